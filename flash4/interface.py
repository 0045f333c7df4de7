"""Public functions: validation, defaults and documentation."""

import inspect
import math
import operator
from typing import NamedTuple

import torch

from flash4 import launch, ops
from flash4.common import mods
from flash4.dispatch import BackwardPlan, Plan
from flash4.problem import (
    LENGTHS,
    MAX_WINDOW,
    NO_LIMIT,
    CallOptions,
    check_lengths,
    check_per_head,
    check_scale,
    check_softcap,
    check_tensors,
)

__all__ = ["Redone", "explain", "flash_attn_func", "flash_attn_varlen_func", "redone_tiles"]

# Keywords that are not built yet: accepted only with these values, which ask for nothing.
_NEUTRAL = {
    "block_mask": (None,),
    "dropout_p": (0.0,),
    "q_descale": (None,),
    "k_descale": (None,),
    "v_descale": (None,),
    "num_splits": (0, 1),
    "page_table": (None,),
}
# Keywords that only a few values make sense for.
_FLAGS = {
    "causal": (True, False),
    "pack_gqa": (None, True, False),
    "deterministic": (None, True, False),
}

MULTIPROCESSORS = 132  # of an H100 or H200 SXM; what ``explain`` assumes without a GPU


def default_scale(q) -> float:
    """1 / sqrt(head_dim); 1 for an empty head dim, which the size checks refuse later."""
    return 1 / math.sqrt(q.shape[-1] or 1)


def _refuse_unbuilt(keywords: dict):
    """Raise NotImplementedError for the first keyword that asks for something that is not built yet."""
    for name, neutral in _NEUTRAL.items():
        value = keywords.get(name)
        if name not in keywords:
            continue
        if value is None and None in neutral:
            continue
        if not isinstance(value, (bool, int, float)) or value not in neutral:
            raise NotImplementedError(
                f"flash4 does not support {name} yet; leave it at {neutral[0]!r}"
            )


def _window(causal: bool, window_size) -> tuple[bool, int, int]:
    """Fold ``causal`` and a window into one another: (causal, left, right) as in ``CallOptions``.

    Raises:
        ValueError: not a pair of int or None, or a side below -1.
    """
    if window_size == (None, None):
        return causal, NO_LIMIT, NO_LIMIT
    try:
        left, right = (NO_LIMIT if side is None else operator.index(side) for side in window_size)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"window_size must be a pair (left, right) of int or None, got {window_size!r}"
        ) from error
    if left < NO_LIMIT or right < NO_LIMIT:
        raise ValueError(
            f"sides of window_size are None or -1 for no limit, or at least 0, got {window_size!r}"
        )
    causal = causal or right == 0
    left, right = (NO_LIMIT if side >= MAX_WINDOW else side for side in (left, right))
    return causal, left, NO_LIMIT if causal else right


def _softcap(value) -> float:
    """The cap as a float; None is none.

    Raises:
        TypeError: not a Python number.
    """
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"softcap must be a Python number, got {value!r}")
    return float(value)


def _mods(q, keywords: dict) -> dict[str, object]:
    """Keys of mods, and aux tensors, as in ``CallOptions``.

    Raises:
        TypeError: a mod that is none, or depends on what cannot be told; aux_tensors of the wrong type.
        ValueError: aux_tensors that are not supported, or that no mod reads; a derivative of no score_mod.
    """
    tracing = torch.compiler.is_compiling()
    register = mods.register_while_tracing if tracing else mods.register
    names = ("score_mod", "score_mod_bwd", "mask_mod")
    found = {name: register(keywords[name]) for name in names}
    if found["score_mod_bwd"] and not found["score_mod"]:
        raise ValueError("score_mod_bwd is the derivative of score_mod; this call has none")
    aux = keywords["aux_tensors"]
    if aux is None:
        return found
    mods.check_aux(aux, q)
    if not aux:
        return found
    if not (found["score_mod"] or found["mask_mod"]):
        raise ValueError("aux_tensors are for score_mod and mask_mod; this call has neither")
    return found | {"aux_tensors": list(aux)}


def _deterministic(wanted: bool | None) -> bool:
    """Whether gradients must be bitwise repeatable; None follows torch."""
    return torch.are_deterministic_algorithms_enabled() if wanted is None else wanted


