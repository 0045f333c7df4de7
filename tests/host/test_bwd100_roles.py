"""The Blackwell backward's own role functions, in plain Python: right numbers, and no hazard, in any order.

As a script, with more random problems: ``python -m tests.host.test_bwd100_roles --n 2000 --seed 1``; with ``--ordered``
problems whose dQ is summed in a fixed order, each with other CTAs and in other orders of everything else.
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

from flash4.common.geometry import ceil_div
from flash4.interface import options_of
from flash4.problem import AttentionProblem
from flash4.sim.calls import batched
from flash4.sim.machine import Hazard
from flash4.sim.mutants import SM100_BACKWARD_PROBLEMS, sm100_bwd_mutants
from flash4.sim.sm100_bwd import (
    NO_TURN,
    Variation,
    backward_machines,
    dq_of_sums,
    simulate_backward,
)
from flash4.sm100.bwd_config import MAX_HEAD_DIM, BackwardConfig, choose_config
from tests import strategies
from tests.checks import assert_gradients_close
from tests.host.random_runs import arguments_of, check_random
from tests.host.test_bwd90_roles import Case, lengths
from tests.host.test_bwd90_sequences import arrays_of

KINDS = (
    # config, head_dim, head_dim_v
    (BackwardConfig(True, 64, 64, True), 64, 64),
    (BackwardConfig(False, 64, 64, False), 64, 64),
    (BackwardConfig(True, 128, 128, False), 128, 128),
    (BackwardConfig(True, 128, 128, True), 96, 120),
    (BackwardConfig(True, 128, 128, False, ctas=2), 128, 128),
    (BackwardConfig(True, 128, 128, True, ctas=2), 128, 128),
    (BackwardConfig(False, 128, 128, True, ctas=2), 104, 72),
    (BackwardConfig(True, 64, 128, True), 40, 128),
    (BackwardConfig(True, 128, 64, False), 128, 8),
)


def gradients(case: Case, seed: int = 0):
    """What the simulated kernel makes of a case."""
    arrays, dlse = case.arrays()
    return simulate_backward(case.config, arrays, case.options, case.workers, seed, dlse=dlse)


def run(case: Case, seed: int = 0):
    """Simulate a case, and check it against float64."""
    q, k, v, dout, dlse = case.tensors()
    results = [torch.from_numpy(x).to(q.dtype) for x in gradients(case, seed)]
    assert_gradients_close(results, (q, k, v), dout, dlse=dlse, **case.keywords)
    return case.config


SHAPES = ((0, 150, 300), (1, 300, 150), (3, 257, 257), (4, 150, 300), (5, 260, 300), (6, 300, 100))


@pytest.mark.parametrize(("index", "seqlen_q", "seqlen_k"), SHAPES)
def test_numbers(index, seqlen_q, seqlen_k):
    config, head_dim, head_dim_v = KINDS[index]
    run(Case(config, head_dim, head_dim_v, 1, seqlen_q, seqlen_k, 2, dlse=True), seed=index)


ANY_ORDER = st.sampled_from((False, False, True))


def other_facts(draw) -> dict:
    """Facts of a case that no config knows."""
    return dict(
        batch=draw(st.integers(1, 2)),
        heads_kv=draw(st.integers(1, 2)),
        ratio=draw(st.sampled_from((1, 1, 2, 3))),
        softmax_scale=draw(st.sampled_from((0.1, 0.1, 0.02, 0.7, 0.0, -0.1))),
        value_scale=draw(st.sampled_from((1.0, 0.1, 3.0))),
        workers=draw(st.integers(1, 4)),
        dlse=draw(st.booleans()),
        sink=draw(st.sampled_from((None, None, 1.0))),
    )


@st.composite
def cases(draw, ordered=ANY_ORDER):
    config, head_dim, head_dim_v = draw(st.sampled_from(KINDS))
    left, right = (draw(st.one_of(st.none(), st.integers(0, 300))) for _ in range(2))
    window = draw(st.sampled_from(((None, None), (None, None), (left, None), (left, right))))
    causal, softcap = draw(st.booleans()), draw(st.sampled_from((0.0, 0.0, 2.0, 50.0)))
    if causal:
        window = (window[0], None)
    features = {
        "left": window[0] is not None,
        "right": window[1] is not None,
        "softcap": softcap != 0,
        "alibi": draw(st.sampled_from((False, False, True))),
        "ordered": draw(ordered),
    }
    return Case(
        replace(config, causal=causal, **features),
        draw(st.sampled_from((head_dim, 8 * draw(st.integers(1, head_dim // 8))))),
        draw(st.sampled_from((head_dim_v, 8 * draw(st.integers(1, head_dim_v // 8))))),
        seqlen_q=draw(lengths(config.tile_m, 3)),
        seqlen_k=draw(lengths(config.tile_n, 2 if config.ctas == 2 else 3)),
        window_size=window,
        softcap=softcap,
        **other_facts(draw),
    )


@settings(max_examples=8)
@given(case=cases(), seed=st.integers(0, 2**16))
def test_numbers_of_random_problems(case, seed):
    run(case, seed)


NARROW = ((64, 64), (128, 128), (96, 120), (40, 128), (128, 64))


def fitted(problem, head_dims, deterministic):
    """A call whose head dims this kernel takes, and whether its dQ is summed in a fixed order."""
    if (
        max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM
        or problem.score_mod
        or problem.mask_mod
    ):
        problem = replace(problem, head_dim=head_dims[0], head_dim_v=head_dims[1])
    return problem, deterministic


CALLS = st.builds(
    fitted,
    strategies.problems(max_seqlen=300, max_scores=2**16),
    st.sampled_from(NARROW),
    st.sampled_from((False, False, True)),
).filter(lambda call: all(x.numel() for x in call[0].shapes))


def prepared(problem, deterministic, seed):
    """(config, arrays, options, gradient of out) of a call, with NaN in what is not in use."""
    inputs = problem.tensors(seed=seed)
    options = options_of(*inputs, deterministic=deterministic, **problem.keywords())
    config = choose_config(AttentionProblem.of_call(*inputs, options))[0]
    return config, *arrays_of(problem, inputs, seed)


def run_call(call, seed: int = 0):
    """Any call of the public functions, with the config that it would get."""
    problem, deterministic = call
    config, arrays, options, dout = prepared(problem, deterministic, seed)
    results = simulate_backward(config, arrays, options, 1 + seed % 4, seed)
    results = [torch.from_numpy(x).to(problem.dtype) for x in results]
    inputs, keywords = problem.tensors(seed=seed), problem.keywords()
    assert_gradients_close(results, inputs, dout, **keywords)
    return config


@settings(max_examples=8)
@given(CALLS, st.integers(0, 2**16))
def test_calls_of_every_feature(call, seed):
    run_call(call, seed)


MODS = {
    "score": {"score_mod": "bent", "causal": True},
    "mask": {"mask_mod": "dilated", "alibi": "by head"},
    "cap, tensors": {"score_mod": "heads", "mask_mod": "documents", "softcap": 3.0},
    "window": {"score_mod": "bent", "mask_mod": "dilated", "window_size": (60, 40)},
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", MODS)
def test_mods(name, head_dim):
    """At head dim 128 by pairs."""
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim, "seqlen_q": 200, "seqlen_k": 300}
    problem = strategies.Problem(**sizes, ratio=2, dtype=torch.bfloat16, **MODS[name])
    assert run_call((problem, False), seed=len(name)).ctas == head_dim // 64


def additions(config, arrays, options, timing, dlse=None):
    """(gradients' bits, place of sums -> tiles that added there in order), of so many CTAs in an order of everything else."""
    packed = [x.ndim == 3 for x in arrays[:2]]
    tensors, dlse = batched(arrays, dlse, packed)
    sums, orders = 0, {}
    for machine, call in backward_machines(config, tensors, options, *timing, dlse=dlse):
        machine.run()
        sums = sums + dq_of_sums(call)
        for place, total in call.sums.items():
            orders.setdefault(place, []).extend(x for x in total.order if x != NO_TURN)
    return (sums, call.dk, call.dv), orders


def same_order(problem, seed: int):
    """Run a problem whose order is fixed with other CTAs, sections and orders of all else: one order, the same bits."""
    if isinstance(problem, Case):
        config, options, workers = problem.config, problem.options, problem.workers
        arrays, dlse = problem.arrays()
    else:
        (problem, _), dlse, workers = problem, None, 1 + seed % 4
        config, arrays, options, _ = prepared(problem, True, seed)
    timings = [(workers, seed), (workers % 4 + 1, seed + 101), (5, seed + 202)]
    runs = [additions(config, arrays, options, timing, dlse) for timing in timings]
    for bits, orders in runs:
        assert orders == runs[0][1]
        assert all(np.array_equal(a, b) for a, b in zip(bits, runs[0][0], strict=True))
    blocks, seqlen_k = (
        config.blocks(*[0 if side else None for side in (config.left, config.right)]),
        arrays[1].shape[-3],
    )
    positions = {blocks.tile_at(i, seqlen_k): i for i in range(ceil_div(seqlen_k, config.tile_n))}
    for order in runs[0][1].values():
        numbers = [positions[int(x)] for x in order]
        assert numbers == sorted(set(numbers)), "tiles add in the order of their numbers"
    return config


def has_lengths(call):
    """Whether sequences have lengths of their own."""
    return call[0].varlen


ORDERED = {
    "odd blocks": dict(seqlen_q=140, seqlen_k=300, ratio=3),
    "a window": dict(seqlen_q=400, seqlen_k=350, window_size=(40, 10)),
    "nobody sees the first queries": dict(seqlen_q=300, seqlen_k=140, causal=True),
    "few queries": dict(seqlen_q=100, seqlen_k=600, causal=True),
    "groups of tiles": dict(seqlen_q=1100, seqlen_k=1200, causal=True),
    "empty sequences": dict(
        lengths_q=(130, 0, 300, 9), lengths_k=(200, 100, 260, 0), around=(3, 5), causal=True
    ),
}


@pytest.mark.parametrize("name", ORDERED)
def test_one_order_of_additions(name):
    """Of one CTA and, for odd blocks, of pairs; ``--ordered`` has more, at random."""
    head_dim = 128 if name in ("odd blocks", "a window") else 64
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim, "dtype": torch.bfloat16}
    same_order((strategies.Problem(**sizes, **ORDERED[name]), True), 7)


