"""The machine that roles run on: tasks in an adversarial order, barriers, rings, shared memory, asynchronous copies.

A task is a role of one warp group. It gives way at every synchronisation, and a seed decides who goes on. What the
hardware does in its own time is done at the worst time: a copy clears its target when it is issued, and lands at a
random moment or only when nobody can go on without it; an MMA reads and writes when it is waited for.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from greenlet import getcurrent, greenlet

PACES = (1, 1, 4, 30)  # relative speeds of tasks: some race ahead as far as the rings let them
PATIENCE = (0.0, 0.9, 1.0)  # probability that a copy does not land yet; 1 is the latest moment


class Hazard(Exception):
    """The schedule broke a rule of the hardware."""


class Deadlock(Hazard):
    """No task can go on; the message says who waits for what."""


@dataclass(eq=False)
class Task:
    """A role at its current wait."""

    name: str
    greenlet: greenlet
    pace: int
    ready: Callable[[], bool] = lambda: True
    what: Callable[[], str] = lambda: "its start"


class Machine:
    """One CTA: runs its tasks to their ends."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._patience = self._random.choice(PATIENCE)
        self._tasks, self._copies = [], []

    def spawn(self, name: str, role: Callable, *arguments):
        """Add a task that runs ``role(*arguments)``."""

        def body():
            with np.errstate(all="ignore"):  # -inf and 0 / 0 of rows without keys are the GPU's too
                role(*arguments)

        self._tasks.append(Task(name, greenlet(body), self._random.choice(PACES)))

    def until(self, ready: Callable[[], bool], what: Callable[[], str]):
        """Called by a task: go on when ``ready()``; ``what()`` says what it waits for."""
        getcurrent().parent.switch((ready, what))

    def give_way(self):
        """Called by a task: let others go first."""
        self.until(lambda: True, lambda: "nothing")

    def start_copy(self, land: Callable[[], None]):
        """Do ``land()`` at some later time."""
        self._copies.append(land)

    def run(self):
        """Run until every task has ended.

        Raises:
            Deadlock: tasks wait, and no copy is in flight that could wake them.
            Hazard: the last task ended before the last copy, which needs the CTA's shared memory.
        """
        while self._tasks:
            ready = [task for task in self._tasks if task.ready()]
            if self._copies and (not ready or self._random.random() >= self._patience):
                self._copies.pop(self._random.randrange(len(self._copies)))()
            elif ready:
                task = self._random.choices(ready, [task.pace for task in ready])[0]
                request = task.greenlet.switch()
                if task.greenlet.dead:
                    self._tasks.remove(task)
                else:
                    task.ready, task.what = request
            else:
                waits = (f"{task.name} waits for {task.what()}" for task in self._tasks)
                raise Deadlock("; ".join(waits))
        if self._copies:
            raise Hazard(f"the CTA ended with {len(self._copies)} copies in flight")


class Barrier:
    """An mbarrier: a phase completes when its arrivals and the bytes that they announced are all there."""

    def __init__(self, machine: Machine, name: str, arrivals: int):
        self.machine, self.name, self.arrivals = machine, name, arrivals
        self.phase, self._missing, self._bytes = 0, arrivals, 0

    def arrive(self, count: int = 1, nbytes: int = 0):
        """Arrive, and announce bytes; negative are bytes that landed."""
        self._missing, self._bytes = self._missing - count, self._bytes + nbytes
        if self._missing < 0:
            raise Hazard(f"{self.name}: more than {self.arrivals} arrivals in one phase")
        if self._missing == self._bytes == 0:
            self.phase, self._missing = self.phase + 1, self.arrivals

    def wait(self, phase: int):
        """Wait until ``phase`` is complete; by its parity, which is all that the hardware looks at."""
        self.machine.until(
            lambda: (self.phase - phase) % 2 == 1,
            lambda: (
                f"phase {phase} of {self.name} (now {self.phase}, {self._missing} of "
                f"{self.arrivals} arrivals and {self._bytes} bytes missing)"
            ),
        )

    def sync(self):
        """Arrive and wait, as at a named barrier."""
        phase = self.phase
        self.arrive()
        self.wait(phase)


