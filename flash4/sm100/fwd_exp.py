"""2^x on the FMA units: what the special function unit, 16 a cycle on an SM, does not have to do.

x = n + f with n = floor(x): 2^x = 2^f 2^n, 2^f by a polynomial, 2^n by adding n to the exponent field. The coefficients
are those of the smallest largest relative error on [0, 1) among quartics with p(0) = 1, rounded to float32: 3.0e-6. A
cubic errs by 8.6e-5, which rounding P to bfloat16 hides, but not the log-sum-exp of a row that one key dominates.

x must be within [-127, 129), or n would leave the exponent field. Multiply-adds can saturate at 0 and 1 for nothing, so it
is worked out as a part of that range, (x + 127) / 256. Its last place is worth 2.6e-6 for x below 1, 5.3e-6 for others.
-127 gives 0. Where x may be large, n is taken a trifle too low, so that the last one is 128: as p(1) < 2, 128 gives 3.4e38
and more gives NaN, which a fixed shift's checks see. A NaN gives 0, as -inf does.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

from flash4.common.numerics import saturated_fma

QUARTIC = (0.0134266842, 0.0522424743, 0.241280205, 0.693044845, 1.0)  # of f^4 ... 1
LOWEST, RANGE = -127.0, 256.0  # of x
JUST_BELOW = 256.0 - 2.0**-16  # the float32 before RANGE
ROUNDER = 1.5 * 2.0**23 + LOWEST  # adding it leaves n in the low bits


def part_of_range(scale, offset):
    """(scale, offset) with which a score becomes a part of the range, from those with which it becomes x."""
    return scale * (1 / RANGE), offset * (1 / RANGE) + -LOWEST / RANGE


def exp2_on_fma(s0, s1, scale, offset, bounded: bool):
    """2^(scale s + offset) of a pair, with what ``part_of_range`` made of scale and offset; ``bounded`` if less than 2^128."""
    y = (saturated_fma(s0, scale, offset), saturated_fma(s1, scale, offset))
    whole = (Float32(RANGE), Float32(RANGE))
    below = whole if bounded else (Float32(JUST_BELOW), Float32(JUST_BELOW))
    shifted = cute.arch.fma_packed_f32x2(y, below, (ROUNDER, ROUNDER), rnd="rm")
    minus = cute.arch.sub_packed_f32x2((ROUNDER, ROUNDER), shifted)  # -127 - n
    f = cute.arch.fma_packed_f32x2(y, whole, minus)  # up to a trifle more than 1: p goes on there
    power = (Float32(QUARTIC[0]), Float32(QUARTIC[0]))
    for c in QUARTIC[1:]:
        power = cute.arch.fma_packed_f32x2(f, power, (c, c))
    return tuple(
        ((n.bitcast(Int32) << 23) + part.bitcast(Int32)).bitcast(Float32)
        for n, part in zip(shifted, power)
    )
