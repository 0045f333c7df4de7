"""Sequences in the backward: what memory is theirs, and that each tile of keys is some CTA's."""

import heapq
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4.common.dsl import plain
from flash4.common.geometry import QueryBlocks, ceil_div
from flash4.common.kv_sequences import (
    SequenceSchedule,
    Side,
    find_tile,
    row_block,
    visited_rows,
)
from flash4.common.kv_tiles import KvGrid
from flash4.common.varlen import Sequences
from flash4.sim.handout import HostWarp
from tests.host.test_varlen import expected, sequences

find_tile, row_block = plain(find_tile), plain(row_block)


def sides(s, tile_m=80, tile_n=128):
    """Both sides of ``varlen.Sequences``."""
    return (
        Side(s.batch, s.rows_q, tile_m, s.cu_q, s.used_q),
        Side(s.batch, s.rows_k, tile_n, s.cu_k, s.used_k),
    )


def schedule_of(s, heads_kv=2, ratio=1, least=1, **facts):
    """A schedule whose sections hold five tiles."""
    blocks = QueryBlocks(80, 128, facts.pop("causal", False), **facts)
    return SequenceSchedule(blocks, KvGrid(0, heads_kv, 0, ratio), *sides(s), 5, least)


def all_tiles(schedule):
    """Tiles of all numbers that have one, in order."""
    tiles = (find_tile(schedule, HostWarp(), number) for number in range(schedule.total))
    return [tile for tile in tiles if tile.valid]


@settings(max_examples=200)
@given(sequences(most=90, longest=300))
def test_rows(s):
    """Each sequence lies where the definition says, and all rows are of one sequence, or around them."""
    for side, rows in zip(sides(s), (s.rows_q, s.rows_k), strict=True):
        for batch in range(s.batch):
            found = side.at(side.number_of(batch))
            row_q, stored_q, seqlen_q, row_k, seqlen_k = expected(s, batch)
            queries = side.tile == 80
            assert found.batch == batch
            assert found.begin == (row_q if queries else row_k)
            assert found.used == (seqlen_q if queries else seqlen_k)
            assert not queries or found.stored == stored_q
        spans = [side.at(i) for i in range(side.count)]
        if side.cu is not None:
            ends = [(x.begin, x.begin + x.stored) for x in spans]
            assert ends[0][0] == 0 and ends[-1][1] == rows
            assert all(a[1] == b[0] for a, b in pairwise(ends))
            assert not spans[0].used and not spans[-1].used
        for index in (-5, -1, side.count, side.count + 40):  # safe
            side.at(index)


@settings(max_examples=200)
@given(sequences(most=90, longest=300))
def test_slots(s):
    """No two sequences share one, each has one at least and all that its rows fill; every slot finds its rows."""
    for side in sides(s):
        starts = [side.slot(i) for i in range(side.count + 1)]
        for i, (begin, end) in enumerate(pairwise(starts)):
            assert end - begin >= max(1, side.blocks_at(i))
        assert starts[0] == 0 and starts[-1] <= side.slots
        rows = {}
        for entry in range(s.batch if side.cu is None else 1):
            for slot in range(
                side.slots if side.cu is not None else ceil_div(side.rows, side.tile)
            ):
                block = row_block(side, HostWarp(), slot, entry)
                for i in range(min(side.tile, block.stored)):
                    assert rows.setdefault((block.entry, block.begin + i), i < block.used) == (
                        i < block.used
                    )
        entries = 1 if side.cu is not None else s.batch
        assert len(rows) == entries * side.rows
        assert sum(rows.values()) == sum(side.at(i).used for i in range(side.count))


def test_malformed_offsets_stay_inside():
    """Sequences that overlap, run backwards or beyond what is stored: wrong, but within the memory that there is."""
    for cu in ([5, 400, 30, 900], [900, 0, 900, 0], [-7, 2**30, 3, 3], [0, 0, 0, 0]):
        side = Side(3, 500, 80, cu)
        for index in range(-3, 9):
            rows = side.at(index)
            assert 0 <= rows.begin <= rows.begin + rows.stored <= 500
            if 0 <= index < side.count:
                last = rows.slot + max(ceil_div(rows.stored, 80), 1) - 1
                assert 0 <= rows.slot <= last < side.slots
        for slot in range(side.slots):
            block = row_block(side, HostWarp(), slot, 0)
            assert block.begin + min(block.stored, 80) <= 500 and block.used <= block.stored


@settings(max_examples=150)
@given(
    sequences(most=90, longest=300),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from((1, 4, 16)),
    st.sampled_from(({}, {"causal": True}, {"left": 70}, {"left": 30, "right": 90}, {"right": 5})),
)
def test_tiles(s, heads_kv, ratio, least, facts):
    """Every tile of stored keys is there once, those of a head from the first keys to the last."""
    schedule = schedule_of(s, heads_kv, ratio, least, **facts)
    tiles = all_tiles(schedule)
    places = {}
    for position, tile in enumerate(tiles):
        places[tile.index, tile.head_kv, tile.n_block] = position
    assert len(places) == len(tiles)
    wanted = {
        (i, head, n)
        for i in range(schedule.keys.count)
        for head in range(heads_kv)
        for n in range(schedule.keys.blocks_at(i))
    }
    assert set(places) == wanted
    for (i, head, n), position in places.items():
        assert n == 0 or places[i, head, n - 1] < position


