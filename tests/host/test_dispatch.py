"""Plans, layouts and the operator: everything between the public function and the kernel, without a GPU."""

import contextlib
import dataclasses
import itertools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import flash4
from flash4 import dispatch, launch, ops, reference
from flash4.common import mods
from flash4.dispatch import architecture, plan_forward
from flash4.problem import AttentionProblem
from flash4.sm90 import fwd_config as sm90_fwd
from flash4.sm90.fwd_config import ForwardConfig
from tests import strategies
from tests.gpu import test_smoke

F16, BF16 = torch.float16, torch.bfloat16
WORKERS = 132
FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True, eq=False)
class Launch:
    """What a kernel was called with."""

    config: object
    tensors: tuple
    numbers: tuple
    section: int
    workers: int

    @property
    def scale(self):
        """First of the numbers: factor of a score, or the cap."""
        return self.numbers[0]

    @property
    def keywords(self):
        """What the launch says about scores and masks, as keywords of the reference."""
        config = self.config
        numbers = dict(zip(config.numbers, self.numbers, strict=True))
        optional = dict(zip(config.optional_tensors, self.tensors[5:], strict=True))
        for name in (ops.NEXT_TILE, ops.RESET_COUNTER):
            assert optional.pop(name, torch.zeros(1)).tolist() == [0]
        scale, cap = numbers["scale"], 0.0
        if config.softcap:
            scale, cap = scale * numbers["cap_scale"], scale
        return {
            "softmax_scale": -scale if config.negate else scale,
            "softcap": cap,
            "causal": config.causal,
            "window_size": (numbers.get("left"), numbers.get("right")),
            "learnable_sink": optional.pop("sink", None),
            "score_mod": mods.function(config.score_mod),
            "mask_mod": mods.function(config.mask_mod),
            "aux_tensors": [
                optional.pop(n) for n in config.optional_tensors if n.startswith("aux")
            ],
            **optional,
        }


def run_reference(launch):
    """Do what the kernel does, with the facts that a kernel has; refuse what TMA would not take."""
    *operands, lse = launch.tensors[:5]
    for x in operands:
        assert x.stride(-1) == 1 and x.data_ptr() % 16 == 0, "TMA cannot address it"
        assert not any(stride % 8 for stride in x.stride()[:-1]), x.stride()
    q, k, v, out = operands
    if launch.config.cu_q:
        q, out, lse = (x.squeeze(0) for x in (q, out, lse))
    if launch.config.cu_k:
        k, v = k.squeeze(0), v.squeeze(0)
    out32, lse32 = reference.attention(
        q, k, v, return_lse=True, compute_dtype=torch.float32, **launch.keywords
    )
    out.copy_(out32)
    lse.copy_(lse32)


def forward_on_cpu(q, k, v, *options):
    """Do what the operator does with CUDA tensors."""
    return launch.forward_operator(q, k, v, *options)


@contextlib.contextmanager
def stand_in_gpu(run=run_reference):
    """Take CPU tensors for CUDA ones, and `run` for the kernels; yields the list of launches."""
    launches = []

    def get(kernel, config, arch):
        def launch(tensors, numbers, section, workers):
            launches.append(Launch(config, tensors, numbers, section, workers))
            run(launches[-1])

        return launch

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.Tensor, "is_cuda", property(lambda self: True)),
            (torch.cuda, "device", lambda device: contextlib.nullcontext()),
            (torch.cuda, "current_device", lambda: None),
            (ops, "device_facts", lambda index: ("sm_90a", WORKERS)),
            (ops, "reset_counter", lambda device: torch.zeros(1, dtype=torch.int32)),
            (ops, "_launches", {}),
            (ops.CACHE, "get", get),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        library = stack.enter_context(torch.library._scoped_library("flash4", "IMPL"))
        library.impl("forward", forward_on_cpu, "CPU")
        yield launches


head_dims = st.integers(1, 32).map(lambda n: 8 * n)
seqlens = st.one_of(st.integers(1, 300), st.integers(1, 20_000))


@st.composite
def attention_problems(draw):
    heads_kv = draw(st.integers(1, 16))
    causal = draw(st.booleans())
    return AttentionProblem(
        dtype=draw(st.sampled_from([F16, BF16])),
        batch=draw(st.integers(1, 64)),
        seqlen_q=draw(seqlens),
        seqlen_k=draw(seqlens),
        heads_q=heads_kv * draw(st.integers(1, 128)),
        heads_kv=heads_kv,
        head_dim=draw(head_dims),
        head_dim_v=draw(head_dims),
        causal=causal,
        negative_scale=draw(st.booleans()),
        pack_gqa=draw(st.sampled_from([None, False, True])),
        window_left=draw(st.booleans()),
        window_right=not causal and draw(st.booleans()),
        softcap=draw(st.booleans()),
        sink=draw(st.booleans()),
        alibi=draw(st.booleans()),
        score_mod=draw(st.sampled_from([0, 0, 7])),
        mask_mod=draw(st.sampled_from([0, 0, 2**56])),
        cu_q=draw(st.booleans()),
        cu_k=draw(st.booleans()),
        used_q=draw(st.booleans()),
        used_k=draw(st.booleans()),
    )


