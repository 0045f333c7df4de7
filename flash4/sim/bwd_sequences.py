"""Sequences of different lengths in the simulated backward: sides, tiles of CTAs, and the kernels around it in NumPy."""

from dataclasses import dataclass, fields, replace

import numpy as np

from flash4.common.dsl import plain
from flash4.common.geometry import ceil_div
from flash4.common.kv_sequences import (
    SequenceSchedule,
    SequenceTile,
    Side,
    find_tile,
    row_block,
    visited_rows,
)
from flash4.common.kv_tiles import KvGrid
from flash4.sim.handout import HostWarp


@dataclass(frozen=True)
class HostTile(SequenceTile):
    """A tile, and which of its CTA's it is."""

    position: int = 0


@dataclass(frozen=True)
class HostTiles(SequenceSchedule):
    """Tiles of one CTA. On a GPU it has one; here any that grow in number, which is harder."""

    mine: tuple[SequenceTile, ...] = ()

    def first(self):
        """Return the CTA's first tile."""
        return self._at(0)

    def next(self, tile):
        """Return the CTA's tile after ``tile``."""
        return self._at(tile.position + 1)

    def _at(self, position):
        valid = position < len(self.mine)
        tile = self.mine[position if valid else 0]
        facts = {field.name: getattr(tile, field.name) for field in fields(SequenceTile)}
        return HostTile(**facts | {"valid": valid, "position": position})


def sides_of(config, q, k, options) -> tuple[Side, Side]:
    """Where queries and keys lie; q and k are (B, S, H, D), packed ones a batch of one."""
    cu_q, cu_k, used_q, used_k = (
        None if x is None else [int(n) for n in x] for x in options.lengths
    )
    batch = q.shape[0] if cu_q is None else len(cu_q) - 1
    return (
        Side(batch, q.shape[1], config.tile_m, cu_q, used_q),
        Side(batch, k.shape[1], config.tile_n, cu_k, used_k),
    )


def tiles_of_ctas(config, blocks, sides, heads: tuple[int, int], workers, section):
    """Tiles of each of so many CTAs; fewer if there are fewer tiles. ``heads`` are KV heads, and query heads of each."""
    schedule = _schedule(config, blocks, sides, heads, section)
    found = (plain(find_tile)(schedule, HostWarp(), n) for n in range(schedule.total))
    tiles = [tile for tile in found if tile.valid]
    shares = [tuple(tiles[i::workers]) for i in range(min(workers, len(tiles)))]
    return [replace(schedule, mine=share) for share in shares]


def _schedule(config, blocks, sides, heads, section) -> HostTiles:
    grid = KvGrid(0, heads[0], 0, heads[1])
    backwards = getattr(config, "backwards", False)
    return HostTiles(blocks, grid, *sides, section, config.least_heads, backwards)


def tiles_handed_out(config, blocks, sides, heads: tuple[int, int], workers, section):
    """The same where a CTA is handed any of all numbers: the whole schedule for each."""
    schedule = _schedule(config, blocks, sides, heads, section)
    return [schedule] * min(workers, schedule.total)


def slots_and_entries(side: Side) -> tuple[int, int]:
    """(batch entries, slots of each)."""
    if side.cu is None:
        return side.batch, ceil_div(side.rows, side.tile)
    return 1, side.slots


def blocks_of_rows(side: Side):
    """(entry, slot, ``RowBlock``) of all slots."""
    entries, slots = slots_and_entries(side)
    for entry in range(entries):
        for slot in range(slots):
            yield entry, slot, plain(row_block)(side, HostWarp(), slot, entry)


def to_slots(side: Side, x, fill):
    """Statistics (B, H, S) by slots, (entries, H, slots tile); what is not in use is ``fill``."""
    entries, slots = slots_and_entries(side)
    found = np.full((entries, x.shape[1], slots * side.tile), fill, np.float32)
    for entry, slot, rows in blocks_of_rows(side):
        n = min(max(rows.used, 0), side.tile)
        found[entry, :, slot * side.tile : slot * side.tile + n] = x[
            rows.entry, :, rows.begin : rows.begin + n
        ]
    return found


def to_rows(side: Side, sums, out, visits=None):
    """dQ by slots (entries, H, slots tile, D) into rows of ``out`` (B, S, H, D); what is not in use is 0.

    ``visits`` are the visiting rule and the keys, where sums that no tile has visited may be anything.
    """
    for entry, slot, rows in blocks_of_rows(side):
        used = visited_rows(*visits, rows) if visits else rows.used
        stored, used = (min(max(n, 0), side.tile) for n in (rows.stored, used))
        block = sums[entry, :, slot * side.tile :][:, : side.tile, : out.shape[3]]
        target = out[rows.entry, rows.begin : rows.begin + stored]
        target[:] = 0
        target[:used] = block[:, :used].transpose(1, 0, 2)
    return out
