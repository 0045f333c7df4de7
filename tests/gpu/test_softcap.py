"""Caps whose near polynomial is taken unasked: scores near, far above, far below and mixed, against float64."""

import pytest
import torch

import flash4
from tests.checks import assert_forward_close

DEVICE = "cuda"
SCALE = 0.1


def draw(head_dim, queries=1500, keys=1500, noise=1.0):
    """Random q, k, v of two heads."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def one(n):
        return torch.randn((1, n, 2, head_dim), generator=generator, device=DEVICE)

    return one(queries) * noise, one(keys), one(keys)


def scored(levels, head_dim):
    """q, k, v whose scaled scores are about one level for each key."""
    q, k, v = draw(head_dim, noise=0.05)
    q[..., 0] = 16.0
    k[..., 0] = levels(torch.arange(k.shape[1], device=DEVICE))[None, :, None] / (16.0 * SCALE)
    return [x.bfloat16() for x in (q, k, v)]


LEVELS = {
    "all below": lambda j: torch.full_like(j, -13, dtype=torch.float32),
    "far below": lambda j: torch.full_like(j, -70, dtype=torch.float32),
    "all above": lambda j: torch.full_like(j, 15, dtype=torch.float32),
    "few near": lambda j: torch.where(j % 597 == 5, 0.0, -14.0),
    "few above": lambda j: torch.where(j % 597 == 5, 25.0, -14.0),
    "falling": lambda j: j / 10.0 - 90.0,
    "rising": lambda j: 90.0 - j / 10.0,
}
CAPS = [5.0, 20.0, 30.0, 50.0, 60.0, 1e4]


def check(q, k, v, **keywords):
    out, lse = flash4.flash_attn_func(q, k, v, softmax_scale=SCALE, return_lse=True, **keywords)
    again, _ = flash4.flash_attn_func(q, k, v, softmax_scale=SCALE, return_lse=True, **keywords)
    assert torch.equal(out, again)
    assert_forward_close(out, lse, (q, k, v), softmax_scale=SCALE, **keywords)


@pytest.mark.parametrize("softcap", CAPS)
@pytest.mark.parametrize("deviation", [1, 2, 4, 8, 60])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_random_scores(head_dim, deviation, softcap):
    q, k, v = draw(head_dim)
    q = q * (deviation / head_dim**0.5 / SCALE)
    check(*(x.bfloat16() for x in (q, k, v)), softcap=softcap, causal=True)


@pytest.mark.parametrize("softcap", CAPS)
@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_at_levels(head_dim, kind, softcap):
    check(*scored(LEVELS[kind], head_dim), softcap=softcap, causal=True)


@pytest.mark.parametrize("window", [(None, None), (200, 0), (300, 100), (None, 70)])
@pytest.mark.parametrize("kind", ["few near", "all above", "falling"])
def test_windows(kind, window):
    check(*scored(LEVELS[kind], 128), softcap=30.0, window_size=window)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deviation", [1, 8])
def test_sequences(deviation, causal):
    q, k, v = draw(128)
    q = q * (deviation / 128**0.5 / SCALE)
    q, k, v = (x[0].bfloat16() for x in (q, k, v))
    lengths = torch.tensor([0, 100, 100, 901, 1500], device=DEVICE, dtype=torch.int32)
    most = 801
    out, lse = flash4.flash_attn_varlen_func(
        q, k, v, lengths, lengths, most, most, softmax_scale=SCALE, softcap=30.0, causal=causal,
        return_lse=True,
    )  # fmt: skip
    for begin, end in zip(lengths.tolist()[:-1], lengths.tolist()[1:], strict=True):
        if begin < end:
            part = [x[None, begin:end] for x in (q, k, v)]
            assert_forward_close(
                out[None, begin:end], lse[None, :, begin:end], part, softmax_scale=SCALE,
                softcap=30.0, causal=causal,
            )  # fmt: skip
