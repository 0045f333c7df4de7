"""Tiles of the backward: every pair of query and key once, masks where they must be, every tile once."""

from collections import Counter
from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash4.common.fragments import accumulator_place, dq_place
from flash4.common.geometry import QueryBlocks, ceil_div
from flash4.common.kv_tiles import KvGrid, KvTileSchedule
from flash4.passes.bwd_config import FinishConfig


def sees(blocks, query, key, seqlen_q, seqlen_k):
    """Whether a query sees a key, from the definition."""
    place, left, right = query + seqlen_k - seqlen_q, blocks.left, blocks.right
    right = 0 if blocks.causal else right
    return (
        key < seqlen_k
        and (right is None or key <= place + right)
        and (left is None or key >= place - left)
    )


def check_tile(blocks, n_block, seqlen_q, seqlen_k):
    """A tile visits the blocks of queries that see one of its keys, and masks where one does not see all."""
    m, n, lengths = blocks.tile_m, blocks.tile_n, (seqlen_q, seqlen_k)
    keys = range(n_block * n, (n_block + 1) * n)
    first, count = blocks.first(n_block, *lengths), blocks.count(n_block, *lengths)
    begin, end = blocks.unmasked(n_block, *lengths)
    every = ceil_div(seqlen_q, m)
    assert 0 <= first < every and 1 <= count <= every - first and 0 <= begin <= end <= count
    anything = False
    for block in range(every):
        queries = range(block * m, min((block + 1) * m, seqlen_q))
        seen = [[sees(blocks, q, key, *lengths) for key in keys] for q in queries]
        visited = first <= block < first + count
        assert visited or not any(map(any, seen))
        anything |= any(map(any, seen))
        unmasked = begin <= block - first < end
        assert not unmasked or all(map(all, seen))
        if visited and not unmasked:  # no mask without a need, of a tile with all its keys
            assert not all(map(all, seen)) or keys[-1] >= seqlen_k
    if anything:  # no block without a query that sees a key
        for block in (first, first + count - 1):
            queries = range(block * m, min((block + 1) * m, seqlen_q))
            assert any(sees(blocks, q, key, *lengths) for q in queries for key in keys)
    else:
        assert (count, begin, end) in ((1, 0, 0), (1, 1, 1))
    for key in keys:
        bounds = blocks.query_begin(key, *lengths), blocks.query_end(key, *lengths)
        for q in range(first * m, (first + count) * m):
            inside = bounds[0] <= q and (q < bounds[1] or not blocks.ends_early)
            # Those behind the last query are hidden by their LSE.
            assert inside == sees(blocks, q, key, *lengths) or q >= seqlen_q


LIMITS = st.one_of(st.none(), st.integers(0, 70))


@given(
    st.sampled_from([(4, 8), (8, 8), (5, 8), (10, 16), (16, 8)]),
    st.booleans(),
    st.integers(1, 60),
    st.integers(1, 60),
    LIMITS,
    LIMITS,
)
def test_tiles_visit_what_sees_them(tile, causal, seqlen_q, seqlen_k, left, right):
    blocks = QueryBlocks(*tile, causal, left, None if causal else right)
    for n_block in range(ceil_div(seqlen_k, blocks.tile_n)):
        check_tile(blocks, n_block, seqlen_q, seqlen_k)


def test_small_tiles_exhaustively():
    windows = [(True, left, None) for left in (None, 0, 2)]
    windows += [(False, left, right) for left in (None, 0, 3) for right in (None, 1, 4)]
    for m, n, window, seqlen_q, seqlen_k in product(
        (2, 3), (2, 4), windows, range(1, 9), range(1, 9)
    ):
        for n_block in range(ceil_div(seqlen_k, n)):
            check_tile(QueryBlocks(m, n, *window), n_block, seqlen_q, seqlen_k)


@given(
    st.booleans(), LIMITS, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3),
    st.integers(1, 8), st.integers(1, 9),
)  # fmt: skip
def test_every_step_once(causal, left, heads_kv, batch, ratio, section, ctas):
    seqlen_q, seqlen_k, blocks = 37, 53, QueryBlocks(4, 8, causal, left)
    lengths, grid = (seqlen_q, seqlen_k), KvGrid(ceil_div(seqlen_k, 8), heads_kv, batch, ratio)
    found, order, loads = Counter(), [], [0] * ctas
    for start in range(ctas):
        tiles = KvTileSchedule(blocks, grid, section, start, ctas, *lengths)
        tile = tiles.first()
        while tile.valid:
            order.append(tile)
            loads[start] += tile.steps
            phases = tiles.phases(tile)
            assert len(phases) == (2 if left is None else 3)
            steps = [(i, phase.masked) for phase in phases for i in range(phase.begin, phase.end)]
            assert [i for i, _ in steps] == list(range(tile.steps))
            begin, end = blocks.unmasked(tile.n_block, *lengths)
            for i, masked in steps:
                block, head = tiles.place(tile, i)
                assert head // ratio == tile.head_kv and block >= tile.first_block
                assert masked != (begin <= block - tile.first_block < end)
                found[tile.batch, head, block, tile.n_block] += 1
            tile = tiles.next(tile)
    assert set(found.values()) == {1}
    pairs = sum(blocks.count(n, *lengths) for n in range(grid.n_blocks))
    assert len(found) == pairs * batch * heads_kv * ratio
    assert len(order) == grid.total
    assert tiles.imbalance() == pytest.approx(max(loads) * ctas / sum(loads))


