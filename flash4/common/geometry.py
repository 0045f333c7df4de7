"""Integer geometry of attention: which KV blocks a query tile visits, and where its mask ends.

Every function here is *dual-mode*: undecorated, branch-free integer arithmetic that takes Python ints on the host
(where property tests prove it) and ``Int32`` values inside a kernel alike. Conditions on static fields (``causal``)
are resolved while tracing.

Queries are aligned bottom-right: query ``i`` of ``seqlen_q`` sits at key position ``i + seqlen_k - seqlen_q``.

Lengths and sides of a window are below 2^30, so that their sums fit 32 bits.
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


def choose(condition, a, b):
    """``a if condition else b`` of two integers, without a branch inside a kernel."""
    if isinstance(condition, bool):
        return a if condition else b
    import cutlass

    return cutlass.select_(condition, cutlass.Int32(a), cutlass.Int32(b))


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
        fixed: whether the softmax shift stays, unlooked at; static.
    """

    begin: object
    end: object
    masked: bool
    fixed: bool = False


@dataclass(frozen=True)
class KvBlocks:
    """KV blocks of ``tile_n`` keys that a tile of ``tile_q`` consecutive queries visits.

    Attributes:
        tile_q: queries per tile (rows of the tile / packed heads).
        tile_n: keys per block.
        causal: query ``i`` sees keys up to ``i + seqlen_k - seqlen_q`` inclusive.
        left: keys before its own position that a query sees; None is no limit. A run-time value.
        right: keys after its own position that a query sees; None is no limit, or ``causal``. A run-time value.
    """

    tile_q: int
    tile_n: int
    causal: bool
    left: object = None
    right: object = None

    @property
    def ends_early(self) -> bool:
        """Whether some queries may see fewer than all keys up to the last; static."""
        return self.causal or self.right is not None

    @property
    def begins_late(self) -> bool:
        """Whether some queries may not see the first keys; static."""
        return self.left is not None

    def key_end(self, query, seqlen_q, seqlen_k):
        """One past the last key that ``query`` may see; at most 0 means no key."""
        if not self.ends_early:
            return seqlen_k
        reach = query + 1 + seqlen_k - seqlen_q
        if self.right is not None:
            reach = reach + self.right
        return imin(seqlen_k, reach)

    def key_begin(self, query, seqlen_q, seqlen_k):
        """First key that ``query`` may see."""
        if not self.begins_late:
            return 0
        return imax(query + seqlen_k - seqlen_q - self.left, 0)

    def until(self, query, seqlen_q, seqlen_k):
        """Blocks [0, until) hold every key that queries up to ``query`` see; at least one block.

        With at least one block every role runs the same code for every tile: rows that see no key at all visit block
        0 with every score masked.
        """
        return ceil_div(imax(self.key_end(query, seqlen_q, seqlen_k), 1), self.tile_n)

    def first(self, m_block, seqlen_q, seqlen_k):
        """First block that a tile visits."""
        return self.key_begin(m_block * self.tile_q, seqlen_q, seqlen_k) // self.tile_n

    def count(self, m_block, seqlen_q, seqlen_k):
        """Number of blocks that a tile visits, from ``first`` on; at least one."""
        end = self.until((m_block + 1) * self.tile_q - 1, seqlen_q, seqlen_k)
        if not self.begins_late:
            return end
        return imax(end - self.first(m_block, seqlen_q, seqlen_k), 1)

    def unmasked(self, query, seqlen_q, seqlen_k):
        """Blocks before this one end before any key that ``query``, or one after it, may not see at its right.

        The last key that each of them sees is not among them: a row has seen a key once it is through the others.
        """
        return imax(self.key_end(query, seqlen_q, seqlen_k) - 1, 0) // self.tile_n

    def unmasked_from(self, query, seqlen_q, seqlen_k):
        """Blocks from this one on hold no key that ``query``, or one before it, may not see at its left."""
        return ceil_div(self.key_begin(query, seqlen_q, seqlen_k), self.tile_n)
