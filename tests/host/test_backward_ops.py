"""Gradients through the public functions, without a GPU: autograd, layouts, and everything around the kernels."""

import contextlib
from dataclasses import astuple, dataclass, replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import flash4
from flash4 import dispatch, launch, ops, reference
from flash4.common import mods
from flash4.common.dsl import plain
from flash4.common.fragments import dq_place
from flash4.common.geometry import QueryBlocks
from flash4.common.kv_sequences import SequenceSchedule, Side, find_tile
from flash4.common.kv_tiles import KvGrid
from flash4.common.mods import SeqlenInfo
from flash4.interface import options_of
from flash4.passes.bwd_config import FINISH, PREPARE
from flash4.problem import AttentionProblem
from flash4.sim.bwd_sequences import to_rows, to_slots
from flash4.sim.handout import HostWarp
from tests import strategies
from tests.checks import assert_gradients_close
from tests.host.test_dispatch import LAYOUTS, run_reference, stand_in_gpu

F16, BF16 = torch.float16, torch.bfloat16
WORKERS = 132
NARROW, WIDE = "flash4.sm90.bwd:BackwardSm90", "flash4.sm90.bwd_wide:WideBackwardSm90"
MIDDLE = "flash4.sm90.bwd_192:Backward192Sm90"


def check_rows(*tensors):
    """What TMA and vector loads ask of tensors."""
    for x in tensors:
        assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0, "TMA cannot address it"
        assert not any(stride % 8 for stride in x.stride()[:-1]), x.stride()


def width_of(config):
    """Head dims of the sums of dQ; ``config`` is that of a backward or of a kernel around it."""
    return getattr(config, "dq_width", config.tile_d)


def order_of_sums(config):
    """(queries, head dims) of a block's sums, one after the other."""
    places = [
        dq_place(config, part, thread, group, number)
        for part in range(2)
        for group in range(config.tile_m * width_of(config) // 1024)
        for thread in range(128)
        for number in range(4)
    ]
    assert sorted(places) == [
        (query, column) for query in range(config.tile_m) for column in range(width_of(config))
    ]
    return torch.tensor(places).T


def side_of(config, x, tile, cu=None, used=None):
    """Where sequences lie in x (B, S, H, D)."""
    cu, used = (None if t is None else t.tolist() for t in (cu, used))
    return Side(x.shape[0] if cu is None else len(cu) - 1, x.shape[1], tile, cu, used)


def queries_of(config, x, lengths):
    """Where queries lie, from the tensors of lengths that a small kernel takes."""
    assert len(lengths) == config.cu_q + config.used_q
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in lengths)
    cu, used = lengths[0] if config.cu_q else None, lengths[-1] if config.used_q else None
    return side_of(config, x, config.tile_m, cu, used)


def keys_of(config, k, *lengths):
    """Where keys lie, from k and the tensors of lengths that a small kernel takes."""
    assert len(lengths) == config.cu_k + config.used_k
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in lengths)
    cu, used = lengths[0] if config.cu_k else None, lengths[-1] if config.used_k else None
    return side_of(config, k, config.tile_n, cu, used)


