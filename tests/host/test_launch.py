"""The short way of a call like one before: the same results and launches as the long way, and who must not take it."""

import contextlib
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flash4
from flash4 import interface, launch, ops
from tests.checks import assert_gradients_close
from tests.host.test_backward_ops import MIDDLE, NARROW, WIDE, Inputs, stand_in
from tests.host.test_dispatch import stand_in_gpu

F16, BF16 = torch.float16, torch.bfloat16


@contextlib.contextmanager
def count_long_ways():
    """A mock of what every call on the long way is checked by."""
    with mock.patch.object(interface, "_options", wraps=interface._options) as checks:
        yield checks


def draw(*shape, dtype=F16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (30, 4)},
    "cap and scale": {"softcap": 3.0, "softmax_scale": -0.3},
    "sink": {"learnable_sink": draw(4).float()},
    "slopes": {"alibi_slopes": draw(2, 4).float().abs()},
    "both": {"learnable_sink": draw(4).float(), "alibi_slopes": draw(2, 4).float()},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("wants_lse", [False, True])
@pytest.mark.parametrize("name", FEATURES)
def test_the_second_call_takes_the_short_way_to_the_same_result(name, wants_lse):
    q, k, v = draw(2, 70, 4, 40), draw(2, 90, 2, 40), draw(2, 90, 2, 24)
    with stand_in_gpu() as launches, count_long_ways() as checks:
        results = [
            flash4.flash_attn_func(q, k, v, return_lse=wants_lse, **FEATURES[name])
            for _ in range(3)
        ]
    assert checks.call_count == 1
    first, *others = ((x,) if torch.is_tensor(x) else x for x in results)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype
            assert a.data_ptr() != b.data_ptr()
    facts = [
        (x.config, x.numbers, x.section, x.workers, [(t.shape, t.stride()) for t in x.tensors])
        for x in launches
    ]
    assert facts[0] == facts[1] == facts[2]


