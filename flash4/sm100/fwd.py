"""Forward attention for Blackwell (sm_100): host code, launch and wiring of the roles.

    load --[q x2, kv x3 tma->mma]--> mma --(s)--> softmax0, softmax1 --(p, t)--> mma --(o)--> correction
    softmax --(m, l)--> correction --(p)--> mma;  correction --[o x2]--> store

Steady state, per KV block i (counted down from the last) and Q tile:

    load        kv.acquire -> TMA K(i) -> kv.acquire -> TMA V(i+1)
    mma         P(i+1) there and O rescaled -> O += P(i+1) V, post o -> S(i) = Q K^T over P(i+1), post s
    softmax     S(i) to registers -> shift, post m -> P(i) over S(i), post p, t
    correction  m: factor, o: P V done -> O *= factor where a shift moved, post p

Config is in ``fwd_config``, graph in ``fwd_graph``, schedule in ``fwd_roles``, or for wide heads, which have one Q tile, in
``fwd_wide_roles``; the verbs of both in ``fwd_ops``.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.tensor_utils import LayoutEnum

from flash4.common.graph import WARPGROUP
from flash4.common.launch_arguments import aux_of, fake_forward, sequences_of
from flash4.common.numerics import LOG2E
from flash4.common.shares import SharedSchedule, find_share
from flash4.common.tiles import Grid, TileSchedule
from flash4.common.tma_views import (
    packed_view,
    permuted_view,
    ragged_packed_view,
    ragged_queries_view,
    ragged_values_view,
    rows_of_entry,
)
from flash4.sm100.fwd_config import (
    ELEMENT_BYTES,
    KEPT,
    MARKS,
    MMA_ROWS,
    SMEM_ALIGN,
    SMEM_LIMIT,
    ForwardConfig,
)
from flash4.sm100.fwd_ends import (
    CorrectionEnds,
    MmaEnds,
    Raise,
    SoftmaxEnds,
    Wait,
    WaitByTurns,
    WideCorrectionEnds,
    WideMmaEnds,
    open_ring,
)
from flash4.sm100.fwd_graph import TMEM_COLUMNS
from flash4.sm100.fwd_ops import (
    CorrectionOps,
    LoadOps,
    MmaOps,
    Operand,
    RunTime,
    SoftmaxOps,
    StoreOps,
    cta_group,
    element,
    make_mma_pv,
    make_mma_qk,
)
from flash4.sm100.fwd_roles import ForwardRoles
from flash4.sm100.fwd_tiles import MarkedTiles, SequenceTiles, with_fresh_numbers
from flash4.sm100.fwd_wide_roles import WideRoles

# Named barriers; 0 is __syncthreads.
BARRIER_TMEM = 1  # all who use tensor memory know where it is
BARRIER_FREE = 2  # correction is through with it


@dataclass(frozen=True)
class Memory:
    """What all roles share."""

    rings: dict  # name -> (producer's end, consumer's end)
    barriers: dict  # name of a signal -> pointer
    sQ: object  # pointers to the buffers
    sK: object
    sV: object
    sO: cute.Tensor
    sStat: cute.Tensor
    share: object  # (4,) int32, of a worker's tiles; None without sequences of different lengths
    kept: object  # (8 * KEPT,) int32, bounds of phases of warps of softmax; or None
    marks: object  # (MARKS + 1,) int32, of tiles to work on again; None without a fixed shift
    tmem: object


class ForwardSm100:
    """One Blackwell forward kernel; see the module docstring for its pipeline."""

    def __init__(self, config: ForwardConfig):
        self.config = config
        self.graph = config.graph
        if not config.fits:
            raise ValueError(
                f"{config} needs {self.graph.smem_bytes} bytes of shared memory, one CTA has {SMEM_LIMIT}"
            )
        self.roles = ForwardRoles() if config.q_tiles > 1 else WideRoles()

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
        operands = self._operands(q, k, v, o)
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
        run_time = RunTime(
            lse=lse,
            scale=numbers["scale"] if c.natural else None,
            scale_log2=None if c.natural else numbers["scale"] * LOG2E,
            cap_scale=numbers.get("cap_scale"),
            left=numbers.get("left"),
            right=numbers.get("right"),
            sink=optional.get("sink"),
            slopes=optional.get("alibi_slopes"),
            aux=aux_of(optional),
            sequences=sequences_of(q, k, optional) if c.varlen else None,
            v_rows_of_entry=rows_of_entry(v) if c.v_is_ragged else None,
        )
        workers = cutlass.min(total, workers // c.ctas)
        self.kernel(operands, run_time, grid, section, (q.shape[1], k.shape[1])).launch(
            grid=(workers * c.ctas, 1, 1),
            cluster=(c.ctas, 1, 1),
            block=(self.graph.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def _operands(self, q, k, v, o):
        """Tensors behind TMA descriptors: Q, K, V to load, O to store."""
        c, layouts, heads_kv = self.config, self._tma_layouts(), k.shape[2]
        load = cpasync.CopyBulkTensorTileG2SOp(cta_group(c))
        save = cpasync.CopyBulkTensorTileS2GOp()

        def operand(op, tensor, layout, tiler):
            atom, coords = cpasync.make_tiled_tma_atom(
                op, tensor, cute.slice_(layout, (None, None, 0)), tiler
            )
            return Operand(atom, coords)

        rows = (c.pack, MMA_ROWS // c.pack)
        queries = ragged_queries_view(q) if c.cu_q else packed_view(q, heads_kv)
        keys = permuted_view(k, [1, 3, 2, 0])
        values = ragged_values_view(v) if c.v_is_ragged else permuted_view(v, [3, 1, 2, 0])
        out = ragged_packed_view(o, heads_kv) if c.cu_q else packed_view(o, heads_kv)
        return (
            operand(load, queries, layouts[0], (rows, c.tile_d)),
            operand(load, keys, layouts[1], (c.tile_n // c.ctas, c.tile_d)),
            operand(load, values, layouts[2], (c.tile_dv // c.ctas, c.tile_n)),
            operand(save, out, layouts[3], (rows, c.o_columns)),
        )

    def _tma_layouts(self):
        """Swizzled layouts as TMA fills and reads them, of one CTA.

        Q (128, tile_d, q_tiles), K (tile_n / ctas, tile_d, stages), V (tile_dv / ctas, tile_n, stages),
        O (128, o_columns, o_slots).
        K and V are the same memory.
        """
        c, dtype = self.config, element(self.config)
        row, column = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        k_tile = (MMA_ROWS, c.tile_n // c.ctas, c.tile_d)
        v_tile = (MMA_ROWS, c.tile_dv // c.ctas, c.tile_n)
        return (
            hopper.make_smem_layout_a(row, (MMA_ROWS, c.tile_n, c.tile_d), dtype, c.q_tiles),
            self._in_slots(hopper.make_smem_layout_b(row, k_tile, dtype, 1), 2),
            self._in_slots(hopper.make_smem_layout_b(column, v_tile, dtype, 1), 2),
            hopper.make_smem_layout_epi(dtype, row, (MMA_ROWS, c.o_columns), c.o_slots),
        )

    def _in_slots(self, layout, modes):
        """Layout of one block as that of all slots of the ring: a slot has room for the wider of K and V."""
        c = self.config
        block = cute.select(layout.outer, mode=list(range(modes)))
        slots = cute.make_layout(c.stages, stride=c.kv_bytes // ELEMENT_BYTES)
        return cute.make_composed_layout(layout.inner, 0, cute.append(block, slots))

    def _mma_layouts(self):
        """The same memory as the MMAs read it, (MMA, MMA_M or MMA_N, MMA_K, slots): Q, K, V; and P in tensor memory."""
        c, dtype = self.config, element(self.config)
        rows = MMA_ROWS * c.ctas
        qk_tile, pv_tile = (rows, c.tile_n, c.tile_d), (rows, c.tile_dv, c.tile_n)
        qk, pv = make_mma_qk(c), make_mma_pv(c)
        return (
            blackwell.make_smem_layout_a(qk, qk_tile, dtype, c.q_tiles),
            self._in_slots(blackwell.make_smem_layout_b(qk, qk_tile, dtype, 1), 3),
            self._in_slots(blackwell.make_smem_layout_b(pv, pv_tile, dtype, 1), 3),
            blackwell.make_smem_layout_a(pv, pv_tile, dtype, 1).outer,
        )

    @cute.kernel
    def kernel(
        self, operands: tuple, run_time: RunTime, grid: Grid, section: Int32, seqlens: tuple
    ):
        """Allocate, open the rings, and send every warp to its role."""
        c, graph = self.config, self.graph
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for operand in operands:
                cpasync.prefetch_descriptor(operand.atom)
        memory = self._allocate(warp, thread)
        if cutlass.const_expr(c.varlen):
            self._find_share(memory, run_time, grid, thread)
        work = (memory, run_time, grid, section, seqlens)
        correction, mma = graph.role("correction"), graph.role("mma")
        load, store = graph.role("load"), graph.role("store")
        if warp >= mma.warps.start:
            cute.arch.setmaxregister_decrease(mma.registers)
            if warp == load.warps.start:
                self._run_load(memory, self._tiles(*work), operands, run_time)
            if warp == mma.warps.start:
                self._run_mma(memory, self._tiles(*work))
            if warp == store.warps.start:
                self._run_store(memory, self._tiles(*work), operands[3])
        if warp < correction.warps.start:
            cute.arch.setmaxregister_increase(graph.role("softmax0").registers)
            tiles = self._tiles(*work, keeps_place=False)  # registers are scarce there
            q_tile = warp // 4 if c.q_tiles > 1 else 0
            self._run_softmax(memory, tiles, run_time, q_tile, thread % WARPGROUP)
        if (warp >= correction.warps.start) & (warp < correction.warps.stop):
            cute.arch.setmaxregister_decrease(correction.registers)
            self._run_correction(memory, self._tiles(*work, keeps_place=False), thread % WARPGROUP)
        if cutlass.const_expr(c.ctas > 1):
            self._meet_peer(warp, self._tiles(*work))

    @cute.jit
    def _meet_peer(self, warp, tiles):
        """Neither CTA of a pair ends before the other is through with it; by all warps."""
        if cutlass.const_expr(self.config.fixed_shift):
            idle = warp >= self.graph.role("store").warps.stop
            if idle | ((warp == self.graph.role("mma").warps.start) & (self._rank() != 0)):
                self.roles.idle(tiles)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    def _find_share(self, memory, run_time, grid, thread):
        """Write what this CTA takes of the tiles of sequences to shared memory; all threads together."""
        threads = self.graph.threads
        costs = cute.recast_ptr(memory.sK, dtype=cutlass.Int64)
        tiles = SharedSchedule(self._blocks(run_time), grid, run_time.sequences)
        tiles = with_fresh_numbers(tiles)
        costs = cute.make_tensor(costs, cute.make_layout(threads))
        share = find_share(tiles, costs, thread, threads, *self._worker())
        for i, number in enumerate(
            (share.sequence, share.within, share.end_sequence, share.end_within)
        ):
            memory.share[i] = number
        cute.arch.sync_threads()

    def _blocks(self, run_time):
        return self.config.blocks(run_time.left, run_time.right)

    def _tiles(self, memory, run_time, grid, section, seqlens, keeps_place=True):
        """This CTA's tiles. Made for every role, or the CTA's number would lie on the stack meanwhile."""
        blocks = self._blocks(run_time)
        if self.config.varlen:
            schedule = SharedSchedule(blocks, grid, run_time.sequences, keeps_place=keeps_place)
            return SequenceTiles(schedule, memory.share)
        schedule = TileSchedule(blocks, grid, section, *self._worker(), *seqlens)
        if self.config.fixed_shift:
            return MarkedTiles(self.config, schedule, memory.marks)
        return schedule

    def _worker(self):
        """Number of this CTA, or of its pair, and of all."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        return block // self.config.ctas, blocks // self.config.ctas

    def _rank(self):
        """Rank of this CTA in its pair; 0 of one that works alone."""
        if self.config.ctas == 1:
            return 0
        block, _, _ = cute.arch.block_idx()
        return block % self.config.ctas

    def _allocate(self, warp, thread):
        """Shared memory, barriers and the ends of rings; all threads meet here."""
        graph, smem = self.graph, SmemAllocator()
        sizes = {b.name: b.nbytes for b in graph.buffers}
        base = {
            name: smem.allocate(n, byte_alignment=SMEM_ALIGN if n % SMEM_ALIGN == 0 else 16)
            for name, n in sizes.items()
        }
        rings = {
            ring.name: open_ring(
                ring, smem.allocate_array(Int64, 2 * ring.stages), self.config.ctas
            )
            for ring in graph.rings
        }
        first = smem.allocate_array(Int64, len(graph.signals))
        barriers = {signal.name: first + i for i, signal in enumerate(graph.signals)}
        self._init_signals(warp, barriers)
        share = self._integers(base.get("share"), 4)
        kept = self._integers(base.get("kept"), 8 * KEPT)
        marks = self._integers(base.get("marks"), MARKS + 1)
        if self.config.fixed_shift:
            self._clear(marks, thread)
        ended = smem.allocate_array(Int64, 1) if self.config.ctas > 1 else None
        users = [role.name for role in graph.roles if role.name not in ("load", "store")]
        tmem = TmemAllocator(
            smem.allocate_array(Int32, 1),
            barrier_for_retrieve=pipeline.NamedBarrier(
                BARRIER_TMEM, sum(graph.role(name).threads for name in users)
            ),
            allocator_warp_id=graph.role("correction").warps.start,
            is_two_cta=self.config.ctas > 1,
            two_cta_tmem_dealloc_mbar_ptr=ended,
        )
        ctas = cute.make_layout((self.config.ctas, 1))
        pipeline.pipeline_init_arrive(ctas)
        pipeline.pipeline_init_wait(ctas)
        sO = self._smem_tensor(base["o"], self._tma_layouts()[3])
        stat = cute.make_tensor(
            cute.recast_ptr(base["stat"], dtype=Float32), cute.make_layout((MMA_ROWS, 2, 2))
        )
        return Memory(
            rings, barriers, base["q"], base["kv"], base["kv"], sO, stat, share, kept, marks, tmem
        )

    @staticmethod
    def _integers(pointer, count):
        """Int32 tensor at a byte pointer; None where there is no such buffer."""
        if pointer is None:
            return None
        return cute.make_tensor(cute.recast_ptr(pointer, dtype=Int32), cute.make_layout(count))

    @cute.jit
    def _clear(self, marks, thread):
        if thread <= MARKS:
            marks[thread] = 0

    @cute.jit
    def _init_signals(self, warp, barriers: cutlass.Constexpr):
        if warp == 0:
            with cute.arch.elect_one():
                for signal in self.graph.signals:
                    cute.arch.mbarrier_init(barriers[signal.name], signal.arrivals)

    def _smem_tensor(self, pointer, layout):
        """Tensor at a byte pointer with a swizzled layout."""
        pointer = cute.recast_ptr(pointer, swizzle_=layout.inner, dtype=element(self.config))
        return cute.make_tensor(pointer, layout.outer)

    def _run_load(self, memory, tiles, operands, run_time):
        c, layouts = self.config, self._tma_layouts()
        sQ, sK, sV = (
            self._smem_tensor(pointer, layout)
            for pointer, layout in zip((memory.sQ, memory.sK, memory.sV), layouts)
        )
        ops = LoadOps(c, tiles, operands[:3], run_time, self._rank(), sQ, sK, sV)
        self.roles.load(ops, tiles, memory.rings["q"][0], memory.rings["kv"][0])

    def _run_store(self, memory, tiles, o):
        ops = StoreOps(self.config, tiles, o, self._rank(), memory.sO)
        self.roles.store(ops, tiles, memory.rings["o"][1])

    def _run_mma(self, memory, tiles):
        c, layouts = self.config, self._mma_layouts()
        memory.tmem.wait_for_alloc()
        sQ, sK, sV = (
            self._smem_tensor(pointer, layout)
            for pointer, layout in zip((memory.sQ, memory.sK, memory.sV), layouts)
        )
        pointer = memory.tmem.retrieve_ptr(Float32)
        ops = MmaOps(c, self.graph.tmem, pointer, sQ, sK, sV, layouts[3])
        q, kv = (memory.rings[name][1] for name in ("q", "kv"))
        if c.q_tiles == 1:
            raises = {name: self._raise(memory, name + "0") for name in "so"}
            waits = {name: self._wait_by_turns(memory, name) for name in "pt"}
            ends = WideMmaEnds(q=q, kv=kv, **raises, **waits)
        else:
            raises = {name: self._raise(memory, name) for name in ("s0", "s1", "o0", "o1")}
            waits = {name: self._wait(memory, name) for name in ("p0", "p1", "t0", "t1")}
            ends = MmaEnds(q=q, kv=kv, **raises, **waits)
        self._lead(ops, tiles, ends)

    @cute.jit
    def _lead(self, ops, tiles, ends):
        """The leader of a pair issues the MMAs of both CTAs."""
        if self._rank() == 0:
            self.roles.mma(ops, tiles, ends)

    def _run_softmax(self, memory, tiles, run_time, q_tile, thread):
        memory.tmem.wait_for_alloc()
        pointer = memory.tmem.retrieve_ptr(Float32)
        ops = SoftmaxOps(
            self.config, self.graph.tmem, tiles, pointer, memory.sStat, run_time, q_tile,
            self._rank(), thread,
            cute.make_rmem_tensor(1, Float32) if self.config.alibi else None,
            self._kept_of_warp(memory),
        )  # fmt: skip
        by_turns, wait = self.config.q_tiles == 1, self._wait(memory, "s0", q_tile)
        ends = SoftmaxEnds(
            s=self._wait_by_turns(memory, "s") if by_turns else wait,
            f=self._wait(memory, "f0", q_tile),
            **{name: self._raise(memory, name + "0", q_tile) for name in "ptml"},
        )
        self.roles.softmax(ops, tiles, ends)

    def _run_correction(self, memory, tiles, thread):
        memory.tmem.allocate(TMEM_COLUMNS)
        memory.tmem.wait_for_alloc()
        pointer = memory.tmem.retrieve_ptr(Float32)
        ops = CorrectionOps(
            self.config, self.graph.tmem, tiles, pointer, memory.sStat, memory.sO, thread
        )
        slots = memory.rings["o"][0]
        if self.config.q_tiles == 1:
            ends = WideCorrectionEnds(
                slots=slots,
                m=self._wait_by_turns(memory, "m"),
                **{name: self._wait(memory, name + "0") for name in "ol"},
                **{name: self._raise(memory, name + "0") for name in "pf"},
            )
        else:
            waits = ("m0", "m1", "o0", "o1", "l0", "l1")
            ends = CorrectionEnds(
                o=slots,
                **{name: self._wait(memory, name) for name in waits},
                **{name: self._raise(memory, name) for name in ("p0", "p1", "f0", "f1")},
            )
        self.roles.correction(ops, tiles, ends)
        memory.tmem.relinquish_alloc_permit()
        cute.arch.barrier(barrier_id=BARRIER_FREE, number_of_threads=WARPGROUP)
        memory.tmem.free(pointer, TMEM_COLUMNS)

    def _kept_of_warp(self, memory):
        """Where a warp of softmax keeps the bounds of its phases, if registers are too scarce."""
        if memory.kept is None:
            return None
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        at = memory.kept.iterator + warp * KEPT
        return cute.make_tensor(at, cute.make_layout(KEPT))

    def _barrier(self, memory, name, q_tile=0):
        """Barrier of a signal; that of the other Q tile is a stride away."""
        return memory.barriers[name] + q_tile * self.graph.stride

    def _raise(self, memory, name, q_tile=0):
        barrier = self._barrier(memory, name, q_tile)
        return Raise(barrier, self._signal(name).kind, self.config.ctas, self.graph.stride)

    def _wait_by_turns(self, memory, name):
        return WaitByTurns(memory.barriers[name + "0"], self.graph.stride)

    def _wait(self, memory, name, q_tile=0):
        return Wait(self._barrier(memory, name, q_tile), self._signal(name).credit)

    def _signal(self, name):
        return next(signal for signal in self.graph.signals if signal.name == name)
