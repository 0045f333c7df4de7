"""Graph of the Blackwell backward: roles by warps, rings, signals, shared and tensor memory, as frozen tables.

Arrivals, memory sums, the launch, the simulator's edges and the diagram in the docs are derived from these tables. Threads
arrive once a warp: a barrier counts warps, which matters where arrivals are remote.
"""

from dataclasses import dataclass

from flash4.common.graph import BARRIER_BYTES, WARP, WARPGROUP, launch_registers
from flash4.sm100.fwd_graph import LEADER, TMEM_COLUMNS, UMMA, Buffer, Role

BYTES = "bytes"  # a signal that a copy from the peer completes
ROWS = 128  # rows of an MMA in a CTA: lanes of tensor memory
CHUNK = 32  # columns that a warpgroup loads at a time
SLICE = 16  # queries that one MMA of dV or dK contracts


@dataclass(frozen=True)
class Ring:
    """Slots of shared memory that ``load`` fills by TMA.

    Attributes:
        name: of the ring.
        consumer: role that reads it.
        stages: slots.
        stage_bytes: of one slot, in one CTA.
        freed_by: UMMA if commits of the consumer free a slot; a role whose warps do; None if other edges cover it.
        covered_by: those edges.
        shared: in a pair, the leader's "full" barrier counts the bytes of both CTAs.
    """

    name: str
    consumer: Role
    stages: int
    stage_bytes: int
    freed_by: str | Role | None = None
    covered_by: tuple[str, ...] = ()
    shared: bool = True

    @property
    def releases(self) -> int:
        """Arrivals that free a slot; 0 if it has no "empty" side."""
        if self.freed_by is None:
            return 0
        return 1 if self.freed_by == UMMA else len(self.freed_by.warps)


@dataclass(frozen=True)
class Signal:
    """One mbarrier per waiting CTA, without a side that says "empty"; what frees it is implied by other edges.

    Attributes:
        name: of the signal.
        raiser: role that arrives.
        waiters: roles that wait.
        kind: UMMA: a commit, which arrives in both CTAs of a pair; THREADS: warps of this CTA; LEADER: warps of both, at
            the leader's; BYTES: its own waiter arms it, bytes from the peer complete it.
        covered_by: edges that together keep the raiser from the next phase until all waiters have seen this one.
        late: waiters whose first wait passes, so that they are one phase behind.
    """

    name: str
    raiser: Role
    waiters: tuple[Role, ...]
    kind: str
    covered_by: tuple[str, ...]
    late: tuple[Role, ...] = ()

    def arrivals(self, ctas: int) -> int:
        """Arrivals of one phase."""
        if self.kind in (UMMA, BYTES):
            return 1
        return len(self.raiser.warps) * (ctas if self.kind == LEADER else 1)


