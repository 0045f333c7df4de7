"""Backward attention for Blackwell, head dims above 128: wiring of the roles, where not as in ``bwd``.

Steps have 64 queries. dQ is multiplied transposed, head dims in lanes: so those of 64 queries take half as many columns of
tensor memory. Where it does not hold dK and dV even so, two CTAs work on a tile, each with half of the columns of dQ, dK and
dV; both multiply all of S and dP, and neither waits for the other.

    two slots of Q   S(i) = K Q^T | dQ^T(i-1) = K^T dS^T | dK += dS^T Q(i-1) | dP(i) = V dO^T | dV += P^T dO(i)
    one slot         S(i) | dP(i) | dV | dK | dQ^T(i)

Config and graph are in ``bwd_wide_config``, the schedule with one slot in ``bwd_wide_roles``, verbs in ``bwd_wide_ops``.
"""

import cutlass.cute as cute

from flash4.sm100.bwd import BackwardSm100
from flash4.sm100.bwd_graph import ROWS
from flash4.sm100.bwd_ops import element
from flash4.sm100.bwd_wide_config import WideBackwardConfig
from flash4.sm100.bwd_wide_ops import WideMmaOps, WideReduceOps
from flash4.sm100.bwd_wide_roles import OneSlotRoles
from flash4.sm100.fwd_config import ELEMENT_BYTES, SMEM_ALIGN


class WideBackwardSm100(BackwardSm100):
    """One wide Blackwell backward kernel; see the module docstring for its pipeline."""

    mma_ops, reduce_ops = WideMmaOps, WideReduceOps

    def __init__(self, config: WideBackwardConfig):
        super().__init__(config)
        if config.q_stages == 1:
            self.issuers = OneSlotRoles()

    def _operand(self, memory, name, layout):
        """16-bit tensor in a buffer; of what is read of some columns alone, it begins at the first of this CTA's."""
        c = self.config
        buffers = {"qt": ("q", c.part_d * c.tile_m), "dot": ("do", c.part_dv * c.tile_m)}
        buffers |= {"ds": ("ds", 0), "dst": ("ds", 0), "dk": ("k", 0), "dv": ("v", 0)}
        first = 0
        if name.startswith("kt"):
            first = c.dq_accumulators[int(name.removeprefix("kt"))][0] * ROWS
            buffers[name] = ("k", c.part_d * ROWS)
        buffer, apart = buffers.get(name, (name, 0))
        base = memory.base[buffer]
        if c.splits > 1 and apart:
            base = base + self._split() * (apart * ELEMENT_BYTES)
        pointer = cute.recast_ptr(
            (base + first * ELEMENT_BYTES).align(SMEM_ALIGN),
            swizzle_=layout.inner,
            dtype=element(c),
        )
        return cute.make_tensor(pointer, layout.outer)
