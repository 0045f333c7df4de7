"""How long a Blackwell backward takes: its own roles, with verbs that cost time and compute nothing; see ``sm100_fwd_clock``.

A warpgroup of ``compute`` is a task, and so are all of ``reduce``; a pair of CTAs is one of them. Only steps in a row are
timed: tiles start one behind the other, and nobody waits for another tile's turn.
"""

import heapq
from dataclasses import dataclass
from types import SimpleNamespace

from flash4.common.dsl import plain
from flash4.common.geometry import Phase, ceil_div
from flash4.sim.barriers import NamedBarrier
from flash4.sim.chips import TensorMemoryChip
from flash4.sim.clock import ClockedMachine, Work
from flash4.sim.cluster import lane_called
from flash4.sim.memory import Region, Space
from flash4.sim.signals import Edges, Signal, SignalSpec, TmaRing, TmaRingSpec
from flash4.sim.sm100_bwd_memory import Cursor, Free, Nothing, Producer, Told
from flash4.sim.sm100_fwd_clock import LOAD, TILE, Commits, _Remote, work
from flash4.sm100.bwd_config import BackwardConfig
from flash4.sm100.bwd_graph import LEADER, ROWS, SLICE, UMMA
from flash4.sm100.bwd_pair_roles import PairRoles
from flash4.sm100.bwd_roles import BackwardRoles
from flash4.sm100.fwd_config import ELEMENT_BYTES

WARPGROUPS = 2
MEETING = 30.0  # from the last arrival at a named barrier; as on an H200
ROUND_TRIP = 700.0  # to L2 and back: a look at a counter
BULK_LATENCY = 700.0  # from the issue of a bulk addition to its end, beyond its bytes; assumed


@dataclass(frozen=True)
class Shape:
    """A kernel as the clock sees it.

    Attributes:
        config: of the kernel.
        roles: class of the role functions of one CTA, and of compute and reduce.
        pair_roles: class of the others of a pair.
        masks: instructions a query that every step takes for masks.
        meetings: barriers of both warpgroups of ``compute`` in a step, beside the schedule's.
        keeps_dst: dS^T goes to tensor memory with one CTA too.
        persistent: a CTA takes several tiles.
    """

    config: BackwardConfig
    roles: type = BackwardRoles
    pair_roles: type = PairRoles
    masks: int = 0
    meetings: int = 0
    keeps_dst: bool = False
    persistent: bool = True


@dataclass(frozen=True)
class Tiles:
    """Some tiles of as many steps each."""

    steps: int
    count: int
    index: int = 0

    @property
    def valid(self) -> bool:
        """Whether this one is among them."""
        return self.index < self.count

    def first(self):
        """The first tile."""
        return self

    def next(self, tile):
        """The tile after ``tile``."""
        return Tiles(self.steps, self.count, tile.index + 1)


class LoadOps:
    """Verbs of the ``load`` role."""

    def __init__(self, machine, config: BackwardConfig):
        self._machine, self._first, c = machine, machine.chip.first_copy, config
        self.k_bytes, self.v_bytes, self.q_bytes = c.k_bytes, c.v_bytes, c.q_bytes
        self.do_bytes, self.stat_bytes = c.do_bytes, c.stat_bytes

    def load_k(self, tile, slot):
        """Keys."""
        self._load(slot, self.k_bytes, "K")

    def load_v(self, tile, slot):
        """Values."""
        self._load(slot, self.v_bytes, "V")

    def load_half_v(self, tile, half, slot):
        """Values, half of the columns."""
        self._load(slot, self.v_bytes, "V")

    def load_kt(self, tile, slot):
        """Keys, the other way."""
        self._load(slot, self.k_bytes, "K^T")

    def load_q(self, tile, i, slot):
        """Queries."""
        self._load(slot, self.q_bytes, "Q")

    def load_do(self, tile, i, slot):
        """dO."""
        self._load(slot, self.do_bytes, "dO")

    def load_qt(self, tile, i, slot):
        """Queries, the other way."""
        self._load(slot, self.q_bytes, "Q^T")

    def load_dot(self, tile, i, slot):
        """dO, the other way."""
        self._load(slot, self.do_bytes, "dO^T")

    def load_stat(self, tile, i, slot):
        """LSE and D."""
        self._load(slot, self.stat_bytes, "statistics")

    def _load(self, slot, nbytes, label):
        machine, chip = self._machine, self._machine.chip
        machine.spend(work(chip, f"issue {label}", other=LOAD, stall=LOAD + self._first))
        self._first = 0.0
        use = {"fill": nbytes / chip.fill_bytes, "smem": nbytes / chip.smem_bytes}
        copy = Work(f"TMA {label}", use["fill"], use, after=chip.copy_latency)
        lane = lane_called(machine, f"copies into {slot.region.name} of {label}")
        lane.issue(label, lambda: slot.full.arrive(0, -nbytes), work=copy)


