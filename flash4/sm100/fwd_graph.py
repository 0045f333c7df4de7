"""Graph of the Blackwell forward: roles by warps, rings, signals, shared and tensor memory, as frozen tables.

Thread counts, arrive counts, memory sums, the launch and the diagram in the docs are derived from these tables.
"""

from dataclasses import dataclass

from flash4.common.graph import BARRIER_BYTES, WARP, WARPGROUP, launch_registers

TMEM_COLUMNS = 512
# Who moves a ring or raises a signal; threads of both CTAs of a pair raise those of its leader.
TMA, UMMA, THREADS, LEADER = "tma", "umma", "threads", "leader"


@dataclass(frozen=True)
class Role:
    """Warps that run one role function.

    Attributes:
        name: of the role.
        warps: of the CTA.
        registers: per thread after reallocation; the same for all roles of a warpgroup.
    """

    name: str
    warps: range
    registers: int

    @property
    def threads(self) -> int:
        """Threads of the role."""
        return WARP * len(self.warps)


@dataclass(frozen=True)
class Buffer:
    """A shared-memory array: its name and its bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Ring:
    """Slots of shared memory between two roles, each with a "full" and an "empty" barrier.

    Attributes:
        name: of the ring and of its buffer.
        producer: role that fills it.
        consumer: role that reads it.
        kinds: who arrives at "full" and who at "empty": TMA or threads, MMA commits or threads.
        stages: slots.
        stage_bytes: of one slot.
    """

    name: str
    producer: Role
    consumer: Role
    kinds: tuple[str, str]
    stages: int
    stage_bytes: int

    @property
    def arrivals(self) -> tuple[int, int]:
        """Arrivals that fill a slot, and that free it."""
        roles = (self.producer, self.consumer)
        return tuple(r.threads if k == THREADS else 1 for r, k in zip(roles, self.kinds))


@dataclass(frozen=True)
class Signal:
    """One mbarrier without a side that says "empty"; what frees it is implied by other edges.

    Attributes:
        name: of the signal.
        raisers: roles that arrive; a phase needs all of them.
        waiter: role that waits.
        kind: arrivals of threads, of those of both CTAs of a pair, or the commit of an MMA.
        covered_by: edges that together keep every raiser from the next phase until the waiter has seen this one.
        credit: phases that count as complete from the start.
    """

    name: str
    raisers: tuple[Role, ...]
    waiter: Role
    kind: str
    covered_by: tuple[str, ...]
    credit: int = 0

    @property
    def arrivals(self) -> int:
        """Arrivals of one phase."""
        threads = sum(role.threads for role in self.raisers)
        return {UMMA: 1, THREADS: threads, LEADER: 2 * threads}[self.kind]


@dataclass(frozen=True)
class TmemMap:
    """Columns of tensor memory, 32 bits each: both S, P over the upper half of each S, then each Q tile's O."""

    tile_n: int
    tile_dv: int
    q_tiles: int = 2

    def s(self, buffer):
        """First column of S, of a Q tile or of a block; a run-time number too."""
        return buffer * self.tile_n

    def p(self, buffer):
        """First column of P, two values a column."""
        return buffer * self.tile_n + self.tile_n // 2

    def o(self, tile):
        """First column of O."""
        return 2 * self.tile_n + tile * self.tile_dv

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Name -> (first column, columns)."""
        found = {}
        for i in (0, 1):
            found[f"s{i}"] = (self.s(i), self.tile_n)
            found[f"p{i}"] = (self.p(i), self.tile_n // 2)
        for i in range(self.q_tiles):
            found[f"o{i}"] = (self.o(i), self.tile_dv)
        return found

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Names that share columns."""
        return (("s0", "p0"), ("s1", "p1"))


@dataclass(frozen=True)
class Graph:
    """Roles, edges and memory of one kernel, for each of the CTAs that work together."""

    roles: tuple[Role, ...]
    rings: tuple[Ring, ...]
    signals: tuple[Signal, ...]
    buffers: tuple[Buffer, ...]
    tmem: TmemMap
    ctas: int = 1

    def role(self, name: str) -> Role:
        """Return the role called ``name``."""
        return next(role for role in self.roles if role.name == name)

    @property
    def stride(self) -> int:
        """Signals from one of the first S, such as p0, to that of the second."""
        names = [signal.name for signal in self.signals]
        return names.index("s1") - names.index("s0")

    @property
    def threads(self) -> int:
        """Threads per CTA: whole warpgroups."""
        last = max(role.warps.stop for role in self.roles)
        return -(-last * WARP // WARPGROUP) * WARPGROUP

    @property
    def registers(self) -> int:
        """Registers of one CTA after reallocation."""
        by_group = {role.warps.start * WARP // WARPGROUP: role.registers for role in self.roles}
        return WARPGROUP * sum(by_group.values())

    @property
    def launch_registers(self) -> int:
        """Registers of one CTA at its launch; roles that ask for more would wait for ever."""
        return launch_registers(self.threads)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA: buffers, barriers, and the word that holds the address of tensor memory.

        A pair has one more barrier, for the end of that memory.
        """
        barriers = 2 * sum(ring.stages for ring in self.rings) + len(self.signals) + self.ctas - 1
        return sum(b.nbytes for b in self.buffers) + BARRIER_BYTES * (barriers + 1)

    def addresses(self) -> dict[str, int]:
        """Byte at which each buffer begins."""
        at, found = 0, {}
        for b in self.buffers:
            found[b.name], at = at, at + b.nbytes
        return found

    def diagram(self) -> str:
        """One line per ring, then one per signal with what frees it."""
        lines = [
            f"{r.producer.name} --[{r.name} x{r.stages} {r.kinds[0]}->{r.kinds[1]}]--> {r.consumer.name}"
            for r in self.rings
        ]
        for s in self.signals:
            raisers = " + ".join(role.name for role in s.raisers)
            credit = ", credit 1" if s.credit else ""
            cover = " and ".join(s.covered_by)
            lines.append(
                f"{raisers} --({s.name} {s.kind}{credit})--> {s.waiter.name}, freed by {cover}"
            )
        return "\n".join(lines)

    def table(self) -> str:
        """Roles with warps and registers, then the maps of shared and of tensor memory."""
        lines = [f"{'role':10} {'warps':8} {'registers':>9}"]
        for role in self.roles:
            span = f"{role.warps.start}..{role.warps.stop - 1}"
            lines.append(f"{role.name:10} {span:8} {role.registers:9}")
        lines.append(
            f"{'all':10} {self.threads // WARP:<8} {self.registers:9} of {self.launch_registers}"
        )
        lines += ["", f"{'smem':10} {'bytes':>9}"]
        lines += [f"{b.name:10} {b.nbytes:9}" for b in self.buffers]
        lines += [f"{'all':10} {self.smem_bytes:9}  with barriers", ""]
        lines.append(f"{'tmem':10} columns of {TMEM_COLUMNS}")
        lines += [
            f"{name:10} {lo}..{lo + n - 1}"
            + ("  over " + name.replace("p", "s") if name[0] == "p" else "")
            for name, (lo, n) in self.tmem.ranges().items()
        ]
        return "\n".join(lines)
