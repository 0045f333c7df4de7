"""The comparison helpers pass what torch computes and notice what is wrong; so do guards."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import find, given, settings
from torch import Tensor

import flash4
from flash4 import reference
from tests import strategies
from tests.checks import (
    assert_close_to_reference,
    assert_forward_close,
    assert_gradients_close,
    assert_lse_close,
    guarded,
)
from tests.strategies import Problem

DTYPES = [torch.float16, torch.bfloat16]


def fused(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Round as a fused kernel does, in float32 math: out, lse, dq, dk, dv."""
    dtype, scale, offset = q.dtype, 1 / math.sqrt(q.shape[-1]), k.shape[1] - q.shape[1]
    q, k, v, dout = (x.float().transpose(1, 2) for x in (q, k, v, dout))
    scores = scale * q @ k.mT
    if causal:
        visible = torch.ones_like(scores, dtype=torch.bool).tril(offset)
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    peak = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    out = (weights.to(dtype).float() @ v / total.where(total > 0, 1.0)).to(dtype)
    p = torch.exp(scores - lse.clamp(min=-1e30))
    delta = (dout * out.float()).sum(-1, keepdim=True)
    ds = (p * (dout @ v.mT - delta)).to(dtype).float()
    dq, dk, dv = scale * ds @ k, scale * ds.mT @ q, p.to(dtype).float().mT @ dout
    gradients = (x.to(dtype).transpose(1, 2) for x in (dq, dk, dv))
    return out.transpose(1, 2), lse[..., 0], *gradients


def inputs(dtype: torch.dtype, seqlen_q: int = 96, seqlen_k: int = 80) -> list[Tensor]:
    """Make q, k, v, dout of one sequence with two heads."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, seqlen, 2, 16, generator=generator).to(dtype)
        for seqlen in (seqlen_q, seqlen_k, seqlen_k, seqlen_q)
    ]


def results(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Make a causal forward result with 16 rows without a key, its expectation and native twin."""
    q, k, v, dout = inputs(dtype)
    out = fused(q, k, v, dout, causal=True)[0]
    expected, native = (
        reference.attention(q, k, v, causal=True, compute_dtype=d) for d in (torch.float64, None)
    )
    return out, expected, native


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", [(96, 80), (80, 96), (2, 2), (1, 1), (1, 50)], ids=str)
def test_right_results_pass(dtype, causal, sizes):
    q, k, v, dout = inputs(dtype, *sizes)
    out, lse, *gradients = fused(q, k, v, dout, causal)
    assert_forward_close(out, lse, (q, k, v), causal=causal)
    assert_gradients_close(gradients, (q, k, v), dout, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_math_passes(dtype):
    q, k, v, dout = inputs(dtype)
    operands = [x.requires_grad_() for x in (q, k, v)]
    p = torch.softmax((q.transpose(1, 2) / 4) @ k.permute(0, 2, 3, 1), -1)
    out = (p @ v.transpose(1, 2)).transpose(1, 2)
    assert_forward_close(out, None, (q, k, v))
    assert_gradients_close(torch.autograd.grad(out, operands, dout), (q, k, v), dout)


def wrong_element(x: Tensor) -> None:
    x[0, 50, 1, 3] *= 1.25


def nan(x: Tensor) -> None:
    x[0, 50, 1, 3] = torch.nan


def infinity(x: Tensor) -> None:
    x[0, 50, 1, 3] = torch.inf


def shifted_row(x: Tensor) -> None:
    x[0, 50] = x[0, 51].clone()


def swapped_heads(x: Tensor) -> None:
    x[0, 50] = x[0, 50].flip(0)


def sign_of_a_late_row(x: Tensor) -> None:
    x[0, -1, 0] *= -1


def unwritten_tail(x: Tensor) -> None:
    x[0, -1:, :, 8:] = 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spoil",
    [
        wrong_element,
        nan,
        infinity,
        shifted_row,
        swapped_heads,
        sign_of_a_late_row,
        unwritten_tail,
    ],
    ids=lambda f: f.__name__,
)
def test_wrong_results_fail(dtype, spoil):
    out, expected, native = results(dtype)
    assert_close_to_reference(out, expected, native)
    spoil(out)
    with pytest.raises(AssertionError, match="^out: "):
        assert_close_to_reference(out, expected, native)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", [{"softmax_scale": 0.26}, {"window_size": (70, 0)}, {}], ids=str)
