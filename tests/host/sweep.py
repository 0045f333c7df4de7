"""Calls in which all values of some facts meet, and their configs compiled one after the other: looks for spills in main loops."""

import argparse
import multiprocessing
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations, product

import torch

from flash4.common import mods
from flash4.problem import AttentionProblem
from tests import strategies

TENSORS = [torch.zeros(2, 2), torch.zeros(2, 2).int()]
MODS = {
    "no mods": (None, None, []),
    "score_mod": ("relative", None, []),
    "mask_mod": (None, "dilated", []),
    "both mods": ("relative", "dilated", []),
    "mods with tensors": ("heads", "documents", TENSORS),
}
LENGTHS = (
    "",
    "cu_q cu_k",
    "used_q used_k",
    "used_k",
    "cu_q used_k",
    "cu_q cu_k used_q used_k",
)
MASKS = ("full", "causal", "left", "right", "left right", "causal left")


def problem_of(facts: dict, gradients: bool = False) -> AttentionProblem:
    """A call with these facts; those that a sweep does not have are as they usually are."""
    score, mask, tensors = MODS[facts["mods"]]
    found = {
        "score_mod": mods.register(strategies.SCORE_MODS[score]) if score else 0,
        "mask_mod": mods.register(strategies.MASK_MODS[mask]) if mask else 0,
        "aux": mods.encode_aux(tensors) if tensors else 0,
    }
    if gradients and score:
        found["score_mod_bwd"] = mods.register(strategies.SCORE_MODS_BWD[score])
    found |= {f"window_{side}": side in facts["mask"] for side in ("left", "right")}
    found |= {name: True for name in facts["lengths"].split()}
    flags = ("softcap", "sink", "alibi", "deterministic")
    found |= {name: facts[name] for name in flags if name in facts}
    if facts.get("negative scale"):
        found["negative_scale"] = True
    heads, rows = facts.get("heads per KV head", 1), facts.get("rows", 4096)
    return AttentionProblem(
        torch.bfloat16 if facts["bf16"] else torch.float16,
        *(1, rows, 4096, heads, 1, *facts["head dims"]), "causal" in facts["mask"],
        pack_gqa=None if heads == 1 else True, **found,
    )  # fmt: skip


def covering(facts: dict[str, tuple], strength: int, seed: int) -> list[tuple]:
    """Calls in which all values of any ``strength`` facts meet: each the best of some random ones that hold a missing set."""
    choose, values = random.Random(seed), list(facts.values())
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


def main(description: str, facts: dict[str, tuple], case_of: Callable, look: Callable):
    """Compile and print what is found.

    Args:
        description: of the command.
        facts: name -> values.
        case_of: takes facts by name; returns a config and a target.
        look: takes that; returns counts, or a text why there are none.
    """
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--strength", type=int, default=2)
    options.add_argument("--random", type=int, default=0)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--part", default="0/1")
    options.add_argument("--minutes", type=float, default=float("inf"))
    given = options.parse_args()
    choose = random.Random(given.seed)
    calls = covering(facts, given.strength, given.seed)
    calls += [tuple(map(choose.choice, facts.values())) for _ in range(given.random)]
    part, parts = map(int, given.part.split("/"))
    cases = {case_of(dict(zip(facts, call, strict=True))): call for call in calls[part::parts]}
    print(f"{len(calls)} calls, of which {len(cases)} configs are compiled here", flush=True)
    start, done, bad, outside = time.perf_counter(), 0, 0, [0]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=context) as pool:
        for (case, call), found in zip(cases.items(), pool.map(look, cases)):
            done += 1
            if isinstance(found, str) or found["loop spills"]:
                bad += 1
                what = found if isinstance(found, str) else found["loop spills"]
                print(call, case[0], what, flush=True)
            else:
                outside.append(found["spills"])
            if time.perf_counter() - start > 60 * given.minutes:
                pool.shutdown(cancel_futures=True)
                break
    print(
        f"{done} configs, {bad} of them spill in a main loop or do not compile; outside of loops at most {max(outside)} spills;"
        f" {time.perf_counter() - start:.0f} s"
    )


def looked_at(compile_one: Callable, case) -> dict[str, int] | str:
    """Counts of a config, or why there are none."""
    try:
        return compile_one(case)
    except Exception as error:  # whatever it is, it is a finding
        return f"{type(error).__name__}: {str(error)[:300]}"
