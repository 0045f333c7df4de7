"""Block ranges, masks and tile order against brute force, and the same functions as the DSL traces them."""

import re
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flash4 import reference
from flash4.common.geometry import KvBlocks, ceil_div, imax, imin
from flash4.common.tiles import Divisors, Grid, TileSchedule, grid_of
from flash4.dispatch import choose_section, plan_forward
from flash4.jit.compile import compile_kernel
from flash4.problem import AttentionProblem
from flash4.sm90.fwd_config import ForwardConfig, choose_config

H200_WORKERS = 132

lengths = st.one_of(st.integers(1, 40), st.integers(1, 3000))
tile_sizes = st.one_of(st.integers(1, 8), st.sampled_from([16, 64, 80, 112, 128, 192, 256]))


# (causal, left, right) of KvBlocks.
MASKS = ((False, None, None), (True, None, None), (True, 2, None), (False, 3, 1), (False, None, 2))
MASKS += ((False, 0, None), (True, 0, None), (False, 1000, 1000), (False, 1, 7))
masks = st.one_of(
    st.tuples(st.booleans(), st.none(), st.none()),
    st.tuples(st.just(True), st.integers(0, 3000), st.none()),
    st.tuples(st.just(False), *[st.one_of(st.none(), st.integers(0, 3000))] * 2),
    st.tuples(st.just(False), *[st.sampled_from([0, 1, 2**30 - 1])] * 2),
)


def visible_range(blocks, queries, seqlen_q, seqlen_k):
    """(first, one past the last) key that each query sees, by the definition; equal if there is none."""
    position = queries + seqlen_k - seqlen_q
    begin = np.zeros_like(position) if blocks.left is None else position - blocks.left
    end = np.full_like(position, seqlen_k)
    if blocks.causal or blocks.right is not None:
        end = position + 1 + (blocks.right or 0)
    begin, end = np.clip(begin, 0, seqlen_k), np.clip(end, 0, seqlen_k)
    return begin, np.maximum(begin, end)


def check_tile(blocks, m_block, seqlen_q, seqlen_k):
    """Compare what one tile visits, and what it leaves unmasked, with the visible keys of its queries."""
    first_query = m_block * blocks.tile_q
    queries = np.arange(first_query, min(first_query + blocks.tile_q, seqlen_q))
    begins, ends = visible_range(blocks, queries, seqlen_q, seqlen_k)
    first, count = (f(m_block, seqlen_q, seqlen_k) for f in (blocks.first, blocks.count))
    assert first >= 0 and count >= 1
    sees = begins < ends
    if sees.any():
        begin, end = begins[sees].min(), ends[sees].max()
        assert first * blocks.tile_n <= begin, "a visible key lies before the visited blocks"
        assert end <= (first + count) * blocks.tile_n, (
            "a visible key lies behind the visited blocks"
        )
        assert begin < (first + 1) * blocks.tile_n, "the first block is visited for nothing"
        assert (first + count - 1) * blocks.tile_n < end, "the last block is visited for nothing"
    else:
        assert count == 1
    unmasked = blocks.unmasked(first_query, seqlen_q, seqlen_k)
    assert 0 <= unmasked <= first + count
    assert unmasked * blocks.tile_n <= ends.min(), "a block that needs a mask has none"
    if not blocks.begins_late:
        assert (unmasked + 1) * blocks.tile_n >= ends.min(), "a block is masked for nothing"
    if ends.min() > 0:
        assert unmasked * blocks.tile_n < ends.min(), "a query has its last key in no masked block"
    unmasked_from = blocks.unmasked_from(first_query + blocks.tile_q - 1, seqlen_q, seqlen_k)
    assert unmasked_from * blocks.tile_n >= begins.max(), "a block that needs a mask has none"


