"""tanh of scaled scores: its polynomials, and how the simulator and the kernel choose among them."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flash4.common import numerics
from flash4.sim.sm90_fwd import WARP_ROWS, cap_scores

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
