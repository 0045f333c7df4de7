"""Instructions of Ampere that CuTe's verbs need by address: cp.async into, and ldmatrix out of, ``SharedRows``."""

from dataclasses import dataclass
from itertools import product

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import warp

from flash4.common.dsl import inline_ptx
from flash4.common.geometry import floor_div
from flash4.sm80.products import element
from flash4.sm80.shared_rows import CHUNK, CHUNK_BYTES, SharedRows


def cp_async(shared, address, nbytes=None):
    """Start the copy of 16 bytes of global memory; of ``nbytes`` 0 zeros are written and nothing is read.

    Args:
        shared: address in shared memory, Int32.
        address: in global memory, Int64.
        nbytes: 16 or 0, Int32; None for 16.
    """
    size = () if nbytes is None else (nbytes,)
    text = "cp.async.cg.shared.global.L2::128B [$0], [$1], 16" + (", $2;" if size else ";")
    inline_ptx(None, "r,l" + ",r" * len(size), text, shared, address, *size, side_effects=True)


def ldmatrix(element, address, transpose: bool):
    """Four matrices of 8 by 8 numbers, of which each lane gives the address of a row: 8 numbers in registers."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, 4), element)
    row = cute.make_ptr(element, address, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)
    loaded = cute.make_rmem_tensor((8, 1), element)
    cute.copy(atom, cute.make_tensor(row, cute.make_layout((8, 1))), loaded)
    return loaded


@dataclass(frozen=True)
class RowCopy:
    """How a CTA's threads copy rows from global to shared memory: each has a chunk of every so many rows."""

    rows: SharedRows  # where to
    row: Int32  # first row of this thread
    chunk: Int32  # its chunk of each row
    stride: int  # rows from one of its rows to the next
    shared: Int32  # byte of its first chunk in the array
    last_bytes: (
        Int32  # bytes of its chunks of the last band: 16, or 0 behind the columns that there are
    )

    @staticmethod
    def of(rows: SharedRows, threads: int, thread, columns):
        """That of a thread of ``threads``; ``columns`` are there at run time, the rest becomes zero."""
        row, chunk = floor_div(thread, rows.chunks), thread & (rows.chunks - 1)
        # Columns are padded by less than a band: only of the last one there may be a part.
        last = (rows.bands - 1) * rows.band + chunk * CHUNK
        last_bytes = cutlass.select_(last < columns, Int32(CHUNK_BYTES), Int32(0))
        stride = threads // rows.chunks
        return RowCopy(rows, row, chunk, stride, rows.at(row, chunk), last_bytes)

    def row_of(self, step: int):
        """Row of this thread's chunk number ``step``."""
        return self.row + step * self.stride

    @property
    def steps(self) -> int:
        """Rows that a thread has a chunk of."""
        return -(-self.rows.rows // self.stride)

    def copy_row(self, base, step: int, address, exists=None):
        """Start the copies of one row's chunk of each band.

        Args:
            base: address of the array in shared memory.
            step: which of this thread's rows.
            address: of this thread's chunk of that row in global memory.
            exists: whether there is such a row, else it becomes zero; None where there is.
        """
        rows = self.rows
        for band in range(rows.bands):
            nbytes = self.last_bytes if band == rows.bands - 1 else None
            if exists is not None:
                whole = Int32(CHUNK_BYTES) if nbytes is None else nbytes
                nbytes = cutlass.select_(exists, whole, Int32(0))
            at = base + self.shared + (band * rows.band_bytes + step * self.stride * rows.row_bytes)
            cp_async(at, address + Int64(band * rows.row_bytes), nbytes)

    def copy(self, base, address, row_stride, count=None):
        """Start the copies of all rows.

        Args:
            base: address of the array in shared memory.
            address: of this thread's first chunk in global memory.
            row_stride: bytes from one row to the next, Int64.
            count: rows that there are; the rest becomes zero. None for all.
        """
        for step in range(self.steps):
            row = self.row_of(step)
            exists = None if count is None else row < count
            if self.rows.rows % self.stride:  # some threads have no chunk of the last rows
                self._copy_some(base, step, address, exists, row)
            else:
                self.copy_row(base, step, address, exists)
            address = address + row_stride * self.stride

    @cute.jit
    def _copy_some(self, base, step, address, exists, row):
        """As ``copy_row``, for those threads that have this row."""
        if row < self.rows.rows:
            self.copy_row(base, step, address, exists)


def stage_rows(config, acc, base, rows: SharedRows, first_row, lane, first_group=0):
    """Round an accumulator to 16 bit and put it into shared memory, from a row and a group of 8 columns on."""
    _, groups, atoms = acc.shape
    rounded = cute.make_rmem_tensor(acc.layout, element(config))
    rounded.store(acc.load().to(element(config)))
    put_rows(rounded, base, rows, first_row, lane, first_group)


def put_rows(rounded, base, rows: SharedRows, first_row, lane, first_group=0):
    """As ``stage_rows``, of numbers of 16 bit."""
    _, groups, atoms = rounded.shape
    words = cute.recast_tensor(rounded, Int32)  # (2 rows, groups, atoms)
    for m, h in product(range(atoms), range(2)):
        row = first_row + (m * 16 + h * 8) + lane // 4
        at = base + rows.at(row, 0) + lane % 4 * 4
        for group, place in enumerate(rows.run_of_chunks(at, first_group, groups)):
            target = cute.make_ptr(Int32, place, cute.AddressSpace.smem, assumed_align=4)
            cute.make_tensor(target, cute.make_layout(1))[0] = words[h, group, m]


def store_chunk(dtype, shared, target):
    """Copy 16 bytes from an address in shared memory to a pointer in global memory."""
    source = cute.make_ptr(dtype, shared, cute.AddressSpace.smem, assumed_align=CHUNK_BYTES)
    target = cute.make_ptr(dtype, target.toint(), cute.AddressSpace.gmem, assumed_align=CHUNK_BYTES)
    layout = cute.make_layout(CHUNK)
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128)
    chunk = cute.make_rmem_tensor(CHUNK, dtype)
    cute.copy(atom, cute.make_tensor(source, layout), chunk)
    cute.copy(atom, chunk, cute.make_tensor(target, layout))
