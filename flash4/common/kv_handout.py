"""Tiles of the backward handed out one by one: a CTA's ``load`` role draws the next from a counter, and tells the others
through a ring of numbers in shared memory (dual-mode, see ``geometry``).

So whoever is done first takes the next tile, as when each has a CTA of its own; but loads of the next begin before the last
one's results are stored.

Of sequences of different lengths ``load`` looks for the tile of the number, and tells all about it: a slot is given back when its
tile is done.
"""

from dataclasses import dataclass

import cutlass.cute as cute

from flash4.common.geometry import choose
from flash4.common.kv_sequences import SequenceSchedule, SequenceTile
from flash4.common.kv_tiles import KvSteps, KvTile, KvTileSchedule


@dataclass(frozen=True)
class HandedTile(KvTile):
    """A tile that was handed out.

    Attributes:
        number: how many this CTA had before.
    """

    number: object


@dataclass(frozen=True)
class KvTileViews:
    """What verbs of any role ask of its tiles; see ``KvTileSchedule``."""

    schedule: KvTileSchedule
    slots: object  # of the ring of numbers

    @property
    def blocks(self):
        """Visiting rule of query blocks."""
        return self.schedule.blocks

    def lengths(self, tile):
        """(queries, keys) of the tile's sequence."""
        return self.schedule.lengths(tile)

    def where(self, tile):
        """Where the tile lies."""
        return self.schedule.where(tile)

    def place(self, tile, i):
        """(block of queries, query head) of a step."""
        return self.schedule.place(tile, i)

    def is_seen(self, tile):
        """See ``KvSteps``."""
        return self.schedule.is_seen(tile)

    def rank(self, tile, i):
        """How many tiles must have added to dQ of a step before."""
        return self.schedule.rank(tile, i)

    def phases(self, tile):
        """Steps with a mask and without."""
        return self.schedule.phases(tile)

    def _tile(self, number, index) -> HandedTile:
        tile = self.schedule.at(index)
        return HandedTile(
            index=tile.index,
            valid=tile.valid,
            n_block=tile.n_block,
            head_kv=tile.head_kv,
            batch=tile.batch,
            first_block=tile.first_block,
            steps=tile.steps,
            number=number,
        )


@dataclass(frozen=True)
class GivenKvTiles(KvTileViews):
    """The tiles of ``load``, which draws them."""

    def first(self):
        """Return the CTA's first tile."""
        return self._next(self.slots.zero)

    def next(self, tile):
        """Return the tile after ``tile``; not valid if there is none, which the others are told too."""
        return self._next(tile.number + 1)

    def _next(self, number):
        self.slots.acquire(number)
        index = self.slots.draw(number)
        self.slots.post(number, index)
        return self._tile(number, index)


@dataclass(frozen=True)
class ToldKvTiles(KvTileViews):
    """The tiles of the warps that are told."""

    def first(self):
        """Return the CTA's first tile."""
        return self._next(self.slots.zero)

    def next(self, tile):
        """Return the tile after ``tile``."""
        return self._next(tile.number + 1)

    def _next(self, number):
        self.slots.wait(number)
        index = self.slots.read(number)
        self.slots.release(number)
        return self._tile(number, index)


@dataclass(frozen=True)
class HandedSequenceTile(SequenceTile):
    """A tile of sequences that was handed out; ``number`` as of ``HandedTile``."""

    number: object


@dataclass(frozen=True)
class SequenceViews(KvSteps):
    """What verbs of any role ask of tiles of sequences; see ``SequenceSchedule``."""

    schedule: SequenceSchedule
    slots: object  # of the ring of tiles

    @property
    def blocks(self):
        """Visiting rule of query blocks."""
        return self.schedule.blocks

    @property
    def grid(self):
        """KV heads, and query heads of each."""
        return self.schedule.grid

    @property
    def backwards(self):
        """Whether a tile visits its blocks from the last to the first."""
        return self.schedule.backwards

    def lengths(self, tile):
        """(queries, keys) in use of the tile's sequence."""
        return tile.seqlen_q, tile.seqlen_k

    def is_seen(self, tile):
        """See ``KvSteps``."""
        return tile.seen > 0

    def where(self, tile):
        """Where the tile lies; read anew, since registers are scarce."""
        return self.slots.place(self.schedule, tile.number)


@dataclass(frozen=True)
class GivenSequenceTiles(SequenceViews):
    """The tiles of ``load``, which draws numbers and looks for their tiles. Some numbers have none."""

    def first(self):
        """Return the CTA's first tile."""
        zero = self.slots.zero
        return self._next(zero, zero)

    def next(self, tile):
        """Return the tile after ``tile``; not valid if there is none, which the others are told too."""
        return self._next(tile.number + 1, self.slots.zero + 1)

    @cute.jit
    def _next(self, number, drawn):
        slots, looking = self.slots, self.slots.zero + 1
        slots.acquire(number)
        while looking > 0:
            index = slots.draw(drawn)
            found = slots.find(self.schedule, number, index)
            looking = choose(found | (index >= self.schedule.total), 0, 1)
            drawn = drawn + 1
        slots.fill(number)
        return slots.tile(number)


@dataclass(frozen=True)
class ToldSequenceTiles(SequenceViews):
    """The tiles of the warps that are told."""

    def first(self):
        """Return the CTA's first tile."""
        return self._next(self.slots.zero)

    def next(self, tile):
        """Return the tile after ``tile``, whose slot is given back."""
        self.slots.release(tile.number)
        return self._next(tile.number + 1)

    def _next(self, number):
        self.slots.wait(number)
        return self.slots.tile(number)
