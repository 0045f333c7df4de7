"""Configuration and pipeline graph of the Hopper backward for head dims above 128, DSL-free; see ``bwd_config``."""

from dataclasses import dataclass, replace

from flash4.common.graph import Buffer, PipelineGraph, Ring, Role
from flash4.common.mod_facts import fields_of_mods, lacks_derivative
from flash4.sm90.bwd_config import (
    FLOAT_BYTES,
    MMA_WARPGROUPS,
    REGISTERS,
    BackwardFacts,
)
from flash4.sm90.fwd_config import ELEMENT_BYTES, MMA_ROWS

MAX_HEAD_DIM = 256
PART_WIDTH = 64  # head dims of dQ that a warpgroup multiplies at a time


@dataclass(frozen=True)
class WideBackwardConfig(BackwardFacts):
    """Compile-time facts of one wide Hopper backward kernel; ints and bools only, and it is the cache key.

    Attributes:
        bf16: bfloat16 inputs and gradients; float16 otherwise.
        tile_d: head dim of Q, K, dQ and dK, padded (TMA fills with zeros).
        tile_dv: head dim of V, dO and dV, padded.
        causal: bottom-right causal mask.
        ctas: CTAs of a cluster that share a tile: 64 keys each, and every block of queries is loaded once for all.
        q_stages: slots of Q.
        do_stages: slots of dO.
        joint: the two CTAs send each other dS, and each adds up half of the head dims of dQ over the keys of both.
        left: as in ``BackwardConfig``, like all that follow.
        right: a window limits the keys after a query's own position.
        softcap: scores are capped.
        alibi: scores lose a slope times a distance.
        ordered: tiles add to dQ in a fixed order.
        score_mod: key of the callable that changes scores.
        score_mod_bwd: of the one that takes gradients back through it.
        mask_mod: of the one that hides keys.
        aux: types of the tensors that mods read.
        cu_q: queries are packed.
        cu_k: keys and values are packed.
        used_q: queries in use are counted for each sequence.
        used_k: keys in use are counted for each sequence.
    """

    bf16: bool
    tile_d: int
    tile_dv: int
    causal: bool
    ctas: int = 2
    q_stages: int = 2
    do_stages: int = 1
    joint: bool = False
    left: bool = False
    right: bool = False
    softcap: bool = False
    alibi: bool = False
    ordered: bool = False
    score_mod: int = 0
    score_mod_bwd: int = 0
    mask_mod: int = 0
    aux: int = 0
    cu_q: bool = False
    cu_k: bool = False
    used_q: bool = False
    used_k: bool = False

    # None is built of how the narrow kernel orders tiles and additions of plain calls.
    late = backwards = False

    def __post_init__(self):
        self.check_mods()
        for name in ("tile_d", "tile_dv"):
            if getattr(self, name) % PART_WIDTH or getattr(self, name) > MAX_HEAD_DIM:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; supported are multiples of {PART_WIDTH} up to {MAX_HEAD_DIM}"
                )
        if self.dq_parts < MMA_WARPGROUPS:
            raise ValueError(f"tile_d is {self.tile_d}; each warpgroup needs {PART_WIDTH} of it")
        if self.ctas not in (1, 2):
            raise ValueError(f"ctas is {self.ctas}; supported are 1 and 2")
        if self.joint and (self.ctas != 2 or self.dq_parts != 4 or self.ordered):
            raise ValueError(
                f"joint with {self.ctas} CTAs, tile_d {self.tile_d}, ordered {self.ordered}; it needs 2, 256, and no order"
            )
        if self.varlen and self.ctas > 1:
            raise ValueError(
                "sequences of different lengths with clusters are not built: ctas is 1"
            )
        if self.causal and self.right:
            raise ValueError("causal and right exclude each other: causal is a right side of 0")

    @property
    def tile_m(self) -> int:
        """Queries per step."""
        return MMA_ROWS

    @property
    def tile_n(self) -> int:
        """Keys per tile."""
        return MMA_ROWS * self.ctas

    @property
    def splits_queries(self) -> bool:
        """Warpgroups share dQ by head dims; as in ``BackwardConfig``."""
        return False

    @property
    def dq_parts(self) -> int:
        """Parts of dQ: ``mma_v`` multiplies those with even numbers, ``mma_k`` the others."""
        return self.tile_d // PART_WIDTH

    @property
    def dq_shape(self) -> tuple[int, int]:
        """(queries, head dims) of what a warpgroup's box holds: a part, or half of one."""
        return self.tile_m, PART_WIDTH // (2 if self.joint else 1)

    @property
    def dq_floats(self) -> int:
        """Numbers in a warpgroup's box."""
        queries, head_dims = self.dq_shape
        return queries * head_dims

    @property
    def ds_stages(self) -> int:
        """Stages of dS."""
        return 1 if self.joint else 2

    @property
    def peer_k_bytes(self) -> int:
        """Bytes of the other CTA's keys, of half of their head dims."""
        return MMA_ROWS * self.tile_d // 2 * ELEMENT_BYTES if self.joint else 0

    @property
    def graph(self) -> PipelineGraph:
        """Roles, rings and shared memory; both MMA roles read what ``load`` fills.

        load --[k x1 tma->warps]--> mma
        load --[v x1 tma->warps]--> mma
        load --[q x2 tma->warps of 2 CTAs]--> mma
        load --[do x1 tma->warps of 2 CTAs]--> mma
        """
        mma_registers, registers = REGISTERS
        load = Role("load", range(0, 1), 1, registers)
        reduce = Role("reduce", range(0, 1), MMA_WARPGROUPS, registers, first_warp=1)
        mma_v = Role("mma_v", range(1, 2), 4, mma_registers)
        mma_k = Role("mma_k", range(2, 3), 4, mma_registers)
        mma = Role("mma", range(1, 3), 4 * MMA_WARPGROUPS, mma_registers)
        k_bytes, v_bytes = (MMA_ROWS * d * ELEMENT_BYTES for d in (self.tile_d, self.tile_dv))
        q_bytes, do_bytes = (self.tile_m * d * ELEMENT_BYTES for d in (self.tile_d, self.tile_dv))
        q_slot, do_slot = q_bytes + self.statistics_bytes, do_bytes + self.statistics_bytes
        return PipelineGraph(
            roles=(load, reduce, mma_v, mma_k),
            rings=(
                Ring("k", load, mma, 1, k_bytes + self.peer_k_bytes),
                Ring("v", load, mma, 1, v_bytes),
                Ring("q", load, mma, self.q_stages, q_slot, self.ctas),
                Ring("do", load, mma, self.do_stages, do_slot, self.ctas),
            ),
            buffers=(
                Buffer("k", k_bytes + self.peer_k_bytes),
                Buffer("v", v_bytes),
                Buffer(
                    "ds", 2 * self.tile_m * MMA_ROWS * ELEMENT_BYTES
                ),  # stages, or the other CTA's
                Buffer("p", self.tile_m * MMA_ROWS * FLOAT_BYTES),  # from mma_v to mma_k
                Buffer("dq", MMA_WARPGROUPS * self.dq_floats * FLOAT_BYTES),
                Buffer("q", self.q_stages * q_slot),  # tiles, then LSE of each
                Buffer("do", self.do_stages * do_slot),  # tiles, then D of each
                Buffer("dk", k_bytes, borrows="k"),
                Buffer("dv", v_bytes, borrows="v"),
            ),
        )


