"""The reference against plain Python loops, torch's own attention, autograd, and what must hold."""

from __future__ import annotations

import ast
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from flash4 import reference
from flash4.reference import AttentionOptions, SeqlenInfo, attention, attention_gradients
from tests.checks import assert_float64_close

PAGE_SIZE = 2
BLOCK = 2
# Which 2 x 2 blocks of the block mask are full, partial or (absent) hidden: {row: {column: kind}}.
BLOCKS = {0: {0: "partial", 2: "full"}, 1: {1: "full", 0: "partial"}, 2: {}}


@dataclass
class Case:
    """A small call, feature by feature: first its facts, then the tensors that store it."""

    heads: int = 2
    heads_kv: int = 2
    head_dim: int = 3
    head_dim_v: int = 3
    capacity_q: list[int] = field(default_factory=lambda: [4, 4])
    capacity_k: list[int] = field(default_factory=lambda: [5, 5])
    unused_q: list[int] = field(default_factory=lambda: [0, 0])
    unused_k: list[int] = field(default_factory=lambda: [0, 0])
    packed_q: bool = False
    packed_k: bool = False
    paged: bool = False
    max_scores: int = reference._MAX_SCORES
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return len(self.capacity_q)

    @property
    def lengths_q(self) -> list[int]:
        return [c - u for c, u in zip(self.capacity_q, self.unused_q, strict=True)]

    @property
    def lengths_k(self) -> list[int]:
        return [c - u for c, u in zip(self.capacity_k, self.unused_k, strict=True)]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    def store(self) -> tuple[list[Tensor], dict[str, Any]]:
        """Return stored q, k, v, NaN wherever nothing may be read, and the call's keywords."""
        keywords = dict(self.keywords)
        if any(self.unused_q):
            keywords["seqused_q"] = torch.tensor(self.lengths_q, dtype=torch.int32)
        if any(self.unused_k):
            keywords["seqused_k"] = torch.tensor(self.lengths_k, dtype=torch.int32)
        q = self._rows(self.capacity_q, self.lengths_q, self.packed_q, self.heads, self.head_dim)
        lengths = self.capacity_k, self.lengths_k
        k = self._rows(*lengths, self.packed_k, self.heads_kv, self.head_dim)
        v = self._rows(*lengths, self.packed_k, self.heads_kv, self.head_dim_v)
        if self.packed_q:
            keywords["cu_seqlens_q"] = _cumulative(self.capacity_q)
        if self.packed_k:
            keywords["cu_seqlens_k"] = _cumulative(self.capacity_k)
        if self.paged:
            pages = self.capacity_k[0] // PAGE_SIZE
            table = torch.randperm(self.batch * pages + 2)[: self.batch * pages].view(-1, pages)
            keywords["page_table"] = table.int()
            k, v = (_into_pages(x, table) for x in (k, v))
        return [q, k, v], keywords

    def _rows(
        self, capacity: list[int], lengths: list[int], packed: bool, heads: int, dim: int
    ) -> Tensor:
        if packed:  # one row before, two after the sequences belong to nobody
            x = self.random(1 + sum(capacity) + 2, heads, dim)
            used = torch.zeros(len(x), dtype=torch.bool)
            for start, length in zip(_cumulative(capacity).tolist(), lengths, strict=False):
                used[start : start + length] = True
        else:
            x = self.random(self.batch, max(capacity), heads, dim)
            used = torch.arange(max(capacity)) < torch.tensor(lengths)[:, None]
        x[~used] = torch.nan
        return x

    def sequences(self, x: Tensor, side: str) -> list[Tensor]:
        """Cut every sequence's used rows, (seqlen, heads, dim), from a dense or packed tensor."""
        capacity, lengths, packed = (
            (self.capacity_q, self.lengths_q, self.packed_q)
            if side == "q"
            else (self.capacity_k, self.lengths_k, self.packed_k)
        )
        if packed:
            starts = _cumulative(capacity).tolist()
            return [x[s : s + n] for s, n in zip(starts, lengths, strict=False)]
        return [x[b, :n] for b, n in enumerate(lengths)]


