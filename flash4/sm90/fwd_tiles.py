"""A worker's way through its tiles, in CuTe: those that must be worked on again, and the ring of tiles."""

from dataclasses import dataclass, fields, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cutlass_dsl import T

from flash4.common.dsl import inline_ptx
from flash4.common.geometry import imax
from flash4.common.graph import WARP
from flash4.common.handout import NOTHING, DenseEntry, find
from flash4.common.tiles import TileSchedule
from flash4.common.varlen import Entry
from flash4.common.warps import Warp
from flash4.sm90.fwd_config import MARKS, NOTES, OUTGROWN, PASSES, TILE_SLOTS, ForwardConfig

BARRIER_PASS = 10  # named barrier: all roles have been through all tiles


@dataclass(frozen=True)
class Tiles:
    """A worker's tiles: all of its schedule, then, with a fixed shift, those that must be worked on again.

    Each role steps through them by itself; they meet between passes, when all marks are there. What is marked for a pass
    gets the bits that it would have got there at once: a row does not depend on what else is marked with it.
    """

    config: ForwardConfig
    schedule: TileSchedule
    marks: object  # (MARK_WORDS,) int32 in shared memory; None without a fixed shift

    def first(self):
        """Return the worker's first tile."""
        return replace(self.schedule.first(), again=Int32(0))

    def ask(self, tile):
        """See ``TileSchedule.ask``."""
        return tile

    def next(self, tile):
        """Return the tile after ``tile``."""
        if self.config.fixed_shift:
            return self._next_marked(tile)
        return replace(self.schedule.next(tile), again=Int32(0))

    @cute.jit
    def _next_marked(self, tile):
        schedule, marks = self.schedule, self.marks
        total, again = schedule.grid.total, tile.again
        index = self._next_index(tile.index, again)
        while (index >= total) & (again < PASSES):
            cute.arch.cp_async_bulk_wait_group(0)  # what is stored again must be stored last
            cute.arch.barrier(barrier_id=BARRIER_PASS, number_of_threads=self._threads)
            first = (again == 0) & (marks[MARKS] != 0)
            again = cutlass.select_(first, Int32(1), Int32(PASSES))
            if marks[again * (MARKS + 1) - 1] != 0:
                index = schedule.start
                if self._is_unmarked(index, again):
                    index = self._next_index(index, again)
        return replace(schedule.at(index), again=again)

    @cute.jit
    def _next_index(self, index, again):
        """Index of the worker's next tile of a pass."""
        index = self.schedule.next_index(index)
        while (index < self.schedule.grid.total) & self._is_unmarked(index, again):
            index = self.schedule.next_index(index)
        return index

    def _is_unmarked(self, index, again):
        """Whether a pass leaves a tile out. All have marks of pass 0, behind those of the others."""
        word = imax(again - 1, 0) * (MARKS + 1) + self.schedule.wave(index) % MARKS
        return (again > 0) & (self.marks[word] == 0)

    @property
    def _threads(self):
        roles = self.config.graph.roles
        return sum(WARP * role.active_warps for role in roles)

    def mark(self, tile, again: int):
        """Have a tile worked on in a later pass, and perhaps some others."""
        self.marks[(again - 1) * (MARKS + 1) + self.schedule.wave(tile.index) % MARKS] = 1
        self.marks[again * (MARKS + 1) - 1] = 1

    def wave(self, tile):
        """How many tiles the worker had before."""
        return self.schedule.wave(tile.index)

    def note_outgrown(self, tile, warpgroup):
        """Remember that a tile outgrew its shift, for the next of this warpgroup of the CTA."""
        self.marks[OUTGROWN + warpgroup] = self.schedule.wave(tile.index) + 1

    def noted(self, warpgroup):
        """Wave after the last tile of a warpgroup that outgrew its shift; -1 if none has."""
        return self.marks[OUTGROWN + warpgroup]

    def after_outgrown(self, tile, warpgroup):
        """1 if the warpgroup's tile before this one outgrew its shift, else 0."""
        return Int32(self.noted(warpgroup) == self.schedule.wave(tile.index))


