"""The Blackwell forward on a CPU: its own roles and tile schedule, with verbs in NumPy.

Arithmetic is float32, rounded to 16 bit where the kernel rounds; S, P and O lie in a tensor memory that keeps bits, at the
columns of the graph. A warpgroup is one task.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

from flash4.common import mods
from flash4.common.dsl import plain
from flash4.common.graph import launch_registers
from flash4.common.mods import SeqlenInfo
from flash4.common.numerics import LN2, LOG2E, RESCALE_THRESHOLD_LOG2
from flash4.common.shares import SharedSchedule, shares_of
from flash4.common.tiles import TileSchedule
from flash4.problem import CallOptions
from flash4.sim.barriers import NamedBarrier
from flash4.sim.calls import ForwardCall
from flash4.sim.cluster import Cluster, ClusterBarrier
from flash4.sim.limits import WarpRole, check_graph, check_registers, check_tmem
from flash4.sim.machine import Machine, join
from flash4.sim.memory import Region, Space
from flash4.sim.signals import ByTurns, Edges, Signal, SignalSpec, TmaRing, TmaRingSpec
from flash4.sim.sm90_fwd import matmul, round_to_16_bit
from flash4.sim.tmem import TensorCore, Tmem, TmemPort
from flash4.sm100.fwd_config import (
    CHUNK,
    LARGEST_TOTAL,
    MARKS,
    MMA_ROWS,
    NO_KEY,
    SMEM_LIMIT,
    ForwardConfig,
)
from flash4.sm100.fwd_exp import JUST_BELOW, LOWEST, QUARTIC, RANGE, ROUNDER
from flash4.sm100.fwd_graph import LEADER, THREADS, TMEM_COLUMNS, UMMA, WARP
from flash4.sm100.fwd_roles import ForwardRoles
from flash4.sm100.fwd_tiles import BARRIER_PASS
from flash4.sm100.fwd_wide_roles import WideRoles

STAT_ROW = MMA_ROWS * 4  # bytes of one number for every row of a Q tile


def pack_16_bit(x: np.ndarray, bf16: bool) -> np.ndarray:
    """Pairs of float32 that hold 16-bit values, as the float32 words of half as many columns."""
    halves = (x.view(np.uint32) >> 16).astype(np.uint16) if bf16 else x.astype(np.float16)
    return np.ascontiguousarray(halves).view(np.float32)


def unpack_16_bit(words: np.ndarray, bf16: bool) -> np.ndarray:
    """The inverse of ``pack_16_bit``."""
    words = np.ascontiguousarray(words)
    if not bf16:
        return words.view(np.float16).astype(np.float32)
    return (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def part_of_range(scores: np.ndarray, scale, offset) -> np.ndarray:
    """What the kernel makes of scores for ``exp2_on_fma``; scale and offset are those with which they would be x."""
    scale, offset = np.float64(scale) / RANGE, np.float32(offset) / np.float32(RANGE)
    offset = (offset + np.float32(-LOWEST / RANGE)).astype(np.float64)
    # Of a NaN the number, like the hardware; products of float32 are exact in float64.
    y = np.fmin(np.fmax(scores.astype(np.float64) * scale + offset, 0), 1)
    return y.astype(np.float32)


def exp2_on_fma(y: np.ndarray, bounded: bool) -> np.ndarray:
    """What the kernel's polynomial gives, in float32, for x = 256 y - 127; ``bounded`` if x is known to be below 128."""
    below = RANGE if bounded else JUST_BELOW
    shifted = np.floor(y.astype(np.float64) * below + ROUNDER).astype(np.float32)
    f = y * np.float32(RANGE) + (np.float32(ROUNDER) - shifted)
    power = np.full_like(y, QUARTIC[0])
    for c in QUARTIC[1:]:
        power = power * f + np.float32(c)
    return ((shifted.view(np.int32) << 23) + power.view(np.int32)).view(np.float32)


