"""The Blackwell backward for head dims above 128 in plain Python: right numbers, and no hazard, in any order.

As a script, with more random problems: ``python -m tests.host.test_bwd100_wide_roles --n 300 --seed 1``; with ``--ordered``
problems whose dQ is summed in a fixed order.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4.dispatch import gradient_obstacle, plan_backward
from flash4.interface import options_of
from flash4.problem import AttentionProblem
from flash4.sim.machine import Hazard
from flash4.sim.mutants import (
    SM100_WIDE_BACKWARD_PROBLEMS,
    Jury,
    Mutant,
    sm100_bwd_wide_mutants,
)
from flash4.sim.sm100_bwd_wide import WideVariation, simulate_wide_backward
from flash4.sm100.bwd_graph import CHUNK, ROWS
from flash4.sm100.bwd_wide_config import (
    WideBackwardConfig,
    can_implement,
    choose_config,
    padded_head_dims,
)
from tests import strategies
from tests.checks import assert_gradients_close
from tests.host.random_runs import arguments_of, check_random
from tests.host.test_bwd90_roles import Case, lengths
from tests.host.test_bwd90_sequences import PROBLEMS, arrays_of
from tests.host.test_bwd100_roles import other_facts

SCORE, MASK = {"score_mod": 1, "score_mod_bwd": 2}, {"mask_mod": 3}
DIMS = ((192, 128), (256, 256), (160, 160), (256, 128), (128, 256), (136, 8), (256, 64), (8, 192))


def config_for(head_dim, head_dim_v, causal=False, bf16=True, **features) -> WideBackwardConfig:
    """Config that a call gets."""
    dtype = torch.bfloat16 if bf16 else torch.float16
    facts = AttentionProblem(dtype, 1, 4096, 4096, 1, 1, head_dim, head_dim_v, causal, **features)
    assert can_implement(facts) is None
    return choose_config(facts)[0]


def gradients(case: Case, seed: int = 0):
    """What the simulated kernel makes of a case."""
    arrays, dlse = case.arrays()
    return simulate_wide_backward(case.config, arrays, case.options, case.workers, seed, dlse=dlse)


def run(case: Case, seed: int = 0):
    """Simulate a case, and check it against float64."""
    q, k, v, dout, dlse = case.tensors()
    results = [torch.from_numpy(x).to(q.dtype) for x in gradients(case, seed)]
    assert_gradients_close(results, (q, k, v), dout, dlse=dlse, **case.keywords)
    return case.config


@pytest.mark.parametrize("dims", DIMS)
def test_numbers(dims):
    index = DIMS.index(dims)
    config = config_for(*dims, causal=index % 2 == 0, bf16=index % 3 > 0)
    run(Case(config, *dims, 1, 150, 200, 1, 2, dlse=True), seed=index)


def test_dims_are_padded_as_memory_asks():
    """(tile_d, tile_dv, CTAs that share the columns)."""
    expected = {
        (192, 128): (192, 128, 1), (256, 256): (256, 256, 2), (160, 160): (256, 256, 2),
        (256, 128): (256, 128, 2), (128, 256): (128, 256, 1), (136, 8): (192, 64, 1),
        (256, 64): (256, 64, 1), (8, 192): (128, 192, 1),
    }  # fmt: skip
    for dims in DIMS:
        config = config_for(*dims)
        assert config.fits and padded_head_dims(*dims) == expected[dims]
        assert (config.tile_d, config.tile_dv, config.splits) == expected[dims]


@pytest.mark.parametrize(
    ("fields", "message"),
    [((256, 128, 1), "576 columns of tensor memory"), ((192, 128, 2), "it takes 256"),
     ((64, 128, 1), "multiples of 64 from 128 to 256"), ((128, 100, 1), "tile_dv is 100"),
     ((256, 256, 3), "supported are 1 and 2")],
)  # fmt: skip
def test_what_has_no_room_is_refused(fields, message):
    tile_d, tile_dv, splits = fields
    with pytest.raises(ValueError, match=message):
        WideBackwardConfig(True, tile_d, tile_dv, False, splits=splits)
    with pytest.raises(ValueError, match="pairs are not built"):
        WideBackwardConfig(True, 192, 128, False, ctas=2)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_110a"])
def test_who_gets_it(arch):
    """Head dims above 128, and no others."""
    for dims in ((192, 128), (64, 136), (128, 128), (64, 8)):
        facts = AttentionProblem(torch.bfloat16, 2, 300, 300, 4, 2, *dims, True)
        plan = plan_backward(facts, arch, 148)
        assert plan.name == ("sm100-bwd-wide" if max(dims) > 128 else "sm100-bwd")
        ((_, whole, _),) = plan.kernels
        assert whole.passes[1].dq_turned == (max(dims) > 128)


@pytest.mark.parametrize("dims", [(64, 64), (256, 256)])
def test_calls_are_told_what_they_lack(dims):
    """The same by both kernels."""
    facts = AttentionProblem(torch.bfloat16, 1, 64, 64, 1, 1, *dims, False, score_mod=1)
    assert "pass score_mod_bwd" in gradient_obstacle(facts, "sm_100a")
    with pytest.raises(NotImplementedError, match="pass score_mod_bwd"):
        plan_backward(facts, "sm_100a", 148)
    assert gradient_obstacle(replace(facts, score_mod_bwd=1), "sm_100a") is None


@pytest.mark.parametrize("fields", [{"score_mod": 1}, {"score_mod_bwd": 1}, {"aux": 1}])
def test_mods_go_together(fields):
    with pytest.raises(ValueError, match="score_mod and score_mod_bwd|aux without a mod"):
        WideBackwardConfig(True, 256, 256, False, splits=2, **fields)


def test_a_section_counts_the_ctas_of_a_tile():
    """About a wave: 148 CTAs have 74 tiles where two share one, 32 of a head."""
    for dims, heads in (((192, 128), 5), ((256, 256), 3)):
        facts = AttentionProblem(torch.bfloat16, 1, 4096, 4096, 16, 16, *dims, False)
        assert plan_backward(facts, "sm_100a", 148).section == heads


@st.composite
def cases(draw, ordered=None):
    head_dim, head_dim_v = draw(st.sampled_from(DIMS))
    head_dim = draw(st.sampled_from((head_dim, 8 * draw(st.integers(1, head_dim // 8)))))
    tile_d, tile_dv, splits = padded_head_dims(head_dim, head_dim_v)
    left, right = (draw(st.one_of(st.none(), st.integers(0, 200))) for _ in range(2))
    window = draw(st.sampled_from(((None, None), (None, None), (left, None), (left, right))))
    causal, softcap = draw(st.booleans()), draw(st.sampled_from((0.0, 0.0, 2.0, 50.0)))
    if causal:
        window = (window[0], None)
    features = {
        "left": window[0] is not None,
        "right": window[1] is not None,
        "softcap": softcap != 0,
        "alibi": draw(st.sampled_from((False, False, True))),
        "ordered": draw(st.sampled_from((False, False, True))) if ordered is None else ordered,
    }
    config = WideBackwardConfig(draw(st.booleans()), tile_d, tile_dv, causal, splits=splits)
    config = replace(config, **features)
    return Case(
        config,
        head_dim,
        head_dim_v,
        seqlen_q=draw(lengths(config.tile_m, 3)),
        seqlen_k=draw(lengths(config.tile_n, 2)),
        window_size=window,
        softcap=softcap,
        **other_facts(draw),
    )


@settings(max_examples=5)
@given(case=cases(), seed=st.integers(0, 2**16))
def test_numbers_of_random_problems(case, seed):
    run(case, seed)


def same_bits(case: Case, seed: int):
    """Run a case whose order is fixed with other CTAs and orders of all else; the bits are the same."""
    results = [
        gradients(replace(case, workers=workers), seed + 101 * i)
        for i, workers in enumerate((case.workers, case.workers % 4 + 1))
    ]
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b)
    return case.config


@pytest.mark.parametrize("dims", [(192, 128), (256, 256)])
def test_a_fixed_order_gives_the_same_bits(dims):
    config = config_for(*dims, causal=True, deterministic=True)
    same_bits(Case(config, *dims, 1, 150, 300, 1, 2, workers=2), 0)


def wide_problem(name: str, dims):
    """One of sequences of different lengths, with other head dims."""
    return replace(PROBLEMS[name], head_dim=dims[0], head_dim_v=dims[1])


def run_call(problem, seed=0, workers=2, deterministic=False):
    """Simulate any call of the public functions with the config that it would get, and check it; returns both."""
    shapes, keywords = problem.shapes, problem.keywords("meta")
    facts = AttentionProblem.of_call(
        *shapes, options_of(*shapes, deterministic=deterministic, **keywords)
    )
    config = plan_backward(facts, "sm_100a", 148).config
    assert isinstance(config, WideBackwardConfig)
    inputs, keywords = problem.tensors(seed=seed), problem.keywords()
    arrays, options, dout = arrays_of(problem, inputs, seed)
    results = simulate_wide_backward(config, arrays, options, workers, seed)
    grads = [torch.from_numpy(x).to(problem.dtype) for x in results]
    assert_gradients_close(grads, inputs, dout, **keywords)
    return config, results


MODS = {
    "score": {"score_mod": "bent", "causal": True},
    "mask": {"mask_mod": "dilated", "alibi": "by head"},
    "cap, tensors": {"score_mod": "heads", "mask_mod": "documents", "softcap": 3.0},
    "window": {"score_mod": "bent", "mask_mod": "dilated", "window_size": (60, 40)},
    "sequences": {
        "score_mod": "relative", "mask_mod": "documents", "causal": True, "sink": 1.0,
        "lengths_q": (70, 0, 90), "lengths_k": (150, 40, 60), "around": (3, 5),
    },
}  # fmt: skip


@pytest.mark.parametrize("dims", [(192, 128), (256, 256)])
@pytest.mark.parametrize("name", MODS)
def test_mods(name, dims):
    """Of one CTA, and of two that share the columns; some by turns."""
    sizes = {"head_dim": dims[0], "head_dim_v": dims[1], "seqlen_q": 100, "seqlen_k": 200}
    problem = strategies.Problem(**sizes, ratio=2, dtype=torch.bfloat16, **MODS[name])
    config, _ = run_call(problem, len(name), deterministic=name == "window")
    assert config.has_mods and config.splits == 1 + (dims == (256, 256))


@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (128, 256)])
def test_runs_of_queries_are_a_threads(dims):
    """A score_mod's by two at least, so that P is made anew; fewer at a time where registers are few."""
    runs = {}
    for facts in ({}, MASK, SCORE, SCORE | {"softcap": True}, SCORE | MASK | {"aux": 1}):
        config = config_for(*dims, **facts)
        runs[tuple(facts)] = config.queries // config.run
        assert config.queries == CHUNK and config.run * runs[tuple(facts)] == CHUNK
    few = 4 if config.part_d > ROWS else 2
    assert list(runs.values()) == [1, 1, 2, few, few]


