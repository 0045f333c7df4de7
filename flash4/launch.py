"""The short way of a call like one before: one look-up by plain values, the outputs, one launch.

The long way, through ``interface`` and the operators of ``ops``, checks and plans a call, and has PyTorch's dispatcher
around it. A call that took it leaves an entry here if nothing about its tensors has to be changed before the launch.
Whoever watches the dispatcher (modes, tracing, functorch, the profiler) gets the long way every time.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from flash4 import ops
from flash4.problem import LENGTHS, CallOptions

SCRATCH = 1 << 18  # floats; for the log-sum-exp of calls that drop it
OPTIONAL = ("sink", "alibi_slopes", *LENGTHS, ops.NEXT_TILE, ops.RESET_COUNTER)
GIVEN = len(OPTIONAL) - 2  # by the caller; behind them counters
_NEXT_TILE, _RESET_COUNTER = GIVEN, GIVEN + 1
_TENSORS = slice(CallOptions._fields.index(OPTIONAL[0]), CallOptions._fields.index("score_mod"))
_PLAIN = (bool, int, float, type(None))
_ADDRESS_BITS = ops.ALIGNMENT - 1
_C = torch._C
_current_device = getattr(_C, "_cuda_getDevice", lambda: torch.cuda.current_device())
_dispatch_modes, _function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
_is_transformed, _tracing = _C._are_functorch_transforms_active, _C._get_tracing_state
_is_profiled = torch.autograd._profiler_enabled
_scratch: dict[torch.device, Tensor] = {}


def allocator(device_type: str):
    """(shape, strides, dtype) -> empty tensor on the current device, as cheaply as this torch can."""
    guards = getattr(getattr(_C, "_dynamo", None), "guards", None)
    quick = getattr(guards, f"_empty_strided_{device_type}", None)  # what compiled graphs use
    if quick is not None:
        return quick
    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device_type
    )


class Shape(NamedTuple):
    """An output: what the allocator takes."""

    shape: tuple
    strides: tuple
    dtype: torch.dtype

    @classmethod
    def of(cls, x):
        """That of a tensor."""
        return cls(tuple(x.shape), x.stride(), x.dtype)


@dataclass(eq=False, slots=True)
class Prepared:
    """All that a call needs but its tensors.

    Attributes:
        function: the kernel.
        options: of the call, without its tensors.
        numbers: what the kernel takes besides tensors.
        section: heads per section of the tile schedule.
        workers: multiprocessors.
        device: index of the device.
        empty: allocator.
        out: of the call, as the kernel sees it.
        lse: of the call, as the kernel sees it.
        scratch: where the log-sum-exp goes that nobody asks for, or None; it is never read.
        packed: whether q is, and whether k and v are: a batch of one to the kernel.
        order: which of ``OPTIONAL`` the kernel takes, in its order.
        given: which of ``OPTIONAL`` the call has.
        backward: what its gradients need, None before the first, False if they go the long way.
    """

    function: object
    options: CallOptions
    numbers: tuple
    section: int
    workers: int
    device: int | None
    empty: object
    out: Shape
    lse: Shape
    scratch: Tensor | None
    packed: tuple[bool, bool]
    order: tuple[int, ...]
    given: tuple[int, ...]
    backward: object = None

    def run(self, q, k, v, optional, wants_lse):
        """Launch; returns (out, lse)."""
        empty, lse = self.empty, self.scratch
        out = empty(*self.out)
        if lse is None or wants_lse:
            lse = empty(*self.lse)
        if not self.order:
            self.function((q, k, v, out, lse), self.numbers, self.section, self.workers)
            return out, lse
        packed_q, packed_k = self.packed
        if packed_q:
            q = q.unsqueeze(0)
        if packed_k:
            k, v = k.unsqueeze(0), v.unsqueeze(0)
        if _NEXT_TILE in self.order:  # of this call alone: others may run at the same time
            optional = (*optional, lse.new_zeros(1, dtype=torch.int32))
        elif _RESET_COUNTER in self.order:
            optional = (*optional, None, ops.reset_counter(q.device))
        tensors = (q, k, v, out, lse, *[optional[i] for i in self.order])
        self.function(tensors, self.numbers, self.section, self.workers)
        return (out.squeeze(0), lse.squeeze(0)) if packed_q else (out, lse)


def watched() -> bool:
    """Whether someone looks at what goes through PyTorch's dispatcher."""
    return (
        _dispatch_modes() != 0
        or (_function_modes() != 0 and not _only_a_default_device())
        or _is_transformed()
        or _tracing() is not None
        or _is_profiled()
        or forward_ad._current_level >= 0
    )


def _only_a_default_device() -> bool:
    """Whether the one function mode is that of ``torch.set_default_device``, which looks at factories alone."""
    alone = _function_modes() == 1
    return alone and isinstance(_C._get_function_stack_at(0), DeviceContext)


