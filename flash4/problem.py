"""The facts of one attention call, and the checks that every call must pass before anything is launched."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from flash4.common.launch_facts import LENGTHS
from flash4.common.mods import check_aux, encode_aux

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIM_STEP = 8  # 16 bytes: the granularity of TMA and of cp.async
MAX_HEAD_DIM = 256
MAX_SCALE = 1e30
MIN_SCALE = 1e-38  # times log2 e it is still a normal float32
NO_LIMIT = -1  # a side of a window
MAX_WINDOW = 2**30  # sums of two such numbers fit int32; a side of at least this is no limit
MAX_SEQLEN = 2**30 - 1


class CallOptions(NamedTuple):
    """What a call says besides q, k and v; ``torch.ops.flash4.forward`` takes the fields in this order.

    Attributes:
        softmax_scale: factor of a score.
        causal: bottom-right causal mask.
        pack_gqa: as in the public functions.
        window_left: keys before a query's own position that it sees; -1 is no limit.
        window_right: keys after it, at least 1; -1 is no limit, or ``causal``.
        softcap: scores are capped to this; 0 is no cap.
        sink: (heads_q,) logits that add to the denominator, or None.
        alibi_slopes: (heads_q,) or (batch, heads_q) slopes, or None.
        cu_seqlens_q: (batch + 1,) rows where sequences begin and end in packed q; None if q is not packed.
        cu_seqlens_k: (batch + 1,) the same of packed k and v.
        seqused_q: (batch,) queries in use; None if all are.
        seqused_k: (batch,) keys in use; None if all are.
        score_mod: key of the callable that changes scores; 0 is none.
        mask_mod: key of the callable that hides keys; 0 is none.
        aux_tensors: what those read besides, or None.
        deterministic: gradients are bitwise repeatable; the forward always is.
        score_mod_bwd: key of the callable that takes a gradient back through ``score_mod``; 0 is none.
    """

    softmax_scale: float
    causal: bool = False
    pack_gqa: bool | None = None
    window_left: int = NO_LIMIT
    window_right: int = NO_LIMIT
    softcap: float = 0.0
    sink: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    score_mod: int = 0
    mask_mod: int = 0
    aux_tensors: list[torch.Tensor] | None = None
    deterministic: bool = False
    score_mod_bwd: int = 0

    @property
    def lengths(self) -> tuple:
        """Tensors that say where sequences lie, or None in their places."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k

    @property
    def flags(self) -> tuple:
        """What of them decides about the kernel, as plain values."""
        return (
            self.causal,
            self.softmax_scale < 0,
            self.pack_gqa,
            self.window_left >= 0,
            self.window_right >= 0,
            self.softcap != 0,
            self.score_mod,
            self.mask_mod,
            self.deterministic,
            self.score_mod_bwd,
            *[
                None if x is None else (x.shape, x.dtype, x.device)
                for x in (self.sink, self.alibi_slopes, *self.lengths)
            ],
            *[(x.dtype, x.ndim) for x in self.aux_tensors or ()],
        )

    def batch(self, q) -> int:
        """Sequences of a call whose queries are ``q``."""
        return q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1


