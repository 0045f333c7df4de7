"""The feature cells: what is asked for beside plain attention, who answers, and the bars."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bench.report import SUBJECT
from bench.shapes import Cell

GEMM, GEMM_SIZE = "gemm", 8192
PEER = "best peer"
# Ten sequences, 22,185 tokens.
LENGTHS = (8192, 33, 4096, 517, 2048, 129, 3072, 1023, 2819, 256)
# A thousandfold difference of lengths.
SKEWED = (8,) * 8 + (8192,) + (8,) * 8
# Keys in use of 16 rows of 4096: drawn once between 100 and 4096.
USED = (3415, 100, 1876, 2790, 611, 4096, 1204, 3011, 158, 2344, 3867, 905, 1533, 2601, 419, 3222)


@dataclass(frozen=True)
class Problem:
    """Attention on one cell with features.

    Attributes:
        shape: sizes; of packed sequences its batch is 1 and its seqlen their total.
        lengths: of the packed sequences, the same for queries and keys; () is a plain batch.
        used_k: keys in use of each row of the batch; () is all.
        window: keys that a query sees, its own the last; 0 is no limit.
        softcap: cap of the scores; 0 is none.
        sink: a learnable sink per head.
        alibi: an ALiBi slope per head.
        data: "normal" draws; or, so that rows outgrow a shift that the first visited keys set, "ramp" (scores
            that grow from the last key to the first, by 1400) or "peaked" (scores of standard deviation 60).
        backward: what is asked for are the gradients of q, k and v.
        deterministic: to the same bits run after run.
    """

    shape: Cell
    lengths: tuple[int, ...] = ()
    used_k: tuple[int, ...] = ()
    window: int = 0
    softcap: float = 0.0
    sink: bool = False
    alibi: bool = False
    data: str = "normal"
    backward: bool = False
    deterministic: bool = False

    def sequences(self) -> list[tuple[int, int, int, int]]:
        """Return (batch row, first token, queries, keys) of every sequence."""
        if not self.lengths:
            s = self.shape.seqlen
            return [
                (b, 0, s, self.used_k[b] if self.used_k else s) for b in range(self.shape.batch)
            ]
        starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        return [(0, start, n, n) for start, n in zip(starts, self.lengths)]

    def flops(self) -> int:
        """Return 2 (d + dv) for each pair that is counted, 2.5 times that for the gradients.

        Half of all pairs if causal, as the papers count, and the visible ones of a window.
        """
        c, pairs = self.shape, 0
        for _, _, queries, keys in self.sequences():
            if self.window:
                w = min(self.window, keys)
                pairs += 2 * queries * w - w * (w - 1)
            else:
                pairs += queries * keys * (1 if c.causal else 2)
        products = 5 if self.backward else 2
        return pairs * c.heads_q * (c.d + c.dv) * products // 2

    def keywords(self, tensors: Any) -> dict[str, Any]:
        """Return the keywords that flash4 and flash-attn-4 share; tensors as in `bench.feature_calls`."""
        asked: dict[str, Any] = {"causal": self.shape.causal}
        if self.window:
            asked["window_size"] = (self.window - 1, 0)
        if self.softcap:
            asked["softcap"] = self.softcap
        if self.sink:
            asked["learnable_sink"] = tensors.sink
        if self.alibi:
            asked["alibi_slopes"] = tensors.slopes
        if self.deterministic:
            asked["deterministic"] = True
        if self.lengths:
            longest = max(self.lengths)
            asked |= {"cu_seqlens_q": tensors.cu, "cu_seqlens_k": tensors.cu}
            asked |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        if self.used_k:
            asked["seqused_k"] = tensors.used_k
        return asked

    @property
    def varlen(self) -> bool:
        """Sequences differ in length."""
        return bool(self.lengths or self.used_k)


@dataclass(frozen=True)
class Arm:
    """One contender of a cell: a package on a problem (a matrix product has none)."""

    package: str
    problem: Problem | None
    label: str = ""

    @property
    def name(self) -> str:
        """The package and what is special about its problem."""
        return f"{self.package} {self.label}".strip()


@dataclass(frozen=True)
class Bar:
    """A quotient of two arms and the limit that it is held to.

    Attributes:
        quantity: "rate" or "time".
        of: name of the arm in the numerator.
        over: that in the denominator; PEER is the fastest peer of the cell.
        limit: least quotient of rates, or largest of times.
    """

    quantity: str
    of: str
    over: str
    limit: float

    def holds(self, quotient: float) -> bool:
        """Tell whether a quotient is good enough."""
        return quotient >= self.limit if self.quantity == "rate" else quotient <= self.limit


@dataclass(frozen=True)
class FeatureCell:
    """Arms that are measured in turns, and what is asked of them."""

    group: str
    name: str
    arms: tuple[Arm, ...]
    bars: tuple[Bar, ...]


def _against(peers: str, problem: Problem, name: str, group: str, limit: float) -> FeatureCell:
    """One problem, flash4 and its peers; the bar is on the rate over the best of them."""
    arms = tuple(Arm(package, problem) for package in (SUBJECT, *peers.split()))
    return FeatureCell(group, name, arms, (Bar("rate", SUBJECT, PEER, limit),))


def _packed(lengths: tuple[int, ...], shape: str, **asked: Any) -> Problem:
    cell = replace(Cell.parse(shape.replace("-h", "-s1-b1-h")), seqlen=sum(lengths))
    return Problem(cell, lengths, **asked)


def _varlen() -> list[FeatureCell]:
    def packed(name: str, lengths: tuple[int, ...], shape: str, limit: float) -> FeatureCell:
        return _against("fa4 fa2", _packed(lengths, shape), f"{shape}-{name}", "varlen", limit)

    padded = Problem(Cell.parse("d128-full-s4096-b16-h16"), used_k=USED)
    return [
        packed("10seqs", LENGTHS, "d128-causal-h16", 1.10),
        packed("10seqs", LENGTHS, "d128-causal-h32x8", 1.10),
        packed("10seqs", LENGTHS, "d64-causal-h32", 1.10),
        packed("10seqs", LENGTHS, "d128-full-h16", 1.0),
        packed("skewed", SKEWED, "d128-causal-h16", 1.0),
        _against("fa4", padded, f"{padded.shape.name}-used", "varlen", 1.0),
    ]


def _window() -> list[FeatureCell]:
    cells = []
    for shape, window, limit in (
        ("d128-causal-s8192-b2-h16", 1024, 1.20),
        ("d64-causal-s8192-b2-h32", 128, 1.10),
    ):
        problem = Problem(Cell.parse(shape), window=window)
        cells.append(_against("fa4 fa2", problem, f"{shape}-window{window}", "window", limit))
    return cells


def _cost() -> list[FeatureCell]:
    plain = Problem(Cell.parse("d128-causal-s8192-b2-h16"))
    asked = {
        "softcap": (replace(plain, softcap=30.0), 1.12),
        "sink": (replace(plain, sink=True), 1.03),
        "alibi": (replace(plain, alibi=True), 1.10),
    }
    arms = [Arm(SUBJECT, plain), Arm("fa4", plain)]
    arms += [Arm(SUBJECT, problem, label) for label, (problem, _) in asked.items()]
    arms += [Arm("fa4", asked[label][0], label) for label in ("softcap", "sink")]
    bars = tuple(
        Bar("time", f"{SUBJECT} {label}", SUBJECT, limit) for label, (_, limit) in asked.items()
    )
    return [FeatureCell("cost", plain.shape.name, tuple(arms), bars)]


def _dims() -> list[FeatureCell]:
    shapes = [f"d{d}-causal-s8192-b2-h{8 if d == 192 else 16}" for d in (40, 80, 96, 192)]
    return [_against("fa4", Problem(Cell.parse(shape)), shape, "dims", 1.0) for shape in shapes]


def _redo() -> list[FeatureCell]:
    cells = []
    for shape in ("d128-{}-s8192-b2-h16", "d64-{}-s8192-b2-h32"):
        for mask in ("full", "causal"):
            plain = Problem(Cell.parse(shape.format(mask)))
            kinds = ("ramp", "peaked")
            arms = [Arm(SUBJECT, plain)]
            arms += [Arm(SUBJECT, replace(plain, data=kind), kind) for kind in kinds]
            bars = tuple(Bar("time", f"{SUBJECT} {kind}", SUBJECT, 2.2) for kind in kinds)
            cells.append(FeatureCell("redo", plain.shape.name, tuple(arms), bars))
    return cells


def _gemm() -> list[FeatureCell]:
    cells = []
    for shape in ("d128-full-s8192-b2-h16", "d128-full-s16384-b1-h16"):
        arms = (Arm(SUBJECT, Problem(Cell.parse(shape))), Arm(GEMM, None))
        cells.append(FeatureCell("gemm", shape, arms, (Bar("rate", SUBJECT, GEMM, 0.97),)))
    return cells


def _backward_varlen() -> list[FeatureCell]:
    cells = []
    for shape, limit in (
        ("d128-causal-h16", 1.10),
        ("d128-causal-h32x8", 1.0),
        ("d64-causal-h32", 1.0),
        ("d128-full-h16", 1.0),
    ):
        problem = _packed(LENGTHS, shape, backward=True)
        cells.append(_against("fa4", problem, f"{shape}-10seqs", "backward-varlen", limit))
    return cells


def _backward_cost() -> list[FeatureCell]:
    plain = Problem(Cell.parse("d128-causal-s8192-b2-h16"), backward=True)
    asked = {
        "deterministic": (replace(plain, deterministic=True), 1.08),
        "softcap": (replace(plain, softcap=30.0), 1.20),
    }
    arms, bars = [Arm(SUBJECT, plain), Arm("fa4", plain)], []
    for label, (problem, limit) in asked.items():
        arms += [Arm(package, problem, label) for package in (SUBJECT, "fa4")]
        bars.append(Bar("time", f"{SUBJECT} {label}", SUBJECT, limit))
    return [FeatureCell("backward-cost", plain.shape.name, tuple(arms), tuple(bars))]


MAKERS = (_varlen, _window, _cost, _dims, _redo, _gemm, _backward_varlen, _backward_cost)
CELLS = tuple(cell for make in MAKERS for cell in make())
GROUPS = tuple(dict.fromkeys(cell.group for cell in CELLS))


def select(text: str) -> tuple[FeatureCell, ...]:
    """Return the cells of a comma-separated list of groups and of "group/cell" names.

    Raises:
        ValueError: a word that is neither.
    """
    words = [w.strip() for w in text.split(",") if w.strip()]
    names = {f"{c.group}/{c.name}" for c in CELLS}
    unknown = [w for w in words if w not in GROUPS and w not in names]
    if unknown or not words:
        raise ValueError(
            f"groups are {', '.join(GROUPS)}, and a cell is called such as "
            f"{CELLS[0].group}/{CELLS[0].name}; got {', '.join(unknown) or 'none'}"
        )
    return tuple(c for c in CELLS if c.group in words or f"{c.group}/{c.name}" in words)
