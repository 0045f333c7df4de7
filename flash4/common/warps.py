"""What the lanes of a warp do together to look through sequences, in CuTe; ``sim.handout.HostWarp`` is its twin."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash4.common.graph import WARP
from flash4.common.search import last_before

LANES_AT_A_TIME = 4  # more take more registers


@dataclass(frozen=True)
class Warp:
    """Lanes that look at a sequence each."""

    lane: Int32

    @property
    def zero(self):
        """0, of the type that loops carry."""
        return Int32(0)

    def each(self, of, first):
        """of(first) in the first lane, of(first + 1) in the next, ..."""
        return of(first + self.lane)

    def sum(self, values):
        """Sum over all lanes."""
        return cute.arch.warp_redux_sync(values, "add")

    @cute.jit
    def sum_before(self, values, keys):
        """Sum over the lanes with a larger key, or with the same and a smaller number."""
        total = Int32(0)
        for first in range(0, WARP, LANES_AT_A_TIME):
            for i in cutlass.range_constexpr(LANES_AT_A_TIME):
                lane = first + i
                value, key = (
                    cute.arch.shuffle_sync(values, lane),
                    cute.arch.shuffle_sync(keys, lane),
                )
                before = (key > keys) | ((key == keys) & (self.lane > lane))
                total = total + cutlass.select_(before, value, Int32(0))
        return total

    def which(self, condition):
        """The only lane with a condition; any from 0 to 32 if there is none."""
        lanes = cute.arch.vote_ballot_sync(condition)
        return Int32(cute.arch.popc(lanes - 1))

    def how_many(self, condition):
        """Number of lanes with a condition."""
        return Int32(cute.arch.popc(cute.arch.vote_ballot_sync(condition)))

    def value_of(self, values, lane):
        """Value of a lane."""
        return cute.arch.shuffle_sync(values, lane)

    def last_before(self, side, slot, stride: int):
        """See ``search.last_before``."""
        return last_before(side, self, slot, stride)
