"""Backward attention for Hopper, head dims above 128: host code and wiring of the roles, where not as in ``bwd``.

    load --[k x1 tma->warps]--> mma_v, mma_k
    load --[v x1 tma->warps]--> mma_v, mma_k
    load --[q x2 tma->warps of 2 CTAs]--> mma_v, mma_k
    load --[do x1 tma->warps of 2 CTAs]--> mma_v, mma_k
    mma_v --[P, float32]--> mma_k --[dS]--> mma_v
    mma_v, mma_k --[dq, one box each]--> reduce --[bulk additions]--> global memory

Per step, one block of 64 queries of one head, in each CTA of a cluster with 64 keys of its own:

    mma_v   S^T = K Q^T | P = exp(scale S - LSE), to mma_k | dV += P^T dO | parts of dQ = dS K, into its box
    mma_k   dP^T = V dO^T | dS = P (dP - D), to mma_v | a part of dQ | dK += dS^T Q | another part of dQ

Config and graph are in ``bwd_wide_config``, the schedule in ``bwd_wide_roles``, its verbs in ``bwd_wide_ops``.
"""

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from flash4.common.graph import WARPGROUP
from flash4.common.kv_tiles import KvGrid, KvTileSchedule
from flash4.common.numerics import opaque
from flash4.common.tma_views import permuted_view
from flash4.sm90.bwd import (
    K_MAJOR,
    MN_MAJOR,
    ROW,
    BackwardSm90,
    Operands,
    RunTime,
    TiledMmas,
)
from flash4.sm90.bwd_config import MMA_WARPGROUPS
from flash4.sm90.bwd_ops import Inbox, Outbox
from flash4.sm90.bwd_wide_config import DS_STAGES, PART_WIDTH
from flash4.sm90.bwd_wide_ops import (
    WideExchange,
    WideLoadOps,
    WideMmaOps,
    WideReduceOps,
    dq_accumulator,
    in_cta,
)
from flash4.sm90.bwd_wide_roles import WideBackwardRoles
from flash4.sm90.fwd_config import MMA_ROWS
from flash4.sm90.fwd_ops import Operand, element, meet


