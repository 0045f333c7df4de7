"""Verbs of the Blackwell backward for head dims above 128, in CuTe, where not as in ``bwd_ops`` and ``bwd_math``: those of dQ^T."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from flash4.common.fragments import GROUP_NUMBERS
from flash4.common.graph import WARP
from flash4.sm100.bwd_config import DQ_STAGES, PANEL
from flash4.sm100.bwd_graph import ROWS
from flash4.sm100.bwd_math import ReduceOps, some
from flash4.sm100.bwd_ops import MmaOps, make_mma_dq_turned
from flash4.sm100.bwd_wide_config import PIECE_NUMBERS

PIECES = ROWS * PANEL // PIECE_NUMBERS  # of a product of 128 head dims


@dataclass(frozen=True)
class WideMmaOps(MmaOps):
    """Verbs of the ``mma`` role."""

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
