"""The Hopper backward on a CPU: its own roles and tile schedule, with verbs in NumPy; see ``sm90_fwd``.

The kernels before and after it are plain formulas here: they have no schedule.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from flash4.common.dsl import plain
from flash4.common.graph import WARP, WARPGROUP
from flash4.common.kv_handout import GivenKvTiles, ToldKvTiles, ToldSequenceTiles
from flash4.common.kv_sequences import SequenceSchedule
from flash4.problem import CallOptions
from flash4.sim.barriers import NamedBarrier, Semaphore
from flash4.sim.bulk import Accumulator, BulkGroups
from flash4.sim.bwd_exchange import Exchange, barriers_of_ds, barriers_of_turns
from flash4.sim.bwd_scores import Scores, Step
from flash4.sim.bwd_sequences import (
    slots_and_entries,
)
from flash4.sim.calls import BackwardCall, batched, gradients, prepare
from flash4.sim.handout import shared_out
from flash4.sim.kv_handout import HostGivenSequenceTiles, HostKvSlots, HostSequenceSlots
from flash4.sim.limits import check_graph
from flash4.sim.machine import Machine
from flash4.sim.memory import Fragment, Region, Space
from flash4.sim.rings import End, MmaQueue, Ring
from flash4.sim.sm90_fwd import matmul, round_to_16_bit
from flash4.sm90.bwd_alternate_roles import AlternateRoles
from flash4.sm90.bwd_config import MMA_WARPGROUPS, STAGES, TILE_N, BackwardConfig
from flash4.sm90.bwd_late_roles import LateRoles
from flash4.sm90.bwd_ops import (
    BARRIER_DQ_EMPTY,
    BARRIER_DQ_FULL,
    BARRIER_EXCHANGE,
    BARRIER_STORE,
    BOX_THREADS,
    EXCHANGE_THREADS,
)
from flash4.sm90.bwd_roles import BackwardRoles
from flash4.sm90.fwd_config import ELEMENT_BYTES, MMA_ROWS, SMEM_LIMIT

GROUPS = range(MMA_WARPGROUPS)
WARPS = WARPGROUP // WARP


@dataclass(frozen=True)
class Call:
    """One call of the kernel: tensors as in ``simulate_backward``, and what is derived from them.

    Attributes:
        config: of the kernel.
        q: queries.
        k: keys.
        v: values.
        dout: gradient of out.
        lse: (batch, heads, padded seqlen_q), log2 units; +inf where P must vanish. Packed: by slots, a batch of one.
        delta: as lse.
        dk: result.
        dv: result.
        options: of the call.
        tiles: schedule of one CTA, or of one role where tiles are handed out.
        sums: (batch entry, head, block, warpgroup) -> what the machine's CTAs add to dQ there.
        turns: the same -> count of tiles that have added, if somebody waits for them.
        sums_shape: (batch entries, heads, queries of all blocks, padded head dim).
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
    sums_shape: tuple[int, ...]

    def turn(self, machine: Machine, key) -> Semaphore:
        """The count of a key."""
        if key not in self.turns:
            self.turns[key] = Semaphore(machine, f"turns of dQ{key}")
        return self.turns[key]

    def place(self, key) -> tuple:
        """Where a key's sums lie in dQ."""
        c, (batch, head, block, part) = self.config, key
        queries, columns = c.dq_shape
        row, column = block * c.tile_m, part * columns
        if c.splits_queries:
            row, column = row + part * queries, 0
        return batch, head, slice(row, row + queries), slice(column, column + columns)


