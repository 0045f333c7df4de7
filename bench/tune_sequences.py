"""Compare configs of the backward of sequences of different lengths on a GPU: `python -m bench.tune_sequences`.

As `bench.tune_backward`, whose variants these are, on cells of `bench.features`. Gradients of every variant are compared with
those of the chosen config before it is timed.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

from bench.ahead import compile_ahead
from bench.feature_cells import Problem, select
from bench.tune_backward import WORKERS, changed, with_backward
from flash4.dispatch import BackwardPlan, plan_backward, serve

CELLS = "backward-varlen"
VARIANTS = (
    "handed_out=0+first_stores=0+backwards=0,first_stores=0+backwards=0,backwards=0,first_stores=0"
)
ARCH = "sm_90a"
CLOSE = 2e-2  # of the largest gradient: each rounds in its own order


def plan_of(problem: Problem, variant: str) -> BackwardPlan | None:
    """Plan of a problem with a variant of the config that it would get; None if that is none, or does not fit."""
    from bench.feature_calls import make_tensors
    from flash4.interface import options_of
    from flash4.problem import AttentionProblem

    x = make_tensors(problem, 1, 0, "meta")[0]
    options = options_of(x.q, x.k, x.v, **keywords_of(problem, x))
    plan = plan_backward(AttentionProblem.of_call(x.q, x.k, x.v, options), ARCH, WORKERS)
    return changed(plan, variant)


def keywords_of(problem: Problem, x: Any) -> dict[str, Any]:
    """What the public function takes, but for lengths that flash4 does not ask for."""
    found = problem.keywords(x)
    return {name: value for name, value in found.items() if not name.startswith("max_seqlen")}


def gradients_of(problem: Problem, variant: str, x: Any) -> Any:
    """A call that returns gradients of q, k and v, made by a variant."""
    import torch

    import flash4
    from flash4.interface import options_of
    from flash4.ops import device_facts, launch_of, slots_of_call

    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    plan, keywords = plan_of(problem, variant), keywords_of(problem, x)
    slots = slots_of_call(x.q, x.k, plan.config, options_of(*leaves, **keywords))
    launch = launch_of(plan, slots, device_facts(0)[1])
    out = with_backward(launch, flash4.flash_attn_varlen_func, leaves, keywords)()
    return functools.partial(torch.autograd.grad, out, leaves, x.dout, retain_graph=True)


def differences(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """Largest difference of gradients, of the largest gradient; NaN if one is."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in pairs)


def tune_problem(problem: Problem, variants: Sequence[str], peers: str, seconds: float) -> dict:
    """Median microseconds of each variant and peer; what computed something else is left out."""
    from bench.feature_calls import FeatureContender, make_tensors
    from bench.feature_cells import Arm
    from bench.protocol import CudaDevice, Entry, measure

    (x,) = make_tensors(problem, 1, 0)
    calls = {variant or "chosen": gradients_of(problem, variant, x) for variant in variants}
    for peer in filter(None, peers.split(",")):
        calls[peer] = FeatureContender(Arm(peer, problem)).prepare(None, x)
    wanted, right = calls["chosen"](), {}
    for name, call in calls.items():
        error = differences(call(), wanted)
        if error <= CLOSE:
            right[name] = call
        else:
            print(f"    {name}: gradients differ by {error:.3g} of the largest", file=sys.stderr)
    entries = [Entry(name, (call,)) for name, call in right.items()]
    found = measure(entries, CudaDevice(), seconds * len(entries))
    return {name: timing.summary()["median_us"] for name, timing in found.timings.items()}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m bench.tune_sequences", description=__doc__)
    p.add_argument("--cells", default=CELLS, help="groups and group/cell names of bench.features")
    p.add_argument("--variants", default=VARIANTS, help="comma-separated, beside the chosen config")
    p.add_argument("--peers", default="fa4", help="comma-separated contenders")
    p.add_argument("--seconds", type=float, default=0.3, help="of timing per variant and cell")
    p.add_argument("--workers", type=int, default=os.cpu_count(), help="compiling processes")
    return p


def different(problem: Problem, variants: Sequence[str]) -> list[str]:
    """Those that are a config of the problem, and not that of one before."""
    found = {}
    for variant in variants:
        plan = plan_of(problem, variant)
        if plan is not None:
            found.setdefault((plan.kernels, plan.section), variant)
    return list(found.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = parser().parse_args(argv)
    asked = ["", *filter(None, args.variants.split(","))]
    problems = {cell.name: cell.arms[0].problem for cell in select(args.cells)}
    variants = {name: different(problem, asked) for name, problem in problems.items()}
    keys = {
        k: None for n, p in problems.items() for v in variants[n] for k in plan_of(p, v).kernels
    }
    for text in compile_ahead(list(keys), args.workers):
        print(text, file=sys.stderr)
    import torch

    torch.cuda.init()
    serve(torch.cuda.get_device_capability(), ARCH)
    for name, problem in problems.items():
        times = tune_problem(problem, variants[name], args.peers, args.seconds)
        peer = min((t for n, t in times.items() if n in args.peers.split(",")), default=None)
        for variant, us in sorted(times.items(), key=lambda item: item[1]):
            ratio = f"{peer / us:.3f}" if peer else ""
            print(f"{name:28} {variant:60} {us:10.1f} us {ratio}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