def check_config(config):
    """Check what the hardware demands of a forward kernel for Hopper."""
    assert all(type(x) in (bool, int) for x in dataclasses.astuple(config)), (
        "str and enum break tracing"
    )
    assert config == replace(config) and hash(config) == hash(replace(config))
    graph = config.graph
    assert config.fits and graph.smem_bytes + sm90_fwd.SMEM_ALIGN <= 227 * 1024
    assert graph.registers <= graph.launch_registers and graph.threads <= 1024
    assert all(role.registers in range(24, 257, 8) for role in graph.roles), "setmaxnreg"
    assert config.tile_m in range(64, 257, 64), "64 rows per warpgroup, a TMA box has at most 256"
    assert config.tile_n in range(16, 257, 16), "P is the A operand of WGMMAs of K = 16"
    assert config.tile_d % 16 == config.tile_dv % 16 == 0
    assert config.pack in (1, 2, 4, 8, 16, 32, 64), "whole queries per warpgroup"
    assert config.tile_q * config.pack == config.tile_m
    # S and O in float32, P in 16 bit, all of one warpgroup's 64 rows over its 128 threads.
    accumulators = config.tile_n // 2 + config.tile_dv // 2 + config.tile_n // 4
    assert accumulators + 24 <= graph.role("mma").registers, "no registers are left to compute with"


