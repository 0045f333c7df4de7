"""2^x on the FMA units: what the special function unit, 16 a cycle on an SM, does not have to do.

x = n + f with n = floor(x): 2^x = 2^f 2^n, 2^f by a polynomial, 2^n by adding n to the exponent field. The coefficients
are those of the smallest largest relative error on [0, 1) among quartics with p(0) = 1, rounded to float32: 3.0e-6. A
cubic errs by 8.6e-5, which rounding P to bfloat16 hides, but not the log-sum-exp of a row that one key dominates. A NaN
gives 0, as -inf does: the clamp takes the number.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32

QUARTIC = (0.0134266842, 0.0522424743, 0.241280205, 0.693044845, 1.0)  # of f^4 ... 1
ROUNDER = 12_582_912.0  # 1.5 2^23: adding it leaves the integer part in the low bits
LOWEST = -127.0  # 2^-127 comes out as 0
HIGHEST = 127.0  # beyond, the exponent field would overflow


def exp2_on_fma(x0, x1, bounded: bool):
    """2^x of a pair; if it is not known that x is below 128, of at most ``HIGHEST``."""
    x = (cute.arch.fmax(x0, LOWEST), cute.arch.fmax(x1, LOWEST))
    if not bounded:
        x = (cute.arch.fmin(x[0], HIGHEST), cute.arch.fmin(x[1], HIGHEST))
    shifted = cute.arch.add_packed_f32x2(x, (ROUNDER, ROUNDER), rnd="rm")
    whole = cute.arch.sub_packed_f32x2(shifted, (ROUNDER, ROUNDER))
    f = cute.arch.sub_packed_f32x2(x, whole)
    y = (Float32(QUARTIC[0]), Float32(QUARTIC[0]))
    for c in QUARTIC[1:]:
        y = cute.arch.fma_packed_f32x2(f, y, (c, c))
    return tuple(
        ((n.bitcast(Int32) << 23) + part.bitcast(Int32)).bitcast(Float32)
        for n, part in zip(shifted, y)
    )
