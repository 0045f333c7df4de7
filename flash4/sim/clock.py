"""A clock for the same roles: discrete events, with units that whoever runs at the same time has to share.

What a task or an operation does is *work*: so many cycles alone, and so much of each unit. Work that runs side by side
proceeds at full speed as long as the units suffice, and else all that use the scarcest unit slow down by the same
factor. Events are the ends of work; between two of them nothing changes.
"""

import heapq
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from greenlet import getcurrent

from flash4.sim.barriers import NamedBarrier
from flash4.sim.machine import Deadlock, Lane, Machine, Operation, Place, Task

TINY = 1e-9
IN_TURN = {"tensor"}


@dataclass(frozen=True)
class Work:
    """Something that takes time.

    Attributes:
        label: for pictures and tables.
        cycles: how long it takes alone.
        use: unit -> amount, as a share of what the unit can do per cycle, summed over the cycles.
        after: cycles from its end to the moment in which others know.
    """

    label: str
    cycles: float
    use: dict[str, float]
    after: float = 0.0


@dataclass(eq=False)
class Activity:
    """Work in progress; ``done(served)`` is called at its end, with the time at which it first got on."""

    work: Work
    done: Callable[[float], None]
    left: float
    speed: float = 0.0
    served: float | None = None


@dataclass(frozen=True)
class Span:
    """A stretch of time of a row in a picture.

    Attributes:
        row: task, or unit.
        label: what it does, or waits for.
        begin: cycle.
        end: cycle.
        waits: it waits.
        cause: (row, time) of what ended the wait, or of what it follows in another row.
        place: line of the role.
    """

    row: str
    label: str
    begin: float
    end: float
    waits: bool = False
    cause: tuple[str, float] | None = None
    place: Place | None = None


@dataclass(eq=False)
class Pause:
    """Where a task stands: at work, or waiting since ``begin``."""

    label: str
    begin: float
    ready: Callable[[], bool] | None = None
    wake: float = 0.0
    cause: tuple[str, float] | None = None


def share(activities: list[Activity]):
    """Set the speeds: the scarcest unit slows all that use it by one factor, then the next of those left.

    A unit in ``IN_TURN`` serves one at a time, in the order of arrival.
    """
    free, taken = [], set()
    for a in activities:
        wanted = IN_TURN & a.work.use.keys()
        if wanted & taken:
            a.speed = 0.0
        else:
            free.append(a)
        taken |= wanted
    room = dict.fromkeys({unit for a in free for unit in a.work.use}, 1.0)
    while free:
        demand = defaultdict(float)
        for a in free:
            for unit, amount in a.work.use.items():
                demand[unit] += amount / a.work.cycles
        scarcest, factor = None, 1.0
        for unit, wanted in demand.items():
            if wanted * factor > room[unit] + TINY:
                scarcest, factor = unit, max(room[unit], 0.0) / wanted
        bound = [a for a in free if scarcest is None or a.work.use.get(scarcest)]
        for a in bound:
            a.speed = factor
            for unit, amount in a.work.use.items():
                room[unit] -= factor * amount / a.work.cycles
        free = [a for a in free if a not in bound]


