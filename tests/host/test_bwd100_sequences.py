"""The Blackwell backward of sequences of different lengths, in plain Python; see ``test_bwd90_sequences``."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flash4.dispatch import plan_backward
from flash4.interface import options_of
from flash4.problem import AttentionProblem
from flash4.sim.sm100_bwd import simulate_backward
from flash4.sm100.bwd_config import can_implement, choose_config
from tests import strategies
from tests.checks import assert_gradients_close
from tests.host.test_bwd90_sequences import (
    NEIGHBOURS,
    PROBLEMS,
    arrays_of,
    assert_neighbours_are_apart,
)


def facts_of(problem, deterministic=False):
    """Facts of a problem's call."""
    shapes, keywords = problem.shapes, problem.keywords("meta")
    options = options_of(*shapes, deterministic=deterministic, **keywords)
    return AttentionProblem.of_call(*shapes, options)


def run(problem, seed=0, workers=2, deterministic=False):
    """Simulate a problem and check it."""
    inputs, keywords = problem.tensors(seed=seed), problem.keywords()
    config = plan_backward(facts_of(problem, deterministic), "sm_100a", 148).config
    assert config.varlen
    arrays, options, dout = arrays_of(problem, inputs, seed)
    results = simulate_backward(config, arrays, options, workers, seed)
    gradients = [torch.from_numpy(x).to(problem.dtype) for x in results]
    assert_gradients_close(gradients, inputs, dout, **keywords)
    return results


@pytest.mark.parametrize("name", ["all", "packed, causal", "in use"])
def test_numbers(name):
    run(PROBLEMS[name], workers=3)


@pytest.mark.parametrize("name", ["causal window"])
def test_turns_give_the_same_bits(name):
    results = [run(PROBLEMS[name], 0, workers, True) for workers in (1, 3)]
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


SEQUENCE_PROBLEMS = strategies.problems(max_seqlen=200, max_scores=2**15).filter(
    lambda p: p.varlen and can_implement(facts_of(p)) is None and all(x.numel() for x in p.shapes)
)


@settings(max_examples=4)
@given(SEQUENCE_PROBLEMS, st.integers(0, 2**16), st.booleans())
def test_random_sequences(problem, seed, deterministic):
    """Random lengths with any features, and CTAs that share the tiles anyhow."""
    assume(problem.scores)
    run(problem, seed, 1 + seed % 4, deterministic)


@pytest.mark.parametrize("softcap", [False, True])
def test_sequences_never_get_a_pair(softcap):
    """Nor does a call fail that would have one if its lengths did not differ."""
    sizes = (torch.bfloat16, 1, 4096, 4096, 1, 1, 128, 128, True)
    for lengths, ctas in (({}, 2), ({"cu_q": True, "cu_k": True}, 1), ({"used_k": True}, 1)):
        problem = AttentionProblem(*sizes, softcap=softcap, **lengths)
        assert choose_config(problem)[0].ctas == ctas


@pytest.mark.parametrize("name", ["d64", "d128, cap and slopes"])
def test_what_a_sequence_holds_reaches_no_other_row(name):
    problem = NEIGHBOURS[name]
    config = plan_backward(facts_of(problem), "sm_100a", 148).config
    assert_neighbours_are_apart(problem, np.nan, functools.partial(simulate_backward, config))
