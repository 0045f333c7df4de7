"""A simulated call before its CTAs have it, and its gradients after: the same for kernels of every architecture."""

from dataclasses import dataclass

import numpy as np

from flash4.common.geometry import ceil_div
from flash4.common.kv_sequences import Side
from flash4.common.kv_tiles import KvGrid, KvTileSchedule
from flash4.common.numerics import LOG2E
from flash4.common.tiles import Grid
from flash4.common.varlen import Sequences
from flash4.problem import CallOptions, positive_scale
from flash4.sim.bwd_sequences import (
    sides_of,
    tiles_handed_out,
    tiles_of_ctas,
    to_rows,
    to_slots,
)


def round_to_16_bit(x: np.ndarray, bf16: bool) -> np.ndarray:
    """Round float32 to the nearest bfloat16 or float16, ties to even; the result is float32."""
    x = np.asarray(x, np.float32)
    if not bf16:
        return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32))


def options_of(options: CallOptions | float) -> CallOptions:
    """Options of a call; a number is the softmax scale of one without."""
    return options if isinstance(options, CallOptions) else CallOptions(options)


def blocks_of(config, options: CallOptions):
    """Which blocks tiles visit, with the sides of the window that the options have."""
    sides = (side if side >= 0 else None for side in (options.window_left, options.window_right))
    return config.blocks(*sides)


@dataclass(frozen=True)
class ForwardCall:
    """What CTAs of a forward work on.

    Attributes:
        q: queries, packed ones as a batch of one, with the sign of the scale.
        k: keys.
        v: values.
        out: result, NaN so far.
        lse: result, NaN so far.
        options: of the call.
        grid: extent of the work in tiles.
        blocks: visiting rule of KV blocks.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    options: CallOptions
    grid: Grid
    blocks: object

    @classmethod
    def of(cls, config, tensors, options):
        """That of q, k, v and options as the public function takes them."""
        (q, k, v), options = tensors, options_of(options)
        if options.alibi_slopes is not None:
            slopes = np.asarray(options.alibi_slopes, np.float32)
            slopes = np.broadcast_to(slopes, (options.batch(q), slopes.shape[-1]))
            options = options._replace(alibi_slopes=slopes)
        q = q[None] if config.cu_q else q
        k, v = (k[None], v[None]) if config.cu_k else (k, v)
        (batch, seqlen_q, heads, _), (_, _, heads_kv, head_dim_v) = q.shape, v.shape
        out = np.full((batch, seqlen_q, heads, head_dim_v), np.nan, np.float32)
        lse = np.full((batch, heads, seqlen_q), np.nan, np.float32)
        groups = ceil_div(heads // heads_kv, config.pack)
        grid = Grid(ceil_div(seqlen_q, config.tile_q), groups, heads_kv, batch)
        q, _ = positive_scale(q, options.softmax_scale)
        return cls(q, k, v, out, lse, options, grid, blocks_of(config, options))

    @property
    def rows(self) -> tuple[int, int]:
        """Queries and keys of an entry."""
        return self.q.shape[1], self.k.shape[1]

    @property
    def sequences(self) -> Sequences:
        """Sequences of different lengths."""
        lengths = (None if x is None else [int(n) for n in x] for x in self.options.lengths)
        return Sequences(self.options.batch(self.q), *self.rows, *lengths)


def batched(tensors, dlse, packed) -> tuple[tuple[np.ndarray, ...], np.ndarray | None]:
    """q, k, v, out, lse and dout, and the gradient of lse or None, packed ones as a batch of one."""
    q_packed, k_packed = packed
    sides = (q_packed, k_packed, k_packed, q_packed, q_packed, q_packed)
    made = tuple(x[None] if side else x for x, side in zip(tensors, sides, strict=True))
    return made, dlse[None] if q_packed and dlse is not None else dlse


@dataclass(frozen=True)
class BackwardCall:
    """What CTAs of a backward work on, beside its tensors.

    Attributes:
        options: of the call.
        sides: where queries and keys lie.
        blocks: visiting rule of blocks of queries.
        grid: extent of the work in tiles, of sequences of one length.
        rows: queries and keys of an entry.
    """

    options: CallOptions
    sides: tuple[Side, Side]
    blocks: object
    grid: KvGrid
    rows: tuple[int, int]

    @classmethod
    def of(cls, config, q, k, options):
        """That of q, k (B, S, H, D) and options."""
        (_, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = q.shape, k.shape
        options = options_of(options)
        sides = sides_of(config, q, k, options)
        batch = sides[0].batch
        if options.alibi_slopes is not None:
            slopes = np.asarray(options.alibi_slopes, np.float32)
            options = options._replace(alibi_slopes=np.broadcast_to(slopes, (batch, heads)))
        grid = KvGrid(ceil_div(seqlen_k, config.tile_n), heads_kv, batch, heads // heads_kv)
        return cls(options, sides, blocks_of(config, options), grid, (seqlen_q, seqlen_k))

    def tiles(self, config, workers: int, seed: int) -> list:
        """Tiles of each CTA; of sequences of one length so many CTAs take turns, if there are so many tiles."""
        if config.varlen:
            heads = (self.grid.heads_kv, self.grid.ratio)
            share = tiles_handed_out if config.handed_out else tiles_of_ctas
            return share(config, self.blocks, self.sides, heads, workers, 1 + seed % 7)
        workers, section = min(workers, self.grid.total), 1 + seed % self.grid.head_count
        return [
            KvTileSchedule(self.blocks, self.grid, section, i, workers, *self.rows)
            for i in range(workers)
        ]


def prepare(queries: Side, out, lse, dout, dlse=None):
    """LSE in log2 units and D, both of whole blocks, as ``passes.bwd_prepare`` makes them."""
    keyless = lse == -np.inf
    d = (out * dout).sum(-1, dtype=np.float32).transpose(0, 2, 1)
    d = d if dlse is None else d - dlse
    lse2 = np.where(keyless, np.inf, lse * np.float32(LOG2E))
    return to_slots(queries, lse2, np.inf), to_slots(queries, np.where(keyless, 0, d), 0)


def gradients(sums, call, packed) -> tuple[np.ndarray, ...]:
    """(dq, dk, dv) as the public function gives them.

    Args:
        sums: of dQ, unscaled, (entries, heads, rows of all slots, padded head dim).
        call: one of the CTAs': with the config, q, k, dk, dv and the options.
        packed: whether q is, and whether k and v are.
    """
    dq = round_to_16_bit(sums * np.float32(call.options.softmax_scale), call.config.bf16)
    side, keys = sides_of(call.config, call.q, call.k, call.options)
    visits = (call.config.blocks(), keys) if call.config.visits_checked else None
    dq = to_rows(side, dq, np.full(call.q.shape, np.nan, np.float32), visits)
    results = zip((dq, call.dk, call.dv), (packed[0], packed[1], packed[1]), strict=True)
    return tuple(x[0] if is_packed else x for x, is_packed in results)