class LoadOps:
    """Verbs of the ``load`` role, for some keys of each tile."""

    def __init__(self, call: Call, first_key: int = 0, count: int = TILE_N):
        self._call, self._first_key, self._count = call, first_key, count

    def load_k(self, tile, slot):
        """Fill the K slot with the tile's keys."""
        self._fill(slot, *self._keys(self._call.k, tile, self._call.config.dq_width))

    def load_v(self, tile, slot):
        """Fill the V slot with the tile's values."""
        self._fill(slot, *self._keys(self._call.v, tile, self._call.config.tile_dv))

    def load_q(self, tile, i, slot):
        """Fill a Q slot with the queries of step ``i`` and their LSE."""
        call = self._call
        self._load(call.q, call.lse, call.config.tile_d, (tile, i), slot)

    def load_do(self, tile, i, slot):
        """Fill a dO slot with the gradients of step ``i`` and their D."""
        call = self._call
        self._load(call.dout, call.delta, call.config.tile_dv, (tile, i), slot)

    def _keys(self, x, tile, width):
        """Rows of x, and the shape of their tile."""
        call = self._call
        where, first = call.tiles.where(tile), tile.n_block * call.config.tile_n + self._first_key
        end = call.tiles.lengths(tile)[1] if call.config.ragged_k else x.shape[1]
        rows = slice(where.row_k + first, where.row_k + max(first, min(first + self._count, end)))
        return x[where.entry_k, rows, tile.head_kv], (self._count, width)

    def _load(self, x, statistic, width, step, slot):
        """A tile, with its statistic as a column behind it."""
        tile_m, (tile, i) = self._call.config.tile_m, step
        tiles = self._call.tiles
        (block, head), where = tiles.place(tile, i), tiles.where(tile)
        end = tiles.lengths(tile)[0] if self._call.config.ragged_q else x.shape[1]
        first, at = block * tile_m, (where.slot_q + block) * tile_m
        rows = slice(where.row_q + first, where.row_q + max(first, min(first + tile_m, end)))
        column = statistic[where.entry_q, head, at : at + tile_m]
        self._fill(slot, x[where.entry_q, rows, head], (tile_m, width), column)

    def _fill(self, slot, rows, shape, column=None):
        block = np.zeros(shape, np.float32)  # TMA fills with zeros
        block[: rows.shape[0], : rows.shape[1]] = rows
        nbytes = block.size * ELEMENT_BYTES
        if column is not None:
            block = np.concatenate([block, column[:, None]], 1)
            nbytes += column.nbytes
        slot.fill(block, nbytes)


@dataclass(frozen=True)
class Box:
    """A warpgroup's part of dQ on its way to the reducing warp, with both sides' barriers."""

    region: Region
    full: NamedBarrier
    empty: NamedBarrier


def _sync(barrier: NamedBarrier, arrivals: int):
    """Arrive so often and wait, as a number of warps do at a named barrier."""
    phase = barrier.phase
    barrier.arrive(arrivals)
    barrier.wait(phase)


class Outbox:
    """An MMA warpgroup's end of its box."""

    def __init__(self, box: Box):
        self._box = box

    def acquire(self):
        """Wait until the box is empty."""
        _sync(self._box.empty, WARPS)

    def commit(self):
        """Let the reducing warp see what was put into the box."""
        machine = self._box.full.machine
        machine.fence()
        self._box.full.arrive(WARPS)
        machine.give_way()


class Inbox:
    """The reducing warp's end of a box."""

    def __init__(self, box: Box):
        self._box = box

    def open(self):
        """Say that the box is empty, as it is at first."""
        self.release()

    def wait(self):
        """Wait until the box is full."""
        _sync(self._box.full, 1)

    def release(self):
        """Say that the box is empty."""
        self._box.empty.arrive(1)
        self._box.empty.machine.give_way()


def stored_rows(where, first) -> slice:
    """Rows of a tensor that a warpgroup's keys from ``first`` on have, as far as their sequence is stored."""
    end = max(first, min(first + MMA_ROWS, where.stored_k))
    return slice(where.row_k + first, where.row_k + end)


