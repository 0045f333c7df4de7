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

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from flash4.common.graph import WARPGROUP
from flash4.common.kv_tiles import KvGrid
from flash4.common.numerics import opaque
from flash4.common.tma_views import permuted_view
from flash4.sm90.bwd import (
    FINDING_WARP,
    K_MAJOR,
    MN_MAJOR,
    ROW,
    BackwardSm90,
    Operands,
    RunTime,
    TiledMmas,
)
from flash4.sm90.bwd_config import MMA_WARPGROUPS
from flash4.sm90.bwd_joint_roles import JointBackwardRoles
from flash4.sm90.bwd_ops import Inbox, Outbox
from flash4.sm90.bwd_wide_config import PART_WIDTH
from flash4.sm90.bwd_wide_ops import (
    JointExchange,
    JointMmaOps,
    WideExchange,
    WideLoadOps,
    WideMmaOps,
    WideReduceOps,
    dq_accumulator,
    in_cta,
)
from flash4.sm90.bwd_wide_roles import WideBackwardRoles
from flash4.sm90.fwd_config import ELEMENT_BYTES, MMA_ROWS
from flash4.sm90.fwd_ops import Operand, element, meet


@dataclass(frozen=True)
class WideOperands(Operands):
    """The same, and the other CTA's part of K, if it is needed."""

    peer_k: object


@dataclass(frozen=True)
class Place:
    """Where an MMA role runs.

    Attributes:
        thread: in the warpgroup.
        group: warpgroup; 0 is ``mma_v``.
        rank: of the CTA.
    """

    thread: Int32
    group: int
    rank: object


