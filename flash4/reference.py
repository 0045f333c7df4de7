"""Attention forward and backward in plain torch, with every feature of the public functions.

Kernels are tested against this module, so it is written for clarity and breadth: one formula a
line, float64 by default, any device. It takes the tensors and keywords of the public functions.

For query `i` and key `j` of one sequence and head, with all modifiers in the order they apply::

    s = softmax_scale * (q_i . k_j)                 scaled score
    s = softcap * tanh(s / softcap)                 if softcap > 0
    s = s - slope * |i + seqlen_k - seqlen_q - j|   if alibi_slopes
    s = score_mod(s, ...)                           if score_mod
    s = -inf where causal, window, mask_mod, block_mask or a sequence end hides key j
    lse_i = log(sum_j exp(s_ij) + exp(sink))        the sink only if learnable_sink
    p_ij = exp(s_ij - lse_i)
    out_i = sum_j keep_ij / (1 - dropout_p) * p_ij * v_j

The backward pass is written out by formula (Dao et al., "FlashAttention", 2022, appendix B, plus
the gradient of the LSE), not derived by autograd: each can be checked against the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "AttentionOptions",
    "Gradients",
    "Noise",
    "SeqlenInfo",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_gradients",
    "combine",
    "rounding_noise",
]

# Scores computed at once: 256 MiB as float64, and backward holds about six such tensors.
_MAX_SCORES = 2**25

# Keywords of the public functions that choose how a result is computed, never what it is.
_NEUTRAL_KEYWORDS = {
    "deterministic",
    "num_splits",
    "pack_gqa",
    "max_seqlen_q",
    "max_seqlen_k",
    "out",
}


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Everything about an attention call besides q, k and v; names as in the public functions.

    Attributes:
        softmax_scale: factor on q.k, any sign or 0; default 1/sqrt(head_dim).
        causal: hides keys with j > i + seqlen_k - seqlen_q.
        window_size: (left, right), inclusive, aligned bottom-right; None or -1 is no limit.
        softcap: cap of the scaled score, applied before `score_mod`; 0 is none.
        learnable_sink: (heads,) extra logit that only adds to the softmax denominator.
        score_mod: (score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) -> new score.
        score_mod_bwd: (grad, score, ...) -> gradient of the unmodified score; default is autograd.
        mask_mod: (batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) -> True where visible.
        aux_tensors: passed through to the mods.
        block_mask: `flex_attention.BlockMask`, its indices counted from each sequence's start.
        alibi_slopes: (heads,) or (batch, heads).
        dropout_p: probability of dropping an entry of P; needs `dropout_mask` unless 0.
        dropout_mask: (batch, heads, seqlen_q, seqlen_k) bool, True where P is kept.
        q_descale: scalar or (batch, heads_kv) factor on q.
        k_descale: scalar or (batch, heads_kv) factor on k.
        v_descale: scalar or (batch, heads_kv) factor on v.
        cu_seqlens_q: (batch + 1,) int, makes q packed (total_q, heads, head_dim).
        cu_seqlens_k: (batch + 1,) int, makes k and v packed (total_k, heads_kv, head_dim).
        seqused_q: (batch,) int, queries in use of each sequence; default all.
        seqused_k: (batch,) int, keys in use of each sequence; default all.
        page_table: (batch, pages) int, makes k, v pools (num_pages, page_size, heads_kv, head_dim).
    """

    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    learnable_sink: Tensor | None = None
    score_mod: Callable[..., Tensor] | None = None
    score_mod_bwd: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    aux_tensors: list[Tensor] | None = None
    block_mask: BlockMask | None = None
    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    dropout_mask: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    page_table: Tensor | None = None

    @classmethod
    def from_keywords(cls, **keywords: Any) -> AttentionOptions:
        """Build options from the public functions' keywords.

        Those that choose how a result is computed, never what it is, are dropped.

        Raises:
            TypeError: a keyword is unknown.
        """
        known = {field.name for field in fields(cls)} | _NEUTRAL_KEYWORDS
        if unknown := sorted(keywords.keys() - known):
            raise TypeError(f"attention reference knows no keyword {', '.join(unknown)}")
        return cls(**{k: v for k, v in keywords.items() if k not in _NEUTRAL_KEYWORDS})

    def window(self) -> tuple[int | None, int | None]:
        """Return (left, right) with causal folded in and None where there is no limit."""
        left, right = (None if side in (None, -1) else side for side in self.window_size)
        if min(left or 0, right or 0) < 0:
            raise ValueError(f"window_size {self.window_size}: sides are None, -1 or at least 0")
        return left, 0 if self.causal else right


