"""The Ampere backward on a CPU: its own role and tiles, with verbs in NumPy; see ``sm80_fwd``.

The kernels before and after it are plain formulas, as in ``sm90_bwd``.
"""

from dataclasses import dataclass

import numpy as np

from flash4.common.dsl import plain
from flash4.problem import CallOptions
from flash4.sim.barriers import Barrier, NamedBarrier, Semaphore
from flash4.sim.bwd_scores import Scores, Step
from flash4.sim.bwd_sequences import slots_and_entries
from flash4.sim.calls import BackwardCall, batched, gradients, prepare
from flash4.sim.cp_async import CpAsync
from flash4.sim.limits import check_graph
from flash4.sim.machine import Machine
from flash4.sim.memory import Region, Space
from flash4.sim.sm80_fwd import SMEM_LIMIT, CopiedRows
from flash4.sim.sm90_fwd import matmul, round_to_16_bit
from flash4.sm80.bwd_config import WHOLE, BackwardConfig
from flash4.sm80.bwd_roles import BackwardRoles
from flash4.sm80.bwd_two_roles import TwoBackwardRoles
from flash4.sm80.fwd_config import ATOM_ROWS, ELEMENT_BYTES

# As the GPU's: ``bwd_two_ops``, which imports the DSL.
BARRIER_P, BARRIER_ROLE = 1, 2
ALL = 1 << 30  # CTAs, more than there are tiles


@dataclass(frozen=True)
class Call:
    """One call of the kernel; tensors as in ``simulate_backward``.

    Attributes:
        lse: (entries, heads, queries of all blocks), log2 units; +inf where P must vanish.
        delta: as lse.
        sums: (entries, heads, queries of all blocks, tile_d) of dQ.
        tiles: schedule of one CTA.
        turns: (entry, head, block) -> count of tiles that have added.
        memory: global memory in which these are.
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
    sums: np.ndarray
    options: CallOptions
    tiles: object
    turns: dict
    memory: Space


@dataclass(frozen=True)
class Strips:
    """A warp's keys by queries of P or dS: runs of queries are apart, as they are in the kernel."""

    regions: list[Region]

    def write(self, x: np.ndarray, run=WHOLE):
        """Replace all of it, or the queries of a run."""
        within = run.of(len(self.regions))
        for number, part in zip(within, np.split(x, len(within), axis=1), strict=True):
            self.regions[number].write(part)

    def read(self, run=WHOLE) -> np.ndarray:
        """All of it, or the queries of a run."""
        within = run.of(len(self.regions))
        return np.concatenate([self.regions[number].read() for number in within], axis=1)