@dataclass(frozen=True)
class AttentionProblem:
    """Hashable facts of one attention call.

    Attributes:
        dtype: element type of q, k, v and out.
        batch: batch entries.
        seqlen_q: queries per batch entry.
        seqlen_k: keys per batch entry.
        heads_q: query heads.
        heads_kv: key and value heads; divides ``heads_q``.
        head_dim: of q and k.
        head_dim_v: of v and out.
        causal: bottom-right causal mask.
        negative_scale: the softmax scale is below zero.
        pack_gqa: the caller's choice whether query heads that share a KV head share tiles; None leaves it to flash4.
        window_left: a window limits the keys before a query's own position.
        window_right: a window limits the keys after it, and lets some through (none is ``causal``).
        softcap: scores are capped.
        sink: each query head has a logit that adds to the softmax denominator.
        alibi: scores lose a slope of their head times the distance between query and key.
        score_mod: key of the callable that changes scores (``common.mods``); 0 is none.
        mask_mod: key of the callable that hides keys; 0 is none.
        aux: types of the tensors that those read (``encode_aux``).
        cu_q: queries are packed; ``seqlen_q`` is their mean length, rounded up.
        cu_k: keys and values are packed; ``seqlen_k`` is their mean length, rounded up.
        used_q: queries in use are counted for each sequence.
        used_k: keys in use are counted for each sequence.
        deterministic: gradients are bitwise repeatable.
        score_mod_bwd: key of the callable that takes a gradient back through ``score_mod``; 0 is none.
    """

    dtype: torch.dtype
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    negative_scale: bool = False
    pack_gqa: bool | None = None
    window_left: bool = False
    window_right: bool = False
    softcap: bool = False
    sink: bool = False
    alibi: bool = False
    score_mod: int = 0
    mask_mod: int = 0
    aux: int = 0
    cu_q: bool = False
    cu_k: bool = False
    used_q: bool = False
    used_k: bool = False
    deterministic: bool = False
    score_mod_bwd: int = 0

    @property
    def varlen(self) -> bool:
        """Lengths of sequences are known on the GPU only."""
        return self.cu_q or self.cu_k or self.used_q or self.used_k

    @property
    def gqa_ratio(self) -> int:
        """Query heads per KV head."""
        return self.heads_q // self.heads_kv

    @property
    def is_empty(self) -> bool:
        """No query or no key: the result needs no kernel."""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_k, self.heads_q)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of what modifies or masks scores, or says how long sequences are."""
        given = {
            "causal": self.causal,
            "window at the left": self.window_left,
            "window at the right": self.window_right,
            "softcap": self.softcap,
            "sink": self.sink,
            "alibi": self.alibi,
            "score_mod": self.score_mod,
            "mask_mod": self.mask_mod,
            "cu_seqlens_q": self.cu_q,
            "cu_seqlens_k": self.cu_k,
            "seqused_q": self.used_q,
            "seqused_k": self.used_k,
        }
        return tuple(name for name, present in given.items() if present)

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward, halved for causal; windows are not counted off."""
        pairs = self.batch * self.heads_q * self.seqlen_q * self.seqlen_k
        return 2 * pairs * (self.head_dim + self.head_dim_v) // (2 if self.causal else 1)

    @classmethod
    def from_tensors(cls, q, k, v, **options):
        """Check a call and return its facts.

        Args:
            q: (batch, seqlen_q, heads_q, head_dim), or packed (total_q, heads_q, head_dim), float16 or bfloat16.
            k: (batch, seqlen_k, heads_kv, head_dim), or packed.
            v: (batch, seqlen_k, heads_kv, head_dim_v), or packed as k.
            options: fields of ``CallOptions``.

        Raises:
            TypeError: not tensors, or a dtype that is not supported.
            ValueError: ranks, sizes, devices or the scale do not fit; the message says what is allowed.
        """
        return cls.of_call(q, k, v, CallOptions(**options))

    @classmethod
    def of_call(cls, q, k, v, options: CallOptions):
        """As ``from_tensors``."""
        check_call(q, k, v, options)
        batch = options.batch(q)

        def mean_length(x, packed):
            return -(-x.shape[0] // max(batch, 1)) if packed else x.shape[1]

        cu_q, cu_k, used_q, used_k = (x is not None for x in options.lengths)
        return cls(
            dtype=q.dtype,
            batch=batch,
            seqlen_q=mean_length(q, cu_q),
            seqlen_k=mean_length(k, cu_k),
            heads_q=q.shape[-2],
            heads_kv=k.shape[-2],
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-1],
            causal=options.causal,
            negative_scale=options.softmax_scale < 0,
            pack_gqa=options.pack_gqa,
            window_left=options.window_left >= 0,
            window_right=options.window_right >= 0,
            softcap=options.softcap != 0,
            sink=options.sink is not None,
            alibi=options.alibi_slopes is not None,
            score_mod=options.score_mod,
            mask_mod=options.mask_mod,
            aux=encode_aux(options.aux_tensors),
            cu_q=cu_q,
            cu_k=cu_k,
            used_q=used_q,
            used_k=used_k,
            deterministic=options.deterministic,
            score_mod_bwd=options.score_mod_bwd,
        )