class Memory:
    """Arrays in shared memory; writing one spoils those of ``overlaps``, which share its bytes.

    A write replaces the array, so that a reader sees from its identity whether what it began to read is still there.
    """

    def __init__(self, count: int):
        self.arrays = [np.full((1, 1), np.nan, np.float32)] * count
        self.overlaps = []

    def write(self, index: int, array: np.ndarray):
        """Replace the array at ``index``."""
        for other in self.overlaps:
            other.arrays = [np.full_like(x, np.nan) for x in other.arrays]
        self.arrays[index] = array


class Ring:
    """Slots that TMA fills, with a "full" and an "empty" barrier each; ``readers`` tasks share the arrivals."""

    def __init__(self, machine: Machine, spec, readers: int):
        self.machine, self.spec, self.memory = machine, spec, Memory(spec.stages)
        self.arrivals_per_reader = spec.consumer_arrivals // readers
        arrivals = {"full": 1, "empty": spec.consumer_arrivals}
        self.full, self.empty = (
            [
                Barrier(machine, f"{spec.name} {state}[{i}]", arrivals[state])
                for i in range(spec.stages)
            ]
            for state in arrivals
        )


@dataclass(frozen=True)
class Slot:
    """One use of a ring's slot."""

    ring: Ring
    index: int

    def fill(self, block: np.ndarray, nbytes: int):
        """Start the TMA copy of ``block`` into the slot."""
        ring = self.ring

        def land():
            ring.memory.write(self.index, block)
            ring.full[self.index].arrive(0, -nbytes)

        ring.memory.write(self.index, np.full_like(block, np.nan))
        ring.machine.start_copy(land)

    def commit(self):
        """Producer: announce the bytes; the slot is full when they have landed."""
        self.ring.full[self.index].arrive(1, self.ring.spec.stage_bytes)
        self.ring.machine.give_way()

    def release(self):
        """Consumer: this task no longer reads the slot."""
        self.ring.empty[self.index].arrive(self.ring.arrivals_per_reader)
        self.ring.machine.give_way()


class End:
    """One task's end of a ring: a role uses it as producer or as consumer."""

    def __init__(self, ring: Ring):
        self._ring, self._uses = ring, 0

    def _advance(self, barriers: list[Barrier], lag: int) -> Slot:
        use, index = divmod(self._uses, len(barriers))
        self._uses += 1
        barriers[index].wait(use - lag)
        return Slot(self._ring, index)

    def acquire_and_advance(self) -> Slot:
        """Producer: wait until the next slot is empty, as all are at first."""
        return self._advance(self._ring.empty, 1)

    def wait_and_advance(self) -> Slot:
        """Consumer: wait until the next slot is full."""
        return self._advance(self._ring.full, 0)


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


class Accumulator:
    """Result of asynchronous MMAs in a warp group's registers; whoever touches it while one is in flight gets NaN."""

    def __init__(self, shape: tuple[int, int], fill: float = np.nan):
        self.array, self.in_flight = np.full(shape, fill, np.float32), 0

    @property
    def values(self) -> np.ndarray:
        """Values, to read or to write in place."""
        if self.in_flight:
            self.array[:] = np.nan
        return self.array


class MmaQueue:
    """Asynchronous MMAs of one warp group: they read operands and write accumulators when they are waited for."""

    def __init__(self, machine: Machine):
        self._machine, self._queue = machine, []

    def issue(self, acc: Accumulator, product: Callable, slots: tuple[Slot, ...], accumulate: bool):
        """Issue acc (+)= product(arrays in the slots), which must be there from now until it is waited for."""
        acc.in_flight += 1
        self._queue.append((acc, product, slots, self._arrays(slots), accumulate))

    def wait(self, pending: int):
        """Wait until at most ``pending`` are in flight."""
        self._machine.give_way()
        while len(self._queue) > pending:
            acc, product, slots, issued, accumulate = self._queue.pop(0)
            arrays = self._arrays(slots)
            result = product(*arrays)
            if any(now is not then for now, then in zip(arrays, issued)):
                result = np.nan
            acc.in_flight -= 1
            acc.array[:] = acc.array + result if accumulate else result

    def _arrays(self, slots):
        return [slot.ring.memory.arrays[slot.index] for slot in slots]
