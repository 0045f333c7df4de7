"""The same as ``sweep_bwd100``, of head dims above 128: ``python -m tests.host.sweep_bwd100_wide``."""

from functools import partial

from flash4.sm100.bwd_wide_config import choose_config
from tests.host import sweep, sweep_bwd100
from tests.host.test_compile_bwd100 import compile_one

FACTS = sweep_bwd100.FACTS | {
    "head dims": ((192, 128), (256, 64), (136, 8), (256, 256), (256, 128), (128, 256), (8, 192))
}


def case_of(facts: dict):
    """(config, target) of a call."""
    return choose_config(sweep.problem_of(facts, gradients=True))[0], facts["target"]


if __name__ == "__main__":
    sweep.main(__doc__.partition("\n")[0], FACTS, case_of, partial(sweep.looked_at, compile_one))
