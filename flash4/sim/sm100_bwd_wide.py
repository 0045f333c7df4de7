"""The Blackwell backward for head dims above 128 on a CPU, where not as in ``sm100_bwd``: dQ^T, and roles with one slot of Q."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from flash4.common.fragments import GROUP_NUMBERS
from flash4.common.graph import WARP
from flash4.sim.sm90_fwd import matmul
from flash4.sim.sm100_bwd import Kernel, MmaOps, ReduceOps, Variation, simulate_backward
from flash4.sim.sm100_bwd_memory import WARPS, panels_of
from flash4.sm100.bwd_config import DQ_STAGES, PANEL
from flash4.sm100.bwd_graph import ROWS
from flash4.sm100.bwd_wide_config import PIECE_NUMBERS, WideBackwardConfig
from flash4.sm100.bwd_wide_roles import OneSlotRoles

PIECES = ROWS * PANEL // PIECE_NUMBERS  # of an accumulator of 128 head dims


def spread(rows: np.ndarray) -> np.ndarray:
    """Rows of a product as lanes have them: of 64, each warp has 16 in its first lanes."""
    if len(rows) == ROWS:
        return rows
    lanes = np.full((WARPS, WARP, rows.shape[1]), np.nan, np.float32)
    lanes[:, : WARP // 2] = rows.reshape(WARPS, WARP // 2, -1)
    return lanes.reshape(ROWS, -1)


class WideMmaOps(MmaOps):
    """Verbs of the ``mma`` role."""

    def dq(self, slot):
        """dQ^T = K^T dS^T, of this CTA's head dims, 128 or 64 at a time."""
        memory, tmem = self._memories[0], self._tmems[0]
        for i, (first, rows) in enumerate(self._config.dq_accumulators):

            def product(*arrays, first=first, rows=rows):
                k = arrays[-1][:, self._own(self._config.part_d)][:, first : first + rows]
                return spread(matmul(k.T, panels_of(arrays[:-1], 1)))

            tile = tmem.tile("dQ", self._map.dq() + i * PANEL, PANEL)
            operands = (*memory.panel(0), memory.tile("k"))
            self._core.issue(tile, product, operands, False, "dQ^T = K^T dS^T")


class WideReduceOps(ReduceOps):
    """Verbs of a warp of the ``reduce`` role: 32 lanes of dQ^T."""

    def _lanes_of(self, part) -> int:
        """Lanes of a warp that have some of a piece."""
        return self._config.dq_accumulators[part // PIECES][1] // WARPS

    def _box(self, part, warp):
        return self._memory.dq(part % DQ_STAGES, warp, self._lanes_of(part))

    def stage_dq(self, sums, part):
        """A piece of it to shared memory: 16 queries of 32 head dims, or 32 of 16."""
        which, within = divmod(part, PIECES)
        lanes = self._lanes_of(part)
        queries = PIECE_NUMBERS // WARPS // lanes
        first = which * PANEL + within * queries
        mine = sums[:lanes, first : first + queries]
        self._box(part, self._warp).write(mine.reshape(lanes, -1, GROUP_NUMBERS).transpose(1, 0, 2))
        self._machine.fence()


@dataclass(frozen=True)
class WideVariation(Variation):
    """What a run may change, to see whether it matters.

    Attributes:
        one_slot: class with ``load`` and ``mma`` where Q has one slot.
    """

    one_slot: type = OneSlotRoles

    def roles_for(self, config: WideBackwardConfig) -> type | None:
        """Class that a config runs, or None if all that is changed is what it does not run."""
        changed = self.one_slot is not OneSlotRoles
        return None if changed and config.q_stages > 1 else self.roles


class WideKernel(Kernel):
    """Memory, edges and roles of one CTA."""

    mma_ops, reduce_ops, vary = WideMmaOps, WideReduceOps, WideVariation

    @property
    def issuers(self) -> type:
        """Class with the roles ``load`` and ``mma``."""
        return self.variation.one_slot if self.call.config.q_stages == 1 else self.variation.roles


simulate_wide_backward = partial(simulate_backward, kernel=WideKernel)
