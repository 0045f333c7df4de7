"""Tiles of sequences of different lengths: each CTA finds the tile of its own number by itself (dual-mode).

A sequence has as many numbers as it may have tiles, wherever it begins in packed queries (``kv_sequences.Side``). Of those
of 32 sequences the ones with the most keys come first, so that what comes last is short; some numbers have no tile.
"""

from dataclasses import dataclass

import cutlass.cute as cute

from flash4.common.graph import WARP
from flash4.common.kv_sequences import Side
from flash4.common.tiles import Place
from flash4.common.varlen import CHUNK, VarlenSchedule


@dataclass(frozen=True)
class FoundTile:
    """One unit of work; names as in ``tiles.Tile``, ``index`` and ``within`` as in ``varlen.Entry``."""

    valid: object
    index: object
    within: object
    m_block: object
    n_blocks: object
    first_block: object
    seqlen_q: object
    seqlen_k: object


@dataclass(frozen=True)
class FoundTiles:
    """The one tile of a CTA.

    Attributes:
        schedule: order of all tiles.
        warp: whose lanes look at a sequence each.
        number: of the CTA.
    """

    schedule: VarlenSchedule
    warp: object
    number: object

    @property
    def blocks(self):
        """Visiting rule of KV blocks."""
        return self.schedule.blocks

    @property
    def grid(self):
        """Groups and KV heads."""
        return self.schedule.grid

    @property
    def total(self):
        """Numbers of tiles, those included that have none."""
        return queries_of(self.schedule).slots * self.grid.groups * self.grid.heads_kv

    def lengths(self, tile):
        """(queries, keys) in use of a tile's sequence."""
        return tile.seqlen_q, tile.seqlen_k

    def place(self, tile) -> Place:
        """Where a tile lies; decoded anew, since registers are scarce."""
        return self.schedule.place(self.schedule.at(tile.index, tile.within, 0, 0))

    def find(self):
        """See ``find``."""
        return find(self.schedule, self.warp, self.number)

    def first(self) -> FoundTile:
        """Return the tile; it is not valid if there is none of this number."""
        index, within, valid = self.find()
        entry = self.schedule.at(index, within, 0, 0)
        return FoundTile(
            valid=valid,
            index=index,
            within=within,
            m_block=entry.m_block,
            n_blocks=entry.n_blocks,
            first_block=entry.first_block,
            seqlen_q=entry.seqlen_q,
            seqlen_k=entry.seqlen_k,
        )


def queries_of(schedule: VarlenSchedule) -> Side:
    """Queries of all sequences, by which tiles are numbered."""
    sequences = schedule.sequences
    return Side(sequences.batch, sequences.rows_q, schedule.blocks.tile_q, sequences.cu_q)


@cute.jit
def find(schedule, warp, number):
    """(sequence, tile in it, whether there is one) of a number; by a whole warp."""
    queries, heads = queries_of(schedule), schedule.grid.groups * schedule.grid.heads_kv
    chunk = warp.last_before(queries, number // heads, CHUNK) * CHUNK
    sizes = warp.each(schedule.tiles_at, chunk)
    before = warp.sum_before(sizes, warp.each(schedule.keys_at, chunk))
    begins = queries.slot(chunk) * heads + before
    lane = warp.which((begins <= number) & (number < begins + sizes))
    return chunk + lane, number - warp.value_of(begins, lane), lane < WARP