def find(config, queries, heads, found, section, *rest):
    """Tiles of all numbers, into ``found``."""
    count = config.left + config.right
    sides, (k, *lengths) = list(rest[:count]), rest[count:]
    left, right = sides.pop(0) if config.left else None, sides.pop() if config.right else None
    blocks = QueryBlocks(config.tile_m, config.tile_n, config.causal, left, right)
    grid = KvGrid(0, k.shape[2], 0, heads // k.shape[2])
    schedule = SequenceSchedule(
        blocks, grid, queries, keys_of(config, k, *lengths), section, config.least_heads
    )
    assert len(found) == schedule.total
    for number, words in enumerate(found):
        tile = plain(find_tile)(schedule, HostWarp(), number)
        words.copy_(torch.tensor([*astuple(tile), *astuple(schedule.where(tile))]))


def prepare(config, tensors):
    """``passes.bwd_prepare`` in torch."""
    out, dout, lse, lse2, delta, sums, *optional = tensors
    check_rows(out, dout)
    n = config.cu_q + config.used_q
    lengths, optional = optional[:n], optional[n:]
    counters = config.turns + config.handed_out
    dlse, rest = optional[counters : counters + config.dlse], optional[counters + config.dlse :]
    if config.finds:
        find(config, queries_of(config, out, lengths), out.shape[2], *rest)
    else:
        assert not rest
    for counter in optional[:counters]:
        counter.zero_()
    d = (out.float() * dout.float()).sum(-1).transpose(1, 2)
    d = d - dlse[0] if dlse else d
    seen, queries = lse != -torch.inf, queries_of(config, out, lengths)
    for statistic, x, fill in (
        (lse2, torch.where(seen, lse / 0.6931471805599453, torch.inf), np.inf),
        (delta, torch.where(seen, d, 0.0), 0),
    ):
        statistic.copy_(torch.from_numpy(to_slots(queries, x.numpy(), fill)))
    sums.fill_(0.0 if config.zeroes else torch.nan)


def multiply(config, tensors, numbers, section):
    """``sm90.bwd`` in torch, from the facts that the kernel has, one sequence after the other."""
    q, k, v, dout, lse2, delta, sums, dk, dv, *optional = tensors
    check_rows(q, k, v, dout, dk, dv)
    optional = dict(zip(config.optional_tensors, optional, strict=True))
    if config.handed_out:
        workers = dict(zip(config.numbers, numbers, strict=True))["workers"]
        assert not optional["next_tile"].any() and workers > 0
    if config.turns:
        assert not optional["turns"].any() and optional["turns"].shape == (*sums.shape[:3], 2)
    if config.tiles_found:
        places = optional["found_tiles"][:, :4]  # valid, sequence, tile, KV head
        assert len({*map(tuple, places[places[:, 0] > 0].tolist())}) == places[:, 0].sum() > 0
    queries, keys = (
        side_of(config, x, tile, optional.get(f"cu_seqlens_{n}"), optional.get(f"seqused_{n}"))
        for n, x, tile in (("q", q, config.tile_m), ("k", k, config.tile_n))
    )
    for ragged, xs in ((config.ragged_q, (q, dout)), (config.ragged_k, (k, v))):
        for x in xs if ragged else ():
            assert x.stride(1) and (x.shape[0] == 1 or x.stride(0) % x.stride(1) == 0)
    for index in range(keys.count):
        of_k = keys.at(index)
        of_q = queries.at(queries.number_of(of_k.batch))
        for x in (dk, dv):
            x[of_k.entry, of_k.begin : of_k.begin + of_k.stored] = 0
        if of_k.used and of_q.used:
            multiply_sequence(config, tensors, (of_q, of_k), numbers, optional)


def multiply_sequence(config, tensors, places, numbers, optional):
    """The products of one sequence."""
    q, k, v, dout, lse2, delta, sums, dk, dv, *_ = tensors
    numbers = dict(zip(config.numbers, numbers, strict=True))
    of_q, of_k = places
    ratio, seqlen_q, seqlen_k = q.shape[2] // k.shape[2], of_q.used, of_k.used

    def rows(x, of):
        return x[of.entry, of.begin : of.begin + of.used].float().transpose(0, 1)

    qs, dos = rows(q, of_q), rows(dout, of_q)
    ks, vs = (rows(x, of_k).repeat_interleave(ratio, 0) for x in (k, v))
    first = of_q.slot * config.tile_m
    lse, d = (x[of_q.entry, :, first : first + seqlen_q, None] for x in (lse2, delta))
    scores, slope = numbers["scale"] * qs @ ks.mT, 1.0
    if config.softcap:
        capped = torch.tanh(numbers["cap_scale"] * qs @ ks.mT)
        scores, slope = numbers["cap"] * capped, 1 - capped.square()
    distance = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)
    if config.alibi:
        scores = scores - optional["alibi_slopes"][of_k.batch, :, None, None] * distance.abs()
    hidden = (distance < 0) & config.causal
    head, query, key = (torch.arange(n) for n in (q.shape[2], seqlen_q, seqlen_k))
    info = SeqlenInfo(seqlen_q, seqlen_k, of_q.begin * config.cu_q, of_k.begin * config.cu_k)
    aux = [optional[name] for name in config.optional_tensors if name.startswith(mods.AUX)]
    where = (of_k.batch, head[:, None, None], query[:, None], key, info, aux)
    score_mod, score_mod_bwd, mask_mod = (
        mods.function(key) for key in (config.score_mod, config.score_mod_bwd, config.mask_mod)
    )
    before = scores
    if score_mod is not None:
        scores = score_mod(scores, *where)
    if mask_mod is not None:
        hidden = hidden | ~torch.as_tensor(mask_mod(*where))
    if config.left:
        hidden = hidden | (distance > numbers["left"])
    if config.right:
        hidden = hidden | (-distance > numbers["right"])
    p = (scores - lse * 0.6931471805599453).masked_fill(hidden, -torch.inf).exp()
    ds = p * (dos @ vs.mT - d)
    if score_mod_bwd is not None:
        ds = score_mod_bwd(ds, before, *where).masked_fill(hidden | lse.isinf(), 0.0)
    ds = ds * slope
    for target, x, factor in ((dk, ds.mT @ qs, numbers["scale"]), (dv, p.mT @ dos, 1.0)):
        by_head = (factor * x).unflatten(0, (-1, ratio)).sum(1).transpose(0, 1)
        target[of_k.entry, of_k.begin : of_k.begin + seqlen_k] = by_head
    blocks = -(-seqlen_q // config.tile_m)
    padded = torch.zeros(sums.shape[1], blocks * config.tile_m, width_of(config))
    padded[:, :seqlen_q, : q.shape[3]] = ds @ ks
    at_queries, at_columns = order_of_sums(config)
    mine = sums[of_q.entry, :, of_q.slot : of_q.slot + blocks]
    parts = padded.unflatten(1, (-1, config.tile_m))[:, :, at_queries, at_columns]
    mine.copy_(parts if config.first_stores else mine + parts)
    if config.visits_checked and config.causal:  # what no tile visits nobody stores
        mine[:, : max(seqlen_q - seqlen_k, 0) // config.tile_m] = torch.nan


def finish(config, tensors, scale):
    """``passes.bwd_finish`` in torch."""
    sums, dq, *lengths = tensors
    check_rows(dq)
    n, visits = config.cu_q + config.used_q, None
    if config.checks:
        blocks = QueryBlocks(config.tile_m, config.tile_n, config.causal)
        visits = (blocks, keys_of(config, *lengths[n:]))
        lengths = lengths[:n]
    queries, columns = order_of_sums(config)
    rows = torch.empty(*sums.shape[:3], config.tile_m, config.tile_d)
    rows[:, :, :, queries, columns] = scale * sums
    found = np.full(dq.shape, np.nan, np.float32)
    to_rows(queries_of(config, dq, lengths), rows.flatten(2, 3).numpy(), found, visits)
    dq.copy_(torch.from_numpy(found))


def backward_on_cpu(dout, dlse, q, k, v, out, lse, *fields):
    """Do what the operator does with CUDA tensors."""
    return launch.backward_operator(dout, dlse, q, k, v, out, lse, *fields)


@contextlib.contextmanager
def stand_in():
    """CPU tensors for CUDA ones and torch for the kernels; yields the names of the kernels, in order of launches."""
    launched = []
    kernels = {PREPARE: prepare, FINISH: finish} | dict.fromkeys((NARROW, MIDDLE, WIDE), multiply)
    with stand_in_gpu(run_reference) as forwards, contextlib.ExitStack() as stack:
        forward_of = ops.CACHE.get

        def get(kernel, config, arch):
            if kernel not in kernels:
                return forward_of(kernel, config, arch)

            def launch(*arguments):
                launched.append(kernel)
                kernels[kernel](config, *arguments)

            return launch

        stack.enter_context(mock.patch.object(ops.CACHE, "get", get))
        stack.enter_context(mock.patch.object(ops, "_backward_launches", {}))
        library = stack.enter_context(torch.library._scoped_library("flash4", "IMPL"))
        library.impl("backward", backward_on_cpu, "CPU")
        yield launched
    assert forwards


@dataclass(frozen=True)
class Inputs:
    """Random inputs of one call, and a gradient of out."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def draw(cls, dtype=F16, heads=2, ratio=2, lengths=(70, 90), dims=(40, 24), batch=2):
        """Random normal tensors; q, k and v require gradients."""
        generator = torch.Generator().manual_seed(0)

        def new(*shape):
            return torch.randn(batch, *shape, generator=generator).to(dtype)

        shapes = ((lengths[0], heads * ratio, dims[0]), (lengths[1], heads, dims[0]))
        q, k, v = (new(*s).requires_grad_() for s in (*shapes, (*shapes[1][:2], dims[1])))
        return cls(q, k, v, new(*shapes[0][:2], dims[1]))

    @property
    def three(self):
        """q, k and v."""
        return self.q, self.k, self.v


KEYWORDS = (
    {},
    {"causal": True},
    {"causal": True, "softmax_scale": -0.2},
    {"softmax_scale": 0.0},
    {"window_size": (None, 0), "pack_gqa": True},
    {"window_size": (20, None)},
    {"deterministic": True},
)


@pytest.mark.parametrize("keywords", KEYWORDS, ids=str)
@pytest.mark.parametrize("dims", [(40, 24), (64, 64), (72, 96), (128, 128), (128, 8)], ids=str)
def test_gradients(dims, keywords):
    x = Inputs.draw(dims=dims)
    with stand_in() as launched:
        out = flash4.flash_attn_func(*x.three, **keywords)
        gradients = torch.autograd.grad(out, x.three, x.dout)
    assert launched == [PREPARE, NARROW, FINISH]
    assert_gradients_close(gradients, x.three, x.dout, **keywords)


def test_sums_that_no_tile_begins_are_refused():
    """Of more causal queries than keys the first see none: no tile would store what others add to."""
    x = Inputs.draw(lengths=(90, 70))
    options = options_of(*x.three, causal=True)
    problem = AttentionProblem.of_call(*x.three, options)
    plan = dispatch.plan_backward(problem, "sm_90a", WORKERS)
    assert plan.config.handed_out and not plan.config.first_stores
    config = replace(plan.config, first_stores=True)
    launch = ops.BackwardLaunch(None, None, None, config, 1, 2, WORKERS)
    with pytest.raises(ValueError, match="first_stores with 90 causal queries of 70 keys"):
        ops.launch_backward(launch, x.dout, None, x.three, x.dout, None, options)


@pytest.mark.parametrize(
    ("dims", "kernel"),
    [
        ((136, 64), MIDDLE), ((64, 256), WIDE), ((192, 128), MIDDLE), ((160, 160), MIDDLE),
        ((168, 136), WIDE), ((256, 256), WIDE),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_of_wide_heads(dims, kernel):
    x = Inputs.draw(dims=dims)
    with stand_in() as launched:
        out = flash4.flash_attn_func(*x.three, causal=True)
        gradients = torch.autograd.grad(out, x.three, x.dout)
    assert launched == [PREPARE, kernel, FINISH]
    assert_gradients_close(gradients, x.three, x.dout, causal=True)


@pytest.mark.parametrize("lengths", [(1, 1), (300, 90), (90, 300), (128, 128)], ids=str)
def test_lengths(lengths):
    """With rows that see no key among them."""
    x = Inputs.draw(lengths=lengths)
    with stand_in():
        out = flash4.flash_attn_func(*x.three, causal=True)
        gradients = torch.autograd.grad(out, x.three, x.dout)
    assert_gradients_close(gradients, x.three, x.dout, causal=True)


@pytest.mark.parametrize("losses", ["lse", "both", "sum of lse"])
def test_a_loss_on_the_log_sum_exp(losses):
    x = Inputs.draw(lengths=(90, 70))
    dlse = torch.randn(2, 4, 90)
    dlse = torch.ones(2, 4, 1).expand(2, 4, 90) if losses == "sum of lse" else dlse
    with stand_in():
        out, lse = flash4.flash_attn_func(*x.three, causal=True, return_lse=True)
        if losses == "both":
            gradients = torch.autograd.grad((out, lse), x.three, (x.dout, dlse))
        else:
            gradients = torch.autograd.grad(lse, x.three, dlse, allow_unused=True)
    dout = x.dout if losses == "both" else torch.zeros_like(x.dout)
    gradients = [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, x.three)]
    assert_gradients_close(gradients, x.three, dout, dlse=dlse, causal=True)


def douts():
    """Gradients of an out of (2, 70, 4, 24), as losses and layers around it make them."""
    contiguous = torch.randn(2, 70, 4, 24).half()
    return {
        "sum": torch.ones(()).half().expand(2, 70, 4, 24),
        "mean over queries": contiguous[:, :1].expand(2, 70, 4, 24),
        "mean over heads": contiguous[:, :, :1].expand(2, 70, 4, 24),
        "heads first": contiguous.transpose(1, 2).contiguous().transpose(1, 2),
        "head dim first": contiguous.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
        "cut from rows": torch.randn(2, 70, 4, 33).half()[..., 5:29],
        "every second": torch.randn(2, 140, 4, 24).half()[:, ::2],
        "backwards heads": contiguous.flip(2),
    }


@pytest.mark.parametrize("name", douts())
def test_gradients_of_out_lie_anyhow(name):
    x, dout = Inputs.draw(), douts()[name]
    with stand_in():
        out = flash4.flash_attn_func(*x.three)
        gradients = torch.autograd.grad(out, x.three, dout)
    assert_gradients_close(gradients, x.three, dout)


def test_only_what_tma_cannot_address_is_copied():
    copied = {}
    for name, dout in douts().items():
        copied[name] = ops.addressable(dout).data_ptr() != dout.data_ptr()
    assert {name for name, yes in copied.items() if yes} == {
        "sum",
        "head dim first",
        "cut from rows",
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_lie_anyhow(layout):
    x = LAYOUTS[layout][0]
    q, k, v = (x.detach().requires_grad_() for _ in range(3))
    with stand_in():
        out = flash4.flash_attn_func(q, k, v)
        dout = torch.randn(out.shape).to(out.dtype)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    assert_gradients_close(gradients, (q, k, v), dout)


@pytest.mark.parametrize("wanted", range(1, 8))
def test_only_what_is_asked_for_comes_back(wanted):
    x = Inputs.draw()
    for i, tensor in enumerate(x.three):
        tensor.requires_grad_(bool(wanted >> i & 1))
    with stand_in():
        flash4.flash_attn_func(*x.three).backward(x.dout)
    assert [t.grad is not None for t in x.three] == [bool(wanted >> i & 1) for i in range(3)]
    gradients = [t.grad for t in x.three]
    assert_gradients_close(gradients, x.three, x.dout)


@pytest.mark.parametrize("empty", ["batch", "heads", "seqlen_q", "seqlen_k"])
def test_empty_problems(empty):
    sizes = dict(batch=2, heads=2, seqlen_q=5, seqlen_k=7) | {empty: 0}
    q = torch.randn(sizes["batch"], sizes["seqlen_q"], sizes["heads"], 8).half()
    k = torch.randn(sizes["batch"], sizes["seqlen_k"], sizes["heads"], 8).half()
    inputs = [x.requires_grad_() for x in (q, k, k.clone())]
    with stand_in_gpu():
        library = torch.library._scoped_library("flash4", "IMPL")
        with library as scope, mock.patch.object(ops, "_backward_launches", {}):
            scope.impl("backward", backward_on_cpu, "CPU")
            flash4.flash_attn_func(*inputs).sum().backward()
    assert all(x.grad.shape == x.shape and not x.grad.any() for x in inputs)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    x = Inputs.draw()

    def block(q, k, v):
        return flash4.flash_attn_func(2 * q, k, v, causal=True)

    with stand_in():
        expected = torch.autograd.grad(block(*x.three), x.three, x.dout)
        checkpoint(block, *x.three, use_reentrant=reentrant).backward(x.dout)
    for tensor, gradient in zip(x.three, expected, strict=True):
        assert torch.equal(tensor.grad, gradient)


def test_a_graph_can_be_kept():
    x = Inputs.draw()
    with stand_in():
        out = flash4.flash_attn_func(*x.three)
        first = torch.autograd.grad(out, x.three, x.dout, retain_graph=True)
        second = torch.autograd.grad(out, x.three, x.dout)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("changed", ["q", "out"])
def test_changes_in_place_are_noticed(changed):
    x = Inputs.draw()
    with stand_in():
        out = flash4.flash_attn_func(*x.three)
        with torch.no_grad():
            (x.q if changed == "q" else out).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, x.three, x.dout)


def test_second_derivatives_are_refused():
    x = Inputs.draw()
    with stand_in():
        out = flash4.flash_attn_func(*x.three)
        (dq, *_) = torch.autograd.grad(out, x.three, x.dout, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives.*create_graph"):
            dq.sum().backward()


FEATURES = {
    "window": {"window_size": (20, 9)},
    "causal window": {"window_size": (20, None), "causal": True},
    "window at the right": {"window_size": (None, 0)},
    "softcap": {"softcap": 3.0},
    "softcap, negative scale": {"softcap": 3.0, "softmax_scale": -0.3, "causal": True},
    "alibi": {"alibi_slopes": torch.linspace(0.01, 0.3, 4).half()},
    "alibi by batch": {"alibi_slopes": torch.linspace(0.01, 0.3, 8).view(2, 4), "causal": True},
    "all": {
        "window_size": (30, 20),
        "softcap": 5.0,
        "alibi_slopes": torch.linspace(0.01, 0.3, 4),
        "learnable_sink": torch.linspace(-1, 1, 4),
    },
}


@pytest.mark.parametrize("name", FEATURES)
def test_gradients_of_features(name):
    x, keywords = Inputs.draw(lengths=(90, 70)), FEATURES[name]
    with stand_in():
        out = flash4.flash_attn_func(*x.three, **keywords)
        gradients = torch.autograd.grad(out, x.three, x.dout)
    assert_gradients_close(gradients, x.three, x.dout, **keywords)


def test_rows_whose_lse_is_very_negative():
    x = Inputs.draw(lengths=(70, 90), dims=(64, 64))
    three = [t.detach() for t in x.three]
    three = [(5 * t.abs()).requires_grad_() for t in three[:2]] + [three[2].requires_grad_()]
    with stand_in():
        out, lse = flash4.flash_attn_func(*three, softmax_scale=-1.0, return_lse=True)
        gradients = torch.autograd.grad(out, three, x.dout[..., :64])
    assert lse.max() < -500
    assert_gradients_close(gradients, three, x.dout, softmax_scale=-1.0)


SINKS = {
    "some": torch.linspace(-2, 2, 4),
    "far above and below": torch.tensor([-1000.0, -30.0, 30.0, 1000.0]),
    "none": torch.full((4,), -torch.inf),
    "float16": torch.linspace(-2, 2, 4).half(),
}


@pytest.mark.parametrize("loss", ["out", "both"])
@pytest.mark.parametrize("name", SINKS)
def test_gradients_of_sinks(name, loss):
    """With rows that see no key, whose log-sum-exp is the sink."""
    x, sink = Inputs.draw(lengths=(90, 70)), SINKS[name].clone().requires_grad_()
    dlse = torch.randn(2, 4, 90) if loss == "both" else None
    with stand_in():
        out, lse = flash4.flash_attn_func(
            *x.three, causal=True, learnable_sink=sink, return_lse=True
        )
        outputs, grads = ((out, lse), (x.dout, dlse)) if loss == "both" else (out, x.dout)
        gradients = torch.autograd.grad(outputs, (*x.three, sink), grads)
    assert gradients[3].dtype == sink.dtype
    keywords = {"causal": True, "learnable_sink": sink.detach()}
    assert_gradients_close(gradients, x.three, x.dout, dlse=dlse, **keywords)


def test_only_the_sink_needs_a_gradient():
    x, sink = Inputs.draw(), torch.zeros(4, requires_grad=True)
    inputs = [t.detach() for t in x.three]
    with stand_in():
        flash4.flash_attn_func(*inputs, learnable_sink=sink).backward(x.dout)
    gradients = (None, None, None, sink.grad)
    assert_gradients_close(gradients, inputs, x.dout, learnable_sink=sink.detach())


def test_the_sink_of_a_call_without_keys():
    q = torch.randn(2, 5, 4, 8).half().requires_grad_()
    kv, sink = torch.randn(2, 0, 4, 8).half(), torch.zeros(4, requires_grad=True)
    dlse = torch.randn(2, 4, 5)
    with stand_in_gpu(), mock.patch.object(ops, "_backward_launches", {}):
        with torch.library._scoped_library("flash4", "IMPL") as library:
            library.impl("backward", backward_on_cpu, "CPU")
            _, lse = flash4.flash_attn_func(q, kv, kv, learnable_sink=sink, return_lse=True)
            dq, dsink = torch.autograd.grad(lse, (q, sink), dlse)
    assert not dq.any()
    torch.testing.assert_close(dsink, dlse.sum((0, 2)))


MODS = {
    "mask": {"mask_mod": strategies.dilated, "causal": True},
    "score": {"score_mod": strategies.bent, "score_mod_bwd": strategies.bent_bwd},
    "both, with tensors": {
        "score_mod": strategies.bias_of_heads,
        "score_mod_bwd": strategies.bias_of_heads_bwd,
        "mask_mod": strategies.same_document,
        "aux_tensors": [torch.randn(8, 4).t(), torch.arange(180).view(2, 90) // 40],
    },
    "cap, slopes and window": {
        "score_mod": strategies.bent,
        "score_mod_bwd": strategies.bent_bwd,
        "softcap": 3.0,
        "alibi_slopes": torch.linspace(0.01, 0.3, 4),
        "window_size": (40, 10),
        "learnable_sink": torch.zeros(4),
    },
}


@pytest.mark.parametrize("dims", [(64, 64), (40, 24), (192, 128)], ids=str)
@pytest.mark.parametrize("name", MODS)
def test_gradients_of_mods(name, dims):
    x, keywords = Inputs.draw(lengths=(90, 70), dims=dims), MODS[name]
    with stand_in():
        for _ in range(2):  # the second one finds its launches
            out = flash4.flash_attn_func(*x.three, **keywords)
            gradients = torch.autograd.grad(out, x.three, x.dout)
    assert_gradients_close(gradients, x.three, x.dout, **keywords)


def clipped_bwd(grad, score, *_):
    """No derivative, but what a caller wants for one; not linear in the gradient."""
    return grad * (1 + grad * grad)


def test_what_score_mod_bwd_makes_of_gradients_is_up_to_the_caller():
    x, keywords = Inputs.draw(), {"score_mod": strategies.bent, "score_mod_bwd": clipped_bwd}
    with stand_in():
        out = flash4.flash_attn_func(*x.three, **keywords)
        gradients = torch.autograd.grad(out, x.three, x.dout)
    assert_gradients_close(gradients, x.three, x.dout, **keywords)


def test_mods_are_told_apart_in_the_backward():
    """By numbers that they close over, the derivative's too."""
    x, found = Inputs.draw(), []
    with stand_in():
        for factor, slope in ((1.0, 1.0), (0.5, 0.5), (0.5, 1.0), (1.0, 1.0)):
            keywords = {
                "score_mod": lambda score, *_: score * factor,  # noqa: B023
                "score_mod_bwd": lambda grad, *_: grad * slope,  # noqa: B023
            }
            out = flash4.flash_attn_func(*x.three, **keywords)
            found.append(torch.autograd.grad(out, x.three, x.dout))
            assert_gradients_close(found[-1], x.three, x.dout, **keywords)
    assert torch.equal(found[2][0] / 2, found[1][0]) or not torch.equal(found[2][0], found[1][0])
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[3], strict=True))


