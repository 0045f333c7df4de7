"""Which calls are refused, and in which words; which values of a keyword ask for nothing."""

import inspect
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flash4
from flash4.problem import AttentionProblem
from tests.host.test_dispatch import stand_in_gpu

F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def gpu():
    """A GPU that runs the reference on the CPU, so that accepted calls go through."""
    with stand_in_gpu() as launches:
        yield launches


def tensor(*shape, dtype=F16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def operands(q=(2, 5, 4, 64), k=(2, 7, 2, 64), v=(2, 7, 2, 32)):
    """q, k and v; a value is a shape, or what stands in the tensor's place."""
    return tuple(tensor(*x) if isinstance(x, tuple) else x for x in (q, k, v))


def check_refused(error, words, call, *arguments, **keywords):
    """Check that a call raises exactly this type, and that its message has all of the words."""
    with pytest.raises(error) as caught:
        call(*arguments, **keywords)
    assert type(caught.value) is error, f"{type(caught.value).__name__}: {caught.value}"
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"no {missing} in {str(caught.value)!r}"


CALLS = (flash4.flash_attn_func, flash4.explain)
both_calls = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)

# What stands in the place of q, k or v; the error; what its message must name.
WRONG_OPERANDS = {
    "q is a list": (dict(q=[1]), TypeError, ["q must be a torch.Tensor", "list"]),
    "v is an array": (dict(v=np.zeros((2, 7, 2, 32))), TypeError, ["v must be", "ndarray"]),
    "k is None": (dict(k=None), TypeError, ["k must be", "NoneType"]),
    "q is a scalar": (dict(q=()), ValueError, ["q must have 4 dimensions", "()"]),
    "q has 3 dimensions": (
        dict(q=(5, 4, 64)),
        ValueError,
        ["q must have 4 dimensions (batch, seqlen, heads, head_dim)", "(5, 4, 64)"],
    ),
    "v has 5 dimensions": (dict(v=(1, 2, 7, 2, 32)), ValueError, ["v must have 4", "(1, 2, 7, 2"]),
    "float32": (
        dict(q=tensor(2, 5, 4, 64, dtype=torch.float32)),
        TypeError,
        ["q is torch.float32", "torch.float16 and torch.bfloat16"],
    ),
    "float64 v": (
        dict(v=tensor(2, 7, 2, 32, dtype=torch.float64)),
        TypeError,
        ["v is torch.float64", "torch.float16 and torch.bfloat16"],
    ),
    "integers": (dict(k=tensor(2, 7, 2, 64, dtype=torch.int8)), TypeError, ["k is torch.int8"]),
    "fp8": (
        dict(k=tensor(2, 7, 2, 64, dtype=torch.float8_e4m3fn)),
        TypeError,
        ["k is torch.float8_e4m3fn", "torch.float16 and torch.bfloat16"],
    ),
    "mixed dtypes": (
        dict(v=tensor(2, 7, 2, 32, dtype=BF16)),
        TypeError,
        ["one dtype", "q torch.float16", "v torch.bfloat16"],
    ),
    "two devices": (
        dict(k=tensor(2, 7, 2, 64, device="meta")),
        ValueError,
        ["one device", "q on cpu", "k on meta"],
    ),
    "batch of k": (
        dict(k=(3, 7, 2, 64), v=(3, 7, 2, 32)),
        ValueError,
        ["q and k must agree in batch", "2 and 3"],
    ),
    "batch is not broadcast": (dict(k=(1, 7, 2, 64), v=(1, 7, 2, 32)), ValueError, ["2 and 1"]),
    "batch of v": (dict(v=(3, 7, 2, 32)), ValueError, ["k and v must agree", "(3, 7, 2, 32)"]),
    "keys of v": (dict(v=(2, 8, 2, 32)), ValueError, ["k and v must agree", "seqlen", "(2, 8"]),
    "heads of v": (dict(v=(2, 7, 1, 32)), ValueError, ["k and v must agree", "heads"]),
    "head dims of q and k": (
        dict(k=(2, 7, 2, 56)),
        ValueError,
        ["q and k must agree in head_dim", "64 and 56"],
    ),
    "heads 3 and 2": (
        dict(q=(2, 5, 3, 64)),
        ValueError,
        ["multiple of KV heads", "3 query heads", "2 KV heads"],
    ),
    "ratio upside down": (
        dict(q=(2, 5, 1, 64)),
        ValueError,
        ["multiple of KV heads", "1 query heads", "2 KV heads"],
    ),
    "no KV heads": (
        dict(k=(2, 7, 0, 64), v=(2, 7, 0, 32)),
        ValueError,
        ["multiple of KV heads", "4 query heads", "0 KV heads"],
    ),
    "no key and a wrong head dim": (dict(k=(2, 0, 2, 64), v=(2, 0, 2, 4)), ValueError, ["v is 4"]),
}


