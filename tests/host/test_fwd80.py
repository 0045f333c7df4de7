"""The Ampere forward without a GPU: memory, tiles, and its own role in plain Python.

As a script, with more random calls: ``python -m tests.host.test_fwd80 --n 2000 --seed 1``.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import flash4
from flash4 import dispatch
from flash4.common.dsl import plain
from flash4.common.geometry import KvBlocks
from flash4.common.tiles import Grid
from flash4.common.varlen import Sequences, VarlenSchedule
from flash4.dispatch import architecture
from flash4.interface import options_of
from flash4.problem import AttentionProblem
from flash4.sim.explore import explore
from flash4.sim.handout import HostWarp
from flash4.sim.sm80_fwd import SMEM_LIMIT, forward_machines, simulate_forward
from flash4.sm80 import fwd
from flash4.sm80.fwd_config import (
    A100,
    CONSUMER_BLACKWELL,
    CTA_RESERVED,
    HOPPER,
    SMALL,
    SMEM_ALIGN,
    ForwardConfig,
)
from flash4.sm80.fwd_tiles import find, queries_of
from flash4.sm80.shared_rows import CHUNK, CHUNK_BYTES, SharedRows
from tests import strategies
from tests.checks import assert_forward_close
from tests.host.random_runs import arguments_of, check_random

BANKS, BANK_BYTES, LANES = 32, 4, 32
DIMS = range(32, 257, 32)
CARDS = {"A100": A100, "small": SMALL, "Blackwell": CONSUMER_BLACKWELL, "Hopper": HOPPER}
TINY = ForwardConfig(True, 32, 32, warps=4, atoms=1, tile_n=16, causal=False)


@pytest.mark.parametrize("columns", DIMS)
def test_each_number_has_a_place_of_its_own(columns):
    rows = SharedRows(64, columns)
    places = [
        rows.at(row, chunk) + band * rows.band_bytes
        for row, chunk, band in product(range(64), range(rows.chunks), range(rows.bands))
    ]
    assert sorted(places) == list(range(0, rows.nbytes, CHUNK_BYTES))
    for row, step in product(range(64), range(rows.chunks // 2)):
        for chunk in (0, 1):
            assert rows.pair_at(rows.at(row, chunk), step) == rows.at(row, 2 * step + chunk)


@pytest.mark.parametrize("columns", DIMS)
def test_runs_of_chunks_and_pairs_are_one_behind_the_other(columns):
    rows = SharedRows(64, columns)
    for row, count in product(range(8), range(1, columns // CHUNK + 1)):
        for first in range(0, columns // CHUNK - count + 1, count):
            places = [
                rows.at(row, n % rows.chunks) + n // rows.chunks * rows.band_bytes
                for n in range(first, first + count)
            ]
            assert rows.run_of_chunks(rows.at(row, 0), first, count) == places
            if count % 2 == 0:
                pairs = rows.run_of_pairs(rows.at(row, 0), first // 2, count // 2)
                assert pairs == places[::2]


@pytest.mark.parametrize("columns", DIMS)
@pytest.mark.parametrize("by_columns", [False, True])
def test_ldmatrix_meets_nobody_in_a_bank(columns, by_columns):
    """Each of its four matrices has 8 rows of 16 bytes, which must be in all 32 banks."""
    rows = SharedRows(64, columns)
    for step in range(rows.chunks // 2):
        at = [rows.pair_at(rows.of_lane(lane, by_columns), step) for lane in range(LANES)]
        for matrix in range(4):
            mine = at[8 * matrix : 8 * matrix + 8]
            banks = {(a + b) // BANK_BYTES % BANKS for a in mine for b in range(0, 16, BANK_BYTES)}
            assert len(banks) == BANKS


@pytest.mark.parametrize("columns", DIMS)
def test_copies_meet_nobody_in_a_bank(columns):
    """8 threads at a time write 16 bytes each."""
    rows = SharedRows(64, columns)
    for first in range(0, 64 * rows.chunks, 8):
        at = [rows.at(t // rows.chunks, t % rows.chunks) for t in range(first, first + 8)]
        assert len({a % (BANKS * BANK_BYTES) // CHUNK_BYTES for a in at}) == 8


@pytest.mark.parametrize("columns", DIMS)
def test_lanes_give_the_rows_that_an_operand_has(columns):
    """Matrices in the order of an mma's registers: rows first for A, columns first for B."""
    rows = SharedRows(64, columns)
    for by_columns, order in ((False, "row"), (True, "column")):
        for lane in range(LANES):
            first, second = lane // 8 % 2, lane // 16
            row, chunk = (second, first) if order == "column" else (first, second)
            assert rows.of_lane(lane, by_columns) == rows.at(8 * row + lane % 8, chunk)


