"""The ring of tiles on a CPU: ``common.handout``'s own source, with verbs that know barriers and races.

CTAs run one after the other here, so that which tiles a CTA gets is decided beforehand: any that grow in number.
"""

import copy
import random
from dataclasses import fields, replace

import numpy as np

from flash4.common.dsl import plain
from flash4.common.graph import WARP, Ring
from flash4.common.handout import (
    NOTHING,
    DenseEntry,
    GivenDense,
    GivenTiles,
    ToldDense,
    ToldTiles,
    find,
)
from flash4.common.search import last_before
from flash4.common.varlen import Entry
from flash4.sim.barriers import Barrier
from flash4.sim.machine import Machine
from flash4.sim.memory import ADD, Region, Space


class HostWarp:
    """A warp whose lanes are the elements of an array."""

    zero = 0

    def each(self, of, first):
        """of(first) in the first lane, of(first + 1) in the next, ..."""
        return np.array([of(first + lane) for lane in range(WARP)])

    def sum(self, values):
        """Sum over all lanes."""
        return int(values.sum())

    def sum_before(self, values, keys):
        """Sum over the lanes with a larger key, or with the same and a smaller number."""
        order = np.argsort(-keys, kind="stable")
        before = np.cumsum(values[order]) - values[order]
        return before[np.argsort(order)]

    def which(self, condition):
        """The only lane with a condition; any from 0 to 32 if there is none."""
        assert condition.sum() <= 1
        return int(condition.argmax()) if condition.any() else WARP

    def how_many(self, condition):
        """Number of lanes with a condition."""
        return int(condition.sum())

    def value_of(self, values, lane):
        """Value of a lane."""
        return int(values[lane % WARP])

    def last_before(self, side, slot, stride):
        """See ``search.last_before``."""
        return plain(last_before)(side, self, slot, stride)


def shared_out(total: int, workers: int, seed: int) -> list[list[int]]:
    """Numbers of the tiles that each worker gets, in one of the ways in which a counter may come to hand them out."""
    draw = random.Random(seed)
    weights = [draw.choice((1, 1, 5, 50)) for _ in range(workers)]
    lists = [[worker] if worker < total else [] for worker in range(workers)]
    for number in range(workers, total):
        draw.choices(lists, weights)[0].append(number)
    return lists


