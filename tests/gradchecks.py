"""Gradients as differences of a float64 forward, at tiny sizes: what no formula of a backward has gone into."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flash4 import reference
from tests.checks import assert_close_to_reference
from tests.strategies import Problem

STEP = 1e-5  # of a central difference: its error is some 1e-10 of the gradient

SMALL = dict(heads_kv=1, ratio=2, head_dim=8, head_dim_v=8, seqlen_q=5, seqlen_k=6)
PACKED = dict(lengths_q=(3, 0, 4), lengths_k=(4, 2, 3), around=(1, 2))
WIDE = dict(head_dim=8, head_dim_v=136, seqlen_q=3, seqlen_k=4, dtype=torch.bfloat16)
TINY = {
    "full": Problem(**SMALL),
    "causal": Problem(**SMALL | {"seqlen_q": 7}, causal=True),
    "window": Problem(**SMALL, window_size=(2, 1)),
    "window at the right": Problem(**SMALL, window_size=(None, 1)),
    "causal window": Problem(**SMALL, causal=True, window_size=(1, None)),
    "negative scale": Problem(**SMALL, softmax_scale=-0.3),
    "scale 0": Problem(**SMALL, softmax_scale=0.0),
    "cap": Problem(**SMALL, softcap=1.5),
    "sink": Problem(**SMALL | {"seqlen_q": 7}, causal=True, sink=0.5),
    "slopes": Problem(**SMALL, alibi="by head"),
    "slopes by batch": Problem(**SMALL, batch=2, alibi="by batch and head"),
    "mask_mod": Problem(**SMALL, mask_mod="dilated"),
    "score_mod": Problem(**SMALL, score_mod="bent"),
    "score_mod by place": Problem(**SMALL, score_mod="relative", causal=True),
    "mods that read": Problem(**SMALL, score_mod="heads", mask_mod="documents"),
    "cap, slopes, mods": Problem(
        **SMALL, softcap=2.0, alibi="by head", score_mod="bent", mask_mod="dilated"
    ),
    "packed": Problem(**SMALL, **PACKED),
    "packed, causal, mods": Problem(**SMALL, **PACKED, causal=True, score_mod="bent", sink=0.0),
    "in use": Problem(**SMALL, batch=2, used_q=(5, 2), used_k=(1, 6)),
    "queries packed": Problem(**SMALL | {"seqlen_k": 4}, lengths_q=(3, 2), used_k=(4, 2)),
    "all of it": Problem(
        **SMALL, **PACKED, used_q=(2, 0, 4), used_k=(4, 1, 3), window_size=(2, 2), softcap=2.0, sink=1.0,
        alibi="by batch and head", score_mod="bent", mask_mod="documents", softmax_scale=-0.4,
    ),
    "wide": Problem(**WIDE),
    "wide, packed": Problem(**WIDE, lengths_q=(2, 3), lengths_k=(3, 1), causal=True, ratio=2),
    "wide, mods": Problem(**WIDE, score_mod="bent", mask_mod="documents", softcap=2.0, alibi="by head"),
    "wide, in use, mods": Problem(
        **WIDE, batch=2, used_q=(3, 1), used_k=(2, 4), score_mod="heads", window_size=(2, 1), sink=0.0
    ),
}  # fmt: skip


def differences(
    loss: Callable[..., Tensor], inputs: Sequence[Tensor], step: float = STEP
) -> list[Tensor]:
    """Central differences of a number by each element of float64 tensors; 0 for elements that are not finite."""
    gradients = []
    for x in inputs:
        gradient = torch.zeros_like(x)
        flat, found = x.view(-1), gradient.view(-1)
        for i in range(flat.numel()):
            here = flat[i].item()
            if not torch.isfinite(flat[i]):
                continue
            values = []
            for there in (here + step, here - step):
                flat[i] = there
                values.append(loss(*inputs))
            flat[i] = here
            found[i] = (values[0] - values[1]) / (2 * step)
        gradients.append(gradient)
    return gradients


def check_by_differences(
    gradients: Sequence[Tensor | None],
    problem: Problem,
    inputs: Sequence[Tensor],
    dout: Tensor,
    dlse: Tensor | None = None,
) -> None:
    """Compare gradients of q, k, v and, if the problem has them, sinks with differences of the reference's forward.

    The tolerance is that of every test of gradients.

    Raises:
        AssertionError: one of them, or of the reference's own gradients, is wrong.
    """
    keywords = problem.keywords()
    sink = keywords.pop("learnable_sink")
    operands = [x.detach().cpu().double().contiguous() for x in inputs]
    operands += [] if sink is None else [sink.double()]
    dout, dlse = (None if x is None else x.detach().cpu() for x in (dout, dlse))

    def loss(q, k, v, *sinks):
        own = {"learnable_sink": sinks[0]} if sinks else {}
        out, lse = reference.attention(q, k, v, return_lse=True, **keywords, **own)
        total = (out * dout.double()).sum()
        if dlse is not None:
            total = total + (torch.where(lse.isinf(), 0.0, lse) * dlse.double()).sum()
        return total

    numeric = differences(loss, operands)
    options = reference.AttentionOptions.from_keywords(**keywords, learnable_sink=sink)
    q, k, v = (x.detach().cpu() for x in inputs)
    expected = reference.attention_backward(q, k, v, dout, options, dlse=dlse)
    native = reference.attention_backward(q, k, v, dout, options, dlse=dlse, compute_dtype=None)
    noise = reference.rounding_noise(q, k, v, dout, options, dlse=dlse)
    for name, wanted in zip(expected._fields, numeric, strict=False):
        torch.testing.assert_close(getattr(expected, name), wanted, rtol=1e-6, atol=1e-7)
    for name, got, wanted in zip(("dq", "dk", "dv"), gradients, numeric, strict=False):
        if got is not None:
            own, spread = getattr(native, name), getattr(noise, name)
            assert_close_to_reference(got.detach().cpu(), wanted, own, name, noise=spread)
