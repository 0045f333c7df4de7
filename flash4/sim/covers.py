"""Checks the claim that an edge frees another one.

An mbarrier without an "empty" side may be raised again only when its waiters have seen the last phase. Where another
edge implies that, a schedule says so: ``covered_by``. Here the claim is checked on the trace of a run: clocks pass on
through the named edges alone, and every arrival of a phase must still know that each waiter has seen the phase before.
That something else happens to order the two does not make a claim true.
"""

from collections import defaultdict
from collections.abc import Iterable

from flash4.sim.machine import Clock, Machine, Step, join


class Replay:
    """Clocks of a recorded run, passed on by some barriers only.

    Args:
        machine: after its run.
        passing: names of the barriers that pass clocks on.
    """

    def __init__(self, machine: Machine, passing: Iterable[str]):
        self._machine, self._passing = machine, set(passing)
        self._arrivals = {b.name: b.arrivals for b in machine.barriers}
        self._ordered = {lane.name: lane.ordered for lane in machine.lanes}
        self._clocks: dict[str, Clock] = defaultdict(dict)
        self._times: dict[str, int] = defaultdict(int)
        self._pending: dict[str, tuple[str, int]] = {}  # task -> the wait that it has begun
        self._issued: dict[tuple[str, int], Clock] = {}
        self._gathered: dict[tuple[str, int], Clock] = defaultdict(dict)
        self._cells = {name: [0, count, 0] for name, count in self._arrivals.items()}

    def arrivals(self, barriers: set[str]):
        """Yield (step, phase, clock of whoever arrives) of every arrival at some barriers."""
        for step in self._machine.trace:
            clock = self._advance(step)
            if step.kind == "arrive" and step.target in self._arrivals:
                phase = self._arrive(step, clock)
                if step.target in barriers:
                    yield step, phase, clock

    def _advance(self, step: Step) -> Clock:
        actor, clock = step.actor, self._clocks[step.actor]
        if actor in self._pending:  # it has gone on since
            join(clock, self._gathered[self._pending.pop(actor)])
        if step.kind == "land":
            issued = self._issued[actor, step.count]
            if not self._ordered[actor]:
                clock.clear()
            join(clock, issued)
        self._times[actor] += 1
        clock[actor] = self._times[actor]
        if step.kind == "issue":
            self._issued[step.target, step.count] = dict(clock)
        elif step.kind == "wait" and step.target in self._passing:
            self._pending[actor] = step.target, step.count
        return clock

    def _arrive(self, step: Step, clock: Clock) -> int:
        cell = self._cells[step.target]
        phase = cell[0]
        if step.target in self._passing:
            join(self._gathered[step.target, phase], clock)
        cell[1], cell[2] = cell[1] - step.count, cell[2] + step.nbytes
        if cell[1] == cell[2] == 0:
            self._cells[step.target] = [phase + 1, self._arrivals[step.target], 0]
        return phase


def sights(machine: Machine, barriers: set[str]) -> dict[tuple[str, int], list[tuple[Step, int]]]:
    """(barrier, phase) -> the waits for it, each with the time of its actor."""
    times, found = defaultdict(int), defaultdict(list)
    for step in machine.trace:
        times[step.actor] += 1
        if step.kind == "wait" and step.target in barriers:
            found[step.target, step.count].append((step, times[step.actor]))
    return found


def check_cover(machine: Machine, name: str, barriers: set[str], cover: str, passing: set[str]):
    """Check that the barriers of a cover order every reuse of an edge.

    Args:
        machine: after its run.
        name: of the edge.
        barriers: of the edge.
        cover: names of the edges that are said to free it.
        passing: barriers of those.
    """
    seen = sights(machine, barriers)
    for step, phase, clock in Replay(machine, passing).arrivals(barriers):
        if step.nbytes < 0:
            continue  # bytes of a copy belong to the arrival that announced them
        for sight, time in seen[step.target, phase - 1]:
            if clock.get(sight.actor, 0) < time:
                machine.report(
                    f"{name} is said to be freed by {cover}, but that does not make {step.actor}"
                    + (f", {step.place}," if step.place else "")
                    + f" arrive at {step.target} for phase {phase} after {sight.actor} has seen phase "
                    f"{phase - 1} at {sight.place}"
                )
                return
