"""Execution of planned calls, and PyTorch operators for them. No policy: plans come from ``dispatch``."""

import functools
from dataclasses import dataclass, replace

import torch

from flash4.common.kv_tiles import slots_of
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
REDONE = "redone"  # names of counters among a kernel's optional tensors
NEXT_TILE = "next_tile"  # zero at the launch
RESET_COUNTER = "reset_counter"  # the same, and zero again behind it
THREADS_STREAM = 2  # handle by which each thread means a stream of its own


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


def is_addressable(x) -> bool:
    """Whether ``addressable`` returns a tensor as it is; copies nothing."""
    shape, strides = x.shape, x.stride()
    if x.data_ptr() % ALIGNMENT or _must_copy(shape, strides, x.element_size()):
        return False
    return _canonical_strides(shape, strides) is None


def has_whole_rows(v) -> bool:
    """Whether rows lie apart, and batch entries a whole number of rows from each other."""
    row = v.stride(1)
    return bool(row) and (v.shape[0] == 1 or v.stride(0) % row == 0)


def whole_rows(v):
    """Return v, or a copy of it that ``has_whole_rows``."""
    return v if has_whole_rows(v) else v.clone(memory_format=torch.contiguous_format)


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
    keep(_launches, key, launch)
    return launch


def keep(table: dict, key, value):
    """Put a value into a table that never grows beyond bounds."""
    if len(table) >= MAX_LAUNCHES:
        table.clear()
    table[key] = value


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def kernel_for(kernel: str, config, arch: str):
    """Launch function of a kernel, compiled here if it must be.

    Raises:
        RuntimeError: it must be compiled or loaded, which cannot be done while a CUDA graph is captured.
    """
    if not CACHE.contains(kernel, config, arch) and is_capturing():
        raise RuntimeError(
            f"flash4 has not loaded {kernel} for this kind of call yet, and cannot while a CUDA graph is captured: "
            "make one such call before the capture, or flash4.precompile it"
        )
    return CACHE.get(kernel, config, arch)


def _launch_of(plan: Plan, device, workers: int) -> Launch:
    """What a plan's kernel, compiled here if it must be, needs at run time."""
    config = plan.config
    with torch.cuda.device(device):
        function = kernel_for(plan.kernel, config, plan.arch)
    used = plan.multiprocessors_of(workers)
    return Launch(function, plan.section, used, config.numbers, config.optional_tensors)


_reset_counters: dict[tuple[int, int], torch.Tensor] = {}


def reset_counter(device):
    """A counter at zero for a kernel that leaves it so: one for each stream, where launches follow one another.

    A graph that is captured gets new ones: it may be replayed on any stream.
    """
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return reset_counter(device)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if stream == THREADS_STREAM or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device.index, stream)
    if key not in _reset_counters:
        _reset_counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _reset_counters[key]


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
        "cap_root": cap**0.2 if cap else None,
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
    if RESET_COUNTER in launch.tensors:
        counters[RESET_COUNTER] = reset_counter(q.device)
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
    if v.ndim == 4 and problem.varlen and not has_whole_rows(v):
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
    "int score_mod=0, int mask_mod=0, Tensor[]? aux_tensors=None, bool deterministic=False, int score_mod_bwd=0) "
    "-> (Tensor, Tensor)",
)


@torch.library.register_fake("flash4::forward")
def _forward_fake(q, k, v, *options):
    check_call(q, k, v, CallOptions(*options))
    return empty_output(q, v.shape[-1]), empty_lse(q)


