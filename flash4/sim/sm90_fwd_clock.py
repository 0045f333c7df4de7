"""How long the Hopper forward takes: its own roles and tile schedule, with verbs that cost time and compute nothing.

Counts are instructions of one warp, as the compiled kernel has them (a test compares those of plain calls); rates are
the chip's. Mods cost nothing here.
"""

from dataclasses import dataclass, replace

import numpy as np

from flash4.common.dsl import plain
from flash4.common.graph import WARPGROUP
from flash4.common.tiles import TileSchedule
from flash4.sim.chips import Chip
from flash4.sim.clock import ClockedMachine, ClockedNamedBarrier, Work
from flash4.sim.memory import Space
from flash4.sim.rings import End, Ring, Turn
from flash4.sim.timing import Timing
from flash4.sm90.fwd_config import MMA_ROWS, ForwardConfig
from flash4.sm90.fwd_ops import BARRIER_Q_READ, BARRIER_TURN
from flash4.sm90.fwd_roles import ForwardRoles

MMA_K = 16
NOTHING = np.zeros((1, 1), np.float32)

# Instructions of one warp beyond those that every element of S needs: (vector, others). Others are control flow,
# barriers and the uniform datapath's: they take an issue slot and leave the register file's ports alone.
SS_STEP, RS_STEP = (0, 3.8), (0, 1.5)  # per WGMMA, operand A in shared memory and in registers
BLOCK = (22, 20)  # waits, releases, votes, the loop itself: a third at each of its three places
TILE, STORE = (100, 130), (100, 130)
LOAD = (20, 20)  # one TMA copy
DRAW_CYCLES = 1_000  # an atomic at the L2 and back: a guess


def ops(chip: Chip, label: str, *, fma=0.0, alu=0.0, mufu=0.0, other=(0.0, 0.0), stall=0.0) -> Work:
    """Work of one warp (of each warp of a warpgroup): instructions by unit, and cycles in which it only waits.

    Args:
        chip: rates.
        label: of the work.
        fma: float additions and multiplications.
        alu: maxima, conversions, comparisons.
        mufu: exponentials.
        other: (vector, others), instructions of no unit that matters.
        stall: cycles.
    """
    vector = fma + alu + mufu + other[0]
    use = {
        "ports": vector * chip.ports,
        "issue": vector + other[1],
        "fma": fma / chip.fma,
        "alu": alu / chip.alu,
        "mufu": mufu / chip.mufu,
    }
    use = {unit: amount for unit, amount in use.items() if amount}
    alone = (amount / chip.alone.get(unit, 1.0) for unit, amount in use.items())
    cycles = max(alone, default=0.0) + stall
    return Work(label, cycles, use)


def per_step(steps, each, share=1 / 3):
    """(vector, others), instructions around a group of WGMMAs, with its share of the block's own."""
    return tuple(steps * x + share * y for x, y in zip(each, BLOCK, strict=True))


@dataclass(frozen=True)
class MmaShape:
    """A group of WGMMAs of one warpgroup: 64 x columns x (16 steps)."""

    columns: int
    steps: int
    a_in_registers: bool

    def work(self, chip: Chip, label: str) -> Work:
        """Time on the tensor cores, and what it keeps from others."""
        cycles = 2 * MMA_ROWS * self.columns * MMA_K * self.steps / chip.mma_flops
        ports = np.interp(self.columns, list(chip.mma_ports), list(chip.mma_ports.values()))
        use = {"tensor": cycles, "ports": float(ports) * cycles}
        use |= {unit: share * cycles for unit, share in chip.mma_beside.items()}
        return Work(label, cycles, use, after=chip.mma_latency)


class LoadOps:
    """Verbs of the ``load`` role."""

    def __init__(self, machine: ClockedMachine, config: ForwardConfig):
        self._machine, self._config, self._first = machine, config, machine.chip.first_copy

    def load_q(self, tile, slot):
        """Fill a Q slot."""
        self._load(slot, self._config.q_bytes, "TMA Q")

    def load_k(self, tile, n_block, slot):
        """Fill a K slot."""
        self._load(slot, self._config.k_bytes, "TMA K")

    def load_v(self, tile, n_block, slot):
        """Fill a V slot."""
        self._load(slot, self._config.v_bytes, "TMA V")

    def _load(self, slot, nbytes, label):
        machine, stall, self._first = self._machine, sum(LOAD) + self._first, 0.0
        machine.spend(ops(machine.chip, f"issue {label}", other=LOAD, stall=stall))
        slot.fill(NOTHING, nbytes)


