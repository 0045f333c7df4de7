"""Backward attention for Hopper: host code, launch and wiring of the roles.

    load --[k x1 tma->warps]--> mma
    load --[v x1 tma->warps]--> mma
    load --[q x2 tma->warps]--> mma
    load --[do x2 tma->warps]--> mma
    mma --[dq, one box per warpgroup]--> reduce --[bulk additions]--> global memory

Per step, one block of queries of one head:

    mma   S^T = K Q^T | dP^T = V dO^T | P = exp(scale S - LSE) | dS = P (dP - D) | dV += P^T dO | dQ = dS K
          | dK += dS^T Q, dQ into its box

LSE and D come from ``passes.bwd_prepare``; ``passes.bwd_finish`` makes dQ of the sums. Config and graph are in ``bwd_config``, the
schedules in ``bwd_roles``, ``bwd_late_roles`` and ``bwd_alternate_roles``, its verbs in ``bwd_ops``.
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
from flash4.common.kv_handout import (
    GivenKvTiles,
    GivenSequenceTiles,
    ToldKvTiles,
    ToldSequenceTiles,
)
from flash4.common.kv_one_tile import TILE_WORDS, OneTile
from flash4.common.kv_sequences import SequenceSchedule
from flash4.common.kv_tiles import KvGrid, KvTileSchedule
from flash4.common.launch_arguments import aux_of, entry_rows, fake_backward, sides_of
from flash4.common.numerics import LOG2E, near_end, opaque
from flash4.common.tma_views import (
    permuted_view,
    ragged_rows_view,
    ragged_store_view,
)
from flash4.sm90.bwd_alternate_roles import AlternateRoles
from flash4.sm90.bwd_config import MMA_WARPGROUPS, STAGES, TILE_N, BackwardConfig
from flash4.sm90.bwd_late_roles import LateRoles
from flash4.sm90.bwd_ops import Exchange, Inbox, LoadOps, MmaOps, Outbox, ReduceOps
from flash4.sm90.bwd_roles import BackwardRoles
from flash4.sm90.bwd_slots import KvTileSlots, SequenceSlots
from flash4.sm90.fwd_config import ELEMENT_BYTES, MMA_ROWS, SMEM_ALIGN, SMEM_LIMIT
from flash4.sm90.fwd_ops import Operand, element

ROW = LayoutEnum.ROW_MAJOR
FINDING_WARP = 1  # not the one that sets up barriers
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


@dataclass(frozen=True)
class TiledMmas:
    """The products of a step: S^T and dP^T, dK, dV, dQ."""

    s: cute.TiledMma
    dk: cute.TiledMma
    dv: cute.TiledMma
    dq: cute.TiledMma


@dataclass(frozen=True)
class Operands:
    """Tensors behind TMA descriptors, (S, D, H, B)."""

    q: Operand
    k: Operand
    v: Operand
    do: Operand
    dk: Operand
    dv: Operand


@dataclass(frozen=True)
class RunTime:
    """What crosses the launch besides."""

    lse: cute.Tensor  # (B, H, padded Sq), float32, log2 units
    delta: cute.Tensor  # (B, H, padded Sq), float32
    dq: cute.Tensor  # (B, H, blocks, tile_m dq_width), float32
    scale: Float32  # factor of a score
    cap: object  # in log2 units unless the config is natural, Float32; None where it has no such feature, as all that follows
    cap_scale: object  # factor of a score within the cap, Float32
    left: object  # sides of the window, Int32
    right: object
    slopes: object  # (B, H), float32
    turns: object  # (B, H, blocks, 2), int32
    next_tile: object  # (1,) int32, zero at the launch
    found_tiles: object  # (numbers of tiles, words of each) int32
    aux: object  # tuple of tensors that mods read
    section: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    queries: object  # kv_sequences.Side; None where all sequences are as long as their tensors, as the next
    keys: object
    entry_rows: (
        dict  # rows from one batch entry to the next by name, of what is ragged but not packed
    )


@dataclass(frozen=True)
class Shared:
    """Tensors in shared memory; see the verbs."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor


