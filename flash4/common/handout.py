"""Tiles handed out one by one: a CTA takes the next from a counter, and its ``load`` role tells the others (dual-mode).

What ``load`` knows of a tile stands in a slot of a ring in shared memory until all ``mma`` warps are through with it.
There a tile whose rows outgrew a fixed softmax shift is marked. ``load`` sees the mark when it comes to use the slot
again, and gives out the same tile instead of a new one. At the end it looks at all slots once more before it tells that
no tile is left, and fills those whose tiles are done with nothing.
"""

from dataclasses import dataclass

import cutlass.cute as cute

from flash4.common.geometry import choose
from flash4.common.varlen import CHUNK, Cursor, VarlenSchedule, VarlenTile

END, TILE, NOTHING = 0, 1, 2  # kinds of entries


@cute.jit
def find(tiles, warp, cursor, wanted):
    """Cursor at the sequence with tile ``wanted``; in a chunk behind the last if there is none.

    Args:
        tiles: ``VarlenSchedule``.
        warp: whose lanes look at a sequence each.
        cursor: where to begin, not behind the wanted tile.
        wanted: number of a tile among all.
    """
    count, chunk, chunk_begin = tiles.sequences.count, cursor.chunk, cursor.chunk_begin
    sizes = warp.each(tiles.tiles_at, chunk)
    size = warp.sum(sizes)
    while (chunk_begin + size <= wanted) & (chunk < count):
        chunk_begin = chunk_begin + size
        chunk = chunk + CHUNK
        sizes = warp.each(tiles.tiles_at, chunk)
        size = warp.sum(sizes)
    begins = chunk_begin + warp.sum_before(sizes, warp.each(tiles.keys_at, chunk))
    lane = warp.which((begins <= wanted) & (wanted < begins + sizes))
    begin, size = warp.value_of(begins, lane), warp.value_of(sizes, lane)
    return Cursor(chunk, chunk_begin, chunk + lane, begin, begin + size)


@dataclass(frozen=True)
class TileViews:
    """What verbs of any role ask of its tiles."""

    schedule: VarlenSchedule
    slots: object  # of the ring of tiles
    redoes: bool  # tiles may be marked

    @property
    def blocks(self):
        """Visiting rule of KV blocks."""
        return self.schedule.blocks

    @property
    def grid(self):
        """Groups and KV heads."""
        return self.schedule.grid

    def lengths(self, tile):
        """(queries, keys) in use of a tile's sequence."""
        return tile.seqlen_q, tile.seqlen_k

    def place(self, tile):
        """Where a tile lies; read anew, since registers are scarce."""
        return self.schedule.place(self.slots.read(tile.number))

    def mark(self, tile, again):
        """Have a tile worked on in a later pass."""
        self.slots.mark(tile.number, again)

    def _tile(self, number, entry, cursor=None, idle=None) -> VarlenTile:
        return VarlenTile(
            valid=entry.kind == TILE,
            number=number,
            again=entry.again,
            m_block=entry.m_block,
            n_blocks=entry.n_blocks,
            first_block=entry.first_block,
            seqlen_q=entry.seqlen_q,
            seqlen_k=entry.seqlen_k,
            cursor=cursor,
            idle=idle,
        )


@dataclass(frozen=True)
class GivenTiles(TileViews):
    """The tiles of ``load``, which finds them."""

    def first(self):
        """Return the worker's first tile."""
        zero = self.slots.zero
        return self._next(zero, Cursor(zero, zero, zero, zero, zero), zero)

    def next(self, tile):
        """Return the tile after ``tile``."""
        return self._next(tile.number + 1, tile.cursor, tile.idle)

    @cute.jit
    def _next(self, number, cursor, idle):
        schedule, slots = self.schedule, self.slots
        count, last = schedule.sequences.count, slots.count if self.redoes else 1
        kind, index, within, again = slots.zero + NOTHING, slots.zero, slots.zero, slots.zero
        while kind == NOTHING:
            slots.acquire(number)
            index, within, again = slots.marked(number)
            if (again == 0) & (cursor.chunk < count):
                wanted = slots.draw(number)
                if wanted >= cursor.end:
                    cursor = slots.find(schedule, cursor, wanted)
                index, within = cursor.index, wanted - cursor.begin
            found = (again > 0) | (cursor.chunk < count)
            idle = choose(found, 0, idle + 1)
            kind = choose(found, TILE, choose(idle == last, END, NOTHING))
            within = choose(found, within, 0)
            if kind == NOTHING:
                slots.post_nothing(number)
                number = number + 1
        entry = schedule.at(index, within, kind, again)
        slots.post(number, entry)
        return self._tile(number, entry, cursor, idle)


@dataclass(frozen=True)
class ToldTiles(TileViews):
    """The tiles of an ``mma`` warp, which is told."""

    def first(self):
        """Return the worker's first tile."""
        return self._next(self.slots.zero)

    def next(self, tile):
        """Return the tile after ``tile``, whose slot is given back."""
        self.slots.release(tile.number)
        return self._next(tile.number + 1)

    @cute.jit
    def _next(self, number):
        slots = self.slots
        slots.wait(number)
        if self.redoes:
            while slots.kind(number) == NOTHING:
                slots.release(number)
                number = number + 1
                slots.wait(number)
            if slots.again(number) > 0:
                slots.wait_stores()  # what is stored again must be stored last
        return self._tile(number, slots.read(number))
