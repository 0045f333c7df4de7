"""The ring of tiles of the Hopper backward, in CuTe; see ``common.kv_handout``."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash4.common.kv_handout import HandedSequenceTile
from flash4.common.kv_one_tile import place_in, tile_in


@dataclass(frozen=True)
class KvTileSlots:
    """Slots, their barriers, and the counter that tells a CTA's next tile."""

    words: cute.Tensor  # (words of a slot, slots) int32 in shared memory
    full: cute.Pointer
    empty: cute.Pointer
    counter: cute.Tensor  # (1,) int32 in global memory: tiles given out beyond every CTA's first
    worker: Int32
    workers: Int32
    lane: Int32  # in the warp
    owned: bool  # a CTA's first tile is its own number; else the counter gives that too; static

    @property
    def count(self) -> int:
        """Number of slots."""
        return cute.size(self.words, mode=[1])

    @property
    def zero(self):
        """0, of the type that loops carry."""
        return Int32(0)

    @cute.jit
    def open(self, thread, arrivals: cutlass.Constexpr):
        """Set up barriers, with so many arrivals that empty a slot; by all threads, before they meet."""
        if thread < self.count:
            cute.arch.mbarrier_init(self.full + thread, 1)
            cute.arch.mbarrier_init(self.empty + thread, arrivals)

    def acquire(self, number):
        """Wait until a slot is empty, as all are at first."""
        phase = (number // self.count + 1) % 2
        cute.arch.mbarrier_wait(self.empty + number % self.count, phase)

    def wait(self, number):
        """Wait until a slot is full."""
        cute.arch.mbarrier_wait(self.full + number % self.count, number // self.count % 2)

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
        self.words[0, number % self.count] = Int32(index)
        self.fill(number)

    def read(self, number):
        """What a slot holds."""
        return cute.arch.make_warp_uniform(self.words[0, number % self.count])

    def release(self, number):
        """Give a slot back; by a whole warp."""
        self._arrive(self.empty + number % self.count)

    def fill(self, number):
        """Say that a slot is full; by a whole warp."""
        self._arrive(self.full + number % self.count)

    @cute.jit
    def _arrive(self, barrier):
        cute.arch.sync_warp()
        if self.lane == 0:
            cute.arch.mbarrier_arrive(barrier)


@dataclass(frozen=True)
class SequenceSlots(KvTileSlots):
    """The same of a call with sequences of different lengths: a slot holds all that roles need to know of a tile."""

    found: cute.Tensor = (
        None  # (numbers, words of a slot) int32 in global memory: tiles that were found before
    )

    def _slot(self, number):
        return self.words[None, number % self.count]

    def find(self, schedule, number, index):
        """Put the tile of an index into a slot; by a whole warp. Returns whether there is one."""
        words = cute.size(self.words, mode=[0])
        last, mine = cute.size(self.found, mode=[0]) - 1, cutlass.min(self.lane, words - 1)
        word = self.found[cutlass.min(index, last), mine]
        valid = cutlass.select_(index <= last, cute.arch.shuffle_sync(word, 0), Int32(0))
        word = cutlass.select_(self.lane == 0, valid, word)
        self._slot(number)[mine] = word  # the last one by several lanes
        return valid != 0

    def tile(self, number):
        """The tile in a slot."""
        return HandedSequenceTile(**tile_in(self._slot(number)), number=number)

    def place(self, schedule, number):
        """Where it lies."""
        return place_in(self._slot(number), schedule)
