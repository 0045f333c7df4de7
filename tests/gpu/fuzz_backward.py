"""Random gradients through the public function, against the reference, element by element.

All kernels are compiled beforehand, in parallel::

    python -m tests.gpu.fuzz_backward --n 500 --seed 1 --workers 16

Every failure is printed as the command that repeats it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time

import torch

from flash4.dispatch import architecture, serve
from tests.gpu.gradients import DOUTS, GradientCase, is_built
from tests.gpu.test_fuzz import compile_all, run_all
from tests.strategies import Problem, random_problems

MAX_SCORES = 2**24  # the reference keeps several matrices of so many float64


def random_cases(n: int, seed: int, sequences: bool = False) -> list[GradientCase]:
    """Make n cases, all of them of sequences of different lengths if asked; tensors of case i have the seed ``seed + i``."""
    choose = random.Random(seed).choice
    drawn = random_problems(1000 * n, seed, max_scores=MAX_SCORES)
    wanted = (p for p in drawn if p.varlen or not sequences)
    problems = itertools.islice((p for p in wanted if is_built(p)), n)
    return [
        GradientCase(
            problem,
            seed + i,
            choose(DOUTS),
            choose((False, False, True)),
            choose((False,) * 5 + (True,)),
        )
        for i, problem in enumerate(problems)
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.fuzz_backward", description=__doc__)
    parser.add_argument("--n", type=int, default=500, help="number of problems")
    parser.add_argument("--seed", type=int, default=0, help="of problems and tensors")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="compiling processes")
    parser.add_argument("--arch", help="kernels of another target than the GPU's, such as sm_90")
    parser.add_argument("--sequences", action="store_true", help="of different lengths, all")
    parser.add_argument("--problem", help="one problem instead, such as 'Problem(seqlen_q=3)'")
    parser.add_argument("--dout", choices=DOUTS, default="contiguous", help="with --problem")
    parser.add_argument("--dlse", action="store_true", help="with --problem")
    parser.add_argument("--deterministic", action="store_true", help="with --problem")
    options = parser.parse_args(arguments)
    if options.problem:
        problem = eval(options.problem, {"Problem": Problem, "torch": torch})
        flags = (options.dout, options.dlse, options.deterministic)
        cases = [GradientCase(problem, options.seed, *flags)]
    else:
        cases = random_cases(options.n, options.seed, options.sequences)
    start = time.perf_counter()
    capability = torch.cuda.get_device_capability()
    if options.arch:
        serve(capability, options.arch)
    arch = architecture(capability)
    keys = list(dict.fromkeys(key for case in cases for key in case.kernels(arch)))
    failures = compile_all(keys, max(1, min(options.workers, len(keys))))
    compiled = time.perf_counter()
    failures += run_all(cases)
    finished = time.perf_counter()
    print(
        f"{len(cases)} problems, {failures} failures, {len(keys)} kernels, "
        f"compile {compiled - start:.0f} s, run {finished - compiled:.0f} s"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
