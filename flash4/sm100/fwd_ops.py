"""Verbs of the Blackwell forward's schedule, in CuTe: TMA, tcgen05 MMAs, online softmax, O and LSE.

An accumulator of 128 rows is 128 lanes of tensor memory, a column of it one column there. A thread of a warpgroup reaches
one lane: a row of S is 128 registers of one thread, and no row is reduced over threads.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import BFloat16, Float16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from flash4.common import mods, numerics
from flash4.common.geometry import imax, imin
from flash4.common.mods import SeqlenInfo
from flash4.common.numerics import LN2, LOG2E, RESCALE_THRESHOLD_LOG2
from flash4.common.tma_views import WRAP
from flash4.sm100.fwd_config import (
    CHUNK,
    KEY_STEP,
    LARGEST_TOTAL,
    MMA_ROWS,
    NO_KEY,
    ForwardConfig,
)
from flash4.sm100.fwd_exp import exp2_on_fma, part_of_range

PIECE = 8  # 16-bit elements that a thread stores to shared memory at a time
UNROLLED_DIM = 128  # head dim up to which the slices of Q K^T are unrolled


def element(config):
    """16-bit element type of a config."""
    return BFloat16 if config.bf16 else Float16


def cta_group(c: ForwardConfig):
    """Whether MMAs and loads are those of one CTA, or of a pair."""
    return tcgen05.CtaGroup.TWO if c.ctas > 1 else tcgen05.CtaGroup.ONE


def make_mma_qk(c: ForwardConfig):
    """Tiled MMA of S = Q K^T, both from shared memory. Made where it is used: then its descriptor is a literal."""
    return blackwell.make_trivial_tiled_mma(
        element(c), element(c), OperandMajorMode.K, OperandMajorMode.K, Float32,
        cta_group(c), (MMA_ROWS * c.ctas, c.tile_n),
    )  # fmt: skip


def make_mma_pv(c: ForwardConfig):
    """Tiled MMA of O += P V, P from tensor memory."""
    return blackwell.make_trivial_tiled_mma(
        element(c), element(c), OperandMajorMode.K, OperandMajorMode.MN, Float32,
        cta_group(c), (MMA_ROWS * c.ctas, c.tile_dv), tcgen05.OperandSource.TMEM,
    )  # fmt: skip


@dataclass(frozen=True)
class Operand:
    """A global tensor behind a TMA descriptor: the copy atom and the tensor of its coordinates."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


@dataclass(frozen=True)
class RunTime:
    """What crosses the launch besides operands and grid; None where the config has no such feature."""

    lse: cute.Tensor  # (B, H, Sq), float32
    scale: object  # factor of a score, or of the tanh that caps it, Float32; None if only scale_log2 is needed
    scale_log2: object  # the same in log2 units; None if verbs scale scores one by one
    cap_scale: object  # factor of a score within the tanh, Float32
    left: object  # sides of the window, Int32
    right: object
    sink: object  # (H,), float32
    slopes: object  # (B, H), float32
    aux: object  # tuple of tensors that mods read
    sequences: object  # Sequences; None where all are as long as their tensors
    v_rows_of_entry: object  # rows from one batch entry of V to the next, Int32


@cute.jit
def announce(slot, nbytes: cutlass.Constexpr, rank, ctas: cutlass.Constexpr):
    """Tell a slot's barrier how many bytes come; that of a pair is the leader's, and counts those of both CTAs."""
    if cutlass.const_expr(ctas == 1):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(slot.barrier, nbytes)
    elif rank == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(slot.barrier, ctas * nbytes)