@dataclass(frozen=True)
class Call:
    """One call of the kernel: tensors as in ``simulate_forward``, and what is derived from them."""

    config: ForwardConfig
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    options: CallOptions
    tiles: object

    @property
    def scale(self) -> np.float32:
        """Factor of a score, positive; within the cap, if there is one."""
        scale = abs(self.options.softmax_scale) or 1.0
        return np.float32(scale / (self.options.softcap or 1.0))

    @property
    def natural_scale(self) -> np.float32:
        """Factor that makes a scaled score of a score, or of the tanh of one."""
        return np.float32(self.options.softcap or self.scale)

    @property
    def scale_log2(self) -> np.float32:
        """Factor of what the softmax takes, in log2 units."""
        return np.float32(LOG2E if self.config.natural else self.natural_scale * LOG2E)

    def places(self, tile, part: int):
        """(queries, heads, whether they exist) of the rows of a part of a tile, as of ``ForwardConfig.part``."""
        pack, ratio = self.config.pack, self.q.shape[2] // self.k.shape[2]
        place = self.tiles.place(tile)
        query, head = np.divmod(np.arange(MMA_ROWS), pack)
        query += self.config.first_query(tile, part)
        head += place.group * pack
        exists = (query < place.stored_q) & (head < ratio)
        return query, place.head_kv * ratio + head, exists


class Tiles:
    """One role's way through a worker's tiles, and through those marked again; all meet at ``barrier`` in between."""

    def __init__(self, schedule, barrier, warps: int, marks: set):
        self._schedule, self._barrier, self._warps, self._marks = schedule, barrier, warps, marks

    def first(self):
        """Return the worker's first tile."""
        return self._schedule.first()

    def next(self, tile):
        """Return the tile after ``tile``."""
        if self._barrier is None:
            return self._schedule.next(tile)
        schedule, again = self._schedule, tile.again
        index = schedule.next_index(tile.index)
        if index >= schedule.grid.total and not again:
            self.meet()
            again = 1
            if self._marks:
                index = schedule.start
        if again:
            while index < schedule.grid.total and schedule.wave(index) % MARKS not in self._marks:
                index = schedule.next_index(index)
        return replace(schedule.at(index), again=again)

    def meet(self):
        """Wait for all who go through the tiles; in a pair those without work, too."""
        if isinstance(self._barrier, ClusterBarrier):
            self._barrier.sync()
        else:
            phase = self._barrier.phase
            self._barrier.arrive(self._warps)
            self._barrier.wait(phase)

    def mark(self, tile):
        """Have a tile worked on again."""
        self._marks.add(self._schedule.wave(tile.index) % MARKS)


class LoadOps:
    """Verbs of the ``load`` role, of one CTA: its rows of Q, its part of K's keys and of V's columns."""

    def __init__(self, call: Call, rank: int):
        self._call, self._rank = call, rank

    def load_q(self, tile, q_tile, slot):
        """Fill a slot with one Q tile."""
        call, c = self._call, self._call.config
        place = call.tiles.place(tile)
        query, head, exists = call.places(tile, c.part(q_tile, self._rank))
        if c.cu_q:
            exists &= query < call.tiles.lengths(tile)[0]
        block = np.zeros((MMA_ROWS, c.tile_d), np.float32)  # TMA fills with zeros
        rows = call.q[place.batch_q, place.row_q + query[exists], head[exists]]
        block[exists, : rows.shape[1]] = rows
        slot.fill(block, c.q_bytes)

    def load_k(self, tile, n_block, slot):
        """Fill a slot with block ``n_block`` of K."""
        c = self._call.config
        block = self._block(self._call.k, tile, n_block, None, c.tile_d)
        slot.fill(np.split(block, c.ctas)[self._rank], c.k_bytes)

    def load_v(self, tile, n_block, slot):
        """Fill a slot with block ``n_block`` of V."""
        c, call = self._call.config, self._call
        seqlen_k = call.tiles.lengths(tile)[1] if c.v_is_ragged else None
        block = self._block(call.v, tile, n_block, seqlen_k, c.tile_dv)
        slot.fill(np.split(block, c.ctas, 1)[self._rank], c.v_bytes)

    def _block(self, x, tile, n_block, seqlen_k, width):
        """A block; without ``seqlen_k`` with what lies in memory, behind the sequence's last key too."""
        tile_n, place = self._call.config.tile_n, self._call.tiles.place(tile)
        first = (tile.first_block + n_block) * tile_n
        end = first + tile_n
        if seqlen_k is not None:
            end = max(min(end, seqlen_k), first)
        rows = x[place.batch_k, place.row_k + first : place.row_k + end, place.head_kv]
        block = np.zeros((tile_n, width), np.float32)
        block[: len(rows), : rows.shape[1]] = rows
        return block


