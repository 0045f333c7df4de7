"""Search configs of the Hopper forward on a GPU: `python -m bench.tune`.

For every cell it times candidates around the config that dispatch chooses, interleaved with the peers, prints them sorted
by time, and writes a record with all of them: the evidence for `choose_tile`.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from bench import provenance, report
from bench.ahead import compile_ahead
from bench.shapes import Cell, select
from flash4.dispatch import choose_section
from flash4.sm90.fwd_config import KEY_STEP, ForwardConfig, choose_config, spend_memory

KERNEL, ARCH = "flash4.sm90.fwd:ForwardSm90", "sm_90a"
CELLS = (
    "d64-full-s16384-b1-h32,d64-full-s1024-b16-h32,d64-causal-s4096-b4-h32,d64-causal-s512-b32-h32,"
    "d128-full-s16384-b1-h16,d128-full-s1024-b16-h16,d128-causal-s8192-b2-h16,d128-causal-s512-b32-h16,"
    "d256-full-s4096-b4-h8,d256-causal-s4096-b4-h8,d192x128-causal-s8192-b2-h16"
)
# Changes to the chosen config, by the wider head dim of its tile. What does not fit is left out.
TILES = {
    64: (
        {"tile_m": 192, "tile_n": 128, "stages": 2},
        {"tile_m": 192, "tile_n": 128, "stages": 3},
        {"tile_m": 256, "tile_n": 64, "stages": 4},
        {"tile_m": 512, "tile_n": 64, "stages": 4, "cluster": 2},
    ),
    96: (
        {"tile_m": 128, "tile_n": 128, "stages": 2},
        {"tile_m": 128, "tile_n": 64, "stages": 4},
        {"tile_m": 192, "tile_n": 64, "stages": 3},
        {"tile_m": 192, "tile_n": 96, "stages": 2},
        {"tile_m": 192, "tile_n": 112, "stages": 2},
        {"tile_m": 192, "tile_n": 128, "stages": 2},
    ),
    128: (
        {"tile_m": 128, "tile_n": 128, "stages": 2},
        {"tile_m": 128, "tile_n": 64, "stages": 4},
        {"tile_m": 192, "tile_n": 64, "stages": 3},
        {"tile_m": 192, "tile_n": 64, "stages": 4},
        {"tile_m": 256, "tile_n": 128, "stages": 2, "cluster": 2},
    ),
    192: (
        {"tile_m": 128, "tile_n": 128, "stages": 2},
        {"tile_m": 128, "tile_n": 112, "stages": 2},
        {"tile_m": 128, "tile_n": 96, "stages": 2},
        {"tile_m": 128, "tile_n": 64, "stages": 2},
        {"tile_m": 256, "tile_n": 128, "stages": 2, "cluster": 2},
        {"tile_m": 256, "tile_n": 112, "stages": 2, "cluster": 2},
    ),
    256: (
        {"tile_m": 128, "tile_n": 64, "stages": 2},
        {"tile_m": 128, "tile_n": 80, "stages": 2},
        {"tile_m": 256, "tile_n": 64, "stages": 2, "cluster": 2},
        {"tile_m": 256, "tile_n": 80, "stages": 2, "cluster": 2},
    ),
}
SETTLES = {64: (0, 8), 96: (0, 12), 128: (0, 12), 192: (8, 16), 256: (8, 16)}


@dataclass(frozen=True)
class Candidate:
    """What is timed: a config, and heads per section of its tile order if not those that dispatch chooses."""

    config: ForwardConfig
    section: int | None = None


def candidates(cell: Cell) -> list[ForwardConfig]:
    """Configs to compare on a cell, the chosen one first; each once, and only what fits."""
    chosen = choose_config(cell.problem())[0]
    wide = next(size for size in TILES if size >= max(chosen.tile_d, chosen.tile_dv))
    found = {chosen: None}
    rows = chosen.tile_m // chosen.cluster
    plain = replace(chosen, cluster=1, tile_m=rows, skip=False, turns=False, q_stages=1, o_parts=1)
    exact = [-(-size // KEY_STEP) * KEY_STEP for size in (cell.d, cell.dv)]
    for tile in TILES[wide] + tuple(
        {**t, "tile_d": exact[0], "tile_dv": exact[1]} for t in TILES[wide]
    ):
        shorter = tile["tile_n"] < tile["tile_m"]  # some warpgroups pass over a tile's last blocks
        for settle in SETTLES[wide]:
            changes = [{"skip": cell.causal and shorter}]
            if wide == 64 and not cell.causal:
                changes.append({"turns": True})
            if wide > 128:
                changes.append({"skip": cell.causal and shorter, "fixed_shift": True})
            for change in changes:
                try:
                    config = replace(plain, **tile, settle=settle, **change)
                    config = spend_memory(config)[0]
                except ValueError:  # not a config; those that are tried need not all be
                    continue
                if config.fits:
                    found[config] = None
    return list(found)


def label(candidate: Candidate) -> str:
    """A candidate in one word: tile, stages, and what is on."""
    config = candidate.config
    words = [f"{config.tile_m}x{config.tile_n}", f"s{config.stages}", f"q{config.q_stages}"]
    words += [f"d{config.tile_d}x{config.tile_dv}"]
    words += [f"o{config.o_parts}"] * (config.o_parts > 1)
    words += [f"cluster{config.cluster}"] * (config.cluster > 1)
    words += [name for name in ("turns", "skip", "fixed_shift") if getattr(config, name)]
    words.append(f"settle{config.settle}")
    words += [f"section{candidate.section}"] * (candidate.section is not None)
    return "-".join(words)


def launch(cell: Cell, candidate: Candidate, q: Any, k: Any, v: Any) -> Any:
    """Run one candidate on the tensors of a cell; returns out."""
    import torch

    function, section, workers = _launcher(cell, candidate)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    tensors = (q, k, v, out, lse)
    if candidate.config.handed_out:
        from flash4.ops import reset_counter

        tensors += (reset_counter(q.device),)
    function(tensors, (cell.d**-0.5,), section, workers)
    return out


@functools.cache
def _launcher(cell: Cell, candidate: Candidate) -> tuple[Any, int, int]:
    """(kernel, heads per section, multiprocessors)."""
    from flash4.common.tiles import grid_of
    from flash4.jit.cache import CACHE
    from flash4.ops import device_facts

    config, workers, problem = candidate.config, device_facts(0)[1], cell.problem()
    grid = grid_of(problem, config.tile_q, config.pack)
    section = candidate.section or choose_section(problem, config, grid, workers)
    return CACHE.get(KERNEL, config, ARCH), section, workers


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    p.add_argument("--cells", default=CELLS, help="comma-separated cells and subsets")
    p.add_argument("--seconds", type=float, default=0.2, help="of timing per candidate and cell")
    p.add_argument("--workers", type=int, default=os.cpu_count(), help="compiling processes")
    p.add_argument(
        "--only", default="", help="candidates whose label has this, and the chosen ones"
    )
    p.add_argument("--without", help="leave out candidates whose label has this")
    p.add_argument(
        "--sections", help="comma-separated heads per section to try the chosen config with instead"
    )
    p.add_argument("--list", action="store_true", help="print the candidates; needs no GPU")
    p.add_argument("--out", type=Path, help="where to write the JSON record")
    return p


def tune_cell(cell: Cell, compared: Sequence[Candidate], seconds: float) -> dict[str, Any]:
    """Time the candidates of a cell; returns them with their figures, fastest first."""
    from bench.variants import tune

    found = tune(
        cell, compared, functools.partial(launch, cell), label=label, budget_s=seconds * (len(compared) + 2)
    )  # fmt: skip
    rows = []
    for candidate, record in found:
        facts = None
        if candidate is not None:
            config = candidate.config
            facts = {f.name: getattr(config, f.name) for f in fields(config)}
        keep = ("name", "status", "median_us", "p10_us", "p90_us", "spread", "tflops", "error")
        rows.append({**{k: record[k] for k in keep if k in record}, "config": facts})
    return {"cell": cell.name, "chosen": label(compared[0]), "candidates": rows}


def compared(cell: Cell, args: argparse.Namespace) -> list[Candidate]:
    """What the command line asks for on a cell; what dispatch chooses comes first."""
    chosen, *others = map(Candidate, candidates(cell))
    if args.sections:
        return [chosen, *(replace(chosen, section=int(text)) for text in args.sections.split(","))]
    found = [c for c in others if args.only in label(c)]
    return [chosen, *(c for c in found if not (args.without and args.without in label(c)))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = parser().parse_args(argv)
    cells = select(args.cells)
    by_cell = {cell: compared(cell, args) for cell in cells}
    every = {c.config: None for found in by_cell.values() for c in found}
    if args.list:
        for cell in cells:
            print(cell.name, *map(label, by_cell[cell]), sep="\n  ")
        return 0
    errors = compile_ahead([(KERNEL, config, ARCH) for config in every], args.workers)
    for text in errors:
        print(text, file=sys.stderr)
    import torch

    torch.cuda.init()
    started, revision, gpu = provenance.now(), provenance.commit(), provenance.gpu()
    results = {
        "started": started, "commit": revision, "versions": provenance.versions(), "gpu": gpu, "errors": errors,
        "cells": [],
    }  # fmt: skip
    out = args.out or provenance.results_path(started, revision, gpu["name"], "tune")
    for cell in cells:
        results["cells"].append(tune_cell(cell, by_cell[cell], args.seconds))
        report.save(results, out)
    print(f"written to {out}")
    for row in results["cells"]:
        best = next((r for r in row["candidates"] if r["config"] and r["status"] == "ok"), None)
        print(f"{row['cell']:32} chosen {row['chosen']:44} best {best and best['name']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
