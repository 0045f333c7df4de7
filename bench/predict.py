"""Predicted against measured: `python -m bench.predict --measure --out FILE` on a GPU, `--show FILE` anywhere.

Measured at the highest clock: a launch or two, then a pause, so that power does not limit it. The clock is read right
before and after on the GPU itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from bench import provenance
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


def main() -> None:
    """Measure, or show."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--measure", action="store_true", help="on a GPU; needs --out")
    options.add_argument("--out", type=Path, help="JSON record to write")
    arguments = options.parse_args()
    if arguments.measure:
        arguments.out.write_text(json.dumps(measure(), indent=1))


if __name__ == "__main__":
    main()
