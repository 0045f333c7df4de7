"""Rows of 16-bit numbers in shared memory, swizzled so that neither copies nor ldmatrix meet in a bank (dual-mode).

Columns come in bands of 64, or of 32 where they are no multiple of 64. A band has its rows one behind the other, each of
8 (or 4) chunks of 16 bytes, of which chunk ``c`` of row ``r`` lies where chunk ``c ^ r`` would. ldmatrix reads the same
chunk of 8 rows at once: so they are in 8 different groups of banks.
"""

from dataclasses import dataclass

CHUNK_BYTES = 16
CHUNK = 8  # numbers of a chunk


@dataclass(frozen=True)
class SharedRows:
    """An array of ``rows`` by ``columns`` 16-bit numbers.

    Attributes:
        rows: a multiple of 8.
        columns: a multiple of 32.
    """

    rows: int
    columns: int

    @property
    def band(self) -> int:
        """Columns of a band."""
        return 32 if self.columns % 64 else 64

    @property
    def bands(self) -> int:
        """Number of bands."""
        return self.columns // self.band

    @property
    def chunks(self) -> int:
        """Chunks of a row of a band."""
        return self.band // CHUNK

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a band."""
        return self.chunks * CHUNK_BYTES

    @property
    def band_bytes(self) -> int:
        """Bytes of a band."""
        return self.rows * self.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.bands * self.band_bytes

    def at(self, row, chunk):
        """Byte of a chunk of a row of the first band. Rows 8 apart are swizzled alike."""
        twist = row % 8 if self.chunks == 8 else row % 8 // 2
        return row * self.row_bytes + (chunk ^ twist) * CHUNK_BYTES

    def of_lane(self, lane, by_columns: bool):
        """Byte of the row and chunk that a lane gives to ldmatrix for four matrices of 16 rows and two chunks.

        They come in the order of an mma's operands: first both of the rows, as A has them and a transposed B; or
        ``by_columns`` first both of the columns, as B has them and a transposed A.
        """
        if by_columns:
            return self.at(lane % 8 + lane // 16 * 8, lane // 8 % 2)
        return self.at(lane % 16, lane // 16)

    def pair_at(self, at, number):
        """From the byte of a chunk of pair 0 of a row to that of the same chunk of pair ``number``, over all bands."""
        return self._step(at, number, 2)

    def _step(self, at, number, width: int):
        """From a chunk of a row's first ``width`` to the same one of its ``width`` with ``number``."""
        steps = self.chunks // width
        within = at ^ (number % steps * (width * CHUNK_BYTES))
        return within if self.bands == 1 else within + number // steps * self.band_bytes

    def run_of_pairs(self, at, first, count: int) -> list:
        """``pair_at`` of ``count`` pairs from ``first`` on, a multiple of ``count`` that may be known at run time only."""
        return self._run(at, first, count, 2)

    def run_of_chunks(self, at, first, count: int) -> list:
        """The same of ``count`` chunks, from the byte of a row's chunk 0."""
        return self._run(at, first, count, 1)

    def _run(self, at, first, count, width):
        steps = self.chunks // width
        if count % steps == 0 or steps % count == 0:  # then no sum carries into a band
            at = self._step(at, first, width)
            return [self._step(at, number, width) for number in range(count)]
        return [self._step(at, first + number, width) for number in range(count)]