class SeqlenInfo(NamedTuple):
    """What a mod may know about its sequence.

    Attributes:
        seqlen_q: queries in use.
        seqlen_k: keys in use.
        offset_q: row of the first query in packed q, else 0.
        offset_k: row of the first key in packed k, else 0.
    """

    seqlen_q: int
    seqlen_k: int
    offset_q: int
    offset_k: int


class Gradients(NamedTuple):
    """Gradients of the stored tensors, shaped like them; dsink is None without a sink."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor | None


class Noise(NamedTuple):
    """Unavoidable rounding errors, see `rounding_noise`; gradients' are 0 without a dout."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsink: Tensor


class _Tile(NamedTuple):
    """A part of a call that is computed at once; all its sequences have the same lengths.

    `q`, `k`, `v` are (batch, heads, seqlen, head_dim); `index` holds the numbers of batch, head,
    query and key, which broadcast over the scores; the slices say where the tile lies in the call.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    index: tuple[Tensor, Tensor, Tensor, Tensor]
    batch: slice
    heads: slice
    heads_kv: slice
    queries: slice
    info: SeqlenInfo

    @property
    def diagonal(self) -> Tensor:
        """The key that each query is aligned with."""
        return self.index[2] + self.info.seqlen_k - self.info.seqlen_q


class _Softmax(NamedTuple):
    """Softmax of a tile, and how it arose; (batch, heads, queries, keys) or without keys."""

    p: Tensor
    p_dropped: Tensor
    lse: Tensor
    p_sink: Tensor  # the sink's share of the row; 0 without a sink
    scores: Tensor  # before score_mod
    slope: Tensor | None  # softcap's derivative
    visible: Tensor | None  # broadcasts; None if all keys are


class _ScoreGradient(NamedTuple):
    """Gradients of a tile's rows, heads first."""

    dout: Tensor
    out: Tensor
    delta: Tensor
    ds: Tensor  # gradient of softmax_scale * q.k