@pytest.mark.parametrize(
    ("dims", "kernel"), [((40, 24), NARROW), ((192, 128), MIDDLE), ((192, 192), WIDE)]
)
@pytest.mark.parametrize("name", FEATURES)
def test_gradients_of_the_second_call(name, dims, kernel):
    """Those of sinks go the long way, after a short one of the forward."""
    x, keywords = Inputs.draw(dims=dims), FEATURES[name]
    with stand_in() as launched:
        found = []
        for _ in range(3):
            out = flash4.flash_attn_func(*x.three, **keywords)
            found.append(torch.autograd.grad(out, x.three, x.dout))
    kinds = {kind: launched.count(kind) for kind in launched}
    assert kinds[kernel] == 3 and len(kinds) >= 2 and set(kinds.values()) == {3}, kinds
    for gradients in found:
        assert_gradients_close(gradients, x.three, x.dout, **keywords)
        for a, b in zip(gradients, found[0], strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()


@contextlib.contextmanager
def names_of_calls():
    """Functions of flash4 that run, in order."""
    called = []

    def profile(frame, event, argument):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("flash4"):
            name = f"{module}.{frame.f_code.co_name}"
            called.extend([name] * (name != "flash4.launch.<lambda>"))  # there without CUDA

    sys.setprofile(profile)
    try:
        yield called
    finally:
        sys.setprofile(None)


def test_the_short_way_runs_no_policy():
    """A new function here costs every call of every model."""
    x = draw(1, 128, 2, 64)
    with stand_in_gpu(run=lambda launch: None):
        flash4.flash_attn_func(x, x, x)
        with names_of_calls() as called:
            flash4.flash_attn_func(x, x, x)
    assert called == [
        "flash4.interface.flash_attn_func", "flash4.interface._scalars",
        "flash4.interface._deterministic",
        "flash4.launch.attend", "flash4.launch.watched", "flash4.launch._find", "flash4.launch._key",
        "flash4.launch.run",
    ]  # fmt: skip


def test_nor_does_that_of_gradients():
    x = Inputs.draw()
    with stand_in():
        for _ in range(2):
            out = flash4.flash_attn_func(*x.three)
            torch.autograd.grad(out, x.three, x.dout, retain_graph=True)
        (prepared,) = {y.backward for y in ops._launches.values() if hasattr(y, "backward")}
        assert out.grad_fn.found.backward is prepared
        out.grad_fn.found.backward = replace(prepared, function=lambda *_: None)
        with names_of_calls() as called:
            torch.autograd.grad(out, x.three, x.dout)
    assert called == [
        "flash4.launch.backward", "flash4.launch._gradients", "flash4.launch.watched",
        "flash4.launch.run",
    ]  # fmt: skip


@pytest.mark.parametrize(("wants_lse", "seqlen"), [(False, 128), (True, 128), (False, 70_000)])
def test_only_outputs_are_allocated(wants_lse, seqlen):
    """What nobody asks for goes to memory that all calls share, unless it is large."""
    x = torch.zeros(1, 1, 4, 8, dtype=F16).expand(1, seqlen, 4, 8)
    x = x.contiguous()
    with stand_in_gpu(run=lambda launch: None) as launches:
        flash4.flash_attn_func(x, x, x)
        *_, prepared = (y for y in ops._launches.values() if isinstance(y, launch.Prepared))
        prepared.empty = mock.Mock(wraps=prepared.empty)
        flash4.flash_attn_func(x, x, x, return_lse=wants_lse)
    small = not wants_lse and seqlen == 128
    assert prepared.empty.call_count == (1 if small else 2)
    shared = launch._scratch[x.device].data_ptr()
    assert (launches[-1].tensors[4].data_ptr() == shared) == small


CU = torch.tensor([0, 11, 15, 40], dtype=torch.int32)
USED = torch.tensor([9, 0, 20], dtype=torch.int32)
SEQUENCES = {
    "packed": ("packed", "packed", {"cu_seqlens_q": CU, "cu_seqlens_k": CU}),
    "packed queries": ("packed", "batch", {"cu_seqlens_q": CU}),
    "packed keys": ("batch", "packed", {"cu_seqlens_k": CU}),
    "decode": ("batch", "batch", {"seqused_k": USED}),
    "all": ("packed", "packed", {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "seqused_q": USED, "seqused_k": USED}),
    "sinks": ("packed", "packed", {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "learnable_sink": draw(4).float()}),
    "int64": ("packed", "packed", {"cu_seqlens_q": CU.long(), "cu_seqlens_k": CU.long()}),
}  # fmt: skip


@pytest.mark.parametrize("wants_lse", [False, True])
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_take_the_short_way(name, wants_lse):
    """With other lengths in the same tensors too; what must be converted goes the long way."""
    q_kind, k_kind, keywords = SEQUENCES[name]
    q = draw(40, 4, 40) if q_kind == "packed" else draw(3, 12, 4, 40)
    k, v = (draw(*((40, 2) if k_kind == "packed" else (3, 20, 2)), d) for d in (40, 24))
    keywords = {key: x.clone() for key, x in keywords.items()}
    with stand_in_gpu() as launches, count_long_ways() as checks:
        for change in (0, 0, 1):
            for lengths in keywords.values():
                if lengths.dtype in (torch.int32, torch.int64):
                    lengths[1] += change
            found = flash4.flash_attn_varlen_func(
                q, k, v, return_lse=wants_lse, causal=True, **keywords
            )
            before = checks.call_count
            with Seen():  # the long way
                expected = flash4.flash_attn_varlen_func(
                    q, k, v, return_lse=wants_lse, causal=True, **keywords
                )
            assert checks.call_count == before + 1
            pairs = zip(found, expected, strict=True) if wants_lse else [(found, expected)]
            for a, b in pairs:
                assert torch.equal(a, b) and a.stride() == b.stride() and a.shape == b.shape
        assert checks.call_count == (6 if name == "int64" else 4)
    counters = [x.tensors[-1] for x in launches if x.config.optional_tensors[-1:] == ("next_tile",)]
    assert len({x.data_ptr() for x in counters}) == len(counters), "each call has its own"


@contextlib.contextmanager
def count_long_gradients():
    """A mock of what gradients go through on the long way."""
    with mock.patch.object(ops, "run_backward", wraps=ops.run_backward) as long:
        yield long


@pytest.mark.parametrize("lie", ["contiguous", "expanded", "of one row"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_gradients_of_sequences_take_the_short_way(name, lie):
    """With the launches and the bits of the long way; sinks take that."""
    q_kind, k_kind, keywords = SEQUENCES[name]
    q = draw(40, 4, 40) if q_kind == "packed" else draw(3, 12, 4, 40)
    k, v = (draw(*((40, 2) if k_kind == "packed" else (3, 20, 2)), d) for d in (40, 24))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    dout = draw(*q.shape[:-1], 24)
    if lie == "expanded":
        dout = dout[..., :1, :1].expand(dout.shape)
    if lie == "of one row":
        dout = dout[..., :1, :, :].expand(dout.shape)
    found, launched = [], []
    with stand_in() as launches:
        for way in ("first", "short", "short", "long"):
            if way == "long":
                ops._launches.clear()
                ops._backward_launches.clear()
            out = flash4.flash_attn_varlen_func(*inputs, causal=True, **keywords)
            if way == "long":
                with mock.patch.object(launch, "_fits", lambda *_: False):
                    found.append(torch.autograd.grad(out, inputs, dout))
                continue
            with count_long_gradients() as long:
                found.append(torch.autograd.grad(out, inputs, dout))
            assert long.call_count == (name == "sinks" or (name == "int64"))
            launched.append(len(launches))
    assert launched == [3, 6, 9]
    for gradients in found:
        for a, b, x in zip(gradients, found[-1], inputs, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() and a.shape == x.shape


@pytest.mark.parametrize("name", [*FEATURES, "packed", "all"])
def test_a_backward_is_one_launch_and_four_allocations(name):
    """Three gradients, each the owner of its memory, and a workspace as large as the plan says."""
    if name in FEATURES:
        x, keywords = Inputs.draw(), FEATURES[name]
        inputs, function, dout = x.three, flash4.flash_attn_func, x.dout
    else:
        *_, keywords = SEQUENCES[name]
        inputs = [draw(40, 4, 64).requires_grad_() for _ in range(3)]
        function, dout = flash4.flash_attn_varlen_func, draw(40, 4, 64)
    with stand_in() as launches:
        torch.autograd.grad(function(*inputs, **keywords), inputs, dout)
        calls, made, before = [], [], len(launches)
        out = function(*inputs, **keywords)
        torch.autograd.grad(out, inputs, dout, retain_graph=True)
        entries = [y for y in ops._launches.values() if isinstance(y, launch.Prepared)]
        assert all(y is entries[0] for y in entries)
        prepared = entries[0].backward
        if name in ("sink", "both"):
            assert prepared is False, "they go the long way"
            return
        entries[0].backward = replace(
            prepared,
            empty=lambda *what: made.append(prepared.empty(*what)) or made[-1],
            function=lambda *what: calls.append(what) or prepared.function(*what),
        )
        gradients = torch.autograd.grad(out, inputs, dout)
    assert len(calls) == 1 and len(launches) == before + 6
    assert len(made) == 4 and all(a is b for a, b in zip(made, gradients, strict=False))
    assert all(x._base is None for x in gradients)
    plan = flash4.explain(*inputs, backward=True, arch="sm_90a", **keywords)
    assert made[3].numel() * 4 <= plan.workspace_bytes
    assert made[3].numel() * 4 == plan.workspace_bytes or name in SEQUENCES


def plain(value):
    if isinstance(value, tuple):
        return all(map(plain, value))
    return value is None or isinstance(
        value, (bool, int, float, str, type, torch.dtype, torch.device)
    )


def test_keys_hold_plain_values():
    x = draw(2, 70, 4, 40)
    with stand_in_gpu(run=lambda launch: None):
        for keywords in FEATURES.values():
            for _ in range(2):
                flash4.flash_attn_func(x, x, x, **keywords)
        for length in (5, torch.tensor(5)):
            lengths = torch.tensor([0, 70], dtype=torch.int32)
            flash4.flash_attn_varlen_func(x[0], x[0], x[0], lengths, lengths, length, length)
        keys = list(ops._launches)
    assert len(keys) == 3 * (len(FEATURES) + 1), "kernel, operator, function"
    assert all(map(plain, keys))


def test_tensors_as_numbers_leave_no_entry():
    x = draw(2, 70, 4, 40)
    with stand_in_gpu(run=lambda launch: None) as launches:
        for scale in (0.5, 0.25):
            flash4.flash_attn_func(x, x, x, softmax_scale=torch.tensor(scale))
        prepared = [y for y in ops._launches.values() if isinstance(y, launch.Prepared)]
        assert len(prepared) == 2 and all(map(plain, ops._launches)), "of the operator alone"
    assert [y.scale for y in launches] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"window_size": (5, 3)}, {"window_size": (5.0, 3)}),
        ({"deterministic": True}, {"deterministic": 1}),
        ({"pack_gqa": True}, {"pack_gqa": 1}),
        ({}, {"dropout_p": 0.1}),
        ({}, {"num_splits": 3}),
        ({}, {"page_table": 3}),
        ({}, {"q_descale": 3}),
    ],
    ids=str,
)
def test_what_is_refused_at_first_is_refused_later(first, then):
    """Numbers that Python calls equal are told apart."""
    x = draw(2, 70, 4, 40)
    with stand_in_gpu(run=lambda launch: None):
        for _ in range(2):
            flash4.flash_attn_func(x, x, x, **first)
        with pytest.raises((TypeError, ValueError, NotImplementedError)):
            flash4.flash_attn_func(x, x, x, **then)