@given(attention_problems())
def test_plans_of_random_problems(problem):
    plan = plan_forward(problem, "sm_90a", WORKERS)
    config, grid = plan.config, plan.grid
    check_config(config)
    assert hash(plan) == hash(plan_forward(problem, "sm_90a", WORKERS))
    assert (config.bf16, config.causal) == (problem.dtype == BF16, problem.causal)
    assert config.negate == problem.negative_scale
    assert (config.left, config.right) == (problem.window_left, problem.window_right)
    assert (config.softcap, config.sink) == (problem.softcap, problem.sink)
    assert config.alibi == problem.alibi
    assert (config.score_mod, config.mask_mod) == (problem.score_mod, problem.mask_mod)
    assert problem.head_dim <= config.tile_d and problem.head_dim_v <= config.tile_dv
    assert (grid.heads_kv, grid.batch) == (problem.heads_kv, problem.batch)
    assert 0 <= grid.m_blocks * config.tile_q - problem.seqlen_q < config.tile_q
    assert 0 <= grid.groups * config.pack - problem.gqa_ratio < config.pack
    assert 1 <= plan.section <= (2**30 if problem.varlen else grid.head_count)
    names = ("cu_q", "cu_k", "used_q", "used_k")
    assert all(getattr(config, name) == getattr(problem, name) for name in names)
    sides = (5 if side else None for side in (problem.window_left, problem.window_right))
    if problem.varlen:
        with pytest.raises(ValueError, match="GPU"):
            plan.schedule(WORKERS, *sides)
    else:
        used, most = plan.multiprocessors_of(WORKERS), WORKERS // config.cluster
        assert plan.schedule(WORKERS, *sides).step == min(used // config.cluster, grid.total)
        assert math.ceil(grid.total / (used // config.cluster)) == math.ceil(grid.total / most)
        assert used == WORKERS or dispatch.tiles_are_equal(problem)
    assert plan.reasons and all("runs on" in reason for _, reason in plan.rejected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [128, 8192])
def test_every_pair_of_head_dims_has_a_config_that_fits(causal, seqlen):
    configs = set()
    for head_dim, head_dim_v in itertools.product(range(8, 257, 8), repeat=2):
        problem = AttentionProblem(BF16, 1, seqlen, seqlen, 1, 1, head_dim, head_dim_v, causal)
        config, _ = sm90_fwd.choose_config(problem)
        check_config(config)
        assert config.tile_d >= head_dim and config.tile_dv >= head_dim_v
        configs.add(config)
    assert len(configs) <= 81, "nine padded sizes of each head dim"


@pytest.mark.parametrize("pack_gqa", [None, False, True])
@pytest.mark.parametrize("seqlen_q", [1, 2, 3, 17, 128, 1000, 8192])
def test_packing_covers_every_ratio(seqlen_q, pack_gqa):
    for ratio, head_dim in itertools.product(range(1, 129), (64, 128)):
        problem = AttentionProblem(
            BF16, 1, seqlen_q, 512, 2 * ratio, 2, head_dim, head_dim, False, False, pack_gqa
        )
        plan = plan_forward(problem, "sm_90a", WORKERS)
        pack = plan.config.pack
        assert plan.grid.groups * pack >= ratio
        if ratio == 1 or pack_gqa is False:
            assert pack == 1
        elif pack_gqa:
            assert pack > 1
        else:
            everything = min(64, 2 ** math.ceil(math.log2(ratio)))
            tiles = {p: tiles_per_kv_head(plan, p) for p in (1, everything)}
            assert tiles[pack] == min(tiles.values()), f"ratio {ratio}: {tiles}"


def tiles_per_kv_head(plan, pack):
    problem, rows = plan.problem, plan.config.tile_m
    return math.ceil(problem.gqa_ratio / pack) * math.ceil(problem.seqlen_q * pack / rows)


PROBLEM = AttentionProblem(BF16, 2, 300, 500, 8, 2, 128, 64, True)


def test_the_number_of_shapes_is_not_the_number_of_kernels():
    shapes = itertools.product((1, 7, 64), (129, 1000, 16384), (1, 513, 9000), (1, 24))
    plans = [
        plan_forward(AttentionProblem(BF16, b, sq, sk, h, h, 128, 128, True), "sm_90a", WORKERS)
        for b, sq, sk, h in shapes
    ]
    assert len({(plan.kernel, plan.config, plan.arch) for plan in plans}) == 1


@pytest.mark.parametrize("arch", ["sm_75", "sm_100", "sm_130", ""])
def test_other_architectures_are_refused_with_the_reason_of_each_kernel(arch):
    with pytest.raises(NotImplementedError) as caught:
        plan_forward(PROBLEM, arch, WORKERS)
    for name, _, target, _ in dispatch.FORWARD_KERNELS:
        reason = str(caught.value).partition(f"{name}: runs on ")[2].partition(";")[0]
        assert target in reason and reason.endswith(f", not {arch}")


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (13, 0)])
def test_capabilities_without_a_kernel(capability):
    with pytest.raises(
        NotImplementedError, match=r"\d+\.\d+; supported are 9\.0 \(Hopper"
    ) as caught:
        architecture(capability)
    assert f"compute capability {capability[0]}.{capability[1]};" in str(caught.value)


def test_hopper_and_blackwell_have_a_kernel():
    assert architecture((9, 0)) == "sm_90a"
    with pytest.raises(NotImplementedError, match=r"Blackwell \(10.0\) have never run on a GPU"):
        architecture((10, 0))
    for capability, name in (((10, 3), "Blackwell Ultra"), ((11, 0), r"Blackwell \(Thor\)")):
        with pytest.raises(NotImplementedError, match=name):
            architecture(capability)
    blackwells = [(arch, "sm100-fwd") for arch in ("sm_100a", "sm_103a", "sm_110a")]
    for arch, name in (("sm_90a", "sm90-fwd"), *blackwells):
        plan = plan_forward(PROBLEM, arch, WORKERS)
        assert (plan.name, plan.arch) == (name, arch)
        assert plan.grid.m_blocks == -(-PROBLEM.seqlen_q // plan.config.tile_q)
        plan.schedule(WORKERS)


@pytest.mark.parametrize("name", ["batch", "seqlen_q", "seqlen_k", "heads_q"])
def test_empty_problems_have_no_plan(name):
    with pytest.raises(ValueError, match="empty"):
        plan_forward(replace(PROBLEM, **{name: 0}), "sm_90a", WORKERS)


@pytest.mark.parametrize("name", ["head_dim", "head_dim_v"])
def test_the_kernel_says_which_head_dim_is_too_large(name):
    with pytest.raises(NotImplementedError, match=f"sm90-fwd: {name} 512 exceeds 256"):
        plan_forward(replace(PROBLEM, **{name: 512}), "sm_90a", WORKERS)


def test_the_first_kernel_that_can_is_taken_and_the_others_say_why_not(monkeypatch):
    real = dispatch.FORWARD_KERNELS[0]
    cannot = SimpleNamespace(can_implement=lambda problem: "it rains")
    table = (
        ("elsewhere", "m:C", "sm_80", None),
        ("cannot", "m:C", "sm_90a", cannot),
        real,
        ("second", *real[1:]),
    )
    monkeypatch.setattr(dispatch, "FORWARD_KERNELS", table)
    plan = plan_forward(PROBLEM, "sm_90a", WORKERS)
    assert (plan.name, plan.kernel) == real[:2]
    assert dict(plan.rejected) == {
        "elsewhere": "runs on sm_80, not sm_90a",
        "cannot": "it rains",
        "second": f"{real[0]} comes first",
    }
    for name, reason in plan.rejected:
        assert f"not {name}: {reason}" in str(plan)


def view(stride, offset=0, shape=(2, 5, 4, 64), device="cpu"):
    """Random tensor with the given strides in an aligned storage."""
    size = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if device == "meta":
        return torch.empty(size, dtype=F16, device=device).as_strided(shape, stride, offset)
    storage = torch.randn(size, generator=torch.manual_seed(0)).half()
    return storage.as_strided(shape, stride, offset)


# Layout: tensor, and what hinders TMA.
LAYOUTS = {
    "contiguous": (view((1280, 256, 64, 1)), None),
    "transposed": (view((1280, 64, 320, 1)), None),
    "interleaved": (view((3840, 768, 64, 1), offset=256), None),
    "every second": (view((2560, 512, 64, 1)), None),
    "padded": (view((1440, 288, 72, 1)), None),
    "expanded batch": (view((0, 256, 64, 1)), None),
    "expanded heads": (view((320, 64, 0, 1)), None),
    "aligned offset": (view((1280, 256, 64, 1), offset=8), None),
    "size 1 with an odd stride": (view((3, 64, 7, 1), shape=(1, 5, 1, 64)), None),
    "offset of 1": (view((1280, 256, 64, 1), offset=1), "not 16-byte aligned"),
    "offset of 4": (view((1280, 256, 64, 1), offset=4), "not 16-byte aligned"),
    "offset of 1, size 1 with an odd stride": (
        view((3, 64, 7, 1), 1, (1, 5, 1, 64)),
        "not 16-byte aligned",
    ),
    "head stride 68": (view((1360, 272, 68, 1)), "136 bytes"),
    "token stride 258": (view((1296, 258, 64, 1)), "516 bytes"),
    "batch stride 1284": (view((1284, 256, 64, 1)), "2568 bytes"),
    "every second element": (view((2560, 512, 128, 2)), "head_dim stride is 2"),
    "head_dim not last": (view((1280, 256, 1, 4)), "head_dim stride is 4"),
    "one element": (view((0, 0, 0, 0)), "head_dim stride is 0"),
}
both_devices = pytest.mark.parametrize("device", ["cpu", "meta"])


def check_addressable(x):
    """Check that `addressable` gives the same values in a layout for TMA, and copies only if it must."""
    given_layout = (x.stride(), x.storage_offset())
    y = ops.addressable(x)
    assert ops.layout_obstacle(y) is None
    assert y.stride(-1) == 1 and y.data_ptr() % 16 == 0
    assert not any(stride % 8 for stride in y.stride()[:-1]), f"{x.stride()} became {y.stride()}"
    assert y.dtype == x.dtype and torch.equal(x, y)
    copied = y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert copied == (ops.layout_obstacle(x) is not None)
    assert (x.stride(), x.storage_offset()) == given_layout


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_that_tma_cannot_address_are_copied(layout):
    x, obstacle = LAYOUTS[layout]
    found = ops.layout_obstacle(x)
    assert (found is None) if obstacle is None else (obstacle in found)
    check_addressable(x)


@st.composite
def strided_tensors(draw):
    shape = (*(draw(st.integers(1, 3)) for _ in range(3)), draw(st.sampled_from([8, 24])))
    steps = st.one_of(st.integers(0, 40).map(lambda n: 8 * n), st.integers(0, 40))
    stride = (draw(steps), draw(steps), draw(steps), draw(st.sampled_from([1, 1, 1, 2, 0])))
    return view(stride, draw(st.sampled_from([0, 0, 8, 24, 1, 4])), shape)


@given(strided_tensors())
def test_addressable_for_any_strides(x):
    check_addressable(x)


@both_devices
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_explain_says_what_is_copied(layout, name, device):
    x, obstacle = LAYOUTS[layout]
    x = view(x.stride(), x.storage_offset(), x.shape, device)
    operands = dict.fromkeys("qkv", torch.empty(x.shape, dtype=F16, device=device)) | {name: x}
    plan = flash4.explain(**operands)
    if obstacle is None:
        assert plan.copies == () and "copies nothing" in str(plan)
    else:
        (copy,) = plan.copies
        assert copy.startswith(f"{name}: ") and obstacle in copy
        assert f"copies {copy}" in str(plan) and "nothing" not in str(plan).splitlines()[-1]


@both_devices
def test_explain_prints_the_facts(device):
    q, k, v = (
        torch.empty(shape, dtype=BF16, device=device)
        for shape in ((2, 300, 12, 128), (2, 500, 3, 128), (2, 500, 3, 64))
    )
    plan = flash4.explain(q, k, v, causal=True, softmax_scale=-1)
    text = str(plan)
    assert plan.problem.negative_scale and plan.arch == "sm_90a"
    for fact in (
        "sm90-fwd for sm_90a",
        "batch 2, queries 300, keys 500, heads 12/3, head dim 128/64, bfloat16, causal",
        repr(plan.config),
        f"{plan.grid.total} tiles of {plan.config.tile_q} queries, {plan.section} heads per section",
        *(f"because {reason}" for reason in plan.reasons),
    ):
        assert fact in text
    assert "causal" not in str(flash4.explain(q, k, v)).splitlines()[0]
    with pytest.raises(NotImplementedError, match="sm90-fwd: runs on sm_90a, not sm_75"):
        flash4.explain(q, k, v, arch="sm_75")


@pytest.mark.parametrize("layouts", [*itertools.product(strategies.LAYOUTS, repeat=2)])
def test_the_kernel_gets_each_tensor_in_its_own_layout(layouts):
    """Through the operator: strides of one tensor are never another's, and copies are as explained."""
    problem = strategies.Problem(
        batch=2, heads_kv=2, ratio=2, head_dim=16, head_dim_v=8, seqlen_q=5, seqlen_k=6,
        causal=True, layouts=(layouts[0], layouts[1], layouts[0]),
    )  # fmt: skip
    inputs = problem.tensors()
    explained = {copy[0] for copy in flash4.explain(*inputs, **problem.keywords()).copies}
    with stand_in_gpu() as launches:
        out, lse = flash4.flash_attn_func(*inputs, return_lse=True, **problem.keywords())
    (launch,) = launches
    expected = reference.attention(
        *inputs, return_lse=True, compute_dtype=torch.float32, **problem.keywords()
    )
    assert torch.equal(out, expected[0].half()) and torch.equal(lse, expected[1])
    for name, x, y in zip("qkv", inputs, launch.tensors, strict=False):
        copied = x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()
        assert copied == (name in explained)


finite_scales = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-1e38, 1e38),
    st.floats(-2.0, 2.0),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1e-39, 1e-38, 5e-324, 1e39, -1e300]),
)


