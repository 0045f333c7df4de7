"""Instruction streams beside warpgroup MMAs: how fast each runs, alone and together.

Some warpgroups multiply, the others run a loop of one kind of instruction; every warp notes the clock at its start
and at its end. Of the two that share an SM, the one that ends first was never alone.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cutlass_dsl import T
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from flash4.common.dsl import inline_ptx
from flash4.sm90.fwd_ops import issue_mma

WARPGROUP = 128
ROWS = 64
CHAINS = 16  # independent chains: latency must not show
NEVER = 1.2345678e33
PER_TURN = 64  # groups of instructions per turn of the loop

MUFU = ("=f,f", "ex2.approx.ftz.f32 $0, $1;", 1)
FMA = ("=f,f,f", "fma.rn.ftz.f32 $0, $1, $2, $2;", 2)
ADD = ("=f,f,f", "add.ftz.f32 $0, $1, $2;", 2)
PACK = (
    "=f,f,f",
    "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $1, $2; mov.b32 $0, t; }",
    2,
)
MAX3 = (
    "=f,f,f",
    "{ .reg .s32 a, b, t; mov.b32 a, $1; mov.b32 b, $2; max.s32 t, a, b; max.s32 t, t, 77; mov.b32 $0, t; }",
    2,
)
# Per two elements of a softmax; 4 instructions each. Three arguments: text, count, which chains it takes.
KINDS = {
    "mufu": (MUFU,),
    "fma": (FMA,),
    "max3": (MAX3,),
    "pack": (PACK,),
    "softmax": (FMA, MUFU, ADD, FMA, MUFU, ADD, MAX3, PACK),
}


@dataclass(frozen=True)
class StreamConfig:
    """One pair of streams; ints and bools only.

    Attributes:
        mma_warpgroups: warpgroups that multiply.
        op_warpgroups: warpgroups that run the other stream.
        kind: index of the other stream in ``KINDS``.
        n: columns of each MMA (64 x n x 16).
        steps: MMAs per group.
        groups: groups in a row; a warpgroup waits for the last.
        a_in_registers: operand A comes from registers.
    """

    mma_warpgroups: int
    op_warpgroups: int
    kind: int = 0
    n: int = 128
    steps: int = 8
    groups: int = 1
    a_in_registers: bool = False

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return WARPGROUP * (self.mma_warpgroups + self.op_warpgroups)


class Streams:
    """Kernel of a config; called with (data, clocks, mma turns, op turns, stream).

    ``data`` (any number of float32) fills the operands of the MMAs, two 16-bit values each; ``clocks`` is (CTAs, 16
    warps, 4): cycles at start and end, nanoseconds at start and end.
    """

    def __init__(self, config: StreamConfig):
        self.config = config

    def fake_arguments(self):
        """Arguments to compile with."""
        data = cute.runtime.make_fake_tensor(
            Float32, (cute.sym_int(),), stride=(1,), assumed_align=16
        )
        clocks = cute.runtime.make_fake_tensor(
            Int64, (cute.sym_int(), 16, 4), stride=(64, 4, 1), assumed_align=16
        )
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        return data, clocks, Int32(1), Int32(1), stream

    @cute.jit
    def __call__(self, data, clocks, mma_turns: Int32, op_turns: Int32, stream):
        """Launch one CTA per row of ``clocks``."""
        c = self.config
        source = warpgroup.OperandSource.RMEM if c.a_in_registers else warpgroup.OperandSource.SMEM
        mma = None
        if cutlass.const_expr(c.mma_warpgroups > 0):
            mma = hopper.make_trivial_tiled_mma(
                BFloat16,
                BFloat16,
                OperandMajorMode.K,
                OperandMajorMode.MN if c.a_in_registers else OperandMajorMode.K,
                Float32,
                (c.mma_warpgroups, 1, 1),
                (ROWS, c.n),
                source,
            )
        self.kernel(mma, data, clocks, mma_turns, op_turns).launch(
            grid=(clocks.shape[0], 1, 1), block=(c.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, mma, data: cute.Tensor, clocks: cute.Tensor, mma_turns: Int32, op_turns: Int32
    ):
        """Send each warpgroup to its stream."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        tensors = None
        if cutlass.const_expr(c.mma_warpgroups > 0):
            tensors = self._operands(data, thread)
        cute.arch.sync_threads()
        start_ns = cute.arch.globaltimer()
        total = Float32(0.0)
        start = cute.arch.clock64()
        if group < c.mma_warpgroups:
            if cutlass.const_expr(c.mma_warpgroups > 0):
                total = self._multiply(mma, data, tensors, thread, mma_turns)
        else:
            if cutlass.const_expr(c.op_warpgroups > 0):
                total = self._run_ops(thread, op_turns)
        end = cute.arch.clock64()
        if total == NEVER:  # or the compiler would see that nobody needs it
            start = Int64(0)
        if thread % 32 == 0:
            clocks[block, thread // 32, 0] = Int64(start)
            clocks[block, thread // 32, 1] = Int64(end)
            clocks[block, thread // 32, 2] = Int64(start_ns)
            clocks[block, thread // 32, 3] = Int64(cute.arch.globaltimer())

    @cute.jit
    def _operands(self, data: cute.Tensor, thread: Int32):
        """Shared-memory operands, filled from ``data``."""
        c, smem = self.config, SmemAllocator()
        rows, depth = ROWS * c.mma_warpgroups, 16 * c.steps
        tile = (rows, c.n, depth)
        order = LayoutEnum.COL_MAJOR if c.a_in_registers else LayoutEnum.ROW_MAJOR
        layouts = (
            hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, BFloat16, 1),
            hopper.make_smem_layout_b(order, tile, BFloat16, 1),
        )
        tensors = []
        for i in cutlass.range_constexpr(2):
            layout = layouts[i]
            words = cute.cosize(layout.outer) // 2
            start = smem.allocate_array(Float32, words, byte_alignment=1024)
            flat = cute.make_tensor(start, cute.make_layout(words))
            for j in cutlass.range(thread, words, c.threads, unroll=1):
                flat[j] = data[(j + i * words) % data.shape[0]]
            swizzled = cute.recast_ptr(start, swizzle_=layout.inner, dtype=BFloat16)
            tensors.append(cute.make_tensor(swizzled, layout.outer))
        cute.arch.fence_proxy("async.shared", space="cta")
        return tensors

    @cute.jit
    def _multiply(
        self, mma: cute.TiledMma, data: cute.Tensor, tensors: list, thread: Int32, turns: Int32
    ):
        c = self.config
        sA, sB = tensors
        group = thread // WARPGROUP
        mine = mma.get_slice(group * WARPGROUP)
        if cutlass.const_expr(c.a_in_registers):
            a = cute.make_rmem_tensor(((2, 2, 2), 1, c.steps), BFloat16)
            words = cute.recast_tensor(a, Float32)
            for i in cutlass.range_constexpr(cute.size(words)):
                words[i] = data[(thread + 977 * i) % data.shape[0]]
        else:
            a = mma.make_fragment_A(mine.partition_A(sA))[None, None, None, 0]
        b = mma.make_fragment_B(mine.partition_B(sB))[None, None, None, 0]
        acc = cute.make_rmem_tensor(((2, 2, c.n // 8), 1, 1), Float32)
        acc.fill(0.0)
        for _ in cutlass.range(turns, unroll=1):
            for _ in cutlass.range_constexpr(c.groups):
                issue_mma(mma, acc, a, b, True)
            warpgroup.wait_group(0)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(cute.size(acc)):
            total = total + acc[i]
        return total

    @cute.jit
    def _run_ops(self, thread: Int32, turns: Int32):
        values = cute.make_rmem_tensor(CHAINS, Float32)
        y = Float32(thread)
        for i in cutlass.range_constexpr(CHAINS):
            values[i] = Float32(thread + i)
        body = list(KINDS.values())[self.config.kind]
        for _ in cutlass.range(turns, unroll=1):
            for i in cutlass.range_constexpr(PER_TURN):
                for j in cutlass.range_constexpr(len(body)):
                    constraints, text, inputs = body[j]
                    chain = (i * len(body) + j) % CHAINS
                    operands = (values[chain], y)[:inputs]
                    values[chain] = Float32(
                        inline_ptx(T.f32(), constraints, text, *operands, side_effects=True)
                    )
        total = Float32(0.0)
        for i in cutlass.range_constexpr(CHAINS):
            total = total + values[i]
        return total
