"""Work tiles of the backward and the order in which CTAs take them (dual-mode, see ``geometry``).

One tile is ``tile_n`` keys of one KV head of one batch entry. It visits blocks of queries, of all the query heads that
share its KV head: one (block, head) is a step.
"""

from dataclasses import dataclass

import numpy as np

from flash4.common.geometry import Phase, QueryBlocks, ceil_div, choose, imax, imin


@dataclass(frozen=True)
class KvTile:
    """One unit of work.

    Attributes:
        index: position in the schedule.
        valid: whether the index lies inside the schedule.
        n_block: tile of keys within the sequence.
        head_kv: KV head.
        batch: batch entry.
        first_block: first block of queries that it visits.
        steps: blocks of queries that it visits, times query heads.
    """

    index: object
    valid: object
    n_block: object
    head_kv: object
    batch: object
    first_block: object
    steps: object


@dataclass(frozen=True)
class KvGrid:
    """Extent of the work.

    Attributes:
        n_blocks: tiles of keys per sequence.
        heads_kv: KV heads.
        batch: batch entries.
        ratio: query heads per KV head.
    """

    n_blocks: object
    heads_kv: object
    batch: object
    ratio: object

    @property
    def head_count(self):
        """Independent (batch, KV head) pairs."""
        return self.heads_kv * self.batch

    @property
    def total(self):
        """Number of tiles."""
        return self.n_blocks * self.head_count


@dataclass(frozen=True)
class KvPlace:
    """Where a tile lies in the tensors of a call.

    Attributes:
        batch: number of its sequence in the call.
        entry_q: batch entry of the queries; 0 if they are packed.
        entry_k: batch entry of keys and values; 0 if they are packed.
        row_q: first row of its sequence in packed queries, else 0.
        row_k: first row of its sequence in packed keys, else 0.
        stored_k: rows that its sequence has there.
        slot_q: first block of what is kept for its queries, in ``entry_q``.
    """

    batch: object
    entry_q: object
    entry_k: object
    row_q: object
    row_k: object
    stored_k: object
    slot_q: object


class KvSteps:
    """What verbs of any role ask of the steps of a tile; a schedule has ``blocks``, ``grid`` and ``lengths``."""

    backwards = False  # a tile visits its blocks from the last to the first; static

    def is_seen(self, tile):
        """Whether the tile has a key that exists, and its sequence a query; one that has not masks all of its steps."""
        return True

    def place(self, tile, i):
        """(block of queries, query head) of step ``i``: the heads of a block one after the other.

        So the masked blocks of all heads come first, or last.
        """
        if self.backwards:
            i = tile.steps - 1 - i
        block = i // self.grid.ratio
        head = tile.head_kv * self.grid.ratio + i - block * self.grid.ratio
        return tile.first_block + block, head

    def rank(self, tile, i):
        """How many tiles must have added to dQ of step ``i`` before this one, in a fixed order; negative for one that is not asked.

        They all have lower indices.
        """
        return self.rank_of(tile, self.place(tile, i)[0])

    def rank_of(self, tile, block):
        """The same, of a block of queries."""
        rank = self.blocks.rank(tile.n_block, block, *self.lengths(tile))
        return choose(self.is_seen(tile), rank, -1)

    def has_turn(self, tile, block):
        """Whether the rank of a block that the tile visits is not negative; without windows all are asked, if any is."""
        return self.rank_of(tile, block) >= 0 if self.blocks.ends_early else self.is_seen(tile)

    def phases(self, tile) -> tuple[Phase, ...]:
        """Steps with a mask, those without, and, with a window that limits the left side, again those with a mask.

        Backwards those without come first.
        """
        unmasked = self.blocks.unmasked(tile.n_block, *self.lengths(tile))
        begin, end = (
            choose(self.is_seen(tile), block * self.grid.ratio, tile.steps) for block in unmasked
        )
        if self.backwards:
            return Phase(0, tile.steps - begin, False), Phase(tile.steps - begin, tile.steps, True)
        found = (Phase(0, begin, True), Phase(begin, end, False))
        return (*found, Phase(end, tile.steps, True)) if self.blocks.ends_early else found


