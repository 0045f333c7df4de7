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


def floor_div(a, b: int):
    """``a / b`` rounded down, for any sign of ``a``: a shift if ``b`` is a power of two."""
    return a >> (b.bit_length() - 1) if b & (b - 1) == 0 else a // b


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
        unfixed: whether it would, had a row not outgrown it; static.
        left_only: whether a mask cuts them at most before a row's first visible key; static.
    """

    begin: object
    end: object
    masked: bool
    fixed: bool = False
    unfixed: bool = False
    left_only: bool = False


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

    def of_query(self, query, seqlen_q, seqlen_k):
        """Block of the first key that ``query`` may see."""
        return self.key_begin(query, seqlen_q, seqlen_k) // self.tile_n

    def first(self, m_block, seqlen_q, seqlen_k):
        """First block that a tile visits."""
        return self.of_query(m_block * self.tile_q, seqlen_q, seqlen_k)

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


@dataclass(frozen=True)
class QueryBlocks:
    """Blocks of ``tile_m`` queries that a tile of ``tile_n`` keys visits in the backward, from the first to the last.

    Attributes:
        tile_m: queries per block.
        tile_n: keys per tile.
        causal: a query sees no key after its own position.
        left: keys before its own position that a query sees; None is no limit. A run-time value.
        right: keys after its own position that a query sees; None is no limit, or ``causal``. A run-time value.
        group: tiles that come in order together: down in the first group, up in the next, and so on. Static; 0: all up.
            Of causal calls without a left side only.
    """

    tile_m: int
    tile_n: int
    causal: bool
    left: object = None
    right: object = None
    group: int = 0

    @property
    def begins_late(self) -> bool:
        """Whether the first queries may not see a key; static."""
        return self.causal or self.right is not None

    @property
    def ends_early(self) -> bool:
        """Whether the last queries may not see a key; static."""
        return self.left is not None

    def query_begin(self, key, seqlen_q, seqlen_k):
        """First query that may see ``key``; behind every block's last query for a key that does not exist."""
        begin = 0
        if self.begins_late:
            begin = key - (seqlen_k - seqlen_q)
            begin = imax(begin if self.right is None else begin - self.right, 0)
        return choose(key < seqlen_k, begin, seqlen_q + self.tile_m)

    def query_end(self, key, seqlen_q, seqlen_k):
        """One past the last query that may see ``key``; at most 0 means none."""
        if not self.ends_early:
            return seqlen_q
        return imin(self.window_end(key, seqlen_q, seqlen_k), seqlen_q)

    def window_end(self, key, seqlen_q, seqlen_k):
        """The same as if queries went on for ever."""
        return key - (seqlen_k - seqlen_q) + self.left + 1

    def first(self, n_block, seqlen_q, seqlen_k):
        """First block that tile ``n_block`` visits."""
        if not self.begins_late:
            return 0
        return self.query_begin(n_block * self.tile_n, seqlen_q, seqlen_k) // self.tile_m

    def count(self, n_block, seqlen_q, seqlen_k):
        """Number of blocks that it visits, from ``first`` on; at least one, of which a tile that nobody sees masks all."""
        first = self.first(n_block, seqlen_q, seqlen_k)
        if not self.ends_early:
            return ceil_div(seqlen_q, self.tile_m) - first
        last_key = imin((n_block + 1) * self.tile_n, seqlen_k) - 1
        end = imax(self.query_end(last_key, seqlen_q, seqlen_k), 0)
        return imax(ceil_div(end, self.tile_m) - first, 1)

    def tile_at(self, position, seqlen_k):
        """Tile of keys that comes at ``position``."""
        if not self.group:
            return position
        begin, last, descends = self._group_of(position, seqlen_k)
        return choose(descends, begin + last - position, position)

    def _group_of(self, n_block, seqlen_k):
        """(first tile, last tile, whether they come in descending order) of the group of a tile, or of a position."""
        number = floor_div(n_block, self.group)
        begin = number * self.group
        last = imin(begin + self.group, ceil_div(seqlen_k, self.tile_n)) - 1
        return begin, last, (number & 1) == 0

    def rank(self, n_block, block, seqlen_q, seqlen_k):
        """How many tiles that come before ``n_block`` hold keys that a query of ``block`` may see; negative if it holds none."""
        if self.group:
            begin, last, descends = self._group_of(n_block, seqlen_k)
            last_key = (block + 1) * self.tile_m - 1 + seqlen_k - seqlen_q
            last_seen = imin(floor_div(last_key, self.tile_n), last)
            return choose(descends, begin + last_seen - n_block, n_block)
        if not self.ends_early:
            return n_block
        first_key = block * self.tile_m + seqlen_k - seqlen_q - self.left
        return n_block - imax(first_key, 0) // self.tile_n

    def unmasked(self, n_block, seqlen_q, seqlen_k):
        """(begin, end) of the blocks, counted from ``first``, whose queries all see all keys of the tile.

        None, where the tile reaches past the last key.
        """
        first = self.first(n_block, seqlen_q, seqlen_k)
        count = self.count(n_block, seqlen_q, seqlen_k)
        last_key = (n_block + 1) * self.tile_n - 1
        late = imin(self.query_begin(last_key, seqlen_q, seqlen_k), seqlen_q)
        begin = imin(imax(ceil_div(late, self.tile_m) - first, 0), count)
        begin = choose(last_key < seqlen_k, begin, count)
        if not self.ends_early:
            return begin, count
        # Queries behind the last need no mask: their LSE hides them.
        early = self.query_end(n_block * self.tile_n, seqlen_q, seqlen_k)
        whole = choose(early < seqlen_q, imax(early, 0), seqlen_q + self.tile_m - 1) // self.tile_m
        return begin, imin(imax(whole - first, begin), count)
