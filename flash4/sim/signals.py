"""Edges between the roles of a Blackwell kernel: signals, and rings that TMA fills, in one CTA or in a pair.

A signal is one mbarrier per waiting CTA, raised by one or several roles, without a side that says "empty": another edge,
which its ``covered_by`` names, makes sure that nobody raises it before its waiters have seen the last phase.
"""

from dataclasses import dataclass

import numpy as np

from flash4.sim.barriers import Barrier
from flash4.sim.bulk import load
from flash4.sim.cluster import Cta, arrive_at
from flash4.sim.covers import check_cover
from flash4.sim.machine import Hazard, Machine
from flash4.sim.memory import Region
from flash4.sim.tmem import TensorCore, fence_after, fence_before


class Edges:
    """All signals and rings of a schedule, by name; checks every ``covered_by`` when the run ends.

    Args:
        machine: that runs them.
        ctas: of the cluster; none where the machine is one CTA.
        fences: whether posts and waits have tcgen05 fences.
    """

    def __init__(self, machine: Machine, ctas: tuple[Cta, ...] = (), fences: bool = True):
        self.machine, self.ctas, self.fences = machine, tuple(ctas), fences
        self._barriers: dict[str, set[str]] = {}
        self._claims: list[tuple[str, tuple[str, ...]]] = []
        machine.at_exit.append(self._check_claims)

    def barriers(self, edge: str, name: str, arrivals: int, shared: bool) -> list[Barrier]:
        """Make the barriers of an edge: one in each CTA, or with ``shared``, only in the leader."""
        ctas = self.ctas[:1] if shared else self.ctas
        made = [cta.barrier(name, arrivals) for cta in ctas] or [
            Barrier(self.machine, name, arrivals)
        ]
        self._barriers.setdefault(edge, set()).update(barrier.name for barrier in made)
        return made

    def claim(self, edge: str, covered_by: tuple[str, ...]):
        """Say which edges together free this one.

        Raises:
            ValueError: there is nothing to say it of.
        """
        if not isinstance(covered_by, tuple):
            raise ValueError(f"{edge}: covered_by is a tuple of names, not {covered_by!r}")
        self._claims.append((edge, covered_by))

    def _check_claims(self):
        for edge, covered_by in self._claims:
            unknown = [name for name in covered_by if name not in self._barriers]
            if unknown:
                raise Hazard(f"{edge} is said to be freed by {unknown[0]}, which does not exist")
            passing = set().union(*(self._barriers[name] for name in covered_by))
            cover = " and ".join(covered_by)
            check_cover(self.machine, edge, self._barriers[edge], cover, passing)


@dataclass(frozen=True)
class SignalSpec:
    """What a signal is.

    Attributes:
        name: of the edge.
        arrivals: of one phase, from all raisers.
        covered_by: edges that together free it: signals, or "x full" and "x empty" of a ring x.
        credit: phases that count as complete from the start.
        shared: its only barrier is the leader's, where tasks of both CTAs arrive.
    """

    name: str
    arrivals: int = 1
    covered_by: tuple[str, ...] = ()
    credit: int = 0
    shared: bool = False


class Signal:
    """A one-way event, of which ``end`` gives each role its end."""

    def __init__(self, edges: Edges, spec: SignalSpec):
        self.edges, self.spec = edges, spec
        self.barriers = edges.barriers(spec.name, spec.name, spec.arrivals, spec.shared)
        edges.claim(spec.name, spec.covered_by)

    def end(self, cta: Cta | None = None, count: int = 1, core=None, lag: int = 0) -> "SignalEnd":
        """Make a role's end.

        Args:
            cta: of the role.
            count: arrivals of one post.
            core: posts are commits, to every CTA; else the role arrives itself.
            lag: phases by which this waiter's first wait is behind, besides the signal's credit.
        """
        rank = 0 if cta is None or self.spec.shared else cta.rank
        return SignalEnd(self, self.barriers[rank], count, core, -self.spec.credit - lag)


