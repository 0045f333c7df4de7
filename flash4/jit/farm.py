"""Compiling many kernels at once, in processes of their own: the DSL compiles one at a time in each."""

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

WORKER_BYTES = 2 << 30  # of one worker that compiles; one that has grown beyond is replaced
SHARE = 0.5  # of the memory that is free, unless the caller says how much


def available_bytes() -> int:
    """Memory that this process may still take: of the machine, and of its control group."""
    free = 4 << 30
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            free = min(free, int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return free


def worker_count(jobs: int, workers: int | None, memory_bytes: int | None) -> int:
    """Processes for so many jobs: at most one a CPU, or as many as asked for, and what fits into the memory.

    Args:
        jobs: kernels to compile.
        workers: most processes; None is one for each CPU that this process may use.
        memory_bytes: what all of them together may take; None is half of what is free.

    Raises:
        ValueError: a number below 1.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if memory_bytes is not None and memory_bytes < 1:
        raise ValueError(f"the memory must be more than 0, got {memory_bytes} bytes")
    cpus = len(os.sched_getaffinity(0)) if workers is None else workers
    memory = SHARE * available_bytes() if memory_bytes is None else memory_bytes
    return max(1, min(jobs, cpus, int(memory // WORKER_BYTES)))


def compile_all(
    keys: Sequence[tuple], workers: int, done: Callable[[tuple, str | None, bool], None]
):
    """Put kernels into the disk cache, each by one of so many processes.

    Args:
        keys: (kernel, config, architecture).
        workers: processes.
        done: called after each with (key, what went wrong or None, whether it was compiled), by one thread at a time.
    """
    jobs, guard = queue.SimpleQueue(), threading.Lock()
    for key in keys:
        jobs.put(key)

    def serve():
        process = None
        while True:
            try:
                key = jobs.get_nowait()
            except queue.Empty:
                break
            process = process or _start()
            problem, compiled, memory = _ask(process, key)
            with guard:
                done(key, problem, compiled)
            if memory is None or memory > WORKER_BYTES:
                _stop(process)
                process = None
        if process is not None:
            _stop(process)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _start() -> subprocess.Popen:
    """A fresh process, not a fork: this one may hold a CUDA context."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "flash4.jit.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def _ask(process, key) -> tuple[str | None, bool, int | None]:
    """(problem, whether it compiled, memory) of one job; no memory if the process died."""
    try:
        pickle.dump(key, process.stdin)
        process.stdin.flush()
        return pickle.load(process.stdout)
    except (EOFError, OSError, pickle.UnpicklingError):
        process.wait()
        return f"the process that compiled it ended with status {process.returncode}", False, None


def _stop(process):
    process.stdin.close()
    process.stdout.close()
    process.wait()
