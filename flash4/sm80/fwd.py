"""Forward attention for Ampere, and for newer cards without kernels of their own: host code and launch.

Each tile has its own CTA: the hardware hands tiles out, the longest of a section first. Config is in ``fwd_config``, the
schedule in ``fwd_roles``, its verbs in ``fwd_ops``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from flash4.common.graph import WARP
from flash4.common.launch_arguments import aux_of, fake_forward, sequences_of
from flash4.common.numerics import LOG2E, Divisor
from flash4.common.tiles import Divisors, Grid, TileSchedule
from flash4.common.varlen import VarlenSchedule
from flash4.common.warps import Warp
from flash4.sm80.fwd_config import SMEM_ALIGN, ForwardConfig
from flash4.sm80.fwd_ops import ForwardOps, RowState
from flash4.sm80.fwd_roles import ForwardRoles
from flash4.sm80.fwd_tiles import FoundTiles
from flash4.sm80.products import element
from flash4.sm80.scores import Scores


class ForwardSm80:
    """One Ampere forward kernel; its schedule and verbs are named here for the ladder of ``bench.ladder80``."""

    schedule, verbs = ForwardRoles, ForwardOps

    def __init__(self, config: ForwardConfig):
        self.config = config
        self.roles = self.schedule()

    def fake_arguments(self):
        """Arguments of ``__call__`` with symbolic sizes and strides, for compiling without data."""
        return fake_forward(self.config, element(self.config))

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
            sequences = sequences_of(q, k, optional)
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