class ReduceOps:
    """Verbs of the ``reduce`` role, for one MMA warpgroup's part of dQ."""

    def __init__(self, machine: Machine, call: Call, box: Box, regions, group: int):
        self._machine, self._call, self._box, self._group = machine, call, box, group
        self._regions, self._bulk = regions, BulkGroups(machine)

    @property
    def handed_out(self) -> bool:
        """Whether dK and dV leave through the box."""
        return self._call.config.handed_out

    def store_dk(self, tile):
        """Start the store of dK."""
        self._store("dk", self._call.dk, tile)

    def store_dv(self, tile):
        """Start the store of dV."""
        self._store("dv", self._call.dv, tile)

    def _store(self, name, result, tile):
        where, first = self._call.tiles.where(tile), tile.n_block * TILE_N + self._group * MMA_ROWS
        rows = stored_rows(where, first)
        target = result[where.entry_k, rows, tile.head_kv]

        def put(array):
            target[:] = array[: target.shape[0], : target.shape[1]]

        self._bulk.store(self._regions[name, self._group], put)
        self._bulk.commit_group()

    def _key(self, tile, i):
        (block, head), where = self._call.tiles.place(tile, i), self._call.tiles.where(tile)
        return where.entry_q, head, where.slot_q + block, self._group

    def _turn(self, tile, i) -> Semaphore:
        return self._call.turn(self._machine, self._key(tile, i))

    def _rank(self, tile, i):
        """How many additions come before this one; negative for one that is not asked."""
        return self._call.tiles.rank(tile, i)

    def wait_turn(self, tile, i):
        """Wait until all tiles whose turn comes first have added theirs."""
        config, rank = self._call.config, self._rank(tile, i)
        if (config.ordered or config.first_stores) and rank >= 0:
            self._turn(tile, i).wait(rank if config.ordered else min(rank, 1))

    def pass_turn(self, tile, i):
        """Wait until the addition is done, and let the next tile go; see the verb of ``bwd_ops``."""
        config, rank = self._call.config, self._rank(tile, i)
        if config.ordered or (config.turns and rank == 0):
            self._count(tile, i, rank >= 0)

    def _count(self, tile, i, counts):
        self._bulk.wait_group(0)
        if counts:
            self._turn(tile, i).add()

    def add_dq(self, tile, i):
        """Accumulator += box, for the queries of step ``i``."""
        self._add(self._key(tile, i), tile)

    def _add(self, key, tile):
        call = self._call
        if call.config.first_stores and not call.tiles.is_seen(tile):
            return  # its step's place may be another's
        if key not in call.sums:
            # Tiles that have no turn add zeros, in any order.
            ordered = call.config.ordered and not (call.config.left or call.config.varlen)
            shape = call.config.dq_shape
            call.sums[key] = Accumulator(self._machine, f"dQ{key}", shape, ordered)
            if call.config.first_stores:
                call.sums[key].region.poke(np.full(shape, np.nan, np.float32))
        total, label = call.sums[key], self._name(tile)
        if call.config.first_stores and tile.n_block == 0:
            self._bulk.store(self._box.region, lambda array: total.put(array, label), total.region)
        else:
            self._bulk.reduce_add(self._box.region, total, label)
        self._bulk.commit_group()

    def _name(self, tile) -> str:
        """Whose addition it is."""
        return f"{tile.index}"

    def wait_read(self):
        """Wait until the box has been read."""
        self._bulk.wait_group(0, read=True)

    def drain(self):
        """Wait until all additions are done."""
        self._bulk.wait_group(0)


def lse_of(q_slot) -> np.ndarray:
    """LSE of a slot's queries, the column behind them."""
    return q_slot.region.read()[:, -1]


