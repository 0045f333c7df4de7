"""Sequences of different lengths: where they lie, that every tile has one owner, and that owners are equally busy."""

from dataclasses import replace
from itertools import accumulate, product

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import flash4
from flash4.common.geometry import KvBlocks, ceil_div, choose, narrow, wide
from flash4.common.shares import part_of, shares_of
from flash4.common.tiles import Grid
from flash4.common.varlen import Sequences, VarlenSchedule
from tests.host.test_dispatch import stand_in_gpu

H200_WORKERS = 132


@st.composite
def sequences(draw, longest=2000, most=12):
    """Sequences with any of the four tensors, with numbers that exceed what is stored."""
    batch = draw(st.integers(1, most))
    length = st.one_of(st.just(0), st.integers(0, 9), st.integers(0, longest))
    sides, used = [], []
    for _ in range(2):
        rows, cu = draw(st.integers(1, longest)), None
        if draw(st.booleans()):
            starts = accumulate(
                (draw(length) for _ in range(batch)), initial=draw(st.sampled_from((0, 0, 17)))
            )
            cu = list(starts)
            rows = max(cu[-1] + draw(st.sampled_from((0, 0, 40, -3))), 1)
        sides.append((rows, cu))
        some = draw(st.booleans())
        used.append([draw(length) for _ in range(batch)] if some else None)
    (rows_q, cu_q), (rows_k, cu_k) = sides
    return Sequences(batch, rows_q, rows_k, cu_q, cu_k, *used)


def expected(s, batch):
    """(first row of q, rows of q, queries in use, first row of k, keys in use) by the definition."""

    def side(rows, cu, used):
        begin, end = (0, rows) if cu is None else (min(cu[batch], rows), min(cu[batch + 1], rows))
        in_use = end - begin if used is None else min(used[batch], end - begin)
        return begin, end - begin, in_use

    (row_q, stored_q, seqlen_q), (row_k, _, seqlen_k) = (
        side(s.rows_q, s.cu_q, s.used_q),
        side(s.rows_k, s.cu_k, s.used_k),
    )
    return row_q, stored_q, seqlen_q, row_k, seqlen_k


@given(sequences())
def test_where_sequences_lie(s):
    packed = s.cu_q is not None
    found = [s.at(i) for i in range(s.count)]
    for batch, x in enumerate(found[1:-1] if packed else found):
        assert (x.row_q, x.stored_q, x.seqlen_q, x.row_k, x.seqlen_k) == expected(s, batch)
        assert x.batch_q == (0 if packed else batch)
        assert x.batch_k == (batch if s.cu_k is None else 0)
    if packed:
        rows = [row for x in found for row in range(x.row_q, x.row_q + x.stored_q)]
        assert rows == list(range(s.rows_q)), "every row is of one sequence, or around them"
        assert all(x.seqlen_q == x.seqlen_k == 0 for x in (found[0], found[-1]))


@given(sequences(), st.integers(0, 1000))
def test_any_number_is_safe_to_ask_for(s, beyond):
    x = s.at(s.count + beyond)
    assert 0 <= x.row_q <= x.row_q + x.stored_q <= s.rows_q and x.seqlen_q <= x.stored_q
    assert 0 <= x.row_k <= x.row_k + x.seqlen_k <= s.rows_k
    assert 0 <= x.batch_q < s.batch and 0 <= x.batch_k < s.batch


masks = st.sampled_from(
    [(False, None, None), (True, None, None), (True, 100, None), (False, 64, 9), (False, None, 5)]
)


@st.composite
def schedules(draw):
    grid = Grid(0, draw(st.integers(1, 3)), draw(st.integers(1, 4)), 0)
    blocks = KvBlocks(draw(st.sampled_from([1, 16, 128, 256])), 64, *draw(masks))
    return VarlenSchedule(blocks, grid, draw(sequences(longest=700)))


def tiles_of(schedule, workers, threads=32):
    """Tiles of each worker, in order."""
    lists = []
    for share in shares_of(schedule, workers, threads):
        mine, found = replace(schedule, share=share), []
        tile = mine.first()
        while tile.valid:
            found.append(tile)
            tile = mine.next(tile)
        lists.append(found)
    return lists


