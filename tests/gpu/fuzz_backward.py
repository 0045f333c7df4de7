"""Random gradients through the public function, against the reference, element by element.

All kernels are compiled beforehand, in parallel::

    python -m tests.gpu.fuzz_backward --n 500 --seed 1 --workers 16 --processes 8 --kernels 400

Every failure is printed as the command that repeats it.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys

import torch

from flash4.sm80 import bwd_config
from tests.gpu.fuzzing import compile_and_run, one_problem, parser_of, target, within
from tests.gpu.gradients import DOUTS, GradientCase, is_built
from tests.strategies import random_problems

MAX_SCORES = 2**24  # the reference keeps several matrices of so many float64
CANDIDATES = 60  # of which the one with the most pairs of features that have not met yet is taken
# Head dims of problems with mods, whose kernels are many: one of each kind.
DIMS_OF_MODS = (
    (128, 128, torch.bfloat16),
    (64, 64, torch.float16),
    (192, 128, torch.bfloat16),
)
AMPERE_DIMS_OF_MODS = (
    *DIMS_OF_MODS,
    (256, 256, torch.bfloat16),
)  # whose kernel has other tiles there


def features_of(case: GradientCase) -> frozenset[str]:
    """What a case has beyond a plain call, by names."""
    p, left, right = case.problem, *case.problem.window_size
    given = {
        "causal": p.causal or right == 0,
        "left": left not in (None, -1),
        "right": right not in (None, -1, 0) and not p.causal,
        "softcap": p.softcap,
        "sink": p.sink is not None,
        "alibi": p.alibi is not None,
        "score_mod": p.score_mod is not None,
        "mask_mod": p.mask_mod is not None,
        "aux_tensors": p.reads_tensors,
        "cu_seqlens_q": p.lengths_q is not None,
        "cu_seqlens_k": p.lengths_k is not None,
        "seqused_q": p.used_q is not None,
        "seqused_k": p.used_k is not None,
        "grouped heads": p.ratio > 1,
        "wide heads": max(p.head_dim, p.head_dim_v) > 128,
        "negative scale": (p.softmax_scale or 0) < 0,
        "gradient of lse": case.dlse,
        "deterministic": case.deterministic,
    }
    return frozenset(name for name, present in given.items() if present)


def pairs_of(case: GradientCase) -> set[tuple[str, ...]]:
    """Pairs of its features."""
    return {*itertools.combinations(sorted(features_of(case)), 2)}


def random_cases(
    n: int, seed: int, sequences: bool = False, arch: str = "sm_90a", mods: bool = False
) -> list[GradientCase]:
    """Make n cases for a target, all of them of sequences of different lengths, or with mods, if asked; tensors of case i
    have the seed ``seed + i``.

    Of several that are drawn, the one is taken in which the most pairs of features meet for the first time.
    """
    generator = random.Random(seed)
    drawn = _candidates(generator.choice, seed, sequences, arch, mods)
    cases, met = [], set()
    for i in range(n):
        some = [next(drawn) for _ in range(CANDIDATES if i < n // 2 else 1)]
        best = max(some, key=lambda case: len(pairs_of(case) - met))
        met |= pairs_of(best)
        cases.append(dataclasses.replace(best, seed=seed + i))
    return cases


def _candidates(choose, seed: int, sequences: bool, arch: str, mods: bool):
    """Cases whose gradients are built, without end."""
    dims_of_mods = DIMS_OF_MODS if arch.endswith("a") else AMPERE_DIMS_OF_MODS
    for problem in random_problems(10**9, seed, max_scores=MAX_SCORES):
        has_mods = problem.score_mod is not None or problem.mask_mod is not None
        if sequences and not problem.varlen or mods and not has_mods:
            continue
        if has_mods:
            head_dim, head_dim_v, dtype = choose(dims_of_mods)
            changes = dict(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
            problem = dataclasses.replace(problem, **changes)
        if is_built(problem, arch):
            flags = choose((False, False, True)), choose((False,) * 5 + (True,))
            yield GradientCase(problem, 0, choose(DOUTS), *flags)


def other_flags(choose, case: GradientCase) -> GradientCase:
    """With another gradient of out, which no kernel knows."""
    return dataclasses.replace(case, dout=choose(DOUTS))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = parser_of("tests.gpu.fuzz_backward", __doc__)
    parser.add_argument("--sequences", action="store_true", help="of different lengths, all")
    parser.add_argument("--mods", action="store_true", help="in all")
    parser.add_argument("--dout", choices=DOUTS, default="contiguous", help="with --problem")
    parser.add_argument("--dlse", action="store_true", help="with --problem")
    parser.add_argument("--deterministic", action="store_true", help="with --problem")
    parser.add_argument(
        "--two-roles", action="store_true", help="Ampere's, for however few tiles of keys"
    )
    options = parser.parse_args(arguments)
    if options.two_roles:
        if options.processes:
            parser.error("--two-roles is for this process")
        bwd_config.FEW_TILES = 0
    arch = target(options)
    if options.problem:
        flags = (options.dout, options.dlse, options.deterministic)
        cases = [GradientCase(one_problem(options.problem), options.seed, *flags)]
    else:
        cases = random_cases(options.n, options.seed, options.sequences, arch, options.mods)
    cases, keys = within(cases, options.kernels, arch, options.seed, other_flags)
    return compile_and_run(cases, keys, options)


if __name__ == "__main__":
    sys.exit(main())