def misaligned(x):
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def negated(x):
    """A view whose sign is yet to be applied."""
    y = torch._neg_view(-x)
    assert y.is_neg() and torch.equal(y, x)
    return y


def odd(x):
    return torch.empty(x.numel() * 2, dtype=x.dtype).view(*x.shape, 2)[..., 0].copy_(x)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("change", [misaligned, negated, odd, torch.nn.Parameter])
def test_tensors_that_must_be_changed_take_the_long_way(change, name):
    if change is torch.nn.Parameter:
        change = lambda x: torch.nn.Parameter(x, requires_grad=False)  # noqa: E731
    given = {"q": draw(2, 70, 4, 40), "k": draw(2, 90, 2, 40), "v": draw(2, 90, 2, 40)}
    with stand_in_gpu(), count_long_ways() as checks:
        for _ in range(2):
            expected = flash4.flash_attn_func(**given)
        assert checks.call_count == 1
        given[name] = change(given[name])
        for _ in range(2):
            assert torch.equal(flash4.flash_attn_func(**given), expected)
        assert checks.call_count == 3


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(str(function))
        return function(*arguments, **(keywords or {}))


def test_who_watches_the_dispatcher_sees_the_operator():
    x = draw(2, 70, 4, 40)
    with stand_in_gpu():
        for _ in range(2):
            expected = flash4.flash_attn_func(x, x, x)
        with Seen() as seen:
            assert torch.equal(flash4.flash_attn_func(x, x, x), expected)
        assert "flash4.forward.default" in seen.names
        with torch.profiler.profile() as profile:
            flash4.flash_attn_func(x, x, x)
        assert any(event.name == "flash4::forward" for event in profile.events())