@given(schedules(), st.integers(1, 150), st.sampled_from([1, 7, 32, 384]))
def test_every_tile_has_one_owner(schedule, workers, threads):
    visited = [tile for tiles in tiles_of(schedule, workers, threads) for tile in tiles]
    found = [
        (t.index, t.place.head_kv, t.place.group, t.m_block) for t in visited if t.place.stored_q
    ]
    assert len(found) == len(set(found)), "tiles are visited twice"
    grid, every = schedule.grid, set()
    for index in range(schedule.sequences.count):
        m_blocks = ceil_div(schedule.sequences.at(index).stored_q, schedule.blocks.tile_q)
        every |= set(product([index], range(grid.heads_kv), range(grid.groups), range(m_blocks)))
    assert set(found) == every
    for t in visited:
        x = schedule.sequences.at(t.index)
        assert schedule.lengths(t) == (x.seqlen_q, x.seqlen_k)
        lean = replace(schedule, keeps_place=False)
        assert lean.place(replace(t, place=None)) == t.place
        if t.m_block * schedule.blocks.tile_q < x.seqlen_q:
            assert t.n_blocks == schedule.blocks.count(t.m_block, x.seqlen_q, x.seqlen_k)
        else:
            assert t.n_blocks == 1


@given(schedules(), st.integers(1, 150))
def test_no_worker_has_more_than_its_part_and_a_tile(schedule, workers):
    """By the estimate that shares are cut by."""
    costs = []
    for tiles in tiles_of(schedule, workers):
        costs.append(sum(schedule._tile_cost(schedule.sequences.at(t.index)) for t in tiles))
    largest = max(
        schedule._tile_cost(schedule.sequences.at(i)) for i in range(schedule.sequences.count)
    )
    assert max(costs) <= sum(costs) / workers + largest


def lengths_of(kind, rng):
    """Lengths of sequences of one batch, 64k tokens or so."""
    if kind == "one long, many short":
        return [60_000] + [60] * 100
    if kind == "many short, one long":
        return [60] * 100 + [60_000]
    if kind == "long and short in turn":
        return [8192, 8] * 8
    if kind == "equal":
        return [4096] * 16
    return np.exp(rng.uniform(np.log(8), np.log(16_000), 24)).astype(int).tolist()


@pytest.mark.parametrize("mask", [(False, None, None), (True, None, None), (True, 1024, None)])
@pytest.mark.parametrize(
    "kind",
    ["one long, many short", "many short, one long", "long and short in turn", "equal", "any"],
)
def test_lengths_that_differ_a_thousandfold_are_balanced(kind, mask):
    """By what tiles really cost, their blocks and one; a window's short first tiles are not spread as evenly."""
    lengths = lengths_of(kind, np.random.default_rng(0))
    cu = list(accumulate(lengths, initial=0))
    schedule = VarlenSchedule(
        KvBlocks(128, 128, *mask),
        Grid(0, 1, 16, 0),
        Sequences(len(lengths), cu[-1], cu[-1], cu, cu),
    )
    loads, largest = [], 0
    for tiles in tiles_of(schedule, H200_WORKERS):
        costs = [tile.n_blocks + 1 for tile in tiles]
        loads.append(sum(costs))
        largest = max(largest, *costs)
    mean = sum(loads) / H200_WORKERS
    slack = 1.1 if mask[1] else 1.0
    assert max(loads) <= slack * mean + 1.5 * largest, (max(loads), mean, largest)


@given(st.integers(1, 1000), st.integers(0, 5000))
@example(384, 1)
def test_parts_of_threads_cover_all_sequences(threads, count):
    parts = [part_of(i, threads, count) for i in range(threads)]
    assert [i for begin, end in parts for i in range(begin, end)] == list(range(count))


def test_helpers_on_the_host():
    assert (choose(True, 1, 2), choose(False, 1, 2), wide(2**40), narrow(7)) == (1, 2, 2**40, 7)


@pytest.mark.parametrize("used", [True, False])
def test_values_of_sequences_lie_whole_rows_apart(used):
    """The kernel counts batch entries of V in rows; only there, other strides are copied."""
    q = torch.randn(2, 5, 1, 64).bfloat16()
    v = torch.randn(2, 7 * 64 + 8).bfloat16().as_strided((2, 5, 1, 64), (7 * 64 + 8, 64, 64, 1))
    same = torch.randn(2, 1, 1, 64).bfloat16().expand(2, 5, 1, 64)
    counts = torch.tensor([3, 5], dtype=torch.int32) if used else None
    for values in (v, same):
        with stand_in_gpu(run=lambda launch: None) as launches:
            if used:
                flash4.flash_attn_varlen_func(q, q, values, seqused_k=counts)
            else:
                flash4.flash_attn_func(q, q, values)
        (launch,) = launches
        taken = launch.tensors[2]
        assert torch.equal(taken, values)
        whole = taken.stride(1) != 0 and taken.stride(0) % taken.stride(1) == 0
        assert whole if used else taken.stride()[:2] == values.stride()[:2]
