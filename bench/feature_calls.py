"""Feature cells on tensors: inputs, the calls of flash4 and its peers, and the check of their results."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

import flash4
from bench.baselines import CONTENDERS, Contender
from bench.check import (
    ROW_TOLERANCE,
    SLICE_ROWS,
    disagreement,
    row_disagreement,
)
from bench.feature_cells import GEMM_SIZE, Arm, Problem
from bench.report import SUBJECT

RAMP = 1400.0  # growth of the scaled scores from the last key to the first
PEAKED = 60.0  # standard deviation of the scaled scores
RAMP_QUERY = 16.0


@dataclass(frozen=True)
class Tensors:
    """One set of inputs; what a problem has no use for is None.

    Attributes:
        q: (batch, seqlen, heads, d) or packed (total, heads, d); k and v alike.
        k: see q.
        v: see q.
        cu: (sequences + 1,) int32 offsets of packed sequences.
        used_k: (batch,) int32 keys in use.
        sink: (heads,) float32.
        slopes: (heads,) float32.
        dout: gradient of the output, shaped like it.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu: torch.Tensor | None = None
    used_k: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    dout: torch.Tensor | None = None


def make_tensors(problem: Problem, sets: int, seed: int, device: str = "cuda") -> list[Tensors]:
    """Return random bfloat16 inputs, on the meta device such that have no values."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)
    c = problem.shape

    def draw(heads: int, dim: int) -> torch.Tensor:
        shape = (c.batch, c.seqlen, heads, dim)
        x = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return x[0] if problem.lengths else x

    def numbers(values: Iterable[int]) -> torch.Tensor | None:
        values = list(values)
        return torch.tensor(values, dtype=torch.int32, device=device) if values else None

    offsets = itertools.accumulate(problem.lengths, initial=0) if problem.lengths else ()
    cu, used_k = numbers(offsets), numbers(problem.used_k)
    made = []
    for _ in range(sets):
        q, k, v = draw(c.heads_q, c.d), draw(c.heads_kv, c.d), draw(c.heads_kv, c.dv)
        outgrow(problem, q, k)
        dout = draw(c.heads_q, c.dv) if problem.backward else None
        made.append(with_features(problem, Tensors(q, k, v, cu, used_k, dout=dout)))
    return made


def with_features(problem: Problem, x: Tensors) -> Tensors:
    """Return the same q, k and v with the sink (0 to 4) and the slopes (1/2 to 1/256) that a problem has."""
    heads, device = problem.shape.heads_q, x.q.device
    sink = torch.linspace(0, 4, heads, device=device) if problem.sink else None
    slopes = 2.0 ** torch.linspace(-1, -8, heads, device=device) if problem.alibi else None
    return replace(x, sink=sink, slopes=slopes)


def outgrow(problem: Problem, q: torch.Tensor, k: torch.Tensor) -> None:
    """Change random q and k in place into what the problem's `data` says."""
    scale = problem.shape.d**0.5
    if problem.data == "peaked":
        q *= PEAKED**0.5
        k *= PEAKED**0.5
    elif problem.data == "ramp":
        q[..., 0] = RAMP_QUERY
        top = RAMP * scale / RAMP_QUERY
        k[..., 0] = torch.linspace(top, 0, k.shape[1], device=k.device)[None, :, None]


def draw_all(
    problems: Iterable[Problem], sets: int, seed: int, device: str
) -> dict[Problem, list[Tensors]]:
    """Return inputs by problem; problems that differ in features alone share the memory of q, k and v."""
    made: dict[Problem, list[Tensors]] = {}
    by_data: dict[tuple, list[Tensors]] = {}
    for problem in problems:
        data = (problem.shape, problem.lengths, problem.used_k, problem.data, problem.backward)
        shared = by_data.get(data)
        own = make_tensors(problem, sets, seed, device) if shared is None else shared
        by_data.setdefault(data, own)
        made[problem] = [with_features(problem, x) for x in own]
    return made


