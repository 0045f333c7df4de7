"""Pipeline graphs: the roles, rings and memory of a warp-specialised kernel as small frozen tables.

Thread counts, barrier arrive counts, the shared-memory sum and the diagram in the docs are derived from these tables;
nothing types them a second time.
"""

from dataclasses import dataclass

WARP = 32
WARPGROUP = 128
REGISTER_FILE = 65_536  # registers of an SM, 32 bits each
REGISTER_STEP = 8  # a thread has a multiple of this
BARRIER_BYTES = 8  # one mbarrier; a ring stage has two, "full" and "empty"


def launch_registers(threads: int) -> int:
    """Registers that a CTA of so many threads is launched with: each has its share of the file, in steps of 8.

    ``setmaxnreg`` deals these out anew. The rest of the file is out of reach.
    """
    return threads * (REGISTER_FILE // threads // REGISTER_STEP * REGISTER_STEP)


@dataclass(frozen=True)
class Role:
    """A set of warps that run one role function.

    Attributes:
        name: name of the role function.
        warpgroups: indices of the warpgroups that the role occupies.
        active_warps: warps of those warpgroups that run the role function.
        registers: registers per thread after reallocation.
        first_warp: the first of those warps, in the first warpgroup; roles may share a warpgroup.
    """

    name: str
    warpgroups: range
    active_warps: int
    registers: int
    first_warp: int = 0


@dataclass(frozen=True)
class Buffer:
    """A shared-memory array.

    Attributes:
        name: name of the array.
        nbytes: size.
        borrows: name of the buffer whose memory it reuses, if any.
    """

    name: str
    nbytes: int
    borrows: str | None = None


@dataclass(frozen=True)
class Ring:
    """A ring of shared-memory slots, filled by TMA or by a warp and released by the warps that read it.

    Attributes:
        name: name of the ring and of its buffer.
        producer: role that fills it.
        consumer: role that reads it.
        stages: slots.
        stage_bytes: bytes that one fill delivers (of TMA the transaction count of its barrier).
        ctas: CTAs of a cluster that fill a slot in all of them at once, each with its part; their consumers together
            free it.
        tma: filled by TMA.
    """

    name: str
    producer: Role
    consumer: Role
    stages: int
    stage_bytes: int
    ctas: int = 1
    tma: bool = True

    @property
    def consumer_arrivals(self) -> int:
        """Arrivals that free a slot: one per consumer warp of each CTA."""
        return self.consumer.active_warps * self.ctas


@dataclass(frozen=True)
class PipelineGraph:
    """Roles, rings and shared memory of one kernel."""

    roles: tuple[Role, ...]
    rings: tuple[Ring, ...]
    buffers: tuple[Buffer, ...]

    def role(self, name: str) -> Role:
        """Return the role called ``name``."""
        return next(role for role in self.roles if role.name == name)

    def ring(self, name: str) -> Ring:
        """Return the ring called ``name``."""
        return next(ring for ring in self.rings if ring.name == name)

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return WARPGROUP * len(self._registers_by_warpgroup)

    @property
    def registers(self) -> int:
        """Registers of one CTA after reallocation."""
        return WARPGROUP * sum(self._registers_by_warpgroup.values())

    @property
    def _registers_by_warpgroup(self) -> dict[int, int]:
        """Registers per thread of each warpgroup; roles that share one have the same number."""
        return {group: role.registers for role in self.roles for group in role.warpgroups}

    @property
    def launch_registers(self) -> int:
        """Registers of one CTA at its launch; roles that ask for more would wait for ever."""
        return launch_registers(self.threads)

    def allocations(self) -> dict[str, int]:
        """Bytes of each buffer that has memory of its own, as large as the largest that borrows it."""
        sizes = {b.name: b.nbytes for b in self.buffers if b.borrows is None}
        for b in self.buffers:
            if b.borrows is not None:
                sizes[b.borrows] = max(sizes[b.borrows], b.nbytes)
        return sizes

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA: buffers and barriers."""
        barriers = 2 * BARRIER_BYTES * sum(ring.stages for ring in self.rings)
        return sum(self.allocations().values()) + barriers

    def addresses(self) -> dict[str, int]:
        """Byte at which each buffer begins: one behind the other, a borrowing one where its host does."""
        at, bases = 0, {}
        for name, nbytes in self.allocations().items():
            bases[name], at = at, at + nbytes
        return {b.name: bases[b.borrows or b.name] for b in self.buffers}

    def diagram(self) -> str:
        """One line per ring: producer --[ring x stages]--> consumer."""
        lines = []
        for ring in self.rings:
            shared = f" of {ring.ctas} CTAs" if ring.ctas > 1 else ""
            filler = "tma" if ring.tma else "warp"
            edge = f"{ring.name} x{ring.stages} {filler}->warps{shared}"
            lines.append(f"{ring.producer.name} --[{edge}]--> {ring.consumer.name}")
        return "\n".join(lines)

    def table(self) -> str:
        """Roles with warps and registers, then the shared-memory map."""
        lines = [f"{'role':8} {'warpgroups':12} {'warps':>5} {'registers':>9}"]
        for role in self.roles:
            span = f"{role.warpgroups.start}..{role.warpgroups.stop - 1}"
            lines.append(f"{role.name:8} {span:12} {role.active_warps:5} {role.registers:9}")
        lines.append(
            f"{'all':8} {self.threads // WARPGROUP:<12} {self.threads // WARP:5} {self.registers:9} of {self.launch_registers}"
        )
        lines.append("")
        lines.append(f"{'smem':8} {'bytes':>9}")
        for b in self.buffers:
            lines.append(
                f"{b.name:8} {b.nbytes:9}" + (f"  borrows {b.borrows}" if b.borrows else "")
            )
        lines.append(f"{'all':8} {self.smem_bytes:9}  with barriers")
        return "\n".join(lines)
