"""Every order of a small schedule, not only those that a seed happens to pick.

The steps of a role do not depend on the order in which others run: a recorded run gives each actor's list of steps, and
only their interleaving is open. ``explore`` walks all interleavings of those lists, with barriers as plain counters and
operations that may stay in flight as long as nobody waits for them. Steps that no other actor can notice are taken at
once, operations that nobody notices land as late as they may, for that is when they are most in the way (partial-order
reductions), and no state is visited twice.

The clocks of the recorded run and this search do not share code: one argues, the other looks.
"""

from dataclasses import dataclass
from typing import NamedTuple

from flash4.sim.barriers import Barrier
from flash4.sim.independence import Independence
from flash4.sim.machine import Deadlock, Hazard, Machine, Step
from flash4.sim.memory import ADD

MAX_STATES = 300_000
ACCESSES = ("read", "write")
# A copy's bytes count in the moment in which it lands; between two accesses of a task nobody can tell the time.
TOGETHER = {("land", "arrive"), *((first, second) for first in ACCESSES for second in ACCESSES)}


class Cell(NamedTuple):
    """State of a barrier; of a semaphore, ``phase`` is its count."""

    phase: int
    missing: int
    nbytes: int


class State(NamedTuple):
    """Where every actor is, and what the barriers show."""

    positions: tuple[int, ...]
    cells: tuple[Cell, ...]


class TooManyStates(ValueError):
    """The schedule is too large to walk through all its orders."""


@dataclass
class Found:
    """What an exhaustive search saw."""

    states: int
    steps: int


