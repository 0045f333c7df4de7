"""How all threads of a CTA find the share of a persistent worker together (see ``varlen``).

Each thread adds up the cost of a part of the sequences; those in whose parts the share begins and ends look closer.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from flash4.common.dsl import plain
from flash4.common.geometry import ceil_div, choose, imin, wide
from flash4.common.varlen import Share, VarlenSchedule


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


def shares_of(tiles: VarlenSchedule, workers: int, threads: int = 32) -> list[Share]:
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
