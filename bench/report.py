"""Tables, ratios and verdicts from a results record; needs neither torch nor a GPU.

A record is what `bench.run` writes as JSON: provenance, `ceilings` (what the machine reached at
the start and at the end), and `cells`, each as `bench.core.measure_cell` returns it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.protocol import percentile
from bench.shapes import SUBSETS

SUBJECT = "flash4"
SCHEMA = 1
_SUMMARY = ("d64", "d128", "d256", "causal", "short")
# A peer that is absent or refuses a cell is a fact to show; a contender that computes something
# else or breaks while running is a fault of the run.
_FAULTS = ("mismatch", "failed")


def geomean(values: Iterable[float]) -> float | None:
    """Return the geometric mean, or None of nothing."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def tflops(row: dict[str, Any], name: str) -> float | None:
    """Return a contender's rate on a cell, or None if it has none."""
    record = row["contenders"].get(name, {})
    return record.get("tflops") if record.get("status") == "ok" else None


def best_peer(row: dict[str, Any]) -> str | None:
    """Return the name of the fastest contender of a cell but flash4."""
    rates = {n: tflops(row, n) for n in row["contenders"] if n != SUBJECT}
    known = {n: r for n, r in rates.items() if r is not None}
    return max(known, key=known.__getitem__) if known else None


def ratio(row: dict[str, Any]) -> float | None:
    """Return flash4's rate over the best peer's: above 1 is faster."""
    ours, peer = tflops(row, SUBJECT), best_peer(row)
    return None if ours is None or peer is None else ours / tflops(row, peer)


def ratio_noise(row: dict[str, Any]) -> float | None:
    """Return half the p10-p90 width of the ratio over rounds: smaller differences are noise.

    Rounds are paired, since both contenders ran within each under the same clocks.
    """
    if ratio(row) is None:
        return None
    ours, theirs = (
        row["contenders"][n].get("round_medians_us", []) for n in (SUBJECT, best_peer(row))
    )
    paired = [b / a for a, b in zip(ours, theirs)]
    if len(paired) < 2:
        return None
    return (percentile(paired, 90) - percentile(paired, 10)) / 2


def gemm_tflops(results: dict[str, Any]) -> float | None:
    """Return the machine's matrix product rate: the mean of the times it was measured."""
    rates = [c["gemm_tflops"] for c in results.get("ceilings", []) if c.get("gemm_tflops")]
    return sum(rates) / len(rates) if rates else None


def ratios(results: dict[str, Any], names: Sequence[str] | None = None) -> dict[str, float]:
    """Return the ratio to the best peer by cell name, where there is one."""
    found = {row["cell"]: ratio(row) for row in results["cells"]}
    return {c: r for c, r in found.items() if r is not None and (names is None or c in names)}


def _shown(value: float | None, form: str, suffix: str = "") -> str:
    return "-" if value is None else format(value, form) + suffix


def header(contenders: Sequence[str]) -> str:
    """Return the table's head; contenders in TFLOP/s."""
    rates = "".join(f"{n:>9}" for n in contenders)
    return (
        f"{'cell':30}{rates}   {'best peer':9}{'ratio':>7}{'+-':>7}{'% GEMM':>8}{'MHz':>6}{'W':>5}"
    )


def line(row: dict[str, Any], contenders: Sequence[str], gemm: float | None) -> str:
    """Return one cell as a line of the table.

    An error shows as its status, and `*` marks a rate for which the device may have waited for
    the host.
    """
    rates = ""
    for name in contenders:
        record = row["contenders"].get(name, {})
        rate = tflops(row, name)
        mark = "*" if record.get("dry_bursts") else ""
        rates += (
            f"{_shown(rate, '.1f', mark) if rate is not None else record.get('status', '-'):>9}"
        )
    subject = SUBJECT if SUBJECT in contenders else best_peer(row)
    ours = tflops(row, subject) if subject else None
    share = 100 * ours / gemm if ours and gemm else None
    noise, clocks = ratio_noise(row), row.get("clocks", {})
    return (
        f"{row['cell']:30}{rates}   {best_peer(row) or '-':9}{_shown(ratio(row), '.3f'):>7}"
        f"{_shown(noise, '.3f'):>7}{_shown(share, '.1f'):>8}"
        f"{_shown(clocks.get('sm_mhz'), '.0f'):>6}{_shown(clocks.get('watts'), '.0f'):>5}"
    )


