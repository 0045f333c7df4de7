"""Verbs of the Hopper forward's schedule, in CuTe: TMA loads, WGMMA, online softmax, store.

Partition names: ``tSrQ`` is "partitioned for S, registers (descriptors), Q". Accumulators of one warpgroup are
``((2, 2, N / 8), 1, 1)``: pairs of columns, rows r and r + 8, groups of eight columns.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from flash4.common import mods, numerics
from flash4.common.geometry import imax, imin
from flash4.common.mods import SeqlenInfo
from flash4.common.numerics import LN2, LOG2E
from flash4.common.tma_views import WRAP
from flash4.sm90.fwd_cap import PART_COLUMNS, cap_scores, near_exponentials, replace_scores
from flash4.sm90.fwd_config import MMA_ROWS, PASSES, TRUSTED_LOG2, ForwardConfig
from flash4.sm90.fwd_ends import RingOperand, slot_steps
from flash4.sm90.fwd_rows import (
    EndedRow,
    RowState,
    all_finite,
    clear_row,
    finish_row,
    move_shifts,
    outgrown,
    rows_of,
    scale_rows,
    with_sink,
)

# Named barriers; 0 is __syncthreads.
BARRIER_TURN = 1  # one per MMA warpgroup: 1..4
BARRIER_STORE = 5  # one per MMA warpgroup: 5..8
BARRIER_Q_READ = 9  # all MMA warpgroups have read Q


def element(config):
    """16-bit element type of a config."""
    return BFloat16 if config.bf16 else Float16


@dataclass(frozen=True)
class Operand:
    """A global tensor behind a TMA descriptor: the copy atom and the tensor of its coordinates."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


@dataclass(frozen=True)
class Turn:
    """MMA warpgroups take turns at issuing: warpgroup w waits on its named barrier until w - 1 passes on."""

    is_last: cutlass.Boolean  # of the warpgroups
    own: Int32  # this warpgroup's barrier
    following: Int32  # the next one's
    enabled: bool

    @staticmethod
    def of(warpgroup, count, enabled):
        """Turns of ``count`` warpgroups; opaque numbers, or they would be worked out in every round."""
        own = BARRIER_TURN + warpgroup
        following = cutlass.select_(warpgroup == count - 1, Int32(BARRIER_TURN), own + 1)
        return Turn(
            warpgroup == count - 1,
            numerics.opaque(own),
            numerics.opaque(following),
            enabled and count > 1,
        )

    def open(self):
        """Let the first warpgroup go."""
        if self.enabled:
            self._open()

    @cute.jit
    def _open(self):
        if self.is_last:
            cute.arch.barrier_arrive(barrier_id=BARRIER_TURN, number_of_threads=256)

    def wait(self):
        """Wait for this warpgroup's turn."""
        if self.enabled:
            cute.arch.barrier(barrier_id=self.own, number_of_threads=256)

    def pass_on(self):
        """Give the turn to the next warpgroup."""
        if self.enabled:
            cute.arch.barrier_arrive(barrier_id=self.following, number_of_threads=256)