def test_wrong_functions_fail(dtype, change):
    """Another scale, a narrower window, no causal mask: all of it shows, forward and backward."""
    q, k, v, dout = inputs(dtype, 96, 96)
    right = {"causal": True}
    wrong = {**right, **change} if change else {}
    out, lse = reference.attention(q, k, v, return_lse=True, **wrong)
    with pytest.raises(AssertionError, match="^out: "):
        assert_forward_close(out.to(dtype), None, (q, k, v), **right)
    with pytest.raises(AssertionError, match="^lse: "):
        assert_lse_close(lse, reference.attention(q, k, v, return_lse=True, **right)[1])
    gradients = reference.attention_gradients(q, k, v, dout, **wrong)[:3]
    for i, gradient in enumerate(gradients):
        alone = [None] * i + [gradient.to(dtype)]
        with pytest.raises(AssertionError, match=f"^{'dq dk dv'.split()[i]}: "):
            assert_gradients_close(alone, (q, k, v), dout, **right)


def test_an_error_too_small_for_elements_shows_in_the_mean():
    """A padded key that joins every row's sum makes out 1/512 too small."""
    q, k, v, _ = inputs(torch.float16, 64, 512)
    q = torch.zeros_like(q)
    expected = reference.attention(q, k, v)
    native = reference.attention(q, k, v, compute_dtype=None)
    wrong = (expected * 512 / 513).half()
    with pytest.raises(AssertionError, match="root mean square"):
        assert_close_to_reference(wrong, expected, native)


def test_message_names_the_worst_element():
    out, expected, native = results(torch.float16)
    out[0, 60, 1, 5] += 0.5
    out[0, 70, 0, 2] += 2.0
    with pytest.raises(AssertionError) as error:
        assert_close_to_reference(out, expected, native, "out of split 3")
    message = str(error.value)
    assert message.startswith(
        "out of split 3: 2 of 3072 elements are wrong, worst at (0, 70, 0, 2)"
    )
    for part in ("got", "expected", "allowed"):
        assert part in message


def test_rows_without_keys_must_be_exactly_zero():
    q, k, v, dout = inputs(torch.bfloat16)
    out, lse, *gradients = fused(q, k, v, dout, causal=True)
    assert torch.equal(out[0, :16], torch.zeros_like(out[0, :16]))
    out[0, 3, 1, 0] = gradients[0][0, 3, 1, 0] = 1e-30
    with pytest.raises(AssertionError, match=r"^out: 1 of .* worst at \(0, 3, 1, 0\)"):
        assert_forward_close(out, lse, (q, k, v), causal=True)
    with pytest.raises(AssertionError, match=r"^dq: 1 of .* worst at \(0, 3, 1, 0\)"):
        assert_gradients_close(gradients, (q, k, v), dout, causal=True)


def test_rows_given_as_zero_must_be_exactly_zero():
    out, zeros = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8, dtype=torch.float64)
    out[0, 3, 1, 5] = 1e-40
    assert_close_to_reference(out, zeros, zeros)
    with pytest.raises(AssertionError, match=r"^out: 1 of .* worst at \(0, 3, 1, 5\)"):
        assert_close_to_reference(out, zeros, zeros, zero_rows=torch.ones(1, 4, 2).bool())


def test_gradient_of_a_sink():
    q, k, v, dout = inputs(torch.bfloat16)
    sink = torch.tensor([0.5, -1.0])
    gradients = reference.attention_gradients(q, k, v, dout, learnable_sink=sink)
    results = [x.bfloat16() for x in gradients[:3]] + [gradients.dsink.float()]
    assert_gradients_close(results, (q, k, v), dout, learnable_sink=sink)
    results[3][1] *= 1.1
    with pytest.raises(AssertionError, match="^dsink: "):
        assert_gradients_close(results, (q, k, v), dout, learnable_sink=sink)


