"""Faults that users of attention kernels have met, each through the public function; ``tests/faults.md`` has the list."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import flash4
from flash4 import ops
from tests.checks import assert_forward_close, assert_lse_close, guarded
from tests.strategies import Problem

DEVICE = "cuda"
BF16 = torch.bfloat16
HUGE = 2**31 - 1


def draw(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    """Random normal tensors."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return [torch.randn(shape, generator=generator, device=DEVICE).to(BF16) for shape in shapes]


LENGTHS = [(300, 100), (100, 300), (257, 257)]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_every_way_to_write_no_limit(causal, seqlen_q, seqlen_k):
    """None, -1 and sizes that no sequence reaches give the bits of a call without a window, for Sq > Sk too."""
    q, k, v = draw((2, seqlen_q, 4, 64), (2, seqlen_k, 4, 64), (2, seqlen_k, 4, 64))
    expected = flash4.flash_attn_func(q, k, v, causal=causal)
    assert expected.abs().amax() > 0
    for window in ((-1, -1), (None, -1), (HUGE, HUGE), (HUGE, None), (-1, HUGE)):
        out = flash4.flash_attn_func(q, k, v, causal=causal, window_size=window)
        assert torch.equal(out, expected), window


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("left", [0, 64, 400, HUGE])
def test_right_sides_wider_than_the_keys(left, seqlen_q, seqlen_k):
    """A right side counts from the query's own position, which lies before the first key where Sq > Sk."""
    q, k, v = draw((1, seqlen_q, 2, 128), (1, seqlen_k, 2, 128), (1, seqlen_k, 2, 128))
    for right in (seqlen_k, seqlen_q, HUGE):
        window = (left, right)
        out, lse = flash4.flash_attn_func(q, k, v, window_size=window, return_lse=True)
        assert_forward_close(out, lse, (q, k, v), window_size=window)


@pytest.mark.parametrize("level", [-4e4, -5.1e4, -1e5, -2.45e5, 2.45e5])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 64), (1, 1), (5, 1), (130, 200)])
def test_rows_whose_logits_are_all_far_from_zero(seqlen_q, seqlen_k, level):
    """Raw logits at one level, the first key's 5000 above it, as real models have had them; and a single key."""
    q, k, v = draw((1, seqlen_q, 16, 128), (1, seqlen_k, 1, 128), (1, seqlen_k, 1, 128))
    q[..., 0], k[..., 0] = 448.0, level / 448
    k[:, 0, :, 0] = (level + 5000) / 448
    for causal in (False, True):
        out, lse = flash4.flash_attn_func(q, k, v, causal=causal, return_lse=True)
        assert_forward_close(out, lse, (q, k, v), causal=causal)
        seen = lse.isfinite().transpose(1, 2)
        assert seen.any() and (out.float().abs().amax(-1) > 0)[seen].all()


@pytest.mark.parametrize("at", ["start", "middle", "end"])
@pytest.mark.parametrize("sink", [None, -30.0, 0.0, 1000.0])
def test_rows_without_keys_anywhere_in_a_tile(at, sink):
    """14 rows that no key is shown to: 0 in out, -inf or their sink in lse, and nothing to their neighbours."""
    n, rows = 256, {"start": (0, 14), "middle": (120, 134), "end": (242, 256)}[at]
    q, k, v = draw((1, n, 2, 64), (1, n, 2, 64), (1, n, 2, 64))
    hidden = torch.zeros(n, dtype=torch.int32, device=DEVICE)
    hidden[slice(*rows)] = 1
    sinks = None if sink is None else torch.tensor([sink, sink / 2], device=DEVICE)
    keywords = dict(mask_mod=not_hidden, aux_tensors=[hidden], learnable_sink=sinks)
    out, lse = flash4.flash_attn_func(q, k, v, **keywords, return_lse=True)
    assert_forward_close(out, lse, (q, k, v), **keywords)
    empty = slice(*rows)
    wanted = torch.full((2, 14), -torch.inf, device=DEVICE)
    if sinks is not None:
        wanted = sinks[:, None].expand(2, 14)
    assert (out[0, empty] == 0).all()
    assert_lse_close(lse[0, :, empty], wanted)


def not_hidden(batch, head, q_idx, kv_idx, info, aux):
    """Hides every key from some queries."""
    return aux[0][q_idx] == 0


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_keys_behind_a_dense_tensor_never_matter(value, head_dim):
    """A cache whose first rows are passed as a view: what lies behind them, in the same block, is not read."""
    cache = draw(*[(3, 400, 2, head_dim)] * 2)
    (q,) = draw((3, 70, 4, head_dim), seed=1)
    for seqlen in (1, 63, 65, 300):
        clean = [x[:, :seqlen].clone() for x in cache]
        spoiled = [x.clone() for x in cache]
        for x in spoiled:
            x[:, seqlen:] = value
        expected = flash4.flash_attn_func(q, *clean, causal=True)
        out = flash4.flash_attn_func(q, *(x[:, :seqlen] for x in spoiled), causal=True)
        assert torch.equal(out, expected) and out.isfinite().all()


