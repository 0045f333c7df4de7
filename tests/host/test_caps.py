"""tanh of scaled scores: its polynomials, and how the simulator and the kernel choose among them."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flash4.common import numerics
from flash4.common.numerics import LOG2E
from flash4.sim.sm90_fwd import WARP_ROWS, cap_scores, near_scores, part_scores
from flash4.sm90.fwd_cap import BELOW, NEAR_OUTER, ROOM_LOG2, SMALL_OUTER
from flash4.sm90.fwd_config import TRUSTED_LOG2

LIMIT = 4e-6  # relative, of what a cap gives: what the LSE is held to


@pytest.mark.parametrize(
    ("coefficients", "end", "error"),
    [
        (numerics.TANH_NEAR, numerics.TANH_NEAR_END, 1.5e-6),
        (numerics.TANH_MIDDLE, numerics.TANH_MIDDLE_END, 1.2e-6),
    ],
    ids=["near", "middle"],
)
def test_polynomials(coefficients, end, error):
    """A dense grid, and ten binades down to where the error is that of the first coefficient."""
    x = np.concatenate([np.linspace(0, end, 2_000_001)[1:], end * 2.0 ** -np.arange(0, 10, 1e-4)])
    got = x * np.polynomial.polynomial.polyval(x * x, coefficients)
    found = np.abs(got / np.tanh(x) - 1).max()
    assert error / 1.1 < found <= error, "the least error, neither more nor less than stated"


@pytest.mark.parametrize("used", [1e-4, 0.1, 0.3, 0.32, 0.8, 0.82, 3.0, 50.0])
def test_all_ways_agree(used):
    """Each warp's largest score uses ``used`` of the cap, at an end of a way or inside it."""
    x = np.linspace(-used, used, 2 * WARP_ROWS * 4096 + 1)[1:].reshape(2 * WARP_ROWS, 4096)
    check(x, 0.01, 30.0)


@given(
    used=st.floats(-6, 2).map(lambda e: 10.0**e),
    inner=st.floats(-37, 30).map(lambda e: 10.0**e),
    outer=st.floats(-36, 30).map(lambda e: 10.0**e),
)
def test_factors_of_any_size(used, inner, outer):
    assume(used / inner < float(np.finfo(np.float32).max))  # or there is no such score
    x = np.linspace(-used, used, WARP_ROWS * 16).reshape(WARP_ROWS, 16)
    check(x, inner, outer)


def check(x, inner, outer):
    """cap_scores of x / inner is outer tanh(x)."""
    inner, outer = np.float32(inner), np.float32(outer)
    s = (x / np.float64(inner)).astype(np.float32)
    got = cap_scores(s, inner, outer).astype(np.float64)
    expected = np.float64(outer) * np.tanh(s.astype(np.float64) * inner)
    assert (np.abs(got - expected) <= LIMIT * np.abs(expected) + 1e-37).all()


def test_warps_choose_for_themselves():
    """A large score has its own warp take the long way, and no other."""
    s = np.full((2 * WARP_ROWS, 16), 0.3, np.float32)
    near = cap_scores(s, np.float32(0.5), np.float32(1))
    s[3, 5] = 10.0
    got = cap_scores(s, np.float32(0.5), np.float32(1))
    assert (got[WARP_ROWS:] == near[WARP_ROWS:]).all()
    assert (got[:WARP_ROWS] != near[:WARP_ROWS]).all()
    s[3, 5] = np.nan
    got = cap_scores(s, np.float32(0.5), np.float32(1))
    assert np.isnan(got).sum() == 1 and (got[WARP_ROWS:] == near[WARP_ROWS:]).all()


CAPS = np.float64(LOG2E) * np.concatenate(
    [[20.0, 25, 30, 40, 50, 55, 60, 100, 500], 10.0 ** np.arange(3, 6.1, 0.5)]
)


def near(x):
    """The near polynomial, in float64."""
    return x * np.polynomial.polynomial.polyval(x * x, numerics.TANH_NEAR)


@pytest.mark.parametrize("outer", CAPS, ids=lambda outer: f"{outer / LOG2E:.0f}")
def test_what_is_below_the_near_polynomial(outer):
    """The error of exp2 there, of float64 and of the kernel's float32, by its logarithm: it is far too small for float64."""
    x = -np.concatenate(
        [np.linspace(numerics.TANH_NEAR_END, 3, 1_000_001), np.geomspace(3, 1e4, 10_001)]
    )
    inner, outer = np.float32(2**-4), np.float32(outer)
    s = (x / inner).astype(np.float32)
    x = s.astype(np.float64) * inner
    right = outer * np.tanh(x)
    limit = BELOW[0] - BELOW[1] * np.float64(outer)
    for got in (outer * near(x), near_scores(s, inner, outer).astype(np.float64)):
        with np.errstate(divide="ignore"):
            factor = np.log2(-np.expm1(-np.abs(got - right) * np.log(2)))
        # Float32 cannot say scores of a large cap better than this, near or not.
        own = right + np.log2(np.float64(outer) * 2**-22)
        assert ((np.maximum(got, right) + factor <= limit) | (own >= limit)).all()
        if outer < 60 * LOG2E:
            assert (own < limit).mean() > 0.9


def test_the_bound_below_is_no_larger_than_it_must_be():
    x = -np.linspace(numerics.TANH_NEAR_END, 3, 100_001)
    error = np.abs(np.exp2(NEAR_OUTER * near(x)) - np.exp2(NEAR_OUTER * np.tanh(x))).max()
    assert 0.5 < error / 2 ** (BELOW[0] - BELOW[1] * NEAR_OUTER) <= 1


def test_the_near_polynomial_rises():
    """So that P beyond its end is more than P of its end; by its derivative, which is a parabola of x^2."""
    c0, c1, c2 = numerics.TANH_NEAR
    assert (3 * c1) ** 2 < 4 * c0 * (5 * c2)
    inner, outer = np.float32(2**-4), np.float32(30 * LOG2E)
    s = np.geomspace(numerics.TANH_NEAR_END, 1e30, 100_001).astype(np.float32) / inner
    top = outer * np.tanh(numerics.TANH_NEAR_END)
    assert (near_scores(s, inner, outer) >= top * (1 - LIMIT)).all()


@pytest.mark.parametrize("sign", [-1, 1])
def test_parts_that_are_done_again(sign):
    """With the largest errors that the hardware's exp2 and reciprocal may have."""
    x = np.concatenate([np.linspace(-12, 12, 400_001), [-1e30, 1e30]]).astype(np.float32)
    inner, outer = np.float32(2**-4), np.float32(SMALL_OUTER)
    right = np.float64(outer) * np.tanh(x.astype(np.float64))
    with np.errstate(over="ignore"):
        e = np.exp2(x * np.float32(2 * LOG2E)) * np.float32(1 + sign * 2**-22)
    r = np.float32(1) / (e + np.float32(1)) * np.float32(1 + sign * 2**-23)
    for got in (r * (-2 * outer) + outer, part_scores(x / inner, inner, outer)):
        assert got.dtype == np.float32
        assert np.abs(got - right).max() <= 5.2e-7 * outer
    assert np.isnan(part_scores(x / inner, inner, np.float32(SMALL_OUTER * 1.01))).all()


def test_shifts_of_a_small_cap_leave_room_on_both_sides():
    for outer in (NEAR_OUTER, SMALL_OUTER):
        shift = outer - ROOM_LOG2  # at the least
        assert outer - shift + 13 < TRUSTED_LOG2 and -outer - shift >= -126
