"""Main loops of the Blackwell backward beside those of flash-attn-4, from machine code of the same compiler; needs no GPU.

``python -m bench.blackwell_backward_loops`` compiles both for sm_100a, head dim 128, and prints instructions, waits, posts
and barriers of a step of 128 queries. Fewer instructions are not more speed.
"""

import os
import tempfile
from pathlib import Path

from bench.blackwell_loops import ARCH, HEADS, SEQLEN, SMS, compare
from flash4.jit.inspect import count_resources, disassemble
from tests.host.sass_loops import loops

# Causal, CTAs, in a fixed order.
CALLS = ((False, 2, False), (True, 2, False), (False, 1, False), (True, 1, False), (True, 2, True))
LOOPS = ("mma", "compute", "masked compute", "reduce", "load")
COUNTED = ((), ("SYNCS.PHASECHK",), ("SYNCS.ARRIVE", "UTCBAR"), ("BAR.SYNC",), ("LDL", "STL"))


def theirs(call, folder: str):
    """Compile flash-attn-4's backward without a GPU; machine code goes to ``folder``."""
    causal, ctas, ordered = call
    os.environ |= {
        "FLASH_ATTENTION_ARCH": ARCH,
        "FLASH_ATTENTION_NUM_SMS": str(SMS),
        "CUTE_DSL_ARCH": ARCH,
        "FA_DISABLE_2CTA": str(int(ctas == 1)),
    }
    import cutlass.cute as cute
    import torch
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    compile_, kept = cute.compile, f" --keep-cubin --dump-dir {folder}"
    cute.compile = lambda *args, options="", **named: compile_(
        *args, options=options + kept, **named
    )
    with FakeTensorMode():
        q, k, v, out, dout = (
            torch.empty(1, SEQLEN, HEADS, 128, device="cuda", dtype=torch.bfloat16)
            for _ in range(5)
        )
        lse = torch.empty(1, HEADS, SEQLEN, device="cuda")
        interface._flash_attn_bwd(q, k, v, out, dout, lse, causal=causal, deterministic=ordered)


def ours(call, folder: str):
    """Compile our backward."""
    from flash4.jit.compile import compile_kernel
    from flash4.sm100.bwd_config import BackwardConfig

    causal, ctas, ordered = call
    config = BackwardConfig(True, 128, 128, causal, ctas=ctas, ordered=ordered)
    compile_kernel("flash4.sm100.bwd:BackwardSm100", config, ARCH, folder)


def measure(job) -> dict[str, tuple[int, ...]]:
    """Counts of each loop: instructions, waits, posts, barriers, spills."""
    compile_one, call = job
    with tempfile.TemporaryDirectory() as folder:
        compile_one(call, folder)
        found = [disassemble(path) for path in Path(folder).glob("*.cubin")]
    sass = next(x for x in found if x.count("UTCHMMA") > 16 and x.count("MUFU.EX2") >= 64)
    inner = loops(sass)
    compute = [x for x in inner if x.count("MUFU.EX2") >= 64 and x.count("LDTM") >= 4]
    kinds = {
        "mma": [x for x in inner if x.count("UTCHMMA") >= 16 and x.count("UTCBAR") >= 3],
        "compute": compute,
        "masked compute": compute[1:] if len(compute[1:2] and compute[1].names) < 800 else [],
        "reduce": [x for x in inner if x.count("UBLKRED", "UBLKPF", "UTMAREDG", "RED")],
        "load": [x for x in inner if x.count("UTMALDG") >= 2],
    }
    counts = {
        name: tuple(loop.count(*prefixes) for prefixes in COUNTED)
        for name, loops_of_role in kinds.items()
        for loop in loops_of_role[:1]
    }
    return {**counts, "kernel": (count_resources(sass).instructions,)}


def main():
    """Compile and print."""
    calls = {}
    for causal, ctas, ordered in CALLS:
        order = ", deterministic" if ordered else ""
        title = f"{'causal' if causal else 'full'}, {ctas} CTA{'s' * (ctas > 1)}{order}"
        calls[title] = theirs, ours, (causal, ctas, ordered)
    compare(calls, measure, "instructions / waits / posts / barriers / spills", LOOPS)


if __name__ == "__main__":
    main()
