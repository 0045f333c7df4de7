"""Correctness before speed: results on slices against float64, then whole against each other.

The reference is plain torch in float64 on the same rounded inputs. How far a result may be off
is set by the same computation with its intermediates rounded to bfloat16, where any kernel that
feeds tensor cores has to round them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.baselines import Inputs
from bench.shapes import Cell

SLICE_ROWS = 256
CHUNK_ROWS = 1024  # of queries at a time in the backward reference, to bound its memory
EPS = torch.finfo(torch.bfloat16).eps
# Against the rounded computation. Twice its rms error catches a loss of precision everywhere; the
# largest error gets more room, since a gradient's errors have long tails (3.9 times seen in a right
# kernel), and is there to catch single wrong elements, which are off by far more.
RMS_SLACK, LARGEST_SLACK = 2, 8
# Rounding alone makes rows of two right outputs differ by about 0.5 % of their norm. Gradient rows
# of a peaked softmax are small differences of large terms, and so differ by more.
ROW_TOLERANCE = {"forward": 0.05, "backward": 0.2}

Rounding = Callable[[torch.Tensor], torch.Tensor]


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).double()


def _probabilities(q: torch.Tensor, k: torch.Tensor, first_row: int, causal: bool) -> torch.Tensor:
    """P = softmax(Q K^T / sqrt(d)) for consecutive query rows of one head."""
    scores = q @ k.T * q.shape[-1] ** -0.5
    if causal:
        rows = torch.arange(first_row, first_row + q.shape[0], device=q.device)
        hidden = torch.arange(k.shape[0], device=q.device)[None, :] > rows[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1)


def _backward(
    heads: tuple[torch.Tensor, ...], causal: bool, rounding: Rounding
) -> tuple[torch.Tensor, ...]:
    """Return dq, dk, dv of one KV head and the group of query heads that share it."""
    q, k, v, dout = heads  # (seqlen, group, d), (seqlen, d), (seqlen, dv), (seqlen, group, dv)
    scale = q.shape[-1] ** -0.5
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for head in range(q.shape[1]):
        for start in range(0, q.shape[0], CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            qc, doc = q[rows, head], dout[rows, head]
            p = _probabilities(qc, k, start, causal)
            # delta = rowsum(dO * O), dS = P * (dO V^T - delta)
            delta = (doc * rounding(rounding(p) @ v)).sum(-1, keepdim=True)
            ds = rounding(p * (doc @ v.T - delta))
            dq[rows, head] = ds @ k * scale
            dk += ds.T @ qc * scale
            dv += rounding(p).T @ doc
    return rounding(dq), rounding(dk), rounding(dv)


def disagreement(out: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> str | None:
    """Return how `out` misses the reference, or None if it is as right as rounding allows."""
    out = out.double()
    lost = int((~torch.isfinite(out)).sum())
    if lost:
        return f"{lost} of {out.numel()} elements are not finite"
    error, base = (out - exact).abs(), (rounded - exact).abs()
    rms, error_rms, base_rms = (x.square().mean().sqrt() for x in (exact, error, base))
    # One unit in the last place of the element or, if that is near zero, of a typical one.
    bound = LARGEST_SLACK * base.max() + EPS * torch.maximum(exact.abs(), rms)
    excess = int((error > bound).sum())
    if excess or error_rms > RMS_SLACK * base_rms + EPS / 4 * rms:
        return (
            f"{excess} of {out.numel()} elements are off by too much: largest error "
            f"{error.max():.3g}, rms {error_rms:.3g}, where bfloat16 rounding gives "
            f"{base.max():.3g} and {base_rms:.3g} (rms of the reference {rms:.3g})"
        )
    return None


def row_disagreement(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> str | None:
    """Compare two whole results row by row; return where and how far the worst is off."""
    if ours.shape != theirs.shape:
        return f"shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
    worst, place = 0.0, None
    for batch, (a, b) in enumerate(zip(ours, theirs)):
        a, b = a.float(), b.float()
        norms = b.norm(dim=-1)
        # Early gradient rows are near zero under a causal mask: hold them to the typical norm.
        ratio = (a - b).norm(dim=-1) / torch.maximum(norms, norms.mean())
        ratio = torch.nan_to_num(ratio, nan=float("inf"))
        if ratio.max() > worst:
            worst = float(ratio.max())
            row, head = divmod(int(ratio.argmax()), ratio.shape[-1])
            place = f"batch {batch}, row {row}, head {head}"
    if worst > tolerance:
        return f"differs by {worst:.1%} of the row's norm at {place}"
    return None


def _slices(cell: Cell, inputs: Inputs, direction: str) -> list[tuple[Callable, Any, Any]]:
    """Return (pick, exact, rounded): `pick` takes a contender's results to the slice."""
    group = cell.heads_q // cell.heads_kv
    if direction == "backward":
        b, h = cell.batch - 1, cell.heads_kv - 1
        mine = slice(h * group, (h + 1) * group)
        cuts = ((b, slice(None), mine), (b, slice(None), h), (b, slice(None), h))
        dout = inputs.dout[cuts[0]].double()
        heads = tuple(t[c].double() for t, c in zip((inputs.q, inputs.k, inputs.v), cuts))
        both = (_backward((*heads, dout), cell.causal, r) for r in (_exact, _rounded))
        return [
            (lambda results, i=i, cut=cut: results[i][cut], exact, rounded)
            for i, (cut, exact, rounded) in enumerate(zip(cuts, *both))
        ]
    found = []
    last = max(0, cell.seqlen - SLICE_ROWS)
    for b, h, start in ((0, 0, 0), (cell.batch - 1, cell.heads_q - 1, last)):
        cut = (b, slice(start, start + SLICE_ROWS), h)
        k, v = (t[b, :, h // group].double() for t in (inputs.k, inputs.v))
        p = _probabilities(inputs.q[cut].double(), k, start, cell.causal)
        exact, rounded = p @ v, _rounded(_rounded(p) @ v)
        found.append((lambda results, cut=cut: results[0][cut], exact, rounded))
    return found


@torch.no_grad()
def mismatches(
    cell: Cell,
    inputs: Inputs,
    results: dict[str, tuple[torch.Tensor, ...]],
    direction: str = "forward",
) -> dict[str, str]:
    """Return what is wrong with each contender's results; names that are right are absent.

    Args:
        cell: The problem.
        inputs: What all contenders were given.
        results: By name, (out,) or (dq, dk, dv) in (batch, seqlen, heads, head_dim). The first
            that passes on the slices becomes what later ones are compared with as a whole.
        direction: "forward" or "backward".
    """
    labels = ("out",) if direction == "forward" else ("dq", "dk", "dv")
    sources = (inputs.q, inputs.k, inputs.v)
    shapes = (
        [tuple(t.shape) for t in sources]
        if direction == "backward"
        else [(cell.batch, cell.seqlen, cell.heads_q, cell.dv)]
    )
    slices = _slices(cell, inputs, direction)
    wrong: dict[str, str] = {}
    trusted: str | None = None
    for name, tensors in results.items():
        for label, tensor, shape in zip(labels, tensors, shapes):
            if tuple(tensor.shape) != shape:
                wrong[name] = f"{label} has shape {tuple(tensor.shape)} instead of {shape}"
        for i, (pick, exact, rounded) in enumerate(slices):
            if name in wrong:
                break
            text = disagreement(pick(tensors), exact, rounded)
            if text:
                label = labels[i] if direction == "backward" else f"out (slice {i})"
                wrong[name] = f"{label}: {text}"
        if name in wrong:
            continue
        if trusted is None:
            trusted = name
            continue
        for label, ours, theirs in zip(labels, tensors, results[trusted]):
            text = row_disagreement(ours, theirs, ROW_TOLERANCE[direction])
            if text:
                wrong[name] = f"{label} against {trusted}: {text}"
    return wrong
