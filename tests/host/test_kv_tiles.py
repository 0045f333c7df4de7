"""Tiles of the backward: every pair of query and key once, masks where they must be, every tile once."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash4.common.fragments import accumulator_place, dq_place
from flash4.common.geometry import QueryBlocks, ceil_div
from flash4.common.kv_tiles import KvGrid, KvTileSchedule
from flash4.passes.bwd_config import FinishConfig


def sees(query, key, causal, seqlen_q, seqlen_k):
    return key < seqlen_k and (not causal or key <= query + seqlen_k - seqlen_q)


def check_tile(blocks, n_block, seqlen_q, seqlen_k):
    """A tile visits the blocks of queries that see one of its keys, and masks where one does not see all."""
    m, n, lengths = blocks.tile_m, blocks.tile_n, (seqlen_q, seqlen_k)
    keys = range(n_block * n, (n_block + 1) * n)
    first, count = blocks.first(n_block, *lengths), blocks.count(n_block, *lengths)
    masked = blocks.masked(n_block, *lengths)
    assert count >= 1 and 0 <= masked <= count and first + count == ceil_div(seqlen_q, m)
    for block in range(first + count):
        queries = range(block * m, min((block + 1) * m, seqlen_q))
        seen = [[sees(q, key, blocks.causal, *lengths) for key in keys] for q in queries]
        assert any(map(any, seen)) == (block >= first)
        if block >= first:
            assert all(map(all, seen)) or block < first + masked
    # No more than need be: of a tile with all its keys, the last masked block has something to hide.
    if masked and keys[-1] < seqlen_k:
        queries = range((first + masked - 1) * m, min((first + masked) * m, seqlen_q))
        assert not all(sees(q, keys[-1], blocks.causal, *lengths) for q in queries)
    for key in keys:
        begin = blocks.query_begin(key, *lengths)
        for q in range((first + count) * m):  # those behind the last query are hidden by their LSE
            assert (q >= begin) == sees(q, key, blocks.causal, *lengths) or q >= seqlen_q


@given(
    st.sampled_from([(4, 8), (8, 8), (5, 8), (10, 16), (16, 8)]),
    st.booleans(),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_tiles_visit_what_sees_them(tile, causal, seqlen_q, seqlen_k):
    blocks = QueryBlocks(*tile, causal)
    for n_block in range(ceil_div(seqlen_k, blocks.tile_n)):
        check_tile(blocks, n_block, seqlen_q, seqlen_k)


def test_small_tiles_exhaustively():
    for m, n, causal, seqlen_q, seqlen_k in product(
        (2, 3), (2, 4), (False, True), range(1, 9), range(1, 9)
    ):
        for n_block in range(ceil_div(seqlen_k, n)):
            check_tile(QueryBlocks(m, n, causal), n_block, seqlen_q, seqlen_k)


@given(
    st.booleans(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 8),
    st.integers(1, 9),
)  # fmt: skip
def test_every_step_once(causal, heads_kv, batch, ratio, section, ctas):
    seqlen_q, seqlen_k, blocks = 37, 53, QueryBlocks(4, 8, causal)
    grid = KvGrid(ceil_div(seqlen_k, 8), heads_kv, batch, ratio)
    found, order = Counter(), []
    for start in range(ctas):
        tiles = KvTileSchedule(blocks, grid, section, start, ctas, seqlen_q, seqlen_k)
        tile = tiles.first()
        while tile.valid:
            order.append(tile)
            masked, free = tiles.phases(tile)
            assert (masked.begin, masked.end, free.end) == (0, free.begin, tile.steps)
            for i in range(tile.steps):
                block, head = tiles.place(tile, i)
                assert head // ratio == tile.head_kv and block >= tile.first_block
                unmasked = block - tile.first_block >= blocks.masked(
                    tile.n_block, seqlen_q, seqlen_k
                )
                assert unmasked == (i >= masked.end)
                found[tile.batch, head, block, tile.n_block] += 1
            tile = tiles.next(tile)
    assert set(found.values()) == {1}
    pairs = sum(blocks.count(n, seqlen_q, seqlen_k) for n in range(grid.n_blocks))
    assert len(found) == pairs * batch * heads_kv * ratio
    assert len(order) == grid.total


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
    [FinishConfig(True, *c) for c in ((64, 64, False), (64, 96, False), (128, 64, False), (80, 128, True))],
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