@dataclass(frozen=True)
class TileSlots:
    """The ring of tiles: slots, their barriers, and the counter that tells a CTA's next tile.

    A slot has a word for each field of an entry, then for each pass but the first one that says whether the slot's tile
    is worked on again.
    """

    words: cute.Tensor  # (TILE_WORDS, TILE_SLOTS) int32 in shared memory
    full: cute.Pointer
    empty: cute.Pointer
    counter: cute.Tensor  # (1,) int32 in global memory: tiles given out beyond every worker's first
    worker: Int32
    workers: Int32
    lane: Int32  # in the warp

    entry = Entry  # what a slot holds

    @property
    def names(self):
        """Fields of what a slot holds, in the order of its words."""
        return tuple(field.name for field in fields(self.entry))

    @property
    def count(self):
        """Slots."""
        return TILE_SLOTS

    @property
    def zero(self):
        """0, of the type that loops carry."""
        return Int32(0)

    @cute.jit
    def open(self, thread, arrivals: cutlass.Constexpr):
        """Set up words, and barriers with so many arrivals that empty a slot; by all threads, before they meet."""
        words = self.words
        if thread < self.count:
            cute.arch.mbarrier_init(self.full + thread, 1)
            cute.arch.mbarrier_init(self.empty + thread, arrivals)
        if thread < cute.size(words):  # any numbers are safe that are not negative
            words[thread] = 0

    def acquire(self, number):
        """Wait until a slot is empty."""
        cute.arch.mbarrier_wait(self.empty + number % self.count, (number // self.count + 1) % 2)

    def wait(self, number):
        """Wait until a slot is full."""
        cute.arch.mbarrier_wait(self.full + number % self.count, number // self.count % 2)

    def post(self, number, entry):
        """Fill a slot; by a whole warp."""
        slot = number % self.count
        cute.arch.sync_warp()  # all lanes have read what was there
        for i, name in enumerate(self.names):
            self.words[i, slot] = Int32(getattr(entry, name))
        for again in range(PASSES):
            self.words[len(self.names) + again, slot] = Int32(0)
        self._arrive(self.full + slot)

    def post_nothing(self, number):
        """Fill a slot with nothing to do; by a whole warp. What it held was not marked."""
        slot = number % self.count
        cute.arch.sync_warp()
        self.words[self.names.index("kind"), slot] = Int32(NOTHING)
        self._arrive(self.full + slot)

    def release(self, number):
        """Give a slot back; by a whole warp."""
        self._arrive(self.empty + number % self.count)

    @cute.jit
    def _arrive(self, barrier):
        cute.arch.sync_warp()
        if self.lane == 0:
            cute.arch.mbarrier_arrive(barrier)

    def read(self, number):
        """What a slot holds."""
        slot = number % self.count
        return self.entry(*(self.words[i, slot] for i in range(len(self.names))))

    def kind(self, number):
        """Kind of what a slot holds."""
        return self.read(number).kind

    def again(self, number):
        """Pass in which a slot's tile is worked on."""
        return self.read(number).again

    def marked(self, number):
        """(sequence, number in it, pass) of the tile that a slot held; pass 0 if it need not be worked on again."""
        entry = self.read(number)
        return entry.index, entry.within, self._marked_pass(number)

    def _marked_pass(self, number):
        slot, again = number % self.count, Int32(0)
        for later in range(1, PASSES + 1):
            word = self.words[len(self.names) + later - 1, slot]
            again = cutlass.select_(word != 0, Int32(later), again)
        return again

    def mark(self, number, again: int):
        """Mark a slot's tile for a later pass; whoever else does writes the same."""
        self.words[len(self.names) + again - 1, number % self.count] = Int32(1)

    @cute.jit
    def draw(self, number):
        """Number among all tiles of this worker's next: its own number first, then what the counter says."""
        drawn = Int32(0)
        if (self.lane == 0) & (number > 0):
            drawn = cute.arch.atomic_add(self.counter.iterator, Int32(1))
        drawn = cute.arch.shuffle_sync(drawn, 0)
        return cutlass.select_(number > 0, drawn + self.workers, self.worker)

    def find(self, schedule, cursor, wanted):
        """See ``handout.find``."""
        return find(schedule, Warp(self.lane), cursor, wanted)

    def wait_stores(self):
        """Wait until this thread's stores are there."""
        cute.arch.cp_async_bulk_wait_group(0)


def count_up(counter, last):
    """Atomic: add 1 to a counter in global memory, or set it to 0 if it is ``last``; return what it was.

    Not an addition, as ptxas would collect those of a warp, and wait for the sum at once.
    """
    address = Int64(counter.iterator.toint())
    text = "atom.global.inc.u32 $0, [$1], $2;"
    return Int32(inline_ptx(T.i32(), "=r,l,r", text, address, Int32(last), side_effects=True))


@dataclass(frozen=True)
class DenseSlots(TileSlots):
    """The ring of tiles of a dense call, (DENSE_WORDS, TILE_SLOTS) words. Its counter is zero again after the launch."""

    answers: Int32 = None  # how often all workers together ask the counter
    notes: cute.Tensor = None  # (NOTES,) int32 in shared memory; see ``handout.DenseViews``

    entry = DenseEntry

    @cute.jit
    def open(self, thread, arrivals: cutlass.Constexpr):
        """As ``TileSlots.open``; no warpgroup has noted anything."""
        TileSlots.open(self, thread, arrivals)
        if thread < NOTES:
            self.notes[thread] = -1

    def marked(self, number):
        """(index, pass) of the tile that a slot held; pass 0 if it need not be worked on again."""
        return self.read(number).index, self._marked_pass(number)

    @cute.jit
    def ask(self):
        """Ask the counter; lane 0 gets its answer, and waits for it when it is used. The last answer leaves it at 0."""
        answer = Int32(0)
        if self.lane == 0:
            answer = count_up(self.counter, self.answers - 1)
        return answer

    def answered(self, number, answer):
        """Index of this worker's next tile; behind the last when none is left, which a worker may be told once."""
        answer = cute.arch.shuffle_sync(answer, 0)
        return cutlass.select_(number > 0, answer + self.workers, self.worker)
