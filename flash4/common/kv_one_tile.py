"""Tiles of calls that have sequences of different lengths, in CuTe.

A warp finds them, and leaves them in shared memory, where each role reads what it needs. Where each CTA has one tile, it does
so while others set up barriers.
"""

from dataclasses import dataclass, fields, replace

import cutlass.cute as cute
from cutlass import Boolean, Int32

from flash4.common.graph import WARP
from flash4.common.kv_sequences import SequenceSchedule, SequenceTile, find_tile
from flash4.common.kv_tiles import KvPlace, KvSteps
from flash4.common.warps import Warp

FOUND = tuple(field.name for field in fields(SequenceTile))
PLACE = tuple(field.name for field in fields(KvPlace))
TILE_WORDS = len(FOUND) + len(PLACE)


def find_into(words, schedule: SequenceSchedule, lane, number):
    """Look for the tile of a number, and put it into ``words``; by a whole warp. Returns whether there is one."""
    tile = find_tile(schedule, Warp(Int32(lane)), number)
    place = schedule.where(tile)
    for i, name in enumerate(FOUND):
        words[i] = Int32(getattr(tile, name))
    for i, name in enumerate(PLACE):
        words[len(FOUND) + i] = Int32(getattr(place, name))
    return tile.valid


def _word(words, i):
    """A word, which is the same for all threads."""
    return cute.arch.make_warp_uniform(words[i])


def tile_in(words) -> dict:
    """Fields of the ``SequenceTile`` in ``words``."""
    found = {name: _word(words, i) for i, name in enumerate(FOUND)}
    return found | {"valid": found["valid"] != 0}


def place_in(words, schedule: SequenceSchedule) -> KvPlace:
    """Where that tile lies. What is not packed has static zeros."""
    found = {name: _word(words, len(FOUND) + i) for i, name in enumerate(PLACE)}
    static = set()
    if schedule.queries.cu is not None:
        static |= {"entry_q"}
    else:
        static |= {"row_q", "slot_q"}
    static |= {"entry_k"} if schedule.keys.cu is not None else {"row_k"}
    return KvPlace(**found | dict.fromkeys(static, 0))


@dataclass(frozen=True)
class OneTile(KvSteps):
    """A CTA's only tile."""

    schedule: SequenceSchedule
    words: cute.Tensor  # (TILE_WORDS,) int32 in shared memory

    @property
    def backwards(self):
        """Whether a tile visits its blocks from the last to the first."""
        return self.schedule.backwards

    @property
    def blocks(self):
        """Visiting rule of query blocks."""
        return self.schedule.blocks

    @property
    def grid(self):
        """KV heads, and query heads of each."""
        return self.schedule.grid

    def find(self, thread, number):
        """Look for the tile of a number; by a whole warp, before all roles meet."""
        find_into(self.words, self.schedule, thread % WARP, number)

    def first(self):
        """Return the CTA's tile."""
        return SequenceTile(**tile_in(self.words))

    def next(self, tile):
        """Return a tile that is not valid."""
        return replace(tile, valid=Boolean(False))

    def lengths(self, tile):
        """(queries, keys) in use of the tile's sequence."""
        return tile.seqlen_q, tile.seqlen_k

    def is_seen(self, tile):
        """See ``KvSteps``."""
        return tile.seen > 0

    def where(self, tile) -> KvPlace:
        """Where the tile lies; read anew, since registers are scarce."""
        return place_in(self.words, self.schedule)
