"""Compare configs of a backward on a GPU: `python -m bench.tune_backward`.

For every cell it times variants of the config that dispatch chooses, interleaved with the peers, prints them sorted by time,
and writes a record with all of them. A variant is a word such as `late+handed_out+tile_m=64+swap_dq=0`: fields of the config,
with 1 for a value by default, and `section`, heads per section of the tile order. With `--parts` it also times the three
kernels of each variant apart. `--arch sm_90` takes the kernels of Ampere.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import provenance, report
from bench.ahead import compile_ahead, keys_of
from bench.shapes import Cell, select
from flash4.common.geometry import ceil_div
from flash4.common.launch_facts import WORDS
from flash4.dispatch import BackwardPlan, plan_backward, serve
from flash4.passes.bwd_config import FINISH, PREPARE

WORKERS = 132  # of an H200: to plan without a GPU
CELLS = (
    "d128-full-s4096-b4-h16,d128-full-s1024-b16-h16,d128-causal-s8192-b2-h16,d128-causal-s4096-b4-h16,"
    "d128-causal-s1024-b16-h16,d64-full-s4096-b4-h32,d64-causal-s4096-b4-h32,d64-causal-s1024-b16-h32"
)
VARIANTS = "late,handed_out,late+handed_out,late+handed_out+chained"
KEPT = ("name", "status", "median_us", "p10_us", "p90_us", "spread", "tflops", "error")


def plan_of(cell: Cell, variant: str, arch: str = "sm_90a") -> BackwardPlan | None:
    """Plan of a cell with a variant of the config that it would get; None if that is none, or does not fit."""
    plan = changed(plan_backward(cell.problem(), arch, WORKERS), variant)
    if plan is None or plan.config.lengths_obstacle(cell.seqlen, cell.seqlen):
        return None
    return plan


def changed(plan: BackwardPlan, variant: str) -> BackwardPlan | None:
    """A plan with a variant of its config; None if that is none, or does not fit."""
    changes = {}
    for word in filter(None, variant.split("+")):
        name, _, value = word.partition("=")
        changes[name] = int(value or 1)
    section = changes.pop("section", plan.section)
    kinds = {name: type(getattr(plan.config, name)) for name in changes}
    changes = {name: kinds[name](value) for name, value in changes.items()}
    try:
        config = replace(plan.config, **changes)
    except ValueError:  # not a config; those that are tried need not all be
        return None
    if not config.fits:
        return None
    return replace(plan, config=config, section=section)


@functools.cache
def _launch(cell: Cell, variant: str, arch: str) -> Any:
    from flash4.ops import device_facts, launch_of

    plan = plan_of(cell, variant, arch)
    slots = tuple(ceil_div(cell.seqlen, tile) for tile in (plan.config.tile_m, plan.config.tile_n))
    return launch_of(plan, slots, device_facts(0)[1])


def factory(cell: Cell, variant: str, arch: str, q: Any, k: Any, v: Any) -> Any:
    """A call whose output has the variant as its backward."""
    import flash4

    launch = _launch(cell, variant, arch)
    return with_backward(launch, flash4.flash_attn_func, (q, k, v), {"causal": cell.causal})


def with_backward(launch: Any, function: Any, inputs: Sequence[Any], keywords: dict) -> Any:
    """A call of a public function whose output has a launch as its backward."""
    import torch

    from flash4.interface import options_of
    from flash4.ops import launch_backward

    options = options_of(*inputs, **keywords)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = function(q, k, v, return_lse=True, **keywords)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            *inputs, out, lse = ctx.saved_tensors
            return launch_backward(launch, dout, None, inputs, out, lse, options)[:3]

    return functools.partial(Attention.apply, *inputs)


def parts_of(plan: BackwardPlan, arguments: tuple) -> dict[str, Callable[[], Any]]:
    """The three kernels of a plan, each compiled by itself, on what the function that launches all is called with."""
    import torch

    from flash4.ops import kernel_for

    ((_, whole, arch),), (tensors, numbers, section) = plan.kernels, arguments
    workspace = tensors[9]

    def view(name: str, first: int, shape: tuple[int, ...]) -> Any:
        part = workspace[first : first + math.prod(shape)].view(shape)
        return part.view(torch.int32) if name in WORDS else part

    of_prepare, of_main, of_finish = whole.parts(tensors, (numbers, section), view)
    before, after = whole.passes
    calls = {
        "prepare": (PREPARE, before, (of_prepare,)),
        "main": (whole.kernel, whole.main, (of_main, numbers, section)),
        "finish": (FINISH, after, (of_finish, numbers[0])),
    }
    return {
        name: functools.partial(kernel_for(kernel, config, arch), *given)
        for name, (kernel, config, given) in calls.items()
    }


def time_parts(cell: Cell, variant: str, arch: str, seconds: float) -> dict[str, float]:
    """Median microseconds of each of the three kernels, launched again and again."""
    from bench.baselines import make_inputs
    from bench.protocol import CudaDevice, Entry, measure

    (inputs,) = make_inputs(cell, 1, "backward", 0)
    launch, calls = _launch(cell, variant, arch), []
    import flash4
    from flash4.interface import options_of
    from flash4.ops import launch_backward

    tensors = (inputs.q, inputs.k, inputs.v)
    out, lse = flash4.flash_attn_func(*tensors, causal=cell.causal, return_lse=True)
    options = options_of(*tensors, causal=cell.causal)
    noted = replace(launch, function=lambda *arguments: calls.append(arguments))
    launch_backward(noted, inputs.dout, None, tensors, out, lse, options)
    parts = parts_of(plan_of(cell, variant, arch), calls[0])
    # The main kernel takes tiles from a counter that the one before it resets: time both, and subtract.
    first = [parts["prepare"], parts["main"]]
    entries = [
        Entry("whole", (functools.partial(launch.function, *calls[0]),)),
        Entry("prepare", (parts["prepare"],)),
        Entry("prepare+main", (lambda: [call() for call in first],)),
        Entry("finish", (parts["finish"],)),
    ]
    found = measure(entries, CudaDevice(), seconds)
    return {name: timing.summary()["median_us"] for name, timing in found.timings.items()}


def tune_cell(cell: Cell, variants: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Time variants on a cell; returns them with their figures, fastest first."""
    from bench.variants import compare

    made = {
        variant or "chosen": functools.partial(factory, cell, variant, args.arch)
        for variant in variants
    }
    budget = args.seconds * (len(made) + 2)
    peers = [name for name in args.peers.split(",") if name]
    found = compare(cell, made, peers=peers, direction="backward", budget_s=budget)
    rows = [{k: record[k] for k in KEPT if k in record} for record in found]
    for row in rows:
        variant = "" if row["name"] == "chosen" else row["name"]
        if args.parts and row["status"] == "ok" and variant in variants:
            row["parts_us"] = time_parts(cell, variant, args.arch, args.seconds)
            print(f"    {row['name']:44} {row['parts_us']}", flush=True)
    return {"cell": cell.name, "candidates": rows}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m bench.tune_backward", description=__doc__)
    p.add_argument("--cells", default=CELLS, help="comma-separated cells and subsets")
    p.add_argument("--variants", default=VARIANTS, help="comma-separated, beside the chosen config")
    p.add_argument("--peers", default="fa4", help="comma-separated contenders")
    p.add_argument("--arch", default="sm_90a", help="target of the kernels; sm_90: those of Ampere")
    p.add_argument("--seconds", type=float, default=0.2, help="of timing per variant and cell")
    p.add_argument("--parts", action="store_true", help="time the kernels apart too")
    p.add_argument("--workers", type=int, default=os.cpu_count(), help="compiling processes")
    p.add_argument("--out", type=Path, help="where to write the JSON record")
    return p


