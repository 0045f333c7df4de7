"""Forward attention for Ampere, and for newer cards without kernels of their own: host code and launch.

Each tile has its own CTA: the hardware hands tiles out, the longest of a section first. Config is in ``fwd_config``, the
schedule in ``fwd_roles``, its verbs in ``fwd_ops``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from flash4.common.graph import WARP
from flash4.common.mods import AUX, decode_aux
from flash4.common.numerics import LOG2E, Divisor
from flash4.common.tiles import Divisors, Grid, TileSchedule
from flash4.common.varlen import Sequences, VarlenSchedule
from flash4.common.warps import Warp
from flash4.sm80.fwd_config import SMEM_ALIGN, ForwardConfig
from flash4.sm80.fwd_ops import ForwardOps, RowState
from flash4.sm80.fwd_roles import ForwardRoles
from flash4.sm80.fwd_tiles import FoundTiles
from flash4.sm80.products import element
from flash4.sm80.scores import Scores

# In the order of mods.AUX_DTYPES.
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
AUX_ELEMENTS = (Float32, cutlass.Float16, cutlass.BFloat16, Int32, Int64)


class ForwardSm80:
    """One Ampere forward kernel; its schedule and verbs are named here for the ladder of ``bench.ladder80``."""

    schedule, verbs = ForwardRoles, ForwardOps

    def __init__(self, config: ForwardConfig):
        self.config = config
        self.roles = self.schedule()

    def fake_arguments(self):
        """Arguments of ``__call__`` with symbolic sizes and strides, for compiling without data."""
        c = self.config

        def sym(divisibility):
            return cute.sym_int64(divisibility=divisibility)

        batch, heads, heads_kv = cute.sym_int(), cute.sym_int(), cute.sym_int()
        batch_k = batch if c.cu_q == c.cu_k else cute.sym_int()  # packed: a batch of one
        seqlen_q, seqlen_k = cute.sym_int(), cute.sym_int()
        head_dim, head_dim_v = cute.sym_int(divisibility=8), cute.sym_int(divisibility=8)

        def tensor(*shape):
            strides = (sym(8), sym(8), sym(8), 1)  # cp.async: multiples of 16 bytes
            return cute.runtime.make_fake_tensor(
                element(c), shape, stride=strides, assumed_align=16
            )

        def vector(dtype, *shape):
            strides = (*(sym(1) for _ in shape[1:]), 1)
            return cute.runtime.make_fake_tensor(dtype, shape, stride=strides, assumed_align=4)

        optional = {
            "sink": vector(Float32, heads),
            "alibi_slopes": vector(Float32, cute.sym_int(), heads),
            **{name: vector(Int32, cute.sym_int()) for name in LENGTHS},
            **{f"{AUX}{i}": fake_aux(*kind) for i, kind in enumerate(decode_aux(c.aux))},
        }
        tensors = (
            tensor(batch, seqlen_q, heads, head_dim),
            tensor(batch_k, seqlen_k, heads_kv, head_dim),
            tensor(batch_k, seqlen_k, heads_kv, head_dim_v),
            tensor(batch, seqlen_q, heads, head_dim_v),
            vector(Float32, batch, heads, seqlen_q),
            *(optional[name] for name in c.optional_tensors),
        )
        sides = ("left", "right")
        numbers = tuple(Int32(1) if name in sides else Float32(1) for name in c.numbers)
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        return (tensors, numbers, Int32(1), Int32(1), stream)

    @cute.jit
    def __call__(
        self,
        tensors,  # q (B, Sq, H, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), o (B, Sq, H, Dv), lse (B, H, Sq) float32, ...
        numbers: tuple,  # Float32 or Int32, named by the config
        section: Int32,
        workers: Int32,  # as all forwards are given; here each tile has its own
        stream,
    ):
        """Launch."""
        c = self.config
        q, k, v, o, lse, *optional = tensors
        optional = dict(zip(c.optional_tensors, optional, strict=True))
        numbers = dict(zip(c.numbers, numbers, strict=True))
        heads_kv = k.shape[2]
        grid = Grid(
            m_blocks=cute.ceil_div(q.shape[1], c.tile_q),
            groups=cute.ceil_div(q.shape[2] // heads_kv, c.pack),
            heads_kv=heads_kv,
            batch=q.shape[0],
        )
        scale = numbers["scale"] if c.natural else numbers["scale"] * LOG2E
        scale_log2 = scale
        if c.changes_scores:
            scale_log2 = Float32(LOG2E if c.natural else 1.0)
        sign = -1.0 if c.negate else 1.0
        scores = Scores(
            scale=scale if c.softcap else scale * sign,
            cap_scale=numbers["cap_scale"] * sign if c.softcap else None,
            scale_log2=scale_log2,
            inv_scale_log2=1.0 / scale_log2,
            sink=optional.get("sink"),
            slopes=optional.get("alibi_slopes"),
            aux=aux_of(optional),
        )
        sides = (numbers.get("left"), numbers.get("right"))
        sequences, divisors, total = None, None, grid.total
        if cutlass.const_expr(c.varlen):
            sequences = self._sequences(q, k, optional)
            tiles = FoundTiles(VarlenSchedule(c.blocks(*sides), grid, sequences, section), None, 0)
            total = tiles.total
        else:
            divisors = Divisors.of(grid, section, Int32(1)).each(Divisor)
        order = (section, divisors, sequences)
        self.kernel((q, k, v, o, lse), scores, sides, grid, order).launch(
            grid=(total, 1, 1),
            block=(c.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=c.ctas_per_sm,
            preferred_smem_carveout=100,  # percent; without it the DSL would ask a driver
        )

    def _sequences(self, q, k, optional):
        """Sequences of a call whose lengths are in tensors."""
        cu_q, cu_k, used_q, used_k = (optional.get(name) for name in LENGTHS)
        batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
        return Sequences(batch, q.shape[1], k.shape[1], cu_q, cu_k, used_q, used_k)

    @cute.kernel
    def kernel(self, tensors: tuple, scores: Scores, sides: tuple, grid: Grid, order: tuple):
        """One tile."""
        c, (q, k, *_) = self.config, tensors
        index, _, _ = cute.arch.block_idx()
        section, divisors, sequences = order
        blocks = c.blocks(*sides)
        if cutlass.const_expr(c.varlen):
            thread, _, _ = cute.arch.thread_idx()
            schedule = VarlenSchedule(blocks, grid, sequences, section)
            tiles = FoundTiles(schedule, Warp(thread % WARP), index)
        else:
            rows = (q.shape[1], k.shape[1])
            tiles = TileSchedule(blocks, grid, section, index, 1, *rows, divisors)
        self.roles.attend(self._ops(tensors, scores, tiles), tiles)

    def _ops(self, tensors, scores, tiles):
        """Verbs of a thread: what it copies, what it reads, its accumulators and row state."""
        c, (q, k, v, o, lse) = self.config, tensors
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
        smem = SmemAllocator()
        at = {
            name: smem.allocate(nbytes, byte_alignment=SMEM_ALIGN).toint()
            for name, nbytes in c.graph.allocations().items()
        }
        return self.verbs(
            config=c,
            tiles=tiles,
            scores=scores,
            q=q,
            k=k,
            v=v,
            o=o,
            lse=lse,
            sQ=at["q"],
            sK=at["k"],
            sV=at["v"],
            q_row=c.rows_q.of_lane(lane, by_columns=False),
            k_row=c.rows_k.of_lane(lane, by_columns=True),
            v_row=c.rows_v.of_lane(lane, by_columns=False),
            tOrO=cute.make_rmem_tensor((4, c.tile_dv // 8, c.atoms), Float32),
            state=RowState.of(2 * c.atoms),
            first=cute.make_rmem_tensor(2, Int64),
            thread=thread,
            warp=warp,
        )


def fake_aux(dtype_index, dims):
    """A tensor that mods read: any sizes and strides."""
    dtype = AUX_ELEMENTS[dtype_index]
    return cute.runtime.make_fake_tensor(
        dtype,
        tuple(cute.sym_int() for _ in range(dims)),
        stride=tuple(cute.sym_int64() for _ in range(dims)),
        assumed_align=dtype.width // 8,
    )


def aux_of(optional):
    """Tensors that mods read, or None."""
    found = tuple(x for name, x in optional.items() if name.startswith(AUX))
    return found if found else None