def _options(q, k, v, keywords: dict) -> CallOptions:
    """What a call's keywords ask for; checks them, and what q, k and v are.

    Raises:
        NotImplementedError: one of them is not built yet.
        TypeError: a value of the wrong type.
        ValueError: a value that is not supported.
    """
    for name, allowed in _FLAGS.items():
        _check_flag(name, keywords[name], allowed)
    causal, left, right = _window(keywords["causal"], keywords["window_size"])
    _refuse_unbuilt(keywords)
    cu_q, cu_k, used_q, used_k = lengths = [keywords.get(name) for name in LENGTHS]
    check_tensors(q, k, v, cu_q is not None, cu_k is not None)
    scale = keywords["softmax_scale"]
    scale = default_scale(q) if scale is None else float(scale)
    check_scale(scale)
    sink, slopes = keywords["learnable_sink"], keywords["alibi_slopes"]
    softcap = _softcap(keywords["softcap"])
    options = CallOptions(
        scale,
        causal,
        keywords["pack_gqa"],
        left,
        right,
        softcap,
        sink,
        slopes,
        *lengths,
        deterministic=_deterministic(keywords["deterministic"]),
        **_mods(q, keywords),
    )
    check_softcap(options)
    if not (cu_q is cu_k is used_q is used_k is None):
        check_lengths(q, k, options)
    check_per_head("learnable_sink", sink, q)
    if slopes is not None:
        check_per_head("alibi_slopes", slopes, q, options.batch(q))
    return options


def _overlaps(shape, strides) -> bool:
    """Whether elements of a tensor may share memory: a stride that does not clear what lies inside it."""
    extent = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < extent:
            return True
        extent = stride * (size - 1) + extent
    return False


def _share_memory(a, b) -> bool:
    """Whether the address ranges of two tensors of one device overlap."""

    def span(x):
        last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()

    if not (a.numel() and b.numel()):
        return False
    (a_begin, a_end), (b_begin, b_end) = span(a), span(b)
    return a_begin < b_end and b_begin < a_end


def _check_flag(name: str, value, allowed):
    """Check a keyword that only a few values make sense for.

    Raises:
        TypeError: any other value.
    """
    for choice in allowed:
        if value is choice:
            return
    raise TypeError(f"{name} must be one of {allowed}, got {value!r}")


def _check_out(out, q, v):
    """Check what a caller's output buffer is.

    Raises:
        TypeError: not a tensor.
        ValueError: wrong shape, dtype or device.
    """
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch.Tensor, got {type(out).__name__}")
    shape = (*q.shape[:-1], v.shape[-1])
    if tuple(out.shape) != shape or out.dtype != q.dtype or out.device != q.device:
        raise ValueError(
            f"out must be {shape}, {q.dtype}, on {q.device}; "
            f"got {tuple(out.shape)}, {out.dtype}, on {out.device}"
        )


def _inputs(q, k, v, options: CallOptions) -> dict[str, torch.Tensor]:
    """Tensors that a call reads and may ask gradients of, by name."""
    named = {"q": q, "k": k, "v": v, "learnable_sink": options.sink}
    named["alibi_slopes"] = options.alibi_slopes
    named |= {f"aux_tensors[{i}]": x for i, x in enumerate(options.aux_tensors or ())}
    return {name: x for name, x in named.items() if x is not None}


def _check_out_memory(out, q, k, v, options: CallOptions):
    """Check where a caller's output buffer lies.

    Raises:
        ValueError: strides that TMA cannot address, or memory of its own elements or of an input.
    """
    obstacle = ops.layout_obstacle(out)
    if obstacle is None and _overlaps(out.shape, out.stride()):
        obstacle = f"with strides {out.stride()} some of its elements share memory"
    for name, x in _inputs(q, k, v, options).items():
        if obstacle is None and _share_memory(out, x):
            obstacle = f"it shares memory with {name}"
    if obstacle is not None:
        raise ValueError(f"out cannot be written in place: {obstacle}")


def _forward_into(out, q, k, v, options: CallOptions):
    """Forward into a caller's buffer; returns the LSE.

    Raises:
        ValueError: a gradient is asked for, or the buffer does not fit.
    """
    inputs = _inputs(q, k, v, options).values()
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise ValueError("out= is not differentiable; call it under torch.no_grad()")
    _check_out(out, q, v)
    if torch.compiler.is_compiling():  # a graph has no use for the buffer before its end
        result, lse = ops.forward(q, k, v, *options)
        out.copy_(result)
        return lse
    _check_out_memory(out, q, k, v, options)
    lse = ops.run_forward(q, k, v, out, options)
    torch.autograd.graph.increment_version(out)
    return lse


def _check_device(q):
    """Check that q is on a GPU.

    Raises:
        ValueError: it is not.
    """
    if not q.is_cuda:
        raise ValueError(
            f"q, k and v must be on a CUDA device, got {q.device}; flash4.reference runs anywhere"
        )


