"""Backward attention for Blackwell, head dims above 128: wiring of the roles, where not as in ``bwd``.

Steps have 64 queries. dQ is multiplied transposed, head dims in lanes: so those of 64 queries take half as many columns of
tensor memory. Where it does not hold dK and dV even so, two CTAs work on a tile, each with half of the columns of dQ, dK and
dV; both multiply all of S and dP, and neither waits for the other. They keep V in tensor memory.

    S(i) = K Q^T | dQ^T(i-1) = K^T dS^T | dK += dS^T Q(i-1) | dP(i) = V dO^T | dV += P^T dO(i)

Config and graph are in ``bwd_wide_config``, what differs of the schedule in ``bwd_wide_roles``, verbs in ``bwd_wide_ops``.
"""

import cutlass.cute as cute

from flash4.sm100.bwd import BackwardSm100
from flash4.sm100.bwd_ends import Raise, Told
from flash4.sm100.bwd_ops import element
from flash4.sm100.bwd_wide_config import WideBackwardConfig
from flash4.sm100.bwd_wide_ops import WideComputeOps, WideLoadOps, WideMmaOps, WideReduceOps
from flash4.sm100.bwd_wide_roles import KeptRoles
from flash4.sm100.fwd_config import SMEM_ALIGN
from flash4.sm100.fwd_graph import THREADS


class WideBackwardSm100(BackwardSm100):
    """One wide Blackwell backward kernel; see the module docstring for its pipeline."""

    load_ops, mma_ops = WideLoadOps, WideMmaOps
    compute_ops, reduce_ops = WideComputeOps, WideReduceOps

    def __init__(self, config: WideBackwardConfig):
        super().__init__(config)
        if config.keeps_v:
            self.roles = KeptRoles()

    def _more_ends(self, memory, role):
        """Those of V, where it is kept in tensor memory."""
        if not self.config.keeps_v:
            return {}
        if role == "mma":
            return {"v": Told(memory.barriers["vt"])}
        return {
            "v": self._ring(memory, "v"),
            "v_free": Raise(memory.empty["v"], THREADS, 1),
            "vt": self._raise(memory, "vt"),
        }

    def _operand(self, memory, name, layout):
        """16-bit tensor in a buffer; of what is read by columns, it begins at the first of this CTA's."""
        if not name.startswith(("kt", "qt", "dot")):
            return super()._operand(memory, name, layout)
        buffer, first = self.config.start_of(name, self._split())
        pointer = (memory.base[buffer] + first).align(SMEM_ALIGN)
        pointer = cute.recast_ptr(pointer, swizzle_=layout.inner, dtype=element(self.config))
        return cute.make_tensor(pointer, layout.outer)
