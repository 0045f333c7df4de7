"""``torch.nn.functional.scaled_dot_product_attention`` on flash4's kernels; what they do not take goes to PyTorch."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flash4 import interface, launch, ops
from flash4.common.mods import constant_while_tracing
from flash4.dispatch import BackwardPlan, Plan, gradient_obstacle
from flash4.problem import (
    DTYPES,
    HEAD_DIM_STEP,
    MAX_HEAD_DIM,
    MAX_SCALE,
    MIN_SCALE,
    AttentionProblem,
    CallOptions,
)

__all__ = ["TorchPlan", "explain", "scaled_dot_product_attention"]


def _keep_where_true(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    return aux_tensors[0][batch, head, q_idx, kv_idx] != 0


def _add(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    return score + aux_tensors[0][batch, head, q_idx, kv_idx]


@dataclass(frozen=True)
class TorchPlan:
    """A call of ``scaled_dot_product_attention`` that PyTorch runs. ``print(plan)`` explains it.

    Attributes:
        reason: why flash4 does not.
    """

    reason: str

    def __str__(self):
        return f"torch.nn.functional.scaled_dot_product_attention\n  because {self.reason}"


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """As the function of ``torch.nn.functional``, which runs whatever flash4 has no kernel for.

    ``flash4.explain(query, key, value, sdpa=True, ...)`` says who runs a call, and why.

    Args:
        query: (batch, heads_q, seqlen_q, head_dim), or without batch; any strides.
        key: (batch, heads_kv, seqlen_k, head_dim).
        value: (batch, heads_kv, seqlen_k, head_dim_v).
        attn_mask: broadcastable to (batch, heads_q, seqlen_q, seqlen_k): boolean, true where a key is seen, or of query's
            dtype, added to the scaled scores.
        dropout_p: probability that a weight is dropped; if it is not 0, PyTorch runs the call.
        is_causal: query i sees the keys j <= i: aligned top-left, unlike ``flash_attn_func``.
        scale: factor of scores; default 1 / sqrt(head_dim).
        enable_gqa: heads_kv may divide heads_q.

    Returns:
        (batch, heads_q, seqlen_q, head_dim_v) in query's dtype; a query that sees no key gives 0.
    """
    given = (attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if _obstacle(query, key, value, given) is not None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    tensors, keywords = _own_call(query, key, value, attn_mask, is_causal, scale)
    out = interface.flash_attn_func(*tensors, **keywords).transpose(1, 2)
    return out if query.ndim == 4 else out.squeeze(0)


def explain(q, k, v, *, sdpa=False, arch=None, backward=False, dlse=False, **keywords):
    """Say how a call would run: kernel, configuration, reasons, and what is copied. Launches and compiles nothing.

    Args:
        q: as in ``flash_attn_func`` or ``flash_attn_varlen_func``; tensors on the CPU or the meta device will do.
        k: as in ``flash_attn_func``.
        v: as in ``flash_attn_func``.
        sdpa: the call is one of ``scaled_dot_product_attention``, in its layout, with its keywords.
        arch: target such as "sm_90a"; default the GPU of q, and "sm_90a" for tensors that are on none.
        backward: say how its gradients would be computed instead.
        dlse: with ``backward``: the log-sum-exp has a gradient too.
        keywords: as there.

    Returns:
        The plan; ``print`` it. With ``sdpa`` a ``TorchPlan`` for a call that PyTorch runs.

    Raises:
        TypeError: a keyword that neither has.
        ValueError: as in ``flash_attn_func``, or an empty problem, which needs no kernel.
        NotImplementedError: as in ``flash_attn_func``.
    """
    if not sdpa:
        return interface.explain(q, k, v, arch=arch, backward=backward, dlse=dlse, **keywords)
    if dlse:
        raise TypeError("dlse: scaled_dot_product_attention returns no log-sum-exp")
    unknown = keywords.keys() - _DEFAULTS.keys()
    if unknown:
        raise TypeError(f"scaled_dot_product_attention has no keyword {', '.join(unknown)}")
    found = _explained(q, k, v, tuple((_DEFAULTS | keywords).values()), arch, backward)
    return TorchPlan(found) if isinstance(found, str) else found


_DEFAULTS = {
    "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
}  # fmt: skip


def _explained(q, k, v, given: tuple, arch, backward) -> Plan | BackwardPlan | str:
    """The plan of a call, or the reason why PyTorch runs it."""
    mask, _, is_causal, scale, _ = given
    wants = backward or _wants_gradients(q, k, v, mask)
    reason = _misfit(q, k, v, given, wants)
    if reason is None and arch is None and q.is_cuda:
        reason = _device_obstacle(q.device.index)
    if reason is not None:
        return reason
    tensors, own = _own_call(q, k, v, mask, is_causal, scale)
    try:
        return interface.explain(*tensors, arch=arch, backward=backward, **own)
    except NotImplementedError as error:
        return str(error)


_verdicts: dict[tuple, str | None] = {}


def _obstacle(query, key, value, given: tuple) -> str | None:
    """Why PyTorch runs a call, or None. Looked up by what decides it, if that has been asked before."""
    mask = given[0]
    wants = _wants_gradients(query, key, value, mask)
    if torch.compiler.is_compiling():
        if not query.is_cuda:
            return "query is on no CUDA device"
        return _misfit(query, key, value, given, wants) or _device_obstacle(query.device.index)
    try:
        key_of = tuple(
            None if x is None else (x.__class__, x.shape, x.dtype, x.device)
            for x in (query, key, value, mask)
        )
        if launch.watched():
            return _decide(query, key, value, given)
        key_of += (*given[1:], *map(type, given[1:]), wants)
        if key_of not in _verdicts:
            ops.keep(_verdicts, key_of, _decide(query, key, value, given))
        return _verdicts[key_of]
    except (TypeError, AttributeError):  # not a tensor, or no hash
        return _decide(query, key, value, given)


def _decide(query, key, value, given: tuple) -> str | None:
    """Why PyTorch runs a call, or None, in eager mode."""
    if isinstance(query, Tensor) and not query.is_cuda:
        return f"query is on {query.device}, flash4's kernels run on CUDA devices"
    found = _explained(query, key, value, given, None, False)
    return found if isinstance(found, str) else None


def _wants_gradients(*tensors) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in tensors
    )


@constant_while_tracing
def _device_obstacle(index) -> str | None:
    try:
        ops.device_facts(index)
    except NotImplementedError as error:
        return str(error)
    return None


def _misfit(q, k, v, given: tuple, wants_gradients: bool) -> str | None:
    """Why flash4 cannot run a call on any device, or None. What is wrong is PyTorch's to refuse."""
    mask, dropout_p, is_causal, scale, enable_gqa = given
    if dropout_p != 0.0:
        return f"dropout_p is {dropout_p}, flash4 drops nothing"
    reason = _operand_misfit(q, k, v, enable_gqa)
    if reason is None:
        reason = _mask_misfit(q, k, mask, is_causal, wants_gradients)
    if reason is None and scale is not None:
        if not isinstance(scale, (int, float)) or not MIN_SCALE <= abs(scale) <= MAX_SCALE:
            reason = f"scale is {scale}; flash4 takes numbers of {MIN_SCALE} to {MAX_SCALE}"
    if reason is None and wants_gradients:
        tensors, own = _own_call(q, k, v, mask, is_causal, scale)
        right = own.get("window_size", (None, -1))[1]
        options = CallOptions(1.0, own.get("causal", False), window_right=right)
        if torch.compiler.is_compiling():  # which would watch a table of what was asked before
            reason = gradient_obstacle(AttentionProblem.of_call(*tensors, options))
        else:
            reason = ops._obstacle(*tensors, options)
    return reason