def _cumulative(lengths: list[int]) -> Tensor:
    """Offsets of packed sequences; row 0 belongs to nobody."""
    return torch.tensor([*itertools.accumulate(lengths, initial=1)], dtype=torch.int32)


def _into_pages(x: Tensor, table: Tensor) -> Tensor:
    pool = torch.full((table.numel() + 2, PAGE_SIZE, *x.shape[2:]), torch.nan, dtype=x.dtype)
    pool[table.flatten()] = x.reshape(-1, PAGE_SIZE, *x.shape[2:])
    return pool


def _from_pages(pool: Tensor, table: Tensor) -> Tensor:
    return pool[table].reshape(len(table), -1, *pool.shape[2:])


def score_mod(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    bias = 0.1 * (q_idx - kv_idx) * (head + 1) - 0.05 * batch + 0.01 * seqlen_info.offset_q
    scaled = score * aux_tensors[0][head, kv_idx] if aux_tensors is not None else score
    return scaled + 0.3 * score * score + bias


def score_mod_bwd(grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    factor = aux_tensors[0][head, kv_idx] if aux_tensors is not None else 1.0
    return grad * (factor + 0.6 * score)


def mask_mod(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Hide scattered keys, and all keys of query 1."""
    return ((q_idx + 2 * kv_idx + head + batch + seqlen_info.seqlen_k) % 3 != 0) & (q_idx != 1)


def block_mask() -> BlockMask:
    """Build the mask of BLOCKS, whose partial blocks show their lower triangle."""
    lists = {}
    for kind in ("partial", "full"):
        columns = [[c for c, k in row.items() if k == kind] for row in BLOCKS.values()]
        lists[kind] = (
            torch.tensor([[list(map(len, columns))]], dtype=torch.int32),
            torch.tensor([[[row + [0] * (3 - len(row)) for row in columns]]], dtype=torch.int32),
        )
    return BlockMask.from_kv_blocks(
        *lists["partial"],
        *lists["full"],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    )


# A feature sets facts or keywords of a case. Two that set the same one exclude each other.
FEATURES: dict[str, dict[str, Any]] = {
    "gqa": {"heads": 6},
    "head_dim_v": {"head_dim_v": 5},
    "packed_q": {"packed_q": True, "capacity_q": [4, 2]},
    "packed_k": {"packed_k": True, "capacity_k": [3, 6]},
    "paged": {"paged": True, "packed_k": False, "capacity_k": [6, 6]},
    "seqused_q": {"unused_q": [1, 2]},
    "seqused_k": {"unused_k": [1, None]},
    "tiles": {"max_scores": 7},
    "negative_scale": {"softmax_scale": -0.7},
    "zero_scale": {"softmax_scale": 0.0},
    "causal": {"causal": True},
    "window": {"window_size": (1, 1)},
    "window_left": {"window_size": (2, -1)},
    "window_right": {"window_size": (None, 0)},
    "softcap": {"softcap": 0.8},
    "sink": {"learnable_sink": None},
    "score_mod": {"score_mod": score_mod},
    "score_mod_bwd": {"score_mod": score_mod, "score_mod_bwd": score_mod_bwd},
    "aux_tensors": {"aux_tensors": None},
    "mask_mod": {"mask_mod": mask_mod},
    "block_mask": {"block_mask": None},
    "alibi": {"alibi_slopes": ()},
    "alibi_batch": {"alibi_slopes": (2,)},
    "dropout": {"dropout_p": 0.4, "dropout_mask": None},
    "descale": {"q_descale": None, "k_descale": None, "v_descale": None},
}


def build(*names: str) -> Case:
    """Combine features into a case with fixed random tensors."""
    torch.manual_seed(0)
    case = Case()
    chosen = {key: value for name in names for key, value in FEATURES[name].items()}
    for key in chosen.keys() & vars(case).keys():
        setattr(case, key, chosen.pop(key))
    # The last sequence uses none of its keys, whatever its capacity.
    case.unused_k = [c if u is None else u for c, u in zip(case.capacity_k, case.unused_k)]
    makers: dict[str, Callable[[], Any]] = {
        "learnable_sink": lambda: case.random(case.heads),
        "aux_tensors": lambda: [case.random(case.heads, 6)],
        "block_mask": block_mask,
        "alibi_slopes": lambda: case.random(*chosen["alibi_slopes"], case.heads),
        "dropout_mask": lambda: case.random(case.batch, case.heads, 4, 6) > -0.3,
        "q_descale": lambda: case.random(case.batch, case.heads_kv),
        "k_descale": lambda: torch.tensor(0.8, dtype=torch.float64),
        "v_descale": lambda: case.random(case.batch, case.heads_kv),
    }
    case.keywords = {k: makers[k]() if k in makers else v for k, v in chosen.items()}
    return case


def naive(case: Case, b: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one sequence's out (seqlen_q, heads, dim) and LSE (heads, seqlen_q) by loops."""
    options = AttentionOptions(**case.keywords)
    group = case.heads // case.heads_kv
    starts = (_cumulative(c)[b].item() for c in (case.capacity_q, case.capacity_k))
    offsets = (s if p else 0 for s, p in zip(starts, (case.packed_q, case.packed_k)))
    info = SeqlenInfo(len(q), len(k), *offsets)
    if options.q_descale is not None:
        q = q * options.q_descale[b].repeat_interleave(group)[:, None]
        k = k * options.k_descale
        v = v * options.v_descale[b][:, None]
    q, k, v = q.tolist(), k.tolist(), v.tolist()
    out = torch.zeros(len(q), case.heads, case.head_dim_v, dtype=torch.float64)
    lse = torch.full((case.heads, len(q)), -torch.inf, dtype=torch.float64)
    for h, i in itertools.product(range(case.heads), range(len(q))):
        weights = {
            j: math.exp(naive_score(options, info, (b, h, i, j), q[i][h], k[j][h // group]))
            for j in range(len(k))
            if naive_visible(options, info, (b, h, i, j))
        }
        total = sum(weights.values())
        if options.learnable_sink is not None:
            total += math.exp(options.learnable_sink[h].item())
        if total:
            lse[h, i] = math.log(total)
        for j, weight in weights.items():
            p = weight / total
            if options.dropout_p:
                p = p / (1 - options.dropout_p) if options.dropout_mask[b, h, i, j] else 0.0
            for d in range(case.head_dim_v):
                out[i, h, d] += p * v[j][h // group][d]
    return out, lse


def naive_score(
    options: AttentionOptions, info: SeqlenInfo, at: tuple, q: list[float], k: list[float]
) -> float:
    b, h, i, j = at
    scale = options.softmax_scale
    score = sum(x * y for x, y in zip(q, k))
    score *= 1 / math.sqrt(len(q)) if scale is None else scale
    if options.softcap:
        score = options.softcap * math.tanh(score / options.softcap)
    if options.alibi_slopes is not None:
        slopes = options.alibi_slopes
        slope = slopes[b, h].item() if slopes.dim() == 2 else slopes[h].item()
        score -= slope * abs(i + info.seqlen_k - info.seqlen_q - j)
    if options.score_mod is not None:
        score = float(options.score_mod(score, b, h, i, j, info, options.aux_tensors))
    return score


def naive_visible(options: AttentionOptions, info: SeqlenInfo, at: tuple) -> bool:
    b, h, i, j = at
    aligned = i + info.seqlen_k - info.seqlen_q
    left, right = options.window_size
    visible = left in (None, -1) or aligned - left <= j
    visible &= right in (None, -1) or j <= aligned + right
    visible &= not options.causal or j <= aligned
    if options.mask_mod is not None:
        visible &= bool(options.mask_mod(b, h, i, j, info, options.aux_tensors))
    if options.block_mask is not None:
        kind = BLOCKS[i // BLOCK].get(j // BLOCK)
        visible &= kind == "full" or (kind == "partial" and i >= j)
    return visible


def sets_of_features() -> list[tuple[str, ...]]:
    """List no feature, each one, and each pair that can go together."""
    pairs = (
        (a, b)
        for a, b in itertools.combinations(FEATURES, 2)
        if not FEATURES[a].keys() & FEATURES[b].keys()
    )
    return [(), *((name,) for name in FEATURES), *pairs]


@pytest.mark.parametrize("names", sets_of_features(), ids="+".join)
def test_features_in_pairs(names, monkeypatch):
    """Forward equals the loops; the explicit backward equals autograd through the forward."""
    case = build(*names)
    monkeypatch.setattr(reference, "_MAX_SCORES", case.max_scores)
    (q, k, v), keywords = case.store()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if "learnable_sink" in keywords:
        leaves.append(keywords["learnable_sink"].requires_grad_())
    out, lse = attention(q, k, v, return_lse=True, **keywords)

    expected_out, expected_lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    lse_rows = expected_lse.mT if case.packed_q else expected_lse.transpose(1, 2)
    key_tensors = (
        _from_pages(x.detach(), keywords["page_table"]) if case.paged else x.detach()
        for x in (k, v)
    )
    parts = (case.sequences(q.detach(), "q"), *(case.sequences(x, "k") for x in key_tensors))
    targets = case.sequences(expected_out, "q"), case.sequences(lse_rows, "q")
    for b, (q_b, k_b, v_b, out_b, lse_b) in enumerate(zip(*parts, *targets)):
        result = naive(case, b, q_b, k_b, v_b)
        out_b.copy_(result[0])
        lse_b.copy_(result[1].mT)
    assert_float64_close(out.detach(), expected_out, "out")
    assert_float64_close(lse.detach(), expected_lse, "lse")

    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    by_autograd = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    explicit = attention_gradients(q, k, v, dout, dlse=dlse, **keywords)
    for name, got, expected in zip(explicit._fields, explicit, by_autograd):
        assert_float64_close(got, expected, name)


class Explicit(torch.autograd.Function):
    """The reference with its explicit backward."""

    @staticmethod
    def forward(ctx, q, k, v, sink, options):
        ctx.save_for_backward(q, k, v, sink)
        ctx.options = options
        return reference.attention_forward(
            q, k, v, AttentionOptions(**options, learnable_sink=sink)
        )

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, sink = ctx.saved_tensors
        options = AttentionOptions(**ctx.options, learnable_sink=sink)
        return *reference.attention_backward(q, k, v, dout, options, dlse=dlse), None


@pytest.mark.parametrize(
    "names",
    [
        ("gqa", "head_dim_v", "softcap", "score_mod", "window", "alibi"),
        ("packed_q", "packed_k", "dropout", "mask_mod"),
    ],
    ids="+".join,
)
def test_explicit_backward_passes_gradcheck(names):
    case = build(*names)
    case.capacity_q, case.capacity_k = [3, 2], [2, 4] if case.packed_k else [3, 3]
    (q, k, v), keywords = case.store()
    operands = [x.nan_to_num().requires_grad_() for x in (q, k, v, case.random(case.heads))]

    def finite(q, k, v, sink):
        out, lse = Explicit.apply(q, k, v, sink, keywords)
        return out, lse[lse.isfinite()]

    assert torch.autograd.gradcheck(finite, operands)


def test_autograd_and_gradients_skip_nan_output_gradients_of_unused_rows():
    case = build("packed_q", "seqused_q", "causal")
    (q, k, v), keywords = case.store()
    out, lse = attention(q, k, v, return_lse=True, **keywords)
    dout = torch.full_like(out, torch.nan)
    dlse = torch.full_like(lse, torch.nan)
    for rows, row_lse in zip(case.sequences(dout, "q"), case.sequences(dlse.mT, "q")):
        rows.fill_(1.0)
        row_lse.fill_(1.0)
    gradients = attention_gradients(q, k, v, dout, dlse=dlse, **keywords)
    assert all(x.isfinite().all() for x in gradients[:3])


def test_gradient_of_a_lse_without_keys_is_ignored():
    q, k, v = (torch.randn(1, 3, 1, 4, dtype=torch.float64) for _ in range(3))
    k, v = k[:, :2], v[:, :2]  # causal: query 0 sees no key
    dlse = torch.tensor([[[torch.nan, 1.0, 1.0]]], dtype=torch.float64)
    gradients = attention_gradients(q, k, v, torch.randn_like(q), dlse=dlse, causal=True)
    assert all(x.isfinite().all() for x in gradients[:3])
    assert not gradients.dq[0, 0].any()


@pytest.mark.parametrize("shape", [(2, 33, 65, 4, 2, 16, 8), (1, 1, 130, 3, 1, 8, 24)], ids=str)
def test_equals_torch_attention(shape):
    batch, seqlen_q, seqlen_k, heads, heads_kv, d, dv = shape
    torch.manual_seed(0)
    sizes = ((seqlen_q, heads, d), (seqlen_k, heads_kv, d), (seqlen_k, heads_kv, dv))
    q, k, v = (torch.randn(batch, *size, dtype=torch.float64) for size in sizes)
    operands = [x.requires_grad_() for x in (q, k, v)]
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in operands), attn_mask=mask, enable_gqa=True
        ).transpose(1, 2)
    dout = torch.randn_like(expected)
    assert_float64_close(attention(q, k, v, causal=True).detach(), expected.detach(), "out")
    gradients = attention_gradients(q, k, v, dout, causal=True)
    for name, got, right in zip(
        gradients._fields, gradients, torch.autograd.grad(expected, operands, dout)
    ):
        assert_float64_close(got, right, name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_native_math_errs_as_much_as_torch(dtype):
    """compute_dtype=None is a fair yardstick: it errs like softmax(scale q k^T) v in torch."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 96, 2, 32).to(dtype) for _ in range(4))
    operands = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    p = torch.softmax(operands[0] * (1 / math.sqrt(32)) @ operands[1].mT, -1)
    out = (p @ operands[2]).transpose(1, 2)
    by_torch = [out.detach(), *torch.autograd.grad(out, operands, dout)]
    by_torch[1:] = (x.transpose(1, 2) for x in by_torch[1:])
    native, exact = (
        (attention(q, k, v, compute_dtype=d), *attention_gradients(q, k, v, dout, compute_dtype=d))
        for d in (None, torch.float64)
    )
    for own, other, right in zip(native[:4], by_torch, exact):
        assert own.dtype == dtype
        errors = [(x.double() - right).square().mean().sqrt() for x in (own, other)]
        assert 0.8 < errors[0] / errors[1] < 1.25


def test_float32_math_is_closer_than_bfloat16():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, 2, 16).bfloat16() for _ in range(3))
    exact, single, half = (
        attention(q, k, v, compute_dtype=dtype) for dtype in (torch.float64, torch.float32, None)
    )
    assert single.dtype == torch.float32
    assert (single - exact).abs().max() < 1e-3 * (half - exact).abs().max()


lengths = st.integers(0, 9)


@settings(max_examples=30)
@given(lengths, lengths, st.sampled_from([-1, 0, 2]), st.sampled_from([-1, 0, 3]), st.booleans())
def test_constant_v_gives_that_constant(seqlen_q, seqlen_k, left, right, causal):
    q, k, v = random_inputs(seqlen_q, seqlen_k)
    v = torch.full_like(v, 3.0)
    keywords = {"window_size": (left, right), "causal": causal}
    out, lse = attention(q, k, v, return_lse=True, **keywords)
    has_keys = (lse > -torch.inf).transpose(1, 2)
    assert_float64_close(out, 3.0 * has_keys[..., None].expand(out.shape).double())


@settings(max_examples=20)
@given(lengths, lengths, st.randoms(use_true_random=False))
def test_order_of_keys_does_not_matter(seqlen_q, seqlen_k, random):
    q, k, v = random_inputs(seqlen_q, seqlen_k)
    order = random.sample(range(seqlen_k), seqlen_k)
    assert_float64_close(attention(q, k[:, order], v[:, order]), attention(q, k, v))


@settings(max_examples=20)
@given(lengths, lengths, st.floats(-1e4, 1e4))
def test_shifted_scores_shift_the_lse_alone(seqlen_q, seqlen_k, shift):
    q, k, v = random_inputs(seqlen_q, seqlen_k)
    plain = attention(q, k, v, return_lse=True)
    shifted = attention(q, k, v, return_lse=True, score_mod=lambda score, *_: score + shift)
    assert_float64_close(shifted[0], plain[0], "out")
    assert_float64_close(shifted[1], plain[1] + shift, "lse")


@settings(max_examples=20)
@given(lengths, lengths, lengths, st.booleans())
def test_splits_combine_to_the_whole(seqlen_q, first, second, empty):
    q, k, v = random_inputs(seqlen_q, first + second)
    parts = [
        attention(q, k[:, rows], v[:, rows], return_lse=True)
        for rows in (slice(0, first), slice(first, None))
    ]
    if empty:  # a split that saw nothing may hold anything
        nothing = torch.full_like(parts[0][0], torch.nan)
        parts.append((nothing, torch.full_like(parts[0][1], -torch.inf)))
    out, lse = reference.combine(*(torch.stack(x) for x in zip(*parts)))
    expected = attention(q, k, v, return_lse=True)
    assert_float64_close(out, expected[0], "out")
    assert_float64_close(lse, expected[1], "lse")


def test_combine_of_packed_partials():
    out, lse = torch.randn(3, 7, 2, 4), torch.randn(3, 2, 7)
    whole = reference.combine(out[:, None], lse[:, None])
    packed = reference.combine(out, lse)
    assert_float64_close(packed[0], whole[0][0])
    assert_float64_close(packed[1], whole[1][0])


@settings(max_examples=20)
@given(lengths, lengths, st.integers(1, 4))
def test_causal_prefix_ignores_later_tokens(seqlen, extra, ratio):
    q, k, v = random_inputs(seqlen + extra, seqlen + extra, ratio=ratio)
    whole = attention(q, k, v, causal=True)
    prefix = attention(q[:, :seqlen], k[:, :seqlen], v[:, :seqlen], causal=True)
    assert_float64_close(whole[:, :seqlen], prefix)


def test_grouped_heads_equal_repeated_ones():
    q, k, v = random_inputs(5, 7, ratio=3)
    repeated = attention(q, *(x.repeat_interleave(3, dim=2) for x in (k, v)))
    assert_float64_close(attention(q, k, v), repeated)


def test_sequences_that_share_a_page_add_their_gradients():
    q, k, v = random_inputs(2, 4, batch=2)
    table = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)
    pools = [torch.cat([x[0], x[1, 2:]]).view(3, 2, *x.shape[2:]) for x in (k, v)]
    dout = torch.randn_like(q)
    gradients = attention_gradients(q, *pools, dout, page_table=table)
    apart = attention_gradients(q, *(_from_pages(x, table) for x in pools), dout)
    for got, expected in zip(gradients[1:3], apart[1:3]):
        total = torch.zeros_like(got)
        total[:2] += expected[0].view(2, 2, *got.shape[2:])
        total[1:] += expected[1].view(2, 2, *got.shape[2:])
        assert_float64_close(got, total)


@pytest.mark.parametrize("scale", [1e6, -1e6])
def test_huge_logits(scale):
    """The LSE is the true value, out picks the largest score, gradients are finite."""
    q, k, v = random_inputs(3, 5)
    out, lse = attention(q, k, v, return_lse=True, softmax_scale=scale)
    scores = scale * torch.einsum("bihd,bjhd->bhij", q, k)
    assert_float64_close(lse, scores.logsumexp(-1))
    largest = scores.argmax(-1)[0, 0]
    assert_float64_close(out[0, :, 0], v[0, largest, 0])
    gradients = attention_gradients(q, k, v, torch.randn_like(q), softmax_scale=scale)
    assert all(x.isfinite().all() for x in gradients[:3])


@pytest.mark.parametrize("x", [0.0, 1e-9, 3.0, 17.0, 20.0, 35.0, 44.0, 300.0, 800.0])
def test_the_slope_of_a_saturated_cap(x):
    """Of scores x and -x in units of the cap; from x = 20 on 1 - tanh^2 would be 0."""
    cap, value = 2.0, 0.5
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([x * cap, -x * cap], dtype=torch.float64).view(1, 2, 1, 1)
    v = torch.tensor([value, -value], dtype=torch.float64).view(1, 2, 1, 1)
    options = AttentionOptions(softmax_scale=1.0, softcap=cap)
    dq, dk, *_ = reference.attention_backward(q, k, v, torch.ones_like(q), options)
    p = 1 / (1 + math.exp(-2 * cap * math.tanh(x)))  # of the first key
    slope = 1 / math.cosh(x) ** 2 if x < 700 else 0.0
    ds = 2 * p * (1 - p) * value * slope
    found = [*dk.flatten().tolist(), dq.item()]
    assert found == pytest.approx([ds, -ds, 2 * ds * x * cap], rel=1e-13, abs=0)


@pytest.mark.parametrize("sink", [None, 0.5], ids=["no_sink", "sink"])
@pytest.mark.parametrize("sizes", [*itertools.product((0, 2), (0, 3), (0, 4), (0, 2))], ids=str)
def test_empty_sizes(sizes, sink):
    batch, seqlen_q, seqlen_k, heads = sizes
    q, k, v = random_inputs(seqlen_q, seqlen_k, batch=batch, heads_kv=heads)
    sink = None if sink is None else torch.full((heads,), sink, dtype=torch.float64)
    out, lse = attention(q, k, v, return_lse=True, learnable_sink=sink)
    gradients = attention_gradients(
        q, k, v, torch.ones_like(q), dlse=torch.ones_like(lse), learnable_sink=sink
    )
    assert out.shape == q.shape and lse.shape == (batch, heads, seqlen_q)
    assert [x.shape for x in gradients[:3]] == [q.shape, k.shape, v.shape]
    if not seqlen_k:
        assert not out.any() and not gradients.dq.any()
        expected = torch.full_like(lse, -torch.inf if sink is None else 0.5)
        assert torch.equal(lse, expected)
        if sink is not None:  # LSE = sink in every row
            assert torch.equal(
                gradients.dsink, torch.full((heads,), float(batch * seqlen_q)).double()
            )


def test_no_packed_rows():
    empty = torch.zeros(0, 2, 8)
    edges = torch.zeros(1, dtype=torch.int32)
    out, lse = attention(
        empty, empty, empty, return_lse=True, cu_seqlens_q=edges, cu_seqlens_k=edges
    )
    assert out.shape == (0, 2, 8) and lse.shape == (2, 0)


def test_what_float32_flushes_is_noise():
    q, k, v, dout = (torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16) for _ in range(4))
    q[..., 0], k[0, 0, 0, 0], v[..., 1], dout[..., 1] = 1, 128, 3, 5
    v[0, 0] = 0
    for scale, lost in ((0.686, True), (0.6, False)):  # P of the second key is 2^-126.7 or 2^-110.8
        options = AttentionOptions(softmax_scale=scale)
        gradients = reference.attention_backward(q, k, v, dout, options)
        noise = reference.rounding_noise(q, k, v, dout, options)
        assert (gradients.dk[0, 1, 0, 0] != 0) & (gradients.dv[0, 1, 0, 1] != 0)
        for name in ("dk", "dv"):
            gradient, error = (getattr(x, name)[0, 1] for x in (gradients, noise))
            assert (error >= gradient.abs()).all() == lost, name


def test_rounding_noise_is_its_formula():
    q, k, v = (x.half() for x in random_inputs(6, 9))
    dout = torch.randn(q.shape).half()
    noise = reference.rounding_noise(q, k, v, dout, AttentionOptions(softmax_scale=-0.3))
    q, k, v, dout = (x[0, :, 0].double() for x in (q, k, v, dout))
    p = torch.softmax(-0.3 * q @ k.T, -1)
    ds = p * (dout @ v.T - (dout * (p @ v)).sum(-1, keepdim=True))
    n = (dout * (p @ v)).square().sum(-1, keepdim=True).sqrt()
    squares = {
        "out": p**2 @ v**2,
        "dq": 0.09 * (ds**2 @ k**2 + (n * p @ k) ** 2),
        "dk": 0.09 * (ds**2 + (n * p) ** 2).T @ q**2,
        "dv": (p**2).T @ dout**2,
    }
    for name, square in squares.items():
        assert_float64_close(getattr(noise, name)[0, :, 0], 2**-10 * square.sqrt(), name)


@pytest.mark.parametrize("name", [*FEATURES])
def test_without_rounding_noise_results_are_zero(name):
    """With every feature, noise has the results' shapes, and is 0 only where no rounding can be."""
    case = build(name, "causal") if name != "causal" else build(name, "sink")
    (q, k, v), keywords = case.store()
    q, k, v = (x.half() for x in (q, k, v))
    out, lse = attention(q, k, v, return_lse=True, **keywords)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    options = AttentionOptions(**keywords)
    noise = reference.rounding_noise(q, k, v, dout, options, dlse=dlse)
    gradients = reference.attention_backward(q, k, v, dout, options, dlse=dlse)
    for size, value in zip(noise, (out, *gradients)):
        if value is not None:
            assert size.shape == value.shape and size.isfinite().all()
            assert not value[size == 0].any()


def random_inputs(
    seqlen_q: int, seqlen_k: int, *, batch: int = 1, heads_kv: int = 1, ratio: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q * 100 + seqlen_k)
    sizes = ((seqlen_q, heads_kv * ratio), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    return tuple(
        torch.randn(batch, *size, 4, dtype=torch.float64, generator=generator) for size in sizes
    )


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"heads": 3}, "3 heads are no multiple of 2 KV heads"),
        ({"window_size": (-2, 0)}, "window_size"),
        ({"dropout_p": 0.1}, "dropout_mask"),
        ({"seqused_k": torch.tensor([6, 5])}, "sequence 0 uses 6 rows, but only 5 are stored"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 3, 4])}, "q holds 3 sequences, k and v 2"),
        ({"block_mask": block_mask(), "seqlen_q": 7}, "block_mask covers 6 queries"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_contradictions_are_errors(keywords, message):
    keywords = dict(keywords)
    q = torch.zeros(2, keywords.pop("seqlen_q", 4), keywords.pop("heads", 2), 8)
    k = torch.zeros(2, 5, 2, 8)
    q = q[0] if "cu_seqlens_q" in keywords else q
    with pytest.raises(ValueError, match=message):
        attention(q, k, k, **keywords)


def test_unknown_keywords_are_errors_and_kernel_choices_are_not():
    q, k, v = random_inputs(2, 3)
    neutral = attention(q, k, v, num_splits=4, pack_gqa=True, deterministic=True)
    assert torch.equal(neutral, attention(q, k, v))
    with pytest.raises(TypeError, match="softmax_scal"):
        attention(q, k, v, softmax_scal=1.0)


def test_reference_imports_torch_and_the_standard_library_alone():
    tree = ast.parse(Path(reference.__file__).read_text())
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported - set(sys.stdlib_module_names) == {"torch"}
