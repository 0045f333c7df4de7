"""Global tensors as TMA sees them: modes that tiles cut first, and sequences with bounds of their own."""

import cutlass.cute as cute
from cutlass import Int32, Int64

TMA_ALIGN = 16  # bytes


def packed_view(x, heads_kv):
    """View (B, S, H, D) as ((H / heads_kv, S), D, heads_kv, B): the row mode that a tile of packed heads cuts."""
    batch, seqlen, heads, head_dim = x.shape
    s_batch, s_seqlen, s_head, s_dim = x.stride
    ratio = heads // heads_kv
    layout = cute.make_layout(
        ((ratio, seqlen), head_dim, heads_kv, batch),
        stride=((s_head, s_seqlen), s_dim, s_head * ratio, s_batch),
    )
    return cute.make_tensor(x.iterator, layout)


def permuted_view(x, order):
    """View with the modes of x in another order."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=order))


# TMA knows one bound for a mode, but sequences end where they please. A ragged view has the rows twice, as modes row and
# end with one stride. With R elements in the first, row r of a sequence of n rows that begins at row b is at (R - n + r,
# b + n): in bounds of the first mode exactly if r < n; loads beyond give zeros, stores nothing. That is R rows too far.
#
# For a store the view begins R = S rows before the tensor of S rows. For a load it must not: TMA faults unless a load's
# base is mapped memory, as others report too. There R is 2^30, and a third mode, whose stride is 2^34 bytes less that of
# a row, is always at 2^30: 2^30 rows less, and 2^64 bytes more, which is nothing.
WRAP = 1 << 30
WRAP_ELEMENTS = 1 << 33  # 2^34 bytes of 16-bit elements


def ragged_packed_view(x, heads_kv):
    """View (1, S, H, D) as ((H / heads_kv, row), D, heads_kv, end), to store."""
    _, rows, heads, head_dim = x.shape
    _, s_row, s_head, s_dim = x.stride
    ratio = heads // heads_kv
    layout = cute.make_layout(
        ((ratio, rows), head_dim, heads_kv, rows + 1),
        stride=((s_head, s_row), s_dim, s_head * ratio, s_row),
    )
    before = (x.iterator - Int64(rows) * Int64(s_row)).align(TMA_ALIGN)
    return cute.make_tensor(before, layout)


def ragged_queries_view(x):
    """View (1, S, H, D) as ((H, row), D, wrap, end), to load. There is no mode to bound the heads of a group."""
    _, rows, heads, head_dim = x.shape
    _, s_row, s_head, s_dim = x.stride
    layout = cute.make_layout(
        ((heads, WRAP), head_dim, WRAP + 1, rows + 1),
        stride=((s_head, s_row), s_dim, _wrapping(s_row), s_row),
    )
    return cute.make_tensor(x.iterator, layout)


def ragged_values_view(x):
    """View (B, S, H, D) as (D, row, H, wrap, end), to load; entry b begins at row b ``rows_of_entry``."""
    batch, rows, heads, head_dim = x.shape
    _, s_row, s_head, s_dim = x.stride
    every = (batch - 1) * rows_of_entry(x) + rows
    layout = cute.make_layout(
        (head_dim, WRAP, heads, WRAP + 1, every + 1),
        stride=(s_dim, s_row, s_head, _wrapping(s_row), s_row),
    )
    return cute.make_tensor(x.iterator, layout)


def ragged_rows_view(x):
    """View (B, S, H, D) as (row, D, H, wrap, end), to load; entries as in ``ragged_values_view``."""
    return permuted_view(ragged_values_view(x), [1, 0, 2, 3, 4])


def ragged_rows(tensor, head, begin, rows):
    """So many rows (S, D) of a head from row ``begin`` on; loads of what comes after them give zeros."""
    return cute.domain_offset((WRAP - rows, 0), tensor[None, None, head, WRAP, begin + rows])


def ragged_store_view(x):
    """View (1, S, H, D) as (row, D, H, end), to store."""
    _, rows, heads, head_dim = x.shape
    _, s_row, s_head, s_dim = x.stride
    layout = cute.make_layout(
        (rows, head_dim, heads, rows + 1), stride=(s_row, s_dim, s_head, s_row)
    )
    before = (x.iterator - Int64(rows) * Int64(s_row)).align(TMA_ALIGN)
    return cute.make_tensor(before, layout)


def rows_of_entry(x):
    """Rows from one batch entry of (B, S, H, D) to the next; the stride is a multiple of a row's."""
    return Int32(x.stride[0] // x.stride[1])


def _wrapping(stride):
    return cute.assume(Int64(WRAP_ELEMENTS) - Int64(stride), divby=8)
