"""Every synchronisation of the wide Hopper backward matters, or is known not to; see ``test_bwd90_mutants``."""

import json
import random
from pathlib import Path

import pytest

from flash4.sim.explore import explore
from flash4.sim.mutants import (
    JURIES,
    WIDE_BACKWARD_PROBLEMS,
    BackwardProblem,
    Jury,
    Mutant,
    sm90_bwd_wide_mutants,
)
from flash4.sim.sm90_bwd_wide import WideVariation, simulate_wide_backward, wide_machines
from flash4.sm90.bwd_wide_config import WideBackwardConfig

FILE = Path(__file__).with_name("sm90_bwd_wide_harmless_mutants.json")
HARMLESS = json.loads(FILE.read_text("utf-8"))
MUTANTS = {mutant.name: mutant for mutant in sm90_bwd_wide_mutants()}
OTHERS = [mutant for mutant in MUTANTS.values() if mutant.name not in HARMLESS]


@pytest.fixture(scope="module")
def jury():
    return JURIES["sm90-bwd-wide"]()


def test_names_are_unique_and_the_list_is_current():
    assert len(MUTANTS) == len(sm90_bwd_wide_mutants())
    assert set(HARMLESS) <= set(MUTANTS), set(HARMLESS) - set(MUTANTS)
    assert all(len(reason) > 20 for reason in HARMLESS.values())


def test_the_problems_cover_what_can_differ():
    configs = [problem.config for problem in WIDE_BACKWARD_PROBLEMS]
    assert {config.dq_parts for config in configs} == {2, 3, 4}
    assert {config.ctas for config in configs} == {1, 2}
    assert {config.causal for config in configs} == {True, False}
    assert {config.ordered for config in configs} == {True, False}


def test_the_kernel_itself_is_not_reported(jury):
    assert jury.verdict(Mutant("nothing", 0, False, WideVariation)) is None


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_listed_as_harmless_is_not_reported(name, jury):
    """A reason that holds no longer must not stay on the list."""
    assert jury.verdict(MUTANTS[name]) is None


@pytest.mark.parametrize("mutant", OTHERS, ids=lambda m: f"{m.line} {m.name}")
def test_all_others_are_reported(mutant, jury):
    assert jury.verdict(mutant)


# Two tiles of two steps in one CTA: rings wrap over tiles, and dS has both its stages.
TINY = BackwardProblem(WideBackwardConfig(True, 128, 64, False, ctas=1), 100, 120)


@pytest.mark.parametrize("name", random.Random(0).sample(sorted(HARMLESS), 3))
def test_what_is_listed_as_harmless_is_so_in_every_order(name):
    jury = Jury((TINY,), seeds=1, simulate=simulate_wide_backward)
    assert jury.verdict(MUTANTS[name]) is None
    variation = MUTANTS[name].build()
    for machine, _ in wide_machines(TINY.config, *TINY.tensors(), 0.25, 1, 0, variation):
        machine.run()
        explore(machine)