class WideBackwardSm90(BackwardSm90):
    """One Hopper backward kernel for head dims above 128; see the module docstring for its pipeline."""

    schedule = WideBackwardRoles

    def _operands(self, tensors):
        """TMA descriptors of q, k, v, do, dk and dv."""
        c, layouts = self.config, self._smem_layouts()
        load, save = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        for_all = cpasync.CopyBulkTensorTileG2SMulticastOp() if c.ctas > 1 else load
        boxes = {
            "q": (for_all, (c.tile_m, c.tile_d), c.ctas),
            "k": (load, (MMA_ROWS, c.tile_d), 1),
            "v": (load, (MMA_ROWS, c.tile_dv), 1),
            "do": (for_all, (c.tile_m, c.tile_dv), c.ctas),
            "dk": (save, (MMA_ROWS, c.tile_d), 1),
            "dv": (save, (MMA_ROWS, c.tile_dv), 1),
        }
        operands = []
        for (name, (op, box, ctas)), tensor in zip(boxes.items(), tensors, strict=True):
            one = cute.slice_(layouts[name], (None, None, 0))
            view = permuted_view(tensor, [1, 3, 2, 0])
            operands.append(Operand(*cpasync.make_tiled_tma_atom(op, view, one, box, ctas)))
        return Operands(*operands)

    def _tiled_mmas(self):
        """Products by one warpgroup: S^T or dP^T, dK or dV, and a part of dQ."""
        c, dtype = self.config, element(self.config)

        def product(majors, columns, source=warpgroup.OperandSource.SMEM):
            shape = (MMA_ROWS, columns)
            return hopper.make_trivial_tiled_mma(
                dtype, dtype, *majors, Float32, (1, 1, 1), shape, source
            )

        registers = warpgroup.OperandSource.RMEM
        return TiledMmas(
            s=product((K_MAJOR, K_MAJOR), c.tile_m),
            dk=product((K_MAJOR, MN_MAJOR), c.tile_d, registers),
            dv=product((K_MAJOR, MN_MAJOR), c.tile_dv, registers),
            dq=product((K_MAJOR, MN_MAJOR), PART_WIDTH),
        )

    def _smem_layouts(self):
        """Swizzled layouts by buffer, (rows, columns, stages), rows contiguous."""
        c, dtype = self.config, element(self.config)

        def rows(count, width, stages):
            return hopper.make_smem_layout_a(ROW, (count, 1, width), dtype, stages)

        return {
            "q": rows(c.tile_m, c.tile_d, c.q_stages),
            "k": rows(MMA_ROWS, c.tile_d, 1),
            "v": rows(MMA_ROWS, c.tile_dv, 1),
            "do": rows(c.tile_m, c.tile_dv, c.do_stages),
            "ds": rows(c.tile_m, MMA_ROWS, DS_STAGES),
            "dk": hopper.make_smem_layout_epi(dtype, ROW, (MMA_ROWS, c.tile_d), 1),
            "dv": hopper.make_smem_layout_epi(dtype, ROW, (MMA_ROWS, c.tile_dv), 1),
        }

    @cute.kernel
    def kernel(self, mmas: TiledMmas, operands: Operands, run_time: RunTime, grid: KvGrid):
        """Allocate, open the rings, and send every warp to its role."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        rank = in_cta(c.ctas)
        if warp == 0:
            for operand in (operands.q, operands.k, operands.v, operands.do):
                cpasync.prefetch_descriptor(operand.atom)
        smem = SmemAllocator()
        pointers = self._allocate(smem)
        shared = self._shared(pointers)
        p_floats = cute.make_layout(c.tile_m * MMA_ROWS)
        sP = cute.make_tensor(cute.recast_ptr(pointers["p"], dtype=Float32), p_floats)
        lane = opaque(thread)  # ptxas would read the lane id anew for every release in the loop
        k_producer, k_consumer = self._open_ring(smem, "k", lane)
        v_producer, v_consumer = self._open_ring(smem, "v", lane)
        q_producer, q_consumer = self._open_ring(smem, "q", lane)
        do_producer, do_consumer = self._open_ring(smem, "do", lane)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        meet(c.ctas)

        lengths = (run_time.seqlen_q, run_time.seqlen_k)
        blocks = c.blocks(run_time.left, run_time.right)
        shares = (cta // c.ctas, ctas // c.ctas)
        tiles = KvTileSchedule(blocks, grid, run_time.section, *shares, *lengths)
        load, reduce, mma_v, mma_k = self.graph.roles
        ends = (k_consumer, v_consumer, q_consumer, do_consumer)
        if group == 0:
            cute.arch.setmaxregister_decrease(load.registers)
            if warp == 0:
                ops = self._load_ops(operands, run_time, tiles, shared, WideLoadOps, rank=rank)
                self.roles.load(ops, tiles, k_producer, v_producer, q_producer, do_producer)
            first = reduce.first_warp
            if (warp >= first) & (warp < first + reduce.active_warps):
                mine = warp - first
                box = shared.dq[None, mine]
                ops = WideReduceOps(c, tiles, run_time.dq, box, run_time.turns, mine, rank)
                self.roles.reduce(ops, tiles, Inbox(mine))
        elif group == 1:
            cute.arch.setmaxregister_increase(mma_v.registers)
            place = (thread % WARPGROUP, 0, 0)
            fields = self._mma_fields(mmas, operands, run_time, tiles, shared, place)
            ops = WideMmaOps(**self._parts_of_dq(mmas, fields, shared, place), rank=rank, sP=sP)
            self.roles.mma_v(ops, tiles, *ends, WideExchange(), Outbox(0))
        else:
            cute.arch.setmaxregister_increase(mma_k.registers)
            place = (thread % WARPGROUP, 1, 0)
            fields = self._mma_fields(mmas, operands, run_time, tiles, shared, place)
            ops = WideMmaOps(**self._parts_of_dq(mmas, fields, shared, place), rank=rank, sP=sP)
            self.roles.mma_k(ops, tiles, *ends, WideExchange(), Outbox(1))
        meet(c.ctas)

    def _parts_of_dq(self, mmas, fields, shared, place):
        """The fields, with K^T of each part of dQ that the warpgroup multiplies, and accumulators of all but one."""
        one, group = mmas.dq.get_slice(0), place[1]
        transposed = permuted_view(shared.k, [1, 0, 2])
        parts = []
        for number in range(group, self.config.dq_parts, MMA_WARPGROUPS):
            part = cute.local_tile(transposed, (PART_WIDTH, MMA_ROWS, 1), (number, 0, 0))
            fragment = mmas.dq.make_fragment_B(one.partition_B(part))
            parts.append(fragment[None, None, None, 0])
        shape = dq_accumulator(self.config)
        rest = tuple(cute.make_rmem_tensor(shape, Float32) for _ in parts[1:])
        return fields | {"tDQrK": tuple(parts), "rest": rest}
