"""Scalar and row arithmetic of the softmax, in CuTe. Logits are in log2 units where a name ends in ``_log2``."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import T

from flash4.common.dsl import inline_ptx

TANH_SERIES = (-17 / 315, 2 / 15, -1 / 3)  # of x^7, x^5, x^3; up to 1/4 the next term is 3e-7 of x
TANH_SERIES_END = 0.25
# tanh(x) / x by powers of x^2, up to an end; relative error at most 1.5e-6 and 1.2e-6, the least that so many terms allow.
TANH_NEAR = (0.999998523681, -0.333060090771, 0.125770372321)
TANH_NEAR_END = 0.3125
TANH_MIDDLE = (0.999998846313, -0.333244752795, 0.132223719653, -0.0489464950184, 0.0118957955103)
TANH_MIDDLE_END = 0.8125
# Sizes of a cap's two factors up to which coefficients with both in them, the inner one to the fifth, are far from the
# ends of float32.
LARGEST_FACTOR = 2.0**20
SEVENS = 28  # bits of a row in a word, seven to a byte
LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634
RESCALE_THRESHOLD_LOG2 = 8.0  # P may grow to 2^8 before its row is rescaled: float16 has room


def float_bits(x):
    """Reinterpret a float32 as an int32; integers order like the floats as long as one side is >= 0."""
    return Int32(inline_ptx(T.i32(), "=r,f", "mov.b32 $0, $1;", Float32(x)))


def copysign(x, sign):
    """x >= 0 with the sign of another number."""
    text = "copysign.f32 $0, $2, $1;"
    return Float32(inline_ptx(T.f32(), "=f,f,f", text, Float32(x), Float32(sign)))


def undefined():
    """Return a float32 register with no defined value, and no dependence on what was in it."""
    return Float32(inline_ptx(T.f32(), "=f", ""))


def opaque(x):
    """Return x through a move that the compiler cannot see through, so that it keeps it instead of recomputing it."""
    return Int32(inline_ptx(T.i32(), "=r,r", "mov.b32 $0, $1;", Int32(x), side_effects=True))


def lane_asked_for():
    """Number of this thread in its warp, asked for again: unlike a move, no compiler takes this out of a loop."""
    return Int32(inline_ptx(T.i32(), "=r", "mov.u32 $0, %laneid;", side_effects=True))


def kept(x):
    """Return an Int64 through a move that the compiler cannot see through, but may take out of a loop."""
    return Int64(inline_ptx(T.i64(), "=l,l", "mov.b64 $0, $1;", Int64(x)))


def low_bits(n):
    """Int32 whose lowest ``n`` bits are 1: none for n <= 0, all from 32 on."""
    text = "{ .reg .b32 t; max.s32 t, $1, 0; shl.b32 t, 1, t; sub.s32 $0, t, 1; }"
    return Int32(inline_ptx(T.i32(), "=r,r", text, Int32(n)))


def place_in_sevens(n):
    """Place of bit ``n`` of a row of bits, seven to a byte: those become predicates in one instruction (R2P)."""
    return n + n // 7


def max3_float(a, b, c):
    """Largest of three float32; sm_100 and later."""
    return Float32(inline_ptx(T.f32(), "=f,f,f,f", "max.f32 $0, $1, $2, $3;", a, b, c))


def saturated_fma(a, b, c):
    """a b + c, of at least 0 and at most 1; of a NaN 0.

    It takes the bits of a: where that is masked, ptxas makes predicates seven at a time (R2P) only if the masks of all
    scores are alike, and LLVM has integers where two of them become a pair.
    """
    text = "{ .reg .f32 t; mov.b32 t, $1; fma.rn.sat.f32 $0, t, $2, $3; }"
    bits = Float32(a).bitcast(Int32)
    return Float32(inline_ptx(T.f32(), "=f,r,f,f", text, bits, Float32(b), Float32(c)))


def max3_int(a, b, c):
    """Largest of three int32: one VIMNMX3 on sm_90 and later."""
    text = "{ .reg .s32 t; max.s32 t, $1, $2; max.s32 $0, t, $3; }"
    return Int32(inline_ptx(T.i32(), "=r,r,r,r", text, a, b, c))


def max_bits(values):
    """Largest of float32 values by their bits: exact if that is >= 0, else merely some negative number."""
    bits = [float_bits(x) for x in values]
    lanes, turn = bits[:2], 0  # two chains, or each maximum would wait for the one before
    for i in range(2, len(bits) - 1, 2):
        lanes[turn] = max3_int(lanes[turn], bits[i], bits[i + 1])
        turn ^= 1
    if len(bits) % 2:
        return max3_int(lanes[0], lanes[1], bits[-1])
    return cutlass.max(lanes[0], lanes[1])


def max_float(values):
    """Largest of float32 values, in four chains."""
    lanes = list(values[:4])
    for i, x in enumerate(values[4:]):
        lanes[i % 4] = cute.arch.fmax(lanes[i % 4], x)
    return cute.arch.fmax(cute.arch.fmax(lanes[0], lanes[1]), cute.arch.fmax(lanes[2], lanes[3]))


def max3_of(values):
    """Largest of an even number of float32 values, in four chains of maxima of three; sm_100 and later."""
    lanes = list(values[:4])
    for i, (a, b) in enumerate(zip(values[4::2], values[5::2], strict=True)):
        lanes[i % 4] = max3_float(lanes[i % 4], a, b)
    return cute.arch.fmax(max3_float(lanes[0], lanes[1], lanes[2]), lanes[3])


def tanh(x):
    """Hyperbolic tangent to a relative error of about 1e-6 everywhere; the hardware's own has 5e-4.

    1 - 2 / (exp(2 x) + 1) loses its digits near 0, where the series takes over.
    """
    square, factor = x * x, Float32(0.0)
    for coefficient in TANH_SERIES:
        factor = (factor + coefficient) * square
    e = cute.math.exp2(x * (2 * LOG2E), fastmath=True)
    far = 1.0 - 2.0 * cute.arch.rcp_approx(e + 1.0)
    return cutlass.select_(square < TANH_SERIES_END**2, x + x * factor, far)


def usual_factors(inner, outer):
    """Whether coefficients with the fifth power of ``inner`` stay in float32; numbers of the kernel or of NumPy."""
    least, most = 1 / LARGEST_FACTOR, LARGEST_FACTOR
    return (inner >= least) & (inner <= most) & (outer >= least) & (outer <= most)


def sum_of(chains):
    """Sum of up to four partial sums; None stands for nothing."""
    parts = [x for x in chains if x is not None]
    while len(parts) > 1:
        parts = [
            parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i]
            for i in range(0, len(parts), 2)
        ]
    return parts[0]


def largest_pair_bits(values):
    """Bits of the largest |a| + |b| of neighbours: no less than the largest |a|, with fewer instructions."""
    pairs = zip(values[::2], values[1::2], strict=True)
    return max_bits([cute.math.absf(a) + cute.math.absf(b) for a, b in pairs])


def tanh_and_slope(x):
    """(tanh x, 1 - tanh^2 x), both to a relative error of about 1e-6 everywhere.

    With r = 1 / (exp(2 |x|) + 1) the slope is 4 r (1 - r): the square of a tanh near 1 has lost it.
    """
    square, factor = x * x, Float32(0.0)
    for coefficient in TANH_SERIES:
        factor = (factor + coefficient) * square
    e = cute.math.exp2(cute.math.absf(x) * (2 * LOG2E), fastmath=True)
    r = cute.arch.rcp_approx(e + 1.0)
    far = 1.0 - 2.0 * r
    far = cutlass.select_(x < 0.0, -far, far)
    tanh_x = cutlass.select_(square < TANH_SERIES_END**2, x + x * factor, far)
    return tanh_x, 4.0 * r * (1.0 - r)


def polynomial(x, coefficients):
    """Sum of coefficients times powers of x, from the constant on."""
    total = Float32(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        total = total * x + coefficient
    return total


def near_end(scale):
    """Largest |y| for ``near_tanh_and_slope(scale y)``."""
    return TANH_NEAR_END / cute.math.absf(scale)


def near_tanh_and_slope(x):
    """The same for |x| up to ``TANH_NEAR_END``, in six instructions."""
    tanh_x = x * polynomial(x * x, TANH_NEAR)
    return tanh_x, 1.0 - tanh_x * tanh_x


def far_tanh_and_slope(x):
    """The same, tanh x to an absolute error of 5.2e-7: near 0 it has few digits; see ``tanh_and_slope`` for the slope."""
    e = cute.math.exp2(cute.math.absf(x) * (2 * LOG2E), fastmath=True)
    r = cute.arch.rcp_approx(e + 1.0)
    return copysign(1.0 - 2.0 * r, x), 4.0 * r * (1.0 - r)


@cute.jit
def settle(x: Float32):
    """End a basic block on ``x >= 0``, so that ptxas keeps what x depends on above what follows.

    Without it ptxas hoists the wait for an asynchronous MMA over the exponentials that should hide it. The branch is
    never taken; the vote keeps it uniform over the warp.
    """
    if cute.arch.vote_any_sync(x < 0.0):
        inline_ptx(None, "", "nanosleep.u32 20;", side_effects=True)


class Divisor:
    """A positive number of the launch that integers from 0 on are divided by, with a multiplication and a shift.

    What that takes is worked out on the host.
    """

    def __init__(self, number, made=None):
        self.made = cute.fast_divmod_create_divisor_v2(number) if made is None else made

    def __rfloordiv__(self, x):
        return Int32(x // self.made)

    def __extract_mlir_values__(self):
        return self.made.__extract_mlir_values__()

    def __new_from_mlir_values__(self, values):
        return Divisor(None, self.made.__new_from_mlir_values__(values))


class Factor(Divisor):
    """The same of a number that integers are multiplied by, too."""

    def __init__(self, number, made=None):
        super().__init__(number, made)
        self.number = number

    def __rmul__(self, x):
        return x * self.number

    __mul__ = __rmul__

    def __extract_mlir_values__(self):
        return [self.number.ir_value(), *super().__extract_mlir_values__()]

    def __new_from_mlir_values__(self, values):
        made = self.made.__new_from_mlir_values__(values[1:])
        return Factor(Int32(values[0]), made)