def test_a_default_device_watches_nothing():
    x = draw(2, 70, 4, 40)
    with stand_in_gpu(run=lambda launch: None), count_long_ways() as checks:
        with torch.device("cpu"):
            for _ in range(3):
                flash4.flash_attn_func(x, x, x)
        assert checks.call_count == 1
        with torch.overrides.BaseTorchFunctionMode(), torch.device("cpu"):
            flash4.flash_attn_func(x, x, x)
        assert checks.call_count == 2


def test_transforms_take_the_long_way():
    """vmap calls the operator once for each entry."""
    x = draw(2, 2, 70, 4, 40)
    with stand_in_gpu():
        for _ in range(2):
            expected = [flash4.flash_attn_func(y, y, y) for y in x]
        found = torch.vmap(flash4.flash_attn_func)(x, x, x)
    assert torch.equal(found, torch.stack(expected))


def test_another_current_device_takes_the_long_way():
    x = draw(2, 70, 4, 40)
    with stand_in_gpu(run=lambda launch: None), count_long_ways() as checks:
        for _ in range(2):
            flash4.flash_attn_func(x, x, x)
        with mock.patch.object(launch, "_current_device", lambda: 1):
            flash4.flash_attn_func(x, x, x)
    assert checks.call_count == 2


def fake_on(index):
    """More tiles than either GPU has multiprocessors."""
    return torch.empty(8, 4096, 32, 64, dtype=BF16, device=f"cuda:{index}")


