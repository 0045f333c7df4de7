"""Backward attention for Ampere, and for newer cards without kernels of their own: host code and launch.

Each tile of keys has its own CTA. The kernels before and after it are ``passes.bwd_prepare`` and ``passes.bwd_finish``.
Config is in ``bwd_config``, the schedule in ``bwd_roles``, its verbs in ``bwd_ops``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from flash4.common.graph import WARP
from flash4.common.kv_sequences import SequenceSchedule, find_tile
from flash4.common.kv_tiles import KvGrid, KvTileSchedule
from flash4.common.launch_arguments import aux_of, fake_backward, sides_of
from flash4.common.numerics import LOG2E, Factor
from flash4.common.warps import Warp
from flash4.sm80.bwd_config import BackwardConfig
from flash4.sm80.bwd_ops import BackwardOps, RunTime, Shared
from flash4.sm80.bwd_roles import BackwardRoles
from flash4.sm80.bwd_two_ops import TwoRolesOps
from flash4.sm80.bwd_two_roles import TwoBackwardRoles
from flash4.sm80.fwd_config import SMEM_ALIGN
from flash4.sm80.products import element


class FoundTiles(SequenceSchedule):
    """The one tile of a CTA, which its warps find by themselves; ``number`` and ``warp`` are set beside the fields."""

    def first(self):
        """Return the tile; it is not valid if there is none of this number."""
        return find_tile(self, self.warp, self.number)


class BackwardSm80:
    """One Ampere backward kernel."""

    def __init__(self, config: BackwardConfig):
        self.config = config
        self.roles = TwoBackwardRoles() if config.two_roles else BackwardRoles()

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
        """Launch one CTA for each tile of keys."""
        c = self.config
        q, k, v, do, lse, delta, sums, dk, dv, *optional = tensors
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
            sums=sums,
            scale=numbers["scale"],
            cap=numbers["cap"] * (1.0 if c.natural else LOG2E) if c.softcap else None,
            cap_scale=numbers.get("cap_scale"),
            slopes=optional.get("alibi_slopes"),
            turns=optional.get("turns"),
            aux=aux_of(optional),
        )
        sides = (numbers.get("left"), numbers.get("right"))
        order = (section, (queries, keys) if c.varlen else None)
        self.kernel((q, k, v, do, dk, dv), run_time, sides, grid, order).launch(
            grid=(grid.total, 1, 1),
            block=(c.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=c.ctas_per_sm,
            preferred_smem_carveout=100,  # percent; without it the DSL would ask a driver
        )

    @cute.kernel
    def kernel(self, tensors: tuple, run_time: RunTime, sides: tuple, grid: KvGrid, order: tuple):
        """One tile."""
        c, (q, k, v, do, dk, dv) = self.config, tensors
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        section, found = order
        blocks = c.blocks(*sides)
        if cutlass.const_expr(c.varlen):
            tiles = FoundTiles(blocks, grid, *found, section, c.least_heads)
            object.__setattr__(tiles, "warp", Warp(thread % WARP))
            object.__setattr__(tiles, "number", index)
        else:
            tiles = KvTileSchedule(blocks, grid, section, index, 1, q.shape[1], k.shape[1])
        smem = SmemAllocator()
        at = {
            name: smem.allocate(nbytes, byte_alignment=SMEM_ALIGN).toint()
            for name, nbytes in c.graph.allocations().items()
        }
        given = dict(
            config=c,
            tiles=tiles,
            run_time=run_time,
            q=q,
            k=k,
            v=v,
            do=do,
            dk_out=dk,
            dv_out=dv,
            shared=Shared(
                **{name: at.get(name) for name in ("q", "k", "v", "do", "ds", "p", "lse", "delta")}
            ),
            thread=thread,
            warp=cute.arch.make_warp_uniform(thread // WARP) & (c.warps - 1),  # not negative
        )
        if cutlass.const_expr(c.two_roles):
            warp = given["warp"]
            if warp < c.role_warps:
                ops = TwoRolesOps(
                    **given,
                    dk_acc=None,
                    dv_acc=self._sums(c.tile_dv),
                    role=0,
                    role_warp=warp % c.role_warps,
                )
                self.roles.mma_v(ops, tiles)
            else:
                ops = TwoRolesOps(
                    **given,
                    dk_acc=self._sums(c.tile_d),
                    dv_acc=None,
                    role=1,
                    role_warp=warp % c.role_warps,
                )
                self.roles.mma_k(ops, tiles)
        else:
            ops = BackwardOps(**given, dk_acc=self._sums(c.tile_d), dv_acc=self._sums(c.tile_dv))
            self.roles.differentiate(ops, tiles)

    def _sums(self, columns):
        """Registers of a warp's part of dK or dV."""
        c = self.config
        return cute.make_rmem_tensor((4, columns // 8 // c.column_parts, c.sum_atoms), Float32)