class Explorer:
    """All interleavings of the steps of a recorded run.

    Args:
        machine: after its run, whole or failed.
    """

    def __init__(self, machine: Machine):
        self._arrivals = {b.name: b.arrivals for b in machine.barriers if isinstance(b, Barrier)}
        programs: dict[str, list[list[Step]]] = {}
        for step in machine.trace:
            program = programs.setdefault(step.actor, [])
            last = program[-1][0].kind if program else None
            if (last, step.kind) in TOGETHER:
                program[-1].append(step)
            else:
                program.append([step])
        self.names, self.programs = list(programs), list(programs.values())
        every = [step for program in self.programs for group in program for step in group]
        lanes = {lane.name: lane for lane in machine.lanes}
        self._delay_landings(lanes)
        if (len(lanes), len(self._arrivals)) != (len(machine.lanes), len(machine.barriers)):
            raise ValueError("two lanes or two barriers have the same name")
        self._cells = sorted(
            {s.target for s in every if s.kind in ("wait", "arrive") and s.target not in lanes}
        )
        self._where = {name: i for i, name in enumerate(self._cells)}
        self._lanes = {
            name: self.names.index(name) if name in self.names else None for name in lanes
        }
        self._ordered = {name: lane.ordered for name, lane in lanes.items()}
        self._behind = {n: lane.behind.name for n, lane in lanes.items() if lane.behind}
        self._count_landings()
        self._touches = {
            (group[0].target, group[0].count): group[0]
            for program in self.programs
            for group in program
            if group[0].kind == "issue"
        }
        self._issues = self._count_issues()
        users: dict[int, set[str]] = {}
        for step in every:
            for region, _ in step.touches:
                users.setdefault(id(region.space), set()).add(step.actor)
        self._private = {space for space, actors in users.items() if len(actors) == 1}
        self._ctas = {
            cta: [self.names.index(task.name) for task in cta.tasks if task.name in self.names]
            for cta in machine.ctas
        }
        homes = {b.name: b.cta for b in machine.barriers if isinstance(b, Barrier)}
        self._visits = [[self._visited(group, homes) for group in p] for p in self.programs]
        self._independence = Independence(
            self.programs, self._touches, self._behind, self._private, (self._ctas, self._visits)
        )

    def _delay_landings(self, lanes: dict):
        """Let what has no arrival of its own land with the next in its lane, or when its issuer waits for it."""
        self._joiners: dict[str, set[int]] = {}
        last: dict[str, int] = {}
        for actor, program in enumerate(self.programs):
            for step in (step for group in program for step in group if step.kind == "join"):
                self._joiners.setdefault(step.target, set()).add(actor)
                last[step.target] = max(last.get(step.target, 0), step.count)
        before = {lane.behind.name for lane in lanes.values() if lane.behind}
        self._late = {
            (actor, position)
            for actor, (name, program) in enumerate(zip(self.names, self.programs))
            if name in last and name not in before and all(len(group) == 1 for group in program)
            for position, (step,) in enumerate(program)
            if step.count <= last[name]
        }
        for actor, name in enumerate(self.names):
            if name not in lanes or name in last or name in before:
                continue
            merged: list[list[Step]] = []
            for group in self.programs[actor]:
                if merged and merged[-1][-1].kind == "land":
                    merged[-1] += group
                else:
                    merged.append(list(group))
            self.programs[actor] = merged

    def _count_landings(self):
        """How many operations of a lane have landed at each of its positions."""
        self._landings = {}
        for lane, actor in self._lanes.items():
            table = [0]
            for group in self.programs[actor] if actor is not None else ():
                table.append(table[-1] + sum(step.kind == "land" for step in group))
            self._landings[lane] = table

    def _visited(self, group: list[Step], homes: dict) -> set:
        """CTAs whose memory or barriers a step uses."""
        if not self._ctas:
            return set()
        touches = [touch for step in group for touch in step.touches]
        for step in group:
            if step.kind == "land":
                touches += self._touches[step.actor, step.count].touches
        visited = {region.space.cta for region, _ in touches}
        return (visited | {homes.get(step.target) for step in group}) - {None}

    def _count_issues(self) -> dict[str, tuple[int, list[int]]]:
        """Lane -> (actor that issues into it, how many it has issued at each of its positions)."""
        tables = {}
        for actor, program in enumerate(self.programs):
            for lane in {group[0].target for group in program if group[0].kind == "issue"}:
                table = [0]
                for step, *_ in program:
                    table.append(table[-1] + (step.kind == "issue" and step.target == lane))
                if lane in tables:
                    raise ValueError(f"{lane}: more than one issuer")
                tables[lane] = actor, table
        return tables

    def start(self) -> State:
        """State before anything has happened."""
        cells = tuple(Cell(0, self._arrivals.get(name, 0), 0) for name in self._cells)
        return State((0,) * len(self.programs), cells)

    def _landed(self, state: State, lane: str) -> int:
        actor = self._lanes[lane]
        return 0 if actor is None else self._landings[lane][state.positions[actor]]

    def _issued(self, state: State, lane: str) -> int:
        actor, table = self._issues[lane]
        return table[state.positions[actor]]

    def enabled(self, state: State, actor: int) -> bool:
        """Whether an actor can take its next step."""
        step = self.programs[actor][state.positions[actor]][0]
        if step.kind == "wait":
            cell = state.cells[self._where[step.target]]
            if step.target not in self._arrivals:
                return cell.phase >= step.count
            return (cell.phase - step.count) % 2 == 1
        if step.kind == "join":
            return self._landed(state, step.target) >= step.count
        if step.kind == "land":
            return self._can_land(state, actor)
        return True

    def _can_land(self, state: State, actor: int) -> bool:
        position = state.positions[actor]
        lane = self.names[actor]
        number = max(step.count for step in self.programs[actor][position] if step.kind == "land")
        behind = self._behind.get(lane)
        if behind is not None and self._landed(state, behind) < number:
            return False
        if (actor, position) in self._late and not self._awaited(state, lane, number):
            return False
        return self._issued(state, lane) >= number

    def _awaited(self, state: State, lane: str, number: int) -> bool:
        for actor in self._joiners[lane]:
            program, position = self.programs[actor], state.positions[actor]
            if position < len(program):
                step = program[position][0]
                if (step.kind, step.target) == ("join", lane) and step.count >= number:
                    return True
        return False

    def take(self, state: State, actor: int) -> State:
        """State after an actor's next step.

        Raises:
            Hazard: the step breaks a rule.
        """
        group = self.programs[actor][state.positions[actor]]
        cells = state.cells
        for cta in self._visits[actor][state.positions[actor]]:
            self._check_running(state, actor, group, cta)
        for step in group:
            if step.kind == "arrive":
                cells = self._arrive(cells, step)
            elif step.kind == "wait" and step.target in self._arrivals:
                if cells[self._where[step.target]].phase != step.count + 1:
                    raise Hazard(f"{tell(step)} ends at once, by the parity of another phase")
            elif step.touches:
                self._check_flying(state, step)
        positions = state.positions
        return State((*positions[:actor], positions[actor] + 1, *positions[actor + 1 :]), cells)

    def _check_running(self, state: State, actor: int, group: list[Step], cta):
        """A CTA that a step uses has begun, and has not ended."""
        tasks = self._ctas[cta]
        if all(state.positions[task] == len(self.programs[task]) for task in tasks):
            what = " and ".join(tell(step) for step in group)
            raise Hazard(f"{what}, and uses {cta.name}, all of whose tasks have ended")
        step = group[0]
        if step.kind != "land" and actor not in tasks and not cta.peers:
            if not any(state.positions[task] for task in tasks):
                raise Hazard(f"{tell(step)}, and uses {cta.name}, which has not started")

    def _arrive(self, cells, step: Step):
        where = self._where[step.target]
        cell = cells[where]
        if step.target not in self._arrivals:
            cell = cell._replace(phase=cell.phase + 1)
        else:
            cell = Cell(cell.phase, cell.missing - step.count, cell.nbytes + step.nbytes)
            if cell.missing < 0:
                raise Hazard(f"{tell(step)} is one arrival too many in phase {cell.phase}")
            if cell.missing == cell.nbytes == 0:
                cell = Cell(cell.phase + 1, self._arrivals[step.target], 0)
        return (*cells[:where], cell, *cells[where + 1 :])

    def _check_flying(self, state: State, step: Step):
        for lane in self._issues:
            if lane == step.target and self._ordered[lane]:
                continue
            for number in range(self._landed(state, lane) + 1, self._issued(state, lane) + 1):
                other = self._touches[lane, number]
                for region, write in step.touches:
                    for used, written in other.touches:
                        add = write == written == ADD
                        if (write or written) and not add and region.overlaps(used):
                            raise Hazard(
                                f"race on {region.name}: {tell(step)}, while number {other.count} of "
                                f"{other.target}, issued at {other.place}, has not landed"
                            )

    def quiet(self, state: State, actor: int) -> bool:
        """Whether nobody can notice the next step, so that it may as well be taken now.

        An access to registers is of that kind: only the task's own MMAs can be in its way, and it never meets more
        of them in flight than when it is taken at once.
        """
        group = self.programs[actor][state.positions[actor]]
        if group[0].kind == "join":
            return True
        return group[0].kind in ACCESSES and all(
            id(region.space) in self._private for step in group for region, _ in step.touches
        )

    def moves(self, state: State) -> list[int]:
        """Actors whose next steps have to be tried."""
        able = [
            actor
            for actor, program in enumerate(self.programs)
            if state.positions[actor] < len(program) and self.enabled(state, actor)
        ]
        quiet = next((actor for actor in able if self.quiet(state, actor)), None)
        return self._independence.pick(state.positions, able) if quiet is None else [quiet]

    def stuck(self, state: State) -> str:
        """Story of a state in which nobody can move."""
        waits = []
        for actor, program in enumerate(self.programs):
            if state.positions[actor] < len(program):
                step = program[state.positions[actor]][0]
                if step.kind != "land":
                    waits.append(tell(step))
        return "; ".join(waits)