FEATURES = ({}, {"causal": True}, {"window_left": True, "softcap": True}, {"cu_q": True})


def problem(head_dim, head_dim_v, dtype=torch.bfloat16, **facts):
    return AttentionProblem(dtype, 1, 4096, 4096, 4, 2, head_dim, head_dim_v, **facts)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_every_config_fits_its_card(card):
    """No launch fails for shared memory, and a multiprocessor holds as many CTAs as registers are shared by."""
    for head_dim, head_dim_v, facts in product(range(8, 257, 24), (8, 64, 128, 200, 256), FEATURES):
        config, reasons = card.choose_config(problem(head_dim, head_dim_v, **facts))
        needed = config.smem_bytes + SMEM_ALIGN
        assert needed <= card.smem_bytes
        assert config.ctas_per_sm * (needed + CTA_RESERVED) <= card.sm_smem_bytes
        assert config.tile_d - 32 < head_dim <= config.tile_d
        assert config.tile_dv - 32 < head_dim_v <= config.tile_dv
        assert config.threads * config.ctas_per_sm * config.registers <= 65_536
        assert any(str(config.smem_bytes) in reason for reason in reasons)


def test_larger_memory_means_larger_tiles():
    large, small = (card.choose_config(problem(128, 128))[0] for card in (A100, SMALL))
    assert large.tile_n * large.ctas_per_sm > small.tile_n * small.ctas_per_sm


def run(config, problem, seed):
    """Simulate a call of any features."""
    inputs, keywords = problem.tensors(seed=seed), problem.keywords()
    options = options_of(*inputs, **keywords)
    for name in ("sink", "alibi_slopes"):
        if getattr(options, name) is not None:
            options = options._replace(**{name: getattr(options, name).numpy()})
    if options.aux_tensors is not None:
        options = options._replace(aux_tensors=[x.numpy() for x in options.aux_tensors])
    arrays = (x.float().numpy() for x in inputs)
    with np.errstate(invalid="ignore"):  # NaN in rows that are not in use
        out, lse = simulate_forward(config, *arrays, options, seed=seed)
    out = torch.from_numpy(out).to(problem.dtype)
    assert_forward_close(out, torch.from_numpy(lse), inputs, **keywords)


TILES = st.sampled_from(
    (
        {},  # as it ships
        {"warps": 4, "atoms": 1, "tile_n": 16, "ctas_per_sm": 1},
        {"warps": 4, "atoms": 1, "tile_n": 32, "stages": 3, "ctas_per_sm": 1},
    )
)


CALLS = st.tuples(
    strategies.problems(max_seqlen=200, max_scores=2**14),
    st.sampled_from(("sm_80", "sm_86", "sm_90")),
    TILES,
)


def run_call(call, seed: int):
    """Simulate a call on some card, with the config that it would get, or a smaller tile; returns the config."""
    problem, arch, tile = call
    inputs = problem.tensors(seed=seed)
    assume(all(x.numel() for x in inputs))
    config = flash4.explain(*inputs, arch=arch, **problem.keywords()).config
    if config.pack <= 16 * tile.get("warps", config.warps) * tile.get("atoms", config.atoms):
        config = replace(config, **tile)
    assume(config.smem_bytes + SMEM_ALIGN <= SMEM_LIMIT)  # what the simulator has: that of an A100
    run(config, problem, seed)
    return config


