"""Verbs of the Hopper backward for head dims above 128, where they are not those of ``bwd_ops``."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from flash4.common.dsl import inline_ptx
from flash4.common.graph import WARP, WARPGROUP
from flash4.sm90.bwd_config import MMA_WARPGROUPS
from flash4.sm90.bwd_ops import (
    BARRIER_STORE,
    EXCHANGE_THREADS,
    LoadOps,
    Meeting,
    MmaOps,
    ReduceOps,
    Scores,
    store_rows,
)
from flash4.sm90.bwd_wide_config import PART_WIDTH
from flash4.sm90.fwd_config import MMA_ROWS
from flash4.sm90.fwd_ops import issue_mma, tma_load

# Named barriers beside those of ``bwd_ops``.
BARRIER_P = 8  # ``mma_v`` has put P
BARRIER_DS = 9  # ``mma_k`` has written dS
MMA_WARPS = EXCHANGE_THREADS // WARP
BARRIER_OWN_DS = 10  # the warps of ``mma_k`` have


@dataclass(frozen=True)
class WideExchange(Meeting):
    """What the MMA warpgroups tell each other; their whole meeting is as in the narrow kernel."""

    def open(self, thread):
        """Nothing to set up."""

    def post_p(self):
        """``mma_v``: P is in its box."""
        cute.arch.barrier_arrive(barrier_id=BARRIER_P, number_of_threads=EXCHANGE_THREADS)

    def wait_p(self):
        """``mma_k``: wait for P."""
        cute.arch.barrier(barrier_id=BARRIER_P, number_of_threads=EXCHANGE_THREADS)

    def post_ds(self):
        """``mma_k``: dS is in shared memory."""
        cute.arch.barrier_arrive(barrier_id=BARRIER_DS, number_of_threads=EXCHANGE_THREADS)

    def wait_ds(self):
        """``mma_v``: wait for dS."""
        cute.arch.barrier(barrier_id=BARRIER_DS, number_of_threads=EXCHANGE_THREADS)


@dataclass(frozen=True)
class WideLoadOps(LoadOps):
    """Verbs of the ``load`` role: keys of this CTA, and its part of the queries for all CTAs."""

    rank: object  # of this CTA among those that share a tile
    peer_k: object  # half of the head dims of K, (S, D, heads_kv, B); None unless ``joint``
    sPeerK: object  # (64, tile_d / 2, 1)

    def load_k(self, tile, slot):
        """Fill the K slot with this CTA's keys; rows past the sequence become zero."""
        mK = self._keys("k", tile)
        gK = cute.local_tile(mK, (MMA_ROWS, self.config.tile_d), (self._rows(tile), 0))
        tma_load(self.k.atom, gK, self.sK, slot)
        if self.config.joint:
            mK = self.peer_k.tensor[None, None, tile.head_kv, tile.batch]
            place = (tile.n_block * self.config.ctas + 1 - self.rank, self.rank)
            gK = cute.local_tile(mK, (MMA_ROWS, self.config.tile_d // 2), place)
            tma_load(self.peer_k.atom, gK, self.sPeerK, slot)

    def load_v(self, tile, slot):
        """Fill the V slot with this CTA's values."""
        mV = self._keys("v", tile)
        gV = cute.local_tile(mV, (MMA_ROWS, self.config.tile_dv), (self._rows(tile), 0))
        tma_load(self.v.atom, gV, self.sV, slot)

    def load_q(self, tile, i, slot):
        """Fill a Q slot with the queries of step ``i``, in all CTAs together, and their LSE, each its own."""
        self._load_queries("q", self.config.tile_d, (tile, i), self.sQ, slot)
        self._load_statistic(self.mLSE, (tile, i), self.sLSE, slot)

    def load_do(self, tile, i, slot):
        """Fill a dO slot with the gradients of step ``i``, in all CTAs together, and their D, each its own."""
        self._load_queries("do", self.config.tile_dv, (tile, i), self.sDO, slot)
        self._load_statistic(self.mD, (tile, i), self.sD, slot)

    def _rows(self, tile):
        return tile.n_block * self.config.ctas + self.rank

    def _load_queries(self, name, width, step, sX, slot):
        c, (tile, i) = self.config, step
        block, head = self.tiles.place(tile, i)
        mX = self._queries(name, tile, self.tiles.where(tile), head)
        gX = cute.local_tile(mX, (c.tile_m, width), (block, 0))
        tma_load(getattr(self, name).atom, gX, sX, slot, (self.rank, c.ctas))

    def _load_statistic(self, mX, step, sX, slot):
        tile, i = step
        (block, head), where = self.tiles.place(tile, i), self.tiles.where(tile)
        self._load_statistics(mX[where.entry_q, head, None], where.slot_q + block, sX, slot)


@dataclass(frozen=True)
class WideReduceOps(ReduceOps):
    """Verbs of the ``reduce`` role, for one MMA warpgroup's parts of dQ."""

    rank: object  # of this CTA

    @property
    def parts(self):
        """What of each dQ comes through the box: parts, or halves of one."""
        if self.config.joint:
            return 2
        return (self.config.dq_parts + 1 - self.warpgroup) // MMA_WARPGROUPS

    def rank_of_addition(self, tile, i):
        """How many additions come before this CTA's; negative for one that is not asked."""
        return self.tiles.rank(tile, i) * self.config.ctas + self.rank

    def add_dq(self, tile, i, part):
        """Accumulator += box, for a part of the head dims of step ``i``."""
        number = part * MMA_WARPGROUPS + self.warpgroup
        if self.config.joint:
            number = (self.rank * MMA_WARPGROUPS + self.warpgroup) * 2 + part
        self.add_to_sums(tile, i, number * self.config.dq_floats)


@dataclass(frozen=True)
class WideMmaOps(MmaOps):
    """Verbs of the roles ``mma_v`` and ``mma_k``; each uses its own."""

    rank: object  # of this CTA: which keys of the tile
    sP: cute.Tensor  # (64 tile_m,) float32, in the order of the accumulator
    rest: tuple  # none or one accumulator of dQ, which stays from one step to the next

    def key_group(self):
        """Which 64 keys of the tile are this CTA's."""
        return self.rank

    def begin(self):
        """dK = dV = 0; each role has one of them."""
        self.dk_acc.fill(0.0)
        self.dv_acc.fill(0.0)

    def put_p(self, s):
        """What dS takes of S^T, P times the slope of the cap as a rule, in float32: registers -> its box."""
        self.put_floats(s, self.sP)

    def take_p(self, tile, i, q_slot):
        """Its box -> registers: a thread has the numbers that the same one of ``mma_v`` put there.

        This role does not know which steps have a mask: any may, where that matters.
        """
        values = cute.make_rmem_tensor(((2, 2, self.config.tile_m // 8), 1, 1), Float32)
        mine, box = self.in_box(values, self.sP)
        cute.autovec_copy(box, mine)
        place = self._place(tile, i) if self.config.score_mod else None
        return Scores(values, True, place, q_slot)

    def ds(self, i, scores, dp, do_slot):
        """As in the narrow kernel; then all warps of this warpgroup may multiply it."""
        super().ds(i, scores, dp, do_slot)
        cute.arch.barrier(barrier_id=BARRIER_OWN_DS, number_of_threads=WARPGROUP)

    def dq(self, i, k_slot):
        """Issue the first of this warpgroup's parts of dQ = dS K into a fresh accumulator."""
        dQ = cute.make_rmem_tensor(dq_accumulator(self.config), Float32)
        self._dq(i, 0, dQ)
        return dQ

    def dq_rest(self, i, k_slot):
        """Issue the second into ``rest``, if there is one, and an empty group otherwise."""
        for number, dQ in enumerate(self.rest):
            self._dq(i, number + 1, dQ)
        if not self.rest:
            warpgroup.commit_group()

    def _dq(self, i, number, dQ):
        tDQrDS = self.tDQrDS[None, None, None, i % self.config.ds_stages]
        issue_mma(self.mma_dq, dQ, tDQrDS, self.tDQrK[number], False)

    def store_dk(self, tile):
        """Start the store of dK, scaled; rows past the sequence are clipped."""
        self._save(tile, (self.mma_dk, self.dk_acc, self.scale), self.sDK, self.dk_out)

    def store_dv(self, tile):
        """Start the store of dV."""
        self._save(tile, (self.mma_dv, self.dv_acc, Float32(1.0)), self.sDV, self.dv_out)

    @cute.jit
    def _save(self, tile, result, sX, operand):
        self._stage(*result, sX)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=BARRIER_STORE + self.warpgroup, number_of_threads=WARPGROUP)
        if cute.arch.make_warp_uniform(self.thread // 32) == 0:
            store_rows(self, operand, tile, self.key_group(), sX)
            cute.arch.cp_async_bulk_commit_group()


@dataclass(frozen=True)
class JointExchange(WideExchange):
    """What the CTAs tell each other, besides: dS of a step, and that it has been read."""

    full: object  # mbarrier: the other's dS has arrived
    empty: object  # mbarrier: the other CTA has read this one's
    ds: object  # pointer: this CTA's dS
    peer_ds: object  # pointer: where the other's arrives
    peer: Int32  # rank of the other CTA
    thread: Int32  # in the warpgroup
    nbytes: int

    def open(self, thread):
        """Set up the barriers, as thread ``thread`` of the CTA."""
        self._open(thread)

    @cute.jit
    def _open(self, thread):
        if thread == 0:
            cute.arch.mbarrier_init(self.full, 1)
            cute.arch.mbarrier_init(self.empty, MMA_WARPS)

    def wait_peer(self, count):
        """Wait for the other CTA's dS of step ``count``."""
        cute.arch.mbarrier_wait(self.full, count & 1)

    def release_peer(self):
        """This warp has read it: say so to the other CTA."""
        inline_ptx(
            None,
            "r,r,~{memory}",
            "{ .reg .pred p; .reg .b32 b; elect.sync _|p, 0xffffffff; mapa.shared::cluster.u32 b, $0, $1; "
            "@p mbarrier.arrive.shared::cluster.b64 _, [b]; }",
            Int32(self.empty.toint()),
            Int32(self.peer),
            side_effects=True,
        )

    def acquire_ds(self, count):
        """Wait until the other CTA has read what was sent before step ``count``."""
        cute.arch.mbarrier_wait(self.empty, (count + 1) & 1)

    @cute.jit
    def send_ds(self):
        """Copy dS to the other CTA, and expect as much from it."""
        if cute.arch.make_warp_uniform(self.thread // WARP) == 0:
            inline_ptx(
                None,
                "r,r,r,r,r,~{memory}",
                "{ .reg .pred p; .reg .b32 d, b; elect.sync _|p, 0xffffffff; "
                "mapa.shared::cluster.u32 d, $0, $4; mapa.shared::cluster.u32 b, $3, $4; "
                "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$3], $2; "
                "@p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [d], [$1], $2, [b]; }",
                Int32(self.peer_ds.toint()),
                Int32(self.ds.toint()),
                Int32(self.nbytes),
                Int32(self.full.toint()),
                Int32(self.peer),
                side_effects=True,
            )


@dataclass(frozen=True)
class JointMmaOps(WideMmaOps):
    """Verbs of the roles ``mma_v`` and ``mma_k`` where CTAs add dQ up together: one part, whose halves go out in turns."""

    acc: cute.Tensor  # ((2, 2, 8), 1, 1), float32: dQ
    tDQrPeerDS: cute.Tensor  # (MMA, MMA_M, MMA_K, 1): the other CTA's dS
    tDQrPeerK: cute.Tensor  # (MMA, MMA_N, MMA_K): the other CTA's keys

    def dq(self, i, k_slot):
        """Issue dQ = dS K over this CTA's keys."""
        self._dq(i, 0, self.acc)

    def dq_of_peer(self, k_slot):
        """Issue dQ += dS K over the other's."""
        a = self.tDQrPeerDS[None, None, None, 0]
        issue_mma(self.mma_dq, self.acc, a, self.tDQrPeerK, True)

    def put_first_half(self):
        """The first 32 head dims: registers -> box."""
        self._put_half(0)

    def put_second_half(self):
        """The others."""
        self._put_half(1)

    def _put_half(self, number):
        size = cute.size(self.acc) // 2
        half = cute.make_tensor(self.acc.iterator + number * size, cute.make_layout(size))
        self.put_floats(half, self.sDQ)


def dq_accumulator(config):
    """Shape of a part of dQ in registers."""
    return ((2, 2, config.tile_m * PART_WIDTH // WARPGROUP // 4), 1, 1)


def in_cta(ctas: int) -> Int32:
    """Rank of this CTA in its cluster."""
    return cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if ctas > 1 else Int32(0)
