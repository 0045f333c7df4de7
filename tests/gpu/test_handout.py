"""Tiles that a counter hands out: the same bits in every run, from several streams and graphs at once."""

from itertools import accumulate

import pytest
import torch

import flash4
from flash4 import ops
from tests.checks import assert_forward_close

DEVICE = "cuda"
LENGTHS = (2048, 33, 1024, 0, 517, 129, 768, 1, 1023, 256)
MANY = tuple(1 + 37 * i % 300 for i in range(100))  # chunks of sequences


def draw(lengths, head_dim=128, seed=0):
    """Random normal q, k, v of packed sequences, and where those lie."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (sum(lengths), 8, head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device=DEVICE).bfloat16() for _ in range(3))
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    return q, k, v, dict(cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, return_lse=True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [LENGTHS, MANY], ids=["ten", "many"])
def test_every_run_gives_the_same_bits(lengths, head_dim):
    q, k, v, keywords = draw(lengths, head_dim)
    out, lse = flash4.flash_attn_varlen_func(q, k, v, **keywords)
    keywords_of_check = {name: x for name, x in keywords.items() if name != "return_lse"}
    assert_forward_close(out, lse, (q, k, v), **keywords_of_check)
    for _ in range(50):
        again, lse_again = flash4.flash_attn_varlen_func(q, k, v, **keywords)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


def test_graphs_that_are_replayed_at_the_same_time():
    """Each call has a counter of its own, also within a graph."""
    calls = [draw(LENGTHS, seed=seed) for seed in range(3)]
    expected = [flash4.flash_attn_varlen_func(*call[:3], **call[3]) for call in calls]
    streams, graphs, results = [torch.cuda.Stream() for _ in calls], [], []
    for *inputs, keywords in calls:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append([flash4.flash_attn_varlen_func(*inputs, **keywords) for _ in range(2)])
        graphs.append(graph)
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for wanted, pair in zip(expected, results, strict=True):
        for found in pair:
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def ramped(q, k, top):
    """Scores that grow from the last key of each sequence to its first, the order in which blocks are visited."""
    q, k = q.clone(), k.clone()
    q[..., 0] = 16.0
    for part in k.split(LENGTHS):
        part[..., 0] = torch.linspace(top, 0, part.shape[0], device=DEVICE)[:, None]
    return q, k


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_of_sequences_that_outgrow_their_shift(head_dim):
    """None of random inputs, one of one row, nearly all of a ramp; exact each time."""
    q, k, v, keywords = draw(LENGTHS, head_dim)
    del keywords["return_lse"]
    assert flash4.redone_tiles(q, k, v, **keywords).redone == 0
    row = q.clone()
    row[2000, 5] = k[5, 5] * 40
    assert flash4.redone_tiles(row, k, v, **keywords).redone == 1
    q_ramped, steep = ramped(q, k, 3000)
    assert flash4.redone_tiles(q_ramped, steep, v, **keywords).redone >= 8 * 8
    for inputs in ((row, k, v), (*ramped(q, k, 60), v)):
        out, lse = flash4.flash_attn_varlen_func(*inputs, **keywords, return_lse=True)
        assert_forward_close(out, lse, inputs, **keywords)


DENSE = (
    # batch, queries, keys, heads, KV heads, head dims, causal, window
    (4, 512, 512, 16, 16, 128, True, (None, None)),
    (2, 2048, 2048, 8, 8, 64, True, (None, None)),
    (1, 1000, 1300, 6, 2, 128, True, (None, None)),
    (1, 130, 4000, 3, 3, 192, True, (None, None)),
    (3, 700, 700, 4, 4, 256, True, (None, None)),
    (1, 1, 300, 2, 2, 128, True, (None, None)),
    (2, 900, 900, 8, 8, 64, False, (None, 100)),
    (2, 2048, 2048, 8, 8, 128, True, (256, None)),
    (2, 1900, 1900, 12, 4, 64, True, (127, None)),
    (1, 1000, 1300, 6, 2, 128, False, (70, 33)),
    (3, 700, 900, 4, 4, 96, False, (0, 0)),
    (1, 1500, 1500, 4, 1, 64, False, (200, None)),
    (2, 500, 4700, 4, 4, 192, True, (4096, None)),
    (1, 1100, 1100, 2, 2, 256, True, (1023, None)),
)


def draw_dense(case, seed=0):
    """Random normal q, k and v, and keywords."""
    batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, causal, window = case
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shapes = ((seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv))
    q, k, v = (
        torch.randn(batch, *shape, head_dim, generator=generator, device=DEVICE).bfloat16()
        for shape in shapes
    )
    keywords = dict(causal=causal, window_size=window)
    assert flash4.explain(q, k, v, **keywords).config.handed_out
    return q, k, v, keywords


@pytest.mark.parametrize("case", DENSE, ids=str)
def test_dense_calls_give_the_same_bits_in_every_run(case):
    q, k, v, keywords = draw_dense(case)
    out, lse = flash4.flash_attn_func(q, k, v, **keywords, return_lse=True)
    assert_forward_close(out, lse, (q, k, v), **keywords)
    for _ in range(50):
        again, lse_again = flash4.flash_attn_func(q, k, v, **keywords, return_lse=True)
        assert torch.equal(out, again) and torch.equal(lse, lse_again)
    assert int(ops.reset_counter(q.device)) == 0, "the kernel leaves its counter at zero"


def test_dense_calls_on_several_streams_and_in_graphs():
    """Launches of one stream follow one another and share a counter; a graph has its own."""
    calls = [draw_dense(DENSE[i % 2], seed=i) for i in range(4)]
    expected = [flash4.flash_attn_func(*call[:3], **call[3]) for call in calls]
    torch.cuda.synchronize()
    streams, graphs, results = [torch.cuda.Stream() for _ in calls], [], []
    for q, k, v, keywords in calls[:2]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append([flash4.flash_attn_func(q, k, v, **keywords) for _ in range(2)])
        graphs.append(graph)
    torch.cuda.synchronize()
    eager = []
    for _ in range(20):
        for stream, graph in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
        for stream, (q, k, v, keywords), wanted in zip(streams, calls, expected):
            with torch.cuda.stream(stream):
                eager.append((flash4.flash_attn_func(q, k, v, **keywords), wanted))
    torch.cuda.synchronize()
    assert all(torch.equal(found, wanted) for found, wanted in eager)
    for wanted, pair in zip(expected, results):
        assert all(torch.equal(found, wanted) for found in pair)


@pytest.mark.parametrize("window", [(None, None), (2047, None)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dense_tiles_that_outgrow_their_shift(head_dim, window):
    """None of random inputs, one of one row, most of a ramp; exact each time."""
    q, k, v, keywords = draw_dense((2, 2048, 2048, 8, 8, head_dim, True, window))
    assert flash4.redone_tiles(q, k, v, **keywords).redone == 0
    row = q.clone()
    row[1, 2000, 5] = k[1, 5, 5] * 40
    assert flash4.redone_tiles(row, k, v, **keywords).redone == 1
    steep_q, steep_k = q.clone(), k.clone()
    steep_q[..., 0] = 16.0
    steep_k[..., 0] = torch.linspace(3000, 0, 2048, device=DEVICE)[None, :, None]
    gentle_k = k.clone()
    gentle_k[..., 0] = torch.linspace(60, 0, 2048, device=DEVICE)[None, :, None]
    assert flash4.redone_tiles(steep_q, steep_k, v, **keywords).redone > 0
    for inputs in ((row, k, v), (steep_q, steep_k, v), (steep_q, gentle_k, v)):
        out, lse = flash4.flash_attn_func(*inputs, **keywords, return_lse=True)
        if inputs[1] is not steep_k:
            assert_forward_close(out, lse, inputs, **keywords)
        for _ in range(10):  # which tiles are foreseen depends on who got them, bits do not
            again = flash4.flash_attn_func(*inputs, **keywords)
            assert torch.equal(out, again)
    assert int(ops.reset_counter(q.device)) == 0
