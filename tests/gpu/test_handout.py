"""Tiles of sequences that a counter hands out: the same bits in every run, from several streams and graphs at once."""

from itertools import accumulate

import pytest
import torch

import flash4
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
