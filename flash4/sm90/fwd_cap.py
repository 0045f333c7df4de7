"""Caps of scores in the Hopper forward: outer tanh(inner s), and P of capped scores."""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flash4.common import numerics
from flash4.common.numerics import (
    LOG2E,
    NEAR_LOWEST,
    NEAR_OUTER,
    TANH_MIDDLE,
    TANH_MIDDLE_END,
    TANH_NEAR,
    TANH_NEAR_END,
    usual_factors,
)

ROOM_LOG2 = 50  # of P above the lowest shift
LARGEST_LIFTED = 80


@dataclass(frozen=True)
class Cap:
    """outer tanh(inner s) of a score s."""

    inner: Float32  # of either sign
    outer: Float32  # positive
    factors: tuple  # (k, a, b): with t = k s the near polynomial is t ((t^2 + a)^2 + b)
    cubic: tuple  # (k, b): with t = k s the near polynomial of two terms is t (t^2 + b)
    near_end: Float32  # largest |s| for it; negative if its factors would leave float32
    middle_end: Float32
    near_top: Float32  # capped score there
    lowest: Float32  # see ``NEAR_LOWEST``
    floor: Float32  # of the shift

    @staticmethod
    def of(inner, outer, root, unit):
        """Derive what is left from the two factors, and the fifth root of the outer one over its unit."""
        size = cutlass.select_(inner < 0.0, -inner, inner)
        usual = usual_factors(size, outer)
        c0, c1, c2 = TANH_NEAR
        fifth = c2**0.2
        root = root * unit**0.2
        k = inner * root * fifth
        a = outer / (root * root * root) * (c1 / (2 * fifth**3))
        b = outer / root * (c0 / fifth) - a * a
        near_end = cutlass.select_(usual, TANH_NEAR_END / size, Float32(-1.0))
        lowest = NEAR_LOWEST[0] - NEAR_LOWEST[1] * outer
        top = math.tanh(TANH_NEAR_END) * outer
        lifted = outer <= Float32(LARGEST_LIFTED)
        floor = cutlass.select_(lifted, outer - ROOM_LOG2, -Float32.inf)
        third = -((1 / 3) ** (1 / 3))
        # of two terms: times only
        cube = root * root
        return Cap(
            inner, outer, (k, a, b), (inner * cube * third, outer / cube / third), near_end,
            TANH_MIDDLE_END / size, top, lowest, floor,
        )

    @property
    def trusts_near(self):
        """Whether the near polynomial may be taken unasked: what it makes of scores far below zero is far below its others."""
        return (self.near_end > 0.0) & (self.outer >= NEAR_OUTER)

    def of_near(self, s, addend):
        """Capped s + addend, for |s| up to ``near_end``."""
        k, a, b = self.factors
        t = s * k
        w = t * t + a
        return t * (w * w + b) + addend

    def of_cubic(self, s, addend):
        """For timing only."""
        k, b = self.cubic
        t = s * k
        return t * (t * t + b) + addend

    def of_middle(self, s, addend):
        """Capped s + addend, for |s| up to ``middle_end``."""
        x = s * self.inner
        square = x * x
        factor = Float32(TANH_MIDDLE[-1])
        for coefficient in TANH_MIDDLE[-2::-1]:
            factor = factor * square + coefficient
        return x * factor * self.outer + addend

    def of_any(self, s, addend):
        """Capped s + addend."""
        return numerics.tanh(s * self.inner) * self.outer + addend

    def of_lean(self, s, addend):
        """Capped s + addend, to an absolute error of 3e-7 of the outer factor."""
        e = cute.math.exp2(s * (self.inner * (2 * LOG2E)), fastmath=True)
        return cute.arch.rcp_approx(e + 1.0) * (-2.0 * self.outer) + (self.outer + addend)

    def of_lean_or_near(self, s, addend):
        """Capped s + addend."""
        near = cute.math.absf(s) <= self.near_end
        return cutlass.select_(near, self.of_near(s, addend), self.of_lean(s, addend))


def exp2_of(S, columns, function, shifts, settle_at):
    """(P, row sums) of columns of S: exp2(function(S) - shift)."""
    P, sums = [], []
    for r in range(2):
        chains, addend = [None] * 4, -shifts[r]
        for n, j in enumerate(columns):
            p = cute.math.exp2(function(S[r, j], addend), fastmath=True)
            P.append(p)
            chains[n % 4] = p if chains[n % 4] is None else chains[n % 4] + p
            if settle_at and len(P) == settle_at:
                so_far = sum_of(chains)
                numerics.settle(so_far if r == 0 else sums[0] + so_far)
        sums.append(sum_of(chains))
    return P, sums


def sum_of(chains):
    """Sum of the chains that have begun."""
    begun = [chain for chain in chains if chain is not None]
    while len(begun) > 1:
        begun = [a + b for a, b in zip(begun[::2], begun[1::2], strict=False)] + begun[len(begun) // 2 * 2 :]
    return begun[0]


@cute.jit
def store_exp2(S: cute.Tensor, P: cute.Tensor, sums: cute.Tensor, begin: cutlass.Constexpr, function: cutlass.Constexpr, shifts, settle_at: cutlass.Constexpr):
    """P and sums = those of the columns of S from ``begin`` on."""
    size = cute.size(P) // 2
    p, s = exp2_of(S, range(begin, begin + size), function, shifts, settle_at)
    for r in cutlass.range_constexpr(2):
        sums[r] = s[r]
        for j in cutlass.range_constexpr(size):
            P[r, j] = p[r * size + j]


def is_large(cap, sums, shifts):
    """Whether a sum of P is larger than P of the largest score that the near polynomial is for."""
    limits = [cute.math.exp2(cap.near_top - shift, fastmath=True) for shift in shifts]
    return (sums[0] > limits[0]) | (sums[1] > limits[1])


@cute.jit
def near_block(S: cute.Tensor, P: cute.Tensor, cap, state, config: cutlass.Constexpr, begin: cutlass.Constexpr, settle_at: cutlass.Constexpr):
    """P in place of some columns of S by the near polynomial, and their row sums; by the exact tanh where those are large."""
    size, way = cute.size(P) // 2, config.cap_way
    sums = cute.make_rmem_tensor(2, Float32)
    shifts = (state.shift_log2[0], state.shift_log2[1])
    near = cap.of_cubic if way >= 20 else cap.of_near
    exact = {0: cap.of_any, 1: cap.of_lean_or_near, 2: cap.of_lean}[config.cap_exact]
    if cutlass.const_expr(way % 10 == 1 and config.cap_sticky):
        if state.exact[0] == 0:
            store_exp2(S, P, sums, begin, near, shifts, settle_at)
            large = is_large(cap, sums, shifts)
            state.exact[0] = Int32(cute.arch.vote_any_sync(large))
        if state.exact[0] != 0:
            store_exp2(S, P, sums, begin, exact, shifts, settle_at)
    else:
        store_exp2(S, P, sums, begin, near, shifts, settle_at)
        if cutlass.const_expr(way % 10 == 1):
            large = is_large(cap, sums, shifts)
            if cute.arch.vote_any_sync(large):
                store_exp2(S, P, sums, begin, exact, shifts, 0)
    for r in cutlass.range_constexpr(2):
        if cutlass.const_expr(way % 10 == 2):
            state.peak[r] = cute.arch.fmax(state.peak[r], sums[r])
        state.total[r] = state.total[r] + sums[r]
        for j in cutlass.range_constexpr(size):
            S[r, begin + j] = P[r, j]