class MmaOps:
    """Verbs of the ``mma`` role, for one warpgroup; of CTAs that share tiles, one of the last, which sees most."""

    def __init__(self, machine, config: ForwardConfig, group: int, tiles, q_read):
        self._machine, self._config = machine, config
        self._group = config.tile_warpgroups - config.mma_warpgroups + group
        self._tiles = tiles
        self._mma = machine.lane(f"the tensor core for mma[{group}]", True)
        self._stores = machine.lane(f"stores of mma[{group}]", True)
        self._q_read = q_read
        self.o_borrows_q = config.o_borrows_q
        chip, elements = machine.chip, config.tile_n // 2
        self._qk = MmaShape(config.tile_n, config.tile_d // MMA_K, False)
        self._pv = MmaShape(config.tile_dv, config.tile_n // MMA_K, True)
        self._works = {
            "qk": self._qk.work(chip, "S = Q K^T"),
            "pv": self._pv.work(chip, "O += P V"),
        }
        steps = per_step(self._qk.steps, SS_STEP)
        self._issue_qk = ops(chip, "issue S = Q K^T", other=steps, stall=sum(steps) / 2)
        steps = per_step(self._pv.steps, RS_STEP, 0)
        self._issue_pv = ops(chip, "issue O += P V", other=steps, stall=sum(steps) / 2)
        third = per_step(0, (0, 0))
        self._max = ops(chip, "row maximum", alu=elements / 2, other=third, stall=30)
        self._look_away = ops(chip, "row maximum", other=(2, third[1]))
        self._exp = ops(chip, "exponentials", fma=2 * elements, mufu=elements, stall=30)
        self._mask = ops(chip, "mask", alu=(3 if config.left else 2) * elements, other=(10, 0))
        self._change = {
            (masked, fixed): _score_changes(chip, config, elements, masked, fixed)
            for masked in (False, True)
            for fixed in (False, True)
        }
        self._exact = ops(
            chip, "exact maximum", alu=elements + 4, fma=4, mufu=2, other=third, stall=120
        )
        self._convert = ops(chip, "P to 16 bit", alu=elements / 2, other=third, stall=30)
        columns, other = config.tile_dv / config.o_parts, tuple(x / config.o_parts for x in STORE)
        self._finish = ops(chip, "O / l", fma=columns / 2, alu=columns / 4, other=other, stall=200)
        self._begin = ops(chip, "begin", other=TILE)

    def unseen_blocks(self, tile):
        """Blocks that this warpgroup skips."""
        return self._config.unseen_blocks(tile, self._group, self._tiles)

    def passed_blocks(self, tile):
        """Blocks that this warpgroup no longer needs."""
        return self._config.passed_blocks(tile, self._group, self._tiles)

    def phases(self, tile):
        """Masked blocks, then the others."""
        return self._config.phases(tile, self._group, self._tiles)

    def begin(self, tile):
        """Tile decoding, and O = 0."""
        self._machine.spend(self._begin)

    def qk(self, q_slot, k_slot):
        """Issue S = Q K^T."""
        self._machine.spend(self._issue_qk)
        self._mma.issue("S = Q K^T", _nothing, work=self._works["qk"])

    def pv(self, v_slot):
        """Issue O += P V."""
        self._machine.spend(self._issue_pv)
        self._mma.issue("O += P V", _nothing, work=self._works["pv"])

    def wait_mma(self, pending):
        """Wait until at most ``pending`` MMAs are in flight."""
        self._mma.join(self._mma.issued - pending)

    def softmax_first(self, tile, n_block, s):
        """The first block: masked where it must be, and an exact maximum."""
        c = self._config
        self._machine.spend(self._change[True, False])
        if c.causal or c.left or c.right:
            self._machine.spend(self._mask)
        self._machine.spend(self._exact)
        self._machine.spend(self._exp)

    def softmax(self, tile, n_block, s, phase):
        """Check the maximum, exponentials; with random data the shift does not move after the first block."""
        self._machine.spend(self._change[phase.masked, phase.fixed])
        if phase.masked:
            self._machine.spend(self._mask)
        self._machine.spend(self._look_away if phase.fixed else self._max)
        self._machine.spend(self._exp)

    def convert_p(self, s):
        """P to 16 bit."""
        self._machine.spend(self._convert)

    def rescale_o(self, phase):
        """Counted with ``convert_p``: a check."""

    def store(self, tile):
        """O / l, to shared memory, and a TMA store."""
        machine, nbytes = self._machine, self._config.o_bytes // self._config.mma_warpgroups
        for _ in range(self._config.o_parts):
            if self.o_borrows_q:
                self._q_read.sync()
            else:
                self.wait_store()
            machine.spend(self._finish)
            self._stores.issue("the store of O", _nothing, work=_store_work(machine.chip, nbytes))

    def wait_store(self):
        """Wait until the stores have read their shared memory."""
        self._stores.join(self._stores.issued)


def _score_changes(chip, config, elements, masked, fixed) -> Work:
    """What is done to every score beyond the exponentials' own: a cap, ALiBi, a negative scale; mods are not known.

    Scores are taken to use little of their cap, as random ones do.
    """
    fma, alu = float(config.negate and not config.changes_scores), 0.0
    if config.softcap:
        fma, alu = (4.0, 0.0) if config.near_first and fixed and not masked else (4.5, 0.25)
    elif config.changes_scores:
        fma = 1.0
    if config.alibi:
        fma += 1.0 if config.causal and not masked else 2.0
    if config.changes_scores and fixed:  # the shift comes with it
        fma -= 1.0
    return ops(chip, "cap, slopes", fma=fma * elements, alu=alu * elements)


def _nothing():
    pass


def _store_work(chip, nbytes):
    return Work("TMA store of O", nbytes / chip.fill_bytes, {}, after=chip.copy_latency)


def busiest(tiles: TileSchedule) -> int:
    """Worker with the most to do, counting one block more for each tile's ends."""
    return int(np.argmax([sum(t.n_blocks + 1 for t in mine) for mine in tiles.workers()]))


@dataclass(frozen=True)
class DrawnTiles:
    """A worker's tiles where they are handed out, as one role sees them; ``load`` asks by ``draw`` and waits by ``wait``."""

    schedule: TileSchedule
    indices: list[int]
    draw: object = None
    wait: object = None

    @property
    def blocks(self):
        """Visiting rule of KV blocks."""
        return self.schedule.blocks

    def lengths(self, tile):
        """(queries, keys) of a tile's sequence."""
        return self.schedule.lengths(tile)

    def first(self):
        """Return the worker's first tile."""
        return self.schedule.at(self.indices[0])

    def ask(self, tile):
        """Ask for the tile after ``tile``."""
        self.draw()
        return tile

    def next(self, tile):
        """Return the tile after ``tile``."""
        if self.wait is not None:
            self.wait()
        i = self.indices.index(tile.index) + 1
        total = self.schedule.grid.total
        return self.schedule.at(self.indices[i] if i < len(self.indices) else total)


def drawn_by_the_busiest(tiles: TileSchedule) -> DrawnTiles:
    """What the worker with the most to do gets where tiles are handed out."""
    costs = tiles.handed_out_costs()
    return DrawnTiles(tiles, max(tiles.handed_out()[0], key=lambda mine: costs[mine].sum()))


def time_forward(
    plan, chip: Chip, roles=ForwardRoles, latest=float("inf"), window=(None, None)
) -> Timing:
    """Run the worker with the most to do under the clock.

    Args:
        plan: of the call.
        chip: rates.
        window: its sides, where the config has them.
        roles: class of the role functions.
        latest: cycle after which no spans are kept.
    """
    problem, config = plan.problem, plan.config
    schedule = plan.schedule(chip.sms, *window)
    machine = ClockedMachine(chip, latest)
    if config.handed_out:
        tiles = drawn_by_the_busiest(schedule)
    else:
        tiles = replace(schedule, start=busiest(schedule))
    _fill_cta(machine, config, tiles, roles)
    machine.run()
    flops = 2 * visible_pairs(problem, schedule) * (problem.head_dim + problem.head_dim_v)
    return Timing(machine, chip, schedule.step * config.cluster, flops)


def visible_pairs(problem, schedule: TileSchedule) -> float:
    """Query-key pairs that count as work: half of all for causal, as benchmarks have it, and those in a window."""
    lengths, blocks = (problem.seqlen_q, problem.seqlen_k), schedule.blocks
    heads = problem.batch * problem.heads_q
    if blocks.left is None and blocks.right is None:
        return heads * problem.seqlen_q * problem.seqlen_k / (2 if problem.causal else 1)
    ends = (blocks.key_end(i, *lengths) - blocks.key_begin(i, *lengths) for i in range(lengths[0]))
    return heads * sum(max(n, 0) for n in ends)


def _fill_cta(machine, config, tiles, roles):
    """One CTA; another that shares its tiles is taken to load and release in step with it."""
    graph, count, schedule = config.graph, config.mma_warpgroups, roles()
    rings = [Ring(machine, spec, count, Space(machine)) for spec in graph.rings if spec.tma]
    threads = WARPGROUP * count
    q_read = ClockedNamedBarrier(machine, BARRIER_Q_READ, "q read", threads, WARPGROUP)
    turns = [
        ClockedNamedBarrier(machine, BARRIER_TURN + i, f"turn[{i}]", 2 * WARPGROUP, WARPGROUP)
        for i in range(count)
        if config.turns and count > 1
    ]
    load, mma = plain(roles.load), plain(roles.mma)
    ends, given = [End(ring) for ring in rings], tiles
    if config.handed_out:
        answers = machine.lane("answers of the counter", True)
        work = Work("the counter's answer", DRAW_CYCLES, {})
        given = replace(
            tiles,
            draw=lambda: answers.issue("ask", _nothing, work=work),
            wait=lambda: answers.join(answers.issued),
        )
    machine.spawn("load", load, schedule, LoadOps(machine, config), given, *ends)
    for group in range(count):
        verbs = MmaOps(machine, config, group, tiles, q_read)
        ends = [End(ring) for ring in rings]
        machine.spawn(f"mma[{group}]", mma, schedule, verbs, tiles, *ends, Turn(turns, group))
