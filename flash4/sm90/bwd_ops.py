"""Verbs of the Hopper backward's schedule, in CuTe: TMA loads, WGMMA, P and dS, additions to dQ, store.

Names as in ``fwd_ops``. Rows of S and dP are keys, so that P and dS are operands of dV and dK as they are: registers.
An accumulator's columns are queries: ``8 j + 2 (t % 4) + {0, 1}`` for thread t.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from flash4.common import mods, numerics
from flash4.common.dsl import inline_ptx
from flash4.common.geometry import choose, imin
from flash4.common.graph import WARP, WARPGROUP
from flash4.common.mod_places import ModPlace, Pair
from flash4.common.numerics import LOG2E
from flash4.common.tma_views import ragged_rows
from flash4.sm90.bwd_config import STAGES, BackwardConfig
from flash4.sm90.fwd_config import MMA_ROWS
from flash4.sm90.fwd_ops import Operand, element, issue_mma, tma_load
from flash4.sm90.fwd_rows import rows_of

# Named barriers; 0 is __syncthreads.
BARRIER_EXCHANGE = 1  # both MMA warpgroups
BARRIER_DQ_FULL = 2  # one per MMA warpgroup: 2, 3
BARRIER_DQ_EMPTY = 4  # one per MMA warpgroup: 4, 5
BARRIER_STORE = 6  # one per MMA warpgroup: 6, 7
BARRIER_DS_EMPTY = (
    8  # two per MMA warpgroup, by turns, for its dS that the other one has read: 8, 9 and 10, 11
)
BARRIER_TURN = 12  # one per MMA warpgroup: 12, 13
EXCHANGE_THREADS = 2 * WARPGROUP
PARTS_OF_CAP = (
    2  # of a step, each of whose scores are near zero or not: fewer registers than with one
)
BOX_THREADS = WARPGROUP + WARP  # a warpgroup that fills the box of dQ, and the warp that empties it


def copy_row(destination, source, nbytes: int, barrier):
    """Bulk copy of ``nbytes`` from global to shared memory, which count at ``barrier``; the whole warp calls it."""
    inline_ptx(
        None,
        "r,l,r,r",
        "{ .reg .pred p; elect.sync _|p, 0xffffffff; @p cp.async.bulk.shared::cluster.global"
        ".mbarrier::complete_tx::bytes [$0], [$1], $2, [$3]; }",
        Int32(destination.toint()),
        Int64(source.toint()),
        Int32(nbytes),
        Int32(barrier.toint()),
        side_effects=True,
    )


def add_floats(destination, source, nbytes: int):
    """Bulk addition of float32 from shared to global memory; the whole warp calls it."""
    inline_ptx(
        None,
        "l,r,r",
        "{ .reg .pred p; elect.sync _|p, 0xffffffff; @p cp.reduce.async.bulk.global.shared::cta"
        ".bulk_group.add.f32 [$0], [$1], $2; }",
        Int64(destination.toint()),
        Int32(source.toint()),
        Int32(nbytes),
        side_effects=True,
    )


def put_or_add_floats(destination, source, nbytes: int, puts):
    """Bulk store if ``puts`` is not 0, else addition, of float32; the whole warp calls it."""
    inline_ptx(
        None,
        "l,r,r,r",
        "{ .reg .pred p, q, s, a; elect.sync _|p, 0xffffffff; setp.ne.s32 q, $3, 0; and.pred s, p, q; not.pred q, q; "
        "and.pred a, p, q; @s cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2; "
        "@a cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2; }",
        Int64(destination.toint()),
        Int32(source.toint()),
        Int32(nbytes),
        Int32(puts),
        side_effects=True,
    )


def wait_for_count(address, count):
    """Wait until the number at ``address`` in global memory is at least ``count``; the whole warp calls it."""
    inline_ptx(
        None,
        "l,r,~{memory}",
        "{ .reg .pred p; .reg .s32 v; AGAIN: ld.acquire.gpu.global.s32 v, [$0]; "
        "setp.lt.s32 p, v, $1; @p bra AGAIN; }",
        Int64(address.toint()),
        Int32(count),
        side_effects=True,
    )


def add_to_count(address, amount):
    """Add to the number at ``address`` in global memory, behind what the elected thread did; the whole warp calls it."""
    inline_ptx(
        None,
        "l,r,~{memory}",
        "{ .reg .pred p; elect.sync _|p, 0xffffffff; @p red.release.gpu.global.add.s32 [$0], $1; }",
        Int64(address.toint()),
        Int32(amount),
        side_effects=True,
    )


class Meeting:
    """Where both MMA warpgroups meet."""

    def sync(self):
        """Wait for the other warpgroup."""
        cute.arch.barrier(barrier_id=BARRIER_EXCHANGE, number_of_threads=EXCHANGE_THREADS)


@dataclass(frozen=True)
class Exchange(Meeting):
    """The same, and how they tell each other how far they are with the dS of a number."""

    warpgroup: Int32

    def open(self):
        """Say that the stage of the other's first dS is empty."""
        self.release(1)

    @cute.jit
    def open_turns(self):
        """The first turn is that of the first warpgroup."""
        if self.warpgroup == 1:
            self.pass_turn()

    def take_turn(self):
        """Wait until the other warpgroup has issued its products."""
        barrier = BARRIER_TURN + self.warpgroup
        cute.arch.barrier(barrier_id=barrier, number_of_threads=EXCHANGE_THREADS)

    def pass_turn(self):
        """Let the other warpgroup issue its products, behind those of this one."""
        barrier = BARRIER_TURN + 1 - self.warpgroup
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=EXCHANGE_THREADS)

    def acquire(self, number):
        """Wait until the other has read the dS that the stage of ``number`` held."""
        barrier = BARRIER_DS_EMPTY + STAGES * self.warpgroup + number % STAGES
        cute.arch.barrier(barrier_id=barrier, number_of_threads=EXCHANGE_THREADS)

    def release(self, number):
        """Say that this warpgroup has read the other's dS."""
        barrier = BARRIER_DS_EMPTY + STAGES * (1 - self.warpgroup) + number % STAGES
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=EXCHANGE_THREADS)


