"""The Blackwell backward for head dims above 128 on a CPU, where not as in ``sm100_bwd``: dQ^T, and V in tensor memory."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from flash4.common.fragments import GROUP_NUMBERS
from flash4.common.graph import WARP
from flash4.sim.sm90_fwd import matmul
from flash4.sim.sm100_bwd import (
    ComputeOps,
    Kernel,
    LoadOps,
    MmaOps,
    ReduceOps,
    Variation,
    simulate_backward,
)
from flash4.sim.sm100_bwd_memory import WARPS, Free, Told, panels_of
from flash4.sim.sm100_fwd import pack_16_bit, unpack_16_bit
from flash4.sm100.bwd_config import DQ_STAGES, PANEL
from flash4.sm100.bwd_graph import ROWS
from flash4.sm100.bwd_wide_config import PIECE_NUMBERS, WideBackwardConfig
from flash4.sm100.bwd_wide_roles import KeptRoles

PIECES = ROWS * PANEL // PIECE_NUMBERS  # of an accumulator of 128 head dims


def spread(rows: np.ndarray) -> np.ndarray:
    """Rows of a product as lanes have them: of 64, each warp has 16 in its first lanes."""
    if len(rows) == ROWS:
        return rows
    lanes = np.full((WARPS, WARP, rows.shape[1]), np.nan, np.float32)
    lanes[:, : WARP // 2] = rows.reshape(WARPS, WARP // 2, -1)
    return lanes.reshape(ROWS, -1)


class WideLoadOps(LoadOps):
    """Verbs of the ``load`` role."""

    def load_half_v(self, tile, half: int, slot):
        """Values of half of the columns."""
        region = self._memory.tile("v")
        width = region.shape[1]
        values = self._keys(self._call.v, tile, 0, ROWS)[:, half * width : (half + 1) * width]
        self._fill(region, values, slot)


class WideMmaOps(MmaOps):
    """Verbs of the ``mma`` role."""

    def dp(self, slot):
        """dP^T = V dO^T, of V in tensor memory if it is kept there."""
        if not self._config.keeps_v:
            super().dp(slot)
            return
        tmem, bf16 = self._tmems[0], self._config.bf16

        def product(v, do):
            return matmul(unpack_16_bit(v, bf16), do.T)

        operands = (tmem.tile("V", *self._map.ranges()["v"]), self._memories[0].tile("do"))
        tile = tmem.tile("dP", self._map.dp(), PANEL)
        self._core.issue(tile, product, operands, False, "dP = V dO^T")

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


class WideComputeOps(ComputeOps):
    """Verbs of a warp of the ``compute`` role."""

    def keep_v(self, half: int):
        """Half of V to tensor memory: this warp's keys, half of those columns."""
        region = self._memory.tile("v")
        width = region.shape[1] // 2
        mine = region.read()[self._lanes.start : self._lanes.stop]
        words = pack_16_bit(mine[:, self._warpgroup * width :][:, :width].copy(), self._config.bf16)
        at = self._map.v() + (2 * half + self._warpgroup) * (width // 2)
        self._port.store(self._tile("V", at, width // 2), words)
        self._port.wait_st()


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
        kept: class with the role functions where V is kept in tensor memory.
    """

    kept: type = KeptRoles

    def roles_for(self, config: WideBackwardConfig) -> type | None:
        """Class that a config runs, or None if all that is changed is what it does not run."""
        return None if self.kept is not KeptRoles and not config.keeps_v else self.roles


class WideKernel(Kernel):
    """Memory, edges and roles of one CTA."""

    load_ops, mma_ops, compute_ops = WideLoadOps, WideMmaOps, WideComputeOps
    reduce_ops, vary = WideReduceOps, WideVariation

    @property
    def own_roles(self) -> type:
        """Class with the roles of one CTA."""
        return self.variation.kept if self.call.config.keeps_v else self.variation.roles

    def _more_ends(self, cta):
        """Ends of ``compute`` where V is kept."""
        if not self.call.config.keeps_v:
            return {}
        ring = self.rings["v"]
        return {
            "v": ring.consumer(cta),
            "v_free": Free(ring.empty[0][0]),
            "vt": self._signal(cta, "compute", "vt"),
        }

    def _mma_ends(self, cta):
        """Ends of ``mma``."""
        ends = super()._mma_ends(cta)
        if self.call.config.keeps_v:
            ends["v"] = Told(self._signal(cta, "mma", "vt"))
        return ends


simulate_wide_backward = partial(simulate_backward, kernel=WideKernel)
