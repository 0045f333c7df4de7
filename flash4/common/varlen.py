"""Sequences of different lengths, and the order in which a persistent grid visits their tiles (dual-mode, see
``geometry``).

Lengths are known on the GPU only, so that every worker finds its share there: tiles stand in a row, each with an
estimated cost, and worker w of W takes those that begin in [w, w + 1) / W of the total. No worker has more than its
part of the total and one tile.
"""

from dataclasses import dataclass

from flash4.common.geometry import KvBlocks, ceil_div, choose, imax, imin, narrow, wide
from flash4.common.tiles import Grid, Place

TILE_COST = 1  # of a tile's prologue and store, in blocks


@dataclass(frozen=True)
class Sequence:
    """Where one sequence lies, and how long it is.

    Attributes:
        batch: its number in the call; any for rows around the sequences.
        batch_q: batch entry of q; 0 if it is packed.
        batch_k: batch entry of k and v; 0 if they are packed.
        row_q: its first row in packed q, else 0.
        row_k: its first row in packed k and v, else 0.
        stored_q: rows that it has in q.
        seqlen_q: rows of those that are in use.
        seqlen_k: keys in use.
    """

    batch: object
    batch_q: object
    batch_k: object
    row_q: object
    row_k: object
    stored_q: object
    seqlen_q: object
    seqlen_k: object


@dataclass(frozen=True)
class Sequences:
    """All sequences of a call; a tensor is None where the call has none.

    Rows of packed q that lie before the first and behind the last sequence are sequences too, without keys, so that
    every row gets a result. Numbers beyond what is stored are cut.

    Attributes:
        batch: sequences of the call.
        rows_q: queries stored, of each batch entry or of packed q.
        rows_k: keys stored, of each batch entry or of packed k and v.
        cu_q: (batch + 1,) rows where sequences begin and end in packed q.
        cu_k: (batch + 1,) the same of packed k and v.
        used_q: (batch,) queries in use.
        used_k: (batch,) keys in use.
    """

    batch: object
    rows_q: object
    rows_k: object
    cu_q: object = None
    cu_k: object = None
    used_q: object = None
    used_k: object = None

    @property
    def count(self):
        """Number of sequences, with the rows around those of packed q."""
        return self.batch if self.cu_q is None else self.batch + 2

    def at(self, index) -> Sequence:
        """Sequence number ``index`` of ``count``; any number is safe to ask for."""
        if self.cu_q is None:
            batch, outside = imin(index, self.batch - 1), None
            row_q, stored_q = 0, self.rows_q
        else:
            batch = imax(imin(index - 1, self.batch - 1), 0)
            before, behind = index < 1, index > self.batch
            begin, end = _span(self.cu_q, batch, self.rows_q)
            outside = before | behind
            row_q = choose(before, 0, choose(behind, end, begin))
            stored_q = choose(before, begin, choose(behind, self.rows_q, end)) - row_q
        row_k, seqlen_k = 0, self.rows_k
        if self.cu_k is not None:
            row_k, end = _span(self.cu_k, batch, self.rows_k)
            seqlen_k = end - row_k
        seqlen_q = stored_q
        if self.used_q is not None:
            seqlen_q = imax(imin(self.used_q[batch], seqlen_q), 0)
        if self.used_k is not None:
            seqlen_k = imax(imin(self.used_k[batch], seqlen_k), 0)
        if outside is not None:
            seqlen_q, seqlen_k = (choose(outside, 0, length) for length in (seqlen_q, seqlen_k))
        return Sequence(
            batch=batch,
            batch_q=batch if self.cu_q is None else 0,
            batch_k=batch if self.cu_k is None else 0,
            row_q=row_q,
            row_k=row_k,
            stored_q=stored_q,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
        )


def _span(cu_seqlens, batch, rows):
    """(first row, one past the last) of a packed sequence, within the rows that there are."""
    begin = imax(imin(cu_seqlens[batch], rows), 0)
    return begin, imax(imin(cu_seqlens[batch + 1], rows), begin)


@dataclass(frozen=True)
class Share:
    """What one worker takes of all tiles: from one place on, before another.

    Attributes:
        sequence: of its first tile.
        within: number of its first tile in that sequence.
        end_sequence: of the first tile that is not its own.
        end_within: number of that tile in its sequence.
    """

    sequence: object
    within: object
    end_sequence: object
    end_within: object


@dataclass(frozen=True)
class VarlenTile:
    """One unit of work; names as in ``tiles.Tile``, ``tiles.Place`` and ``Sequence``.

    Attributes:
        index: number of its sequence.
        within: number of the tile in its sequence.
        place: where it lies, or None where that is decoded anew when it is asked for.
    """

    valid: object
    index: object
    within: object
    m_block: object
    n_blocks: object
    first_block: object
    seqlen_q: object
    seqlen_k: object
    place: object


