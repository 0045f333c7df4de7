"""Sequences of different lengths: where they lie, in which order their tiles come, and how they are handed out."""

import heapq
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash4
from flash4.common.dsl import plain
from flash4.common.geometry import KvBlocks, ceil_div
from flash4.common.handout import TILE, find
from flash4.common.tiles import Grid
from flash4.common.varlen import CHUNK, Cursor, Sequences, VarlenSchedule
from flash4.dispatch import SEQUENCE_SECTION_BYTES
from flash4.interface import options_of
from flash4.sim.handout import HostWarp, shared_out
from flash4.sim.sm90_fwd import simulate_forward
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
    blocks = KvBlocks(draw(st.sampled_from([16, 64, 128])), 64, *draw(masks))
    section = draw(st.sampled_from([1, 300, 900, 10**6]))
    return VarlenSchedule(blocks, grid, draw(sequences(longest=300, most=40)), section)


START = Cursor(0, 0, 0, 0, 0)


def entries_of(schedule):
    """All tiles, in order."""
    found, cursor = [], START
    for wanted in range(schedule.total()):
        if wanted >= cursor.end:
            cursor = plain(find)(schedule, HostWarp(), cursor, wanted)
        found.append(schedule.at(cursor.index, wanted - cursor.begin, TILE, 0))
    return found


@settings(max_examples=40)
@given(schedules())
def test_every_tile_has_one_number(schedule):
    sequences, grid, entries = schedule.sequences, schedule.grid, entries_of(schedule)
    found = [(e.index, e.head_kv, e.group, e.m_block) for e in entries]
    every = set()
    for index in range(sequences.count):
        m_blocks = ceil_div(sequences.at(index).stored_q, schedule.blocks.tile_q)
        every |= set(product([index], range(grid.heads_kv), range(grid.groups), range(m_blocks)))
    assert len(found) == len(set(found)) and set(found) == every
    for e in entries:
        x, place = sequences.at(e.index), schedule.place(e)
        assert (e.seqlen_q, e.seqlen_k) == (x.seqlen_q, x.seqlen_k)
        assert (place.batch_q, place.batch_k) == (x.batch_q, x.batch_k)
        assert (place.row_q, place.row_k, place.stored_q) == (x.row_q, x.row_k, x.stored_q)
        in_use = e.m_block * schedule.blocks.tile_q < x.seqlen_q
        assert e.n_blocks == (
            schedule.blocks.count(e.m_block, x.seqlen_q, x.seqlen_k) if in_use else 1
        )


@settings(max_examples=40)
@given(schedules(), st.data())
def test_what_a_worker_finds_does_not_depend_on_what_it_had_before(schedule, data):
    total = schedule.total()
    wanted = data.draw(st.integers(0, total + 200))
    before = sorted(data.draw(st.lists(st.integers(0, wanted), max_size=4)))
    cursor = START
    for earlier in before:
        cursor = plain(find)(schedule, HostWarp(), cursor, earlier)
    cursor = plain(find)(schedule, HostWarp(), cursor, wanted)
    direct = plain(find)(schedule, HostWarp(), START, wanted)
    assert (cursor.chunk < schedule.sequences.count) == (wanted < total)
    if wanted < total:
        assert cursor == direct


@settings(max_examples=40)
@given(schedules())
def test_the_longest_come_first(schedule):
    """Sequences within a chunk, tiles within a section of heads."""
    entries = entries_of(schedule)
    for e, following in pairwise(entries):
        if e.index != following.index:
            chunks = e.index // CHUNK, following.index // CHUNK
            assert (
                chunks[0] < chunks[1] or chunks[0] == chunks[1] and e.seqlen_k >= following.seqlen_k
            )
        elif schedule.blocks.ends_early and following.m_block > e.m_block:
            m_blocks = ceil_div(schedule.sequences.at(e.index).stored_q, schedule.blocks.tile_q)
            assert (e.m_block, following.m_block) == (0, m_blocks - 1), (
                "a section ends, another begins"
            )


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=32, max_size=32))
def test_lanes_add_up_what_comes_before_them(pairs):
    values, keys = (np.array(x) for x in zip(*pairs, strict=True))
    found = HostWarp().sum_before(values, keys)
    for lane, key in enumerate(keys):
        before = [v for i, v in enumerate(values) if keys[i] > key or keys[i] == key and i < lane]
        assert found[lane] == sum(before)


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 99))
def test_a_counter_gives_every_tile_to_one_worker(total, workers, seed):
    lists = shared_out(total, workers, seed)
    assert sorted(sum(lists, [])) == list(range(total)) and all(x == sorted(x) for x in lists)
    assert all(x[:1] == ([i] if i < total else []) for i, x in enumerate(lists))


TEN = (8192, 33, 4096, 517, 2048, 129, 3072, 1023, 2819, 256)
LISTS = {
    "ten": TEN,
    "ten, the short ones first": tuple(reversed(TEN)),
    "one long, many short": (60_000,) + (60,) * 100,
    "many short, one long": (8,) * 16 + (8192,),
    "long and short in turn": (8192, 8) * 8,
    "equal": (4096,) * 16,
}


@pytest.mark.parametrize("mask", [(False, None, None), (True, None, None), (True, 1024, None)])
@pytest.mark.parametrize("name", LISTS)
def test_workers_are_equally_busy_and_few_keys_are_live(name, mask):
    """Whoever is free takes the next tile, which takes its blocks and one; an H200 has 60 MB of L2."""
    lengths = LISTS[name]
    cu = list(accumulate(lengths, initial=0))
    sequences = Sequences(len(lengths), cu[-1], cu[-1], cu, cu)
    section = SEQUENCE_SECTION_BYTES // (4 * 128)
    schedule = VarlenSchedule(KvBlocks(128, 128, *mask), Grid(0, 1, 16, 0), sequences, section)
    free, runs = [(0, i) for i in range(H200_WORKERS)], []
    for e in entries_of(schedule):
        begin, worker = heapq.heappop(free)
        heapq.heappush(free, (begin + e.n_blocks + 1, worker))
        keys = min(e.seqlen_k, e.n_blocks * 128) if mask[1] else e.seqlen_k
        runs.append((begin, begin + e.n_blocks + 1, (e.index, e.head_kv), keys))
    end = max(time for time, _ in free)
    mean = sum(b - a for a, b, *_ in runs) / H200_WORKERS
    assert end <= 1.04 * mean, (end, mean)
    sizes = []
    for moment in np.linspace(0, end, 40, endpoint=False):
        live = {head: keys for a, b, head, keys in runs if a <= moment < b}
        sizes.append(512 * sum(live.values()))
    assert np.mean(sizes) <= max(24 << 20, 4 * 512 * max(lengths))


def test_every_way_to_hand_tiles_out_gives_the_same_bits():
    rng = np.random.default_rng(0)
    lengths = [70, 0, 130, 5]
    cu = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
    q, k, v = (
        torch.from_numpy(rng.standard_normal((205, 2, 64), np.float32)).bfloat16() for _ in range(3)
    )
    keywords = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    config, options = flash4.explain(q, k, v, **keywords).config, options_of(q, k, v, **keywords)
    arrays = [x.float().numpy() for x in (q, k, v)]
    results = [
        simulate_forward(config, *arrays, options, workers, seed)
        for workers, seed in ((1, 0), (2, 1), (3, 2), (3, 3))
    ]
    for out, lse in results[1:]:
        assert (out == results[0][0]).all() and (lse == results[0][1]).all()


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
