"""Compare variants of a kernel with each other and with the peers, under the same protocol.

    from bench.shapes import Cell
    from bench.variants import tune

    tune(Cell.parse("d64-causal-s4096-b4-h32"), configs, launch)

where `launch(config, q, k, v)` runs one configuration and returns its output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from bench.baselines import CONTENDERS, FromCallable
from bench.core import Bench, bench_here, measure_cell
from bench.shapes import Cell

Factory = Callable[..., Callable[[], Any]]
SECONDS_PER_CONTENDER = 0.3


def compare(
    cell: Cell,
    factories: Mapping[str, Factory],
    *,
    peers: Iterable[str] = ("fa4", "cudnn"),
    direction: str = "forward",
    budget_s: float | None = None,
    bench: Bench | None = None,
) -> list[dict[str, Any]]:
    """Check and time callables on one cell, interleaved, and print them sorted by time.

    Args:
        cell: The problem.
        factories: By name, `factory(q, k, v)` returning a call without arguments that returns
            the output (or a tuple that begins with it). For the backward its output must carry
            a graph.
        peers: Names from `bench.baselines.CONTENDERS` to run beside them.
        direction: "forward" or "backward".
        budget_s: Seconds of timing in all; by default in proportion to the contenders.
        bench: Where and how to run, in place of `direction` and `budget_s`; by default the
            current GPU.

    Returns:
        One record per contender with its `name`, fastest first, those with errors last.
    """
    contenders = [CONTENDERS[name]() for name in peers]
    contenders += [FromCallable(name, factory) for name, factory in factories.items()]
    names = [c.name for c in contenders]
    if len(set(names)) != len(names):
        raise ValueError(f"names of contenders repeat: {names}")
    if bench is None:
        bench = bench_here(direction, budget_s or SECONDS_PER_CONTENDER * len(names))
        try:
            row = measure_cell(cell, contenders, bench)
        finally:
            if bench.telemetry:
                bench.telemetry.stop()
    else:
        row = measure_cell(cell, contenders, bench)
    found = [{"name": name, **record} for name, record in row["contenders"].items()]
    found.sort(key=lambda r: r["median_us"] if r["status"] == "ok" else float("inf"))
    print(format_table(row, found), flush=True)
    return found


def tune(
    cell: Cell,
    configs: Iterable[Hashable],
    launch: Callable[..., Any],
    *,
    label: Callable[[Hashable], str] = str,
    **keywords: Any,
) -> list[tuple[Hashable | None, dict[str, Any]]]:
    """Compare configurations of one kernel; return (config, record), fastest first.

    Args:
        cell: The problem.
        configs: The configurations, opaque here.
        launch: `launch(config, q, k, v) -> out`.
        label: Names a configuration in the table.
        **keywords: As for `compare`.

    Returns:
        Pairs of configuration and record; peers have None for a configuration.
    """
    by_name: dict[str, Hashable] = {}
    for config in configs:
        name = label(config)
        if name in by_name:
            raise ValueError(f"two configurations are called {name!r}")
        by_name[name] = config
    factories = {
        name: functools.partial(functools.partial, launch, config)
        for name, config in by_name.items()
    }
    return [(by_name.get(r["name"]), r) for r in compare(cell, factories, **keywords)]


def format_table(row: dict[str, Any], records: list[dict[str, Any]]) -> str:
    """Return a cell's contenders as a table, one a line, in the order given."""
    clocks = row["clocks"]
    lines = [
        f"{row['cell']} {row['direction']}: {clocks.get('sm_mhz') or '-'} MHz, "
        f"{clocks.get('watts') or '-'} W"
    ]
    timed = [r for r in records if r["status"] == "ok"]
    for r in timed:
        mark = "*" if r["dry_bursts"] else " "
        lines.append(
            f"  {r['name']:44} {r['median_us']:9.1f} us{mark} p10 {r['p10_us']:9.1f} "
            f"p90 {r['p90_us']:9.1f} spread {r['spread']:6.1%} {r['tflops']:7.1f} TFLOP/s "
            f"{timed[0]['median_us'] / r['median_us']:6.3f}"
        )
    lines += [f"  {r['name']:44} {r['status']}: {r['error']}" for r in records if r not in timed]
    return "\n".join(lines)
