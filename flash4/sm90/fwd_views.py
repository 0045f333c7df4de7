"""Global tensors as TMA sees them: modes that tiles cut first, and sequences with bounds of their own."""

import cutlass.cute as cute
from cutlass import Int64

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


# TMA knows one bound for a mode, but sequences end where they please. A ragged view has the rows twice, as modes (row,
# end) of S and S + 1 elements and one stride, and begins S rows before the tensor. Row r of a sequence of n rows that
# begins at row b is at (S - n + r, b + n): S rows cancel, the address is that of row b + r, and the first mode is in
# bounds exactly if r < n. Loads beyond give zeros, stores nothing.


def ragged_packed_view(x, heads_kv):
    """View (1, S, H, D) as ((H / heads_kv, row), D, heads_kv, end)."""
    _, rows, heads, head_dim = x.shape
    _, s_row, s_head, s_dim = x.stride
    ratio = heads // heads_kv
    layout = cute.make_layout(
        ((ratio, rows), head_dim, heads_kv, rows + 1),
        stride=((s_head, s_row), s_dim, s_head * ratio, s_row),
    )
    return cute.make_tensor(_rows_before(x, rows, s_row), layout)


def ragged_values_view(x):
    """View (B, S, H, D) as (D, row, H, end, B)."""
    batch, rows, heads, head_dim = x.shape
    s_batch, s_row, s_head, s_dim = x.stride
    layout = cute.make_layout(
        (head_dim, rows, heads, rows + 1, batch), stride=(s_dim, s_row, s_head, s_row, s_batch)
    )
    return cute.make_tensor(_rows_before(x, rows, s_row), layout)


def _rows_before(x, rows, stride):
    """Pointer so many rows before x."""
    return (x.iterator - Int64(rows) * Int64(stride)).align(TMA_ALIGN)
