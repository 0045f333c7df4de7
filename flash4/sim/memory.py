"""Bytes that tasks and asynchronous operations share, with what is needed to find races among them."""

from dataclasses import dataclass

import numpy as np

from flash4.sim.machine import Clock, Machine, Operation, Place, describe_gap

ADD = 2  # a kind of write: additions in global memory, each of them whole, in any order


@dataclass(eq=False)
class Access:
    """The last use of bytes by a task or lane.

    Attributes:
        lo: first byte.
        hi: byte behind the last.
        write: whether it wrote them; ``ADD`` if it added to them.
        index: of the task or lane, in clocks.
        time: of the task or lane.
        who: name for stories.
        place: line of the role.
        fenced: time of the writer's proxy fence; None before it; 0 where none is needed.
        task: index of the task itself, or of the one that issued the operation.
    """

    lo: int
    hi: int
    write: bool
    index: int
    time: int
    who: str
    place: Place | None
    fenced: int | None
    task: int


class Space:
    """A range of bytes: a CTA's shared memory, global memory, or registers that an MMA uses.

    Attributes:
        proxies: ordinary writes need a proxy fence before an asynchronous operation uses them.
        cta: whose memory it is, where a machine has several CTAs.
    """

    def __init__(self, machine: Machine, proxies: bool = True, cta=None):
        self.machine, self.proxies, self.cta = machine, proxies, cta
        self._uses: list[Access] = []
        self.contents: dict[tuple[int, int], np.ndarray] = {}
        if proxies:
            machine.spaces.append(self)

    def touch(self, region, write: bool, who: str, clock: Clock, epoch=None):
        """Check an access against all before it, and remember it.

        Args:
            region: bytes.
            write: whether they are written; ``ADD`` if they are added to.
            who: name for stories.
            clock: what the access comes after.
            epoch: (index, number, whether it accesses memory like a task) of an asynchronous operation; None
                for the acting task itself.

        Raises:
            Hazard: the access races with an earlier one, or a proxy fence is missing.
        """
        machine, kept = self.machine, []
        place = machine.place()
        actor = machine.actor.index
        index, time, generic = epoch or (actor, clock.get(actor, 0), True)
        if self.cta is not None:
            self.cta.visit(clock, index, time, f"{who}, which uses {region.name}")
        for use in self._uses:
            if use.hi <= region.lo or region.hi <= use.lo:
                kept.append(use)
                continue
            if (write or use.write) and clock.get(use.index, 0) < use.time:
                if write != ADD or use.write != ADD:
                    self._race(region, write, who, clock, use)
            if not generic and use.write and self.proxies and use.fenced != 0:
                if use.fenced is None or clock.get(use.task, 0) < use.fenced:
                    machine.report(
                        f"proxy fence missing: {who} at {place} uses {region.name}, which "
                        f"{use.who} wrote at {use.place}"
                        + ("" if use.fenced is None else f" and fenced too late for {who} to know")
                    )
            covered = region.lo <= use.lo and use.hi <= region.hi
            if not covered or (
                write is not True and (use.write is not write or use.index != index)
            ):
                kept.append(use)
        fenced = None if generic and write else 0
        kept.append(Access(region.lo, region.hi, write, index, time, who, place, fenced, actor))
        self._uses = kept

    def _race(self, region, write, who, clock, use: Access):
        now, then = "writes" if write else "reads", "written" if use.write else "read"
        self.machine.report(
            f"race on {region.name}: {who} {now} it at {self.machine.place()}, but it may still be "
            f"{then} by {use.who}, {use.place}: {describe_gap(self.machine, clock, use.index, use.time)}"
        )

    def fence(self, task):
        """Proxy fence of a task."""
        for use in self._uses:
            if use.task == task.index and use.fenced is None:
                if task.clock.get(use.index, 0) >= use.time:
                    use.fenced = task.clock.get(task.index, 0)


@dataclass(frozen=True, eq=False)
class Region:
    """An array in a space; writing it spoils whatever overlaps it. Unwritten memory is NaN."""

    space: Space
    name: str
    lo: int
    hi: int
    shape: tuple[int, ...]

    def overlaps(self, other: "Region") -> bool:
        """Whether they share bytes."""
        return self.space is other.space and self.lo < other.hi and other.lo < self.hi

    def peek(self) -> np.ndarray:
        """Array, without an access: for operations, which declare theirs when they are issued."""
        array = self.space.contents.get((self.lo, self.hi))
        return np.full(self.shape, np.nan, np.float32) if array is None else array

    def poke(self, array: np.ndarray):
        """Replace the array, without an access."""
        contents = self.space.contents
        for lo, hi in [key for key in contents if key[0] < self.hi and self.lo < key[1]]:
            del contents[lo, hi]
        contents[self.lo, self.hi] = array

    def spoil(self):
        """Forget what lies here: an operation is about to write it."""
        self.poke(np.full(self.shape, np.nan, np.float32))

    def read(self) -> np.ndarray:
        """Array, read by the acting task."""
        self.touch(False)
        return self.peek()

    def write(self, array: np.ndarray):
        """Replace the array, as the acting task."""
        self.touch(True)
        self.poke(array)

    def touch(self, write: bool):
        """Access of the acting task."""
        machine = self.space.machine
        assert not isinstance(machine.actor, Operation)
        kind = "write" if write else "read"
        machine.note(kind, self.name, 0, touches=((self, write),))
        self.space.touch(self, write, machine.actor.name, machine.actor.clock)


class Fragment:
    """A register array of one warp group that MMAs use while they are in flight."""

    def __init__(self, machine: Machine, name: str, shape: tuple[int, int], fill: float = np.nan):
        self.region = Region(Space(machine, proxies=False), name, 0, 1, shape)
        self.region.poke(np.full(shape, fill, np.float32))

    @property
    def values(self) -> np.ndarray:
        """Values, to read or to write in place."""
        self.region.touch(True)
        return self.region.peek()
