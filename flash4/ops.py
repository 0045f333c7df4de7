"""Execution of planned calls, as PyTorch operators. No policy: plans come from ``dispatch``."""

import functools
from dataclasses import dataclass, replace

import torch

from flash4.common.mods import AUX
from flash4.dispatch import (
    BackwardPlan,
    Plan,
    architecture,
    gradient_obstacle,
    plan_backward,
    plan_forward,
)
from flash4.jit.cache import CACHE
from flash4.problem import LENGTHS, AttentionProblem, CallOptions, check_call, positive_scale

ALIGNMENT = 16  # bytes; of addresses and strides that TMA takes
MAX_LAUNCHES = 8_192
REDONE = "redone"  # name of the counter among a kernel's optional tensors


@dataclass(frozen=True)
class Launch:
    """What a call needs at run time, looked up by shapes and strides.

    Attributes:
        function: compiled kernel.
        section: heads per section of the tile schedule.
        workers: multiprocessors.
        numbers: names of the numbers that the kernel takes.
        tensors: names of the tensors that it takes beyond those of every call.
    """

    function: object
    section: int
    workers: int
    numbers: tuple[str, ...]
    tensors: tuple[str, ...]


@functools.cache
def device_facts(index: int) -> tuple[str, int]:
    """(architecture, multiprocessors) of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return architecture((properties.major, properties.minor)), properties.multi_processor_count


def stride_obstacle(shape, strides, element_size: int) -> str | None:
    """Why TMA cannot address a tensor with these strides, or None."""
    if strides[-1] != 1 and shape[-1] > 1:
        return f"its head_dim stride is {strides[-1]}, TMA needs 1"
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size > 1 and stride * element_size % ALIGNMENT:
            return f"a stride of {stride * element_size} bytes is not a multiple of {ALIGNMENT}"
    return None


def layout_obstacle(x) -> str | None:
    """Why TMA cannot address a tensor as it lies, or None."""
    obstacle = stride_obstacle(x.shape, x.stride(), x.element_size())
    # A meta tensor has no address: say what would hold if its storage began at an aligned one.
    address = x.storage_offset() * x.element_size() if x.is_meta else x.data_ptr()
    if obstacle is None and address % ALIGNMENT:
        obstacle = f"its first element is not {ALIGNMENT}-byte aligned"
    return obstacle


@functools.lru_cache(maxsize=MAX_LAUNCHES)
def _canonical_strides(shape, strides):
    """Strides with those of size-1 dimensions made even (the kernel checks all of them); None if already so."""
    if all(stride % 8 == 0 for stride in strides[:-1]) and strides[-1] == 1:
        return None
    even = (s if size > 1 else shape[-1] for size, s in zip(shape[:-1], strides[:-1], strict=True))
    return (*even, 1)


@functools.lru_cache(maxsize=MAX_LAUNCHES)
def _must_copy(shape, strides, element_size: int) -> bool:
    return stride_obstacle(shape, strides, element_size) is not None


def addressable(x):
    """Return x, or a copy of it where TMA cannot address it."""
    shape, strides = x.shape, x.stride()
    if x.data_ptr() % ALIGNMENT or _must_copy(shape, strides, x.element_size()):
        return x.clone(memory_format=torch.contiguous_format)
    strides = _canonical_strides(shape, strides)
    return x if strides is None else x.as_strided(shape, strides)


def whole_rows(v):
    """Return v, or a copy of it whose rows lie apart, and batch entries a whole number of rows from each other."""
    row = v.stride(1)
    if row and (v.shape[0] == 1 or v.stride(0) % row == 0):
        return v
    return v.clone(memory_format=torch.contiguous_format)


def empty_output(q, head_dim_v: int):
    """Output for q: (batch, seqlen_q, heads_q, head_dim_v), or packed, in q's memory order of heads and queries."""
    if q.ndim == 3:
        return empty_output(q.unsqueeze(0), head_dim_v).squeeze(0)
    batch, seqlen, heads, _ = q.shape
    if q.stride(1) < q.stride(2) and q.transpose(1, 2).is_contiguous():
        return q.new_empty((batch, heads, seqlen, head_dim_v)).transpose(1, 2)
    return q.new_empty((batch, seqlen, heads, head_dim_v))


_launches: dict[tuple, Launch | None] = {}


