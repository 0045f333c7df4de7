"""Tiles as a role of the Blackwell forward gets them: those of sequences, and those that are worked on again."""

from dataclasses import dataclass, fields, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash4.common.dsl import inline_ptx
from flash4.common.graph import WARP
from flash4.common.numerics import opaque
from flash4.common.shares import Share, SharedSchedule
from flash4.common.tiles import Grid, TileSchedule
from flash4.sm100.fwd_config import MARKS

BARRIER_PASS = 3  # all roles have been through all tiles


@dataclass(frozen=True)
class MarkedTiles:
    """A worker's tiles: all of its schedule, then those that must be worked on again, as a row outgrew a fixed shift.

    Each role steps through them by itself; they meet once in between, when all marks are there. Both CTAs of a pair have
    the marks of both.
    """

    config: cutlass.Constexpr
    schedule: TileSchedule
    marks: cute.Tensor  # (MARKS + 1,) int32 in shared memory

    @property
    def blocks(self):
        """Visiting rule of KV blocks."""
        return self.schedule.blocks

    @property
    def grid(self):
        """Extent of the work."""
        return self.schedule.grid

    def lengths(self, tile):
        """(queries, keys) of a tile's sequence."""
        return self.schedule.lengths(tile)

    def place(self, tile):
        """Where a tile lies."""
        return self.schedule.place(tile)

    def at(self, index):
        """Decode a tile index."""
        return self.schedule.at(index)

    def first(self):
        """Return the worker's first tile."""
        return replace(self.schedule.first(), again=Int32(0))

    @cute.jit
    def next(self, tile):
        """Return the tile after ``tile``."""
        schedule, marks = self.schedule, self.marks
        index, again = schedule.next_index(tile.index), tile.again
        if (index >= schedule.grid.total) & (again == 0):
            cute.arch.cp_async_bulk_wait_group(0)  # what is stored again must be stored last
            self.meet()
            again = Int32(1)
            if marks[MARKS] != 0:
                index = schedule.start
        if again == 1:
            while (index < schedule.grid.total) & (marks[schedule.wave(index) % MARKS] == 0):
                index = schedule.next_index(index)
        return replace(schedule.at(index), again=again)

    def meet(self):
        """Wait for all warps that go through the tiles; in a pair for those without work, too."""
        if self.config.ctas > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            warps = sum(len(role.warps) for role in self.config.graph.roles)
            cute.arch.barrier(barrier_id=BARRIER_PASS, number_of_threads=WARP * warps)

    def mark(self, tile):
        """Have a tile worked on again, and perhaps some others."""
        wave = self.schedule.wave(tile.index) % MARKS
        for at in (wave, MARKS):
            if self.config.ctas == 1:
                self.marks[at] = 1
            else:
                store_in_both(self.marks.iterator + at, 1)


def store_in_both(pointer, number):
    """Store an int32 at a place of the shared memory of both CTAs of a pair."""
    text = "{ .reg .b32 a; mapa.shared::cluster.u32 a, $0, $1; st.shared::cluster.u32 [a], $2; }"
    for rank in (0, 1):
        inline_ptx(
            None, "r,r,r", text, pointer.toint(), Int32(rank), Int32(number), side_effects=True
        )


def with_fresh_numbers(schedule: SharedSchedule) -> SharedSchedule:
    """A schedule from copies of its numbers that nothing can be kept of."""
    grid, sequences = schedule.grid, schedule.sequences
    numbers = {name: opaque(getattr(sequences, name)) for name in ("batch", "rows_q", "rows_k")}
    grid = Grid(*(opaque(getattr(grid, field.name)) for field in fields(Grid)))
    return replace(schedule, grid=grid, sequences=replace(sequences, **numbers))


@dataclass(frozen=True)
class SequenceTiles:
    """A ``SharedSchedule`` that is decoded anew at every call, from numbers that nothing can be kept of.

    Otherwise the compiler keeps what all roles have in common, such as the reciprocals of divisors, from the start of the
    kernel on: on the stack, as roles have few registers.
    """

    schedule: SharedSchedule  # without a share
    share: cute.Tensor  # (4,) int32 in shared memory: the worker's share

    def _fresh(self) -> SharedSchedule:
        share = Share(*(self.share[i] for i in range(4)))
        return replace(with_fresh_numbers(self.schedule), share=share)

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
