"""Limits of the hardware that a pipeline graph must keep before anything runs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flash4.common.graph import REGISTER_FILE, REGISTER_STEP, WARP, WARPGROUP, PipelineGraph
from flash4.sim.machine import Hazard
from flash4.sim.tmem import COLUMNS, MIN_COLUMNS

MIN_REGISTERS, MAX_REGISTERS = 24, 256  # what setmaxnreg takes


def check_graph(graph: PipelineGraph, smem_limit: int):
    """Check registers, shared memory and borrowed buffers.

    Args:
        graph: of the kernel.
        smem_limit: bytes of shared memory that a CTA may have.

    Raises:
        Hazard: a limit is exceeded; the message carries the sum.
    """
    for role in graph.roles:
        if role.registers % REGISTER_STEP or not MIN_REGISTERS <= role.registers <= MAX_REGISTERS:
            raise Hazard(
                f"{role.name}: {role.registers} registers; setmaxnreg takes multiples of {REGISTER_STEP} "
                f"from {MIN_REGISTERS} to {MAX_REGISTERS}"
            )
    if graph.registers > graph.launch_registers:
        parts = " + ".join(
            f"{len(r.warpgroups)} x 128 x {r.registers} ({r.name})" for r in graph.roles
        )
        raise Hazard(
            f"{parts} = {graph.registers} registers; {graph.threads} threads have {graph.launch_registers} at "
            f"launch: setmaxnreg would wait for more for ever"
        )
    if graph.smem_bytes > smem_limit:
        raise Hazard(
            f"{graph.smem_bytes} bytes of shared memory with barriers; a CTA has {smem_limit}"
        )
    sizes = {b.name: b.nbytes for b in graph.buffers}
    for ring in graph.rings:
        if sizes[ring.name] < ring.stages * ring.stage_bytes:
            raise Hazard(
                f"ring {ring.name}: {ring.stages} x {ring.stage_bytes} bytes in {sizes[ring.name]}"
            )


@dataclass(frozen=True)
class WarpRole:
    """A role of any number of warps, which may share a warpgroup with others.

    Attributes:
        name: of the role.
        warps: of the CTA that run it.
        registers: per thread after reallocation.
    """

    name: str
    warps: range
    registers: int


def check_registers(roles: Iterable[WarpRole], launch_registers: int):
    """Check the registers of roles that are not whole warpgroups.

    A warpgroup has one register count, whichever of its warps ask for it, and what the warpgroups have together must
    have been there at launch.

    Args:
        roles: of the kernel; warps without a role keep what their warpgroup has.
        launch_registers: per thread, as compiled.

    Raises:
        Hazard: a limit is exceeded; the message carries the sum.
    """
    counts: dict[int, tuple[int, str]] = {}  # warpgroup -> (registers, role)
    taken: dict[int, str] = {}
    for role in roles:
        if role.registers % REGISTER_STEP or not MIN_REGISTERS <= role.registers <= MAX_REGISTERS:
            raise Hazard(
                f"{role.name}: {role.registers} registers; setmaxnreg takes multiples of {REGISTER_STEP} "
                f"from {MIN_REGISTERS} to {MAX_REGISTERS}"
            )
        for warp in role.warps:
            if warp in taken:
                raise Hazard(f"warp {warp} is in {taken[warp]} and in {role.name}")
            taken[warp] = role.name
            group = warp * WARP // WARPGROUP
            known, first = counts.setdefault(group, (role.registers, role.name))
            if known != role.registers:
                raise Hazard(
                    f"warpgroup {group}: {known} registers in {first}, {role.registers} in {role.name}; "
                    f"setmaxnreg holds for a whole warpgroup"
                )
    groups = max(counts) + 1
    pool = min(groups * WARPGROUP * launch_registers, REGISTER_FILE)
    used = [counts.get(group, (launch_registers, "no role")) for group in range(groups)]
    total = sum(WARPGROUP * registers for registers, _ in used)
    if groups * WARPGROUP * launch_registers > REGISTER_FILE or total > pool:
        parts = " + ".join(f"128 x {registers} ({name})" for registers, name in used)
        raise Hazard(
            f"{parts} = {total} registers; {groups} x 128 x {launch_registers} are there at launch, and an SM "
            f"has {REGISTER_FILE}"
        )


def check_tmem(
    ranges: Mapping[str, tuple[int, int]],
    aliases: Iterable[tuple[str, str]] = (),
    residents: int = 1,
) -> int:
    """Check a map of tensor memory and return the columns to allocate.

    Args:
        ranges: name -> (first column, columns).
        aliases: pairs of names that may share columns.
        residents: CTAs that share a multiprocessor.

    Raises:
        Hazard: two ranges overlap that must not, or there are not so many columns.
    """
    allowed = {frozenset(pair) for pair in aliases}
    names = list(ranges)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            (a, count_a), (b, count_b) = ranges[first], ranges[second]
            if a < b + count_b and b < a + count_a and frozenset((first, second)) not in allowed:
                raise Hazard(
                    f"{first}, columns {a}..{a + count_a - 1}, and {second}, columns {b}..{b + count_b - 1}, "
                    f"overlap, and are not declared to"
                )
    end = max(lo + count for lo, count in ranges.values())
    columns = MIN_COLUMNS
    while columns < end:
        columns *= 2
    if columns * residents > COLUMNS:
        raise Hazard(
            f"{end} columns take an allocation of {columns}; {residents} CTAs share {COLUMNS}"
        )
    return columns
