"""Predicted against measured: `python -m bench.predict --measure FILE` on a GPU, `--show FILE` anywhere.

For SM cycles as well, on the GPU: `ncu --clock-control none -k regex:Forward.* --csv --metrics
sm__cycles_elapsed.max,smsp__inst_executed.sum python -m bench.predict --calls > CSV`, then `--merge FILE CSV`.

Measured at the highest clock: a launch or two, then a pause, so that power does not limit it. The clock is read right
before and after on the GPU itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path

from bench import provenance
from bench.ncu import launches
from bench.shapes import Cell

TOKENS = 16384
HEADS = {64: 32, 128: 16, 256: 8}
CELLS = tuple(
    Cell(d, d, causal, seqlen, TOKENS // seqlen, heads, heads)
    for d, heads in HEADS.items()
    for causal in (False, True)
    for seqlen in (2048, 8192)
)
ROUNDS, PAUSE_S, CLOCK_CYCLES = 15, 0.03, 40_000


def measure(cells=CELLS) -> dict:
    """Microseconds of a launch and MHz around it, medians over rounds with pauses."""
    import torch

    import flash4
    from bench.micro.handoffs import EmptyConfig
    from flash4.jit.compile import compile_kernel

    clock = compile_kernel("bench.micro.handoffs:Empty", EmptyConfig(384), "sm_90a")
    rows = []
    for cell in cells:
        shape = (cell.batch, cell.seqlen, cell.heads_q, cell.d)
        q, k, v = (torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(3))
        flash4.flash_attn_func(q, k, v, causal=cell.causal)
        spans, rates = [], []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            time.sleep(PAUSE_S)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            clocks = torch.zeros(2, 1, 4, dtype=torch.int64, device="cuda")
            torch.cuda._sleep(600_000)
            clock(clocks[0], CLOCK_CYCLES)
            for event in events:
                event.record()
                flash4.flash_attn_func(q, k, v, causal=cell.causal)
            clock(clocks[1], CLOCK_CYCLES)
            torch.cuda.synchronize()
            spans.append(events[1].elapsed_time(events[2]) * 1e3)
            start, end, start_ns, end_ns = clocks[:, 0].T.tolist()
            rates += [(b - a) / (d - c) * 1e3 for a, b, c, d in zip(start, end, start_ns, end_ns)]
        rows.append(
            {
                "cell": cell.name,
                "config": asdict(planned(cell).config),
                "us": round(statistics.median(spans), 2),
                "us_least": round(min(spans), 2),
                "us_most": round(max(spans), 2),
                "mhz": round(statistics.median(rates), 1),
                "mhz_least": round(min(rates), 1),
            }
        )
        print(rows[-1], flush=True)
    return {
        "started": provenance.now(),
        "commit": provenance.commit(),
        "versions": provenance.versions(),
        "gpu": provenance.gpu(),
        "cells": rows,
    }


def run_calls(cells=CELLS) -> None:
    """Call each cell twice: for a profiler."""
    import torch

    import flash4

    for cell in cells:
        shape = (cell.batch, cell.seqlen, cell.heads_q, cell.d)
        q, k, v = (torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(3))
        for _ in range(2):
            flash4.flash_attn_func(q, k, v, causal=cell.causal)
    torch.cuda.synchronize()


def merge(record: dict, csv_text: str) -> None:
    """Add SM cycles and instructions of each cell's second call from ncu's CSV of ``--calls``."""
    calls = launches(csv_text)
    for i, row in enumerate(record["cells"]):
        found = calls[2 * i + 1]
        row["cycles"] = round(found["sm__cycles_elapsed.max"])
        row["instructions"] = round(found["smsp__inst_executed.sum"])


def planned(cell: Cell, config: dict | None = None):
    """Plan of a cell on an H200; with another config than today's, if one is given by its fields."""
    from flash4.common.tiles import grid_of
    from flash4.dispatch import choose_section, plan_forward
    from flash4.sim.chips import H200

    plan = plan_forward(cell.problem(), "sm_90a", H200.sms)
    if config is None:
        return plan
    config = type(plan.config)(**config)
    grid = grid_of(plan.problem, config.tile_q, config.pack)
    section = choose_section(plan.problem, config, grid, H200.sms)
    return replace(plan, config=config, grid=grid, section=section)


def predict(row: dict):
    """Timing of a recorded cell by the model, with the config that was measured."""
    from flash4.sim.chips import H200
    from flash4.sim.sm90_fwd_clock import time_forward

    plan = planned(Cell.parse(row["cell"]), row["config"])
    return time_forward(plan, H200, latest=0)


def errors(record: dict, show=lambda text: None) -> tuple[list[float], list[float]]:
    """Relative errors of the predicted times, and of the predicted cycles where they were measured."""
    times, cycles = [], []
    show(f"{'cell':28} {'cycles':>9} {'model':>9} {'':>6}   {'us':>8} {'model':>8} {'':>6}")
    for row in record["cells"]:
        timing = predict(row)
        times.append(timing.microseconds / row["us"] - 1)
        text = ""
        if "cycles" in row:
            cycles.append(timing.cycles / row["cycles"] - 1)
            text = f"{row['cycles']:9} {timing.cycles:9.0f} {cycles[-1]:+6.1%}"
        show(
            f"{row['cell']:28} {text:26}   {row['us']:8.1f} {timing.microseconds:8.1f} {times[-1]:+6.1%}"
        )
    for name, found in (("times", times), ("cycles", cycles)):
        if found:
            sizes = [abs(x) for x in found]
            show(f"{name}: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")
    return times, cycles


def main() -> None:
    """Measure, merge, or show."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--measure", type=Path, metavar="FILE", help="on a GPU: write a record")
    options.add_argument("--calls", action="store_true", help="on a GPU, under ncu: only call")
    options.add_argument("--merge", type=Path, nargs=2, metavar=("FILE", "CSV"), help="add cycles")
    options.add_argument(
        "--show", type=Path, metavar="FILE", help="compare a record with the model"
    )
    arguments = options.parse_args()
    if arguments.measure:
        arguments.measure.write_text(json.dumps(measure(), indent=1))
    if arguments.calls:
        run_calls()
    if arguments.merge:
        path, table = arguments.merge
        record = json.loads(path.read_text())
        merge(record, table.read_text())
        path.write_text(json.dumps(record, indent=1))
    if arguments.show:
        errors(json.loads(arguments.show.read_text()), print)


if __name__ == "__main__":
    main()