def _facts(x):
    return None if x is None else (x.__class__, x.shape, x.stride(), x.dtype, x.device)


def _key(q, k, v, optional, scalars):
    """Key of a call: numbers, types, and what torch has only one object of."""
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, scalars, tuple(map(type, scalars)),
    )  # fmt: skip
    sink, slopes, cu_q, cu_k, used_q, used_k = optional
    if sink is slopes is cu_q is cu_k is used_q is used_k is None:
        return key
    return (*key, *map(_facts, optional))


def _find(q, k, v, optional, scalars) -> Prepared | None:
    """Entry of a call, if its tensors can be taken as they lie."""
    try:
        found = ops._launches.get(_key(q, k, v, optional, scalars))
        # What the key does not say: an address that is not aligned, a sign that is still to be applied.
        if (
            found is None
            or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & _ADDRESS_BITS
            or q.is_neg() or k.is_neg() or v.is_neg()
            or found.device != _current_device()
        ):  # fmt: skip
            return None
    except (TypeError, AttributeError, RuntimeError):  # no hash, no tensor, no memory
        return None
    return found


def attend(q, k, v, optional, scalars, wants_lse):
    """Result (out, lse) of a call like one before, None for lse where nobody asked; None if it must go the long way.

    Args:
        q: queries.
        k: keys.
        v: values.
        optional: logits of heads, slopes, and four tensors of lengths, each or None.
        scalars: all other keywords that may differ from their defaults, plain values if the call is right.
        wants_lse: the caller reads lse.
    """
    if not (q.__class__ is k.__class__ is v.__class__ is Tensor) or watched():
        return None
    found = _find(q, k, v, optional, scalars)
    if found is None:
        return None
    if torch.is_grad_enabled():
        sink, slopes = optional[:2]
        if slopes is not None and slopes.requires_grad:
            return None  # which says why there are none
        if (
            q.requires_grad or k.requires_grad or v.requires_grad
            or (sink is not None and sink.requires_grad)
        ):  # fmt: skip
            if found.backward is False:
                return None
            inputs = (q, k, v, (found, optional))
            inputs = inputs if sink is None else (*inputs, sink)
            return _apply_for_both(*inputs) if wants_lse else (_apply(*inputs), None)
    return found.run(q, k, v, optional, wants_lse)


def remember(q, k, v, options: CallOptions, scalars):
    """Let the next call of a public function like this one, which the operator has seen, take the short way."""
    found = _find(q, k, v, options[_TENSORS], _operator_scalars(options))
    if found is not None and all(type(x) in _PLAIN for x in scalars):
        ops.keep(ops._launches, _key(q, k, v, options[_TENSORS], scalars), found)


def _prepare(q, k, v, options: CallOptions) -> Prepared | None:
    """What the next call like this one needs, if nothing about its tensors has to be changed before the launch."""
    inputs, tensors = (q, k, v), options[_TENSORS]
    if any(x.__class__ is not Tensor or x.is_neg() for x in inputs):
        return None
    if options.softmax_scale == 0 or options.aux_tensors is not None:
        return None
    if any(_is_converted(i, options) for i in range(GIVEN) if tensors[i] is not None):
        return None
    q4, k4, v4 = map(ops.as_batch, inputs)
    varlen = any(x is not None for x in options.lengths)
    if (varlen and not ops.has_whole_rows(v4)) or not all(map(ops.is_addressable, (q4, k4, v4))):
        return None
    launch = ops._launch_for(q, k, v, options)
    if launch is None or not {*launch.tensors} <= {*OPTIONAL}:
        return None
    out, lse = ops.empty_output(q4, v4.shape[-1]), ops.empty_lse(q4)
    if not ops.is_addressable(out):
        return None
    differentiable = ops._obstacle(q, k, v, options) is None
    return Prepared(
        function=launch.function,
        options=options._replace(**dict.fromkeys(OPTIONAL[:GIVEN])),
        numbers=ops._numbers(launch.numbers, options, abs(options.softmax_scale)),
        section=launch.section,
        workers=launch.workers,
        device=q.device.index,
        empty=allocator(q.device.type),
        out=Shape.of(out),
        lse=Shape.of(lse),
        scratch=_scratch_like(lse),
        packed=(q.ndim == 3, k.ndim == 3),
        order=tuple(OPTIONAL.index(name) for name in launch.tensors),
        given=tuple(i for i in range(GIVEN) if tensors[i] is not None),
        backward=None if differentiable else False,
    )


def _is_converted(i: int, options: CallOptions) -> bool:
    """Whether the kernel gets another tensor than the caller's."""
    name, x = OPTIONAL[i], getattr(options, OPTIONAL[i])
    dtype = torch.int32 if name in LENGTHS else torch.float32
    return x.dtype != dtype or not x.is_contiguous() or (name == "alibi_slopes" and x.ndim == 1)


