"""Tiles of sequences of different lengths, as a role of the Blackwell forward gets them."""

from dataclasses import dataclass, fields, replace

import cutlass.cute as cute

from flash4.common.numerics import opaque
from flash4.common.tiles import Grid
from flash4.common.varlen import Share, VarlenSchedule


@dataclass(frozen=True)
class SequenceTiles:
    """A ``VarlenSchedule`` that is decoded anew at every call, from numbers that nothing can be kept of.

    Otherwise the compiler keeps what all roles have in common, such as the reciprocals of divisors, from the start of the
    kernel on: on the stack, as roles have few registers.
    """

    schedule: VarlenSchedule  # without a share
    share: cute.Tensor  # (4,) int32 in shared memory: the worker's share

    def _fresh(self) -> VarlenSchedule:
        schedule = self.schedule
        grid, sequences = schedule.grid, schedule.sequences
        numbers = {name: opaque(getattr(sequences, name)) for name in ("batch", "rows_q", "rows_k")}
        return replace(
            schedule,
            grid=Grid(*(opaque(getattr(grid, field.name)) for field in fields(Grid))),
            sequences=replace(sequences, **numbers),
            share=Share(*(self.share[i] for i in range(4))),
        )

    @property
    def blocks(self):
        """Visiting rule of KV blocks."""
        return self.schedule.blocks

    @property
    def grid(self):
        """Extent of the work."""
        return self.schedule.grid

    def first(self):
        """Return the worker's first tile."""
        return self._fresh().first()

    def next(self, tile):
        """Return the worker's next tile."""
        return self._fresh().next(tile)

    def at(self, index, within):
        """Decode a place: a sequence, and a number of a tile in it."""
        return self._fresh().at(index, within)

    def lengths(self, tile):
        """(queries, keys) in use of a tile's sequence."""
        return self.schedule.lengths(tile)

    def place(self, tile):
        """Where a tile lies."""
        return self._fresh().place(tile)
