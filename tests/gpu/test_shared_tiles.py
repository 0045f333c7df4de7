"""Tiles that the two CTAs of a cluster share: right, the same run after run, and the bits of CTAs on their own."""

import pytest
import torch

import flash4
from tests.checks import assert_forward_close

DEVICE = "cuda"
F16, BF16 = torch.float16, torch.bfloat16
REPEATS = 50

# head_dim, head_dim_v, dtype, batch, heads, heads_kv, queries, keys, keywords
CASES = {
    "full": (256, 256, BF16, 4, 16, 16, 1000, 1031, {}),
    "causal": (256, 256, BF16, 1, 10, 10, 4096, 4300, {"causal": True}),
    "rows without keys": (192, 128, BF16, 1, 8, 8, 4600, 4100, {"causal": True}),
    "192 and 128": (192, 128, BF16, 2, 20, 20, 1000, 2000, {}),
    "64 and 256": (64, 256, BF16, 2, 20, 20, 1000, 1500, {}),
    "160, float16": (160, 160, F16, 1, 10, 10, 4096, 4097, {"causal": True}),
    "224, float16, O in the memory of Q": (224, 224, F16, 4, 16, 16, 1000, 1100, {}),
    "packed heads": (256, 256, BF16, 2, 128, 8, 300, 1100, {}),
    "short queries, packed heads": (256, 256, BF16, 80, 128, 2, 16, 1024, {"pack_gqa": True}),
    "window to the right, cap": (
        *(256, 256, BF16, 1, 10, 10, 4096, 4096),
        {"window_size": (None, 100), "softcap": 5.0},
    ),
}


def draw(case):
    """Random normal q, k and v, and the keywords."""
    head_dim, head_dim_v, dtype, batch, heads, heads_kv, queries, keys, keywords = CASES[case]
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = (
        (batch, queries, heads, head_dim),
        (batch, keys, heads_kv, head_dim),
        (batch, keys, heads_kv, head_dim_v),
    )
    inputs = [torch.randn(s, generator=generator, device=DEVICE).to(dtype) for s in shapes]
    assert flash4.explain(*inputs, **keywords).config.cluster == 2
    return inputs, keywords


@pytest.mark.parametrize("case", CASES)
def test_against_the_reference(case):
    inputs, keywords = draw(case)
    out, lse = flash4.flash_attn_func(*inputs, **keywords, return_lse=True)
    for b in range(len(out)):  # one by one: the reference holds all scores in float64
        one = [x[b : b + 1] for x in inputs]
        assert_forward_close(out[b : b + 1], lse[b : b + 1], one, **keywords)


@pytest.mark.parametrize("case", CASES)
def test_repeats_are_bitwise_equal(case):
    inputs, keywords = draw(case)
    first = flash4.flash_attn_func(*inputs, **keywords, return_lse=True)
    for _ in range(REPEATS):
        again = flash4.flash_attn_func(*inputs, **keywords, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("case", ["full", "192 and 128", "64 and 256"])
def test_a_batch_of_one_that_one_cta_to_a_tile_works_on_has_the_same_bits(case):
    inputs, keywords = draw(case)
    out, lse = flash4.flash_attn_func(*inputs, **keywords, return_lse=True)
    one = [x[:1] for x in inputs]
    assert flash4.explain(*one, **keywords).config.cluster == 1
    alone = flash4.flash_attn_func(*one, **keywords, return_lse=True)
    assert torch.equal(alone[0], out[:1]) and torch.equal(alone[1], lse[:1])