def test_a_score_mod_without_a_derivative_is_refused_by_the_forward():
    """With what to pass; without gradients it needs none."""
    x, said = Inputs.draw(), r"pass score_mod_bwd\(grad, score, batch, .*no_grad"
    with stand_in_gpu(run=lambda launch: None):
        for function in (flash4.flash_attn_func, flash4.flash_attn_varlen_func):
            with pytest.raises(ValueError, match=said):
                function(*x.three, score_mod=strategies.bent)
            with torch.no_grad():
                function(*x.three, score_mod=strategies.bent)
            function(*(t.detach() for t in x.three), score_mod=strategies.bent)
    with pytest.raises(NotImplementedError, match="pass score_mod_bwd"):
        flash4.explain(*x.three, backward=True, score_mod=strategies.bent)


def test_a_derivative_of_nothing_is_refused():
    x = Inputs.draw()
    with stand_in_gpu(run=lambda launch: None):
        with pytest.raises(ValueError, match="score_mod_bwd is the derivative of score_mod"):
            flash4.flash_attn_func(*x.three, score_mod_bwd=strategies.bent_bwd)


@pytest.mark.parametrize("alone", [False, True])
def test_gradients_of_what_mods_read_are_refused(alone):
    """Whoever else needs gradients."""
    x, keywords = Inputs.draw(), dict(MODS["both, with tensors"])
    aux = keywords["aux_tensors"]
    keywords["aux_tensors"] = [aux[0].clone().requires_grad_(), aux[1]]
    inputs = [t.detach() for t in x.three] if alone else x.three
    with stand_in_gpu(run=lambda launch: None):
        with pytest.raises(NotImplementedError, match=r"aux_tensors\[0\] are not built.*detach"):
            flash4.flash_attn_func(*inputs, **keywords)
        with torch.no_grad():
            flash4.flash_attn_func(*inputs, **keywords)


