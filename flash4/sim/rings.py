"""What roles hold in their hands: ring ends, slots, turns, and a warp group's queue of MMAs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flash4.sim.barriers import Barrier
from flash4.sim.cluster import arrive_at
from flash4.sim.machine import Hazard, Machine
from flash4.sim.memory import Fragment, Region, Space


class Ring:
    """Slots that TMA fills, with a "full" and an "empty" barrier each, in one CTA.

    Args:
        machine: that runs it.
        spec: of the graph.
        readers: tasks that share the arrivals that free a slot.
        space: the CTA's memory.
        at: byte where the slots begin.
        shape: of a slot's array.
    """

    def __init__(
        self, machine: Machine, spec, readers: int, space: Space | None = None, at=0, shape=(1, 1)
    ):
        space = space or Space(machine)
        self.machine, self.spec, self.cta = machine, spec, space.cta
        self.arrivals_per_reader = spec.consumer_arrivals // readers
        size, slots = spec.stage_bytes, range(spec.stages)
        prefix = f"{self.cta.name}." if self.cta else ""
        self.regions = [
            Region(space, f"{prefix}{spec.name}[{i}]", at + i * size, at + (i + 1) * size, shape)
            for i in slots
        ]
        self.lanes = [
            machine.lane(f"copies into {region.name}", ordered=False) for region in self.regions
        ]
        name = prefix + spec.name
        self.full = [Barrier(machine, f"{name} full[{i}]", 1, self.cta) for i in slots]
        self.empty = [
            Barrier(machine, f"{name} empty[{i}]", spec.consumer_arrivals, self.cta) for i in slots
        ]
        machine.at_exit.append(self._check_balance)

    def fill(self, index: int, block: np.ndarray, nbytes: int):
        """Start the TMA copy of ``block`` into a slot."""
        region = self.regions[index]

        def land():
            region.poke(block)
            self.full[index].arrive(0, -nbytes)

        self.lanes[index].issue(f"the copy into {region.name}", land, writes=[region])
        region.spoil()

    def free(self, index: int):
        """Arrive for one reader."""
        self.empty[index].arrive(self.arrivals_per_reader)
        self.machine.give_way()

    def _check_balance(self):
        for full, empty in zip(self.full, self.empty):
            if full.phase != empty.phase or full.missing != 1 or empty.missing != empty.arrivals:
                self.machine.report(
                    f"the CTA ends with {full.name} filled {full.phase} times and released "
                    f"{empty.phase} times ({empty.arrivals - empty.missing} of {empty.arrivals} arrivals "
                    f"of one more)"
                )


class SharedRing(Ring):
    """One CTA's part of a ring that the CTAs of a cluster fill together; ``connect`` it before its use.

    Each copies its part of a block into the slots of all of them, where its bytes count; each reader arrives in all.
    """

    def connect(self, rings: "tuple[SharedRing, ...]"):
        """Let this ring know those of all CTAs, itself among them, in the order of their ranks."""
        self.rings, self.rank, machine = rings, rings.index(self), self.machine
        self.copies = [
            self.lanes
            if ring is self
            else [
                machine.lane(f"copies of {self.cta.name} into {region.name}", ordered=False)
                for region in ring.regions
            ]
            for ring in rings
        ]
        self.parts = [[self._part(region) for region in ring.regions] for ring in rings]

    def _part(self, region: Region) -> Region:
        """Bytes of a slot that this CTA fills."""
        size = (region.hi - region.lo) // len(self.rings)
        lo, (rows, columns) = region.lo + self.rank * size, region.shape
        shape = (rows // len(self.rings), columns)
        return Region(region.space, f"part {self.rank} of {region.name}", lo, lo + size, shape)

    def fill(self, index: int, block: np.ndarray, nbytes: int):
        """Start the copies of this CTA's part of ``block`` into a slot of every CTA."""
        for rank in range(len(self.rings)):
            self.fill_of(rank, index, block, nbytes)

    def fill_of(self, rank: int, index: int, block: np.ndarray, nbytes: int):
        """Start the copy into one CTA's slot; a barrier there counts its bytes."""
        count, region, full = len(self.rings), self.rings[rank].regions[index], self.counter(rank)
        rows = slice(self.rank * len(block) // count, (self.rank + 1) * len(block) // count)

        def put(values):
            array = region.peek().copy()
            array[rows] = values
            region.poke(array)

        def land():
            put(block[rows])
            full[index].arrive(0, -nbytes // count)

        part = self.parts[rank][index]
        self.copies[rank][index].issue(f"the copy into {part.name}", land, writes=[part])
        put(np.nan)

    def counter(self, rank: int) -> list[Barrier]:
        """Barriers that count the bytes of copies into a CTA's slots."""
        return self.rings[rank].full

    def free(self, index: int):
        """Arrive for one reader, in every CTA."""
        for ring in self.rings:
            arrive_at(ring.empty[index], self.arrivals_per_reader)


@dataclass(eq=False)
class Slot:
    """One use of a ring's slot by one task."""

    ring: Ring
    index: int
    use: int = 0  # how often the slot was full before
    released: object = None

    @property
    def region(self) -> Region:
        """Memory of the slot."""
        return self.ring.regions[self.index]

    def fill(self, block: np.ndarray, nbytes: int):
        """Start the TMA copy of ``block`` into the slot."""
        self.ring.fill(self.index, block, nbytes)

    def commit(self):
        """Producer: announce the bytes; the slot is full when they have landed."""
        self._leave()
        self.ring.full[self.index].arrive(1, self.ring.spec.stage_bytes)
        self.ring.machine.give_way()

    def release(self):
        """Consumer: this task no longer reads the slot."""
        self._leave()
        self.ring.free(self.index)

    def _leave(self):
        machine, place = self.ring.machine, self.ring.machine.place()
        if self.released is not None:
            machine.report(
                f"{machine.actor.name} gives {self.region.name} away twice: at {self.released}, and again "
                f"at {place}"
            )
        self.released = place or "its setup"


class End:
    """One task's end of a ring: a role uses it as producer or as consumer.

    Args:
        ring: the ring.
        miscount: slots that this end counts beyond the ring's; for mutants, which make mistakes.
    """

    def __init__(self, ring: Ring, miscount: int = 0):
        self._ring, self._uses, self._stages = ring, 0, ring.spec.stages + miscount
        self._looked = None  # (slot, use) that was looked at last

    def _next(self) -> tuple[int, int]:
        """(slot, how often it was used before)."""
        use, index = divmod(self._uses, self._stages)
        if index >= self._ring.spec.stages:
            raise Hazard(f"{self._ring.spec.name}: slot {index} of {self._ring.spec.stages}")
        return index, use

    def _advance(self, barriers: list[Barrier] | None, lag: int = 0) -> Slot:
        index, use = self._next()
        self._uses += 1
        if barriers is not None:
            self._wait(barriers[index], index, use - lag)
        return Slot(self._ring, index, use)

    def _wait(self, barrier: Barrier, index: int, use: int):
        """Wait, also where a look has shown that this need not be, which makes no difference but in time."""
        looked, self._looked = self._looked, None
        if looked is not None and looked != (index, use):
            self._ring.machine.report(
                f"{self._ring.spec.name}: {self._ring.machine.actor.name} waits for slot {index}, use {use}, but "
                f"looked whether slot {looked[0]} is full for use {looked[1]}"
            )
        barrier.wait(use)

    def _look(self, index: int, use: int):
        self._looked = index, use
        self._ring.full[index].look(use)

    def acquire_and_advance(self) -> Slot:
        """Producer: wait until the next slot is empty, as all are at first."""
        return self._advance(self._ring.empty, 1)

    def wait_and_advance(self) -> Slot:
        """Consumer: wait until the next slot is full."""
        return self._advance(self._ring.full)

    def wait_beside(self, slot: Slot) -> Slot:
        """Consumer: wait until the slot is full that has the number of another ring's, for as many-th a time."""
        self._wait(self._ring.full[slot.index], slot.index, slot.use)
        return Slot(self._ring, slot.index, slot.use)

    def look_ahead(self, slot: Slot | None = None):
        """Consumer: look whether the next slot is full already, or the one beside another ring's."""
        self._look(*(self._next() if slot is None else (slot.index, slot.use)))

    def advance_unwaited(self, slot: Slot | None = None) -> Slot:
        """What a role does that forgets to wait."""
        return self._advance(None) if slot is None else Slot(self._ring, slot.index, slot.use)


class Turn:
    """Turns of tasks: each waits on its own barrier, where the one before it arrives; no barriers, no turns."""

    def __init__(self, barriers: list[Barrier], task: int):
        self._barriers, self._task = barriers, task

    def open(self):
        """Let the first task go."""
        if self._task == len(self._barriers) - 1:
            self.pass_on()

    def wait(self):
        """Wait for this task's turn."""
        if self._barriers:
            self._barriers[self._task].sync()

    def pass_on(self):
        """Give the turn to the next task."""
        if self._barriers:
            following = self._barriers[(self._task + 1) % len(self._barriers)]
            following.arrive()
            following.machine.give_way()


class MmaQueue:
    """Asynchronous MMAs of one warp group, in order."""

    def __init__(self, machine: Machine, name: str):
        self._machine, self._lane = machine, machine.lane(f"the tensor core for {name}", True)

    def issue(self, acc: Fragment, product: Callable, operands, accumulate: bool, label: str):
        """Issue acc (+)= product(arrays of the operand regions), which it reads until it is waited for."""

        def land():
            with np.errstate(
                all="ignore"
            ):  # a shift that overflowed gives inf - inf, and its tile is redone
                result = product(*(region.peek() for region in operands))
                acc.region.poke(acc.region.peek() + result if accumulate else result)

        self._lane.issue(label, land, reads=operands, writes=[acc.region])

    def wait(self, pending: int):
        """Wait until at most ``pending`` are in flight."""
        self._machine.give_way()
        self._lane.join(self._lane.issued - pending)
