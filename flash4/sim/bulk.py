"""Bulk copies (TMA): loads that count at barriers, in one CTA or in several; stores and additions in commit groups.

A store reads shared memory first and writes global memory later. Waiting for the reads lets the buffer be reused; only
waiting for the whole lets another CTA see the result.
"""

from collections.abc import Callable

import numpy as np

from flash4.sim.barriers import Barrier
from flash4.sim.cluster import lane_called
from flash4.sim.machine import Machine, Task
from flash4.sim.memory import ADD, Region, Space


def load(region: Region, block: np.ndarray, barrier: Barrier, nbytes: int):
    """Start the copy of ``block`` into a region; its bytes count at ``barrier``, which may be the leader's."""
    machine, task = barrier.machine, barrier.machine.actor

    def land():
        region.poke(block)
        barrier.arrive(0, -nbytes)

    lane = lane_called(machine, f"copies of {task.name} into {region.name}")
    lane.issue(f"the copy into {region.name}", land, writes=[region])
    region.spoil()


def load_multicast(regions: list[Region], block: np.ndarray, barriers: list[Barrier], nbytes: int):
    """Start the copy of ``block`` into every CTA's region; it lands in each at its own time, and counts there."""
    for region, barrier in zip(regions, barriers, strict=True):
        load(region, block, barrier, nbytes)


class Accumulator:
    """A float32 array in global memory that starts at zero and that bulk operations add to.

    Args:
        machine: that runs it.
        name: for stories.
        shape: of the array.
        ordered: the sum is to be the same run after run, so that two additions that nothing orders are a race.

    Attributes:
        order: labels of the additions, in the order in which they landed.
    """

    def __init__(self, machine: Machine, name: str, shape: tuple[int, ...], ordered: bool = False):
        self.region = Region(Space(machine, proxies=False), name, 0, 1, shape)
        self.region.poke(np.zeros(shape, np.float32))
        self.kind, self.order = True if ordered else ADD, []

    @property
    def values(self) -> np.ndarray:
        """The sum so far, without an access."""
        return self.region.peek()

    def put(self, array: np.ndarray, label: str):
        """What the sum starts from lands."""
        self.region.poke(array)
        self.order.append(label)

    def add(self, array: np.ndarray, label: str):
        """An addition lands."""
        self.region.poke(self.region.peek() + array)
        self.order.append(label)


class BulkGroups:
    """Bulk copies out of shared memory; every task has commit groups of its own."""

    def __init__(self, machine: Machine):
        self._machine = machine
        self._open: dict[Task, list] = {}  # task -> [(lane of reads, lane of writes, number)]
        self._groups: dict[Task, list[list]] = {}

    def store(
        self, source: Region, put: Callable[[np.ndarray], None], target: Region | None = None
    ):
        """Start a store of ``source``.

        Args:
            source: shared memory.
            put: takes the array when it is written.
            target: where it is written, if somebody else uses that too.
        """
        self._start(source, f"the store of {source.name}", put, [target] if target else [], True)

    def reduce_add(self, source: Region, target: Accumulator, label: str):
        """Start an addition of ``source`` to global memory; ``label`` is what ``target.order`` shows."""

        def put(array):
            target.add(array, label)

        self._start(source, f"the addition of {source.name}", put, [target.region], target.kind)

    def _start(self, source, label, put, targets, kind):
        machine, task, taken = self._machine, self._machine.actor, []
        reads = lane_called(machine, f"reads of {source.name} by {task.name}")
        writes = lane_called(machine, f"writes from {source.name} by {task.name}")
        writes.behind = reads
        reads.issue(label, lambda: taken.append(source.peek().copy()), reads=[source])
        writes.issue(label, lambda: put(taken[0]), writes=targets, kind=kind)
        self._open.setdefault(task, []).append((reads, writes, writes.issued))

    def commit_group(self):
        """Close a group: what the task has started since the last one."""
        task = self._machine.actor
        self._groups.setdefault(task, []).append(self._open.pop(task, []))

    def wait_group(self, pending: int, read: bool = False):
        """Wait until at most the last ``pending`` groups are under way, or with ``read``, still read."""
        machine, task = self._machine, self._machine.actor
        machine.give_way()
        groups, last = self._groups.get(task, []), {}
        for reads, writes, number in sum(groups[: max(len(groups) - pending, 0)], []):
            last[reads] = number
            if not read:
                last[writes] = number
        for lane, number in last.items():
            if task.clock.get(lane.index, 0) < number:
                lane.join(number)