def test_changes_in_place_of_what_mods_read_are_noticed():
    x, keywords = Inputs.draw(), dict(MODS["both, with tensors"])
    keywords["aux_tensors"] = [t.clone() for t in keywords["aux_tensors"]]
    with stand_in():
        out = flash4.flash_attn_func(*x.three, **keywords)
        keywords["aux_tensors"][0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, x.three, x.dout)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_of_mods(reentrant):
    x, keywords = Inputs.draw(), MODS["both, with tensors"]

    def block(q, k, v):
        return flash4.flash_attn_func(2 * q, k, v, **keywords)

    with stand_in():
        expected = torch.autograd.grad(block(*x.three), x.three, x.dout)
        checkpoint(block, *x.three, use_reentrant=reentrant).backward(x.dout)
    for tensor, gradient in zip(x.three, expected, strict=True):
        assert torch.equal(tensor.grad, gradient)


def test_gradients_of_slopes_are_refused():
    x, slopes = Inputs.draw(), torch.ones(4, requires_grad=True)
    with stand_in_gpu(run=lambda launch: None):
        with pytest.raises(NotImplementedError, match="alibi_slopes are not built.*detach"):
            flash4.flash_attn_func(*x.three, alibi_slopes=slopes)
        flash4.flash_attn_func(*x.three, alibi_slopes=slopes.detach())