def _operand_misfit(q, k, v, enable_gqa) -> str | None:
    operands = {"query": q, "key": k, "value": v}
    for name, x in operands.items():
        if not isinstance(x, Tensor) or type(x) not in _own_types():
            return f"{name} is of type {type(x).__name__}, flash4 takes torch.Tensor"
    compiling = torch.compiler.is_compiling()
    if not compiling and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    ):
        return "it is called within a transform or forward-mode differentiation"
    for name, x in operands.items():
        if x.dtype not in DTYPES:
            return f"{name} is {x.dtype}, flash4 takes float16 and bfloat16"
        if x.dtype != q.dtype or x.device != q.device:
            return "query, key and value differ in dtype or device"
        if x.ndim not in (3, 4) or x.ndim != q.ndim:
            return f"{name} has {x.ndim} dimensions, flash4 takes 4, or 3 without a batch, in all"
        if 0 in x.shape:
            return f"{name} is empty"
        if x.shape[-1] % HEAD_DIM_STEP or x.shape[-1] > MAX_HEAD_DIM:
            return f"the head dim of {name} is {x.shape[-1]}, flash4 takes multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
    if k.shape[:-1] != v.shape[:-1] or q.shape[:-3] != k.shape[:-3] or q.shape[-1] != k.shape[-1]:
        return "sizes differ: flash4 does not broadcast query, key and value"
    heads_q, heads_kv = q.shape[-3], k.shape[-3]
    if heads_q != heads_kv and not (enable_gqa and heads_q % heads_kv == 0):
        return f"{heads_q} query heads and {heads_kv} KV heads without enable_gqa"
    return None


