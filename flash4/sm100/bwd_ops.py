"""Verbs of the Blackwell backward's roles of one warp, in CuTe: TMA loads, tcgen05 MMAs, the exchange of a pair; and layouts.

The roles of warpgroups are in ``bwd_math``.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import BFloat16, Float16, Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.experimental import primitives
from cutlass.tensor_utils import LayoutEnum

from flash4.common.tma_views import ragged_rows
from flash4.sm100.bwd_config import FLOAT_BYTES, TILE_M, BackwardConfig
from flash4.sm100.bwd_graph import ROWS, SLICE

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def element(c: BackwardConfig):
    """16-bit element type of a config."""
    return BFloat16 if c.bf16 else Float16


def cta_group(c: BackwardConfig):
    """Whether MMAs and loads are those of one CTA, or of a pair."""
    return tcgen05.CtaGroup.TWO if c.ctas > 1 else tcgen05.CtaGroup.ONE


def make_mma(c, majors, shape, source=tcgen05.OperandSource.SMEM):
    """Tiled MMA of a config's elements, with float32 accumulators."""
    return blackwell.make_trivial_tiled_mma(
        element(c), element(c), *majors, Float32, cta_group(c), shape, source
    )


def make_mma_s(c: BackwardConfig):
    """Tiled MMA of S^T = K Q^T and dP^T = V dO^T. Made where it is used, as all: then its descriptor is a literal."""
    return make_mma(c, (K_MAJOR, K_MAJOR), (ROWS * c.ctas, c.tile_m))


def make_mma_dv(c: BackwardConfig):
    """Tiled MMA of dV += P^T dO, P from tensor memory."""
    shape = (ROWS * c.ctas, c.part_dv)
    return make_mma(c, (K_MAJOR, MN_MAJOR), shape, tcgen05.OperandSource.TMEM)


def make_mma_dk(c: BackwardConfig):
    """Tiled MMA of dK += dS^T Q: dS from shared memory, in a pair from tensor memory."""
    source = tcgen05.OperandSource.SMEM if c.ctas == 1 else tcgen05.OperandSource.TMEM
    return make_mma(c, (K_MAJOR, MN_MAJOR), (ROWS * c.ctas, c.part_d), source)


def make_mma_dq(c: BackwardConfig):
    """Tiled MMA of dQ = dS K: 128 rows in a pair too."""
    return make_mma(c, (MN_MAJOR, MN_MAJOR), (TILE_M, c.tile_d))


def smem_layouts(c: BackwardConfig, stages: int | None = None) -> dict:
    """Swizzled layouts of a CTA's operands as MMAs read them, (MMA, MMA_MN, MMA_K, slots), by name.

    Args:
        c: config.
        stages: slots; as many as there are by default. Two for an index that is 0 where the compiler cannot know it.
    """
    dtype, rows = element(c), ROWS * c.ctas
    s, dv, dk, queries = make_mma_s(c), make_mma_dv(c), make_mma_dk(c), c.tile_m
    one, of_q = stages or 1, stages or c.q_stages
    a, b = blackwell.make_smem_layout_a, blackwell.make_smem_layout_b
    found = {
        "k": a(s, (rows, queries, c.tile_d), dtype, one),
        "v": a(s, (rows, queries, c.part_dv), dtype, one),
        "q": b(s, (rows, queries, c.tile_d), dtype, of_q),
        "do": b(s, (rows, queries, c.tile_dv), dtype, one),
        "qt": b(dk, (rows, c.part_d, queries), dtype, of_q),
        "dot": b(dv, (rows, c.part_dv, queries), dtype, one),
        "p": a(dv, (rows, c.part_dv, queries), dtype, 1),
    }
    if c.ctas == 1:
        found["dst"] = a(dk, (rows, c.part_d, queries), dtype, one)
    if c.splits > 1:  # a part of the columns of a slot
        found["qt"] = _spaced(found["qt"], c.tile_d * queries)
    for name, width in (("dk", c.part_d), ("dv", c.part_dv)):
        found[name] = blackwell.make_smem_layout_epi(dtype, LayoutEnum.ROW_MAJOR, (ROWS, width), 1)
    return found | dq_layouts(c, dtype, one)


