"""Several CTAs of a cluster in one machine: their memory, their ends, and what one does to another.

Every CTA has shared memory, named barriers and tasks of its own. What crosses over (a remote arrival, a copy into the
peer's memory, a commit to both CTAs) is an operation: it happens some time after its issue. A CTA must have started
before another one touches it, and must not end before it knows that the last of them has come.
"""

from flash4.sim.barriers import Barrier, NamedBarrier
from flash4.sim.machine import Clock, Hazard, Lane, Machine, Operation, Task, join
from flash4.sim.memory import Region, Space


class Cta:
    """One CTA of a cluster.

    Args:
        machine: that runs it.
        rank: in the cluster; 0 is the leader of a pair.
        cluster: its name, where a machine has several.

    Attributes:
        smem: its shared memory.
        index: in clocks: whoever knows it knows that the CTA has started and set up its barriers.
    """

    def __init__(self, machine: Machine, rank: int, cluster: str = ""):
        self.machine, self.rank = machine, rank
        self.name = f"{cluster}.cta{rank}" if cluster else f"cta{rank}"
        self.index, self.smem, self.tasks = machine.new_index(), Space(machine, cta=self), []
        self._visits: dict[int, tuple] = {}  # index of a task or lane -> (time, who, place)
        self.peers: list[Cta] = []  # known to have started when the roles begin
        machine.ctas.append(self)
        machine.at_exit.append(self._check_exit)

    def spawn(self, name: str, role, *arguments):
        """Add a task of this CTA; as of ``Machine``."""
        self.machine.spawn(f"{self.name}.{name}", role, *arguments)
        task = self.machine.tasks[-1]
        task.cta = self
        for cta in (self, *self.peers):
            task.clock[cta.index] = 1
        self.tasks.append(task)

    def barrier(self, name: str, arrivals: int) -> Barrier:
        """Make an mbarrier in this CTA's shared memory."""
        return Barrier(self.machine, f"{self.name}.{name}", arrivals, self)

    def named_barrier(self, number: int, name: str, threads: int, unit: int) -> NamedBarrier:
        """Make one of this CTA's 15 named barriers; as of ``NamedBarrier``."""
        return NamedBarrier(self.machine, number, f"{self.name}.{name}", threads, unit, self)

    def region(self, name: str, lo: int, hi: int, shape: tuple[int, ...]) -> Region:
        """Make an array in this CTA's shared memory."""
        return Region(self.smem, f"{self.name}.{name}", lo, hi, shape)

    def visit(self, clock: Clock, index: int, time: int, who: str, place=None):
        """Remember an access to this CTA's memory or barriers that may outlive its tasks.

        Args:
            clock: what the access comes after.
            index: of the task or lane that accesses.
            time: of that task or lane.
            who: accesses; for stories.
            place: line of the role; that of the acting task by default.
        """
        machine, actor = self.machine, self.machine.actor
        foreign = actor.cta is not self
        if actor is machine.host or (index == actor.index and not foreign):
            return
        place = place or machine.place()
        if foreign and not clock.get(self.index):
            machine.report(
                f"{who} at {place}, but nothing makes it come after the start of {self.name}, which sets up "
                f"its barriers: a cluster barrier is missing"
            )
        if self._visits.get(index, (0,))[0] <= time:
            self._visits[index] = time, who, place

    def check_arrival(self, barrier: Barrier):
        """An arrival at a barrier of this CTA: by its own tasks, or by an operation."""
        machine, actor = self.machine, self.machine.actor
        if isinstance(actor, Operation):
            who = f"{actor.label}, which arrives at {barrier.name}"
            self.visit(actor.clock, actor.index, actor.number, who, actor.place)
        elif actor is not machine.host and actor.cta is not self:
            machine.report(
                f"{actor.name} arrives at {barrier.name} at {machine.place()} as if it were its own: it is "
                f"another CTA's, and takes remote arrivals"
            )

    def check_wait(self, barrier: Barrier):
        """A wait at a barrier of this CTA: only its own tasks can."""
        machine, actor = self.machine, self.machine.actor
        if actor is not machine.host and actor.cta is not self:
            machine.report(
                f"{actor.name} waits for {barrier.name} at {machine.place()}: a task can wait only at barriers "
                f"of its own CTA"
            )

    def _check_exit(self):
        known: Clock = {}
        for task in self.tasks:
            join(known, task.clock)
        for index, (time, who, place) in self._visits.items():
            if known.get(index, 0) < time:
                self.machine.report(
                    f"{self.name} may end before {who}, {place}: none of its tasks waits for that"
                )


