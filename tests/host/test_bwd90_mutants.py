"""Every synchronisation of the Hopper backward matters, and the simulator says so when one is dropped or moved."""

import json
import random
from pathlib import Path

import pytest

from flash4 import cli
from flash4.sim.explore import explore
from flash4.sim.machine import Hazard
from flash4.sim.mutants import (
    BACKWARD_PROBLEMS,
    JURIES,
    BackwardProblem,
    Jury,
    Mutant,
    sm90_bwd_mutants,
)
from flash4.sim.sm90_bwd import Variation, backward_machines, simulate_backward
from flash4.sm90.bwd_config import BackwardConfig

FILE = Path(__file__).with_name("sm90_bwd_harmless_mutants.json")
HARMLESS = json.loads(FILE.read_text("utf-8"))
MUTANTS = {mutant.name: mutant for mutant in sm90_bwd_mutants()}
OTHERS = [mutant for mutant in MUTANTS.values() if mutant.name not in HARMLESS]


@pytest.fixture(scope="module")
def jury():
    return JURIES["sm90-bwd"]()


def test_names_are_unique_and_the_list_is_current():
    assert len(MUTANTS) == len(sm90_bwd_mutants())
    assert set(HARMLESS) <= set(MUTANTS), set(HARMLESS) - set(MUTANTS)
    assert all(len(reason) > 20 for reason in HARMLESS.values())


def test_the_problems_cover_what_can_differ():
    configs = [problem.config for problem in BACKWARD_PROBLEMS]
    assert {config.splits_queries for config in configs} == {True, False}
    assert {config.causal for config in configs} == {True, False}
    assert {config.ordered for config in configs} == {True, False}


def test_the_kernel_itself_is_not_reported(jury):
    assert jury.verdict(Mutant("nothing", 0, False, Variation)) is None


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_listed_as_harmless_is_not_reported(name, jury):
    """A reason that holds no longer must not stay on the list. In one order; the command tries all."""
    assert jury.verdict(MUTANTS[name], seeds=1) is None


@pytest.mark.parametrize("mutant", OTHERS, ids=lambda m: f"{m.line} {m.name}")
def test_all_others_are_reported(mutant, jury):
    assert jury.verdict(mutant)


# Two tiles of two steps: rings wrap over tiles, and dS has both its stages.
TINY = BackwardProblem(BackwardConfig(True, 16, 16, 64, False), 100, 140)


@pytest.mark.parametrize("name", random.Random(0).sample(sorted(HARMLESS), 5))
def test_what_is_listed_as_harmless_is_so_in_every_order(name):
    jury = Jury((TINY,), seeds=1, simulate=simulate_backward)
    assert jury.verdict(MUTANTS[name]) is None
    for machine, _ in backward_machines(
        TINY.config, *TINY.tensors(), 0.25, 1, 0, MUTANTS[name].build()
    ):
        machine.run()
        explore(machine)


EARLY = (
    "mma: swap ops.wait_mma(0) <-> q_slot.release()",
    "mma: swap exchange.sync() <-> ops.store(tile)",
    "mma: drop q_slot = q_consumer.wait_and_advance()",
    "mma: drop outbox.acquire() #3",
    "reduce: drop ops.wait_read()",
)


@pytest.mark.parametrize("name", EARLY)
def test_exploration_finds_it_without_clocks(name):
    problem = BackwardProblem(TINY.config, 300, 100)  # one tile of five steps
    variation = Variation(MUTANTS[name].build().roles, strict=False)
    ((machine, _),) = backward_machines(problem.config, *problem.tensors(), 0.25, 1, 0, variation)
    machine.run()
    assert machine.hazards, "the clocks see it too"
    with pytest.raises(Hazard, match="bwd_roles.py.*the last steps before"):
        explore(machine)


def test_the_command(capsys):
    arguments = ["mutants", "sm90-bwd", "--sample", "3", "--seed", "5"]
    assert cli.main([*arguments, "--harmless", str(FILE)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("3 mutants in ") and " 0 NOT REPORTED" in said