@pytest.mark.parametrize("total", [1200, 1203, 1400])
def test_rows_past_the_last_sequence_give_zero(total):
    """Padding behind cu_seqlens[-1], in memory that held NaN, comes back as 0 and -inf; the buffer's ends stay."""
    rows = 1200
    q, k, v = draw(*[(total, 3, 128)] * 3)
    for x in (q, k, v):
        x[rows:] = torch.nan
    cu = torch.tensor([0, 700, 701, 701, 1200], dtype=torch.int32, device=DEVICE)
    buffer = guarded((total, 3, 128), BF16, DEVICE)
    keywords = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    out, lse = flash4.flash_attn_varlen_func(
        q, k, v, out=buffer.tensor, return_lse=True, **keywords
    )
    buffer.check(written=True)
    assert (out[rows:] == 0).all() and (lse[:, rows:] == -torch.inf).all()
    assert_forward_close(out, lse, (q, k, v), **keywords)


EMPTY = {
    "first": ((0, 70, 200), (33, 70, 200)),
    "middle": ((70, 0, 200), (70, 33, 200)),
    "last": ((70, 200, 0), (70, 200, 33)),
    "keys only": ((33, 70, 200), (0, 70, 0)),
    "all but one": ((0, 0, 3, 0), (0, 0, 500, 0)),
}


@pytest.mark.parametrize("which", EMPTY)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_empty_sequences_anywhere(which, head_dim):
    lengths_q, lengths_k = EMPTY[which]
    problem = Problem(
        dtype=BF16, heads_kv=2, head_dim=head_dim, head_dim_v=head_dim, causal=True,
        lengths_q=lengths_q, lengths_k=lengths_k,
    )  # fmt: skip
    for changed in (problem, dataclasses.replace(problem, causal=False, sink=1.0)):
        inputs, keywords = changed.tensors(DEVICE), changed.keywords(DEVICE)
        out, lse = changed.function(*inputs, return_lse=True, **keywords)
        assert_forward_close(out, lse, inputs, **keywords)


@pytest.mark.parametrize("ratio", [1, 5, 8])
def test_decode_in_every_form_gives_one_result(ratio):
    """One token per sequence: dense, packed by cu_seqlens = arange, and with the cache's lengths; layouts as promised."""
    batch, seqlen, heads = 40, 300, 2 * ratio
    q, k, v = draw((batch, 1, heads, 128), *[(batch, seqlen, 2, 128)] * 2)
    used = torch.randint(1, seqlen + 1, (batch,), dtype=torch.int32, device=DEVICE)
    cu = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
    keywords = dict(seqused_k=used, causal=True)
    out, lse = flash4.flash_attn_varlen_func(q, k, v, return_lse=True, **keywords)
    assert_forward_close(out, lse, (q, k, v), **keywords)
    packed, packed_lse = flash4.flash_attn_varlen_func(
        q[:, 0], k, v, cu, max_seqlen_q=1, return_lse=True, **keywords
    )
    assert packed.shape == (batch, heads, 128) and packed.is_contiguous()
    assert packed_lse.shape == (heads, batch) and lse.shape == (batch, heads, 1)
    assert_forward_close(
        packed, packed_lse, (q[:, 0], k, v), cu_seqlens_q=cu, seqused_k=used, causal=True
    )
    for b in (0, batch - 1):
        n = int(used[b])
        own = [x[b : b + 1] for x in (q, k[:, :n], v[:, :n])]
        alone, alone_lse = flash4.flash_attn_func(*own, causal=True, return_lse=True)
        assert alone.shape == (1, 1, heads, 128)
        assert_forward_close(alone, alone_lse, own, causal=True)


