"""Commands about compiled kernels: compile ahead, list, clear."""

import time
from collections import Counter

import flash4
from flash4.jit.cache import CACHE, cache_dir


def add_commands(add, problem, run_precompile):
    """Add the parsers; ``add`` is (name, function, text, *parents) -> parser."""
    text = "compile what a call needs into the disk cache, in parallel, with or without a GPU"
    ahead = add("precompile", run_precompile, text, problem)
    ahead.add_argument("--arch", help="target such as sm_90a; default: this machine's GPU")
    ahead.add_argument("--backward", action="store_true", help="its gradients too")
    ahead.add_argument(
        "--any-length", action="store_true", help="for any number of queries and keys"
    )
    text = "processes at a time; default: one for each CPU"
    ahead.add_argument("--workers", type=int, metavar="N", help=text)
    text = "memory of all processes together; default: half of what is free"
    ahead.add_argument("--memory-gib", type=float, metavar="X", help=text)
    text = "list the compiled kernels on disk and what they take, or remove them"
    cache = add("cache", show, text)
    cache.add_argument("--clear", action="store_true", help="remove all of them")
    cache.add_argument(
        "--stale", action="store_true", help="only those that this version of flash4 never loads"
    )


def precompile(arguments, call: dict) -> int:
    """``precompile`` of one call; 1 if something does not compile."""
    a = arguments
    done = flash4.precompile(
        [call],
        arch=a.arch,
        backward=a.backward,
        any_length=a.any_length,
        workers=a.workers,
        memory_gib=a.memory_gib,
        progress=True,
    )
    print(done)
    print(f"in {cache_dir()}")
    return int(bool(done.failed))


def show(arguments) -> int:
    """``cache``."""
    if arguments.clear:
        print(f"removed {CACHE.clear_disk(stale=arguments.stale)} kernels from {cache_dir()}")
        return 0
    entries = [entry for entry in CACHE.entries() if entry.stale or not arguments.stale]
    for entry in entries:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.modified))
        stale = " (stale)" if entry.stale else ""
        print(f"{entry.bytes / 1024:8.0f} KiB  {when}  {entry.arch} {entry.kernel}{stale}")
        print(f"               {entry.config}")
    counts = Counter(entry.stale for entry in entries)
    size = sum(entry.bytes for entry in entries) / 2**20
    print(f"{len(entries)} kernels, {counts[True]} of them stale, {size:.1f} MiB in {cache_dir()}")
    return 0
