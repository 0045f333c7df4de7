"""Verbs of the ``convert`` role of the Hopper backward, in CuTe: dQ = scale * its sums, in 16 bit."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flash4.common.fragments import GROUP_NUMBERS, dq_place
from flash4.common.graph import WARP, WARPGROUP
from flash4.sm90.bwd_config import BackwardConfig
from flash4.sm90.bwd_ops import copy_row, wait_for_count
from flash4.sm90.fwd_ops import element

PAIR = 2  # neighbours in a row among the numbers of a thread


@dataclass(frozen=True)
class ConvertOps:
    """Verbs of the ``convert`` role: one warp, which takes the place of each warp of the warpgroup that multiplied the sums."""

    config: BackwardConfig
    mSums: cute.Tensor  # (B, H, blocks, tile_m tile_d), float32
    mTurns: cute.Tensor  # (B, H, blocks, 2) int32, tiles that have added
    mDQ: cute.Tensor  # (B, S, H, D), 16 bit
    sSums: cute.Tensor  # (dq_floats, 1)
    scale: Float32
    lane: Int32

    def wait_sums(self, block):
        """Wait until all tiles that visit a block have added theirs."""
        turns = self.mTurns[block.batch, block.head, block.block, None]
        wait_for_count(turns.iterator + block.part, block.visitors)
        cute.arch.fence_proxy("async.global")  # the copy engine comes after this thread

    def load_sums(self, block, slot):
        """Fill a slot with the sums."""
        floats = self.config.dq_floats
        sums = self.mSums[block.batch, block.head, block.block, None].iterator + block.part * floats
        copy_row(self.sSums[None, slot.index].iterator, sums, 4 * floats, slot.barrier)

    @cute.jit
    def convert(self, block, slot):
        """Slot -> dQ, two neighbours at a time: eight rows of a group of columns."""
        for place in range(WARPGROUP // WARP):
            self._convert_rows(block, slot, place * WARP + self.lane)

    @cute.jit
    def _convert_rows(self, block, slot, thread):
        """The numbers that one thread of the warpgroup had."""
        c, first = self.config, block.block * self.config.tile_m
        source = self.sSums[None, slot.index].iterator + thread * GROUP_NUMBERS
        numbers = cute.make_rmem_tensor(GROUP_NUMBERS, Float32)
        pair = cute.make_rmem_tensor(PAIR, element(c))
        for group in cutlass.range_constexpr(c.dq_floats // WARPGROUP // GROUP_NUMBERS):
            at = (source + group * GROUP_NUMBERS * WARPGROUP).align(16)
            cute.autovec_copy(cute.make_tensor(at, cute.make_layout(GROUP_NUMBERS)), numbers)
            for number in cutlass.range_constexpr(0, GROUP_NUMBERS, PAIR):
                query, column = dq_place(c, block.part, thread, group, number)
                row = first + query
                if (row < self.mDQ.shape[1]) & (column < self.mDQ.shape[3]):
                    for i in cutlass.range_constexpr(PAIR):
                        pair[i] = (numbers[number + i] * self.scale).to(element(c))
                    to = self.mDQ[block.batch, row, block.head, None].iterator + column
                    cute.autovec_copy(pair, cute.make_tensor(to.align(4), cute.make_layout(PAIR)))