class SignalEnd:
    """One role's end of a signal: it posts, or it waits."""

    def __init__(self, signal: Signal, barrier: Barrier, count: int, core, phase: int):
        self._signal, self._barrier, self._count, self._core = signal, barrier, count, core
        self._phase, self._fences = phase, signal.edges.fences

    def post(self):
        """Raise it: by a commit, once all MMAs of this role are done; or now, with a fence before."""
        if self._core is not None:
            self._core.commit(*self._signal.barriers)
            return
        if self._fences:
            fence_before(self._barrier.machine)
        arrive_at(self._barrier, self._count)

    def expect(self, nbytes: int):
        """Raise it once so many bytes have come, too."""
        arrive_at(self._barrier, self._count, nbytes)

    def wait(self):
        """Wait for the next phase, with a fence after."""
        self._phase += 1
        self._barrier.wait(self._phase - 1)
        if self._fences:
            fence_after(self._barrier.machine)

    def skip(self):
        """What a role does that forgets to wait, and counts on."""
        self._phase += 1


class ByTurns:
    """One role's end of two signals of blocks by turns: who posts says which, who waits is told."""

    def __init__(self, *ends: SignalEnd):
        self._ends, self._waits = ends, 0

    def post(self, buffer: int):
        """Raise one of the two."""
        self._ends[buffer].post()

    def wait_and_advance(self) -> int:
        """Wait for the one whose turn it is."""
        self._waits += 1
        buffer = (self._waits - 1) % len(self._ends)
        self._ends[buffer].wait()
        return buffer

    def advance_unwaited(self) -> int:
        """What a role does that forgets to wait, and counts on."""
        self._waits += 1
        buffer = (self._waits - 1) % len(self._ends)
        self._ends[buffer].skip()
        return buffer


@dataclass(frozen=True)
class TmaRingSpec:
    """What a ring is.

    Attributes:
        name: of the ring; its edges are "name full" and "name empty".
        stages: slots.
        nbytes: of one slot in one CTA.
        releases: arrivals that free a slot in each CTA; 0: it has no "empty" side.
        covered_by: edges that together free a slot, where there is no "empty" side.
        shared: in a pair, the leader's "full" barrier counts the bytes of both CTAs.
    """

    name: str
    stages: int
    nbytes: int
    releases: int = 1
    covered_by: tuple[str, ...] = ()
    shared: bool = True


class TmaRing:
    """Slots that TMA fills in every CTA at once; ``producer`` and ``consumer`` give the ends.

    Args:
        edges: of the schedule.
        spec: of the ring.
        regions: for each CTA its slots.
    """

    def __init__(self, edges: Edges, spec: TmaRingSpec, regions: list[list[Region]]):
        self.edges, self.spec, self.regions = edges, spec, regions
        self.shared = spec.shared and len(regions) > 1
        full, empty = f"{spec.name} full", f"{spec.name} empty"
        slots = range(spec.stages)
        self.full = [edges.barriers(full, f"{full}[{i}]", 1, self.shared) for i in slots]
        self.empty = []
        if spec.releases:
            self.empty = [
                edges.barriers(empty, f"{empty}[{i}]", spec.releases, False) for i in slots
            ]
            edges.machine.at_exit.append(self._check_balance)
        else:
            edges.claim(full, spec.covered_by)

    def producer(self, cta: Cta | None = None) -> "TmaProducer":
        """The end that fills."""
        return TmaProducer(self, cta.rank if cta else 0)

    def consumer(self, cta: Cta | None = None, core: TensorCore | None = None) -> "TmaConsumer":
        """The end that reads; it releases by commits if it has a tensor core, else by an arrival in its CTA."""
        return TmaConsumer(self, cta.rank if cta else 0, core)

    def _check_balance(self):
        for full, empty in zip(self.full, self.empty):
            for barrier in empty:
                if barrier.phase != full[0].phase or barrier.missing != barrier.arrivals:
                    self.edges.machine.report(
                        f"the CTA ends with {full[0].name} filled {full[0].phase} times and {barrier.name} "
                        f"released {barrier.phase} times"
                    )