@given(finite_scales)
def test_the_kernel_gets_a_positive_scale_that_float32_can_hold(scale):
    """The kernel multiplies -inf by it and divides by it: 0, denormals and Inf would give NaN."""
    x = torch.zeros(1, 2, 1, 8, dtype=F16)
    with stand_in_gpu(run=lambda launch: None) as launches:
        try:
            flash4.flash_attn_func(x, x, x, softmax_scale=scale)
        except ValueError as error:
            assert "softmax_scale" in str(error) and (abs(scale) > 1e30 or 0 < abs(scale) < 1e-38)
            return
    (launch,) = launches
    rounded = torch.tensor(launch.scale, dtype=torch.float32).item() * math.log2(math.e)
    assert FLOAT32.tiny <= rounded <= FLOAT32.max, f"scale {scale} became {launch.scale}"
    assert launch.config.negate == (scale < 0)
    assert launch.scale == (abs(scale) if scale else 1.0)
    assert scale or not launch.tensors[0].any(), "a scale of 0 runs as zeroed queries"


@pytest.mark.parametrize("scale", [None, 0.25, -0.25, 0, 1, torch.tensor(0.5)])
def test_results_with_a_scale(scale):
    q, k, v = (torch.randn(1, 6, 2, 16, generator=torch.manual_seed(i)).half() for i in range(3))
    with stand_in_gpu():
        out, lse = flash4.flash_attn_func(q, k, v, softmax_scale=scale, return_lse=True)
    expected = reference.attention(
        q, k, v, softmax_scale=scale, return_lse=True, compute_dtype=torch.float32
    )
    assert torch.equal(out, expected[0].half()) and torch.allclose(lse, expected[1])


