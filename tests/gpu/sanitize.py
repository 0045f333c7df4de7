"""Forward and backward of small calls under compute-sanitizer, each in a process of its own with a time limit.

    python -m tests.gpu.sanitize                       # memcheck and racecheck of every call
    python -m tests.gpu.sanitize --tool memcheck --call "d128 causal" --seconds 120

Kernels are compiled beforehand, without it. Tensors are allocated one by one, so that memcheck sees what is read or written
beyond them. racecheck knows shared memory only, and not every order that mbarriers and TMA give: it may be alarmed in vain.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.gpu.gradients import GradientCase
from tests.strategies import Problem

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck")
ERRORS = 86  # exit status of the sanitizer where it has found some
SECONDS = 90
BF16 = torch.bfloat16
SMALL = dict(seqlen_q=150, seqlen_k=200)
PACKED = dict(lengths_q=(70, 0, 90, 1), lengths_k=(50, 40, 130, 0), around=(3, 20))
CALLS = {
    "d128 causal": Problem(head_dim=128, head_dim_v=128, dtype=BF16, ratio=2, **SMALL, causal=True),
    "d64 window": Problem(head_dim=64, head_dim_v=64, **SMALL, window_size=(40, 10), sink=0.0),
    "d72 and 96, cap and slopes": Problem(
        head_dim=72, head_dim_v=96, dtype=BF16, **SMALL, softcap=5.0, alibi="by head"
    ),
    "d128 packed": Problem(head_dim=128, head_dim_v=128, dtype=BF16, **PACKED, causal=True),
    "d64 packed, mods": Problem(
        head_dim=64, head_dim_v=64, **PACKED, score_mod="heads", mask_mod="documents"
    ),
    "d128 mods": Problem(
        head_dim=128, head_dim_v=128, dtype=BF16, **SMALL, score_mod="bent", mask_mod="dilated"
    ),
    "d192 and 128": Problem(head_dim=192, head_dim_v=128, dtype=BF16, **SMALL, causal=True),
    "d256": Problem(head_dim=256, head_dim_v=256, dtype=BF16, **SMALL),
    "d192 packed, mods": Problem(head_dim=192, head_dim_v=128, dtype=BF16, **PACKED, score_mod="bent"),
}  # fmt: skip


def run(name: str, deterministic: bool) -> None:
    """A forward and its backward, checked."""
    GradientCase(CALLS[name], dlse=True, deterministic=deterministic).check()


def sanitize(sanitizer: str, tool: str, name: str, seconds: float) -> str:
    """Run a call under a tool; returns what is to be said of it."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(ERRORS), "--print-limit", "20"]
    command += [sys.executable, "-m", "tests.gpu.sanitize", "--run", name]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"not done in {seconds:.0f} s"
    if done.returncode == 0:
        return "clean"
    print(done.stdout[-6000:], done.stderr[-3000:], sep="\n", file=sys.stderr)
    return "ERRORS" if done.returncode == ERRORS else f"failed with {done.returncode}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns 1 if a tool has found something, or a call has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize", description=__doc__)
    parser.add_argument("--tool", choices=TOOLS, help="one of both")
    parser.add_argument("--call", choices=CALLS, help="one of all")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a call under a tool")
    parser.add_argument("--jobs", type=int, default=1, help="calls at the same time")
    parser.add_argument("--run", choices=CALLS, help="no tool: run this call, as the tools do")
    options = parser.parse_args(arguments)
    if options.run:
        for deterministic in (False, True):
            run(options.run, deterministic)
        return 0
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        print("compute-sanitizer is not there: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    names = [options.call] if options.call else list(CALLS)
    tools = [options.tool] if options.tool else TOOLS
    asked = [(tool, name) for tool in tools for name in names]

    def compiled(name: str) -> None:
        command = [sys.executable, "-m", "tests.gpu.sanitize", "--run", name]
        subprocess.run(command, cwd=ROOT, check=True)

    def said_of(one: tuple[str, str]) -> str:
        began = time.perf_counter()
        said = sanitize(sanitizer, *one, options.seconds)
        print(f"{one[0]:10s} {one[1]:30s} {said} ({time.perf_counter() - began:.0f} s)", flush=True)
        return said

    with ThreadPoolExecutor(options.jobs) as threads:
        list(threads.map(compiled, names))
        found = list(threads.map(said_of, asked))
    return 0 if all(said == "clean" or said.startswith("not done") for said in found) else 1


if __name__ == "__main__":
    sys.exit(main())
