"""One cell, start to end: inputs, first calls, correctness, timing. All commands use this."""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench import provenance
from bench.baselines import PEERS, Contender, Inputs, make_inputs
from bench.check import mismatches
from bench.protocol import (
    CudaDevice,
    DeviceLost,
    Entry,
    Measurement,
    describe,
    input_sets,
    is_alive,
    measure,
)
from bench.shapes import Cell
from bench.telemetry import Telemetry, open_telemetry


@dataclass
class Bench:
    """Where and how cells are measured."""

    device: Any
    l2_bytes: int
    direction: str = "forward"
    budget_s: float = 1.2
    seed: int = 0
    telemetry: Telemetry | None = None
    torch_device: str = "cuda"


def bench_here(direction: str, budget_s: float, seed: int | None = None) -> Bench:
    """Return a bench on the current GPU, with its log of clocks; a seed of None comes from the time."""
    torch.cuda.init()
    l2_bytes, telemetry = provenance.gpu()["l2_bytes"], open_telemetry(provenance.gpu_uuid())
    seed = int(time.time()) if seed is None else seed
    return Bench(CudaDevice(), l2_bytes, direction, budget_s, seed, telemetry)


def _poison(cell: Cell, device: str) -> None:
    """Leave NaN in the allocator's free blocks, so that an output nobody wrote shows."""
    for heads, dim in ((cell.heads_q, max(cell.d, cell.dv)), (cell.heads_kv, cell.d)):
        shape = (cell.batch, cell.seqlen, heads, dim)
        torch.full(shape, math.nan, dtype=torch.bfloat16, device=device)


def _first_call(
    contender: Contender, cell: Cell, inputs: list[Inputs], bench: Bench
) -> tuple[Entry, tuple[torch.Tensor, ...]]:
    """Prepare a contender on all input sets and call it once; return its results."""
    with contender.context():
        launches = tuple(contender.prepare(cell, one, bench.direction) for one in inputs)
        _poison(cell, bench.torch_device)
        raw = launches[0]()
    bench.device.synchronize()
    entry = Entry(contender.name, launches, contender.context)
    return entry, contender.results(raw, bench.direction)


def enter(
    contender: Contender, cell: Cell, inputs: list[Inputs], bench: Bench
) -> tuple[dict[str, Any], Entry | None, tuple[torch.Tensor, ...]]:
    """Make one contender's record; its entry is None if it cannot take part."""
    reason = contender.available()
    if reason is not None:
        return {"status": "absent", "error": reason}, None, ()
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        # Torch says in warnings why a backend refuses a problem.
        warnings.simplefilter("always")
        try:
            entry, results = _first_call(contender, cell, inputs, bench)
        except Exception as error:
            because = "; ".join(str(w.message).split("(Triggered")[0].strip() for w in caught)
            text = describe(error) + (f" [{because[:600]}]" if because else "")
            if not is_alive(bench.device):
                raise DeviceLost(f"{contender.name}: {text}") from error
            return {"status": "refused", "error": text}, None, ()
    first_call_s = round(time.perf_counter() - began, 3)
    return {"status": "ok", "first_call_s": first_call_s}, entry, results


def record_times(
    found: Measurement, records: dict[str, dict[str, Any]], flops: Mapping[str, int]
) -> None:
    """Write what `measure` found into the contenders' records, with rates from their operations."""
    for name, timing in found.timings.items():
        summary = timing.summary()
        records[name].update(summary)
        if timing.error is not None:
            records[name].update(status="failed", error=timing.error)
        elif summary["launches"]:
            records[name]["tflops"] = float(f"{flops[name] / summary['median_us'] / 1e6:.5g}")


def measure_cell(cell: Cell, contenders: Sequence[Contender], bench: Bench) -> dict[str, Any]:
    """Check and time all contenders on one cell.

    Returns:
        A record for `bench.report`: what was measured, under which clocks, and per contender a
        status ("ok", "absent", "refused", "mismatch" or "failed"), times and any error.

    Raises:
        DeviceLost: A contender left the device unusable.
    """
    sets = input_sets(cell.input_bytes(), bench.l2_bytes)
    inputs = make_inputs(cell, sets, bench.direction, bench.seed, bench.torch_device)
    records: dict[str, dict[str, Any]] = {}
    entries: dict[str, Entry] = {}
    results: dict[str, tuple[torch.Tensor, ...]] = {}
    for contender in contenders:
        record, entry, tensors = enter(contender, cell, inputs, bench)
        records[contender.name] = record
        if entry is not None:
            entries[contender.name], results[contender.name] = entry, tensors
    # Peers first: the first right one is what flash4's whole result is compared with.
    ordered = dict(sorted(results.items(), key=lambda item: item[0] not in PEERS))
    for name, text in mismatches(cell, inputs[0], ordered, bench.direction).items():
        records[name].update(status="mismatch", error=text)
        del entries[name]
    del results, ordered
    found = measure(list(entries.values()), bench.device, bench.budget_s)
    flops = cell.flops(bench.direction)
    record_times(found, records, dict.fromkeys(entries, flops))
    clocks = bench.telemetry.window(found.started, found.ended) if bench.telemetry else {}
    if bench.direction == "backward":
        # A peer's autograd node may hold its tensors in a cycle, which only the collector frees.
        entries.clear()
        gc.collect()
    return {
        "cell": cell.name,
        "direction": bench.direction,
        "flops": flops,
        "input_sets": sets,
        "kept_per_burst": found.kept_per_burst,
        "spin_us": round(found.spin_us, 1),
        "measured_s": round(found.ended - found.started, 3),
        "clocks": clocks,
        "contenders": records,
    }
