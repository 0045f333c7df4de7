"""The Blackwell backward on a CPU: its own roles and tile schedule, with verbs in NumPy; see ``sm100_fwd``.

Each warp is a task, so that what is missing between warps of a role shows too. Both CTAs of a pair are in one machine, and
all CTAs where tiles wait for one another. Sums of dQ lie in the order in which the kernel after this one reads them.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from flash4.common.dsl import plain
from flash4.common.fragments import GROUP_NUMBERS
from flash4.common.graph import WARP, launch_registers
from flash4.problem import CallOptions
from flash4.sim.barriers import NamedBarrier, Semaphore
from flash4.sim.bulk import Accumulator, BulkGroups, load
from flash4.sim.bwd_scores import Scores, Step
from flash4.sim.calls import BackwardCall, batched, gradients, prepare
from flash4.sim.cluster import Cluster, lane_called
from flash4.sim.limits import WarpRole, check_registers, check_tmem
from flash4.sim.machine import Hazard, Machine, join
from flash4.sim.memory import Region
from flash4.sim.signals import Edges, Signal, SignalSpec, TmaRing, TmaRingSpec
from flash4.sim.sm90_fwd import matmul, round_to_16_bit
from flash4.sim.sm100_bwd_memory import (
    WARPS,
    Cursor,
    Free,
    Memory,
    Nothing,
    Producer,
    dq_of_sums,
    panels_of,
)
from flash4.sim.sm100_fwd import pack_16_bit, unpack_16_bit
from flash4.sim.tmem import TensorCore, Tmem, TmemPort
from flash4.sm100.bwd_config import DQ_STAGES, BackwardConfig
from flash4.sm100.bwd_graph import CHUNK, LEADER, ROWS, SLICE, UMMA
from flash4.sm100.bwd_pair_roles import PairRoles
from flash4.sm100.bwd_roles import BackwardRoles
from flash4.sm100.fwd_config import SMEM_LIMIT
from flash4.sm100.fwd_graph import TMEM_COLUMNS

BARRIER_COMPUTE, BARRIER_REDUCE = 2, 3
NO_TURN = "a tile without a turn"  # whose additions are of zeros, in any order


@dataclass(frozen=True)
class Call:
    """One call of the kernel: tensors as in ``simulate_backward``, and what is derived from them.

    Attributes:
        lse: (batch, heads, padded seqlen_q), log2 units, negative; -inf where P must vanish.
        delta: the same of D, negative.
        sums: (batch, head, block, rank, part) -> what the machine's CTAs add to dQ there.
        turns: (batch, head, block, rank) -> count of tiles that have added, if somebody waits for them.
        split: which part of the columns of dQ, dK and dV this CTA has.
    """

    config: BackwardConfig
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    lse: np.ndarray
    delta: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    options: CallOptions
    tiles: object
    sums: dict[tuple, Accumulator]
    turns: dict[tuple, Semaphore]
    split: int = 0

    def own(self, width: int) -> slice:
        """Columns of this CTA among parts of ``width``."""
        return slice(self.split * width, (self.split + 1) * width)

    def block_of(self, tile, i):
        """(batch entry of statistics and sums, query head, slot) of a step."""
        (block, head), where = self.tiles.place(tile, i), self.tiles.where(tile)
        return where.entry_q, head, where.slot_q + block

    def rows_of(self, tile, i):
        """Rows of a step's queries in the tensors, (batch entry, begin, end, query head)."""
        (block, head), where = self.tiles.place(tile, i), self.tiles.where(tile)
        stored = self.tiles.lengths(tile)[0] if self.config.ragged_q else self.q.shape[1]
        first = block * self.config.tile_m
        end = max(first, min(first + self.config.tile_m, stored))
        return where.entry_q, where.row_q + first, where.row_q + end, head


