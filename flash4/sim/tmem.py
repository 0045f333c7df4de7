"""Tensor memory of Blackwell (tcgen05): allocation, MMAs that accumulate there, loads, stores and fences.

Tensor memory has 512 columns of 128 lanes, 32 bits each. Ranges of columns may overlap as they like: contents are kept
as bits, and every use is checked against all uses of the same columns and lanes. Loads and stores of a warp are
asynchronous, and so are MMAs. What one task has done here another may use when three things hold: it is known to have
landed (a wait for loads or stores, or a commit), a fence stands between that and the arrival (a commit has its own), and
another fence stands between the other task's wait and its use.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from flash4.sim.barriers import Barrier
from flash4.sim.cluster import Cta, lane_called
from flash4.sim.machine import Clock, Hazard, Lane, Machine, Place
from flash4.sim.memory import Access, Fragment, Region, Space

COLUMNS, LANES, WARP_LANES = 512, 128, 32
MIN_COLUMNS = 32


@dataclass(eq=False)
class Allocation:
    """Columns [lo, hi), from an allocation to its end."""

    lo: int
    hi: int
    who: str
    place: Place | None


class Tmem(Space):
    """Tensor memory as one CTA sees it.

    Args:
        machine: that runs it.
        cta: whose it is, where a machine has several CTAs.
        residents: CTAs of this kernel that share a multiprocessor, and so its 512 columns.
    """

    def __init__(self, machine: Machine, cta: Cta | None = None, residents: int = 1):
        super().__init__(machine, proxies=False, cta=cta)
        self.name = f"TMEM of {cta.name}" if cta else "TMEM"
        self.array = np.full((LANES, COLUMNS), np.nan, np.float32)
        self.fences: dict[
            int, Lane
        ] = {}  # index of a lane of loads or stores -> what is fenced of it
        self._residents, self._live, self._relinquished = residents, [], None
        machine.at_exit.append(self._check_freed)

    def tile(self, name: str, lo: int, columns: int, lanes: range = range(LANES)) -> "Tile":
        """Name a range of columns, counted from the start of tensor memory."""
        prefix = f"{self.cta.name}." if self.cta else ""
        return Tile(self, prefix + name, lo, lo + columns, lanes)

    def allocate(self, columns: int) -> Allocation:
        """Take columns, as one warp of the CTA; others may use them once they know of it.

        Raises:
            Hazard: there is no such allocation, or no room for it.
        """
        who, place = self.machine.actor.name, self.machine.place()
        if self.machine.actor is not self.machine.host and self.machine.actor.cta is not self.cta:
            raise Hazard(
                f"{who} allocates columns of {self.name} at {place}: they are another CTA's"
            )
        if not MIN_COLUMNS <= columns <= COLUMNS or columns & (columns - 1):
            raise Hazard(
                f"{who} allocates {columns} columns at {place}: powers of two from {MIN_COLUMNS} to {COLUMNS}"
            )
        if self._relinquished:
            raise Hazard(f"{who} allocates at {place}, after {self._relinquished} gave that up")
        taken = sum(a.hi - a.lo for a in self._live)
        if (taken + columns) * self._residents > COLUMNS:
            raise Hazard(
                f"{who} allocates {columns} columns at {place}: {self._residents} CTAs x ({taken} + {columns}) "
                f"columns; a multiprocessor has {COLUMNS}"
            )
        starts = sorted({0, *(a.hi for a in self._live)})
        lo = next(s for s in starts if all(s + columns <= a.lo or a.hi <= s for a in self._live))
        found = Allocation(lo, lo + columns, who, place)
        self._live.append(found)
        self._touch_all(found, "the allocation")
        return found

    def relinquish(self):
        """Give up the right to allocate, so that another CTA of the multiprocessor may."""
        self._relinquished = f"{self.machine.actor.name} at {self.machine.place()}"

    def free(self, allocation: Allocation):
        """Give columns back, as any warp of the CTA.

        Raises:
            Hazard: they are not allocated.
        """
        if allocation not in self._live:
            raise Hazard(
                f"{self.machine.actor.name} frees columns at {self.machine.place()} that are not allocated"
            )
        self._touch_all(allocation, "the end of the allocation")
        self._live.remove(allocation)
        self.array[:, allocation.lo : allocation.hi] = np.nan

    def _touch_all(self, allocation: Allocation, what: str):
        lo, hi, machine = allocation.lo, allocation.hi, self.machine
        tile = self.tile(f"columns {lo}..{hi - 1}", lo, hi - lo)
        machine.note("write", tile.name, 0, touches=((tile, True),))
        self.touch(tile, True, f"{what} by {machine.actor.name}", machine.actor.clock)

    def touch(self, region, write, who: str, clock: Clock, epoch=None):
        """As of ``Space``, for columns of some lanes, with what holds only here."""
        known = len(self.machine.hazards)
        if not any(a.lo <= region.lo and region.hi <= a.hi for a in self._live):
            self.machine.report(
                f"{who} at {self.machine.place()} uses {region.name}, columns {region.lo}..{region.hi - 1} of "
                f"{self.name}, which are not allocated, or freed already"
            )
        for part in region.parts():
            if epoch is not None:
                for use in self._uses:
                    if use.lo < part.hi and part.lo < use.hi and (write or use.write):
                        self._check_fences(region, who, clock, use)
            if len(self.machine.hazards) == known:
                super().touch(part, write, who, clock, epoch)

    def _check_fences(self, region, who, clock: Clock, use: Access):
        actor = self.machine.actor
        if use.task in (actor.index, use.index) or clock.get(use.index, 0) < use.time:
            return  # its own, or an allocation, or a race
        fenced, missing = self.fences.get(use.index), None
        if fenced and clock.get(fenced.index, 0) < use.time:
            missing = "before thread sync, between that and the arrival that tells of it"
        elif actor.tensor.get(use.index, 0) < use.time:
            missing = f"after thread sync, between the wait and this use, in {actor.name}"
        if missing:
            self.machine.report(
                f"tcgen05 fence missing: {who} at {self.machine.place()} uses {region.name}, as {use.who} "
                f"does at {use.place}; there is no fence {missing}"
            )

    def _check_freed(self):
        for a in self._live:
            self.machine.report(
                f"{self.name} is not freed: columns {a.lo}..{a.hi - 1}, which {a.who} allocated at {a.place}"
            )


@dataclass(frozen=True, eq=False)
class Tile:
    """Columns [lo, hi) of some lanes of tensor memory, as float32."""

    space: Tmem
    name: str
    lo: int
    hi: int
    lanes: range = range(LANES)

    def overlaps(self, other: "Tile") -> bool:
        """Whether they share memory; lanes count in whole warps."""
        if self.space is not other.space or self.lo >= other.hi or other.lo >= self.hi:
            return False
        mine, theirs = quarters(self.lanes), quarters(other.lanes)
        return mine.start < theirs.stop and theirs.start < mine.stop

    def parts(self) -> list[Region]:
        """One region per warp's lanes: column c of quarter q is byte 512 q + c."""
        shape = (WARP_LANES, self.hi - self.lo)
        return [
            Region(self.space, self.name, q * COLUMNS + self.lo, q * COLUMNS + self.hi, shape)
            for q in quarters(self.lanes)
        ]

    def peek(self) -> np.ndarray:
        """Contents, without an access."""
        return self.space.array[self.lanes.start : self.lanes.stop, self.lo : self.hi].copy()

    def poke(self, array: np.ndarray):
        """Replace the contents, without an access; bits are kept."""
        self.space.array[self.lanes.start : self.lanes.stop, self.lo : self.hi] = array


