"""mma.sync: accumulators in registers, and products of what ldmatrix gives, in CuTe.

A thread has, of each 16 rows (an *atom*) that its warp owns, rows ``lane // 4`` and 8 below, and of each 8 columns two:
an accumulator is (4, N / 8, atoms), of which the first mode is (2 columns, 2 rows).
"""

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32
from cutlass.cute.nvgpu import warp


def element(config):
    """16-bit element type of a config."""
    return BFloat16 if config.bf16 else Float16


def rows_of(acc):
    """View an accumulator (4, N / 8, atoms) as (2 atoms rows, N / 4 columns) of this thread."""
    _, groups, atoms = acc.shape
    layout = cute.make_layout(((2, atoms), (2, groups)), stride=((2, 4 * groups), (1, 4)))
    return cute.make_tensor(acc.iterator, layout)


def multiply(config, acc, a, b, group):
    """acc += a b, of each atom's 16 by 16 numbers ``a`` and 16 by 16 ``b``, whose columns are groups ``group`` and the next."""
    atom = cute.make_mma_atom(warp.MmaF16BF16Op(element(config), Float32, (16, 8, 16)))
    for half in range(2):
        b_half = cute.make_tensor(b.iterator + 4 * half, cute.make_layout(((2, 2),)))
        for m, a_atom in enumerate(a):
            offset = (group + half) * 4 + m * 4 * acc.shape[1]
            part = cute.make_tensor(acc.iterator + offset, cute.make_layout(((2, 2),)))
            a_part = cute.make_tensor(a_atom.iterator, cute.make_layout(((2, 2, 2),)))
            cute.mma_atom_call(atom, part, a_part, b_half, part)