def _launch_for(q, k, v, options: CallOptions) -> Launch | None:
    """Look a call up; None for an empty problem. Validation and planning run once per key."""
    key = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    key += options.flags
    try:
        return _launches[key]
    except KeyError:
        pass
    problem = AttentionProblem.of_call(q, k, v, options)
    launch = None
    if not problem.is_empty:
        arch, workers = device_facts(q.device.index)
        launch = _launch_of(plan_forward(problem, arch, workers), q.device, workers)
    if len(_launches) >= MAX_LAUNCHES:
        _launches.clear()
    _launches[key] = launch
    return launch


def _launch_of(plan: Plan, device, workers: int) -> Launch:
    """What a plan's kernel, compiled here if it must be, needs at run time."""
    config = plan.config
    with torch.cuda.device(device):
        function = CACHE.get(plan.kernel, config, plan.arch)
    return Launch(function, plan.section, workers, config.numbers, config.optional_tensors)


def _numbers(names: tuple[str, ...], options: CallOptions, scale: float) -> tuple:
    """Values of the numbers that a kernel takes; ``scale`` is positive."""
    if names == ("scale",):
        return (scale,)
    cap = options.softcap
    values = {
        "scale": cap or scale,
        "cap_scale": scale / cap if cap else None,
        "left": options.window_left,
        "right": options.window_right,
    }
    return tuple(values[name] for name in names)


def _optional_tensor(name: str, options: CallOptions, batch: int):
    """What a kernel takes by this name: a tensor of the type and layout that it was compiled for."""
    if name.startswith(AUX):
        return options.aux_tensors[int(name[len(AUX) :])].detach()
    x = getattr(options, name).detach()
    if name in LENGTHS:
        return x.to(torch.int32).contiguous()
    x = x.to(torch.float32).contiguous()
    if name == "alibi_slopes" and x.ndim == 1:
        x = x.expand(batch, -1)
    return x


def empty_lse(q):
    """Log-sum-exp for q: (batch, heads_q, seqlen_q), or packed (heads_q, total_q)."""
    *batch, seqlen, heads, _ = q.shape
    return q.new_empty((*batch, heads, seqlen), dtype=torch.float32)


def fill_without_keys(out, lse, options: CallOptions):
    """Write the result of a call in which no query sees a key."""
    out.zero_()
    lse.fill_(float("-inf"))
    if options.sink is None or not lse.numel() or not options.batch(out):
        return
    row = torch.arange(lse.shape[-1], device=lse.device)
    cu, used, inside = options.cu_seqlens_q, options.seqused_q, None
    if cu is not None:
        sequence = torch.bucketize(row, cu[1:], right=True).clamp(max=cu.shape[0] - 2)
        inside = (row >= cu[0]) & (row < cu[-1])
        if used is not None:
            inside &= row - cu[sequence] < used[sequence]
    elif used is not None:
        inside = (row < used[:, None])[:, None]
    sink = options.sink.detach()[:, None].float().expand(lse.shape)
    lse.copy_(sink if inside is None else torch.where(inside, sink, lse))


def run_forward(q, k, v, out, options: CallOptions):
    """Write attention into ``out`` and return the log-sum-exp; shapes as in the public functions."""
    launch = _launch_for(q, k, v, options)
    lse = empty_lse(q)
    if launch is None:
        fill_without_keys(out, lse, options)
        return lse
    _run(launch, (q, k, v, out, lse), options)
    return lse


def _run(launch: Launch, tensors, options: CallOptions, redone=None):
    """Launch a kernel on q, k, v, out and lse, and the counter of what it works on again if it has one."""
    q, k, v, out, lse = tensors
    batch = options.batch(q)
    q, scale = positive_scale(q, options.softmax_scale)
    if q.ndim == 3:  # packed sequences: a batch of one to the kernel
        q, out, lse = q[None], out[None], lse[None]
    if k.ndim == 3:
        k, v = k[None], v[None]
    if options.cu_seqlens_k is not None or options.seqused_k is not None:
        v = whole_rows(v)
    tensors = (addressable(q), addressable(k), addressable(v), addressable_out(out), lse)
    tensors += tuple(
        redone if name == REDONE else _optional_tensor(name, options, batch)
        for name in launch.tensors
    )
    numbers = _numbers(launch.numbers, options, scale)
    if q.device.index == torch.cuda.current_device():
        launch.function(tensors, numbers, launch.section, launch.workers)
    else:
        with torch.cuda.device(q.device):
            launch.function(tensors, numbers, launch.section, launch.workers)