@pytest.mark.parametrize(
    ("name", "dims"),
    [("all", (192, 128)), ("packed, causal", (256, 256)), ("in use", (256, 128))],
)
def test_sequences(name, dims):
    config, _ = run_call(wide_problem(name, dims), workers=3)
    assert config.varlen


def test_turns_of_sequences_give_the_same_bits():
    problem = wide_problem("causal window", (256, 256))
    results = [run_call(problem, 0, workers, True)[1] for workers in (1, 3)]
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def widened(problem, dims):
    """The same call with other head dims."""
    return replace(problem, head_dim=dims[0], head_dim_v=dims[1])


CALLS = st.builds(
    widened, strategies.problems(max_seqlen=150, max_scores=2**14), st.sampled_from(DIMS)
).filter(lambda problem: all(x.numel() for x in problem.shapes) and problem.scores)


def run_random(problem, seed):
    """Simulate a case or a call, those by as many CTAs and in such an order as its seed says; returns its config."""
    if isinstance(problem, Case):
        return run(problem, seed)
    return run_call(problem, seed, 1 + seed % 4, bool(seed % 2))[0]


@settings(max_examples=5)
@given(CALLS, st.integers(0, 2**16))
def test_calls_of_every_feature(problem, seed):
    run_random(problem, seed)