def _spaced(layout, numbers: int):
    """The same layout with slots so many numbers apart."""
    outer = layout.outer
    outer = cute.make_layout(outer.shape, stride=(*outer.stride[:3], numbers))
    return cute.make_composed_layout(layout.inner, 0, outer)


def dq_layouts(c: BackwardConfig, dtype, stages: int) -> dict:
    """The same of dQ's operands alone."""
    if c.dq_turned:
        return turned_layouts(c, dtype, stages)
    mma, shape = make_mma_dq(c), (TILE_M, c.tile_d, ROWS * c.ctas)
    return {
        "ds": blackwell.make_smem_layout_a(mma, shape, dtype, stages),
        "kt": blackwell.make_smem_layout_b(mma, shape, dtype, stages),
    }


def make_mma_dq_turned(c: BackwardConfig, rows: int):
    """Tiled MMA of dQ^T = K^T dS^T, of 128 or 64 head dims."""
    return make_mma(c, (MN_MAJOR, MN_MAJOR), (rows, c.tile_m))


def turned_layouts(c: BackwardConfig, dtype, stages: int) -> dict:
    """Layouts of the operands of dQ^T: of dS, and of K for each product."""
    found = {}
    for i, (_, rows) in enumerate(c.dq_accumulators):
        mma, shape = make_mma_dq_turned(c, rows), (rows, c.tile_m, ROWS)
        found[f"kt{i}"] = blackwell.make_smem_layout_a(mma, shape, dtype, stages)
        found["ds"] = blackwell.make_smem_layout_b(mma, shape, dtype, stages)
    return found