@settings(max_examples=60)
@given(CALLS, st.integers(0, 2**16))
def test_calls_of_every_feature(call, seed):
    """Any call of the public functions."""
    run_call(call, seed)


@settings(max_examples=100)
@given(st.data())
def test_each_tile_of_sequences_is_found_once(data):
    """By the number of a CTA, which must not be that of two."""
    draw = data.draw
    batch, tile_q, groups, heads_kv = (draw(st.integers(1, n)) for n in (70, 40, 2, 3))
    sizes = draw(st.lists(st.integers(0, 90), min_size=batch, max_size=batch))
    before, behind = draw(st.integers(0, 50)), draw(st.integers(0, 50))
    cu = [before, *(before + sum(sizes[: i + 1]) for i in range(batch))]
    sequences = Sequences(batch, cu[-1] + behind, 64, cu_q=cu)
    blocks = KvBlocks(tile_q, 16, draw(st.booleans()))
    schedule = VarlenSchedule(blocks, Grid(1, groups, heads_kv, 1), sequences, 100)
    total = queries_of(schedule).slots * groups * heads_kv
    found = (plain(find)(schedule, HostWarp(), number) for number in range(total))
    tiles = [(index, within) for index, within, valid in found if valid]
    expected = [
        (index, within)
        for index in range(sequences.count)
        for within in range(schedule.tiles_at(index))
    ]
    assert sorted(tiles) == expected


@pytest.mark.parametrize("stages", [2, 3])
def test_every_order_of_a_small_problem(stages):
    config = replace(TINY, tile_n=16, stages=stages)
    draw = np.random.default_rng(0).standard_normal
    q, k, v = (draw((1, n, 1, 8), np.float32) for n in (64, 40, 40))
    ((machine, _),) = forward_machines(config, (q, k, v), 0.1, 1, 0)
    machine.run()
    found = explore(machine)
    assert found.steps > found.states > len(machine.tasks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_d": 48}, "tile_d is 48"),
        ({"warps": 2}, "2 warps of 1 atoms"),
        ({"tile_n": 24}, "tile_n is 24"),
        ({"stages": 1}, "at least 2"),
        ({"pack": 3}, "pack is 3"),
        ({"causal": True, "right": True}, "exclude each other"),
    ],
)
def test_configs_that_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **change)


AMPERE = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_87", (8, 9): "sm_89"}
AMPERE |= {(12, 0): "sm_120", (12, 1): "sm_121"}


@pytest.mark.parametrize("capability", AMPERE)
def test_what_has_no_kernel_of_its_own_gets_amperes(capability):
    arch = architecture(capability)
    assert arch == AMPERE[capability]
    q = torch.empty(2, 300, 4, 64, dtype=torch.bfloat16, device="meta")
    for backward, name in ((False, "sm80-fwd"), (True, "sm80-bwd")):
        plan = flash4.explain(q, q, q, arch=arch, backward=backward)
        assert plan.name == name and plan.arch == arch
        text = str(plan)
        assert "Ampere instructions serve it" in text and "shared memory" in text
        # A newer card is told that it has none of its own.
        assert ("of its own are not built for this card" in text) == (capability[0] > 8)


def test_hopper_gets_amperes_kernels_if_asked(monkeypatch):
    monkeypatch.setattr(dispatch, "ARCHITECTURES", dict(dispatch.ARCHITECTURES))
    assert architecture((9, 0)) == "sm_90a"
    dispatch.serve((9, 0), "sm_90")
    assert dispatch.plan_forward(problem(64, 64), architecture((9, 0)), 132).name == "sm80-fwd"


def test_the_kernel_and_its_schedule_are_short():
    """It is the one to read first."""
    folder = Path(fwd.__file__).parent
    lines = [
        len((folder / f"{name}.py").read_text("utf-8").splitlines())
        for name in ("fwd", "fwd_ops", "fwd_roles")
    ]
    assert sum(lines) <= 600


def main():
    """Run random calls; a failure is shrunk and raised."""
    check_random(arguments_of(main.__doc__), ((CALLS, run_call),))


if __name__ == "__main__":
    main()
