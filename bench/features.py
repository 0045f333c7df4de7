"""Measure features beside the peers and plain kernels, and hold them to bars: `python -m bench.features`.

Groups of cells (`--cells`): varlen, window, cost (of softcap, sink and ALiBi over the plain kernel), dims (head dims
without a kernel of their own), redo (rows that outgrow a fixed shift), gemm (share of a matrix product's rate),
backward-varlen and backward-cost (of a fixed order of sums, and of softcap, over plain gradients). The
exit status is 1 if a contender computed something wrong or broke, if flash4 could not run or, with `--assert`, if a bar
was missed or has no figure; 2 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import provenance, report
from bench.ahead import compile_ahead
from bench.feature_cells import CELLS, GEMM, GEMM_SIZE, GROUPS, PEER, Bar, FeatureCell, select
from bench.protocol import DeviceLost, Entry, describe, input_sets, measure, percentile

KIND = "features"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m bench.features", description=__doc__)
    p.add_argument(
        "--cells", default=",".join(GROUPS), help="groups and group/cell names (default: all)"
    )
    p.add_argument(
        "--list", action="store_true", help="print the cells and their bars; needs no GPU"
    )
    p.add_argument(
        "--budget-s", type=float, default=0.25, help="seconds of timing per contender (%(default)s)"
    )
    p.add_argument(
        "--limit-s", type=float, default=float("inf"), help="begin no cell after so many seconds"
    )
    p.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count(),
        help="processes that compile flash4 beforehand",
    )
    p.add_argument("--seed", type=int, help="of the inputs (default: from the clock)")
    p.add_argument("--out", type=Path, help="where to write the JSON record")
    p.add_argument("--show", type=Path, metavar="PATH", help="print a record; needs no GPU")
    p.add_argument(
        "--assert", dest="asserted", action="store_true", help="fail where a bar is missed"
    )
    return p


# Measuring


def measure_feature_cell(
    cell: FeatureCell, bench: Any, make: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """Check and time all arms of a cell, taking turns.

    Args:
        cell: what is measured.
        bench: a `bench.core.Bench`; its budget is per arm.
        make: from an arm to its contender; by default the real one.

    Returns:
        A record: per arm what `bench.core.measure_cell` says of a contender.

    Raises:
        DeviceLost: an arm left the device unusable.
    """
    from bench import core
    from bench import feature_calls as calls

    make = make or calls.FeatureContender
    problems = dict.fromkeys(arm.problem for arm in cell.arms if arm.problem is not None)
    sets = max(input_sets(p.shape.input_bytes(), bench.l2_bytes) for p in problems)
    tensors = calls.draw_all(problems, sets, bench.seed, bench.torch_device)
    records: dict[str, dict[str, Any]] = {}
    entries: dict[str, Entry] = {}
    results: dict[str, tuple[Any, Any]] = {}
    contenders: dict[str, Any] = {}
    for arm in sorted(cell.arms, key=lambda arm: arm.package == report.SUBJECT):
        inputs = tensors.get(arm.problem, [None])
        shape = (arm.problem or cell.arms[0].problem).shape
        contenders[arm.name] = make(arm)
        records[arm.name], entry, raw = core.enter(contenders[arm.name], shape, inputs, bench)
        if entry is not None:
            entries[arm.name], results[arm.name] = entry, (arm, raw)
    first = {problem: made[0] for problem, made in tensors.items()}
    for name, text in calls.mismatches(results, first).items():
        records[name].update(status="mismatch", error=text)
        del entries[name]
    results.clear()
    for arm in cell.arms:
        if arm.name in entries:
            records[arm.name].update(_counts(contenders[arm.name], first.get(arm.problem)))
    turn = [entries[arm.name] for arm in cell.arms if arm.name in entries]
    found = measure(turn, bench.device, bench.budget_s * len(cell.arms))
    flops = {a.name: a.problem.flops() if a.problem else 2 * GEMM_SIZE**3 for a in cell.arms}
    core.record_times(found, records, flops)
    clocks = bench.telemetry.window(found.started, found.ended) if bench.telemetry else {}
    return {
        "group": cell.group,
        "cell": cell.name,
        "input_sets": sets,
        "kept_per_burst": found.kept_per_burst,
        "spin_us": round(found.spin_us, 1),
        "clocks": clocks,
        "flops": flops,
        "contenders": {arm.name: records[arm.name] for arm in cell.arms},
    }


def _counts(contender: Any, inputs: Any) -> dict[str, Any]:
    """What an arm counts; a counter that fails must not cost the measurement."""
    try:
        return contender.counts(inputs)
    except Exception as error:
        return {"count_error": describe(error)}


def kernel_keys(cells: Sequence[FeatureCell], arch: str) -> list[tuple[str, Any, str]]:
    """Return what the kernel cache will be asked for; flash4's arms that it refuses ask for nothing."""
    import flash4
    from bench import feature_calls as calls

    keys: dict[tuple[str, Any, str], None] = {}
    for problem in {a.problem: None for c in cells for a in c.arms if a.package == report.SUBJECT}:
        x = calls.make_tensors(problem, 1, 0, "meta")[0]
        try:
            plan = flash4.explain(x.q, x.k, x.v, arch=arch, **problem.keywords(x))
            if problem.backward:
                asked = problem.keywords(x) | {"backward": True}
                gradients = flash4.explain(x.q, x.k, x.v, arch=arch, **asked)
                keys.update(dict.fromkeys(gradients.kernels))
        except NotImplementedError:
            continue
        keys[plan.kernel, plan.config, plan.arch] = None
        if problem.data != "normal" and plan.config.counted is not None:
            keys[plan.kernel, plan.config.counted, plan.arch] = None
    return list(keys)


