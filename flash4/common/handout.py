"""Tiles handed out one by one: a CTA takes the next from a counter, and its ``load`` role tells the others (dual-mode).

What ``load`` knows of a tile stands in a slot of a ring in shared memory until all ``mma`` warps are through with it.
There a tile whose rows outgrew a fixed softmax shift is marked. ``load`` sees the mark when it comes to use the slot
again, and gives out the same tile instead of a new one. At the end it looks at all slots once more before it tells that
no tile is left, and fills those whose tiles are done with nothing.

Of dense calls the number that the counter gives is the tile: all roles decode it by themselves. Of sequences ``load``
looks for the tile and tells all about it.
"""

from dataclasses import dataclass, fields, replace

import cutlass.cute as cute

from flash4.common.geometry import choose, imax
from flash4.common.tiles import Tile
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

    def ask(self, tile):
        """Nothing: the counter is asked when the next tile is."""
        return tile

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


@dataclass(frozen=True)
class DenseEntry:
    """What stands in a slot of the ring of tiles of a dense call, a word for each.

    Attributes:
        kind: ``TILE``, ``NOTHING`` or ``END``.
        index: of the tile in the schedule; behind its last one at the end.
        again: pass in which the tile is worked on.
    """

    kind: object
    index: object
    again: object


@dataclass(frozen=True)
class DenseTile(Tile):
    """A tile of a dense call that was handed out; ``number`` and ``idle`` as in ``varlen.VarlenTile``.

    Attributes:
        idle: 0 while the counter may have tiles left; it counts from 1 on afterwards.
        asked: 1 if the counter was asked for a tile that has not been given out yet.
        answer: what it said, in a form that only slots understand: it may still be on its way.
    """

    number: object = None
    idle: object = None
    asked: object = None
    answer: object = None


@dataclass(frozen=True)
class DenseViews(TileViews):
    """As ``TileViews``, of a ``tiles.TileSchedule``.

    Attributes:
        notes: (warpgroups,) number after that of its last tile that outgrew a fixed shift; None without one.
    """

    notes: object = None

    def lengths(self, tile):
        """(queries, keys) of a tile's sequence."""
        return self.schedule.lengths(tile)

    def place(self, tile):
        """Where a tile lies."""
        return self.schedule.place(tile)

    def wave(self, tile):
        """How many tiles the worker had before."""
        return tile.number

    def note_outgrown(self, tile, warpgroup):
        """Remember that a tile outgrew its shift, for the next of this warpgroup of the CTA."""
        self.notes[warpgroup] = tile.number + 1

    def noted(self, warpgroup):
        """Number after that of a warpgroup's last tile that outgrew its shift; -1 if none has."""
        return self.notes[warpgroup]

    def after_outgrown(self, tile, warpgroup):
        """1 if the warpgroup's tile before this one outgrew its shift, else 0."""
        return choose(self.noted(warpgroup) == tile.number, 1, 0)

    def _tile(self, number, entry, **more) -> DenseTile:
        tile = self.schedule.at(entry.index)
        known = {field.name: getattr(tile, field.name) for field in fields(tile)}
        return DenseTile(**known | {"number": number, "again": entry.again} | more)


@dataclass(frozen=True)
class GivenDense(DenseViews):
    """The tiles of ``load`` of a dense call.

    Each worker asks the counter until it says that no tile is left, and not again: together they ask as often as there are
    tiles. So the counter that wraps behind the last answer is zero for the next launch.
    """

    def first(self):
        """Return the worker's first tile."""
        zero = self.slots.zero
        return self._next(zero, zero, zero, zero)

    def ask(self, tile):
        """Ask the counter for the tile after ``tile``, unless there is one already, or none."""
        return replace(tile, answer=self._ask(tile), asked=choose(tile.idle == 0, 1, 0))

    @cute.jit
    def _ask(self, tile):
        answer = tile.answer
        if (tile.idle == 0) & (tile.asked == 0):
            answer = self.slots.ask()
        return answer

    def next(self, tile):
        """Return the tile after ``tile``."""
        return self._next(tile.number + 1, tile.idle, tile.asked, tile.answer)

    @cute.jit
    def _next(self, number, idle, asked, answer):
        slots, total = self.slots, self.schedule.grid.total
        last = 1 + (slots.count if self.redoes else 1)
        kind, index, again = slots.zero + NOTHING, slots.zero, slots.zero
        while kind == NOTHING:
            slots.acquire(number)
            index, again = slots.marked(number)
            left = idle == 0
            if (again == 0) & left:
                index = slots.answered(number, answer)
                asked = slots.zero
            found = (again > 0) | (left & (index < total))
            idle = choose(found, choose(left, 0, 1), imax(idle, 1) + 1)
            kind = choose(found, TILE, choose(idle == last, END, NOTHING))
            index = choose(found, index, total)
            if kind == NOTHING:
                slots.post_nothing(number)
                number = number + 1
        entry = DenseEntry(kind, index, again)
        slots.post(number, entry)
        return self._tile(number, entry, idle=idle, asked=asked, answer=answer)


@dataclass(frozen=True)
class ToldDense(DenseViews, ToldTiles):
    """The tiles of an ``mma`` warp of a dense call, which is told."""
