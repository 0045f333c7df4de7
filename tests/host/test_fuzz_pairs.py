"""What the fuzz of gradients draws: every two features meet, within a few hundred problems."""

import itertools

import pytest

from tests.gpu.fuzz_backward import features_of, pairs_of, random_cases

# That cannot meet.
NEVER = {("causal", "right")}
# Kernels of these compile for long, so that problems with features keep to one sign.
RARE = {"negative scale"}


@pytest.mark.parametrize("seed", [0, 1, 12])
def test_every_pair_of_features_meets(seed):
    cases = random_cases(200, seed)
    names = set().union(*map(features_of, cases)) - RARE
    assert names == {
        "causal", "left", "right", "softcap", "sink", "alibi", "score_mod", "mask_mod", "aux_tensors",
        "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "grouped heads", "wide heads",
        "gradient of lse", "deterministic",
    }  # fmt: skip
    wanted = {*itertools.combinations(sorted(names), 2)} - NEVER
    assert not wanted - set().union(*map(pairs_of, cases))


def test_the_same_seed_draws_the_same_problems():
    assert random_cases(5, 3) == random_cases(5, 3) != random_cases(5, 4)
