"""Measure flash4 beside its peers: `python -m bench.run`.

Prints a table and writes a JSON record, anew after every cell, so that a run cut short leaves
what it found. The exit status is 1 if a contender computed something wrong or broke, if flash4
could not run, or if an asserted ratio was missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import provenance, report
from bench.protocol import CudaDevice, DeviceLost, describe
from bench.shapes import SUBSETS, Cell, select


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    p.add_argument(
        "--cells",
        default="training",
        help=f"comma-separated subsets ({', '.join(SUBSETS)}) and cell names (default: training)",
    )
    p.add_argument("--contenders", default="flash4,fa4,cudnn,fa2", help="default: %(default)s")
    p.add_argument("--direction", choices=("forward", "backward"), default="forward")
    p.add_argument(
        "--arch", help="take flash4's kernels of another target, such as sm_90: Ampere's"
    )
    p.add_argument("--budget-s", type=float, default=1.2, help="seconds of timing per cell")
    p.add_argument("--seed", type=int, help="of the inputs (default: from the clock)")
    p.add_argument("--out", type=Path, help="where to write the JSON record")
    p.add_argument("--show", type=Path, metavar="PATH", help="print a record; needs no GPU")
    p.add_argument("--assert-geomean", type=float, metavar="RATIO")
    p.add_argument("--assert-worst", type=float, metavar="RATIO")
    return p


def run_cells(
    cells: Sequence[Cell], contenders: Sequence[Any], bench: Any, results: dict[str, Any], out: Path
) -> None:
    """Measure cell by cell into `results`; print and write after each."""
    from bench.core import measure_cell

    print(report.header(results["contenders"]), flush=True)
    for cell in cells:
        try:
            row = measure_cell(cell, contenders, bench)
        except DeviceLost as error:
            results["fatal"] = f"{cell.name}: device lost: {error}"
        except Exception as error:
            # Not a contender's fault (out of memory for the inputs, say), but no reason to lose
            # the other cells.
            problem = {"status": "failed", "error": f"outside the timing: {describe(error)}"}
            records = {c.name: dict(problem) for c in contenders}
            row = {"cell": cell.name, "contenders": records}
        if "fatal" in results:
            report.save(results, out)
            return
        results["cells"].append(row)
        report.save(results, out)
        print(report.line(row, results["contenders"], report.gemm_tflops(results)), flush=True)


def _measure_ceilings(when: str, bench: Any, results: dict[str, Any]) -> None:
    from bench.baselines import measure_ceilings

    try:
        found = measure_ceilings(bench.device)
    except Exception as error:
        found = {"error": describe(error)}
    results["ceilings"].append({"when": when, **found})


def _take_kernels_of(args: argparse.Namespace, cells: Sequence[Cell]) -> None:
    """Have flash4 run kernels of another target, and compile them in parallel."""
    import torch

    from bench.ahead import compile_ahead, keys_of
    from flash4.dispatch import serve

    serve(torch.cuda.get_device_capability(), args.arch)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    keys = [k for cell in cells for k in keys_of(cell, args.direction, args.arch, multiprocessors)]
    for text in compile_ahead(list(dict.fromkeys(keys)), os.cpu_count()):
        print(text, file=sys.stderr)


def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], Path] | str:
    """Run what the command line asks for; return the record and its path, or why not."""
    cells = select(args.cells)
    if not cells:
        return f"no cells in {args.cells!r}"
    import torch

    from bench import baselines
    from bench.core import Bench
    from bench.telemetry import open_telemetry

    contenders = baselines.select(args.contenders)
    if not torch.cuda.is_available():
        return "no CUDA device; --show PATH prints a record without one"
    torch.cuda.init()
    if args.arch:
        _take_kernels_of(args, cells)
    gpu, revision, started = provenance.gpu(), provenance.commit(), provenance.now()
    seed = args.seed if args.seed is not None else int(time.time())
    telemetry = open_telemetry(provenance.gpu_uuid())
    bench = Bench(
        CudaDevice(), gpu["l2_bytes"], args.direction, args.budget_s, seed, telemetry=telemetry
    )
    results: dict[str, Any] = {
        "schema": report.SCHEMA,
        "started": started,
        "commit": revision,
        "versions": provenance.versions(),
        "gpu": gpu,
        "telemetry": telemetry.name if telemetry else None,
        "direction": args.direction,
        "arch": args.arch,
        "budget_s": args.budget_s,
        "seed": seed,
        "contenders": [c.name for c in contenders],
        "ceilings": [],
        "cells": [],
        "complete": False,
    }
    out = args.out or provenance.results_path(started, revision, gpu["name"], args.direction)
    try:
        _measure_ceilings("start", bench, results)
        run_cells(cells, contenders, bench, results, out)
        if "fatal" not in results:
            _measure_ceilings("end", bench, results)
            results["complete"] = True
    finally:
        if telemetry:
            telemetry.stop()
        report.save(results, out)
    return results, out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = parser().parse_args(argv)
    if args.show:
        results = report.load(args.show)
    else:
        try:
            found = _measure(args)
        except ValueError as error:
            found = str(error)
        if isinstance(found, str):
            print(f"bench.run: {found}", file=sys.stderr)
            return 2
        results, out = found
        print(f"\nwritten to {out}\n", flush=True)
    print(report.table(results), flush=True)
    bad = report.verdicts(results, args.assert_geomean, args.assert_worst)
    for text in bad:
        print(f"FAIL {text}", file=sys.stderr, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