def _own_types() -> tuple:
    if torch.compiler.is_compiling():  # fake tensors stand for what will come
        return (Tensor, torch.nn.Parameter, torch._subclasses.FakeTensor)
    return (Tensor, torch.nn.Parameter)


def _mask_misfit(q, k, mask, is_causal, wants_gradients: bool) -> str | None:
    if mask is None:
        return None
    if is_causal:
        return "attn_mask and is_causal exclude each other"
    if type(mask) not in _own_types():  # torch.nn.attention.bias among others
        return f"attn_mask is of type {type(mask).__name__}, flash4 takes torch.Tensor"
    if mask.dtype != torch.bool and mask.dtype != q.dtype:
        return f"attn_mask is {mask.dtype}, flash4 takes torch.bool and query's {q.dtype}"
    if mask.device != q.device:
        return "attn_mask is on another device"
    full = (*q.shape[:-1], k.shape[-2])
    if not 2 <= mask.ndim <= q.ndim or any(
        n not in (1, size) for n, size in zip(reversed(mask.shape), reversed(full), strict=False)
    ):
        return f"attn_mask {tuple(mask.shape)} does not fit {full}"
    if wants_gradients:
        return "flash4 has no gradients of calls with attn_mask"
    if torch.compiler.is_compiling():
        return "under torch.compile flash4 leaves calls with attn_mask to PyTorch"
    return None


def _own_call(query, key, value, mask, is_causal, scale):
    """(q, k, v) and keywords of the ``flash_attn_func`` that computes a call of this module."""
    if query.ndim == 3:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    keywords = {"softmax_scale": scale}
    if is_causal:
        if seqlen_q < seqlen_k:  # keys behind the last query are seen by none
            key, value = (x.narrow(-2, 0, seqlen_q) for x in (key, value))
        if seqlen_q > seqlen_k:  # positions count from the last query and the last key
            keywords["window_size"] = (None, seqlen_q - seqlen_k)
        else:
            keywords["causal"] = True
    if mask is not None:
        name, mod = (
            ("mask_mod", _keep_where_true) if mask.dtype == torch.bool else ("score_mod", _add)
        )
        full = (*query.shape[:-1], seqlen_k)
        keywords[name], keywords["aux_tensors"] = mod, [mask.to(query.dtype).expand(full)]
    return tuple(x.transpose(1, 2) for x in (query, key, value)), keywords