class Columns:
    """The graph's map of tensor memory."""

    def __init__(self, tmem: Tmem, config: ForwardConfig):
        self._tmem, self._map, self._config = tmem, config.graph.tmem, config

    def s(self, buffer: int, column: int = 0, columns: int | None = None):
        """Some columns of S; all by default."""
        columns = self._config.tile_n if columns is None else columns
        return self._tmem.tile(f"S{buffer}", self._map.s(buffer) + column, columns)

    def p(self, buffer: int, column: int, columns: int):
        """Some columns of P, two of them in each of tensor memory."""
        return self._tmem.tile(f"P{buffer}", self._map.p(buffer) + column // 2, columns // 2)

    def o(self, q_tile: int):
        """O of a Q tile."""
        return self._tmem.tile(f"O{q_tile}", self._map.o(q_tile), self._config.tile_dv)

    def part_of_o(self, part: int):
        """What is stored at a time."""
        q_tile, column = self._config.place_of_part(part)
        columns = self._config.o_columns
        return self._tmem.tile(f"O{q_tile}", self._map.o(q_tile) + column * columns, columns)


class MmaOps:
    """Verbs of the ``mma`` role, for all CTAs of a tile; Q tile i is always in slot i.

    Args:
        config: of the kernel.
        core: tensor core of the CTA, or of the pair.
        columns: tensor memory of each CTA.
        q_slots: slots of Q of each CTA.
    """

    def __init__(self, config: ForwardConfig, core: TensorCore, columns: list[Columns], q_slots):
        self._config, self._core, self._columns, self._q = config, core, columns, q_slots

    def first_buffer(self):
        """Which S the first block of all gets, with one Q tile."""
        return 0

    def qk(self, buffer, q_slot, k_slot):
        """Issue S = Q K^T, of the Q tile of that number, or of the only one to that S."""
        ctas, q_tile = self._config.ctas, self._q_tile(buffer)

        def product(*arrays):
            k = np.concatenate(arrays[ctas:])
            return tuple(matmul(q, k.T) for q in arrays[:ctas])

        operands = (*(slots[q_tile] for slots in self._q), *k_slot.regions)
        scores = tuple(columns.s(buffer) for columns in self._columns)
        self._core.issue(scores, product, operands, False, f"S{buffer} = Q K^T")

    def _q_tile(self, buffer):
        return buffer if self._config.q_tiles > 1 else 0

    def pv_head(self, buffer, v_slot, accumulate):
        """Issue O (+)= P V for the first columns of P."""
        self._pv(buffer, v_slot, 0, self._config.head, accumulate)

    def pv_tail(self, buffer, v_slot):
        """Issue O += P V for the last columns of P."""
        self._pv(buffer, v_slot, self._config.head, self._config.tile_n, True)

    def _pv(self, buffer, v_slot, begin, end, accumulate):
        c, q_tile = self._config, self._q_tile(buffer)

        def product(*arrays):
            v = np.concatenate(arrays[c.ctas :], 1)[begin:end]
            return tuple(matmul(unpack_16_bit(p, c.bf16), v) for p in arrays[: c.ctas])

        operands = [columns.p(buffer, begin, end - begin) for columns in self._columns]
        outputs = tuple(columns.o(q_tile) for columns in self._columns)
        operands = (*operands, *v_slot.regions)
        self._core.issue(outputs, product, operands, accumulate, f"O{q_tile} += P V")


class SoftmaxOps:
    """Verbs of the ``softmax`` role, for one Q tile of one CTA."""

    def __init__(self, call: Call, place, columns: Columns, port: TmemPort, stats, tiles: Tiles):
        self._call, self._config, (self._q_tile, rank) = call, call.config, place
        self._part, self._tiles = call.config.part(self._q_tile, rank), tiles
        self._columns, self._port, self._stats = columns, port, stats
        c, j = call.config, np.arange(call.config.tile_n)
        self._on_fma = (j % 16 >= 16 - c.poly) & (j < c.head)

    def phases(self, tile):
        """Blocks with a mask, then those without."""
        return self._config.phases(tile, self._part, self._call.tiles)

    def begin(self, tile):
        """No shift, sum 0."""
        return np.full(MMA_ROWS, NO_KEY, np.float32), np.zeros(MMA_ROWS, np.float32)

    def _buffer(self, buffer):
        return self._q_tile if buffer is None else buffer

    def load_s(self, tile, n_block, phase, buffer=None):
        """S in registers: negated for a negative scale, capped, changed by mods, masked."""
        c, call, buffer = self._config, self._call, self._buffer(buffer)
        first_key = (tile.first_block + n_block) * c.tile_n
        if c.score_mod or c.mask_mod:
            self._change_in_memory(tile, first_key, buffer)
        parts = [
            self._port.load(self._columns.s(buffer, column, CHUNK))
            for column in range(0, c.tile_n, CHUNK)
        ]
        self._port.wait_ld()
        s = np.concatenate([part.values for part in parts], 1)
        if not (c.score_mod or c.mask_mod):
            s = self._change(tile, first_key, s)
        if phase.masked:
            queries, lengths = call.places(tile, self._part)[0].tolist(), call.tiles.lengths(tile)
            begins, ends = (
                np.array([edge(query, *lengths) for query in queries])[:, None]
                for edge in (call.tiles.blocks.key_begin, call.tiles.blocks.key_end)
            )
            keys = first_key + np.arange(c.tile_n)
            s[(keys < begins) | (keys >= ends)] = -np.inf
        return s

    def _change_in_memory(self, tile, first_key, buffer):
        """What mods make of S, a part of the row at a time."""
        for column in range(0, self._config.tile_n, CHUNK):
            columns = self._columns.s(buffer, column, CHUNK)
            scores = self._port.load(columns)
            self._port.wait_ld()
            self._port.store(columns, self._change(tile, first_key + column, scores.values))
        self._port.wait_st()

    def _change(self, tile, first_key, s):
        """Negate or cap, scale in natural units, add what slopes and mods do."""
        c, call = self._config, self._call
        s = -s if c.negate else s
        s = np.tanh(s * call.scale) if c.softcap else s
        s = s * call.natural_scale if c.natural else s
        self._apply_mods(tile, first_key + np.arange(s.shape[1]), s)
        return s

    def _apply_mods(self, tile, keys, s):
        """Slopes; then S = score_mod(S), and -inf where mask_mod hides a key."""
        call, c = self._call, self._config
        place, lengths = call.tiles.place(tile), call.tiles.lengths(tile)
        query, head, _ = call.places(tile, self._part)
        query, head = query[:, None], np.minimum(head, call.q.shape[2] - 1)[:, None]
        if c.alibi:
            distance = np.abs(query + lengths[1] - lengths[0] - keys).astype(np.float32)
            s -= call.options.alibi_slopes[place.batch][head] * distance
        query, keys = (
            np.clip(x, 0, max(n - 1, 0)) for x, n in ((query, lengths[0]), (keys, lengths[1]))
        )
        info = SeqlenInfo(*lengths, place.row_q, place.row_k)
        where = (place.batch, head, query, keys, info, call.options.aux_tensors)
        if c.score_mod:
            s[:] = mods.function(c.score_mod)(s, *where)
        if c.mask_mod:
            s[~np.broadcast_to(mods.function(c.mask_mod)(*where), s.shape)] = -np.inf

    def move_shift(self, scores, offset, phase):
        """(new offset, factor of O and of the sum)."""
        if phase.fixed:
            return offset, np.ones(MMA_ROWS, np.float32)
        new = -np.fmax.reduce(scores, 1) * self._call.scale_log2
        growth = new - offset
        keep = growth >= -RESCALE_THRESHOLD_LOG2
        factor = np.where(keep, 1, np.exp2(growth)).astype(np.float32)
        return np.where(keep, offset, new), factor

    def put_factor(self, factor, buffer=None):
        """Tell correction."""
        self._stats[self._buffer(buffer)][0].write(factor)

    def exp_head(self, scores, offset, phase, buffer=None):
        """First columns of P over S."""
        self._exp(scores, offset, slice(0, self._config.head), phase, self._buffer(buffer))

    def exp_tail(self, scores, offset, phase, buffer=None):
        """Last columns of P over S."""
        c = self._config
        self._exp(scores, offset, slice(c.head, c.tile_n), phase, self._buffer(buffer))

    def _exp(self, scores, offset, part, phase, buffer):
        scale, offset, s = self._call.scale_log2, offset[:, None], scores[:, part]
        on_fma = exp2_on_fma(part_of_range(s, scale, offset), not phase.fixed)
        x = np.where(self._on_fma[part], on_fma, np.exp2(s * scale + offset))
        scores[:, part] = x
        p = pack_16_bit(round_to_16_bit(x, self._config.bf16), self._config.bf16)
        for column in range(0, part.stop - part.start, CHUNK):
            words = p[:, column // 2 : (column + CHUNK) // 2]
            self._port.store(self._columns.p(buffer, part.start + column, CHUNK), words)
        self._port.wait_st()

    def add_sum(self, scores, total, factor):
        """The sum, shrunk by the factor, plus that of this block."""
        return total * factor + scores.sum(1)

    def put_inverse(self, tile, offset, total):
        """Tell correction 1 / sum, with the sink in it; 0 of a row without keys, or not in use."""
        _, inverse = self._finish(tile, offset, total)
        empty = (total == 0) | self._unused(tile)
        self._stats[self._q_tile][1].write(np.where(empty, np.float32(0), inverse))

    def store_lse(self, tile, offset, total):
        """LSE to global memory; of a row without keys -inf, or its sink."""
        call, place = self._call, self._call.tiles.place(tile)
        query, head, exists = call.places(tile, self._part)
        lse = np.where(self._unused(tile), -np.inf, self._finish(tile, offset, total)[0])
        call.lse[place.batch_q, head[exists], place.row_q + query[exists]] = lse[exists]
        if self._config.fixed_shift and not (total <= LARGEST_TOTAL)[exists].all():
            self._tiles.mark(tile)

    def _unused(self, tile):
        call = self._call
        return call.places(tile, self._part)[0] >= call.tiles.lengths(tile)[0]

    def _finish(self, tile, offset, total):
        """(LSE, factor of O) of every row."""
        call, shift_log2, shrink = self._call, -offset, np.float32(1)
        if call.config.sink:
            sink, head = call.options.sink, call.places(tile, self._part)[1]
            sink_log2 = sink[np.minimum(head, len(sink) - 1)] * np.float32(LOG2E)
            new = np.maximum(shift_log2, sink_log2)
            shrink = np.exp2(shift_log2 - new)
            total = total * shrink + np.exp2(sink_log2 - new)
            shift_log2 = new
        lse = (shift_log2 + np.log2(total)) * np.float32(LN2)
        return np.where(total == 0, -np.inf, lse), shrink / total


class CorrectionOps:
    """Verbs of the ``correction`` role."""

    def __init__(self, machine: Machine, config, columns: Columns, port, stats, tiles: Tiles):
        self._machine, self._config, self._tiles = machine, config, tiles
        self._columns, self._port, self._stats = columns, port, stats
        self.parts = config.o_parts

    def get_factor(self, buffer):
        """Factor of O since the last block."""
        return self._stats[buffer][0].read()

    def get_inverse(self, q_tile):
        """1 / row sum; 0 of a row without keys."""
        return self._stats[q_tile][1].read()

    def rescale_o(self, q_tile, factor):
        """O *= factor; always here, so that a race does not depend on the numbers."""
        o = self._port.load(self._columns.o(q_tile))
        self._port.wait_ld()
        self._port.store(self._columns.o(q_tile), o.values * factor[:, None])
        self._port.wait_st()

    def finish_o(self, tile, part, slot, inverse):
        """A part of O over the row sum, in 16 bit, to shared memory."""
        o = self._port.load(self._columns.part_of_o(part))
        self._port.wait_ld()
        if self._config.fixed_shift and not np.isfinite(o.values).all():
            self._tiles.mark(tile)
        o = np.where(inverse[:, None] == 0, 0, o.values * inverse[:, None])
        slot.region.write(round_to_16_bit(o, self._config.bf16))
        self._machine.fence()


class StoreOps:
    """Verbs of the ``store`` role."""

    def __init__(self, machine: Machine, call: Call, rank: int):
        self._call, self._rank, self.parts = call, rank, call.config.o_parts
        self._lane = machine.lane(f"stores of O of CTA {rank}", ordered=True)

    def store_o(self, tile, part, slot):
        """Start the store of a slot."""
        call, source, place = self._call, slot.region, self._call.tiles.place(tile)
        q_tile, column = call.config.place_of_part(part)
        first = column * call.config.o_columns
        query, head, exists = call.places(tile, call.config.part(q_tile, self._rank))

        def land():
            at = (place.batch_q, place.row_q + query[exists], head[exists])
            block = source.peek()[exists, : max(call.out.shape[3] - first, 0)]
            call.out[(*at, slice(first, first + block.shape[1]))] = block

        self._lane.issue(f"the store of O{part}", land, reads=[source])

    def wait_store(self):
        """Wait until the stores have read their shared memory."""
        self._lane.join(self._lane.issued)


@dataclass(frozen=True)
class Variation:
    """What is run instead of the kernel as it is.

    Attributes:
        roles: class with the role functions; by default the kernel's own.
        strict: stop at the first hazard.
        covers: name of a signal -> another ``covered_by``.
    """

    roles: type | None = None
    strict: bool = True
    covers: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def roles_for(self, config) -> type:
        """Class that a config runs: these roles, if they are those of its kind."""
        own = roles_of(config)
        return self.roles if self.roles and self.roles.__name__ == own.__name__ else own


def simulate_forward(config, q, k, v, options, workers=1, seed=0, variation=None):
    """Run the kernel's schedule.

    Args:
        config: ``ForwardConfig``.
        q: (B, Sq, H, D), or packed, float32 array of 16-bit values.
        k: (B, Sk, Hkv, D), or packed.
        v: (B, Sk, Hkv, Dv), or packed.
        options: as the config's flags say, tensors as NumPy arrays; a number is the softmax scale of a call without.
        workers: CTAs that share the tiles.
        seed: decides whatever the schedule leaves open, and the heads per section.
        variation: a ``Variation``; the kernel itself by default.

    Returns:
        (out, lse), float32; out holds 16-bit values.

    Raises:
        Hazard: the schedule deadlocks or breaks a rule of the hardware.
    """
    out = lse = None
    for machine, call in forward_machines(config, (q, k, v), options, workers, seed, variation):
        machine.run()
        out, lse = call.out, call.lse
    return (out[0], lse[0]) if config.cu_q else (out, lse)


def forward_machines(config, tensors, options, workers, seed, variation=None):
    """Yield the machine and the call of every CTA, ready to run; arguments as of ``simulate_forward``."""
    made, variation = ForwardCall.of(config, tensors, options), variation or Variation()
    check_limits(config)
    for worker, tiles in enumerate(schedules_of(config, made, workers, seed)):
        call = Call(config, made.q, made.k, made.v, made.out, made.lse, made.options, tiles)
        machine = Machine(seed + worker, variation.strict)
        Kernel(machine, call, variation).spawn()
        yield machine, call


def schedules_of(config, made: ForwardCall, workers, seed) -> list:
    """The tiles of every worker."""
    grid, blocks = made.grid, made.blocks
    workers, section = min(workers, grid.total), 1 + seed % grid.head_count
    if config.varlen:
        shared = SharedSchedule(blocks, grid, made.sequences)
        return [replace(shared, share=share) for share in shares_of(shared, workers)]
    return [TileSchedule(blocks, grid, section, i, workers, *made.rows) for i in range(workers)]


def check_limits(config: ForwardConfig):
    """Check registers, shared and tensor memory of a config's graph.

    Raises:
        Hazard: a limit is exceeded.
    """
    graph = config.graph
    check_graph(graph, SMEM_LIMIT)
    roles = [WarpRole(role.name, role.warps, role.registers) for role in graph.roles]
    check_registers(roles, launch_registers(graph.threads) // graph.threads)
    check_tmem(graph.tmem.ranges(), graph.tmem.aliases)


def roles_of(config) -> type:
    """Class with the role functions of a config."""
    return ForwardRoles if config.q_tiles > 1 else WideRoles


# Signals of a role that it waits for, and that it raises. With one Q tile those of a letter are two, of blocks by turns.
NAMES = {
    "mma": (("p0", "p1", "t0", "t1"), ("s0", "s1", "o0", "o1")),
    "correction": (("m0", "m1", "o0", "o1", "l0", "l1"), ("p0", "p1", "f0", "f1")),
    "softmax0": (("s0", "f0"), ("p0", "t0", "m0", "l0")),
    "softmax1": (("s1", "f1"), ("p1", "t1", "m1", "l1")),
}
WIDE_NAMES = {
    "mma": (("p", "t"), ("s", "o0")),
    "correction": (("m", "o0", "l0"), ("p", "f0")),
    "softmax0": (("s", "f0"), ("p", "t", "m", "l0")),
}


def ends_of(config, role: str, end, **others) -> SimpleNamespace:
    """What a role gets.

    Args:
        config: of the kernel.
        role: its name; softmax finds its ends by their letters, as does everyone with one Q tile.
        end: makes the end of a signal: (name, whether it raises) -> end.
        others: rings, by their names.
    """
    wide = config.q_tiles == 1
    found = SimpleNamespace(**others)
    if wide and role == "correction":
        found = SimpleNamespace(slots=others["o"])
    for raised, names in enumerate((WIDE_NAMES if wide else NAMES)[role]):
        for name in names:
            if len(name) == 1:
                made = ByTurns(*(end(f"{name}{i}", bool(raised)) for i in (0, 1)))
            else:
                made = end(name, bool(raised))
            setattr(found, name[0] if wide or role.startswith("softmax") else name, made)
    return found


class Kernel:
    """Memory, edges and roles of one CTA, or of a pair, by the config's graph."""

    def __init__(self, machine: Machine, call: Call, variation: Variation):
        self.machine, self.call, self.variation = machine, call, variation
        config, self.graph = call.config, call.config.graph
        pair = Cluster(machine, config.ctas).ctas if config.ctas > 1 else ()
        self.ctas = tuple(pair) or (None,)
        self.edges, self.core = Edges(machine, pair), TensorCore(machine, pair)
        self.tmems = [Tmem(machine, cta) for cta in self.ctas]
        self.memories = [cta.smem if cta else Space(machine) for cta in self.ctas]
        covers = dict(variation.covers)
        self.signals = {s.name: self._signal(s, covers) for s in self.graph.signals}
        self.rings = {ring.name: self._ring(ring) for ring in self.graph.rings}

    def _signal(self, spec, covers):
        shared = spec.kind == LEADER
        arrivals = len(spec.raisers) * (self.graph.ctas if shared else 1)
        cover = covers.get(spec.name, spec.covered_by)
        return Signal(self.edges, SignalSpec(spec.name, arrivals, cover, spec.credit, shared))

    def _ring(self, spec):
        c, base = self.call.config, self.graph.addresses()[spec.name]
        shapes = {
            "q": (MMA_ROWS, c.tile_d),
            "kv": (c.tile_n // c.ctas, c.kv_columns),
            "o": (MMA_ROWS, c.o_columns),
        }
        starts = [base + i * spec.stage_bytes for i in range(spec.stages)]
        regions = [
            [
                self._region(rank, f"{spec.name}[{i}]", lo, spec.stage_bytes, shapes[spec.name])
                for i, lo in enumerate(starts)
            ]
            for rank in range(len(self.ctas))
        ]
        by_threads = spec.kinds[0] == THREADS
        nbytes = 0 if by_threads else spec.stage_bytes
        ring = TmaRingSpec(spec.name, spec.stages, nbytes, shared=not by_threads)
        return TmaRing(self.edges, ring, regions)

    def _region(self, rank, name, at, nbytes, shape):
        cta = self.ctas[rank]
        name = f"{cta.name}.{name}" if cta else name
        return Region(self.memories[rank], name, at, at + nbytes, shape)

    def _stats(self, rank):
        """For each Q tile the region of its factors and that of its inverse sums."""
        base = self.graph.addresses()["stat"]
        starts = [base + i * STAT_ROW for i in range(4)]

        def region(name, i, at):
            return self._region(rank, f"{name}{i}", at, STAT_ROW, (MMA_ROWS,))

        return [
            (region("factor", i, starts[2 * i]), region("inverse", i, starts[2 * i + 1]))
            for i in (0, 1)
        ]

    def _end(self, cta, name: str, raised: bool):
        """One end of a signal."""
        spec = next(s for s in self.graph.signals if s.name == name)
        core = self.core if raised and spec.kind == UMMA else None
        return self.signals[name].end(cta, core=core)

    def _ends_of(self, cta, role: str, **others):
        """Ends of a role of a CTA."""
        return ends_of(
            self.call.config, role, lambda name, raised: self._end(cta, name, raised), **others
        )

    def spawn(self):
        """Add the roles' tasks; tensor memory is there from the start, and correction frees it."""
        held = [tmem.allocate(TMEM_COLUMNS) for tmem in self.tmems]
        self.marks, self.barrier = set(), self._pass_barrier()
        for rank, cta in enumerate(self.ctas):
            self._spawn(rank, cta)
        self.machine.at_exit.insert(0, lambda: self._free(held))

    def _pass_barrier(self):
        """Where all roles meet that have been through all tiles; None without a fixed shift."""
        if not self.call.config.fixed_shift:
            return None
        warps = sum(len(role.warps) for role in self.graph.roles)
        if len(self.ctas) > 1:  # a task of each role in each CTA, but one ``mma``; and of the rest
            tasks = len(self.ctas) * (len(self.graph.roles) + 1) - 1
            return ClusterBarrier(self.machine, "pass", tasks)
        return NamedBarrier(self.machine, BARRIER_PASS, "pass", WARP * warps, WARP)

    def _spawn(self, rank, cta):
        """The roles of one CTA; the leader's ``mma`` is that of both."""
        machine, call, config = self.machine, self.call, self.call.config
        roles = self.variation.roles_for(config)
        columns, stats = [Columns(tmem, config) for tmem in self.tmems], self._stats(rank)
        q, kv, o = (self.rings[name] for name in ("q", "kv", "o"))

        def tiles(warps=1):
            return Tiles(call.tiles, self.barrier, warps, self.marks)

        def start(name, role, *arguments):
            (cta or machine).spawn(name, plain(role), roles(), *arguments)

        ends = (q.producer(cta), kv.producer(cta))
        start("load", roles.load, LoadOps(call, rank), tiles(), *ends)
        if rank == 0:
            ops = MmaOps(config, self.core, columns, q.regions)
            ends = {"q": q.consumer(cta, self.core), "kv": kv.consumer(cta, self.core)}
            start("mma", roles.mma, ops, tiles(), self._ends_of(cta, "mma", **ends))
        for i in range(config.q_tiles):
            name = f"softmax{i}"
            port, mine = TmemPort(self.tmems[rank], name, range(4)), tiles(4)
            ops = SoftmaxOps(call, (i, rank), columns[rank], port, stats, mine)
            start(name, roles.softmax, ops, mine, self._ends_of(cta, name))
        port, mine = TmemPort(self.tmems[rank], "correction", range(4)), tiles(4)
        ops = CorrectionOps(machine, config, columns[rank], port, stats, mine)
        ends = self._ends_of(cta, "correction", o=o.producer(cta))
        start("correction", roles.correction, ops, mine, ends)
        start("store", roles.store, StoreOps(machine, call, rank), tiles(), o.consumer(cta))
        if cta and self.barrier:
            start("idle", roles.idle, tiles())

    def _free(self, held):
        """Free tensor memory knowing only what correction of each CTA knows at its end."""
        machine = self.machine
        for task in machine.tasks:
            if task.name.endswith("correction"):
                join(machine.host.clock, task.clock)
        for tmem, allocation in zip(self.tmems, held):
            tmem.free(allocation)
        # What the host does is before and after all else, and no step of any order.
        machine.trace = [step for step in machine.trace if step.actor != machine.host.name]
