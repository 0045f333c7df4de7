"""Limits of the hardware that a pipeline graph must keep before anything runs."""

from flash4.common.graph import PipelineGraph
from flash4.sim.machine import Hazard

REGISTER_FILE = 65_536  # registers of an SM, 32 bits each
MIN_REGISTERS, MAX_REGISTERS, REGISTER_STEP = 24, 256, 8  # what setmaxnreg takes


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
    if graph.registers > REGISTER_FILE:
        parts = " + ".join(
            f"{len(r.warpgroups)} x 128 x {r.registers} ({r.name})" for r in graph.roles
        )
        raise Hazard(f"{parts} = {graph.registers} registers; an SM has {REGISTER_FILE}")
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