@pytest.mark.parametrize("seed", [0, 3, 4, 5])
def test_rows_with_the_same_probabilities_share_the_rounding_of_out(seed):
    torch.manual_seed(seed)
    q, k = torch.zeros(1, 900, 1, 64).bfloat16(), torch.randn(1, 1, 1, 64).bfloat16()
    v, dout = torch.randn(1, 1, 1, 64).bfloat16(), torch.ones(1, 900, 1, 64).bfloat16()
    sink = torch.tensor([1.0])
    options = reference.AttentionOptions(learnable_sink=sink)
    out, lse = reference.attention_forward(q, k, v, options)
    rounding = out.bfloat16().double() - out
    for stored, right in ((out + rounding, True), (out + 20 * rounding, False)):
        delta = (dout.double() * stored).sum(-1).transpose(1, 2)
        dsink = -((sink[:, None] - lse).exp() * delta).sum((0, 2)).float()
        with contextlib.nullcontext() if right else pytest.raises(AssertionError):
            assert_gradients_close((None, None, None, dsink), (q, k, v), dout, learnable_sink=sink)


def test_expected_infinities_and_overflow_agree():
    """A value beyond float16 becomes Inf there, and must."""
    expected = torch.full((1, 2, 1, 8), 1.0, dtype=torch.float64)
    expected[0, 0, 0, 0], expected[0, 0, 0, 1] = 1e6, torch.nan
    out = expected.half()
    assert_close_to_reference(out, expected, out)
    out[0, 0, 0, 0] = 65504
    with pytest.raises(AssertionError, match="NaN and Inf differ"):
        assert_close_to_reference(out, expected, expected.half())


def test_a_useless_yardstick_is_an_error():
    out, expected, native = results(torch.float16)
    native[0, 50, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="native is not finite"):
        assert_close_to_reference(out, expected, native)


def test_shapes_must_agree():
    out, expected, native = results(torch.float16)
    with pytest.raises(AssertionError, match="shape"):
        assert_close_to_reference(out.transpose(1, 2), expected, native)


@pytest.mark.parametrize(
    ("row", "value"),
    [(3, -1e30), (3, torch.nan), (3, torch.inf), (50, -torch.inf), (50, 3.0)],
    ids=str,
)
def test_wrong_lse_fails(row, value):
    """Rows below 16 have no key: nothing but -inf is right there."""
    q, k, v, dout = inputs(torch.bfloat16)
    lse = fused(q, k, v, dout, causal=True)[1]
    expected = reference.attention(q, k, v, causal=True, return_lse=True)[1]
    assert_lse_close(lse, expected)
    lse[0, 1, row] = value
    with pytest.raises(AssertionError, match="lse"):
        assert_lse_close(lse, expected)


