"""Gradients through ``flash_attn_varlen_func`` without a GPU: autograd, layouts, sinks and workspace."""

import contextlib
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

import flash4
from flash4 import ops
from flash4.common.kv_tiles import slots_of
from tests.checks import assert_gradients_close
from tests.gpu.gradients import DOUTS, GradientCase
from tests.host.test_backward_ops import backward_on_cpu, stand_in
from tests.host.test_bwd90_sequences import PROBLEMS
from tests.host.test_dispatch import stand_in_gpu
from tests.strategies import Problem

BF16 = torch.bfloat16
every_problem = pytest.mark.parametrize("name", PROBLEMS)


def gradients_of(case: GradientCase):
    """Gradients of a case's inputs, and the inputs."""
    inputs = case.inputs("cpu")
    with stand_in():
        return case.gradients(inputs, "cpu"), inputs


def check(case: GradientCase):
    """All gradients, what is stored but of no sequence included."""
    found, inputs = gradients_of(case)
    keywords = case.problem.keywords()
    dout, dlse = case.gradient_of_out("cpu"), case.gradient_of_lse("cpu")
    assert all(x.shape == t.shape for x, t in zip(found, inputs, strict=False))
    assert_gradients_close(found, inputs, dout, dlse=dlse, **keywords)


@every_problem
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(name, deterministic):
    check(GradientCase(PROBLEMS[name], dlse=True, deterministic=deterministic))


@pytest.mark.parametrize("dout", DOUTS)
@pytest.mark.parametrize("name", ["packed, causal", "in use", "all"])
def test_gradients_of_out_lie_anyhow(name, dout):
    check(GradientCase(PROBLEMS[name], dout=dout))


LAYOUTS = (
    ("interleaved", "interleaved", "interleaved"),
    ("transposed", "every_second", "unaligned"),
    ("padded", "expanded_heads", "transposed"),
)


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["packed", "in use", "queries packed, keys in use"])
def test_inputs_lie_anyhow(name, layouts):
    check(GradientCase(replace(PROBLEMS[name], layouts=layouts)))


@pytest.mark.parametrize(
    "name", ["packed", "all", "in use", "queries packed", "keys packed", "many"]
)
def test_gradients_of_sinks(name):
    """They are summed over rows of sequences alone; rows without keys have them as log-sum-exp."""
    check(GradientCase(replace(PROBLEMS[name], sink=0.5, heads_kv=3), dlse=True))


def test_lengths_of_int64_and_max_seqlen():
    """max_seqlen of any kind is accepted, and does not matter."""
    case = GradientCase(PROBLEMS["packed"])
    inputs, keywords = case.inputs("cpu"), case.problem.keywords()
    dout, results = case.gradient_of_out("cpu"), []
    longs = {n: x.long() if isinstance(x, torch.Tensor) else x for n, x in keywords.items()}
    with stand_in():
        for given in (keywords, longs):
            for longest in (None, 1, torch.tensor(300)):
                out = flash4.flash_attn_varlen_func(
                    *inputs, max_seqlen_q=longest, max_seqlen_k=longest, **given
                )
                results.append(torch.autograd.grad(out, inputs, dout))
    for gradients in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients, results[0], strict=True))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)], ids=str)
def test_calls_without_rows(lengths):
    """No sequence at all, and sequences that are all empty, with and without rows around them."""
    for around in ((0, 0), (2, 3)):
        rows, cu = sum(around), torch.full((len(lengths) + 1,), around[0], dtype=torch.int32)
        inputs = [torch.randn(rows, 2, 64).half().requires_grad_() for _ in range(3)]
        sink = torch.zeros(2, requires_grad=True)
        with stand_in_unless_empty(rows * len(lengths)):
            out, lse = flash4.flash_attn_varlen_func(
                *inputs, cu, cu, learnable_sink=sink, return_lse=True
            )
            (out.float().sum() + lse.sum()).backward()
        assert all(not x.grad.any() and x.grad.shape == x.shape for x in (*inputs, sink))


def stand_in_unless_empty(work):
    """``stand_in`` asks for a launch, of which an empty call has none."""
    if work:
        return stand_in()
    stack = contextlib.ExitStack()
    stack.enter_context(stand_in_gpu())
    stack.enter_context(mock.patch.object(ops, "_backward_launches", {}))
    library = stack.enter_context(torch.library._scoped_library("flash4", "IMPL"))
    library.impl("backward", backward_on_cpu, "CPU")
    return stack