@dataclass(frozen=True)
class KvTileSchedule(KvSteps):
    """Order of the tiles: CTA ``start`` of ``step`` takes every ``step``-th.

    Heads are cut into sections of ``section`` heads; within a section the tiles of all its heads run from the longest
    to the shortest, which under a causal mask is from the first keys to the last; or in groups by ``blocks.tile_at``.

    Attributes:
        blocks: visiting rule of query blocks; static.
        grid: extent of the work.
        section: heads per section.
        start: this CTA, 0 <= start < step.
        step: number of CTAs.
        seqlen_q: queries per sequence.
        seqlen_k: keys per sequence.
        backwards: a tile visits its blocks from the last to the first; static.
    """

    blocks: QueryBlocks
    grid: KvGrid
    section: object
    start: object
    step: object
    seqlen_q: object
    seqlen_k: object
    backwards: bool = False

    def first(self):
        """Return the CTA's first tile."""
        return self.at(self.start)

    def next(self, tile):
        """Return the CTA's tile after ``tile``."""
        return self.at(tile.index + self.step)

    def at(self, index):
        """Decode a tile index."""
        grid, lengths = self.grid, (self.seqlen_q, self.seqlen_k)
        tiles_per_section = self.section * grid.n_blocks
        section = index // tiles_per_section
        within = index - section * tiles_per_section
        # At least one head, so that the index behind the last tile decodes too (to a place outside the tensors).
        heads = imax(imin(self.section, grid.head_count - section * self.section), 1)
        position = within // heads
        n_block = self.blocks.tile_at(position, self.seqlen_k)
        head = section * self.section + within - position * heads
        batch = head // grid.heads_kv
        return KvTile(
            index=index,
            valid=index < grid.total,
            n_block=n_block,
            head_kv=head - batch * grid.heads_kv,
            batch=batch,
            first_block=self.blocks.first(n_block, *lengths),
            steps=self.blocks.count(n_block, *lengths) * grid.ratio,
        )

    def imbalance(self) -> float:
        """Host only: the busiest CTA's steps over the mean."""
        lengths = (self.seqlen_q, self.seqlen_k)
        order = (self.blocks.tile_at(i, self.seqlen_k) for i in range(self.grid.n_blocks))
        steps = np.array([self.blocks.count(n_block, *lengths) for n_block in order])
        index = np.arange(self.grid.total)
        section = index // (self.section * self.grid.n_blocks)
        within = index - section * self.section * self.grid.n_blocks
        heads = np.minimum(self.section, self.grid.head_count - section * self.section)
        loads = np.bincount(index % self.step, steps[within // heads], self.step)
        return float(loads.max() * self.step / loads.sum())

    def lengths(self, tile):
        """(queries, keys) of a tile's sequence."""
        return self.seqlen_q, self.seqlen_k

    def where(self, tile) -> KvPlace:
        """Where a tile lies."""
        batch = tile.batch
        return KvPlace(batch, batch, batch, 0, 0, self.seqlen_k, 0)


def slots_of(batch, rows, tile, packed: bool):
    """Blocks of ``tile`` rows that all sequences have: of ``batch`` times ``rows``, or packed in so many; dual-mode.

    Packed ones have more than their rows fill; see ``kv_sequences``.
    """
    return rows // tile + batch + 2 if packed else batch * ceil_div(rows, tile)


def kv_grid_of(problem, tile_n: int) -> KvGrid:
    """Tiles of a problem; where keys are packed, about as many as there are at most, of one long sequence."""
    batch, rows = problem.batch, problem.seqlen_k
    packed = slots_of(batch, batch * rows, tile_n, True)
    return KvGrid(
        n_blocks=packed if problem.cu_k else ceil_div(rows, tile_n),
        heads_kv=problem.heads_kv,
        batch=1 if problem.cu_k else batch,
        ratio=problem.gqa_ratio,
    )
