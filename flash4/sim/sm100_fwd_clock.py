"""How long a Blackwell forward takes: its own roles and tile schedule, with verbs that cost time and compute nothing.

Counts are instructions of one warp, which has a quarter of an SM to itself and to a warp of each of the other warpgroups.
A pair of CTAs is one of them: its peer does the same at the same time. What caps, slopes and mods do costs nothing here.
"""

import heapq
from dataclasses import dataclass, replace

from flash4.common.dsl import plain
from flash4.common.geometry import ceil_div
from flash4.common.tiles import Grid, TileSchedule
from flash4.sim.chips import TensorMemoryChip
from flash4.sim.clock import ClockedMachine, Work
from flash4.sim.cluster import lane_called
from flash4.sim.memory import Region, Space
from flash4.sim.signals import Edges, Signal, SignalSpec, TmaRing, TmaRingSpec
from flash4.sim.sm90_fwd_clock import busiest, visible_pairs
from flash4.sim.sm100_fwd import ends_of, roles_of
from flash4.sim.timing import Timing
from flash4.sm100.fwd_config import ELEMENT_BYTES, KEY_STEP, MMA_ROWS, ForwardConfig
from flash4.sm100.fwd_graph import LEADER, THREADS, UMMA

WARP_ROWS = 32
LOAD = 40  # instructions of a TMA load
TILE = 150  # of a tile's beginning, in every role
STORE_LSE = 60


@dataclass(frozen=True)
class Shape:
    """A kernel as the clock sees it.

    Attributes:
        config: of the kernel.
        roles: class of the role functions.
        emulated: of a block's exponentials, those that the FMA units compute.
        degree: of their polynomial.
        clamped: by a maximum of its own; else multiply-adds of one number each that saturate take the place of one of two.
    """

    config: ForwardConfig
    roles: type
    emulated: int
    degree: int
    clamped: bool = False


