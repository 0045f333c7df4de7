"""The polynomial for 2^x that Blackwell's forward runs on the FMA units, for every float32 that it can get.

It gets y, for x = 256 y - 127. As a script all of [2^-8, 255/256), which are those that give normal numbers:
``python -m tests.host.test_exp2_fma``; as a test all of x from -63 to 9, and some of the others. What is lost on the way from
a score to y is not looked at here: half a unit in y's last place, 2.6e-6 for x below 1 (``test_fwd100_roles``).
"""

import time

import numpy as np
import pytest
import torch

from flash4.dispatch import plan_forward
from flash4.problem import AttentionProblem
from flash4.sim.sm90_fwd import round_to_16_bit
from flash4.sim.sm100_fwd import exp2_on_fma
from flash4.sm100.fwd_exp import LOWEST, RANGE

ERROR = 3.1e-6  # relative; a cubic's is 8.6e-5
SAME_BITS = 0.999  # of bfloat16, and none further than its neighbour
FIRST, END = 1.0001 / RANGE, 255 / RANGE  # just above 2^-126, the least normal number, and 2^128
PART = 1 << 21


def numbers(begin: float, end: float, step: int = 1):
    """Float32 of [begin, end), in parts."""
    first, last = (int(np.float32(x).view(np.int32)) for x in (begin, end))
    for part in range(first, last, PART * step):
        yield np.arange(part, min(part + PART * step, last), step, dtype=np.int32).view(np.float32)


def look(y: np.ndarray, bounded: bool) -> tuple[float, int, int]:
    """(largest relative error, how many of bfloat16's bits are the same, farthest in units of its last place)."""
    power, exact = exp2_on_fma(y, bounded), np.exp2(RANGE * y.astype(np.float64) + LOWEST)
    error = (np.abs(power - exact) / exact).max()
    found, right = (
        round_to_16_bit(z.astype(np.float32), True).view(np.int32) >> 16 for z in (power, exact)
    )
    away = np.abs(found - right)
    return error, int((away == 0).sum()), int(away.max())


def look_at_all(parts, bounded: bool) -> tuple[int, float, float, int]:
    """(numbers, largest error, share of the same bits, farthest)."""
    count, error, same, away = 0, 0.0, 0, 0
    for y in parts:
        found = look(y, bounded)
        count, same = count + len(y), same + found[1]
        error, away = max(error, found[0]), max(away, found[2])
    return count, error, same / count, away


@pytest.mark.parametrize("bounded", [False, True])
def test_every_number_of_those_that_sums_are_made_of_and_some_of_the_others(bounded):
    count, error, same, away = look_at_all(numbers(1 / 4, 136 / RANGE), bounded)
    assert count > 1 << 23 and error < ERROR and same > SAME_BITS and away <= 1
    _, error, same, away = look_at_all(numbers(FIRST, END, 61), bounded)
    assert error < ERROR and same > SAME_BITS and away <= 1


@pytest.mark.parametrize("bounded", [False, True])
def test_below_the_normal_numbers_it_goes_down_to_zero(bounded):
    y = np.concatenate([[np.float32(0)], *numbers(2.0**-30, 1 / RANGE, 61)])
    power = exp2_on_fma(y, bounded)
    assert power[0] == 0 and (power >= 0).all() and (power <= 2.0**-126).all()


def test_whole_parts_are_exact():
    fraction = np.linspace(0, 1, 4097, dtype=np.float32)[:-1]
    one = exp2_on_fma((fraction - np.float32(LOWEST)) / np.float32(RANGE), bounded=True)
    assert one[0] == 1
    for whole in (-126, -100, -2, 1, 7, 64, 126):
        y = (fraction + np.float32(whole - LOWEST)) / np.float32(RANGE)
        assert (exp2_on_fma(y, bounded=True) == np.ldexp(one, whole)).all()


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
    for bounded in (True, False):
        count, error, same, away = look_at_all(numbers(FIRST, END), bounded)
        print(
            f"{count} numbers, {'known to be below 2^128' if bounded else 'of any size'}: relative error {error:.3g},",
            f"{same:.3%} the same in bfloat16, others {away} unit away; {time.perf_counter() - start:.0f} s",
        )