class FeatureContender(Contender):
    """An arm of a feature cell as a contender."""

    def __init__(self, arm: Arm):
        self.name, self.arm = arm.name, arm

    def available(self) -> str | None:
        """Return why the package cannot run here, or None."""
        if self.arm.package == "gemm":
            return None if torch.cuda.is_available() else "no CUDA device"
        return CONTENDERS[self.arm.package]().available()

    def prepare(self, cell, inputs, direction="forward"):
        """Return the call to time, on `Tensors`: of a graph that is built here for gradients."""
        problem, call = self.arm.problem, CALLS[self.arm.package]
        if problem is None or not problem.backward:
            return call(problem, inputs)
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out = self.output(call(problem, replace(inputs, q=leaves[0], k=leaves[1], v=leaves[2]))())
        return functools.partial(torch.autograd.grad, out, leaves, inputs.dout, retain_graph=True)

    def results(self, raw, direction):
        """Return (out,), or (dq, dk, dv) from what a call for gradients returned."""
        backward = self.arm.problem is not None and self.arm.problem.backward
        return super().results(raw, "backward" if backward else direction)

    def counts(self, inputs: Tensors) -> dict[str, int]:
        """Return how many tiles flash4 works on twice, for data that is meant to make it do so."""
        problem = self.arm.problem
        if self.arm.package != SUBJECT or problem.data == "normal":
            return {}
        found = flash4.redone_tiles(inputs.q, inputs.k, inputs.v, **problem.keywords(inputs))
        return {"redone": found.redone, "tiles": found.tiles}


def _package_call(module: str, problem: Problem, x: Tensors) -> Callable[[], Any]:
    """The public function of flash4 or flash-attn-4; their keywords have the same names."""
    name = "flash_attn_varlen_func" if problem.varlen else "flash_attn_func"
    function = getattr(importlib.import_module(module), name)
    return functools.partial(function, x.q, x.k, x.v, **problem.keywords(x))


def _fa2_call(problem: Problem, x: Tensors) -> Callable[[], Any]:
    """FlashAttention-2 as torch carries it, past the dispatch that knows neither windows nor sequences."""
    longest = max(problem.lengths, default=problem.shape.seqlen)
    return functools.partial(
        torch.ops.aten._flash_attention_forward,
        x.q,
        x.k,
        x.v,
        x.cu,
        x.cu,
        longest,
        longest,
        0.0,
        problem.shape.causal,
        False,
        window_size_left=problem.window - 1 if problem.window else None,
        window_size_right=0 if problem.window else None,
    )


def _gemm_call(problem: None, x: None) -> Callable[[], Any]:
    a, b = (
        torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    return functools.partial(torch.matmul, a, b, out=torch.empty_like(a))


CALLS: dict[str, Callable[[Any, Any], Callable[[], Any]]] = {
    SUBJECT: functools.partial(_package_call, "flash4"),
    "fa4": functools.partial(_package_call, "flash_attn.cute"),
    "fa2": _fa2_call,
    "gemm": _gemm_call,
}


# What is right


def _slices(problem: Problem) -> list[tuple[int, int, int]]:
    """Return (sequence, first query, head): begin of the shortest sequence, end of the longest one."""
    found = problem.sequences()
    by_work = sorted(range(len(found)), key=lambda i: (found[i][2] * found[i][3], i))
    last = max(0, found[by_work[-1]][2] - SLICE_ROWS)
    return [(by_work[0], 0, 0), (by_work[-1], last, problem.shape.heads_q - 1)]


def probabilities(
    problem: Problem, x: Tensors, sequence: int, first: int, head: int
) -> tuple[torch.Tensor, torch.Tensor, tuple]:
    """Return P of consecutive queries of one head in float64, V, and where the queries lie in the output.

    s = scale q k^T;  s = cap tanh(s / cap);  s -= slope |p - j|;  P = softmax(s, exp(sink))
    """
    p, _, _, v, place = _scores(problem, x, sequence, first, head)
    return p, v, place


def _scores(problem: Problem, x: Tensors, sequence: int, first: int, head: int) -> tuple:
    """Return P as `probabilities`, the cap's derivative at each score, K, V and the place."""
    row, start, queries, keys = problem.sequences()[sequence]
    kv_head = head // (problem.shape.heads_q // problem.shape.heads_kv)
    rows = slice(start + first, start + min(queries, first + SLICE_ROWS))
    place = (row, rows, head)
    q, k, v = ((t[None] if problem.lengths else t) for t in (x.q, x.k, x.v))
    q, k, v = (
        q[place].double(),
        *(t[row, start : start + keys, kv_head].double() for t in (k, v)),
    )
    scores, slope = q @ k.T * problem.shape.d**-0.5, 1.0
    if problem.softcap:
        capped = torch.tanh(scores / problem.softcap)
        scores, slope = problem.softcap * capped, 1 - capped.square()
    positions = torch.arange(first, first + q.shape[0], device=q.device) + keys - queries
    distance = positions[:, None] - torch.arange(keys, device=q.device)
    if problem.alibi:
        scores = scores - x.slopes[head].double() * distance.abs()
    if problem.shape.causal:
        scores = scores.masked_fill(distance < 0, float("-inf"))
    if problem.window:
        scores = scores.masked_fill(distance >= problem.window, float("-inf"))
    if problem.sink:
        sinks = x.sink[head].double().expand(q.shape[0], 1)
        scores = torch.cat([scores, sinks], -1)
    return torch.softmax(scores, -1)[:, :keys], slope, k, v, place


def gradient_of_queries(
    problem: Problem, x: Tensors, sequence: int, first: int, head: int
) -> tuple[torch.Tensor, torch.Tensor, tuple]:
    """Return dq of consecutive queries of one head, exact and with intermediates rounded, and their place.

    dS = P (dO V^T - rowsum(dO O)) slope;  dQ = scale dS K
    """
    p, slope, k, v, place = _scores(problem, x, sequence, first, head)
    dout = (x.dout[None] if problem.lengths else x.dout)[place].double()
    found = []
    for rounding in (torch.Tensor.double, _rounded):
        delta = (dout * rounding(rounding(p) @ v)).sum(-1, keepdim=True)
        ds = rounding(p * (dout @ v.T - delta) * slope)
        found.append(rounding(ds @ k * problem.shape.d**-0.5))
    return *found, place


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).double()