class _Call:
    """Stored tensors and options of one call, and where each sequence lies in them."""

    def __init__(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        options: AttentionOptions | None,
        dtype: torch.dtype | None,
    ):
        self.q, self.k, self.v = q, k, _ = operands
        self.options = o = options or AttentionOptions()
        self.heads, self.heads_kv = q.shape[-2], k.shape[-2]
        self.group = self.heads // max(self.heads_kv, 1)
        if self.group * self.heads_kv != self.heads:
            raise ValueError(f"{self.heads} heads are no multiple of {self.heads_kv} KV heads")
        if o.dropout_p and o.dropout_mask is None:
            raise ValueError("dropout_p needs dropout_mask: the reference draws no random numbers")

        # fp8 has no arithmetic of its own in torch; bfloat16 is what its unfused math would use.
        own = q.dtype if q.dtype.itemsize > 1 else torch.bfloat16
        self.dtype = dtype or own
        # Torch's softmax and reductions work in float32 on 16-bit tensors and round their results.
        self.wide = self.dtype if self.dtype.itemsize > 2 else torch.float32
        self.scale = 1 / math.sqrt(q.shape[-1]) if o.softmax_scale is None else o.softmax_scale

        self.batch = q.shape[0] if o.cu_seqlens_q is None else len(o.cu_seqlens_q) - 1
        batch_k, capacity_k = k.shape[:2]
        if o.page_table is not None:
            batch_k, capacity_k = len(o.page_table), k.shape[1] * o.page_table.shape[1]
        elif o.cu_seqlens_k is not None:
            batch_k = len(o.cu_seqlens_k) - 1
        if batch_k != self.batch:
            raise ValueError(f"q holds {self.batch} sequences, k and v {batch_k}")
        self.spans_q = _spans(self.batch, q.shape[1], o.cu_seqlens_q, o.seqused_q)
        self.spans_k = _spans(self.batch, capacity_k, o.cu_seqlens_k, o.seqused_k)

    def tiles(self) -> Iterator[_Tile]:
        """Cut the call into tiles of at most `_MAX_SCORES` scores, whole sequences if they fit."""
        o = self.options
        ragged = (o.cu_seqlens_q, o.cu_seqlens_k, o.seqused_q, o.seqused_k, o.page_table)
        alike = all(x is None for x in ragged)
        b = 0
        while b < self.batch and self.heads:
            (start_q, seqlen_q), (start_k, seqlen_k) = self.spans_q[b], self.spans_k[b]
            info = SeqlenInfo(seqlen_q, seqlen_k, start_q, start_k)
            row_scores = self.group * max(seqlen_k, 1)
            head_scores = row_scores * max(seqlen_q, 1)
            batch_scores = head_scores * self.heads_kv
            b_end = min(b + max(1, _MAX_SCORES // batch_scores), self.batch) if alike else b + 1
            for heads_kv in _slices(self.heads_kv, _MAX_SCORES // head_scores):
                for queries in _slices(seqlen_q, _MAX_SCORES // row_scores):
                    yield self._load(slice(b, b_end), heads_kv, queries, info)
            b = b_end

    def _load(self, batch: slice, heads_kv: slice, queries: slice, info: SeqlenInfo) -> _Tile:
        heads = slice(heads_kv.start * self.group, heads_kv.stop * self.group)
        ranges = (batch, heads, queries, slice(0, info.seqlen_k))
        index = (torch.arange(s.start, s.stop, device=self.q.device) for s in ranges)
        views = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
        index = tuple(x.view(view) for x, view in zip(index, views, strict=True))
        tile = _Tile(self.q, self.k, self.v, index, batch, heads, heads_kv, queries, info)
        q = self.descale("q", self.query_rows(self.q, tile).transpose(1, 2).to(self.dtype), tile)
        k = self.descale("k", self._key_rows(self.k, tile).transpose(1, 2).to(self.dtype), tile)
        v = self.descale("v", self._key_rows(self.v, tile).transpose(1, 2).to(self.dtype), tile)
        return tile._replace(q=q, k=k, v=v)

    def descale(self, name: str, x: Tensor, tile: _Tile) -> Tensor:
        """Multiply x (batch, heads, seqlen, head_dim) by the descale factor of `name`, if any."""
        factor = getattr(self.options, f"{name}_descale")
        if factor is None:
            return x
        factor = factor.expand(self.batch, self.heads_kv)[tile.batch, tile.heads_kv]
        factor = factor.repeat_interleave(x.shape[1] // factor.shape[1], dim=1)
        return (x * factor[:, :, None, None]).to(x.dtype)

    def query_rows(self, x: Tensor, tile: _Tile) -> Tensor:
        """View a tile's rows of a tensor laid out like q, as (batch, seqlen, heads, head_dim)."""
        if self.options.cu_seqlens_q is None:
            return x[tile.batch, tile.queries, tile.heads]
        start = tile.info.offset_q
        return x[None, start + tile.queries.start : start + tile.queries.stop, tile.heads]

    def lse_rows(self, x: Tensor, tile: _Tile) -> Tensor:
        """View a tile's rows of a tensor laid out like the LSE, as (batch, heads, seqlen)."""
        if self.options.cu_seqlens_q is None:
            return x[tile.batch, tile.heads, tile.queries]
        start = tile.info.offset_q
        return x[None, tile.heads, start + tile.queries.start : start + tile.queries.stop]

    def _slots(self, tile: _Tile) -> tuple[Tensor, Tensor]:
        """Return the page and the slot in it of every key of a paged tile."""
        key, page_size = tile.index[3].flatten(), self.k.shape[1]
        return self.options.page_table[tile.batch.start, key // page_size].long(), key % page_size

    def _key_rows(self, x: Tensor, tile: _Tile) -> Tensor:
        start, length = tile.info.offset_k, tile.info.seqlen_k
        if self.options.page_table is not None:
            return x[:, :, tile.heads_kv][self._slots(tile)][None]
        if self.options.cu_seqlens_k is not None:
            return x[None, start : start + length, tile.heads_kv]
        return x[tile.batch, :length, tile.heads_kv]

    def add_to_keys(self, total: Tensor, part: Tensor, tile: _Tile) -> None:
        """Add a tile's gradient (batch, heads_kv, seqlen, head_dim) to `total`, laid out like k."""
        part = part.transpose(1, 2).to(total.dtype)
        if self.options.page_table is None:
            self._key_rows(total, tile).add_(part)
        else:  # sequences may share a page, and a plain indexed add would lose updates
            slots = self._slots(tile)
            total[:, :, tile.heads_kv].index_put_(slots, part[0], accumulate=True)


def _slices(length: int, step: int) -> list[slice]:
    step = max(step, 1)
    return [slice(i, min(i + step, length)) for i in range(0, length, step)]


def _spans(
    batch: int, capacity: int, cu_seqlens: Tensor | None, used: Tensor | None
) -> list[tuple[int, int]]:
    """Return (first row, rows in use) of every sequence."""
    if cu_seqlens is None:
        starts, lengths = [0] * batch, [capacity] * batch
    else:
        starts, lengths = cu_seqlens[:-1].tolist(), cu_seqlens.diff().tolist()
    if used is not None:
        for b, (length, capacity) in enumerate(zip(used.tolist(), lengths, strict=True)):
            if length > capacity:
                raise ValueError(f"sequence {b} uses {length} rows, but only {capacity} are stored")
        lengths = used.tolist()
    return list(zip(starts, lengths, strict=True))


def _times_kv(x: Tensor, kv: Tensor) -> Tensor:
    """Multiply (batch, heads, m, k) by (batch, heads_kv, k, n), a KV head serving its heads."""
    b, h, m, k = x.shape
    hk, n = kv.shape[1], kv.shape[3]
    return (x.reshape(b, hk, h // hk * m, k) @ kv).reshape(b, h, m, n)


def _sum_over_queries(x: Tensor, y: Tensor, heads_kv: int) -> Tensor:
    """Compute x^T y of (batch, heads, m, n) and (batch, heads, m, d), summed per KV head."""
    b, h, m, n = x.shape
    rows = h // heads_kv * m
    return x.reshape(b, heads_kv, rows, n).mT @ y.reshape(b, heads_kv, rows, y.shape[3])


def _scores(call: _Call, tile: _Tile) -> tuple[Tensor, Tensor | None]:
    """Return the score before `score_mod`, and softcap's derivative (None without softcap)."""
    o = call.options
    slope = None
    # The scale goes on q, as in torch's own unfused math, because 16-bit q.k may overflow unscaled.
    scores = _times_kv(tile.q * call.scale, tile.k.mT)
    if o.softcap:
        within = scores / o.softcap
        tanh = torch.tanh(within)
        scores, slope = o.softcap * tanh, _slope_of_tanh(within, tanh)
    if o.alibi_slopes is not None:
        slopes = o.alibi_slopes.to(call.wide).expand(call.batch, call.heads)[tile.batch, tile.heads]
        scores = scores - slopes[:, :, None, None] * (tile.diagonal - tile.index[3]).abs()
    return scores, slope


def _slope_of_tanh(x: Tensor, tanh: Tensor) -> Tensor:
    """Return 1 - tanh^2, in 16 bits as torch has it.

    Near 1 the square of a float64 tanh has lost the slope: from |x| = 19 on nothing would be left, though float32, and so
    a kernel, can hold it up to |x| = 44. With r = 1 / (exp(2 |x|) + 1) it is 4 r (1 - r).
    """
    if x.dtype.itemsize == 2:
        return 1 - tanh * tanh
    r = 1 / (torch.exp(2 * x.abs()) + 1)
    return 4 * r * (1 - r)


def _evaluate(call: _Call, tile: _Tile, mod: Callable[..., Tensor], *leading: Tensor) -> Tensor:
    # Torch computes `0.1 * q_idx` in its default dtype, which would cost float64 half its digits.
    default = torch.get_default_dtype()
    torch.set_default_dtype(call.wide)
    try:
        return mod(*leading, *tile.index, tile.info, call.options.aux_tensors)
    finally:
        torch.set_default_dtype(default)


def _modified(call: _Call, tile: _Tile, scores: Tensor) -> Tensor:
    mod = call.options.score_mod
    return scores if mod is None else _evaluate(call, tile, mod, scores).expand(scores.shape)


def _modified_backward(call: _Call, tile: _Tile, grad: Tensor, scores: Tensor) -> Tensor:
    o = call.options
    if o.score_mod is None:
        return grad
    if o.score_mod_bwd is not None:
        return _evaluate(call, tile, o.score_mod_bwd, grad, scores)
    with torch.enable_grad():
        leaf = scores.detach().requires_grad_()
        modified = _modified(call, tile, leaf)
        if not modified.requires_grad:
            return torch.zeros_like(grad)
        (result,) = torch.autograd.grad(modified, leaf, grad.to(modified.dtype), allow_unused=True)
    return torch.zeros_like(grad) if result is None else result


def _visible(call: _Call, tile: _Tile) -> Tensor | None:
    """Return a mask that broadcasts over the scores, True where a key is seen; None if all are."""
    o = call.options
    key = tile.index[3]
    left, right = o.window()
    masks = []
    if left is not None:
        masks.append(key >= tile.diagonal - left)
    if right is not None:
        masks.append(key <= tile.diagonal + right)
    if o.mask_mod is not None:
        masks.append(_evaluate(call, tile, o.mask_mod))
    if o.block_mask is not None:
        masks.append(_block_visible(o.block_mask, tile))
    return functools.reduce(torch.logical_and, masks) if masks else None


def _block_visible(block_mask: BlockMask, tile: _Tile) -> Tensor:
    """Evaluate a block mask: full blocks are seen whole, partial ones as its mask_mod says."""
    b, h, i, j = tile.index
    rows_per_block, keys_per_block = block_mask.BLOCK_SIZE
    rows = block_mask.kv_num_blocks.shape[-1] * rows_per_block
    if rows < tile.info.seqlen_q:
        raise ValueError(f"block_mask covers {rows} queries of a sequence of {tile.info.seqlen_q}")

    def listed(counts: Tensor, lists: Tensor) -> Tensor:
        columns = -(-tile.info.seqlen_k // keys_per_block)
        used = torch.arange(lists.shape[-1], device=lists.device) < counts[..., None]
        # One column more than there are takes the entries that name no block of this sequence.
        column = torch.where(used, lists, columns).long().clamp(max=columns)
        seen = torch.zeros(*lists.shape[:-1], columns + 1, dtype=torch.bool, device=lists.device)
        seen.scatter_(-1, column, True)
        own_b, own_h = (x if n > 1 else 0 * x for x, n in zip((b, h), lists.shape[:2], strict=True))
        return seen[own_b, own_h, i // rows_per_block, j // keys_per_block]

    partial = listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    visible = partial & block_mask.mask_mod(b, h, i, j)
    if block_mask.full_kv_num_blocks is not None:
        visible = visible | listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return visible


def _softmax(call: _Call, tile: _Tile) -> _Softmax:
    scores, slope = _scores(call, tile)
    visible = _visible(call, tile)
    modified = _modified(call, tile, scores).to(call.wide)
    if visible is not None:
        modified = modified.masked_fill(~visible, -torch.inf)
    sink = modified.new_full((1, 1, 1, 1), -torch.inf)
    if call.options.learnable_sink is not None:
        sink = call.options.learnable_sink[tile.heads].to(call.wide).view(1, -1, 1, 1)
    with torch.no_grad():
        peak = sink.expand(*modified.shape[:-1], 1)
        if modified.shape[-1]:
            peak = torch.maximum(peak, modified.amax(-1, keepdim=True))
        # exp(-inf - (-inf)) is NaN; any finite peak gives such a row the weights 0 it should have.
        peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weights, sink_weight = torch.exp(modified - peak), torch.exp(sink - peak)
    total = weights.sum(-1, keepdim=True) + sink_weight
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (peak + torch.log(total)).masked_fill(empty, -torch.inf)[..., 0]
    p = (weights / total).to(call.dtype)
    return _Softmax(
        p, _dropped(call, tile, p), lse, (sink_weight / total)[..., 0], scores, slope, visible
    )


def _dropped(call: _Call, tile: _Tile, x: Tensor) -> Tensor:
    """Apply dropout to P, or equally to its gradient."""
    p = call.options.dropout_p
    if not p:
        return x
    keep = call.options.dropout_mask[tile.batch, tile.heads, tile.queries, : x.shape[-1]]
    return torch.where(keep, x / (1 - p) if p < 1 else 0 * x, 0)


def _score_gradient(
    call: _Call, tile: _Tile, softmax: _Softmax, dout: Tensor, dlse: Tensor | None
) -> _ScoreGradient:
    dout = call.query_rows(dout, tile).transpose(1, 2).to(call.dtype)
    out = _times_kv(softmax.p_dropped, tile.v)
    # delta = dO . O - dLSE: both act on a whole row of P alike.
    delta = (dout.to(call.wide) * out).sum(-1)
    if dlse is not None:
        # An LSE of -inf is a constant, whatever gradient a loss sends it.
        delta = delta - call.lse_rows(dlse, tile).masked_fill(softmax.lse == -torch.inf, 0.0)
    # dP = dO V^T, dS = P (dP - delta)
    dp = _dropped(call, tile, _times_kv(dout, tile.v.mT))
    ds = _unmodified(call, tile, softmax, softmax.p * (dp - delta[..., None]))
    return _ScoreGradient(dout, out, delta, ds)


def _unmodified(call: _Call, tile: _Tile, softmax: _Softmax, ds: Tensor) -> Tensor:
    """Take a gradient of the final scores back to one of softmax_scale * q.k."""
    ds = _modified_backward(call, tile, ds.to(softmax.scores.dtype), softmax.scores)
    # A mod's derivative may be infinite or NaN where nothing is seen.
    ds = ds if softmax.visible is None else ds.masked_fill(~softmax.visible, 0.0)
    return (ds if softmax.slope is None else ds * softmax.slope).to(call.dtype)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions | None = None,
    *,
    compute_dtype: torch.dtype | None = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Compute attention; differentiable by autograd.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or packed (total_q, heads, head_dim).
        k: (batch, seqlen_k, heads_kv, head_dim), packed, or a page pool; heads_kv divides heads.
        v: like k, with a head_dim of its own.
        options: everything else; see `AttentionOptions`.
        compute_dtype: dtype of all arithmetic and of the results. None is q's own dtype, with
            scores, P and out rounded to it as torch's unfused math does (its softmax works in
            float32 on 16-bit dtypes): the yardstick for tolerances.

    Returns:
        out, laid out like q with v's head_dim, and the LSE (natural log), (batch, heads, seqlen_q)
        or (heads, total_q), in the compute dtype (float32 where that has 16 bits). A row with no
        visible key has out 0 and LSE -inf (the sink, if any); a row of no sequence has 0 and -inf.

    Raises:
        ValueError: sizes or options contradict one another.
    """
    call = _Call((q, k, v), options, compute_dtype)
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=call.dtype, device=q.device)
    lse_shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.full(lse_shape, -torch.inf, dtype=call.wide, device=q.device)
    for tile in call.tiles():
        softmax = _softmax(call, tile)
        # O = P V
        call.query_rows(out, tile).copy_(_times_kv(softmax.p_dropped, tile.v).transpose(1, 2))
        call.lse_rows(lse, tile).copy_(softmax.lse)
    return out, lse


def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    options: AttentionOptions | None = None,
    *,
    dlse: Tensor | None = None,
    compute_dtype: torch.dtype | None = torch.float64,
) -> Gradients:
    """Compute the gradients of a loss on out and, if `dlse` is given, on the LSE.

    With all names as in the module docstring, and D the dropout (keep / (1 - dropout_p))::

        dv_j = sum_i D_ij p_ij dout_i            dp_ij = D_ij (dout_i . v_j)
        delta_i = dout_i . out_i                 ds_ij = p_ij (dp_ij - delta_i + dlse_i)
        ds goes back through score_mod and softcap
        dq_i = softmax_scale sum_j ds_ij k_j     dk_j = softmax_scale sum_i ds_ij q_i
        dsink = sum_i p_sink_i (dlse_i - delta_i)

    Args:
        q: as in `attention_forward`.
        k: as in `attention_forward`.
        v: as in `attention_forward`.
        dout: gradient of out, laid out like it.
        options: see `AttentionOptions`.
        dlse: gradient of the LSE, laid out like it.
        compute_dtype: as in `attention_forward`. None rounds P, dP and dS to q's dtype and takes
            delta from the rounded out, as every fused backward does, PyTorch's included.

    Returns:
        Gradients in the compute dtype; zero for rows, slots and pages that no sequence uses.
    """
    call = _Call((q, k, v), options, compute_dtype)
    dq = torch.zeros(q.shape, dtype=call.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=call.wide, device=q.device) for x in (k, v))
    dsink = torch.zeros(call.heads, dtype=call.wide, device=q.device)
    with torch.no_grad():
        for tile in call.tiles():
            softmax = _softmax(call, tile)
            grad = _score_gradient(call, tile, softmax, dout, dlse)
            # dV = P^T dO
            dv_part = _sum_over_queries(softmax.p_dropped, grad.dout, tile.v.shape[1])
            call.add_to_keys(dv, call.descale("v", dv_part, tile), tile)
            # dQ = scale dS K
            dq_part = call.descale("q", _times_kv(grad.ds, tile.k) * call.scale, tile)
            call.query_rows(dq, tile).copy_(dq_part.transpose(1, 2))
            # dK = scale dS^T Q
            dk_part = _sum_over_queries(grad.ds, tile.q * call.scale, tile.k.shape[1])
            call.add_to_keys(dk, call.descale("k", dk_part, tile), tile)
            dsink[tile.heads] -= (softmax.p_sink * grad.delta).sum((0, 2))
    has_sink = call.options.learnable_sink is not None
    return Gradients(dq, dk.to(call.dtype), dv.to(call.dtype), dsink if has_sink else None)


_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def _at_risk(x: Tensor, p: Tensor, factor: float) -> Tensor:
    """x, times a factor where float32 may flush it, or the probability p behind it, to 0."""
    lost = (p < _SMALLEST_NORMAL) | (x.abs() < _SMALLEST_NORMAL)
    return torch.where(lost, x * factor, x)


def rounding_noise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None = None,
    options: AttentionOptions | None = None,
    *,
    dlse: Tensor | None = None,
) -> Noise:
    """Estimate, element by element, the rounding error that a fused kernel cannot avoid.

    Such a kernel rounds at least P, dS and the out that it saves to q's dtype. With independent
    relative errors of size eps in each of them, first order and root mean square::

        out_i: eps sqrt(sum_j p_ij^2 v_j^2)              n_i = sqrt(sum_d dout_id^2 out_id^2)
        dq_i:  eps softmax_scale sqrt(sum_j ds_ij^2 k_j^2 + (n_i sum_j p_ij k_j)^2)
        dk_j:  eps softmax_scale sqrt(sum_i (ds_ij^2 + p_ij^2 n_i^2) q_i^2)
        dv_j:  eps sqrt(sum_i p_ij^2 dout_i^2)           dsink: eps sqrt(sum_i p_sink_i^2 n_i^2)

    `eps n_i` is the error of delta_i, and goes back through score_mod and softcap as ds does. Real
    rounding errors are spread evenly up to eps/2, so that these are some five standard deviations.
    P and dS below the smallest normal float32 may be flushed to 0, all of a sum alike: their error is
    all of them, times the root of the number of terms.

    Args:
        q: as in `attention_forward`; its dtype decides eps.
        k: as in `attention_forward`.
        v: as in `attention_forward`.
        dout: gradient of out; None skips the gradients' noise.
        options: see `AttentionOptions`.
        dlse: gradient of the LSE.

    Returns:
        float64 tensors, laid out like what they belong to.
    """
    call = _Call((q, k, v), options, torch.float64)
    eps = torch.finfo(q.dtype).eps
    flushed = math.sqrt(q.shape[:-1].numel() + k.shape[:-1].numel()) / eps
    new = functools.partial(torch.zeros, dtype=torch.float64, device=q.device)
    out = new(*q.shape[:-1], v.shape[-1])
    dq, dk, dv, dsink = new(q.shape), new(k.shape), new(v.shape), new(call.heads)

    def descaled(name: str, square: Tensor, tile: _Tile) -> Tensor:
        return call.descale(name, call.descale(name, square, tile), tile)

    with torch.no_grad():
        for tile in call.tiles():
            softmax = _softmax(call, tile)
            p_square = _at_risk(softmax.p_dropped, softmax.p, flushed).square()
            out_part = _times_kv(p_square, tile.v.square())
            call.query_rows(out, tile).copy_(out_part.transpose(1, 2))
            if dout is None:
                continue
            grad = _score_gradient(call, tile, softmax, dout, dlse)
            n = (grad.dout * grad.out).square().sum(-1, keepdim=True).sqrt()
            p_n = _unmodified(call, tile, softmax, softmax.p * n)
            ds_square = _at_risk(grad.ds, softmax.p, flushed).square()
            q_scaled = tile.q * call.scale
            dq_part = _times_kv(ds_square, tile.k.square()) + _times_kv(p_n, tile.k).square()
            dq_part = descaled("q", dq_part * call.scale**2, tile)
            call.query_rows(dq, tile).copy_(dq_part.transpose(1, 2))
            heads_kv = tile.k.shape[1]
            dk_part = _sum_over_queries(ds_square + p_n.square(), q_scaled.square(), heads_kv)
            call.add_to_keys(dk, descaled("k", dk_part, tile), tile)
            dv_part = _sum_over_queries(p_square, grad.dout.square(), heads_kv)
            call.add_to_keys(dv, descaled("v", dv_part, tile), tile)
            dsink[tile.heads] += (softmax.p_sink * n[..., 0]).square().sum((0, 2))
    return Noise(*(eps * square.sqrt() for square in (out, dq, dk, dv, dsink)))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    compute_dtype: torch.dtype | None = torch.float64,
    return_lse: bool = False,
    **keywords: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Call `attention_forward` with the keywords of `flash_attn_func` and `flash_attn_varlen_func`.

    Args:
        q: as in `attention_forward`.
        k: as in `attention_forward`.
        v: as in `attention_forward`.
        compute_dtype: as in `attention_forward`.
        return_lse: return (out, lse) instead of out.
        **keywords: fields of `AttentionOptions`; keywords that only choose a kernel are ignored.

    Returns:
        out, or (out, lse).
    """
    options = AttentionOptions.from_keywords(**keywords)
    out, lse = attention_forward(q, k, v, options, compute_dtype=compute_dtype)
    return (out, lse) if return_lse else out


def attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    dlse: Tensor | None = None,
    compute_dtype: torch.dtype | None = torch.float64,
    **keywords: Any,
) -> Gradients:
    """Call `attention_backward` with the keywords of the public functions, as `attention` does."""
    options = AttentionOptions.from_keywords(**keywords)
    return attention_backward(q, k, v, dout, options, dlse=dlse, compute_dtype=compute_dtype)


def combine(
    out_partial: Tensor, lse_partial: Tensor, *, compute_dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Merge partial results over disjoint sets of keys.

    `lse = log sum_s exp(lse_s)` and `out = sum_s exp(lse_s - lse) out_s`; a partial whose LSE is
    -inf saw no key, and its out is ignored whatever it holds.

    Args:
        out_partial: (splits, batch, seqlen, heads, head_dim), or packed without batch.
        lse_partial: (splits, batch, heads, seqlen), or packed without batch.
        compute_dtype: dtype of the arithmetic and of the results.

    Returns:
        out (batch, seqlen, heads, head_dim) and LSE (batch, heads, seqlen), or without batch.
    """
    lse_partial = lse_partial.to(compute_dtype)
    peak = lse_partial.amax(0)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)
    weights = torch.exp(lse_partial - peak)
    total = weights.sum(0)
    lse = peak + torch.log(total)
    weights = (weights / total.masked_fill(total == 0, 1.0)).transpose(-1, -2)[..., None]
    return torch.where(weights == 0, 0.0, weights * out_partial.to(compute_dtype)).sum(0), lse
