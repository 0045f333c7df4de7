"""Configurations of the kernels before and after a backward; DSL-free."""

from dataclasses import dataclass

THREADS = 256
PREPARE = "flash4.passes.bwd_prepare:PrepareBackward"
FINISH = "flash4.passes.bwd_finish:FinishBackward"


@dataclass(frozen=True)
class PrepareConfig:
    """Facts of the kernel that makes the row statistics and zeroes the sums of dQ.

    Attributes:
        bf16: bfloat16 out and dout; float16 otherwise.
        tile_m: queries per block.
        tile_d: head dim of dQ, padded.
        tile_dv: head dim of out, padded.
        dlse: the LSE has a gradient.
        turns: those of tiles that add to dQ are counted, from zero.
        handed_out: so are tiles that CTAs take.
        zeroes: the sums of dQ have to start from zero.
        chained: the next kernel may be launched before this one has ended; it waits where it must.
        cu_q: queries are packed, as in ``sm90.bwd_config.BackwardConfig``.
        used_q: queries in use are counted.
        negates: statistics are stored as -LSE and -D, for those who add them.
        finds: tiles of keys are looked for, for the next kernel; the fields that follow are of these, as in its config.
        tile_n: keys per tile.
        causal: bottom-right causal mask.
        left: a window limits the keys before a query's own position.
        right: a window limits the keys after it.
        cu_k: keys are packed.
        used_k: keys in use are counted.
        least_heads: of a section.
    """

    bf16: bool
    tile_m: int
    tile_d: int
    tile_dv: int
    dlse: bool
    turns: bool = False
    handed_out: bool = False
    zeroes: bool = True
    chained: bool = False
    cu_q: bool = False
    used_q: bool = False
    negates: bool = False
    finds: bool = False
    tile_n: int = 0
    causal: bool = False
    left: bool = False
    right: bool = False
    cu_k: bool = False
    used_k: bool = False
    least_heads: int = 0

    @property
    def varlen(self) -> bool:
        """Blocks look for their rows among sequences."""
        return self.cu_q or self.used_q or self.finds


@dataclass(frozen=True)
class FinishConfig:
    """Facts of the kernel that makes dQ of its sums; fields as in ``sm90.bwd_config.BackwardConfig``.

    Attributes:
        warps: that multiplied a block, each 16 by 8 numbers at a time (``fragments.warp_dq_place``); 0 where warpgroups did.
        query_warps: of these, those that share its queries.
        dq_lanes: 1 or 2 where the sums lie as lanes of tensor memory of so many CTAs have them, else 0.
        checks: sums of queries that see no key may hold anything; the fields that follow are for these alone.
        tile_n: keys per tile.
        causal: bottom-right causal mask.
        cu_k: keys are packed.
        used_k: keys in use are counted.
    """

    bf16: bool
    tile_m: int
    tile_d: int
    swap_dq: bool
    chained: bool = False
    cu_q: bool = False
    used_q: bool = False
    warps: int = 0
    query_warps: int = 0
    dq_lanes: int = 0
    checks: bool = False
    tile_n: int = 0
    causal: bool = False
    cu_k: bool = False
    used_k: bool = False

    @property
    def varlen(self) -> bool:
        """Blocks look for their rows among sequences."""
        return self.cu_q or self.used_q or self.checks

    @property
    def splits_queries(self) -> bool:
        """Each warpgroup has half of the queries, not of the head dims."""
        return self.tile_m == 128 and not self.swap_dq


def passes_of(config, dlse: bool) -> tuple[PrepareConfig, FinishConfig]:
    """The kernels around a backward kernel of this config."""
    lengths = (config.cu_q, config.used_q)
    keys = {name: getattr(config, name) for name in ("tile_n", "causal", "cu_k", "used_k")}
    finds, checks = {}, {}
    if config.tiles_found:
        others = {name: getattr(config, name) for name in ("left", "right", "least_heads")}
        finds = {"finds": True} | keys | others
    if config.visits_checked:
        checks = {"checks": True} | keys
    prepare = PrepareConfig(
        config.bf16, config.tile_m, config.dq_width, config.tile_dv, dlse, config.turns,
        config.handed_out, not config.first_stores, config.chained, *lengths, config.negates, **finds,
    )  # fmt: skip
    return prepare, FinishConfig(
        config.bf16,
        config.tile_m,
        config.dq_width,
        config.swap_dq,
        config.chained,
        *lengths,
        **config.order_of_sums,
        **checks,
    )