def _forward(out, q, k, v, keywords: dict, scalars=None):
    """Check a call and run it; returns (out, lse). With ``scalars``, the next one like it takes the short way."""
    options = _options(q, k, v, keywords)
    _check_device(q)
    if out is not None:
        return out, _forward_into(out, q, k, v, options)
    result = ops.forward(q, k, v, *options)
    if scalars is not None and not launch.watched():
        launch.remember(q, k, v, options, scalars)
    return result


def _scalars(rare, plain, window_size, deterministic) -> tuple | None:
    """What a call like one before is known by beside its tensors; None if it must go the long way.

    Args:
        rare: values of the keywords that the short way does not know, all None if it can be taken.
        plain: values of those that are numbers.
        window_size: as given.
        deterministic: as given.
    """
    for value in rare:
        if value is not None:
            return None
    if window_size.__class__ is not tuple or torch.compiler.is_compiling():
        return None
    return (*plain, _deterministic(deterministic), *window_size)


def _check_max_seqlen(**lengths):
    """Check what is not looked at further.

    Raises:
        TypeError: neither an int nor a tensor nor None.
    """
    for name, value in lengths.items():
        if not (value is None or isinstance(value, (int, torch.Tensor))):
            raise TypeError(f"{name} must be an int, a tensor or None, got {value!r}")


