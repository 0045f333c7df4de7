"""Tiles that are shared out beforehand: every tile once, and to each worker its part."""

from dataclasses import replace
from itertools import accumulate, product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flash4.common.geometry import KvBlocks, ceil_div, choose
from flash4.common.shares import SharedSchedule, narrow, part_of, shares_of, wide
from flash4.common.tiles import Grid
from flash4.common.varlen import Sequences
from tests.host.test_varlen import masks, sequences

H200_WORKERS = 132


@st.composite
def schedules(draw):
    grid = Grid(0, draw(st.integers(1, 3)), draw(st.integers(1, 4)), 0)
    blocks = KvBlocks(draw(st.sampled_from([1, 16, 128, 256])), 64, *draw(masks))
    return SharedSchedule(blocks, grid, draw(sequences(longest=700)))


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
    schedule = SharedSchedule(
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
