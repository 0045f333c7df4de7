"""Gradients of sequences of different lengths on a GPU: numbers, and what must not reach them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flash4
from tests.gpu.gradients import DEVICE, DOUTS, GradientCase, poison, requested_bytes
from tests.host.test_bwd90_sequences import PROBLEMS as SMALL
from tests.strategies import Problem

F16, BF16 = torch.float16, torch.bfloat16
REPEATS = 50
D128 = dict(head_dim=128, head_dim_v=128, dtype=BF16)
D64 = dict(head_dim=64, head_dim_v=64)
UNEVEN = (1900, 0, 3, 700, 64, 1, 333, 1280)
LARGE = {
    "d128 causal": Problem(
        **D128, heads_kv=4, lengths_q=UNEVEN, lengths_k=UNEVEN, causal=True, around=(7, 300)
    ),
    "d128 full": Problem(**D128, heads_kv=3, lengths_q=UNEVEN, lengths_k=UNEVEN[::-1]),
    "d128 grouped heads": Problem(
        **D128, heads_kv=2, ratio=4, lengths_q=UNEVEN, lengths_k=UNEVEN, causal=True
    ),
    "d64 causal": Problem(**D64, heads_kv=8, lengths_q=UNEVEN, lengths_k=UNEVEN, causal=True),
    "d64 full": Problem(**D64, heads_kv=8, lengths_q=UNEVEN, lengths_k=UNEVEN),
    "d96 in use": Problem(
        head_dim=96, head_dim_v=96, dtype=BF16, heads_kv=3, seqlen_q=700, seqlen_k=900, batch=4,
        used_q=(700, 0, 130, 699), used_k=(1, 900, 555, 128),
    ),
    "d128 many": Problem(
        **D128, heads_kv=2, causal=True, lengths_q=tuple(3 * i % 40 for i in range(300)),
        lengths_k=tuple(7 * i % 50 for i in range(300)),
    ),
    "d128 window": Problem(
        **D128, heads_kv=4, lengths_q=UNEVEN, lengths_k=UNEVEN, window_size=(200, 0)
    ),
    "d128 mods": Problem(
        **D128, heads_kv=2, lengths_q=UNEVEN, lengths_k=UNEVEN, causal=True, around=(7, 300),
        score_mod="bent", mask_mod="documents",
    ),
    "d192 causal": Problem(
        **D128 | {"head_dim": 192}, heads_kv=3, lengths_q=UNEVEN, lengths_k=UNEVEN, causal=True, around=(7, 300)
    ),
    "d256 in use": Problem(
        head_dim=256, head_dim_v=256, dtype=BF16, heads_kv=2, ratio=2, seqlen_q=700, seqlen_k=900,
        batch=4, used_q=(700, 0, 130, 699), used_k=(1, 900, 555, 128), score_mod="relative",
    ),
    "d192 and 128": Problem(
        head_dim=192, head_dim_v=128, dtype=BF16, heads_kv=2, ratio=2, lengths_q=UNEVEN, lengths_k=UNEVEN, causal=True
    ),
    "d128 everything": Problem(
        **D128, heads_kv=2, ratio=2, lengths_q=UNEVEN, lengths_k=UNEVEN[::-1], softcap=3.0, sink=1.0,
        alibi="by batch and head", window_size=(300, 100), used_q=(1800, 0, 2, 500, 64, 0, 1, 1279),
        used_k=(1280, 333, 0, 60, 699, 3, 0, 1500), around=(1, 2),
    ),
}  # fmt: skip
PROBLEMS = SMALL | LARGE
every_problem = pytest.mark.parametrize("name", PROBLEMS)


@every_problem
@pytest.mark.parametrize("dlse", [False, True], ids=["out", "out and lse"])
def test_gradients(name: str, dlse: bool):
    """Beside NaN in rows that are of no sequence or not in use, and in memory that nobody writes."""
    GradientCase(PROBLEMS[name], dlse=dlse).check()


@pytest.mark.parametrize("dout", DOUTS)
@pytest.mark.parametrize("name", ["d128", "in use", "all"])
def test_gradients_of_out_lie_anyhow(name: str, dout: str):
    GradientCase(SMALL[name], dout=dout).check()


LAYOUTS = (
    ("interleaved", "interleaved", "interleaved"),
    ("transposed", "every_second", "unaligned"),
    ("padded", "expanded_heads", "transposed"),
)


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["packed", "in use"])
def test_inputs_lie_anyhow(name: str, layouts: tuple[str, str, str]):
    GradientCase(replace(SMALL[name], layouts=layouts)).check()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 79, 80, 81, 127, 128, 129, 257])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192])
def test_edges_of_tiles(head_dim: int, length: int):
    """Each sequence begins where the one before ends: what is stored too far lies in the next one."""
    lengths = (length, 200, 1, length, 128, length)
    for causal in (False, True):
        problem = Problem(BF16, 1, 2, 1, head_dim, head_dim, causal=causal)
        GradientCase(replace(problem, lengths_q=lengths, lengths_k=lengths[::-1])).check()


@pytest.mark.parametrize("name", LARGE)
def test_repeats(name: str):
    """dk and dv have the same bits, run after run."""
    case = GradientCase(LARGE[name], dlse=True)
    inputs = case.inputs()
    first = case.gradients(inputs)
    for _ in range(REPEATS):
        found = case.gradients(inputs)
        assert torch.equal(found[1], first[1]) and torch.equal(found[2], first[2])


@pytest.mark.parametrize("name", LARGE)
def test_deterministic_gradients_repeat(name: str):
    case = GradientCase(LARGE[name], deterministic=True)
    case.check()
    inputs = case.inputs()
    first = case.gradients(inputs)
    for _ in range(2 * REPEATS):
        poison()
        for got, wanted in zip(case.gradients(inputs), first, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_gradients_of_out_outside_the_sequences_do_not_matter(value: float):
    """Nor what the log-sum-exp's gradient is there."""
    problem = SMALL["all"]
    inputs, keywords = GradientCase(problem).inputs(), problem.keywords(DEVICE)
    outside = problem._outside(problem.lengths_q, problem.used_q, problem.seqlen_q).to(DEVICE)
    results = []
    for filled in (0.0, value):
        out, lse = flash4.flash_attn_varlen_func(*inputs, return_lse=True, **keywords)
        dout, dlse = torch.ones_like(out), torch.ones_like(lse)
        dout[outside] = filled
        dlse[:, outside] = filled
        results.append(torch.autograd.grad((out, lse), inputs, (dout, dlse)))
    for got, wanted in zip(results[1][1:], results[0][1:], strict=True):
        assert torch.equal(got, wanted)
    assert results[1][0].isfinite().all() and not results[1][0][outside].any()


