"""scaled_dot_product_attention: torch's results, whoever runs it, and the reason why."""

import contextlib
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right

import flash4
from flash4 import ops, sdpa
from tests.host.test_backward_ops import stand_in
from tests.host.test_dispatch import stand_in_gpu

F16, BF16 = torch.float16, torch.bfloat16
TORCH = torch.nn.functional.scaled_dot_product_attention


@contextlib.contextmanager
def gpu(backward=False):
    """CPU tensors for CUDA ones; yields the list of launches, or of kernels with ``backward``."""
    with (
        mock.patch.object(sdpa, "_verdicts", {}),
        (stand_in if backward else stand_in_gpu)() as launches,
    ):
        yield launches


def draw(*shape, dtype=F16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def mask_of(kind, heads, seqlen_q, seqlen_k, batch=2):
    """Masks of every shape that broadcasts; some queries see no key."""
    seen = (
        torch.rand(batch, heads, seqlen_q, seqlen_k, generator=torch.Generator().manual_seed(1))
        < 0.6
    )
    seen[:, :, seqlen_q // 2] = False
    return {
        "none": lambda: None,
        "bool": lambda: seen,
        "bool keys": lambda: seen[:, :1, :1],
        "bool square": lambda: seen[0, 0],
        "bool heads": lambda: seen[:1],
        "float": lambda: draw(batch, heads, seqlen_q, seqlen_k),
        "float square": lambda: draw(seqlen_q, seqlen_k),
        "float -inf": lambda: torch.zeros(seen.shape, dtype=F16).masked_fill(~seen, -torch.inf),
        "float one key": lambda: draw(batch, heads, seqlen_q, 1),
    }[kind]()


MASKS = (
    "none", "bool", "bool keys", "bool square", "bool heads", "float", "float square", "float -inf",
    "float one key",
)  # fmt: skip


def close(found, expected):
    assert found.shape == expected.shape and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("lengths", [(17, 17), (17, 40), (40, 17), (1, 9)], ids=str)
@pytest.mark.parametrize("kind", [*MASKS, "causal"])
def test_results_are_torchs(kind, lengths):
    seqlen_q, seqlen_k = lengths
    q, k, v = draw(2, 4, seqlen_q, 40), draw(2, 4, seqlen_k, 40), draw(2, 4, seqlen_k, 24)
    mask = None if kind == "causal" else mask_of(kind, 4, seqlen_q, seqlen_k)
    given = dict(attn_mask=mask, is_causal=kind == "causal", scale=0.3)
    expected = TORCH(q, k, v, **given)
    with gpu() as launches, torch.no_grad():
        for _ in range(2):
            close(flash4.scaled_dot_product_attention(q, k, v, **given), expected)
        assert len(launches) == 2, sdpa.explain(q, k, v, sdpa=True, **given)
        assert "sm90-fwd" in str(flash4.explain(q, k, v, sdpa=True, **given))


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_gqa(heads_kv):
    q, kv = draw(2, 4, 17, 64), draw(2, heads_kv, 30, 64)
    expected = TORCH(q, kv, kv, enable_gqa=True, is_causal=True)
    with gpu() as launches:
        close(
            flash4.scaled_dot_product_attention(q, kv, kv, None, 0.0, True, enable_gqa=True),
            expected,
        )
    assert len(launches) == 1


def test_without_a_batch():
    q, kv = draw(4, 17, 64), draw(4, 30, 64)
    mask = mask_of("bool", 4, 17, 30)[0]
    with gpu() as launches:
        close(flash4.scaled_dot_product_attention(q, kv, kv, mask), TORCH(q, kv, kv, mask))
        close(flash4.scaled_dot_product_attention(q, kv, kv), TORCH(q, kv, kv))
    assert len(launches) == 2


@pytest.mark.parametrize("lengths", [(33, 33), (20, 33), (33, 20)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_gradients_are_torchs(head_dim, causal, lengths):
    """Also those of keys that no query sees."""
    shapes = [(2, 4, length, head_dim) for length in (lengths[0], lengths[1], lengths[1])]
    inputs = [draw(*s).requires_grad_() for s in shapes]
    dout = draw(*shapes[0])
    expected = torch.autograd.grad(TORCH(*inputs, is_causal=causal), inputs, dout)
    with gpu(backward=True) as launched:
        out = flash4.scaled_dot_product_attention(*inputs, is_causal=causal)
        found = torch.autograd.grad(out, inputs, dout)
    assert len(launched) == 3
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


HALF = draw(2, 4, 17, 64)
FALLBACKS = {
    "dropout": ((HALF, HALF, HALF), {"dropout_p": 0.5}, "dropout_p is 0.5"),
    "float32": ((HALF.float(),) * 3, {}, "query is torch.float32"),
    "head dim": ((HALF[..., :60],) * 3, {}, "head dim of query is 60"),
    "large head dim": ((draw(1, 1, 4, 264),) * 3, {}, "head dim of query is 264"),
    "broadcast": ((HALF, HALF[:1], HALF[:1]), {}, "does not broadcast"),
    "2 dimensions": ((HALF[0, 0],) * 3, {}, "query has 2 dimensions"),
    "5 dimensions": ((HALF[None],) * 3, {}, "query has 5 dimensions"),
    "no keys": ((HALF, HALF[:, :, :0], HALF[:, :, :0]), {}, "key is empty"),
    "both": ((HALF,) * 3, {"attn_mask": draw(17, 17), "is_causal": True}, "exclude each other"),
    "scale": ((HALF,) * 3, {"scale": 0.0}, "scale is 0.0"),
    "object": ((HALF,) * 3, {"attn_mask": causal_lower_right(17, 17)}, "CausalBias"),
    "gradients": (
        (HALF.clone().requires_grad_(), HALF, HALF),
        {"attn_mask": draw(17, 17)},
        "no gradients",
    ),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_the_rest_goes_to_torch_with_a_reason(name):
    tensors, given, reason = FALLBACKS[name]
    with gpu() as launches:
        plan = flash4.explain(*tensors, sdpa=True, **given)
        assert isinstance(plan, flash4.TorchPlan) and reason in plan.reason and plan.reason
        assert "torch.nn.functional" in str(plan) and plan.reason in str(plan)
        for _ in range(2):
            torch.manual_seed(0)
            found = flash4.scaled_dot_product_attention(*tensors, **given)
            torch.manual_seed(0)
            assert torch.equal(found, TORCH(*tensors, **given))
    assert not launches


@pytest.mark.parametrize(
    ("tensors", "given"),
    [
        ((HALF, HALF[:, :2], HALF[:, :2]), {}),
        ((HALF,) * 3, {"attn_mask": torch.zeros(17, 16, dtype=torch.bool)}),
        ((HALF,) * 3, {"attn_mask": torch.zeros(17, 17, dtype=torch.int32)}),
        ((HALF, HALF.float(), HALF), {}),
        ((HALF, None, HALF), {}),
        ((HALF,) * 3, {"dropout_p": 1.5}),
    ],
    ids=range(6),
)
def test_what_torch_refuses_is_refused_in_its_words(tensors, given):
    with pytest.raises(Exception) as theirs:
        TORCH(*tensors, **given)
    with gpu() as launches, pytest.raises(type(theirs.value)) as ours:
        flash4.scaled_dot_product_attention(*tensors, **given)
    assert str(ours.value) == str(theirs.value) and not launches


def test_tensors_of_the_cpu_go_to_torch():
    assert torch.equal(
        flash4.scaled_dot_product_attention(HALF, HALF, HALF), TORCH(HALF, HALF, HALF)
    )


def test_a_device_without_kernels_goes_to_torch():
    def facts(index):
        raise NotImplementedError("flash4 has no kernel for compute capability 7.5")

    with gpu() as launches, mock.patch.object(ops, "device_facts", facts):
        assert torch.equal(
            flash4.scaled_dot_product_attention(HALF, HALF, HALF), TORCH(HALF, HALF, HALF)
        )
        assert "7.5" in flash4.explain(HALF, HALF, HALF, sdpa=True).reason
    assert not launches


def test_unknown_keywords():
    with pytest.raises(TypeError, match="no keyword causal"):
        flash4.explain(HALF, HALF, HALF, sdpa=True, causal=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_makes_one_graph(dynamic):
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    def attend(q, k, v):
        return flash4.scaled_dot_product_attention(2 * q, k, v, is_causal=True) + 1

    compiled = torch.compile(attend, fullgraph=True, backend=backend, dynamic=dynamic)
    with FakeTensorMode(), mock.patch.object(ops, "device_facts", lambda index: ("sm_90a", 132)):
        for seqlen in (100, 200, 300) if dynamic else (100,):
            q = torch.empty(2, 4, seqlen, 64, dtype=BF16, device="cuda")
            assert compiled(q, q, q).shape == q.shape
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert any("flash4" in name for name in called), called