def test_without_turns_the_order_of_additions_matters():
    """The test above can fail; dK is of one tile, and is the same in any order."""
    config, *dims = KINDS[1]
    results = [gradients(Case(config, *dims, 1, 300, 560, workers=n), n) for n in (3, 1)]
    assert not np.array_equal(results[0][0], results[1][0])
    assert np.array_equal(results[0][1], results[1][1])


def test_rows_without_keys_add_nothing():
    config, *dims = KINDS[0]
    arrays, dlse = Case(config, *dims, 1, 300, 40, dlse=True).arrays()
    dq, *_ = simulate_backward(config, arrays, 0.1, dlse=dlse * np.inf)
    assert not dq[:, :260].any()


def test_steps_do_not_depend_on_the_order():
    """What lets one recorded run stand for all orders."""
    config, *dims = KINDS[4]
    arrays, _ = Case(config, *dims, seqlen_q=200, seqlen_k=300).arrays()
    programs = []
    for seed in range(2):
        ((machine, _),) = backward_machines(config, arrays, 0.1, workers=1, seed=seed)
        machine.run()
        actors = {step.actor for step in machine.trace}
        steps = [(s.actor, s.kind, s.target, s.count, s.nbytes) for s in machine.trace]
        programs.append({actor: [s for s in steps if s[0] == actor] for actor in actors})
    assert programs[0] == programs[1]