@pytest.mark.parametrize("asked", ["True", "by torch", "False although torch", "None"])
def test_deterministic_gradients(asked):
    """What is asked for when the forward is called holds for its backward."""
    x, wanted = Inputs.draw(), {"True": True, "False although torch": False}.get(asked)
    torchs = "torch" in asked
    with stand_in(), mock.patch.object(ops.CACHE, "get", wraps=ops.CACHE.get) as get:
        with mock.patch.object(torch, "are_deterministic_algorithms_enabled", lambda: torchs):
            out = flash4.flash_attn_func(*x.three, deterministic=wanted, causal=True)
        gradients = torch.autograd.grad(out, x.three, x.dout)
    assert_gradients_close(gradients, x.three, x.dout, causal=True)
    configs = {call.args[0]: call.args[1] for call in get.call_args_list}
    ordered = asked in ("True", "by torch")
    assert configs[NARROW].ordered == ordered
    assert configs[PREPARE].turns == configs[NARROW].turns
    assert ordered <= configs[PREPARE].turns


@pytest.mark.parametrize("layout", LAYOUTS)
def test_real_and_fake_gradients_agree(layout):
    x = LAYOUTS[layout][0]
    real = ops.empty_gradients(x, x, x)
    with FakeTensorMode() as mode:
        q = mode.from_tensor(x)
        out, lse = ops.empty_output(q, q.shape[-1]), ops.empty_lse(q)
        *fake, dsink = ops.backward(out, None, q, q, q, out, lse, 0.125, True)
    assert dsink.shape == (0,)
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.stride(), r.dtype) == (
            f.shape,
            f.stride(),
            f.dtype,
        ) and r.shape == x.shape