def test_lengths_that_change_before_the_backward_are_noticed():
    case = GradientCase(PROBLEMS["packed"])
    inputs, keywords = case.inputs("cpu"), case.problem.keywords()
    with stand_in():
        out = flash4.flash_attn_varlen_func(*inputs, **keywords)
        keywords["cu_seqlens_q"] += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, inputs, case.gradient_of_out("cpu"))


@every_problem
def test_the_plan_bounds_the_workspace(name):
    """The documented formula; what is allocated is at most that."""
    problem = PROBLEMS[name]
    plan = flash4.explain(*problem.shapes, backward=True, arch="sm_90a", **problem.keywords("meta"))
    config, shapes = plan.config, problem.shapes
    if config.cu_q:
        rows = problem.sequences * -(-shapes[0].shape[0] // problem.sequences)
        blocks = rows // config.tile_m + problem.sequences + 2
        exact = slots_of(problem.sequences, shapes[0].shape[0], config.tile_m, True)
        assert "up to" in str(plan)
    else:
        blocks = exact = problem.sequences * -(-problem.seqlen_q // config.tile_m)
    of_tile = config.tile_slots[0] if config.tiles_found else 0
    numbers = problem.heads * blocks * (config.tile_m * (config.dq_width + 2) + 2 * config.turns)
    words = plan.grid.total * of_tile + 32 * config.handed_out
    assert plan.workspace_bytes == 4 * (numbers + words)
    options = flash4.interface.options_of(*shapes, **problem.keywords("meta"))
    entries = [1 if cu else problem.sequences for cu in (config.cu_q, config.cu_k)]
    found = ops.slots_of_call(*shapes[:2], config, options)
    assert entries[0] * found[0] == exact <= blocks
    assert entries[1] * found[1] * shapes[1].shape[-2] <= plan.grid.total
    found = "found before and handed out" if config.tiles_found else "each found by its CTA"
    assert found in str(plan)


def test_workspace_grows_with_rows_and_sequences_alone():
    """Not with the longest sequence times their number."""
    kinds = ((64,) * 100, (6301,) + (1,) * 99, (6400,) + (0,) * 99)
    sizes = []
    for lengths in kinds:
        problem = Problem(head_dim=128, head_dim_v=128, lengths_q=lengths, lengths_k=lengths)
        keywords = problem.keywords("meta")
        plan = flash4.explain(*problem.shapes, backward=True, arch="sm_90a", **keywords)
        sizes.append(plan.workspace_bytes)
    assert sizes == sizes[:1] * 3


def test_only_what_tma_cannot_address_is_copied():
    """The plan says so: entries that lie a whole number of rows apart need no copy."""
    k = torch.empty(3, 100, 2, 64, dtype=BF16, device="meta")
    padded = torch.empty(3, 100 * 128 + 8, dtype=BF16, device="meta").as_strided(
        (3, 100, 2, 64), (100 * 128 + 8, 128, 64, 1)
    )
    used = torch.empty(3, dtype=torch.int32, device="meta")
    for side, copied in (("seqused_k", {"k", "v"}), ("seqused_q", {"q"})):
        keywords = {side: used, "backward": True, "arch": "sm_90a"}
        assert not flash4.explain(k, k, k, **keywords).copies
        copies = flash4.explain(padded, padded, padded, **keywords).copies
        assert {text.partition(":")[0] for text in copies} == copied


def test_real_and_fake_gradients_agree():
    case = GradientCase(PROBLEMS["packed"])
    found, inputs = gradients_of(case)
    detached = [x.detach() for x in inputs]
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in detached)
        out, lse = ops.empty_output(q, v.shape[-1]), ops.empty_lse(q)
        *fake, dsink = ops.backward(out, None, q, k, v, out, lse, 0.125, True)
    for real, meta in zip(found, fake, strict=False):
        assert (real.shape, real.stride(), real.dtype) == (meta.shape, meta.stride(), meta.dtype)


def test_the_operator_is_registered_as_torch_expects():
    case = GradientCase(PROBLEMS["all"])
    inputs, keywords = case.inputs("cpu"), case.problem.keywords()
    q, k, v = (x.detach() for x in inputs)
    lengths = [keywords[name] for name in flash4.problem.LENGTHS]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    with stand_in():
        out, lse = flash4.flash_attn_varlen_func(q, k, v, return_lse=True, **keywords)
        features = (0.125, True, -1, -1, 0.0, None, None, True)
        call = (case.gradient_of_out("cpu"), None, q, k, v, out, lse, *features, *lengths)
        torch.library.opcheck(ops.backward, call, test_utils=tests)