@both_calls
@pytest.mark.parametrize("wrong", WRONG_OPERANDS)
def test_operands_that_do_not_fit(wrong, call):
    changed, error, words = WRONG_OPERANDS[wrong]
    call(*operands())  # a plan of similar operands is remembered
    check_refused(error, words, call, *operands(**changed))


# Head dims, and the nearest supported one that padding reaches.
WRONG_HEAD_DIMS = {0: None, 1: 8, 4: 8, 7: 8, 33: 40, 100: 104, 255: 256, 257: None, 264: None}


@both_calls
@pytest.mark.parametrize(("head_dim", "nearest"), WRONG_HEAD_DIMS.items())
def test_head_dims_that_are_not_supported(head_dim, nearest, call):
    words = [f"is {head_dim};", "multiples of 8 up to 256"]
    words += [f"pad it with zeros to {nearest}"] if nearest else []
    q, k, v = operands(q=(2, 5, 4, head_dim), k=(2, 7, 2, head_dim))
    check_refused(ValueError, ["head_dim of q and k", *words], call, q, k, v)
    q, k, v = operands(v=(2, 7, 2, head_dim))
    check_refused(ValueError, ["head_dim of v", *words], call, q, k, v)


@given(st.integers(0, 300), st.integers(0, 300))
def test_head_dims_are_the_multiples_of_8_up_to_256(head_dim, head_dim_v):
    q, k, v = (tensor(1, 1, 1, d, device="meta") for d in (head_dim, head_dim, head_dim_v))
    supported = range(8, 257, 8)
    if head_dim in supported and head_dim_v in supported:
        problem = flash4.explain(q, k, v).problem
        assert (problem.head_dim, problem.head_dim_v) == (head_dim, head_dim_v)
    else:
        with pytest.raises(ValueError, match="multiples of 8 up to 256"):
            flash4.explain(q, k, v)


@both_calls
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_scales_that_are_not_finite(scale, call):
    words = ["softmax_scale must be finite", str(scale)]
    for _ in range(2):  # also after a right call of the same shapes, whose plan is remembered
        check_refused(ValueError, words, call, *operands(), softmax_scale=scale)
        for sign in (1, -1):
            call(*operands(), softmax_scale=sign)


def test_tensors_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    words = ["CUDA device", "cpu", "flash4.reference"]
    check_refused(ValueError, words, flash4.flash_attn_func, *operands())


def test_facts_of_a_call():
    q, k, v = operands(q=(2, 5, 12, 64), k=(2, 7, 3, 64), v=(2, 7, 3, 32))
    problem = AttentionProblem.from_tensors(q, k, v, softmax_scale=-0.5, causal=True)
    assert problem == AttentionProblem(F16, 2, 5, 7, 12, 3, 64, 32, True, True, None)
    assert hash(problem) == hash(AttentionProblem(F16, 2, 5, 7, 12, 3, 64, 32, True, True, None))
    assert problem.gqa_ratio == 4 and not problem.is_empty
    assert problem.flops == 2 * 2 * 12 * 5 * 7 * (64 + 32) // 2
    zero = AttentionProblem.from_tensors(q, k, v, softmax_scale=-0.0, causal=False)
    assert not zero.negative_scale


EMPTY_SIZES = [
    sizes for sizes in itertools.product((0, 2), repeat=4) if 0 in sizes
]  # batch, queries, keys, heads


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k", "heads"), EMPTY_SIZES)
def test_empty_sizes_launch_nothing(batch, seqlen_q, seqlen_k, heads, gpu):
    q, k, v = operands(
        (batch, seqlen_q, heads, 64), (batch, seqlen_k, heads, 64), (batch, seqlen_k, heads, 32)
    )
    out, lse = flash4.flash_attn_func(q, k, v, return_lse=True)
    assert out.shape == (batch, seqlen_q, heads, 32) and (out == 0).all()
    assert lse.shape == (batch, heads, seqlen_q) and (lse == -torch.inf).all()
    buffer = torch.full_like(out, torch.nan)
    assert flash4.flash_attn_func(q, k, v, out=buffer) is buffer and (buffer == 0).all()
    sink = torch.arange(float(heads))
    out, lse = flash4.flash_attn_func(q, k, v, learnable_sink=sink, return_lse=True)
    assert (out == 0).all() and torch.equal(lse, sink[None, :, None].expand(lse.shape))
    assert not gpu
    check_refused(ValueError, ["empty", "no kernel"], flash4.explain, q, k, v)