@given(strategies.problems(max_seqlen=40, max_scores=10_000))
def test_what_a_call_asks_for_reaches_the_kernel(problem):
    """Through the operator: with what a launch says alone, the reference gives what the call should."""
    inputs, keywords = problem.tensors(), problem.keywords()
    with stand_in_gpu():
        out, lse = problem.function(*inputs, return_lse=True, **keywords)
    expected, expected_lse = reference.attention(
        *inputs, return_lse=True, compute_dtype=torch.float32, **keywords
    )
    assert torch.allclose(out.float(), expected, rtol=1e-2, atol=1e-2)
    assert torch.allclose(lse, expected_lse, rtol=1e-4, atol=1e-4)


def test_new_sizes_of_features_ask_for_no_new_kernel():
    x = torch.zeros(1, 30, 2, 8, dtype=F16)
    with stand_in_gpu(run=lambda launch: None) as launches:
        for left, right, softcap, sink in ((3, 4, 5.0, 0.5), (0, 9, 0.1, -3.0), (10**6, 1, 1e6, 0)):
            flash4.flash_attn_func(
                x, x, x, window_size=(left, right), softcap=softcap,
                learnable_sink=torch.full((2,), float(sink)),
            )  # fmt: skip
    assert len({launch.config for launch in launches}) == 1
    assert [launch.numbers[2:4] for launch in launches] == [(3, 4), (0, 9), (10**6, 1)]
    assert [launch.numbers[0] for launch in launches] == [5.0, 0.1, 1e6]
    roots = [launch.numbers[4] ** 5 for launch in launches]
    assert roots == pytest.approx([5.0, 0.1, 1e6], rel=1e-9)
    assert [launch.tensors[5][0].item() for launch in launches] == [0.5, -3.0, 0.0]