def check_call(q, k, v, options: CallOptions):
    """Check everything about a call; see the checks for what they raise."""
    packed_q, packed_k = options.cu_seqlens_q is not None, options.cu_seqlens_k is not None
    check_tensors(q, k, v, packed_q, packed_k)
    check_sizes(q, k, v)
    check_lengths(q, k, options)
    check_scale(options.softmax_scale)
    check_softcap(options)
    check_per_head("learnable_sink", options.sink, q)
    check_per_head("alibi_slopes", options.alibi_slopes, q, options.batch(q))
    check_aux(options.aux_tensors or (), q)


def check_tensors(q, k, v, packed_q: bool = False, packed_k: bool = False):
    """Check types, ranks, dtypes and devices of q, k and v.

    Raises:
        TypeError: not a tensor, or a dtype other than float16 and bfloat16, or mixed dtypes.
        ValueError: not 4-dimensional, or 3-dimensional if packed, or on different devices.
    """
    for name, x, packed in (("q", q, packed_q), ("k", k, packed_k), ("v", v, packed_k)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if packed and x.ndim != 3:
            raise ValueError(
                f"packed {name} must have 3 dimensions (total, heads, head_dim), got shape {tuple(x.shape)}"
            )
        if not packed and x.ndim != 4:
            raise ValueError(
                f"{name} must have 4 dimensions (batch, seqlen, heads, head_dim), got shape {tuple(x.shape)}"
                + ("; packed sequences need cu_seqlens" if x.ndim == 3 else "")
            )
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}; supported are torch.float16 and torch.bfloat16")
        if x.dtype != q.dtype:
            raise TypeError(f"q, k and v must have one dtype, got q {q.dtype} and {name} {x.dtype}")
        if x.device != q.device:
            raise ValueError(
                f"q, k and v must be on one device, got q on {q.device} and {name} on {x.device}"
            )


def check_scale(softmax_scale: float):
    """Check the softmax scale.

    Raises:
        ValueError: not finite, or outside what float32 can hold beside scores.
    """
    # Comparisons alone, which a graph that is being compiled can take; NaN fails the first.
    if not -MAX_SCALE <= softmax_scale <= MAX_SCALE:
        raise ValueError(
            f"softmax_scale must be finite and at most {MAX_SCALE} either way, got {softmax_scale}"
        )
    if -MIN_SCALE < softmax_scale < MIN_SCALE and softmax_scale != 0:
        raise ValueError(
            f"softmax_scale is {softmax_scale}, too small for float32; "
            f"supported are 0 and {MIN_SCALE} to {MAX_SCALE} either way"
        )


def check_softcap(options: CallOptions):
    """Check the cap, and that the factor of a score within it is one that float32 can hold.

    Raises:
        ValueError: not finite, negative, or too far from the softmax scale.
    """
    cap, scale = options.softcap, abs(options.softmax_scale)
    if cap == 0:
        return
    if not MIN_SCALE <= cap <= MAX_SCALE:  # NaN fails too
        raise ValueError(f"softcap is {cap}; supported are 0 (none) and {MIN_SCALE} to {MAX_SCALE}")
    if scale != 0 and not MIN_SCALE <= scale / cap <= MAX_SCALE:
        raise ValueError(
            f"softmax_scale / softcap is {scale / cap} in magnitude; supported are {MIN_SCALE} to {MAX_SCALE}"
        )