@settings(max_examples=3)
@given(CALLS.filter(lambda problem: problem.varlen), st.integers(0, 2**16))
def test_random_sequences(problem, seed):
    run_random(problem, seed)


KEPT = SM100_WIDE_BACKWARD_PROBLEMS[0]


def edges_of(config):
    """Names of the edges that others cover."""
    return [x.name for x in (*config.graph.signals, *config.graph.rings) if x.covered_by]


@pytest.mark.parametrize("name", edges_of(KEPT.config))
def test_a_cover_is_not_a_matter_of_belief(name):
    """Each edge is freed by those that the graph names, and not by nothing."""
    variation = WideVariation(covers=((name, ()),))
    (tensors,) = KEPT.tensors()
    with pytest.raises(Hazard, match=f"{name}( full)? is said to be freed by"):
        simulate_wide_backward(KEPT.config, tensors, 0.1, 1, variation=variation)


MUTANTS = {mutant.name: mutant for mutant in sm100_bwd_wide_mutants()}
FILE = Path(__file__).with_name("sm100_bwd_wide_harmless_mutants.json")
HARMLESS = json.loads(FILE.read_text("utf-8"))  # name -> why nothing is wrong


@pytest.fixture(scope="module")
def jury():
    return Jury(SM100_WIDE_BACKWARD_PROBLEMS, simulate=simulate_wide_backward)


def test_mutants_have_names_of_their_own():
    assert len(MUTANTS) == len(sm100_bwd_wide_mutants()) and set(HARMLESS) <= set(MUTANTS)


def test_the_kernel_itself_is_not_reported(jury):
    assert jury.verdict(Mutant("nothing", 0, False, WideVariation)) is None


@pytest.mark.parametrize("name", random.Random(0).sample(sorted(HARMLESS), 4))
def test_what_is_listed_as_harmless_is_not_reported(name, jury):
    assert jury.verdict(MUTANTS[name], seeds=1) is None


@pytest.mark.parametrize("name", random.Random(0).sample(sorted(set(MUTANTS) - set(HARMLESS)), 16))
def test_others_are_reported(name, jury):
    """A sample; ``python -m flash4 mutants sm100-bwd-wide`` has all."""
    assert jury.verdict(MUTANTS[name])


def main():
    """Run random (problem, seed) pairs, of configs and of calls; a failure is shrunk and raised."""
    arguments = arguments_of(main.__doc__, ordered="cases whose dQ is summed in a fixed order")
    if arguments.ordered:
        check_random(arguments, ((cases(True), same_bits),), "the same bits")
    else:
        check_random(arguments, ((st.one_of(cases(), CALLS), run_random),))


if __name__ == "__main__":
    main()
