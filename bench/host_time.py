"""Host time of one eager call, and of the first call of a fresh process.

`python -m bench.host_time` prints both. The problem is so small that the kernel takes less than
the call: what is timed is Python, dispatch and launch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.protocol import describe
from bench.provenance import ROOT, now
from bench.shapes import Cell

CELL = Cell(d=128, dv=128, causal=False, seqlen=128, batch=1, heads_q=2, heads_kv=2)
CALLS, REPEATS, WARM_UP = 1000, 7, 200
TURNS = 3  # of a backward and of PyTorch's engine alone
CHILD_TIMEOUT_S = 300


def per_call_us(
    call: Callable[[], Any],
    synchronize: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the host microseconds of one call: the median and the least of the repeats."""
    for _ in range(WARM_UP):
        call()
    repeats = []
    for _ in range(REPEATS):
        synchronize()
        began = clock()
        for _ in range(CALLS):
            call()
        repeats.append((clock() - began) / CALLS * 1e6)
    synchronize()
    return {"median_us": round(statistics.median(repeats), 2), "min_us": round(min(repeats), 2)}


def engine_alone(inputs: Any) -> Callable[[], Any]:
    """A backward like those of the contenders whose function does nothing: it returns gradients made before."""
    import torch

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.gradients = tuple(torch.empty_like(x) for x in (q, k, v))
            return torch.empty_like(inputs.dout)

        @staticmethod
        def backward(ctx, dout):
            return ctx.gradients

    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    out = Nothing.apply(*leaves)
    return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)


def own_us(
    call: Callable[[], Any],
    alone: Callable[[], Any],
    synchronize: Callable[[], None],
    threads: bool,
) -> dict[str, float]:
    """Return what a backward takes beyond PyTorch's engine with a function that does nothing.

    With `threads` the engine runs it in the device's thread, as it does unless told otherwise.
    """
    import torch

    with torch.autograd.set_multithreading_enabled(threads):
        pairs = [[per_call_us(x, synchronize) for x in (call, alone)] for _ in range(TURNS)]
    return {
        key: round(statistics.median(whole[key] - engine[key] for whole, engine in pairs), 2)
        for key in ("median_us", "min_us")
    }


def eager(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Time one eager call of each contender, without and with a graph for the backward, and that.

    The backward's time is that of `torch.autograd.grad`, its engine and the thread of the device included; `own` is
    what is left of it without those.
    """
    import torch

    from bench.baselines import CONTENDERS, make_inputs

    found: dict[str, dict[str, Any]] = {}
    for name in names:
        contender = CONTENDERS[name]()
        reason = contender.available()
        if reason is not None:
            found[name] = {"error": reason}
            continue
        found[name] = {}
        one = make_inputs(CELL, 1, "backward", seed=int(time.time()))[0]
        for label, grad in (("no_grad", False), ("with_grad", True)):
            q, k, v = (t.detach().requires_grad_(grad) for t in (one.q, one.k, one.v))
            try:
                with contender.context():
                    call = contender.bind(CELL, q, k, v)
                    found[name][label] = per_call_us(call, torch.cuda.synchronize)
            except Exception as error:
                found[name][label] = {"error": describe(error)}
        try:
            with contender.context():
                call = contender.prepare(CELL, one, "backward")
                found[name]["backward"] = per_call_us(call, torch.cuda.synchronize)
                for label, threads in (("own", True), ("own, one thread", False)):
                    own = own_us(call, engine_alone(one), torch.cuda.synchronize, threads)
                    found[name][f"backward, {label}"] = own
        except Exception as error:
            found[name]["backward"] = {"error": describe(error)}
    return found


def child(name: str) -> dict[str, Any]:
    """In a fresh process: time import and first call; torch and CUDA are up before the clock."""
    import torch

    from bench.baselines import CONTENDERS, make_inputs

    one = make_inputs(CELL, 1, "forward", seed=0)[0]
    torch.cuda.synchronize()
    contender = CONTENDERS[name]()
    began = time.perf_counter()
    reason = contender.available()
    imported = time.perf_counter()
    if reason is not None:
        return {"error": reason}
    with contender.context():
        call = contender.bind(CELL, one.q, one.k, one.v)
        call()
        torch.cuda.synchronize()
        called = time.perf_counter()
        call()
        torch.cuda.synchronize()
    second = time.perf_counter()
    return {
        "import_ms": round((imported - began) * 1e3, 2),
        "first_call_ms": round((called - imported) * 1e3, 2),
        "second_call_ms": round((second - called) * 1e3, 3),
        "dsl_imported": "cutlass" in sys.modules,
    }


def run_child(name: str, cache_dir: str) -> dict[str, Any]:
    """Run `child` in a fresh process with this cache directory."""
    env = {**os.environ, "FLASH4_CACHE_DIR": cache_dir}
    command = [sys.executable, "-m", "bench.host_time", "--child", name]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {CHILD_TIMEOUT_S} s"}
    return parse_child(done.stdout, done.stderr, done.returncode)


def parse_child(stdout: str, stderr: str, status: int) -> dict[str, Any]:
    """Find the child's record in what it printed; packages may print around it."""
    for text in reversed(stdout.splitlines()):
        try:
            found = json.loads(text)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    last = " ".join(stderr.split())[-400:]
    return {"error": f"exit status {status}: {last}"}


def first_calls(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Time first calls with an empty and then a filled cache directory.

    FLASH4_CACHE_DIR is flash4's; peers see no difference but their own caches, if any.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="flash4-cache-") as cache:
            found[name] = {"cold": run_child(name, cache), "warm": run_child(name, cache)}
    return found


def _print(title: str, found: dict[str, dict[str, Any]]) -> None:
    print(title)
    for name, rows in found.items():
        if "error" in rows:
            print(f"  {name:8} {rows['error']}")
            continue
        for label, values in rows.items():
            print(f"  {name:8} {label:24}", ", ".join(f"{k} {v}" for k, v in values.items()))
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    p = argparse.ArgumentParser(prog="python -m bench.host_time", description=__doc__)
    p.add_argument("--contenders", default="flash4,fa4,cudnn")
    p.add_argument("--out", help="where to write a JSON record")
    p.add_argument("--child", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.child:
        try:
            found = child(args.child)
        except Exception as error:
            found = {"error": describe(error)}
        print("\n" + json.dumps(found), flush=True)
        return 0
    import torch

    from bench.baselines import CONTENDERS

    names = [n.strip() for n in args.contenders.split(",") if n.strip()]
    unknown = [n for n in names if n not in CONTENDERS]
    if unknown:
        p.error(f"contenders are {', '.join(CONTENDERS)}; got {args.contenders!r}")
    if not torch.cuda.is_available():
        print("bench.host_time: no CUDA device", file=sys.stderr)
        return 2
    # First calls first: the children should find the GPU as idle as a user's process does.
    fresh = first_calls([n for n in names if n in ("flash4", "fa4")])
    _print("first call of a fresh process (ms), torch and CUDA loaded before", fresh)
    calls = eager(names)
    _print(f"host time of one eager call, {CELL.name} (us)", calls)
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"started": now(), "first_calls": fresh, "eager": calls}, file, indent=1)
    own = [fresh.get("flash4", {}), calls.get("flash4", {})]
    own += [values for rows in own for values in rows.values() if isinstance(values, dict)]
    return int(any("error" in rows for rows in own))


if __name__ == "__main__":
    sys.exit(main())