def _scratch_like(lse):
    """View of a device's scratch memory, which is never freed: kernels of any stream or graph may write to it."""
    if lse.numel() > SCRATCH:
        return None
    device = lse.device
    if device not in _scratch:
        if ops.is_capturing():
            return None  # it would belong to the graph
        _scratch[device] = lse.new_empty(SCRATCH)
    return _scratch[device].as_strided(lse.shape, lse.stride())


_OF_KEYS = (0, 1, 1, 0, 0, 0, 0, 1, 1)  # q, k, v, out, its gradient, lse, dq, dk, dv


@dataclass(frozen=True, eq=False, slots=True)
class PreparedBackward:
    """All that the gradients of a call need but tensors.

    Attributes:
        function: launches all kernels.
        numbers: what it takes besides tensors.
        section: heads per section of the tile schedule.
        device: index of the device.
        empty: allocator.
        gradients: outputs.
        workspace: what the kernels need for themselves.
        strides: of out.
        of_inputs: strides of q, k and v, None where the function itself refuses what it does not take.
        packed: whether q is, and whether k and v are: a batch of one to the kernels.
    """

    function: object
    numbers: tuple
    section: int
    device: int | None
    empty: object
    gradients: tuple[Shape, ...]
    workspace: Shape
    strides: tuple
    of_inputs: tuple | None
    packed: tuple[bool, bool]

    @classmethod
    def of(cls, q, k, v, out, options: CallOptions):
        """That of a call, or False if its gradients must go the long way."""
        launch = ops._backward_launch_for(q, k, v, options, False)
        gradients, inputs = ops.empty_gradients(q, k, v), (q, k, v)
        if launch is None or any(ops.addressable_out(x) is not x for x in gradients):
            return False
        config, (q4, k4, v4) = launch.config, map(ops.as_batch, inputs)
        given = tuple(x for x in OPTIONAL[1:GIVEN] if getattr(options, x) is not None)
        if given != config.given_tensors:
            return False  # mods read more
        if config.ragged_q and not ops.has_whole_rows(q4):
            return False
        if config.ragged_k and not (ops.has_whole_rows(k4) and ops.has_whole_rows(v4)):
            return False
        numbers = launch.workspace_numbers(q4, k4)
        return cls(
            function=launch.function,
            numbers=ops._backward_numbers(config.numbers, options, launch.workers),
            section=launch.section,
            device=q.device.index,
            empty=allocator(q.device.type),
            gradients=tuple(map(Shape.of, gradients)),
            workspace=Shape((numbers,), (1,), torch.float32),
            strides=out.stride(),
            of_inputs=tuple(x.stride() for x in inputs) if config.varlen else None,
            packed=(q.ndim == 3, k.ndim == 3),
        )

    def run(self, dout, q, k, v, out, lse, given):
        """Launch; returns gradients of q, k and v, or None if they must go the long way.

        Args:
            dout: gradient of out, any strides.
            q: queries, as hooks gave them back, like all that follows.
            k: keys.
            v: values.
            out: result of the call.
            lse: log-sum-exp of the call.
            given: the other tensors of the call.
        """
        kind = dout.__class__
        if not (
            kind is q.__class__ is k.__class__ is v.__class__ is out.__class__ is lse.__class__
            and kind is Tensor and self.device == _current_device() and not dout.is_neg()
        ):  # fmt: skip
            return None
        if dout.stride() != self.strides or dout.data_ptr() & _ADDRESS_BITS:
            dout = ops.addressable(dout)
        empty, (dq, dk, dv) = self.empty, self.gradients
        dq, dk, dv = empty(*dq), empty(*dk), empty(*dv)
        tensors = (q, k, v, out, dout, lse, dq, dk, dv)
        if self.of_inputs is not None:
            if (q.stride(), k.stride(), v.stride()) != self.of_inputs:
                return None
            tensors = self._as_batches(tensors)
        try:
            self.function((*tensors, empty(*self.workspace), *given), self.numbers, self.section)
        except (
            ValueError
        ):  # what hooks gave back lies as the kernels do not take it: nothing was launched
            return None
        return dq, dk, dv

    def _as_batches(self, tensors):
        """Those of sequences, as the kernels see them."""
        found = [
            x.unsqueeze(0) if self.packed[of_keys] else x for x, of_keys in zip(tensors, _OF_KEYS)
        ]
        found[4] = ops.whole_rows(found[4])
        return found


class _Attention(torch.autograd.Function):
    """Autograd of the short way to out alone; the operator of ``ops`` has its own, which does the same."""

    @staticmethod
    def forward(ctx, q, k, v, call, sink=None):
        return _run_and_save(ctx, q, k, v, call)[0]

    @staticmethod
    def backward(ctx, dout):
        return _gradients(ctx, dout, None)