class MmaOps:
    """Verbs of the ``mma`` role: operations and bytes of a CTA."""

    def __init__(self, machine, shape: Shape):
        self._machine, self._shape, self._config = machine, shape, shape.config
        self._lane = lane_called(machine, "the tensor core for mma", ordered=True)

    def s(self, slot):
        """S^T = K Q^T."""
        self._scores("S", self._config.tile_d)

    def dp(self, slot):
        """dP^T = V dO^T."""
        c = self._config
        if c.keeps_v:
            self._issue("dP", c.tile_m, c.tile_dv, c.tile_m * c.tile_dv)
        else:
            self._scores("dP", c.tile_dv)

    def _scores(self, label, depth):
        queries = self._config.tile_m
        self._issue(label, queries, depth, (ROWS + queries // self._config.ctas) * depth)

    def dv(self, slot, accumulate):
        """dV += P^T dO."""
        c = self._config
        self._issue("dV", c.part_dv, c.tile_m, c.tile_m * c.part_dv // c.ctas)

    def dk(self, slot, accumulate):
        """dK += dS^T Q."""
        c = self._config
        in_smem = c.ctas == 1 and not self._shape.keeps_dst
        a = ROWS * c.tile_m if in_smem else 0
        self._issue("dK", c.part_d, c.tile_m, a + c.tile_m * c.part_d // c.ctas)

    def dq(self, slot):
        """dQ = dS K."""
        c = self._config
        if not c.dq_turned:
            elements = ROWS * c.tile_m + ROWS * c.tile_d
            self._issue("dQ", c.tile_d // c.ctas, c.tile_n, elements)
            return
        for _, rows in c.dq_accumulators:  # 64 rows take as long as 128
            self._issue("dQ^T", c.tile_m, ROWS, ROWS * (rows + c.tile_m))

    def _issue(self, label, columns, depth, elements):
        machine, chip = self._machine, self._machine.chip
        cycles = 2 * ROWS * columns * depth / chip.mma_flops
        use = {"tensor": cycles, "smem": ELEMENT_BYTES * elements / chip.smem_bytes}
        self._lane.issue(label, _nothing, work=Work(label, max(use.values()), use))
        issue = chip.mma_issue * depth / SLICE
        machine.spend(Work(f"issue {label}", issue, {"issue": issue / 4}))


class ComputeOps:
    """Verbs of a warpgroup of ``compute``."""

    def __init__(self, machine, shape: Shape, meeting):
        chip, c, n = machine.chip, shape.config, shape.config.tile_m // WARPGROUPS
        self._machine, self._shape, self._meeting = machine, shape, meeting
        wait, step = chip.tmem_latency, chip.dependence
        self._tile = work(chip, "decode", other=TILE)
        self._load_s = work(chip, "load S", tmem=n, stall=wait)
        self._softmax = work(
            chip, "P", fma=n / 2, mufu=n, cvt=n / 2, alu=shape.masks * n, other=n / 4 + 10, stall=step,
        )  # fmt: skip
        self._store = work(chip, "store 16 bit", tmem=n / 2, stall=wait)
        self._grad = work(chip, "dS", tmem=n, fma=n, cvt=n / 2, other=n / 4 + 10, stall=wait + step)
        self._stage = work(
            chip, "dV or dK", tmem=c.part_d / 2, cvt=c.part_d / 4, other=60, stall=4 * wait
        )
        nbytes = ROWS * n * ELEMENT_BYTES
        cycles = nbytes / chip.smem_bytes
        use = {"smem": cycles, "issue": 12.0}
        self._store_ds = Work("store dS", cycles + wait, use)
        self._has_dst = c.ctas == 2 or shape.keeps_dst
        self._lane = lane_called(machine, "stores of dK and dV", ordered=True)

    def keep_v(self, half):
        """Half of V to tensor memory."""
        chip, words = self._machine.chip, self._shape.config.part_dv / 4
        stall = 2 * chip.tmem_latency
        use = work(chip, "keep V", tmem=words, other=words + 20, stall=stall)
        self._machine.spend(use)

    def phases(self, tile):
        """All steps."""
        self._machine.spend(self._tile)
        return (Phase(0, tile.steps, False),)

    def place(self, tile, i, phase):
        """Nothing."""

    def load_s(self):
        """S to registers."""
        self._machine.spend(self._load_s)

    def softmax(self, tile, place, scores, slot, phase):
        """P."""
        self._machine.spend(self._softmax)
        for _ in range(self._shape.meetings):
            self._meeting.sync()
        return None, None

    def store_p(self, probs):
        """P to tensor memory."""
        self._machine.spend(self._store)

    def grad(self, weights, slot):
        """dS."""
        self._machine.spend(self._grad)

    def store_dst(self, grads):
        """dS^T to tensor memory."""
        if self._has_dst:
            self._machine.spend(self._store)

    def store_ds(self, grads):
        """dS to shared memory."""
        self._machine.spend(self._store_ds)

    def stage_dv(self):
        """dV to shared memory."""
        self._machine.spend(self._stage)

    stage_dk = stage_dv

    def send_dv(self, tile):
        """Start a store."""
        chip, nbytes = (
            self._machine.chip,
            ROWS * self._shape.config.part_dv * ELEMENT_BYTES // WARPGROUPS,
        )
        use = {"smem": nbytes / chip.smem_bytes}
        store = Work("TMA store", nbytes / chip.fill_bytes, use)
        self._lane.issue(store.label, _nothing, work=store)

    send_dk = send_dv

    def wait_sent(self):
        """Wait until stores have read."""
        self._lane.join(self._lane.issued)

    def drain(self):
        """Nothing more."""


class ReduceOps:
    """Verbs of ``reduce``."""

    def __init__(self, machine, config: BackwardConfig):
        chip, c = machine.chip, config
        self._machine, self._config, self.parts = machine, c, tuple(range(c.dq_steps))
        self._load = work(chip, "load dQ", tmem=c.tmem.dq_columns, stall=chip.tmem_latency)
        nbytes = c.dq_floats * 4
        self._cycles = nbytes / chip.smem_bytes
        use = {"smem": self._cycles, "issue": c.dq_columns / 4 + 8}
        self._stage = Work("stage dQ", self._cycles + chip.tmem_latency, use)
        use = {"smem": self._cycles, "out": nbytes / chip.fill_bytes}
        self._add = Work("add dQ", use["out"], use)
        self._lane = lane_called(machine, "additions", ordered=True)

    def place(self, tile, i):
        """Nothing."""

    def load_dq(self):
        """dQ to registers."""
        self._machine.spend(self._load)

    def stage_dq(self, sums, part):
        """A part to shared memory."""
        self._machine.spend(self._stage)

    def wait_read(self):
        """Wait until what came before has been read."""
        self._lane.join(self._lane.issued)

    def add_dq(self, place, part):
        """Start an addition."""
        self._lane.issue("add dQ", _nothing, work=self._add)

    def wait_turn(self, tile, place):
        """A look at the counter, which shows the turn."""
        if self._config.ordered:
            self._machine.spend(Work("look at the turn", ROUND_TRIP, {"issue": 4.0}))

    def pass_turn(self, tile, place):
        """Wait until the additions are done, and count."""
        if self._config.ordered:
            self.wait_read()
            self._machine.spend(Work("wait for additions", BULK_LATENCY, {"issue": 4.0}))

    def drain(self):
        """Nothing more."""


class RelayOps:
    """Verbs of ``relay``; what is sent comes as the peer's does."""

    def __init__(self, machine, config: BackwardConfig, barrier):
        self._machine, self._barrier, self.panel_bytes = machine, barrier, config.panel_bytes

    def send_ds(self):
        """Start the copy."""
        machine, chip, nbytes = self._machine, self._machine.chip, self.panel_bytes
        use = {"smem": 2 * nbytes / chip.smem_bytes}  # read here, and written by the peer's
        copy = Work("send dS", nbytes / chip.fill_bytes, use, after=chip.copy_latency)
        lane = lane_called(machine, "copies to the peer")
        lane.issue("send dS", lambda: self._barrier.arrive(0, -nbytes), work=copy)


class Meeting(NamedBarrier):
    """A named barrier under the clock."""

    def wait(self, phase: int):
        """Wait, as ``Barrier``."""
        with self.machine.waking(MEETING):
            super().wait(phase)


def _nothing():
    pass


def time_tiles(shape: Shape, chip: TensorMemoryChip, tiles: Tiles) -> ClockedMachine:
    """Run tiles of one CTA, or of one of a pair, under the clock; returns the machine at its end."""
    return _Kernel(shape, chip, tiles).machine


class _Kernel:
    """Edges and roles of one CTA."""

    def __init__(self, shape: Shape, chip: TensorMemoryChip, tiles: Tiles):
        self.machine = machine = ClockedMachine(chip, 0.0)
        self.shape, self.graph, self.core = shape, shape.config.graph, Commits(machine)
        self.pair, edges = shape.config.ctas == 2, Edges(machine, fences=False)
        self.signals, self.rings = {}, {}
        for spec in self.graph.signals:
            count = WARPGROUPS if spec.raiser.name == "compute" else 1
            self.signals[spec.name] = Signal(edges, SignalSpec(spec.name, count))
        space = Space(machine)
        for ring in self.graph.rings:
            regions = [Region(space, f"{ring.name}[{i}]", 0, 1, (1, 1)) for i in range(ring.stages)]
            releases = WARPGROUPS if ring.releases > 1 else ring.releases
            spec = TmaRingSpec(ring.name, ring.stages, 1, releases)
            self.rings[ring.name] = TmaRing(edges, spec, [regions])
        self._spawn(tiles)
        machine.run()

    def _end(self, role: str, name: str):
        spec = self.graph.signal(name)
        late = int(role in [waiter.name for waiter in spec.late])
        raised = role == spec.raiser.name and spec.name != "x"
        core = self.core if raised and spec.kind == UMMA else None
        end = self.signals[name].end(core=core, lag=late)
        return _Remote(self.machine, end) if raised and spec.kind == LEADER else end

    def _ends(self, role: str, *names, **others):
        return SimpleNamespace(**{name: self._end(role, name) for name in names}, **others)

    def _spawn(self, tiles):
        machine, shape, config = self.machine, self.shape, self.shape.config
        roles = shape.pair_roles if self.pair else shape.roles

        def start(name, role, owner, ops, ends):
            machine.spawn(name, plain(role), owner(), ops, tiles, ends)

        rings = {name: Producer(ring, 0, None) for name, ring in self.rings.items()}
        heard = ("s", "dp") if self.pair else ()
        start(
            "load", roles.load, roles, LoadOps(machine, config), self._ends("load", *heard, **rings)
        )
        start("mma", roles.mma, roles, MmaOps(machine, shape), self._mma_ends())
        if self.pair:
            ops = RelayOps(machine, config, self.signals["x"].barriers[0])
            start("relay", roles.relay, roles, ops, self._ends("relay", "ds", "x", "y"))
        meeting = Meeting(machine, 2, "compute", WARPGROUPS, 1)
        names = ("s", "p", "dp", "ds", "dv", "dk") + (("early", "dst") if self.pair else ())
        for i in range(WARPGROUPS):
            others = {} if self.pair else dict.fromkeys(("early", "dst"), Nothing())
            ends = self._ends(
                "compute", *names, **others,
                free=self._end("compute", "dq") if self.pair else Nothing(),
                stat=self.rings["stat"].consumer(),
                k_free=Free(self.rings["k"].empty[0][0]), meeting=meeting,
            )  # fmt: skip
            if config.keeps_v:
                ring = self.rings["v"]
                ends.v, ends.v_free = ring.consumer(), Free(ring.empty[0][0])
                ends.vt = self._end("compute", "vt")
            ops = ComputeOps(machine, shape, meeting)
            start(f"compute{i}", shape.roles.compute, shape.roles, ops, ends)
        ends = self._ends("reduce", "dq", "r", meeting=Meeting(machine, 3, "reduce", 1, 1))
        start("reduce", shape.roles.reduce, shape.roles, ReduceOps(machine, config), ends)

    def _mma_ends(self):
        names = ("s", "p", "dp", "dq", "r", "dv", "dk")
        names += ("early", "dst", "y") if self.pair else ("ds",)
        held = ("k", "v", "kt", "a", "b") if self.pair else ("k", "v", "q", "do")
        rings = {name: self.rings[name].consumer(core=self.core) for name in held}
        if self.shape.config.keeps_v:
            rings["v"] = Told(self._end("mma", "vt"))
        if not self.pair:
            rings["qt"], rings["dot"] = (Cursor(self.rings[n], self.core) for n in ("q", "do"))
        return self._ends("mma", *names, **rings)


@dataclass(frozen=True)
class Costs:
    """Cycles of a tile: of its steps, and besides."""

    tile: float
    step: float


def costs_of(shape: Shape, chip: TensorMemoryChip, short=8, long=16) -> Costs:
    """Costs of a kernel, from runs of one and two tiles of different lengths."""
    one, longer = (time_tiles(shape, chip, Tiles(n, 1)).now for n in (short, long))
    step = (longer - one) / (long - short)
    if not shape.persistent:
        return Costs(one - short * step + chip.cta_start, step)
    return Costs(time_tiles(shape, chip, Tiles(short, 2)).now - one - short * step, step)


def tflops(seqlen: int, causal: bool, shape: Shape, costs: Costs, chip: TensorMemoryChip) -> float:
    """Speed at 32k tokens and 16 heads of a sequence, as benchmarks count; tiles go head by head to the CTA that is free.

    What a persistent kernel does with its tiles is in ``sm100_bwd_turns``.
    """
    config, heads = shape.config, 32_768 // seqlen * 16
    blocks = config.blocks()
    counts = [blocks.count(n, seqlen, seqlen) for n in range(ceil_div(seqlen, config.tile_n))]
    loads = [0.0] * (chip.sms // config.team)
    for count in counts * heads:
        start = heapq.heappop(loads)
        heapq.heappush(loads, start + costs.tile + count * costs.step)
    microseconds = max(loads) / chip.mma_mhz + chip.launch_us
    pairs = seqlen**2 / (2 if causal else 1) * heads
    return 2 * pairs * (3 * config.tile_d + 2 * config.tile_dv) / microseconds / 1e6