@pytest.mark.parametrize(("causal", "left", "right"), MASKS)
def test_key_range_is_the_reference_mask(causal, left, right):
    blocks = KvBlocks(4, 4, causal, left, right)
    for seqlen_q, seqlen_k in product(range(1, 10), range(1, 10)):
        # With equal scores and the identity for V, out is above 0 exactly where a key is seen.
        q = torch.zeros(1, seqlen_q, 1, 1)
        k, v = torch.zeros(1, seqlen_k, 1, 1), torch.eye(seqlen_k).view(1, seqlen_k, 1, seqlen_k)
        out = reference.attention(q, k, v, causal=causal, window_size=(left, right))
        seen, keys = (out[0, :, 0] > 0).numpy(), np.arange(seqlen_k)
        begins, ends = visible_range(blocks, np.arange(seqlen_q), seqlen_q, seqlen_k)
        assert (seen == (keys >= begins[:, None]) & (keys < ends[:, None])).all()
        for query in range(seqlen_q):
            begin, end = (f(query, seqlen_q, seqlen_k) for f in (blocks.key_begin, blocks.key_end))
            where = (seqlen_q, seqlen_k, query)
            assert (seen[query] == (keys >= begin) & (keys < end)).all(), where


@pytest.mark.parametrize(("causal", "left", "right"), MASKS)
def test_every_small_tile(causal, left, right):
    for tile_q, tile_n, seqlen_q, seqlen_k in product(
        (1, 2, 3, 5), (1, 2, 4, 7), range(1, 13), range(1, 13)
    ):
        blocks = KvBlocks(tile_q, tile_n, causal, left, right)
        for m_block in range(ceil_div(seqlen_q, tile_q)):
            check_tile(blocks, m_block, seqlen_q, seqlen_k)


