"""Main loops of the Blackwell forward beside those of flash-attn-4, from machine code of the same compiler; needs no GPU.

``python -m bench.blackwell_loops`` compiles both for sm_100a, with LSE, and prints instructions, waits and commits for 128
scores (of both tiles, where a loop has two). flash-attn-4 asks the driver for the number of multiprocessors while it
compiles; it is told that of a B200.
"""

import argparse
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from flash4.jit.inspect import count_resources, disassemble
from tests.host.sass_loops import loops

ARCH, SMS = "sm_100a", 148
CALLS = ((128, 128, False), (128, 128, True), (192, 128, True), (64, 64, False))
SEQLEN, HEADS = 8192, 16
LOOPS = ("softmax", "softmax, looking", "softmax, masked", "mma", "correction")


def theirs(call, folder: str):
    """Compile flash-attn-4's forward without a GPU; machine code goes to ``folder``."""
    os.environ |= {
        "FLASH_ATTENTION_ARCH": ARCH,
        "FLASH_ATTENTION_NUM_SMS": str(SMS),
        "CUTE_DSL_ARCH": ARCH,
    }
    import cutlass
    import cutlass.cute as cute
    import torch
    from cutlass import Int32
    from flash_attn.cute import interface, tile_scheduler
    from torch._subclasses.fake_tensor import FakeTensorMode

    def grid(params, *, loc=None, ip=None):
        most = SMS // params.cluster_shape_m * params.cluster_shape_m
        blocks = params.total_blocks_cluster * params.cluster_shape_m
        return cutlass.min(most, blocks), Int32(1), Int32(1)

    tile_scheduler.StaticPersistentTileScheduler.get_grid_shape = staticmethod(grid)
    compile_, kept = cute.compile, f" --keep-cubin --dump-dir {folder}"
    cute.compile = lambda *args, options="", **named: compile_(
        *args, options=options + kept, **named
    )
    d, dv, causal = call
    with FakeTensorMode():
        q, k, v = (
            torch.empty(1, SEQLEN, HEADS, n, device="cuda", dtype=torch.bfloat16)
            for n in (d, d, dv)
        )
        interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)


def ours(call, folder: str):
    """Compile our forward with the config that the call gets."""
    import torch

    from flash4.dispatch import plan_forward
    from flash4.jit.compile import compile_kernel
    from flash4.problem import AttentionProblem

    d, dv, causal = call
    sizes = (1, SEQLEN, SEQLEN, HEADS, HEADS, d, dv)
    plan = plan_forward(AttentionProblem(torch.bfloat16, *sizes, causal), ARCH, SMS)
    compile_kernel(plan.kernel, plan.config, ARCH, folder)


def measure(job) -> dict[str, tuple[int, ...]]:
    """Counts of each loop: instructions, waits, arrivals of threads, commits, spills."""
    compile_one, call = job
    with tempfile.TemporaryDirectory() as folder:
        compile_one(call, folder)
        cubin = max(Path(folder).glob("*.cubin"), key=lambda path: path.stat().st_size)
        sass = disassemble(cubin)
    inner = loops(sass)
    softmax = [x for x in inner if x.count("MUFU.EX2") > 32 and x.count("LDTM") in (4, 5)]
    masked = [x for x in softmax if x.count("ISETP") + x.count("R2P", "SEL", "FSEL") > 64]
    plain = [x for x in softmax if x not in masked]
    looking = [x for x in plain if x.count("FMNMX", "FMNMX3") > 48]
    kinds = {
        "softmax": plain[:1],
        "softmax, looking": looking[:1],
        "softmax, masked": masked[:1],
        "mma": [x for x in inner if x.count("UTCHMMA") >= 8 and x.count("UTCBAR") >= 4][:1],
        "correction": [
            x for x in inner if x.count("LDTM") >= 4 and x.count("STTM") and not x.count("MUFU")
        ][:1],
    }
    counts = {
        name: tuple(
            loop.count(*prefixes)
            for prefixes in (
                (),
                ("SYNCS.PHASECHK",),
                ("SYNCS.ARRIVE",),
                ("UTCBAR",),
                ("LDL", "STL"),
            )  # fmt: skip
        )
        for name, found in kinds.items()
        for loop in found
    }
    return {**counts, "kernel": (count_resources(sass).instructions,)}


def compare(calls: dict, measure, heading: str, names) -> None:
    """Compile every call twice and print what is counted of both, side by side.

    Args:
        calls: by what is printed of it, (theirs, ours, call); both compile a call into a folder.
        measure: from (compile, call) to counts by loop.
        heading: what the counts are.
        names: of the loops.
    """
    options = argparse.ArgumentParser()
    options.add_argument("--workers", type=int, default=2)
    workers = options.parse_args().workers
    jobs = [(compile_one, call) for *both, call in calls.values() for compile_one in both]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        found = list(pool.map(measure, jobs))
    print(f"{heading}; flash-attn-4 | flash4")
    for i, title in enumerate(calls):
        print(title)
        for name in (*names, "kernel"):
            both = [" / ".join(map(str, x.get(name, ("-",)))) for x in found[2 * i : 2 * i + 2]]
            print(f"  {name:18} {both[0]:>24} | {both[1]}")


def main():
    """Compile and print."""
    calls = {
        f"{d}/{dv} {'causal' if causal else 'full'}": (theirs, ours, (d, dv, causal))
        for d, dv, causal in CALLS
    }
    compare(calls, measure, "instructions / waits / arrivals / commits / spills", LOOPS)


if __name__ == "__main__":
    main()
