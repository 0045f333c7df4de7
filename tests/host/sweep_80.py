"""Compile many kinds of config of the Ampere kernels, and look for spills in main loops; by hand, as ``sweep_fwd100``.

``python -m tests.host.sweep_80 [--strength 3] [--random N] [--part I/N] [--workers N] [--minutes M]``: forward and backward, for every
card that they serve.
"""

from functools import partial

from flash4.sm80 import bwd_config, fwd_config
from tests.host import sweep
from tests.host.test_compile_80 import BACKWARD, CARDS, FORWARD, compiled

FACTS = {
    "kernel": (FORWARD, BACKWARD),
    "target": tuple(CARDS),
    "head dims": (
        *((64, 64), (128, 128), (192, 192), (256, 256), (192, 128), (64, 256), (256, 64)),
        *((96, 96), (160, 160), (40, 24), (224, 96)),
    ),
    "bf16": (True, False),
    "mask": sweep.MASKS,
    "softcap": (False, True),
    "sink": (False, True),
    "alibi": (False, True),
    "deterministic": (False, True),
    "mods": tuple(sweep.MODS),
    "lengths": sweep.LENGTHS,
    "heads per KV head": (1, 4),
}


def case_of(facts: dict):
    """(config, (kernel, target)) of a call."""
    backward = facts["kernel"] == BACKWARD
    problem = sweep.problem_of(facts, gradients=backward)
    card = getattr(bwd_config if backward else fwd_config, CARDS[facts["target"]])
    assert card.can_implement(problem) is None
    config = card.choose_config(problem)[0]
    assert card.holds(config)
    return config, (facts["kernel"], facts["target"])


def compile_one(case) -> dict[str, int]:
    """Spills of a config in main loops, and in all of it."""
    config, (kernel, target) = case
    loops, spills = compiled(kernel, config, target)
    if not loops:
        raise ValueError("no main loop was found")
    return {"loop spills": sum(count for _, count in loops), "spills": spills}


if __name__ == "__main__":
    sweep.main(__doc__.partition("\n")[0], FACTS, case_of, partial(sweep.looked_at, compile_one))
