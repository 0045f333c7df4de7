"""Which rows of queries a block of the kernels around a backward has, in CuTe."""

import cutlass.cute as cute
from cutlass import Int32

from flash4.common.graph import WARP
from flash4.common.kv_sequences import RowBlock, Side, row_block
from flash4.common.warps import Warp


def fake_lengths(config):
    """Tensors of lengths that a config takes, for compiling without data."""
    return tuple(
        cute.runtime.make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,), assumed_align=4)
        for present in (config.cu_q, config.used_q)
        if present
    )


def queries_side(config, x, lengths):
    """``Side`` of queries in x (B, S, H, D), or None if all are as long as the tensor."""
    if not config.varlen:
        return None
    cu = lengths[0] if config.cu_q else None
    used = lengths[-1] if config.used_q else None
    batch = x.shape[0] if cu is None else cu.shape[0] - 1
    return Side(batch, x.shape[1], config.tile_m, cu, used)


def fake_lengths_of_keys(config):
    """The same, of keys."""
    return tuple(
        cute.runtime.make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,), assumed_align=4)
        for present in (config.cu_k, config.used_k)
        if present
    )


def keys_side(config, x, lengths):
    """``Side`` of keys in x (B, S, H, D)."""
    cu = lengths[0] if config.cu_k else None
    used = lengths[-1] if config.used_k else None
    batch = x.shape[0] if cu is None else cu.shape[0] - 1
    return Side(batch, x.shape[1], config.tile_n, cu, used)


def fake_rows(dtype, config):
    """Keys in memory that nobody reads: their number matters. And the lengths beside them."""
    strides = (*(cute.sym_int64(divisibility=8) for _ in range(3)), 1)
    shape = tuple(cute.sym_int() for _ in range(4))
    x = cute.runtime.make_fake_tensor(dtype, shape, stride=strides, assumed_align=16)
    return (x, *fake_lengths_of_keys(config))


def rows_of(side, thread, place, x, tile: int) -> RowBlock:
    """Rows of block (block, batch) of x (B, S, H, D); by whole warps."""
    block, batch = place
    if side is not None:
        return row_block(side, Warp(Int32(thread % WARP)), block, batch)
    first = block * tile
    left = x.shape[1] - first
    return RowBlock(batch, first, batch, first, left, left)
