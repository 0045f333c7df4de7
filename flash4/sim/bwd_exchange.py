"""How the simulated MMA warpgroups of the Hopper backward meet, and tell each other how far they are."""

from flash4.common.graph import WARPGROUP
from flash4.sim.barriers import NamedBarrier
from flash4.sim.machine import Machine
from flash4.sm90.bwd_config import MMA_WARPGROUPS, STAGES
from flash4.sm90.bwd_ops import BARRIER_DS_EMPTY, BARRIER_TURN, EXCHANGE_THREADS

GROUPS = range(MMA_WARPGROUPS)


class Exchange:
    """Where both MMA warpgroups meet, or tell each other how far they are with the dS of a number.

    Args:
        meeting: of both.
        empty: barriers by warpgroup that writes dS and stage; None where they always meet.
        turns: barriers by warpgroup whose turn it is to multiply; None where both may.
        group: whose end this is.
    """

    def __init__(self, meeting: NamedBarrier, empty, turns, group: int):
        self._meeting, self._empty, self._turns, self._group = meeting, empty, turns, group

    def open_turns(self):
        """The first turn is that of the first warpgroup."""
        if self._group == 1:
            self.pass_turn()

    def take_turn(self):
        """Wait until the other warpgroup has issued its products."""
        self._turns[self._group].sync()

    def pass_turn(self):
        """Let the other warpgroup issue its products."""
        barrier = self._turns[1 - self._group]
        barrier.arrive()
        barrier.machine.give_way()

    def sync(self):
        """Wait for the other warpgroup."""
        self._meeting.sync()

    def open(self):
        """Say that the stage of the other's first dS is empty."""
        self.release(1)

    def acquire(self, number):
        """Wait until the other has read the dS that the stage of ``number`` held."""
        self._empty[self._group][number % STAGES].sync()

    def release(self, number):
        """Say that this warpgroup has read the other's dS."""
        barrier = self._empty[1 - self._group][number % STAGES]
        barrier.arrive()
        barrier.machine.give_way()


def barriers_of_ds(machine: Machine):
    """Barriers of dS by warpgroup that writes it and stage."""

    def barrier(group, stage):
        number, name = BARRIER_DS_EMPTY + STAGES * group + stage, f"ds[{group}][{stage}] empty"
        return NamedBarrier(machine, number, name, EXCHANGE_THREADS, WARPGROUP)

    return [[barrier(group, stage) for stage in range(STAGES)] for group in GROUPS]


def barriers_of_turns(machine: Machine):
    """Barriers by warpgroup whose turn it is to multiply."""

    def barrier(group):
        name = f"turn of mma[{group}]"
        return NamedBarrier(machine, BARRIER_TURN + group, name, EXCHANGE_THREADS, WARPGROUP)

    return [barrier(group) for group in GROUPS]
