"""Random problems through the public function, against the reference, element by element.

With pytest a few of them, drawn by Hypothesis, which shrinks what fails. As a script many of them,
all kernels compiled beforehand in parallel::

    python -m tests.gpu.test_fuzz --n 1000 --seed 1 --workers 14

Every failure is printed as the command that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

import hypothesis
import torch
from hypothesis import strategies as st

import flash4
from flash4.dispatch import architecture, serve
from tests.checks import assert_forward_close, guarded
from tests.strategies import Problem, problems, random_problems

DEVICE = "cuda"
HANG_SECONDS = 120
EXAMPLES = max(1, hypothesis.settings().max_examples // 5)  # each may compile a kernel


@dataclass(frozen=True)
class Case:
    """One call of a run.

    Attributes:
        problem: what is called.
        seed: of its tensors.
        in_place: write into a guarded, NaN-filled buffer.
    """

    problem: Problem
    seed: int
    in_place: bool

    def __str__(self) -> str:
        place = " --in-place" if self.in_place else ""
        return f'python -m tests.gpu.test_fuzz --problem "{self.problem}" --seed {self.seed}{place}'

    def check(self, device: str = DEVICE) -> None:
        """Run it.

        Raises:
            AssertionError: out or lse is wrong, or memory beside out was written.
        """
        problem = self.problem
        inputs = problem.tensors(device, self.seed)
        keywords = problem.keywords(device)
        if self.in_place:
            buffer = guarded(problem.out_shape, problem.dtype, device)
            out, lse = problem.function(*inputs, out=buffer.tensor, return_lse=True, **keywords)
            assert out is buffer.tensor
            buffer.check(written=True)
        else:
            out, lse = problem.function(*inputs, return_lse=True, **keywords)
        assert out.dtype == problem.dtype and lse.dtype == torch.float32
        assert_forward_close(out, lse, inputs, **keywords)


@hypothesis.settings(max_examples=EXAMPLES)
@hypothesis.given(problems(), st.integers(0, 2**32 - 1), st.booleans())
def test_random_problems(problem: Problem, seed: int, in_place: bool):
    Case(problem, seed, in_place).check()


def random_cases(n: int, seed: int) -> list[Case]:
    """Make n cases, half of them in place; the tensors of case i have the seed `seed + i`."""
    return [
        Case(problem, seed + i, in_place=i % 2 == 1)
        for i, problem in enumerate(random_problems(n, seed))
    ]


def kernel_key(problem: Problem, arch: str) -> tuple[str, object, str] | None:
    """Return what the kernel cache is asked for: kernel, config and architecture; None if nothing is."""
    if not all(x.numel() for x in problem.shapes):
        return None
    plan = flash4.explain(*problem.shapes, arch=arch, **problem.keywords("meta"))
    return plan.kernel, plan.config, plan.arch


def compile_one(key: tuple[str, object, str]) -> str | None:
    """Put a kernel into the disk cache, in a process that never touches the GPU; returns the error."""
    from flash4.jit.cache import CACHE

    try:
        CACHE.get(*key)
    except Exception as error:
        return one_line(error)
    return None


def compile_in_turn(keys: queue.SimpleQueue) -> int:
    """Compile keys until there are none, in a child process, and in a new one where it dies."""
    failures, pool = 0, None
    with contextlib.suppress(queue.Empty):
        while True:
            key = keys.get_nowait()
            pool = pool or ProcessPoolExecutor(1, mp_context=get_context("spawn"))
            try:
                error = pool.submit(compile_one, key).result()
            except BrokenProcessPool:
                error, pool = "the compiler ended its process", None
            if error is not None:
                failures += 1
                print(f"DOES NOT COMPILE {key}: {error}", flush=True)
    if pool is not None:
        pool.shutdown()
    return failures


def compile_all(keys: Iterable[tuple[str, object, str]], workers: int) -> int:
    """Compile kernels in parallel, and print those that do not compile; returns their number."""
    waiting = queue.SimpleQueue()
    for key in keys:
        waiting.put(key)
    with ThreadPoolExecutor(workers) as threads:
        return sum(threads.map(compile_in_turn, [waiting] * workers))


def one_line(error: BaseException) -> str:
    """Type and message of an error and of its causes."""
    parts = []
    while error is not None:
        parts.append(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
        error = error.__cause__
    return " <- ".join(parts)


class Watchdog:
    """Ends the process, with the command that repeats it, when a case hangs."""

    def __init__(self, seconds: float = HANG_SECONDS):
        self.seconds, self.timer = seconds, None

    def watch(self, case: Case | None) -> None:
        """Start the clock for a case; None stops it."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if case is not None:
            self.timer = threading.Timer(self.seconds, self._expire, (case,))
            self.timer.daemon = True
            self.timer.start()

    def _expire(self, case: Case) -> None:
        print(f"HANGS for {self.seconds} s: {case}", flush=True)
        os._exit(3)


def device_is_lost(device: str) -> bool:
    """Whether an earlier fault has made the GPU unusable for this process."""
    try:
        torch.ones(1, device=device).item()
    except RuntimeError:
        return True
    return False


def run_all(cases: list[Case], device: str = DEVICE) -> int:
    """Run cases in this process and print those that fail; returns their number."""
    failures, watchdog = 0, Watchdog()
    for i, case in enumerate(cases):
        watchdog.watch(case)
        try:
            case.check(device)
        except Exception as error:
            failures += 1
            print(f"FAILS {case}\n      {one_line(error)}", flush=True)
            if not isinstance(error, AssertionError) and device_is_lost(device):
                traceback.print_exc()
                print(f"the GPU is lost; {len(cases) - i - 1} problems were not run", flush=True)
                failures += len(cases) - i - 1
                break
    watchdog.watch(None)
    return failures


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.test_fuzz", description=__doc__)
    parser.add_argument("--n", type=int, default=1000, help="number of problems")
    parser.add_argument("--seed", type=int, default=0, help="of problems and tensors")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="compiling processes")
    parser.add_argument("--arch", help="kernels of another target than the GPU's, such as sm_90")
    parser.add_argument("--problem", help="one problem instead, such as 'Problem(seqlen_q=3)'")
    parser.add_argument("--in-place", action="store_true", help="with --problem: through out=")
    options = parser.parse_args(arguments)

    if options.problem:
        problem = eval(options.problem, {"Problem": Problem, "torch": torch})
        cases = [Case(problem, options.seed, options.in_place)]
    else:
        cases = random_cases(options.n, options.seed)
    capability = torch.cuda.get_device_capability()
    if options.arch:
        serve(capability, options.arch)
    arch = architecture(capability)
    asked = (kernel_key(case.problem, arch) for case in cases)
    keys = list(dict.fromkeys(key for key in asked if key is not None))
    start = time.perf_counter()
    failures = compile_all(keys, max(1, min(options.workers, len(keys))))
    compiled = time.perf_counter()
    failures += run_all(cases)
    finished = time.perf_counter()
    print(
        f"{len(cases)} problems, {failures} failures, {len(keys)} configs, "
        f"compile {compiled - start:.0f} s, run {finished - compiled:.0f} s"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