class _AttentionAndLse(torch.autograd.Function):
    """The same to out and lse, which may both have a gradient."""

    @staticmethod
    def forward(ctx, q, k, v, call, sink=None):
        ctx.set_materialize_grads(False)
        return _run_and_save(ctx, q, k, v, call)

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse)


# What comes before is for functorch.
_apply = super(torch.autograd.Function, _Attention).apply
_apply_for_both = super(torch.autograd.Function, _AttentionAndLse).apply


def _run_and_save(ctx, q, k, v, call):
    """Result of a call, (what is prepared for it, its other tensors); the sink among them is an input of its own too."""
    found, optional = call
    out, lse = found.run(q, k, v, optional, True)
    if found.given:
        ctx.save_for_backward(q, k, v, out, lse, *[optional[i] for i in found.given])
    else:
        ctx.save_for_backward(q, k, v, out, lse)
    ctx.found = found
    return out, lse


def _gradients(ctx, dout, dlse):
    """Gradients of what ``_Attention.forward`` takes."""
    found, (q, k, v, out, lse, *given) = ctx.found, ctx.saved_tensors
    if dlse is None and dout is not None and not torch.is_grad_enabled() and not watched():
        prepared = found.backward
        if prepared is None:
            prepared = found.backward = _prepare_backward(found, q, k, v, out, given)
        gradients = prepared.run(dout, q, k, v, out, lse, given) if prepared else None
        if gradients is not None:
            return *gradients, None
    options = _options_of(found, given)
    dout = torch.zeros_like(out) if dout is None else dout
    fields = ops.backward_fields(options)
    *gradients, dsink = ops.backward(dout, dlse, q, k, v, out, lse, *fields)
    return (*gradients, None) if options.sink is None else (*gradients, None, dsink)


def _options_of(found: Prepared, given) -> CallOptions:
    """Those of a call, with its tensors."""
    return found.options._replace(**{OPTIONAL[i]: x for i, x in zip(found.given, given)})


def _prepare_backward(found: Prepared, q, k, v, out, given):
    options = _options_of(found, given)
    return options.sink is None and PreparedBackward.of(q, k, v, out, options)


# The operators, which compiled graphs call, have a look-up of their own: below the dispatcher nobody watches.


def forward_operator(q, k, v, *options):
    """``flash4::forward`` on a GPU, the short way if it had such a call before."""
    options = CallOptions(*options)
    tensors, scalars = options[_TENSORS], _operator_scalars(options)
    if q.__class__ is k.__class__ is v.__class__ is Tensor:
        found = _find(q, k, v, tensors, scalars)
        if found is not None:
            return found.run(q, k, v, tensors, True)
    out = ops.empty_output(q, v.shape[-1])
    lse = ops.run_forward(q, k, v, out, options)
    prepared = _prepare(q, k, v, options)
    if prepared is not None:
        ops.keep(ops._launches, _key(q, k, v, tensors, scalars), prepared)
    return out, lse


def _operator_scalars(options: CallOptions) -> tuple:
    return (*options[: _TENSORS.start], *options[_TENSORS.stop :])


def backward_operator(dout, dlse, q, k, v, out, lse, *fields):
    """``flash4::backward`` on a GPU, the short way if it had such a call before."""
    inputs, options = (q, k, v), ops.backward_options(fields)
    if dlse is None and options.sink is None and options.aux_tensors is None:
        scalars = ("backward", options.softmax_scale, options.causal, options.softcap)
        scalars += (options.window_left, options.window_right, options.deterministic)
        scalars += (options.score_mod, options.score_mod_bwd, options.mask_mod)
        key = _key(*inputs, options[_TENSORS], scalars)
        found = ops._backward_launches.get(key)
        if found is None and _fits((*inputs, out), lse, options):
            found = PreparedBackward.of(*inputs, out, options)
            ops.keep(ops._backward_launches, key, found)
        given = [x for x in options[_TENSORS] if x is not None]
        gradients = found.run(dout, *inputs, out, lse, given) if found else None
        if gradients is not None:
            return *gradients, lse.new_empty(0)
    return ops.run_backward(dout, dlse, inputs, out, lse, options)


def _fits(rows, lse, options: CallOptions) -> bool:
    """Whether nothing of what a forward saved has to be changed before the launch."""
    if any(x.__class__ is not Tensor or not ops.is_addressable(x) for x in rows):
        return False
    given = options[_TENSORS]
    if any(_is_converted(i, options) for i in range(GIVEN) if given[i] is not None):
        return False
    return lse.is_contiguous() and all(x.numel() for x in rows)


torch.library.impl("flash4::forward", "CUDA", forward_operator)
torch.library.impl("flash4::backward", "CUDA", backward_operator)