def flash_attn_func(
    q, k, v, *, softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0,
    learnable_sink=None, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None,
    block_mask=None, alibi_slopes=None, dropout_p=0.0, deterministic=None, num_splits=0,
    pack_gqa=None, q_descale=None, k_descale=None, v_descale=None, out=None, return_lse=False,
):  # fmt: skip
    """Exact attention, out = softmax(softmax_scale * q k^T) v, in one kernel (FlashAttention, arXiv:2205.14135).

    Query head h attends with KV head ``h // (heads_q / heads_kv)``. Queries are aligned bottom-right: query i has the
    position p = i + seqlen_k - seqlen_q among the keys, and sees keys j <= p with ``causal``, and p - left <= j <= p +
    right with ``window_size``. A query that sees no key gives exactly 0, and -inf in lse (its head's sink, if any).

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), float16 or bfloat16, on a GPU that ``is_available`` names. Any strides; a
            copy is made only where the kernel cannot address them (``explain`` says so). head_dim is a multiple of 8 up to 256.
        k: (batch, seqlen_k, heads_kv, head_dim); heads_kv divides heads_q.
        v: (batch, seqlen_k, heads_kv, head_dim_v); head_dim_v is a multiple of 8 up to 256.
        softmax_scale: 0, or 1e-38 to 1e30 of either sign; default 1 / sqrt(head_dim). Scaled scores up to 1e6 in
            magnitude keep float32's accuracy.
        causal: mask keys after the query's own position.
        window_size: (left, right) keys before and after the query's own position that it sees beside that; None or -1
            is no limit. Blocks of keys outside the window cost nothing. (None, 0) is causal.
        softcap: cap of scaled scores, softcap * tanh(softmax_scale * q k^T / softcap); 0 is none, else 1e-38 to 1e30.
        learnable_sink: (heads_q,) logits, float32 or 16 bit (converted to float32): each adds exp(sink) to the softmax
            denominators of its head, and nothing to out. They are not scaled.
        score_mod: (score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) -> new score; a callable that is traced
            into the kernel, of arithmetic and comparisons on numbers, without branches. The score is scaled, capped and
            has its ALiBi; indices count from the start of a sequence; ``seqlen_info`` has seqlen_q, seqlen_k, offset_q
            and offset_k. It is known by its code and by the numbers that it closes over or names as globals: other
            numbers compile another kernel.
        score_mod_bwd: (grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) -> gradient of ``score``, which
            gradients of q and k need beside a score_mod, as a callable like it. ``grad`` is the gradient by what score_mod
            returned, P (dP - D), and ``score`` what it was given; for s^2 it is grad * 2 * score. Hidden keys get 0.
        mask_mod: (batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) -> whether the key is seen; as score_mod. Causal
            and window apply beside it. No block is skipped for it.
        aux_tensors: tensors that the mods read by index: 1 to 4 dimensions, float32, float16, bfloat16, int32 or int64,
            any strides. Where a tile reaches past a sequence, indices are those of its last query or key. They get no
            gradients: one that requires them is refused.
        block_mask: not supported yet.
        alibi_slopes: (heads_q,) or (batch, heads_q), float32 or 16 bit (converted to float32): scaled and capped scores
            lose slope * |p - j|.
        dropout_p: not supported yet.
        deterministic: whether gradients are bitwise repeatable; None follows ``torch.use_deterministic_algorithms``. out and
            the gradients of k and v always are; that of q costs some speed.
        num_splits: parts that the keys of one query are split into; only 1 is supported yet, and 0 chooses it.
        pack_gqa: whether query heads that share a KV head share tiles; None chooses by the number of tiles.
        q_descale: not supported yet.
        k_descale: not supported yet.
        v_descale: not supported yet.
        out: buffer (batch, seqlen_q, heads_q, head_dim_v) to write into; not differentiable.
        return_lse: also return the log-sum-exp of the scaled scores.

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim_v) in q's dtype; with ``return_lse`` the pair (out, lse), lse
        (batch, heads_q, seqlen_q) in float32, natural logarithm.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: sizes or devices that do not fit; the message says what is allowed.
        NotImplementedError: a keyword or GPU that is not supported yet; the message names it.
    """
    traced = (score_mod, score_mod_bwd, mask_mod, aux_tensors, block_mask)
    rare = (out, *traced, q_descale, k_descale, v_descale)
    plain = (softmax_scale, causal, softcap, pack_gqa, dropout_p, num_splits)
    scalars = _scalars(rare, plain, window_size, deterministic)
    if scalars is not None:
        tensors = (learnable_sink, alibi_slopes, None, None, None, None)
        result = launch.attend(q, k, v, tensors, scalars, return_lse)
        if result is not None:
            return result if return_lse else result[0]
    keywords = dict(
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        learnable_sink=learnable_sink, deterministic=deterministic, pack_gqa=pack_gqa,
        score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
        aux_tensors=aux_tensors, block_mask=block_mask, alibi_slopes=alibi_slopes,
        dropout_p=dropout_p, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        num_splits=num_splits,
    )  # fmt: skip
    out, lse = _forward(out, q, k, v, keywords, scalars)
    return (out, lse) if return_lse else out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, *,
    seqused_q=None, seqused_k=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), softcap=0.0, learnable_sink=None, score_mod=None,
    score_mod_bwd=None, mask_mod=None, aux_tensors=None, block_mask=None, alibi_slopes=None,
    dropout_p=0.0, deterministic=None, num_splits=0, pack_gqa=None, q_descale=None,
    k_descale=None, v_descale=None, out=None, return_lse=False,
):  # fmt: skip
    """``flash_attn_func`` for sequences of different lengths, which stay on the GPU: nothing waits for them.

    Either side is packed, with ``cu_seqlens``, or a batch of rows; ``seqused`` says how many rows of each sequence are
    in use, counted from its first. Masks are aligned at the ends of what is in use. What lies in k and v outside that
    never reaches a result, whatever it holds; rows of q outside that give 0 in out, and -inf in lse. Gradients of all rows
    outside are 0, and what lies there, in the gradients of out and lse too, does not matter. Lengths may be 0.

    Args:
        q: (total_q, heads_q, head_dim) with ``cu_seqlens_q``, else (batch, seqlen_q, heads_q, head_dim).
        k: (total_k, heads_kv, head_dim) with ``cu_seqlens_k``, else (batch, seqlen_k, heads_kv, head_dim).
        v: as k, with head_dim_v.
        cu_seqlens_q: (batch + 1,) int32, sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q. int64 is
            converted. Rows before the first and behind the last sequence are of none.
        cu_seqlens_k: (batch + 1,) int32, the same for k and v.
        max_seqlen_q: int or tensor; not needed, and not looked at.
        max_seqlen_k: int or tensor; not needed, and not looked at.
        seqused_q: (batch,) int32, queries in use; at most as many as are stored.
        seqused_k: (batch,) int32, keys in use; at most as many as are stored.
        page_table: not supported yet.
        softmax_scale: as in ``flash_attn_func``, as are all keywords that follow.
        causal: mask keys after the query's own position.
        window_size: (left, right) keys around the query's own position.
        softcap: cap of scaled scores.
        learnable_sink: (heads_q,) logits that add to the denominators.
        score_mod: changes scores.
        score_mod_bwd: takes gradients back through score_mod.
        mask_mod: hides keys.
        aux_tensors: what the mods read.
        block_mask: not supported yet.
        alibi_slopes: (heads_q,) or (batch, heads_q) slopes of the distance between query and key.
        dropout_p: not supported yet.
        deterministic: whether gradients are bitwise repeatable; None follows torch's setting.
        num_splits: only 1 is supported yet, and 0 chooses it.
        pack_gqa: whether query heads that share a KV head share tiles; None chooses by the mean length.
        q_descale: not supported yet.
        k_descale: not supported yet.
        v_descale: not supported yet.
        out: buffer to write into, q's shape with head_dim_v; not differentiable.
        return_lse: also return the log-sum-exp of the scaled scores.

    Returns:
        out, q's shape with head_dim_v, in q's dtype; with ``return_lse`` the pair (out, lse), lse (heads_q, total_q) or
        (batch, heads_q, seqlen_q) in float32, natural logarithm.

    Raises:
        TypeError: not a tensor, or an unsupported dtype.
        ValueError: sizes or devices that do not fit; the message says what is allowed.
        NotImplementedError: a keyword or GPU that is not supported yet; the message names it.
    """
    _check_max_seqlen(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    rare = (
        out, page_table, score_mod, score_mod_bwd, mask_mod, aux_tensors, block_mask, q_descale, k_descale,
        v_descale,
    )  # fmt: skip
    plain = (softmax_scale, causal, softcap, pack_gqa, dropout_p, num_splits)
    scalars = _scalars(rare, plain, window_size, deterministic)
    if scalars is not None:
        tensors = (learnable_sink, alibi_slopes, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        result = launch.attend(q, k, v, tensors, scalars, return_lse)
        if result is not None:
            return result if return_lse else result[0]
    keywords = dict(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q,
        seqused_k=seqused_k, page_table=page_table, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, learnable_sink=learnable_sink,
        deterministic=deterministic, pack_gqa=pack_gqa, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
        block_mask=block_mask, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, num_splits=num_splits,
    )  # fmt: skip
    out, lse = _forward(out, q, k, v, keywords, scalars)
    return (out, lse) if return_lse else out


def options_of(q, k, v, **keywords) -> CallOptions:
    """Checked options of a call with these keywords, of ``flash_attn_varlen_func`` if it alone has them."""
    dense = inspect.signature(flash_attn_func)
    signature = dense
    if not keywords.keys() <= dense.parameters.keys():
        signature = inspect.signature(flash_attn_varlen_func)
    bound = signature.bind(q, k, v, **keywords)
    bound.apply_defaults()
    return _options(q, k, v, bound.arguments)


def explain(q, k, v, *, arch=None, backward=False, dlse=False, **keywords) -> Plan | BackwardPlan:
    """Say how a call would run: kernel, configuration, reasons, and what is copied. Launches and compiles nothing.

    Args:
        q: as in ``flash_attn_func`` or ``flash_attn_varlen_func``; tensors on the CPU or the meta device will do.
        k: as in ``flash_attn_func``.
        v: as in ``flash_attn_func``.
        arch: target such as "sm_90a"; default the GPU of q, and "sm_90a" for tensors that are on none.
        backward: say how its gradients would be computed instead.
        dlse: with ``backward``: the log-sum-exp has a gradient too.
        keywords: as there.

    Returns:
        The plan; ``print`` it.

    Raises:
        TypeError: a keyword that neither has.
        ValueError: as in ``flash_attn_func``, or an empty problem, which needs no kernel.
        NotImplementedError: as in ``flash_attn_func``.
    """
    options = options_of(q, k, v, **keywords)
    if q.is_cuda and arch is None:
        arch, workers = ops.device_facts(q.device.index)
    else:
        arch, workers = arch or "sm_90a", MULTIPROCESSORS
    if backward:
        return ops.plan_backward_call((q, k, v), options, arch, workers, dlse)
    if dlse:
        raise ValueError("dlse says something of a backward only")
    return ops.plan_call(q, k, v, options, arch, workers)


class Redone(NamedTuple):
    """What ``redone_tiles`` found.

    Attributes:
        redone: tiles that were worked on twice.
        tiles: tiles of the call; of sequences of different lengths about as many.
    """

    redone: int
    tiles: int


def redone_tiles(q, k, v, **keywords) -> Redone:
    """Run a call and count the tiles of its output that were worked on twice, by a kernel compiled for that.

    Where the plan says that blocks without a mask keep a fixed softmax shift, a tile with a row that outgrows it is
    worked on again, and so may be others of the same worker, since marks are few (not with sequences of different
    lengths). All other kernels never do.
    The call waits for the GPU, and its result is dropped: this is to find out why inputs are slow.

    Args:
        q: as in ``flash_attn_func`` or ``flash_attn_varlen_func``.
        k: as in ``flash_attn_func``.
        v: as in ``flash_attn_func``.
        keywords: as there.

    Returns:
        The counts.

    Raises:
        TypeError: a keyword that neither has.
        ValueError: as in ``flash_attn_func``.
        NotImplementedError: as in ``flash_attn_func``.
    """
    options = options_of(q, k, v, **keywords)
    _check_device(q)
    return Redone(*ops.count_redone(q, k, v, options))