@dataclass(frozen=True)
class Operand:
    """A global tensor behind a TMA descriptor: the copy atom and the tensor of its coordinates."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


@dataclass(frozen=True)
class Operands:
    """Tensors behind TMA descriptors, (S, D, H, B); those of a pair alone, (D, S, H, B), are None without one."""

    k: Operand
    v: Operand
    q: Operand
    do: Operand
    dk: Operand
    dv: Operand
    kt: object = None
    qt: object = None
    dot: object = None


@dataclass(frozen=True)
class LoadOps:
    """Verbs of the ``load`` role."""

    config: cutlass.Constexpr
    tiles: object  # kv_tiles.KvTileSchedule or kv_one_tile.OneTile, as in the other verbs
    operands: Operands
    entry_rows: (
        dict  # rows from one batch entry to the next by name, of what is ragged but not packed
    )
    mLSE: cute.Tensor  # (B, H, padded S): -LSE in log2 units; -inf where P must vanish
    mD: cute.Tensor  # (B, H, padded S): -D
    rank: object  # of the CTA
    smem: object  # name -> operand as MMAs read it, (MMA, MMA_MN, MMA_K, slots)
    sStat: cute.Tensor  # (128 queries, 2, slots) float32

    @property
    def k_bytes(self):
        """Bytes of a CTA's keys."""
        return self.config.k_bytes

    @property
    def v_bytes(self):
        """Bytes of a CTA's values."""
        return self.config.v_bytes

    @property
    def q_bytes(self):
        """Bytes of a CTA's queries of a step."""
        return self.config.q_bytes

    @property
    def do_bytes(self):
        """Bytes of a CTA's dO of a step."""
        return self.config.do_bytes

    @property
    def stat_bytes(self):
        """Bytes of LSE and D of a step."""
        return self.config.stat_bytes

    def load_k(self, tile, slot):
        """Fill the slot with the tile's keys, in a pair this CTA's half; rows past the sequence become zero."""
        self._load_keys("k", self.config.tile_d, tile, slot)

    def load_v(self, tile, slot):
        """The same of values."""
        self._load_keys("v", self.config.tile_dv, tile, slot)

    def _load_keys(self, name, width, tile, slot, column=0):
        c, operand, where = self.config, getattr(self.operands, name), self.tiles.where(tile)
        if c.ragged_k:
            begin = where.row_k if c.cu_k else where.entry_k * self.entry_rows[name]
            rows = self.tiles.lengths(tile)[1]
            mX = ragged_rows(operand.tensor, tile.head_kv, begin, rows)
        else:
            mX = operand.tensor[None, None, tile.head_kv, where.entry_k]
        gX = cute.local_tile(mX, (c.tile_n, width), (tile.n_block, column))
        part = make_mma_s(c).get_slice(self.rank).partition_A(gX)
        self._load(name, operand, part, slot)

    def load_kt(self, tile, slot):
        """All keys, half of their head dims."""
        c, operand = self.config, self.operands.kt
        mX = operand.tensor[None, None, tile.head_kv, tile.batch]
        gX = cute.local_tile(mX, (c.tile_d, c.tile_n), (0, tile.n_block))
        part = make_mma_dq(c).get_slice(self.rank).partition_B(gX)
        self._load("kt", operand, part, slot)

    def load_q(self, tile, i, slot):
        """Queries of step ``i``, in a pair this CTA's half; rows past the sequence become zero."""
        self._load_queries("q", self.config.tile_d, tile, i, slot)

    def load_do(self, tile, i, slot):
        """The same of dO."""
        self._load_queries("do", self.config.tile_dv, tile, i, slot)

    def _load_queries(self, name, width, tile, i, slot):
        c, operand, where = self.config, getattr(self.operands, name), self.tiles.where(tile)
        block, head = self.tiles.place(tile, i)
        if c.ragged_q:
            begin = where.row_q if c.cu_q else where.entry_q * self.entry_rows[name]
            mX = ragged_rows(operand.tensor, head, begin, self.tiles.lengths(tile)[0])
        else:
            mX = operand.tensor[None, None, head, where.entry_q]
        gX = cute.local_tile(mX, (self.config.tile_m, width), (block, 0))
        part = make_mma_s(self.config).get_slice(self.rank).partition_B(gX)
        self._load(name, operand, part, slot)

    def load_qt(self, tile, i, slot):
        """All queries of step ``i``, half of their head dims."""
        self._load_half("qt", make_mma_dk(self.config), self.config.tile_d, tile, i, slot)

    def load_dot(self, tile, i, slot):
        """The same of dO."""
        self._load_half("dot", make_mma_dv(self.config), self.config.tile_dv, tile, i, slot)

    def _load_half(self, name, mma, width, tile, i, slot):
        operand, (block, head) = getattr(self.operands, name), self.tiles.place(tile, i)
        mX = operand.tensor[None, None, head, tile.batch]
        gX = cute.local_tile(mX, (width, TILE_M), (0, block))
        self._load(name, operand, mma.get_slice(self.rank).partition_B(gX), slot)

    def _load(self, name, operand, part, slot):
        """Start the copy of a part into a slot; its bytes count at the slot's barrier, in a pair at the leader's."""
        cute.arch.sync_warp()  # LLVM makes no copies of a loop with it
        tXsX, tXgX = cpasync.tma_partition(
            operand.atom, 0, cute.make_layout(1),
            cute.group_modes(self.smem[name], 0, 3), cute.group_modes(part, 0, 3),
        )  # fmt: skip
        cute.copy(operand.atom, tXgX, tXsX[None, slot.index], tma_bar_ptr=slot.barrier)

    def load_stat(self, tile, i, slot):
        """-LSE and -D of the queries of step ``i``."""
        (block, head), where = self.tiles.place(tile, i), self.tiles.where(tile)
        queries = self.config.tile_m
        with cute.arch.elect_one():
            for which, mX in enumerate((self.mLSE, self.mD)):
                slot_of_block = where.slot_q + block
                source = mX[where.entry_q, head, None].iterator + slot_of_block * queries
                target = self.sStat[None, which, slot.index].iterator
                primitives.cp_async_bulk_shared_cluster_global(
                    target, source, slot.barrier, queries * FLOAT_BYTES
                )


