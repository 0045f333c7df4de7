"""scaled_dot_product_attention against torch's, on a GPU."""

from __future__ import annotations

import pytest
import torch

import flash4

DEVICE = "cuda"
TORCH = torch.nn.functional.scaled_dot_product_attention


def draw(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def masks(batch, heads, seqlen_q, seqlen_k):
    """Boolean and additive masks of every shape that broadcasts; one query sees no key, and so does a whole tile's."""
    seen = draw(batch, heads, seqlen_q, seqlen_k).float() > -0.3
    seen[:, :, seqlen_q // 2] = False
    causal = torch.ones(seqlen_q, seqlen_k, device=DEVICE).tril().bool()
    window = torch.zeros(seqlen_q, seqlen_k, device=DEVICE, dtype=torch.bfloat16)
    keys = torch.ones(batch, 1, 1, seqlen_k, device=DEVICE, dtype=torch.bool)
    keys[:, :, :, seqlen_k * 3 // 4 :] = False
    keys[0, :, :, : seqlen_k // 2] = False
    return {
        "bool": seen,
        "causal": causal,
        "keys": keys,
        "heads": seen[:1],
        "float": draw(batch, heads, seqlen_q, seqlen_k, seed=5),
        "float square": window.masked_fill(~causal, -torch.inf),
        "float lowest": window.masked_fill(~causal, torch.finfo(torch.bfloat16).min),
        "one query": draw(batch, heads, 1, seqlen_k, seed=6),
    }


MASKS = (
    "bool", "causal", "keys", "heads", "float", "float square", "float lowest", "one query",
)  # fmt: skip


def check(found, q, k, v, **given):
    """Within twice the error of torch's own math in the same dtype, of the float64 result."""
    exact = TORCH(q.double(), k.double(), v.double(), **double(given))
    theirs = TORCH(q, k, v, **given)
    assert found.shape == theirs.shape and found.dtype == theirs.dtype
    bound = 2 * (theirs.double() - exact).abs().max() + 2**-8 * exact.abs() + 1e-3
    assert ((found.double() - exact).abs() <= bound).all()


def double(given):
    mask = given.get("attn_mask")
    if mask is None or mask.dtype == torch.bool:
        return given
    return {**given, "attn_mask": mask.double()}


@pytest.mark.parametrize("lengths", [(300, 300), (130, 517), (517, 130)], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind, lengths):
    q, k, v = (draw(2, 4, n, 64, seed=i) for i, n in enumerate((lengths[0], *lengths[1:] * 2)))
    mask = masks(2, 4, *lengths)[kind]
    assert "sm90-fwd" in str(flash4.explain(q, k, v, sdpa=True, attn_mask=mask))
    for _ in range(2):
        check(flash4.scaled_dot_product_attention(q, k, v, mask), q, k, v, attn_mask=mask)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(300, 300), (130, 517), (517, 130)], ids=str)
def test_causal_is_top_left_with_gradients(lengths, causal):
    inputs = [draw(2, 4, n, 128, seed=i) for i, n in enumerate((lengths[0], *lengths[1:] * 2))]
    for x in inputs:
        x.requires_grad_()
    dout = draw(2, 4, lengths[0], 128, seed=9)
    assert "sm90-bwd" in str(flash4.explain(*inputs, sdpa=True, is_causal=causal, backward=True))
    out = flash4.scaled_dot_product_attention(*inputs, is_causal=causal)
    found = torch.autograd.grad(out, inputs, dout)
    check(out.detach(), *(x.detach() for x in inputs), is_causal=causal)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(TORCH(*exact_inputs, is_causal=causal), exact_inputs, dout.double())
    for a, b in zip(found, exact, strict=True):
        assert (a.double() - b).abs().max() <= 0.02 * b.abs().max()


def test_gqa_and_scale():
    q, kv = draw(2, 8, 200, 128), draw(2, 2, 333, 128, seed=1)
    given = dict(enable_gqa=True, scale=0.05)
    check(flash4.scaled_dot_product_attention(q, kv, kv, **given), q, kv, kv, **given)


def test_what_goes_to_torch():
    q = draw(2, 4, 64, 64)
    for tensors, given in (
        ((q, q, q), {"dropout_p": 0.5}),
        ((q.float(),) * 3, {}),
        ((q[..., :60],) * 3, {}),
    ):
        plan = flash4.explain(*tensors, sdpa=True, **given)
        assert isinstance(plan, flash4.TorchPlan)
        torch.manual_seed(0)
        found = flash4.scaled_dot_product_attention(*tensors, **given)
        torch.manual_seed(0)
        assert torch.equal(found, TORCH(*tensors, **given))


def test_is_available():
    found = flash4.is_available()
    assert found and torch.cuda.current_device() in found.devices, str(found)
