"""How long a signal takes: a named barrier, an mbarrier, a TMA copy; and how fast TMA fills shared memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

WARPGROUP = 128
BOX_ROWS, BOX_COLUMNS = 128, 64  # 16 KB of bfloat16
BOX_BYTES = 2 * BOX_ROWS * BOX_COLUMNS


@dataclass(frozen=True)
class HandoffConfig:
    """How a signal is passed.

    Attributes:
        mbarrier: two warps signal through mbarriers; else two warpgroups through named barriers.
        alone: one side signals to itself: what arriving and not having to wait costs.
    """

    mbarrier: bool
    alone: bool = False


class Handoffs:
    """Two sides pass a token back and forth; called with (clocks (CTAs, 2), turns, stream)."""

    def __init__(self, config: HandoffConfig):
        self.config = config

    def fake_arguments(self):
        """Arguments to compile with."""
        clocks = cute.runtime.make_fake_tensor(
            Int64, (cute.sym_int(), 2), stride=(2, 1), assumed_align=16
        )
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        return clocks, Int32(1), stream

    @cute.jit
    def __call__(self, clocks: cute.Tensor, turns: Int32, stream):
        """Launch."""
        self.kernel(clocks, turns).launch(
            grid=(clocks.shape[0], 1, 1), block=(2 * WARPGROUP, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, clocks: cute.Tensor, turns: Int32):
        """Ping-pong ``turns`` times."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        side = cute.arch.make_warp_uniform(thread // WARPGROUP)
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, 2)
        if thread == 0:
            cute.arch.mbarrier_init(barriers, 1)
            cute.arch.mbarrier_init(barriers + 1, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        start = cute.arch.clock64()
        if cutlass.const_expr(self.config.alone):
            if side == 0:
                self._alone(barriers, thread, turns)
        elif cutlass.const_expr(self.config.mbarrier):
            if thread % WARPGROUP < 32:
                for i in cutlass.range(turns, unroll=1):
                    if side == 0:
                        if thread % 32 == 0:
                            cute.arch.mbarrier_arrive(barriers)
                        cute.arch.mbarrier_wait(barriers + 1, i % 2)
                    else:
                        cute.arch.mbarrier_wait(barriers, i % 2)
                        if thread % 32 == 0:
                            cute.arch.mbarrier_arrive(barriers + 1)
        else:
            for _ in cutlass.range(turns, unroll=1):
                if side == 0:
                    cute.arch.barrier_arrive(barrier_id=1, number_of_threads=2 * WARPGROUP)
                    cute.arch.barrier(barrier_id=2, number_of_threads=2 * WARPGROUP)
                else:
                    cute.arch.barrier(barrier_id=1, number_of_threads=2 * WARPGROUP)
                    cute.arch.barrier_arrive(barrier_id=2, number_of_threads=2 * WARPGROUP)
        end = cute.arch.clock64()
        if thread == 0:
            clocks[block, 0] = Int64(start)
            clocks[block, 1] = Int64(end)

    @cute.jit
    def _alone(self, barriers: cute.Pointer, thread: Int32, turns: Int32):
        for i in cutlass.range(turns, unroll=1):
            if cutlass.const_expr(self.config.mbarrier):
                if thread < 32:
                    if thread == 0:
                        cute.arch.mbarrier_arrive(barriers)
                    cute.arch.mbarrier_wait(barriers, i % 2)
            else:
                cute.arch.barrier(barrier_id=1, number_of_threads=WARPGROUP)


@dataclass(frozen=True)
class CopyConfig:
    """Attributes: flying: copies of 16 KB in flight per CTA."""

    flying: int


class Copies:
    """Each CTA copies boxes of its own into shared memory; called with (x, clocks (CTAs, 2), turns, stream)."""

    def __init__(self, config: CopyConfig):
        self.config = config

    def fake_arguments(self):
        """Arguments to compile with; x is (boxes * 128, 64) bfloat16."""
        x = cute.runtime.make_fake_tensor(
            BFloat16, (cute.sym_int(), BOX_COLUMNS), stride=(BOX_COLUMNS, 1), assumed_align=16
        )
        clocks = cute.runtime.make_fake_tensor(
            Int64, (cute.sym_int(), 2), stride=(2, 1), assumed_align=16
        )
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        return x, clocks, Int32(1), stream

    @cute.jit
    def __call__(self, x: cute.Tensor, clocks: cute.Tensor, turns: Int32, stream):
        """Launch."""
        layout = cute.make_layout((BOX_ROWS, BOX_COLUMNS), stride=(BOX_COLUMNS, 1))
        atom, coords = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), x, layout, (BOX_ROWS, BOX_COLUMNS)
        )
        self.kernel(atom, coords, clocks, turns).launch(
            grid=(clocks.shape[0], 1, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom, x: cute.Tensor, clocks: cute.Tensor, turns: Int32):
        """``turns`` rounds of ``flying`` copies; a slot is filled again as soon as it is full."""
        flying = self.config.flying
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        smem = SmemAllocator()
        barriers = smem.allocate_array(Int64, flying)
        layout = cute.make_layout(
            (BOX_ROWS, BOX_COLUMNS, flying), stride=(BOX_COLUMNS, 1, BOX_ROWS * BOX_COLUMNS)
        )
        sX = smem.allocate_tensor(BFloat16, layout, byte_alignment=1024)
        if thread == 0:
            for i in cutlass.range_constexpr(flying):
                cute.arch.mbarrier_init(barriers + i, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        boxes = x.shape[0] // BOX_ROWS
        gX = cute.local_tile(x, (BOX_ROWS, BOX_COLUMNS), (None, 0))
        tXsX, tXgX = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        start = cute.arch.clock64()
        for turn in cutlass.range(turns + 1, unroll=1):
            for i in cutlass.range_constexpr(flying):
                if turn > 0:
                    cute.arch.mbarrier_wait(barriers + i, (turn - 1) % 2)
                if turn < turns:
                    box = (block + blocks * (turn * flying + i)) % boxes
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(barriers + i, BOX_BYTES)
                    cute.copy(atom, tXgX[None, box], tXsX[None, i], tma_bar_ptr=barriers + i)
        end = cute.arch.clock64()
        if thread == 0:
            clocks[block, 0] = Int64(start)
            clocks[block, 1] = Int64(end)


@dataclass(frozen=True)
class EmptyConfig:
    """Attributes: threads: per CTA."""

    threads: int


class Empty:
    """A kernel that does nothing, and one that spins; called with (clocks (CTAs, 4), cycles, stream)."""

    def __init__(self, config: EmptyConfig):
        self.config = config

    def fake_arguments(self):
        """Arguments to compile with."""
        clocks = cute.runtime.make_fake_tensor(
            Int64, (cute.sym_int(), 4), stride=(4, 1), assumed_align=16
        )
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        return clocks, Int32(1), stream

    @cute.jit
    def __call__(self, clocks: cute.Tensor, cycles: Int32, stream):
        """Launch."""
        self.kernel(clocks, cycles).launch(
            grid=(clocks.shape[0], 1, 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, clocks: cute.Tensor, cycles: Int32):
        """Note clock and nanoseconds, spin, and note them again."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if cycles > 0:
            start, start_ns = cute.arch.clock64(), cute.arch.globaltimer()
            now = cute.arch.clock64()
            while now - start < Int64(cycles):
                now = cute.arch.clock64()
            if thread == 0:
                clocks[block, 0] = Int64(start)
                clocks[block, 1] = Int64(now)
                clocks[block, 2] = Int64(start_ns)
                clocks[block, 3] = Int64(cute.arch.globaltimer())
