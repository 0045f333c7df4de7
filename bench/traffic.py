"""Bytes that the forward moves between HBM and the chip, by ncu: `python -m bench.traffic`.

One launch of each cell is profiled with cold caches, in a child process under ncu, and compared with the bytes that
every attention has to move: q, k and v read once, out and lse written once. What is written last may still lie in the
L2 at the end of a launch, so written bytes may be fewer. The exit status is 1, with `--assert`, if more is read or
written than the bar allows or the bytes do not grow linearly with the sequence; 2 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import provenance, report
from bench.ncu import launches
from bench.shapes import Cell, select

KIND = "traffic"
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
MOST = 1.15  # of the compulsory bytes
SLOPE = 0.05  # exponent of S in the bytes per head may miss 1 by so much
TIMEOUT_S = 300
_TOKENS = 16384


def _cells() -> tuple[Cell, ...]:
    """16k tokens of 16 heads from S 1k on, and one sequence of 32k tokens with 8."""
    found = []
    for causal in (False, True):
        found += [Cell(128, 128, causal, 1 << n, _TOKENS >> n, 16, 16) for n in range(10, 15)]
        found.append(Cell(128, 128, causal, 2 * _TOKENS, 1, 8, 8))
    return tuple(found)


CELLS = _cells()


def compulsory(cell: Cell) -> tuple[int, int]:
    """Return the bytes that any forward must read (q, k, v) and write (out in 16 bit, lse in 32)."""
    rows = cell.batch * cell.seqlen * cell.heads_q
    return cell.input_bytes(), rows * (2 * cell.dv + 4)


def run_calls(cells: Sequence[Cell]) -> None:
    """Under ncu: call each cell once to compile it, then once profiled."""
    import torch

    import flash4
    from bench.baselines import make_inputs

    for i, cell in enumerate(cells):
        x = make_inputs(cell, 1, "forward", seed=i)[0]
        flash4.flash_attn_func(x.q, x.k, x.v, causal=cell.causal)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        flash4.flash_attn_func(x.q, x.k, x.v, causal=cell.causal)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def command(ncu: str, cells: Sequence[Cell]) -> list[str]:
    """Return the command that profiles one launch of each cell."""
    options = {
        "--print-units": "base",
        "--clock-control": "none",
        "--cache-control": "all",
        "--profile-from-start": "off",
        "--metrics": f"{READ},{WRITTEN}",
    }
    words = [word for pair in options.items() for word in pair]
    names = ",".join(cell.name for cell in cells)
    return [ncu, "--csv", *words, sys.executable, "-m", "bench.traffic", "--calls", names]


def profile(ncu: str, cells: Sequence[Cell], timeout_s: float = TIMEOUT_S) -> list[dict[str, Any]]:
    """Return one row per cell.

    Raises:
        RuntimeError: the profiler or its child failed, or did not see one launch per cell.
    """
    try:
        done = subprocess.run(
            command(ncu, cells),
            cwd=provenance.ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"ncu: {error}") from error
    printed = done.stdout + done.stderr
    complaints = [line for line in printed.splitlines() if line.startswith("==ERROR==")]
    if done.returncode or complaints:
        last = " ".join(complaints) or " ".join(printed.split())[-600:]
        raise RuntimeError(f"ncu: exit status {done.returncode}: {last}")
    found = launches(done.stdout)
    if len(found) != len(cells):
        raise RuntimeError(f"ncu saw {len(found)} launches of {len(cells)} calls")
    return [row_of(cell, metrics) for cell, metrics in zip(cells, found)]


def row_of(cell: Cell, metrics: dict[str, float]) -> dict[str, Any]:
    """Return a cell's row of a record from its metrics."""
    read, written = compulsory(cell)
    return {
        "cell": cell.name,
        "read": round(metrics[READ]),
        "written": round(metrics[WRITTEN]),
        "compulsory_read": read,
        "compulsory_written": written,
    }


def exponent(rows: Sequence[dict[str, Any]]) -> float | None:
    """Return the exponent of S in the bytes read per head: least squares over the logarithms; None of fewer than two lengths."""
    points = []
    for row in rows:
        cell = Cell.parse(row["cell"])
        heads = cell.batch * cell.heads_q
        points.append((math.log(cell.seqlen), math.log(row["read"] / heads)))
    if len({x for x, _ in points}) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points))
    across = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / across