def test_packed_outputs_real_and_fake():
    """Shapes, strides and dtypes agree, also for heads-first queries; the operator takes packed calls."""
    for q in (torch.randn(9, 4, 64).half(), torch.randn(4, 9, 64).half().transpose(0, 1)):
        kv = torch.randn(12, 2, 64).half()
        cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 9], [0, 5, 12]))
        lengths = (0.125, True, None, -1, -1, 0.0, None, None, cu_q, cu_k, None, cu_k[1:] - 5)
        with stand_in_gpu():
            real = ops.forward(q, kv, kv, *lengths)
            torch.library.opcheck(ops.forward, (q, kv, kv, *lengths))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = ops.forward(*(mode.from_tensor(x) for x in (q, kv, kv)), *lengths)
        for r, f in zip(real, fake, strict=True):
            assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)
        assert real[1].shape == (4, 9) and real[0].stride() == q.stride()


def test_sinks_of_any_layout_and_dtype():
    x = torch.randn(1, 5, 4, 8).half()
    wide = torch.randn(4, 3).t()
    for sink in (wide[1], wide[1].half(), wide[1].bfloat16().requires_grad_()):
        with stand_in_gpu() as launches:
            out = flash4.flash_attn_func(x, x, x, learnable_sink=sink)
        taken = launches[0].tensors[5]
        assert taken.dtype == torch.float32 and taken.is_contiguous()
        assert torch.equal(taken, sink.detach().float()) and out.requires_grad == sink.requires_grad
        plan = flash4.explain(x, x, x, learnable_sink=sink)
        assert any("learnable_sink" in copy for copy in plan.copies) == (
            sink.dtype != torch.float32
        )


def test_a_second_call_runs_no_policy():
    x = torch.zeros(3, 17, 2, 8, dtype=F16)
    with (
        stand_in_gpu(run=lambda launch: None) as launches,
        mock.patch.object(dispatch, "choose_section", wraps=dispatch.choose_section) as policy,
    ):
        for _ in range(3):
            flash4.flash_attn_func(x, x, x)
    assert len(launches) == 3 and policy.call_count == 1


def test_calls_that_differ_are_never_taken_for_one_another():
    """All in one process and twice, since what a call needs is looked up by its facts."""
    shapes = [
        ((2, 9, 4, 16), (2, 9, 2, 16)),
        ((2, 9, 4, 16), (2, 9, 4, 16)),
        ((1, 9, 4, 16), (1, 8, 2, 16)),
    ]
    keywords = [
        dict(causal=causal, softmax_scale=scale, pack_gqa=pack_gqa)
        for causal in (False, True)
        for scale in (0.5, -0.5, 0.3)
        for pack_gqa in (None, False, True)
    ]
    keywords += [
        dict(softmax_scale=0.5, window_size=window, softcap=softcap, learnable_sink=sink)
        for window in ((None, None), (3, None), (None, 3), (3, 3), (3, 0))
        for softcap in (0.0, 2.0)
        for sink in (None, torch.zeros(4))
    ]
    calls = [*itertools.product(shapes, (F16, BF16), keywords)]
    with stand_in_gpu(run=lambda launch: None) as launches:
        for (q_shape, kv_shape), dtype, options in calls * 2:
            q, kv = torch.zeros(q_shape, dtype=dtype), torch.zeros(kv_shape, dtype=dtype)
            flash4.flash_attn_func(q, kv, kv, **options)
            plan, launch = flash4.explain(q, kv, kv, **options), launches[-1]
            assert launch.config == plan.config
            assert (launch.section, launch.workers) == (
                plan.section,
                plan.multiprocessors_of(WORKERS),
            )
            assert launch.scale == (options.get("softcap") or abs(options["softmax_scale"]))
    assert len(launches) == 2 * len(calls)