def test_devices_of_two_architectures_get_their_own_kernels():
    """Looked up for the tensor's device, whatever the current one is."""
    asked = []

    def get(kernel, config, arch):
        asked.append((kernel, arch))
        return asked[-1]

    facts = {0: ("sm_90a", 132), 1: ("sm_100a", 148)}
    with (
        FakeTensorMode(),
        mock.patch.object(ops, "_launches", {}),
        mock.patch.object(ops, "device_facts", facts.get),
        mock.patch.object(ops.CACHE, "get", get),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
    ):
        tensors = [fake_on(i) for i in (0, 1, 0, 1)]
        options = interface.options_of(*[tensors[0]] * 3)
        found = [ops._launch_for(x, x, x, options) for x in tensors]
    assert [arch for _, arch in asked] == ["sm_90a", "sm_100a"]
    assert found[0] is found[2] and found[1] is found[3]
    assert found[0].workers <= 132 < found[1].workers <= 148
    assert [x.function[1] for x in found[:2]] == ["sm_90a", "sm_100a"]


def warm(x, **keywords):
    """One call with its gradients, which leaves entries."""
    out = flash4.flash_attn_func(*x.three, **keywords)
    torch.autograd.grad(out, x.three, x.dout)


@pytest.mark.parametrize("lie", ["expanded", "transposed", "odd", "misaligned"])
def test_gradients_of_out_lie_anyhow(lie):
    x = Inputs.draw(dims=(40, 40))
    dout = {
        "expanded": lambda: torch.ones((), dtype=F16).expand(x.dout.shape),
        "transposed": lambda: x.dout.transpose(1, 2).contiguous().transpose(1, 2),
        "odd": lambda: odd(x.dout),
        "misaligned": lambda: misaligned(x.dout),
    }[lie]()
    with stand_in():
        warm(x)
        out = flash4.flash_attn_func(*x.three)
        gradients = torch.autograd.grad(out, x.three, dout)
    assert_gradients_close(gradients, x.three, dout.contiguous())


def test_what_hooks_give_back_may_lie_otherwise():
    x = Inputs.draw(dims=(40, 40))

    def unpack(y):
        return y.transpose(1, 2).contiguous().transpose(1, 2) if y.ndim == 4 else y

    with stand_in():
        warm(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda y: y, unpack):
            out = flash4.flash_attn_func(*x.three)
        gradients = torch.autograd.grad(out, x.three, x.dout)
    assert_gradients_close(gradients, x.three, x.dout)