def errors(results: dict[str, Any]) -> list[str]:
    """Return every error of every contender, a repeated one once, with the cells it hit."""
    hit: dict[tuple[str, str, str], list[str]] = {}
    for row in results["cells"]:
        for name, record in row["contenders"].items():
            if record.get("error"):
                key = (name, record["status"], record["error"])
                hit.setdefault(key, []).append(row["cell"])
    return [
        f"{name} {status} on {cells[0] if len(cells) == 1 else f'{len(cells)} cells'}: {text}"
        for (name, status, text), cells in hit.items()
    ]


def summary(results: dict[str, Any]) -> list[str]:
    """Return the lines under the table: ceilings, geomeans, worst cell, errors."""
    lines = []
    for ceiling in results.get("ceilings", []):
        if "gemm_tflops" in ceiling:
            lines.append(
                f"at the {ceiling['when']}: 8192^3 bf16 matrix product "
                f"{ceiling['gemm_tflops']:.0f} TFLOP/s, copy {ceiling['copy_gbs']:.0f} GB/s"
            )
        else:
            lines.append(f"at the {ceiling['when']}: no ceilings: {ceiling.get('error')}")
    found = ratios(results)
    if found:
        worst = min(found, key=found.__getitem__)
        lines.append(
            f"{SUBJECT} / best peer: geomean {geomean(found.values()):.3f} over {len(found)} "
            f"cells, worst {found[worst]:.3f} ({worst}), "
            f"ahead on {sum(r > 1 for r in found.values())}"
        )
        parts = []
        for subset in _SUMMARY:
            values = ratios(results, [c.name for c in SUBSETS[subset]]).values()
            if values:
                label = "S<=1024" if subset == "short" else subset
                parts.append(f"{label} {geomean(values):.3f} ({len(values)})")
        lines.append("geomean by subset: " + ", ".join(parts) if parts else "")
    return [text for text in lines if text] + errors(results)


def table(results: dict[str, Any]) -> str:
    """Return the whole report as text."""
    gpu, versions = results.get("gpu", {}), results.get("versions", {})
    known = ", ".join(f"{k} {v}" for k, v in versions.items() if v)
    head = (
        f"{results.get('direction', 'forward')}, TFLOP/s; {gpu.get('name', 'unknown GPU')}, "
        f"commit {results.get('commit', 'unknown')}, {results.get('started', '')}\n{known}"
    )
    gemm = gemm_tflops(results)
    rows = [line(row, results["contenders"], gemm) for row in results["cells"]]
    partial = [] if results.get("complete") else ["this run did not finish"]
    fatal = [f"stopped: {results['fatal']}"] if results.get("fatal") else []
    body = [head, header(results["contenders"]), *rows, *summary(results), *partial, *fatal]
    return "\n".join(body)


def row_faults(row: dict[str, Any], cell: str) -> list[str]:
    """Return what went wrong on a cell: wrong results, breakdowns, and flash4 unable to run."""
    bad = []
    for name, record in row["contenders"].items():
        status = record.get("status")
        if status in _FAULTS or (name.split(" ")[0] == SUBJECT and status != "ok"):
            bad.append(f"{cell}: {name} {status}: {record.get('error')}")
    return bad


def verdicts(
    results: dict[str, Any], min_geomean: float | None = None, min_worst: float | None = None
) -> list[str]:
    """Return why a run is not good; empty if it is.

    Args:
        results: The record of a run.
        min_geomean: The least geometric mean of flash4's ratios to the best peer.
        min_worst: The least ratio of any cell.
    """
    bad = [f"stopped: {results['fatal']}"] if results.get("fatal") else []
    for row in results["cells"]:
        bad += row_faults(row, row["cell"])
    if min_geomean is None and min_worst is None:
        return bad
    found = ratios(results)
    missing = [row["cell"] for row in results["cells"] if row["cell"] not in found]
    if missing or not found:
        bad.append(
            f"no ratio to assert on {len(missing)} cells: {', '.join(missing) or 'none ran'}"
        )
    if found and min_geomean is not None and geomean(found.values()) < min_geomean:
        bad.append(f"geomean {geomean(found.values()):.3f} is below {min_geomean}")
    if min_worst is not None:
        bad += [
            f"{c}: ratio {r:.3f} is below {min_worst}" for c, r in found.items() if r < min_worst
        ]
    return bad


def save(results: dict[str, Any], path: Path) -> None:
    """Write the record so that a reader, or a kill, never meets half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    os.replace(partial, path)


def load(path: Path) -> dict[str, Any]:
    """Read a record."""
    results = json.loads(path.read_text())
    if results.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {results.get('schema')!r}; this reads {SCHEMA}")
    return results
