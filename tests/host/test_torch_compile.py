"""Whole models under torch.compile: one graph, gradients, symbolic sizes, checkpointing, and mods."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import flash4
from flash4 import interface, ops, sdpa
from flash4.common import mods
from flash4.problem import CallOptions
from tests.host.test_backward_ops import stand_in
from tests.host.test_dispatch import LAYOUTS, stand_in_gpu

F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextlib.contextmanager
def gpu():
    """Kernels in torch, and CPU tensors taken for CUDA ones while tracing too."""
    with stand_in() as launched, mock.patch.object(interface, "_check_device", lambda q: None):
        yield launched


class Block(torch.nn.Module):
    """A transformer block; ``kind`` says by which function it attends."""

    def __init__(self, kind, checkpointed=False, width=32, heads=4):
        super().__init__()
        self.kind, self.heads, self.checkpointed = kind, heads, checkpointed
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)

    def attend(self, x):
        q, k, v = self.qkv(self.norm(x)).to(F16).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if self.kind == "dense":
            out = flash4.flash_attn_func(q, k, v, causal=True)
        elif self.kind == "lse":
            out, lse = flash4.flash_attn_func(q, k, v, window_size=(7, 3), return_lse=True)
            out = out * torch.sigmoid(lse).transpose(1, 2)[..., None].to(F16)
        else:
            raise ValueError(self.kind)
        return self.out(out.flatten(2).float())

    def forward(self, x):
        if self.checkpointed:
            return x + checkpoint(self.attend, x, use_reentrant=False)
        return x + self.attend(x)


def run(model, reference, sizes):
    """Outputs and gradients of both, side by side."""
    for batch, seqlen in sizes:
        x = torch.randn(batch, seqlen, 32, generator=torch.Generator().manual_seed(seqlen))
        outs, gradients = [], []
        for one in (model, reference):
            y = x.clone().requires_grad_()
            outs.append(one(y))
            gradients.append(
                torch.autograd.grad(outs[-1].square().sum(), [y, *reference.parameters()])
            )
        torch.testing.assert_close(*outs, rtol=1e-3, atol=1e-3)
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["dense", "lse"])
def test_a_transformer_block(kind, checkpointed, dynamic):
    torch.manual_seed(0)
    reference = Block(kind, checkpointed)
    counter = CompileCounterWithBackend("aot_eager_decomp_partition")
    model = torch.compile(reference, fullgraph=True, dynamic=dynamic, backend=counter)
    sizes = [(2, 20), (3, 33), (2, 47)] if dynamic else [(2, 20)]
    with gpu() as launched:
        run(model, reference, sizes[:1])
        compiled = counter.frame_count
        run(model, reference, sizes[1:])
    assert counter.frame_count == compiled, "a graph serves all sizes"
    assert len(launched) == 6 * len(sizes)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "kv"])
def test_gradients_of_some_inputs(wanted):
    """As under FSDP, which freezes parts of a model."""
    given = {name: torch.randn(2, 20, 4, 32).half() for name in "qkv"}
    for name in wanted:
        given[name].requires_grad_()

    def loss(q, k, v):
        return flash4.flash_attn_func(q, k, v, causal=True).float().square().sum()

    asked = [given[name] for name in wanted]
    with gpu():
        expected = torch.autograd.grad(loss(**given), asked)
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for a, b in zip(torch.autograd.grad(compiled(**given), asked), expected, strict=True):
            assert torch.equal(a, b)


def test_marked_dimensions_stay_symbolic():
    def attend(q, k):
        return flash4.flash_attn_func(q, k, k, softcap=2.0, return_lse=True)

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    with gpu():
        for batch, seqlen in ((2, 20), (3, 40), (5, 17)):
            q, k = torch.randn(batch, seqlen, 4, 32).half(), torch.randn(batch, 30, 2, 32).half()
            for x, dims in ((q, (0, 1)), (k, (0,))):
                for dim in dims:
                    torch._dynamo.mark_dynamic(x, dim)
            for a, b in zip(compiled(q, k), attend(q, k), strict=True):
                assert torch.equal(a, b)
    assert counter.frame_count == 1


def test_tensors_as_longest_lengths_neither_sync_nor_compile_again():
    def attend(q, lengths, longest):
        return flash4.flash_attn_varlen_func(
            q, q, q, lengths, lengths, longest, longest, causal=True
        )

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    with FakeTensorMode():
        q = torch.empty(50, 4, 64, dtype=BF16, device="cuda")
        lengths = torch.empty(4, dtype=torch.int32, device="cuda")
        for device in ("cuda", "cuda", "cpu"):  # reading a fake tensor's value raises
            compiled(q, lengths, torch.empty((), dtype=torch.int32, device=device))
    assert counter.frame_count <= 2, "once for each device"


FACTOR = 0.5


def by_number(score, *_):
    return score * FACTOR


def by_default(score, *_, factor=0.25):
    return score * factor


def by_closure(factor):
    def mod(score, *_):
        return score * factor

    def change(value):
        nonlocal factor
        factor = value

    return mod, change


def helper(score):
    return score * FACTOR


def by_helper(score, *_):
    return helper(score)


def compiled_keys(attend):
    """A compiled function, and a list of the keys of mods in its graphs."""
    keys = []

    def backend(module, inputs):
        (call,) = [n for n in module.graph.nodes if "flash4" in str(n.target)]
        options = dict(zip(CallOptions._fields, call.args[3:], strict=False))
        keys.append((options.get("score_mod", 0), options.get("mask_mod", 0)))
        return module

    return torch.compile(attend, fullgraph=True, backend=backend), keys


def fake(*shape):
    return torch.empty(*shape, dtype=BF16, device="cuda")


@pytest.mark.parametrize("name", ["number", "default", "closure", "partial", "lambda"])
def test_mods_are_part_of_the_graph(name, monkeypatch):
    """Compiled again when a number changes that the mod reads."""
    mod, change = by_closure(0.5)
    mod = {
        "number": by_number,
        "default": by_default,
        "closure": mod,
        "partial": functools.partial(by_default, factor=0.1),
        "lambda": lambda score, *_: score + 1,
    }[name]
    compiled, keys = compiled_keys(lambda q, m: flash4.flash_attn_func(q, q, q, score_mod=m))
    with FakeTensorMode():
        q = fake(2, 20, 4, 64)
        expected = []
        for value in (0.5, 0.7, 0.7, 0.9):
            change(value)
            monkeypatch.setitem(globals(), "FACTOR", value)
            compiled(q, mod)
            expected.append((mods.register(mod), 0))
            assert keys[-1] == expected[-1]
    assert len(keys) == len({*expected}) == (3 if name in ("number", "closure") else 1)


def test_derivatives_are_part_of_the_graph():
    """Compiled again when a number changes that the derivative reads."""
    derivative, change = by_closure(0.5)
    seen = []

    def backend(module, inputs):
        (node,) = [n for n in module.graph.nodes if "flash4" in str(n.target)]
        seen.append(dict(zip(CallOptions._fields, node.args[3:], strict=False))["score_mod_bwd"])
        return module

    def attend(q, bwd):
        return flash4.flash_attn_func(q, q, q, score_mod=by_default, score_mod_bwd=bwd)

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    with FakeTensorMode():
        for value in (0.5, 0.7, 0.7):
            change(value)
            compiled(fake(2, 20, 4, 64), derivative)
            assert seen[-1] == mods.register(derivative)
    assert len(seen) == 2


def test_mods_made_within_the_graph():
    """From numbers that the graph is made for; a symbolic one is refused."""

    def attend(q, width):
        def mask(b, h, q_idx, kv_idx, info, aux):
            return q_idx - kv_idx < width

        return flash4.flash_attn_func(q, q, q, mask_mod=mask)

    compiled, keys = compiled_keys(attend)
    with FakeTensorMode():
        compiled(fake(2, 20, 4, 64), 3)
        with pytest.raises(Exception, match="closure cell"):
            compiled(fake(2, 20, 4, 64), 5)
    assert len(keys) == 1 and keys[0][1]


@pytest.mark.parametrize(
    "mod", [by_helper, functools.partial(by_number)], ids=["helper", "partial"]
)
def test_mods_whose_numbers_cannot_be_watched_are_refused(mod):
    compiled, _ = compiled_keys(lambda q, m: flash4.flash_attn_func(q, q, q, score_mod=m))
    with FakeTensorMode(), pytest.raises(Exception, match="torch.compile would not see it change"):
        compiled(fake(2, 20, 4, 64), mod)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("head_dim", [32, 256, 264])
def test_sdpa_with_gradients(head_dim, dynamic):
    """By flash4 where it has them, else by torch; decided while tracing."""

    def attend(q, k, v):
        return flash4.scaled_dot_product_attention(q * 2, k, v, is_causal=True)

    def obstacle(q, k, v, given):  # CPU tensors taken for CUDA ones
        return sdpa._misfit(q, k, v, given, sdpa._wants_gradients(q, k, v))

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter, dynamic=dynamic)
    with gpu() as launched, mock.patch.object(sdpa, "_obstacle", obstacle):
        for n in (20, 33) if dynamic else (20,):
            inputs = [torch.randn(2, 4, n, head_dim).half().requires_grad_() for n in (n, 40, 40)]
            dout = torch.randn(2, 4, n, head_dim).half()
            expected = torch.autograd.grad(attend(*inputs), inputs, dout)
            found = torch.autograd.grad(compiled(*inputs), inputs, dout)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        assert bool(launched) == (head_dim <= 256)
        if not launched:
            x = torch.zeros(1, 8, 1, 64, dtype=F16)
            flash4.flash_attn_func(x, x, x)  # which the stand-in wants to see
    assert counter.frame_count <= 2


VARLEN_LAYOUTS = {
    "contiguous": lambda x: x,
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "interleaved": lambda x: torch.stack([x, x], 1)[:, 0],
    "padded": lambda x: torch.nn.functional.pad(x, (0, 8))[..., : x.shape[-1]],
}


@pytest.mark.parametrize("layout", VARLEN_LAYOUTS)
@pytest.mark.parametrize("packed", ["both", "queries", "keys"])
def test_packed_outputs_real_and_fake_agree(layout, packed):
    """Shapes, dtypes and strides, by torch's own check too."""
    change = VARLEN_LAYOUTS[layout]
    lengths = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    q, k, v = (torch.randn(20, 4, 32).half() for _ in range(3))
    given = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
    if packed == "keys":
        q = torch.randn(3, 9, 4, 32).half()
        given.pop("cu_seqlens_q")
    if packed == "queries":
        k, v = (torch.randn(3, 9, 4, 32).half() for _ in range(2))
        given.pop("cu_seqlens_k")
    q, k, v = (change(x) if x.ndim == 3 else x for x in (q, k, v))
    options = CallOptions(0.125, True, **given)
    with stand_in_gpu(run=lambda launch: None):
        real = ops.forward(q, k, v, *options)
        torch.library.opcheck(
            ops.forward, (q, k, v, *options), test_utils=("test_schema", "test_faketensor")
        )
    with FakeTensorMode() as mode:
        moved = [mode.from_tensor(x) if torch.is_tensor(x) else x for x in options]
        found = ops.forward(*(mode.from_tensor(x) for x in (q, k, v)), *moved)
    for r, f in zip(real, found, strict=True):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_short_way_gives_what_the_fakes_promise(layout, lse):
    x = LAYOUTS[layout][0]
    with stand_in_gpu(run=lambda launch: None):
        found = [flash4.flash_attn_func(x, x, x, return_lse=True) for _ in range(2)][lse]
    with FakeTensorMode() as mode:
        y = mode.from_tensor(x)
        promised = ops.forward(y, y, y, 0.125)
    for r, f in zip(found, promised, strict=True):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)