class LoadOps:
    """Verbs of the ``load`` role of one CTA."""

    def __init__(self, call: Call, memory: Memory, rank: int):
        self._call, self._memory, self._rank, c = call, memory, rank, call.config
        self.k_bytes, self.v_bytes, self.q_bytes = c.k_bytes, c.v_bytes, c.q_bytes
        self.do_bytes, self.stat_bytes = c.do_bytes, c.stat_bytes

    def _fill(self, region: Region, rows, slot, size: int = 2):
        block = np.zeros(region.shape, np.float32)  # TMA fills with zeros
        block[: rows.shape[0], : rows.shape[1]] = rows
        load(region, block, slot.full, block.size * size)

    def _keys(self, x, tile, first: int, count: int):
        call, where = self._call, self._call.tiles.where(tile)
        begin = tile.n_block * call.config.tile_n + first
        stored = call.tiles.lengths(tile)[1] if call.config.ragged_k else x.shape[1]
        end = max(begin, min(begin + count, stored))
        return x[where.entry_k, where.row_k + begin : where.row_k + end, tile.head_kv]

    def _queries(self, x, tile, i, first: int = 0, count: int | None = None):
        entry, begin, end, head = self._call.rows_of(tile, i)
        begin += first
        count = self._call.config.tile_m if count is None else count
        return x[entry, begin : max(begin, min(begin + count, end)), head]

    def _half(self, rows, width: int):
        return rows[:, self._rank * width : (self._rank + 1) * width]

    def load_k(self, tile, slot):
        """This CTA's keys."""
        self._fill(
            self._memory.tile("k"), self._keys(self._call.k, tile, self._rank * ROWS, ROWS), slot
        )

    def load_v(self, tile, slot):
        """This CTA's values."""
        self._fill(
            self._memory.tile("v"), self._keys(self._call.v, tile, self._rank * ROWS, ROWS), slot
        )

    def load_kt(self, tile, slot):
        """All keys, half of their head dims."""
        region = self._memory.tile("kt")
        rows = self._keys(self._call.k, tile, 0, 2 * ROWS)
        self._fill(region, self._half(rows, region.shape[1]), slot)

    def _part(self, x, tile, i):
        count = self._call.config.tile_m // self._call.config.ctas
        return self._queries(x, tile, i, self._rank * count, count)

    def load_q(self, tile, i, slot):
        """Queries of step ``i``; in a pair this CTA's half of them."""
        self._fill(self._memory.tile("q", slot.index), self._part(self._call.q, tile, i), slot)

    def load_do(self, tile, i, slot):
        """The same of dO."""
        self._fill(self._memory.tile("do"), self._part(self._call.dout, tile, i), slot)

    def load_qt(self, tile, i, slot):
        """All queries of step ``i``, half of their head dims."""
        region = self._memory.tile("qt")
        self._fill(region, self._half(self._queries(self._call.q, tile, i), region.shape[1]), slot)

    def load_dot(self, tile, i, slot):
        """The same of dO."""
        region = self._memory.tile("dot")
        rows = self._queries(self._call.dout, tile, i)
        self._fill(region, self._half(rows, region.shape[1]), slot)

    def load_stat(self, tile, i, slot):
        """-LSE and -D of the queries of step ``i``."""
        batch, head, block = self._call.block_of(tile, i)
        tile_m = self._call.config.tile_m
        columns = slice(block * tile_m, (block + 1) * tile_m)
        rows = np.stack([x[batch, head, columns] for x in (self._call.lse, self._call.delta)])
        self._fill(self._memory.stat(slot.index), rows, slot, 4)