class ClockedMachine(Machine):
    """A machine that runs its tasks in the order of time.

    Args:
        chip: rates.
        latest: cycles after which nothing more is drawn; time goes on.

    Attributes:
        now: cycles since the start.
        spans: what was done and waited for, by the order of its end.
        busy: unit -> its busy cycles.
        stalls: (task, what it waits for) -> cycles.
        acting: row of what happens now.
    """

    def __init__(self, chip, latest: float = float("inf")):
        super().__init__(seed=0)
        self.chip, self.latest, self.now = chip, latest, 0.0
        self.spans: list[Span] = []
        self.busy, self.stalls = defaultdict(float), defaultdict(float)
        self._active: list[Activity] = []
        self._timers: list[tuple[float, int, Callable]] = []
        self._pauses: dict[Task, Pause] = {}
        self._wake, self._count, self.acting = chip.mbarrier, 0, "the start"

    def lane(self, name: str, ordered: bool) -> "ClockedLane":
        """Make a lane."""
        self.lanes.append(ClockedLane(self, name, self.new_index(), ordered))
        return self.lanes[-1]

    def note(self, kind, target, count, nbytes=0, touches=()):
        """Keep the acting task's line; there is no trace of steps."""
        if isinstance(self.actor, Task):
            self.actor.place = self.place() if self.now < self.latest else None

    def report(self, story: str):
        """Hazards are the other machine's business."""

    def fence(self):
        """Proxy fences cost what the verb says."""

    def give_way(self):
        """Others go on when it is their time."""

    def spend(self, work: Work):
        """Called by a task: do work."""
        if work.cycles:
            getcurrent().parent.switch(work)

    @contextmanager
    def waking(self, cycles: float):
        """Waits that begin inside take this long from the signal to the go-ahead."""
        before, self._wake = self._wake, cycles
        yield
        self._wake = before

    def until(self, ready, what):
        """Called by a task: wait; costs ``poll`` if there is nothing to wait for."""
        if self.actor is self.host:
            super().until(ready, what)
        else:
            getcurrent().parent.switch(Pause(what, self.now, ready, self._wake))

    def start(self, work: Work, done: Callable[[float], None]):
        """Begin work; ``done`` is called at its end."""
        activity = Activity(work, done, work.cycles)
        self._active.append(activity)
        share(self._active)

    def at(self, time: float, call: Callable[[], None]):
        """Call at a time."""
        self._count += 1
        heapq.heappush(self._timers, (time, self._count, call))

    def run(self):
        """Run until every task has ended.

        Raises:
            Deadlock: tasks wait, and nothing is in progress that could wake them.
        """
        for task in list(self._running):
            self._go_on(task)
        while self._running:
            self._advance()

    def _advance(self):
        ends = [self.now + a.left / a.speed for a in self._active if a.speed > TINY]
        times = ends + [time for time, _, _ in self._timers[:1]]
        if not times:
            waits = [f"{t.name} waits for {p.label()}" for t, p in self._pauses.items()]
            raise Deadlock("; ".join(waits))
        step = max(min(times) - self.now, 0.0)
        self.now += step
        finished = []
        for a in self._active:
            if a.served is None and a.speed > TINY:
                a.served = self.now - step
            a.left -= step * a.speed
            for unit, amount in a.work.use.items():
                self.busy[unit] += step * a.speed * amount / a.work.cycles
            if a.left <= TINY * max(1.0, a.work.cycles):
                finished.append(a)
        if finished:
            self._active = [a for a in self._active if a not in finished]
        calls = [partial(a.done, a.served) for a in finished]
        while self._timers and self._timers[0][0] <= self.now + TINY:
            calls.append(heapq.heappop(self._timers)[2])
        for call in calls:
            call()
            self._look()
        share(self._active)

    def _look(self):
        """Let go on whoever waited for what has just happened."""
        for task, pause in self._pauses.items():
            if pause.ready is not None and pause.cause is None and pause.ready():
                pause.cause = (self.acting, self.now)
                self.at(self.now + pause.wake, lambda task=task: self._end_wait(task))

    def _end_wait(self, task):
        pause = self._pauses.pop(task)
        label = reason(pause.label)
        self.stalls[task.name, label] += self.now - pause.begin
        self.draw(task.name, label, pause.begin, True, pause.cause, task.place)
        self._go_on(task)

    def _go_on(self, task):
        """Let a task run until it works or waits."""
        before, self.actor, self.acting = self.actor, task, task.name
        request = task.thread.switch()
        self.actor = before
        if task.thread.dead:
            self._running.remove(task)
        elif isinstance(request, Work):
            begin = self.now

            def done(_):
                self.draw(task.name, request.label, begin, place=task.place)
                self._go_on(task)

            self.start(request, done)
        elif request.ready():
            request.cause, request.wake = (task.name, self.now), self.chip.poll
            self._pauses[task] = request
            self.at(self.now + self.chip.poll, lambda: self._end_wait(task))
        else:
            self._pauses[task] = request
        self._look()

    def draw(self, row, label, begin, waits=False, cause=None, place=None):
        """Keep a span that ends now, for pictures."""
        if begin < self.latest:
            self.spans.append(Span(row, label, begin, self.now, waits, cause, place))


def reason(story: Callable[[], str]) -> str:
    """Name of the barrier or lane that a story tells of, without numbers."""
    words = story().partition(" (")[0].rpartition(" of ")[2]
    return re.sub(r"\[\d+\]$", "", words)


class ClockedLane(Lane):
    """Operations with a duration; in an ordered lane one begins when the one before has ended."""

    def issue(self, label, run, reads=(), writes=(), work: Work | None = None):
        """Start an operation: ``work``, or a copy of as many bytes as the regions have."""
        machine, task = self.machine, self.machine.actor
        if work is None:
            work = copy_work(machine.chip, label, sum(r.hi - r.lo for r in (*reads, *writes)))
        self.issued += 1
        task_place = machine.place() if machine.now < machine.latest else None
        clock = dict(task.clock)
        operation = Operation(
            self.name, f"{label} of {task.name}", self.issued, run, clock, task_place
        )
        self.last = operation
        if self.ordered:
            self.flying.append((operation, work))
        if len(self.flying) <= 1:
            self._begin(operation, work)

    def _begin(self, operation, work):
        machine, cause = self.machine, (self.machine.acting, self.machine.now)

        def ended(served):
            machine.draw(self.name, work.label, served, False, cause, operation.place)
            machine.at(machine.now + work.after, lambda: self._land(operation))
            if self.ordered:
                self.flying.popleft()
                if self.flying:
                    machine.acting = self.name
                    self._begin(*self.flying[0])

        machine.start(work, ended)

    def _land(self, operation):
        machine, before = self.machine, self.machine.actor
        machine.actor, machine.acting = operation, self.name
        operation.run()
        machine.actor = before
        self.landed = operation.number

    def join(self, number: int):
        """Called by a task: wait until the operations up to ``number`` have landed."""
        machine = self.machine
        machine.note("join", self.name, number)
        if number > self.landed:
            with machine.waking(0.0):
                machine.until(lambda: self.landed >= number, lambda: self.name)


class ClockedNamedBarrier(NamedBarrier):
    """A named barrier under the clock."""

    def wait(self, phase: int):
        """Wait, as ``Barrier``."""
        with self.machine.waking(self.machine.chip.named_barrier):
            super().wait(phase)


def copy_work(chip, label: str, nbytes: int) -> Work:
    """A TMA copy into or out of one SM's shared memory."""
    cycles = nbytes / chip.fill_bytes
    return Work(label, cycles, {"fill": cycles}, after=chip.copy_latency)
