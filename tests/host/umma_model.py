"""What the tensor core of Blackwell does with descriptors and tensor memory, in integers, as the PTX ISA documents it."""

from dataclasses import dataclass

ROW = 128  # bytes of a row under the 128-byte swizzle
VERSION, SWIZZLE_128 = 1, 2  # fields of a descriptor of shared memory


@dataclass(frozen=True)
class Descriptor:
    """Of an operand in shared memory under the 128-byte swizzle; bytes."""

    start: int
    leading: int
    stride: int

    @property
    def number(self) -> int:
        """The 64 bits."""
        fields = ((self.start // 16, 0), (self.leading // 16, 16), (self.stride // 16, 32))
        fields += ((VERSION, 46), (SWIZZLE_128, 61))
        return sum(value << at for value, at in fields)


def swizzled(address: int) -> int:
    """The 16-byte chunk of a row is exchanged by the number of the row among eight."""
    return address ^ (address // ROW % 8) * 16


def operand_address(d: Descriptor, mn: int, k: int, mn_major: bool) -> int:
    """Byte that element (mn, k) of one MMA's 16-bit operand is read from.

    K-major: a row holds k; eight rows are a group, and groups are ``stride`` apart. MN-major: a row holds 64 of mn, eight
    rows are eight k; those groups are ``stride`` apart, and the next 64 of mn ``leading``.
    """
    if not mn_major:
        return swizzled(d.start + mn // 8 * d.stride + mn % 8 * ROW + k * 2)
    per_row = ROW // 2
    group = d.start + mn // per_row * d.leading + k // 8 * d.stride
    return swizzled(group + k % 8 * ROW + mn % per_row * 2)


def tma_address(base: int, row: int, column: int, rows: int) -> int:
    """Byte to which TMA brings a 16-bit element of a tile: boxes of ``rows`` rows of 128 bytes, one behind the other."""
    per_row = ROW // 2
    return swizzled(base + column // per_row * rows * ROW + row * ROW + column % per_row * 2)


def accumulator(row: int, column: int, ctas: int) -> tuple[int, int, int]:
    """(CTA, lane, column) of an element of D, for 128 rows of one CTA or 256 of a pair."""
    assert row < 128 * ctas
    return row // 128, row % 128, column


def accumulator_of_64(row: int, column: int) -> tuple[int, int]:
    """(lane, column) of an element of D of one CTA with 64 rows: each quarter of the lanes has 16, in its first half."""
    return row // 16 * 32 + row % 16, column


def operand_in_tensor_memory(row: int, k: int) -> tuple[int, int, int]:
    """(lane, column, half) of an element of a 16-bit A: two to a column, the even one in the low half."""
    return row % 128, k // 2, k % 2


def register_32x32b(thread: int, register: int) -> tuple[int, int]:
    """(lane, column) of a register in loads and stores of shape 32x32b by a warpgroup."""
    return thread, register


def share_of_b(columns: int, ctas: int, rank: int) -> range:
    """Columns of B, N of the MMA, that it reads from a CTA's shared memory."""
    part = columns // ctas
    return range(rank * part, (rank + 1) * part)