@dataclass(frozen=True)
class BackwardLaunch:
    """What a backward needs at run time, looked up by shapes.

    Attributes:
        function: compiled; it launches the three kernels.
        config: of the main kernel.
        section: heads per section of the tile schedule.
        slots: blocks of queries of each head, of a batch entry or of packed queries; tiles of keys, likewise.
        workers: multiprocessors.
    """

    function: object
    config: object
    section: int
    slots: tuple[int, int]
    workers: int

    def places(self, q, k) -> dict[str, tuple[int, int]]:
        """Where parts of the workspace lie; of q and k (B, S, H, D)."""
        return self.config.workspace(*self._counts(q, k))

    def workspace_numbers(self, q, k) -> int:
        """How large it is."""
        return self.config.workspace_numbers(*self._counts(q, k))

    def _counts(self, q, k):
        """Blocks of queries of all heads and batch entries, and tiles of keys."""
        return (x.shape[0] * x.shape[2] * n for x, n in zip((q, k), self.slots, strict=True))


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
        facts = device_facts(q.device.index)
        plan = plan_backward(problem, *facts, dlse)
        with torch.cuda.device(q.device):
            launch = launch_of(plan, slots_of_call(q, k, plan.config, options), facts[1])
    keep(_backward_launches, key, launch)
    return launch


def launch_of(plan: BackwardPlan, slots: tuple[int, int], workers: int) -> BackwardLaunch:
    """Compiled function of a plan; ``slots`` as of ``slots_of_call``, ``workers`` the GPU's multiprocessors."""
    (kernel,) = plan.kernels
    return BackwardLaunch(kernel_for(*kernel), plan.config, plan.section, slots, workers)


def slots_of_call(q, k, config, options: CallOptions) -> tuple[int, int]:
    """Blocks of queries of each head, of a batch entry or of packed ``q``, and tiles of keys of ``k`` likewise."""
    sides = (q, config.tile_m, options.cu_seqlens_q), (k, config.tile_n, options.cu_seqlens_k)
    batch, found = options.batch(q), []
    for x, tile, cu in sides:
        packed = cu is not None
        found.append(slots_of(batch if packed else 1, x.shape[-3], tile, packed))
    return tuple(found)


def empty_gradients(q, k, v):
    """Gradients for q, k and v, each in its tensor's memory order of heads and rows."""
    return tuple(empty_output(x, x.shape[-1]) for x in (q, k, v))


def run_backward(dout, dlse, inputs, out, lse, options: CallOptions):
    """Gradients (dq, dk, dv, dsink) of a call; the last is empty if it has no sinks.

    Args:
        dout: gradient of out, any strides.
        dlse: gradient of lse, or None.
        inputs: q, k and v as the call was given them.
        out: result of the call.
        lse: log-sum-exp of the call.
        options: of the call.
    """
    launch = _backward_launch_for(*inputs, options, dlse is not None)
    if launch is None:
        gradients = empty_gradients(*inputs)
        for gradient in gradients:
            gradient.zero_()
        return *gradients, _gradient_without_keys(dlse, lse, options.sink)
    return launch_backward(launch, dout, dlse, inputs, out, lse, options)


def launch_backward(launch: BackwardLaunch, dout, dlse, inputs, out, lse, options: CallOptions):
    """Run the kernels; see ``run_backward``."""
    gradients, sink = empty_gradients(*inputs), options.sink
    dq, dk, dv = (addressable_out(as_batch(gradient)) for gradient in gradients)
    q, k, v, out, dout = (addressable(as_batch(x)) for x in (*inputs, out, dout))
    obstacle = launch.config.lengths_obstacle(q.shape[1], k.shape[1])
    if obstacle is not None:
        raise ValueError(obstacle)
    config = launch.config
    q, dout = (whole_rows(x) if config.ragged_q else x for x in (q, dout))
    k, v = (whole_rows(x) if config.ragged_k else x for x in (k, v))
    workspace = q.new_empty(launch.workspace_numbers(q, k), dtype=torch.float32)
    batch = options.batch(inputs[0])
    optional = [_optional_tensor(name, options, batch) for name in config.given_tensors]
    optional += [] if dlse is None else [as_batch(dlse, 3)]
    rows = as_batch(lse, 3).contiguous()
    tensors = (q, k, v, out, dout, rows, dq, dk, dv, workspace, *optional)
    with torch.cuda.device(q.device):
        numbers = _backward_numbers(config.numbers, options, launch.workers)
        launch.function(tensors, numbers, launch.section)
    if sink is None:
        return *gradients, lse.new_empty(0)
    first, count = launch.places(q, k)["delta"]
    delta = workspace[first : first + count].view(*rows.shape[:2], -1)
    delta = statistics_of_rows(delta, lse, options.cu_seqlens_q, config.tile_m)
    delta = -delta if config.negates else delta
    return *gradients, _gradient_of_sink(delta, as_batch(lse, 3), sink)


