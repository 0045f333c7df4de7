"""Configuration of the Hopper backward for head dims of 136 to 192 of Q and K, DSL-free; see ``bwd_config``."""

from dataclasses import dataclass, replace

from flash4.sm90.bwd_config import MAX_HEAD_DIM as NARROW_HEAD_DIM
from flash4.sm90.bwd_config import (
    MMA_WARPGROUPS,
    BackwardConfig,
)
from flash4.sm90.fwd_config import MMA_ROWS

PARTS = 3  # of dQ, of 64 head dims each: one for each warpgroup, and one that they share
MAX_HEAD_DIM = PARTS * MMA_ROWS
DIM_STEP = 32
MAX_SUM = 320  # of the padded head dims: half as many registers of a thread hold dK and dV
TILE_M = 48  # queries of a step: what registers hold beside dK and dV of 64 keys
SMALL_TILE_M = 32  # with what takes more of them


@dataclass(frozen=True)
class Backward192Config(BackwardConfig):
    """Compile-time facts of one such kernel; fields as in ``BackwardConfig``.

    dQ^T is multiplied, whose 192 rows are three parts: each warpgroup has one, and half of the queries of the third.
    """

    near_cap = False  # not built for its registers

    def _check_tile(self):
        if not (NARROW_HEAD_DIM < self.tile_d <= MAX_HEAD_DIM and self.tile_d % DIM_STEP == 0):
            raise ValueError(f"tile_d is {self.tile_d}; supported are 160 and {MAX_HEAD_DIM}")
        if not self.swap_dq or self.tile_m % 16:
            raise ValueError(
                f"swap_dq {self.swap_dq}, tile_m {self.tile_m}; supported are True, and multiples of 16"
            )
        if self.late:
            raise ValueError("late takes registers that dK and dV have")

    @property
    def dq_width(self) -> int:
        """Head dims of dQ as it is multiplied, and of K in shared memory: three whole parts."""
        return MAX_HEAD_DIM

    @property
    def dq_shape(self) -> tuple[int, int]:
        """(queries, head dims) of as many numbers as a warpgroup's part of dQ has: it is not a rectangle."""
        return self.tile_m, self.dq_width // MMA_WARPGROUPS


def padded(head_dim: int) -> int:
    """Head dim of the tile: at least 64, and a multiple of 32."""
    return max(64, -(-head_dim // DIM_STEP) * DIM_STEP)


def can_implement(problem) -> str | None:
    """Why this kernel cannot run the backward of a problem, or None if it can."""
    if problem.score_mod or problem.mask_mod:
        return "takes no mods: they need more registers than are left"
    if not NARROW_HEAD_DIM < problem.head_dim <= MAX_HEAD_DIM:
        return (
            f"takes head_dim from {NARROW_HEAD_DIM + 8} to {MAX_HEAD_DIM}, not {problem.head_dim}"
        )
    most = MAX_SUM - padded(problem.head_dim)
    if problem.head_dim_v > most:
        return f"takes head_dim_v up to {most} beside head_dim {problem.head_dim}, not {problem.head_dim_v}"
    return None


def choose_config(problem) -> tuple[Backward192Config, tuple[str, ...]]:
    """Configuration for a problem that ``can_implement`` accepts, and the reasons for it."""
    import torch

    scarce = [name for name in ("softcap", "window_left") if getattr(problem, name)]
    config = Backward192Config(
        bf16=problem.dtype == torch.bfloat16,
        tile_d=padded(problem.head_dim),
        tile_dv=padded(problem.head_dim_v),
        tile_m=SMALL_TILE_M if scarce else TILE_M,
        causal=problem.causal,
        swap_dq=True,
        left=problem.window_left,
        right=problem.window_right,
        softcap=problem.softcap,
        alibi=problem.alibi,
        ordered=problem.deterministic,
        cu_q=problem.cu_q,
        cu_k=problem.cu_k,
        used_q=problem.used_q,
        used_k=problem.used_k,
    )
    beside = " and ".join((f"head dims {config.tile_d}/{config.tile_dv}", *scarce))
    why = (f"{config.tile_m} queries per step: what registers hold beside {beside}",)
    limited = problem.window_left or problem.window_right or problem.varlen
    if limited or problem.softcap or problem.alibi or problem.deterministic:
        return config, (*why, "one CTA for each tile of keys, and kernels one after the other")
    if problem.heads_q != problem.heads_kv:
        return config, (
            *why,
            "one CTA for each tile of keys, in the order of the hardware: faster where query heads share keys",
        )
    first_stores = not problem.causal or problem.seqlen_q <= problem.seqlen_k
    if not problem.causal and config.tile_d == config.tile_dv:
        first_stores = False  # with 160 and 160 head dims a register would spill, and products wait for one another
    config = replace(
        config, handed_out=True, backwards=True, chained=True, first_stores=first_stores
    )
    return config, (
        *why,
        "tiles handed out, and kernels launched before the one before has ended",
    )