@dataclass(frozen=True)
class LoadOps:
    """Verbs of the ``load`` role."""

    config: ForwardConfig
    tiles: object
    q: Operand  # ((heads per KV head, S), D, heads_kv, B); of packed queries a ragged view
    k: Operand  # (S, D, heads_kv, B)
    v: Operand  # (Dv, S, heads_kv, B); a ragged view if the config says so
    heads_per_kv: Int32
    v_rows_of_entry: object  # of the ragged view, or None
    sQ: cute.Tensor  # (tile_m, tile_d, q_stages)
    sK: cute.Tensor  # (tile_n, tile_d, stages)
    sV: cute.Tensor  # (tile_dv, tile_n, stages)
    rank: object  # of this CTA among those that share tiles

    def load_q(self, tile, slot):
        """Fill a Q slot with the tile's queries; rows past the sequence become zero."""
        c = self.config
        tiler = ((c.pack, c.cta_rows // c.pack), c.tile_d)
        place, group = self.tiles.place(tile), None
        if c.cu_q:  # a warp's rows decide together when shifts move: not for the next sequence's
            seqlen = self.tiles.lengths(tile)[0]
            mQ = self.q.tensor[None, None, WRAP, place.row_q + seqlen]
            head = place.head_kv * self.heads_per_kv + place.group * c.pack
            mQ, group = cute.domain_offset(((head, WRAP - seqlen), 0), mQ), 0
        else:
            mQ, group = self.q.tensor[None, None, place.head_kv, place.batch_q], place.group
        gQ = cute.local_tile(mQ, tiler, ((group, tile.m_block * c.cluster + self.rank), 0))
        tma_load(self.q.atom, gQ, self.sQ, slot)

    def load_k(self, tile, n_block, slot):
        """Fill a K slot with block ``n_block`` of those that the tile visits."""
        c, place = self.config, self.tiles.place(tile)
        mK = self.k.tensor[None, None, place.head_kv, place.batch_k]
        if c.cu_k:  # keys after the sequence are masked
            mK = cute.domain_offset((place.row_k, 0), mK)
        gK = cute.local_tile(mK, (c.tile_n, c.tile_d), (tile.first_block + n_block, 0))
        tma_load(self.k.atom, gK, self.sK, slot, (self.rank, c.cluster))

    def load_v(self, tile, n_block, slot):
        """Fill a V slot with block ``n_block`` of those that the tile visits."""
        c, place = self.config, self.tiles.place(tile)
        if c.v_is_ragged:  # values after the sequence become zero: 0 * NaN would be NaN
            seqlen = self.tiles.lengths(tile)[1]
            end = place.batch_k * self.v_rows_of_entry + place.row_k + seqlen
            mV = self.v.tensor[None, None, place.head_kv, WRAP, end]
            mV = cute.domain_offset((0, WRAP - seqlen), mV)
        else:
            mV = self.v.tensor[None, None, place.head_kv, place.batch_k]
        gV = cute.local_tile(mV, (c.tile_dv, c.tile_n), (0, tile.first_block + n_block))
        tma_load(self.v.atom, gV, self.sV, slot, (self.rank, c.cluster))


def meet(ctas):
    """Wait for the roles of all CTAs of a cluster: one must have set up its barriers, or may still be written to."""
    if ctas > 1:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


def tma_load(atom, gX, sX, slot, share=(0, 1)):
    """Start the bulk copy of one tile into ``slot``; its barrier completes when the bytes have landed.

    ``share`` is (rank, CTAs): each copies its part of the tile, to all of them.
    """
    rank, ctas = share
    tXsX, tXgX = cpasync.tma_partition(
        atom, rank, cute.make_layout(ctas), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )
    mask = {"mcast_mask": cutlass.Int16((1 << ctas) - 1)} if ctas > 1 else {}
    cute.copy(atom, tXgX, tXsX[None, slot.index], tma_bar_ptr=slot.barrier, **mask)


def steps_of(operand):
    """One operand for each K step of a WGMMA: a list as it is, a tensor by its last mode."""
    if isinstance(operand, list | tuple):
        return operand
    return [operand[None, None, k] for k in range(cute.size(operand.shape[2]))]


def issue_mma(tiled_mma, acc, a, b, accumulate):
    """Issue acc (+)= a b as one group of WGMMAs, asynchronously; a and b are lists of their operands, or tensors.

    The atom is made afresh: setting ACCUMULATE rebinds its value inside the current region only.
    """
    warpgroup.fence()
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for a_step, b_step in zip(steps_of(a), steps_of(b), strict=True):
        cute.gemm(atom, acc, a_step, b_step, acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


@dataclass(frozen=True)
class Flat:
    """Addend of a row's scores: the negative of its shift."""

    shift: object

    def at(self, j):
        """Addend of this thread's score ``j``."""
        return -self.shift


@dataclass(frozen=True)
class Slope:
    """Addend that grows with the column, all keys being before the query."""

    slope: Float32
    last: int
    at_last: Float32

    def at(self, j):
        """Addend of this thread's score ``j``; at the key next to the query no digits are lost."""
        back = self.last - (8 * (j // 2) + j % 2)
        return self.at_last - self.slope * Float32(back) if back else self.at_last


@dataclass(frozen=True)
class Roof:
    """Addend that falls on both sides of the query's position."""

    slope: Float32
    distance: Float32  # of the query's position from this thread's first column
    shift: object

    def at(self, j):
        """Addend of this thread's score ``j``."""
        column = Float32(8 * (j // 2) + j % 2)
        return -self.slope * cute.math.absf(self.distance - column) - self.shift


@dataclass(frozen=True)
class MmaOps:
    """Verbs of the ``mma`` role; every tensor is this warpgroup's or this thread's part."""

    config: ForwardConfig
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    tSrQ: cute.Tensor  # (MMA, MMA_M, MMA_D, q_stages)
    tSrK: RingOperand  # (MMA, MMA_N, MMA_D, stages)
    tOrV: RingOperand  # (MMA, MMA_DV, MMA_N, stages)
    tOrO: cute.Tensor  # ((2, 2, tile_dv / 8), 1, 1), float32
    tOrP: cute.Tensor  # ((2, 2, 2), 1, tile_n / 16), 16 bit
    state: RowState
    tiles: object  # TileSchedule, or ToldTiles
    worker_tiles: object  # Tiles, or ToldTiles
    cap: object  # Cap, or None
    scale: Float32  # factor of a score without a cap, signed; in log2 units unless the config is natural
    scale_log2: Float32  # factor of what softmax takes
    inv_scale_log2: Float32
    thread: Int32  # in the warpgroup
    warpgroup: Int32  # among the MMA warpgroups
    o: Operand  # ((heads per KV head, S), Dv, heads_kv, B); of packed queries a ragged view instead of B
    sO: cute.Tensor  # (64, tile_dv / o_parts) of this warpgroup
    mLSE: cute.Tensor  # (B, H, S)
    mSink: object  # (H,) float32, or None
    mSlopes: object  # (B, H) float32, or None
    slopes: object  # of this thread's two rows, in units of changed scores, or None
    positions: object  # of these rows, as ``_position`` has them, or None
    aux: object  # tuple of tensors that mods read, or None
    mRedone: object  # (1,) int32, tiles that were worked on again, or None

    @property
    def o_borrows_q(self):
        """Whether O is staged in Q's memory."""
        return self.config.o_borrows_q

    def unseen_blocks(self, tile):
        """Blocks, counted from the tile's last, that this warpgroup skips."""
        return self.config.unseen_blocks(tile, self.warpgroup, self.tiles)

    def passed_blocks(self, tile):
        """Blocks, counted from the tile's first, that this warpgroup skips."""
        return self.config.passed_blocks(tile, self.warpgroup, self.tiles)

    def phases(self, tile):
        """Blocks after this warpgroup's first, which is always masked; see ``ForwardConfig.phases``."""
        if self.config.near_first:
            exact = cutlass.select_(self.cap.trusts_near, Int32(0), Int32(1))
            tile = replace(tile, again=imax(tile.again, exact))
        if self.config.foresees:  # asked before any of the warpgroup notes anything about this tile
            guess = self.worker_tiles.after_outgrown(tile, self.local_warpgroup)
            tile = replace(tile, again=imax(tile.again, guess))
        return tuple(
            replace(phase, begin=numerics.opaque(phase.begin), end=numerics.opaque(phase.end))
            for phase in self.config.phases(tile, self.warpgroup, self.tiles)
        )

    @property
    def local_warpgroup(self):
        """This warpgroup among those of its CTA."""
        return self.warpgroup % self.config.mma_warpgroups

    def begin(self, tile):
        """O = 0, shift = -inf, l = 0."""
        self.tOrO.fill(0.0)
        self.state.shift_log2.fill(-Float32.inf)
        self.state.total.fill(0.0)
        if self.config.alibi:
            place = self.tiles.place(tile)
            for r in range(2):
                slope = self.mSlopes[place.batch, self._head(place, r)]
                self.slopes[r] = slope if self.config.natural else slope * LOG2E
                if self.config.fixed_shift:  # opaque, or it would be computed for every block
                    self.positions[r] = numerics.opaque(self._position(tile, r))

    def _position(self, tile, r):
        """Position of this thread's row ``r`` among the keys, less the thread's first column in a block."""
        seqlen_q, seqlen_k = self.tiles.lengths(tile)
        query = tile.m_block * self.config.tile_q + self._query_row(r) // self.config.pack
        return query + seqlen_k - seqlen_q - 2 * (self.thread % 4)

    def _head(self, place, r):
        """Query head of this thread's row ``r``; the last one for packed rows that have none."""
        heads, pack = self.mLSE.shape[1], self.config.pack
        head_in_kv = place.group * pack + self._query_row(r) % pack
        return cutlass.min(
            place.head_kv * (heads // self.tiles.grid.heads_kv) + head_in_kv, heads - 1
        )

    def qk(self, q_slot, k_slot):
        """Issue S = Q K^T into a fresh accumulator.

        Fresh, because a WGMMA that ignores its accumulator still reads it in the compiler's eyes: a
        shared one would stay live around the loop.
        """
        S = cute.make_rmem_tensor(((2, 2, self.config.tile_n // 8), 1, 1), Float32)
        for i in range(cute.size(S)):
            S[i] = numerics.undefined()
        c = self.config
        keep = c.tile_d <= 192 and not (c.left and c.mma_warpgroups > 2)
        # With one stage a constant spares address arithmetic.
        tSrQ = slot_steps(self.tSrQ, q_slot.index if c.q_stages > 1 else 0, keep)
        issue_mma(self.mma_qk, S, tSrQ, self.tSrK.steps(k_slot), False)
        return S

    def pv(self, v_slot):
        """Issue O += P V."""
        issue_mma(self.mma_pv, self.tOrO, self.tOrP, self.tOrV.steps(v_slot), True)

    def wait_mma(self, pending):
        """Wait until at most ``pending`` groups of MMAs are in flight."""
        warpgroup.wait_group(pending)

    def _query_row(self, r):
        """Row in the tile of this thread's row ``r``."""
        return self.warpgroup * MMA_ROWS + self.thread // 32 * 16 + self.thread % 32 // 4 + 8 * r

    def _mask(self, tile, n_block, S, left=True, right=True):
        """Set scores to -inf: at the left before the row's first visible key, at the right past its last."""
        c, blocks, lengths = self.config, self.tiles.blocks, self.tiles.lengths(tile)
        first_column = (tile.first_block + n_block) * c.tile_n + 2 * (self.thread % 4)
        for r in range(2):  # columns of this thread: 8 j + {0, 1}
            query = tile.m_block * c.tile_q + self._query_row(r) // c.pack
            visible = blocks.key_end(query, *lengths) - first_column
            hidden = blocks.key_begin(query, *lengths) - first_column
            for j in range(c.tile_n // 4):
                column = Int32(8 * (j // 2) + j % 2)
                seen = column < visible if right else column >= hidden
                if left and right and c.left:
                    seen = seen & (column >= hidden)
                S[r, j] = cutlass.select_(seen, S[r, j], -Float32.inf)

    @cute.jit
    def _mask_left(self, tile, n_block, S: cute.Tensor):
        """Mask the left side only if it cuts the block: of a tile's first, small windows do. Saves 64 instructions."""
        c, blocks = self.config, self.tiles.blocks
        last_query = c.first_query(tile, self.warpgroup) + MMA_ROWS // c.pack - 1
        begin = blocks.key_begin(last_query, *self.tiles.lengths(tile))
        if begin > (tile.first_block + n_block) * c.tile_n:
            self._mask(tile, n_block, S, right=False)

    def _prepare(self, tile, n_block, S, masked, first=False, left_only=False):
        """Negate for a negative scale, or change scores, then mask."""
        c = self.config
        if c.changes_scores:
            ways = c.ways_to_cap(masked, first)
            self._change(S, self._addends(tile, n_block, masked, (0.0, 0.0)), ways)
        elif c.negate:
            for i in range(cute.size(S)):
                S[i] = -S[i]
        if c.score_mod or c.mask_mod:
            self._apply_mods(tile, n_block, S)
        if masked and (c.causal or c.left or c.right):
            apart = first and c.left and c.skip  # without skip a register would spill for it
            self._mask(tile, n_block, S, left=not apart, right=not left_only)
            if apart:
                self._mask_left(tile, n_block, S)
        elif masked:
            self._mask_tail(tile, n_block, S)

    def _addends(self, tile, n_block, masked, shifts):
        """What scores of this thread's two rows get added: ALiBi's -slope |p - j| and the negative of a shift.

        p is the query's position among the keys, j that of the key.
        """
        c, addends = self.config, []
        if not c.alibi:
            return tuple(Flat(shift) for shift in shifts)
        for r in range(2):
            position = self.positions[r] if c.fixed_shift else self._position(tile, r)
            distance = position - (tile.first_block + n_block) * c.tile_n
            if c.causal and not masked:  # p >= j, of the thread's last column too
                last = 8 * (c.tile_n // 8 - 1) + 1
                at_last = -self.slopes[r] * Float32(distance - last) - shifts[r]
                addends.append(Slope(self.slopes[r], last, at_last))
            else:
                addends.append(Roof(self.slopes[r], Float32(distance), shifts[r]))
        return tuple(addends)

    def _change(self, S, addends, ways):
        """S = scale S, or its cap, plus the addends; in log2 units unless the config is natural."""
        if not self.config.softcap:
            replace_scores(S, lambda s, addend: s * self.scale + addend, addends)
        elif ways == 1:
            replace_scores(S, self.cap.of_any, addends)
        else:
            cap_scores(S, self.cap, addends, ways)

    def _apply_mods(self, tile, n_block, S):
        """S = score_mod(S), and -inf where mask_mod hides a key; see ``flash_attn_func`` for what they are given."""
        c, place = self.config, self.tiles.place(tile)
        score_mod, mask_mod = mods.function(c.score_mod), mods.function(c.mask_mod)
        seqlen_q, seqlen_k = self.tiles.lengths(tile)
        info = SeqlenInfo(seqlen_q, seqlen_k, Int32(place.row_q), Int32(place.row_k))
        first_key = (tile.first_block + n_block) * c.tile_n + 2 * (self.thread % 4)
        for r in range(2):
            query = tile.m_block * c.tile_q + self._query_row(r) // c.pack
            query = imax(imin(query, seqlen_q - 1), 0)  # a mod may read a tensor there
            for j in range(c.tile_n // 4):
                key = imax(imin(first_key + (8 * (j // 2) + j % 2), seqlen_k - 1), 0)
                where = (place.batch, self._head(place, r), query, key, info, self.aux)
                if score_mod is not None:
                    S[r, j] = Float32(score_mod(S[r, j], *where))
                if mask_mod is not None:
                    keep = cutlass.Boolean(mask_mod(*where))
                    S[r, j] = cutlass.select_(keep, S[r, j], -Float32.inf)

    @cute.jit
    def _mask_tail(self, tile, n_block, S: cute.Tensor):
        """Mask only if the block reaches past the keys: without a causal mask most last blocks do not."""
        if (n_block + 1) * self.config.tile_n > self.tiles.lengths(tile)[1]:
            self._mask(tile, n_block, S)

    def softmax_first(self, tile, n_block, s):
        """As ``softmax``, for the first block of a tile."""
        S = rows_of(s)
        self._prepare(tile, n_block, S, True, first=True)
        floor = None
        if self.config.near_first:  # rows far below it are worked on again, without
            floor = cutlass.select_(tile.again == 0, self.cap.floor, -Float32.inf)
        move_shifts(S, self.state, self._scales_log2, self._growth_log2(tile), floor)
        self._exponentials(S, True)

    def softmax(self, tile, n_block, s, phase):
        """Move the shift if it must and may; P = exp2(scale_log2 S - shift), l += rowsum P."""
        S, c, shifts = rows_of(s), self.config, self.state.shift_log2
        if phase.fixed and not phase.masked and c.changes_scores:  # with the shift, which is known
            if c.near_first:
                self._near_block(S)
                return
            addends = self._addends(tile, n_block, False, (shifts[0], shifts[1]))
            self._change(S, addends, c.ways_to_cap(False))
            self._exponentials(S, False, shifted=True)
            return
        self._prepare(tile, n_block, S, phase.masked, left_only=phase.left_only)
        if not phase.fixed:
            self.state.correction.fill(1.0)
            if c.near_first:  # worked out anew: few blocks come here, and the others lack registers
                for r in range(2):
                    self.state.limit[r] = (
                        shifts[r] + self._growth_log2(tile)
                    ) * self.inv_scale_log2
            self._move_outgrown(tile, S, phase.unfixed)
        self._exponentials(S, phase.masked)

    def _near_block(self, S):
        """P in place of S, and its row sums, part by part: each is judged for itself."""
        c, state, columns = self.config, self.state, self.config.tile_n // 4
        shifts = (state.shift_log2[0], state.shift_log2[1])
        for begin in range(0, columns, PART_COLUMNS):
            size = min(PART_COLUMNS, columns - begin)
            P = rows_of(cute.make_rmem_tensor(2 * size, Float32))
            sums = cute.make_rmem_tensor(2, Float32)
            settle_at = 0 if begin else 2 * columns * c.settle // 64
            near_exponentials(S, P, sums, self.cap, begin, shifts, settle_at)
            for r in range(2):
                state.total[r] = state.total[r] + sums[r]
                for j in range(size):
                    S[r, begin + j] = P[r, j]

    @cute.jit
    def _move_outgrown(self, tile, S: cute.Tensor, unfixed: cutlass.Constexpr):
        state, scales_log2 = self.state, self._scales_log2
        if cute.arch.vote_any_sync(outgrown(S, state)):
            move_shifts(S, state, scales_log2, self._growth_log2(tile))
            if cutlass.const_expr(unfixed):
                self._note_outgrown(tile)

    def _is_unlooked(self, tile):
        """Whether the shift of a tile that is through was fixed; where another warp has marked it, False will do too."""
        unlooked = tile.again == 0
        if self.config.near_first:
            unlooked = unlooked & self.cap.trusts_near
        if self.config.foresees:
            noted = self.worker_tiles.noted(self.local_warpgroup)
            unlooked = unlooked & (noted < self.worker_tiles.wave(tile))
        return unlooked

    def _note_outgrown(self, tile):
        if self.config.foresees:
            self.worker_tiles.note_outgrown(tile, self.local_warpgroup)

    def _growth_log2(self, tile):
        return Float32(Int32(self.config.growth_log2(tile)))

    @property
    def _scales_log2(self):
        return self.scale_log2, self.inv_scale_log2

    def _exponentials(self, S, masked, shifted=False):
        """P in place of S, which may be shifted, and its row sums in four chains; settle after a set number of them."""
        state, columns = self.state, self.config.tile_n // 4
        settle_at = 2 * columns * self.config.settle // 64
        chains = []
        for r in range(2):
            shift = state.shift_log2[r]
            if masked or self.config.may_hide_any:  # a row without a key yet: exp2(-inf - 0) = 0
                shift = cutlass.select_(shift == -Float32.inf, Float32(0.0), shift)
            chains.append([None] * 4)
            for j in range(columns):
                log2_p = S[r, j] if shifted else S[r, j] * self.scale_log2 - shift
                p = cute.math.exp2(log2_p, fastmath=True)
                S[r, j] = p
                chain = chains[r][j % 4]
                chains[r][j % 4] = p if chain is None else chain + p
                if settle_at and r * columns + j + 1 == settle_at:
                    so_far = [numerics.sum_of(chain) for chain in chains]
                    numerics.settle(so_far[0] if r == 0 else so_far[0] + so_far[1])
        for r in range(2):
            # Block by block: single terms would vanish beside the total of a long row.
            state.total[r] = state.total[r] + numerics.sum_of(chains[r])

    def convert_p(self, s):
        """Round P to 16 bit into the A operand of P V; the element order of S is that of the operand."""
        P = cute.make_tensor(self.tOrP.iterator, s.layout)
        P.store(s.load().to(element(self.config)))

    def rescale_o(self, phase):
        """Let O follow a moved shift; for most blocks none has moved."""
        if not phase.fixed:
            self._rescale_o()

    @cute.jit
    def _rescale_o(self):
        O, correction = rows_of(self.tOrO), self.state.correction
        if cute.arch.vote_any_sync((correction[0] != 1.0) | (correction[1] != 1.0)):
            scale_rows(O, correction)

    def store(self, tile):
        """O / l and LSE = ln 2 (shift + log2 l) to global memory; a row without keys gives 0, and -inf or its sink."""
        place = self.tiles.place(tile)
        self._finish_rows(tile, place)
        self._store_o(tile, place)
        if self.config.counts:
            self._count(tile)

    @cute.jit
    def _count(self, tile):
        """Count a tile that is worked on again, once for all its warpgroups."""
        if (tile.again > 0) & (self.warpgroup == 0) & (self.thread == 0):
            cute.arch.atomic_add(self.mRedone.iterator, Int32(1))

    def _finish_rows(self, tile, place):
        """O / l and LSE of this thread's two rows; their sums first, so that what one waits for is done for both."""
        parts = [self.state.total[r] for r in range(2)]
        totals = [cute.arch.warp_reduction_sum(part, threads_in_group=4) for part in parts]
        rows = tuple(self._row(tile, place, r, total) for r, total in enumerate(totals))
        self._write_rows(tile, place, rows)

    def _row(self, tile, place, r, total):
        """What is known of this thread's row ``r`` at the end of a tile; O is as P V left it."""
        c, shift_log2, mLSE = self.config, self.state.shift_log2[r], self.mLSE
        heads_per_kv = mLSE.shape[1] // self.tiles.grid.heads_kv
        empty = total == 0.0
        row = self._query_row(r)
        query = tile.m_block * c.tile_q + row // c.pack
        head_in_kv = place.group * c.pack + row % c.pack
        lse = (shift_log2 + cute.math.log2(total, fastmath=True)) * LN2
        lse = cutlass.select_(empty, -Float32.inf, lse)
        inverse = cute.arch.rcp_approx(total)
        if c.sink:
            lse, inverse = with_sink(shift_log2, total, self.mSink[self._head(place, r)])
        exists = (query < place.stored_q) & (head_in_kv < heads_per_kv)
        judged = exists
        # Rows in memory may be of no sequence, or not in use.
        if c.varlen:
            unused = query >= self.tiles.lengths(tile)[0]
            empty = empty | unused
            lse = cutlass.select_(unused, -Float32.inf, lse)
            judged = exists & (query < self.tiles.lengths(tile)[0])
        trusted = finite = True
        if c.fixed_shift:
            finite = all_finite(rows_of(self.tOrO), r)
            trusted = total <= 2.0**TRUSTED_LOG2
            if c.near_first:
                trusted = trusted & (empty | self._near_is_right(tile, r, total))
        head = place.head_kv * heads_per_kv + head_in_kv
        return EndedRow(empty, inverse, lse, head, query, exists, judged, trusted, finite)

    @cute.jit
    def _write_rows(self, tile, place, rows):
        O, mLSE = rows_of(self.tOrO), self.mLSE
        any_empty = cute.arch.vote_any_sync(rows[0].empty | rows[1].empty)
        if any_empty:  # few are; O may hold 0 * NaN there
            for r in cutlass.range_constexpr(2):
                clear_row(O, r, rows[r].empty)
        for r in cutlass.range_constexpr(2):
            ended = rows[r]
            finish_row(O, r, cutlass.select_(ended.empty, Float32(0.0), ended.inverse))
            if (self.thread % 4 == 0) & ended.exists:
                mLSE[place.batch_q, ended.head, place.row_q + ended.query] = ended.lse
        if cutlass.const_expr(self.config.fixed_shift):
            fine = [(x.trusted & x.finite) | (not x.judged) for x in rows]
            if not (fine[0] & fine[1]):
                for r in cutlass.range_constexpr(2):
                    self._mark_row(tile, rows[r])

    @cute.jit
    def _mark_row(self, tile, ended):
        # What is not finite for a shift that was fixed need not be once it moves, in pass 1; and if another warp's
        # note hides that it was fixed.
        finite = ended.finite
        unlooked = self._is_unlooked(tile) | ((not finite) & (tile.again == 0))
        if ended.judged & (not ended.trusted) & unlooked:
            self.worker_tiles.mark(tile, 1)
            self._note_outgrown(tile)
        elif ended.judged & (not finite) & (tile.again < PASSES):
            self.worker_tiles.mark(tile, PASSES)

    def _near_is_right(self, tile, r, total):
        """Whether what the near polynomial made of scores far below zero is nothing beside the row's sum."""
        mean_log2 = self.state.shift_log2[r] + cute.math.log2(total, fastmath=True)
        blocks = tile.n_blocks - 1 - self.unseen_blocks(tile)  # none: log2 gives -inf
        keys = Float32(blocks * self.config.tile_n)
        return mean_log2 - cute.math.log2(keys, fastmath=True) >= self.cap.lowest

    @cute.jit
    def _store_o(self, tile, place):
        """Registers -> shared memory -> TMA, this warpgroup's 64 rows only; rows past the sequence are clipped."""
        out = cute.make_rmem_tensor(self.tOrO.layout, element(self.config))
        out.store(self.tOrO.load().to(element(self.config)))
        for part in cutlass.range_constexpr(self.config.o_parts):
            self._store_part(tile, place, out, part)

    @cute.jit
    def _store_part(self, tile, place, out, part: cutlass.Constexpr):
        c = self.config
        columns = c.tile_dv // c.o_parts
        layout = cute.make_layout(((2, 2, columns // 8), 1, 1))
        values = cute.make_tensor(out.iterator + part * cute.size(layout), layout)
        r2s = self._store_copy(columns).get_slice(self.thread)
        storing_warp = cute.arch.make_warp_uniform(self.thread // 32) == 0
        barrier_id = BARRIER_STORE + self.local_warpgroup
        if cutlass.const_expr(c.o_borrows_q):
            # Other warpgroups may still read Q where this one is about to write O.
            cute.arch.barrier(barrier_id=BARRIER_Q_READ, number_of_threads=128 * c.mma_warpgroups)
        else:
            if storing_warp:
                cute.arch.cp_async_bulk_wait_group(0, read=True)  # the last store has read sO
            cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)
        cute.copy(r2s, r2s.retile(values), r2s.partition_D(self.sO))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=128)
        if storing_warp:
            rows = ((c.pack, MMA_ROWS // c.pack), columns)
            at = ((place.group, tile.m_block * c.tile_warpgroups + self.warpgroup), part)
            if cutlass.const_expr(c.cu_q):  # what comes after the sequence is not written
                stored = place.stored_q
                mO = self.o.tensor[None, None, place.head_kv, place.row_q + stored]
                mO = cute.domain_offset(((0, cute.size(mO, mode=[0, 1]) - stored), 0), mO)
            else:
                mO = self.o.tensor[None, None, place.head_kv, place.batch_q]
            gO = cute.local_tile(mO, rows, at)
            tOsO, tOgO = cpasync.tma_partition(
                self.o.atom,
                0,
                cute.make_layout(1),
                cute.group_modes(self.sO, 0, 2),
                cute.group_modes(gO, 0, 2),
            )
            cute.copy(self.o.atom, tOsO, tOgO)
            cute.arch.cp_async_bulk_commit_group()

    def _store_copy(self, columns):
        """Tiled copy of (64, columns) from an accumulator's registers to shared memory."""
        dtype = element(self.config)
        one_warpgroup = hopper.make_trivial_tiled_mma(
            dtype, dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1),
            (MMA_ROWS, columns), warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        matrices = 4 if columns % 16 == 0 else 2
        store_atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, matrices), dtype)
        return cute.make_tiled_copy_C(store_atom, one_warpgroup)

    def wait_store(self):
        """Wait until this warp's stores have read their shared memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