@dataclass(frozen=True)
class VarlenSchedule:
    """The tiles of one worker, in order.

    Tiles of one sequence stand head by head; where queries see different numbers of keys, long and short tiles of a
    head alternate, so that any part of them costs about what their mean says. A sequence without rows has one tile,
    which stores nothing.

    Attributes:
        blocks: visiting rule of KV blocks; static but for the sides of a window.
        grid: groups and KV heads; the rest is not used.
        sequences: of the call.
        share: of this worker; None while it is not known.
        keeps_place: a tile keeps its place, which costs registers; otherwise ``place`` decodes it, which costs time.
    """

    blocks: KvBlocks
    grid: Grid
    sequences: Sequences
    share: object = None
    keeps_place: bool = True

    def lengths(self, tile):
        """(queries, keys) in use of a tile's sequence."""
        return tile.seqlen_q, tile.seqlen_k

    def place(self, tile) -> Place:
        """Where a tile lies."""
        if self.keeps_place:
            return tile.place
        return self._place(self.sequences.at(tile.index), tile.within)

    def _place(self, sequence: Sequence, within) -> Place:
        head = within // self._m_blocks(sequence)
        head_kv = head // self.grid.groups
        return Place(
            group=head - head_kv * self.grid.groups,
            head_kv=head_kv,
            batch=sequence.batch,
            batch_q=sequence.batch_q,
            batch_k=sequence.batch_k,
            row_q=sequence.row_q,
            row_k=sequence.row_k,
            stored_q=sequence.stored_q,
        )

    def _m_blocks(self, sequence: Sequence):
        return imax(ceil_div(sequence.stored_q, self.blocks.tile_q), 1)

    def _tiles_of(self, sequence: Sequence):
        m_blocks = ceil_div(sequence.stored_q, self.blocks.tile_q)
        return imax(m_blocks * self.grid.groups * self.grid.heads_kv, 1)

    def _tile_cost(self, sequence: Sequence):
        """Estimated mean cost of a sequence's tiles, in quarters of a block, rounded up."""
        tile_q, lengths = self.blocks.tile_q, (sequence.seqlen_q, sequence.seqlen_k)
        stored, used = (ceil_div(n, tile_q) for n in (sequence.stored_q, sequence.seqlen_q))
        quarters = 4 * self.blocks.count(0, *lengths)
        if self.blocks.ends_early or self.blocks.begins_late:
            quarters = sum(self.blocks.count(used * i // 8, *lengths) for i in (1, 3, 5, 7))
        if self.sequences.used_q is not None:  # tiles without queries in use visit one block
            total = wide(used) * quarters + 4 * (stored - used)
            quarters = narrow(ceil_div(total, imax(stored, 1)))
        return quarters + 4 * TILE_COST

    def cost(self, index):
        """Estimated cost of a sequence."""
        sequence = self.sequences.at(index)
        return wide(self._tiles_of(sequence)) * self._tile_cost(sequence)

    def tile_at(self, index, cost):
        """(sequence, number of a tile) of the first tile that begins at or behind ``cost`` within sequence ``index``."""
        within = narrow(ceil_div(cost, self._tile_cost(self.sequences.at(index))))
        return self._carry_over(index, within)

    def first(self):
        """Return the worker's first tile."""
        return self.at(self.share.sequence, self.share.within)

    def next(self, tile):
        """Return the worker's next tile."""
        return self.at(*self._carry_over(tile.index, tile.within + 1))

    def _carry_over(self, index, within):
        """(sequence, number of a tile): the next sequence's first if this one has not as many."""
        over = within >= self._tiles_of(self.sequences.at(index))
        return choose(over, index + 1, index), choose(over, 0, within)

    def at(self, index, within):
        """Decode a place: a sequence, and a number of a tile in it."""
        sequence, blocks, share = self.sequences.at(index), self.blocks, self.share
        m_blocks = self._m_blocks(sequence)
        m_block = within - within // m_blocks * m_blocks
        if blocks.ends_early:
            half = m_block // 2
            m_block = choose(m_block - 2 * half > 0, half, m_blocks - 1 - half)
        lengths = (sequence.seqlen_q, sequence.seqlen_k)
        has_queries = imin(imax(sequence.seqlen_q - m_block * blocks.tile_q, 0), 1)
        return VarlenTile(
            valid=(index < share.end_sequence)
            | ((index == share.end_sequence) & (within < share.end_within)),
            index=index,
            within=within,
            m_block=m_block,
            n_blocks=imax(blocks.count(m_block, *lengths) * has_queries, 1),
            first_block=blocks.first(m_block, *lengths),
            seqlen_q=sequence.seqlen_q,
            seqlen_k=sequence.seqlen_k,
            place=self._place(sequence, within) if self.keeps_place else None,
        )
