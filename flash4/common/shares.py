"""Tiles of sequences that are shared out beforehand, and how all threads of a CTA find the share of its worker together.

Lengths are known on the GPU only: tiles stand in a row, each with an estimated cost, and worker w of W takes those that
begin in [w, w + 1) / W of the total. No worker has more than its part of the total and one tile. Each thread adds up the
cost of a part of the sequences; those in whose parts the share begins and ends look closer.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from flash4.common.dsl import plain
from flash4.common.geometry import KvBlocks, ceil_div, choose, imax, imin
from flash4.common.tiles import Grid, Place
from flash4.common.varlen import Sequence, Sequences

TILE_COST = 1  # of a tile's prologue and store, in blocks


def wide(a):
    """As a 64-bit integer inside a kernel."""
    return a if isinstance(a, int) else Int64(a)


def narrow(a):
    """As a 32-bit integer inside a kernel."""
    return a if isinstance(a, int) else Int32(a)


@dataclass(frozen=True)
class Share:
    """What one worker takes of all tiles: from one place on, before another.

    Attributes:
        sequence: of its first tile.
        within: number of its first tile in that sequence.
        end_sequence: of the first tile that is not its own.
        end_within: number of that tile in its sequence.
    """

    sequence: object
    within: object
    end_sequence: object
    end_within: object


@dataclass(frozen=True)
class SharedTile:
    """One unit of work; names as in ``tiles.Tile``, ``tiles.Place`` and ``Sequence``.

    Attributes:
        index: number of its sequence.
        within: number of the tile in its sequence.
        place: where it lies, or None where that is decoded anew when it is asked for.
    """

    valid: object
    index: object
    within: object
    m_block: object
    n_blocks: object
    first_block: object
    seqlen_q: object
    seqlen_k: object
    place: object


@dataclass(frozen=True)
class SharedSchedule:
    """The tiles of one worker, in order.

    Tiles of one sequence stand head by head; where queries see different numbers of keys, long and short tiles of a
    head alternate, so that any part of them costs about what their mean says. A sequence without rows has one tile,
    which stores nothing.

    Attributes:
        blocks: visiting rule of KV blocks; static but for the sides of a window.
        grid: groups and KV heads; the rest is not used.
        sequences: of the call.
        share: of this worker; None while it is not known.
        keeps_place: a tile keeps its place, which costs registers; otherwise ``place`` decodes it, which costs time.
    """

    blocks: KvBlocks
    grid: Grid
    sequences: Sequences
    share: object = None
    keeps_place: bool = True

    def lengths(self, tile):
        """(queries, keys) in use of a tile's sequence."""
        return tile.seqlen_q, tile.seqlen_k

    def place(self, tile) -> Place:
        """Where a tile lies."""
        if self.keeps_place:
            return tile.place
        return self._place(self.sequences.at(tile.index), tile.within)

    def _place(self, sequence: Sequence, within) -> Place:
        head = within // self._m_blocks(sequence)
        head_kv = head // self.grid.groups
        return Place(
            group=head - head_kv * self.grid.groups,
            head_kv=head_kv,
            batch=sequence.batch,
            batch_q=sequence.batch_q,
            batch_k=sequence.batch_k,
            row_q=sequence.row_q,
            row_k=sequence.row_k,
            stored_q=sequence.stored_q,
        )

    def _m_blocks(self, sequence: Sequence):
        return imax(ceil_div(sequence.stored_q, self.blocks.tile_q), 1)

    def _tiles_of(self, sequence: Sequence):
        m_blocks = ceil_div(sequence.stored_q, self.blocks.tile_q)
        return imax(m_blocks * self.grid.groups * self.grid.heads_kv, 1)

    def _tile_cost(self, sequence: Sequence):
        """Estimated mean cost of a sequence's tiles, in quarters of a block, rounded up."""
        tile_q, lengths = self.blocks.tile_q, (sequence.seqlen_q, sequence.seqlen_k)
        stored, used = (ceil_div(n, tile_q) for n in (sequence.stored_q, sequence.seqlen_q))
        quarters = 4 * self.blocks.count(0, *lengths)
        if self.blocks.ends_early or self.blocks.begins_late:
            quarters = sum(self.blocks.count(used * i // 8, *lengths) for i in (1, 3, 5, 7))
        if self.sequences.used_q is not None:  # tiles without queries in use visit one block
            total = wide(used) * quarters + 4 * (stored - used)
            quarters = narrow(ceil_div(total, imax(stored, 1)))
        return quarters + 4 * TILE_COST

    def cost(self, index):
        """Estimated cost of a sequence."""
        sequence = self.sequences.at(index)
        return wide(self._tiles_of(sequence)) * self._tile_cost(sequence)

    def tile_at(self, index, cost):
        """(sequence, number of a tile) of the first tile that begins at or behind ``cost`` within sequence ``index``."""
        within = narrow(ceil_div(cost, self._tile_cost(self.sequences.at(index))))
        return self._carry_over(index, within)

    def first(self):
        """Return the worker's first tile."""
        return self.at(self.share.sequence, self.share.within)

    def next(self, tile):
        """Return the worker's next tile."""
        return self.at(*self._carry_over(tile.index, tile.within + 1))

    def _carry_over(self, index, within):
        """(sequence, number of a tile): the next sequence's first if this one has not as many."""
        over = within >= self._tiles_of(self.sequences.at(index))
        return choose(over, index + 1, index), choose(over, 0, within)

    def at(self, index, within):
        """Decode a place: a sequence, and a number of a tile in it."""
        sequence, blocks, share = self.sequences.at(index), self.blocks, self.share
        m_blocks = self._m_blocks(sequence)
        m_block = within - within // m_blocks * m_blocks
        if blocks.ends_early:
            half = m_block // 2
            m_block = choose(m_block - 2 * half > 0, half, m_blocks - 1 - half)
        lengths = (sequence.seqlen_q, sequence.seqlen_k)
        has_queries = imin(imax(sequence.seqlen_q - m_block * blocks.tile_q, 0), 1)
        return SharedTile(
            valid=(index < share.end_sequence)
            | ((index == share.end_sequence) & (within < share.end_within)),
            index=index,
            within=within,
            m_block=m_block,
            n_blocks=imax(blocks.count(m_block, *lengths) * has_queries, 1),
            first_block=blocks.first(m_block, *lengths),
            seqlen_q=sequence.seqlen_q,
            seqlen_k=sequence.seqlen_k,
            place=self._place(sequence, within) if self.keeps_place else None,
        )


@cute.jit
def cost_of(tiles, begin, end):
    """Cost of sequences [begin, end); dual-mode, as the next."""
    total = wide(begin) - wide(begin)  # 0, of the type that the loop carries
    for index in range(begin, end):
        total = total + tiles.cost(index)
    return total


@cute.jit
def sequence_at(tiles, begin, end, cost):
    """(sequence of [begin, end) that ``cost`` lies in, cost from its start); ``cost`` counts from that of ``begin``."""
    found = begin
    for index in range(begin, end):
        size = tiles.cost(index)
        passed = (found == index) & (cost >= size)
        found = choose(passed, index + 1, found)
        cost = cost - choose(passed, 1, 0) * size
    return found, cost


def part_of(thread, threads, count):
    """Sequences [begin, end) of ``count`` that a thread looks at."""
    size = ceil_div(count, threads)
    begin = imin(thread * size, count)
    return begin, imin(begin + size, count)


def shares_of(tiles: SharedSchedule, workers: int, threads: int = 32) -> list[Share]:
    """Host only: the shares of all workers, found as the threads of a CTA find them."""
    parts = [part_of(i, threads, tiles.sequences.count) for i in range(threads)]
    costs = [plain(cost_of)(tiles, *part) for part in parts]
    bounds = []
    for worker in range(workers):
        cost = sum(costs) * worker // workers
        for part, size in zip(parts, costs, strict=True):
            if 0 <= cost < size:
                bounds.append(tiles.tile_at(*plain(sequence_at)(tiles, *part, cost)))
            cost -= size
    bounds.append((tiles.sequences.count, 0))
    return [Share(*bounds[i], *bounds[i + 1]) for i in range(workers)]


@cute.jit
def find_share(tiles, costs: cute.Tensor, thread, threads: cutlass.Constexpr, worker, workers):
    """Share of a worker, found by all threads of its CTA; they meet several times, and last before they return.

    Args:
        tiles: schedule without a share.
        costs: (threads,) int64 in shared memory; free for other uses afterwards, TMA among them.
        thread: number of the calling thread.
        threads: threads of the CTA; static.
        worker: number of this CTA.
        workers: CTAs.
    """
    count = tiles.sequences.count
    part = part_of(thread, threads, count)
    mine = cost_of(tiles, *part)
    costs[thread] = mine
    cute.arch.sync_threads()
    before, total = Int64(0), Int64(0)
    for i in range(imin(threads, count)):  # threads behind these have no part
        cost = costs[i]
        before += cutlass.select_(i < thread, cost, Int64(0))
        total += cost
    cute.arch.sync_threads()
    if thread == 0:  # the last share ends with the last sequence
        costs[2] = Int64(count)
        costs[3] = Int64(0)
    cute.arch.sync_threads()
    for bound in cutlass.range_constexpr(2):
        cost = total * (worker + bound) // workers - before
        if (cost >= 0) & (cost < mine):
            sequence, within = tiles.tile_at(*sequence_at(tiles, *part, cost))
            costs[2 * bound] = Int64(sequence)
            costs[2 * bound + 1] = Int64(within)
    cute.arch.sync_threads()
    share = Share(*(Int32(costs[i]) for i in range(4)))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    return share