class WarpOps:
    """Verbs of ``differentiate``, for one warp."""

    def __init__(self, machine: Machine, call: Call, warp: int, memory: dict, barrier: Barrier):
        self._machine, self._call, self._config, self._warp = machine, call, call.config, warp
        self._memory, self._barrier, c = memory, barrier, call.config
        self._copies = CpAsync(machine, f"warp {warp} of {barrier.name}")
        number, rows = warp % c.role_warps, c.key_atoms * ATOM_ROWS
        first, part = number % c.key_warps * rows, number // c.key_warps
        self._mine = number  # which of the parts of P, dS, dK and dV
        self._column_part = number if c.two_roles and not c.keeps_p else part
        self._keys = range(first, first + rows)
        self._queries = np.split(np.arange(c.tile_m), c.splits)[part]
        self.copies_ahead, self.keeps_p = c.stages > 1, c.keeps_p

    def phases(self, tile):
        """See ``KvSteps.phases``."""
        return self._call.tiles.phases(tile)

    def begin(self, tile):
        """dK = dV = 0."""
        c = self._config
        self._dk, self._dv = (
            np.zeros((c.sum_atoms * ATOM_ROWS, width // c.column_parts), np.float32)
            for width in (c.tile_d, c.tile_dv)
        )

    def _copy(self, target: CopiedRows, rows: np.ndarray):
        shape = (sum(region.shape[0] for region in target.regions), target.regions[0].shape[1])
        block = np.zeros(shape, np.float32)
        block[: len(rows), : rows.shape[1]] = rows
        for where, region in target.of_warp(self._warp % target.warps):
            self._copies.copy(region, block[where])

    def copy_keys(self, tile):
        """Start this warp's copies of the tile's K and V."""
        call, c, where = self._call, self._config, self._call.tiles.where(tile)
        first = tile.n_block * c.tile_n
        end = where.row_k + max(first, min(first + c.tile_n, call.tiles.lengths(tile)[1]))
        for name, x in (("k", call.k), ("v", call.v)):
            rows = x[where.entry_k, where.row_k + first : end, tile.head_kv]
            self._copy(self._memory[name], rows)

    def copy_step(self, tile, i):
        """Start this warp's copies of what step ``i`` needs, if there is one."""
        if i >= tile.steps:
            return
        call, c, where = self._call, self._config, self._call.tiles.where(tile)
        (block, head), slot = call.tiles.place(tile, i), i % c.stages
        first = block * c.tile_m
        end = where.row_q + max(first, min(first + c.tile_m, call.tiles.lengths(tile)[0]))
        for name, x in (("q", call.q), ("do", call.dout)):
            rows = x[where.entry_q, where.row_q + first : end, head]
            self._copy(self._memory[name][slot], rows)
        if self._mine == 0:  # whose threads are as many as statistics have chunks
            at, own = (where.slot_q + block) * c.tile_m, first < call.tiles.lengths(tile)[0]
            for name, x in (("lse", call.lse), ("delta", call.delta)):
                row = x[where.entry_q, head, at : at + c.tile_m]
                self._copies.copy(self._memory[name][slot], row if own else np.zeros_like(row))

    def commit(self):
        """Close a group of copies."""
        self._copies.commit_group()

    def wait_copies(self):
        """Wait until this warp's copies have landed."""
        self._copies.wait_group(0)

    def sync(self):
        """Meet all warps of the CTA."""
        self._barrier.sync()

    def _columns(self, run):
        """Queries of a run of this warp's."""
        own = run.of(len(self._queries))
        return self._queries[own.start : own.stop]

    def s(self, i, run=WHOLE):
        """S^T = K Q^T."""
        q = self._memory["q"][i % self._config.stages].read()[self._columns(run)]
        return matmul(self._memory["k"].read(self._keys), q.T)

    def dp(self, i, run=WHOLE):
        """dP^T = V dO^T."""
        do = self._memory["do"][i % self._config.stages].read()[self._columns(run)]
        return matmul(self._memory["v"].read(self._keys), do.T)

    def softmax(self, tile, i, s, dp, phase):
        """P^T and dS^T, in 16 bit."""
        step, lse = self._step(tile, i, phase), self._statistic("lse", i)
        pairs = step.pairs(s, lse)
        values = s if self._config.score_mod else pairs.p * pairs.slope
        ds = Scores(step, values, lambda: lse, hides=False).ds(dp - self._statistic("delta", i))
        return tuple(round_to_16_bit(x, self._config.bf16) for x in (pairs.p, ds))

    def _statistic(self, name, i, run=WHOLE):
        return self._memory[name][i % self._config.stages].read()[self._columns(run)]

    def _step(self, tile, i, phase, run=WHOLE):
        keys = slice(self._keys.start, self._keys.stop)
        unseen = not self._call.tiles.is_seen(tile)
        return Step(self._call, keys, tile, i, phase.masked, self._columns(run), unseen)

    def put_ds(self, p, ds):
        """dS^T, and P^T where warps with the same keys have split it, into shared memory."""
        self._memory["ds"][0][self._mine].write(ds)
        if not self.keeps_p:
            self._memory["p"][0][self._mine].write(p)

    def _of_keys(self, name, mine, i):
        """All queries of this warp's keys, of P or dS."""
        if self.keeps_p:
            return mine
        first = self._mine % self._config.key_warps
        parts = self._memory[name][0][first :: self._config.key_warps]
        return np.concatenate([part.read() for part in parts], axis=1)

    def _all(self, name, slot):
        """All queries of all keys, of P or dS."""
        c, parts = self._config, [part.read() for part in self._memory[name][slot]]
        groups = range(0, c.role_warps, c.key_warps)
        return np.concatenate([np.concatenate(parts[g : g + c.key_warps]) for g in groups], axis=1)

    def dv(self, i, p, run=WHOLE):
        """dV += P^T dO."""
        self._accumulate(self._dv, self._of_keys("p", p, i), "do", i, run)

    def dk(self, i, ds, run=WHOLE):
        """dK += dS^T Q."""
        self._accumulate(self._dk, self._of_keys("ds", ds, i), "q", i, run)

    def _accumulate(self, acc, a, name, i, run):
        width, over = acc.shape[1], run.of(self._config.tile_m)
        rows = self._memory[name][i % self._config.stages].read()[over.start : over.stop]
        acc += matmul(a, rows[:, self._column_part * width : (self._column_part + 1) * width])

    def dq(self, i=0):
        """This warp's part of dQ = dS K."""
        rows, columns = self._dq_part()
        ds = self._all("ds", i % self._config.ds_slots)
        return matmul(ds[:, rows].T, self._memory["k"].read()[:, columns])

    def _dq_part(self):
        c, (queries, columns) = self._config, self._config.dq_shape
        row = self._warp % c.query_warps * queries
        column = self._warp // c.query_warps * columns
        return slice(row, row + queries), slice(column, column + columns)

    def wait_turn(self, tile, i):
        """Wait until all tiles whose turn comes first have added theirs, if their order is fixed."""
        if self._config.ordered:
            if self._warp == 0:
                rank = self._call.tiles.rank(tile, i)
                self._turn(tile, i).wait(max(rank, 0))
            self.sync()

    def pass_turn(self, tile, i):
        """Let the next tile add, once all warps have."""
        if self._config.ordered:
            self.sync()
            if self._warp == 0 and self._call.tiles.rank(tile, i) >= 0:
                self._turn(tile, i).add()

    def _key(self, tile, i):
        (block, head), where = self._call.tiles.place(tile, i), self._call.tiles.where(tile)
        return where.entry_q, head, where.slot_q + block

    def _turn(self, tile, i):
        key, turns = self._key(tile, i), self._call.turns
        if key not in turns:
            turns[key] = Semaphore(self._machine, f"turns of dQ{key}")
        return turns[key]

    def add_dq(self, tile, i, dq):
        """Sums += dQ, for the queries of step ``i``."""
        call, c = self._call, self._config
        (entry, head, block), (rows, columns) = self._key(tile, i), self._dq_part()
        if c.ordered and call.tiles.rank(tile, i) >= 0:  # as a write: the order matters
            at = hash((entry, head, block, self._warp))
            Region(call.memory, f"dQ[{entry, head, block}]", at, at + 1, (1, 1)).touch(True)
        first = block * c.tile_m
        call.sums[entry, head, first + rows.start : first + rows.stop, columns] += dq

    def store(self, tile):
        """dK (scaled) and dV, through the memory of K and V."""
        call, c, where = self._call, self._config, self._call.tiles.where(tile)
        for name, x in self._results().items():
            self._memory[name][self._mine].write(round_to_16_bit(x, c.bf16))
        self.sync()
        first = tile.n_block * c.tile_n
        strips = c.role_warps // c.column_parts  # of keys, whose parts lie one after another
        for name, target in (("dk", call.dk), ("dv", call.dv)):
            parts = self._memory[name]
            rows = np.concatenate(
                [
                    np.concatenate([part.read() for part in parts[w::strips]], 1)
                    for w in range(strips)
                ]
            )
            mine = range(self._warp, min(c.tile_n, where.stored_k - first), c.warps)
            for row in mine:  # some of them each, whichever
                at = (where.entry_k, where.row_k + first + row, tile.head_kv)
                target[at] = rows[row, : target.shape[3]]

    def _results(self):
        """What this warp has of dK and dV."""
        return {"dk": self._dk * np.float32(self._call.options.softmax_scale), "dv": self._dv}


class TwoRolesOps(WarpOps):
    """Verbs of ``mma_v`` and ``mma_k``, for one warp."""

    def __init__(self, machine: Machine, call: Call, warp: int, memory: dict, barriers: tuple):
        super().__init__(machine, call, warp, memory, barriers[0])
        self._role = warp // call.config.role_warps
        of_p, of_roles = barriers[1:]
        self._p = of_p[self._mine % len(of_p)]
        self._meeting = of_roles[self._role] if of_roles else None  # where nobody meets

    def post_p(self):
        """``mma_v``: P is there."""
        self._p.arrive()

    def wait_p(self):
        """``mma_k``: wait for P."""
        self._p.sync()

    def meet_role(self):
        """Meet the warps of this role."""
        self._meeting.sync()

    def runs(self, phase=None):
        """Runs of queries in which this role takes a step."""
        return self._config.runs(self._role, phase is not None and phase.masked)

    def probabilities(self, tile, i, s, phase, run):
        """P^T, in 16 bit."""
        pairs = self._step(tile, i, phase, run).pairs(s, self._statistic("lse", i, run))
        return round_to_16_bit(pairs.p, self._config.bf16)

    def ds(self, i, dp, run):
        """dS^T, in 16 bit, of P in shared memory."""
        p = self._memory["p"][self._p_slot(i)][self._mine].read(run)
        return round_to_16_bit(p * (dp - self._statistic("delta", i, run)), self._config.bf16)

    def _p_slot(self, i):
        return i % self._config.ds_slots if self._config.hands_over else 0

    def put_p(self, i, p, run):
        """P^T into shared memory."""
        self._memory["p"][self._p_slot(i)][self._mine].write(p, run)

    def put_ds(self, i, ds, run):
        """dS^T into shared memory."""
        self._memory["ds"][i % self._config.ds_slots][self._mine].write(ds, run)

    def _of_keys(self, name, mine, i):
        if self.keeps_p:
            return mine
        return self._all(name, i % self._config.ds_slots if name == "ds" else 0)

    def add_dq_of(self, tile, i):
        """Multiply this warp's part of dQ of a step, if there is one, and add it to the sums."""
        if i >= 0:
            self.add_dq(tile, i, self.dq(i))

    def _results(self):
        results = super()._results()
        return {name: results[name] for name in (("dv",), ("dk",))[self._role]}


@dataclass(frozen=True)
class Variation:
    """What a run may change, to see whether it matters; as in ``sm80_fwd``."""

    roles: type = BackwardRoles
    two_roles: type = TwoBackwardRoles
    strict: bool = True


def simulate_backward(
    config: BackwardConfig,
    tensors,
    options: CallOptions | float,
    workers=2,
    seed=0,
    variation=None,
    dlse=None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Run the kernel's role on every tile of a problem; arguments and result as of ``sm90_bwd.simulate_backward``.

    ``workers`` is not used: each tile has a CTA of its own.

    Raises:
        Hazard: the schedule deadlocks or breaks a rule of the hardware.
    """
    packed, call = [x.ndim == 3 for x in tensors[:2]], None
    tensors, dlse = batched(tensors, dlse, packed)
    machines = backward_machines(config, tensors, options, workers, seed, variation, dlse)
    for machine, made in machines:
        machine.run()
        call = made
    return gradients(call.sums, call, packed)


def backward_machines(config, tensors, options, workers, seed, variation=None, dlse=None):
    """Yield the machine and the call of every CTA, ready to run; arguments as of ``simulate_backward``.

    CTAs that wait for one another's additions are all in one machine; its call is that of the last of them.
    """
    (q, k, v, out, lse, dout), variation = tensors, variation or Variation()
    made = BackwardCall.of(config, q, k, options)
    sides, options = made.sides, made.options
    ctas = made.tiles(config, ALL, seed)
    dk, dv = (np.full(x.shape, np.nan, np.float32) for x in (k, v))
    entries, slots = slots_and_entries(sides[0])
    sums = np.zeros((entries, q.shape[2], slots * config.tile_m, config.tile_d), np.float32)
    statistics = prepare(sides[0], out, lse, dout, dlse)
    check_graph(config.graph, SMEM_LIMIT)
    machine = None
    for number, tiles in enumerate(ctas):
        if machine is None or not config.turns:
            machine, turns = Machine(seed + number, variation.strict), {}
            memory = Space(machine, proxies=False)
        call = Call(config, q, k, v, dout, *statistics, dk, dv, sums, options, tiles, turns, memory)
        _fill_cta(machine, call, variation, f"cta{number}." if config.turns else "")
        if number == len(ctas) - 1 or not config.turns:
            yield machine, call


def _fill_cta(machine: Machine, call: Call, variation: Variation, prefix: str):
    """Memory, barrier and warps of one CTA, by the config's graph."""
    c, space = call.config, Space(machine)
    bases, memory = c.graph.addresses(), {}
    for name in ("k", "v"):
        memory[name] = CopiedRows(space, prefix + name, bases[name], c.rows(name), c.warps)
    for name in ("q", "do"):
        rows = c.rows(name)
        memory[name] = [
            CopiedRows(
                space, f"{prefix}{name}[{s}]", bases[name] + s * rows.nbytes, rows, c.role_warps
            )
            for s in range(c.stages)
        ]
    for name in ("lse", "delta"):
        nbytes = c.statistics_bytes
        memory[name] = [
            Region(
                space, f"{prefix}{name}[{s}]", bases[name] + s * nbytes, bases[name] + (s + 1) * nbytes,
                (c.tile_m,),
            )
            for s in range(c.stages)
        ]  # fmt: skip
    scores = (c.key_atoms * ATOM_ROWS, c.tile_m // c.splits)
    slots = {"ds": c.ds_slots}
    if "p" in bases:
        slots["p"] = c.ds_slots if c.hands_over else 1
    for name, count in slots.items():
        nbytes = c.rows(name).nbytes
        memory[name] = [
            _strips(_parts(space, f"{prefix}{name}[{s}]", bases[name] + s * nbytes, c, scores), c)
            for s in range(count)
        ]
    for name, width in (("dk", c.tile_d), ("dv", c.tile_dv)):
        shape = (c.sum_atoms * ATOM_ROWS, width // c.column_parts)
        memory[name] = _parts(space, prefix + name, bases[name], c, shape)
    barrier = Barrier(machine, f"{prefix}__syncthreads", c.warps)
    schedule = (variation.two_roles if c.two_roles else variation.roles)()
    ops_of = WarpOps
    if c.two_roles:
        ops_of = TwoRolesOps
        of_p, of_roles = [(BARRIER_P, "P", c.warps)], []
        if c.hands_over:
            of_p = [(BARRIER_P + n, f"P of pair {n}", 2) for n in range(c.role_warps)]
        else:
            roles = enumerate(c.graph.roles)
            of_roles = [(BARRIER_ROLE + n, role.name, c.role_warps) for n, role in roles]
        barrier = (barrier, *([NamedBarrier(machine, *x, 1) for x in y] for y in (of_p, of_roles)))
    for warp in range(c.warps):
        role = plain(getattr(type(schedule), c.graph.roles[warp // c.role_warps].name))
        ops = ops_of(machine, call, warp, memory, barrier)
        machine.spawn(f"{prefix}warp {warp}", role, schedule, ops, call.tiles)


def _parts(space, name, base, c, shape):
    """Parts of an array that warps of a role share, those of the same keys side by side."""
    nbytes, strips = shape[0] * shape[1] * ELEMENT_BYTES, c.tile_n // shape[0]
    found = []
    for warp in range(c.role_warps):
        at = base + (warp % strips * (c.role_warps // strips) + warp // strips) * nbytes
        found.append(Region(space, f"{name} of warp {warp}", at, at + nbytes, shape))
    return found


def _strips(parts: list[Region], c: BackwardConfig) -> list[Strips]:
    """The same of P or dS, cut into as many runs as any step has."""
    count, found = c.most_runs, []
    for part in parts:
        size, (rows, columns) = (part.hi - part.lo) // count, part.shape
        cuts = range(part.lo, part.hi, size)
        shape = (rows, columns // count)
        found.append(Strips([Region(part.space, part.name, at, at + size, shape) for at in cuts]))
    return found