@dataclass(frozen=True)
class Outbox:
    """An MMA warpgroup's end of its box of dQ."""

    warpgroup: Int32

    def acquire(self):
        """Wait until the box is empty."""
        cute.arch.barrier(
            barrier_id=BARRIER_DQ_EMPTY + self.warpgroup, number_of_threads=BOX_THREADS
        )

    def commit(self):
        """Let the reducing warp see what was put into the box."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier_arrive(
            barrier_id=BARRIER_DQ_FULL + self.warpgroup, number_of_threads=BOX_THREADS
        )


@dataclass(frozen=True)
class Inbox:
    """The reducing warp's end of a box of dQ."""

    warpgroup: Int32

    def open(self):
        """Say that the box is empty, as it is at first."""
        self.release()

    def wait(self):
        """Wait until the box is full."""
        cute.arch.barrier(
            barrier_id=BARRIER_DQ_FULL + self.warpgroup, number_of_threads=BOX_THREADS
        )

    def release(self):
        """Say that the box is empty."""
        cute.arch.barrier_arrive(
            barrier_id=BARRIER_DQ_EMPTY + self.warpgroup, number_of_threads=BOX_THREADS
        )


@dataclass(frozen=True)
class LoadOps:
    """Verbs of the ``load`` role."""

    config: BackwardConfig
    tiles: object  # kv_tiles.KvTileSchedule, kv_one_tile.OneTile or views of kv_handout, as in the other verbs
    q: Operand  # (S, D, H, B), as the next three; ragged views if the config says so
    k: Operand
    v: Operand
    do: Operand
    entry_rows: (
        dict  # rows from one batch entry of a ragged view that is not packed to the next, by name
    )
    mLSE: cute.Tensor  # (B, H, padded S), log2 units; +inf where P must vanish
    mD: cute.Tensor  # (B, H, padded S)
    sQ: cute.Tensor  # (tile_m, tile_d, stages)
    sK: cute.Tensor  # (tile_n, dq_width, 1)
    sV: cute.Tensor  # (tile_n, tile_dv, 1)
    sDO: cute.Tensor  # (tile_m, tile_dv, stages)
    sLSE: cute.Tensor  # (tile_m, stages)
    sD: cute.Tensor  # (tile_m, stages)

    def load_k(self, tile, slot):
        """Fill the K slot with the tile's keys; rows past the sequence become zero."""
        c = self.config
        mK = self._keys("k", tile)
        gK = cute.local_tile(mK, (c.tile_n, c.dq_width), (tile.n_block, 0))
        tma_load(self.k.atom, gK, self.sK, slot)

    def load_v(self, tile, slot):
        """Fill the V slot with the tile's values."""
        c = self.config
        mV = self._keys("v", tile)
        gV = cute.local_tile(mV, (c.tile_n, c.tile_dv), (tile.n_block, 0))
        tma_load(self.v.atom, gV, self.sV, slot)

    def load_q(self, tile, i, slot):
        """Fill a Q slot with the queries of step ``i`` and their LSE; rows past the sequence become zero."""
        c, (block, head) = self.config, self.tiles.place(tile, i)
        where = self.tiles.where(tile)
        mQ = self._queries("q", tile, where, head)
        gQ = cute.local_tile(mQ, (c.tile_m, c.tile_d), (block, 0))
        tma_load(self.q.atom, gQ, self.sQ, slot)
        gLSE = self.mLSE[where.entry_q, head, None]
        self._load_statistics(gLSE, where.slot_q + block, self.sLSE, slot)

    def load_do(self, tile, i, slot):
        """Fill a dO slot with the gradients of step ``i`` and their D."""
        c, (block, head) = self.config, self.tiles.place(tile, i)
        where = self.tiles.where(tile)
        mDO = self._queries("do", tile, where, head)
        gDO = cute.local_tile(mDO, (c.tile_m, c.tile_dv), (block, 0))
        tma_load(self.do.atom, gDO, self.sDO, slot)
        gD = self.mD[where.entry_q, head, None]
        self._load_statistics(gD, where.slot_q + block, self.sD, slot)

    def _queries(self, name, tile, where, head):
        """Rows (S, D) of q or do of the tile's sequence."""
        tensor, entry = getattr(self, name).tensor, where.entry_q
        if not self.config.ragged_q:
            return tensor[None, None, head, entry]
        end = where.row_q if self.config.cu_q else entry * self.entry_rows[name]
        return ragged_rows(tensor, head, end, self.tiles.lengths(tile)[0])

    def _keys(self, name, tile):
        """Rows (S, D) of k or v of the tile's sequence."""
        tensor, where = getattr(self, name).tensor, self.tiles.where(tile)
        if not self.config.ragged_k:
            return tensor[None, None, tile.head_kv, where.entry_k]
        end = where.row_k if self.config.cu_k else where.entry_k * self.entry_rows[name]
        return ragged_rows(tensor, tile.head_kv, end, self.tiles.lengths(tile)[1])

    def _load_statistics(self, gX, block, sX, slot):
        """They count at the barrier of the tile that they belong to."""
        c = self.config
        source = gX.iterator + block * c.tile_m
        copy_row(sX[None, slot.index].iterator, source, c.statistics_bytes, slot.barrier)


