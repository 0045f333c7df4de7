"""What the fuzz of gradients draws: every two features meet, within a few hundred problems."""

import dataclasses
import itertools
import random

import pytest

from tests.gpu.fuzz_backward import features_of, other_flags, pairs_of, random_cases
from tests.gpu.fuzzing import within
from tests.strategies import resized

# That cannot meet.
NEVER = {("causal", "right")}
# Kernels of these compile for long, so that problems with features keep to one sign.
RARE = {"negative scale"}


@pytest.mark.parametrize(("arch", "seed"), [("sm_90a", 0), ("sm_90a", 1), ("sm_90", 12)])
def test_every_pair_of_features_meets(arch, seed):
    cases = random_cases(200, seed, arch=arch)
    names = set().union(*map(features_of, cases)) - RARE
    assert names == {
        "causal", "left", "right", "softcap", "sink", "alibi", "score_mod", "mask_mod", "aux_tensors",
        "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "grouped heads", "wide heads",
        "gradient of lse", "deterministic",
    }  # fmt: skip
    wanted = {*itertools.combinations(sorted(names), 2)} - NEVER
    assert not wanted - set().union(*map(pairs_of, cases))


def test_mods_in_all():
    """On Ampere of all of its kinds of tiles, and with few kernels."""
    cases = random_cases(60, 5, arch="sm_90", mods=True)
    assert all({"score_mod", "mask_mod"} & features_of(case) for case in cases)
    _, keys = within(cases, 40, "sm_90", 5, other_flags)
    mains = [config.main for _, config, _ in keys if hasattr(config, "main")]
    assert len(keys) <= 40 and {config.tile_m for config in mains} == {32, 64}


def test_the_same_seed_draws_the_same_problems():
    assert random_cases(5, 3) == random_cases(5, 3) != random_cases(5, 4)


def test_few_kernels_are_enough_for_many_problems():
    cases, keys = within(random_cases(60, 3), 60, "sm_90a", 3, other_flags)
    assert len(cases) == 60 and len(keys) <= 60
    assert {key for case in cases for key in case.kernels("sm_90a")} == {*keys}
    assert len({(str(case.problem), case.seed) for case in cases}) == 60
    assert [case.seed for case in cases] == list(range(3, 63))


def test_a_resized_problem_keeps_its_features():
    choose = random.Random(4).choice
    for case in random_cases(40, 4):
        other = dataclasses.replace(case, problem=resized(choose, case.problem))
        assert other.problem.function == case.problem.function
        assert features_of(other) - {"grouped heads"} == features_of(case) - {"grouped heads"}
