"""Sequences of different lengths in the backward: where they lie, which memory is theirs, and the order of tiles
(dual-mode, see ``geometry``).

Packed sequences begin anywhere, blocks of rows do not: a sequence has whole blocks, or *slots*, of its own for what is
summed and for what is copied in bulk. Those of a sequence that begins at row b, the ``i``-th of all, begin at slot
``b // tile + i``. That needs no sums over the sequences before it, no two of them meet, and none is left without.

Numbers of tiles come from the same formula, so that each CTA finds its own tile by itself.
"""

from dataclasses import dataclass

import cutlass.cute as cute

from flash4.common.geometry import QueryBlocks, ceil_div, choose, imax, imin
from flash4.common.graph import WARP
from flash4.common.kv_tiles import KvGrid, KvPlace, KvSteps, slots_of
from flash4.common.varlen import CHUNK


@dataclass(frozen=True)
class Rows:
    """Where the rows of one sequence lie in the tensors of one side.

    Attributes:
        batch: its number in the call; any for rows around the sequences.
        entry: batch entry of the tensors; 0 if they are packed.
        begin: its first row there.
        stored: rows that it has.
        used: those of them that are in use.
        slot: its first slot in that entry.
    """

    batch: object
    entry: object
    begin: object
    stored: object
    used: object
    slot: object


@dataclass(frozen=True)
class Side:
    """Rows of all sequences, as queries or as keys, and their slots. A tensor is None where the call has none.

    Rows of packed tensors before the first and behind the last sequence are sequences too, of which no row is in use.
    Numbers beyond what is stored are cut.

    Attributes:
        batch: sequences of the call.
        rows: rows stored, of each batch entry or of packed tensors.
        tile: rows of a slot.
        cu: (batch + 1,) rows where sequences begin and end in packed tensors.
        used: (batch,) rows in use.
    """

    batch: object
    rows: object
    tile: int
    cu: object = None
    used: object = None

    @property
    def count(self):
        """Number of sequences, with the rows around them."""
        return self.batch if self.cu is None else self.batch + 2

    @property
    def slots(self):
        """Slots of all sequences."""
        return slots_of(self.batch, self.rows, self.tile, self.cu is not None)

    def slot(self, index):
        """First slot of sequence ``index`` of ``count``, among those of all batch entries."""
        if self.cu is None:
            return index * ceil_div(self.rows, self.tile)
        return self._begin(index) // self.tile + index

    def _begin(self, index):
        """First row of a packed sequence; that of number ``count`` is behind the last row."""
        inside = imax(imin(index - 1, self.batch), 0)
        begin = imax(imin(self.cu[inside], self.rows), 0)
        return choose(index < 1, 0, choose(index > self.batch + 1, self.rows, begin))

    def number_of(self, batch):
        """Number among ``count`` of a sequence of the call."""
        return batch if self.cu is None else batch + 1

    def at(self, index) -> Rows:
        """Sequence ``index`` of ``count``; any number is safe to ask for."""
        if self.cu is None:
            batch, entry, begin, stored = imax(imin(index, self.batch - 1), 0), None, 0, self.rows
        else:
            batch, entry = imax(imin(index - 1, self.batch - 1), 0), 0
            begin = self._begin(index)
            stored = imax(self._begin(index + 1) - begin, 0)
        used = stored
        if self.used is not None:
            used = imax(imin(self.used[batch], stored), 0)
        if self.cu is not None:
            used = choose((index < 1) | (index > self.batch), 0, used)
        return Rows(
            batch=batch,
            entry=batch if entry is None else entry,
            begin=begin,
            stored=stored,
            used=used,
            slot=0 if self.cu is None else self.slot(index),
        )

    def blocks_at(self, index):
        """Slots that a sequence fills; 0 behind the last one."""
        return choose(index < self.count, ceil_div(self.at(index).stored, self.tile), 0)


@dataclass(frozen=True)
class RowBlock:
    """One slot of the queries.

    Attributes:
        batch: number of its sequence in the call; any for rows around the sequences.
        first: its first row in the sequence.
        entry: batch entry of its rows.
        begin: its first row there.
        stored: rows from there on that its sequence has; may exceed the slot, or be negative.
        used: the same of those in use.
    """

    batch: object
    first: object
    entry: object
    begin: object
    stored: object
    used: object


@cute.jit
def row_block(side, warp, slot, entry):
    """Rows of a slot of a batch entry; by a whole warp."""
    index = entry
    if side.cu is not None:
        index = warp.last_before(side, slot, 1)
    rows = side.at(index)
    first = (slot - rows.slot) * side.tile
    stored, used = rows.stored - first, rows.used - first
    return RowBlock(rows.batch, first, rows.entry, rows.begin + first, stored, used)


def visited_rows(blocks: QueryBlocks, keys: Side, rows: RowBlock):
    """Rows in use of a slot of the queries as far as a tile of keys visits it, which the sequence's first one does, or none.

    No window limits the left side.
    """
    seqlen_k = keys.at(keys.number_of(rows.batch)).used
    begin = blocks.query_begin(0, rows.first + rows.used, seqlen_k)
    return choose(rows.first + blocks.tile_m > begin, rows.used, 0)