def test_sequences_do_not_matter_to_one_another():
    problem = LARGE["d128 causal"]
    case = GradientCase(problem)
    inputs = case.inputs()
    expected = case.gradients(inputs)
    begins = problem._begins(problem.lengths_q)
    with torch.no_grad():
        for x in inputs:
            x[begins[0] : begins[1]] = torch.nan
            x[begins[4] : begins[5]] = torch.inf
    found = case.gradients(inputs)
    others = torch.ones(inputs[0].shape[0], dtype=torch.bool, device=DEVICE)
    for i in (0, 4):
        others[begins[i] : begins[i + 1]] = False
    assert found[0][others].isfinite().all()
    for got, wanted in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(got[others], wanted[others])


def test_the_same_as_one_call_for_each_sequence():
    """But for rounding: one call takes blocks of queries in another order."""
    problem = LARGE["d128 causal"]
    case = GradientCase(problem)
    inputs, dout = case.inputs(), case.gradient_of_out()
    found = case.gradients(inputs)
    for begin, length in zip(problem._begins(problem.lengths_q), problem.lengths_q, strict=False):
        if not length:
            continue
        rows = slice(begin, begin + length)
        alone = [x.detach()[None, rows].requires_grad_() for x in inputs]
        out = flash4.flash_attn_func(*alone, causal=True)
        gradients = torch.autograd.grad(out, alone, dout[None, rows])
        for got, expected in zip(found, gradients, strict=True):
            error = (got[rows].float() - expected[0].float()).abs().max()
            assert error <= 4 * torch.finfo(BF16).eps * expected.abs().max()


