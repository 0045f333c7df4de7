"""The first thing to run on a GPU: under a minute, compilations included, and a bit of everything."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import flash4
from tests.checks import assert_forward_close, guarded
from tests.strategies import Problem

DEVICE = "cuda"
F16, BF16 = torch.float16, torch.bfloat16


def check(problem: Problem, seed: int = 0) -> None:
    """Compare out and lse with the reference; plainly, and in a guarded buffer with the same bits."""
    inputs = problem.tensors(DEVICE, seed)
    keywords = problem.keywords(DEVICE)
    out, lse = problem.function(*inputs, return_lse=True, **keywords)
    assert_forward_close(out, lse, inputs, **keywords)
    buffer = guarded(tuple(out.shape), out.dtype, DEVICE)
    written = problem.function(*inputs, out=buffer.tensor, **keywords)
    buffer.check(written=True)
    assert written is buffer.tensor and torch.equal(written, out)
    assert torch.equal(problem.function(*inputs, **keywords), out), "return_lse changes out"


SQUARE = dict(batch=2, heads_kv=2, seqlen_q=300, seqlen_k=300)
LONG = dict(heads_kv=2, seqlen_q=1100, seqlen_k=1500)
D128 = dict(head_dim=128, head_dim_v=128, dtype=BF16)
PROBLEMS = {
    "d128 full": Problem(**D128, **SQUARE),
    "d128 causal": Problem(**D128, **SQUARE, causal=True),
    "d128 rows without keys": Problem(**D128, heads_kv=2, seqlen_q=517, seqlen_k=130, causal=True),
    "d128 few queries": Problem(**D128, heads_kv=3, seqlen_q=5, seqlen_k=900, causal=True),
    "d128 packed": Problem(**D128, heads_kv=2, ratio=5, seqlen_q=3, seqlen_k=257, causal=True),
    "d128 scale 0": Problem(**D128, **SQUARE, softmax_scale=0.0),
    "d128 tiny scale": Problem(**D128, **SQUARE, causal=True, softmax_scale=1e-38),
    "d128 negative scale": Problem(**D128, **SQUARE, causal=True, softmax_scale=-0.1),
    "d128 large scores": Problem(**D128, **SQUARE, causal=True, value_scale=30.0),
    "d64 full": Problem(head_dim=64, head_dim_v=64, **SQUARE),
    "d64 causal": Problem(
        head_dim=64, head_dim_v=64, heads_kv=4, seqlen_q=129, seqlen_k=700, causal=True
    ),
    "d40 unaligned": Problem(
        head_dim=40, head_dim_v=40, **SQUARE, layouts=("unaligned", "transposed", "interleaved")
    ),
    "d192 and 128": Problem(
        head_dim=192,
        head_dim_v=128,
        dtype=BF16,
        heads_kv=2,
        seqlen_q=260,
        seqlen_k=333,
        causal=True,
    ),
    "d256 full": Problem(head_dim=256, head_dim_v=256, dtype=BF16, **SQUARE),
    "d128 window": Problem(**D128, **SQUARE, window_size=(100, 30)),
    "d128 causal window": Problem(**D128, **SQUARE, causal=True, window_size=(128, None)),
    "d64 causal window": Problem(head_dim=64, head_dim_v=64, **LONG, window_size=(200, 0)),
    "d64 window": Problem(head_dim=64, head_dim_v=64, **LONG, window_size=(77, 300)),
    "d64 window at the right": Problem(
        head_dim=64, head_dim_v=64, heads_kv=2, seqlen_q=900, seqlen_k=300, window_size=(None, 5)
    ),
    "d256 window, rows without keys": Problem(
        head_dim=256, head_dim_v=256, heads_kv=2, seqlen_q=517, seqlen_k=130, window_size=(32, 64)
    ),
    "d128 cap": Problem(**D128, **SQUARE, softcap=5.0),
    "d128 cap far above the scores": Problem(**D128, **SQUARE, causal=True, softcap=1e6),
    "d128 cap, large scores": Problem(**D128, **SQUARE, causal=True, softcap=2.0, value_scale=9.0),
    "d128 cap, scores near zero": Problem(**D128, **LONG, causal=True, softcap=30.0),
    "d128 cap, scores in the middle": Problem(**D128, **LONG, softcap=8.0, softmax_scale=-0.09),
    "d128 cap, scores everywhere": Problem(**D128, **LONG, causal=True, softcap=6.0, alibi="by head"),
    "d64 cap, scores in the middle": Problem(
        head_dim=64, head_dim_v=64, dtype=BF16, **LONG, causal=True, softcap=8.0
    ),
    "d128 tiny cap and scale": Problem(
        **D128, **LONG, causal=True, softcap=1e-30, softmax_scale=1e-31
    ),
    "d128 huge cap": Problem(**D128, **LONG, causal=True, softcap=1e30),
    "d128 sink": Problem(**D128, **SQUARE, sink=1.0),
    "d128 sink, rows without keys": Problem(
        **D128, heads_kv=3, ratio=2, seqlen_q=517, seqlen_k=130, causal=True, sink=0.0
    ),
    "d128 sink far above": Problem(**D128, **SQUARE, sink=1000.0),
    "d128 sink far below": Problem(**D128, **SQUARE, causal=True, sink=-1000.0),
    "d64 everything": Problem(
        head_dim=64, head_dim_v=64, heads_kv=2, ratio=4, seqlen_q=33, seqlen_k=700, causal=True,
        softmax_scale=-0.2, window_size=(300, None), softcap=3.0, sink=2.0,
    ),
    "d192 and 128, everything": Problem(
        head_dim=192, head_dim_v=128, dtype=BF16, heads_kv=2, seqlen_q=260, seqlen_k=333,
        window_size=(100, 100),
        softcap=3.0,
        sink=2.0,
    ),
    "d128 alibi": Problem(**D128, **SQUARE, alibi="by head"),
    "d128 causal alibi": Problem(**D128, **LONG, causal=True, alibi="by head"),
    "d128 causal alibi, slopes of both signs": Problem(
        **D128, **LONG, batch=2, causal=True, alibi="by batch and head", softmax_scale=-0.1
    ),
    "d64 causal alibi": Problem(
        head_dim=64, head_dim_v=64, dtype=BF16, **LONG, batch=2, ratio=4, causal=True,
        alibi="by batch and head",
    ),
    "d64 causal alibi, packed heads": Problem(
        head_dim=64, head_dim_v=64, batch=2, heads_kv=2, ratio=3, seqlen_q=30, seqlen_k=700, causal=True,
        alibi="by batch and head", softcap=4.0,
    ),
    "d192 and 128, alibi, packed sequences": Problem(
        head_dim=192, head_dim_v=128, dtype=BF16, heads_kv=2, lengths_q=(9, 300, 0), around=(0, 9),
        lengths_k=(300, 100, 7), alibi="by batch and head", window_size=(90, 200), sink=1.0,
    ),
    "d128 mask_mod": Problem(**D128, **SQUARE, mask_mod="dilated", causal=True),
    "d128 score_mod": Problem(**D128, **SQUARE, score_mod="heads", softcap=9.0),
    "d64 mods and a window that leaves rows without keys": Problem(
        head_dim=64, head_dim_v=64, heads_kv=2, ratio=4, seqlen_q=300, seqlen_k=200,
        mask_mod="dilated", score_mod="relative", window_size=(0, 0), sink=0.0,
    ),
    "d256 mods, packed sequences": Problem(
        head_dim=256, head_dim_v=256, dtype=BF16, heads_kv=2, lengths_q=(9, 300, 0), around=(0, 9),
        lengths_k=(300, 100, 7), mask_mod="documents", score_mod="relative", causal=True,
    ),
    "d128 packed sequences": Problem(
        **D128, heads_kv=2, lengths_q=(300, 1, 128, 257), lengths_k=(300, 70, 128, 500)
    ),
    "d128 packed sequences, causal": Problem(
        **D128, heads_kv=2, ratio=3, causal=True, lengths_q=(5, 300, 64), lengths_k=(600, 300, 64)
    ),
    "d128 empty sequences, rows around": Problem(
        **D128, heads_kv=2, causal=True, around=(5, 130), sink=1.0,
        lengths_q=(0, 150, 0, 0, 33, 0), lengths_k=(0, 100, 90, 0, 0, 0),
    ),
    "d64 packed sequences": Problem(
        head_dim=64, head_dim_v=64, heads_kv=2, lengths_q=(300, 1, 0, 700), lengths_k=(99, 700, 5, 2)
    ),
    "d64 packed sequences, causal, in use": Problem(
        head_dim=64, head_dim_v=64, heads_kv=2, ratio=4, causal=True, around=(0, 3),
        lengths_q=(300, 100, 700), lengths_k=(400, 700, 5), used_q=(250, 0, 700),
        used_k=(333, 64, 0),
    ),
    "d128 keys in use": Problem(
        **D128, heads_kv=2, ratio=8, causal=True, seqlen_q=3, seqlen_k=1000,
        used_k=(1000, 0, 1, 64, 513),
    ),
    "d192 and 128, queries in use": Problem(
        head_dim=192, head_dim_v=128, dtype=BF16, heads_kv=2, seqlen_q=300, seqlen_k=200,
        used_q=(300, 0, 129), used_k=(7, 200, 130), window_size=(50, 20),
    ),
    "d256 packed queries": Problem(
        head_dim=256, head_dim_v=256, dtype=BF16, heads_kv=2, seqlen_k=300, lengths_q=(1, 300, 77)
    ),
    "d40 packed keys, unaligned": Problem(
        head_dim=40, head_dim_v=64, heads_kv=3, seqlen_q=200, lengths_k=(0, 300, 77), around=(9, 1),
        layouts=("unaligned", "transposed", "interleaved"),
    ),
    "d128 ten thousand short sequences": Problem(
        **D128, heads_kv=1, causal=True, lengths_q=(1, 3, 0, 7) * 2500, lengths_k=(5, 3, 1, 0) * 2500
    ),
    "d128 one long sequence among short ones": Problem(
        **D128, heads_kv=2, causal=True, lengths_q=(3, 5) * 40 + (3000,), lengths_k=(9, 1) * 40 + (3000,)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_against_the_reference(name: str):
    check(PROBLEMS[name])


def test_a_sequence_is_on_its_own():
    """Packed beside others, each gives the bits that it gives alone."""
    lengths = (100, 0, 300, 1, 129)
    packed = Problem(**D128, heads_kv=2, causal=True, lengths_q=lengths, lengths_k=lengths)
    q, k, v = packed.tensors(DEVICE)
    out = packed.function(q, k, v, **packed.keywords(DEVICE))
    begin = 0
    for n in lengths:
        own = [x[None, begin : begin + n].clone() for x in (q, k, v)]
        assert torch.equal(flash4.flash_attn_func(*own, causal=True)[0], out[begin : begin + n])
        begin += n


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_what_is_not_in_use_never_matters(tensor, value):
    """Bits do not change with what lies behind the keys in use, in a dense cache and between packed sequences."""
    for problem in (PROBLEMS["d128 keys in use"], PROBLEMS["d64 packed sequences, causal, in use"]):
        inputs, keywords = problem.tensors(DEVICE), problem.keywords(DEVICE)
        inputs = [x.nan_to_num(0.0) for x in inputs]
        expected = problem.function(*inputs, **keywords)
        which = "qkv".index(tensor)
        holes = problem.tensors(DEVICE)[which].isnan()
        inputs[which] = inputs[which].masked_fill(holes, value)
        assert holes.any() and torch.equal(problem.function(*inputs, **keywords), expected)


@pytest.mark.parametrize("total_q", [0, 7])
@pytest.mark.parametrize("total_k", [0, 9])
def test_batches_without_any_row(total_q, total_k):
    """Sequences that are all empty, beside rows of none or of nothing at all."""
    q, k = (torch.randn(n, 4, 64, device=DEVICE, dtype=BF16) for n in (total_q, total_k))
    cu = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    sink = torch.ones(4, device=DEVICE)
    out, lse = flash4.flash_attn_varlen_func(q, k, k, cu, cu, learnable_sink=sink, return_lse=True)
    assert out.shape == q.shape and (out == 0).all()
    assert lse.shape == (4, total_q) and (lse == -torch.inf).all()


def test_keys_of_no_sequence_with_sinks():
    """Where no call needs a kernel: rows of sequences have their sink as LSE, others -inf."""
    problem = Problem(
        **D128, heads_kv=2, lengths_q=(3, 0, 4), lengths_k=(0, 0, 0), used_q=(2, 0, 4), sink=1.0,
        around=(0, 2),
    )  # fmt: skip
    q, _, _ = problem.tensors(DEVICE)
    k = torch.empty(0, 2, 128, device=DEVICE, dtype=BF16)
    keywords = problem.keywords(DEVICE)
    keywords["cu_seqlens_k"].zero_()
    out, lse = flash4.flash_attn_varlen_func(q, k, k, **keywords, return_lse=True)
    inside = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 0], device=DEVICE, dtype=torch.bool)
    sink = keywords["learnable_sink"][:, None].expand_as(lse)
    assert (out == 0).all() and torch.equal(lse, sink.masked_fill(~inside, -torch.inf))


def test_new_lengths_do_not_compile_or_wait():
    from flash4.jit.cache import CACHE

    problem = PROBLEMS["d128 packed sequences"]
    check(problem)
    before = CACHE.compiles
    for lengths in ((1, 2), (300, 0, 5, 1000), (64,) * 50):
        check(dataclasses.replace(problem, lengths_q=lengths, lengths_k=lengths))
    assert CACHE.compiles == before
    inputs, keywords = problem.tensors(DEVICE), problem.keywords(DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.function(*inputs, max_seqlen_q=300, max_seqlen_k=500, **keywords)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graph_of_packed_sequences_takes_new_lengths():
    """A captured call follows the lengths in its tensors."""
    problem = PROBLEMS["d128 packed sequences, causal"]
    inputs, keywords = problem.tensors(DEVICE), problem.keywords(DEVICE)
    inputs = [x.nan_to_num(0.0) for x in inputs]
    problem.function(*inputs, **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = problem.function(*inputs, return_lse=True, **keywords)
    for cu_q, cu_k in (
        ((0, 5, 305, 369), (0, 600, 900, 964)),
        ((0, 100, 100, 350), (0, 1, 900, 964)),
    ):
        for name, numbers in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
            keywords[name].copy_(torch.tensor(numbers, dtype=torch.int32))
        graph.replay()
        assert_forward_close(out, lse, inputs, **keywords)


def empty_problems() -> list[tuple[int, int, int, int]]:
    """Batch, queries, keys and heads, each of them 0 once, and all of them."""
    sizes = (2, 5, 7, 3)
    return [tuple(0 if i == j else n for j, n in enumerate(sizes)) for i in range(4)] + [(0,) * 4]


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k", "heads"), empty_problems())
def test_empty_sizes(batch: int, seqlen_q: int, seqlen_k: int, heads: int):
    q, k, v = (
        torch.randn(batch, seqlen, heads, head_dim, device=DEVICE).to(BF16)
        for seqlen, head_dim in ((seqlen_q, 128), (seqlen_k, 128), (seqlen_k, 64))
    )
    out, lse = flash4.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert out.shape == (batch, seqlen_q, heads, 64) and out.dtype == BF16 and (out == 0).all()
    assert lse.shape == (batch, heads, seqlen_q) and (lse == -torch.inf).all()
    buffer = torch.full_like(out, torch.nan)
    assert flash4.flash_attn_func(q, k, v, out=buffer) is buffer and (buffer == 0).all()


SMALL = PROBLEMS["d128 causal"]


def test_another_stream():
    """The launch waits for what its own stream does before, and not for the default stream."""
    inputs = SMALL.tensors(DEVICE)
    expected = flash4.flash_attn_func(*inputs, causal=True)
    late = [torch.full_like(x, torch.nan) for x in inputs]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # some 50 ms
        for x, y in zip(late, inputs, strict=True):
            x.copy_(y)
        out = flash4.flash_attn_func(*late, causal=True)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_torch_compile_makes_one_graph():
    def attend(q, k, v):
        out, lse = flash4.flash_attn_func(2 * q, k, v, causal=True, return_lse=True)
        return out + 1, lse

    inputs = SMALL.tensors(DEVICE)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*inputs), attend(*inputs), strict=True):
        assert torch.equal(got, expected) and got.stride() == expected.stride()


def test_new_shapes_and_scales_do_not_compile():
    from flash4.jit.cache import CACHE

    check(SMALL)
    before = CACHE.compiles
    for seqlen_q, seqlen_k in ((1, 64), (64, 1), (128, 129), (1000, 77)):
        for scale in (None, 0.3):
            check(
                Problem(
                    **D128, heads_kv=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=True,
                    softmax_scale=scale,
                )
            )  # fmt: skip
    assert CACHE.compiles == before


def test_new_sizes_of_features_do_not_compile():
    from flash4.jit.cache import CACHE

    sizes = [((100, 30), 5.0, 1.0), ((0, 1), 50.0, -9.0), ((1000, 200), 0.3, 30.0)]
    calls = [Problem(**D128, **SQUARE, window_size=w, softcap=c, sink=s) for w, c, s in sizes]
    check(calls[0])
    before = CACHE.compiles
    for problem in (*calls[1:], calls[0]):  # two caps in one process, and back
        check(problem)
    assert CACHE.compiles == before


@pytest.mark.parametrize("window", [(None, 0), (-1, 0), (300, 0), (2**31, 0), (299, 0)])
def test_windows_that_are_causal(window):
    inputs = SMALL.tensors(DEVICE)
    out, lse = flash4.flash_attn_func(*inputs, window_size=window, return_lse=True)
    assert_forward_close(out, lse, inputs, causal=True)
    assert out.abs().amax() > 0


@pytest.mark.parametrize("width", [1, 2, 64, 129])
def test_how_many_keys_a_window_shows(width):
    """With equal scores and the identity for V, out counts: a window of (width - 1, 0) shows width keys."""
    n = 256
    q, k = (torch.zeros(1, n, 1, 64, device=DEVICE, dtype=F16) for _ in range(2))
    v = torch.eye(n, device=DEVICE, dtype=F16).view(1, n, 1, n)
    out = flash4.flash_attn_func(q, k, v, window_size=(width - 1, 0))
    counts = (out[0, :, 0] > 0).sum(-1)
    assert torch.equal(counts, torch.arange(1, n + 1, device=DEVICE).clamp(max=width))


def test_a_second_device_runs_its_own_launches():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    inputs = SMALL.tensors(DEVICE)
    expected = flash4.flash_attn_func(*inputs, causal=True)
    there = [x.to("cuda:1") for x in inputs]
    out = flash4.flash_attn_func(*there, causal=True)  # while cuda:0 is the current device
    assert out.device == there[0].device and torch.equal(out.cpu(), expected.cpu())
    with pytest.raises(ValueError, match="one device"):
        flash4.flash_attn_func(inputs[0], there[1], there[2])


@pytest.mark.parametrize("causal", [False, True])
def test_graph_capture_and_replay(causal):
    q, k, v = (torch.randn(2, 300, 4, 64, device=DEVICE, dtype=BF16) for _ in range(3))
    flash4.flash_attn_func(q, k, v, causal=causal)  # compiles; capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash4.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    for _ in range(2):
        for x in (q, k, v):
            x.normal_()
        out.fill_(float("nan"))
        graph.replay()
        assert_forward_close(out, lse, (q, k, v), causal=causal)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_logits_up_to_a_million(head_dim, sign):
    """Rows of huge logits of either sign, beside rows of small ones, in every warp."""
    q, k, v = (torch.randn(1, 400, 2, head_dim, device=DEVICE, dtype=BF16) for _ in range(3))
    q[:, ::3] *= 300
    k *= 30
    k[:, 200:] = k[:, 200:].abs() * sign  # drifts, so that shifts move again and again
    q[:, 1::3] = q[:, 1::3].abs() * 100
    scale = 1e6 / (q.float().abs().amax() * k.float().abs().amax() * head_dim**0.5).item()
    for causal in (False, True):
        out, lse = flash4.flash_attn_func(
            q, k, v, causal=causal, softmax_scale=scale, return_lse=True
        )
        assert_forward_close(out, lse, (q, k, v), causal=causal, softmax_scale=scale)


@pytest.mark.parametrize("scale", [0.0, 1e-37])
def test_huge_scores_with_a_vanishing_scale(scale):
    q, k, v = (torch.randn(1, 300, 2, 64, device=DEVICE, dtype=BF16) for _ in range(3))
    q, k = q * 1e15, k * 1e15
    out, lse = flash4.flash_attn_func(q, k, v, causal=True, softmax_scale=scale, return_lse=True)
    assert_forward_close(out, lse, (q, k, v), causal=True, softmax_scale=scale)