class MmaOps:
    """Verbs of the ``mma`` role, for one warpgroup."""

    def __init__(self, machine: Machine, call: Call, prefix: str, group: int, regions, box: Box):
        self._machine, self._call, self._config, self._group = machine, call, call.config, group
        self._name, self._regions, self._box = f"{prefix}mma[{group}]", regions, box
        self._rows = slice(group * MMA_ROWS, (group + 1) * MMA_ROWS)
        self._queue = MmaQueue(machine, self._name)
        self._stores = machine.lane(f"stores of {self._name}", ordered=True)
        self._p, self._ds = (self._fragment(name, call.config.tile_m) for name in ("P", "dS"))

    def _fragment(self, name, columns, rows=MMA_ROWS, fill=np.nan):
        return Fragment(self._machine, f"{name} of {self._name}", (rows, columns), fill)

    @property
    def handed_out(self) -> bool:
        """Whether dK and dV leave through the box, while the next tile begins."""
        return self._config.handed_out

    def phases(self, tile):
        """Steps with a mask, then those without."""
        return self._call.tiles.phases(tile)

    def begin(self, tile):
        """dK = dV = 0."""
        self._dk = self._fragment("dK", self._config.tile_d, fill=0.0)
        self._dv = self._fragment("dV", self._config.tile_dv, fill=0.0)

    def s(self, k_slot, q_slot):
        """Issue S^T = K Q^T into a fresh accumulator."""
        return self._scores("S", k_slot, q_slot)

    def dp(self, v_slot, do_slot):
        """Issue dP^T = V dO^T into a fresh accumulator."""
        return self._scores("dP", v_slot, do_slot)

    def _scores(self, name, kept, passing):
        acc, operands = self._fragment(name, self._config.tile_m), (kept.region, passing.region)

        def product(keys, queries):
            return matmul(keys[self._rows, : queries.shape[1] - 1], queries[:, :-1].T)

        self._queue.issue(acc, product, operands, False, name)
        return acc

    def softmax(self, tile, i, s, q_slot, phase):
        """P^T = exp2(scale_log2 S^T - LSE); returns what dS takes: that times the slope of the cap, or with a score_mod S^T."""
        step = Step(self._call, self._rows, tile, i, phase.masked)
        pairs = step.pairs(s.values, lse_of(q_slot))
        self._p.values[:] = round_to_16_bit(pairs.p, self._config.bf16)
        if not self._config.score_mod:
            s.values[:] = pairs.p * pairs.slope
        return Scores(step, s.values, lambda: lse_of(q_slot))

    def ds(self, i, scores, dp, do_slot):
        """dS^T = P^T (dP^T - D), to registers and to the shared memory of step ``i``."""
        delta = do_slot.region.read()[:, -1]
        values = scores.ds(dp.values - delta)
        rounded = round_to_16_bit(values, self._config.bf16)
        self._ds.values[:] = rounded
        self._regions["ds", i % self._config.ds_stages, self._group].write(rounded)
        self._machine.fence()

    def dv(self, do_slot):
        """Issue dV += P^T dO."""
        self._accumulate(self._dv, self._p, do_slot, "dV")

    def dk(self, q_slot):
        """Issue dK += dS^T Q."""
        self._accumulate(self._dk, self._ds, q_slot, "dK")

    def _accumulate(self, acc, operand, slot, name):
        def product(a, b):
            return matmul(a, b[:, :-1])

        self._queue.issue(acc, product, (operand.region, slot.region), True, name)

    def dq(self, i, k_slot):
        """Issue this warpgroup's part of dQ = dS K into a fresh accumulator."""
        c, (queries, columns) = self._config, self._config.dq_shape
        acc = self._fragment("dQ", columns, queries)
        part = slice(self._group * queries, (self._group + 1) * queries)
        width = slice(self._group * columns, (self._group + 1) * columns)

        def product(first, second, keys):
            ds = np.concatenate([first, second])
            if c.splits_queries:
                return matmul(ds.T[part], keys)
            return matmul(ds.T, keys[:, width])

        stage = i % self._config.ds_stages
        halves = [self._regions["ds", stage, group] for group in GROUPS]
        self._queue.issue(acc, product, (*halves, k_slot.region), False, "dQ")
        return acc

    def wait_mma(self, pending):
        """Wait until at most ``pending`` MMAs are in flight."""
        self._queue.wait(pending)

    def put_dq(self, dq):
        """Registers -> box."""
        self._box.region.write(dq.values.copy())

    def put_dk(self):
        """dK (scaled), registers -> box."""
        self._put("dk")

    def put_dv(self):
        """dV, registers -> box."""
        self._put("dv")

    def _put(self, name):
        scale = np.float32(self._call.options.softmax_scale)
        values = self._dk.values * scale if name == "dk" else self._dv.values
        region = self._regions[name, self._group]
        region.write(round_to_16_bit(values, self._config.bf16))
        return region

    def store(self, tile):
        """Start the store of dK (scaled) and dV, this warpgroup's 64 rows."""
        self._store(tile, "dk", self._call.dk)
        self._store(tile, "dv", self._call.dv)

    def _store(self, tile, name, target):
        where = self._call.tiles.where(tile)
        rows = stored_rows(where, tile.n_block * self._config.tile_n + self._rows.start)
        region = self._put(name)
        self._machine.fence()
        self._start_store(region, target[where.entry_k, rows, tile.head_kv])

    def _start_store(self, region, target):
        def land():
            target[:] = region.peek()[: target.shape[0], : target.shape[1]]

        self._stores.issue(f"the store of {region.name}", land, reads=[region])

    def wait_store(self):
        """Wait until this warpgroup's stores have read their shared memory."""
        self._stores.join(self._stores.issued)