OUTPUT_LAYOUTS = {
    "contiguous": (2, 5, 4, 64),
    "heads first": (2, 4, 5, 64),
    "one query": (2, 4, 1, 64),
    "one head": (2, 1, 5, 64),
    "one of all": (1, 1, 1, 64),
    "no query": (2, 4, 0, 64),
    "odd strides": (1, 1, 5, 64),
}


def queries(layout):
    x = torch.randn(OUTPUT_LAYOUTS[layout]).half()
    if layout == "odd strides":
        x = x.as_strided(x.shape, (3, 5, 64, 1))
    return x if layout == "contiguous" else x.transpose(1, 2)


@pytest.mark.parametrize("head_dim_v", [64, 32])
@pytest.mark.parametrize("layout", OUTPUT_LAYOUTS)
def test_real_and_fake_outputs_agree(layout, head_dim_v):
    q = queries(layout)
    kv = torch.randn(q.shape[0], 7, q.shape[2], 64).half()
    inputs = (q, kv, kv[..., :head_dim_v])
    with stand_in_gpu():
        real = ops.forward(*inputs, 0.125, False, None)
    with FakeTensorMode() as mode:
        fake = ops.forward(*(mode.from_tensor(x) for x in inputs), 0.125, False, None)
    for name, r, f in zip(("out", "lse"), real, fake, strict=True):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype), name
    assert ops.empty_output(q, head_dim_v).stride() == real[0].stride()
    assert real[1].dtype == torch.float32 and real[1].is_contiguous()
    if layout == "heads first":
        assert real[0].transpose(1, 2).is_contiguous(), "out follows q's memory order"


def test_output_of_other_layouts_is_contiguous():
    for layout in ("interleaved", "expanded batch", "expanded heads", "every second", "padded"):
        assert ops.empty_output(LAYOUTS[layout][0], 64).is_contiguous(), layout


