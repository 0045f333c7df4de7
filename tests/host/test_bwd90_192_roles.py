"""The role functions of the Hopper backward for head dims of 136 to 192, in plain Python; see ``test_bwd90_roles``."""

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
from flash4.sim.sm90_bwd_192 import machines_192, simulate_backward_192
from flash4.sm90.bwd_192_config import Backward192Config, can_implement, choose_config
from tests.host.test_bwd90_roles import (
    IN_ORDER,
    WIDE,
    WINDOWS,
    WITH_TURNS,
    Case,
    cases,
    run,
)


def problem(head_dim, head_dim_v, causal=False, bf16=True, **features):
    """Facts of a call with these head dims and features."""
    dtype = torch.bfloat16 if bf16 else torch.float16
    return AttentionProblem(dtype, 1, 4096, 4096, 1, 1, head_dim, head_dim_v, causal, **features)


def shipped(*dims, **features):
    """Config that such a call gets."""
    return choose_config(problem(*dims, **features))[0]


KINDS = (
    # head_dim, head_dim_v, causal, bf16
    (192, 128, True, True),
    (192, 128, False, False),
    (160, 160, True, True),
    (136, 64, False, True),
    (168, 40, True, False),
)
CONFIGS = [(shipped(*kind), *kind[:2]) for kind in KINDS]
CONFIGS += [(shipped(192, 128, True, softcap=True), 192, 128)]
CONFIGS += [(replace(config, **IN_ORDER), *dims) for config, *dims in CONFIGS[:3]]


def test_the_configs_cover_what_can_differ():
    configs = [config for config, *_ in CONFIGS]
    assert {config.tile_d for config in configs} == {160, 192}
    assert {config.tile_m for config in configs} == {32, 48}
    assert {config.handed_out for config in configs} == {True, False}


def test_what_is_taken():
    taken = {
        (d, dv)
        for d, dv in itertools.product(range(8, 257, 8), repeat=2)
        if can_implement(problem(d, dv)) is None
    }
    assert {d for d, _ in taken} == {*range(136, 193, 8)}
    assert max(dv for d, dv in taken if d <= 160) == 160
    assert max(dv for d, dv in taken if d > 160) == 128
    for d, dv in taken:
        config = shipped(d, dv)
        assert config.fits and config.tile_d >= d and config.tile_dv >= dv
        assert config.graph.registers <= config.graph.launch_registers


def test_tiles_are_handed_out_where_that_was_faster():
    """Of plain calls whose query heads have a KV head each."""
    plain = problem(192, 128, True)
    assert choose_config(plain)[0].handed_out
    for facts in (
        {"heads_q": 4},
        {"softcap": True},
        {"window_right": True, "causal": False},
        {"deterministic": True},
    ):
        config = choose_config(replace(plain, **facts))[0]
        assert not (config.handed_out or config.first_stores or config.backwards), facts


@pytest.mark.parametrize("index", range(len(CONFIGS)), ids=lambda i: f"{i}-{CONFIGS[i][1:]}")
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(150, 300), (300, 150), (9, 130)])
def test_numbers(index, seqlen_q, seqlen_k):
    config, head_dim, head_dim_v = CONFIGS[index]
    softcap = 20.0 if config.softcap else 0.0
    case = Case(config, head_dim, head_dim_v, 1, seqlen_q, seqlen_k, 1, 2, dlse=True)
    run(replace(case, softcap=softcap), seed=index)


@settings(max_examples=40)
@given(case=cases(CONFIGS, **WIDE), seed=st.integers(0, 2**16))
def test_numbers_of_random_problems(case, seed):
    run(case, seed)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(window):
    facts = {"window_left": window[0] is not None, "window_right": window[1] is not None}
    config = shipped(192, 128, **facts)
    assert config.tile_m == (32 if config.left else 48)
    run(Case(config, 192, 128, 1, 200, 500, 1, 2, window_size=window))


