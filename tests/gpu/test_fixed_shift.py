"""Rows that outgrow a fixed softmax shift: worked on again, exactly, in the same launch."""

import pytest
import torch

import flash4
from tests.checks import assert_forward_close

DEVICE = "cuda"


def draw(head_dim, seqlen, seed=0, heads=3):
    """Random normal q, k, v with one batch entry."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (1, seqlen, heads, head_dim)
    return [torch.randn(shape, generator=generator, device=DEVICE).bfloat16() for _ in range(3)]


def peaked(q, k):
    """Scores with a standard deviation of 60."""
    return q * 8, k * 7.5


def ramp(q, k):
    """Maxima that grow from the last key to the first, the order in which blocks are visited."""
    q[..., 0] = 16.0
    k[..., 0] = torch.linspace(60, 0, k.shape[1], device=DEVICE)[None, :, None]
    return q, k


def far_sink(q, k):
    """The first key far above all others."""
    q[..., 0], k[:, 0, :, 0] = 16.0, 200.0
    return q, k


def negative(q, k):
    """All scores far below zero, the last keys the lowest."""
    q[..., 0] = -16.0
    k[..., 0] = torch.linspace(50, 150, k.shape[1], device=DEVICE)[None, :, None]
    return q, k


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("change", [peaked, ramp, far_sink, negative])
def test_outgrown_rows_are_exact(change, head_dim, causal):
    q, k, v = draw(head_dim, 1500)
    q, k = change(q, k)
    out, lse = flash4.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    assert_forward_close(out, lse, (q, k, v), causal=causal)


def test_one_row_of_many(head_dim=128):
    """A single query outgrows the shift, in one tile of hundreds; the others keep their bits."""
    q, k, v = draw(head_dim, 4096, heads=16)
    plain, plain_lse = flash4.flash_attn_func(q, k, v, return_lse=True)
    row, head = 2345, 7
    q[0, row, head] = k[0, 5, head] * 40
    out, lse = flash4.flash_attn_func(q, k, v, return_lse=True)
    assert_forward_close(out, lse, (q, k, v))
    same = torch.ones(4096, 16, dtype=torch.bool, device=DEVICE)
    same[row - row % 128 : row - row % 128 + 128, head] = False
    close = (out.float() - plain.float()).abs().amax(-1)[0][same]
    assert close.max() < 0.01 and lse.isfinite().all()


def test_values_near_the_end_of_bfloat16():
    """P of 2^60 times values of 1e30 leaves float32 only on the way: the second time is exact."""
    q, k, v = draw(128, 1024)
    q, k = ramp(q, k)
    v = v * 1e30
    out = flash4.flash_attn_func(q, k, v)
    exact = torch.softmax(
        (q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1)) * 128**-0.5, -1
    )
    expected = (exact @ v.double().transpose(1, 2)).transpose(1, 2)
    assert out.isfinite().all()
    assert (out.double() - expected).abs().max() < 0.02 * expected.abs().max()


def test_nan_stays_in_its_row():
    q, k, v = draw(128, 1024)
    q[0, 100, 1, 5] = torch.nan
    out = flash4.flash_attn_func(q, k, v)
    bad = out.isnan().any(-1)[0]
    assert bad[100, 1] and bad.sum() == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_counter_says_which_inputs_are_worked_on_twice(head_dim, causal):
    """No tile of random inputs, all of a ramp (but the first, which a causal mask cuts everywhere), one of one row."""
    q, k, v = draw(head_dim, 2048, heads=8)
    redone, tiles = flash4.redone_tiles(q, k, v, causal=causal)
    assert redone == 0 and tiles >= 2048 * 8 // 256
    row = q.clone()
    row[0, 2000, 5] = k[0, 5, 5] * 40
    assert flash4.redone_tiles(row, k, v, causal=causal).redone == 1
    steep = k.clone()
    steep[..., 0] = torch.linspace(3000, 0, 2048, device=DEVICE)[None, :, None]
    q[..., 0] = 16.0
    redone, tiles = flash4.redone_tiles(q, steep, v, causal=causal)
    assert redone == tiles or causal and tiles > redone >= tiles - 8


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
def test_heads_keep_their_bits_beside_those_that_outgrow(head_dim, causal):
    """Whether their tiles were worked on with a fixed shift, foreseen to need a look, or done again."""
    q, k, v = draw(head_dim, 1500, heads=60)
    q[:, ::7, :, 0], k[:, 3, :, 0] = 12.0, 25.0  # rows that grow far, but not too far
    plain, plain_lse = flash4.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    q[:, :, ::3] *= 60
    out, lse = flash4.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    for kept in (1, 2):
        assert torch.equal(out[:, :, kept::3], plain[:, :, kept::3])
        assert torch.equal(lse[:, kept::3], plain_lse[:, kept::3])
