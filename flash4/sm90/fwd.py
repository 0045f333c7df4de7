"""Forward attention for Hopper: host code, launch and wiring of the roles.

    load --[q x2 tma->warps]--> mma
    load --[k x2 tma->warps]--> mma
    load --[v x2 tma->warps]--> mma

Steady state, per KV block (counted down from the last):

    load  k.acquire -> TMA K(i) -> v.acquire -> TMA V(i+1)
    mma   k.wait -> issue S(i) = Q K^T -> v.wait -> issue O += P(i+1) V -> S there, k.release -> softmax(i)
          -> O there, v.release -> P(i) to 16 bit -> rescale O

Two CTAs of a cluster may share a tile: each loads half of every block of K and V into both, and each slot waits for the
releases of both. They meet before their roles begin and before they end.

Config and graph are in ``fwd_config``, the schedule in ``fwd_roles``, its verbs in ``fwd_ops``.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from flash4.common.graph import WARP, WARPGROUP
from flash4.common.handout import GivenDense, GivenTiles, ToldDense, ToldTiles
from flash4.common.launch_arguments import aux_of, fake_forward, sequences_of
from flash4.common.numerics import LOG2E, Divisor, opaque
from flash4.common.tiles import Divisors, Grid, TileSchedule, workers_of
from flash4.common.tma_views import (
    packed_view,
    permuted_view,
    ragged_packed_view,
    ragged_queries_view,
    ragged_values_view,
    rows_of_entry,
)
from flash4.common.varlen import VarlenSchedule
from flash4.sm90.fwd_cap import Cap
from flash4.sm90.fwd_config import (
    DENSE_WORDS,
    MARK_WORDS,
    MMA_ROWS,
    NOTES,
    OUTGROWN,
    SMEM_ALIGN,
    SMEM_LIMIT,
    TILE_WORDS,
    ForwardConfig,
)
from flash4.sm90.fwd_ends import RingOperand, open_consumers
from flash4.sm90.fwd_ops import LoadOps, MmaOps, Operand, Turn, element, meet
from flash4.sm90.fwd_roles import ForwardRoles
from flash4.sm90.fwd_rows import make_row_state
from flash4.sm90.fwd_tiles import DenseSlots, Tiles, TileSlots


@dataclass(frozen=True)
class RunTime:
    """What crosses the launch besides operands and grid; None where the config has no such feature."""

    lse: cute.Tensor  # (B, H, Sq), float32
    scale: Float32  # factor of a score, or of the tanh that caps it; in log2 units unless the config is natural
    cap: object  # Cap
    left: object  # sides of the window, Int32
    right: object
    sink: object  # (H,), float32
    slopes: object  # (B, H), float32
    aux: object  # tuple of tensors that mods read
    next_tile: object  # (1,) int32, zero at the launch
    redone: object  # (1,) int32
    sequences: object  # Sequences; None where all are as long as their tensors
    v_rows_of_entry: object  # rows from one batch entry of V to the next, Int32


class ForwardSm90:
    """One Hopper forward kernel; see the module docstring for its pipeline."""

    def __init__(self, config: ForwardConfig):
        self.config = config
        self.graph = config.graph
        if not config.fits:
            raise ValueError(
                f"{config} needs {self.graph.smem_bytes} bytes of shared memory and up to {SMEM_ALIGN} "
                f"for alignment, one CTA has {SMEM_LIMIT}"
            )
        self.roles = ForwardRoles()

    def fake_arguments(self):
        """Arguments of ``__call__`` with symbolic sizes and strides, for compiling without data."""
        return fake_forward(self.config, element(self.config))

    @cute.jit
    def __call__(
        self,
        tensors,  # q (B, Sq, H, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), o (B, Sq, H, Dv), lse (B, H, Sq) float32, ...
        numbers: tuple,  # Float32 or Int32, named by the config
        section: Int32,
        workers: Int32,
        stream,
    ):
        """Build layouts and TMA descriptors, and launch."""
        c = self.config
        q, k, v, o, lse, *optional = tensors
        optional = dict(zip(c.optional_tensors, optional, strict=True))
        heads_kv = k.shape[2]
        mma_qk, mma_pv = self._tiled_mmas()
        layouts = self._smem_layouts()
        load, save = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_for_all = cpasync.CopyBulkTensorTileG2SMulticastOp() if c.cluster > 1 else load

        def operand(op, tensor, layout, tiler):
            atom, coords = cpasync.make_tiled_tma_atom(
                op,
                tensor,
                cute.slice_(layout, (None, None, 0)),
                tiler,
                c.cluster if op is load_for_all else 1,
            )
            return Operand(atom, coords)

        q_rows, o_rows = (c.pack, c.cta_rows // c.pack), (c.pack, MMA_ROWS // c.pack)
        operands = (
            operand(
                load,
                ragged_queries_view(q) if c.cu_q else packed_view(q, heads_kv),
                layouts[0],
                (q_rows, c.tile_d),
            ),
            operand(load_for_all, permuted_view(k, [1, 3, 2, 0]), layouts[1], (c.tile_n, c.tile_d)),
            operand(load_for_all, self._values_view(v), layouts[2], (c.tile_dv, c.tile_n)),
            operand(
                save, self._rows_view(o, heads_kv), layouts[3], (o_rows, c.tile_dv // c.o_parts)
            ),
        )
        grid = Grid(
            m_blocks=cute.ceil_div(q.shape[1], c.tile_q),
            groups=cute.ceil_div(q.shape[2] // heads_kv, c.pack),
            heads_kv=heads_kv,
            batch=q.shape[0],
        )
        total = grid.total
        if cutlass.const_expr(c.cu_q):  # each sequence may have a tile that is not full
            sequences = optional["cu_seqlens_q"].shape[0] + 1
            total = grid.total + sequences * grid.groups * heads_kv
        numbers = dict(zip(c.numbers, numbers, strict=True))
        scale = numbers["scale"] if c.natural else numbers["scale"] * LOG2E
        run_time = RunTime(
            lse=lse,
            scale=scale,
            cap=self._cap(numbers, scale) if c.softcap else None,
            left=numbers.get("left"),
            right=numbers.get("right"),
            sink=optional.get("sink"),
            slopes=optional.get("alibi_slopes"),
            aux=aux_of(optional),
            next_tile=optional.get("reset_counter" if c.handed_out else "next_tile"),
            redone=optional.get("redone"),
            sequences=sequences_of(q, k, optional) if c.varlen else None,
            v_rows_of_entry=rows_of_entry(v) if c.v_is_ragged else None,
        )
        workers = cutlass.min(total, workers_of(workers, c.cluster))
        order = (section, None if c.varlen else Divisors.of(grid, section, workers).each(Divisor))
        self.kernel(
            (mma_qk, mma_pv), operands, run_time, grid, order, (q.shape[1], k.shape[1])
        ).launch(
            grid=(workers * c.cluster, 1, 1),
            cluster=(c.cluster, 1, 1),
            block=(self.graph.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _cap(self, numbers, scale):
        """The cap of scores; a negative scale is that of what is within."""
        inner = -numbers["cap_scale"] if self.config.negate else numbers["cap_scale"]
        root = numbers["cap_root"] * (1.0 if self.config.natural else LOG2E**0.2)
        return Cap.of(inner, scale, root)

    def _values_view(self, v):
        """V as its loads cut it, (Dv, S, heads_kv, B); see ``LoadOps``."""
        return ragged_values_view(v) if self.config.v_is_ragged else permuted_view(v, [3, 1, 2, 0])

    def _rows_view(self, x, heads_kv):
        """O as tiles cut it, ((heads per KV head, S), Dv, heads_kv, B); see ``MmaOps``."""
        return ragged_packed_view(x, heads_kv) if self.config.cu_q else packed_view(x, heads_kv)

    def _tiled_mmas(self):
        """Tiled MMAs of S = Q K^T and O += P V; each warpgroup owns 64 rows."""
        c, dtype = self.config, element(self.config)
        groups = (c.mma_warpgroups, 1, 1)
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        mma_qk = hopper.make_trivial_tiled_mma(
            dtype, dtype, k_major, k_major, Float32, groups, (MMA_ROWS, c.tile_n)
        )
        mma_pv = hopper.make_trivial_tiled_mma(
            dtype,
            dtype,
            k_major,
            mn_major,
            Float32,
            groups,
            (MMA_ROWS, c.tile_dv),
            warpgroup.OperandSource.RMEM,
        )
        return mma_qk, mma_pv

    def _smem_layouts(self):
        """Swizzled layouts of Q (cta_rows, tile_d, q_stages), K (tile_n, tile_d, stages), V (tile_dv, tile_n, stages), O."""
        c, dtype = self.config, element(self.config)
        row, column = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        return (
            hopper.make_smem_layout_a(row, (c.cta_rows, c.tile_n, c.tile_d), dtype, c.q_stages),
            hopper.make_smem_layout_b(row, (c.cta_rows, c.tile_n, c.tile_d), dtype, c.stages),
            hopper.make_smem_layout_b(column, (c.cta_rows, c.tile_dv, c.tile_n), dtype, c.stages),
            hopper.make_smem_layout_epi(
                dtype, row, (MMA_ROWS, c.tile_dv // c.o_parts), c.mma_warpgroups
            ),
        )

    @cute.kernel
    def kernel(
        self,
        mmas: tuple,
        operands: tuple,
        run_time: RunTime,
        grid: Grid,
        order: tuple,
        seqlens: tuple,
    ):
        """Allocate, open the rings, and send every warp to its role."""
        c, (section, divisors) = self.config, order
        thread, _, _ = cute.arch.thread_idx()
        worker, _, _ = cute.arch.block_idx()
        workers, _, _ = cute.arch.grid_dim()
        worker, workers = worker // c.cluster, workers // c.cluster
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if c.cluster > 1 else 0
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        if warp == 0:
            for operand in operands:
                cpasync.prefetch_descriptor(operand.atom)
        smem = SmemAllocator()
        pointers = self._allocate(smem)
        sQ, sK, sV, sO = self._smem_tensors(pointers)
        marks = None
        if cutlass.const_expr(c.fixed_shift and not c.hands_out):
            marks = cute.make_tensor(
                cute.recast_ptr(pointers["marks"], dtype=Int32), cute.make_layout(MARK_WORDS)
            )
            if thread < MARK_WORDS:
                marks[thread] = cutlass.select_(thread < OUTGROWN, Int32(0), Int32(-1))
        # Opaque: ptxas would read the lane id anew for every release in the loop.
        lane = opaque(thread)
        q_producer, q_consumer = self._open_ring(
            smem.allocate_array(cutlass.Int64, 2 * c.q_stages), "q", lane
        )
        barriers = smem.allocate_array(cutlass.Int64, 4 * c.stages)
        k_producer, _ = self._open_ring(barriers, "k", lane)
        v_producer, _ = self._open_ring(barriers + 2 * c.stages, "v", lane)
        slots = None
        if cutlass.const_expr(c.hands_out):
            who = (worker, workers, lane % WARP)
            slots = self._open_tiles(smem, pointers, run_time.next_tile, who, grid.total)
            slots.open(thread, self.graph.ring("tiles").consumer_arrivals)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        meet(c.cluster)

        blocks = c.blocks(run_time.left, run_time.right)
        if cutlass.const_expr(c.varlen):
            schedule = VarlenSchedule(blocks, grid, run_time.sequences, section)
            tiles = GivenTiles(schedule, slots, c.fixed_shift)
            mma_tiles = ToldTiles(schedule, slots, c.fixed_shift)
        else:
            schedule = TileSchedule(blocks, grid, section, worker, workers, *seqlens, divisors)
            tiles = mma_tiles = Tiles(c, schedule, marks)
            if cutlass.const_expr(c.handed_out):
                tiles = GivenDense(schedule, slots, c.fixed_shift)
                mma_tiles = ToldDense(schedule, slots, c.fixed_shift, slots.notes)
        load, mma = self.graph.role("load"), self.graph.role("mma")
        if group == 0:
            cute.arch.setmaxregister_decrease(load.registers)
            if warp == 0:
                ops = self._load_ops(operands, run_time, tiles, (sQ, sK, sV), rank)
                self.roles.load(ops, tiles, q_producer, k_producer, v_producer)
                meet(c.cluster)
        else:
            cute.arch.setmaxregister_increase(mma.registers)
            mine = group - mma.warpgroups.start
            k_consumer, v_consumer = open_consumers(barriers, c.stages, c.cluster, lane)
            smem_tensors = (sQ, sK, sV, sO[None, None, mine])
            place = (thread % WARPGROUP, mine, rank, k_consumer.barriers)
            ops = self._mma_ops(mmas, smem_tensors, operands[3], run_time, mma_tiles, place)
            turn = Turn.of(mine, c.mma_warpgroups, c.turns)
            self.roles.mma(ops, mma_tiles, q_consumer, k_consumer, v_consumer, turn)
            meet(c.cluster)

    def _allocate(self, smem):
        """Pointers to the shared memory of each buffer that has its own, by the graph's map."""
        return {
            name: smem.allocate(nbytes, byte_alignment=SMEM_ALIGN)
            for name, nbytes in self.graph.allocations().items()
        }

    def _smem_tensors(self, pointers):
        """Shared-memory tensors of Q, K, V and O."""
        dtype, tensors = element(self.config), []
        for buffer, layout in zip(self.graph.buffers, self._smem_layouts(), strict=False):
            pointer = pointers[buffer.borrows or buffer.name]
            pointer = cute.recast_ptr(pointer, swizzle_=layout.inner, dtype=dtype)
            tensors.append(cute.make_tensor(pointer, layout.outer))
        return tensors

    def _open_ring(self, barriers, name, lane):
        """The producer and consumer ends of the graph's ring ``name``, and its barriers at a pointer."""
        ring = self.graph.ring(name)
        ring_ends = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=ring.stages,
            producer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, ring.producer.active_warps
            ),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, ring.consumer_arrivals),
            tx_count=ring.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, ring.ctas, 1, 1)),
            tidx=lane,
            mcast_mode_mn=(0, 1),
            defer_sync=True,
        )
        if self.config.cluster > ring.ctas:  # the pipeline would signal another CTA's barrier
            ring_ends = replace(ring_ends, is_signaling_thread=lane % WARP == 0)
        return ring_ends.make_participants()

    def _open_tiles(self, smem, pointers, next_tile, who, total):
        """Slots and barriers of the ring of tiles; ``total`` is that of a dense call."""
        ring, dense = self.graph.ring("tiles"), self.config.handed_out
        at = cute.recast_ptr(pointers["tiles"], dtype=Int32)
        shape = (DENSE_WORDS if dense else TILE_WORDS, ring.stages)
        words = cute.make_tensor(at, cute.make_layout(shape))
        full, empty = (smem.allocate_array(cutlass.Int64, ring.stages) for _ in range(2))
        ends = (words, full, empty, next_tile, *who)
        if not dense:
            return TileSlots(*ends)
        notes = cute.make_tensor(at + DENSE_WORDS * ring.stages, cute.make_layout(NOTES))
        return DenseSlots(*ends, total, notes)

    def _load_ops(self, operands, run_time, tiles, smem_tensors, rank):
        """Verbs of the ``load`` role."""
        c = self.config
        schedule = tiles if c.varlen else tiles.schedule
        heads_per_kv = run_time.lse.shape[1] // schedule.grid.heads_kv
        return LoadOps(
            c, schedule, *operands[:3], heads_per_kv, run_time.v_rows_of_entry, *smem_tensors, rank
        )

    def _inverse(self, scale_log2):
        """1 / scale_log2, of what softmax takes."""
        if self.config.changes_scores:
            return Float32(1 / LOG2E if self.config.natural else 1.0)
        return cute.arch.rcp_approx(scale_log2)

    def _mma_ops(self, mmas, smem_tensors, o, run_time, tiles, place):
        """Partition the operands for one warpgroup; allocate its accumulators and row state."""
        c = self.config
        mma_qk, mma_pv = mmas
        sQ, sK, sV, sO = smem_tensors
        thread, warpgroup_index, rank, barriers = place
        scale = -run_time.scale if c.negate else run_time.scale
        scale_log2 = run_time.scale
        if c.changes_scores:
            scale_log2 = Float32(LOG2E if c.natural else 1.0)
        thr_qk = mma_qk.get_slice(warpgroup_index * WARPGROUP)
        thr_pv = mma_pv.get_slice(warpgroup_index * WARPGROUP)
        return MmaOps(
            config=c,
            mma_qk=mma_qk,
            mma_pv=mma_pv,
            tSrQ=mma_qk.make_fragment_A(thr_qk.partition_A(sQ)),
            tSrK=RingOperand.of(mma_qk.make_fragment_B(thr_qk.partition_B(sK)), barriers),
            tOrV=RingOperand.of(mma_pv.make_fragment_B(thr_pv.partition_B(sV)), barriers),
            tOrO=cute.make_rmem_tensor(((2, 2, c.tile_dv // 8), 1, 1), Float32),
            tOrP=cute.make_rmem_tensor(((2, 2, 2), 1, c.tile_n // 16), element(c)),
            state=make_row_state(),
            tiles=tiles if c.varlen else tiles.schedule,
            worker_tiles=tiles,
            cap=run_time.cap,
            scale=scale,
            scale_log2=scale_log2,
            inv_scale_log2=self._inverse(scale_log2),
            thread=thread,
            warpgroup=warpgroup_index + rank * c.mma_warpgroups,
            o=o,
            sO=sO,
            mLSE=run_time.lse,
            mSink=run_time.sink,
            mSlopes=run_time.slopes,
            aux=run_time.aux,
            slopes=cute.make_rmem_tensor(2, Float32) if c.alibi else None,
            positions=cute.make_rmem_tensor(2, Int32) if c.alibi and c.fixed_shift else None,
            mRedone=run_time.redone,
        )
