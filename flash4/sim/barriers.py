"""Barriers and semaphores, with the rules that keep their counts meaningful.

A phase of a barrier is told from the next one by its parity only. So whoever arrives or waits must come after the phase
before, and no phase may end before everyone who waits for the last has seen it. Both are checked by clocks.
"""

from flash4.sim.machine import Hazard, Machine, Operation, describe_gap, join, knows


class Barrier:
    """An mbarrier: a phase completes when its arrivals and the bytes that they announced are all there."""

    def __init__(self, machine: Machine, name: str, arrivals: int, cta=None):
        self.machine, self.name, self.arrivals, self.cta = machine, name, arrivals, cta
        self.phase, self.missing, self.bytes = 0, arrivals, 0
        self._clock, self._done, self._seen, self._waiting = {}, [], {}, {}
        machine.barriers.append(self)

    def arrive(self, count: int = 1, nbytes: int = 0):
        """Arrive, and announce bytes; negative are bytes that landed."""
        machine, actor = self.machine, self.machine.actor
        machine.note("arrive", self.name, count, nbytes)
        if self.cta is not None:
            self.cta.check_arrival(self)
        if self.phase and not knows(actor.clock, self._done[-1]):
            machine.report(
                f"{actor.name} arrives at {self.name} for phase {self.phase} at {machine.place()}, but "
                f"nothing makes it come after phase {self.phase - 1}: it may count there; "
                f"{self._gap(actor.clock, self._done[-1])}"
            )
        join(self._clock, actor.clock)
        self.missing, self.bytes = self.missing - count, self.bytes + nbytes
        if self.missing < 0:
            raise Hazard(
                f"{self.name}: more than {self.arrivals} arrivals in phase {self.phase}, the last by "
                f"{actor.name} at {machine.place()}"
            )
        machine.publish()
        if self.missing == self.bytes == 0:
            self._complete()

    def _complete(self):
        for waiter, time in self._seen.items():
            if self._clock.get(waiter.index, 0) < time:
                self.machine.report(
                    f"phase {self.phase} of {self.name} may end before {waiter.name} has seen phase "
                    f"{self.phase - 1}: only their parity tells them apart"
                )
        self._done.append(self._clock)
        self._clock, self._seen = {}, {}
        self.phase, self.missing = self.phase + 1, self.arrivals
        for waiter, phase in self._waiting.items():
            self._check_passed(waiter, phase)

    def _check_passed(self, waiter, phase):
        if self.phase > phase + 1:
            raise Hazard(
                f"phase {phase + 1} of {self.name} ended before {waiter.name} saw phase {phase} at "
                f"{waiter.place}: only their parity tells them apart"
            )

    def wait(self, phase: int):
        """Wait until ``phase`` is complete; by its parity, which is all that the hardware looks at."""
        machine, task = self.machine, self.machine.actor
        machine.note("wait", self.name, phase)
        if self.cta is not None:
            self.cta.check_wait(self)
        self._check_passed(task, phase)
        self._waiting[task] = phase
        machine.until(lambda: (self.phase - phase) % 2 == 1, lambda: self._story(task, phase))
        del self._waiting[task]
        if self.phase != phase + 1 or (phase > 0 and not knows(task.clock, self._done[phase - 1])):
            machine.report(
                f"{task.name} waits for phase {phase} of {self.name} at {task.place} without having "
                f"seen phase {phase - 1}: by its parity the wait may end at once"
            )
        if 0 <= phase < self.phase:
            join(task.clock, self._done[phase])
        self._seen[task] = task.clock.get(task.index, 0)

    def look(self, phase: int):
        """Check a look whether ``phase`` is complete, by its parity; whoever looks must have seen the phase before."""
        machine, task = self.machine, self.machine.actor
        if phase > 0 and (self.phase < phase or not knows(task.clock, self._done[phase - 1])):
            machine.report(
                f"{task.name} looks at phase {phase} of {self.name} at {machine.place()} without having "
                f"seen phase {phase - 1}: by its parity it may seem complete"
            )

    def sync(self):
        """Arrive and wait, as at a named barrier."""
        phase = self.phase
        self.arrive()
        self.wait(phase)

    def _story(self, task, phase) -> str:
        nbytes = f"{self.bytes} bytes missing"
        if self.bytes < 0:
            nbytes = f"no bytes missing, but {-self.bytes} unannounced ones there"
        return (
            f"phase {phase} of {self.name} (now {self.phase}, {self.missing} of {self.arrivals} "
            f"arrivals and {nbytes}) at {task.place}"
        )

    def _gap(self, clock, other) -> str:
        index = next(i for i, time in other.items() if clock.get(i, 0) < time)
        return describe_gap(self.machine, clock, index, other[index])


class NamedBarrier(Barrier):
    """One of a CTA's 15 named barriers; ``threads`` as the instruction counts them, ``unit`` for each arrival."""

    def __init__(self, machine: Machine, number: int, name: str, threads: int, unit: int, cta=None):
        machine.name_barrier(number, name, cta)
        super().__init__(machine, f"{name} (barrier {number})", threads // unit, cta)


class Semaphore:
    """A counter in global memory: whoever waits for a target knows that this many have added, not which."""

    def __init__(self, machine: Machine, name: str):
        self.machine, self.name = machine, name
        self._clocks = [{}]  # what is known once the counter shows its index

    def add(self):
        """Add one, with release semantics."""
        actor = self.machine.actor
        assert not isinstance(actor, Operation)
        self.machine.note("arrive", self.name, 1)
        clock = dict(self._clocks[-1])
        join(clock, actor.clock)
        self._clocks.append(clock)
        self.machine.publish()
        self.machine.give_way()

    def wait(self, target: int):
        """Wait until the counter is at least ``target``; more may have come, but nobody can rely on it."""
        machine, task = self.machine, self.machine.actor
        machine.note("wait", self.name, target)
        machine.until(
            lambda: len(self._clocks) > target,
            lambda: f"{target} counts of {self.name} (now {len(self._clocks) - 1}) at {task.place}",
        )
        join(task.clock, self._clocks[target])
