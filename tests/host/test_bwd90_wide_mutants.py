"""Every synchronisation of the wide Hopper backward matters, or is known not to; see ``test_bwd90_mutants``."""

import json
import random
from functools import partial
from pathlib import Path

import pytest

from flash4.sim.explore import explore
from flash4.sim.mutants import (
    JOINT_BACKWARD_PROBLEMS,
    JURIES,
    KERNELS,
    WIDE_BACKWARD_PROBLEMS,
    BackwardProblem,
    Jury,
    Mutant,
)
from flash4.sim.sm90_bwd_wide import WideVariation, simulate_wide_backward, wide_machines
from flash4.sm90.bwd_joint_roles import JointBackwardRoles
from flash4.sm90.bwd_wide_config import WideBackwardConfig

NAMES = ("sm90-bwd-wide", "sm90-bwd-joint")
FILES = {
    name: Path(__file__).with_name(f"{name.replace('-', '_')}_harmless_mutants.json")
    for name in NAMES
}
HARMLESS = {name: json.loads(file.read_text("utf-8")) for name, file in FILES.items()}
MUTANTS = {name: {mutant.name: mutant for mutant in KERNELS[name]()} for name in NAMES}
LISTED = [(name, mutant) for name in NAMES for mutant in HARMLESS[name]]
OTHERS = [
    (name, mutant) for name in NAMES for mutant in MUTANTS[name] if mutant not in HARMLESS[name]
]


@pytest.fixture(scope="module")
def juries():
    return {name: JURIES[name]() for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_unique_and_the_list_is_current(name):
    assert len(MUTANTS[name]) == len(KERNELS[name]())
    assert set(HARMLESS[name]) <= set(MUTANTS[name]), set(HARMLESS[name]) - set(MUTANTS[name])
    assert all(len(reason) > 20 for reason in HARMLESS[name].values())


def test_the_problems_cover_what_can_differ():
    configs = [problem.config for problem in WIDE_BACKWARD_PROBLEMS]
    assert {config.dq_parts for config in configs} == {2, 3, 4}
    assert {config.ctas for config in configs} == {1, 2}
    assert {config.causal for config in configs} == {True, False}
    assert {config.ordered for config in configs} == {True, False}
    assert {problem.config.do_stages for problem in JOINT_BACKWARD_PROBLEMS} == {1, 2}


def test_the_kernels_themselves_are_not_reported(juries):
    assert juries["sm90-bwd-wide"].verdict(Mutant("nothing", 0, False, WideVariation)) is None
    joint = partial(WideVariation, JointBackwardRoles)
    assert juries["sm90-bwd-joint"].verdict(Mutant("nothing", 0, False, joint)) is None


@pytest.mark.parametrize(("name", "mutant"), LISTED)
def test_what_is_listed_as_harmless_is_not_reported(name, mutant, juries):
    """A reason that holds no longer must not stay on the list. In one order; the command tries all."""
    assert juries[name].verdict(MUTANTS[name][mutant], seeds=1) is None


@pytest.mark.parametrize(("name", "mutant"), OTHERS)
def test_all_others_are_reported(name, mutant, juries):
    assert juries[name].verdict(MUTANTS[name][mutant])


# Two tiles of two steps in one CTA: rings wrap over tiles, and dS has both its stages.
TINY = BackwardProblem(WideBackwardConfig(True, 128, 64, False, ctas=1), 100, 120)


@pytest.mark.parametrize("mutant", random.Random(0).sample(sorted(HARMLESS["sm90-bwd-wide"]), 3))
def test_what_is_listed_as_harmless_is_so_in_every_order(mutant):
    jury, variation = (
        Jury((TINY,), seeds=1, simulate=simulate_wide_backward),
        MUTANTS["sm90-bwd-wide"][mutant].build(),
    )
    assert jury.verdict(MUTANTS["sm90-bwd-wide"][mutant]) is None
    for machine, _ in wide_machines(TINY.config, *TINY.tensors(), 0.25, 1, 0, variation):
        machine.run()
        explore(machine)