def test_lse_in_base_two_or_of_a_shifted_row_fails():
    q, k, v, _ = inputs(torch.bfloat16)
    expected = reference.attention(q, k, v, return_lse=True)[1]
    for wrong in (expected / math.log(2), expected.roll(1, -1), expected + 1e-4):
        with pytest.raises(AssertionError, match="lse"):
            assert_lse_close(wrong.float(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_guards(dtype):
    result = guarded((3, 5, 8), dtype, columns=8)
    assert result.tensor.shape == (3, 5, 8) and result.tensor.stride() == (80, 16, 1)
    assert result.tensor.isnan().all() and result.buffer.isnan().all()
    assert result.tensor.data_ptr() % 16 == 0
    result.check()
    with pytest.raises(AssertionError, match=r"120 elements were never written, .* \(0, 0, 0\)"):
        result.check(written=True)
    result.tensor.zero_()
    result.check(written=True)
    result.tensor[2, 1, 3] = torch.nan  # a NaN that was computed
    result.check(written=True)


@pytest.mark.parametrize("offset", [-1, 8, 14 * 16 + 8, 15 * 16 + 3])
def test_guards_notice_stray_writes(offset):
    result = guarded((3, 5, 8), torch.float16, columns=8)
    result.buffer[result.tensor.storage_offset() + offset] = torch.nan
    with pytest.raises(AssertionError, match=rf"1 elements outside .* element \{offset:+d} from"):
        result.check()


@pytest.mark.parametrize("layout", strategies.LAYOUTS)
def test_layouts_hold_the_same_numbers_between_nans(layout):
    shape = {"batch": 2, "heads_kv": 2, "ratio": 3, "head_dim": 16, "seqlen_q": 5, "seqlen_k": 4}
    plain = Problem(**shape).tensors(seed=3)
    tensors = Problem(**shape, layouts=(layout,) * 3).tensors(seed=3)
    for x, y in zip(tensors, plain):
        assert x.shape == y.shape and x.dtype == y.dtype and not x.isnan().any()
        if not layout.startswith("expanded"):
            assert torch.equal(x, y)
        whole = torch.as_strided(x, (x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
        assert whole.isnan().sum() == len(whole) - len(set(addresses(x)))


def addresses(x: Tensor) -> list[int]:
    """Give the place in storage of every element."""
    places = torch.arange(x.untyped_storage().nbytes() // x.itemsize)
    return places.as_strided(x.shape, x.stride(), x.storage_offset()).flatten().tolist()


@settings(max_examples=50)
@given(strategies.problems())
def test_problems_are_bounded_and_print_themselves(problem):
    assert problem.scores <= strategies.MAX_SCORES
    assert max(problem.seqlen_q, problem.seqlen_k) <= strategies.MAX_SEQLEN
    assert max(problem.head_dim, problem.head_dim_v) <= 256
    assert (problem.head_dim | problem.head_dim_v) % 8 == 0
    assert eval(str(problem)) == problem


def test_problems_shrink_to_the_smallest():
    assert find(strategies.problems(), lambda problem: True) == Problem()


def test_random_problems_repeat_and_cover():
    problems = list(strategies.random_problems(500, seed=1))
    assert problems == list(strategies.random_problems(500, seed=1))
    assert problems[:5] != list(strategies.random_problems(5, seed=2))
    for name in ("dtype", "batch", "ratio", "head_dim", "causal", "softmax_scale", "pack_gqa"):
        assert len({getattr(problem, name) for problem in problems}) > 1
    assert {layout for problem in problems for layout in problem.layouts} == {*strategies.LAYOUTS}
    edges = {k * tile + d for tile in strategies.TILES for k in range(34) for d in (-1, 0, 1)}
    assert sum(problem.seqlen_k in edges for problem in problems) > 200


def test_random_problems_pass_against_fused_rounding():
    """The bound accuses no right result: small problems of all kinds, forward and backward."""
    for i, problem in enumerate(
        strategies.random_problems(80, 7, max_seqlen=130, max_scores=2**14)
    ):
        features = (problem.window_size != (None, None), problem.softcap, problem.sink is not None)
        dense = problem.function is flash4.flash_attn_func
        if problem.softmax_scale is not None or any(features) or not dense:
            continue
        q, k, v = problem.tensors(seed=i)
        dout = problem.output_gradient(seed=i)
        k, v = (x.repeat_interleave(problem.ratio, 2) for x in (k, v))
        out, lse, *gradients = fused(q, k, v, dout, problem.causal)
        assert_forward_close(out, lse, (q, k, v), causal=problem.causal)
        assert_gradients_close(gradients, (q, k, v), dout, causal=problem.causal)


def truncating_scores(q, k):
    """Scores as tensor cores sum them: 16 products at a time, rounded towards zero to float32."""
    total = torch.zeros(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    for i in range(0, q.shape[-1], 16):
        part = (x[..., i : i + 16].double() for x in (q, k))
        exact = total.double() + torch.einsum("bqhd,bkhd->bhqk", *part)
        nearest = exact.float()
        away = nearest.double().abs() > exact.abs()
        total = torch.where(away, torch.nextafter(nearest, torch.zeros(())), nearest)
    return total


def test_lse_of_scores_whose_terms_cancel():
    """Right results of a GPU were refused where |q| |k| is a thousand and the score next to nothing."""
    generator = torch.Generator().manual_seed(39)
    q, k, v = ((torch.randn(1, 64, 16, 240, generator=generator) * 3).bfloat16() for _ in range(3))
    keywords = {"causal": True, "softmax_scale": 0.7}
    out, expected = reference.attention(q, k, v, return_lse=True, **keywords)
    hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)
    lse = (truncating_scores(q, k) * 0.7).masked_fill(hidden, -math.inf).logsumexp(-1)
    with pytest.raises(AssertionError, match="lse"):
        assert_lse_close(lse, expected)
    assert_forward_close(out.bfloat16(), lse, (q, k, v), **keywords)
    with pytest.raises(AssertionError, match="lse"):
        assert_forward_close(out.bfloat16(), lse + 1e-3, (q, k, v), **keywords)