def edges_of(config):
    """Names of the edges that others cover; that of x is raised by who waits for it."""
    edges = (*config.graph.signals, *config.graph.rings)
    return [edge.name for edge in edges if edge.covered_by and edge.name != "x"]


COVERED = [(i, name) for i in (0, 1) for name in edges_of(SM100_BACKWARD_PROBLEMS[i].config)]


@pytest.mark.parametrize(("index", "name"), COVERED)
def test_a_cover_is_not_a_matter_of_belief(index, name):
    """Each edge is freed by those that the graph names, and not by nothing."""
    problem = SM100_BACKWARD_PROBLEMS[index]
    variation = Variation(covers=((name, ()),))
    (tensors,) = problem.tensors()
    with pytest.raises(Hazard, match=f"{name}( full)? is said to be freed by"):
        simulate_backward(problem.config, tensors, 0.1, 1, variation=variation)


MUTANTS = {mutant.name: mutant for mutant in sm100_bwd_mutants()}
REMOVALS = [name for name in MUTANTS if ": drop" in name or name.startswith("pair: ")]
FILE = Path(__file__).with_name("sm100_bwd_harmless_mutants.json")
HARMLESS = json.loads(FILE.read_text("utf-8"))  # name -> why nothing is wrong


def test_mutants_have_names_of_their_own():
    assert len(MUTANTS) == len(sm100_bwd_mutants()) and set(HARMLESS) <= set(MUTANTS)


