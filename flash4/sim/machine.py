"""The machine that roles run on: tasks in an adversarial order, asynchronous operations, and vector clocks.

A task is one role of one warp group (or warp). It gives way at every synchronisation, and a seed decides who goes on.
An asynchronous operation (a copy, an MMA) belongs to a lane. It reads its sources and writes its results when it
lands: at a random moment, or only when nobody can go on without it.

Every task and every lane has a clock: for each other task and lane, how far it has been waited for. Two accesses to
the same bytes of which one writes are a race unless the later one's clock contains the earlier one. Such a race is
found in whichever order the two happen to come, so that a hazard does not need an unlucky seed to show.
"""

import linecache
import os
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from greenlet import getcurrent, greenlet

PACES = (1, 1, 4, 30)  # relative speeds of tasks: some race ahead as far as the rings let them
# Probability that an operation does not land yet; 1 is the latest moment.
PATIENCE = (0.0, 0.9, 1.0)
SWITCHES = 1_000_000  # more than any run of sensible size: a role that never ends is reported

Clock = dict[int, int]  # index of a task or lane -> its time


class Hazard(Exception):
    """The schedule broke a rule of the hardware; the message tells the story."""


class Deadlock(Hazard):
    """No task can go on; the message says who waits for what."""


def join(clock: Clock, other: Clock):
    """Let ``clock`` know what ``other`` knows."""
    for index, time in other.items():
        if clock.get(index, 0) < time:
            clock[index] = time


def knows(clock: Clock, other: Clock) -> bool:
    """Whether ``clock`` contains ``other``."""
    return all(clock.get(index, 0) >= time for index, time in other.items())


class Place(NamedTuple):
    """A line of a role."""

    file: str
    line: int

    def __str__(self):
        source = linecache.getline(self.file, self.line).partition("#")[0].strip()
        where = f"{os.path.basename(self.file)}:{self.line}"
        return f"{where} `{source}`" if source else where


class Step(NamedTuple):
    """One visible step of a run.

    Attributes:
        actor: task or lane.
        kind: wait, arrive, issue, land, join, read or write.
        target: name of the barrier, lane or region.
        count: phase of a wait, arrivals, or number of an operation.
        nbytes: bytes that an arrival announces; negative are landed ones.
        place: line of the role; None for what lands by itself.
        touches: (region, whether it is written) that an issued operation, or the task itself, uses.
    """

    actor: str
    kind: str
    target: str
    count: int
    nbytes: int = 0
    place: Place | None = None
    touches: tuple = ()


@dataclass(eq=False)
class Task:
    """A role at its current wait; ``lines[t]`` is where its time ``t`` ended.

    ``leave`` is what it does behind its role. Where a machine has several CTAs, ``cta`` is the task's. ``ports`` are its ways into tensor memory, and ``tensor`` is
    what its last fence behind a wait let its tcgen05 operations see.
    """

    name: str
    index: int
    thread: greenlet | None = None
    code: object = None
    pace: int = 1
    ready: Callable[[], bool] = lambda: True
    what: Callable[[], str] = lambda: "its start"
    clock: Clock = field(default_factory=dict)
    lines: list = field(default_factory=lambda: [None])
    place: Place | None = None
    leave: Callable[[], None] = lambda: None
    cta: object = None
    tensor: Clock = field(default_factory=dict)
    ports: list = field(default_factory=list)


@dataclass(eq=False)
class Operation:
    """An asynchronous operation in flight; acts as its issuer and its lane up to itself.

    Attributes:
        name: of its lane.
        label: for stories.
        number: in its lane, from 1 on.
        run: does it.
        clock: what it comes after, and itself.
        place: where it was issued.
        index: of its lane, in clocks.
        cta: of its issuer.
    """

    name: str
    label: str
    number: int
    run: Callable[[], None]
    clock: Clock
    place: Place | None
    index: int = 0
    cta: object = None