@pytest.mark.parametrize("layout", ["contiguous", "heads first", "one query"])
def test_the_operator_is_registered_as_torch_expects(layout):
    q = queries(layout)
    kv = torch.randn(q.shape[0], 7, q.shape[2], 64).half()
    with stand_in_gpu():
        torch.library.opcheck(ops.forward, (q, kv, kv, 0.125, True, None))
        sink = torch.zeros(q.shape[2])
        torch.library.opcheck(ops.forward, (q, kv, kv, 0.125, False, None, 3, 4, 5.0, sink))
        torch.library.opcheck(
            ops.forward,
            (q.clone().requires_grad_(), kv, kv, 0.125, True, True),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return flash4.flash_attn_func(q, k, v, causal=True, return_lse=True)


def test_torch_compile_makes_one_graph():
    """With a CUDA device that has no memory, since tracing looks at shapes alone."""
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    compiled = torch.compile(Attention(), fullgraph=True, backend=backend)
    with FakeTensorMode():
        q = torch.empty(2, 5, 4, 64, dtype=BF16, device="cuda")
        kv = torch.empty(2, 9, 2, 64, dtype=BF16, device="cuda")
        out, lse = compiled(q, kv, kv)
    assert (out.shape, lse.shape) == ((2, 5, 4, 64), (2, 4, 5))
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.flash4.forward in called or torch.ops.flash4.forward.default in called


def test_torch_compile_takes_features_and_packed_sequences():
    """In one graph, all but mods, whose code is looked at while tracing."""

    def attend(q, kv, packed_q, packed_kv, sink, cu, used):
        dense = flash4.flash_attn_func(
            q, kv, kv, window_size=(9, 5), softcap=3.0, learnable_sink=sink, alibi_slopes=sink
        )
        packed, lse = flash4.flash_attn_varlen_func(
            packed_q,
            packed_kv,
            packed_kv,
            cu,
            cu,
            5,
            5,
            seqused_k=used,
            causal=True,
            return_lse=True,
        )
        return dense, packed, lse

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    with FakeTensorMode():
        q = torch.empty(2, 9, 4, 64, dtype=BF16, device="cuda")
        kv = torch.empty(2, 9, 2, 64, dtype=BF16, device="cuda")
        sink = torch.empty(4, device="cuda")
        cu, used = (torch.empty(n, dtype=torch.int32, device="cuda") for n in (3, 2))
        packed_q, packed_kv = (
            torch.empty(9, heads, 64, dtype=BF16, device="cuda") for heads in (4, 2)
        )
        dense, packed, lse = compiled(q, kv, packed_q, packed_kv, sink, cu, used)
    assert (dense.shape, packed.shape, lse.shape) == (q.shape, (9, 4, 64), (4, 9))


def test_tracing_keeps_sizes_symbolic():
    """Batch, heads and lengths stay free: one graph serves every size."""
    with FakeTensorMode():
        q = torch.empty(2, 5, 4, 64, dtype=BF16, device="cuda")
        k = torch.empty(2, 9, 4, 64, dtype=BF16, device="cuda")
        v = torch.empty(2, 9, 4, 32, dtype=BF16, device="cuda")
        batch, queries, keys, heads = (torch.export.Dim(n, max=9999) for n in "bqkh")
        sizes = {0: batch, 1: keys, 2: heads}
        program = torch.export.export(
            Attention(), (q, k, v), dynamic_shapes=({**sizes, 1: queries}, sizes, sizes)
        )
    out, lse = (node.meta["val"] for node in list(program.graph.nodes)[-1].args[0])
    assert sum(isinstance(n, torch.SymInt) for n in (*out.shape, *lse.shape)) == 6
    assert out.shape[3] == 32


@pytest.mark.parametrize(
    ("field", "value"),
    [("tile_n", 56), ("tile_n", 0), ("tile_m", 96), ("tile_m", 320), ("pack", 3)],
)
def test_configs_that_would_break_the_compiler_are_refused(field, value):
    """The DSL ends the whole process on some of them."""
    good = {"bf16": True, "tile_d": 64, "tile_dv": 64, "tile_m": 128, "tile_n": 64, "causal": True}
    ForwardConfig(**good)
    with pytest.raises(ValueError, match=field):
        ForwardConfig(**{**good, field: value})


def test_skipping_and_turns_exclude_each_other():
    good = {"bf16": True, "tile_d": 64, "tile_dv": 64, "tile_m": 128, "tile_n": 64, "skip": True}
    ForwardConfig(**good, causal=True)
    for wrong in ({"causal": True, "turns": True}, {"causal": False}):
        with pytest.raises(ValueError, match="skip"):
            ForwardConfig(**good, **wrong)


def test_scale_zero_with_huge_scores():
    """Scores near the end of float32 must vanish too."""
    q, k, v = (
        torch.randn(1, 6, 2, 16, generator=torch.manual_seed(i)).bfloat16() for i in range(3)
    )
    q, k = q * 1e16, k * 1e16
    with stand_in_gpu():
        out, lse = flash4.flash_attn_func(q, k, v, softmax_scale=0.0, causal=True, return_lse=True)
    rows = torch.arange(1, 7)
    mean = v.float().cumsum(1) / rows[:, None, None]
    assert torch.allclose(out.float(), mean, atol=2e-2)
    assert torch.allclose(lse, rows.log().expand_as(lse))


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 7, 8, 16, 64, 71, 128])
def test_the_number_of_queries_asks_for_two_kernels_at_most(ratio):
    """What a server meets as lengths change must not compile again and again."""
    configs = set()
    for seqlen in (*range(1, 200), 255, 256, 257, 1000, 4095, 4096, 10_000):
        problem = AttentionProblem(BF16, 1, seqlen, 4096, 2 * ratio, 2, 128, 128, causal=True)
        configs.add(plan_forward(problem, "sm_90a", WORKERS).config)
    assert len(configs) <= (1 if ratio == 1 else 2)


def test_more_tiles_than_int32_counts():
    problem = AttentionProblem(BF16, 2**17, 1, 1, 2**14, 2**14, 8, 8)
    with pytest.raises(NotImplementedError, match="split the batch"):
        plan_forward(problem, "sm_90a", WORKERS)


def test_a_kernel_that_shared_memory_cannot_hold_is_refused():
    from flash4.sm90.fwd import ForwardSm90

    wide = ForwardConfig(True, 256, 256, tile_m=128, tile_n=64, causal=True, stages=3)
    assert not wide.fits
    with pytest.raises(ValueError, match="232448"):
        ForwardSm90(wide)


@pytest.mark.parametrize("name", test_smoke.PROBLEMS)
def test_the_smoke_problems_are_taken(name):
    """What the GPU tests call is not refused: they run rarely, this test always."""
    problem = test_smoke.PROBLEMS[name]
    with stand_in_gpu() as launches:
        problem.function(*problem.tensors("cpu"), return_lse=True, **problem.keywords())
    assert launches