def is_reported(variation, indices) -> bool:
    """Whether a run of a variation stops, or gives other numbers."""
    for index in indices:
        problem = SM100_BACKWARD_PROBLEMS[index]
        (tensors,) = problem.tensors()
        arguments = (problem.config, tensors, problem.options, problem.workers)
        expected = simulate_backward(*arguments)
        for seed in range(3):
            try:
                results = simulate_backward(*arguments, seed, variation)
            except Exception:  # a mutant may fail in any way
                return True
            if not all(np.array_equal(a, b) for a, b in zip(results, expected, strict=True)):
                return True
    return False


@pytest.mark.parametrize("name", random.Random(0).sample(sorted(set(REMOVALS) - set(HARMLESS)), 8))
def test_no_synchronisation_can_go(name):
    """A sample; ``python -m tests.host.test_bwd100_roles --removals`` has all."""
    assert is_reported(MUTANTS[name].build(), (1, 4) if name.startswith("pair") else (0, 2, 1, 4))


def remove_all():
    """Judge every removal of a call."""
    missed = []
    for name in REMOVALS:
        pair, role = name.startswith("pair"), name.partition(":")[0]
        indices = (1, 4) if pair else (3, 0, 2) if role in ("load", "mma") else (3, 0, 2, 1, 4)
        if name not in HARMLESS and not is_reported(MUTANTS[name].build(), indices):
            missed.append(name)
            print("NOT REPORTED", name, flush=True)
    print(
        f"{len(REMOVALS)} removals, {len(HARMLESS)} known as harmless, {len(missed)} not reported"
    )
    raise SystemExit(bool(missed))


def run_any(problem, seed):
    """Simulate a case or a call."""
    return (run if isinstance(problem, Case) else run_call)(problem, seed)


def main():
    """Run random (problem, seed) pairs, of configs and of calls, where a failure is shrunk and raised; or remove every call."""
    arguments = arguments_of(
        main.__doc__,
        ordered="problems whose dQ is summed in a fixed order",
        removals="remove every call",
    )
    if arguments.removals:
        remove_all()
    if arguments.ordered:
        searches = ((cases(st.just(True)), same_order), (CALLS.filter(has_lengths), same_order))
        check_random(arguments, searches, "one order, the same bits")
    else:
        check_random(arguments, ((st.one_of(cases(), CALLS), run_any),))


if __name__ == "__main__":
    main()