# Keywords that are built, so that they are tested elsewhere, and for every other one a value that
# asks for something. Whoever adds a keyword has to enter it here.
BUILT = {
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "learnable_sink",
    "alibi_slopes",
    "score_mod",
    "score_mod_bwd",
    "mask_mod",
    "aux_tensors",
    "deterministic",
    "pack_gqa",
    "out",
    "return_lse",
}
ASKS_FOR_SOMETHING = {
    "block_mask": [object(), torch.zeros(4)],
    "dropout_p": [0.1, 1.0, torch.tensor(0.5)],
    "num_splits": [2, 16, -1],
    "q_descale": [torch.ones(1), 1.0],
    "k_descale": [torch.ones(2, 2)],
    "v_descale": [torch.ones(()), np.ones(2)],
}
NEUTRAL = {"softcap": [0, 0.0, None, -0.0], "dropout_p": [0, 0.0], "num_splits": [0, 1]}
PARAMETERS = inspect.signature(flash4.flash_attn_func).parameters
KEYWORDS = [n for n, p in PARAMETERS.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]


def test_every_keyword_is_built_or_refused():
    assert not BUILT & ASKS_FOR_SOMETHING.keys()
    assert set(KEYWORDS) == BUILT | ASKS_FOR_SOMETHING.keys()


@both_calls
@pytest.mark.parametrize("name", [name for name in KEYWORDS if name not in BUILT])
def test_unbuilt_keywords_are_refused_by_name(name, call, gpu):
    for value in ASKS_FOR_SOMETHING[name]:
        check_refused(NotImplementedError, [name], call, *operands(), **{name: value})
    assert not gpu


@both_calls
@pytest.mark.parametrize("name", KEYWORDS)
def test_neutral_values_are_accepted(name, call):
    default = PARAMETERS[name].default
    for value in [default, *NEUTRAL.get(name, [])]:
        call(*operands(), **{name: value})


@both_calls
@pytest.mark.parametrize("value", [None, False, True])
def test_deterministic_is_accepted(value, call):
    call(*operands(), deterministic=value)


HUGE = 2**31
UNLIMITED = [(None, None), (-1, -1), (None, -1), (-1, None), [-1, -1], [None, None]]
UNLIMITED += [(HUGE, HUGE), (2**62, None), (-1, 2**30)]
CAUSAL = [(None, 0), (-1, 0), [None, 0], [-1, 0], (HUGE, 0)]


