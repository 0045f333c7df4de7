"""Compile many kinds of config of the Blackwell backward, and look for spills in main loops; by hand, as ``sweep_fwd100``.

``python -m tests.host.sweep_bwd100 [--strength 3] [--random N] [--part I/N]``.
"""

from functools import partial

from flash4.sm100.bwd_config import choose_config
from tests.host import sweep
from tests.host.test_compile_bwd100 import compile_one

FACTS = {
    "head dims": ((64, 64), (64, 128), (128, 64), (128, 128), (96, 96), (40, 24)),
    "target": ("sm_100a", "sm_103a"),
    "bf16": (True, False),
    "mask": sweep.MASKS,
    "softcap": (False, True),
    "alibi": (False, True),
    "deterministic": (False, True),
    "mods": tuple(sweep.MODS),
    "lengths": sweep.LENGTHS,
}


def case_of(facts: dict):
    """(config, target) of a call."""
    return choose_config(sweep.problem_of(facts, gradients=True))[0], facts["target"]


if __name__ == "__main__":
    sweep.main(__doc__.partition("\n")[0], FACTS, case_of, partial(sweep.looked_at, compile_one))