@dataclass(eq=False)
class TmaSlot:
    """One use of a ring's slot by one role of one CTA."""

    ring: TmaRing
    rank: int
    index: int
    core: TensorCore | None = None
    given: object = None
    nbytes: int | None = (
        None  # of what it was filled with; of all it has room for, if it was not filled yet
    )

    @property
    def region(self) -> Region:
        """Memory of the slot in the role's CTA."""
        return self.ring.regions[self.rank][self.index]

    @property
    def regions(self) -> list[Region]:
        """Memory of the slot in every CTA."""
        return [slots[self.index] for slots in self.ring.regions]

    @property
    def full(self) -> Barrier:
        """Barrier that counts its bytes."""
        return self.ring.full[self.index][0 if self.ring.shared else self.rank]

    def fill(self, block: np.ndarray, nbytes: int | None = None):
        """Start the TMA copy of ``block`` into the slot; of all its bytes by default."""
        self.nbytes = self.ring.spec.nbytes if nbytes is None else nbytes
        load(self.region, block, self.full, self.nbytes)

    def commit(self):
        """Producer: announce the bytes, as the CTA whose barrier counts them."""
        self._give()
        if self.rank == 0 or not self.ring.shared:
            count = len(self.ring.regions) if self.ring.shared else 1
            nbytes = self.ring.spec.nbytes if self.nbytes is None else self.nbytes
            arrive_at(self.full, 1, nbytes * count)

    def release(self):
        """Consumer: the slot may be filled again, once the MMAs so far are done."""
        self._give()
        if self.ring.empty and self.core is not None:
            self.core.commit(*self.ring.empty[self.index])
        elif self.ring.empty:
            arrive_at(self.ring.empty[self.index][self.rank])

    def _give(self):
        machine, place = self.ring.edges.machine, self.ring.edges.machine.place()
        if self.given is not None:
            machine.report(
                f"{machine.actor.name} gives {self.region.name} away twice: at {self.given}, and again at {place}"
            )
        self.given = place or "its setup"


class TmaProducer:
    """A role's end of a ring that it fills."""

    def __init__(self, ring: TmaRing, rank: int):
        self._ring, self._rank, self._uses = ring, rank, 0

    def acquire_and_advance(self) -> TmaSlot:
        """Wait until the next slot is empty, as all are at first."""
        use, index = divmod(self._uses, self._ring.spec.stages)
        self._uses += 1
        if self._ring.empty:
            self._ring.empty[index][self._rank].wait(use - 1)
        return TmaSlot(self._ring, self._rank, index)

    def advance_unwaited(self) -> TmaSlot:
        """What a role does that forgets to wait."""
        self._uses += 1
        return TmaSlot(self._ring, self._rank, (self._uses - 1) % self._ring.spec.stages)

    def tail(self):
        """Wait until every slot is empty: nothing may arrive here after the CTA's end."""
        for _ in range(self._ring.spec.stages):
            self.acquire_and_advance()


class TmaConsumer:
    """A role's end of a ring that it reads."""

    def __init__(self, ring: TmaRing, rank: int, core: TensorCore | None):
        self._ring, self._rank, self._core, self._uses = ring, rank, core, 0

    def wait_and_advance(self) -> TmaSlot:
        """Wait until the next slot is full."""
        slot = self.advance_unwaited()
        slot.full.wait((self._uses - 1) // self._ring.spec.stages)
        return slot

    def advance_unwaited(self) -> TmaSlot:
        """What a role does that forgets to wait."""
        self._uses += 1
        index = (self._uses - 1) % self._ring.spec.stages
        return TmaSlot(self._ring, self._rank, index, self._core)