@pytest.mark.parametrize("window", UNLIMITED + CAUSAL)
@pytest.mark.parametrize("causal", [False, True])
def test_window_sentinels(window, causal, gpu):
    """No limit equals no window, and (no limit, 0) equals causal, in every way to write them."""
    q, k, v = (torch.randn(x.shape, generator=torch.manual_seed(0)).half() for x in operands())
    is_causal = causal or window in CAUSAL
    plan = flash4.explain(q, k, v, causal=causal, window_size=window)
    assert plan == flash4.explain(q, k, v, causal=is_causal)
    assert plan.problem.causal is is_causal
    out = flash4.flash_attn_func(q, k, v, causal=causal, window_size=window)
    assert torch.equal(out, flash4.flash_attn_func(q, k, v, causal=is_causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "window", [(0, 0), (128, 0), (None, 5), (5, None), (-1, 1), (2**30 - 1, 3), (6, 4), (1, 2**40)]
)
def test_limited_windows(window, causal, gpu):
    """A side is there or not, causal is a right side of 0, and sizes are run-time numbers."""
    q, k, v = operands()
    problem = flash4.explain(q, k, v, causal=causal, window_size=window).problem
    left, right = (None if side in (None, -1) or side >= 2**30 else side for side in window)
    assert problem.causal is (causal or right == 0)
    assert problem.window_left is (left is not None)
    assert problem.window_right is (right is not None and not problem.causal)
    flash4.flash_attn_func(q, k, v, causal=causal, window_size=window)
    (launch,) = gpu
    numbers = dict(zip(launch.config.numbers, launch.numbers, strict=True))
    assert numbers.get("left") == left
    assert numbers.get("right") == (None if problem.causal else right)


@both_calls
@pytest.mark.parametrize("window", [(-2, 0), (0, -2), (-(2**40), None)])
def test_windows_below_no_limit(window, call):
    check_refused(ValueError, ["window_size", str(window)], call, *operands(), window_size=window)


@both_calls
@pytest.mark.parametrize("softcap", [-1.0, float("nan"), float("inf"), 1e31, 1e-39, -(10**400)])
def test_softcaps_that_are_not_supported(softcap, call):
    for _ in range(2):  # also after a right call of the same shapes, whose plan is remembered
        with pytest.raises((ValueError, OverflowError)):
            call(*operands(), softcap=softcap)
        call(*operands(), softcap=30.0)


@both_calls
@pytest.mark.parametrize("softcap", [torch.tensor(0.0), "5", [1.0], True])
def test_softcaps_that_are_no_numbers(softcap, call):
    check_refused(
        TypeError, ["softcap must be a Python number"], call, *operands(), softcap=softcap
    )


@both_calls
def test_softcaps_far_from_the_scale(call):
    words = ["softmax_scale / softcap", "supported"]
    for scale, softcap in ((1e30, 1e-3), (-1e30, 1e-3), (1e-38, 1e3)):
        check_refused(ValueError, words, call, *operands(), softmax_scale=scale, softcap=softcap)
    call(*operands(), softmax_scale=0, softcap=1e-38)


# What stands in the place of a sink for 4 query heads; the error; what its message must name.
WRONG_SINKS = {
    "array": (np.zeros(4), TypeError, ["learnable_sink must be a torch.Tensor", "ndarray"]),
    "number": (0.0, TypeError, ["learnable_sink must be a torch.Tensor", "float"]),
    "float64": (tensor(4, dtype=torch.float64), TypeError, ["torch.float64", "torch.float32"]),
    "integers": (tensor(4, dtype=torch.int32), TypeError, ["torch.int32", "torch.float32"]),
    "one for each KV head": (tensor(2), ValueError, ["(4,)", "(2,)"]),
    "one for all": (tensor(), ValueError, ["(4,)", "()"]),
    "two dimensions": (tensor(4, 1), ValueError, ["(4,)", "(4, 1)"]),
    "elsewhere": (tensor(4, device="meta"), ValueError, ["cpu", "meta"]),
}


@both_calls
@pytest.mark.parametrize("wrong", WRONG_SINKS)
def test_sinks_that_do_not_fit(wrong, call):
    sink, error, words = WRONG_SINKS[wrong]
    call(*operands(), learnable_sink=tensor(4))  # a plan of a similar call is remembered
    check_refused(error, words, call, *operands(), learnable_sink=sink)
    words = [word.replace("learnable_sink", "alibi_slopes") for word in words]
    check_refused(error, words, call, *operands(), alibi_slopes=sink)


@both_calls
def test_slopes_of_heads_and_of_sequences(call):
    for slopes in (tensor(4), tensor(2, 4), tensor(2, 4, dtype=torch.float32)):
        call(*operands(), alibi_slopes=slopes)
    for shape in ((1, 4), (3, 4), (2, 2), (4, 2)):
        words = ["alibi_slopes", "(4,) or (2, 4)", str(shape)]
        check_refused(ValueError, words, call, *operands(), alibi_slopes=tensor(*shape))


@both_calls
@pytest.mark.parametrize(
    "window",
    [None, 5, (1,), (None, None, None), ("a", "b"), (None, 0.5), (None, -0.5), (None, "0"), "", {}],
)
def test_windows_that_are_none(window, call):
    with pytest.raises((TypeError, ValueError), match="window_size"):
        call(*operands(), window_size=window)


@both_calls
@pytest.mark.parametrize("name", ["softmax_scal", "is_causal", "dropout", "window", "max_seqlen"])
def test_unknown_keywords(name, call):
    with pytest.raises(TypeError, match=name):
        call(*operands(), **{name: None})


@both_calls
def test_options_are_keywords_only(call):
    q, k, v = operands()
    with pytest.raises(TypeError, match="positional"):
        call(q, k, v, 0.125)
    with pytest.raises(TypeError, match="'?v'?"):
        call(q, k)


def test_out_is_the_result():
    q, k, v = (torch.randn(x.shape, generator=torch.manual_seed(0)).half() for x in operands())
    expected, expected_lse = flash4.flash_attn_func(q, k, v, return_lse=True)
    buffer = torch.full_like(expected, torch.nan)
    out, lse = flash4.flash_attn_func(q, k, v, out=buffer, return_lse=True)
    assert out is buffer
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def strided(*stride, offset=0, shape=(2, 5, 4, 32)):
    """A buffer of out's shape with the given strides, of an aligned storage."""
    size = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return torch.zeros(size, dtype=F16).as_strided(shape, stride, offset)


RIGHT_OUT = {
    "contiguous": strided(640, 128, 32, 1),
    "transposed": strided(640, 32, 160, 1),
    "between others": strided(3840, 768, 64, 1, offset=256),
    "size 1 with odd strides": strided(3, 32, 5, 1, shape=(1, 5, 1, 32)),
}


@pytest.mark.parametrize("layout", RIGHT_OUT)
def test_out_of_any_strides_that_tma_can_write(layout, gpu):
    buffer = RIGHT_OUT[layout]
    batch, seqlen_q, heads, head_dim_v = buffer.shape
    q, k, v = (
        torch.randn(shape, generator=torch.manual_seed(0)).half()
        for shape in (
            (batch, seqlen_q, heads, 64),
            (batch, 7, heads, 64),
            (batch, 7, heads, head_dim_v),
        )
    )
    expected = flash4.flash_attn_func(q, k, v)
    assert flash4.flash_attn_func(q, k, v, out=buffer) is buffer
    assert torch.equal(buffer, expected)


WRONG_OUT = {
    "queries": (tensor(2, 6, 4, 32), ["(2, 5, 4, 32)", "(2, 6, 4, 32)"]),
    "head_dim of q instead of v": (tensor(2, 5, 4, 64), ["(2, 5, 4, 32)", "(2, 5, 4, 64)"]),
    "heads first": (tensor(2, 4, 5, 32), ["(2, 5, 4, 32)"]),
    "packed": (tensor(10, 4, 32), ["(2, 5, 4, 32)", "(10, 4, 32)"]),
    "broadcast": (tensor(1, 5, 4, 32), ["(2, 5, 4, 32)"]),
    "dtype": (tensor(2, 5, 4, 32, dtype=BF16), ["torch.float16", "torch.bfloat16"]),
    "float32": (tensor(2, 5, 4, 32, dtype=torch.float32), ["torch.float16", "torch.float32"]),
    "device": (tensor(2, 5, 4, 32, device="meta"), ["on cpu", "on meta"]),
    "last stride": (strided(1280, 256, 64, 2), ["head_dim stride is 2"]),
    "odd stride": (strided(680, 136, 33, 1), ["66 bytes", "multiple of 16"]),
    "misaligned": (strided(640, 128, 32, 1, offset=1), ["not 16-byte aligned"]),
    "batch entries on one another": (strided(0, 128, 32, 1), []),
    "heads on one another": (strided(160, 32, 0, 1), []),
    "queries on one another": (strided(640, 64, 32, 1), []),
}


@pytest.mark.parametrize("wrong", WRONG_OUT)
def test_out_that_does_not_fit(wrong, gpu):
    out, words = WRONG_OUT[wrong]
    check_refused(ValueError, ["out", *words], flash4.flash_attn_func, *operands(), out=out)
    assert not gpu


@pytest.mark.parametrize("out", [True, 5, "out", [1.0], np.zeros((2, 5, 4, 32), np.float16)])
def test_out_that_is_no_tensor(out):
    check_refused(TypeError, ["out", "Tensor"], flash4.flash_attn_func, *operands(), out=out)


@pytest.mark.parametrize("differentiable", range(3))
def test_out_and_gradients(differentiable):
    inputs = operands()
    inputs[differentiable].requires_grad_()
    buffer = tensor(2, 5, 4, 32)
    check_refused(ValueError, ["out=", "no_grad"], flash4.flash_attn_func, *inputs, out=buffer)
    with torch.no_grad():
        assert flash4.flash_attn_func(*inputs, out=buffer) is buffer


@both_calls
@pytest.mark.parametrize(
    ("keyword", "value"),
    [("causal", "False"), ("causal", None), ("causal", 1), ("pack_gqa", 0), ("pack_gqa", "no")],
)
def test_flags_that_are_no_flags(keyword, value, call):
    for _ in range(2):  # also where an equal key is remembered
        check_refused(TypeError, [keyword], call, *operands(), **{keyword: value})
        call(*operands(), **{keyword: False})


@pytest.mark.parametrize("shared", range(3))
def test_out_in_the_memory_of_an_input(shared, gpu):
    inputs = operands(q=(2, 5, 4, 32), k=(2, 5, 4, 32), v=(2, 5, 4, 32))
    words = ["out", f"shares memory with {'qkv'[shared]}"]
    check_refused(ValueError, words, flash4.flash_attn_func, *inputs, out=inputs[shared])
    assert not gpu


@both_calls
@pytest.mark.parametrize("scale", [1e-39, -1e-45, 5e-324, 1.1e30, -1e300])
def test_scales_that_float32_cannot_hold(scale, call):
    check_refused(
        ValueError, ["softmax_scale", "1e-38", "1e+30"][:1], call, *operands(), softmax_scale=scale
    )


@pytest.mark.parametrize("wrong", ["queries", "dtype", "float32", "broadcast"])
def test_out_that_does_not_fit_while_compiling(wrong, gpu, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    out, words = WRONG_OUT[wrong]
    check_refused(ValueError, ["out", *words], flash4.flash_attn_func, *operands(), out=out)


def packed_operands(q=(9, 4, 64), k=(12, 2, 64), v=(12, 2, 32)):
    """Packed q, k and v of three sequences."""
    return operands(q, k, v)


def ints(*numbers, dtype=torch.int32, device="cpu"):
    return torch.tensor(numbers, dtype=dtype, device=device)


CU_Q, CU_K = ints(0, 4, 4, 9), ints(0, 5, 6, 12)
VARLEN_CALLS = (flash4.flash_attn_varlen_func, flash4.explain)
both_varlen_calls = pytest.mark.parametrize("call", VARLEN_CALLS, ids=lambda call: call.__name__)

# Operands and lengths; the error; what its message must name.
WRONG_LENGTHS = {
    "packed q without cu_seqlens": (
        (packed_operands(), dict(cu_seqlens_k=CU_K)),
        ValueError,
        ["q must have 4 dimensions", "(9, 4, 64)", "cu_seqlens"],
    ),
    "batch of q with cu_seqlens": (
        (operands(k=(12, 2, 64), v=(12, 2, 32)), dict(cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)),
        ValueError,
        ["packed q must have 3 dimensions", "(2, 5, 4, 64)"],
    ),
    "v is not packed as k": (
        (packed_operands(v=(2, 7, 2, 32)), dict(cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)),
        ValueError,
        ["packed v must have 3 dimensions"],
    ),
    "rows of k and v": (
        (packed_operands(v=(11, 2, 32)), dict(cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)),
        ValueError,
        ["k and v must agree", "(11, 2, 32)"],
    ),
    "numbers of sequences": (
        (packed_operands(), dict(cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K[:3])),
        ValueError,
        ["q holds 3 sequences", "cu_seqlens_k", "speaks of 2"],
    ),
    "sequences in k": (
        (packed_operands(k=(2, 7, 2, 64), v=(2, 7, 2, 32)), dict(cu_seqlens_q=CU_Q)),
        ValueError,
        ["q holds 3 sequences", "k and v hold 2"],
    ),
    "too many in use": (
        (operands(), dict(seqused_k=ints(1, 2, 3))),
        ValueError,
        ["q holds 2 sequences", "seqused_k", "speaks of 3"],
    ),
    "no cumulative length at all": (
        (packed_operands(), dict(cu_seqlens_q=CU_Q[:0], cu_seqlens_k=CU_K)),
        ValueError,
        ["cu_seqlens_q", "(batch + 1,)", "(0,)"],
    ),
    "two dimensions": (
        (operands(), dict(seqused_q=ints(1, 2)[None])),
        ValueError,
        ["seqused_q", "(batch,)", "(1, 2)"],
    ),
    "floats": ((operands(), dict(seqused_k=torch.ones(2))), TypeError, ["seqused_k", "float32"]),
    "a list": ((operands(), dict(seqused_k=[1, 2])), TypeError, ["seqused_k", "list"]),
    "elsewhere": (
        (operands(), dict(seqused_k=ints(1, 2, device="meta"))),
        ValueError,
        ["seqused_k", "cpu", "meta"],
    ),
    "a length that is no number": (
        (packed_operands(), dict(cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, page_table=ints(0))),
        NotImplementedError,
        ["page_table"],
    ),
}


@both_varlen_calls
@pytest.mark.parametrize("wrong", WRONG_LENGTHS)
def test_lengths_that_do_not_fit(wrong, call):
    (tensors, lengths), error, words = WRONG_LENGTHS[wrong]
    call(*packed_operands(), cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K)
    check_refused(error, words, call, *tensors, **lengths)


@pytest.mark.parametrize("longest", [None, 0, 5, torch.tensor(5)])
def test_longest_lengths_are_not_needed(longest, gpu):
    flash4.flash_attn_varlen_func(*packed_operands(), CU_Q, CU_K, longest, longest)
    assert len(gpu) == 1
    with pytest.raises(TypeError, match="max_seqlen_k"):
        flash4.flash_attn_varlen_func(*packed_operands(), CU_Q, CU_K, longest, 5.0)


def test_new_lengths_ask_for_no_new_kernel(gpu):
    for cu_q, cu_k in ((CU_Q, CU_K), (ints(0, 0, 0, 1), ints(3, 3, 4, 5)), (CU_Q.long(), CU_K)):
        flash4.flash_attn_varlen_func(*packed_operands(), cu_q, cu_k, pack_gqa=False)
    for total in (1, 100, 5000):
        x = tensor(total, 4, 64)
        flash4.flash_attn_varlen_func(x, x[:, :2], x[:, :2, :32], CU_Q, CU_K, pack_gqa=False)
    assert len({launch.config for launch in gpu}) == 1
    assert all(x.dtype == torch.int32 for launch in gpu for x in launch.tensors[5:])


def test_sequences_without_keys_give_their_sinks():
    """What runs without a kernel agrees with the reference."""
    q, sink = torch.randn(9, 4, 64).half(), torch.arange(4.0)
    k, v, cu_k = tensor(0, 2, 64), tensor(0, 2, 32), ints(0, 0, 0)
    for cu_q, used_q in ((ints(1, 3, 8), None), (ints(0, 0, 9), ints(0, 5)), (ints(2, 9, 9), None)):
        keywords = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, learnable_sink=sink, seqused_q=used_q)
        out, lse = flash4.flash_attn_varlen_func(q, k, v, **keywords, return_lse=True)
        expected = flash4.reference.attention(q, k, v, **keywords, return_lse=True)
        assert (out == 0).all() and torch.equal(lse.double(), expected[1])


TENSOR = torch.zeros(2)


def keep_all(*_):
    return True


# Mods and what they read; the error; what its message must name.
WRONG_MODS = {
    "no callable": (dict(score_mod=3), TypeError, ["callable", "3"]),
    "a tensor closed over": (
        dict(mask_mod=lambda *_: TENSOR),
        TypeError,
        ["tensor", "aux_tensors"],
    ),
    "aux without a mod": (dict(aux_tensors=[tensor(4)]), ValueError, ["aux_tensors", "neither"]),
    "an array": (dict(mask_mod=keep_all, aux_tensors=[np.zeros(2)]), TypeError, ["list of torch"]),
    "a tensor, no list": (dict(mask_mod=keep_all, aux_tensors=(3,)), TypeError, ["list of torch"]),
    "float64": (
        dict(mask_mod=keep_all, aux_tensors=[tensor(2, dtype=torch.float64)]),
        TypeError,
        ["aux_tensors[0]", "float64", "torch.int32"],
    ),
    "a scalar": (
        dict(mask_mod=keep_all, aux_tensors=[tensor(2), tensor()]),
        ValueError,
        ["aux_tensors[1]", "0 dimensions", "1 to 4"],
    ),
    "too many": (dict(mask_mod=keep_all, aux_tensors=[tensor(2)] * 9), ValueError, ["9", "8"]),
    "elsewhere": (
        dict(mask_mod=keep_all, aux_tensors=[tensor(2, device="meta")]),
        ValueError,
        ["aux_tensors[0]", "cpu", "meta"],
    ),
}


@both_calls
@pytest.mark.parametrize("wrong", WRONG_MODS)
def test_mods_that_are_not_supported(wrong, call):
    keywords, error, words = WRONG_MODS[wrong]
    check_refused(error, words, call, *operands(), **keywords)
