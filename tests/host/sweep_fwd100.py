"""Compile many kinds of config of the Blackwell forward, and look for spills in main loops; by hand, as it takes long.

``python -m tests.host.sweep_fwd100`` takes a set of calls in which every two facts (head dims, mask, cap, lengths, target, ...)
meet in all their values; ``--strength 3`` every three; ``--random N`` N calls more, of any combination. What dispatch can choose
is about two million configs, of which nobody compiles all. ``--part I/N`` takes a share of the work.
"""

import argparse
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations, product

import torch

from flash4.common import mods
from flash4.problem import AttentionProblem
from tests import strategies
from tests.host.test_compile_fwd100 import CHOICES, compile_one

TENSORS = [torch.zeros(2, 2), torch.zeros(2, 2).int()]
MODS = {
    "no mods": (None, None, []),
    "score_mod": ("relative", None, []),
    "mask_mod": (None, "dilated", []),
    "both mods": ("relative", "dilated", []),
    "mods with tensors": ("heads", "documents", TENSORS),
}
FACTS = {
    "head dims": tuple(product((64, 128, 192, 256), (64, 128, 256))),
    "target": tuple(CHOICES),
    "rows": (100, 4096, 8192),
    "bf16": (True, False),
    "mask": ("full", "causal", "left", "right", "left right", "causal left"),
    "softcap": (False, True),
    "sink": (False, True),
    "alibi": (False, True),
    "negative scale": (False, True),
    "mods": tuple(MODS),
    "lengths": (
        "",
        "cu_q cu_k",
        "used_q used_k",
        "used_k",
        "cu_q used_k",
        "cu_q cu_k used_q used_k",
    ),
    "heads per KV head": (1, 2, 8, 64),
}


def case_of(call: tuple):
    """(config, target) of a call."""
    facts = dict(zip(FACTS, call, strict=True))
    score, mask, tensors = MODS[facts["mods"]]
    mods_of = {
        "score_mod": mods.register(strategies.SCORE_MODS[score]) if score else 0,
        "mask_mod": mods.register(strategies.MASK_MODS[mask]) if mask else 0,
        "aux": mods.encode_aux(tensors) if tensors else 0,
    }
    flags = {f"window_{side}": side in facts["mask"] for side in ("left", "right")}
    flags |= {name: True for name in facts["lengths"].split()}
    sizes = (1, facts["rows"], 4096, facts["heads per KV head"], 1, *facts["head dims"])
    problem = AttentionProblem(
        torch.bfloat16 if facts["bf16"] else torch.float16, *sizes, "causal" in facts["mask"],
        negative_scale=facts["negative scale"], pack_gqa=None if facts["heads per KV head"] == 1 else True,
        softcap=facts["softcap"], sink=facts["sink"], alibi=facts["alibi"], **mods_of, **flags,
    )  # fmt: skip
    return CHOICES[facts["target"]](problem)[0], facts["target"]


def covering(strength: int, seed: int) -> list[tuple]:
    """Calls in which all values of any ``strength`` facts meet: each the best of some random ones that hold a missing set."""
    choose, values = random.Random(seed), list(FACTS.values())
    missing = {
        tuple(zip(places, chosen, strict=True))
        for places in combinations(range(len(values)), strength)
        for chosen in product(*(values[i] for i in places))
    }
    calls = []
    while missing:
        wanted = dict(choose.choice(sorted(missing, key=str)))
        drawn = [
            tuple(wanted.get(i, choose.choice(options)) for i, options in enumerate(values))
            for _ in range(40)
        ]
        found = [set(combinations(enumerate(call), strength)) & missing for call in drawn]
        best = max(range(len(drawn)), key=lambda i: len(found[i]))
        calls.append(drawn[best])
        missing -= found[best]
    return calls


def look(case) -> dict[str, int] | str:
    """Counts of a config, or why there are none."""
    try:
        return compile_one(case)
    except Exception as error:  # whatever it is, it is a finding
        return f"{type(error).__name__}: {str(error)[:300]}"


def main():
    """Compile and print what is found."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--strength", type=int, default=2)
    options.add_argument("--random", type=int, default=0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--part", default="0/1")
    options.add_argument("--minutes", type=float, default=float("inf"))
    given = options.parse_args()
    choose = random.Random(given.seed)
    calls = covering(given.strength, given.seed)
    calls += [tuple(map(choose.choice, FACTS.values())) for _ in range(given.random)]
    part, parts = map(int, given.part.split("/"))
    cases = {case_of(call): call for call in calls[part::parts]}
    print(f"{len(calls)} calls, of which {len(cases)} configs are compiled here", flush=True)
    start, done, bad, outside = time.perf_counter(), 0, 0, []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=context) as pool:
        for (case, call), found in zip(cases.items(), pool.map(look, cases)):
            done += 1
            if isinstance(found, str) or found["loop spills"]:
                bad += 1
                print(
                    call,
                    case[0],
                    found if isinstance(found, str) else found["loop spills"],
                    flush=True,
                )
            else:
                outside.append(found["spills"])
            if time.perf_counter() - start > 60 * given.minutes:
                pool.shutdown(cancel_futures=True)
                break
    print(
        f"{done} configs, {bad} of them spill in a main loop or do not compile; outside of loops at most {max(outside)} spills;"
        f" {time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