class WideBackwardSm90(BackwardSm90):
    """One Hopper backward kernel for head dims above 128; see the module docstring for its pipeline."""

    def _schedule(self):
        """The role functions."""
        return JointBackwardRoles() if self.config.joint else WideBackwardRoles()

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
            view = self._view(name, tensor)
            operands.append(Operand(*cpasync.make_tiled_tma_atom(op, view, one, box, ctas)))
        peer_k = None
        if c.joint:
            box, view = (MMA_ROWS, c.tile_d // 2), permuted_view(tensors[1], [1, 3, 2, 0])
            one = cute.slice_(self._peer_layouts()[0], (None, None, 0))
            peer_k = Operand(*cpasync.make_tiled_tma_atom(load, view, one, box))
        return WideOperands(*operands, peer_k)

    def _peer_layouts(self):
        """Swizzled layouts of the other CTA's K, half of its head dims, and of its dS."""
        c, dtype = self.config, element(self.config)
        shapes = ((MMA_ROWS, 1, c.tile_d // 2), (c.tile_m, 1, MMA_ROWS))
        return [hopper.make_smem_layout_a(ROW, shape, dtype, 1) for shape in shapes]

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
            "ds": rows(c.tile_m, MMA_ROWS, c.ds_stages),
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
        peer = self._peer_tensors(pointers)
        lane = opaque(thread)  # ptxas would read the lane id anew for every release in the loop
        k_producer, k_consumer = self._open_ring(smem, "k", lane)
        v_producer, v_consumer = self._open_ring(smem, "v", lane)
        q_producer, q_consumer = self._open_ring(smem, "q", lane)
        do_producer, do_consumer = self._open_ring(smem, "do", lane)
        exchange = self._exchange(smem, pointers, thread, rank)
        exchange.open(thread)
        tiles = self._tiles(run_time, grid, smem, (cta // c.ctas, ctas // c.ctas))
        if cutlass.const_expr(c.varlen):
            if warp == FINDING_WARP:
                tiles.find(thread, cta)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        meet(c.ctas)

        load, reduce, mma_v, mma_k = self.graph.roles
        ends = (k_consumer, v_consumer, q_consumer, do_consumer)
        if group == 0:
            cute.arch.setmaxregister_decrease(load.registers)
            if warp == 0:
                more = {"rank": rank, "peer_k": operands.peer_k, "sPeerK": peer[0]}
                ops = self._load_ops(operands, run_time, tiles, shared, WideLoadOps, **more)
                self.roles.load(ops, tiles, k_producer, v_producer, q_producer, do_producer)
            first = reduce.first_warp
            if (warp >= first) & (warp < first + reduce.active_warps):
                mine = warp - first
                ops = self._reduce_ops(operands, run_time, tiles, shared, (mine, rank))
                self.roles.reduce(ops, tiles, Inbox(mine))
        elif group == 1:
            cute.arch.setmaxregister_increase(mma_v.registers)
            place = Place(thread % WARPGROUP, 0, rank)
            fields = self._mma_fields(
                mmas, operands, run_time, tiles, shared, (place.thread, place.group, 0)
            )
            ops = self._wide_ops(mmas, fields, shared, (sP, *peer), place)
            self.roles.mma_v(ops, tiles, *ends, exchange, Outbox(0))
        else:
            cute.arch.setmaxregister_increase(mma_k.registers)
            place = Place(thread % WARPGROUP, 1, rank)
            fields = self._mma_fields(
                mmas, operands, run_time, tiles, shared, (place.thread, place.group, 0)
            )
            ops = self._wide_ops(mmas, fields, shared, (sP, *peer), place)
            self.roles.mma_k(ops, tiles, *ends, exchange, Outbox(1))
        meet(c.ctas)

    def _reduce_ops(self, operands, run_time, tiles, shared, place):
        """Verbs of the ``reduce`` role of one warpgroup; dK and dV do not leave through it."""
        mine, rank = place
        stores = dict.fromkeys(("sDK", "sDV", "dk_out", "dv_out"))
        return WideReduceOps(
            config=self.config,
            tiles=tiles,
            mDQ=run_time.dq,
            sDQ=shared.dq[None, mine],
            mTurns=run_time.turns,
            warpgroup=mine,
            rank=rank,
            **stores,
        )

    def _peer_tensors(self, pointers):
        """K and dS of the other CTA in shared memory: behind its own."""
        c, dtype, tensors = self.config, element(self.config), []
        if not c.joint:
            return None, None
        own = (MMA_ROWS * c.tile_d, c.tile_m * MMA_ROWS)
        for name, size, layout in zip(("k", "ds"), own, self._peer_layouts(), strict=True):
            pointer = pointers[name] + size * ELEMENT_BYTES
            pointer = cute.recast_ptr(pointer, swizzle_=layout.inner, dtype=dtype)
            tensors.append(cute.make_tensor(pointer, layout.outer))
        return tuple(tensors)

    def _exchange(self, smem, pointers, thread, rank):
        """What the MMA warpgroups tell each other, and the CTAs."""
        c = self.config
        if not c.joint:
            return WideExchange()
        nbytes = c.tile_m * MMA_ROWS * ELEMENT_BYTES
        full, empty = (smem.allocate_array(cutlass.Int64, 1) for _ in range(2))
        places = (pointers["ds"], pointers["ds"] + nbytes)
        return JointExchange(full, empty, *places, 1 - rank, thread % WARPGROUP, nbytes)

    def _wide_ops(self, mmas, fields, shared, tensors, place):
        """Verbs of an MMA role, with K^T of what the warpgroup multiplies of dQ, and accumulators that stay."""
        c, (sP, sPeerK, sPeerDS) = self.config, tensors
        one, shape = mmas.dq.get_slice(0), dq_accumulator(c)

        def keys(sK, number):
            part = cute.local_tile(
                permuted_view(sK, [1, 0, 2]), (PART_WIDTH, MMA_ROWS, 1), (number, 0, 0)
            )
            return mmas.dq.make_fragment_B(one.partition_B(part))[None, None, None, 0]

        fields = fields | {"rank": place.rank, "sP": sP}
        if c.joint:
            own = keys(shared.k, place.rank * MMA_WARPGROUPS + place.group)
            return JointMmaOps(
                **fields | {"tDQrK": (own,), "rest": ()},
                acc=cute.make_rmem_tensor(shape, Float32),
                tDQrPeerDS=mmas.dq.make_fragment_A(one.partition_A(sPeerDS)),
                tDQrPeerK=keys(sPeerK, place.group),
            )
        numbers = range(place.group, c.dq_parts, MMA_WARPGROUPS)
        rest = tuple(cute.make_rmem_tensor(shape, Float32) for _ in numbers[1:])
        parts = tuple(keys(shared.k, number) for number in numbers)
        return WideMmaOps(**fields | {"tDQrK": parts, "rest": rest})