@given(tile_sizes, tile_sizes, masks, lengths, lengths)
@example(128, 128, (True, None, None), 128, 1)  # rows without keys fill whole tiles
@example(128, 128, (True, None, None), 1, 129)
@example(128, 64, (False, 32, 64), 129, 40)
def test_random_tiles(tile_q, tile_n, mask, seqlen_q, seqlen_k):
    blocks = KvBlocks(tile_q, tile_n, *mask)
    m_blocks = ceil_div(seqlen_q, tile_q)
    for m_block in {0, m_blocks // 2, m_blocks - 1}:
        check_tile(blocks, m_block, seqlen_q, seqlen_k)


@given(tile_sizes, tile_sizes, st.booleans(), lengths, lengths, st.integers(0, 3000))
def test_blocks_of_a_single_query(tile_q, tile_n, causal, seqlen_q, seqlen_k, query):
    """Without a window."""
    blocks = KvBlocks(tile_q, tile_n, causal)
    until = blocks.until(query, seqlen_q, seqlen_k)
    end = blocks.key_end(min(query, seqlen_q - 1), seqlen_q, seqlen_k)
    assert until == max(1, -(-end // tile_n))
    assert until <= blocks.until(query + 1, seqlen_q, seqlen_k), "later queries see no fewer keys"
    if query < seqlen_q:
        m_block = query // tile_q
        assert until <= blocks.count(m_block, seqlen_q, seqlen_k)
        assert blocks.unmasked(query, seqlen_q, seqlen_k) <= until


@given(
    dims=st.sampled_from([(64, 64), (128, 128), (256, 256)]),
    mask=masks,
    pack=st.sampled_from([1, 2, 8, 64]),
    seqlen_q=lengths,
    seqlen_k=lengths,
)
def test_phases_visit_every_block_once_and_mask_what_is_cut(dims, mask, pack, seqlen_q, seqlen_k):
    causal, left, right = mask
    facts = {"causal": causal, "window_left": left is not None, "window_right": right is not None}
    problem = AttentionProblem(torch.bfloat16, 1, seqlen_q, seqlen_k, 1, 1, *dims, **facts)
    config = replace(choose_config(problem)[0], pack=pack)
    blocks = config.blocks(left, right)
    grid = Grid(ceil_div(seqlen_q, config.tile_q), 1, 1, 1)
    tiles = TileSchedule(blocks, grid, 1, 0, 1, seqlen_q, seqlen_k)
    for tile in (tiles.at(index) for index in {0, grid.total // 2, grid.total - 1}):
        for warpgroup in range(config.mma_warpgroups):
            first_query = config.first_query(tile, warpgroup)
            queries = np.arange(first_query, min(first_query + 64 // pack, seqlen_q))
            begins, ends = visible_range(blocks, queries, seqlen_q, seqlen_k)
            unseen = config.unseen_blocks(tile, warpgroup, tiles)
            assert 0 <= unseen < tile.n_blocks
            end = tile.first_block + tile.n_blocks
            assert (ends <= (end - unseen) * config.tile_n).all(), "a visible block is skipped"
            passed = config.passed_blocks(tile, warpgroup, tiles)
            assert 0 <= passed < tile.n_blocks - unseen
            assert (begins >= (tile.first_block + passed) * config.tile_n).all() or not passed
            at = unseen + 1
            for phase in config.phases(tile, warpgroup, tiles):
                assert phase.begin == at and phase.end >= at, "blocks are left out or visited twice"
                at = phase.end
                assert phase.masked or not phase.left_only
                if phase.begin == phase.end:
                    continue
                if not phase.masked:
                    assert (begins <= (end - phase.end) * config.tile_n).all(), "cut at the left"
                if phase.left_only or not phase.masked:
                    assert (ends >= (end - phase.begin) * config.tile_n).all(), "cut at the right"
            assert at == tile.n_blocks - passed


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1), st.integers(1, 2**31))
def test_integer_helpers(a, b, c):
    assert imin(a, b) == min(a, b) and imax(a, b) == max(a, b)
    assert type(imin(a, b)) is int
    assert ceil_div(abs(a), c) == -(-abs(a) // c)


@given(
    tile_m=st.sampled_from([64, 128, 192, 256]),
    pack=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    ratio=st.integers(1, 128),
    seqlen_q=st.integers(1, 400),
)
def test_packed_rows_cover_every_query_and_head_once(tile_m, pack, ratio, seqlen_q):
    config = ForwardConfig(True, 64, 64, tile_m, 64, False, pack=pack)
    problem = AttentionProblem(torch.float16, 1, seqlen_q, 1, ratio, 1, 64, 64)
    grid = grid_of(problem, config.tile_q, pack)
    rows = np.arange(tile_m)  # row r holds query r // pack of head r % pack
    seen = np.zeros((ratio, seqlen_q), int)
    for m_block, group in product(range(grid.m_blocks), range(grid.groups)):
        query, head = m_block * config.tile_q + rows // pack, group * pack + rows % pack
        inside = (query < seqlen_q) & (head < ratio)
        assert inside.any(), "a tile without rows"
        np.add.at(seen, (head[inside], query[inside]), 1)
        if m_block == grid.m_blocks - 1:
            assert query.max() >= seqlen_q - 1
    assert (seen == 1).all()


small = st.integers(1, 5)


@st.composite
def schedules(draw):
    grid = Grid(draw(st.integers(1, 12)), draw(small), draw(small), draw(small))
    blocks = KvBlocks(draw(st.sampled_from([1, 3, 64, 128])), 64, *draw(masks))
    last_tile = draw(st.integers(1, blocks.tile_q))
    seqlen_q = (grid.m_blocks - 1) * blocks.tile_q + last_tile
    section = draw(st.integers(1, grid.head_count + 2))
    step = draw(st.one_of(st.integers(1, 9), st.integers(1, 140)))
    return TileSchedule(blocks, grid, section, 0, step, seqlen_q, draw(st.integers(1, 900)))


def places(tiles):
    return [(t.m_block, t.group, t.head_kv, t.batch) for t in tiles]


def check_schedule(schedule):
    """Check that every tile is visited once, that n_blocks is right, and that imbalance() is what happens."""
    grid = schedule.grid
    every = set(
        product(range(grid.m_blocks), range(grid.groups), range(grid.heads_kv), range(grid.batch))
    )
    decoded = [schedule.at(index) for index in range(grid.total)]
    assert all(tile.valid for tile in decoded)
    assert sorted(places(decoded)) == sorted(every), "at() is not a bijection"

    workers = schedule.workers()
    assert len(workers) == schedule.step
    visited = [tile for tiles in workers for tile in tiles]
    assert sorted(places(visited)) == sorted(every), "tiles are left out or visited twice"
    waves = {len(tiles) for tiles in workers}
    assert max(waves) == -(-grid.total // schedule.step) and max(waves) - min(waves) <= 1
    for tile in visited:
        expected = schedule.blocks.count(tile.m_block, schedule.seqlen_q, schedule.seqlen_k)
        assert tile.n_blocks == expected >= 1
        first = schedule.blocks.first(tile.m_block, schedule.seqlen_q, schedule.seqlen_k)
        assert tile.first_block == first
    loads = [sum(tile.n_blocks + 1 for tile in tiles) for tiles in workers]
    busiest = max(loads) * schedule.step / sum(loads)
    assert schedule.imbalance() == pytest.approx(busiest, rel=1e-12)


def test_every_small_schedule():
    for m_blocks, groups, heads_kv, section, step, causal in product(
        (1, 2, 5), (1, 3), (1, 2), (1, 2, 4, 7), (1, 2, 3, 8), (False, True)
    ):
        grid = Grid(m_blocks, groups, heads_kv, 2)
        check_schedule(
            TileSchedule(KvBlocks(2, 3, causal), grid, section, 0, step, 2 * m_blocks, 5)
        )


@given(schedules())
def test_random_schedules(schedule):
    check_schedule(schedule)


@given(schedules(), st.integers(0, 10_000))
def test_decoding_past_the_end_is_harmless(schedule, beyond):
    tile = schedule.at(schedule.grid.total + beyond)
    assert not tile.valid
    assert tile.n_blocks >= 1 or tile.m_block < 0


@dataclass(frozen=True)
class Exact:
    """Divides what a kernel's divisors can."""

    number: int

    def __post_init__(self):
        assert 1 <= self.number < 2**31

    def __rfloordiv__(self, x):
        assert 0 <= x < 2**31
        return x // self.number


def prepared(schedule, change):
    """The schedule with divisors of its own."""
    divisors = Divisors.of(schedule.grid, schedule.section, schedule.step)
    return replace(schedule, divisors=divisors.each(change))


@given(schedules(), st.integers(0, 10_000))
def test_divisors_divide_integers_from_0_on_by_what_is_not_0(schedule, beyond):
    by_divisors, total = prepared(schedule, Exact), schedule.grid.total
    for index in {*range(min(total, 40)), total // 2, total - 1, total, total + beyond}:
        tile, following = by_divisors.at(index), by_divisors.next(by_divisors.at(index))
        for found, wanted in (
            (tile, schedule.at(index)),
            (following, schedule.next(schedule.at(index))),
        ):
            assert (found.index, found.valid) == (wanted.index, wanted.valid)
            if wanted.valid:
                assert found == wanted
            else:  # outside the tensors
                in_rows = 0 <= found.m_block < schedule.grid.m_blocks
                assert not in_rows or found.batch >= schedule.grid.batch
        assert by_divisors.wave(index) == schedule.wave(index)


@given(schedules())
def test_tiles_of_a_section_stay_together_longest_first(schedule):
    grid, tiles_per_section = schedule.grid, schedule.section * schedule.grid.m_blocks
    for begin in range(0, grid.total, tiles_per_section):
        end = min(begin + tiles_per_section, grid.total)
        tiles = [schedule.at(index) for index in range(begin, end)]
        heads = {(t.group, t.head_kv, t.batch) for t in tiles}
        assert len(heads) <= schedule.section
        lengths = [t.n_blocks for t in tiles]
        longest_first = schedule.blocks.ends_early and not schedule.blocks.begins_late
        assert not longest_first or lengths == sorted(lengths, reverse=True)


TRAINING = [
    (seqlen, head_dim, heads)
    for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
    for head_dim, heads in ((64, 32), (128, 16), (256, 8))
]


@pytest.mark.parametrize(("seqlen", "head_dim", "heads"), TRAINING)
def test_causal_training_shapes_are_balanced(seqlen, head_dim, heads):
    problem = AttentionProblem(
        torch.bfloat16, 16384 // seqlen, seqlen, seqlen, heads, heads, head_dim, head_dim, True
    )
    plan = plan_forward(problem, "sm_90a", H200_WORKERS)
    schedule = plan.schedule(H200_WORKERS)
    imbalance = schedule.handed_out()[1] if plan.config.handed_out else schedule.imbalance()
    assert imbalance <= 1.05, f"the busiest worker has {imbalance:.3f} of the mean: {plan}"


@given(
    st.sampled_from([(64, 32), (128, 16), (256, 8)]),
    st.integers(1, 40_000),
    st.integers(1, 40_000),
    st.integers(1, 64),
    st.booleans(),
)
def test_sections_are_in_range_and_no_worse_than_one(dims, seqlen_q, seqlen_k, batch, causal):
    head_dim, heads = dims
    problem = AttentionProblem(
        torch.bfloat16, batch, seqlen_q, seqlen_k, heads, heads, head_dim, head_dim, causal
    )
    plan = plan_forward(problem, "sm_90a", H200_WORKERS)
    section = choose_section(problem, plan.config, plan.grid, H200_WORKERS)
    assert section == plan.section
    assert 1 <= section <= plan.grid.head_count


def geometry_cases():
    """(KvBlocks, m_block, query, seqlen_q, seqlen_k)."""
    lengths = ((300, 500), (500, 300), (128, 128), (1, 129), (129, 1))
    sides = ((False, None, None), (True, None, None), (True, 70, None), (False, 2**30 - 1, 5))
    return [
        (KvBlocks(tile_q, 112, *mask), seqlen_q // tile_q // 2, seqlen_q // 3, seqlen_q, seqlen_k)
        for tile_q, mask, (seqlen_q, seqlen_k) in product((64, 3), sides, lengths)
    ]


def schedule_cases():
    """(TileSchedule, index): first, middle and last tile, and the ones behind."""
    cases = []
    for causal, section, start in product((False, True), (1, 4, 6), (0, 2)):
        grid = Grid(5, 3, 2, 1)
        schedule = TileSchedule(KvBlocks(64, 64, causal), grid, section, start, 7, 300, 200)
        cases += [(schedule, index) for index in (0, 13, 29, 30, 47)]
    return cases


def geometry_values(case, integer=int):
    """What the functions of one case return; `integer` makes the run-time values."""
    blocks, *numbers = case
    m_block, query, seqlen_q, seqlen_k = (integer(x) for x in numbers)
    sides = (None if side is None else integer(side) for side in (blocks.left, blocks.right))
    blocks = KvBlocks(blocks.tile_q, blocks.tile_n, blocks.causal, *sides)
    return [
        blocks.count(m_block, seqlen_q, seqlen_k),
        blocks.until(query, seqlen_q, seqlen_k),
        blocks.unmasked(query, seqlen_q, seqlen_k),
        blocks.key_end(query, seqlen_q, seqlen_k),
        blocks.key_begin(query, seqlen_q, seqlen_k),
        blocks.first(m_block, seqlen_q, seqlen_k),
        blocks.unmasked_from(query, seqlen_q, seqlen_k),
    ]


def schedule_values(case, integer=int):
    """The decoded tile and its successor's index, as integers."""
    schedule, index = case
    grid = Grid(*(integer(getattr(schedule.grid, n)) for n in Grid.__dataclass_fields__))
    names = ("section", "start", "step", "seqlen_q", "seqlen_k")
    numbers = {name: integer(getattr(schedule, name)) for name in names}
    schedule = replace(schedule, grid=grid, **numbers)
    if schedule.divisors is not None:
        from flash4.common.numerics import Divisor

        schedule = prepared(schedule, int if integer is int else Divisor)
    tile = schedule.at(integer(index))
    following = schedule.next(tile)
    return [
        integer(tile.valid),
        tile.m_block,
        tile.group,
        tile.head_kv,
        tile.batch,
        tile.n_blocks,
        following.index,
    ]


def traced_values(cases):
    """Kernel that stores the values of all cases, computed by the same functions on traced integers."""
    import cutlass
    import cutlass.cute as cute

    class TracedValues:
        def fake_arguments(self):
            size = cute.sym_int()
            out = cute.runtime.make_fake_compact_tensor(cutlass.Int32, (size,), assumed_align=16)
            return out, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)

        @cute.jit
        def __call__(self, out: cute.Tensor, stream):
            self.kernel(out).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

        @cute.kernel
        def kernel(self, out: cute.Tensor):
            self.store(out)

        def store(self, out):
            values_of = geometry_values if isinstance(cases[0][0], KvBlocks) else schedule_values
            values = [value for case in cases for value in values_of(case, cutlass.Int32)]
            for i, value in enumerate(values):
                out[i] = value

    return TracedValues()


def traced_walk(config):
    """Kernel that walks a schedule whose sizes are known at run time only."""
    import cutlass
    import cutlass.cute as cute
    from cutlass import Int32

    class TracedWalk:
        def fake_arguments(self):
            size = cute.sym_int()
            out = cute.runtime.make_fake_compact_tensor(Int32, (size,), assumed_align=16)
            stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
            return (out, *[Int32(1)] * 5, stream)

        @cute.jit
        def __call__(self, out: cute.Tensor, m_blocks: Int32, heads: Int32, section: Int32,
                     seqlen_q: Int32, seqlen_k: Int32, stream):  # fmt: skip
            grid = Grid(m_blocks, heads, heads, heads)
            self.kernel(out, grid, section, (seqlen_q, seqlen_k)).launch(
                grid=(cutlass.min(grid.total, 132), 1, 1), block=(32, 1, 1), stream=stream
            )

        @cute.kernel
        def kernel(self, out: cute.Tensor, grid: Grid, section: Int32, seqlens: tuple):
            worker, _, _ = cute.arch.block_idx()
            workers, _, _ = cute.arch.grid_dim()
            blocks = KvBlocks(*config)
            tiles = TileSchedule(blocks, grid, section, worker, workers, *seqlens)
            tile = tiles.first()
            while tile.valid:
                unmasked = blocks.unmasked(tile.m_block * blocks.tile_q, *seqlens)
                out[tile.index] = tile.n_blocks - unmasked + tile.group + tile.head_kv + tile.batch
                tile = tiles.next(tile)

    return TracedWalk()


def stored_literals(ptx):
    """Int32 values by element, of a PTX whose stores to global memory have only literal operands."""
    values = {}
    stores = re.findall(r"st\.global(?:\.v\d)?\.[bsu]32\s+\[%\w+(?:\+(\d+))?\], \{?([^;}]*)", ptx)
    for offset, operands in stores:
        for i, operand in enumerate(operands.split(",")):
            values[int(offset or 0) // 4 + i] = int(operand)
    return values


@pytest.mark.parametrize("name", ["geometry", "schedule", "schedule with divisors"])
def test_the_dsl_traces_the_same_integers(name, tmp_path):
    cases, values_of = {
        "geometry": (geometry_cases(), geometry_values),
        "schedule": (schedule_cases(), schedule_values),
        "schedule with divisors": (
            [(prepared(schedule, int), index) for schedule, index in schedule_cases()],
            schedule_values,
        ),
    }[name]
    compiled = compile_kernel(f"{__name__}:traced_values", cases, "sm_90a", str(tmp_path))
    # The compiler folds the constants, so that a CPU can read what a GPU would store.
    expected = [value for case in cases for value in values_of(case)]
    assert stored_literals(compiled.__ptx__) == dict(enumerate(expected))


@pytest.mark.parametrize("causal", [False, True])
def test_the_dsl_traces_a_persistent_walk(causal, tmp_path):
    compiled = compile_kernel(f"{__name__}:traced_walk", (96, 112, causal), "sm_90a", str(tmp_path))
    assert "st.global" in compiled.__ptx__