def check_per_head(name: str, x, q, batch: int | None = None):
    """Check a tensor of one number for each query head, or, with ``batch``, also for each sequence and head.

    Raises:
        TypeError: not a tensor, or a dtype other than float32, float16 and bfloat16.
        ValueError: another shape, or on another device.
    """
    if x is None:
        return
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in (torch.float32, *DTYPES):
        raise TypeError(
            f"{name} is {x.dtype}; supported are torch.float32, torch.float16 and torch.bfloat16"
        )
    shapes = [(q.shape[-2],)] + ([] if batch is None else [(batch, q.shape[-2])])
    if tuple(x.shape) not in shapes:
        raise ValueError(
            f"{name} must be {' or '.join(map(str, shapes))}, a number for each query head, got {tuple(x.shape)}"
        )
    if x.device != q.device:
        raise ValueError(f"{name} must be on {q.device} as q, got {x.device}")


def positive_scale(q, softmax_scale: float):
    """Return (q, scale) with a positive scale; a sign is the kernel's to apply.

    A scale of 0 would turn masked scores, -inf, into NaN: it runs as zeroed queries instead.
    """
    if softmax_scale == 0:
        return q * 0, 1.0
    return q, abs(softmax_scale)


def check_sizes(q, k, v):
    """Check that the sizes of q, k and v fit together and are supported.

    Raises:
        ValueError: with the sizes, the limit and the nearest supported choice.
    """
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k and v must agree in batch, seqlen and heads, got k {tuple(k.shape)} and v {tuple(v.shape)}"
        )
    if q.ndim == k.ndim == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must agree in batch, got {q.shape[0]} and {k.shape[0]}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must agree in head_dim, got {q.shape[-1]} and {k.shape[-1]}")
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if (heads_kv == 0 and heads_q != 0) or (heads_kv != 0 and heads_q % heads_kv):
        raise ValueError(
            f"query heads must be a multiple of KV heads, got {heads_q} query heads and {heads_kv} KV heads"
        )
    for name, x in (("q", q), ("k", k)):
        if x.shape[-3] > MAX_SEQLEN:
            raise ValueError(f"{name} has {x.shape[-3]} rows; supported are up to {MAX_SEQLEN}")
    check_head_dim("head_dim of q and k", q.shape[-1])
    check_head_dim("head_dim of v", v.shape[-1])


def check_lengths(q, k, options: CallOptions):
    """Check the tensors that say where sequences lie and how long they are; their values are the caller's business.

    Raises:
        TypeError: not a tensor of int32 or int64.
        ValueError: wrong shape or device, or numbers of sequences that differ.
    """
    batch = None
    for name, x in zip(LENGTHS, options.lengths, strict=True):
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} is {x.dtype}; supported are torch.int32 and torch.int64")
        if x.device != q.device:
            raise ValueError(f"{name} must be on {q.device} as q, got {x.device}")
        cumulative = int(name.startswith("cu"))  # sizes that are being traced take no bool
        if x.ndim != 1 or (cumulative and x.shape[0] == 0):
            size = "batch + 1" if cumulative else "batch"
            raise ValueError(f"{name} must have shape ({size},), got {tuple(x.shape)}")
        batch = options.batch(q) if batch is None else batch
        if x.shape[0] - cumulative != batch:
            raise ValueError(
                f"q holds {batch} sequences, {name} of shape {tuple(x.shape)} speaks of {x.shape[0] - cumulative}"
            )
    if batch is not None and k.ndim == 4 and k.shape[0] != batch:
        raise ValueError(f"q holds {batch} sequences, k and v hold {k.shape[0]}")


def check_head_dim(name: str, head_dim: int):
    """Check one head dim.

    Raises:
        ValueError: not a multiple of 8 from 8 to 256.
    """
    if 0 < head_dim <= MAX_HEAD_DIM and head_dim % HEAD_DIM_STEP == 0:
        return
    above = -(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP
    hint = (
        f"; pad it with zeros to {above} and keep softmax_scale"
        if 0 < above <= MAX_HEAD_DIM
        else ""
    )
    raise ValueError(
        f"{name} is {head_dim}; supported are multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}{hint}"
    )
