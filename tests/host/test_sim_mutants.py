"""Every synchronisation of the Hopper forward matters, and the simulator says so when one is dropped or moved."""

import json
import random
import re
from pathlib import Path

import pytest

from flash4 import cli
from flash4.sim import mutants
from flash4.sim.explore import explore
from flash4.sim.machine import Hazard
from flash4.sim.mutants import PROBLEMS, Jury, Problem, mutants_of_source, sm90_fwd_mutants
from flash4.sim.sm90_fwd import Variation, forward_machines
from flash4.sm90.fwd_config import ForwardConfig

FILE = Path(__file__).with_name("sm90_fwd_harmless_mutants.json")
HARMLESS = json.loads(FILE.read_text("utf-8"))
MUTANTS = {mutant.name: mutant for mutant in sm90_fwd_mutants()}
SYNCHRONISING = [m for m in MUTANTS.values() if m.synchronises and m.name not in HARMLESS]
OTHERS = [m for m in MUTANTS.values() if not m.synchronises and m.name not in HARMLESS]
SAMPLE = 8


@pytest.fixture(scope="module")
def jury():
    return Jury()


def test_names_are_unique_and_the_list_is_current():
    assert len(MUTANTS) == len(sm90_fwd_mutants())
    assert set(HARMLESS) <= set(MUTANTS), set(HARMLESS) - set(MUTANTS)
    assert all(len(reason) > 20 for reason in HARMLESS.values())


def test_the_problems_cover_what_can_differ():
    configs = [problem.config for problem in PROBLEMS]
    assert {config.o_borrows_q for config in configs} == {True, False}
    assert {config.turns for config in configs} == {True, False}
    assert {config.skip for config in configs} == {True, False}
    assert {config.mma_warpgroups for config in configs} == {1, 2, 4}
    assert {config.cluster for config in configs} == {1, 2}
    assert {config.left for config in configs} == {True, False}


def test_the_kernel_itself_is_not_reported(jury):
    assert jury.verdict(mutants.Mutant("nothing", 0, False, Variation)) is None


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_listed_as_harmless_is_not_reported(name, jury):
    """A reason that holds no longer must not stay on the list. In one order; the command tries all."""
    assert jury.verdict(MUTANTS[name], seeds=1) is None


@pytest.mark.parametrize("mutant", SYNCHRONISING, ids=lambda m: f"{m.line} {m.name}")
def test_a_dropped_or_moved_synchronisation_is_reported(mutant, jury):
    assert jury.verdict(mutant)


@pytest.mark.parametrize(
    "mutant", random.Random(0).sample(OTHERS, SAMPLE), ids=lambda m: f"{m.line} {m.name}"
)
def test_other_mutants_are_reported(mutant, jury):
    assert jury.verdict(mutant)


# What is told of CTAs that do not share tiles as they must.
STORIES = {
    "CTAs do not meet before the roles begin": "the start of cta1, which sets up its barriers",
    "CTAs do not meet before one ends": "nobody has waited for the arrival of cta",
    "Readers arrive in their own CTA only, where that many": "race on part . of cta..k",
    "Readers arrive in their own CTA for the other's": "race on part . of cta..k",
    "Readers arrive twice in the other CTA": "race on part . of cta..k",
    "A copy of a part reaches the slot of its own CTA only": "k full.* 256 bytes missing",
    "Each CTA copies all of a block into its own slot": "race on cta..k.*the copy into part",
    "Bytes count in the CTA that copies": "race on cta..k.*by the copy into part . of cta",
}


@pytest.mark.parametrize("name", STORIES)
def test_what_is_told_of_ctas_that_share_tiles(name):
    (mutant,) = (m for m in MUTANTS.values() if m.name.startswith(f"cluster: {name}"))
    problems = [problem for problem in PROBLEMS if problem.config.cluster == 2]
    assert re.search(STORIES[name], Jury(problems, seeds=1).verdict(mutant))