def different(cell: Cell, variants: Sequence[str], arch: str) -> list[str]:
    """Those that are a config of the cell, and not that of one before."""
    found = {}
    for variant in variants:
        plan = plan_of(cell, variant, arch)
        if plan is not None:
            found.setdefault((plan.kernels, plan.section), variant)
    return list(found.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = parser().parse_args(argv)
    by_cell = {}
    for cell in select(args.cells):
        by_cell[cell] = different(cell, ["", *filter(None, args.variants.split(","))], args.arch)
    keys = {}
    for cell, found in by_cell.items():
        keys |= dict.fromkeys(keys_of(cell, "forward", args.arch, WORKERS))
        keys |= dict.fromkeys(k for v in found for k in plan_of(cell, v, args.arch).kernels)
    errors = compile_ahead(list(keys), args.workers)
    for text in errors:
        print(text, file=sys.stderr)
    import torch

    torch.cuda.init()
    serve(torch.cuda.get_device_capability(), args.arch)
    started, revision, gpu = provenance.now(), provenance.commit(), provenance.gpu()
    results = {
        "started": started, "commit": revision, "arch": args.arch, "versions": provenance.versions(), "gpu": gpu, "errors": errors,
        "cells": [],
    }  # fmt: skip
    out = args.out or provenance.results_path(started, revision, gpu["name"], "tune-backward")
    for cell, variants in by_cell.items():
        results["cells"].append(tune_cell(cell, variants, args))
        report.save(results, out)
    print(f"written to {out}")
    for row in results["cells"]:
        times = {r["name"]: r.get("median_us") for r in row["candidates"] if r["status"] == "ok"}
        peer = min((t for name, t in times.items() if name in args.peers.split(",")), default=None)
        ratios = {name: round(peer / t, 3) for name, t in times.items()} if peer else times
        print(f"{row['cell']:28} {ratios}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