def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], Path] | str:
    """Run what the command line asks for; return the record and its path, or why not."""
    cells = select(args.cells)
    import torch

    from bench.core import bench_here

    if not torch.cuda.is_available():
        return "no CUDA device; --show PATH prints a record without one"
    began, started, revision = time.perf_counter(), provenance.now(), provenance.commit()
    bench = bench_here("forward", args.budget_s, args.seed)
    gpu = provenance.gpu()
    results: dict[str, Any] = {
        "schema": report.SCHEMA,
        "kind": KIND,
        "started": started,
        "commit": revision,
        "versions": provenance.versions(),
        "gpu": gpu,
        "telemetry": bench.telemetry.name if bench.telemetry else None,
        "budget_s": args.budget_s,
        "seed": bench.seed,
        "cells": [],
        "complete": False,
    }
    out = args.out or provenance.results_path(started, revision, gpu["name"], KIND)
    try:
        arch = "sm_{}a".format(gpu["capability"].replace(".", ""))
        keys = kernel_keys(cells, arch)
        for text in compile_ahead(keys, args.workers):
            print(text, flush=True)
        kernels = len(keys)
        print(f"{kernels} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
        run_cells(cells, bench, results, out, began + args.limit_s)
    finally:
        if bench.telemetry:
            bench.telemetry.stop()
        results["seconds"] = round(time.perf_counter() - began, 1)
        report.save(results, out)
    return results, out


def run_cells(
    cells: Sequence[FeatureCell], bench: Any, results: dict[str, Any], out: Path, until: float
) -> None:
    """Measure cell by cell into `results`; print and write after each."""
    for cell in cells:
        if time.perf_counter() > until:
            return
        try:
            row = measure_feature_cell(cell, bench)
        except DeviceLost as error:
            results["fatal"] = f"{cell.group}/{cell.name}: device lost: {error}"
            return
        except Exception as error:
            # Not an arm's fault (out of memory for the inputs, say), but no reason to lose the other cells.
            problem = {"status": "failed", "error": f"outside the timing: {describe(error)}"}
            row = {
                "group": cell.group,
                "cell": cell.name,
                "contenders": {arm.name: dict(problem) for arm in cell.arms},
            }
        results["cells"].append(row)
        report.save(results, out)
        print("\n".join(lines_of(row)), flush=True)
    results["complete"] = True


# Reading a record


def bars_of(row: dict[str, Any]) -> tuple[Bar, ...]:
    """Return the bars of a cell of a record; none if it is no longer among the cells."""
    names = (row["group"], row["cell"])
    return next((c.bars for c in CELLS if (c.group, c.name) == names), ())


def _package(name: str) -> str:
    return name.split(" ")[0]


def against(row: dict[str, Any], bar: Bar) -> str | None:
    """Return the name of the arm that a bar compares with, or None if none of them ran."""
    known = [n for n in row["contenders"] if report.tflops(row, n) is not None]
    if bar.over != PEER:
        return bar.over if bar.over in known else None
    peers = [n for n in known if _package(n) not in (_package(bar.of), GEMM)]
    return max(peers, key=lambda n: report.tflops(row, n), default=None)


def quotient(row: dict[str, Any], bar: Bar) -> tuple[float, float | None] | None:
    """Return what a bar limits and its noise (half the p10-p90 width over paired rounds), or None without figures."""
    other = against(row, bar)
    if other is None or report.tflops(row, bar.of) is None:
        return None
    a, b = (row["contenders"][n] for n in (bar.of, other))
    if bar.quantity == "rate":
        work = row["flops"][bar.of] / row["flops"][other]
        value, paired = (
            work * b["median_us"] / a["median_us"],
            [work * y / x for x, y in zip(a["round_medians_us"], b["round_medians_us"])],
        )
    else:
        value, paired = (
            a["median_us"] / b["median_us"],
            [x / y for x, y in zip(a["round_medians_us"], b["round_medians_us"])],
        )
    noise = (percentile(paired, 90) - percentile(paired, 10)) / 2 if len(paired) > 1 else None
    return value, noise


def verdict(row: dict[str, Any], bar: Bar) -> tuple[bool, str]:
    """Return whether a bar holds, and that in words."""
    sign = ">=" if bar.quantity == "rate" else "<="
    asked = f"{bar.quantity} of {bar.of} over {against(row, bar) or bar.over}"
    found = quotient(row, bar)
    if found is None:
        return False, f"no figure: {asked} {sign} {bar.limit:.2f}"
    value, noise = found
    held = bar.holds(value)
    spread = "" if noise is None else f" +- {noise:.3f}"
    return (
        held,
        f"{'holds' if held else 'MISSED'}: {asked} {value:.3f}{spread} {sign} {bar.limit:.2f}",
    )


def lines_of(row: dict[str, Any]) -> list[str]:
    """Return a cell as lines: its arms, then its bars."""
    clocks = row.get("clocks", {})
    lines = [
        f"{row['group']}/{row['cell']}: {clocks.get('sm_mhz') or '-'} MHz, {clocks.get('watts') or '-'} W"
    ]
    for name, r in row["contenders"].items():
        if r["status"] != "ok":
            lines.append(f"  {name:16} {r['status']}: {r['error']}")
            continue
        mark = "*" if r["dry_bursts"] else " "
        again = f"  {r['redone']} of {r['tiles']} tiles twice" if "redone" in r else ""
        again += f"  not counted: {r['count_error']}" if "count_error" in r else ""
        lines.append(
            f"  {name:16} {r['median_us']:9.1f} us{mark} p10 {r['p10_us']:9.1f} p90 {r['p90_us']:9.1f} "
            f"spread {r['spread']:6.1%} {r['tflops']:7.1f} TFLOP/s  first call {r['first_call_s']:.1f} s{again}"
        )
    return lines + [f"  {verdict(row, bar)[1]}" for bar in bars_of(row)]


def table(results: dict[str, Any]) -> str:
    """Return the whole record as text."""
    gpu, versions = results.get("gpu", {}), results.get("versions", {})
    known = ", ".join(f"{k} {v}" for k, v in versions.items() if v)
    head = (
        f"features; {gpu.get('name', 'unknown GPU')}, commit {results.get('commit', 'unknown')}, "
        f"{results.get('started', '')}, {results.get('seconds', '-')} s"
    )
    rows = [line for row in results["cells"] for line in lines_of(row)]
    partial = [] if results.get("complete") else ["this run did not finish"]
    fatal = [f"stopped: {results['fatal']}"] if results.get("fatal") else []
    return "\n".join([head, known, *rows, *partial, *fatal])


def failures(results: dict[str, Any], asserted: bool) -> list[str]:
    """Return why a run is not good; with `asserted`, bars that are missed or have no figure too."""
    bad = [f"stopped: {results['fatal']}"] if results.get("fatal") else []
    if asserted and not results.get("complete"):
        bad.append("the run did not finish")
    for row in results["cells"]:
        name = f"{row['group']}/{row['cell']}"
        bad += report.row_faults(row, name)
        if asserted:
            found = (verdict(row, bar) for bar in bars_of(row))
            bad += [f"{name}: {text}" for held, text in found if not held]
    return bad


def load(path: Path) -> dict[str, Any]:
    """Read a record of this command.

    Raises:
        ValueError: it is of another schema or command.
    """
    results = report.load(path)
    if results.get("kind") != KIND:
        raise ValueError(f"{path} is no record of bench.features")
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = parser().parse_args(argv)
    try:
        if args.list:
            for cell in select(args.cells):
                bars = ", ".join(
                    f"{b.quantity} of {b.of} over {b.over} {b.limit}" for b in cell.bars
                )
                print(f"{cell.group}/{cell.name}: {', '.join(a.name for a in cell.arms)}; {bars}")
            return 0
        found = (load(args.show), args.show) if args.show else _measure(args)
    except (ValueError, OSError) as error:
        found = describe(error)
    if isinstance(found, str):
        print(f"bench.features: {found}", file=sys.stderr)
        return 2
    results, out = found
    print(f"\n{out}\n\n{table(results)}", flush=True)
    bad = failures(results, args.asserted)
    for text in bad:
        print(f"FAIL {text}", file=sys.stderr, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