class HostSlots:
    """The ring of tiles of one CTA.

    Args:
        machine: that runs it.
        spec: of the ring.
        space: shared memory.
        at: first byte of the slots.
        numbers: of the tiles that this CTA gets.
        beyond: what the counter says when no tile is left.
    """

    zero = 0
    entry = Entry

    def __init__(self, machine: Machine, spec: Ring, space: Space, at: int, numbers, beyond: int):
        self.count, self._machine = spec.stages, machine
        self._numbers, self._beyond = iter(numbers), beyond
        words, slots = spec.stage_bytes // 4, range(spec.stages)
        ends = [at + 4 * words * (i + 1) for i in slots]
        self._entries = [
            Region(space, f"tiles[{i}]", ends[i] - 4 * words, ends[i] - 8, (1,)) for i in slots
        ]
        self._marks = [Region(space, f"mark[{i}]", ends[i] - 8, ends[i], (1,)) for i in slots]
        self._held, self._marked = [None] * spec.stages, [set() for _ in slots]
        self._full = [Barrier(machine, f"tiles full[{i}]", 1) for i in slots]
        self._empty = [Barrier(machine, f"tiles empty[{i}]", spec.consumer_arrivals) for i in slots]
        machine.at_exit.append(self._check_balance)

    def of_role(self, arrivals: int, wait_stores):
        """The ring as one task sees it that gives back slots with so many arrivals."""
        mine = copy.copy(self)
        mine._arrivals, mine.wait_stores = arrivals, wait_stores
        return mine

    def _check_balance(self):
        """All slots were given back but that of the end."""
        held = sum(full.phase - empty.phase for full, empty in zip(self._full, self._empty))
        if held != 1 or any(b.missing != b.arrivals for b in self._full + self._empty):
            self._machine.report(
                f"the CTA ends with {held} tiles that were not given back, its end among them"
            )

    def acquire(self, number):
        """Wait until a slot is empty, as all are at first."""
        use, slot = divmod(number, self.count)
        self._empty[slot].wait(use - 1)

    def wait(self, number):
        """Wait until a slot is full."""
        use, slot = divmod(number, self.count)
        self._full[slot].wait(use)

    def post(self, number, entry):
        """Fill a slot."""
        slot = number % self.count
        self._entries[slot].touch(True)
        self._marks[slot].touch(True)
        self._held[slot] = entry
        self._marked[slot].clear()
        self._full[slot].arrive()
        self._machine.give_way()

    def post_nothing(self, number):
        """Fill a slot with nothing to do. What it held was not marked."""
        empty = self.entry(*(0 for _ in fields(self.entry)))
        self.post(number, replace(self._held[number % self.count] or empty, kind=NOTHING))

    def release(self, number):
        """Give a slot back."""
        self._empty[number % self.count].arrive(self._arrivals)
        self._machine.give_way()

    def read(self, number) -> Entry:
        """What a slot holds."""
        slot = number % self.count
        self._entries[slot].touch(False)
        return self._held[slot]

    def kind(self, number):
        """Kind of what a slot holds."""
        return self.read(number).kind

    def again(self, number):
        """Pass in which a slot's tile is worked on."""
        return self.read(number).again

    def marked(self, number):
        """(sequence, number in it, pass) of the tile that a slot held; pass 0 if it need not be worked on again."""
        slot = number % self.count
        if number < self.count:
            return 0, 0, 0
        entry = self.read(number)
        self._marks[slot].touch(False)
        return entry.index, entry.within, max(self._marked[slot], default=0)

    def mark(self, number, again):
        """Mark a slot's tile for a later pass; others may at the same time, since all write the same."""
        slot, machine = number % self.count, self._machine
        region = self._marks[slot]
        machine.note("write", region.name, 0, touches=((region, ADD),))
        region.space.touch(region, ADD, machine.actor.name, machine.actor.clock)
        self._marked[slot].add(again)

    def draw(self, number):
        """Number among all tiles of this worker's next."""
        return next(self._numbers, self._beyond)

    def find(self, schedule, cursor, wanted):
        """See ``handout.find``."""
        return plain(find)(schedule, HostWarp(), cursor, wanted)


class HostDenseSlots(HostSlots):
    """The ring of tiles of one CTA of a dense call."""

    entry = DenseEntry
    _told_the_end = False

    def marked(self, number):
        """(index, pass) of the tile that a slot held; pass 0 if it need not be worked on again."""
        slot = number % self.count
        if number < self.count:
            return 0, 0
        entry = self.read(number)
        self._marks[slot].touch(False)
        return entry.index, max(self._marked[slot], default=0)

    def ask(self):
        """Ask the counter. Nobody may ask again who was told that none is left."""
        if self._told_the_end:
            self._machine.report("the counter is asked again: it may be zero for the next launch")
        return self.draw(None)

    def answered(self, number, answer):
        """Index of this worker's next tile."""
        index = answer if number else self.draw(None)
        self._told_the_end = index >= self._beyond
        return index


class HostGivenTiles(GivenTiles):
    """The tiles of ``load``, in plain Python."""

    _next = plain(GivenTiles._next)


class HostToldTiles(ToldTiles):
    """The tiles of ``mma``, in plain Python."""

    _next = plain(ToldTiles._next)


class HostGivenDense(GivenDense):
    """The tiles of ``load`` of a dense call, in plain Python."""

    _ask = plain(GivenDense._ask)
    _next = plain(GivenDense._next)


class HostToldDense(ToldDense):
    """The tiles of ``mma`` of a dense call, in plain Python."""

    _next = plain(ToldTiles._next)
