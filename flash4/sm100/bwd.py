"""Backward attention for Blackwell (sm_100): host code, launch and wiring of the roles.

    load --[k, v, do, q x2 tma]--> mma, [stat x2]--> compute
    mma --(s)--> compute --(p)--> mma --(dp)--> compute --(ds)--> mma --(dq)--> reduce --(r)--> mma
    mma --(dv, dk)--> compute;  a pair: compute --(ds)--> relay --(x, bytes)--> the peer's relay --(y)--> mma

Per step, one block of 128 queries of one head, while ``compute`` works on P and dS:

    one CTA   S(i) = K Q^T | dQ(i-1) = dS K | dK += dS^T Q(i-1) | dP(i) = V dO^T | dV += P^T dO(i)
    a pair    S(i) | dK += dS^T Q(i-1) | dP(i) | dQ(i-1) | dV += P^T dO(i)

-LSE and -D come from ``passes.bwd_prepare``; ``passes.bwd_finish`` makes dQ of the sums. Config is in ``bwd_config``, graph
in ``bwd_graph``, schedule in ``bwd_roles`` and ``bwd_pair_roles``, its verbs in ``bwd_ops`` and ``bwd_math``.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator, TmemAllocator

from flash4.common.graph import WARP, WARPGROUP
from flash4.common.kv_one_tile import TILE_WORDS, OneTile
from flash4.common.kv_sequences import SequenceSchedule
from flash4.common.kv_tiles import KvGrid, KvTileSchedule
from flash4.common.launch_arguments import aux_of, entry_rows, fake_backward, sides_of
from flash4.common.numerics import LOG2E, Factor
from flash4.common.tma_views import (
    permuted_view,
    ragged_rows_view,
    ragged_store_view,
)
from flash4.sm100.bwd_config import (
    DQ_STAGES,
    PANEL,
    SMEM_LIMIT,
    STAT_STAGES,
    BackwardConfig,
)
from flash4.sm100.bwd_ends import (
    NEVER,
    Bytes,
    ComputeEnds,
    Consumer,
    Cursor,
    LoadEnds,
    Meeting,
    MmaEnds,
    Nothing,
    Producer,
    Raise,
    ReduceEnds,
    RelayEnds,
    Wait,
)
from flash4.sm100.bwd_graph import BYTES, ROWS, UMMA
from flash4.sm100.bwd_math import VECTOR, ComputeOps, Lanes, ReduceOps, RunTime
from flash4.sm100.bwd_ops import (
    LoadOps,
    MmaOps,
    Operand,
    Operands,
    RelayOps,
    cta_group,
    element,
    make_mma_dk,
    make_mma_dq,
    make_mma_dv,
    make_mma_s,
    smem_layouts,
)
from flash4.sm100.bwd_pair_roles import PairRoles
from flash4.sm100.bwd_roles import BackwardRoles
from flash4.sm100.fwd_config import SMEM_ALIGN
from flash4.sm100.fwd_graph import THREADS, TMEM_COLUMNS

# Named barriers; 0 is __syncthreads.
BARRIER_TMEM = 1  # all who use tensor memory know where it is
BARRIER_COMPUTE = 2
BARRIER_REDUCE = 3
BARRIER_FREE = 4  # compute and reduce are through with it
FINDING_WARP = 1  # not the one that sets up barriers
# Where one CTA has an operand of the other major: over which.
SAME = {"kt": "k", "qt": "q", "dot": "do"}


@dataclass(frozen=True)
class Memory:
    """What all roles share."""

    first: object  # pointer to all of it
    base: dict  # name of a buffer -> pointer
    full: dict  # name of a ring -> barriers
    empty: dict  # of those that have such a side
    barriers: dict  # name of a signal -> barrier
    tmem: object = None


class BackwardSm100:
    """One Blackwell backward kernel; see the module docstring for its pipeline."""

    load_ops, mma_ops, compute_ops, reduce_ops = LoadOps, MmaOps, ComputeOps, ReduceOps

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.graph = config.graph
        if not config.fits:
            raise ValueError(
                f"{config} needs {self.graph.smem_bytes} bytes of shared memory, one CTA has {SMEM_LIMIT}"
            )
        self.roles = BackwardRoles()
        self.pair_roles = PairRoles()

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
        """Build layouts and TMA descriptors, and launch as many CTAs as run at the same time."""
        c = self.config
        q, k, v, do, lse, delta, dq, dk, dv, *optional = tensors
        optional = dict(zip(c.optional_tensors, optional, strict=True))
        numbers = dict(zip(c.numbers, numbers, strict=True))
        queries, keys = sides_of(c, q, k, optional)
        grid = KvGrid(
            n_blocks=keys.slots if c.cu_k else cute.ceil_div(k.shape[1], c.tile_n),
            heads_kv=k.shape[2],
            batch=k.shape[0],
            ratio=Factor(Int32(q.shape[2] // k.shape[2])),
        )
        run_time = RunTime(
            lse=lse,
            delta=delta,
            dq=dq,
            scale=numbers["scale"],
            cap=numbers["cap"] * (1.0 if c.natural else LOG2E) if c.softcap else None,
            cap_scale=numbers.get("cap_scale"),
            left=numbers.get("left"),
            right=numbers.get("right"),
            slopes=optional.get("alibi_slopes"),
            turns=optional.get("turns"),
            aux=aux_of(optional),
            queries=queries if c.varlen else None,
            keys=keys if c.varlen else None,
            entry_rows=entry_rows(self.config, q, k, v, do),
        )
        operands = self._operands(q, k, v, do, dk, dv)
        workers = grid.total
        if cutlass.const_expr(not c.varlen):
            workers = cutlass.min(grid.total, numbers["workers"] // self.config.team)
        self.kernel(operands, run_time, grid, section, (q.shape[1], k.shape[1])).launch(
            grid=(workers * self.config.team, 1, 1),
            cluster=(c.ctas, 1, 1) if c.ctas > 1 else None,
            block=(self.graph.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=c.chained,
        )

    def _view(self, name, x, order):
        """A tensor (B, S, H, D) with its modes in another order, or ragged; see the verbs."""
        c = self.config
        if name in ("dk", "dv"):
            return ragged_store_view(x) if c.cu_k else permuted_view(x, order)
        ragged = c.ragged_q if name in ("q", "do") else c.ragged_k
        return ragged_rows_view(x) if ragged else permuted_view(x, order)

    def _operands(self, q, k, v, do, dk, dv):
        """TMA descriptors."""
        c, layouts = self.config, smem_layouts(self.config)
        load, save = (
            cpasync.CopyBulkTensorTileG2SOp(cta_group(c)),
            cpasync.CopyBulkTensorTileS2GOp(),
        )
        mma_s, mma_dv, mma_dk, mma_dq = (
            make_mma_s(c),
            make_mma_dv(c),
            make_mma_dk(c),
            make_mma_dq(c),
        )
        cluster = cute.tiled_divide(cute.make_layout((c.ctas, 1, 1)), (mma_s.thr_id.shape,)).shape
        make_a, make_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B

        def operand(make, x, order, name, shape, mma):
            one = cute.select(layouts[name], [0, 1, 2])
            view = self._view(name, x, order)
            return Operand(*make(load, view, one, shape, mma, cluster))

        def result(x, name, width):
            one = cute.select(layouts[name], [0, 1])
            view = self._view(name, x, rows)
            return Operand(*cpasync.make_tiled_tma_atom(save, view, one, (ROWS, width)))

        rows, columns = [1, 3, 2, 0], [3, 1, 2, 0]
        s_d, s_dv = (c.tile_n, c.tile_m, c.tile_d), (c.tile_n, c.tile_m, c.tile_dv)
        s_v = (c.tile_n, c.tile_m, c.part_dv)
        found = {
            "k": operand(make_a, k, rows, "k", s_d, mma_s),
            "v": operand(make_a, v, rows, "v", s_v, mma_s),
            "q": operand(make_b, q, rows, "q", s_d, mma_s),
            "do": operand(make_b, do, rows, "do", s_dv, mma_s),
            "dk": result(dk, "dk", c.part_d),
            "dv": result(dv, "dv", c.part_dv),
        }
        if c.ctas > 1:
            of_dq = (c.tile_m, c.tile_d, c.tile_n)
            of_dk, of_dv = (c.tile_n, c.tile_d, c.tile_m), (c.tile_n, c.tile_dv, c.tile_m)
            found |= {
                "kt": operand(make_b, k, columns, "kt", of_dq, mma_dq),
                "qt": operand(make_b, q, columns, "qt", of_dk, mma_dk),
                "dot": operand(make_b, do, columns, "dot", of_dv, mma_dv),
            }
        return Operands(**found)

    @cute.kernel
    def kernel(
        self, operands: Operands, run_time: RunTime, grid: KvGrid, section: Int32, seqlens: tuple
    ):
        """Allocate, open the rings, and send every warp to its role."""
        c, graph = self.config, self.graph
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for operand in (operands.k, operands.v, operands.q, operands.do):
                cpasync.prefetch_descriptor(operand.atom)
        memory = self._allocate(warp)
        if cutlass.const_expr(c.chained):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()  # statistics, sums and counters are there
        tiles = (run_time, grid, section, seqlens)
        if cutlass.const_expr(c.varlen):
            if warp == FINDING_WARP:
                number, _, _ = cute.arch.block_idx()
                self._tiles(memory, *tiles).find(thread, number // self.config.team)
            cute.arch.sync_threads()
        compute, reduce, mma = (graph.role(name) for name in ("compute", "reduce", "mma"))
        if warp >= mma.warps.start:
            cute.arch.setmaxregister_decrease(mma.registers)
            if warp == graph.role("load").warps.start:
                self._run_load(memory, self._tiles(memory, *tiles), operands, run_time)
            if warp == mma.warps.start:
                self._run_mma(memory, self._tiles(memory, *tiles))
            if cutlass.const_expr(c.ctas > 1):
                if warp == graph.role("relay").warps.start:
                    self._run_relay(memory, self._tiles(memory, *tiles))
        elif warp >= compute.warps.start:
            cute.arch.setmaxregister_increase(compute.registers)
            at, own = warp - compute.warps.start, self._own(memory, section)
            self._run_compute(own, self._tiles(own, *tiles), operands, run_time, at, thread)
        else:
            self._set_registers(reduce.registers)
            own = self._own(memory, section)
            self._run_reduce(own, self._tiles(own, *tiles), run_time, warp, thread)
        if cutlass.const_expr(c.ctas > 1):  # neither CTA ends before the other is through with it
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def _set_registers(self, registers):
        """Give registers back, or take more than there are at the launch."""
        if registers > self.graph.launch_registers // self.graph.threads:
            cute.arch.setmaxregister_increase(registers)
        else:
            cute.arch.setmaxregister_decrease(registers)

    def _tiles(self, memory, run_time, grid, section, seqlens):
        """This CTA's tiles, for a role; of sequences of different lengths one, which a warp has found."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        visits = self.config.blocks(run_time.left, run_time.right)
        if self.config.varlen:
            words = cute.recast_ptr(memory.base["tile"], dtype=Int32)
            words = cute.make_tensor(words, cute.make_layout(TILE_WORDS))
            sides = (run_time.queries, run_time.keys)
            return OneTile(
                SequenceSchedule(visits, grid, *sides, section, self.config.least_heads), words
            )
        return KvTileSchedule(
            visits, grid, section, block // self.config.team, blocks // self.config.team, *seqlens
        )

    def _rank(self):
        """Rank of this CTA in its pair; 0 of one that works alone."""
        if self.config.ctas == 1:
            return 0
        return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    def _split(self):
        """Which part of the columns of dQ, dK and dV this CTA has."""
        if self.config.splits == 1:
            return 0
        block, _, _ = cute.arch.block_idx()
        return cute.arch.make_warp_uniform(block % self.config.splits)

    def _allocate(self, warp):
        """Shared memory, barriers and tensor memory; all threads meet here."""
        graph, smem, c = self.graph, SmemAllocator(), self.config
        memory = self._memory(smem.allocate(graph.placed_bytes, byte_alignment=SMEM_ALIGN))
        self._init_barriers(warp, self._counts(memory))
        users = [role.threads for role in graph.roles if role.name in ("mma", "compute", "reduce")]
        tmem = TmemAllocator(
            smem.allocate_array(Int32, 1),
            barrier_for_retrieve=pipeline.NamedBarrier(BARRIER_TMEM, sum(users)),
            allocator_warp_id=graph.role("reduce").warps.start,
            is_two_cta=c.ctas > 1,
            two_cta_tmem_dealloc_mbar_ptr=smem.allocate_array(Int64, 1) if c.ctas > 1 else None,
        )
        ctas = cute.make_layout((c.ctas, 1))
        pipeline.pipeline_init_arrive(ctas)
        pipeline.pipeline_init_wait(ctas)
        return replace(memory, tmem=tmem)

    def _memory(self, first, tmem=None):
        """Buffers and barriers behind one another from a pointer on."""
        places = self.graph.places()

        def barriers(kind):
            found = {name: at for (of, name), at in places.items() if of == kind}
            return {name: cute.recast_ptr(first + at, dtype=Int64) for name, at in found.items()}

        base = {buffer.name: first + places["buffer", buffer.name] for buffer in self.graph.buffers}
        return Memory(first, base, barriers("full"), barriers("empty"), barriers("signal"), tmem)

    def _counts(self, memory):
        """(barrier, arrivals of a phase) of all barriers."""
        found = []
        for ring in self.graph.rings:
            for i in range(ring.stages):
                found.append((memory.full[ring.name] + i, 1))
                if ring.releases:
                    found.append((memory.empty[ring.name] + i, ring.releases))
        for signal in self.graph.signals:
            found.append((memory.barriers[signal.name], signal.arrivals(self.config.ctas)))
        return found

    def _own(self, memory, section):
        """Memory at a base that ptxas takes for another one, so that it need not be in the same register in all roles.

        Such a register is one of those that a CTA is launched with: where a role has no more than these for what it
        holds, the base would be in local memory in all roles.
        """
        nothing = cute.assume(section >> NEVER, SMEM_ALIGN)
        return self._memory(memory.first + nothing, memory.tmem)

    @cute.jit
    def _init_barriers(self, warp, counts: cutlass.Constexpr):
        if warp == 0:
            with cute.arch.elect_one():
                for barrier, arrivals in counts:
                    cute.arch.mbarrier_init(barrier, arrivals)

    def _operand(self, memory, name, layout):
        """16-bit tensor in a buffer; of one CTA both majors of an operand are in the same one."""
        buffer = {"dst": "ds", "dk": "k", "dv": "v"}.get(name, name)
        if self.config.ctas == 1:
            buffer = SAME.get(buffer, buffer)
        pointer = cute.recast_ptr(
            memory.base[buffer], swizzle_=layout.inner, dtype=element(self.config)
        )
        return cute.make_tensor(pointer, layout.outer)

    def _smem(self, memory, names, stages=None):
        """Operands as MMAs read them, by name."""
        layouts = smem_layouts(self.config, stages)
        return {name: self._operand(memory, name, layouts[name]) for name in names}

    def _floats(self, memory, name, layout):
        pointer = cute.recast_ptr(memory.base[name], dtype=Float32)
        return cute.make_tensor(pointer, layout)

    def _raise(self, memory, name):
        signal = self.graph.signal(name)
        return Raise(memory.barriers[name], signal.kind, self.config.ctas)

    def _wait(self, memory, name, role):
        signal = self.graph.signal(name)
        late = role in [waiter.name for waiter in signal.late]
        kind = Bytes if signal.kind == BYTES else Wait
        return kind(memory.barriers[name], late)

    def _ring(self, memory, name, kind=Consumer):
        """A consumer's end of a ring; releases are commits."""
        ring, freed = self.graph.ring(name), None
        if ring.freed_by == UMMA:
            freed = Raise(memory.empty[name], UMMA, self.config.ctas)
        return kind(ring, memory.full[name], freed)

    def _more_ends(self, memory, role):
        """Ends of a role that other kernels do not have."""
        return {}

    def _run_load(self, memory, tiles, operands, run_time):
        c, rank = self.config, self._rank()
        every = ("k", "v", "q", "do", "kt", "qt", "dot")
        names = [name for name in every if getattr(operands, name) is not None]
        layout = cute.make_layout((c.tile_m, 2, STAT_STAGES))
        ops = self.load_ops(
            c, tiles, operands, run_time.entry_rows, run_time.lse, run_time.delta, rank,
            self._smem(memory, names), self._floats(memory, "stat", layout),
        )  # fmt: skip
        ends = {
            ring.name: Producer(
                ring, memory.full[ring.name], memory.empty.get(ring.name), c.ctas, rank
            )
            for ring in self.graph.rings
        }
        if c.ctas > 1:
            ends |= {name: self._wait(memory, name, "load") for name in ("s", "dp")}
            self.pair_roles.load(ops, tiles, LoadEnds(**ends))
        else:
            self.roles.load(ops, tiles, LoadEnds(**ends))

    def _run_mma(self, memory, tiles):
        c = self.config
        memory.tmem.wait_for_alloc()
        names = [name for name in smem_layouts(c) if name not in ("p", "dk", "dv")]
        pointer = memory.tmem.retrieve_ptr(Float32)
        ops = self.mma_ops(
            c, self.graph.tmem, smem_layouts(c)["p"].outer, pointer, self._smem(memory, names, 2)
        )
        posts = {name: self._raise(memory, name) for name in ("s", "dp", "dq", "dv", "dk")}
        heard = ("p", "r", "early", "dst", "y") if c.ctas > 1 else ("p", "r", "ds")
        waits = {name: self._wait(memory, name, "mma") for name in heard}
        rings = ("k", "v", "kt", "a", "b") if c.ctas > 1 else ("k", "v", "q", "do")
        ends = posts | waits | {name: self._ring(memory, name) for name in rings}
        ends |= self._more_ends(memory, "mma")
        if c.ctas > 1:
            self._lead(ops, tiles, MmaEnds(**ends))
        else:
            ends |= {"qt": self._ring(memory, "q", Cursor), "dot": self._ring(memory, "do", Cursor)}
            self.roles.mma(ops, tiles, MmaEnds(**ends))

    @cute.jit
    def _lead(self, ops, tiles, ends):
        """The leader of a pair issues the MMAs of both CTAs."""
        if self._rank() == 0:
            self.pair_roles.mma(ops, tiles, ends)

    def _panels(self, memory):
        """dS as ``compute`` writes it, (128 keys, 64 queries, panels), and the same without its swizzle, (numbers, panels)."""
        c = self.config
        inner = smem_layouts(c)["ds"].inner
        layout = cute.make_layout((ROWS, PANEL, c.panels), stride=(PANEL, 1, ROWS * PANEL))
        pointer = cute.recast_ptr(memory.base["ds"], swizzle_=inner, dtype=element(c))
        flat = cute.recast_ptr(memory.base["ds"], dtype=element(c))
        numbers = cute.make_layout((ROWS * PANEL, c.panels))
        return cute.make_tensor(pointer, layout), cute.make_tensor(flat, numbers)

    def _run_relay(self, memory, tiles):
        ops = RelayOps(self.config, self._panels(memory)[1], memory.barriers["x"], self._rank())
        waits = {name: self._wait(memory, name, "relay") for name in ("ds", "x")}
        self.pair_roles.relay(ops, tiles, RelayEnds(y=self._raise(memory, "y"), **waits))

    def _run_compute(self, memory, tiles, operands, run_time, warp, thread):
        c, pair = self.config, self.config.ctas > 1
        memory.tmem.wait_for_alloc()
        lanes = Lanes(memory.tmem.retrieve_ptr(Float32), thread % WARPGROUP)
        statistics = cute.make_layout((VECTOR, c.tile_m // VECTOR, 2, STAT_STAGES))
        results = self._smem(memory, ("dk", "dv"))
        ops = self.compute_ops(
            config=c,
            tmem=self.graph.tmem,
            tiles=tiles,
            run_time=run_time,
            lanes=lanes,
            sStat=self._floats(memory, "stat", statistics),
            sPanels=self._panels(memory)[0],
            sDK=results["dk"],
            sDV=results["dv"],
            dk_out=operands.dk,
            dv_out=operands.dv,
            rank=self._rank(),
            warp=warp,
            warpgroup=warp // (WARPGROUP // WARP),
            split=self._split(),
        )
        ends = {name: self._wait(memory, name, "compute") for name in ("s", "dp", "dv", "dk")}
        ends |= {name: self._raise(memory, name) for name in ("p", "ds")}
        for name in ("early", "dst"):
            ends[name] = self._raise(memory, name) if pair else Nothing()
        ends["free"] = self._wait(memory, "dq", "compute") if pair else Nothing()
        threads = self.graph.role("compute").threads
        ends |= {
            "stat": self._ring(memory, "stat"),
            "k_free": Raise(memory.empty["k"], THREADS, 1),
            "meeting": Meeting(BARRIER_COMPUTE, threads),
        }
        ends |= self._more_ends(memory, "compute")
        self.roles.compute(ops, tiles, ComputeEnds(**ends))
        cute.arch.barrier_arrive(barrier_id=BARRIER_FREE, number_of_threads=threads + WARPGROUP)

    def _run_reduce(self, memory, tiles, run_time, warp, thread):
        c = self.config
        memory.tmem.allocate(TMEM_COLUMNS)
        memory.tmem.wait_for_alloc()
        pointer = memory.tmem.retrieve_ptr(Float32)
        parts = cute.make_layout((VECTOR, ROWS, c.dq_columns // VECTOR, DQ_STAGES))
        ops = self.reduce_ops(
            c, self.graph.tmem, tiles, run_time, Lanes(pointer, thread),
            self._floats(memory, "dq", parts), self._rank() + self._split(), warp,
        )  # fmt: skip
        ends = ReduceEnds(
            dq=self._wait(memory, "dq", "reduce"),
            r=self._raise(memory, "r"),
            meeting=Meeting(BARRIER_REDUCE, WARPGROUP),
        )
        self.roles.reduce(ops, tiles, ends)
        memory.tmem.relinquish_alloc_permit()
        threads = self.graph.role("compute").threads + WARPGROUP
        cute.arch.barrier(barrier_id=BARRIER_FREE, number_of_threads=threads)
        memory.tmem.free(pointer, TMEM_COLUMNS)