class MmaOps:
    """Verbs of the ``mma`` role, for all CTAs of a tile."""

    def __init__(self, call: Call, core: TensorCore, memories: list[Memory], tmems: list[Tmem]):
        self._config, self._core, self._map = call.config, core, call.config.tmem
        self._own = call.own
        self._memories, self._tmems = memories, tmems

    def _tiles(self, name, column, columns):
        return tuple(tmem.tile(name, column, columns) for tmem in self._tmems)

    def _all(self, name, slot=0):
        return [memory.tile(name, slot) for memory in self._memories]

    def _keys_by_queries(self, label, column, a, b, slot):
        """Keys of each CTA, by the queries of both."""
        ctas = len(self._memories)

        def product(*arrays):
            rows = np.concatenate(arrays[ctas:])
            return tuple(matmul(x, rows.T) for x in arrays[:ctas])

        operands = (*self._all(a), *self._all(b, slot))
        tiles = self._tiles(label, column, self._config.tile_m)
        self._core.issue(tiles, product, operands, False, label)

    def s(self, slot):
        """S^T = K Q^T."""
        self._keys_by_queries("S", self._map.s(), "k", "q", slot.index)

    def dp(self, slot):
        """dP^T = V dO^T."""
        self._keys_by_queries("dP", self._map.dp(), "v", "do", slot.index)

    def _by_slices(self, words):
        """16-bit columns of a tile whose slices lie as the map says."""
        slices = range(self._config.tile_m // SLICE)
        columns = [words[:, self._map.slice_of(k) :][:, : SLICE // 2] for k in slices]
        return np.concatenate([unpack_16_bit(x, self._config.bf16) for x in columns], 1)

    def _sum_over_queries(self, label, at, columns, source, names, slot, accumulate):
        """A of each CTA in tensor memory; B all columns, in a pair half of them in each CTA."""
        ctas, pair_name = len(self._memories), names[self._config.ctas - 1]

        def product(*arrays):
            b = np.concatenate(arrays[ctas:], 1)[:, self._own(columns)]
            return tuple(matmul(self._by_slices(x), b) for x in arrays[:ctas])

        operands = (*self._tiles(*source), *self._all(pair_name, slot))
        self._core.issue(
            self._tiles(label, at, columns), product, operands, accumulate, f"{label} +="
        )

    def dv(self, slot, accumulate):
        """dV += P^T dO."""
        source, names = ("P", *self._map.ranges()["p"]), ("do", "dot")
        columns = self._config.part_dv
        self._sum_over_queries("dV", self._map.dv(), columns, source, names, slot.index, accumulate)

    def dk(self, slot, accumulate):
        """dK += dS^T Q; of one CTA with dS from shared memory."""
        columns, at = self._config.part_d, self._map.dk()
        if self._config.ctas == 2:
            source = ("dS", self._map.dp(), ROWS // 2)
            self._sum_over_queries("dK", at, columns, source, ("q", "qt"), slot.index, accumulate)
            return
        memory, count = self._memories[0], self._config.panels

        def product(*arrays):
            return (matmul(panels_of(arrays[:-1], count), arrays[-1][:, self._own(columns)]),)

        panels = [piece for i in range(count) for piece in memory.panel(i)]
        operands = (*panels, memory.tile("q", slot.index))
        self._core.issue(
            self._tiles("dK", at, columns), product, operands, accumulate, "dK += dS^T Q"
        )

    def dq(self, slot):
        """dQ = dS K; in a pair each CTA's 64 queries by all keys, the second half of the columns in lanes 64 to 127."""
        c, ctas, each = self._config, self._config.ctas, 2 * 2 * WARPS
        names = ("k", "kt")

        def product(*arrays):
            b = np.concatenate(arrays[-ctas:], 1)
            found = []
            for rank in range(ctas):
                mine = arrays[rank * each : (rank + 1) * each]
                if ctas == 1:
                    found.append(matmul(panels_of(mine, 2).T, b))
                    continue
                half = len(mine) // 2
                keys = np.concatenate([panels_of(mine[:half], 1), panels_of(mine[half:], 1)])
                sums = matmul(keys.T, b)
                found.append(np.concatenate(np.split(sums, 2, 1)))
            return tuple(found)

        panels = [piece for memory in self._memories for i in (0, 1) for piece in memory.panel(i)]
        operands = (*panels, *self._all(names[ctas - 1]))
        tiles = self._tiles("dQ", self._map.dq(), c.tile_d // ctas)
        self._core.issue(tiles, product, operands, False, "dQ = dS K")


class WarpOps:
    """What a warp of ``compute`` or ``reduce`` has: a quarter of the lanes of tensor memory."""

    def __init__(self, machine: Machine, call: Call, place, memory: Memory, tmem: Tmem):
        self._machine, self._call, self._config = machine, call, call.config
        self._rank, self._warp = place
        self._memory, self._tmem, self._map = memory, tmem, call.config.graph.tmem
        self._lanes = range(WARP * (self._warp % WARPS), WARP * (self._warp % WARPS + 1))
        self._warpgroup, self._bulk = self._warp // WARPS, BulkGroups(machine)
        self._port = TmemPort(tmem, f"{type(self).__name__} {self._warp}", [self._warp])

    def _tile(self, name, column, columns):
        return self._tmem.tile(name, column, columns, self._lanes)

    def _load(self, name, column, columns):
        values = self._port.load(self._tile(name, column, columns))
        self._port.wait_ld()
        return values.values.copy()

    def drain(self):
        """Wait until all that was sent has come."""
        self._bulk.wait_group(0)


class ComputeOps(WarpOps):
    """Verbs of a warp of the ``compute`` role: 32 keys, and 32 queries of each half."""

    def phases(self, tile):
        """Steps with a mask, then those without."""
        return self._call.tiles.phases(tile)

    def place(self, tile, i, phase):
        """Step ``i``, of this warp's keys and queries."""
        first = self._rank * ROWS + self._lanes.start
        keys = slice(first, first + WARP)
        return Step(self._call, keys, tile, i, phase.masked, self._columns())

    def _columns(self):
        """Queries of this warp in a step."""
        firsts = [
            self._map.loaded(self._warpgroup, part) for part in range(self._config.query_parts)
        ]
        return np.concatenate([first + np.arange(CHUNK) for first in firsts])

    def _both(self, name, column):
        firsts = [
            column + self._map.loaded(self._warpgroup, part)
            for part in range(self._config.query_parts)
        ]
        return np.concatenate([self._load(name, first, CHUNK) for first in firsts], 1)

    def load_s(self):
        """S^T in registers."""
        return self._both("S", self._map.s())

    def _lse(self, slot):
        """LSE of this warp's queries; the kernel has it negated, to add it."""
        return -self._memory.stat(slot.index).read()[0][self._columns()]

    def softmax(self, tile, place, scores, slot, phase):
        """(what dS takes: P^T, times the slope of a cap, or with a score_mod S^T; P^T in 16 bit)."""
        pairs = place.pairs(scores, self._lse(slot))
        values = scores if self._config.score_mod else pairs.p * pairs.slope
        probs = round_to_16_bit(pairs.p, self._config.bf16)
        return Scores(place, values, lambda: self._lse(slot), hides=False), probs

    def _pack(self, name, column, values):
        """Store 16-bit values over what this warp has read."""
        for part in range(self._config.query_parts):
            words = pack_16_bit(
                values[:, CHUNK * part : CHUNK * (part + 1)].copy(), self._config.bf16
            )
            at = column + self._map.packed(self._warpgroup, part)
            self._port.store(self._tile(name, at, CHUNK // 2), words)
        self._port.wait_st()

    def store_p(self, probs):
        """P^T over S^T."""
        self._pack("P", self._map.s(), probs)

    def grad(self, weights, slot):
        """dS^T = P^T (dP^T - D), in 16 bit; of a tile that nobody sees 0 whatever D is."""
        dp = self._both("dP", self._map.dp())
        delta = self._memory.stat(slot.index).read()[1][self._columns()]
        grads = round_to_16_bit(weights.ds(dp + delta), self._config.bf16)
        return grads if self._call.tiles.is_seen(weights.step.tile) else np.zeros_like(grads)

    def store_dst(self, grads):
        """In a pair dS^T over dP^T."""
        if self._config.ctas == 2:
            self._pack("dS", self._map.dp(), grads)

    def panel(self, part: int) -> int:
        """Where dS of a half of the queries goes: in a pair the peer's half into the panel that is sent."""
        if self._config.ctas == 1:
            return part
        return self._rank if part == self._rank else 2

    def store_ds(self, grads):
        """dS to shared memory."""
        for part in range(self._config.query_parts):
            region = self._memory.ds(self.panel(part), self._warp)
            region.write(grads[:, CHUNK * part : CHUNK * (part + 1)].copy())
        self._machine.fence()

    def _stage(self, name, label, column, factor):
        region = self._memory.out(name, self._warp)
        width = region.shape[1]
        values = self._load(label, column + width * self._warpgroup, width)
        region.write(round_to_16_bit(values * factor, self._config.bf16))
        self._machine.fence()

    def stage_dv(self):
        """dV to shared memory, over V."""
        self._stage("v", "dV", self._map.dv(), np.float32(1))

    def stage_dk(self):
        """dK, scaled, over K."""
        self._stage("k", "dK", self._map.dk(), np.float32(self._call.options.softmax_scale))

    def _send(self, name, target, tile):
        if self._warp:
            return
        where = self._call.tiles.where(tile)
        first = tile.n_block * self._config.tile_n + self._rank * ROWS
        end = where.row_k + max(first, min(first + ROWS, where.stored_k))
        rows = target[where.entry_k, where.row_k + first : end, tile.head_kv]
        for warp in range(2 * WARPS):
            region = self._memory.out(name, warp)
            lane, width = WARP * (warp % WARPS), region.shape[1]
            own = rows[:, self._call.own(2 * width)]
            mine = own[lane : lane + WARP, width * (warp // WARPS) :][:, :width]

            def put(array, mine=mine):
                mine[:] = array[: mine.shape[0], : mine.shape[1]]

            self._bulk.store(region, put)
        self._bulk.commit_group()

    def send_dv(self, tile):
        """Start the store of dV."""
        self._send("v", self._call.dv, tile)

    def send_dk(self, tile):
        """Start the store of dK."""
        self._send("k", self._call.dk, tile)

    def wait_sent(self):
        """Wait until the stores have read their shared memory."""
        self._bulk.wait_group(0, read=True)


class ReduceOps(WarpOps):
    """Verbs of a warp of the ``reduce`` role: 32 lanes of dQ."""

    @property
    def parts(self):
        """Parts in which dQ leaves."""
        return tuple(range(self._config.dq_steps))

    def load_dq(self):
        """dQ in registers."""
        return self._load("dQ", self._map.dq(), self._map.dq_columns)

    def _box(self, part, warp):
        return self._memory.dq(part % DQ_STAGES, warp)

    def stage_dq(self, sums, part):
        """A part of it to shared memory."""
        region, columns = self._box(part, self._warp), self._config.dq_columns
        mine = sums[:, part * columns : (part + 1) * columns]
        region.write(mine.reshape(WARP, -1, GROUP_NUMBERS).transpose(1, 0, 2))
        self._machine.fence()

    def wait_read(self):
        """Wait until what was staged before has been read."""
        self._bulk.wait_group(DQ_STAGES - 2, read=True)

    def place(self, tile, i):
        """Where the sums of step ``i`` lie, the block of queries, and whose addition it is."""
        block, _ = self._call.tiles.place(tile, i)
        has_turn = self._call.tiles.rank_of(tile, block) >= 0
        whose = f"{tile.n_block}" if has_turn else NO_TURN
        return (*self._call.block_of(tile, i), block, whose)

    def add_dq(self, place, part):
        """Start the addition of a part, by the first warp."""
        if self._warp:
            return
        c, key = self._config, (*place[:3], self._rank, part)
        for warp in range(WARPS):
            region, at = self._box(part, warp), (*key, warp)
            if at not in self._call.sums:
                # Tiles without a turn add zeros, in any order.
                ordered = c.ordered and not (c.left or c.varlen)
                total = Accumulator(self._machine, f"dQ{at}", region.shape, ordered)
                self._call.sums[at] = total
            self._bulk.reduce_add(region, self._call.sums[at], place[4])
        self._bulk.commit_group()

    def _turn(self, place) -> Semaphore:
        key = (*place[:3], self._rank)
        if key not in self._call.turns:
            self._call.turns[key] = Semaphore(self._machine, f"turns of dQ{key}")
        return self._call.turns[key]

    def wait_turn(self, tile, place):
        """Wait until all tiles whose turn comes first have added theirs."""
        rank = self._call.tiles.rank_of(tile, place[3])
        if self._config.ordered and not self._warp and rank >= 0:
            self._turn(place).wait(rank)

    def pass_turn(self, tile, place):
        """Wait until the addition is done, and let the next tile go."""
        if self._config.ordered and not self._warp:
            self._bulk.wait_group(0)
            if self._call.tiles.rank_of(tile, place[3]) >= 0:
                self._turn(place).add()


class RelayOps:
    """Verbs of the ``relay`` role of one CTA of a pair."""

    def __init__(self, config, memories: list[Memory], barrier, rank: int):
        self._memories, self._barrier, self._rank = memories, barrier, rank
        self.panel_bytes = config.panel_bytes

    def send_ds(self):
        """Start the copy of the outgoing panel to the peer, where its bytes count."""
        own, peer = self._memories[self._rank], self._memories[1 - self._rank]
        sources, targets, barrier = own.panel(2), peer.panel(self._rank), self._barrier
        task = barrier.machine.actor

        def land():
            for source, target in zip(sources, targets, strict=True):
                target.poke(source.peek().copy())
            barrier.arrive(0, -self.panel_bytes)

        lane = lane_called(barrier.machine, f"copies of {task.name} to its peer")
        lane.issue("the copy of dS to the peer", land, sources, targets)
        for target in targets:
            target.spoil()


@dataclass(frozen=True)
class Variation:
    """What a run may change, to see whether it matters.

    Attributes:
        roles: class with the role functions of one CTA; ``compute`` and ``reduce`` of a pair too.
        pair_roles: class with the others of a pair.
        strict: stop at the first hazard.
        covers: name of a signal or ring -> another ``covered_by``.
        meets: whether the CTAs of a pair meet before one ends.
    """

    roles: type = BackwardRoles
    pair_roles: type = PairRoles
    strict: bool = True
    covers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    meets: bool = True

    def roles_for(self, config: BackwardConfig) -> type | None:
        """Class that a config runs, or None if all that is changed is what it does not run."""
        return None if config.ctas == 1 and self.pair_roles is not PairRoles else self.roles


def check_limits(config: BackwardConfig):
    """Check registers, shared and tensor memory of a config's graph.

    Raises:
        Hazard: a limit is exceeded.
    """
    graph = config.graph
    if graph.smem_bytes > SMEM_LIMIT:
        raise Hazard(
            f"{graph.smem_bytes} bytes of shared memory with barriers; a CTA has {SMEM_LIMIT}"
        )
    roles = [WarpRole(role.name, role.warps, role.registers) for role in graph.roles]
    check_registers(roles, launch_registers(graph.threads) // graph.threads)
    check_tmem(graph.tmem.ranges(), graph.tmem.aliases)


def simulate_backward(
    config, tensors, options, workers=2, seed=0, variation=None, dlse=None, kernel=None
):
    """Run the kernel's roles on every tile of a problem.

    Args:
        config: ``BackwardConfig``.
        tensors: q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v (.., head_dim_v),
            out, lse (batch, heads, seqlen_q) and dout; float32, all but lse holding 16-bit values.
        options: as the config's flags say, tensors as NumPy arrays; a number is the softmax scale of a call without.
        workers: CTAs, or pairs of them, that share the tiles.
        seed: decides whatever the schedule leaves open, and the heads per section.
        variation: a ``Variation``; the kernel itself by default.
        dlse: gradient of lse.
        kernel: class of the simulated kernel; ``Kernel`` by default.

    Returns:
        (dq, dk, dv), float32 holding 16-bit values.

    Raises:
        Hazard: the schedule deadlocks or breaks a rule of the hardware.
    """
    packed, sums = [x.ndim == 3 for x in tensors[:2]], 0
    tensors, dlse = batched(tensors, dlse, packed)
    machines = backward_machines(config, tensors, options, workers, seed, variation, dlse, kernel)
    for machine, call in machines:
        machine.run()
        sums = sums + dq_of_sums(call)
    return gradients(sums, call, packed)


def backward_machines(
    config, tensors, options, workers, seed, variation=None, dlse=None, kernel=None
):
    """Yield the machine and the call of every CTA, ready to run; arguments as of ``simulate_backward``.

    CTAs that wait for one another's additions are all in one machine; its call is that of the last of them.
    """
    (q, k, v, out, lse, dout), kernel = tensors, kernel or Kernel
    variation = variation or kernel.vary()
    made = BackwardCall.of(config, q, k, options)
    sides, options = made.sides, made.options
    ctas = made.tiles(config, workers, seed)
    dk, dv = (np.full(x.shape, np.nan, np.float32) for x in (k, v))
    statistics = [-x for x in prepare(sides[0], out, lse, dout, dlse)]
    check_limits(config)
    machine = None
    shares = [(mine, split) for mine in ctas for split in range(config.splits)]
    for number, (mine, split) in enumerate(shares):
        if machine is None or not config.turns:
            machine, shared = Machine(seed + number, variation.strict), ({}, {})
        call = Call(config, q, k, v, dout, *statistics, dk, dv, options, mine, *shared, split)
        name = f"worker{number}" if config.turns else ""
        kernel(machine, call, variation, name).spawn()
        if number == len(shares) - 1 or not config.turns:
            yield machine, call


class Kernel:
    """Memory, edges and roles of one CTA, or of a pair, by the config's graph."""

    load_ops, mma_ops, compute_ops, reduce_ops = LoadOps, MmaOps, ComputeOps, ReduceOps
    vary = Variation

    def __init__(self, machine: Machine, call: Call, variation: Variation, name: str):
        self.machine, self.call, self.variation = machine, call, variation
        config, self.graph = call.config, call.config.graph
        named = config.ctas > 1 or name
        self.cluster = Cluster(machine, config.ctas, name=name) if named else None
        self.ctas = tuple(self.cluster.ctas) if named else (None,)
        pair = self.ctas if config.ctas > 1 else ()
        self.edges = Edges(machine, self.ctas if named else ())
        self.core = TensorCore(machine, pair)
        self.tmems = [Tmem(machine, cta) for cta in self.ctas]
        self.memories = [Memory(machine, config, cta) for cta in self.ctas]
        covers = dict(variation.covers)
        self.signals, self.rings = {}, {}
        for spec in self.graph.signals:
            cover = covers.get(spec.name, spec.covered_by)
            shared = spec.kind == LEADER
            made = SignalSpec(spec.name, spec.arrivals(config.ctas), cover, 0, shared)
            self.signals[spec.name] = Signal(self.edges, made)
        for spec in self.graph.rings:
            cover = covers.get(spec.name, spec.covered_by)
            made = TmaRingSpec(spec.name, spec.stages, 0, spec.releases, cover, spec.shared)
            regions = [
                [self._region_of(memory, spec, i) for i in range(spec.stages)]
                for memory in self.memories
            ]
            self.rings[spec.name] = TmaRing(self.edges, made, regions)

    @staticmethod
    def _region_of(memory, spec, slot):
        """What stands for a slot in stories."""
        if spec.name == "stat":
            return memory.stat(slot)
        return memory.tile({"a": "q", "b": "do"}.get(spec.name, spec.name), slot)

    def _signal(self, cta, role: str, name: str):
        """A role's end of a signal."""
        spec = self.graph.signal(name)
        late = int(role in [waiter.name for waiter in spec.late])
        core = self.core if role == spec.raiser.name and spec.kind == UMMA else None
        return self.signals[name].end(cta, core=core, lag=late)

    def spawn(self):
        """Add the roles' tasks; tensor memory is there from the start, and reduce frees it."""
        held = [tmem.allocate(TMEM_COLUMNS) for tmem in self.tmems]
        for rank, cta in enumerate(self.ctas):
            self._spawn(rank, cta)
        if self.call.config.ctas > 1 and self.variation.meets:
            tasks = [task for cta in self.ctas for task in cta.tasks]
            everyone = self.cluster.barrier("cluster", len(tasks))
            for task in tasks:
                task.leave = everyone.sync
        self.machine.at_exit.insert(0, lambda: self._free(held))

    def _spawn(self, rank, cta):
        """The roles of one CTA; the leader's ``mma`` is that of both."""
        machine, call, config, pair = (
            self.machine,
            self.call,
            self.call.config,
            self.call.config.ctas > 1,
        )
        own, of_pair = self.own_roles, self.variation.pair_roles
        roles = of_pair if pair else own
        memory, tmem = self.memories[rank], self.tmems[rank]

        def start(name, role, owner, ops, ends):
            (cta or machine).spawn(
                name, plain(role), owner(), ops, call.tiles, SimpleNamespace(**ends)
            )

        def signals(role, *names):
            return {name: self._signal(cta, role, name) for name in names}

        rings = {name: Producer(ring, rank, cta) for name, ring in self.rings.items()}
        heard = signals("load", "s", "dp") if pair else {}
        start("load", roles.load, roles, self.load_ops(call, memory, rank), rings | heard)
        if rank == 0:
            start(
                "mma",
                roles.mma,
                roles,
                self.mma_ops(call, self.core, self.memories, self.tmems),
                self._mma_ends(cta),
            )
        if pair:
            x = self.signals["x"].barriers[1 - rank]
            ops = RelayOps(config, self.memories, x, rank)
            start("relay", roles.relay, roles, ops, signals("relay", "ds", "x", "y"))
        nothing = dict.fromkeys(("early", "dst", "free"), Nothing())
        meetings = [
            NamedBarrier(machine, number, name, WARP * warps, WARP, cta)
            if cta is None
            else cta.named_barrier(number, name, WARP * warps, WARP)
            for number, name, warps in (
                (BARRIER_COMPUTE, "compute", 8),
                (BARRIER_REDUCE, "reduce", 4),
            )
        ]
        k_free = Free(self.rings["k"].empty[0][rank])
        for warp in range(2 * WARPS):
            ends = signals("compute", "s", "p", "dp", "ds", "dv", "dk") | nothing
            if pair:
                ends |= signals("compute", "early", "dst")
                ends["free"] = self._signal(cta, "compute", "dq")
            ends |= {
                "stat": self.rings["stat"].consumer(cta),
                "k_free": k_free,
                "meeting": meetings[0],
            }
            ends |= self._more_ends(cta)
            ops = self.compute_ops(machine, call, (rank, warp), memory, tmem)
            start(f"compute{warp}", own.compute, own, ops, ends)
        for warp in range(WARPS):
            ends = signals("reduce", "dq", "r") | {"meeting": meetings[1]}
            ops = self.reduce_ops(machine, call, (rank + call.split, warp), memory, tmem)
            start(f"reduce{warp}", own.reduce, own, ops, ends)

    @property
    def own_roles(self) -> type:
        """Class with the roles of one CTA."""
        return self.variation.roles

    def _more_ends(self, cta):
        """Ends of ``compute`` that other kernels do not have."""
        return {}

    def _mma_ends(self, cta):
        """Ends of ``mma``."""
        pair = self.call.config.ctas > 1
        names = ("s", "p", "dp", "dq", "r", "dv", "dk")
        names += ("early", "dst", "y") if pair else ("ds",)
        ends = {name: self._signal(cta, "mma", name) for name in names}
        for name in ("k", "v", "kt", "a", "b") if pair else ("k", "v", "q", "do"):
            ends[name] = self.rings[name].consumer(cta, self.core)
        if not pair:
            ends |= {
                "qt": Cursor(self.rings["q"], self.core),
                "dot": Cursor(self.rings["do"], self.core),
            }
        return ends

    def _free(self, held):
        """Free tensor memory knowing only what ``compute`` and ``reduce`` of each CTA know at their end."""
        machine = self.machine
        for task in machine.tasks:
            if "compute" in task.name or "reduce" in task.name:
                join(machine.host.clock, task.clock)
        for tmem, allocation in zip(self.tmems, held):
            tmem.free(allocation)
        machine.trace = [step for step in machine.trace if step.actor != machine.host.name]