class Cluster:
    """CTAs that reach each other's shared memory.

    Args:
        machine: that runs them.
        size: CTAs.
        synced: the prologue, which is not part of the roles, has synchronised the cluster.
        name: of the cluster, where a machine has several.
    """

    def __init__(self, machine: Machine, size: int, synced: bool = True, name: str = ""):
        self.machine, self.ctas = machine, [Cta(machine, rank, name) for rank in range(size)]
        for cta in self.ctas if synced else ():
            cta.peers = self.ctas

    def barrier(self, name: str, tasks: int) -> "ClusterBarrier":
        """Make the cluster barrier, for so many tasks in all CTAs."""
        return ClusterBarrier(self.machine, name, tasks)


class ClusterBarrier(Barrier):
    """The barrier of all threads of a cluster, whose arrival and wait may be apart.

    The hardware does not wait for threads that have left; here they are missed, and that is a deadlock.
    """

    def __init__(self, machine: Machine, name: str, tasks: int):
        super().__init__(machine, name, tasks)
        self._turns, self._arrived = {}, {}
        machine.at_exit.append(self._check_balance)

    def arrive(self, count: int = 1, nbytes: int = 0):
        """Arrive, and go on; the task's next call must be ``wait``."""
        task, place = self.machine.actor, self.machine.place()
        if task in self._arrived:
            raise Hazard(
                f"{task.name} arrives at {self.name} at {place}, and has not waited since it arrived at "
                f"{self._arrived[task]}"
            )
        self._arrived[task] = place
        for lane in self.machine.lanes:  # release: what it did before has come, to other CTAs too
            if lane.name.startswith(arrivals_of(task)):
                lane.join(lane.issued)
        super().arrive(count, nbytes)

    def wait(self, phase: int | None = None):
        """Wait until everyone has arrived as often as this task."""
        task = self.machine.actor
        if self._arrived.pop(task, self) is self:
            place = self.machine.place()
            raise Hazard(f"{task.name} waits at {self.name} at {place} without having arrived")
        turn = self._turns.get(task, 0)
        self._turns[task] = turn + 1
        super().wait(turn)

    def sync(self):
        """Arrive and wait."""
        self.arrive()
        self.wait()

    def _check_balance(self):
        for task, place in self._arrived.items():
            self.machine.report(
                f"{task.name} leaves without having waited at {self.name}, where it arrived at {place}"
            )


def arrivals_of(task: Task) -> str:
    """How the names of lanes of a task's remote arrivals begin."""
    return f"arrivals of {task.name} at "


def lane_called(machine: Machine, name: str, ordered: bool = False) -> Lane:
    """The lane of that name, made when it is first needed."""
    found = next((lane for lane in machine.lanes if lane.name == name), None)
    return found or machine.lane(name, ordered)


def arrive_at(barrier: Barrier, count: int = 1, nbytes: int = 0):
    """Arrive at a barrier of whichever CTA: at another's, the arrival is on its way for a while."""
    machine, task = barrier.machine, barrier.machine.actor
    if barrier.cta is None or task.cta is barrier.cta:
        barrier.arrive(count, nbytes)
    else:
        lane = lane_called(machine, f"{arrivals_of(task)}{barrier.name}")
        lane.issue("the arrival", lambda: barrier.arrive(count, nbytes))
    machine.give_way()


def copy_to_peer(source: Region, target: Region, barrier: Barrier, nbytes: int):
    """Start a bulk copy from own shared memory to another CTA's; its bytes count at a barrier there.

    The issuer never learns that it has landed: only whoever waits at ``barrier`` does.
    """
    machine, task = source.space.machine, source.space.machine.actor
    if source.space.cta is not task.cta:
        machine.report(
            f"{task.name} copies from {source.name} at {machine.place()}: a copy to a peer begins in own memory"
        )
    if barrier.cta is not target.space.cta:
        machine.report(
            f"{task.name} copies into {target.name} at {machine.place()}, and its bytes are to count at "
            f"{barrier.name}: that must be in the same CTA as what is written"
        )

    def land():
        target.poke(source.peek())
        barrier.arrive(0, -nbytes)

    lane = lane_called(machine, f"copies of {task.name} into {target.name}")
    lane.issue(f"the copy of {source.name} into {target.name}", land, [source], [target])
    target.spoil()