class Machine:
    """One CTA, or several that share memory: runs its tasks to their ends.

    Args:
        seed: picks the order.
        strict: stop at the first hazard; else go on after those that leave a way to, and collect them.
    """

    def __init__(self, seed: int, strict: bool = True):
        self._strict, self.hazards = strict, []
        self._random = random.Random(seed)
        self._patience = self._random.choice(PATIENCE)
        self._indices, self._running, self._named = 0, [], {}
        self.tasks, self.lanes, self.spaces, self.barriers, self.ctas = [], [], [], [], []
        self.trace: list[Step] = []
        self.at_exit: list[Callable[[], None]] = []
        self.host = self.actor = Task("the host", self.new_index())

    def new_index(self) -> int:
        """Index of a task or lane in clocks."""
        self._indices += 1
        return self._indices

    def spawn(self, name: str, role: Callable, *arguments):
        """Add a task that runs ``role(*arguments)``; its own lines are what stories name."""

        def body():
            with np.errstate(all="ignore"):  # -inf and 0 / 0 of rows without keys are the GPU's too
                role(*arguments)
                task.leave()

        task = Task(name, self.new_index(), greenlet(body), role.__code__)
        task.pace = self._random.choice(PACES)
        task.clock[task.index] = 1
        self.tasks.append(task)
        self._running.append(task)

    def lane(self, name: str, ordered: bool) -> "Lane":
        """Make a lane."""
        self.lanes.append(Lane(self, name, self.new_index(), ordered))
        return self.lanes[-1]

    def place(self) -> Place | None:
        """Line of its role at which the acting task is; None for an operation."""
        task, frame = self.actor, sys._getframe(1)
        if isinstance(task, Operation):
            return None
        while frame is not None and frame.f_code is not task.code:
            frame = frame.f_back
        return None if frame is None else Place(frame.f_code.co_filename, frame.f_lineno)

    def note(self, kind: str, target: str, count: int, nbytes: int = 0, touches=()):
        """Write a visible step of the actor into the trace."""
        place = self.place()
        self.trace.append(Step(self.actor.name, kind, target, count, nbytes, place, touches))
        if isinstance(self.actor, Task):
            self.actor.place = place

    def report(self, story: str):
        """Raise a hazard, or collect it."""
        if self._strict:
            raise Hazard(story)
        self.hazards.append(story)

    def publish(self):
        """End the acting task's current time: what it does next is unknown to those who learn its clock now."""
        task = self.actor
        if isinstance(task, Task):
            task.clock[task.index] = task.clock.get(task.index, 0) + 1
            task.lines.append(task.place)

    def until(self, ready: Callable[[], bool], what: Callable[[], str]):
        """Called by a task: go on when ``ready()``; ``what()`` says what it waits for."""
        if self.actor is self.host:  # setting up, before anybody else is there
            if not ready():
                raise Deadlock(f"the host waits for {what()}")
            return
        getcurrent().parent.switch((ready, what))

    def give_way(self):
        """Called by a task: let others go first."""
        self.until(lambda: True, lambda: "nothing")

    def fence(self):
        """Proxy fence: let asynchronous readers see what the acting task wrote to shared memory so far."""
        task = self.actor
        for space in self.spaces:
            space.fence(task)

    def name_barrier(self, number: int, use: str, cta=None):
        """Reserve a named barrier of the CTA, or of one of several.

        Raises:
            Hazard: there is no such barrier, or something else uses it.
        """
        if not 1 <= number <= 15:
            raise Hazard(
                f"{use}: named barrier {number}; there are 1 to 15, and 0 is __syncthreads"
            )
        known = self._named.setdefault((cta, number), use)
        if known != use:
            raise Hazard(f"{use}: named barrier {number} is already that of {known}")

    def run(self):
        """Run until every task has ended.

        Raises:
            Deadlock: tasks wait, and no operation is in flight that could wake them.
            Hazard: a rule is broken on the way, or nobody waited for an operation that needs the CTA's memory.
        """
        for _ in range(SWITCHES):
            if not self._running:
                break
            self._step()
        else:
            raise Hazard(f"no end after {SWITCHES} switches of tasks")
        for check in (self._check_lanes, *self.at_exit):
            check()

    def _step(self):
        ready = [task for task in self._running if task.ready()]
        flying = [x for x in self.lanes if x.flying and (x.behind is None or x.free())]
        if flying and (not ready or self._random.random() >= self._patience):
            self._random.choice(flying).land()
        elif ready:
            task = self._random.choices(ready, [task.pace for task in ready])[0]
            self.actor = task
            request = task.thread.switch()
            self.actor = self.host
            if task.thread.dead:
                self._running.remove(task)
            else:
                task.ready, task.what = request
        else:
            stories = [f"{task.name} waits for {task.what()}" for task in self._running]
            stories += [f"{t.name} has left" for t in self.tasks if t not in self._running]
            raise Deadlock("; ".join(stories))

    def _check_lanes(self):
        known: Clock = {}
        for task in self.tasks:
            join(known, task.clock)
        for lane in self.lanes:
            if known.get(lane.index, 0) < lane.issued:
                self.report(
                    f"the CTA ends, and nobody has waited for {lane.last.label}, issued at "
                    f"{lane.last.place}: it may still use the CTA's shared memory"
                )

    def who(self, index: int):
        """Task or lane of an index."""
        everyone = (self.host, *self.tasks, *self.lanes, *self.ctas)
        return next(x for x in everyone if x.index == index)