def test_the_operator_is_registered_as_torch_expects():
    x = Inputs.draw(dims=(64, 64))
    q, k, v = (t.detach() for t in x.three)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    with stand_in():
        out, lse = flash4.flash_attn_func(q, k, v, return_lse=True)
        for dlse, sink in ((None, None), (torch.randn_like(lse), torch.zeros(4))):
            call = (x.dout, dlse, q, k, v, out, lse, 0.125, True, 30, -1, 3.0, sink)
            torch.library.opcheck(ops.backward, call, test_utils=tests)
        torch.library.opcheck(ops.forward, (*x.three, 0.125, True, None))
        keywords = MODS["both, with tensors"]
        options = options_of(*x.three, **keywords)
        torch.library.opcheck(ops.forward, (*x.three, *options), test_utils=tests)
        call = (x.dout, None, q, k, v, out, lse, *ops.backward_fields(options))
        torch.library.opcheck(ops.backward, call, test_utils=tests)


def test_torch_compile_differentiates():
    """The operator itself: while tracing, nobody takes a CPU tensor for one on a GPU."""
    x = Inputs.draw()

    def loss(q, k, v):
        return ops.forward(2 * q, k, v, 0.125, True)[0]

    with stand_in():
        expected = torch.autograd.grad(loss(*x.three), x.three, x.dout)
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        gradients = torch.autograd.grad(compiled(*x.three), x.three, x.dout)
    for got, wanted in zip(gradients, expected, strict=True):
        assert torch.equal(got, wanted)


