"""Gradients on a GPU: numbers, repeatability, and what surrounds the kernels."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flash4
from tests import strategies
from tests.checks import assert_gradients_close
from tests.gpu.gradients import DEVICE, DOUTS, GradientCase, poison, requested_bytes
from tests.strategies import Problem

F16, BF16 = torch.float16, torch.bfloat16
REPEATS = 30

SQUARE = dict(batch=2, heads_kv=2, seqlen_q=300, seqlen_k=300)
D128 = dict(head_dim=128, head_dim_v=128, dtype=BF16)
D256 = dict(head_dim=256, head_dim_v=256, dtype=BF16)
D192 = dict(head_dim=192, head_dim_v=128, dtype=BF16)
D64 = dict(head_dim=64, head_dim_v=64, dtype=F16)
PROBLEMS = {
    "d128 one tile": Problem(**D128, seqlen_q=80, seqlen_k=128),
    "d128 full": Problem(**D128, **SQUARE),
    "d128 causal": Problem(**D128, **SQUARE, causal=True),
    "d128 float16": Problem(head_dim=128, head_dim_v=128, **SQUARE, causal=True),
    "d128 whole tiles": Problem(**D128, heads_kv=2, seqlen_q=640, seqlen_k=512, causal=True),
    "d128 grouped heads": Problem(**D128, heads_kv=2, ratio=3, seqlen_q=200, seqlen_k=400),
    "d128 one KV head": Problem(
        **D128, batch=2, ratio=8, seqlen_q=513, seqlen_k=257, causal=True
    ),
    "d128 rows without keys": Problem(**D128, heads_kv=2, seqlen_q=517, seqlen_k=130, causal=True),
    "d128 few queries": Problem(**D128, heads_kv=3, seqlen_q=5, seqlen_k=900, causal=True),
    "d128 few keys": Problem(**D128, heads_kv=3, seqlen_q=900, seqlen_k=3),
    "d128 scale 0": Problem(**D128, **SQUARE, softmax_scale=0.0),
    "d128 negative scale": Problem(**D128, **SQUARE, causal=True, softmax_scale=-0.1),
    "d128 peaked": Problem(**D128, **SQUARE, softmax_scale=0.7),
    "d64 one tile": Problem(**D64, seqlen_q=128, seqlen_k=128),
    "d64 full": Problem(**D64, **SQUARE),
    "d64 causal": Problem(**D64, heads_kv=4, seqlen_q=129, seqlen_k=700, causal=True),
    "d64 grouped heads": Problem(
        head_dim=64, head_dim_v=64, dtype=BF16, heads_kv=2, ratio=5, seqlen_q=300, seqlen_k=300,
        causal=True,
    ),
    "d96 one tile": Problem(head_dim=96, head_dim_v=96, dtype=BF16, seqlen_q=64, seqlen_k=128),
    "d96 causal": Problem(head_dim=96, head_dim_v=96, dtype=BF16, **SQUARE, causal=True),
    "d96 full, float16": Problem(head_dim=96, head_dim_v=96, **SQUARE),
    "d8": Problem(head_dim=8, head_dim_v=8, **SQUARE, causal=True),
    "d40 and 56": Problem(head_dim=40, head_dim_v=56, **SQUARE),
    "d120 and 104": Problem(head_dim=120, head_dim_v=104, dtype=BF16, **SQUARE, causal=True),
    "d128 and 64": Problem(head_dim=128, head_dim_v=64, dtype=BF16, **SQUARE, causal=True),
    "d64 and 128": Problem(head_dim=64, head_dim_v=128, dtype=BF16, **SQUARE, causal=True),
    "d96 and 64": Problem(head_dim=96, head_dim_v=64, **SQUARE),
    "d64 and 96": Problem(head_dim=64, head_dim_v=96, dtype=BF16, **SQUARE),
    "d96 and 128": Problem(head_dim=96, head_dim_v=128, **SQUARE, causal=True),
    "d128 and 96": Problem(head_dim=128, head_dim_v=96, **SQUARE),
    "unaligned": Problem(
        head_dim=40, head_dim_v=40, **SQUARE, layouts=("unaligned", "transposed", "interleaved")
    ),
    "expanded": Problem(
        **D64, **SQUARE, layouts=("expanded_heads", "expanded_batch", "every_second")
    ),
    "many heads": Problem(**D64, batch=3, heads_kv=40, seqlen_q=70, seqlen_k=70, causal=True),
    "d128 window": Problem(**D128, **SQUARE, window_size=(100, 30)),
    "d128 causal window": Problem(**D128, heads_kv=2, ratio=2, seqlen_q=700, seqlen_k=900, window_size=(128, 0)),
    "d64 window that leaves keys unseen": Problem(
        **D64, heads_kv=2, seqlen_q=200, seqlen_k=900, window_size=(40, 40)
    ),
    "d96 window at the right": Problem(
        head_dim=96, head_dim_v=96, heads_kv=2, seqlen_q=500, seqlen_k=300, window_size=(None, 5)
    ),
    "d128 cap": Problem(**D128, **SQUARE, causal=True, softcap=5.0),
    "d64 cap, negative scale": Problem(**D64, **SQUARE, softcap=2.0, softmax_scale=-0.3),
    "d40 and 56, far above the cap": Problem(
        head_dim=40, head_dim_v=56, batch=3, heads_kv=2, ratio=4, seqlen_q=223, seqlen_k=2,
        value_scale=3.0, window_size=(201, 0), softcap=1.0,
    ),
    "d128 cap and window": Problem(**D128, **SQUARE, softcap=5.0, window_size=(100, 30)),
    "d128 sink, rows without keys": Problem(
        **D128, heads_kv=3, ratio=2, seqlen_q=517, seqlen_k=130, causal=True, sink=0.0
    ),
    "d64 sink far above": Problem(**D64, **SQUARE, sink=1000.0),
    "d128 alibi": Problem(**D128, **SQUARE, causal=True, alibi="by head"),
    "d64 alibi, grouped heads": Problem(
        **D64, batch=2, heads_kv=2, ratio=3, seqlen_q=200, seqlen_k=300, alibi="by batch and head"
    ),
    "d128 everything": Problem(
        **D128, batch=2, heads_kv=2, ratio=2, seqlen_q=333, seqlen_k=260, window_size=(100, 100),
        softcap=3.0, sink=2.0, alibi="by batch and head", softmax_scale=-0.2,
    ),
    "d64 everything": Problem(
        head_dim=64, head_dim_v=64, dtype=BF16, heads_kv=2, ratio=4, seqlen_q=133, seqlen_k=700,
        causal=True, window_size=(300, None), softcap=3.0, sink=2.0, alibi="by head",
    ),
    "d256 one tile": Problem(**D256, seqlen_q=64, seqlen_k=64),
    "d256 full": Problem(**D256, **SQUARE),
    "d256 causal": Problem(**D256, **SQUARE, causal=True),
    "d256 float16": Problem(head_dim=256, head_dim_v=256, **SQUARE, causal=True),
    "d256 grouped heads": Problem(**D256, heads_kv=2, ratio=3, seqlen_q=200, seqlen_k=400),
    "d256 one KV head": Problem(**D256, batch=2, ratio=8, seqlen_q=513, seqlen_k=257, causal=True),
    "d256 rows without keys": Problem(**D256, heads_kv=2, seqlen_q=517, seqlen_k=130, causal=True),
    "d256 few queries": Problem(**D256, heads_kv=3, seqlen_q=5, seqlen_k=900, causal=True),
    "d256 few keys": Problem(**D256, heads_kv=3, seqlen_q=900, seqlen_k=3),
    "d256 scale 0": Problem(**D256, **SQUARE, softmax_scale=0.0),
    "d256 negative scale": Problem(**D256, **SQUARE, causal=True, softmax_scale=-0.1),
    "d256 peaked": Problem(**D256, **SQUARE, softmax_scale=0.7),
    "d192 and 128": Problem(**D192, **SQUARE, causal=True),
    "d192 and 128, full": Problem(**D192, heads_kv=2, seqlen_q=640, seqlen_k=512),
    "d192 and 128, one tile": Problem(**D192, seqlen_q=48, seqlen_k=128),
    "d192 and 128, float16": Problem(head_dim=192, head_dim_v=128, **SQUARE, causal=True),
    "d192 and 128, rows without keys": Problem(
        **D192, heads_kv=2, seqlen_q=517, seqlen_k=130, causal=True
    ),
    "d192 and 128, few keys": Problem(**D192, heads_kv=3, seqlen_q=900, seqlen_k=3),
    "d192 and 128, cap": Problem(**D192, **SQUARE, causal=True, softcap=5.0),
    "d160": Problem(head_dim=160, head_dim_v=160, dtype=BF16, **SQUARE, causal=True),
    "d152 and 144": Problem(head_dim=152, head_dim_v=144, **SQUARE),
    "d160 everything": Problem(
        head_dim=160, head_dim_v=160, dtype=BF16, batch=2, heads_kv=2, ratio=2, seqlen_q=333, seqlen_k=260,
        window_size=(100, 100), softcap=3.0, sink=2.0, alibi="by batch and head", softmax_scale=-0.2,
    ),
    "d192": Problem(head_dim=192, head_dim_v=192, **SQUARE, causal=True),
    "d136 and 64": Problem(head_dim=136, head_dim_v=64, **SQUARE),
    "d64 and 256": Problem(head_dim=64, head_dim_v=256, dtype=BF16, **SQUARE, causal=True),
    "d168 and 200": Problem(head_dim=168, head_dim_v=200, dtype=BF16, **SQUARE, causal=True),
    "d248 and 8": Problem(head_dim=248, head_dim_v=8, **SQUARE, causal=True),
    "d256 window": Problem(**D256, **SQUARE, window_size=(100, 30)),
    "d192 causal window": Problem(
        **D192, heads_kv=2, ratio=2, seqlen_q=700, seqlen_k=900, window_size=(128, 0)
    ),
    "d192 window that leaves keys unseen": Problem(
        **D192, heads_kv=2, seqlen_q=200, seqlen_k=900, window_size=(40, 40)
    ),
    "d256 cap": Problem(**D256, **SQUARE, causal=True, softcap=5.0),
    "d256 sink, rows without keys": Problem(
        **D256, heads_kv=3, ratio=2, seqlen_q=517, seqlen_k=130, causal=True, sink=0.0
    ),
    "d192 alibi": Problem(**D192, **SQUARE, causal=True, alibi="by batch and head"),
    "d256 everything": Problem(
        **D256, batch=2, heads_kv=2, ratio=2, seqlen_q=333, seqlen_k=260, window_size=(100, 100),
        softcap=3.0, sink=2.0, alibi="by batch and head", softmax_scale=-0.2,
    ),
    "d200 unaligned": Problem(
        head_dim=200, head_dim_v=200, **SQUARE, layouts=("unaligned", "transposed", "interleaved")
    ),
    "d128 mask_mod": Problem(**D128, **SQUARE, mask_mod="dilated"),
    "d128 causal, score_mod": Problem(**D128, **SQUARE, causal=True, score_mod="bent"),
    "d128 mods that read, grouped heads": Problem(
        **D128, batch=2, heads_kv=2, ratio=3, seqlen_q=200, seqlen_k=300, score_mod="heads",
        mask_mod="documents",
    ),
    "d128 cap, slopes, score_mod": Problem(
        **D128, **SQUARE, causal=True, softcap=5.0, alibi="by head", score_mod="bent"
    ),
    "d64 score_mod": Problem(**D64, **SQUARE, score_mod="relative"),
    "d64 causal window, mods": Problem(
        **D64, heads_kv=2, ratio=2, seqlen_q=500, seqlen_k=700, window_size=(128, 0), sink=1.0,
        score_mod="bent", mask_mod="dilated",
    ),
    "d40 and 56, mods that read": Problem(
        head_dim=40, head_dim_v=56, **SQUARE, softmax_scale=-0.2, score_mod="relative",
        mask_mod="documents",
    ),
    "d128 rows that mask_mod leaves without keys": Problem(
        **D128, heads_kv=2, seqlen_q=300, seqlen_k=260, window_size=(0, 0), mask_mod="dilated", sink=0.0
    ),
    "d192 score_mod": Problem(**D192, **SQUARE, causal=True, score_mod="bent"),
    "d256 mask_mod": Problem(**D256, **SQUARE, mask_mod="dilated"),
    "d256 everything and mods": Problem(
        **D256, batch=2, heads_kv=2, ratio=2, seqlen_q=333, seqlen_k=260, window_size=(100, 100),
        softcap=3.0, sink=2.0, alibi="by batch and head", score_mod="heads", mask_mod="documents",
    ),
    "d256 long": Problem(**D256, seqlen_q=3000, seqlen_k=3100, causal=True),
    "long": Problem(**D128, seqlen_q=3000, seqlen_k=3100, causal=True),
}  # fmt: skip
every_problem = pytest.mark.parametrize("name", PROBLEMS)


@every_problem
@pytest.mark.parametrize("dlse", [False, True], ids=["out", "out and lse"])
def test_gradients(name: str, dlse: bool):
    GradientCase(PROBLEMS[name], dlse=dlse).check()


@pytest.mark.parametrize("dout", DOUTS)
@pytest.mark.parametrize("name", ["d128 causal", "d64 full", "d40 and 56"])
def test_gradients_of_out_lie_anyhow(name: str, dout: str):
    GradientCase(PROBLEMS[name], dout=dout).check()


@pytest.mark.parametrize(
    "seqlen_q", [1, 47, 48, 49, 63, 64, 65, 79, 80, 81, 96, 127, 128, 129, 161]
)
@pytest.mark.parametrize("seqlen_k", [1, 127, 128, 129, 257])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 192, 256])
def test_edges_of_tiles(head_dim: int, seqlen_q: int, seqlen_k: int):
    for causal in (False, True):
        problem = Problem(BF16, 1, 1, 2, head_dim, head_dim, seqlen_q, seqlen_k, causal)
        GradientCase(problem, dlse=True).check()


LARGE = {
    "d128 causal": Problem(
        **D128, batch=2, heads_kv=8, seqlen_q=2048, seqlen_k=2048, causal=True
    ),
    "d128 full, odd lengths": Problem(**D128, batch=3, heads_kv=5, seqlen_q=777, seqlen_k=1031),
    "d128 grouped heads": Problem(
        **D128, batch=2, heads_kv=4, ratio=6, seqlen_q=1000, seqlen_k=1100, causal=True
    ),
    "d64 causal": Problem(**D64, batch=2, heads_kv=16, seqlen_q=1025, seqlen_k=1025, causal=True),
    "d64 full": Problem(**D64, batch=2, heads_kv=8, seqlen_q=2000, seqlen_k=3000),
    "d96 causal": Problem(
        head_dim=96, head_dim_v=96, dtype=BF16, heads_kv=9, seqlen_q=1500, seqlen_k=1500, causal=True
    ),
    "d256 causal": Problem(**D256, batch=2, heads_kv=4, seqlen_q=2048, seqlen_k=2048, causal=True),
    "d256 full, odd lengths": Problem(**D256, batch=3, heads_kv=5, seqlen_q=777, seqlen_k=1031),
    "d192 grouped heads": Problem(
        **D192, batch=2, heads_kv=4, ratio=6, seqlen_q=1000, seqlen_k=1100, causal=True
    ),
    "d160 full, odd lengths": Problem(
        head_dim=160, head_dim_v=160, dtype=BF16, batch=3, heads_kv=5, seqlen_q=777, seqlen_k=1031
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_repeats(name: str):
    """dk and dv have the same bits, run after run; dq, whose sums have no order, the same but for their rounding."""
    case = GradientCase(LARGE[name], dlse=True)
    case.check()
    inputs = case.inputs()
    first = case.gradients(inputs)
    largest = first[0].abs().max()
    for _ in range(REPEATS):
        dq, dk, dv = case.gradients(inputs)
        assert torch.equal(dk, first[1]) and torch.equal(dv, first[2])
        assert (dq - first[0]).abs().max() <= 2 * torch.finfo(dq.dtype).eps * largest


TURNS = LARGE | {
    "one head, more tiles than multiprocessors": Problem(
        head_dim=64, head_dim_v=64, dtype=BF16, seqlen_q=300, seqlen_k=40_000
    ),
    "d128 full, few heads": Problem(**D128, heads_kv=2, seqlen_q=3000, seqlen_k=9000),
    "d128 causal window": Problem(
        **D128, heads_kv=8, ratio=2, seqlen_q=3000, seqlen_k=3500, window_size=(400, 0)
    ),
    "d64 window": Problem(**D64, heads_kv=8, seqlen_q=2000, seqlen_k=4000, window_size=(300, 200)),
    "d128 everything": PROBLEMS["d128 everything"],
    "d256 full, few heads": Problem(**D256, heads_kv=2, seqlen_q=3000, seqlen_k=9000),
    "d256 causal window": Problem(
        **D256, heads_kv=4, ratio=2, seqlen_q=3000, seqlen_k=3500, window_size=(400, 0)
    ),
    "d192 window": Problem(
        **D192, heads_kv=8, seqlen_q=2000, seqlen_k=4000, window_size=(300, 200)
    ),
    "d256 everything": PROBLEMS["d256 everything"],
    "d128 mods": PROBLEMS["d128 cap, slopes, score_mod"],
    "d256 mods": PROBLEMS["d256 everything and mods"],
}


@pytest.mark.parametrize("name", TURNS)
def test_deterministic_gradients_repeat(name: str):
    case = GradientCase(TURNS[name], deterministic=True)
    if case.problem.scores <= 2**25:
        case.check()
    inputs = case.inputs()
    first = case.gradients(inputs)
    for _ in range(100):
        for got, wanted in zip(case.gradients(inputs), first, strict=True):
            assert torch.equal(got, wanted)


def test_torch_asks_for_deterministic_gradients():
    case = GradientCase(LARGE["d128 causal"], deterministic=None)
    inputs = case.inputs()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        results = [case.gradients(inputs) for _ in range(20)]
    finally:
        torch.use_deterministic_algorithms(False)
    for gradients in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients, results[0], strict=True))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_rows_whose_lse_is_very_negative(head_dim: int):
    """Keys behind the last have scores of 0, far above them: without a mask their P would be infinite."""
    problem = Problem(
        torch.bfloat16,
        head_dim=head_dim,
        head_dim_v=head_dim,
        seqlen_q=70,
        seqlen_k=70,
        softmax_scale=-1.0,
    )
    inputs = [x.detach() for x in GradientCase(problem).inputs()]
    inputs = [(5 * inputs[0].abs()), (5 * inputs[1].abs()), inputs[2]]
    inputs = [x.requires_grad_() for x in inputs]
    out, lse = flash4.flash_attn_func(*inputs, softmax_scale=-1.0, return_lse=True)
    assert lse.max() < -500
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, dout)
    assert_gradients_close(gradients, inputs, dout, softmax_scale=-1.0)


def test_neighbours_in_the_batch_do_not_matter():
    case = GradientCase(dataclasses.replace(PROBLEMS["d128 causal"], batch=3))
    inputs = case.inputs()
    expected = case.gradients(inputs)
    with torch.no_grad():
        for x in inputs:
            x[0], x[2] = torch.nan, torch.inf
    for got, wanted in zip(case.gradients(inputs)[1:], expected[1:], strict=True):
        assert torch.equal(got[1], wanted[1])


def test_heads_do_not_matter_to_one_another():
    case = GradientCase(PROBLEMS["d128 grouped heads"])
    inputs = case.inputs()
    expected = case.gradients(inputs)
    with torch.no_grad():
        inputs[0][:, :, :3] = torch.nan
        for x in inputs[1:]:
            x[:, :, 0] = torch.nan
    dq, dk, dv = case.gradients(inputs)
    assert torch.equal(dk[:, :, 1], expected[1][:, :, 1])
    assert torch.equal(dv[:, :, 1], expected[2][:, :, 1])
    assert dq[:, :, 3:].isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool):
    case = GradientCase(PROBLEMS["d128 causal"])
    inputs, dout = case.inputs(), case.gradient_of_out()
    _, dk, dv = case.gradients(inputs)

    def block(q, k, v):
        return flash4.flash_attn_func(q, k, v, causal=True)

    checkpoint(block, *inputs, use_reentrant=reentrant).backward(dout)
    assert torch.equal(inputs[1].grad, dk) and torch.equal(inputs[2].grad, dv)


def test_sum_backward():
    case = GradientCase(PROBLEMS["d64 causal"])
    inputs = case.inputs()
    flash4.flash_attn_func(*inputs, causal=True).sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_torch_compile():
    case = GradientCase(PROBLEMS["d128 causal"])
    inputs, dout = case.inputs(), case.gradient_of_out()

    def block(q, k, v):
        return flash4.flash_attn_func(2 * q, k, v, causal=True)

    expected = torch.autograd.grad(block(*inputs), inputs, dout)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    gradients = torch.autograd.grad(compiled(*inputs), inputs, dout)
    for got, wanted in zip(gradients[1:], expected[1:], strict=True):
        assert torch.equal(got, wanted)


def test_another_stream():
    case = GradientCase(LARGE["d128 causal"])
    inputs = case.inputs()
    _, dk, dv = case.gradients(inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = case.gradients(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(other[1], dk) and torch.equal(other[2], dv)


def test_cuda_graphs():
    case = GradientCase(PROBLEMS["d128 causal"])
    inputs, dout = case.inputs(), case.gradient_of_out()

    def step():
        out = flash4.flash_attn_func(*inputs, causal=True)
        return torch.autograd.grad(out, inputs, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for gradient in captured:
        gradient.fill_(torch.nan)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured[1], expected[1]) and torch.equal(captured[2], expected[2])
    assert captured[0].isfinite().all()


@pytest.mark.parametrize("deterministic", [False, True])
def test_workspace_is_what_the_plan_says(deterministic):
    case = GradientCase(LARGE["d128 causal"])
    inputs, dout = case.inputs(), case.gradient_of_out()
    keywords = {"causal": True, "deterministic": deterministic}
    out = flash4.flash_attn_func(*inputs, **keywords)
    plan = flash4.explain(*inputs, backward=True, **keywords)
    torch.autograd.grad(out, inputs, dout, retain_graph=True)
    gc.collect()  # what compiling has left holds tensors
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested_bytes("current")
    gradients = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    results = sum(x.numel() * x.element_size() for x in gradients)
    assert requested_bytes("peak") - before - results == plan.workspace_bytes


def test_new_lengths_do_not_compile():
    from flash4.jit.cache import CACHE

    base = PROBLEMS["d128 causal"]
    GradientCase(base).check()
    before = CACHE.compiles
    for seqlen_q, seqlen_k, ratio in ((1, 64, 1), (64, 1, 2), (128, 129, 3), (700, 77, 1)):
        changes = dict(seqlen_q=seqlen_q, seqlen_k=seqlen_k, ratio=ratio, softmax_scale=-0.3)
        problem = dataclasses.replace(base, pack_gqa=False, **changes)
        case = GradientCase(problem)
        case.check()
    # Another sign of the scale is another forward kernel, as ever; the backward takes both.
    assert CACHE.compiles <= before + 1


def test_what_nobody_writes_would_show():
    """The helper that these tests rely on."""
    poison()
    assert torch.empty(1 << 20, device=DEVICE).isnan().any()


REFUSED = {
    "score_mod": (ValueError, "pass score_mod_bwd", {"score_mod": strategies.relative_bias}),
    "slopes that need a gradient": (
        NotImplementedError,
        "alibi_slopes are not built",
        {"alibi_slopes": torch.ones(2)},
    ),
    "tensors of mods that need a gradient": (
        NotImplementedError,
        r"aux_tensors\[0\] are not built",
        {"mask_mod": strategies.dilated, "aux_tensors": [torch.ones(2)]},
    ),
}


def _needing_gradients(x):
    if isinstance(x, list):
        return [_needing_gradients(y) for y in x]
    return x.to(DEVICE).requires_grad_() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("name", REFUSED)
def test_gradients_that_are_not_built_are_refused_by_the_forward(name: str):
    inputs = GradientCase(PROBLEMS["d128 causal"]).inputs()
    error, said, keywords = REFUSED[name]
    keywords = {key: _needing_gradients(x) for key, x in keywords.items()}
    for function in (flash4.flash_attn_func, flash4.flash_attn_varlen_func):
        with pytest.raises(error, match=said):
            function(*inputs, **keywords)
        with torch.no_grad():
            function(*inputs, **keywords)


AUTOGRAD = {name: PROBLEMS[name] for name in ("d128 causal", "d128 mods that read, grouped heads")}
every_graph = pytest.mark.parametrize("name", AUTOGRAD)


def _call(problem: Problem, inputs, keywords):
    return problem.function(*inputs, **keywords | {"deterministic": True})


@every_graph
def test_a_graph_can_be_kept(name: str):
    case = GradientCase(AUTOGRAD[name])
    inputs, dout = case.inputs(), case.gradient_of_out()
    out = _call(case.problem, inputs, case.problem.keywords(DEVICE))
    first = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    second = torch.autograd.grad(out, inputs, dout)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time|already been freed"):
        torch.autograd.grad(out, inputs, dout)


@every_graph
@pytest.mark.parametrize("changed", ["q", "k", "v", "out", "aux_tensors"])
def test_changes_in_place_are_noticed(name: str, changed: str):
    case = GradientCase(AUTOGRAD[name])
    inputs, dout = case.inputs(), case.gradient_of_out()
    keywords = case.problem.keywords(DEVICE)
    for _ in range(2):  # by both ways of a call
        out = _call(case.problem, inputs, keywords)
        named = dict(zip("qkv", inputs, strict=True), out=out)
        named["aux_tensors"] = keywords.get("aux_tensors", [None])[0]
        if named[changed] is None:
            pytest.skip("the call has none")
        with torch.no_grad():
            named[changed].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, inputs, dout)


@every_graph
def test_second_derivatives_are_refused(name: str):
    case = GradientCase(AUTOGRAD[name])
    inputs, dout = case.inputs(), case.gradient_of_out()
    keywords = case.problem.keywords(DEVICE)
    for _ in range(2):
        out = _call(case.problem, inputs, keywords)
        (dq, *_) = torch.autograd.grad(out, inputs, dout, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives.*create_graph"):
            dq.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_of_mods(reentrant: bool):
    case = GradientCase(AUTOGRAD["d128 mods that read, grouped heads"])
    inputs, dout = case.inputs(), case.gradient_of_out()
    keywords = case.problem.keywords(DEVICE)

    def block(q, k, v):
        return _call(case.problem, (q, k, v), keywords)

    expected = torch.autograd.grad(block(*inputs), inputs, dout)
    checkpoint(block, *inputs, use_reentrant=reentrant).backward(dout)
    for tensor, gradient in zip(inputs, expected, strict=True):
        assert torch.equal(tensor.grad, gradient)


def test_other_numbers_of_mods_are_other_gradients():
    """By closure values, the derivative's too; the first ones are found again."""
    case = GradientCase(PROBLEMS["d128 causal"])
    inputs, dout = case.inputs(), case.gradient_of_out()
    found = []
    for factor, slope in ((1.0, 1.0), (0.5, 0.5), (1.0, 0.5), (1.0, 1.0)):
        out = flash4.flash_attn_func(
            *inputs,
            causal=True,
            deterministic=True,
            score_mod=lambda score, *_: score * factor,  # noqa: B023
            score_mod_bwd=lambda grad, *_: grad * slope,  # noqa: B023
        )
        found.append(torch.autograd.grad(out, inputs, dout))
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[3], strict=True))
    assert not torch.equal(found[0][2], found[1][2])
    # dS is half as large, and rounding does not mind.
    assert torch.equal(found[2][1], found[0][1] / 2) and torch.equal(found[2][2], found[0][2])
