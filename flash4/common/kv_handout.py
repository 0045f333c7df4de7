"""Tiles of the backward handed out one by one: a CTA's ``load`` role draws the next from a counter, and tells the others
through a ring of numbers in shared memory (dual-mode, see ``geometry``).

So whoever is done first takes the next tile, as when each has a CTA of its own; but loads of the next begin before the last
one's results are stored.
"""

from dataclasses import dataclass

from flash4.common.kv_tiles import KvTile, KvTileSchedule


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