def test_new_lengths_do_not_compile():
    from flash4.jit.cache import CACHE

    base = Problem(**D128, lengths_q=(70, 0, 300), lengths_k=(150, 40, 260), causal=True)
    GradientCase(base).check()
    before = CACHE.compiles
    for lengths_q, lengths_k in (
        ((1,), (1,)),
        ((0, 900, 3, 3), (70, 70, 0, 700)),
        ((5,) * 40,) * 2,
    ):
        GradientCase(replace(base, lengths_q=lengths_q, lengths_k=lengths_k)).check()
    assert CACHE.compiles == before


def test_cuda_graphs_with_other_lengths():
    """A graph is replayed with lengths that it was not captured with."""
    case = GradientCase(replace(LARGE["d128 causal"], around=(0, 0)))
    inputs, dout = case.inputs(), case.gradient_of_out()
    cu = case.problem.keywords(DEVICE)["cu_seqlens_q"]
    total = inputs[0].shape[0]

    def step():
        out = flash4.flash_attn_varlen_func(*inputs, cu, cu, causal=True)
        return torch.autograd.grad(out, inputs, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for begins in (
        [0, 5, 5, 100, 2000, 2001, 3000, 3500, total],
        [0, total, *[total] * 7],
        [9] * 9,
    ):
        cu.copy_(torch.tensor(begins, dtype=torch.int32))
        for gradient in captured:
            gradient.fill_(torch.nan)
        graph.replay()
        found = [x.clone() for x in captured]
        expected = step()
        assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])
        assert found[0].isfinite().all()
        torch.testing.assert_close(found[0], expected[0], atol=2e-2, rtol=2e-2)


def test_torch_compile():
    case = GradientCase(SMALL["packed, causal"])
    inputs, dout = case.inputs(), case.gradient_of_out()
    keywords = case.problem.keywords(DEVICE)

    def block(q, k, v):
        return flash4.flash_attn_varlen_func(2 * q, k, v, **keywords)

    expected = torch.autograd.grad(block(*inputs), inputs, dout)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    gradients = torch.autograd.grad(compiled(*inputs), inputs, dout)
    for got, wanted in zip(gradients[1:], expected[1:], strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["d128 causal", "d96 in use"])
def test_workspace_is_what_the_plan_says(name: str):
    problem = LARGE[name]
    case = GradientCase(problem)
    inputs, dout, keywords = case.inputs(), case.gradient_of_out(), problem.keywords(DEVICE)
    out = flash4.flash_attn_varlen_func(*inputs, **keywords)
    plan = flash4.explain(*inputs, backward=True, **keywords)
    torch.autograd.grad(out, inputs, dout, retain_graph=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = requested_bytes("current")
    gradients = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    results = sum(x.numel() * x.element_size() for x in gradients)
    assert requested_bytes("peak") - before - results <= plan.workspace_bytes


def all_cases() -> list[GradientCase]:
    """Every kernel that these tests launch, for compiling them in parallel beforehand."""
    cases = [GradientCase(p, dlse=dlse) for p in PROBLEMS.values() for dlse in (False, True)]
    cases += [GradientCase(p, deterministic=True) for p in LARGE.values()]
    for head_dim in (64, 96, 128, 192):
        for causal in (False, True):
            problem = Problem(BF16, 1, 2, 1, head_dim, head_dim, causal=causal)
            cases.append(GradientCase(replace(problem, lengths_q=(1,), lengths_k=(1,))))
            cases.append(GradientCase(problem))
    return cases


if __name__ == "__main__":  # python -m tests.gpu.test_backward_sequences: compile
    from tests.gpu.fuzzing import compile_all

    wanted = (key for case in all_cases() for key in case.kernels("sm_90a"))
    raise SystemExit(compile_all(dict.fromkeys(wanted), 16))