@settings(max_examples=100)
@given(
    sequences(most=5, longest=400),
    st.integers(1, 3),
    st.sampled_from(({}, {"causal": True}, {"left": 70}, {"left": 30, "right": 90}, {"right": 5})),
)
def test_steps(s, ratio, facts):
    """A tile's steps hold every pair of a query and a key that see each other; masks begin and end where they must."""
    schedule = schedule_of(s, 1, ratio, **facts)
    blocks, seen = schedule.blocks, {}
    for tile in all_tiles(schedule):
        where, (seqlen_q, seqlen_k) = schedule.where(tile), schedule.lengths(tile)
        phases = schedule.phases(tile)
        assert tile.steps >= ratio and phases[0].begin == 0 and phases[-1].end == tile.steps
        assert all(a.end == b.begin and a.begin <= a.end for a, b in pairwise(phases))
        queries = schedule.queries.at(schedule.queries.number_of(where.batch))
        if not schedule.is_seen(tile):
            assert tile.steps == ratio and tile.first_block == 0 and seqlen_q == 0
            assert schedule.rank(tile, 0) < 0
            assert phases[0].masked and phases[0].end == tile.steps
            continue
        assert (seqlen_q, seqlen_k) == (queries.used, schedule.keys.at(tile.index).used)
        for i in range(0, tile.steps, ratio):
            block, head = schedule.place(tile, i)
            assert head == 0 and 0 <= block < ceil_div(queries.stored, 80)
            for key in range(tile.n_block * 128, min(tile.n_block * 128 + 128, seqlen_k), 9):
                begin = blocks.query_begin(key, seqlen_q, seqlen_k)
                end = blocks.query_end(key, seqlen_q, seqlen_k)
                inside = range(max(begin, block * 80), min(end, block * 80 + 80, seqlen_q))
                seen[where.batch, key] = seen.get((where.batch, key), 0) + len(inside)
    for batch in range(s.batch):
        _, _, seqlen_q, _, seqlen_k = expected(s, batch)
        for key in range(0, seqlen_k if seqlen_q else 0):
            if key % 128 % 9:
                continue
            begin = blocks.query_begin(key, seqlen_q, seqlen_k)
            end = min(blocks.query_end(key, seqlen_q, seqlen_k), seqlen_q)
            assert seen.get((batch, key), 0) == max(end - begin, 0)


@settings(max_examples=100)
@given(sequences(most=5, longest=400), st.booleans())
def test_visited_rows(s, causal):
    """Blocks of queries that some tile visits, all of which the first tile of their sequence does."""
    schedule, visited = schedule_of(s, 1, 1, causal=causal), {}
    for tile in all_tiles(schedule):
        where = schedule.where(tile)
        for i in range(tile.steps if schedule.is_seen(tile) else 0):
            slot = where.slot_q + schedule.place(tile, i)[0]
            visited.setdefault((where.entry_q, slot), set()).add(tile.n_block)
    assert all(0 in tiles for tiles in visited.values())
    side = schedule.queries
    for entry in range(s.batch if side.cu is None else 1):
        for slot in range(side.slots if side.cu is not None else ceil_div(side.rows, side.tile)):
            rows = row_block(side, HostWarp(), slot, entry)
            found = visited_rows(schedule.blocks, schedule.keys, rows)
            if min(rows.used, rows.stored) > 0:
                assert found == (rows.used if (entry, slot) in visited else 0)
            else:
                assert found <= 0


@settings(max_examples=100)
@given(
    sequences(most=4, longest=700),
    st.sampled_from(({}, {"causal": True}, {"left": 70}, {"left": 30, "right": 90}, {"right": 5})),
)
def test_turns(s, facts):
    """Tiles that add to a block of dQ in turns count from 0, in the order in which CTAs take them."""
    schedule, counts = schedule_of(s, 1, 1, **facts), {}
    for tile in all_tiles(schedule):
        where = schedule.where(tile)
        for i in range(tile.steps):
            rank, (block, _) = schedule.rank(tile, i), schedule.place(tile, i)
            place = where.entry_q, where.slot_q + block
            if rank >= 0:
                assert rank == counts.get(place, 0), "it would wait for ever"
                counts[place] = rank + 1


@pytest.mark.parametrize("order", [1, -1])
def test_balance(order):
    """Lengths that differ 1000 times, given from short to long: greedy CTAs end within a few percent of each other."""
    lengths = [8, 33, 70, 128, 300, 600, 1500, 3500, 8000, 8192][::order]
    cu = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    for causal in (False, True):
        s = Sequences(len(lengths), cu[-1], cu[-1], cu, cu)
        schedule = SequenceSchedule(
            QueryBlocks(80, 128, causal), KvGrid(0, 16, 0, 1), *sides(s), 132, 16 if causal else 1
        )
        workers = [0] * 132
        tiles = all_tiles(schedule)
        for tile in tiles:
            heapq.heappush(workers, heapq.heappop(workers) + tile.steps + 3)
        total = sum(tile.steps + 3 for tile in tiles)
        assert max(workers) * 132 / total < (1.02 if causal else 1.06)
        assert len(tiles) >= schedule.total - 16 * (len(lengths) + 2)
