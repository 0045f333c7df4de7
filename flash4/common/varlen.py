"""Sequences of different lengths, and the order of their tiles (dual-mode, see ``geometry``).

Lengths are known on the GPU only; ``handout`` shares the tiles out there.
"""

from dataclasses import dataclass

from flash4.common.geometry import KvBlocks, ceil_div, choose, imax, imin
from flash4.common.tiles import Grid, Place

CHUNK = 32  # sequences that are sorted: one for each lane of a warp
SECTION_HEADS = 3  # fewer heads at a time, and too many workers read the same lines of L2


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
class Cursor:
    """How far a worker has looked through the sequences; numbers of tiles only grow.

    Attributes:
        chunk: first sequence of the chunk that the worker's last tile is in; ``Sequences.count`` or more when no tile
            is left.
        chunk_begin: number of that chunk's first tile among all.
        index: sequence of the worker's last tile.
        begin: number of that sequence's first tile among all.
        end: number of the first tile behind it.
    """

    chunk: object
    chunk_begin: object
    index: object
    begin: object
    end: object


@dataclass(frozen=True)
class VarlenTile:
    """One unit of work; names as in ``tiles.Tile``.

    Attributes:
        number: of the worker's tiles, counted from 0.
        again: 1 if the tile is worked on for the second time.
        cursor: of the role that finds tiles; None in those that are told, as the next.
        idle: slots of the ring of tiles that were looked at since its last tile.
    """

    valid: object
    number: object
    again: object
    m_block: object
    n_blocks: object
    first_block: object
    seqlen_q: object
    seqlen_k: object
    cursor: object = None
    idle: object = None


@dataclass(frozen=True)
class Entry:
    """All that roles need to know of a tile, as it stands in a slot of the ring of tiles, a word for each.

    Attributes:
        kind: ``handout.TILE``, ``NOTHING`` or ``END``.
        index: number of its sequence.
        within: number of the tile in its sequence.
        again: as in ``VarlenTile``, like those that follow.
        group: as in ``tiles.Place``, like those that follow.
    """

    kind: object
    index: object
    within: object
    again: object
    m_block: object
    n_blocks: object
    first_block: object
    seqlen_q: object
    seqlen_k: object
    group: object
    head_kv: object
    batch: object
    row_q: object
    row_k: object
    stored_q: object


@dataclass(frozen=True)
class VarlenSchedule:
    """All tiles of a call in one order, in which ``handout`` gives them to whoever is free.

    Sequences come in chunks of ``CHUNK`` as they are given, within a chunk from the longest to the shortest. The heads
    of each are cut into sections; where queries see different numbers of keys, a section's tiles run from the longest
    to the shortest, over all its heads. So few K and V are live at a time, and what comes last is short.

    Attributes:
        blocks: visiting rule of KV blocks; static but for the sides of a window.
        grid: groups and KV heads; the rest is not used.
        sequences: of the call.
        section: keys of one KV head, or of several together, that may be live at a time.
    """

    blocks: KvBlocks
    grid: Grid
    sequences: Sequences
    section: object

    def tiles_at(self, index):
        """Number of tiles of a sequence; 0 behind the last one."""
        m_blocks = ceil_div(self.sequences.at(index).stored_q, self.blocks.tile_q)
        tiles = m_blocks * self.grid.groups * self.grid.heads_kv
        return choose(index < self.sequences.count, tiles, 0)

    def total(self):
        """Host only: number of all tiles."""
        return sum(self.tiles_at(i) for i in range(self.sequences.count))

    def keys_at(self, index):
        """Keys of a sequence: the longer, the longer do its tiles take."""
        return self.sequences.at(index).seqlen_k

    def _heads_per_section(self, seqlen_k):
        """KV heads of a section, as many in each of a sequence as can be."""
        heads_kv = self.grid.heads_kv
        if (
            not self.blocks.ends_early
        ):  # all tiles cost the same: about one wave is live, whatever comes next
            return imax(SECTION_HEADS // self.grid.groups, 1)
        most = imax(imin(self.section // imax(seqlen_k, 1), heads_kv), 1)
        return ceil_div(heads_kv, ceil_div(heads_kv, most))

    def at(self, index, within, kind, again) -> Entry:
        """Decode a place: a sequence, and a number of a tile in it. Any numbers are safe to ask for."""
        sequence, blocks, groups = self.sequences.at(index), self.blocks, self.grid.groups
        lengths = (sequence.seqlen_q, sequence.seqlen_k)
        m_blocks = imax(ceil_div(sequence.stored_q, blocks.tile_q), 1)
        heads = self._heads_per_section(sequence.seqlen_k) * groups
        section = within // (heads * m_blocks)
        rest = within - section * heads * m_blocks
        first_head = section * heads
        here = imax(imin(heads, groups * self.grid.heads_kv - first_head), 1)
        m_block = rest // here
        head = first_head + rest - m_block * here
        head_kv = head // groups
        if blocks.ends_early:
            m_block = m_blocks - 1 - m_block
        has_queries = imin(imax(sequence.seqlen_q - m_block * blocks.tile_q, 0), 1)
        return Entry(
            kind=kind,
            index=index,
            within=within,
            again=again,
            m_block=m_block,
            n_blocks=imax(blocks.count(m_block, *lengths) * has_queries, 1),
            first_block=blocks.first(m_block, *lengths),
            seqlen_q=sequence.seqlen_q,
            seqlen_k=sequence.seqlen_k,
            group=head - head_kv * groups,
            head_kv=head_kv,
            batch=sequence.batch,
            row_q=sequence.row_q,
            row_k=sequence.row_k,
            stored_q=sequence.stored_q,
        )

    def place(self, entry: Entry) -> Place:
        """Where a tile lies."""
        packed_q, packed_k = self.sequences.cu_q is not None, self.sequences.cu_k is not None
        return Place(
            group=entry.group,
            head_kv=entry.head_kv,
            batch=entry.batch,
            batch_q=0 if packed_q else entry.batch,
            batch_k=0 if packed_k else entry.batch,
            row_q=entry.row_q if packed_q else 0,
            row_k=entry.row_k if packed_k else 0,
            stored_q=entry.stored_q,
        )