@torch.no_grad()
def mismatch(problem: Problem, x: Tensors, results: tuple[torch.Tensor, ...]) -> str | None:
    """Return what is wrong with a result, (out,) or (dq, dk, dv): with out or dq on slices, or None."""
    label, first = ("dq", x.q.shape) if problem.backward else ("out", None)
    expected = first or (*x.q.shape[:-1], problem.shape.dv)
    if tuple(results[0].shape) != tuple(expected):
        return f"{label} has shape {tuple(results[0].shape)} instead of {tuple(expected)}"
    whole = results[0][None] if problem.lengths else results[0]
    for i, place in enumerate(_slices(problem)):
        if problem.backward:
            exact, rounded, rows = gradient_of_queries(problem, x, *place)
        else:
            p, v, rows = probabilities(problem, x, *place)
            exact, rounded = p @ v, _rounded(_rounded(p) @ v)
        text = disagreement(whole[rows], exact, rounded)
        if text:
            return f"{label} (slice {i}): {text}"
    return None


@torch.no_grad()
def mismatches(
    results: dict[str, tuple[Arm, tuple[torch.Tensor, ...]]], inputs: dict[Problem, Tensors]
) -> dict[str, str]:
    """Return what is wrong with each arm's result; names that are right are absent.

    Args:
        results: by name of the arm, itself and its whole results, peers first: the first right ones of a
            problem, whatever the order of its sums, are what later ones are compared with as a whole.
        inputs: what they were given.
    """
    wrong: dict[str, str] = {}
    trusted: dict[Problem, str] = {}
    for name, (arm, found) in results.items():
        if arm.problem is None:
            continue
        text = mismatch(arm.problem, inputs[arm.problem], found)
        same = replace(arm.problem, deterministic=False)
        reference = trusted.setdefault(same, name) if text is None else name
        if reference != name:
            text = _whole_mismatch(arm.problem, found, results[reference][1])
            text = text and f"against {reference}: {text}"
        if text:
            wrong[name] = text
    return wrong


def _whole_mismatch(problem: Problem, ours: tuple, theirs: tuple) -> str | None:
    """Return where two results of a problem differ as a whole, or None."""
    direction = "backward" if problem.backward else "forward"
    labels = ("dq", "dk", "dv") if problem.backward else ("out",)
    for label, *both in zip(labels, ours, theirs):
        text = row_disagreement(
            *(x[None] if problem.lengths else x for x in both), ROW_TOLERANCE[direction]
        )
        if text:
            return f"{label} {text}"
    return None
