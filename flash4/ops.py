"""Execution of planned calls, as PyTorch operators. No policy: plans come from ``dispatch``."""

import functools
from dataclasses import dataclass, replace

import torch

from flash4.common.mods import AUX
from flash4.dispatch import Plan, architecture, plan_forward
from flash4.jit.cache import CACHE
from flash4.problem import LENGTHS, AttentionProblem, CallOptions, check_call, positive_scale

ALIGNMENT = 16  # bytes; of addresses and strides that TMA takes
MAX_LAUNCHES = 8_192
REDONE = "redone"  # names of counters among a kernel's optional tensors
NEXT_TILE = "next_tile"


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
    # The counter that hands tiles out is of this call alone: others may run at the same time, on other streams.
    counters = {REDONE: redone}
    if NEXT_TILE in launch.tensors:
        counters[NEXT_TILE] = lse.new_zeros(1, dtype=torch.int32)
    tensors += tuple(
        counters[name] if name in counters else _optional_tensor(name, options, batch)
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


def _backward(ctx, grad_out, grad_lse):
    raise NotImplementedError(
        "flash4 has no backward yet; call the forward under torch.no_grad(), or on detached inputs"
    )


torch.library.register_autograd("flash4::forward", _backward)
forward = torch.ops.flash4.forward.default
