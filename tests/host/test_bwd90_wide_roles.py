"""The role functions of the Hopper backward for head dims above 128, in plain Python; see ``test_bwd90_roles``."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4.common.fragments import accumulator_place, dq_place
from flash4.jit.compile import compile_kernel
from flash4.passes.bwd_config import passes_of
from flash4.problem import AttentionProblem
from flash4.sim.explore import explore
from flash4.sim.sm90_bwd_wide import simulate_wide_backward, wide_machines
from flash4.sm90.bwd_wide_config import WideBackwardConfig, choose_config
from tests.host.test_bwd90_roles import WIDE, WINDOWS, WITH_TURNS, Case, cases, run


def shipped(head_dim, head_dim_v, causal=False, bf16=True, **features):
    """Config that a call with these head dims and features gets."""
    dtype = torch.bfloat16 if bf16 else torch.float16
    facts = AttentionProblem(dtype, 1, 4096, 4096, 1, 1, head_dim, head_dim_v, causal, **features)
    return choose_config(facts)[0]


KINDS = (
    # head_dim, head_dim_v, causal, bf16
    (256, 256, True, True),
    (192, 128, True, True),
    (136, 64, False, False),
    (64, 256, True, True),
    (192, 192, False, True),
)
CONFIGS = [(shipped(*kind), *kind[:2]) for kind in KINDS]
JOINT = shipped(256, 128)
# Not chosen, but supported: pairs of CTAs that share loads alone, and one CTA at head dim 256 without a fixed order.
PAIRS = replace(shipped(192, 128), ctas=2)
CONFIGS += [(JOINT, 256, 128), (PAIRS, 192, 128), (replace(JOINT, joint=False), 256, 128)]
CONFIGS += [(replace(shipped(256, 256), joint=False, ctas=1), 256, 256)]


def test_the_configs_cover_what_can_differ():
    configs = [config for config, *_ in CONFIGS]
    assert {config.dq_parts for config in configs} == {2, 3, 4}
    assert {config.do_stages for config in configs} == {1, 2}
    assert {config.ctas for config in configs} == {1, 2}
    assert {config.joint for config in configs} == {False, True}
    assert {(config.dq_parts, config.ctas) for config in configs if not config.joint} >= {
        (3, 1), (3, 2), (4, 1), (4, 2),
    }  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "dims", [(136, 64), (192, 128), (200, 64), (200, 72), (256, 256), (64, 256)], ids=str
)
def test_pairs_are_chosen_where_they_add_dq_up(dims, causal, deterministic):
    config = shipped(*dims, causal, deterministic=deterministic)
    assert config.joint == (dims[0] > 192 and dims[1] > 64 and not deterministic)
    assert config.ctas == 1 + config.joint


@pytest.mark.parametrize("index", range(len(CONFIGS)), ids=lambda i: f"{i}-{CONFIGS[i][1:]}")
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(150, 300), (300, 150), (128, 128), (9, 60)])
def test_numbers(index, seqlen_q, seqlen_k):
    config, head_dim, head_dim_v = CONFIGS[index]
    run(Case(config, head_dim, head_dim_v, 1, seqlen_q, seqlen_k, 1, 2, dlse=True), seed=index)


@settings(max_examples=40)
@given(case=cases(CONFIGS, **WIDE), seed=st.integers(0, 2**16))
def test_numbers_of_random_problems(case, seed):
    run(case, seed)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(window):
    facts = {"window_left": window[0] is not None, "window_right": window[1] is not None}
    run(Case(shipped(192, 128, **facts), 192, 128, 1, 200, 500, 1, 2, window_size=window))
    joint = replace(JOINT, left=window[0] is not None, right=window[1] is not None)
    run(Case(joint, 256, 128, 1, 200, 500, 1, 2, window_size=window))


@pytest.mark.parametrize("softcap", [0.0, 10.0])
@pytest.mark.parametrize("sink", [None, -50.0, 0.0, 50.0])
def test_caps_and_sinks(softcap, sink):
    config = shipped(256, 128, True, softcap=softcap != 0)
    run(Case(config, 256, 128, 1, 200, 150, 1, 2, softcap=softcap, sink=sink))


def test_blocks_are_loaded_once_for_both_ctas():
    """Each CTA copies half of every block of Q into both, and its own statistics."""
    case = Case(PAIRS, 192, 128, 1, 256, 128, workers=1)
    arrays, _ = case.arrays()
    ((machine, _),) = wide_machines(case.config, arrays, case.options, workers=1, seed=0)
    machine.run()
    issued = [s for s in machine.trace if s.kind == "issue" and "into cta" in s.target]
    into_q = [s for s in issued if ".q[" in s.target]
    assert len(into_q) == 4 * 2 * 2  # blocks, CTAs that copy, CTAs that get them


def test_every_order_gives_the_same_bits_of_dk_and_dv():
    case = Case(shipped(192, 64, True), 192, 64, 1, 200, 300, 2, 2)
    arrays, _ = case.arrays()
    results = [
        simulate_wide_backward(case.config, arrays, 0.1, workers, seed)
        for workers, seed in ((1, 0), (2, 1), (3, 2))
    ]
    for _, dk, dv in results[1:]:
        assert (dk == results[0][1]).all() and (dv == results[0][2]).all()


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("name", WITH_TURNS)
def test_turns_give_the_same_bits_of_dq(name, ctas):
    """Whatever the order of clusters and of their CTAs; without turns it would matter."""
    causal, window = WITH_TURNS[name]
    facts = {"window_left": window[0] is not None, "window_right": window[1] is not None}
    config = replace(shipped(136, 64, causal, deterministic=True, **facts), ctas=ctas)
    case = Case(config, 136, 64, 1, 200, 500, 1, 2, window_size=window)
    arrays, _ = case.arrays()
    results = [
        simulate_wide_backward(config, arrays, case.options, workers, seed)
        for workers, seed in ((4, 0), (2, 1), (3, 2), (1, 3))
    ]
    for gradients in results[1:]:
        assert all((a == b).all() for a, b in zip(gradients, results[0], strict=True))
    run(case)


def test_without_turns_the_bits_of_dq_depend_on_the_order():
    """What the test above would not see if it always passed."""
    case = Case(shipped(136, 64), 136, 64, 1, 200, 500, 1, 2)
    arrays, _ = case.arrays()
    results = [
        simulate_wide_backward(case.config, arrays, case.options, workers, seed)[0]
        for workers, seed in ((4, 0), (2, 1), (3, 2), (1, 3), (4, 4), (4, 5))
    ]
    assert any((dq != results[0]).any() for dq in results[1:])


@pytest.mark.parametrize("tile_d", [128, 192, 256])
def test_the_order_of_sums_is_what_the_last_kernel_reads(tile_d):
    """Part after part, each as a warpgroup's accumulator lies in its box."""
    config = WideBackwardConfig(True, tile_d, 64, False)
    _, finish = passes_of(config, dlse=False)
    numbers = itertools.product(range(config.dq_parts), range(8), range(128), range(4))
    added = []
    for part, group, thread, number in numbers:
        row, column = accumulator_place(thread, group, number)
        added.append((row, 64 * part + column))
    read = [
        dq_place(finish, half, thread, group, number)
        for half, group, thread, number in itertools.product(
            range(2), range(tile_d // 16), range(128), range(4)
        )
    ]
    assert added == read


def test_rows_without_keys_add_nothing():
    case = Case(shipped(256, 256, True), 256, 256, 1, 200, 40, dlse=True)
    arrays, dlse = case.arrays()
    dq, *_ = simulate_wide_backward(case.config, arrays, 0.1, dlse=dlse * np.inf)
    assert not dq[:, :160].any()


def test_simulates_after_compiling():
    """Tracing replaces the code of the role functions; ``plain`` finds the original."""
    config = shipped(192, 128)
    compile_kernel("flash4.sm90.bwd_wide:WideBackwardSm90", config, "sm_90a")
    run(Case(config, 192, 128, 1, 100, 150))


def test_every_order_of_a_small_problem():
    """One CTA, one tile of two steps."""
    config = WideBackwardConfig(True, 128, 64, False, ctas=1)
    case = Case(config, 8, 8, seqlen_q=100, seqlen_k=60, workers=1)
    arrays, _ = case.arrays()
    for machine, _ in wide_machines(config, arrays, case.options, workers=1, seed=0):
        machine.run()
        found = explore(machine)
        assert found.steps > found.states > len(machine.tasks)


def test_steps_do_not_depend_on_the_order():
    """What lets one recorded run stand for all orders."""
    case = Case(shipped(192, 64, True), 192, 64, seqlen_q=200, seqlen_k=200)
    arrays, _ = case.arrays()
    programs = []
    for seed in range(4):
        ((machine, _),) = wide_machines(case.config, arrays, case.options, workers=1, seed=seed)
        machine.run()
        actors = {step.actor for step in machine.trace}
        steps = [(s.actor, s.kind, s.target, s.count, s.nbytes) for s in machine.trace]
        programs.append({actor: [s for s in steps if s[0] == actor] for actor in actors})
    assert programs[1:] == programs[:-1]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"tile_d": 136}, "multiples of 64 up to 256"),
        ({"tile_dv": 320}, "multiples of 64 up to 256"),
        ({"tile_d": 64}, "each warpgroup needs 64"),
        ({"ctas": 3}, "supported are 1 and 2"),
        ({"joint": True}, "it needs 2, 256, and no order"),
        ({"joint": True, "tile_d": 256, "ordered": True}, "it needs 2, 256, and no order"),
        ({"causal": True, "right": True}, "exclude each other"),
    ],
)
def test_bad_configs_are_refused(facts, said):
    with pytest.raises(ValueError, match=said):
        WideBackwardConfig(**{"bf16": True, "tile_d": 192, "tile_dv": 128, "causal": False} | facts)
