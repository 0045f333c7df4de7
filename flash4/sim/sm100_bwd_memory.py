"""Shared memory of the simulated Blackwell backward in pieces as its warps write them, and the ends of its rings."""

import numpy as np

from flash4.common.fragments import GROUP_NUMBERS, dq_place
from flash4.common.graph import WARP
from flash4.sim.cluster import arrive_at
from flash4.sim.machine import Machine
from flash4.sim.memory import Region, Space
from flash4.sim.signals import TmaRing, TmaSlot
from flash4.sim.tmem import TensorCore
from flash4.sm100.bwd_config import BackwardConfig
from flash4.sm100.bwd_graph import CHUNK, ROWS

WARPS = ROWS // WARP  # of a warpgroup


class Memory:
    """Shared memory of one CTA by the graph's map, in pieces as warps write them."""

    def __init__(self, machine: Machine, config: BackwardConfig, cta):
        self._space = cta.smem if cta else Space(machine)
        self._bases, self._prefix = config.graph.addresses(), f"{cta.name}." if cta else ""
        self._config = config

    def _region(self, name, label, offset, shape, size) -> Region:
        at = self._bases[name] + offset
        return Region(self._space, self._prefix + label, at, at + int(np.prod(shape)) * size, shape)

    def tile(self, name: str, slot: int = 0) -> Region:
        """K, V, Q, dO, or in a pair K^T (256 keys, half of the head dims), Q^T and dO^T (queries, the same)."""
        c = self._config
        shapes = {
            "k": (ROWS, c.tile_d), "v": (ROWS, c.part_dv),
            "q": (c.tile_m // c.ctas, c.tile_d), "do": (c.tile_m // c.ctas, c.tile_dv),
            "kt": (c.tile_n, c.tile_d // 2), "qt": (c.tile_m, c.tile_d // 2),
            "dot": (c.tile_m, c.tile_dv // 2),
        }  # fmt: skip
        shape = shapes[name]
        nbytes = shape[0] * shape[1] * 2
        return self._region(name, f"{name}[{slot}]", slot * nbytes, shape, 2)

    def stat(self, slot: int) -> Region:
        """-LSE and -D of a step's queries."""
        c = self._config
        return self._region("stat", f"stat[{slot}]", slot * c.stat_bytes, (2, c.tile_m), 4)

    def ds(self, panel: int, warp: int) -> Region:
        """What a warp of ``compute`` writes of a panel: 32 keys, 32 queries."""
        at = panel * self._config.panel_bytes + warp * CHUNK * WARP * 2
        return self._region("ds", f"dS[{panel}] of warp {warp}", at, (WARP, CHUNK), 2)

    def panel(self, panel: int) -> list[Region]:
        """All of a panel."""
        return [self.ds(panel, warp) for warp in range(2 * WARPS)]

    def out(self, name: str, warp: int) -> Region:
        """What a warp of ``compute`` writes of dK or dV, over K or V: 32 keys, half of the columns."""
        columns = (self._config.part_d if name == "k" else self._config.part_dv) // 2
        at = warp * WARP * columns * 2
        return self._region(name, f"d{name.upper()} of warp {warp}", at, (WARP, columns), 2)

    def dq(self, buffer: int, warp: int, lanes: int = WARP) -> Region:
        """What a warp of ``reduce`` writes of a part of dQ: groups of 4 columns, its lanes, 4."""
        numbers = self._config.dq_floats // WARPS
        shape = (numbers // lanes // GROUP_NUMBERS, lanes, GROUP_NUMBERS)
        at = (buffer * WARPS + warp) * numbers * 4
        return self._region("dq", f"dQ[{buffer}] of warp {warp}", at, shape, 4)


class Producer:
    """``load``'s end of a ring: who waits for a slot says how many bytes will come."""

    def __init__(self, ring: TmaRing, rank: int, cta):
        self._ring, self._rank, self._end = ring, rank, ring.producer(cta)

    def acquire_and_advance(self, nbytes: int) -> TmaSlot:
        """Wait until the next slot is free, and announce bytes at its barrier, in a pair those of both CTAs."""
        return self._announce(self._end.acquire_and_advance(), nbytes)

    def advance_unwaited(self, nbytes: int) -> TmaSlot:
        """What a role does that forgets to wait."""
        return self._announce(self._end.advance_unwaited(), nbytes)

    def _announce(self, slot, nbytes):
        if self._rank == 0 or not self._ring.shared:
            arrive_at(slot.full, 1, nbytes * (2 if self._ring.shared else 1))
        return slot


class Cursor:
    """A second consumer's end, of slots that have been waited for before."""

    def __init__(self, ring: TmaRing, core: TensorCore):
        self._end = ring.consumer(None, core)

    def advance(self) -> TmaSlot:
        """The next slot."""
        return self._end.advance_unwaited()


class Free:
    """A warp's arrival that frees a slot."""

    def __init__(self, barrier):
        self._barrier = barrier

    def post(self):
        """Arrive."""
        arrive_at(self._barrier)


class Told:
    """An end of a signal that tells of what other kernels have a ring for."""

    def __init__(self, end):
        self.wait_and_advance, self.advance_unwaited = end.wait, end.skip


class Nothing:
    """An end that this kind of kernel does not need."""

    def post(self):
        """Nothing."""

    def wait(self):
        """Nothing."""

    skip = wait


def panels_of(pieces, count: int) -> np.ndarray:
    """Panels side by side, (128 keys, 64 queries each), of what warps have written."""
    rows = []
    for warp in range(WARPS):
        mine = [pieces[(p * 2 + w) * WARPS + warp] for p in range(count) for w in (0, 1)]
        rows.append(np.concatenate(mine, 1))
    return np.concatenate(rows)


def dq_of_sums(call) -> np.ndarray:
    """What a machine's CTAs have added to dQ, (entries, heads, rows of all slots, padded head dim), as the next kernel reads it."""
    c = call.config
    dq = np.zeros((*call.lse.shape, c.tile_d), np.float32)
    for (entry, head, slot, rank, part, warp), total in call.sums.items():
        shape = total.values.shape  # groups of columns of a lane, lanes of the warp, 4
        group, lane, number = np.meshgrid(*(np.arange(n) for n in shape), indexing="ij")
        # Place in the block, in float32 numbers, and from it what a thread of the next kernel makes of it.
        flat = (rank * c.dq_steps + part) * c.dq_floats
        flat = flat + ((group * WARPS + warp) * shape[1] + lane) * GROUP_NUMBERS + number
        half = c.tile_m * c.tile_d // 2
        which, rest = np.divmod(flat, half)
        its_group, rest = np.divmod(rest, ROWS * GROUP_NUMBERS)
        thread, its_number = np.divmod(rest, GROUP_NUMBERS)
        row, column = dq_place(c, which, thread, its_group, its_number)
        dq[entry, head, slot * c.tile_m + row, column] += total.values
    return dq