@pytest.mark.parametrize(("seqlen_q", "ratio"), [(1, 8), (3, 5), (130, 1), (200, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_lse_is_the_natural_logarithm_of_a_sum(causal, seqlen_q, ratio):
    """With q = 0 every score is 0: the LSE is ln of the number of keys that a row sees, whatever path it takes."""
    batch, seqlen_k = 2, 333
    k, v = draw(*[(batch, seqlen_k, 2, 128)] * 2)
    q = torch.zeros(batch, seqlen_q, 2 * ratio, 128, device=DEVICE, dtype=BF16)
    positions = torch.arange(seqlen_q, device=DEVICE) + seqlen_k - seqlen_q
    keys = positions + 1.0 if causal else torch.full_like(positions + 1.0, seqlen_k)
    for sink in (None, 0.0):
        sinks = None if sink is None else torch.full((2 * ratio,), sink, device=DEVICE)
        for pack in (None, True, False):
            _, lse = flash4.flash_attn_func(
                q, k, v, causal=causal, pack_gqa=pack, learnable_sink=sinks, return_lse=True
            )
            assert lse.shape == (batch, 2 * ratio, seqlen_q) and lse.dtype == torch.float32
            wanted = torch.log(keys + (sink is not None)).expand_as(lse)
            assert_lse_close(lse, wanted)


def test_the_lse_of_packed_sequences_is_laid_out_by_heads():
    lengths = (5, 0, 200, 1)
    cu = torch.tensor([0, 5, 5, 205, 206], dtype=torch.int32, device=DEVICE)
    q, k, v = draw(*[(206, 4, 64)] * 3)
    _, lse = flash4.flash_attn_varlen_func(q * 0, k, v, cu, cu, causal=True, return_lse=True)
    assert lse.shape == (4, 206)
    wanted = torch.cat([torch.arange(1.0, n + 1) for n in lengths]).log().to(DEVICE)
    assert_lse_close(lse, wanted.expand(4, 206))


def test_caps_that_alternate_in_one_process():
    """softcap * tanh(s / softcap), with the cap as a number of the call: 5, 15, 50 and back, and none between."""
    q, k, v = draw(*[(1, 300, 2, 128)] * 3)
    q = q * 4
    results = {}
    for softcap in (5.0, 15.0, 0.0, 50.0, 5.0, 0.0, 15.0):
        out, lse = flash4.flash_attn_func(q, k, v, softcap=softcap, causal=True, return_lse=True)
        assert_forward_close(out, lse, (q, k, v), softcap=softcap, causal=True)
        assert torch.equal(results.setdefault(softcap, out), out)
    assert not torch.equal(results[5.0], results[50.0])


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim(head_dim):
    """d and dv that share a padded tile, equal and not; what lies beside out is not written."""
    padded = max(64, -(-head_dim // 32) * 32)
    other = head_dim + 8 if head_dim + 8 <= padded else head_dim - 8
    for dims in ((head_dim, head_dim), (head_dim, other)):
        q, k, v = draw((2, 70, 2, dims[0]), (2, 140, 2, dims[0]), (2, 140, 2, dims[1]))
        buffer = guarded((2, 70, 2, dims[1]), BF16, DEVICE)
        out, lse = flash4.flash_attn_func(q, k, v, out=buffer.tensor, return_lse=True)
        buffer.check(written=True)
        assert_forward_close(out, lse, (q, k, v))


@pytest.mark.parametrize("seqlen", [32_767, 32_769, 65_535, 65_537])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_around_those_that_16_bits_count(causal, seqlen):
    q, k, v = draw(*[(1, seqlen, 1, 64)] * 3)
    out, lse = flash4.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    assert out.isfinite().all() and lse.isfinite().all()
    for rows in (slice(0, 128), slice(seqlen - 128, seqlen)):
        keys = slice(0, rows.stop if causal else seqlen)
        inputs = (q[:, rows], k[:, keys], v[:, keys])
        assert_forward_close(out[:, rows], lse[..., rows], inputs, causal=causal)


def test_a_launch_that_fails_raises(monkeypatch):
    """A grid of no CTAs is refused by the driver; the call must say so, and the next one must work."""
    q, k, v = draw(*[(1, 128, 2, 128)] * 3)
    expected = flash4.flash_attn_func(q, k, v)
    real = ops._launch_for
    with monkeypatch.context() as patch:
        patch.setattr(ops, "_launches", {})  # nor may the call take the short way
        patch.setattr(ops, "_launch_for", lambda *call: dataclasses.replace(real(*call), workers=0))
        with pytest.raises(Exception, match=r"(?i)cuda|launch|configuration|invalid"):
            flash4.flash_attn_func(q, k, v)
            torch.cuda.synchronize()
    assert torch.equal(flash4.flash_attn_func(q, k, v), expected)


@pytest.mark.parametrize("sink", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sinks_far_from_the_scores(head_dim, sink):
    """Far below they change nothing, far above they leave out at almost 0 and the LSE at the sink."""
    q, k, v = draw(*[(1, 300, 3, head_dim)] * 3)
    sinks = torch.full((3,), sink, device=DEVICE)
    for causal in (False, True):
        keywords = dict(causal=causal, learnable_sink=sinks)
        out, lse = flash4.flash_attn_func(q, k, v, **keywords, return_lse=True)
        assert_forward_close(out, lse, (q, k, v), **keywords)
        if sink > 0:
            assert_lse_close(lse, torch.full_like(lse, sink))
            assert out.float().abs().amax() < math.exp(-50)


def test_bounds_and_scalars_of_every_kind_compile_nothing():
    """Longest lengths as int, None and tensors, and floats of every feature, are no part of a kernel's key."""
    from flash4.jit.cache import CACHE

    q, k, v = draw(*[(206, 4, 64)] * 3)
    cu = torch.tensor([0, 5, 5, 205, 206], dtype=torch.int32, device=DEVICE)
    expected = flash4.flash_attn_varlen_func(q, k, v, cu, cu, causal=True)
    before = CACHE.compiles
    bounds = (None, 200, torch.tensor(200), torch.tensor(200, device=DEVICE))
    for bound in bounds:
        out = flash4.flash_attn_varlen_func(q, k, v, cu, cu, bound, bound, causal=True)
        assert torch.equal(out, expected)
    for scale in (0.1, 0.2, 1.0):
        flash4.flash_attn_varlen_func(q, k, v, cu, cu, causal=True, softmax_scale=scale)
    assert CACHE.compiles == before
