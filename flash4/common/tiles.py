"""Work tiles and the order in which a persistent grid visits them (dual-mode, see ``geometry``).

One tile is ``tile_q`` queries of one head, or of one group of query heads that share a KV head, of one batch entry.
``TileSchedule.at`` is the only place where a tile index gets its meaning.
"""

import heapq
from dataclasses import dataclass, fields, replace

import numpy as np

from flash4.common.geometry import KvBlocks, ceil_div, choose, imax, imin

ENDS_KEYS = 192  # prologue and store of a tile take about as long as so many keys; measured


@dataclass(frozen=True)
class Tile:
    """One unit of work: a query tile and the number of KV blocks that it visits.

    Attributes:
        index: position in the schedule.
        valid: whether the index lies inside the schedule.
        m_block: query tile within the sequence.
        group: group of packed query heads within the heads that share ``head_kv``.
        head_kv: KV head.
        batch: batch entry.
        n_blocks: KV blocks to visit, counted down from ``n_blocks - 1``.
        first_block: block of the sequence that the last of them, number 0, is.
        again: pass over the worker's tiles: 0, then 1 for those whose rows outgrew a fixed shift, then 2 for those whose O
            overflowed.
    """

    index: object
    valid: object
    m_block: object
    group: object
    head_kv: object
    batch: object
    n_blocks: object
    first_block: object
    again: object = 0


@dataclass(frozen=True)
class Place:
    """Where a tile lies in the tensors of a call.

    Attributes:
        group: group of packed query heads within the heads that share ``head_kv``.
        head_kv: KV head.
        batch: number of its sequence in the call.
        batch_q: batch entry of q; 0 if it is packed.
        batch_k: batch entry of k and v; 0 if they are packed.
        row_q: first row of its sequence in packed q, else 0.
        row_k: first row of its sequence in packed k and v, else 0.
        stored_q: rows that its sequence has in q.
    """

    group: object
    head_kv: object
    batch: object
    batch_q: object
    batch_k: object
    row_q: object
    row_k: object
    stored_q: object


@dataclass(frozen=True)
class Grid:
    """Extent of the work, in tiles.

    Attributes:
        m_blocks: query tiles per sequence.
        groups: groups of packed query heads per KV head.
        heads_kv: KV heads.
        batch: batch entries.
    """

    m_blocks: object
    groups: object
    heads_kv: object
    batch: object

    @property
    def head_count(self):
        """Independent (batch, head group) pairs."""
        return self.groups * self.heads_kv * self.batch

    @property
    def total(self):
        """Number of tiles."""
        return self.m_blocks * self.head_count