class Lane:
    """Asynchronous operations that land one after the other.

    In an ordered lane (the MMAs of one warp group) an operation may use what the one before it wrote.

    Attributes:
        behind: lane whose operation of the same number must have landed before one of this lane does.
        generic: whether its operations access memory like the task itself, and need its proxy fences.
    """

    behind: "Lane | None" = None
    generic = False

    def __init__(self, machine: Machine, name: str, index: int, ordered: bool):
        self.machine, self.name, self.index, self.ordered = machine, name, index, ordered
        self.flying: deque[Operation] = deque()
        self.issued, self.landed, self.last = 0, 0, None

    def issue(self, label: str, run: Callable[[], None], reads=(), writes=(), kind=True):
        """Start an operation that uses regions; ``run()`` does it when it lands, ``kind`` is that of its writes."""
        machine, task = self.machine, self.machine.actor
        touches = [(region, False) for region in reads] + [(region, kind) for region in writes]
        machine.note("issue", self.name, self.issued + 1, touches=tuple(touches))
        clock = dict(task.clock)
        if self.ordered:
            clock[self.index] = self.issued
        self.issued += 1
        label = f"{label} of {task.name}"
        for region, write in touches:
            region.space.touch(region, write, label, clock, (self.index, self.issued, self.generic))
        clock[self.index] = self.issued
        self.last = Operation(
            self.name, label, self.issued, run, clock, machine.place(), self.index, task.cta
        )
        self.flying.append(self.last)
        machine.publish()

    def free(self) -> bool:
        """Whether its next operation may land."""
        return self.behind is None or self.behind.landed > self.landed

    def land(self):
        """Let the next operation happen."""
        operation = self.flying.popleft()
        machine, before = self.machine, self.machine.actor
        machine.actor = operation
        machine.note("land", self.name, operation.number)
        operation.run()
        machine.actor = before
        self.landed = operation.number

    def join(self, number: int):
        """Called by a task: wait until the operations up to ``number`` have landed."""
        machine, task = self.machine, self.machine.actor
        machine.note("join", self.name, number)
        machine.until(lambda: self.landed >= number, lambda: f"{self.name}, {task.place}")
        if number > 0:
            task.clock[self.index] = max(task.clock.get(self.index, 0), number)


def describe_gap(machine: Machine, clock: Clock, index: int, time: int) -> str:
    """What a clock lacks of another's time."""
    other = machine.who(index)
    if isinstance(other, Lane):
        return f"of {other.name}, {clock.get(index, 0)} are known to have landed, and this is number {time}"
    if other in machine.ctas:
        return f"it does not know that {other.name} has started"
    known = other.lines[min(clock.get(index, 0), len(other.lines) - 1)]
    if known is None:
        return f"it knows nothing of {other.name}"
    return f"of {other.name} it knows what came before {known}"
