"""Gradients through the public functions, without a GPU: autograd, layouts, and everything around the kernels."""

import contextlib
import functools
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import flash4
from flash4 import dispatch, launch, ops, reference
from flash4.common.launch_facts import WORDS
from flash4.interface import options_of
from flash4.passes.bwd_config import FINISH, PREPARE, WHOLE
from flash4.problem import AttentionProblem
from tests import strategies
from tests.checks import assert_gradients_close
from tests.host.backward_kernels import check_rows, finish, multiply, prepare
from tests.host.test_dispatch import LAYOUTS, run_reference, stand_in_gpu

F16, BF16 = torch.float16, torch.bfloat16
WORKERS = 132
NARROW, WIDE = "flash4.sm90.bwd:BackwardSm90", "flash4.sm90.bwd_wide:WideBackwardSm90"
MIDDLE = "flash4.sm90.bwd_192:Backward192Sm90"


def refuse_what_kernels_do(tensors):
    """Raise as the compiled function does, before it launches anything."""
    *rows, workspace = (x for i, x in enumerate(tensors[:10]) if i != 5)
    try:
        check_rows(*rows)
    except AssertionError as error:
        raise ValueError(str(error)) from error
    assert tensors[5].stride(-1) == 1 and workspace.data_ptr() % 16 == 0


def whole_backward(config, launched, tensors, numbers, section):
    """``passes.bwd_whole`` in torch, with a workspace that holds NaN."""
    refuse_what_kernels_do(tensors)
    workspace, at = tensors[9].fill_(torch.nan), []

    def view(name, first, shape):
        part = workspace[first:][: int(np.prod(shape))].view(shape)
        at.append((part.data_ptr(), part.numel()))
        return part.view(torch.int32) if name in WORDS else part

    of_prepare, of_main, of_finish = config.parts(tensors, (numbers, section), view)
    ends = [begin + 4 * count for begin, count in at]
    assert all(end <= begin for end, (begin, _) in zip(ends, at[1:], strict=False))
    assert ends[-1] <= workspace.data_ptr() + 4 * workspace.numel(), "they must fit"
    before, after = config.passes
    launched += [PREPARE, config.kernel, FINISH]
    prepare(before, of_prepare)
    multiply(config.main, of_main, numbers, section)
    finish(after, of_finish, numbers[0])


def backward_on_cpu(dout, dlse, q, k, v, out, lse, *fields):
    """Do what the operator does with CUDA tensors."""
    return launch.backward_operator(dout, dlse, q, k, v, out, lse, *fields)


@contextlib.contextmanager
def stand_in():
    """CPU tensors for CUDA ones and torch for the kernels; yields the names of the kernels, in order of launches."""
    launched = []
    with stand_in_gpu(run_reference) as forwards, contextlib.ExitStack() as stack:
        forward_of = ops.CACHE.get

        def get(kernel, config, arch):
            if kernel == WHOLE:
                return functools.partial(whole_backward, config, launched)
            return forward_of(kernel, config, arch)

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
    launch = ops.BackwardLaunch(None, config, 1, (2, 1), WORKERS)
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
    (config,) = (call.args[1] for call in get.call_args_list if call.args[0] == WHOLE)
    ordered, (before, _) = asked in ("True", "by torch"), config.passes
    assert config.main.ordered == ordered and before.turns == config.main.turns
    assert ordered <= before.turns


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
    counter = 32 * plan.config.handed_out
    assert plan.workspace_bytes == 4 * (2 * 16 * blocks * plan.config.tile_m * (128 + 2) + counter)
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
