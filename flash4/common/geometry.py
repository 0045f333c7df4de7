"""Integer geometry of attention: which KV blocks a query tile visits, and where its mask ends.

Every function here is *dual-mode*: undecorated, branch-free integer arithmetic that takes Python ints on the host
(where property tests prove it) and ``Int32`` values inside a kernel alike. Conditions on static fields (``causal``)
are resolved while tracing.

Queries are aligned bottom-right: query ``i`` of ``seqlen_q`` sits at key position ``i + seqlen_k - seqlen_q``.
"""

from dataclasses import dataclass


def imin(a, b):
    """Smaller of two integers, host ints or kernel ``Int32``."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    import cutlass

    return cutlass.min(cutlass.Int32(a), cutlass.Int32(b))


def imax(a, b):
    """Larger of two integers, host ints or kernel ``Int32``."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    import cutlass

    return cutlass.max(cutlass.Int32(a), cutlass.Int32(b))


def ceil_div(a, b):
    """``a / b`` rounded up, for ``a >= 0`` and ``b > 0``."""
    return (a + b - 1) // b


@dataclass(frozen=True)
class Phase:
    """A run of KV blocks, counted from a tile's last one: [begin, end), all masked or none.

    Attributes:
        begin: first block.
        end: one past the last block.
        masked: whether scores need a mask; static.
    """

    begin: object
    end: object
    masked: bool


@dataclass(frozen=True)
class KvBlocks:
    """KV blocks of ``tile_n`` keys that a tile of ``tile_q`` consecutive queries visits.

    Attributes:
        tile_q: queries per tile (rows of the tile / packed heads).
        tile_n: keys per block.
        causal: query ``i`` sees keys up to ``i + seqlen_k - seqlen_q`` inclusive.
    """

    tile_q: int
    tile_n: int
    causal: bool

    def key_end(self, query, seqlen_q, seqlen_k):
        """One past the last key that ``query`` may see; at most 0 means no key."""
        if not self.causal:
            return seqlen_k
        return imin(seqlen_k, query + 1 + seqlen_k - seqlen_q)

    def until(self, query, seqlen_q, seqlen_k):
        """Blocks [0, until) hold every key that queries up to ``query`` see; at least one block.

        With at least one block every role runs the same code for every tile: rows that see no key at all visit block
        0 with every score masked.
        """
        return ceil_div(imax(self.key_end(query, seqlen_q, seqlen_k), 1), self.tile_n)

    def count(self, m_block, seqlen_q, seqlen_k):
        """Blocks that a tile visits: [0, count)."""
        return self.until((m_block + 1) * self.tile_q - 1, seqlen_q, seqlen_k)

    def unmasked(self, query, seqlen_q, seqlen_k):
        """Blocks [0, unmasked) are visible in full to ``query`` and all queries after it."""
        return imax(self.key_end(query, seqlen_q, seqlen_k), 0) // self.tile_n