@dataclass(frozen=True)
class Divisors:
    """What a tile index is divided by on its way to a tile: numbers, or what a kernel divides by in fewer instructions.

    Attributes:
        tiles: of a section.
        heads: of a section.
        last_heads: of the last section, if it has fewer.
        groups: as in ``Grid``.
        heads_kv: as in ``Grid``.
        step: number of workers.
    """

    tiles: object
    heads: object
    last_heads: object
    groups: object
    heads_kv: object
    step: object

    @staticmethod
    def of(grid: Grid, section, step) -> "Divisors":
        """Derive them from a schedule's parts."""
        rest = grid.head_count - grid.head_count // section * section
        return Divisors(
            section * grid.m_blocks, section, imax(rest, 1), grid.groups, grid.heads_kv, step
        )

    def each(self, change) -> "Divisors":
        """Change each of them."""
        return Divisors(*(change(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True)
class TileSchedule:
    """Static persistent order: worker ``start`` of ``step`` takes one tile of every wave of ``step`` tiles.

    Heads are cut into sections of ``section`` heads, so that what is live fits the L2; within a section the query
    tiles run from the longest to the shortest, over all heads of the section. Causal waves run over the workers in
    alternating direction ("snake"), so that a worker which got the longest tile of one wave gets the shortest of the
    next.

    Attributes:
        blocks: visiting rule of KV blocks; static but for the sides of a window.
        grid: extent of the work.
        section: heads per section.
        start: this worker, 0 <= start < step.
        step: number of workers.
        seqlen_q: queries per sequence.
        seqlen_k: keys per sequence.
        divisors: of the other fields, where a kernel has prepared them.
    """

    blocks: KvBlocks
    grid: Grid
    section: object
    start: object
    step: object
    seqlen_q: object
    seqlen_k: object
    divisors: object = None

    @property
    def _by(self) -> Divisors:
        if self.divisors is None:
            return Divisors.of(self.grid, self.section, self.step)
        return self.divisors

    def lengths(self, tile):
        """(queries, keys) of a tile's sequence."""
        return self.seqlen_q, self.seqlen_k

    def place(self, tile) -> Place:
        """Where a tile lies."""
        batch = tile.batch
        return Place(tile.group, tile.head_kv, batch, batch, batch, 0, 0, self.seqlen_q)

    @property
    def descends(self) -> bool:
        """Whether later query tiles see more keys, so that they come first; static."""
        return self.blocks.ends_early

    def first(self):
        """Return the worker's first tile."""
        return self.at(self.start)

    def next(self, tile):
        """Return the worker's tile in the wave after that of ``tile``."""
        return self.at(self.next_index(tile.index))

    def ask(self, tile):
        """Nothing: which tile comes next is known."""
        return tile

    def wave(self, index):
        """Wave of a tile index: how many tiles the worker had before."""
        return index // self._by.step

    def next_index(self, index):
        """Index of the worker's tile in the wave after that of ``index``."""
        if not self.descends:
            return index + self.step
        wave = self.wave(index) + 1
        backwards = wave % 2
        return wave * self.step + self.start + backwards * (self.step - 1 - 2 * self.start)

    def at(self, index):
        """Decode a tile index."""
        grid, by = self.grid, self._by
        section = index // by.tiles
        within = index - section * (self.section * grid.m_blocks)
        # The index behind the last tile decodes too, to a place outside the tensors. (Both branches have the same ``head``;
        # written once, ptxas spills a register in two configs.)
        left = grid.head_count - section * self.section
        if self.divisors is None:
            heads = imax(imin(left, self.section), 1)
            m_block = within // heads
            head = section * self.section + within - m_block * heads
        else:
            is_last = left < self.section
            m_block = choose(is_last, within // by.last_heads, within // by.heads)
            head = (
                section * self.section
                + within
                - m_block * choose(is_last, imax(left, 1), self.section)
            )
        if self.descends:
            m_block = grid.m_blocks - 1 - m_block
        head_of_all = head // by.groups
        batch = head_of_all // by.heads_kv
        return Tile(
            index=index,
            valid=index < grid.total,
            m_block=m_block,
            group=head - head_of_all * grid.groups,
            head_kv=head_of_all - batch * grid.heads_kv,
            batch=batch,
            n_blocks=self.blocks.count(m_block, self.seqlen_q, self.seqlen_k),
            first_block=self.blocks.first(m_block, self.seqlen_q, self.seqlen_k),
        )

    def workers(self):
        """Host only: the tile lists of all workers."""
        lists = []
        for start in range(self.step):
            mine, tiles = replace(self, start=start), []
            tile = mine.first()
            while tile.valid:
                tiles.append(tile)
                tile = mine.next(tile)
            lists.append(tiles)
        return lists

    def _costs(self, ends: float = 1.0):
        """Host only: (tiles,) blocks of each tile, and ``ends`` for its prologue and store."""
        grid = self.grid
        index = np.arange(grid.total)
        section = index // (self.section * grid.m_blocks)
        heads = np.minimum(self.section, grid.head_count - section * self.section)
        m_block = (index - section * self.section * grid.m_blocks) // heads
        if self.descends:
            m_block = grid.m_blocks - 1 - m_block
        counts = [self.blocks.count(m, self.seqlen_q, self.seqlen_k) for m in range(grid.m_blocks)]
        return np.array(counts)[m_block] + ends

    def imbalance(self) -> float:
        """Host only: the busiest worker's load over the mean load."""
        cost = self._costs()
        index = np.arange(self.grid.total)
        wave, worker = index // self.step, index % self.step
        if self.descends:
            worker = np.where(wave % 2 == 1, self.step - 1 - worker, worker)
        loads = np.bincount(worker, weights=cost, minlength=self.step)
        return float(loads.max() * self.step / loads.sum())

    def handed_out_costs(self):
        """Host only: (tiles,) blocks of each tile, with its prologue and store, by which ``handed_out`` counts."""
        return self._costs(ENDS_KEYS / self.blocks.tile_n)

    def handed_out(self, spread: float = 0.0) -> tuple[list[list[int]], float]:
        """Host only: indices of all workers' tiles if whoever is free takes the next, and the ``imbalance`` of that.

        ``spread`` is that of times of equal tiles, some random ones.
        """
        costs = self.handed_out_costs()
        costs = costs * (1 + spread * np.random.default_rng(0).standard_normal(costs.size))
        free, lists = [(0.0, worker) for worker in range(self.step)], [[] for _ in range(self.step)]
        for index, cost in enumerate(costs.tolist()):
            time, worker = free[0]
            lists[worker].append(index)
            heapq.heapreplace(free, (time + cost, worker))
        return lists, max(free)[0] * self.step / float(costs.sum())


def multiprocessors_for(tiles, multiprocessors: int, ctas: int) -> int:
    """Host only: as few of the multiprocessors as need no more waves for tiles that all cost the same.

    The last wave is nearly full then. With a power of two of tiles, waves begin with whole heads: few K and V are live.
    """
    workers = workers_of(multiprocessors, ctas)
    return ceil_div(tiles, ceil_div(tiles, workers)) * ctas


def workers_of(multiprocessors, ctas):
    """Workers of a persistent grid, each with a multiprocessor to each of its CTAs; at least one, dual-mode."""
    return imax(multiprocessors // ctas, 1)


def grid_of(problem, tile_q: int, pack: int) -> Grid:
    """Tiles of a dense problem: ``pack`` query heads share a tile of ``tile_q`` queries."""
    return Grid(
        m_blocks=ceil_div(problem.seqlen_q, tile_q),
        groups=ceil_div(problem.heads_q // problem.heads_kv, pack),
        heads_kv=problem.heads_kv,
        batch=problem.batch,
    )
