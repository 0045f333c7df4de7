"""The Ampere backward without a GPU: memory, who has which part of dQ, and its own role in plain Python."""

import functools
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flash4 import reference
from flash4.common.fragments import warp_dq_place
from flash4.interface import options_of
from flash4.passes.bwd_config import passes_of
from flash4.problem import AttentionProblem
from flash4.sim.explore import explore
from flash4.sim.sm80_bwd import backward_machines, simulate_backward
from flash4.sim.sm80_fwd import SMEM_LIMIT
from flash4.sm80 import bwd_config
from flash4.sm80.bwd_config import OWN_KEYS, TWO_ROLES, BackwardConfig
from flash4.sm80.fwd_config import CTA_RESERVED, SMEM_ALIGN
from tests import strategies
from tests.checks import assert_gradients_close
from tests.gpu.gradients import is_built
from tests.host.test_bwd90_sequences import NEIGHBOURS, arrays_of, assert_neighbours_are_apart
from tests.host.test_bwd100_sequences import facts_of

CARDS = {
    name: getattr(bwd_config, name) for name in ("A100", "SMALL", "CONSUMER_BLACKWELL", "HOPPER")
}
FEATURES = (
    *({}, {"causal": True}, {"window_left": True, "softcap": True}, {"cu_q": True}),
    *({"mask_mod": 1}, {"score_mod": 1, "score_mod_bwd": 2}, {"mask_mod": 1, "aux": 1}),
)
CROWDED = {"window_left": True, "window_right": True, "alibi": True, "cu_k": True}
TINY = BackwardConfig(True, 32, 32, 32, False, warps=4, key_warps=4)


def problem(head_dim, head_dim_v, **facts):
    facts = {"batch": 2, "seqlen_q": 4096, "seqlen_k": 4096, "heads_q": 4, "heads_kv": 2} | facts
    return AttentionProblem(torch.bfloat16, head_dim=head_dim, head_dim_v=head_dim_v, **facts)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_every_config_fits_its_card(card):
    for head_dim, head_dim_v, facts in product(range(8, 257, 24), (8, 64, 128, 200, 256), FEATURES):
        config, _ = card.choose_config(problem(head_dim, head_dim_v, **facts))
        needed = config.smem_bytes + SMEM_ALIGN
        assert needed <= card.smem_bytes
        assert config.ctas_per_sm * (needed + CTA_RESERVED) <= card.sm_smem_bytes
        assert config.threads * config.ctas_per_sm * config.registers <= 65_536


@pytest.mark.parametrize(
    ("card", "dims", "facts", "stages", "reason"),
    [
        ("HOPPER", (256, 256), {}, 2, "a step late"),
        ("A100", (256, 256), {"causal": True}, 1, "beside the next step's copies"),
        ("A100", (192, 128), {}, 2, "a step late"),
        ("SMALL", (192, 128), {}, 1, "beside the next step's copies"),
        ("SMALL", (256, 256), {}, None, "so little shared memory"),
        ("HOPPER", (256, 256), {"softcap": True}, None, "a cap"),
        ("HOPPER", (256, 256), {"deterministic": True}, None, "a fixed order of sums"),
        ("HOPPER", (256, 256), {"mask_mod": 1}, None, "of their own for mods"),
        ("HOPPER", (256, 256), CROWDED, 1, "beside the next step's copies"),
        ("HOPPER", (256, 160), {}, None, "160 columns, which are no multiple of 64"),
        ("HOPPER", (128, 128), {"causal": True}, 2, "each of its own 32 keys"),
        ("A100", (96, 72), {}, 2, "each of its own 32 keys"),
        ("SMALL", (128, 128), {}, None, "so little shared memory"),
        ("HOPPER", (128, 128), {"seqlen_k": 2048}, None, "64 tiles of keys"),
        ("HOPPER", (128, 128), {"seqlen_k": 2049}, 2, "each of its own 32 keys"),
        ("HOPPER", (128, 128), {"softcap": True}, None, "a cap"),
        ("HOPPER", (64, 64), {"causal": True}, 2, "each of its own 32 keys"),
        ("SMALL", (64, 40), {}, 2, "each of its own 32 keys"),
        ("HOPPER", (32, 32), {}, None, "head dims up to 32"),
        ("HOPPER", (64, 64), {"seqlen_k": 2048}, None, "64 tiles of keys"),
    ],
)
def test_two_roles_serve_what_they_can(card, dims, facts, stages, reason):
    """``stages`` is None where every warp has dK and dV."""
    config, reasons = CARDS[card].choose_config(problem(*dims, **facts))
    assert config.two_roles == (stages is not None)
    assert stages in (None, config.stages) and config.ds_slots == (stages or 1)
    assert reason in reasons[-1]


