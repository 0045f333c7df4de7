"""After a backward: dQ = scale * its sums, from the order of accumulators to rows, in 16 bit."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32
from cutlass.memory import SmemAllocator

from flash4.common.fragments import GROUP_NUMBERS, dq_place, warp_dq_place
from flash4.common.geometry import QueryBlocks
from flash4.common.kv_sequences import Side, visited_rows
from flash4.passes.bwd_config import THREADS, FinishConfig
from flash4.passes.bwd_prepare import VECTOR, place_of
from flash4.passes.bwd_rows import fake_lengths, fake_rows, keys_side, queries_side, rows_of

PARTS = 2  # MMA warpgroups of the backward
PART_THREADS = THREADS // PARTS


class FinishBackward:
    """One CTA for each block of queries of one head; rows are put together in shared memory."""

    def __init__(self, config: FinishConfig):
        self.config = config
        self.dtype = BFloat16 if config.bf16 else Float16

    def fake_arguments(self):
        """Arguments of ``__call__`` with symbolic sizes and strides, for compiling without data."""
        c, fake = self.config, cute.runtime.make_fake_tensor
        batch, heads, seqlen, blocks = (cute.sym_int() for _ in range(4))

        def sym(divisibility):
            return cute.sym_int64(divisibility=divisibility)

        sums = fake(
            Float32,
            (batch, heads, blocks, c.tile_m * c.tile_d),
            stride=(sym(4), sym(4), sym(4), 1),
            assumed_align=16,
        )
        dq = fake(
            self.dtype,
            (batch, seqlen, heads, cute.sym_int(divisibility=VECTOR)),
            stride=(sym(8), sym(8), sym(8), 1),
            assumed_align=16,
        )
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        tensors = (sums, dq, *fake_lengths(c))
        if c.checks:
            tensors += fake_rows(self.dtype, c)
        return (tensors, Float32(1.0), stream)

    @cute.jit
    def __call__(
        self,
        tensors,  # sums (B, H, blocks, tile_m tile_d), float32, dq (B, S, H, D); cu_q, used_q; if checked k (B, S, H, D), cu_k, used_k
        scale: Float32,
        stream,
    ):
        """Launch."""
        sums, dq, *lengths = tensors
        blocks = (sums.shape[2], sums.shape[1])
        count, keys = self.config.cu_q + self.config.used_q, None
        side = queries_side(self.config, dq, lengths[:count])
        if cutlass.const_expr(self.config.checks):
            keys = keys_side(self.config, lengths[count], lengths[count + 1 :])
        self.kernel((sums, dq), scale, blocks, side, keys).launch(
            grid=(sums.shape[2] * sums.shape[1] * sums.shape[0], 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=self.config.chained,
        )

    @cute.kernel
    def kernel(self, tensors: tuple, scale: Float32, blocks: tuple, side: Side, keys):
        """Sums -> registers -> shared memory, by rows -> dQ."""
        c, (sums, dq) = self.config, tensors
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        # The last first: their sums were added to last, and are in L2 still.
        count, _, _ = cute.arch.grid_dim()
        block, head, batch = place_of(count - 1 - index, blocks)
        rows = rows_of(side, thread, (block, batch), dq, c.tile_m)
        used = rows.used
        if cutlass.const_expr(c.checks):
            used = visited_rows(QueryBlocks(c.tile_m, c.tile_n, c.causal), keys, rows)
        part, mine = thread // PART_THREADS, thread % PART_THREADS
        width = c.tile_d + VECTOR  # rows apart by other than whole turns of the banks
        sQ = SmemAllocator().allocate_tensor(
            self.dtype, cute.make_layout((c.tile_m, c.tile_d), stride=(width, 1)), byte_alignment=16
        )
        if cutlass.const_expr(c.chained):
            cute.arch.griddepcontrol_wait()
        source = sums[batch, head, block, None].iterator
        numbers = c.tile_m * c.tile_d // THREADS
        values = cute.make_rmem_tensor((GROUP_NUMBERS, numbers // GROUP_NUMBERS), Float32)
        source, layout = self._source(source, part, mine, thread, numbers)
        cute.autovec_copy(cute.make_tensor(source, layout), values)
        for group in cutlass.range_constexpr(numbers // GROUP_NUMBERS):
            for number in cutlass.range_constexpr(GROUP_NUMBERS):
                if cutlass.const_expr(c.warps > 0):
                    i = group * GROUP_NUMBERS + number
                    query, column = warp_dq_place(c, i * THREADS + thread)
                else:
                    query, column = dq_place(c, part, mine, group, number)
                value = values[number, group] * scale
                if cutlass.const_expr(c.varlen):  # rows may not be in use
                    value = Float32(cutlass.select_(query < used, value, Float32(0.0)))
                sQ[query, column] = value.to(self.dtype)
        cute.arch.sync_threads()
        vectors = c.tile_d // VECTOR  # of a row
        for i in cutlass.range_constexpr(cute.ceil_div(c.tile_m * vectors, THREADS)):
            number = i * THREADS + thread
            query, vector = number // vectors, number % vectors
            exists = (query < c.tile_m) & (query < rows.stored)
            if exists & (vector * VECTOR < dq.shape[3]):
                row = dq[rows.entry, rows.begin + query, head, None]
                at = (sQ.iterator + (query * width + vector * VECTOR)).align(16)
                to = (row.iterator + vector * VECTOR).align(16)
                copied = cute.make_rmem_tensor(VECTOR, self.dtype)
                cute.autovec_copy(cute.make_tensor(at, cute.make_layout(VECTOR)), copied)
                cute.autovec_copy(copied, cute.make_tensor(to, cute.make_layout(VECTOR)))

    def _source(self, source, part, mine, thread, numbers):
        """Where a thread's sums begin, and how they lie, as (4, groups)."""
        groups = numbers // GROUP_NUMBERS
        if self.config.warps:
            shape = (GROUP_NUMBERS, groups)
            layout = cute.make_layout(shape, stride=(THREADS, GROUP_NUMBERS * THREADS))
            return source + thread, layout
        first = part * (PART_THREADS * numbers) + mine * GROUP_NUMBERS
        stride = (1, GROUP_NUMBERS * PART_THREADS)
        return (source + first).align(16), cute.make_layout((GROUP_NUMBERS, groups), stride=stride)
