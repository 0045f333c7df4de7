"""What verbs of the Hopper forward do to rows: softmax state, and the end of a tile, in CuTe.

A thread has two rows of its warpgroup's tile, r and r + 8, and every fourth pair of columns.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flash4.common import numerics
from flash4.common.numerics import LN2, LOG2E


def rows_of(acc):
    """View an accumulator ((2, 2, N / 8), 1, 1) as (2 rows, N / 4 columns) of this thread."""
    columns = cute.size(acc) // 2
    return cute.make_tensor(
        acc.iterator, cute.make_layout((2, (2, columns // 2)), stride=(2, (1, 4)))
    )


def row_values(S, r):
    """Scores of this thread's row ``r`` as a list."""
    return [S[r, j] for j in range(cute.size(S) // 2)]


def scale_rows(X, factors):
    """Multiply each row of X by its factor."""
    for r in range(2):
        for j in range(cute.size(X) // 2):
            X[r, j] = X[r, j] * factors[r]


def clear_row(O, r, empty):
    """0 in row ``r`` of O, if it is empty."""
    for j in range(cute.size(O) // 2):
        O[r, j] = cutlass.select_(empty, Float32(0.0), O[r, j])


def finish_row(O, r, inverse):
    """Row ``r`` of O over its row sum."""
    for j in range(cute.size(O) // 2):
        O[r, j] = O[r, j] * inverse


def all_finite(O, r):
    """Whether this thread's part of row ``r`` is finite: 0 times it adds up to 0, in chains, which take less time."""
    chains = [Float32(0.0)] * 4
    for j in range(cute.size(O) // 2):
        chains[j % 4] = O[r, j] * 0.0 + chains[j % 4]
    return numerics.sum_of(chains) == 0.0


@dataclass(frozen=True)
class RowState:
    """Online softmax state of this thread's two rows, in registers.

    P = exp2(scale_log2 * S - shift_log2); the shift is the scaled row maximum when it last moved.
    """

    shift_log2: cute.Tensor  # -inf before the first visible key
    limit: cute.Tensor  # raw score above which the shift must move
    total: cute.Tensor  # l: this thread's share of the row sum of P
    correction: cute.Tensor  # factor for O since its last rescale


def make_row_state():
    """Allocate a row state."""
    return RowState(*(cute.make_rmem_tensor(2, Float32) for _ in range(4)))


def move_shift(state, r, row_max, scales_log2, growth_log2):
    """Raise the shift of row ``r`` to ``row_max`` (a raw score) if P would grow by more than 2^growth_log2.

    l shrinks with it, O has to follow. ``scales_log2`` are the factor of a score and its inverse.
    """
    scale_log2, inv_scale_log2 = scales_log2
    old = state.shift_log2[r]
    scaled = row_max * scale_log2
    new = cutlass.select_(scaled > old + growth_log2, scaled, old)
    # exp2(-inf - -inf) would be NaN: a row without a visible key keeps the factor exp2(-inf) = 0.
    finite = cutlass.select_(new == -Float32.inf, Float32(0.0), new)
    state.shift_log2[r] = new
    state.limit[r] = (new + growth_log2) * inv_scale_log2
    state.correction[r] = cute.math.exp2(old - finite, fastmath=True)
    state.total[r] = state.total[r] * state.correction[r]


def with_sink(shift_log2, total, sink):
    """(LSE, factor of O) of a row whose denominator has exp(sink) too, however far that is from exp2(shift)."""
    sink_log2 = sink * LOG2E
    new = cute.arch.fmax(shift_log2, sink_log2)
    finite = cutlass.select_(new == -Float32.inf, Float32(0.0), new)
    shrink = cute.math.exp2(shift_log2 - finite, fastmath=True)
    total = total * shrink + cute.math.exp2(sink_log2 - finite, fastmath=True)
    lse = (new + cute.math.log2(total, fastmath=True)) * LN2
    return lse, shrink * cute.arch.rcp_approx(total)


def move_shifts(S, state, scales_log2, growth_log2, floor=None):
    """Exact row maxima over the four threads that share a row, then ``move_shift``."""
    for r in range(2):
        row_max = cute.arch.warp_reduction_max(
            numerics.max_float(row_values(S, r)), threads_in_group=4
        )
        if floor is not None:
            row_max = cute.arch.fmax(row_max, floor)
        move_shift(state, r, row_max, scales_log2, growth_log2)


def outgrown(S, state):
    """Whether a score of this thread exceeds its row's limit; a negative limit always says yes.

    Compares bits, with half the instructions of a float maximum; exact because the limit is not negative.
    """
    above = None
    for r in range(2):
        limit = numerics.float_bits(state.limit[r])
        row_above = (numerics.max_bits(row_values(S, r)) > limit) | (limit < 0)
        above = row_above if above is None else above | row_above
    return above


@dataclass(frozen=True)
class EndedRow:
    """A row of this thread at the end of a tile: whether it saw a key, 1 / l, LSE, where it lies, and how it went."""

    empty: cutlass.Boolean
    inverse: Float32
    lse: Float32
    head: Int32
    query: Int32
    exists: cutlass.Boolean
    judged: cutlass.Boolean  # if it went wrong, the tile is worked on again
    trusted: object  # True without a fixed shift, as the next
    finite: object