def count_redone(q, k, v, options: CallOptions) -> tuple[int, int]:
    """(tiles worked on again, tiles) of a call; see ``interface.redone_tiles``."""
    problem = AttentionProblem.of_call(q, k, v, options)
    if problem.is_empty:
        return 0, 0
    arch, workers = device_facts(q.device.index)
    plan = plan_forward(problem, arch, workers)
    if plan.config.counted is None:
        return 0, plan.grid.total
    launch = _launch_of(replace(plan, config=plan.config.counted), q.device, workers)
    redone = q.new_zeros(1, dtype=torch.int32)
    _run(launch, (q, k, v, empty_output(q, v.shape[-1]), empty_lse(q)), options, redone)
    return int(redone), plan.grid.total


def addressable_out(out):
    """Return ``out``, whose layout was checked, with strides that the kernel takes."""
    strides = _canonical_strides(out.shape, out.stride())
    return out if strides is None else out.as_strided(out.shape, strides)


def plan_call(q, k, v, options: CallOptions, arch: str, workers: int) -> Plan:
    """Plan of a call, with the copies that its tensors need."""
    problem = AttentionProblem.of_call(q, k, v, options)
    plan = plan_forward(problem, arch, workers)
    copies = [(name, layout_obstacle(x)) for name, x in (("q", q), ("k", k), ("v", v))]
    if v.ndim == 4 and problem.varlen and whole_rows(v) is not v:
        copies[2] = ("v", "its batch stride is no multiple of its row stride")
    if options.softmax_scale == 0:
        copies[0] = ("q", "a scale of 0 runs as zeroed queries")
    for name, x in (("learnable_sink", options.sink), ("alibi_slopes", options.alibi_slopes)):
        if x is not None and x.dtype != torch.float32:
            copies.append((name, "the kernel takes float32"))
    for name, x in zip(LENGTHS, options.lengths, strict=True):
        if x is not None and x.dtype != torch.int32:
            copies.append((name, "the kernel takes int32"))
    return replace(plan, copies=tuple(f"{name}: {why}" for name, why in copies if why is not None))


torch.library.define(
    "flash4::forward",
    "(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal=False, bool? pack_gqa=None, "
    "SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, Tensor? sink=None, "
    "Tensor? alibi_slopes=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "int score_mod=0, int mask_mod=0, Tensor[]? aux_tensors=None) "
    "-> (Tensor, Tensor)",
)


@torch.library.impl("flash4::forward", "CUDA")
def _forward(q, k, v, *options):
    out = empty_output(q, v.shape[-1])
    return out, run_forward(q, k, v, out, CallOptions(*options))


@torch.library.register_fake("flash4::forward")
def _forward_fake(q, k, v, *options):
    check_call(q, k, v, CallOptions(*options))
    return empty_output(q, v.shape[-1]), empty_lse(q)


@dataclass(frozen=True)
class BackwardLaunch:
    """What a backward needs at run time, looked up by shapes.

    Attributes:
        prepare: compiled kernel before the main one.
        main: compiled kernel.
        finish: compiled kernel after it.
        section: heads per section of the tile schedule.
        query_blocks: blocks of queries of each head.
        tile_m: queries of a block.
        tile_d: head dim of dQ, padded.
    """

    prepare: object
    main: object
    finish: object
    section: int
    query_blocks: int
    tile_m: int
    tile_d: int


_backward_launches: dict[tuple, BackwardLaunch | None] = {}


def _backward_launch_for(q, k, v, options: CallOptions, dlse: bool) -> BackwardLaunch | None:
    """Look a backward up; None for an empty problem. Planning runs once per key."""
    key = (q.shape, k.shape, v.shape, q.dtype, q.device, dlse, *options.flags)
    try:
        return _backward_launches[key]
    except KeyError:
        pass
    problem = AttentionProblem.of_call(q, k, v, options)
    launch = None
    if not problem.is_empty:
        plan = plan_backward(problem, *device_facts(q.device.index), dlse)
        with torch.cuda.device(q.device):
            functions = [CACHE.get(*kernel) for kernel in plan.kernels]
        sizes = (plan.query_blocks, plan.config.tile_m, plan.config.tile_d)
        launch = BackwardLaunch(*functions, plan.section, *sizes)
    if len(_backward_launches) >= MAX_LAUNCHES:
        _backward_launches.clear()
    _backward_launches[key] = launch
    return launch