TINY = (
    Problem(ForwardConfig(True, 16, 16, 64, 16, False), 128, 48),
    Problem(ForwardConfig(True, 16, 16, 128, 16, False, turns=True), 128, 48),
)


@pytest.mark.parametrize("name", random.Random(0).sample(sorted(HARMLESS), 5))
def test_what_is_listed_as_harmless_is_so_in_every_order(name):
    assert Jury(seeds=1).verdict(MUTANTS[name]) is None
    for problem in TINY:
        arguments = (problem.config, problem.tensors(), 0.25, 1, 0, MUTANTS[name].build())
        for machine, _ in forward_machines(*arguments):
            machine.run()
            explore(machine)


ONE_WARPGROUP = ForwardConfig(True, 16, 16, 64, 16, False)
EARLY = (
    ("mma: swap ops.wait_mma(0) <-> k_slot.release()", Problem(ONE_WARPGROUP, 64, 80)),
    ("mma: swap ops.wait_mma(1) <-> k_slot.release()", Problem(ONE_WARPGROUP, 64, 80)),
    ("mma: swap ops.wait_mma(0) <-> v_slot.release() #2", Problem(ONE_WARPGROUP, 64, 80)),
    ("mma: drop k_slot = k_consumer.wait_and_advance() #4", Problem(ONE_WARPGROUP, 64, 80)),
    # Shows only where a whole tile's blocks fit the ring: else K's ring holds the loader back.
    ("mma: swap ops.wait_mma(0) <-> v_slot.release()", Problem(ONE_WARPGROUP, 192, 32)),
    (
        "mma: drop k_slot = k_consumer.wait_and_advance() #2",
        Problem(ForwardConfig(True, 16, 16, 128, 16, True, skip=True), 128, 128),
    ),
)


@pytest.mark.parametrize(("name", "problem"), EARLY, ids=[name for name, _ in EARLY])
def test_exploration_finds_it_without_clocks(name, problem):
    variation = Variation(MUTANTS[name].build().roles, strict=False)
    ((machine, _),) = forward_machines(problem.config, problem.tensors(), 0.25, 1, 0, variation)
    machine.run()
    assert machine.hazards, "the clocks see it too"
    with pytest.raises(Hazard, match="fwd_roles.py.*the last steps before"):
        explore(machine)


SOURCE = '''
class Roles:
    def load(self, ops, ring):
        """Docstrings are no statements."""
        for i in range(2, ops.n):
            slot = ring.acquire_and_advance()
            ops.fill(slot)
            slot.commit()
        ops.wait_mma(0)
        if ops.more:
            slot.release()
'''


def test_how_a_source_is_mutated():
    names = {mutant.name for mutant in mutants_of_source(SOURCE, "roles.py", "Roles")}
    assert names == {
        "load: for i in range(2, ops.n): argument 0 +1",
        "load: for i in range(2, ops.n): argument 0 -1",
        "load: for i in range(2, ops.n): argument 1 +1",
        "load: for i in range(2, ops.n): argument 1 -1",
        "load: drop slot = ring.acquire_and_advance()",
        "load: swap slot = ring.acquire_and_advance() <-> ops.fill(slot)",
        "load: swap ops.fill(slot) <-> slot.commit()",
        "load: drop slot.commit()",
        "load: drop ops.wait_mma(0)",
        "load: ops.wait_mma(0) +1",
        "load: drop slot.release()",
    }


def test_the_command(capsys):
    arguments = ["mutants", "sm90-fwd", "--sample", "3", "--seed", "5"]
    assert cli.main([*arguments, "--harmless", str(FILE)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1].startswith("3 mutants in ") and " 0 NOT REPORTED" in said


def test_the_command_fails_for_a_hole(capsys, monkeypatch):
    monkeypatch.setattr(Jury, "verdict", lambda self, mutant: None)
    assert cli.main(["mutants", "sm90-fwd", "--sample", "2"]) == 1
    assert "2 NOT REPORTED" in capsys.readouterr().out