def as_batch(x, ndim: int = 4):
    """Packed sequences as a batch of one; others as they are."""
    return x if x.ndim == ndim else x[None]


def statistics_of_rows(statistic, lse, cu_seqlens, tile: int):
    """A statistic of blocks of ``tile`` queries, by rows as in ``lse``, with a batch; see ``common.kv_sequences``."""
    rows = lse.shape[-1]
    if cu_seqlens is None:
        return statistic[:, :, :rows]
    row = torch.arange(rows, device=lse.device)
    begins = torch.nn.functional.pad(cu_seqlens.long().clamp(0, rows), (1, 0))
    sequence = torch.bucketize(row, begins[1:], right=True)
    first = begins[sequence]
    return statistic[:, :, (first // tile + sequence) * tile + row - first]


def _backward_numbers(names: tuple[str, ...], options: CallOptions, workers: int) -> tuple:
    """Values of the numbers that a backward kernel takes; the scale keeps its sign."""
    scale, cap = options.softmax_scale, options.softcap
    values = {
        "scale": scale,
        "cap": cap,
        "cap_scale": scale / cap if cap else None,
        "left": options.window_left,
        "right": options.window_right,
        "workers": workers,
    }
    return tuple(values[name] for name in names)


def _gradient_of_sink(delta, lse, sink):
    """dsink = -sum of exp(sink - LSE) D, over batch and queries; nothing of rows with neither key nor sink."""
    weight = torch.exp(sink.detach().float()[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)
    return -(weight * delta).sum((0, 2)).to(sink.dtype)


def _gradient_without_keys(dlse, lse, sink):
    """dsink of a call in which no query sees a key: its log-sum-exp is the sink."""
    if sink is None:
        return lse.new_empty(0)
    if dlse is None or not lse.numel():
        return torch.zeros_like(sink)
    return as_batch(torch.where(lse == -torch.inf, 0.0, dlse), 3).sum((0, 2)).to(sink.dtype)


def plan_backward_call(
    inputs, options: CallOptions, arch: str, workers: int, dlse: bool
) -> BackwardPlan:
    """Plan of the backward of a call with ``inputs`` q, k and v, with the copies that they need."""
    plan = plan_backward(AttentionProblem.of_call(*inputs, options), arch, workers, dlse)
    copies = list(zip(("q", "k", "v"), map(layout_obstacle, inputs), strict=True))
    for i, ragged in enumerate((plan.config.ragged_q, *[plan.config.ragged_k] * 2)):
        x = inputs[i]
        if ragged and x.ndim == 4 and copies[i][1] is None and not has_whole_rows(x):
            copies[i] = (copies[i][0], "its batch stride is no multiple of its row stride")
    return replace(plan, copies=tuple(f"{name}: {why}" for name, why in copies if why is not None))


torch.library.define(
    "flash4::backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale, "
    "bool causal=False, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, Tensor? sink=None, "
    "Tensor? alibi_slopes=None, bool deterministic=False, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int score_mod=0, int score_mod_bwd=0, int mask_mod=0, "
    "Tensor[]? aux_tensors=None) -> (Tensor, Tensor, Tensor, Tensor)",
)
# Fields of CallOptions that the operator takes, in order.
_BACKWARD_FIELDS = (
    "softmax_scale", "causal", "window_left", "window_right", "softcap", "sink", "alibi_slopes",
    "deterministic", *LENGTHS, "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors",
)  # fmt: skip
# Fields that hold one tensor, which is saved; behind them come those that mods read.
_SAVED_FIELDS = ("sink", "alibi_slopes", *LENGTHS)
SINK_INPUT = 3 + CallOptions._fields.index("sink")  # of the forward operator
AUX_INPUT = 3 + CallOptions._fields.index("aux_tensors")


def backward_fields(options: CallOptions) -> tuple:
    """What the backward operator takes behind its tensors."""
    return tuple(getattr(options, name) for name in _BACKWARD_FIELDS)


def backward_options(fields) -> CallOptions:
    """Options of what the backward operator was given behind its tensors."""
    return CallOptions(**dict(zip(_BACKWARD_FIELDS, fields, strict=False)))


@torch.library.register_fake("flash4::backward")
def _backward_fake(dout, dlse, q, k, v, out, lse, *fields):
    sink = backward_options(fields).sink
    dsink = lse.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    return *empty_gradients(q, k, v), dsink


def _refuse_second_derivatives(ctx, *gradients):
    raise NotImplementedError(
        "flash4 has no second derivatives: its backward was called with create_graph=True, and is not differentiable"
    )


backward = torch.ops.flash4.backward.default


_obstacles: dict[tuple, str | None] = {}


def _obstacle(q, k, v, options: CallOptions) -> str | None:
    """Why there are no gradients of a call, or None; looked up, since every forward of a training asks."""
    arch = device_facts(q.device.index)[0] if q.is_cuda else "sm_90a"
    key = (q.shape[-1], v.shape[-1], options.flags, arch)
    try:
        return _obstacles[key]
    except KeyError:
        pass
    except TypeError:  # a size that is being traced has no hash
        return gradient_obstacle(AttentionProblem.of_call(q, k, v, options), arch)
    found = gradient_obstacle(AttentionProblem.of_call(q, k, v, options), arch)
    keep(_obstacles, key, found)
    return found


def _save(ctx, inputs, output):
    """Keep what the gradients need; refuse calls whose gradients are not built, while the caller is still there."""
    q, k, v, *fields = inputs
    options = CallOptions(*fields)
    obstacle = _obstacle(q, k, v, options)
    aux = options.aux_tensors or ()
    constants = {"alibi_slopes": options.alibi_slopes}
    constants |= {f"aux_tensors[{i}]": x for i, x in enumerate(aux)}
    for name, x in constants.items():
        if x is not None and x.requires_grad:
            obstacle = f"gradients of {name} are not built yet; detach it"
    if obstacle is not None:
        forgotten = options.score_mod != 0 and options.score_mod_bwd == 0
        error = ValueError if forgotten else NotImplementedError
        raise error(f"{obstacle}; without gradients, call it under torch.no_grad()")
    saved = (getattr(options, name) for name in _SAVED_FIELDS)
    ctx.save_for_backward(q, k, v, *output, *saved, *aux)
    ctx.set_materialize_grads(False)
    ctx.options = options._replace(aux_tensors=None, **dict.fromkeys(_SAVED_FIELDS))


def _gradients(ctx, dout, dlse):
    tensors = ctx.saved_tensors  # once: checkpointing refuses to unpack them again
    saved, optional = tensors[:5], tensors[5:]
    dout = torch.zeros_like(saved[3]) if dout is None else dout
    options = ctx.options._replace(**dict(zip(_SAVED_FIELDS, optional, strict=False)))
    aux = list(optional[len(_SAVED_FIELDS) :])
    if aux:
        options = options._replace(aux_tensors=aux)
    *gradients, dsink = backward(dout, dlse, *saved, *backward_fields(options))
    # As many as the caller gave: the dispatcher leaves out what is at its default.
    found = [None] * len(ctx.needs_input_grad)
    found[: len(gradients)] = gradients
    if options.sink is not None:
        found[SINK_INPUT] = dsink
    if aux:
        found[AUX_INPUT] = [None] * len(aux)
    asked = zip(ctx.needs_input_grad, found, strict=True)
    return tuple(x if wanted else None for wanted, x in asked)


torch.library.register_autograd("flash4::backward", _refuse_second_derivatives)
torch.library.register_autograd("flash4::forward", _gradients, setup_context=_save)
forward = torch.ops.flash4.forward.default
