"""Compile many kinds of config of the Blackwell forward, and look for spills in main loops; by hand, as it takes long.

``python -m tests.host.sweep_fwd100`` takes a set of calls in which every two facts (head dims, mask, cap, lengths, target, ...)
meet in all their values; ``--strength 3`` every three; ``--random N`` N calls more, of any combination. What dispatch can choose
is about two million configs, of which nobody compiles all. ``--part I/N`` takes a share of the work.
"""

from functools import partial
from itertools import product

from tests.host import sweep
from tests.host.test_compile_fwd100 import CHOICES, compile_one

FACTS = {
    "head dims": tuple(product((64, 128, 192, 256), (64, 128, 256))),
    "target": tuple(CHOICES),
    "rows": (100, 4096, 8192),
    "bf16": (True, False),
    "mask": sweep.MASKS,
    "softcap": (False, True),
    "sink": (False, True),
    "alibi": (False, True),
    "negative scale": (False, True),
    "mods": tuple(sweep.MODS),
    "lengths": sweep.LENGTHS,
    "heads per KV head": (1, 2, 8, 64),
}


def case_of(facts: dict):
    """(config, target) of a call."""
    return CHOICES[facts["target"]](sweep.problem_of(facts))[0], facts["target"]


if __name__ == "__main__":
    sweep.main(__doc__.partition("\n")[0], FACTS, case_of, partial(sweep.looked_at, compile_one))
