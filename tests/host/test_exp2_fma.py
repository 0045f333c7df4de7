"""The polynomial for 2^x that Blackwell's forward runs on the FMA units, for every float32 that can differ.

As a script all of them: ``python -m tests.host.test_exp2_fma``; as a test those of the last three binades below 1, and some of
the others. What a whole part adds to the exponent is exact, so that [0, 1) stands for all of them.
"""

import time

import numpy as np
import torch

from flash4.dispatch import plan_forward
from flash4.problem import AttentionProblem
from flash4.sim.sm90_fwd import round_to_16_bit
from flash4.sim.sm100_fwd import exp2_on_fma

BINADES = 24  # below 2^-24 2^x rounds to 1
ERROR = 3.1e-6  # relative; a cubic's is 8.6e-5
SAME_BITS = 0.999  # of bfloat16, and none further than its neighbour
PART = 1 << 21


def binade(exponent: int, step: int = 1):
    """Float32 of [2^-exponent, 2^(1 - exponent)), in parts."""
    first = np.float32(2.0**-exponent).view(np.int32)
    for begin in range(0, 1 << 23, PART):
        yield np.arange(first + begin, first + begin + PART, step, dtype=np.int32).view(np.float32)


def look(x: np.ndarray) -> tuple[float, int, int]:
    """(largest relative error, how many of bfloat16's bits are the same, farthest in units of its last place)."""
    y, exact = exp2_on_fma(x), np.exp2(x.astype(np.float64))
    error = (np.abs(y - exact) / exact).max()
    found, right = (
        round_to_16_bit(z.astype(np.float32), True).view(np.int32) >> 16 for z in (y, exact)
    )
    away = np.abs(found - right)
    return error, int((away == 0).sum()), int(away.max())


def look_at_all(parts) -> tuple[int, float, float, int]:
    """(numbers, largest error, share of the same bits, farthest)."""
    count, error, same, away = 0, 0.0, 0, 0
    for x in parts:
        found = look(x)
        count, same = count + len(x), same + found[1]
        error, away = max(error, found[0]), max(away, found[2])
    return count, error, same / count, away


def test_every_number_of_the_last_binades_and_some_of_the_others():
    parts = (x for exponent in range(1, 4) for x in binade(exponent))
    count, error, same, away = look_at_all(parts)
    assert count == 3 << 23 and error < ERROR and same > SAME_BITS and away <= 1
    others = (x for exponent in range(4, BINADES + 1) for x in binade(exponent, 61))
    _, error, same, away = look_at_all(others)
    assert error < ERROR and same > SAME_BITS and away <= 1


def test_whole_parts_are_exact():
    x = np.linspace(0, 1, 4097, dtype=np.float32)[:-1]
    for whole in (-126, -100, -2, 1, 7, 64, 126):
        shifted = x + np.float32(whole)  # rounds x, so ask for the fraction that is left
        fraction = shifted - np.float32(whole)
        assert (exp2_on_fma(shifted) == np.ldexp(exp2_on_fma(fraction), whole)).all()


def test_exponentials_are_emulated_where_the_special_function_unit_is_the_limit():
    problem = AttentionProblem(torch.bfloat16, 2, 4096, 4096, 8, 8, 128, 128)
    plans = {arch: plan_forward(problem, arch, 132) for arch in ("sm_100a", "sm_103a", "sm_110a")}
    assert {arch: plan.config.poly for arch, plan in plans.items()} == {
        "sm_100a": 4,
        "sm_103a": 0,
        "sm_110a": 4,
    }
    assert "4 of 16 exponentials" in str(plans["sm_100a"])
    assert "all exponentials on the special function unit" in str(plans["sm_103a"])
    assert not any(name == "sm100-fwd" for plan in plans.values() for name, _ in plan.rejected)


if __name__ == "__main__":
    start = time.perf_counter()
    everything = (x for exponent in range(1, BINADES + 1) for x in binade(exponent))
    count, error, same, away = look_at_all(everything)
    print(
        f"{count} numbers: relative error {error:.3g}, {same:.3%} the same in bfloat16, others {away} unit away;",
        f"{time.perf_counter() - start:.0f} s",
    )
