"""cp.async of Ampere: copies from global to shared memory that a warp starts itself and waits for in groups.

A wait makes the copies visible to the warp that started them, and to nobody else: a barrier has to follow. They access
memory like ordinary writes, so that TMA and MMAs that read from shared memory need a proxy fence first.
"""

import numpy as np

from flash4.sim.barriers import Barrier
from flash4.sim.machine import Machine
from flash4.sim.memory import Region


class CpAsync:
    """The copies of one warp, in groups that end in order.

    Args:
        machine: that runs it.
        name: of the warp.
    """

    def __init__(self, machine: Machine, name: str):
        self._machine, self._task = machine, None
        self._lane = machine.lane(f"cp.async of {name}", ordered=False)
        self._lane.generic = True
        self._groups: list[int] = []  # copies started before each group's end

    def copy(self, region: Region, block: np.ndarray):
        """Start the copy of ``block`` into a region."""
        self._check_task()
        label = f"cp.async into {region.name}"
        self._lane.issue(label, lambda: region.poke(block), writes=[region])
        region.spoil()

    def commit_group(self):
        """Close a group: the copies since the last one."""
        self._check_task()
        self._groups.append(self._lane.issued)

    def wait_group(self, pending: int):
        """Wait until at most the last ``pending`` groups are under way; copies in no group are not waited for."""
        self._check_task()
        self._machine.give_way()
        ended = self._groups[: max(len(self._groups) - pending, 0)]
        if ended:
            self._lane.join(ended[-1])

    def arrive(self, barrier: Barrier):
        """Arrive (``.noinc``) when all copies so far have landed; whoever waits there then sees them."""
        self._check_task()
        self._lane.issue("the arrival behind cp.async", barrier.arrive)

    def _check_task(self):
        machine = self._machine
        self._task = self._task or machine.actor
        if machine.actor is not self._task:
            machine.report(
                f"{machine.actor.name} at {machine.place()} handles copies of {self._task.name}: a warp has "
                f"groups only of its own"
            )