def tell(step: Step) -> str:
    """A step in words."""
    what = {
        "wait": f"waits for phase {step.count} of {step.target}",
        "arrive": f"arrives at {step.target}",
        "issue": f"issues number {step.count} of {step.target}",
        "join": f"waits for number {step.count} of {step.target}",
        "land": f"lands number {step.count}",
        "read": f"reads {step.target}",
        "write": f"writes {step.target}",
    }[step.kind]
    return f"{step.actor} {what}" + (f" at {step.place}" if step.place else "")


def explore(machine: Machine, max_states: int = MAX_STATES) -> Found:
    """Walk through all orders of a recorded run.

    Raises:
        Hazard: in some order a rule is broken, or nobody can go on; the message ends with the last steps before.
        TooManyStates: there are more than ``max_states`` of them.
    """
    explorer = Explorer(machine)
    start = explorer.start()
    seen, stack, steps = {start}, [(start, iter(explorer.moves(start)))], 0
    path: list[Step] = []
    while stack:
        state, moves = stack[-1]
        actor = next(moves, None)
        if actor is None:
            stack.pop()
            if path:
                path.pop()
            continue
        steps += 1
        try:
            following = explorer.take(state, actor)
        except Hazard as hazard:
            raise Hazard(f"{hazard}{_after(path)}") from None
        if following in seen:
            continue
        seen.add(following)
        if len(seen) > max_states:
            raise TooManyStates(f"more than {max_states} states; try fewer tiles or blocks")
        path.append(explorer.programs[actor][state.positions[actor]][0])
        able = explorer.moves(following)
        if not able and explorer.stuck(following):
            raise Deadlock(explorer.stuck(following) + _after(path))
        stack.append((following, iter(able)))
    return Found(len(seen), steps)


def _after(path: list[Step], last: int = 6) -> str:
    return "; the last steps before: " + ", then ".join(tell(step) for step in path[-last:])