def empty_gradients(q, k, v):
    """Gradients for q, k and v, each in its tensor's memory order of heads and rows."""
    return tuple(empty_output(x, x.shape[-1]) for x in (q, k, v))


def run_backward(dout, dlse, q, k, v, out, lse, options: CallOptions):
    """Gradients (dq, dk, dv) of a call.

    Args:
        dout: gradient of out, any strides.
        dlse: gradient of lse, or None.
        q: as the call was given it, as k and v.
        k: keys.
        v: values.
        out: result of the call.
        lse: log-sum-exp of the call.
        options: of the call.
    """
    launch = _backward_launch_for(q, k, v, options, dlse is not None)
    gradients = empty_gradients(q, k, v)
    if launch is None:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    dq, dk, dv = (addressable_out(gradient) for gradient in gradients)
    q, k, v, out, dout = (addressable(x) for x in (q, k, v, out, dout))
    rows = (q.shape[0], q.shape[2], launch.query_blocks)  # batch, heads, blocks
    statistics = q.new_empty((2, *rows[:2], rows[2] * launch.tile_m), dtype=torch.float32)
    sums = q.new_empty((*rows, launch.tile_m * launch.tile_d), dtype=torch.float32)
    prepared = (out, dout, lse.contiguous(), *statistics, sums)
    prepared += () if dlse is None else (dlse,)
    scale = options.softmax_scale
    with torch.cuda.device(q.device):
        launch.prepare(prepared)
        launch.main((q, k, v, dout, *statistics, sums, dk, dv), scale, launch.section)
        launch.finish(sums, dq, scale)
    return gradients


def plan_backward_call(
    inputs, options: CallOptions, arch: str, workers: int, dlse: bool
) -> BackwardPlan:
    """Plan of the backward of a call with ``inputs`` q, k and v, with the copies that they need."""
    plan = plan_backward(AttentionProblem.of_call(*inputs, options), arch, workers, dlse)
    copies = zip(("q", "k", "v"), map(layout_obstacle, inputs), strict=True)
    return replace(plan, copies=tuple(f"{name}: {why}" for name, why in copies if why is not None))


torch.library.define(
    "flash4::backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "float softmax_scale, bool causal=False) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl("flash4::backward", "CUDA")
def _backward(dout, dlse, q, k, v, out, lse, *options):
    return run_backward(dout, dlse, q, k, v, out, lse, CallOptions(*options))


@torch.library.register_fake("flash4::backward")
def _backward_fake(dout, dlse, q, k, v, out, lse, *options):
    return empty_gradients(q, k, v)


def _refuse_second_derivatives(ctx, *gradients):
    raise NotImplementedError(
        "flash4 has no second derivatives: its backward was called with create_graph=True, and is not differentiable"
    )


backward = torch.ops.flash4.backward.default


def _save(ctx, inputs, output):
    """Keep what the gradients need; refuse calls whose gradients are not built, while the caller is still there."""
    q, k, v, *fields = inputs
    options = CallOptions(*fields)
    obstacle = gradient_obstacle(AttentionProblem.of_call(q, k, v, options))
    if obstacle is not None:
        raise NotImplementedError(f"{obstacle}; without gradients, call it under torch.no_grad()")
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)
    ctx.call = (options.softmax_scale, options.causal)


def _gradients(ctx, dout, dlse):
    q, k, v, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    gradients = backward(dout, dlse, q, k, v, out, lse, *ctx.call)
    asked = zip(ctx.needs_input_grad, gradients, strict=False)
    # As many as the caller gave: the dispatcher leaves out what is at its default.
    others = [None] * (len(ctx.needs_input_grad) - len(gradients))
    return (*(x if wanted else None for wanted, x in asked), *others)


torch.library.register_autograd("flash4::backward", _refuse_second_derivatives)
torch.library.register_autograd("flash4::forward", _gradients, setup_context=_save)
forward = torch.ops.flash4.forward.default
