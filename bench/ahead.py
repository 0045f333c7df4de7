"""Kernels compiled before anything is timed, in processes that never touch the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from bench.protocol import describe
from bench.shapes import Cell

HANG_SECONDS = 60  # to compile one kernel
Key = tuple[str, Any, str]  # kernel, config, architecture: what the kernel cache is asked for


def keys_of(cell: Cell, direction: str, arch: str, workers: int) -> list[Key]:
    """What flash4 launches for a cell on a target with ``workers`` multiprocessors; backwards follow a forward."""
    from flash4.dispatch import plan_backward, plan_forward

    plan = plan_forward(cell.problem(), arch, workers)
    keys = [(plan.kernel, plan.config, plan.arch)]
    if direction == "backward":
        keys += plan_backward(cell.problem(), arch, workers).kernels
    return keys


def compile_one(key: Key) -> str | None:
    """Put a kernel into the disk cache; returns why it does not compile, or None."""
    from flash4.jit.cache import CACHE

    try:
        CACHE.get(*key)
    except Exception as error:
        return f"{key[0]} does not compile as {key[1]}: {describe(error)}"
    return None


def compile_ahead(keys: Sequence[Key], workers: int) -> list[str]:
    """Compile kernels in parallel; returns what did not compile, which will say so again at its first call."""
    if not keys or workers < 1:
        return []
    with ProcessPoolExecutor(min(workers, len(keys)), mp_context=get_context("spawn")) as pool:
        try:
            found = list(pool.map(compile_one, keys, timeout=HANG_SECONDS * len(keys)))
        except (BrokenProcessPool, TimeoutError) as error:
            found = [f"not all kernels were compiled beforehand: {describe(error)}"]
    return [text for text in found if text is not None]