def test_a_score_mod_needs_its_derivative():
    facts = {"score_mod": 1, "aux": 0}
    assert "pass score_mod_bwd(" in bwd_config.A100.can_implement(problem(64, 64, **facts))
    assert bwd_config.A100.can_implement(problem(64, 64, **facts, score_mod_bwd=2)) is None


@pytest.mark.parametrize(
    ("dims", "facts", "runs"),
    [
        ((64, 64), {"alibi": True}, (1, 1, 1)),
        ((128, 128), {}, (1, 2, 1)),
        ((128, 128), {"alibi": True}, (2, 4, 1)),
        ((128, 128), {"bf16": False}, (1, 2, 1)),
        ((128, 128), {"bf16": False, "left": True}, (2, 2, 1)),
        ((192, 128), {}, (1, 2, 2)),
        ((64, 64), {"ctas_per_sm": 2}, (2, 2, 2)),
    ],
)
def test_runs_leave_registers(dims, facts, runs):
    """Of dV's role without a mask and with one, and of dK's."""
    facts = {"bf16": True, "causal": True} | OWN_KEYS | facts
    config = BackwardConfig(tile_d=dims[0], tile_dv=dims[1], **facts)
    assert tuple(len(config.runs(*x)) for x in ((0, False), (0, True), (1, False))) == runs
    assert config.most_runs == max(runs)
    assert [len(config.runs_of_dq(role)) for role in (0, 1)] == [1, 1 + (dims[0] > 128)]
    for found in (config.runs(0, True), config.runs(1, False)):
        assert [n for run in found for n in run.of(64)] == list(range(64))
        assert [run.first for run in found] == [True] + [False] * (len(found) - 1)
        assert [run.last for run in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.parametrize(
    ("dims", "facts", "tile"),
    [
        ((64, 64), {"deterministic": True}, (64, 3)),
        ((64, 64), {"deterministic": True, "causal": True}, (64, 2)),
        ((64, 64), {"softcap": True}, (64, 2)),
        ((64, 64), {"seqlen_k": 2048}, (64, 2)),
        ((32, 32), {"causal": True}, (64, 3)),
        ((128, 128), {"softcap": True, "causal": True}, (64, 2)),
        ((128, 128), {"softcap": True, "causal": True, "cu_q": True}, (32, 2)),
        ((256, 256), {"softcap": True, "causal": True}, (64, 1)),
        ((256, 256), {"softcap": True, "causal": True, "cu_q": True}, (32, 1)),
    ],
)
def test_crowded_configs_have_more_registers(dims, facts, tile):
    """(queries of a step, CTAs that share a multiprocessor) of one role."""
    config, _ = bwd_config.HOPPER.choose_config(problem(*dims, **facts))
    assert (config.tile_m, config.ctas_per_sm, config.two_roles) == (*tile, False)


def shipped():
    """All tiles that ship, whatever the card."""
    found = set()
    for card, d, dv in product(CARDS.values(), range(32, 257, 32), (32, 128, 256)):
        found.add(card.choose_config(problem(d, dv))[0])
    return sorted(found, key=repr)


@pytest.mark.parametrize(
    "config", shipped(), ids=lambda c: f"{c.tile_m}x{c.tile_d} {c.warps}/{c.key_warps}"
)
def test_each_number_of_dq_has_one_place(config):
    """Those of all threads at once are neighbours, and the kernel behind knows where each belongs."""
    _, finish = passes_of(config, False)
    places = [warp_dq_place(finish, n) for n in range(config.tile_m * config.tile_d)]
    assert set(places) == set(product(range(config.tile_m), range(config.tile_d)))
    queries, columns = config.dq_shape
    for thread in range(0, config.threads, 37):
        mine = [places[n] for n in range(thread, len(places), config.threads)]
        rows, cols = zip(*mine)
        first = thread // 32 % config.query_warps * queries
        assert all(first <= row < first + queries for row in rows)
        assert max(cols) - min(cols) < columns


TILES = (
    {"warps": 4, "key_warps": 4},
    {"warps": 4, "key_warps": 4, "stages": 1},
    {"warps": 4, "key_warps": 2},
    {"warps": 8, "key_warps": 4, "tile_m": 64},
    TWO_ROLES,
    TWO_ROLES | {"stages": 1},
    OWN_KEYS,
    OWN_KEYS | {"stages": 1},
    OWN_KEYS | {"tile_d": 192, "tile_dv": 128, "stages": 1},  # in runs
)


@settings(max_examples=50)
@given(
    strategies.problems(max_seqlen=150, max_scores=2**14), st.sampled_from(TILES), st.booleans(),
    st.integers(0, 2**16),
)  # fmt: skip
def test_gradients_of_every_feature(problem, tile, deterministic, seed):
    assume(all(x.numel() for x in problem.shapes) and is_built(problem, "sm_80"))
    config, _ = bwd_config.HOPPER.choose_config(facts_of(problem, deterministic))
    tile = {"tile_m": 32, "stages": 2, "two_roles": False} | tile
    assume(bwd_config.query_warps(tile["tile_m"], config.tile_d, tile["warps"]))
    if tile["two_roles"]:
        assume(not (config.softcap or config.ordered or config.has_mods))
        if tile["key_warps"] == TWO_ROLES["key_warps"]:
            tile |= {x: -(-getattr(config, x) // 64) * 64 for x in ("tile_d", "tile_dv")}
    config = replace(config, **tile)
    assume(config.tile_d >= problem.head_dim and config.tile_dv >= problem.head_dim_v)
    assume(config.smem_bytes + SMEM_ALIGN <= SMEM_LIMIT)
    run(problem, config, seed)


def run(problem, config, seed=0):
    """Simulate a call with a config, and check it."""
    inputs = problem.tensors(seed=seed)
    arrays, options, dout = arrays_of(problem, inputs, seed)
    with np.errstate(invalid="ignore"):
        gradients = simulate_backward(config, arrays, options, seed=seed)
    gradients = tuple(torch.from_numpy(x).to(problem.dtype) for x in gradients)
    assert_gradients_close(gradients, inputs, dout, **problem.keywords())


MODS = {
    "score": {"score_mod": "bent", "causal": True},
    "mask": {"mask_mod": "dilated", "alibi": "by head"},
    "score alone": {"score_mod": "relative"},
    "cap, tensors": {"score_mod": "heads", "mask_mod": "documents", "softcap": 3.0},
    "window": {"score_mod": "bent", "mask_mod": "dilated", "window_size": (60, 40)},
    "rows without keys": {"mask_mod": "dilated", "window_size": (0, 0), "sink": 0.0},
    "packed": {
        "score_mod": "heads", "mask_mod": "documents", "alibi": "by head", "softcap": 3.0,
        "lengths_q": (70, 0, 40, 1), "lengths_k": (50, 40, 130, 0), "around": (3, 20),
    },
    "in use": {"score_mod": "bent", "batch": 2, "used_q": (90, 0), "used_k": (3, 150)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("card", "head_dim"), [("A100", 64), ("A100", 128), ("A100", 256), ("SMALL", 256)]
)
@pytest.mark.parametrize("name", MODS)
def test_mods_with_the_tiles_that_ship(name, card, head_dim):
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim, "seqlen_q": 90, "seqlen_k": 150}
    problem = strategies.Problem(**sizes, dtype=torch.bfloat16, ratio=2, **MODS[name])
    config, _ = CARDS[card].choose_config(facts_of(problem, deterministic=len(name) % 2 == 0))
    assert config.has_mods and not config.two_roles
    run(problem, config, len(name))


def test_a_derivative_may_be_anything_where_nothing_is_seen():
    """Infinite at a score of 0, as queries behind the last have it; so may the score itself become."""
    problem = strategies.Problem(seqlen_q=40, seqlen_k=70, head_dim=64, head_dim_v=64)
    inputs = [x.abs() + 0.1 for x in problem.tensors()]
    keywords = {"score_mod": root, "score_mod_bwd": root_bwd, "softmax_scale": 0.1}
    options = options_of(*inputs, **keywords)
    config, _ = bwd_config.A100.choose_config(AttentionProblem.of_call(*inputs, options))
    out, lse = reference.attention(*inputs, return_lse=True, **keywords)
    dout = problem.output_gradient()
    arrays = [x.float().numpy() for x in (*inputs, out.to(dout.dtype), lse, dout)]
    with np.errstate(all="ignore"):
        gradients = simulate_backward(config, arrays, options)
    gradients = tuple(torch.from_numpy(x).to(dout.dtype) for x in gradients)
    assert_gradients_close(gradients, inputs, dout, **keywords)


def root(score, *_):
    """Of positive scores; of a score of 0 its derivative is infinite."""
    return score**0.5


def root_bwd(grad, score, *_):
    """Derivative of ``root``."""
    return grad * 0.5 / score**0.5


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_what_a_sequence_holds_reaches_no_other_row(name):
    """Not even the rows around the sequences: their tiles, which nobody sees, find somebody's statistics."""
    config, _ = bwd_config.HOPPER.choose_config(facts_of(NEIGHBOURS[name]))
    simulate = functools.partial(simulate_backward, config)
    assert_neighbours_are_apart(NEIGHBOURS[name], np.nan, simulate)


@pytest.mark.parametrize("tile", [{}, OWN_KEYS | {"ctas_per_sm": 1}])
@pytest.mark.parametrize("length", [2, 400])
def test_a_tile_that_nobody_sees_adds_nothing_however_high_its_biases(tile, length):
    """Slopes of the last sequence, which has no queries, are negative: exp2 of them is more than 16 or 32 bits hold."""
    problem = strategies.Problem(
        **dict(batch=3, heads_kv=2, head_dim=64, head_dim_v=64, softmax_scale=0.05),
        **dict(seqlen_q=8, seqlen_k=length, lengths_q=(7, 1, 0), used_k=(0, 1, length)),
        alibi="by batch and head",
    )
    config, _ = bwd_config.HOPPER.choose_config(facts_of(problem))
    run(problem, replace(config, **tile))


def test_a_fixed_order_gives_the_same_bits():
    draw = np.random.default_rng(0).standard_normal
    q, k, v, dout = (draw((1, n, 1, 32), np.float32) for n in (100, 300, 300, 100))
    lse = np.full((1, 1, 100), 5, np.float32)
    config = replace(TINY, ordered=True)
    results = [
        simulate_backward(config, (q, k, v, dout, lse, dout), 0.1, seed=seed) for seed in range(4)
    ]
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(other, results[0]))


def test_every_order_of_a_small_problem():
    draw = np.random.default_rng(0).standard_normal
    q, k, v, dout = (draw((1, n, 1, 8), np.float32) for n in (64, 64, 64, 64))
    lse = np.full((1, 1, 64), 5, np.float32)
    machines = backward_machines(replace(TINY), (q, k, v, dout, lse, dout), 0.1, 1, 0)
    machine, _ = next(machines)
    machine.run()
    assert explore(machine).states > len(machine.tasks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_d": 48}, "tile_d is 48"),
        ({"warps": 8, "key_warps": 2}, "8 warps, 2 to the keys"),
        ({"tile_m": 16}, "tile_m is 16"),
        ({"tile_m": 32, "tile_d": 96, "warps": 8, "key_warps": 8}, "cannot be shared out"),
        ({"stages": 3}, "stages is 3"),
        (TWO_ROLES | {"softcap": True}, "two roles need 8 warps"),
        (TWO_ROLES | {"mask_mod": 1}, "no mods"),
        ({"score_mod": 1}, "score_mod and score_mod_bwd go together"),
        ({"aux": 1}, "without a mod"),
        (TWO_ROLES | {"warps": 4}, "two roles need 8 warps"),
        (TWO_ROLES | {"tile_d": 128, "tile_dv": 96}, "96 columns of dK or dV cannot be shared out"),
        (OWN_KEYS | {"tile_m": 128}, "P of 128 queries cannot be handed over"),
        ({"causal": True, "right": True}, "exclude each other"),
    ],
)
def test_configs_that_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)