def can_implement(problem) -> str | None:
    """Why this kernel cannot run the backward of a problem, or None if it can."""
    obstacle = lacks_derivative(problem)
    if obstacle is not None:
        return obstacle
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size > MAX_HEAD_DIM:
            return f"gradients with {name} {size} are not built yet; supported are up to {MAX_HEAD_DIM}"
    return None


def padded_head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Head dims of the tile: multiples of 64, and for each warpgroup a part of dQ."""
    tile_d, tile_dv = (-(-size // PART_WIDTH) * PART_WIDTH for size in (head_dim, head_dim_v))
    return max(tile_d, MMA_WARPGROUPS * PART_WIDTH), tile_dv


def choose_config(problem) -> tuple[WideBackwardConfig, tuple[str, ...]]:
    """Configuration for a problem that ``can_implement`` accepts, and the reasons for it."""
    import torch

    tile_d, tile_dv = padded_head_dims(problem.head_dim, problem.head_dim_v)
    alone = problem.deterministic or problem.varlen
    joint = tile_d == MAX_HEAD_DIM and tile_dv > 64 and not alone  # or it spills
    config = WideBackwardConfig(
        bf16=problem.dtype == torch.bfloat16,
        tile_d=tile_d,
        tile_dv=tile_dv,
        causal=problem.causal,
        ctas=2 if joint else 1,
        joint=joint,
        left=problem.window_left,
        right=problem.window_right,
        softcap=problem.softcap,
        alibi=problem.alibi,
        ordered=problem.deterministic,
        **fields_of_mods(problem),
        cu_q=problem.cu_q,
        cu_k=problem.cu_k,
        used_q=problem.used_q,
        used_k=problem.used_k,
    )
    if joint:
        order = "pairs of CTAs add dQ up together: half as many additions to global memory"
    elif problem.varlen:
        order = "one CTA for each tile, which it finds by itself among the sequences"
    elif tile_d == MAX_HEAD_DIM and not problem.deterministic:
        order = f"one CTA for each tile: a pair that adds dQ up would spill beside a V of {tile_dv}"
    else:
        why = "the order of sums is fixed" if problem.deterministic else f"head dim {tile_d}"
        order = (
            f"one CTA for each tile, {why}: a pair would only share loads, and wait for each other"
        )
    keys = "64 keys for each CTA: dK or dV of so many is what a warpgroup's registers hold"
    roomy = replace(config, do_stages=2)
    return (roomy if roomy.fits else config), (keys, order)