def test_every_order_gives_the_same_bits_of_dk_and_dv():
    case = Case(shipped(192, 64, True), 192, 64, 1, 200, 300, 2, 2)
    arrays, _ = case.arrays()
    results = [
        simulate_backward_192(case.config, arrays, 0.1, workers, seed)
        for workers, seed in ((1, 0), (2, 1), (3, 2))
    ]
    for _, dk, dv in results[1:]:
        assert (dk == results[0][1]).all() and (dv == results[0][2]).all()


@pytest.mark.parametrize("name", WITH_TURNS)
def test_turns_give_the_same_bits_of_dq(name):
    causal, window = WITH_TURNS[name]
    facts = {"window_left": window[0] is not None, "window_right": window[1] is not None}
    config = shipped(136, 64, causal, deterministic=True, **facts)
    case = Case(config, 136, 64, 1, 200, 500, 1, 2, window_size=window)
    arrays, _ = case.arrays()
    results = [
        simulate_backward_192(config, arrays, case.options, workers, seed)
        for workers, seed in ((4, 0), (2, 1), (3, 2), (1, 3))
    ]
    for gradients in results[1:]:
        assert all((a == b).all() for a, b in zip(gradients, results[0], strict=True))
    run(case)


@pytest.mark.parametrize("tile_m", [32, 48])
def test_the_order_of_sums_is_what_the_last_kernel_reads(tile_m):
    """A warpgroup's own 64 head dims, then half of the queries of the shared ones, each as an accumulator lies in its box."""
    config = replace(shipped(192, 128), tile_m=tile_m)
    _, finish = passes_of(config, dlse=False)
    added, read = [], []
    for part in range(2):
        for first_dim, first_query, queries in (
            (64 * part, 0, tile_m),
            (128, part * tile_m // 2, tile_m // 2),
        ):
            for group, thread, number in itertools.product(
                range(queries // 8), range(128), range(4)
            ):
                row, column = accumulator_place(thread, group, number)
                added.append((first_query + column, first_dim + row))
        for group, thread, number in itertools.product(
            range(tile_m * 3 // 16), range(128), range(4)
        ):
            read.append(dq_place(finish, part, thread, group, number))
    assert added == read
    assert sorted(added) == [*itertools.product(range(tile_m), range(192))]


def test_rows_without_keys_add_nothing():
    case = Case(shipped(192, 128, True), 192, 128, 1, 200, 40, dlse=True)
    case = replace(case, config=replace(case.config, first_stores=False))
    arrays, dlse = case.arrays()
    dq, *_ = simulate_backward_192(case.config, arrays, 0.1, dlse=dlse * np.inf)
    assert not dq[:, :160].any()


def test_simulates_after_compiling():
    """Tracing replaces the code of the role functions; ``plain`` finds the original."""
    config = shipped(192, 128)
    compile_kernel("flash4.sm90.bwd_192:Backward192Sm90", config, "sm_90a")
    run(Case(config, 192, 128, 1, 100, 150))


def test_every_order_of_a_small_problem():
    """One tile of two steps."""
    config = Backward192Config(True, 160, 16, 16, False, swap_dq=True)
    case = Case(config, 8, 8, seqlen_q=30, seqlen_k=60, workers=1)
    arrays, _ = case.arrays()
    for machine, _ in machines_192(config, arrays, case.options, workers=1, seed=0):
        machine.run()
        found = explore(machine)
        assert found.steps > found.states > len(machine.tasks)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"tile_d": 136}, "supported are 160 and 192"),
        ({"tile_d": 128}, "supported are 160 and 192"),
        ({"tile_d": 224}, "supported are 160 and 192"),
        ({"swap_dq": False}, "supported are True"),
        ({"tile_m": 40}, "multiples of 16"),
        ({"late": True}, "registers that dK and dV have"),
        ({"causal": True, "right": True}, "exclude each other"),
    ],
)
def test_bad_configs_are_refused(facts, said):
    good = {
        "bf16": True,
        "tile_d": 192,
        "tile_dv": 128,
        "tile_m": 48,
        "causal": False,
        "swap_dq": True,
    }
    with pytest.raises(ValueError, match=said):
        Backward192Config(**good | facts)
