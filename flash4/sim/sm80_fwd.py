"""The Ampere forward on a CPU: its own role and tiles, with verbs in NumPy; a machine for each CTA.

Arithmetic is float32, rounded to 16 bit where the kernel rounds. A warp decides for all its rows whether their softmax
shift moves, as in the kernel.
"""

from dataclasses import dataclass

import numpy as np

from flash4.common.dsl import plain
from flash4.common.geometry import ceil_div
from flash4.common.graph import WARP
from flash4.common.numerics import LN2, LOG2E
from flash4.common.tiles import TileSchedule
from flash4.common.varlen import VarlenSchedule
from flash4.problem import CallOptions
from flash4.sim.barriers import Barrier
from flash4.sim.calls import ForwardCall
from flash4.sim.cp_async import CpAsync
from flash4.sim.handout import HostWarp
from flash4.sim.limits import check_graph
from flash4.sim.machine import Machine
from flash4.sim.memory import Region, Space
from flash4.sim.scores import apply_mods, change, mask
from flash4.sim.sm90_fwd import Call, matmul, round_to_16_bit
from flash4.sm80.fwd_config import ELEMENT_BYTES, GROWTH_LOG2, KEY_STEP, ForwardConfig
from flash4.sm80.fwd_roles import ForwardRoles
from flash4.sm80.fwd_tiles import FoundTiles, find
from flash4.sm80.shared_rows import SharedRows

SMEM_LIMIT = 166_912  # of an A100


class HostFoundTiles(FoundTiles):
    """A CTA's tile, found in plain Python."""

    def find(self):
        """See ``find``."""
        return plain(find)(self.schedule, self.warp, self.number)


