"""How tests compare results: the project's one tolerance, and buffers that notice stray writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash4 import reference

# Rows on either side that share a row's native error; see assert_close_to_reference.
_NEIGHBOURS = 16


def assert_close_to_reference(
    actual: Tensor,
    expected64: Tensor,
    native: Tensor,
    name: str = "out",
    *,
    noise: Tensor | None = None,
    zero_rows: Tensor | None = None,
    factor: float = 2.0,
) -> None:
    """Check a result elementwise against float64, with torch's own error as the yardstick.

    With `e` the expected value, `n` the native one and `eps` the spacing of actual's dtype at 1::

        |actual - e| <= factor * local_native_error + eps * |e| + noise

    `local_native_error` is the largest `|n - e|` in the row (one head_dim vector of one head) and
    in the 16 rows before and after it in the same head. Single elements would be useless as a
    yardstick, because here and there a rounding error is zero by luck. Over the whole tensor the
    yardstick would be blind: under a causal mask the first rows are fifty times larger than the
    last, and so are their errors. Neighbouring rows see nearly the same keys, so that their errors
    are of one size.

    Rows are few in small problems, and a peaked softmax makes each row a case of its own: even a
    neighbourhood may be spared by luck. `noise` is the rounding that no algorithm can avoid, from
    `reference.rounding_noise`. Without it eps times the row's largest `|e|` stands in, which in one
    of a hundred problems accuses a right gradient.

    On top, the root mean square error over the tensor must stay within `factor` times native's plus
    half of that of `eps * |e| + noise`: a small error everywhere, such as a key too many in each
    row, may hide in single elements, but not in their mean.

    NaN and Inf must be where expected, rounded to actual's dtype, has them.

    Args:
        actual: (..., seqlen, heads, head_dim); with fewer dimensions, one row.
        expected64: float64 reference on the same rounded inputs.
        native: torch's own math in the inputs' dtype: the reference with `compute_dtype=None`.
        name: what it is, for the message.
        noise: as actual.
        zero_rows: bool, actual's shape without head_dim: rows that must be exactly 0.
        factor: how many times the native error is allowed.

    Raises:
        AssertionError: with the worst element's index, value, expectation and bound.
        ValueError: native is not finite where expected is, so that it measures nothing.
    """
    assert actual.shape == expected64.shape == native.shape, (
        f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected64.shape)}, "
        f"native {tuple(native.shape)}"
    )
    if not actual.numel():
        return
    eps, tiny = torch.finfo(actual.dtype).eps, torch.finfo(actual.dtype).smallest_normal
    got, expected, native = actual.double(), expected64.double(), native.double()
    finite = _assert_same_special_values(name, actual, expected)
    if not native[finite].isfinite().all():
        raise ValueError(f"{name}: native is not finite where expected is; it measures nothing")

    expected, native_error, error = (
        torch.where(finite, x, 0.0)
        for x in (expected, (native - expected).abs(), (got - expected).abs())
    )
    if noise is None:
        noise = eps * _typical_size(expected)
    # Below its normal range a dtype's spacing is constant, and fast exp2 flushes float32's to zero.
    rounding = eps * expected.abs().clamp(min=tiny) + 2**-120
    allowed = factor * _local_maximum(native_error.amax(-1, keepdim=True)) + rounding + noise
    if zero_rows is not None:
        allowed = allowed.masked_fill(zero_rows[..., None], 0.0)
    _assert_within(name, error, allowed, actual, expected64)
    limit = factor * _rms(native_error) + _rms(rounding + noise) / 2
    assert _rms(error) <= limit, (
        f"{name}: each element is within its bound, but the root mean square error is "
        f"{_rms(error):.3e}, allowed {limit:.3e} (native {_rms(native_error):.3e})"
    )


def assert_forward_close(
    out: Tensor,
    lse: Tensor | None,
    inputs: tuple[Tensor, Tensor, Tensor],
    **keywords: Any,
) -> None:
    """Check a forward result against the reference: out, its zero rows and the LSE.

    Args:
        out: result of a public function.
        lse: its LSE, or None to check out alone.
        inputs: the q, k and v that it was called with.
        **keywords: the keywords that it was called with.

    Raises:
        AssertionError: out or the LSE is wrong.
    """
    q, k, v = (x.detach() for x in inputs)
    with torch.no_grad():
        expected, expected_lse = reference.attention(q, k, v, return_lse=True, **keywords)
        native = reference.attention(q, k, v, compute_dtype=None, **keywords)
    options = reference.AttentionOptions.from_keywords(**keywords)
    noise = reference.rounding_noise(q, k, v, options=options)
    # With a sink a row's LSE no longer tells whether it has keys; without weights out is 0 exactly.
    zero_rows = ((expected == 0) & (noise.out == 0)).all(-1)
    assert_close_to_reference(
        out.detach(), expected, native, "out", noise=noise.out, zero_rows=zero_rows
    )
    if lse is not None:
        atol = 2e-5 + _float32_lse_error(q, k, options)
        assert_lse_close(lse.detach(), expected_lse, atol=atol)


def _float32_lse_error(q: Tensor, k: Tensor, options: reference.AttentionOptions) -> Tensor | float:
    """Half an ulp of what float32 sums up for each row's LSE, whatever the LSE itself comes to.

    A score is a sum of head_dim terms that may cancel: its error goes by their size, |q| |k| at
    most (Cauchy-Schwarz), not by its own. The row sum runs over blocks of at least 64 keys, and may
    lose half an ulp in each. A cap costs a tanh, with a relative error of 8 ulps.
    """
    if not (q.numel() and k.numel()):
        return 0.0
    rows = q.double().norm(dim=-1).transpose(-1, -2)  # laid out as the LSE
    keys = k.double().norm(dim=-1).nan_to_num(0.0, 0.0, 0.0).max()
    given = options.softmax_scale
    scale = q.shape[-1] ** -0.5 if given is None else abs(given)
    scores = scale * rows * keys
    tanh = 16 * scores.clamp(max=options.softcap) if options.softcap else 0.0
    return 2.0**-24 * (scores + tanh + k.shape[-3] / 64)


def assert_gradients_close(
    gradients: Sequence[Tensor | None],
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    *,
    dlse: Tensor | None = None,
    **keywords: Any,
) -> None:
    """Check gradients against the reference.

    Args:
        gradients: dq, dk, dv and, with a learnable sink, dsink; None is not checked.
        inputs: the q, k and v that the forward pass was called with.
        dout: gradient of out.
        dlse: gradient of the LSE.
        **keywords: the keywords that the forward pass was called with.

    Raises:
        AssertionError: a gradient is wrong.
    """
    q, k, v = (x.detach() for x in inputs)
    options = reference.AttentionOptions.from_keywords(**keywords)
    expected = reference.attention_backward(q, k, v, dout, options, dlse=dlse)
    native = reference.attention_backward(q, k, v, dout, options, dlse=dlse, compute_dtype=None)
    noise = reference.rounding_noise(q, k, v, dout, options, dlse=dlse)
    for name, got in zip(expected._fields, gradients, strict=False):
        if got is None:
            continue
        e, n, s = (getattr(x, name) for x in (expected, native, noise))
        if name == "dsink":
            s = s + _sink_error(inputs, dout, dlse, options)
        zero_rows = ((e == 0) & (s == 0)).all(-1) if e.dim() > 1 else None
        assert_close_to_reference(got.detach(), e, n, name, noise=s, zero_rows=zero_rows)


def _sink_error(
    inputs: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    options: reference.AttentionOptions,
) -> Tensor:
    """Error of dsink that is not independent from row to row.

    From an LSE in float32 come four half ulps of it in exp(sink - LSE), for each row: the gradient of a float32 sink is
    compared at float32's own spacing, far below that. From the out that is saved in its dtype comes the rounding of out
    itself, which rows with the same probabilities have in common; twice, as P is rounded too.
    """
    q, k, v = (x.detach() for x in inputs)
    out, lse = reference.attention_forward(q, k, v, options)
    rounding = (dout.double() * (out.to(q.dtype).double() - out)).sum(-1).transpose(-1, -2)
    delta = (dout.double() * out).sum(-1).transpose(-1, -2)
    delta = delta if dlse is None else delta - dlse
    sink = options.learnable_sink.detach().double()[:, None]
    weights = (sink - lse).exp().masked_fill(lse == -torch.inf, 0.0)

    def of_heads(rows: Tensor) -> Tensor:
        return rows.masked_fill(lse == -torch.inf, 0.0).movedim(-2, 0).flatten(1).sum(1)

    spacing = of_heads(weights * delta.abs() * (1 + lse.abs()))
    return 2.0**-22 * spacing + 2 * of_heads(weights * rounding).abs()


def assert_float64_close(actual: Tensor, expected: Tensor, name: str = "result") -> None:
    """Check that two float64 computations agree, to 1e-11 of the largest expected element.

    Raises:
        AssertionError: with the worst element's index, value, expectation and bound.
    """
    assert actual.dtype == expected.dtype == torch.float64, f"{name}: dtype {actual.dtype}"
    assert actual.shape == expected.shape, (
        f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    finite = _assert_same_special_values(name, actual, expected)
    error = torch.where(finite, (actual - expected).abs(), 0.0)
    largest = torch.where(finite, expected.abs(), 0.0).amax() if expected.numel() else 0.0
    allowed = torch.full_like(error, 1e-11) * (largest + 1e-3)
    _assert_within(name, error, allowed, actual, expected)


def assert_lse_close(
    actual: Tensor,
    expected64: Tensor,
    name: str = "lse",
    *,
    atol: Tensor | float = 2e-5,
    rtol: float = 4e-6,
) -> None:
    """Check an LSE (natural log) at float32's accuracy; -inf, +inf and NaN must match exactly.

    The default atol is for scores of normal inputs up to head_dim 256; rtol, about 32 float32 ulps,
    covers the sum over head_dim of scores whose terms are larger than their sum.

    Raises:
        AssertionError: with the worst row's index, value, expectation and bound.
    """
    assert actual.shape == expected64.shape, (
        f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected64.shape)}"
    )
    assert actual.dtype in (torch.float32, torch.float64), f"{name}: dtype {actual.dtype}"
    if not actual.numel():
        return
    expected = expected64.double()
    finite = _assert_same_special_values(name, actual, expected)
    expected = torch.where(finite, expected, 0.0)
    error = torch.where(finite, (actual.double() - expected).abs(), 0.0)
    _assert_within(name, error, atol + rtol * expected.abs(), actual, expected64)


def _assert_same_special_values(name: str, actual: Tensor, expected: Tensor) -> Tensor:
    """Check that NaN, Inf and -Inf agree, and return where the expected value is finite."""
    rounded = expected.to(actual.dtype)
    same = torch.where(rounded.isfinite(), actual.isfinite(), actual == rounded)
    same |= rounded.isnan() & actual.isnan()
    if not same.all():
        worst = tuple((~same).nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: NaN and Inf differ in {(~same).sum().item()} of {same.numel()} elements, "
            f"first at {worst}: got {actual[worst].item()}, expected {expected[worst].item()}"
        )
    return rounded.isfinite()


def _assert_within(
    name: str, error: Tensor, allowed: Tensor, actual: Tensor, expected: Tensor
) -> None:
    wrong = error > allowed
    if not wrong.any():
        return
    excess = torch.where(wrong, error / allowed.clamp(min=1e-300), 0.0)
    worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    raise AssertionError(
        f"{name}: {wrong.sum().item()} of {wrong.numel()} elements are wrong, worst at {worst}: "
        f"got {actual[worst].item():.9g}, expected {expected[worst].item():.9g}, "
        f"error {error[worst].item():.3e}, allowed {allowed[worst].item():.3e}"
    )


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _typical_size(expected: Tensor) -> Tensor:
    """Take the largest element of each row, plus a trace of the largest of its head.

    The trace is for float32 sums that cancel exactly in float64.
    """
    row = expected.abs().amax(-1, keepdim=True)
    head = row.amax((-3, -1), keepdim=True) if row.dim() > 2 else row
    return row + 2**-10 * head


def _local_maximum(row_error: Tensor) -> Tensor:
    """Take the largest of (..., seqlen, heads, 1) over neighbouring rows of the same head."""
    if row_error.dim() < 3:
        return row_error
    by_head = row_error[..., 0].transpose(-1, -2)  # (..., heads, seqlen)
    width = 2 * _NEIGHBOURS + 1
    largest = F.max_pool1d(by_head.reshape(-1, 1, by_head.shape[-1]), width, 1, _NEIGHBOURS)
    return largest.reshape(by_head.shape).transpose(-1, -2)[..., None]


# NaNs of a payload that no arithmetic produces, so that an untouched element can be told from a
# computed NaN, and a NaN written over it from no write at all.
_POISON = {1: 0x7F, 2: 0x7FA5, 4: 0x7FA5A5A5, 8: 0x7FA5A5A5A5A5A5A5}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Guarded:
    """A NaN-filled tensor inside a larger NaN-filled buffer; see `guarded`."""

    tensor: Tensor
    buffer: Tensor

    def check(self, *, written: bool = False) -> None:
        """Check that nothing outside the tensor changed, bit for bit.

        Args:
            written: also check that every element of the tensor was written.

        Raises:
            AssertionError: naming the first stray write, in elements from the tensor's start.
        """
        bits = _INTEGERS[self.buffer.itemsize]
        outside = self.buffer.view(bits) != _POISON[self.buffer.itemsize]
        inside = outside.as_strided(
            self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()
        )
        untouched = (~inside).nonzero()
        inside.zero_()
        stray = outside.nonzero().flatten()
        if len(stray):
            first = stray[0].item() - self.tensor.storage_offset()
            raise AssertionError(
                f"{len(stray)} elements outside the tensor {tuple(self.tensor.shape)} were "
                f"overwritten, the first at element {first:+d} from its start"
            )
        if written and len(untouched):
            raise AssertionError(
                f"{len(untouched)} elements were never written, the first at "
                f"{tuple(untouched[0].tolist())}"
            )


def guarded(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    rows: int = 64,
    columns: int = 0,
) -> Guarded:
    """Allocate a tensor that notices writes outside it, and elements nobody wrote.

    Args:
        shape: of the tensor; the last dimension is contiguous.
        dtype: any with a NaN, or an integer.
        device: where to allocate.
        rows: guard rows, vectors of the last dimension, before and after the tensor.
        columns: guard elements after every row, for stores that spill past head_dim.

    Returns:
        The tensor and its buffer, all NaN with one bit pattern (a large number for integers), the
        tensor's start aligned to 128 elements.
    """
    width = shape[-1] + columns
    count = math.prod(shape[:-1])
    guard = -(-rows * width // 128) * 128
    itemsize = dtype.itemsize
    buffer = torch.full(
        (guard + count * width + guard,),
        _POISON[itemsize],
        dtype=_INTEGERS[itemsize],
        device=device,
    ).view(dtype)
    inner = buffer[guard : guard + count * width].view(*shape[:-1], width)
    return Guarded(inner[..., : shape[-1]], buffer)