class BackwardSm90:
    """One Hopper backward kernel; see the module docstring for its pipeline."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.graph = config.graph
        if not config.fits:
            raise ValueError(
                f"{config} needs {self.graph.smem_bytes} bytes of shared memory and up to {SMEM_ALIGN} "
                f"for alignment, one CTA has {SMEM_LIMIT}"
            )
        self.roles = self._schedule()

    def _schedule(self):
        """The role functions."""
        if self.config.alternate:
            return AlternateRoles()
        return LateRoles() if self.config.late else BackwardRoles()

    def fake_arguments(self):
        """Arguments of ``__call__`` with symbolic sizes and strides, for compiling without data."""
        return fake_backward(self.config, element(self.config))

    @cute.jit
    def __call__(
        self,
        tensors,  # q, k, v, dout (B, S, H, D); lse, delta (B, H, padded Sq), dq (B, H, blocks, ..) float32; dk, dv, ..
        numbers: tuple,  # Float32 or Int32, named by the config
        section: Int32,
        stream,
    ):
        """Build layouts and TMA descriptors, and launch one CTA for each tile of keys, or as many as take them from a counter."""
        q, k, v, do, lse, delta, dq, dk, dv, *optional = tensors
        optional = dict(zip(self.config.optional_tensors, optional, strict=True))
        numbers = dict(zip(self.config.numbers, numbers, strict=True))
        queries, keys = sides_of(self.config, q, k, optional)
        grid = KvGrid(
            n_blocks=keys.slots
            if self.config.cu_k
            else cute.ceil_div(k.shape[1], self.config.tile_n),
            heads_kv=k.shape[2],
            batch=k.shape[0],
            ratio=q.shape[2] // k.shape[2],
        )
        run_time = RunTime(
            lse=lse,
            delta=delta,
            dq=dq,
            scale=numbers["scale"],
            cap=numbers["cap"] * self._score_unit() if self.config.softcap else None,
            cap_scale=numbers.get("cap_scale"),
            left=numbers.get("left"),
            right=numbers.get("right"),
            slopes=optional.get("alibi_slopes"),
            turns=optional.get("turns"),
            next_tile=optional.get("next_tile"),
            found_tiles=optional.get("found_tiles"),
            aux=aux_of(optional),
            section=section,
            seqlen_q=q.shape[1],
            seqlen_k=k.shape[1],
            queries=queries if self.config.varlen else None,
            keys=keys if self.config.varlen else None,
            entry_rows=entry_rows(self.config, q, k, v, do),
        )
        ctas = grid.total
        if cutlass.const_expr(self.config.handed_out):
            ctas = cutlass.min(grid.total, numbers["workers"])
        self.kernel(
            self._tiled_mmas(), self._operands((q, k, v, do, dk, dv)), run_time, grid
        ).launch(
            grid=(ctas * self.config.ctas, 1, 1),
            cluster=(self.config.ctas, 1, 1) if self.config.ctas > 1 else None,
            block=(self.graph.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.config.chained,
        )

    def _score_unit(self):
        """What a score in natural units is multiplied by."""
        return 1.0 if self.config.natural else LOG2E

    def _view(self, name, x):
        """A tensor (B, S, H, D) as its tiles are cut, (S, D, H, B) or ragged; see the verbs."""
        c = self.config
        if name in ("dk", "dv"):
            return ragged_store_view(x) if c.cu_k else permuted_view(x, [1, 3, 2, 0])
        ragged = c.ragged_q if name in ("q", "do") else c.ragged_k
        return ragged_rows_view(x) if ragged else permuted_view(x, [1, 3, 2, 0])

    def _operands(self, tensors):
        """TMA descriptors of q, k, v, do, dk and dv."""
        c, layouts = self.config, self._smem_layouts()
        load, save = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        boxes = {
            "q": (load, (c.tile_m, c.tile_d)),
            "k": (load, (TILE_N, c.dq_width)),
            "v": (load, (TILE_N, c.tile_dv)),
            "do": (load, (c.tile_m, c.tile_dv)),
            "dk": (save, (MMA_ROWS, c.tile_d)),
            "dv": (save, (MMA_ROWS, c.tile_dv)),
        }
        operands = []
        for (name, (op, box)), tensor in zip(boxes.items(), tensors, strict=True):
            one = cute.slice_(layouts[name], (None, None, 0))
            view = self._view(name, tensor)
            operands.append(Operand(*cpasync.make_tiled_tma_atom(op, view, one, box)))
        return Operands(*operands)

    def _tiled_mmas(self):
        """Products by both warpgroups: 64 keys each of S^T, dP^T, dK and dV, and a part of dQ."""
        c, dtype, two = self.config, element(self.config), (MMA_WARPGROUPS, 1, 1)

        def product(majors, groups, tile, source=warpgroup.OperandSource.SMEM):
            return hopper.make_trivial_tiled_mma(
                dtype, dtype, *majors, Float32, groups, tile, source
            )

        registers = warpgroup.OperandSource.RMEM
        if c.swap_dq:
            dq = product((MN_MAJOR, K_MAJOR), two, (MMA_ROWS, c.tile_m))
        elif c.splits_queries:
            dq = product((K_MAJOR, MN_MAJOR), two, (MMA_ROWS, c.tile_d))
        else:
            dq = product((K_MAJOR, MN_MAJOR), (1, MMA_WARPGROUPS, 1), c.dq_shape)
        return TiledMmas(
            s=product((K_MAJOR, K_MAJOR), two, (MMA_ROWS, c.tile_m)),
            dk=product((K_MAJOR, MN_MAJOR), two, (MMA_ROWS, c.tile_d), registers),
            dv=product((K_MAJOR, MN_MAJOR), two, (MMA_ROWS, c.tile_dv), registers),
            dq=dq,
        )

    def _smem_layouts(self):
        """Swizzled layouts by buffer, (rows, columns, stages), rows contiguous.

        K's atoms are as narrow as what one warpgroup takes of its columns for dQ.
        """
        c, dtype = self.config, element(self.config)
        kind = hopper.get_smem_layout_atom(ROW, dtype, c.dq_width if c.swap_dq else c.dq_shape[1])
        atom = warpgroup.make_smem_layout_atom(kind, dtype)

        def rows(count, width, stages):
            return hopper.make_smem_layout_a(ROW, (count, 1, width), dtype, stages)

        return {
            "q": rows(c.tile_m, c.tile_d, STAGES),
            "k": cute.tile_to_shape(atom, (TILE_N, c.dq_width, 1), order=(0, 1, 2)),
            "v": rows(TILE_N, c.tile_dv, 1),
            "do": rows(c.tile_m, c.tile_dv, STAGES),
            "ds": rows(c.tile_m, TILE_N, c.ds_stages),
            "dk": hopper.make_smem_layout_epi(dtype, ROW, (MMA_ROWS, c.tile_d), MMA_WARPGROUPS),
            "dv": hopper.make_smem_layout_epi(dtype, ROW, (MMA_ROWS, c.tile_dv), MMA_WARPGROUPS),
        }

    @cute.kernel
    def kernel(self, mmas: TiledMmas, operands: Operands, run_time: RunTime, grid: KvGrid):
        """Allocate, open the rings, and send every warp to its role."""
        c = self.config
        thread, _, _ = cute.arch.thread_idx()
        start, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        if warp == 0:
            for operand in (operands.q, operands.k, operands.v, operands.do):
                cpasync.prefetch_descriptor(operand.atom)
        smem = SmemAllocator()
        pointers = self._allocate(smem)
        shared = self._shared(pointers)
        lane = opaque(thread)  # ptxas would read the lane id anew for every release in the loop
        k_producer, k_consumer = self._open_ring(smem, "k", lane)
        v_producer, v_consumer = self._open_ring(smem, "v", lane)
        q_producer, q_consumer = self._open_ring(smem, "q", lane)
        do_producer, do_consumer = self._open_ring(smem, "do", lane)
        slots = None
        tiles = self._tiles(run_time, grid, smem, (start, ctas))
        if cutlass.const_expr(c.handed_out):
            slots = self._open_tiles(smem, pointers, run_time, (start, ctas, lane))
            slots.open(thread, c.tile_readers)
        if cutlass.const_expr(c.varlen and not c.handed_out):
            if warp == FINDING_WARP:
                tiles.find(thread, start)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        load_tiles = tiles
        if cutlass.const_expr(c.handed_out):
            given, told = GivenKvTiles, ToldKvTiles
            if cutlass.const_expr(c.varlen):
                given, told = GivenSequenceTiles, ToldSequenceTiles
            load_tiles, tiles = given(tiles, slots), told(tiles, slots)
        load, reduce, mma = (self.graph.role(name) for name in ("load", "reduce", "mma"))
        if group == 0:
            cute.arch.setmaxregister_decrease(load.registers)
            if cutlass.const_expr(c.chained):
                cute.arch.griddepcontrol_launch_dependents()
                cute.arch.griddepcontrol_wait()  # statistics, sums and counters are there
            if warp == 0:
                ops = self._load_ops(operands, run_time, load_tiles, shared)
                self.roles.load(ops, load_tiles, k_producer, v_producer, q_producer, do_producer)
            first = reduce.first_warp
            if (warp >= first) & (warp < first + reduce.active_warps):
                mine = warp - first
                ops = self._reduce_ops(operands, run_time, tiles, shared, mine)
                self.roles.reduce(ops, tiles, Inbox(mine))
        else:
            cute.arch.setmaxregister_increase(mma.registers)
            mine = group - mma.warpgroups.start
            place = (thread % WARPGROUP, mine, mine)
            ops = self._mma_ops(mmas, operands, run_time, tiles, shared, place)
            ends = (k_consumer, v_consumer, q_consumer, do_consumer)
            self.roles.mma(ops, tiles, *ends, Exchange(mine), Outbox(mine))

    def _tiles(self, run_time, grid, smem, place):
        """Tiles of this CTA; ``place`` is its number, and that of all."""
        c, section = self.config, run_time.section
        blocks = c.blocks(run_time.left, run_time.right)
        if not c.varlen:
            lengths = (run_time.seqlen_q, run_time.seqlen_k)
            return KvTileSchedule(blocks, grid, section, *place, *lengths, backwards=c.backwards)
        sides = (run_time.queries, run_time.keys)
        schedule = SequenceSchedule(blocks, grid, *sides, section, c.least_heads, c.backwards)
        if c.handed_out:
            return schedule
        words = cute.make_tensor(
            smem.allocate_array(Int32, TILE_WORDS), cute.make_layout(TILE_WORDS)
        )
        return OneTile(schedule, words)

    def _allocate(self, smem):
        """Pointers to the shared memory of each buffer that has its own, by the graph's map."""
        return {
            name: smem.allocate(nbytes, byte_alignment=SMEM_ALIGN)
            for name, nbytes in self.graph.allocations().items()
        }

    def _open_tiles(self, smem, pointers, run_time, place):
        """Slots and barriers of the ring of tiles."""
        words = cute.recast_ptr(pointers["tiles"], dtype=Int32)
        shape, (start, ctas, lane) = self.config.tile_slots, place
        full, empty = (smem.allocate_array(cutlass.Int64, shape[1]) for _ in range(2))
        slots = cute.make_tensor(words, cute.make_layout(shape))
        # Who waits for another tile's addition must not wait for a CTA that has not begun, wherever fewer fit than asked for.
        owned = not self.config.turns
        fields = (slots, full, empty, run_time.next_tile, start, ctas, lane % WARP, owned)
        if self.config.tiles_found:
            return SequenceSlots(*fields, run_time.found_tiles)
        return KvTileSlots(*fields)

    def _shared(self, pointers):
        """Tensors in shared memory, by the graph's map."""
        c, dtype, layouts = self.config, element(self.config), self._smem_layouts()
        tensors = {}
        for buffer in self.graph.buffers:
            if buffer.name in layouts:
                layout, pointer = layouts[buffer.name], pointers[buffer.borrows or buffer.name]
                pointer = cute.recast_ptr(pointer, swizzle_=layout.inner, dtype=dtype)
                outer = layout.outer
                if c.handed_out and buffer.name in ("dk", "dv"):  # each in its warpgroup's box
                    boxes = cute.make_layout(MMA_WARPGROUPS, stride=c.box_bytes // ELEMENT_BYTES)
                    outer = cute.append(cute.slice_(outer, (None, None, 0)), boxes)
                tensors[buffer.name] = cute.make_tensor(pointer, outer)
        floats = cute.recast_ptr(pointers["dq"], dtype=Float32)
        tensors["dq"] = cute.make_tensor(
            floats, cute.make_layout((c.dq_floats, MMA_WARPGROUPS), stride=(1, c.box_bytes // 4))
        )
        for name, ring in (("lse", "q"), ("delta", "do")):
            tile_bytes = self.graph.ring(ring).stage_bytes - c.statistics_bytes
            stages = self.graph.ring(ring).stages
            behind = cute.recast_ptr(pointers[ring] + stages * tile_bytes, dtype=Float32)
            tensors[name] = cute.make_tensor(behind, cute.make_layout((c.tile_m, stages)))
        return Shared(**tensors)

    def _open_ring(self, smem, name, lane):
        """Barriers and the producer and consumer ends of the graph's ring ``name``."""
        ring = self.graph.ring(name)
        ends = pipeline.PipelineTmaAsync.create(
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * ring.stages),
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
        if self.config.ctas > ring.ctas:  # the pipeline would signal another CTA's barrier
            ends = replace(ends, is_signaling_thread=lane % WARP == 0)
        return ends.make_participants()

    def _load_ops(self, operands, run_time, tiles, shared, kind=LoadOps, **more):
        """Verbs of the ``load`` role, of a class that may have more fields."""
        return kind(
            config=self.config,
            tiles=tiles,
            q=operands.q,
            k=operands.k,
            v=operands.v,
            do=operands.do,
            entry_rows=run_time.entry_rows,
            mLSE=run_time.lse,
            mD=run_time.delta,
            sQ=shared.q,
            sK=shared.k,
            sV=shared.v,
            sDO=shared.do,
            sLSE=shared.lse,
            sD=shared.delta,
            **more,
        )

    def _reduce_ops(self, operands, run_time, tiles, shared, mine):
        """Verbs of the ``reduce`` role of one warpgroup."""
        return ReduceOps(
            config=self.config,
            tiles=tiles,
            mDQ=run_time.dq,
            sDQ=shared.dq[None, mine],
            mTurns=run_time.turns,
            sDK=shared.dk[None, None, mine],
            sDV=shared.dv[None, None, mine],
            dk_out=operands.dk,
            dv_out=operands.dv,
            warpgroup=mine,
        )

    def _mma_ops(self, mmas, operands, run_time, tiles, shared, place):
        """Verbs of the ``mma`` role."""
        return MmaOps(**self._mma_fields(mmas, operands, run_time, tiles, shared, place))

    def _keys_of_dq(self, shared):
        """K^T (D, N, 1), as far as ``mmas.dq`` multiplies it."""
        return permuted_view(shared.k, [1, 0, 2])

    def _mma_fields(self, mmas, operands, run_time, tiles, shared, place):
        """Partition the operands for one warpgroup, which is number ``mine`` of those that a product has; allocate its accumulators."""
        c, (thread, group, mine) = self.config, place

        def a(tiled_mma, tensor):
            part = tiled_mma.get_slice(mine * WARPGROUP).partition_A(tensor)
            return tiled_mma.make_fragment_A(part)

        def b(tiled_mma, tensor):
            part = tiled_mma.get_slice(mine * WARPGROUP).partition_B(tensor)
            return tiled_mma.make_fragment_B(part)

        k_of_dq, ds_of_dq = (a, b) if c.swap_dq else (b, a)
        operand = ((2, 2, 2), 1, c.tile_m // 16)
        return dict(
            config=c,
            tiles=tiles,
            mma_s=mmas.s,
            mma_dk=mmas.dk,
            mma_dv=mmas.dv,
            mma_dq=mmas.dq,
            tSrK=a(mmas.s, shared.k),
            tSrQ=b(mmas.s, shared.q),
            tDPrV=a(mmas.s, shared.v),
            tDPrDO=b(mmas.s, shared.do),
            tDVrDO=b(mmas.dv, permuted_view(shared.do, [1, 0, 2])),
            tDKrQ=b(mmas.dk, permuted_view(shared.q, [1, 0, 2])),
            tDQrK=k_of_dq(mmas.dq, self._keys_of_dq(shared)),
            tDQrDS=ds_of_dq(mmas.dq, shared.ds),
            tDVrP=cute.make_rmem_tensor(operand, element(c)),
            tDKrDS=cute.make_rmem_tensor(operand, element(c)),
            dk_acc=cute.make_rmem_tensor(((2, 2, c.tile_d // 8), 1, 1), Float32),
            dv_acc=cute.make_rmem_tensor(((2, 2, c.tile_dv // 8), 1, 1), Float32),
            sLSE=shared.lse,
            sD=shared.delta,
            sDS=cute.local_tile(
                permuted_view(shared.ds, [1, 0, 2]), (MMA_ROWS, c.tile_m, c.ds_stages), (mine, 0, 0)
            ),
            sDQ=shared.dq[None, group],
            sDK=shared.dk[None, None, mine],
            sDV=shared.dv[None, None, mine],
            dk_out=operands.dk,
            dv_out=operands.dv,
            mSlopes=run_time.slopes,
            aux=run_time.aux,
            scale=run_time.scale,
            score_scale=run_time.scale * self._score_unit(),
            cap=run_time.cap,
            cap_scale=run_time.cap_scale,
            near_end=near_end(run_time.cap_scale) if c.near_cap else None,
            thread=thread,
            warpgroup=group,
        )
