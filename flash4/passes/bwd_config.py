"""Configurations of the kernels before and after a backward; DSL-free."""

from dataclasses import dataclass

from flash4.common.kv_tiles import slots_of
from flash4.common.launch_facts import COUNTERS, FOUND_TILES

THREADS = 256
WHOLE = "flash4.passes.bwd_whole:WholeBackward"
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
        dq_turned: they lie as lanes have the transpose.
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
    dq_turned: bool = False
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


@dataclass(frozen=True)
class WholeConfig:
    """Facts of a whole backward, which one call launches.

    Attributes:
        kernel: class of the main kernel as ``"module:class"``.
        main: its config.
        dlse: the LSE has a gradient.
    """

    kernel: str
    main: object
    dlse: bool

    @property
    def score_mod(self) -> int:
        """Key of the mod of the main kernel; 0 for none, as the next."""
        return getattr(self.main, "score_mod", 0)

    @property
    def mask_mod(self) -> int:
        """The same of the mask."""
        return getattr(self.main, "mask_mod", 0)

    @property
    def passes(self) -> tuple[PrepareConfig, FinishConfig]:
        """The kernels around the main one."""
        return passes_of(self.main, self.dlse)

    def parts(self, tensors, facts, view, wide=int) -> tuple[tuple, tuple, tuple]:
        """Tensors of the three kernels, of those that the call is given; dual-mode.

        Args:
            tensors: q, k, v, out, dout, lse, dq, dk, dv, workspace, those that ``main.given_tensors`` names, and dlse.
            facts: numbers, as ``main.numbers`` names them, and section of the call.
            view: (name, first number, shape) -> a part of the workspace.
            wide: makes an integer one that holds the size of the workspace.
        """
        c = self.main
        q, k, v, out, dout, lse, dq, dk, dv, _, *rest = tensors
        optional = dict(zip(c.given_tensors, rest, strict=False))
        lengths, lengths_k = (
            [optional[name] for name in names if name in optional]
            for names in (("cu_seqlens_q", "seqused_q"), ("cu_seqlens_k", "seqused_k"))
        )
        sequences = optional["cu_seqlens_q"].shape[0] - 1 if c.cu_q else 1
        sequences_k = optional["cu_seqlens_k"].shape[0] - 1 if c.cu_k else k.shape[0]
        rows = (q.shape[0], q.shape[2], slots_of(sequences, q.shape[1], c.tile_m, c.cu_q))
        tiles = slots_of(sequences_k, k.shape[1], c.tile_n, c.cu_k) * k.shape[2]
        padded = (*rows[:2], rows[2] * c.tile_m)
        shapes = {
            "sums": (*rows, c.tile_m * c.dq_width),
            "lse": padded,
            "delta": padded,
            "next_tile": (1,),
            "turns": (*rows, 2),
        }
        if c.tiles_found:
            shapes[FOUND_TILES] = (tiles, c.tile_slots[0])
        places = c.workspace(wide(rows[0] * rows[1] * rows[2]), wide(tiles))
        made = {name: view(name, first, shapes[name]) for name, (first, _) in places.items()}
        sums, statistics = made["sums"], (made["lse"], made["delta"])
        counters = [made[name] for name in COUNTERS if name in made]
        dlse = rest[-1:] if self.dlse else ()
        optional |= made
        keys, found = (k, *lengths_k), ()
        if c.tiles_found:
            numbers, section = facts
            sides = [
                x for name, x in zip(c.numbers, numbers, strict=True) if name in ("left", "right")
            ]
            found = (made[FOUND_TILES], section, *sides, *keys)
        return (
            (out, dout, lse, *statistics, sums, *lengths, *counters, *dlse, *found),
            (q, k, v, dout, *statistics, sums, dk, dv, *(optional[n] for n in c.optional_tensors)),
            (sums, dq, *lengths, *(keys if c.visits_checked else ())),
        )