@dataclass(frozen=True)
class SequenceTile:
    """One unit of work; names as in ``kv_tiles.KvTile``.

    Attributes:
        index: number of its sequence among those of the keys.
        seen: 1 if its sequence has queries, and the tile a key in use; else 0, and one step of nothing but zeros.
        seqlen_q: queries in use, 0 of a tile that is not seen.
        seqlen_k: keys in use.
    """

    valid: object
    index: object
    n_block: object
    head_kv: object
    first_block: object
    steps: object
    seen: object
    seqlen_q: object
    seqlen_k: object


@dataclass(frozen=True)
class SequenceSchedule(KvSteps):
    """Order of the tiles of sequences: each CTA takes the tile of its own number.

    Sequences come in chunks of ``CHUNK`` as they are given, within a chunk from the longest to the shortest. The heads
    of each are cut into sections, in which the tiles of all heads run from the first keys to the last, under a causal
    mask from the longest to the shortest. Some numbers at the end of a chunk have no tile.

    Attributes:
        blocks: visiting rule of query blocks; static but for the sides of a window.
        grid: KV heads and query heads of each; the rest is not used.
        queries: where queries lie.
        keys: where keys and values lie.
        section: tiles that run together, about a wave.
        least_heads: of a section, if there are so many.
        backwards: a tile visits its blocks from the last to the first; static.
    """

    blocks: QueryBlocks
    grid: KvGrid
    queries: Side
    keys: Side
    section: object
    least_heads: int
    backwards: bool = False

    @property
    def total(self):
        """Number of tiles, those included that do not exist."""
        return self.keys.slots * self.grid.heads_kv

    def tiles_at(self, index):
        """Number of tiles of a sequence."""
        return self.keys.blocks_at(index) * self.grid.heads_kv

    def queries_at(self, index):
        """Queries of a sequence: the longer, the longer do its tiles take."""
        return self._queries_of(self.keys.at(index)).used

    def _queries_of(self, keys: Rows) -> Rows:
        return self.queries.at(self.queries.number_of(keys.batch))

    def lengths(self, tile):
        """(queries, keys) in use of a tile's sequence."""
        return tile.seqlen_q, tile.seqlen_k

    def is_seen(self, tile):
        """See ``KvSteps``."""
        return tile.seen > 0

    def _heads_per_section(self, n_blocks):
        heads_kv = self.grid.heads_kv
        most = imax(imin(imax(ceil_div(self.section, n_blocks), self.least_heads), heads_kv), 1)
        return ceil_div(heads_kv, ceil_div(heads_kv, most))

    def at(self, valid, index, within) -> SequenceTile:
        """Decode a place: a sequence, and a number of a tile in it. Any numbers are safe to ask for."""
        keys, blocks, ratio = self.keys.at(index), self.blocks, self.grid.ratio
        n_blocks = imax(ceil_div(keys.stored, blocks.tile_n), 1)
        heads = self._heads_per_section(n_blocks)
        section = within // (heads * n_blocks)
        rest = within - section * heads * n_blocks
        here = imax(imin(heads, self.grid.heads_kv - section * heads), 1)
        n_block = rest // here
        queries, lengths = self._queries_of(keys).used, keys.used
        seen = imin(imin(imax(lengths - n_block * blocks.tile_n, 0), queries), 1)
        queries = queries * seen
        first = blocks.first(n_block, queries, lengths) * seen
        count = imax(blocks.count(n_block, queries, lengths) * seen, 1)
        return SequenceTile(
            valid=valid,
            index=index,
            n_block=n_block,
            head_kv=section * heads + rest - n_block * here,
            first_block=first,
            steps=count * ratio,
            seen=seen,
            seqlen_q=queries,
            seqlen_k=lengths,
        )

    def where(self, tile) -> KvPlace:
        """Where a tile lies."""
        keys = self.keys.at(tile.index)
        queries = self._queries_of(keys)
        return KvPlace(
            batch=keys.batch,
            entry_q=queries.entry,
            entry_k=keys.entry,
            row_q=queries.begin,
            row_k=keys.begin,
            stored_k=keys.stored,
            slot_q=queries.slot,
        )


@cute.jit
def find_tile(schedule, warp, number):
    """Tile of a number, which is not valid if there is none; by a whole warp."""
    keys, heads_kv = schedule.keys, schedule.grid.heads_kv
    chunk = warp.last_before(keys, number // heads_kv, CHUNK) * CHUNK
    sizes = warp.each(schedule.tiles_at, chunk)
    before = warp.sum_before(sizes, warp.each(schedule.queries_at, chunk))
    begins = keys.slot(chunk) * heads_kv + before
    lane = warp.which((begins <= number) & (number < begins + sizes))
    within = number - warp.value_of(begins, lane)
    return schedule.at(lane < WARP, chunk + lane, within)
