"""Blocks of dQ and the order in which CTAs convert them, once all tiles of keys have added to their sums (dual-mode, see
``geometry``)."""

from dataclasses import dataclass

from flash4.common.geometry import ceil_div, imax, imin
from flash4.common.kv_tiles import KvTileSchedule


@dataclass(frozen=True)
class DqBlock:
    """The part of dQ of one MMA warpgroup: of one block of queries of one head.

    Attributes:
        index: position in the order.
        valid: whether the index lies inside it.
        block: block of queries.
        head: query head.
        batch: batch entry.
        part: warpgroup that multiplied it.
        visitors: tiles of keys that add to it.
    """

    index: object
    valid: object
    block: object
    head: object
    batch: object
    part: object
    visitors: object


@dataclass(frozen=True)
class DqBlocks:
    """Order of the blocks: CTA ``start`` of ``step`` converts every ``step``-th.

    It follows the tiles of keys, section of heads by section, so that a block's sums are still in L2. Within a section the
    blocks that are complete first come first: under a causal mask the first ones, which few tiles visit; else those that
    all tiles begin with.

    Attributes:
        schedule: of the tiles of keys; no window limits which blocks they visit.
        parts: of a block; static.
    """

    schedule: KvTileSchedule
    parts: int

    def first(self):
        """Return the CTA's first block."""
        return self.at(self.schedule.start)

    def next(self, block):
        """Return the CTA's block after ``block``."""
        return self.at(block.index + self.schedule.step)

    def at(self, index):
        """Decode an index."""
        tiles = self.schedule
        grid, blocks = tiles.grid, ceil_div(tiles.seqlen_q, tiles.blocks.tile_m)
        total_heads = grid.head_count * grid.ratio
        heads_of_section, count = tiles.section * grid.ratio, index // self.parts
        section = count // (heads_of_section * blocks)
        within = count - section * heads_of_section * blocks
        # At least one head, so that an index behind the last decodes too.
        heads = imax(imin(heads_of_section, total_heads - section * heads_of_section), 1)
        position = within // heads
        head = section * heads_of_section + within - position * heads
        heads_q = grid.heads_kv * grid.ratio
        batch = head // heads_q
        descends = tiles.backwards and not tiles.blocks.causal
        block = blocks - 1 - position if descends else position
        return DqBlock(
            index=index,
            valid=count < total_heads * blocks,
            block=block,
            head=head - batch * heads_q,
            batch=batch,
            part=index - count * self.parts,
            visitors=self._visitors(block),
        )

    def _visitors(self, block):
        """Tiles of keys that visit a block of queries."""
        tiles = self.schedule
        if not tiles.blocks.causal:
            return tiles.grid.n_blocks
        keys = (block + 1) * tiles.blocks.tile_m + tiles.seqlen_k - tiles.seqlen_q
        return imin(ceil_div(imax(keys, 0), tiles.blocks.tile_n), tiles.grid.n_blocks)