def test_plans_explain_themselves():
    q = torch.empty(2, 4096, 16, 128, dtype=BF16, device="meta")
    kv = torch.empty(2, 1000, 4, 128, dtype=BF16, device="meta")
    plan = flash4.explain(q, kv, kv, causal=True, backward=True)
    text = str(plan)
    for part in ("sm90-bwd", "causal", "64 tiles of 128 keys", str(plan.workspace_bytes)):
        assert part in text
    blocks = -(-4096 // plan.config.tile_m)
    assert not plan.config.turns  # they would be two more numbers a block
    assert plan.workspace_bytes == 4 * 2 * 16 * blocks * plan.config.tile_m * (128 + 2)
    assert hash(plan) == hash(flash4.explain(q, kv, kv, causal=True, backward=True))
    with pytest.raises(NotImplementedError, match="runs on sm_90a, not sm_70"):
        flash4.explain(q, kv, kv, backward=True, arch="sm_70")
    with pytest.raises(ValueError, match="empty"):
        flash4.explain(q[:0], kv[:0], kv[:0], backward=True)


def test_too_many_tiles_are_refused():
    problem = AttentionProblem(BF16, 2**21, 2**17, 2**17, 8, 8, 64, 64)
    with pytest.raises(NotImplementedError, match="split the batch"):
        dispatch.plan_backward(problem, "sm_90a", WORKERS)


def test_the_reference_has_the_same_gradients_as_the_stand_in():
    """Of a problem so small that the formulas can be compared without tolerances for rounding."""
    x = Inputs.draw(lengths=(3, 4), dims=(8, 8), ratio=1)
    with stand_in():
        out = flash4.flash_attn_func(*x.three)
        gradients = torch.autograd.grad(out, x.three, x.dout)
    expected = reference.attention_gradients(*(t.detach() for t in x.three), x.dout)
    for got, wanted in zip(gradients, expected, strict=False):
        torch.testing.assert_close(got.double(), wanted, atol=4e-3, rtol=4e-3)