class CopiedRows:
    """Rows in shared memory that the warps of a CTA copy together.

    Args:
        memory: of the CTA.
        name: of the array.
        base: first byte.
        rows: the array.
        warps: that copy.
    """

    def __init__(self, memory: Space, name: str, base: int, rows: SharedRows, warps: int):
        size, nbytes = WARP // rows.chunks, rows.columns * ELEMENT_BYTES
        self._size, self.warps = size, warps
        self.regions = [
            Region(
                memory, f"{name} rows {i}", base + i * nbytes, base + min(i + size, rows.rows) * nbytes,
                (min(size, rows.rows - i), rows.columns),
            )
            for i in range(0, rows.rows, size)
        ]  # fmt: skip

    def of_warp(self, warp: int):
        """(rows, region) of what a warp copies."""
        for i in range(warp, len(self.regions), self.warps):
            yield slice(i * self._size, (i + 1) * self._size), self.regions[i]

    def read(self, rows: range | None = None) -> np.ndarray:
        """Rows, or all, read by the acting task."""
        mine = range(len(self.regions))
        if rows is not None:
            mine = range(rows.start // self._size, ceil_div(rows.stop, self._size))
        return np.concatenate([self.regions[i].read() for i in mine])


class WarpOps:
    """Verbs of ``attend``, for one warp."""

    def __init__(self, machine: Machine, call: Call, warp: int, memory: dict, barrier: Barrier):
        self._machine, self._call, self._config, self._warp = machine, call, call.config, warp
        self._memory, self._barrier = memory, barrier
        self._copies = CpAsync(machine, f"warp {warp}")
        rows = call.config.warp_rows
        self._rows = range(warp * rows, (warp + 1) * rows)

    @property
    def prologue(self):
        """Blocks that are copied before the first is multiplied."""
        return tuple(range(self._config.stages - 1))

    def phases(self, tile):
        """See ``ForwardConfig.phases``."""
        return self._config.phases(tile, self._call.tiles)

    def begin(self, tile):
        """O = 0, shift = -inf, l = 0."""
        count = len(self._rows)
        self._o = np.zeros((count, self._config.tile_dv), np.float32)
        self._shift = np.full(count, -np.inf, np.float32)
        self._total = np.zeros(count, np.float32)

    def copy_q(self, tile):
        """Start this warp's copies of the tile's queries."""
        c, call = self._config, self._call
        place, all_rows = call.tiles.place(tile), range(c.tile_m)
        query, head, exists = call.places(tile, all_rows)
        block = np.zeros((c.tile_m, c.tile_d), np.float32)
        rows = call.q[place.batch_q, place.row_q + query[exists], head[exists]]
        block[exists, : rows.shape[1]] = rows
        self._copy(self._memory["q"], block)

    def _copy(self, target: CopiedRows, block: np.ndarray):
        for rows, region in target.of_warp(self._warp):
            self._copies.copy(region, block[rows])

    def copy_first(self, tile, i):
        """Start the copies of block ``i`` of the prologue."""
        if i < tile.n_blocks:
            self._copy_block(tile, i)

    def copy_next(self, tile, i):
        """Start the copies of the block that many stages behind block ``i``, if there is one."""
        self.copy_first(tile, i + self._config.stages - 1)

    def _copy_block(self, tile, i):
        c, call, place = self._config, self._call, self._call.tiles.place(tile)
        first = (tile.first_block + tile.n_blocks - 1 - i) * c.tile_n
        count = c.tile_n  # all of them exist, unless it is the last
        if i == 0:
            count = min(max(call.tiles.lengths(tile)[1] - first, 0), c.tile_n)
        for name, x, width in (("k", call.k, c.tile_d), ("v", call.v, c.tile_dv)):
            rows = x[
                place.batch_k, place.row_k + first : place.row_k + first + count, place.head_kv
            ]
            block = np.zeros((c.tile_n, width), np.float32)
            block[:count, : rows.shape[1]] = rows
            self._copy(self._memory[name][i % c.stages], block)

    def commit(self):
        """Close a group of copies."""
        self._copies.commit_group()

    def wait_copies(self):
        """Wait for this warp's copies of the block that comes next."""
        self._copies.wait_group(self._config.stages - 2)

    def sync(self):
        """Meet all warps of the CTA."""
        self._barrier.sync()

    def qk(self, i):
        """S = Q K^T of block ``i``."""
        q = self._memory["q"].read(self._rows)
        return matmul(q, self._memory["k"][i % self._config.stages].read().T)

    def move_shift(self, tile, i, s, phase):
        """Change scores and mask them; let the shift follow the maximum, and O and l the shift."""
        call, c = self._call, self._config
        keys = (tile.first_block + tile.n_blocks - 1 - i) * c.tile_n + np.arange(c.tile_n)
        if c.negate:
            np.negative(s, out=s)
        change(call, tile, self._rows, keys, s)
        apply_mods(call, tile, self._rows, keys, s)
        if phase.masked:
            mask(call, tile, self._rows, keys, s)
        scale, growth = call.scale_log2, np.float32(GROWTH_LOG2)
        limit, top = (self._shift + growth) / scale, s.max(1)
        if ((top > limit) | np.signbit(limit)).any():
            old, top = self._shift, top * scale
            self._shift = np.where(top > old + growth, top, old)
            finite = np.where(self._shift == -np.inf, 0, self._shift)
            correction = np.exp2(old - finite)
            self._total *= correction
            self._o *= correction[:, None]

    def softmax_pv(self, i, s, phase):
        """P = exp2(scale_log2 S - shift), l += rowsum P, O += P V, 16 keys at a time."""
        c, shift = self._config, self._shift
        if phase.masked or c.may_hide_any:
            shift = np.where(shift == -np.inf, 0, shift)
        p = np.exp2(s * self._call.scale_log2 - shift[:, None])
        v = self._memory["v"][i % c.stages].read()
        for key in range(0, c.tile_n, KEY_STEP):
            step = slice(key, key + KEY_STEP)
            self._o += round_to_16_bit(p[:, step], c.bf16) @ v[step]
        self._total += p.sum(1)

    def store(self, tile):
        """O / l and LSE = ln 2 (shift + log2 l); a row without keys gives 0 and -inf, or its sink."""
        call, c, place = self._call, self._config, self._call.tiles.place(tile)
        query, head, exists = call.places(tile, self._rows)
        unused = query >= call.tiles.lengths(tile)[0]
        empty = (self._total == 0) | unused
        shift, total, shrink = self._shift, self._total, np.float32(1)
        if c.sink:
            sink_log2 = call.options.sink[head % len(call.options.sink)] * np.float32(LOG2E)
            shift = np.maximum(self._shift, sink_log2)
            finite = np.where(shift == -np.inf, 0, shift)
            shrink = np.exp2(self._shift - finite)
            total = total * shrink + np.exp2(sink_log2 - finite)
        lse = np.where(unused | (total == 0), -np.inf, (shift + np.log2(total)) * np.float32(LN2))
        o = np.where(empty[:, None], 0, self._o * (shrink / total)[:, None])
        query, head = (query + place.row_q)[exists], head[exists]
        call.lse[place.batch_q, head, query] = lse[exists]
        if c.rows_o.nbytes != c.rows_q.nbytes:
            self.sync()
        staged = self._memory["o"][self._warp]
        staged.write(round_to_16_bit(o, c.bf16))
        call.out[place.batch_q, query, head] = staged.read()[exists, : call.out.shape[3]]


@dataclass(frozen=True)
class Variation:
    """What a run may change, to see whether it matters.

    Attributes:
        roles: class of the role.
        strict: as of ``Machine``.
    """

    roles: type = ForwardRoles
    strict: bool = True


def simulate_forward(
    config: ForwardConfig, q, k, v, options: CallOptions | float, workers=2, seed=0, variation=None
) -> tuple[np.ndarray, np.ndarray]:
    """Run the kernel's role on every tile of a problem; arguments and result as of ``sm90_fwd.simulate_forward``.

    ``workers`` is not used: each tile has a CTA of its own.

    Raises:
        Hazard: the schedule deadlocks or breaks a rule of the hardware.
    """
    call = None
    for machine, made in forward_machines(config, (q, k, v), options, workers, seed, variation):
        machine.run()
        call = made
    return (call.out[0], call.lse[0]) if config.cu_q else (call.out, call.lse)


def forward_machines(config, tensors, options, workers, seed, variation=None):
    """Yield the machine and the call of every CTA, ready to run; arguments as of ``simulate_forward``."""
    made, variation = ForwardCall.of(config, tensors, options), variation or Variation()
    grid, blocks = made.grid, made.blocks
    check_graph(config.graph, SMEM_LIMIT)
    if config.varlen:
        schedule = VarlenSchedule(blocks, grid, made.sequences, 1 + 97 * (seed % 9))
        total = HostFoundTiles(schedule, HostWarp(), 0).total
        tiles = [HostFoundTiles(schedule, HostWarp(), number) for number in range(total)]
    else:
        section = 1 + seed % grid.head_count
        tiles = [
            TileSchedule(blocks, grid, section, number, 1, *made.rows)
            for number in range(grid.total)
        ]
    for number, mine in enumerate(tiles):
        call = Call(config, made.q, made.k, made.v, made.out, made.lse, made.options, mine, None)
        machine = Machine(seed + number, variation.strict)
        _fill_cta(machine, call, variation)
        yield machine, call


def _fill_cta(machine: Machine, call: Call, variation: Variation):
    """Memory, barrier and warps of one CTA, by the config's graph."""
    c, space = call.config, Space(machine)
    bases = c.graph.addresses()

    def ring(name, rows):
        return [
            CopiedRows(space, f"{name}[{i}]", bases[name] + i * rows.nbytes, rows, c.warps)
            for i in range(c.stages)
        ]

    part = c.warp_rows * c.tile_dv * ELEMENT_BYTES
    memory = {
        "q": CopiedRows(space, "q", bases["q"], c.rows_q, c.warps),
        "k": ring("k", c.rows_k),
        "v": ring("v", c.rows_v),
        "o": [
            Region(
                space, f"o of warp {w}", bases["o"] + w * part, bases["o"] + (w + 1) * part,
                (c.warp_rows, c.tile_dv),
            )
            for w in range(c.warps)
        ],
    }  # fmt: skip
    barrier = Barrier(machine, "__syncthreads", c.warps)
    attend, schedule = plain(variation.roles.attend), variation.roles()
    for warp in range(c.warps):
        ops = WarpOps(machine, call, warp, memory, barrier)
        machine.spawn(f"warp {warp}", attend, schedule, ops, call.tiles)
