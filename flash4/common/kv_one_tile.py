"""The tile of a CTA whose call has sequences of different lengths, in CuTe.

One warp finds it while others set up barriers, and leaves it in shared memory, where each role reads what it needs.
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


@dataclass(frozen=True)
class OneTile(KvSteps):
    """A CTA's only tile."""

    schedule: SequenceSchedule
    words: cute.Tensor  # (TILE_WORDS,) int32 in shared memory

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
        tile = find_tile(self.schedule, Warp(Int32(thread % WARP)), number)
        place, words = self.schedule.where(tile), self.words
        for i, name in enumerate(FOUND):
            words[i] = Int32(getattr(tile, name))
        for i, name in enumerate(PLACE):
            words[len(FOUND) + i] = Int32(getattr(place, name))

    def first(self):
        """Return the CTA's tile."""
        words = {name: self._read(i) for i, name in enumerate(FOUND)}
        return SequenceTile(**words | {"valid": words["valid"] != 0})

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
        """Where the tile lies; read anew, since registers are scarce. What is not packed has static zeros."""
        words = {name: self._read(len(FOUND) + i) for i, name in enumerate(PLACE)}
        static = set()
        if self.schedule.queries.cu is not None:
            static |= {"entry_q"}
        else:
            static |= {"row_q", "slot_q"}
        static |= {"entry_k"} if self.schedule.keys.cu is not None else {"row_k"}
        return KvPlace(**words | dict.fromkeys(static, 0))

    def _read(self, i):
        """A word, which is the same for all threads."""
        return cute.arch.make_warp_uniform(self.words[i])