@dataclass(frozen=True)
class TmemMap:
    """Columns of tensor memory, 32 bits each.

    Rows of S and dP are keys, columns queries. A warpgroup w of ``compute`` has columns 32 w to 32 w + 31, and those 64
    further on. It packs both into 32 w to 32 w + 31, two values a column: it overwrites only scores that it has read
    itself, so that the warpgroups need not meet, and P is in the first half of S. An MMA takes 16 queries at an address
    of its own, wherever they lie.
    """

    tile_d: int
    tile_dv: int
    ctas: int

    def s(self) -> int:
        """First column of S, and of P."""
        return 0

    def dv(self) -> int:
        """First column of dV."""
        return ROWS

    def dp(self) -> int:
        """First column of dP, and in a pair of dS."""
        return 2 * ROWS

    def dk(self) -> int:
        """First column of dK."""
        return 3 * ROWS

    def dq(self) -> int:
        """First column of dQ: over dP; in a pair, where a lane has half of the head dims, over the half of S behind P."""
        return self.dp() if self.ctas == 1 else self.s() + ROWS // 2

    @property
    def dq_columns(self) -> int:
        """Columns of dQ: in a pair lanes 64 to 127 have the second half of the head dims of the same 64 queries."""
        return self.tile_d // self.ctas

    @staticmethod
    def loaded(warpgroup, part):
        """First of the 32 columns of S or dP that a warpgroup loads as its part 0 or 1: the numbers of their queries."""
        return 2 * CHUNK * part + CHUNK * warpgroup

    @staticmethod
    def packed(warpgroup, part):
        """First of the 16 columns where it stores them in 16 bit."""
        return CHUNK * warpgroup + CHUNK // 2 * part

    @staticmethod
    def loaded_run(warpgroup, number, run: int):
        """First column of S, and query of the step, of the run of ``run`` queries that has a number among a warpgroup's."""
        in_part = CHUNK // run
        return TmemMap.loaded(warpgroup, number // in_part) + number % in_part * run

    @staticmethod
    def packed_run(warpgroup, number, run: int):
        """First of the columns where it stores them in 16 bit."""
        in_part = CHUNK // run
        return TmemMap.packed(warpgroup, number // in_part) + number % in_part * (run // 2)

    @staticmethod
    def slice_of(k: int) -> int:
        """First of the 8 columns of the 16 queries from ``16 k`` on."""
        part, within = divmod(k * SLICE, 2 * CHUNK)
        warpgroup, half = divmod(within, CHUNK)
        return TmemMap.packed(warpgroup, part) + half // 2

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Name -> (first column, columns)."""
        found = {
            "s": (self.s(), ROWS),
            "p": (self.s(), ROWS // 2),
            "dv": (self.dv(), self.tile_dv),
            "dp": (self.dp(), ROWS),
            "dk": (self.dk(), self.tile_d),
            "dq": (self.dq(), self.dq_columns),
        }
        if self.ctas > 1:
            found["ds"] = (self.dp(), ROWS // 2)
        return found

    @property
    def aliases(self) -> tuple[tuple[str, str], ...]:
        """Names that share columns."""
        return (("s", "p"), *((("dp", "dq"),) if self.ctas == 1 else (("s", "dq"), ("dp", "ds"))))


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

    def ring(self, name: str) -> Ring:
        """Return the ring called ``name``."""
        return next(ring for ring in self.rings if ring.name == name)

    def signal(self, name: str) -> Signal:
        """Return the signal called ``name``."""
        return next(signal for signal in self.signals if signal.name == name)

    @property
    def threads(self) -> int:
        """Threads per CTA: whole warpgroups."""
        last = max(role.warps.stop for role in self.roles)
        return -(-last * WARP // WARPGROUP) * WARPGROUP

    @property
    def registers(self) -> int:
        """Registers of one CTA after reallocation."""
        of_group = {
            w * WARP // WARPGROUP: role.registers for role in self.roles for w in role.warps
        }
        return WARPGROUP * sum(of_group.values())

    @property
    def launch_registers(self) -> int:
        """Registers of one CTA at its launch; roles that ask for more would wait for ever."""
        return launch_registers(self.threads)

    @property
    def barriers(self) -> int:
        """Mbarriers; a pair has one more, for the end of its tensor memory."""
        of_rings = sum(ring.stages * (1 + bool(ring.releases)) for ring in self.rings)
        return of_rings + len(self.signals) + self.ctas - 1

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA: buffers, barriers, and the word that holds the address of tensor memory."""
        return sum(b.nbytes for b in self.buffers) + BARRIER_BYTES * (self.barriers + 1)

    def addresses(self) -> dict[str, int]:
        """Byte at which each buffer begins."""
        at, found = 0, {}
        for b in self.buffers:
            found[b.name], at = at, at + b.nbytes
        return found

    def places(self) -> dict[tuple[str, str], int]:
        """("buffer", "full", "empty" or "signal", name) -> its first byte; barriers lie behind all buffers."""
        found = {("buffer", name): at for name, at in self.addresses().items()}
        rings = [(side, r.name, r.stages) for side in ("full", "empty") for r in self.rings]
        counted = [x for x in rings if x[0] == "full" or self.ring(x[1]).releases]
        at = sum(b.nbytes for b in self.buffers)
        for kind, name, count in (*counted, *(("signal", s.name, 1) for s in self.signals)):
            found[kind, name], at = at, at + count * BARRIER_BYTES
        return found

    @property
    def placed_bytes(self) -> int:
        """Bytes of all buffers and barriers that have a place."""
        return max(self.places().values()) + BARRIER_BYTES

    def diagram(self) -> str:
        """One line per ring, then one per signal with what frees it."""
        lines = []
        for r in self.rings:
            freed = r.freed_by if isinstance(r.freed_by, str) else getattr(r.freed_by, "name", None)
            freed = f"freed by {freed or ' and '.join(r.covered_by)}"
            lines.append(f"load --[{r.name} x{r.stages} tma]--> {r.consumer.name}, {freed}")
        for s in self.signals:
            waiters = ", ".join(
                role.name + (" (one phase late)" if role in s.late else "") for role in s.waiters
            )
            cover = " and ".join(s.covered_by)
            lines.append(f"{s.raiser.name} --({s.name} {s.kind})--> {waiters}, freed by {cover}")
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
        over = {pair[1]: pair[0] for pair in self.tmem.aliases}
        lines += [
            f"{name:10} {lo}..{lo + n - 1}" + (f"  over {over[name]}" if name in over else "")
            for name, (lo, n) in self.tmem.ranges().items()
        ]
        return "\n".join(lines)