@dataclass(frozen=True)
class Variation:
    """What a run may change, to see whether it matters; fields as of ``sm90_fwd.Variation``."""

    roles: type = BackwardRoles
    late_roles: type = LateRoles  # of a config with ``late``
    alternate_roles: type = AlternateRoles  # of one with ``alternate``
    miscounts: dict = field(default_factory=dict)
    strict: bool = True
    call = Call  # of the kernel, as its verbs
    mma_ops = MmaOps

    def roles_of(self, config: BackwardConfig) -> type:
        """The roles of a config."""
        if config.alternate:
            return self.alternate_roles
        return self.late_roles if config.late else self.roles

    def fill(self, machine: Machine, call: Call, worker: int, numbers):
        """Set up what works on the tiles of a worker, with their ``numbers`` if they are handed out: one CTA."""
        prefix = f"cta{worker}." if call.config.turns else ""
        _fill_cta(machine, call, self, prefix, numbers)


def simulate_backward(
    config: BackwardConfig,
    tensors,
    options: CallOptions | float,
    workers=2,
    seed=0,
    variation=None,
    dlse=None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run the kernel's roles on every tile of a problem.

    Args:
        config: of the kernel.
        tensors: q (batch, seqlen_q, heads, head_dim), k (batch, seqlen_k, heads_kv, head_dim), v (.., head_dim_v),
            out, lse (batch, heads, seqlen_q) and dout; float32, all but lse holding 16-bit values. Packed ones are as in
            the public function.
        options: as the config's flags say, tensors as NumPy arrays; a number is the softmax scale of a call without.
        workers: CTAs that share the tiles.
        seed: decides whatever the schedule leaves open, and the heads per section.
        variation: a ``Variation``; the kernel itself by default.
        dlse: gradient of lse.

    Returns:
        (dq, dk, dv), float32 holding 16-bit values.

    Raises:
        Hazard: the schedule deadlocks or breaks a rule of the hardware.
    """
    packed, sums = [x.ndim == 3 for x in tensors[:2]], 0
    tensors, dlse = batched(tensors, dlse, packed)
    machines = backward_machines(config, tensors, options, workers, seed, variation, dlse)
    for machine, call in machines:
        machine.run()
        sums = sums + _sums(call)
    return gradients(sums, call, packed)


def total_of(tiles) -> int:
    """Number of all tiles of a schedule."""
    return tiles.total if isinstance(tiles, SequenceSchedule) else tiles.grid.total


def _sums(call: Call) -> np.ndarray:
    """What CTAs have added to dQ, (batch entry, head, queries of all blocks, padded head dim)."""
    fill = np.nan if call.config.visits_checked else 0
    dq = np.full(call.sums_shape, fill, np.float32)
    for key, part in call.sums.items():
        dq[call.place(key)] = part.values
    return dq


def backward_machines(config, tensors, options, workers, seed, variation=None, dlse=None):
    """Yield the machine and the call of every CTA, ready to run; arguments as of ``simulate_backward``.

    CTAs that wait for one another's additions are all in one machine; its call is that of the last of them.
    """
    (q, k, v, out, lse, dout), variation = tensors, variation or Variation()
    made = BackwardCall.of(config, q, k, options)
    sides, options = made.sides, made.options
    ctas = made.tiles(config, workers, seed)
    numbers = [None] * len(ctas)
    if not config.varlen:
        ctas = [replace(tiles, backwards=config.backwards) for tiles in ctas]
    if config.handed_out:
        numbers = shared_out(total_of(ctas[0]), len(ctas), seed)
    dk, dv = (np.full(x.shape, np.nan, np.float32) for x in (k, v))
    entries, slots = slots_and_entries(sides[0])
    shape = (entries, q.shape[2], slots * config.tile_m, config.dq_width)
    statistics = prepare(sides[0], out, lse, dout, dlse)
    check_graph(config.graph, SMEM_LIMIT)
    machine = None
    for worker, tiles in enumerate(ctas):
        if machine is None or not config.turns:
            machine, shared = Machine(seed + worker, variation.strict), ({}, {})
        given = (q, k, v, dout, *statistics, dk, dv)
        call = variation.call(config, *given, options, tiles, *shared, shape)
        variation.fill(machine, call, worker, numbers[worker])
        if worker == len(ctas) - 1 or not config.turns:
            yield machine, call


def _regions(memory: Space, config: BackwardConfig, prefix: str) -> dict[tuple, Region]:
    """Parts of shared memory that are not slots of a ring, by the graph's map."""
    bases, regions = config.graph.addresses(), {}
    half = config.tile_m * MMA_ROWS * ELEMENT_BYTES
    box = config.box_bytes

    def add(key, at, size, shape):
        name = prefix + "".join(str(part) if i == 0 else f"[{part}]" for i, part in enumerate(key))
        regions[key] = Region(memory, name, at, at + size, shape)

    for group in GROUPS:
        for stage in range(STAGES):
            at = bases["ds"] + (stage * MMA_WARPGROUPS + group) * half
            add(("ds", stage, group), at, half, (MMA_ROWS, config.tile_m))
        add(("dq", group), bases["dq"] + group * box, box, config.dq_shape)
        for name, width in (("dk", config.tile_d), ("dv", config.tile_dv)):
            size = MMA_ROWS * width * ELEMENT_BYTES
            apart = box if config.handed_out else size
            add((name, group), bases[name] + group * apart, size, (MMA_ROWS, width))
    return regions


def _fill_cta(machine: Machine, call: Call, variation: Variation, prefix: str, numbers):
    """Shared memory, rings, barriers and roles of one CTA, by the config's graph.

    ``prefix`` is that of its names, ``numbers`` those of its tiles if they are handed out.
    """
    config, graph = call.config, call.config.graph
    role_class = variation.roles_of(config)
    schedule = role_class()
    memory, bases = Space(machine), graph.addresses()
    shapes = {
        "k": (TILE_N, config.dq_width),
        "v": (TILE_N, config.tile_dv),
        "q": (config.tile_m, config.tile_d + 1),
        "do": (config.tile_m, config.tile_dv + 1),
    }

    def readers(spec):
        return MMA_WARPGROUPS if spec.consumer.name == "mma" else 1

    rings = [
        Ring(machine, spec, readers(spec), memory, bases[spec.name], shapes[spec.name])
        for spec in graph.rings
        if spec.name in shapes
    ]
    regions = _regions(memory, config, prefix)

    def ends(role, order):
        named = {ring.spec.name: ring for ring in rings}
        return [End(named[name], variation.miscounts.get((role, name), 0)) for name in order]

    meeting = NamedBarrier(machine, BARRIER_EXCHANGE, "exchange", EXCHANGE_THREADS, WARPGROUP)
    empty = barriers_of_ds(machine) if config.late else None
    turns = barriers_of_turns(machine) if config.alternate else None
    roles = {name: plain(getattr(role_class, name)) for name in ("load", "mma", "reduce")}
    order, call_for = ("k", "v", "q", "do"), _tiles_of_roles(machine, call, memory, numbers)
    given, told = GivenKvTiles, ToldKvTiles
    if config.varlen:
        given, told = HostGivenSequenceTiles, ToldSequenceTiles
    mine = call_for(given, 1)
    machine.spawn(
        f"{prefix}load", roles["load"], schedule, LoadOps(mine), mine.tiles, *ends("load", order)
    )
    for group in GROUPS:
        machine.name_barrier(BARRIER_STORE + group, f"store of mma[{group}]")
        box = Box(
            regions["dq", group],
            *(
                NamedBarrier(machine, number + group, f"dq[{group}] {what}", BOX_THREADS, WARP)
                for number, what in ((BARRIER_DQ_FULL, "full"), (BARRIER_DQ_EMPTY, "empty"))
            ),
        )
        mine = call_for(told, WARPS)
        ops = variation.mma_ops(machine, mine, prefix, group, regions, box)
        ends_and_signals = (
            *ends("mma", order),
            Exchange(meeting, empty, turns, group),
            Outbox(box),
        )
        machine.spawn(
            f"{prefix}mma[{group}]", roles["mma"], schedule, ops, mine.tiles, *ends_and_signals
        )
        mine = call_for(told, 1)
        ops = ReduceOps(machine, mine, box, regions, group)
        machine.spawn(
            f"{prefix}reduce[{group}]", roles["reduce"], schedule, ops, mine.tiles, Inbox(box)
        )


def _tiles_of_roles(machine: Machine, call: Call, memory: Space, numbers):
    """What makes the call of one task, with its tiles: of a kind of views, that gives back slots with so many arrivals."""
    config, graph = call.config, call.config.graph
    if not config.handed_out:
        return lambda kind, arrivals: call
    place, beyond = (memory, graph.addresses()["tiles"]), total_of(call.tiles)
    kind = HostSequenceSlots if config.varlen else HostKvSlots
    slots = kind(machine, graph.ring("tiles"), place, config.tile_readers, numbers, beyond)
    return lambda kind, arrivals: replace(call, tiles=kind(call.tiles, slots.of_role(arrivals)))
