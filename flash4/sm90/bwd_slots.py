"""The ring of numbers of tiles of the Hopper backward, in CuTe; see ``common.kv_handout``."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash4.sm90.bwd_config import TILE_SLOTS


@dataclass(frozen=True)
class KvTileSlots:
    """Slots, their barriers, and the counter that tells a CTA's next tile."""

    words: cute.Tensor  # (TILE_SLOTS,) int32 in shared memory
    full: cute.Pointer
    empty: cute.Pointer
    counter: cute.Tensor  # (1,) int32 in global memory: tiles given out beyond every CTA's first
    worker: Int32
    workers: Int32
    lane: Int32  # in the warp
    owned: bool  # a CTA's first tile is its own number; else the counter gives that too; static

    @property
    def zero(self):
        """0, of the type that loops carry."""
        return Int32(0)

    @cute.jit
    def open(self, thread, arrivals: cutlass.Constexpr):
        """Set up barriers, with so many arrivals that empty a slot; by all threads, before they meet."""
        if thread < TILE_SLOTS:
            cute.arch.mbarrier_init(self.full + thread, 1)
            cute.arch.mbarrier_init(self.empty + thread, arrivals)

    def acquire(self, number):
        """Wait until a slot is empty, as all are at first."""
        phase = (number // TILE_SLOTS + 1) % 2
        cute.arch.mbarrier_wait(self.empty + number % TILE_SLOTS, phase)

    def wait(self, number):
        """Wait until a slot is full."""
        cute.arch.mbarrier_wait(self.full + number % TILE_SLOTS, number // TILE_SLOTS % 2)

    @cute.jit
    def draw(self, number):
        """Index of this CTA's next tile: its own number first, then what the counter says; by a whole warp."""
        drawn = Int32(0)
        if (self.lane == 0) & ((number > 0) | (not self.owned)):
            drawn = cute.arch.atomic_add(self.counter.iterator, Int32(1))
        drawn = cute.arch.shuffle_sync(drawn, 0)
        if cutlass.const_expr(self.owned):
            drawn = cutlass.select_(number > 0, drawn + self.workers, self.worker)
        return drawn

    def post(self, number, index):
        """Fill a slot; by a whole warp."""
        slot = number % TILE_SLOTS
        self.words[slot] = Int32(index)
        self._arrive(self.full + slot)

    def read(self, number):
        """What a slot holds."""
        return cute.arch.make_warp_uniform(self.words[number % TILE_SLOTS])

    def release(self, number):
        """Give a slot back; by a whole warp."""
        self._arrive(self.empty + number % TILE_SLOTS)

    @cute.jit
    def _arrive(self, barrier):
        cute.arch.sync_warp()
        if self.lane == 0:
            cute.arch.mbarrier_arrive(barrier)
