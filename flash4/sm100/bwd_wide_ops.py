"""Verbs of the Blackwell backward for head dims above 128, in CuTe, where not as in ``bwd_ops`` and ``bwd_math``: dQ^T, and V that is kept."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import tcgen05

from flash4.common.fragments import GROUP_NUMBERS
from flash4.common.graph import WARP
from flash4.sm100.bwd_config import DQ_STAGES, PANEL
from flash4.sm100.bwd_graph import ROWS, SLICE
from flash4.sm100.bwd_math import PIECE, ComputeOps, ReduceOps, some
from flash4.sm100.bwd_ops import (
    K_MAJOR,
    LoadOps,
    MmaOps,
    element,
    make_mma,
    make_mma_dq_turned,
)
from flash4.sm100.bwd_wide_config import PIECE_NUMBERS

PIECES = ROWS * PANEL // PIECE_NUMBERS  # of a product of 128 head dims


@dataclass(frozen=True)
class WideLoadOps(LoadOps):
    """Verbs of the ``load`` role."""

    def load_half_v(self, tile, half: int, slot):
        """Fill the slot with half of the columns of the tile's values."""
        self._load_keys("v", self.config.part_dv, tile, slot, half)


def make_mma_dp_kept(c):
    """Tiled MMA of dP^T = V dO^T, V from tensor memory."""
    return make_mma(c, (K_MAJOR, K_MAJOR), (ROWS, c.tile_m), tcgen05.OperandSource.TMEM)


@dataclass(frozen=True)
class WideMmaOps(MmaOps):
    """Verbs of the ``mma`` role."""

    def dp(self, slot):
        """Issue dP^T = V dO^T, of V in tensor memory if it is kept there."""
        c = self.config
        if not c.keeps_v:
            self._scores("v", "do", self.tmem.dp(), slot)
            return
        mma = make_mma_dp_kept(c)
        acc = self._accumulator(mma, (ROWS, c.tile_m), self.tmem.dp())
        columns = [self.tmem.v() + SLICE // 2 * k for k in range(c.tile_dv // SLICE)]
        self._from_tmem(mma, acc, columns, "do", slot, False)

    def dq(self, slot):
        """Issue dQ^T = K^T dS^T: head dims in lanes, queries in columns, 128 or 64 head dims at a time."""
        c = self.config
        for i, (_, rows) in enumerate(c.dq_accumulators):
            mma = make_mma_dq_turned(c, rows)
            acc = self._accumulator(mma, (rows, c.tile_m), self.tmem.dq() + i * PANEL)
            a = mma.make_fragment_A(self.smem[f"kt{i}"])[None, None, None, slot.at]
            b = mma.make_fragment_B(self.smem["ds"])[None, None, None, slot.at]
            self._multiply(mma, acc, a, b, False)


@dataclass(frozen=True)
class WideComputeOps(ComputeOps):
    """Verbs of the ``compute`` role."""

    def keep_v(self, half: int):
        """Half of the columns of V, of which a warpgroup takes half, from their buffer to tensor memory."""
        c = self.config
        width = c.part_dv // 2
        values = cute.make_rmem_tensor(width, element(c))
        row = cute.local_tile(
            self.sDV[None, None, 0], (1, width), (self.lanes.thread, self.warpgroup)
        )
        for j in range(0, width, PIECE):
            piece = cute.make_tensor(values.iterator + j, cute.make_layout((1, PIECE)))
            cute.autovec_copy(cute.local_tile(row, (1, PIECE), (0, j // PIECE)), piece)
        words = width // 2
        column = self.tmem.v() + (2 * half + self.warpgroup) * words
        self.lanes.store(cute.recast_tensor(values, Float32), column, words)


@dataclass(frozen=True)
class WideReduceOps(ReduceOps):
    """Verbs of the ``reduce`` role."""

    def stage_dq(self, sums, part):
        """A piece of it to shared memory: 16 queries of 128 head dims, or 32 of 64; four queries of a lane together."""
        which, within = divmod(part, PIECES)
        _, rows = self.config.dq_accumulators[which]
        groups = PIECE_NUMBERS // rows // GROUP_NUMBERS
        at = which * PANEL + within * groups * GROUP_NUMBERS
        sources = [some(sums, at + i * GROUP_NUMBERS, GROUP_NUMBERS) for i in range(groups)]
        if rows == ROWS:
            for i, source in enumerate(sources):
                target = self.sDQ[None, self.lanes.thread, i, part % DQ_STAGES]
                cute.autovec_copy(source, target)
        else:
            self._stage_few(sources, part)
        cute.arch.fence_view_async_shared()

    @cute.jit
    def _stage_few(self, sources, part: cutlass.Constexpr):
        """Of a product of 64 rows each warp has 16, in its first lanes."""
        thread = self.lanes.thread
        if thread % WARP < WARP // 2:
            row = thread // WARP * (WARP // 2) + thread % WARP
            for i in cutlass.range_constexpr(len(sources)):
                lane, group = row + i % 2 * (ROWS // 2), i // 2
                cute.autovec_copy(sources[i], self.sDQ[None, lane, group, part % DQ_STAGES])