@dataclass(frozen=True)
class MmaOps:
    """Verbs of the ``mma`` role."""

    config: cutlass.Constexpr
    tmem: cutlass.Constexpr
    p_layout: cutlass.Constexpr  # of the A operand of dV, (MMA, MMA_M, MMA_K, 1)
    pointer: object  # to tensor memory
    smem: object  # name -> operand, (MMA, MMA_MN, MMA_K, two slots)

    def _accumulator(self, mma, shape, column):
        layout = mma.make_fragment_C(mma.partition_shape_C(shape)).layout
        return cute.make_tensor(self.pointer + column, layout)

    def _multiply(self, mma, acc, a, b, accumulate):
        for k in range(cute.size(a, mode=[2])):
            mma.set(tcgen05.Field.ACCUMULATE, True if k else accumulate)
            cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)

    def s(self, slot):
        """Issue S^T = K Q^T: keys in lanes, queries in columns."""
        self._scores("k", "q", self.tmem.s(), slot)

    def dp(self, slot):
        """Issue dP^T = V dO^T."""
        self._scores("v", "do", self.tmem.dp(), slot)

    def _scores(self, keys, queries, column, slot):
        c, mma = self.config, make_mma_s(self.config)
        acc = self._accumulator(mma, (c.tile_n, c.tile_m), column)
        a = mma.make_fragment_A(self.smem[keys])[None, None, None, slot.at >> 8]
        b = mma.make_fragment_B(self.smem[queries])[None, None, None, slot.at]
        self._multiply(mma, acc, a, b, False)

    def dv(self, slot, accumulate):
        """Issue dV (+)= P^T dO."""
        column = self.tmem.dv()
        mma = make_mma_dv(self.config)
        acc = self._accumulator(mma, (self.config.tile_n, self.config.part_dv), column)
        self._from_tmem(mma, acc, self._slices(self.tmem.s()), "dot", slot, accumulate)

    def dk(self, slot, accumulate):
        """Issue dK (+)= dS^T Q; of one CTA from the dS that dQ reads, as an operand of the other major."""
        c, mma = self.config, make_mma_dk(self.config)
        acc = self._accumulator(mma, (c.tile_n, c.part_d), self.tmem.dk())
        if c.ctas > 1:
            self._from_tmem(mma, acc, self._slices(self.tmem.dp()), "qt", slot, accumulate)
            return
        a = mma.make_fragment_A(self.smem["dst"])[None, None, None, slot.at >> 8]
        b = mma.make_fragment_B(self.smem["qt"])[None, None, None, slot.at]
        self._multiply(mma, acc, a, b, accumulate)

    def _slices(self, column):
        """Columns of slices of 16 queries of P or dS."""
        slices = range(self.config.tile_m // SLICE)
        return [column + self.tmem.slice_of(k) for k in slices]

    def _from_tmem(self, mma, acc, columns, name, slot, accumulate):
        """A in tensor memory, each slice of 16 columns of it at its own place."""
        shaped = mma.make_fragment_A(cute.make_tensor(self.pointer, self.p_layout))
        layout = shaped[None, None, 0, 0].layout
        b = mma.make_fragment_B(self.smem[name])[None, None, None, slot.at]
        for k, column in enumerate(columns):
            at = self.pointer + column
            a = cute.make_tensor(cute.recast_ptr(at, dtype=element(self.config)), layout)
            mma.set(tcgen05.Field.ACCUMULATE, True if k else accumulate)
            cute.gemm(mma, acc, a, b[None, None, k], acc)

    def dq(self, slot):
        """Issue dQ = dS K; in a pair 64 queries of each CTA, all 256 keys."""
        c, mma = self.config, make_mma_dq(self.config)
        acc = self._accumulator(mma, (TILE_M, c.tile_d), self.tmem.dq())
        a = mma.make_fragment_A(self.smem["ds"])[None, None, None, slot.at]
        b = mma.make_fragment_B(self.smem["kt"])[None, None, None, slot.at]
        self._multiply(mma, acc, a, b, False)


@dataclass(frozen=True)
class RelayOps:
    """Verbs of the ``relay`` role."""

    config: cutlass.Constexpr
    sPanels: cute.Tensor  # (numbers of a panel, 3), 16 bit, without a swizzle
    barrier: object  # of signal x, in this CTA
    rank: object  # of the CTA

    @property
    def panel_bytes(self):
        """Bytes of a panel."""
        return self.config.panel_bytes

    def send_ds(self):
        """Start the copy of the outgoing panel to the peer, where its bytes count."""
        peer = 1 - self.rank
        source = self.sPanels[None, 2].iterator
        target = cute.arch.map_dsmem_ptr(self.sPanels[None, self.rank].iterator, peer)
        barrier = cute.arch.map_dsmem_ptr(self.barrier, peer)
        with cute.arch.elect_one():
            primitives.cp_async_bulk_shared_cluster_shared_cta(
                target, source, barrier, self.config.panel_bytes
            )
