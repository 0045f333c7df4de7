"""The ring of numbers of tiles of a backward on a CPU; see ``common.kv_handout``, and ``sim.handout`` for what is decided
beforehand."""

import copy
from dataclasses import fields

from flash4.common.dsl import plain
from flash4.common.graph import Ring
from flash4.common.kv_handout import GivenSequenceTiles, HandedSequenceTile
from flash4.common.kv_sequences import SequenceTile, find_tile
from flash4.sim.barriers import Barrier
from flash4.sim.handout import HostWarp
from flash4.sim.machine import Machine
from flash4.sim.memory import Region


class HostKvSlots:
    """The ring of one CTA.

    Args:
        machine: that runs it.
        spec: of the ring.
        memory: shared memory, and the first byte of the slots in it.
        readers: warps that empty a slot.
        numbers: of the tiles that this CTA gets.
        beyond: what the counter says when no tile is left.
    """

    zero = 0

    def __init__(self, machine: Machine, spec: Ring, memory, readers: int, numbers, beyond: int):
        (space, at), slots = memory, range(spec.stages)
        self.count, self._machine = spec.stages, machine
        self._numbers, self._beyond = iter(numbers), beyond
        ends = [at + spec.stage_bytes * (i + 1) for i in slots]
        self._entries = [
            Region(space, f"tiles[{i}]", ends[i] - spec.stage_bytes, ends[i], (1,)) for i in slots
        ]
        self._held = [None] * spec.stages
        self._full = [Barrier(machine, f"tiles full[{i}]", 1) for i in slots]
        self._empty = [Barrier(machine, f"tiles empty[{i}]", readers) for i in slots]
        machine.at_exit.append(self._check_balance)

    def of_role(self, arrivals: int):
        """The ring as one task sees it that gives back slots with so many arrivals."""
        mine = copy.copy(self)
        mine._arrivals = arrivals
        return mine

    def _check_balance(self):
        """All slots were given back, that of the end too."""
        barriers = list(zip(self._full, self._empty))
        if any(f.phase != e.phase or e.missing != e.arrivals for f, e in barriers):
            self._machine.report("the CTA ends with tiles that were not given back")

    def acquire(self, number):
        """Wait until a slot is empty, as all are at first."""
        use, slot = divmod(number, self.count)
        self._empty[slot].wait(use - 1)

    def wait(self, number):
        """Wait until a slot is full."""
        use, slot = divmod(number, self.count)
        self._full[slot].wait(use)

    def draw(self, number):
        """Index of this CTA's next tile."""
        return next(self._numbers, self._beyond)

    def post(self, number, index):
        """Fill a slot."""
        self._put(number, index)
        self.fill(number)

    def _put(self, number, held):
        self._entries[number % self.count].touch(True)
        self._held[number % self.count] = held

    def fill(self, number):
        """Say that a slot is full."""
        self._full[number % self.count].arrive()
        self._machine.give_way()

    def read(self, number):
        """What a slot holds."""
        slot = number % self.count
        self._entries[slot].touch(False)
        return self._held[slot]

    def release(self, number):
        """Give a slot back."""
        self._empty[number % self.count].arrive(self._arrivals)
        self._machine.give_way()


class HostSequenceSlots(HostKvSlots):
    """The same of a call with sequences of different lengths. A slot is given back when its tile is done."""

    def _check_balance(self):
        """All slots were given back but that of the end."""
        held = sum(full.phase - empty.phase for full, empty in zip(self._full, self._empty))
        if held != 1 or any(b.missing != b.arrivals for b in self._full + self._empty):
            self._machine.report(
                f"the CTA ends with {held} tiles that were not given back, its end among them"
            )

    def find(self, schedule, number, index):
        """Put the tile of an index into a slot. Returns whether there is one."""
        tile = plain(find_tile)(schedule, HostWarp(), index)
        self._put(number, tile)
        return tile.valid

    def tile(self, number):
        """The tile in a slot."""
        tile = self.read(number)
        known = {field.name: getattr(tile, field.name) for field in fields(SequenceTile)}
        return HandedSequenceTile(**known, number=number)

    def place(self, schedule, number):
        """Where it lies."""
        return schedule.where(self.read(number))


class HostGivenSequenceTiles(GivenSequenceTiles):
    """The tiles of ``load``, in plain Python."""

    _next = plain(GivenSequenceTiles._next)