def shape_of(config: ForwardConfig, roles: type | None = None) -> Shape:
    """Our own kernel, by default with its own roles."""
    return Shape(config, roles or roles_of(config), config.head * config.poly // 16, 4)


def work(chip, label: str, stall: float = 0.0, **counts: float) -> Work:
    """Work of each warp of a warpgroup.

    Args:
        chip: rates.
        label: of the work.
        stall: cycles in which the warp only waits.
        counts: instructions by kind: packed float ones ``fma``, maxima and integers ``alu``, exponentials ``mufu``,
            conversions of pairs ``cvt``, others ``other``; and columns to or from tensor memory, ``tmem``.
    """
    rates = {"fma": chip.fma, "alu": chip.alu, "mufu": chip.mufu, "cvt": chip.cvt}
    use = {kind: counts[kind] / rate for kind, rate in rates.items() if counts.get(kind)}
    use["issue"] = sum(n / 32 if kind == "tmem" else n for kind, n in counts.items())
    if counts.get("tmem"):
        use["tmem"] = counts["tmem"] / chip.tmem_columns
    return Work(label, max(use.values()) + stall, use)


class LoadOps:
    """Verbs of the ``load`` role."""

    def __init__(self, machine: ClockedMachine, config: ForwardConfig):
        self._machine, self._config, self._first = machine, config, machine.chip.first_copy

    def load_q(self, tile, q_tile, slot):
        """Fill a slot of Q."""
        self._load(slot, self._config.q_bytes, "TMA Q")

    def load_k(self, tile, n_block, slot):
        """Fill a slot of K."""
        self._load(slot, self._config.k_bytes, "TMA K")

    def load_v(self, tile, n_block, slot):
        """Fill a slot of V."""
        self._load(slot, self._config.v_bytes, "TMA V")

    def _load(self, slot, nbytes, label):
        machine, chip = self._machine, self._machine.chip
        machine.spend(work(chip, f"issue {label}", other=LOAD, stall=LOAD + self._first))
        self._first, slot.nbytes = 0.0, nbytes
        use = {"fill": nbytes / chip.fill_bytes, "smem": nbytes / chip.smem_bytes}
        copy = Work(label, use["fill"], use, after=chip.copy_latency)
        lane = lane_called(machine, f"copies into {slot.region.name}")
        lane.issue(label, lambda: slot.full.arrive(0, -nbytes), work=copy)


class MmaOps:
    """Verbs of the ``mma`` role."""

    def __init__(self, machine, config: ForwardConfig):
        self._machine, self._config = machine, config
        self._lane = lane_called(machine, "the tensor core for mma", ordered=True)

    def first_buffer(self):
        """Which S comes first."""
        return 0

    def qk(self, buffer, q_slot, k_slot):
        """S = Q K^T: both operands from shared memory."""
        c = self._config
        nbytes = (MMA_ROWS + c.tile_n // c.ctas) * c.tile_d * ELEMENT_BYTES
        self._issue("S = Q K^T", c.tile_n, c.tile_d, nbytes)

    def pv_head(self, buffer, v_slot, accumulate):
        """O += P V for the first columns of P."""
        self._pv(self._config.head)

    def pv_tail(self, buffer, v_slot):
        """O += P V for the last columns of P."""
        self._pv(self._config.tile_n - self._config.head)

    def _pv(self, keys):
        c = self._config
        self._issue("O += P V", c.tile_dv, keys, keys * c.tile_dv // c.ctas * ELEMENT_BYTES)

    def _issue(self, label, columns, depth, nbytes):
        machine, chip = self._machine, self._machine.chip
        cycles = 2 * MMA_ROWS * columns * depth / chip.mma_flops
        use = {"tensor": cycles, "smem": nbytes / chip.smem_bytes}
        machine.spend(Work(f"issue {label}", chip.mma_issue, {"issue": chip.mma_issue / 4}))
        self._lane.issue(label, _nothing, work=Work(label, max(use.values()), use))
        rest = chip.mma_issue * (depth // KEY_STEP - 1)
        machine.spend(Work(f"issue {label}", rest, {"issue": rest / 4} if rest else {}))


class SoftmaxOps:
    """Verbs of the ``softmax`` role, for one Q tile; each warp has 32 rows, one in each of its lanes."""

    def __init__(self, machine, shape: Shape, q_tile: int, tiles):
        self._machine, self._config, self._q_tile, self._tiles = (
            machine,
            shape.config,
            q_tile,
            tiles,
        )
        chip, c, n = machine.chip, shape.config, shape.config.tile_n
        stall, emulated = chip.dependence, shape.emulated
        self._begin = work(chip, "begin", other=TILE)
        self._load = work(chip, "load S", tmem=n, stall=chip.tmem_latency)
        self._mask = work(chip, "mask", alu=2 * n, stall=stall)
        self._max = work(chip, "row maximum", alu=n / 2, mufu=1, other=12, stall=4 * stall)
        self._put = work(chip, "factor", other=6, stall=stall)
        self._head = self._exponentials("exponentials", c.head, emulated, shape)
        self._tail = self._exponentials("exponentials", n - c.head, 0, shape)
        self._sum = work(chip, "row sum", fma=n / 2 + 3, other=2, stall=stall)
        self._finish = work(chip, "finish", mufu=2, other=STORE_LSE, stall=4 * stall)

    def _exponentials(self, label, columns, emulated, shape):
        chip, pairs = self._machine.chip, emulated / 2
        return work(
            chip, label, fma=columns / 2 + pairs * (3 + shape.degree), alu=(3 if shape.clamped else 1) * emulated,
            mufu=columns - emulated, cvt=columns / 2, other=4 + (0 if shape.clamped else pairs), tmem=columns / 2,
            stall=chip.dependence + chip.tmem_latency,
        )  # fmt: skip

    def phases(self, tile):
        """Masked blocks, then the others."""
        return self._config.phases(tile, self._config.part(self._q_tile, 0), self._tiles)

    def begin(self, tile):
        """Tile decoding."""
        self._machine.spend(self._begin)
        return None, None

    def load_s(self, tile, n_block, phase, buffer=None):
        """S to registers, and its mask."""
        self._machine.spend(self._load)
        if phase.masked and (self._config.causal or self._config.left or self._config.right):
            self._machine.spend(self._mask)
        return phase

    def move_shift(self, scores, shift, phase):
        """The maximum, and whether the shift moves; with a fixed one neither."""
        if not phase.fixed:
            self._machine.spend(self._max)
        return None, None

    def put_factor(self, factor, buffer=None):
        """Tell correction."""
        self._machine.spend(self._put)

    def exp_head(self, scores, shift, phase, buffer=None):
        """First columns of P over S."""
        self._machine.spend(self._head)

    def exp_tail(self, scores, shift, phase, buffer=None):
        """Last columns of P over S."""
        self._machine.spend(self._tail)

    def add_sum(self, scores, total, factor):
        """The row's sum."""
        self._machine.spend(self._sum)

    def put_inverse(self, tile, shift, total):
        """Tell correction."""
        self._machine.spend(self._put)

    def store_lse(self, tile, shift, total):
        """LSE to global memory."""
        self._machine.spend(self._finish)


class CorrectionOps:
    """Verbs of the ``correction`` role; with random data no shift moves after a row's first block."""

    def __init__(self, machine, config: ForwardConfig):
        chip, columns = machine.chip, config.o_columns
        self._machine, self.parts = machine, config.o_parts
        self._get = work(chip, "factor", other=6, stall=chip.dependence)
        self._look = work(chip, "look at the factor", other=6, stall=chip.dependence)
        self._finish = work(
            chip, "O / l", fma=columns / 2, cvt=columns / 2, other=columns / 4 + 60, tmem=columns,
            stall=chip.tmem_latency + 4 * chip.dependence,
        )  # fmt: skip

    def get_factor(self, buffer):
        """Factor of O."""
        self._machine.spend(self._get)

    def get_inverse(self, q_tile):
        """Inverse of a row's sum."""
        self._machine.spend(self._get)

    def rescale_o(self, q_tile, factor):
        """A look."""
        self._machine.spend(self._look)

    def finish_o(self, tile, part, slot, inverse):
        """A part of O over the row sum, to shared memory."""
        self._machine.spend(self._finish)


class StoreOps:
    """Verbs of the ``store`` role."""

    def __init__(self, machine, config: ForwardConfig):
        self._machine, self._nbytes, self.parts = machine, config.o_bytes, config.o_parts
        self._lane = lane_called(machine, "stores of O", ordered=True)

    def store_o(self, tile, part, slot):
        """Start the store of a slot."""
        chip = self._machine.chip
        cycles = self._nbytes / chip.fill_bytes
        store = Work("TMA store of O", cycles, {"smem": self._nbytes / chip.smem_bytes})
        self._lane.issue(store.label, _nothing, work=store)

    def wait_store(self):
        """Wait until it has read its slot."""
        self._lane.join(self._lane.issued)


def _nothing():
    pass


class Commits:
    """What stands for the tensor core where ends commit: an arrival behind all MMAs so far."""

    def __init__(self, machine):
        self._machine = machine

    def commit(self, *barriers):
        """Arrive when all MMAs so far are done."""
        machine = self._machine
        lane = lane_called(machine, "the tensor core for mma", ordered=True)

        def land():
            for barrier in barriers:
                barrier.arrive()

        lane.issue("commit", land, work=Work("commit", 1.0, {}, after=machine.chip.commit))


def time_tiles(shape: Shape, chip: TensorMemoryChip, tiles, latest=float("inf")) -> ClockedMachine:
    """Run the tiles of one CTA, or of one of a pair, under the clock; returns the machine at its end."""
    machine = ClockedMachine(chip, latest)
    config, roles, schedule = shape.config, shape.roles, shape.roles()
    graph, edges, core = config.graph, Edges(machine, fences=False), Commits(machine)
    specs = {s.name: SignalSpec(s.name, len(s.raisers), credit=s.credit) for s in graph.signals}
    signals = {s.name: (s, Signal(edges, specs[s.name])) for s in graph.signals}
    space, rings = Space(machine), {}
    for ring in graph.rings:
        regions = [Region(space, f"{ring.name}[{i}]", 0, 1, (1, 1)) for i in range(ring.stages)]
        spec = TmaRingSpec(ring.name, ring.stages, 0 if ring.kinds[0] == THREADS else 1)
        rings[ring.name] = TmaRing(edges, spec, [regions])

    def end(name, raised):
        spec, signal = signals[name]
        if not raised:
            return signal.end()
        made = signal.end(core=core if spec.kind == UMMA else None)
        return _Remote(machine, made) if spec.kind == LEADER else made

    def ends(role, **others):
        return ends_of(config, role, end, **others)

    q, kv, o = (rings[name] for name in ("q", "kv", "o"))
    load = (LoadOps(machine, config), tiles, q.producer(), kv.producer())
    machine.spawn("load", plain(roles.load), schedule, *load)
    mma = ends("mma", q=q.consumer(core=core), kv=kv.consumer(core=core))
    machine.spawn("mma", plain(roles.mma), schedule, MmaOps(machine, config), tiles, mma)
    for i in range(config.q_tiles):
        softmax = (SoftmaxOps(machine, shape, i, tiles), tiles, ends(f"softmax{i}"))
        machine.spawn(f"softmax{i}", plain(roles.softmax), schedule, *softmax)
    correction = (CorrectionOps(machine, config), tiles, ends("correction", o=o.producer()))
    machine.spawn("correction", plain(roles.correction), schedule, *correction)
    store = (StoreOps(machine, config), tiles, o.consumer())
    machine.spawn("store", plain(roles.store), schedule, *store)
    machine.run()
    return machine


class _Remote:
    """A raiser's end whose barrier is the leader's: the peer's arrival, on its way for longer, is the last one."""

    def __init__(self, machine, end):
        self._machine, self._end = machine, end

    def post(self):
        """Arrive, later."""
        machine = self._machine
        machine.at(machine.now + machine.chip.remote, self._end.post)


def time_forward(
    plan, chip: TensorMemoryChip, roles=None, latest=float("inf"), window=(None, None)
) -> Timing:
    """Run the worker with the most to do under the clock.

    Args:
        plan: of the call.
        chip: rates.
        roles: class of the role functions; by default the kernel's own.
        latest: cycle after which no spans are kept.
        window: its sides, where the config has them.
    """
    problem, config = plan.problem, plan.config
    schedule = plan.schedule(chip.sms, *window)
    tiles = replace(schedule, start=busiest(schedule))
    machine = time_tiles(shape_of(config, roles), chip, tiles, latest)
    flops = 2 * visible_pairs(problem, schedule) * (problem.head_dim + problem.head_dim_v)
    return Timing(machine, chip, schedule.step * config.ctas, flops)


@dataclass(frozen=True)
class Costs:
    """Cycles of a kernel's CTAs, linear in what they do; ``costs_of`` measures them under the clock.

    Attributes:
        start: before the first tile, and behind the last.
        tile: of every further tile beyond its blocks.
        block: of a block.
    """

    start: float
    tile: float
    block: float

    def cta(self, blocks: int, tiles: int) -> float:
        """A CTA that has so many tiles with so many blocks in all."""
        return self.start + tiles * self.tile + blocks * self.block


def costs_of(shape: Shape, chip: TensorMemoryChip) -> Costs:
    """Costs of a kernel, from runs of one and two tiles of different lengths; masked blocks are part of a tile's."""
    config, short, long = shape.config, 12, 24

    def cycles(tiles, blocks):
        rows = blocks * config.tile_n
        grid = Grid(ceil_div(rows, config.tile_q) if config.causal else 1, 1, tiles, 1)
        one = _Same(TileSchedule(config.blocks(), grid, tiles, 0, 1, rows, rows), tiles)
        return time_tiles(shape, chip, one).now

    first, second, longer = cycles(1, short), cycles(2, short), cycles(1, long)
    block = (longer - first) / (long - short)
    tile = second - first - short * block
    return Costs(first - tile - short * block, tile, block)


@dataclass(frozen=True)
class _Same:
    """The longest tile of a schedule, several times."""

    schedule: TileSchedule
    times: int

    def first(self):
        """Return it."""
        return replace(self.schedule.first(), index=0, valid=True)

    def next(self, tile):
        """Return it again."""
        index = tile.index + 1
        return replace(tile, index=index, valid=index < self.times)

    @property
    def blocks(self):
        """Visiting rule."""
        return self.schedule.blocks

    def lengths(self, tile):
        """(queries, keys) of the sequence."""
        return self.schedule.lengths(tile)


@dataclass(frozen=True)
class Call:
    """A call to time: as benchmarks have it, 32k tokens and heads of 2,048 columns in all.

    Attributes:
        seqlen: of queries and keys.
        head_dim: of Q and K.
        head_dim_v: of V.
        causal: mask.
    """

    seqlen: int
    head_dim: int
    head_dim_v: int
    causal: bool

    @property
    def heads(self) -> int:
        """Of all batch entries."""
        return 32_768 // self.seqlen * (2_048 // min(self.head_dim, 128))

    @property
    def flops(self) -> float:
        """As benchmarks count: half for causal."""
        pairs = self.seqlen**2 / (2 if self.causal else 1)
        return 2.0 * self.heads * pairs * (self.head_dim + self.head_dim_v)


def tflops(
    call: Call, shape: Shape, costs: Costs, chip: TensorMemoryChip, persistent=True
) -> float:
    """Speed of a call by a kernel's costs; CTAs of one tile each are taken by the SMs that are free, in order."""
    config = shape.config
    grid = Grid(ceil_div(call.seqlen, config.tile_q), 1, call.heads, 1)
    workers = min(chip.sms // config.ctas, grid.total)
    lengths = (call.seqlen, call.seqlen)
    counts = [config.blocks().count(m, *lengths) for m in range(grid.m_blocks)]
    if persistent:
        section = call.heads if not config.causal else max(1, workers // 3)
        schedule = TileSchedule(config.blocks(), grid, section, 0, workers, *lengths)
        loads = [
            costs.cta(sum(tile.n_blocks for tile in mine), len(mine)) for mine in schedule.workers()
        ]
    else:
        loads = [0.0] * workers
        for count in sorted(counts * call.heads, reverse=True):
            start = heapq.heappop(loads)
            heapq.heappush(loads, start + costs.cta(count, 1) + chip.cta_start)
    microseconds = max(loads) / chip.mma_mhz + chip.launch_us
    return call.flops / microseconds / 1e6
