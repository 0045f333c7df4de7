"""Whose slot a number is: a search through sequences by all lanes of a warp (dual-mode, see ``geometry``)."""

from dataclasses import dataclass

import cutlass.cute as cute

from flash4.common.geometry import ceil_div, imin
from flash4.common.graph import WARP


@dataclass(frozen=True)
class Search:
    """A step of the search for the sequence that a slot belongs to: each lane looks at one of those left."""

    side: object  # kv_sequences.Side
    stride: int  # sequences that are looked at as one
    low: object
    left: object
    step: object
    slot: object

    def reaches(self, lane):
        """Whether what this lane looks at begins at the slot, or before it."""
        part = lane * self.step
        index = imin((self.low + part) * self.stride, self.side.count - 1)
        return (part < self.left) & (self.side.slot(index) <= self.slot)


@cute.jit
def last_before(side, warp, slot, stride):
    """Number of the last run of ``stride`` sequences that begins at a slot or before it; by a whole warp."""
    low, left = warp.zero, warp.zero + ceil_div(side.count, stride)
    while left > 1:
        step = ceil_div(left, WARP)
        search = Search(side, stride, low, left, step, slot)
        passed = (warp.how_many(warp.each(search.reaches, warp.zero)) - 1) * step
        low = low + passed
        left = imin(left - passed, step)
    return low