GROUPS = st.integers(0, 4).map(lambda group: QueryBlocks(5, 8, True, group=group))


@given(
    st.builds(partial(QueryBlocks, 5, 8), st.just(False), LIMITS, LIMITS)
    | st.builds(partial(QueryBlocks, 5, 8), st.just(True), LIMITS)
    | GROUPS,
    st.integers(1, 100), st.integers(1, 100), st.integers(1, 4),
)  # fmt: skip
def test_turns_count_up_and_wait_for_tiles_that_have_begun(blocks, seqlen_q, seqlen_k, section):
    """Tiles that a block's queries see have the turns 0, 1, 2, ..., each after those with lower indices."""
    grid = KvGrid(ceil_div(seqlen_k, 8), 2, 2, 2)
    tiles = KvTileSchedule(blocks, grid, section, 0, 1, seqlen_q, seqlen_k)
    turns = {}
    for index in range(grid.total):
        tile = tiles.at(index)
        for i in range(tile.steps):
            block, head = tiles.place(tile, i)
            queries = range(block * 5, min((block + 1) * 5, seqlen_q))
            keys = range(tile.n_block * 8, (tile.n_block + 1) * 8)
            seen = any(sees(blocks, q, key, seqlen_q, seqlen_k) for q in queries for key in keys)
            rank = tiles.rank(tile, i)
            assert rank >= 0 or not seen
            if rank >= 0:
                turns.setdefault((tile.batch, head, block), []).append(rank)
    assert all(ranks == list(range(len(ranks))) for ranks in turns.values())


@given(GROUPS, st.integers(1, 300), st.integers(1, 3))
def test_groups_of_tiles_descend_and_ascend(blocks, seqlen_k, section):
    """Each tile of each head once; of a section group after group."""
    grid = KvGrid(ceil_div(seqlen_k, 8), 3, 2, 1)
    tiles = KvTileSchedule(blocks, grid, section, 0, 1, 40, seqlen_k)
    of_head = {}
    for index in range(grid.total):
        tile = tiles.at(index)
        of_head.setdefault((tile.batch, tile.head_kv), []).append(tile.n_block)
    size = blocks.group or grid.n_blocks
    for order in of_head.values():
        for number, begin in enumerate(range(0, grid.n_blocks, size)):
            down = bool(blocks.group) and number % 2 == 0
            group = range(begin, min(begin + size, grid.n_blocks))
            assert order[begin : begin + size] == sorted(group, reverse=down)
    assert len(of_head) == grid.head_count


def test_long_tiles_come_first_within_a_section():
    grid = KvGrid(n_blocks=4, heads_kv=3, batch=2, ratio=1)
    tiles = KvTileSchedule(QueryBlocks(4, 8, True), grid, 2, 0, 1, 32, 32)
    order = [tiles.at(i) for i in range(grid.total)]
    heads = [(tile.batch, tile.head_kv, tile.n_block) for tile in order[:8]]
    assert heads == [(0, head, n) for n in range(4) for head in range(2)]
    assert [tile.steps for tile in order[:8]] == [8, 8, 6, 6, 4, 4, 2, 2]
    assert not tiles.at(grid.total).valid


def test_an_accumulator_has_every_place_once():
    places = [
        accumulator_place(thread, group, number)
        for thread in range(128)
        for group in range(5)
        for number in range(4)
    ]
    assert sorted(places) == list(product(range(64), range(40)))


@pytest.mark.parametrize(
    "config",
    [FinishConfig(True, *c) for c in ((64, 64, False), (64, 96, False), (128, 64, False), (80, 128, True))]
    + [FinishConfig(True, 64, d, False, dq_turned=True) for d in (128, 192, 256)],
    ids=str,
)  # fmt: skip
def test_a_block_of_dq_has_every_place_once(config):
    places = [
        dq_place(config, part, thread, group, number)
        for part in range(2)
        for thread in range(128)
        for group in range(config.tile_m * config.tile_d // 1024)
        for number in range(4)
    ]
    assert sorted(places) == list(product(range(config.tile_m), range(config.tile_d)))
