"""Caps whose near polynomial is taken unasked, in the simulator: the two judges of it, and what neither of them sees."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from flash4.problem import CallOptions
from flash4.sim import sm90_fwd
from flash4.sim.sm90_fwd import forward_machines
from tests.checks import assert_forward_close
from tests.host.test_fwd90_roles import WINDOWS, shipped

SCALE = 0.1


def scored(score, head_dim=128, queries=300, keys=450, noise=0.05):
    """q, k, v of one head whose scaled scores are ``score(i, j)``, a number or a product of one of each, plus noise."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, 1, head_dim, generator=generator) * size
        for n, size in ((queries, noise), (keys, 1.0), (keys, 1.0))
    )
    q[..., 0] = 16.0
    k[0, :, 0, 0] = score(torch.arange(keys)) / (16.0 * SCALE)
    return [x.bfloat16() for x in (q, k, v)]


def everywhere(level):
    """All scores about ``level``."""
    return scored(lambda j: torch.full(j.shape, float(level)))


def few(level, other):
    """A few keys at ``level``, the others at another, far below."""
    return scored(lambda j: torch.where(j % 97 == 5, float(level), float(other)))


def spread(deviation):
    """Normal scores."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, 1, 128, generator=generator) for n in (300, 450, 450))
    return [x.bfloat16() for x in (q * (deviation / 128**0.5 / SCALE), k, v)]


KINDS = {
    "near": spread(1.0),
    "wide": spread(6.0),
    "wider": spread(60.0),
    "all below": everywhere(-13.0),
    "far below": everywhere(-70.0),
    "all above": everywhere(15.0),
    "few near": few(0.0, -14.0),
    "few above": few(25.0, -14.0),
    "falling": scored(lambda j: j / 3.0 - 90.0),
    "rising": scored(lambda j: 70.0 - j / 3.0),
}
CONFIGS = {
    "128 causal": shipped(128, 128, True, softcap=True),
    "128 full": shipped(128, 128, False, softcap=True),
    "64 causal": shipped(64, 64, True, softcap=True),
}


def simulate(config, inputs, softcap, window=(None, None)):
    """(out, LSE, tiles worked on again), checked against float64."""
    assert config.near_first
    sides = (-1 if side is None else side for side in window)
    options = CallOptions(SCALE, config.causal, None, *sides, softcap)
    arrays = [x.float().numpy() for x in inputs]
    if config.negate:
        options = options._replace(softmax_scale=-SCALE)
        arrays[0] = -arrays[0]
    with np.errstate(over="ignore", invalid="ignore"):
        for machine, call in forward_machines(config.counted, arrays, options, 2, 0):
            machine.run()
            last = call
    out, lse = (torch.from_numpy(x) for x in (last.out, last.lse))
    keywords = {"softmax_scale": SCALE, "causal": config.causal, "softcap": softcap}
    keywords["window_size"] = window
    assert_forward_close(out.bfloat16(), lse, inputs, **keywords)
    return out, lse, int(last.redone[0])


@pytest.mark.parametrize("softcap", [5.0, 19.9, 20.0, 30.0, 50.0, 60.0, 1e4])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers(kind, softcap):
    simulate(CONFIGS["128 causal"], KINDS[kind], softcap)


@pytest.mark.parametrize("name", ["128 full", "64 causal"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_tiles(kind, name):
    config = CONFIGS[name]
    inputs = [x[..., : config.tile_d] for x in KINDS[kind]]
    simulate(replace(config, negate=True), inputs, 30.0)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(window):
    facts = {"window_left": window[0] is not None, "window_right": window[1] is not None}
    config = shipped(128, 128, False, softcap=True, **facts)
    for kind in ("wide", "few near"):
        simulate(config, KINDS[kind], 30.0, window)


def test_large_scores_are_done_again_in_parts_not_in_tiles():
    """Up to a cap of 55; of a larger one whole tiles are, in those that have such scores."""
    config = CONFIGS["128 causal"]
    for kind in ("near", "wide", "wider", "all above", "rising"):
        assert simulate(config, KINDS[kind], 50.0)[2] == 0, kind
    assert simulate(config, KINDS["wider"], 60.0)[2] > 0
    assert simulate(config, KINDS["near"], 60.0)[2] == 0


def test_low_rows_are_done_again():
    config = CONFIGS["128 full"]
    assert simulate(config, KINDS["few near"], 30.0)[2] == 0
    assert simulate(config, KINDS["all below"], 20.0)[2] > 0


def without(name, value):
    """One of the judges of the simulated verbs says always the same."""
    return mock.patch.object(sm90_fwd.MmaOps, name, value)


@pytest.mark.parametrize(
    "kind", ["wide", "all above"]
)  # sums of the wider ones are not trusted anyway
def test_the_judge_of_large_scores_matters(kind):
    def none(self, p):
        return np.zeros(len(p), bool)

    with without("_is_large", none), pytest.raises(AssertionError):
        simulate(CONFIGS["128 causal"], KINDS[kind], 30.0)


def test_the_judge_of_low_rows_matters():
    def right(self, tile):
        return np.ones(64, bool)

    with without("_near_is_right", right), pytest.raises(AssertionError):
        simulate(CONFIGS["128 causal"], KINDS["all below"], 20.0)


def test_the_floor_of_shifts_matters():
    """Without it rows that begin far below outgrow their shift."""
    config, inputs = CONFIGS["128 causal"], KINDS["rising"]
    assert simulate(config, inputs, 50.0)[2] == 0
    with mock.patch.object(sm90_fwd, "ROOM_LOG2", 1000):
        assert simulate(config, inputs, 50.0)[2] > 0


@pytest.mark.parametrize("softcap", [19.9, 2.0**21])
def test_caps_without_a_near_polynomial_or_too_small_for_it_look_at_every_block(softcap):
    def never(self, s):
        raise RuntimeError("taken unasked")

    with without("_near_block", never):
        simulate(CONFIGS["128 causal"], KINDS["near"], softcap)
        with pytest.raises(RuntimeError):
            simulate(CONFIGS["128 causal"], KINDS["near"], 20.1)