def quarters(lanes: range) -> range:
    """Warps of a warpgroup that reach some lanes."""
    return range(lanes.start // WARP_LANES, -(-lanes.stop // WARP_LANES))


class TmemPort:
    """The way of one task, a warp or a warpgroup, into its CTA's tensor memory.

    Args:
        tmem: of its CTA.
        name: of the task, for stories.
        warps: of the task: warp w reaches lanes 32 (w mod 4) to 32 (w mod 4) + 31.
    """

    def __init__(self, tmem: Tmem, name: str, warps: Iterable[int]):
        self._tmem, self._machine, self._task = tmem, tmem.machine, None
        self._warps = list(warps)
        prefix = f"{tmem.cta.name}." if tmem.cta else ""
        self._name, self.fences = prefix + name, []
        self._loads, self._stores = self._lane("loads"), self._lane("stores")

    def _lane(self, what: str) -> Lane:
        lane = self._machine.lane(f"TMEM {what} of {self._name}", ordered=True)
        fence = self._machine.lane(f"fenced TMEM {what} of {self._name}", ordered=True)
        self._tmem.fences[lane.index] = fence
        self.fences.append((lane, fence))
        return lane

    def load(self, tile: Tile) -> Fragment:
        """Start a load into fresh registers, which hold it after ``wait_ld``."""
        self._check(tile)
        shape = (len(tile.lanes), tile.hi - tile.lo)
        registers = Fragment(self._machine, f"registers for {tile.name} of {self._name}", shape)

        def land():
            registers.region.poke(tile.peek())

        self._loads.issue(f"the load of {tile.name}", land, [tile], [registers.region])
        return registers

    def store(self, tile: Tile, values: np.ndarray):
        """Start a store of registers; others may see it after ``wait_st``, a fence and a barrier."""
        self._check(tile)
        values = np.array(values, np.float32)
        self._stores.issue(f"the store of {tile.name}", lambda: tile.poke(values), writes=[tile])

    def wait_ld(self):
        """Wait until the task's loads have landed."""
        self._loads.join(self._loads.issued)

    def wait_st(self):
        """Wait until the task's stores have landed."""
        self._stores.join(self._stores.issued)

    def _check(self, tile: Tile):
        machine, task = self._machine, self._machine.actor
        if self._task is None:
            self._task = task
            task.ports.append(self)
        where = f"{task.name} uses {tile.name} at {machine.place()}"
        if task is not self._task:
            machine.report(f"{where} by the loads and stores of {self._task.name}")
        if tile.space is not self._tmem or task.cta is not self._tmem.cta:
            machine.report(f"{where}: tcgen05.ld and st reach only the CTA's own tensor memory")
        beyond = set(quarters(tile.lanes)) - {warp % 4 for warp in self._warps}
        if beyond:
            lanes = ", ".join(f"{32 * q}..{32 * q + 31}" for q in sorted(beyond))
            machine.report(
                f"{where}: lanes {lanes} are out of reach of warps {self._warps}: warp w has lanes 32 (w mod 4) "
                f"and the 31 behind it"
            )


def fence_before(machine: Machine):
    """tcgen05.fence::before_thread_sync: the acting task's next arrival tells of loads and stores that it waited for."""
    clock = machine.actor.clock
    for port in machine.actor.ports:
        for lane, fence in port.fences:
            clock[fence.index] = clock.get(lane.index, 0)


def fence_after(machine: Machine):
    """tcgen05.fence::after_thread_sync: the acting task's next tcgen05 operations come after what it waited for."""
    machine.actor.tensor = dict(machine.actor.clock)


class TensorCore:
    """MMAs into tensor memory, of one CTA or of a pair; those of one issuer land in order.

    Args:
        machine: that runs it.
        pair: both CTAs of a 2-CTA MMA, the leader first; none where it works on the issuer's CTA alone.
    """

    def __init__(self, machine: Machine, pair: Iterable[Cta] = ()):
        self._machine, self._pair = machine, tuple(pair)

    def _lane(self) -> Lane:
        name = f"the tensor core for {self._machine.actor.name}"
        return lane_called(self._machine, name, ordered=True)

    def issue(self, acc: Tile | tuple, product: Callable, operands, accumulate: bool, label: str):
        """Issue acc (+)= product(arrays of the operands).

        Args:
            acc: accumulator; of a pair one in each CTA, and ``product`` gives as many results.
            product: of the arrays that the operands hold when the MMA lands.
            operands: shared memory, or tensor memory for A.
            accumulate: whether it adds to what ``acc`` holds.
            label: for stories.
        """
        accs = acc if isinstance(acc, tuple) else (acc,)
        self._check(accs, operands, label)

        def land():
            # Memory that nobody has written may hold anything, and sums may overflow.
            with np.errstate(all="ignore"):
                result = product(*(operand.peek() for operand in operands))
                for tile, part in zip(accs, result if isinstance(acc, tuple) else (result,)):
                    tile.poke(tile.peek() + part if accumulate else part)

        self._lane().issue(label, land, reads=operands, writes=accs)

    def _check(self, accs, operands, label):
        machine, task = self._machine, self._machine.actor
        where = f"{label} of {task.name} at {machine.place()}"
        if self._pair and task.cta is not self._pair[0]:
            machine.report(
                f"{where}: only {self._pair[0].name}, the leader, issues MMAs of the pair"
            )
        reach = self._pair or (task.cta,)
        for region in (*accs, *operands):
            if region.space.cta not in reach:
                machine.report(
                    f"{where} uses {region.name}, which is not in a CTA that it works on"
                )

    def commit(self, *barriers: Barrier):
        """Arrive at each barrier, of this CTA or the peer's, when all that the acting task has issued is done."""

        def land():
            for barrier in barriers:
                barrier.arrive()

        self._lane().issue("the commit", land)
        self._machine.give_way()
