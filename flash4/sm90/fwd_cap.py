"""Caps of scores in the Hopper forward: outer tanh(inner s) in log2 units, and P = exp2 of that in as few instructions as may be.

With x = inner s and e = ``TANH_NEAR_END``, p(x) = c0 x + c1 x^3 + c2 x^5 is tanh x for |x| <= e, to 1.5e-6 of it; beyond, p
falls and rises without end. Blocks with a fixed shift and no mask take p for all x, for an outer factor of ``NEAR_OUTER`` or
more, and two judges see that it was right:

- x > e: p rises, so P is more than P of e. Where the sum of a thread's P in one part of a block is more than that, the warp
  does the part again, as outer (1 - 2 / (exp(2 x) + 1)), which errs by 5.2e-7 outer. For an outer factor of more than
  ``SMALL_OUTER`` that would be too much: P becomes NaN, and the tile is worked on again, as one that outgrew a fixed shift.
- x < -e: |exp2(outer p) - exp2(outer tanh x)| <= 2^(A - B outer), (A, B) = ``BELOW``. Beside n keys and a row sum of P of
  n 2^(lowest - shift), lowest = A - B outer + ``TRUST_LOG2``, all n such errors are at most 2^-17.9 = 4.1e-6 of the sum. A
  row with less has its tile worked on again.

With an outer factor up to ``SMALL_OUTER`` a row's shift starts no lower than ``ROOM_LOG2`` below it: P up to 2^50 then has
room to the cap, and P from 2^-110 on to minus the cap, so that no row outgrows its shift, however low its first scores.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from flash4.common import numerics
from flash4.common.numerics import (
    LOG2E,
    TANH_MIDDLE,
    TANH_MIDDLE_END,
    TANH_NEAR,
    TANH_NEAR_END,
    usual_factors,
)

NEAR_OUTER = 20 * LOG2E  # a cap of 20
BELOW = (-8.8 * LOG2E, 0.30)
TRUST_LOG2 = 17.9
PART_COLUMNS = 16  # of a thread: parts have 64 keys
SMALL_OUTER = 80  # a cap of 55
ROOM_LOG2 = 50


def factors_of_near(inner, outer, root):
    """(k, a, b) such that with t = k s the near polynomial is t ((t^2 + a)^2 + b); numbers of the kernel or of NumPy.

    Args:
        root: fifth root of ``outer``.
    """
    c0, c1, c2 = TANH_NEAR
    fifth = c2**0.2
    a = outer / (root * root * root) * (c1 / (2 * fifth**3))
    return inner * root * fifth, a, outer / root * (c0 / fifth) - a * a


@dataclass(frozen=True)
class Cap:
    """outer tanh(inner s) of a score s, in ways of which the cheaper are right for small scores only."""

    inner: Float32  # of either sign
    outer: Float32  # positive
    factors: tuple  # see ``factors_of_near``
    near_end: (
        Float32  # largest |s| for the near polynomial; negative where its factors leave float32
    )
    middle_end: Float32
    near_top: Float32  # capped score at ``near_end``
    lowest: Float32  # see above
    floor: Float32  # of a row's shift
    part_inner: Float32  # 2 log2 e times the inner factor, or NaN if the outer one is large

    @staticmethod
    def of(inner, outer, root):
        """Derive what is left from the two factors, and the fifth root of the outer one."""
        size = cutlass.select_(inner < 0.0, -inner, inner)
        small = outer <= Float32(SMALL_OUTER)
        return Cap(
            inner=inner,
            outer=outer,
            factors=factors_of_near(inner, outer, root),
            near_end=cutlass.select_(
                usual_factors(size, outer), TANH_NEAR_END / size, Float32(-1.0)
            ),
            middle_end=TANH_MIDDLE_END / size,
            near_top=math.tanh(TANH_NEAR_END) * outer,
            lowest=BELOW[0] + TRUST_LOG2 - BELOW[1] * outer,
            floor=cutlass.select_(small, outer - ROOM_LOG2, -Float32.inf),
            part_inner=cutlass.select_(small, inner * (2 * LOG2E), Float32(math.nan)),
        )

    @property
    def trusts_near(self):
        """Whether the near polynomial may be taken unasked, beside its judges."""
        return (self.near_end > 0.0) & (self.outer >= NEAR_OUTER)

    def of_near(self, s, addend):
        """Capped s + addend, for |s| up to ``near_end``."""
        k, a, b = self.factors
        t = s * k
        w = t * t + a
        return t * (w * w + b) + addend

    def of_middle(self, s, addend):
        """Capped s + addend, for |s| up to ``middle_end``."""
        x = s * self.inner
        return x * numerics.polynomial(x * x, TANH_MIDDLE) * self.outer + addend

    def of_any(self, s, addend):
        """Capped s + addend."""
        return numerics.tanh(s * self.inner) * self.outer + addend

    def of_part(self, s, addend):
        """Capped s + addend, to 5.2e-7 of the cap; NaN for a large one."""
        e = cute.math.exp2(s * self.part_inner, fastmath=True)
        return cute.arch.rcp_approx(e + 1.0) * (-2.0 * self.outer) + (self.outer + addend)


@cute.jit
def cap_scores(S: cute.Tensor, cap, addends, ways: cutlass.Constexpr):
    """Capped S plus addends, for a warp at a time in the cheapest of two or three ways that its largest score allows."""
    used = numerics.largest_pair_bits([S[r, j] for r in range(2) for j in range(cute.size(S) // 2)])
    if cute.arch.vote_any_sync(used > numerics.float_bits(cap.near_end)):
        if cutlass.const_expr(ways == 2):
            replace_scores(S, cap.of_any, addends)
        else:
            cap_large_scores(S, cap, addends, used)
    else:
        replace_scores(S, cap.of_near, addends)


@cute.jit
def cap_large_scores(S: cute.Tensor, cap, addends, used):
    """As ``cap_scores``, of the two ways for scores that are not near zero; ``used`` is what decides."""
    if cute.arch.vote_any_sync(used > numerics.float_bits(cap.middle_end)):
        replace_scores(S, cap.of_any, addends)
    else:
        replace_scores(S, cap.of_middle, addends)


def replace_scores(S, function, addends):
    """S = function(S, addend)."""
    for r in range(2):
        for j in range(cute.size(S) // 2):
            S[r, j] = function(S[r, j], addends[r].at(j))


@cute.jit
def near_exponentials(
    S: cute.Tensor, P: cute.Tensor, sums: cute.Tensor, cap, begin: cutlass.Constexpr,
    shifts, settle_at: cutlass.Constexpr,
):  # fmt: skip
    """P and its row sums of the part of S from column ``begin`` on: of the near polynomial, or exact where they are large.

    A branch can leave results only in memory that was there before: hence P and sums, which stay in registers.
    """
    _exponentials(S, P, sums, begin, cap.of_near, shifts, settle_at)
    limits = [cute.math.exp2(cap.near_top - shift, fastmath=True) for shift in shifts]
    if cute.arch.vote_any_sync((sums[0] > limits[0]) | (sums[1] > limits[1])):
        _exponentials(S, P, sums, begin, cap.of_part, shifts, 0)


def _exponentials(S, P, sums, begin, function, shifts, settle_at):
    """P = exp2(function(S) - shift), sums in four chains; settle after a set number of exponentials."""
    columns = cute.size(P) // 2
    for r in range(2):
        chains = [None] * 4
        for j in range(columns):
            p = cute.math.exp2(function(S[r, begin + j], -shifts[r]), fastmath=True)
            P[r, j] = p
            chains[j % 4] = p if chains[j % 4] is None else chains[j % 4] + p
            if settle_at and r * columns + j + 1 == settle_at:
                so_far = numerics.sum_of(chains)
                numerics.settle(so_far if r == 0 else sums[0] + so_far)
        sums[r] = numerics.sum_of(chains)
