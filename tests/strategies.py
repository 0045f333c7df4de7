"""Random attention problems, for Hypothesis and for long runs without it, from one distribution."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

import flash4
from flash4.common import mods

T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]

MAX_SEQLEN = 2100
MAX_SCORES = 64 * 2**20

TILES = (64, 80, 112, 128, 192, 256)
HEAD_DIMS = (64, 128, 96, 192, 256)


def relative_bias(score, batch, head, q_idx, kv_idx, info, aux):
    """Scores fall with the place of the key, by a global number."""
    return score - RELATIVE_SLOPE * (kv_idx + info.offset_k - info.seqlen_q)


def bias_of_heads(score, batch, head, q_idx, kv_idx, info, aux):
    """A table lookup, by head and place."""
    return 0.5 * score + aux[0][head, (q_idx + 3 * kv_idx) % 8]


def bent(score, batch, head, q_idx, kv_idx, info, aux):
    """Not linear, so that its derivative needs the score, and more where the key is far."""
    return score - BEND * score * score + 0.001 * kv_idx * score


def relative_bias_bwd(grad, score, batch, head, q_idx, kv_idx, info, aux):
    """Derivative of ``relative_bias``."""
    return grad


def bias_of_heads_bwd(grad, score, batch, head, q_idx, kv_idx, info, aux):
    """Derivative of ``bias_of_heads``."""
    return 0.5 * grad


def bent_bwd(grad, score, batch, head, q_idx, kv_idx, info, aux):
    """Derivative of ``bent``."""
    return grad * (1 - 2 * BEND * score + 0.001 * kv_idx)


def dilated(batch, head, q_idx, kv_idx, info, aux):
    """Two keys of three, others for every query; whole rows see nothing where a window is narrow."""
    return (q_idx + kv_idx) % 3 != 1


def same_document(batch, head, q_idx, kv_idx, info, aux):
    """Queries see keys of their own document."""
    return aux[1][batch, q_idx] == aux[1][batch, kv_idx]


RELATIVE_SLOPE = 0.01
BEND = 0.02
SCORE_MODS = {"relative": relative_bias, "heads": bias_of_heads, "bent": bent}
SCORE_MODS_BWD = {
    "relative": relative_bias_bwd,
    "heads": bias_of_heads_bwd,
    "bent": bent_bwd,
}
MASK_MODS = {"dilated": dilated, "documents": same_document}
for mod in (*SCORE_MODS.values(), *SCORE_MODS_BWD.values(), *MASK_MODS.values()):
    mods.register(mod)  # a process that compiles for another one finds them by their keys

FEATURES = ("window", "softcap", "sink", "lengths", "lengths", "alibi", "mods")
# Which of cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k a call has.
LENGTHS = (*[(1, 1, 0, 0)] * 3, *[(0, 0, 0, 1)] * 2, (1, 0, 0, 1), (1, 1, 1, 1))
FEATURE_HEAD_DIMS = (
    *[(128, 128, torch.bfloat16)] * 7,
    *[(64, 64, torch.float16)] * 5,
    *[(40, 56, torch.float16)] * 2,
    *[(192, 128, torch.bfloat16)] * 3,
)
RATIOS = (1, 2, 3, 4, 5, 7, 8, 16)
LAYOUTS = (
    "contiguous",  # (batch, seqlen, heads, head_dim)
    "transposed",  # a view of (batch, heads, seqlen, head_dim)
    "interleaved",  # one of three tensors that are packed token by token
    "expanded_batch",  # batch stride 0
    "expanded_heads",  # head stride 0
    "every_second",  # every second token of a longer tensor
    "padded",  # head_dim cut from rows that are 8 elements longer
    "unaligned",  # head_dim cut from rows that are 1 element longer, so that most are misaligned
)


@dataclass(frozen=True)
class Problem:
    """One attention call; `str()` of it is an expression that builds it again.

    Attributes:
        dtype: of q, k and v.
        batch: sequences.
        heads_kv: KV heads.
        ratio: query heads per KV head.
        head_dim: of q and k.
        head_dim_v: of v and out.
        seqlen_q: queries per sequence.
        seqlen_k: keys per sequence.
        causal: as in the public functions.
        softmax_scale: as in the public functions.
        pack_gqa: as in the public functions.
        layouts: of q, k and v; see `LAYOUTS`.
        value_scale: standard deviation of q, k and v.
        window_size: as in the public functions.
        softcap: as in the public functions.
        sink: mean of the learnable sinks; None is none.
        score_mod: name in `SCORE_MODS`.
        mask_mod: name in `MASK_MODS`.
        alibi: slopes, "by head" or "by batch and head"; None is none.
        lengths_q: queries of each sequence, which packs q; `batch` and `seqlen_q` then say nothing.
        lengths_k: keys of each sequence, which packs k and v.
        used_q: queries in use of each sequence.
        used_k: keys in use of each sequence.
        around: rows of no sequence, before the first and behind the last of what is packed.
    """

    dtype: torch.dtype = torch.float16
    batch: int = 1
    heads_kv: int = 1
    ratio: int = 1
    head_dim: int = 8
    head_dim_v: int = 8
    seqlen_q: int = 1
    seqlen_k: int = 1
    causal: bool = False
    softmax_scale: float | None = None
    pack_gqa: bool | None = None
    layouts: tuple[str, str, str] = ("contiguous",) * 3
    value_scale: float = 1.0
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    sink: float | None = None
    alibi: str | None = None
    score_mod: str | None = None
    mask_mod: str | None = None
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    around: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        given = (
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"Problem({', '.join(given)})"

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.heads_kv * self.ratio

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        given = (self.lengths_q, self.lengths_k, self.used_q, self.used_k)
        return next((len(x) for x in given if x is not None), self.batch)

    @property
    def function(self) -> Callable[..., Any]:
        """Public function that takes the call."""
        return flash4.flash_attn_varlen_func if self.varlen else flash4.flash_attn_func

    @property
    def varlen(self) -> bool:
        """Whether sequences have lengths of their own."""
        given = (self.lengths_q, self.lengths_k, self.used_q, self.used_k)
        return any(x is not None for x in given)

    @property
    def reads_tensors(self) -> bool:
        """Whether a mod reads tensors."""
        return self.score_mod == "heads" or self.mask_mod == "documents"

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of out."""
        return (*self._rows(self.lengths_q, self.seqlen_q), self.heads, self.head_dim_v)

    @property
    def shapes(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v without memory, contiguous."""
        queries, keys = (
            self._rows(lengths, seqlen)
            for lengths, seqlen in (
                (self.lengths_q, self.seqlen_q),
                (self.lengths_k, self.seqlen_k),
            )
        )
        return tuple(
            torch.empty(*rows, heads, head_dim, dtype=self.dtype, device="meta")
            for rows, heads, head_dim in (
                (queries, self.heads, self.head_dim),
                (keys, self.heads_kv, self.head_dim),
                (keys, self.heads_kv, self.head_dim_v),
            )
        )

    def _rows(self, lengths: tuple[int, ...] | None, seqlen: int) -> tuple[int, ...]:
        if lengths is None:
            return self.sequences, seqlen
        return (self.around[0] + sum(lengths) + self.around[1],)

    def _begins(self, lengths: tuple[int, ...]) -> list[int]:
        return list(itertools.accumulate(lengths, initial=self.around[0]))

    def _outside(
        self, lengths: tuple[int, ...] | None, used: tuple[int, ...] | None, seqlen: int
    ) -> Tensor | None:
        """Rows that are of no sequence or not in use; None if there are none."""
        if lengths is None and used is None:
            return None
        outside = torch.ones(self._rows(lengths, seqlen), dtype=torch.bool)
        for b, n in enumerate(used or lengths):
            if lengths is None:
                outside[b, :n] = False
            else:
                begin = self._begins(lengths)[b]
                outside[begin : begin + n] = False
        return outside

    @property
    def scores(self) -> int:
        """Query-key pairs, masked ones included, over all heads and sequences."""
        if self.lengths_q is not None or self.lengths_k is not None:
            queries = self.lengths_q or (self.seqlen_q,) * self.sequences
            keys = self.lengths_k or (self.seqlen_k,) * self.sequences
            return self.heads * sum(a * b for a, b in zip(queries, keys, strict=True))
        return self.batch * self.heads * self.seqlen_q * self.seqlen_k

    def keywords(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Build the keyword arguments of `function`; always the same for a problem."""
        sink = None
        if self.sink is not None:
            generator = torch.Generator().manual_seed(self.heads)
            sink = self.sink + 2 * torch.randn(self.heads, generator=generator)
            if self.heads > 2:
                sink[0] = -torch.inf  # as if that head had none
            sink = sink.to(device)
        slopes = None
        if self.alibi is not None:
            slopes = 2.0 ** -torch.linspace(1, 8, self.heads)
            if self.alibi == "by batch and head":
                slopes = slopes * torch.linspace(1, -0.5, self.sequences)[:, None]
            slopes = slopes.to(device)
        keywords = {
            "causal": self.causal,
            "softmax_scale": self.softmax_scale,
            "pack_gqa": self.pack_gqa,
            "window_size": self.window_size,
            "softcap": self.softcap,
            "learnable_sink": sink,
            "alibi_slopes": slopes,
        }
        lengths = {
            "cu_seqlens_q": self.lengths_q and self._begins(self.lengths_q),
            "cu_seqlens_k": self.lengths_k and self._begins(self.lengths_k),
            "seqused_q": self.used_q,
            "seqused_k": self.used_k,
        }
        if self.score_mod is not None or self.mask_mod is not None:
            keywords["score_mod"] = SCORE_MODS.get(self.score_mod)
            keywords["score_mod_bwd"] = SCORE_MODS_BWD.get(self.score_mod)
            keywords["mask_mod"] = MASK_MODS.get(self.mask_mod)
            if self.reads_tensors:
                keywords["aux_tensors"] = [x.to(device) for x in self._aux_tensors()]
        for name, numbers in lengths.items():
            if numbers is not None:
                keywords[name] = torch.tensor(numbers, dtype=torch.int32, device=device)
        return keywords

    def _aux_tensors(self) -> tuple[Tensor, Tensor]:
        """What the mods read: biases, and the document of each place; not contiguous."""
        generator = torch.Generator().manual_seed(1)
        biases = torch.randn(8, self.heads, generator=generator).t()
        stored = (*(self.lengths_q or (self.seqlen_q,)), *(self.lengths_k or (self.seqlen_k,)))
        places = torch.arange(max(*stored, 1), dtype=torch.int32)
        documents = torch.stack([places // (40 + 30 * b) for b in range(self.sequences)])
        return biases, documents

    def tensors(
        self, device: torch.device | str = "cpu", seed: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Build q, k and v, random normal, in their layouts; what lies between, and what is not in use, is NaN."""
        generator = torch.Generator(device).manual_seed(seed)
        queries = (self.lengths_q, self.used_q, self.seqlen_q)
        keys = (self.lengths_k, self.used_k, self.seqlen_k)
        sizes = (
            (queries, self.heads, self.head_dim),
            (keys, self.heads_kv, self.head_dim),
            (keys, self.heads_kv, self.head_dim_v),
        )
        tensors = []
        for slot, ((rows, *size), layout) in enumerate(zip(sizes, self.layouts, strict=True)):
            shape = (*self._rows(rows[0], rows[2]), *size)
            packed = len(shape) == 3
            full = (1, *shape) if packed else shape
            tensor, source_shape = _empty(full, layout, slot, self.dtype, device)
            source = torch.randn(source_shape, device=device, generator=generator)
            tensor.copy_(source * self.value_scale)
            outside = self._outside(*rows)
            # Sequences that share their rows do not all use the same ones.
            if outside is not None and (packed or tensor.shape[0] == full[0]):
                tensor[outside[None] if packed else outside] = torch.nan
            tensor = tensor.expand(full)
            tensors.append(tensor[0] if packed else tensor)
        return tuple(tensors)

    def output_gradient(self, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
        """Build a random normal gradient of out, contiguous."""
        generator = torch.Generator(device).manual_seed(seed + 1)
        return torch.randn(self.out_shape, device=device, generator=generator).to(self.dtype)


def _empty(
    shape: tuple[int, ...],
    layout: str,
    slot: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Tensor, tuple[int, ...]]:
    """Cut a tensor of a layout from a NaN-filled buffer; expanded dimensions have size 1 yet."""
    b, s, h, d = shape

    def nans(*sizes: int) -> Tensor:
        return torch.full(sizes, torch.nan, dtype=dtype, device=device)

    match layout:
        case "contiguous":
            tensor = nans(b, s, h, d)
        case "transposed":
            tensor = nans(b, h, s, d).transpose(1, 2)
        case "interleaved":
            tensor = nans(b, s, 3, h, d)[:, :, slot]
        case "expanded_batch":
            tensor = nans(1, s, h, d)
        case "expanded_heads":
            tensor = nans(b, s, 1, d)
        case "every_second":
            tensor = nans(b, 2 * s, h, d)[:, ::2]
        case "padded":
            tensor = nans(b, s, h, d + 8)[..., :d]
        case "unaligned":
            tensor = nans(b, s, h, d + 1)[..., :d]
        case _:
            raise ValueError(f"layout {layout!r} is none of {LAYOUTS}")
    return tensor, tuple(tensor.shape)


def problems(
    *, max_seqlen: int = MAX_SEQLEN, max_scores: int = MAX_SCORES
) -> st.SearchStrategy[Problem]:
    """Draw problems of at most `max_scores` query-key pairs, shrinking towards `Problem()`."""

    @st.composite
    def draw_problem(draw: st.DrawFn) -> Problem:
        return _choose_problem(
            lambda options: draw(st.sampled_from(options)), max_seqlen, max_scores
        )

    return draw_problem()


def random_problems(
    n: int, seed: int = 0, *, max_seqlen: int = MAX_SEQLEN, max_scores: int = MAX_SCORES
) -> Iterator[Problem]:
    """Yield n problems of the distribution of `problems`, the same ones for a seed."""
    choose = random.Random(seed).choice
    for _ in range(n):
        yield _choose_problem(choose, max_seqlen, max_scores)


def _choose_problem(choose: Choose, max_seqlen: int, max_scores: int) -> Problem:
    """Draw a problem by choices alone; each lists its simplest option first, for shrinking.

    Half of them are plain, of any head dims; the others have features in pairs, and few head dims, so that the number
    of kernels stays bounded.
    """
    plain = _choose_plain_problem(choose, max_seqlen, max_scores)
    return plain if choose((True, False)) else _add_features(choose, plain)


def _add_features(choose: Choose, problem: Problem) -> Problem:
    names = {choose(FEATURES), choose(FEATURES)}
    head_dim, head_dim_v, dtype = choose(FEATURE_HEAD_DIMS)
    # Packed by choice of the library only, and by one ratio, for the same reason.
    changes = dict(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, pack_gqa=None)
    changes["ratio"] = min(problem.ratio, choose((1, 1, 4)))
    if changes["ratio"] != 4:
        changes["ratio"] = 1
    if problem.softmax_scale is not None and problem.softmax_scale < 0:
        changes["softmax_scale"] = None
    if "window" in names:
        changes["window_size"] = _choose_window(choose, problem)
    if "softcap" in names:
        # Far below the scores, about as large, far above them.
        changes["softcap"] = choose((5.0, 1.0, 30.0, 0.1, 1e4))
    if "sink" in names:
        changes["sink"] = choose((0.0, 4.0, -40.0, 40.0))
    if "alibi" in names:
        changes["alibi"] = choose(("by head", "by batch and head"))
    if "mods" in names:  # with many other features and lengths, but one kernel's tile
        changes |= dict(head_dim=128, head_dim_v=128, dtype=torch.bfloat16)
        kinds = ((None, "dilated"), ("heads", None), ("relative", "documents"), ("bent", None))
        changes["score_mod"], changes["mask_mod"] = choose(kinds)
    if "lengths" in names:
        changes |= _choose_lengths(choose, problem)
    return dataclasses.replace(problem, **changes)


def resized(
    choose: Choose, problem: Problem, *, max_seqlen: int = MAX_SEQLEN, max_scores: int = MAX_SCORES
) -> Problem:
    """Draw a problem with the features, types and head dims of another one, and all else drawn anew."""
    plain = _choose_plain_problem(choose, max_seqlen, max_scores)
    names = ("batch", "heads_kv", "seqlen_q", "seqlen_k", "layouts", "value_scale")
    changes = {name: getattr(plain, name) for name in names}
    if problem.ratio > 1:
        changes["ratio"] = plain.ratio
    given = (problem.lengths_q, problem.lengths_k, problem.used_q, problem.used_k)
    kinds = tuple(x is not None for x in given)
    if any(kinds):
        sized = dataclasses.replace(plain, ratio=changes.get("ratio", 1))
        changes |= _choose_lengths(choose, sized, kinds)
    drawn = _choose_window(choose, dataclasses.replace(plain, causal=False))
    changes["window_size"] = tuple(
        old if old in (None, 0) or not new else new
        for old, new in zip(problem.window_size, drawn, strict=True)
    )
    return dataclasses.replace(problem, **changes)


def _choose_lengths(choose: Choose, problem: Problem, kinds=None) -> dict[str, Any]:
    """Lengths of the sequences, none longer than those of the dense problem."""
    longest_q, longest_k, batch = problem.seqlen_q, problem.seqlen_k, choose((1, 2, 3, 5, 9))
    batch = max(1, min(batch, MAX_SCORES // max(1, problem.heads * longest_q * longest_k)))

    def draw(longest: int) -> tuple[int, ...]:
        some = (longest, 0, 1, longest // 3, *range(0, longest + 1, 1 + longest // 30))
        return tuple(choose(some) for _ in range(batch))

    def part(lengths: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(choose((n, n, n // 2, max(n - 1, 0), 0)) for n in lengths)

    packs_q, packs_k, uses_q, uses_k = kinds or choose(LENGTHS)
    lengths_q, lengths_k = (draw(n) if n else (n,) * batch for n in (longest_q, longest_k))
    stored_q = lengths_q if packs_q else (longest_q,) * batch
    stored_k = lengths_k if packs_k else (longest_k,) * batch
    return dict(
        batch=batch,
        lengths_q=stored_q if packs_q else None,
        lengths_k=stored_k if packs_k else None,
        used_q=part(stored_q) if uses_q else None,
        used_k=part(stored_k) if uses_k else None,
        around=choose(((0, 0), (0, 0), (0, 3), (5, 130))),
    )


def _choose_window(choose: Choose, problem: Problem) -> tuple[int | None, int | None]:
    longest = max(problem.seqlen_q, problem.seqlen_k)
    sizes = (0, 1, 7, 63, 64, 100, 128, 200, longest, *range(1, longest + 1, 1 + longest // 50))
    left, right = choose(sizes), choose(sizes)
    if problem.causal:
        return (left, None)
    return choose(((left, right), (left, None), (None, right), (left, 0)))


def _choose_plain_problem(choose: Choose, max_seqlen: int, max_scores: int) -> Problem:
    seqlen_q = _choose_seqlen(choose, max_seqlen)
    seqlen_k = seqlen_q if choose((True, False, False)) else _choose_seqlen(choose, max_seqlen)
    # Lengths keep their tile edges, so that heads and batch give way to the bound.
    if seqlen_q * seqlen_k > max_scores:
        seqlen_k = max(1, max_scores // seqlen_q)
    room = max_scores // (seqlen_q * seqlen_k)
    ratio = min(choose((*RATIOS, *range(1, 17))), room)
    heads_kv = min(choose((1, 1, 2, 3, 4, 8)), room // ratio)
    batch = min(choose((1, 1, 2, 3)), room // (ratio * heads_kv))
    head_dim = _choose_head_dim(choose)
    return Problem(
        dtype=choose((torch.float16, torch.bfloat16)),
        batch=batch,
        heads_kv=heads_kv,
        ratio=ratio,
        head_dim=head_dim,
        head_dim_v=head_dim if choose((True, True, False)) else _choose_head_dim(choose),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        causal=choose((False, True)),
        # 0.7 is several times 1/sqrt(head_dim): most rows attend to a few keys only.
        softmax_scale=choose((None, None, None, 0.05, -0.1, 0.0, 0.7)),
        pack_gqa=choose((None, None, True, False)),
        layouts=tuple(choose((*["contiguous"] * 7, *LAYOUTS)) for _ in range(3)),
        value_scale=choose((1.0, 1.0, 1.0, 0.1, 3.0)),
    )


def _choose_seqlen(choose: Choose, max_seqlen: int) -> int:
    kind = choose(("small", "edge", "edge", "any"))
    if kind == "small":
        return choose(range(1, min(17, max_seqlen + 1)))
    if kind == "any":
        return choose(range(1, max_seqlen + 1))
    tile = choose(TILES)
    blocks = choose(range(1, max(1, max_seqlen // tile) + 1))
    return min(blocks * tile + choose((0, -1, 1)), max_seqlen)


def _choose_head_dim(choose: Choose) -> int:
    return choose((8, *HEAD_DIMS * 6, *range(16, 257, 8)))