@dataclass(frozen=True)
class LoadOps:
    """Verbs of the ``load`` role."""

    config: cutlass.Constexpr
    tiles: object
    operands: tuple  # Q, K, V
    run_time: RunTime
    rank: object  # of the CTA
    sQ: cute.Tensor  # (128, tile_d, Q tiles)
    sK: cute.Tensor  # (tile_n / ctas, tile_d, stages)
    sV: cute.Tensor  # (tile_dv / ctas, tile_n, stages), the same memory

    def load_q(self, tile, q_tile, slot):
        """Fill a slot with one Q tile; rows past the sequence become zero."""
        c, place, (q, _, _) = self.config, self.tiles.place(tile), self.operands
        if (
            c.cu_q
        ):  # a warp's rows decide together whether O is rescaled: not for the next sequence's
            seqlen = self.tiles.lengths(tile)[0]
            mQ = q.tensor[None, None, WRAP, place.row_q + seqlen]
            heads_per_kv = self.run_time.lse.shape[1] // self.tiles.grid.heads_kv
            head = place.head_kv * heads_per_kv + place.group * c.pack
            mQ, group = cute.domain_offset(((head, WRAP - seqlen), 0), mQ), 0
        else:
            mQ, group = q.tensor[None, None, place.head_kv, place.batch_q], place.group
        part = tile.m_block * (c.q_tiles * c.ctas) + c.part(q_tile, self.rank)
        gQ = cute.local_tile(mQ, ((c.pack, MMA_ROWS // c.pack), c.tile_d), ((group, part), 0))
        self._load(q.atom, gQ, self.sQ, slot, c.q_bytes)

    def load_k(self, tile, n_block, slot):
        """Fill a slot with block ``n_block`` of those that the tile visits, or with this CTA's half of it."""
        c, place, (_, k, _) = self.config, self.tiles.place(tile), self.operands
        mK = k.tensor[None, None, place.head_kv, place.batch_k]
        if c.cu_k:  # keys after the sequence are masked
            mK = cute.domain_offset((place.row_k, 0), mK)
        part = (tile.first_block + n_block) * c.ctas + self.rank
        gK = cute.local_tile(mK, (c.tile_n // c.ctas, c.tile_d), (part, 0))
        self._load(k.atom, gK, self.sK, slot, c.k_bytes)

    def load_v(self, tile, n_block, slot):
        """Fill a slot with block ``n_block`` of V of those that the tile visits, or with this CTA's columns of it."""
        c, place, (_, _, v) = self.config, self.tiles.place(tile), self.operands
        if c.v_is_ragged:  # values after the sequence become zero: 0 * NaN would be NaN
            seqlen = self.tiles.lengths(tile)[1]
            end = place.batch_k * self.run_time.v_rows_of_entry + place.row_k + seqlen
            mV = v.tensor[None, None, place.head_kv, WRAP, end]
            # Opaque: or the difference takes the uniform register that holds the base of shared memory.
            mV = cute.domain_offset((0, WRAP - numerics.opaque(seqlen)), mV)
        else:
            mV = v.tensor[None, None, place.head_kv, place.batch_k]
        at = (self.rank, tile.first_block + n_block)
        gV = cute.local_tile(mV, (c.tile_dv // c.ctas, c.tile_n), at)
        self._load(v.atom, gV, self.sV, slot, c.v_bytes)

    def _load(self, atom, gX, sX, slot, nbytes):
        """Start the bulk copy of one tile into ``slot``; its barrier completes when the bytes have landed."""
        cute.arch.sync_warp()  # LLVM makes no copies of a loop with it; four would take all uniform registers
        announce(slot, nbytes, self.rank, self.config.ctas)
        tXsX, tXgX = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
        )
        cute.copy(atom, tXgX, tXsX[None, slot.index], tma_bar_ptr=slot.barrier)


def accumulator(c: ForwardConfig, mma, columns, pointer):
    """Accumulator of one CTA, (128, columns), at a pointer to tensor memory."""
    layout = mma.make_fragment_C(mma.partition_shape_C((MMA_ROWS * c.ctas, columns))).layout
    return cute.make_tensor(pointer, layout)


@dataclass(frozen=True)
class MmaOps:
    """Verbs of the ``mma`` role."""

    config: cutlass.Constexpr
    tmem: cutlass.Constexpr
    pointer: object  # to tensor memory
    sQ: cute.Tensor  # (MMA, MMA_M, MMA_D, Q tiles)
    sK: cute.Tensor  # (MMA, MMA_N, MMA_D, stages); of a pair this CTA's half
    sV: cute.Tensor  # (MMA, MMA_DV, MMA_N, stages)
    p_layout: object  # of the A operand of P V: (MMA, MMA_M, MMA_N, 1)

    def first_buffer(self):
        """Which S the first block of all gets, with one Q tile."""
        return Int32(0)

    def qk(self, buffer, q_slot, k_slot):
        """Issue S = Q K^T, of the Q tile of that number, or of the only one to that S; the first k-slice overwrites.

        Q tile i is always in slot i: both are taken once per tile. The zero from the slot's number is opaque, or ptxas
        keeps the descriptors of all slices of Q in registers around the loop.
        """
        c = self.config
        mma = make_mma_qk(c)
        q_tile = buffer if c.q_tiles > 1 else 0
        tSrQ = mma.make_fragment_A(self.sQ)[None, None, None, q_tile + (k_slot.index >> 8)]
        tSrK = mma.make_fragment_B(self.sK)[None, None, None, k_slot.index]
        tStS = accumulator(c, mma, c.tile_n, self.pointer + self.tmem.s(buffer))
        if c.tile_d > UNROLLED_DIM:
            self._qk_in_groups(tStS, tSrQ, tSrK)
            return
        for k in range(cute.size(tSrQ, mode=[2])):
            mma.set(tcgen05.Field.ACCUMULATE, k != 0)
            cute.gemm(mma, tStS, tSrQ[None, None, k], tSrK[None, None, k], tStS)

    @cute.jit
    def _qk_in_groups(self, tStS, tSrQ, tSrK):
        """A loop over groups of slices: unrolled, ptxas makes all descriptors first and spills them."""
        slices, groups = tSrQ.shape[2]
        for group in cutlass.range(groups, unroll=1):
            mma = make_mma_qk(self.config)
            for k in cutlass.range_constexpr(slices):
                mma.set(tcgen05.Field.ACCUMULATE, (group != 0) if k == 0 else True)
                at = (None, None, (k, group))
                cute.gemm(mma, tStS, tSrQ[at], tSrK[at], tStS)

    def pv_head(self, buffer, v_slot, accumulate):
        """Issue O (+)= P V for the first columns of P."""
        self._pv(buffer, v_slot, range(self.config.head // KEY_STEP), accumulate)

    def pv_tail(self, buffer, v_slot):
        """Issue O += P V for the last columns of P."""
        c = self.config
        self._pv(buffer, v_slot, range(c.head // KEY_STEP, c.tile_n // KEY_STEP), True)

    def _pv(self, buffer, v_slot, slices, accumulate):
        c = self.config
        q_tile = buffer if c.q_tiles > 1 else 0
        mma = make_mma_pv(c)
        shaped = mma.make_fragment_A(cute.make_tensor(self.pointer, self.p_layout))
        p = cute.recast_ptr(self.pointer + self.tmem.p(buffer), dtype=element(c))
        tOtP = cute.make_tensor(p, shaped[None, None, None, 0].layout)
        tOrV = mma.make_fragment_B(self.sV)[None, None, None, v_slot.index]
        tOtO = accumulator(c, mma, c.tile_dv, self.pointer + self.tmem.o(q_tile))
        for k in slices:
            mma.set(tcgen05.Field.ACCUMULATE, True if k else accumulate)
            cute.gemm(mma, tOtO, tOtP[None, None, k], tOrV[None, None, k], tOtO)


def tmem_load(base, column, columns, thread):
    """Copy and source of a load of some columns into this thread's registers."""
    window = tmem_window(base, column, columns)
    op = tcgen05.Ld32x32bOp(tcgen05.Repetition(columns))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), window)
    return copy, copy.get_slice(thread).partition_S(window)


def tmem_store(base, column, columns, thread):
    """Copy and target of a store of some columns from this thread's registers."""
    window = tmem_window(base, column, columns)
    op = tcgen05.St32x32bOp(tcgen05.Repetition(columns))
    copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), window)
    return copy, copy.get_slice(thread).partition_D(window)


def tmem_window(base, column, columns):
    """Columns of an accumulator as (128, columns)."""
    layout = cute.composition(base.layout, cute.make_layout((MMA_ROWS, columns)))
    return cute.make_tensor(base.iterator + column, layout)


def registers_at(values, at, columns):
    """Some registers of a tensor, shaped for a copy to or from tensor memory."""
    return cute.make_tensor(values.iterator + at, cute.make_layout(((columns, 1), 1, 1)))


@dataclass(frozen=True)
class KeptPhase:
    """A run of blocks whose bounds are in shared memory until it begins, as registers are scarce in the runs before."""

    masked: bool
    fixed: bool
    bounds: cute.Tensor  # (2,) int32, of a warp

    @staticmethod
    def of(phase, kept, i):
        """Put bounds away."""
        bounds = cute.make_tensor(kept.iterator + 2 * i, cute.make_layout(2))
        bounds[0], bounds[1] = Int32(phase.begin), Int32(phase.end)
        return KeptPhase(phase.masked, phase.fixed, bounds)

    @property
    def begin(self):
        """First block."""
        return self.bounds[0]

    @property
    def end(self):
        """Block behind the last."""
        return self.bounds[1]


@dataclass(frozen=True)
class SoftmaxOps:
    """Verbs of the ``softmax`` role, for one thread and its row.

    P = exp2(scale_log2 S - shift); the shift, in log2 units, is the row's maximum when it last moved. What roles carry is
    minus the shift, rounded once: what any block makes of it agrees to the last bit.
    """

    config: cutlass.Constexpr
    tmem: cutlass.Constexpr
    tiles: object
    pointer: object  # to tensor memory
    sStat: cute.Tensor  # (128 rows, 2 values, 2 tiles or blocks) float32
    run_time: RunTime
    q_tile: object  # 0 or 1, a run-time value: both warpgroups share the code; 0 of the only one
    rank: object  # of the CTA
    thread: object  # in the warpgroup, and row in the Q tile
    slope: object  # of this thread's row, in a register; None without ALiBi
    kept: object  # (6,) int32 in shared memory, of this warp: where phases begin and end; or None

    @property
    def scale_log2(self):
        """Factor of what the softmax takes."""
        return Float32(LOG2E) if self.config.natural else self.run_time.scale_log2

    def phases(self, tile):
        """Runs of blocks, masked or not; see ``ForwardConfig.phases``."""
        phases = self.config.phases(tile, self._part, self.tiles)
        if self.kept is None:
            return phases
        cute.arch.sync_warp()  # all lanes are through with the last tile's
        return tuple(KeptPhase.of(phase, self.kept, i) for i, phase in enumerate(phases))

    @property
    def _part(self):
        return self.config.part(self.q_tile, self.rank)

    def begin(self, tile):
        """No shift, sum 0."""
        if self.config.alibi:
            place = self.tiles.place(tile)
            self.slope[0] = self.run_time.slopes[place.batch, self._head(place)]
        return Float32(NO_KEY), Float32(0.0)

    def _buffer(self, buffer):
        """Which S: the Q tile's, or with one Q tile that of the block."""
        return self.q_tile if buffer is None else buffer

    def _s(self, buffer):
        c, column = self.config, self.tmem.s(self._buffer(buffer))
        return accumulator(c, make_mma_qk(c), c.tile_n, self.pointer + column)

    def load_s(self, tile, n_block, phase, buffer=None):
        """S of this row in registers: negated for a negative scale, capped, changed by mods, masked."""
        c, first_key = self.config, (tile.first_block + n_block) * self.config.tile_n
        s = self._s(buffer)
        if c.score_mod or c.mask_mod:
            self._change_in_memory(tile, first_key, s)
        scores = cute.make_rmem_tensor(cute.make_layout(c.tile_n), Float32)
        for column in range(0, c.tile_n, CHUNK):
            copy, tStS = tmem_load(s, column, CHUNK, self.thread)
            cute.copy(copy, tStS, registers_at(scores, column, CHUNK))
        cute.arch.fence_view_async_tmem_load()
        if not (c.score_mod or c.mask_mod):
            self._change(tile, first_key, scores)
        if phase.masked and (c.causal or c.left or c.right):
            self._mask(tile, first_key, scores)
        elif phase.masked:
            self._mask_tail(tile, first_key, scores)
        return scores

    @cute.jit
    def _change_in_memory(self, tile, first_key, s):
        """What mods make of S, a part of the row at a time: what they need for a whole row would not fit the registers."""
        for part in cutlass.range(self.config.tile_n // CHUNK, unroll=1):
            scores = cute.make_rmem_tensor(cute.make_layout(CHUNK), Float32)
            load, tStS = tmem_load(s, part * CHUNK, CHUNK, self.thread)
            cute.copy(load, tStS, registers_at(scores, 0, CHUNK))
            cute.arch.fence_view_async_tmem_load()
            self._change(tile, first_key + part * CHUNK, scores)
            store, target = tmem_store(s, part * CHUNK, CHUNK, self.thread)
            cute.copy(store, registers_at(scores, 0, CHUNK), target)
        cute.arch.fence_view_async_tmem_store()

    def _change(self, tile, first_key, scores):
        """Negate or cap, scale in natural units, add what slopes and mods do."""
        c, run_time = self.config, self.run_time
        for j in range(cute.size(scores)):
            if c.softcap:
                factor = -run_time.cap_scale if c.negate else run_time.cap_scale
                scores[j] = numerics.tanh(scores[j] * factor)
            elif c.negate:
                scores[j] = -scores[j]
            if c.natural:
                scores[j] = scores[j] * run_time.scale
        if c.alibi:
            self._add_alibi(tile, first_key, scores)
        if c.score_mod or c.mask_mod:
            self._apply_mods(tile, first_key, scores)

    def _query(self, tile):
        return self.config.first_query(tile, self._part) + self.thread // self.config.pack

    def _head(self, place):
        """Query head of this thread's row; the last one for packed rows that have none."""
        heads, pack = self.run_time.lse.shape[1], self.config.pack
        head_in_kv = place.group * pack + self.thread % pack
        head = place.head_kv * (heads // self.tiles.grid.heads_kv) + head_in_kv
        return cutlass.min(head, heads - 1)

    def _add_alibi(self, tile, first_key, scores):
        """S -= slope |p - j|, with p the query's position among the keys."""
        seqlen_q, seqlen_k = self.tiles.lengths(tile)
        distance = Float32(self._query(tile) + seqlen_k - seqlen_q - first_key)
        for j in range(cute.size(scores)):
            scores[j] = scores[j] - self.slope[0] * cute.math.absf(distance - Float32(j))

    def _apply_mods(self, tile, first_key, scores):
        """S = score_mod(S), and -inf where mask_mod hides a key; see ``flash_attn_func`` for what they are given."""
        c, place = self.config, self.tiles.place(tile)
        score_mod, mask_mod = mods.function(c.score_mod), mods.function(c.mask_mod)
        seqlen_q, seqlen_k = self.tiles.lengths(tile)
        info = SeqlenInfo(seqlen_q, seqlen_k, Int32(place.row_q), Int32(place.row_k))
        query = imax(imin(self._query(tile), seqlen_q - 1), 0)  # a mod may read a tensor there
        head = self._head(place)
        for j in range(cute.size(scores)):
            key = imax(imin(first_key + j, seqlen_k - 1), 0)
            where = (place.batch, head, query, key, info, self.run_time.aux)
            if score_mod is not None:
                scores[j] = Float32(score_mod(scores[j], *where))
            if mask_mod is not None:
                keep = cutlass.Boolean(mask_mod(*where))
                scores[j] = cutlass.select_(keep, scores[j], -Float32.inf)

    def _visible(self, tile):
        """(first key that this thread's row may see, one past the last)."""
        blocks, where = self.tiles.blocks, (self._query(tile), *self.tiles.lengths(tile))
        return blocks.key_begin(*where), blocks.key_end(*where)

    def _mask(self, tile, first_key, scores):
        """Set scores before the row's first and past its last visible key to -inf."""
        c, (begin, end) = self.config, self._visible(tile)
        visible, hidden = end - first_key, begin - first_key
        if c.varlen or c.softcap:  # two registers less
            for j in range(c.tile_n):
                seen = visible > j
                if c.left:
                    seen = seen & (hidden <= j)
                scores[j] = cutlass.select_(seen, scores[j], -Float32.inf)
            return
        visible, hidden = (numerics.place_in_sevens(imax(x, 0)) for x in (visible, hidden))
        for word in range(-(-c.tile_n // numerics.SEVENS)):  # a bit for each score
            seen = numerics.low_bits(visible - 32 * word)
            if c.left:
                seen = seen & ~numerics.low_bits(hidden - 32 * word)
            first = numerics.SEVENS * word
            for j in range(first, min(first + numerics.SEVENS, c.tile_n)):
                kept = (seen & (1 << numerics.place_in_sevens(j - first))) != 0
                scores[j] = cutlass.select_(kept, scores[j], -Float32.inf)

    @cute.jit
    def _mask_tail(self, tile, first_key, scores: cute.Tensor):
        """Mask only if the block reaches past the keys."""
        if first_key + self.config.tile_n > self._visible(tile)[1]:
            self._mask(tile, first_key, scores)

    def move_shift(self, scores, offset, phase):
        """(new offset, factor of O and of the sum); the shift moves only once the maximum outgrew it by 2^8.

        In a row without a key so far minus the maximum is infinite, and the offset stays ``NO_KEY``.
        """
        if phase.fixed:
            return offset, Float32(1.0)
        row_max = numerics.max3_of([scores[j] for j in range(self.config.tile_n)])
        new = -row_max * self.scale_log2
        growth_log2 = new - offset
        keep = growth_log2 >= -RESCALE_THRESHOLD_LOG2
        factor = cute.math.exp2(growth_log2, fastmath=True)
        return (
            cutlass.select_(keep, offset, new),
            cutlass.select_(keep, Float32(1.0), factor),
        )

    def put_factor(self, factor, buffer=None):
        """Tell correction."""
        self.sStat[self.thread, 0, self._buffer(buffer)] = factor

    def exp_head(self, scores, offset, phase, buffer=None):
        """First columns of P over S; the exponentials replace the scores in registers."""
        self._exp(scores, offset, range(0, self.config.head, 2), phase, buffer)

    def exp_tail(self, scores, offset, phase, buffer=None):
        """Last columns of P, all by the special function unit: the tensor core waits for them."""
        self._exp(scores, offset, range(self.config.head, self.config.tile_n, 2), phase, buffer)

    def _exp(self, scores, offset, columns, phase, buffer):
        c, s, scale = self.config, self._s(buffer), self.scale_log2
        part_scale, part_offset = part_of_range(scale, offset)
        for j in columns:
            pair = (scores[j], scores[j + 1])
            if j % 16 >= 16 - c.poly and j < c.head:
                pair = exp2_on_fma(*pair, part_scale, part_offset, bounded=not phase.fixed)
            else:
                pair = cute.arch.fma_packed_f32x2(pair, (scale, scale), (offset, offset))
                pair = tuple(cute.math.exp2(x, fastmath=True) for x in pair)
            scores[j], scores[j + 1] = pair
            if j % CHUNK == CHUNK - 2:
                self._store_p(s, scores, j - j % CHUNK)
        cute.arch.fence_view_async_tmem_store()

    def _store_p(self, s, scores, begin):
        """Round a chunk of exponentials to 16 bit and start its store over S."""
        p = cute.make_rmem_tensor(cute.make_layout(CHUNK), element(self.config))
        chunk = cute.make_tensor(scores.iterator + begin, cute.make_layout(CHUNK))
        p.store(chunk.load().to(element(self.config)))
        column = self.tmem.p(0) - self.tmem.s(0) + begin // 2
        copy, tStP = tmem_store(s, column, CHUNK // 2, self.thread)
        cute.copy(copy, registers_at(cute.recast_tensor(p, Float32), 0, CHUNK // 2), tStP)

    def add_sum(self, scores, total, factor):
        """The sum, shrunk by the factor, plus that of this block's exponentials, in four chains of pairs."""
        pairs = [(scores[j], scores[j + 1]) for j in range(0, self.config.tile_n, 2)]
        chains = pairs[:4]
        for i, pair in enumerate(pairs[4:]):
            chains[i % 4] = cute.arch.add_packed_f32x2(chains[i % 4], pair)
        a = cute.arch.add_packed_f32x2(chains[0], chains[1])
        b = cute.arch.add_packed_f32x2(chains[2], chains[3])
        a = cute.arch.add_packed_f32x2(a, b)
        # Block by block: single terms would vanish beside the total of a long row.
        return total * factor + (a[0] + a[1])

    def _ended(self, tile):
        """Place and number of this thread's row, and whether it is not in use.

        The tile is decoded anew: registers are scarce in the loop before.
        """
        index = numerics.opaque(tile.index)
        if self.config.varlen:
            tile = self.tiles.at(index, numerics.opaque(tile.within))
        else:
            tile = self.tiles.at(index)
        query = self._query(tile)
        return self.tiles.place(tile), query, query >= self.tiles.lengths(tile)[0]

    def put_inverse(self, tile, offset, total):
        """Tell correction 1 / sum, with the sink in it; 0 of a row without keys, or not in use."""
        c = self.config
        inverse, empty = cute.arch.rcp_approx(total), total == 0.0
        if c.sink or c.varlen:
            place, _, unused = self._ended(tile)
            if c.sink:
                inverse = self._with_sink(place, offset, total)[1]
            empty = empty | unused
        self.sStat[self.thread, 1, self.q_tile] = cutlass.select_(empty, Float32(0.0), inverse)

    def _with_sink(self, place, offset, total):
        """(LSE, factor of O) of a row whose denominator has exp(sink) too, however far that is from its maximum."""
        sink_log2 = self.run_time.sink[self._head(place)] * LOG2E
        new = cute.arch.fmax(-offset, sink_log2)
        shrink = cute.math.exp2(-offset - new, fastmath=True)
        total = total * shrink + cute.math.exp2(sink_log2 - new, fastmath=True)
        lse = (new + cute.math.log2(total, fastmath=True)) * LN2
        return lse, shrink * cute.arch.rcp_approx(total)

    @cute.jit
    def store_lse(self, tile, offset, total):
        """LSE = ln 2 (shift + log2 sum) to global memory; of a row without keys -inf, or its sink."""
        c, mLSE = self.config, self.run_time.lse
        place, query, unused = self._ended(tile)
        heads_per_kv = numerics.opaque(mLSE.shape[1]) // self.tiles.grid.heads_kv
        head_in_kv = place.group * c.pack + self.thread % c.pack
        lse = (cute.math.log2(total, fastmath=True) - offset) * LN2
        lse = cutlass.select_(total == 0.0, -Float32.inf, lse)
        if cutlass.const_expr(c.sink):
            lse = self._with_sink(place, offset, total)[0]
        if cutlass.const_expr(c.varlen):
            lse = cutlass.select_(unused, -Float32.inf, lse)
        exists = (query < place.stored_q) & (head_in_kv < heads_per_kv)
        if exists:
            head = place.head_kv * heads_per_kv + head_in_kv
            mLSE[place.batch_q, head, place.row_q + query] = lse
        if cutlass.const_expr(c.fixed_shift):
            trusted = total <= LARGEST_TOTAL
            if exists & (not trusted):
                self.tiles.mark(tile)


@dataclass(frozen=True)
class CorrectionOps:
    """Verbs of the ``correction`` role, for one thread and its row."""

    config: cutlass.Constexpr
    tmem: cutlass.Constexpr
    tiles: object
    pointer: object  # to tensor memory
    sStat: cute.Tensor  # (128 rows, 2 values, 2 tiles or blocks) float32
    sO: cute.Tensor  # (128, o_columns, o_slots)
    thread: object  # in the warpgroup, and row in the Q tile

    @property
    def parts(self):
        """Parts of O that are stored one by one."""
        return self.config.o_parts

    def _o(self, q_tile):
        c = self.config
        return accumulator(c, make_mma_pv(c), c.tile_dv, self.pointer + self.tmem.o(q_tile))

    def get_factor(self, buffer):
        """Factor of O since the last block."""
        return self.sStat[self.thread, 0, buffer]

    def get_inverse(self, q_tile):
        """1 / row sum; 0 of a row without keys."""
        return self.sStat[self.thread, 1, q_tile]

    @cute.jit
    def rescale_o(self, q_tile: cutlass.Constexpr, factor):
        """O *= factor; for most blocks no row of a warp has moved its shift."""
        if cute.arch.vote_any_sync(factor != 1.0):
            columns = self.config.rescaled
            for column in cutlass.range_constexpr(0, self.config.tile_dv, columns):
                load, tOtO = tmem_load(self._o(q_tile), column, columns, self.thread)
                store, target = tmem_store(self._o(q_tile), column, columns, self.thread)
                o = cute.make_rmem_tensor(cute.make_layout(((columns, 1), 1, 1)), Float32)
                cute.copy(load, tOtO, o)
                cute.arch.fence_view_async_tmem_load()
                for j in cutlass.range_constexpr(0, columns, 2):
                    pair = (o[j], o[j + 1])
                    o[j], o[j + 1] = cute.arch.mul_packed_f32x2(pair, (factor, factor))
                cute.copy(store, o, target)
            cute.arch.fence_view_async_tmem_store()

    def finish_o(self, tile, part, slot, inverse):
        """A part of O over the row sum, in 16 bit, to shared memory. Selected, not multiplied by 0, where there is no key.

        With a fixed shift O must be finite, or else the tile is worked on again: 0 times finite numbers adds up to 0.
        """
        c, zeros = self.config, (Float32(0.0), Float32(0.0))
        # Opaque: ptxas would keep the swizzled addresses of all pieces of the row in registers around the loop.
        thread = numerics.opaque(self.thread)
        empty = inverse == 0.0
        tO = self._o(0)
        tO = cute.make_tensor(tO.iterator + part * c.o_columns, tO.layout)
        for column in range(0, c.o_columns, CHUNK):
            load, tOtO = tmem_load(tO, column, CHUNK, self.thread)
            o = cute.make_rmem_tensor(cute.make_layout(((CHUNK, 1), 1, 1)), Float32)
            cute.copy(load, tOtO, o)
            cute.arch.fence_view_async_tmem_load()
            if c.fixed_shift:
                for j in range(0, CHUNK, 2):
                    pair = (o[j], o[j + 1])
                    zeros = cute.arch.fma_packed_f32x2(pair, (0.0, 0.0), zeros)
            for j in range(CHUNK):
                o[j] = cutlass.select_(empty, Float32(0.0), o[j] * inverse)
            rounded = cute.make_rmem_tensor(cute.make_layout(CHUNK), element(c))
            flat = cute.make_tensor(o.iterator, cute.make_layout(CHUNK))
            rounded.store(flat.load().to(element(c)))
            row = cute.local_tile(
                self.sO[None, None, slot.index], (1, CHUNK), (thread, column // CHUNK)
            )
            for j in range(0, CHUNK, PIECE):
                piece = cute.make_tensor(rounded.iterator + j, cute.make_layout((1, PIECE)))
                cute.autovec_copy(piece, cute.local_tile(row, (1, PIECE), (0, j // PIECE)))
        cute.arch.fence_view_async_shared()
        if c.fixed_shift:
            self._mark_unless(zeros[0] + zeros[1] == 0.0, tile)

    @cute.jit
    def _mark_unless(self, finite, tile):
        if not finite:
            self.tiles.mark(tile)


@dataclass(frozen=True)
class StoreOps:
    """Verbs of the ``store`` role."""

    config: cutlass.Constexpr
    tiles: object
    o: Operand  # ((heads per KV head, S), Dv, heads_kv, B); of packed queries a ragged view instead of B
    rank: object  # of the CTA
    sO: cute.Tensor  # (128, o_columns, o_slots)

    @property
    def parts(self):
        """Parts of O that are stored one by one."""
        return self.config.o_parts

    def store_o(self, tile, part, slot):
        """Start the store of a slot; rows past the sequence are clipped."""
        c, place = self.config, self.tiles.place(tile)
        q_tile, column = c.place_of_part(part)
        if c.cu_q:  # what comes after the sequence is not written
            stored = place.stored_q
            mO = self.o.tensor[None, None, place.head_kv, place.row_q + stored]
            mO = cute.domain_offset(((0, cute.size(mO, mode=[0, 1]) - stored), 0), mO)
        else:
            mO = self.o.tensor[None, None, place.head_kv, place.batch_q]
        rows = tile.m_block * (c.q_tiles * c.ctas) + c.part(q_tile, self.rank)
        at = ((place.group, rows), column)
        gO = cute.local_tile(mO, ((c.pack, MMA_ROWS // c.pack), c.o_columns), at)
        tOsO, tOgO = cpasync.tma_partition(
            self.o.atom, 0, cute.make_layout(1),
            cute.group_modes(self.sO, 0, 2), cute.group_modes(gO, 0, 2),
        )  # fmt: skip
        cute.copy(self.o.atom, tOsO[None, slot.index], tOgO)
        cute.arch.cp_async_bulk_commit_group()

    def wait_store(self):
        """Wait until the stores have read their shared memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