def test_losses_on_lse_alone_and_on_both():
    x = Inputs.draw()
    with stand_in():
        warm(x)
        for wanted in ("lse", "both"):
            found = []
            for _ in range(2):
                out, lse = flash4.flash_attn_func(*x.three, return_lse=True)
                outputs = (lse,) if wanted == "lse" else (out, lse)
                weights = (torch.ones_like(lse),) if wanted == "lse" else (x.dout, lse.detach())
                found.append(torch.autograd.grad(outputs, x.three, weights))
            ops._launches.clear()
            out, lse = flash4.flash_attn_func(*x.three, return_lse=True)
            outputs = (lse,) if wanted == "lse" else (out, lse)
            long = torch.autograd.grad(outputs, x.three, weights)
            for gradients in found:
                assert all(torch.equal(a, b) for a, b in zip(gradients, long, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    """Also where the forward takes the long way and its repetition the short one."""
    x = Inputs.draw()

    def block(q, k, v):
        return flash4.flash_attn_func(q, k, v, causal=True)

    with stand_in():
        for _ in range(2):
            for tensor in x.three:
                tensor.grad = None
            checkpoint(block, *x.three, use_reentrant=reentrant).backward(x.dout)
            gradients = [tensor.grad for tensor in x.three]
            assert_gradients_close(gradients, x.three, x.dout, causal=True)


def test_second_derivatives_are_refused():
    x = Inputs.draw()
    with stand_in():
        warm(x)
        out = flash4.flash_attn_func(*x.three)
        (dq,) = torch.autograd.grad(out, x.q, x.dout, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            dq.sum().backward()


def test_changes_in_place_are_noticed():
    x = Inputs.draw()
    with stand_in():
        warm(x)
        out = flash4.flash_attn_func(*x.three)
        with torch.no_grad():
            x.k.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, x.three, x.dout)


def test_gradients_that_are_not_built_are_refused_every_time():
    q = draw(2, 70, 2, 192).requires_grad_()
    slopes = torch.zeros(2, 2, requires_grad=True)
    x = draw(2, 70, 2, 64)
    with stand_in_gpu(run=lambda launch: None):
        with torch.no_grad():
            for _ in range(2):
                flash4.flash_attn_func(q, q, q, score_mod=biased, aux_tensors=[slopes[0]])
                flash4.flash_attn_func(x, x, x, alibi_slopes=slopes)
        for _ in range(2):
            with pytest.raises(ValueError, match="score_mod_bwd.*no_grad"):
                flash4.flash_attn_func(q, q, q, score_mod=biased, aux_tensors=[slopes[0].detach()])
            with pytest.raises(NotImplementedError, match="alibi_slopes"):
                flash4.flash_attn_func(x, x, x, alibi_slopes=slopes)


def test_the_table_is_bounded(monkeypatch):
    monkeypatch.setattr(ops, "MAX_LAUNCHES", 10)
    with stand_in_gpu(run=lambda launch: None):
        for seqlen in range(1, 40):
            x = torch.zeros(1, seqlen, 2, 64, dtype=F16)
            flash4.flash_attn_func(x, x, x)
            assert len(ops._launches) <= 10


def test_a_capture_compiles_nothing():
    """Within a capture of a CUDA graph, a kernel that is not there yet is an error of our own."""
    x = torch.zeros(1, 70, 2, 64, dtype=F16)
    with stand_in_gpu(run=lambda launch: None) as launches:
        with mock.patch.object(ops, "is_capturing", lambda: True):
            with pytest.raises(RuntimeError, match=r"CUDA graph is captured: .*precompile"):
                flash4.flash_attn_func(x, x, x)
            assert not launches
        with mock.patch.object(ops.CACHE, "contains", lambda *key: True):
            with mock.patch.object(ops, "is_capturing", lambda: True):
                flash4.flash_attn_func(x, x, x)
    assert len(launches) == 1


@pytest.mark.parametrize("name", FEATURES)
def test_the_operators_look_up_calls_too(name):
    """Compiled graphs call them; nothing is planned, and the same is launched."""
    x, keywords = Inputs.draw(), FEATURES[name]
    q, k, v = (y.detach() for y in x.three)
    options = interface.options_of(q, k, v, **keywords)
    with stand_in():
        found = []
        for _ in range(3):
            with (
                mock.patch.object(ops, "run_forward", wraps=ops.run_forward) as forward,
                mock.patch.object(ops, "run_backward", wraps=ops.run_backward) as backward,
                mock.patch.object(
                    ops, "_backward_launch_for", wraps=ops._backward_launch_for
                ) as look,
            ):
                out, lse = ops.forward(q, k, v, *options)
                fields = ops.backward_fields(options)
                *gradients, dsink = ops.backward(x.dout, None, q, k, v, out, lse, *fields)
            found.append((out, lse, *gradients))
            counts = (forward.call_count, backward.call_count, look.call_count)
        sinks = "learnable_sink" in keywords
        assert counts == (0, int(sinks), int(sinks)) and (dsink.numel() > 0) == sinks
        for a, b in zip(found[0], found[2], strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()
        assert_gradients_close(found[2][2:], x.three, x.dout, **keywords)
        odd_inputs = (misaligned(q), k, v)
        again = ops.backward(x.dout, None, *odd_inputs, out, lse, *ops.backward_fields(options))
        for a, b in zip(again[:3], found[0][2:], strict=True):
            assert torch.equal(a, b)


def biased(score, b, h, q_idx, kv_idx, info, aux):
    return score + aux[0][h]


def test_mods_and_what_they_read():
    """Mods are told apart by all that they depend on, every time; the operator takes those without tensors by its look-up."""
    q, k, v = draw(2, 70, 4, 40), draw(2, 90, 2, 40), draw(2, 90, 2, 24)
    for factor in (0.5, 0.25):
        for keywords in (
            {"score_mod": lambda score, *_: score * factor},  # noqa: B023
            {"score_mod": biased, "aux_tensors": [draw(4).float() * factor]},
        ):
            with stand_in_gpu() as launches:
                found = [flash4.flash_attn_func(q, k, v, **keywords) for _ in range(3)]
            assert len(launches) == 3 and all(torch.equal(x, found[0]) for x in found)