def store_rows(ops, operand: Operand, tile, group, sX):
    """Store 64 of the tile's keys of dK or dV by TMA; what comes after the sequence is not written."""
    where, config = ops.tiles.where(tile), ops.config
    if config.cu_k:
        end, rows = where.row_k + where.stored_k, cute.size(operand.tensor, mode=[0])
        mX = operand.tensor[None, None, tile.head_kv, end]
        mX = cute.domain_offset((rows - where.stored_k, 0), mX)
    else:
        mX = operand.tensor[None, None, tile.head_kv, where.entry_k]
    store_tile(operand, mX, tile.n_block * (config.tile_n // MMA_ROWS) + group, sX)


def store_tile(operand: Operand, mX, block, sX):
    """The same, of a block of 64 keys of one head (S, D)."""
    gX = cute.local_tile(mX, (MMA_ROWS, cute.size(sX, mode=[1])), (block, 0))
    tXsX, tXgX = cpasync.tma_partition(
        operand.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(sX, 0, 2),
        cute.group_modes(gX, 0, 2),
    )
    cute.copy(operand.atom, tXsX, tXgX)


@dataclass(frozen=True)
class ReduceOps:
    """Verbs of the ``reduce`` role, for one MMA warpgroup's part of dQ."""

    config: BackwardConfig
    tiles: object
    mDQ: cute.Tensor  # (B, H, blocks, tile_m dq_width), float32
    sDQ: cute.Tensor  # (dq_floats,) of the warpgroup
    mTurns: (
        object  # (B, H, blocks, 2) int32, additions that somebody waits for; None without ``turns``
    )
    sDK: cute.Tensor  # (64, tile_d)
    sDV: cute.Tensor  # (64, tile_dv)
    dk_out: Operand  # (S, D, heads_kv, B)
    dv_out: Operand
    warpgroup: Int32

    @property
    def handed_out(self) -> bool:
        """Whether dK and dV leave through the box."""
        return self.config.handed_out

    def store_dk(self, tile):
        """Start the store of dK."""
        store_rows(self, self.dk_out, tile, self.warpgroup, self.sDK)
        cute.arch.cp_async_bulk_commit_group()

    def store_dv(self, tile):
        """Start the store of dV."""
        store_rows(self, self.dv_out, tile, self.warpgroup, self.sDV)
        cute.arch.cp_async_bulk_commit_group()

    def wait_turn(self, tile, i):
        """Wait until all tiles whose turn comes first have added theirs, or the first has stored its."""
        if self.config.ordered or self.config.first_stores:
            behind = choose(self.tiles.is_seen(tile), imin(tile.n_block, 1), 0)
            before = self.rank_of_addition(tile, i) if self.config.ordered else behind
            wait_for_count(self._turn(tile, i), before)
            cute.arch.fence_proxy("async.global")  # the copy engine comes after this thread

    def pass_turn(self, tile, i):
        """Wait until the addition is done, and let the next tile go, or those behind the first."""
        if self.config.ordered:
            counts = choose(self.rank_of_addition(tile, i) >= 0, 1, 0)  # others have no turn
            self._count(tile, i, counts)
        elif self.config.turns:
            self._let_go(tile, i)

    @cute.jit
    def _let_go(self, tile, i):
        if self._is_first(tile):
            self._count(tile, i, 1)

    def _is_first(self, tile):
        """Whether the tile stores its parts of dQ."""
        return (tile.n_block == 0) & self.tiles.is_seen(tile)

    def _count(self, tile, i, amount):
        """Wait until what was added is written; then let others see the addition of step ``i``."""
        cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.fence_proxy("async.global")
        add_to_count(self._turn(tile, i), amount)

    def rank_of_addition(self, tile, i):
        """How many additions come before this one; negative for one that is not asked."""
        return self.tiles.rank(tile, i)

    def _turn(self, tile, i):
        (block, head), where = self.tiles.place(tile, i), self.tiles.where(tile)
        turns = self.mTurns[where.entry_q, head, where.slot_q + block, None]
        return turns.iterator + self.warpgroup

    def add_dq(self, tile, i):
        """Accumulator += box, for the queries of step ``i``; the first tile may store it."""
        self.add_to_sums(tile, i, self.warpgroup * self.config.dq_floats)

    def add_to_sums(self, tile, i, first):
        """Add the box to the sums of step ``i`` from number ``first`` on, or store it there."""
        floats, (block, head) = self.config.dq_floats, self.tiles.place(tile, i)
        where = self.tiles.where(tile)
        sums = self.mDQ[where.entry_q, head, where.slot_q + block, None]
        target = sums.iterator + first
        if self.config.first_stores:
            self._put_or_add(tile, target, 4 * floats)
        else:
            add_floats(target, self.sDQ.iterator, 4 * floats)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _put_or_add(self, tile, target, nbytes: cutlass.Constexpr):
        """A tile that nobody sees has a step of zeros in a place that may be another's: it leaves that alone."""
        if self.tiles.is_seen(tile):
            puts = choose(self._is_first(tile), 1, 0)
            put_or_add_floats(target, self.sDQ.iterator, nbytes, puts)

    def wait_read(self):
        """Wait until the box has been read."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    def drain(self):
        """Wait until all additions are done."""
        cute.arch.cp_async_bulk_wait_group(0)


@dataclass(frozen=True)
class Place:
    """Where a step lies, by this thread's two rows; queries and distances of its first column."""

    begins: tuple  # columns before this one do not see the row's key
    ends: tuple  # nor do those from this one on
    distances: tuple  # from key to query, in keys
    slope: object  # of ALiBi in the units of scores, or None
    mods: object  # ModPlace, or None


@dataclass(frozen=True)
class Scores:
    """What dS of a step takes of S^T: P^T, times the slope of the cap.

    With a score_mod it is S^T itself, from which P is made again: the derivative takes the score beside P.
    """

    values: cute.Tensor
    masked: bool
    place: object  # Place, with a score_mod
    slot: object  # of the LSE


@dataclass(frozen=True)
class MmaOps:
    """Verbs of the ``mma`` role; every tensor is this warpgroup's or this thread's part."""

    config: BackwardConfig
    tiles: object
    mma_s: cute.TiledMma
    mma_dk: cute.TiledMma
    mma_dv: cute.TiledMma
    mma_dq: cute.TiledMma
    tSrK: cute.Tensor  # (MMA, MMA_N, MMA_D, 1)
    tSrQ: cute.Tensor  # (MMA, MMA_M, MMA_D, stages)
    tDPrV: cute.Tensor  # (MMA, MMA_N, MMA_DV, 1)
    tDPrDO: cute.Tensor  # (MMA, MMA_M, MMA_DV, stages)
    tDVrDO: cute.Tensor  # (MMA, MMA_DV, MMA_M, stages): dO^T, the same memory
    tDKrQ: cute.Tensor  # (MMA, MMA_D, MMA_M, stages): Q^T, the same memory
    tDQrK: object  # K^T, the same memory; operand B, or A if swapped
    tDQrDS: cute.Tensor  # dS, (.., stages); operand A, or B if swapped
    tDVrP: cute.Tensor  # ((2, 2, 2), 1, tile_m / 16), 16 bit
    tDKrDS: cute.Tensor  # as tDVrP
    dk_acc: cute.Tensor  # ((2, 2, tile_d / 8), 1, 1), float32
    dv_acc: cute.Tensor  # ((2, 2, tile_dv / 8), 1, 1), float32
    sLSE: cute.Tensor  # (tile_m, stages)
    sD: cute.Tensor  # (tile_m, stages)
    sDS: cute.Tensor  # (64 keys, tile_m, stages)
    sDQ: cute.Tensor  # (dq_floats,)
    sDK: cute.Tensor  # (64, tile_d)
    sDV: cute.Tensor  # (64, tile_dv)
    dk_out: Operand  # (S, D, heads_kv, B); of packed keys a ragged view instead of B
    dv_out: Operand
    mSlopes: object  # (B, H) float32, or None
    aux: object  # tuple of tensors that mods read, or None
    scale: Float32  # factor of a score
    score_scale: Float32  # the same; in log2 units unless the config is natural, as is the cap
    cap: object  # None without one
    cap_scale: object  # factor of a score within the cap; None without one
    near_end: object  # largest |product| whose tanh is taken by a polynomial; None if no one's is
    thread: Int32  # in the warpgroup
    warpgroup: Int32  # among the MMA warpgroups

    @property
    def handed_out(self) -> bool:
        """Whether dK and dV leave through the box, while the next tile begins."""
        return self.config.handed_out

    def phases(self, tile):
        """See ``KvSteps.phases``."""
        return self.tiles.phases(tile)

    def begin(self, tile):
        """dK = dV = 0."""
        self.dk_acc.fill(0.0)
        self.dv_acc.fill(0.0)

    def s(self, k_slot, q_slot):
        """Issue S^T = K Q^T into a fresh accumulator; see ``fwd_ops.MmaOps.qk``."""
        S = cute.make_rmem_tensor(((2, 2, self.config.tile_m // 8), 1, 1), Float32)
        tSrQ = self.tSrQ[None, None, None, q_slot.index]
        issue_mma(self.mma_s, S, self.tSrK[None, None, None, 0], tSrQ, False)
        return S

    def dp(self, v_slot, do_slot):
        """Issue dP^T = V dO^T into a fresh accumulator."""
        dP = cute.make_rmem_tensor(((2, 2, self.config.tile_m // 8), 1, 1), Float32)
        tDPrDO = self.tDPrDO[None, None, None, do_slot.index]
        issue_mma(self.mma_s, dP, self.tDPrV[None, None, None, 0], tDPrDO, False)
        return dP

    def dv(self, do_slot):
        """Issue dV += P^T dO."""
        tDVrDO = self.tDVrDO[None, None, None, do_slot.index]
        issue_mma(self.mma_dv, self.dv_acc, self.tDVrP, tDVrDO, True)

    def dk(self, q_slot):
        """Issue dK += dS^T Q."""
        tDKrQ = self.tDKrQ[None, None, None, q_slot.index]
        issue_mma(self.mma_dk, self.dk_acc, self.tDKrDS, tDKrQ, True)

    def dq(self, i, k_slot):
        """Issue this warpgroup's part of dQ = dS K, or of its transpose, into a fresh accumulator."""
        c = self.config
        dQ = cute.make_rmem_tensor(((2, 2, self.dq_groups), 1, 1), Float32)
        tDQrDS = self.tDQrDS[None, None, None, i % self.config.ds_stages]
        tDQrK = self.tDQrK[None, None, None, 0]
        a, b = (tDQrK, tDQrDS) if c.swap_dq else (tDQrDS, tDQrK)
        issue_mma(self.mma_dq, dQ, a, b, False)
        return dQ

    @property
    def dq_groups(self) -> int:
        """Groups of 4 numbers of a thread's part of dQ."""
        return self.config.dq_floats // WARPGROUP // 4

    def wait_mma(self, pending):
        """Wait until at most ``pending`` groups of MMAs are in flight."""
        warpgroup.wait_group(pending)

    def _columns(self, sX, slot):
        """A statistic of this thread's queries, (2, tile_m / 8)."""
        shape = (2, self.config.tile_m // 8)
        values = cute.make_rmem_tensor(shape, Float32)
        source = sX[None, slot.index].iterator + 2 * (self.thread % 4)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(shape, stride=(1, 8))), values)
        return values

    def softmax(self, tile, i, s, q_slot, phase):
        """P^T = exp2(scale_log2 S^T - LSE), rounded as the operand of dV; hidden pairs give 0.

        Returns what dS takes: in place of S^T comes P^T, times the slope of the cap; with a score_mod S^T stays.
        """
        c, S = self.config, rows_of(s)
        lse = self._columns(self.sLSE, q_slot)
        place = self._place(tile, i) if phase.masked or c.alibi or c.has_mods else None
        columns = cute.size(S) // 2
        if c.near_cap:
            for begin in range(0, columns, columns // PARTS_OF_CAP):
                part = (begin, begin + columns // PARTS_OF_CAP)
                self._near_or_far(S, lse, place, phase.masked, part)
        else:
            self._exponentials(S, lse, place, phase.masked, (0, columns), self._score)
        return Scores(s, phase.masked, place, q_slot)

    @cute.jit
    def _near_or_far(
        self, S: cute.Tensor, lse, place, masked: cutlass.Constexpr, part: cutlass.Constexpr
    ):
        """``_exponentials`` with a cap; for a warp at a time its tanh is a polynomial where its largest score allows."""
        used = numerics.largest_pair_bits([S[r, j] for j in range(*part) for r in range(2)])
        if cute.arch.vote_any_sync(used > numerics.float_bits(self.near_end)):
            self._exponentials(S, lse, place, masked, part, self._far_score)
        else:
            self._exponentials(S, lse, place, masked, part, self._near_score)

    def _exponentials(self, S, lse, place, masked, part, score):
        """P of columns from one to another in 16 bit, and in place of their S what dS takes; ``score`` caps and scales."""
        c = self.config
        pairs = cute.make_tensor(self.tDVrP.iterator, cute.make_layout((2, cute.size(S) // 2)))
        pair = cute.make_rmem_tensor(2, Float32)
        for n in range(*part):
            r, columns = n % 2, (n // 2 * 2, n // 2 * 2 + 1)
            for j in columns:
                found = self._pair(place, masked, (r, j), score(S[r, j]), lse[j])
                pair[j % 2] = found.p
                if not c.score_mod:
                    S[r, j] = found.p if found.slope is None else found.p * found.slope
            pairs[None, n].store(pair.load().to(element(c)))

    def _pair(self, place, masked, at, found, lse):
        """What is known of the pair of row and column ``at``, from its score with its slope, and its query's LSE."""
        c, seen, (score, slope) = self.config, None, found
        if c.natural:
            score = score - self._bias(place, *at) if c.alibi else score
            modified = mods.function(c.score_mod)(score, *place.mods.at(*at, self.aux))
            logit = Float32(modified) * LOG2E - lse
            seen = lse < Float32.inf  # of no sequence, or without keys: the score means nothing
        else:
            logit = score - lse
            logit = logit - self._bias(place, *at) if c.alibi else logit
        if masked:
            inside = self._seen(place, *at)
            seen = inside if seen is None else seen & inside
        if c.mask_mod:
            kept = cutlass.Boolean(mods.function(c.mask_mod)(*place.mods.at(*at, self.aux)))
            seen = kept if seen is None else seen & kept
        if seen is not None:
            logit = cutlass.select_(seen, logit, -Float32.inf)
        return Pair(cute.math.exp2(logit, fastmath=True), score, slope, seen)

    def _score(self, product):
        """(scaled score, its slope over the scale or None) of a product of query and key."""
        if not self.config.softcap:
            return product * self.score_scale, None
        capped, slope = numerics.tanh_and_slope(product * self.cap_scale)
        return capped * self.cap, slope

    def _near_score(self, product):
        """The same for |product| up to ``near_end``."""
        capped, slope = numerics.near_tanh_and_slope(product * self.cap_scale)
        return capped * self.cap, slope

    def _far_score(self, product):
        """The same beside a |product| beyond ``near_end``."""
        capped, slope = numerics.far_tanh_and_slope(product * self.cap_scale)
        return capped * self.cap, slope

    def _place(self, tile, i):
        """What masks and biases of step ``i`` depend on, for this thread."""
        tiles, (block, head) = self.tiles, self.tiles.place(tile, i)
        lengths = tiles.lengths(tile)
        first_query = block * self.config.tile_m + 2 * (self.thread % 4)
        keys = [tile.n_block * self.config.tile_n + self._key_row(r) for r in range(2)]
        slope, place = None, None
        if self.config.alibi:
            slope = self.mSlopes[tiles.where(tile).batch, head]
            slope = slope if self.config.natural else slope * LOG2E
        if self.config.has_mods:
            place = ModPlace.of(tiles, tile, head, first_query, keys)
        return Place(
            begins=tuple(tiles.blocks.query_begin(key, *lengths) - first_query for key in keys),
            ends=tuple(tiles.blocks.query_end(key, *lengths) - first_query for key in keys),
            distances=tuple(Float32(first_query + lengths[1] - lengths[0] - key) for key in keys),
            slope=slope,
            mods=place,
        )

    def _seen(self, place, r, j):
        """Whether the query of column ``j`` sees the key of row ``r``."""
        column = Int32(8 * (j // 2) + j % 2)
        seen = column >= place.begins[r]
        return seen & (column < place.ends[r]) if self.config.left else seen

    def _bias(self, place, r, j):
        """slope |p - j|, with p the query's position among the keys, in the units of scores."""
        distance = place.distances[r] + Float32(8 * (j // 2) + j % 2)
        return place.slope * cute.math.absf(distance)

    def _key_row(self, r):
        """Row in the tile of this thread's row ``r``."""
        return self.key_group() * MMA_ROWS + self.thread // 32 * 16 + self.thread % 32 // 4 + 8 * r

    def key_group(self):
        """Which 64 keys of the tile are this warpgroup's."""
        return self.warpgroup

    def ds(self, i, scores, dp, do_slot):
        """dS^T = P^T (dP^T - D), times the slope of the cap, rounded as the operand of dK and, transposed, into the shared memory of step ``i``.

        Among sequences of different lengths a step may have the D of rows that are not its own, and hold NaN: 0 where P is.
        """
        c, dP = self.config, rows_of(dp)
        delta = self._columns(self.sD, do_slot)
        if c.score_mod:
            self._modified_ds(scores, dP, delta)
        else:
            P = rows_of(scores.values)
            for j in range(c.tile_m // 4):
                for r in range(2):
                    dS = P[r, j] * (dP[r, j] - delta[j])
                    if scores.masked and c.varlen:
                        dS = cutlass.select_(P[r, j] > 0.0, dS, Float32(0.0))
                    dP[r, j] = dS
        dS = cute.make_tensor(self.tDKrDS.iterator, dp.layout)
        dS.store(dp.load().to(element(c)))
        r2s = self._store_copy(self.mma_s, transposed=True).get_slice(self.thread)
        target = r2s.partition_D(self.sDS)[None, None, None, i % self.config.ds_stages]
        cute.copy(r2s, r2s.retile(dS), target)
        cute.arch.fence_proxy("async.shared", space="cta")

    def _modified_ds(self, scores, dP, delta):
        """dS^T in place of dP^T, through a score_mod; P^T is made again."""
        c, S = self.config, rows_of(scores.values)
        lse, derivative = self._columns(self.sLSE, scores.slot), mods.function(c.score_mod_bwd)
        for j in range(c.tile_m // 4):
            for r in range(2):
                found = self._score(S[r, j])
                pair = self._pair(scores.place, scores.masked, (r, j), found, lse[j])
                where = scores.place.mods.at(r, j, self.aux)
                gradient = derivative(pair.p * (dP[r, j] - delta[j]), pair.score, *where)
                # A derivative may be infinite or NaN where nothing is seen.
                gradient = cutlass.select_(pair.seen, Float32(gradient), Float32(0.0))
                dP[r, j] = gradient if pair.slope is None else gradient * pair.slope

    def _store_copy(self, tiled_mma, transposed: bool):
        """This thread's copy of an accumulator in 16 bit from registers to shared memory."""
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transposed, 4), element(self.config))
        one_warpgroup = cute.make_tiled_mma(cute.make_mma_atom(tiled_mma.op), (1, 1, 1))
        return cute.make_tiled_copy_C(atom, one_warpgroup)

    def put_dq(self, dq):
        """Registers -> box, four numbers of a thread at a time: the order of the accumulator in global memory."""
        self.put_floats(dq, self.sDQ)

    def put_floats(self, acc, sX):
        """An accumulator -> its box in shared memory."""
        mine, box = self.in_box(acc, sX)
        cute.autovec_copy(mine, box)

    def in_box(self, acc, sX):
        """An accumulator, and where its box has this thread's numbers, both as (4, groups)."""
        shape = (4, cute.size(acc) // 4)
        box = cute.make_layout(shape, stride=(1, 4 * WARPGROUP))
        return (
            cute.make_tensor(acc.iterator, cute.make_layout(shape)),
            cute.make_tensor(sX.iterator + 4 * self.thread, box),
        )

    @cute.jit
    def store(self, tile):
        """Start the store of dK (scaled) and dV, this warpgroup's 64 rows; rows past the sequence are clipped."""
        self._stage(self.mma_dk, self.dk_acc, self.scale, self.sDK)
        self._stage(self.mma_dv, self.dv_acc, Float32(1.0), self.sDV)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=BARRIER_STORE + self.warpgroup, number_of_threads=WARPGROUP)
        if cute.arch.make_warp_uniform(self.thread // 32) == 0:
            store_rows(self, self.dk_out, tile, self.key_group(), self.sDK)
            store_rows(self, self.dv_out, tile, self.key_group(), self.sDV)
            cute.arch.cp_async_bulk_commit_group()

    def _stage(self, tiled_mma, acc, factor, sX):
        """Registers -> shared memory, in 16 bit."""
        values = cute.make_rmem_tensor(acc.layout, element(self.config))
        values.store((acc.load() * factor).to(element(self.config)))
        c, thread = self.config, self.thread
        if c.handed_out and c.varlen:
            thread = numerics.opaque(
                thread
            )  # or addresses would take registers throughout the tile
        r2s = self._store_copy(tiled_mma, transposed=False).get_slice(thread)
        cute.copy(r2s, r2s.retile(values), r2s.partition_D(sX))

    def put_dk(self):
        """dK (scaled), registers -> box."""
        self._stage(self.mma_dk, self.dk_acc, self.scale, self.sDK)

    def put_dv(self):
        """dV, registers -> box."""
        self._stage(self.mma_dv, self.dv_acc, Float32(1.0), self.sDV)

    def wait_store(self):
        """Wait until this warp's stores have read their shared memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)
