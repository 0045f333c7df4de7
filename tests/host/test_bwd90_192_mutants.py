"""Every synchronisation of the Hopper backward for head dims of 136 to 192 matters, or is known not to; see ``test_bwd90_mutants``."""

import json
import random
from pathlib import Path

import pytest

from flash4.sim.explore import explore
from flash4.sim.mutants import (
    BACKWARD_192_PROBLEMS,
    JURIES,
    KERNELS,
    SHARED_PART,
    BackwardProblem,
    Jury,
    Mutant,
)
from flash4.sim.sm90_bwd_192 import Variation192, machines_192, simulate_backward_192
from flash4.sm90.bwd_192_config import Backward192Config

NAME = "sm90-bwd-192"
HARMLESS = json.loads(
    Path(__file__).with_name("sm90_bwd_192_harmless_mutants.json").read_text("utf-8")
)
MUTANTS = {mutant.name: mutant for mutant in KERNELS[NAME]()}
OTHERS = [name for name in MUTANTS if name not in HARMLESS]


@pytest.fixture(scope="module")
def jury():
    return JURIES[NAME]()


def test_names_are_unique_and_the_list_is_current():
    assert len(MUTANTS) == len(KERNELS[NAME]())
    assert set(HARMLESS) <= set(MUTANTS), set(HARMLESS) - set(MUTANTS)
    assert all(len(reason) > 20 for reason in HARMLESS.values())


def test_the_problems_cover_what_can_differ():
    configs = [problem.config for problem in BACKWARD_192_PROBLEMS]
    for name in ("causal", "ordered", "handed_out"):
        assert {getattr(config, name) for config in configs} == {True, False}, name


def test_the_kernel_itself_is_not_reported(jury):
    assert jury.verdict(Mutant("nothing", 0, False, Variation192)) is None


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_listed_as_harmless_is_not_reported(name, jury):
    """A reason that holds no longer must not stay on the list."""
    assert jury.verdict(MUTANTS[name]) is None


@pytest.mark.parametrize("name", OTHERS)
def test_all_others_are_reported(name, jury):
    assert jury.verdict(MUTANTS[name])


# Two tiles of two steps: rings wrap over tiles, and dS has both its stages.
TINY = BackwardProblem(Backward192Config(causal=False, **SHARED_PART), 30, 140)


@pytest.mark.parametrize("name", random.Random(0).sample(sorted(HARMLESS), 3))
def test_what_is_listed_as_harmless_is_so_in_every_order(name):
    jury = Jury((TINY,), seeds=1, simulate=simulate_backward_192)
    assert jury.verdict(MUTANTS[name]) is None
    variation = MUTANTS[name].build()
    for machine, _ in machines_192(TINY.config, *TINY.tensors(), 0.25, 1, 0, variation):
        machine.run()
        explore(machine)
