"""What the fuzzes share: kernels compiled beforehand in parallel, cases in processes that a fault may end."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import queue
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Protocol

import torch

from flash4.dispatch import architecture, serve
from tests.strategies import Problem, resized

DEVICE = "cuda"
HANG_SECONDS = 120
VARIANTS_TRIED = 20
Key = tuple[str, object, str]  # kernel, config, architecture: what the kernel cache is asked for


class FuzzCase(Protocol):
    """A call to check, a frozen dataclass; ``str()`` of it is the command that repeats it."""

    problem: Problem
    seed: int

    def kernels(self, arch: str) -> list[Key]:
        """All that it launches."""

    def check(self, device: str = DEVICE) -> None:
        """Run it; AssertionError where it is wrong."""


def within(
    cases: Iterable[FuzzCase], most: int, arch: str, seed: int, changed: Callable
) -> tuple[list[FuzzCase], list[Key]]:
    """Return cases that need no more than so many kernels, and these.

    A case that would need one more gives way to one before it with other sizes, lengths, windows and layouts,
    and with what ``changed(choose, case)`` changes.
    """
    choose, chosen, known = random.Random(seed).choice, [], {}
    for case in cases:
        needed = dict.fromkeys(case.kernels(arch))
        if len(known | needed) > most:
            case = _variant(choose, case.seed, chosen, known, arch, changed)
            needed = {}
        known |= needed
        chosen.append(case)
    return chosen, list(known)


def _variant(choose, seed, chosen, known, arch, changed) -> FuzzCase:
    """Another case of known kernels."""
    while True:
        base = choose(chosen)
        for _ in range(VARIANTS_TRIED):
            problem = resized(choose, base.problem, max_scores=max(2**20, base.problem.scores))
            case = changed(choose, dataclasses.replace(base, problem=problem, seed=seed))
            if known.keys() >= set(case.kernels(arch)):
                return case


def compile_one(key: Key) -> str | None:
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


def compile_all(keys: Iterable[Key], workers: int) -> int:
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

    def watch(self, case: FuzzCase | None) -> None:
        """Start the clock for a case; None stops it."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if case is not None:
            self.timer = threading.Timer(self.seconds, self._expire, (case,))
            self.timer.daemon = True
            self.timer.start()

    def _expire(self, case: FuzzCase) -> None:
        print(f"HANGS for {self.seconds} s: {case}", flush=True)
        os._exit(3)


def device_is_lost(device: str) -> bool:
    """Whether an earlier fault has made the GPU unusable for this process."""
    try:
        torch.ones(1, device=device).item()
    except RuntimeError:
        return True
    return False


def run_in_processes(cases: list[FuzzCase], processes: int, arch: str | None) -> int:
    """Run cases in so many processes, 0 is this one, and print those that fail; returns their number.

    Args:
        cases: to run.
        processes: at the same time.
        arch: target that the kernels are compiled for, where it is not the GPU's.
    """
    if processes < 1:
        return run_all(cases)
    parts = [cases[i::processes] for i in range(processes)]
    with ThreadPoolExecutor(processes) as threads:
        return sum(threads.map(lambda part: _run_in_child(part, arch), parts))


def _run_in_child(cases: list[FuzzCase], arch: str | None) -> int:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(_child, cases, arch).result()
        except BrokenProcessPool:
            print(f"A PROCESS ENDED, of {len(cases)} problems", flush=True)
            return len(cases)


def _child(cases: list[FuzzCase], arch: str | None) -> int:
    if arch:
        serve(torch.cuda.get_device_capability(), arch)
    return run_all(cases)


def run_all(cases: list[FuzzCase], device: str = DEVICE) -> int:
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


def parser_of(program: str, description: str) -> argparse.ArgumentParser:
    """Options that all fuzzes have."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--n", type=int, default=1000, help="number of problems")
    parser.add_argument("--seed", type=int, default=0, help="of problems and tensors")
    parser.add_argument("--kernels", type=int, default=10**9, help="most kernels to compile")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="compiling processes")
    parser.add_argument("--processes", type=int, default=0, help="that run; 0 is this one")
    parser.add_argument("--arch", help="kernels of another target than the GPU's, such as sm_90")
    parser.add_argument("--problem", help="one problem instead, such as 'Problem(seqlen_q=3)'")
    return parser


def target(options: argparse.Namespace) -> str:
    """Architecture that kernels are compiled for; calls of this process get it from now on."""
    capability = torch.cuda.get_device_capability()
    if options.arch:
        serve(capability, options.arch)
    return architecture(capability)


def compile_and_run(cases: list[FuzzCase], keys: list[Key], options: argparse.Namespace) -> int:
    """Do all, and print a summary; returns the exit status."""
    start = time.perf_counter()
    failures = compile_all(keys, max(1, min(options.workers, len(keys))))
    compiled = time.perf_counter()
    failures += run_in_processes(cases, options.processes, options.arch)
    finished = time.perf_counter()
    print(
        f"{len(cases)} problems, {failures} failures, {len(keys)} kernels, "
        f"compile {compiled - start:.0f} s, run {finished - compiled:.0f} s"
    )
    return 1 if failures else 0


def one_problem(text: str) -> Problem:
    """Problem of ``--problem``."""
    names: dict[str, Any] = {"Problem": Problem, "torch": torch}
    return eval(text, names)
