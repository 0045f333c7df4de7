"""The ring of numbers of tiles of a backward on a CPU; see ``common.kv_handout``, and ``sim.handout`` for what is decided
beforehand."""

import copy

from flash4.common.graph import Ring
from flash4.sim.barriers import Barrier
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
        slot = number % self.count
        self._entries[slot].touch(True)
        self._held[slot] = index
        self._full[slot].arrive()
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