def _by_mask(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows of a record by mask."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in results["cells"]:
        mask = "causal" if Cell.parse(row["cell"]).causal else "full"
        found.setdefault(mask, []).append(row)
    return found


def failures(results: dict[str, Any]) -> list[str]:
    """Return the bars that a record misses."""
    bad = []
    for row in results["cells"]:
        for what in ("read", "written"):
            ratio = row[what] / row[f"compulsory_{what}"]
            if ratio > MOST:
                bad.append(f"{row['cell']}: {what} {ratio:.3f} of the compulsory bytes > {MOST}")
    for mask, rows in _by_mask(results).items():
        found = exponent(rows)
        if found is not None and abs(found - 1) > SLOPE:
            bad.append(f"{mask}: bytes read grow as S^{found:.3f}, not S^1 within {SLOPE}")
    return bad or ([] if results["cells"] else ["no cells"])


def table(results: dict[str, Any]) -> str:
    """Return a record as text."""
    gpu = results.get("gpu", {}).get("name", "unknown GPU")
    lines = [
        f"HBM traffic; {gpu}, commit {results.get('commit', 'unknown')}, {results.get('started', '')}",
        f"{'cell':30}{'read MB':>10}{'of least':>10}{'written MB':>12}{'of least':>10}{'both':>8}",
    ]
    for row in results["cells"]:
        read, written = row["read"], row["written"]
        least = row["compulsory_read"] + row["compulsory_written"]
        lines.append(
            f"{row['cell']:30}{read / 1e6:10.1f}{read / row['compulsory_read']:10.3f}"
            f"{written / 1e6:12.1f}{written / row['compulsory_written']:10.3f}"
            f"{(read + written) / least:8.3f}"
        )
    for mask, rows in _by_mask(results).items():
        found = exponent(rows)
        if found is not None:
            lines.append(f"{mask}: bytes read per head grow as S^{found:.3f}")
    return "\n".join(lines)


def _find_ncu(given: str | None) -> str:
    """Return the profiler's path.

    Raises:
        RuntimeError: there is none.
    """
    for name in (given,) if given else ("ncu", "/usr/local/cuda/bin/ncu"):
        path = shutil.which(name)
        if path:
            return path
    raise RuntimeError("no ncu here; --ncu PATH says where it is")


def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """Profile what the command line asks for and write the record."""
    cells = select(args.cells) if args.cells else CELLS
    ncu, started, revision = _find_ncu(args.ncu), provenance.now(), provenance.commit()
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device; --show PATH prints a record without one")
    gpu = provenance.gpu()
    results = {
        "schema": report.SCHEMA,
        "kind": KIND,
        "started": started,
        "commit": revision,
        "versions": provenance.versions(),
        "gpu": gpu,
        "cells": profile(ncu, cells, args.timeout_s),
    }
    out = args.out or provenance.results_path(started, revision, gpu["name"], KIND)
    report.save(results, out)
    return results, out


def load(path: Path) -> dict[str, Any]:
    """Read a record of this command.

    Raises:
        ValueError: it is of another schema or command.
    """
    results = report.load(path)
    if results.get("kind") != KIND:
        raise ValueError(f"{path} is no record of bench.traffic")
    return results


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m bench.traffic", description=__doc__)
    p.add_argument(
        "--cells", help="cell names and subsets of bench.run (default: d128, S 1k to 32k)"
    )
    p.add_argument("--ncu", metavar="PATH", help="the profiler (default: ncu of the search path)")
    p.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="for all cells (%(default)s)")
    p.add_argument("--out", type=Path, help="where to write the JSON record")
    p.add_argument("--show", type=Path, metavar="PATH", help="print a record; needs no GPU")
    p.add_argument(
        "--assert", dest="asserted", action="store_true", help="fail where a bar is missed"
    )
    p.add_argument("--calls", help=argparse.SUPPRESS)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = parser().parse_args(argv)
    if args.calls:
        run_calls(select(args.calls))
        return 0
    try:
        results, out = (load(args.show), args.show) if args.show else _measure(args)
    except (RuntimeError, ValueError, OSError) as error:
        print(f"bench.traffic: {error}", file=sys.stderr)
        return 2
    print(f"{out}\n\n{table(results)}", flush=True)
    bad = failures(results)
    for text in bad:
        print(f"{'FAIL' if args.asserted else 'missed:'} {text}", file=sys.stderr, flush=True)
    return int(args.asserted and bool(bad))


if __name__ == "__main__":
    sys.exit(main())
