"""The Hopper backward for head dims above 128 on a CPU: its own roles and tile schedule; see ``sm90_bwd``."""

from dataclasses import dataclass

import numpy as np

from flash4.common.dsl import plain
from flash4.common.graph import WARP, WARPGROUP
from flash4.sim.barriers import Barrier, NamedBarrier
from flash4.sim.bwd_scores import Scores, Step
from flash4.sim.cluster import Cluster, Cta, arrive_at, copy_to_peer
from flash4.sim.machine import Machine
from flash4.sim.memory import Region
from flash4.sim.rings import End, Ring, SharedRing
from flash4.sim.sm90_bwd import (
    Box,
    Call,
    Inbox,
    LoadOps,
    MmaOps,
    Outbox,
    ReduceOps,
    Variation,
    backward_machines,
    lse_of,
    simulate_backward,
)
from flash4.sim.sm90_fwd import matmul
from flash4.sm90.bwd_config import FLOAT_BYTES, MMA_WARPGROUPS
from flash4.sm90.bwd_joint_roles import JointBackwardRoles
from flash4.sm90.bwd_ops import (
    BARRIER_DQ_EMPTY,
    BARRIER_DQ_FULL,
    BARRIER_EXCHANGE,
    BARRIER_STORE,
    BOX_THREADS,
    EXCHANGE_THREADS,
)
from flash4.sm90.bwd_wide_config import PART_WIDTH, WideBackwardConfig
from flash4.sm90.bwd_wide_ops import BARRIER_DS, BARRIER_OWN_DS, BARRIER_P, MMA_WARPS
from flash4.sm90.bwd_wide_roles import WideBackwardRoles
from flash4.sm90.fwd_config import ELEMENT_BYTES, MMA_ROWS

MMA_ROLES = ("mma_v", "mma_k")


class Exchange:
    """What the MMA warpgroups of a CTA tell each other."""

    def __init__(self, meeting: NamedBarrier, p: NamedBarrier, ds: NamedBarrier):
        self._meeting, self._p, self._ds = meeting, p, ds

    def sync(self):
        """Wait for the other warpgroup."""
        self._meeting.sync()

    def post_p(self):
        """``mma_v``: P is in its box."""
        self._post(self._p)

    def wait_p(self):
        """``mma_k``: wait for P."""
        self._p.sync()

    def post_ds(self):
        """``mma_k``: dS is in shared memory."""
        self._post(self._ds)

    def wait_ds(self):
        """``mma_v``: wait for dS."""
        self._ds.sync()

    def _post(self, barrier: NamedBarrier):
        barrier.arrive()
        barrier.machine.give_way()


@dataclass
class Mailbox:
    """Where a CTA gets the other's dS: its memory, what says that it has come, and that the other has read this one's."""

    region: Region
    full: Barrier
    empty: Barrier


class JointExchange(Exchange):
    """What the CTAs tell each other, besides: dS of a step, and that it has been read."""

    def __init__(self, barriers, ds: Region, own: Mailbox, peers: Mailbox):
        super().__init__(*barriers)
        self._ds_region, self._own, self._peers = ds, own, peers

    def wait_peer(self, count):
        """Wait for the other CTA's dS of step ``count``."""
        self._own.full.wait(count)

    def release_peer(self):
        """This warpgroup has read it: say so to the other CTA."""
        arrive_at(self._peers.empty, WARPGROUP // WARP)

    def acquire_ds(self, count):
        """Wait until the other CTA has read what was sent before step ``count``."""
        self._own.empty.wait(count - 1)

    def send_ds(self):
        """Copy dS to the other CTA, and expect as much from it."""
        nbytes = self._ds_region.hi - self._ds_region.lo
        self._own.full.arrive(1, nbytes)
        copy_to_peer(self._ds_region, self._peers.region, self._peers.full, nbytes)
        self._own.full.machine.give_way()


class JointLoadOps(LoadOps):
    """Verbs of the ``load`` role: K, and half of the head dims of the other CTA's behind it."""

    def load_k(self, tile, slot):
        """Fill the K slot."""
        config, half = self._call.config, self._call.config.tile_d // 2
        rank = self._first_key // MMA_ROWS
        own, shape = self._keys(self._call.k, tile, config.tile_d)
        block = np.zeros((MMA_ROWS, config.tile_d + half), np.float32)
        block[: own.shape[0], : own.shape[1]] = own
        first = tile.n_block * config.tile_n + (1 - rank) * MMA_ROWS
        peers = self._call.k[tile.batch, first : first + MMA_ROWS, tile.head_kv]
        peers = peers[:, rank * half : (rank + 1) * half]
        block[: peers.shape[0], config.tile_d : config.tile_d + peers.shape[1]] = peers
        slot.fill(block, block.size * ELEMENT_BYTES)


class WideReduceOps(ReduceOps):
    """Verbs of the ``reduce`` role, for one MMA warpgroup's parts of dQ."""

    def __init__(self, machine: Machine, call: Call, box: Box, regions, place):
        group, rank = place
        super().__init__(machine, call, box, regions, group)
        self._cta = rank
        parts = len(range(group, call.config.dq_parts, MMA_WARPGROUPS))
        self.parts = 2 if call.config.joint else parts

    def _rank(self, tile, i):
        return self._call.tiles.rank(tile, i) * self._call.config.ctas + self._cta

    def _name(self, tile) -> str:
        return f"{tile.index}, cta{self._cta}"

    def add_dq(self, tile, i, part):
        """Accumulator += box, for a part of the head dims of step ``i``."""
        batch, head, block, group = self._key(tile, i)
        number = part * MMA_WARPGROUPS + group
        if self._call.config.joint:
            number = (self._cta * MMA_WARPGROUPS + group) * 2 + part
        self._add((batch, head, block, number), tile)


class WideMmaOps(MmaOps):
    """Verbs of the roles ``mma_v`` and ``mma_k``; each uses its own."""

    def __init__(self, machine, call: Call, prefix: str, place, regions, box: Box):
        group, rank = place
        super().__init__(machine, call, prefix, group, regions, box)
        self._rows = slice(rank * MMA_ROWS, (rank + 1) * MMA_ROWS)
        self._parts = range(group, call.config.dq_parts, MMA_WARPGROUPS)
        shape = (PART_WIDTH, call.config.tile_m)
        self.rest = tuple(self._fragment("rest of dQ", *shape) for _ in self._parts[1:])

    def begin(self):
        """dK = dV = 0."""
        super().begin(None)

    def _scores(self, name, kept, passing):
        acc, operands = self._fragment(name, self._config.tile_m), (kept.region, passing.region)

        def product(keys, queries):
            return matmul(keys, queries[:, :-1].T)

        self._queue.issue(acc, product, operands, False, name)
        return acc

    def put_p(self, s):
        """P, times the slope of the cap: registers -> its box."""
        self._regions["p",].write(s.values.copy())

    def take_p(self, tile, i, q_slot):
        """Its box -> registers."""
        p = self._fragment("P in float32", self._config.tile_m)
        p.values[:] = self._regions["p",].read()
        step = Step(self._call, self._rows, tile, i, True)
        return Scores(step, p.values, lambda: lse_of(q_slot))

    def dq(self, i, k_slot):
        """Issue the first of this warpgroup's parts of dQ = dS K into a fresh accumulator."""
        acc = self._fragment("dQ", PART_WIDTH, self._config.tile_m)
        self._dq(i, k_slot, self._parts[0], acc)
        return acc

    def dq_rest(self, i, k_slot):
        """Issue the second into ``rest``, if there is one, and an empty group otherwise."""
        for part, acc in zip(self._parts[1:], self.rest, strict=True):
            self._dq(i, k_slot, part, acc)
        if not self.rest:
            nothing = self._fragment("nothing", 1)
            self._queue.issue(nothing, lambda: np.zeros((MMA_ROWS, 1)), (), False, "nothing")

    def _dq(self, i, k_slot, part, acc):
        width = slice(part * PART_WIDTH, (part + 1) * PART_WIDTH)

        def product(ds, keys):
            return matmul(ds.T, keys[:, width])

        ds = self._regions["ds", i % self._config.ds_stages, self._group]
        self._queue.issue(acc, product, (ds, k_slot.region), False, "dQ")

    def store_dk(self, tile):
        """Start the store of dK, scaled."""
        self._store(tile, "dk", self._call.dk)

    def store_dv(self, tile):
        """Start the store of dV."""
        self._store(tile, "dv", self._call.dv)


class JointMmaOps(WideMmaOps):
    """Verbs of the roles ``mma_v`` and ``mma_k`` where CTAs add dQ up together."""

    def __init__(self, machine, call: Call, prefix: str, place, regions, box: Box):
        super().__init__(machine, call, prefix, place, regions, box)
        group, rank = place
        self._own = slice_of_part(rank * MMA_WARPGROUPS + group)
        self._peers = slice_of_part(call.config.dq_parts + group)  # behind this CTA's K
        self._acc = self._fragment("dQ", PART_WIDTH, call.config.tile_m)

    def _scores(self, name, kept, passing):
        """S^T or dP^T; K is in the first columns of its slot."""
        acc, operands = self._fragment(name, self._config.tile_m), (kept.region, passing.region)

        def product(keys, queries):
            width = queries.shape[1] - 1
            return matmul(keys[:, :width], queries[:, :-1].T)

        self._queue.issue(acc, product, operands, False, name)
        return acc

    def dq(self, i, k_slot):
        """Issue dQ = dS K over this CTA's keys."""
        self._multiply(("ds", 0, self._group), k_slot, self._own, False)

    def dq_of_peer(self, k_slot):
        """Issue dQ += dS K over the other's."""
        self._multiply(("peer ds",), k_slot, self._peers, True)

    def _multiply(self, name, k_slot, columns, accumulate):
        def product(ds, keys):
            return matmul(ds.T, keys[:, columns])

        operands = (self._regions[name], k_slot.region)
        self._queue.issue(self._acc, product, operands, accumulate, "dQ")

    def put_first_half(self):
        """The first 32 head dims: registers -> box."""
        self._box.region.write(self._acc.values[:, : PART_WIDTH // 2].copy())

    def put_second_half(self):
        """The others."""
        self._box.region.write(self._acc.values[:, PART_WIDTH // 2 :].copy())


def slice_of_part(number: int) -> slice:
    """Head dims of a part of dQ."""
    return slice(number * PART_WIDTH, (number + 1) * PART_WIDTH)


@dataclass(frozen=True)
class WideVariation(Variation):
    """What a run may change; fields as of ``sm90_fwd.Variation``."""

    roles: type = WideBackwardRoles  # or ``JointBackwardRoles``, for a joint config
    shared: type = SharedRing
    meets: tuple[str, ...] = ("start", "end")

    def fill(self, machine: Machine, call: Call, worker: int, numbers):
        """Set up what works on the tiles of a worker: the CTAs of a cluster, which share rings.

        No config hands tiles out, so they have no numbers.
        """
        assert not call.config.handed_out, call.config
        name = f"cluster{worker}" if call.config.turns else ""
        cluster = Cluster(machine, call.config.ctas, "start" in self.meets, name)
        rings = [_make_rings(cta, call.config, self.shared) for cta in cluster.ctas]
        for connected in zip(*rings, strict=True):
            for ring in connected:
                if ring.spec.ctas > 1:
                    ring.connect(connected)
        regions = [_regions(cta, call.config) for cta in cluster.ctas]
        mail = [_mailbox(cta, mine) for cta, mine in zip(cluster.ctas, regions, strict=True)]
        for cta, mine, parts in zip(cluster.ctas, rings, regions, strict=True):
            mailboxes = (mail[cta.rank], mail[len(mail) - 1 - cta.rank])
            _fill_cta(call, self, cta, (mine, parts, mailboxes))
        if "end" in self.meets:
            tasks = [task for cta in cluster.ctas for task in cta.tasks]
            everyone = cluster.barrier(f"{name}.cluster" if name else "cluster", len(tasks))
            for task in tasks:
                task.leave = everyone.sync


def simulate_wide_backward(
    config: WideBackwardConfig, tensors, options, workers=2, seed=0, variation=None, dlse=None
):
    """Run the kernel's roles on every tile of a problem; as ``simulate_backward``."""
    variation = variation or variation_of(config)
    return simulate_backward(config, tensors, options, workers, seed, variation, dlse)


def wide_machines(config, tensors, options, workers, seed, variation=None, dlse=None):
    """Yield the machine and the call of every cluster; as ``backward_machines``."""
    variation = variation or variation_of(config)
    return backward_machines(config, tensors, options, workers, seed, variation, dlse)


def variation_of(config: WideBackwardConfig) -> WideVariation:
    """The kernel itself."""
    return WideVariation(JointBackwardRoles if config.joint else WideBackwardRoles)


def _make_rings(cta: Cta, config: WideBackwardConfig, shared: type) -> list[Ring]:
    """Rings of one CTA by the config's graph; those that CTAs share are of class ``shared``."""
    bases = config.graph.addresses()
    shapes = {
        "k": (MMA_ROWS, config.tile_d + (config.tile_d // 2 if config.joint else 0)),
        "v": (MMA_ROWS, config.tile_dv),
        "q": (config.tile_m, config.tile_d + 1),
        "do": (config.tile_m, config.tile_dv + 1),
    }
    made = []
    for spec in config.graph.rings:
        kind, readers = shared if spec.ctas > 1 else Ring, MMA_WARPGROUPS * spec.ctas
        at, shape = bases[spec.name], shapes[spec.name]
        made.append(kind(cta.machine, spec, readers, cta.smem, at, shape))
    return made


def _regions(cta: Cta, config: WideBackwardConfig) -> dict[tuple, Region]:
    """Parts of shared memory that are not slots of a ring, by the graph's map."""
    bases, regions = config.graph.addresses(), {}
    ds_bytes = config.tile_m * MMA_ROWS * ELEMENT_BYTES
    p_bytes, box = config.tile_m * MMA_ROWS * FLOAT_BYTES, config.dq_floats * FLOAT_BYTES

    def region(name, at, size, shape):
        return cta.region(name, at, at + size, shape)

    regions["p",] = region("p", bases["p"], p_bytes, (MMA_ROWS, config.tile_m))
    for stage in range(config.ds_stages):
        at, shape = bases["ds"] + stage * ds_bytes, (MMA_ROWS, config.tile_m)
        both = region(f"ds[{stage}]", at, ds_bytes, shape)
        regions |= {("ds", stage, group): both for group in range(MMA_WARPGROUPS)}
    if config.joint:
        at = bases["ds"] + ds_bytes
        regions["peer ds",] = region("peer ds", at, ds_bytes, (MMA_ROWS, config.tile_m))
    for group, (name, width) in enumerate((("dv", config.tile_dv), ("dk", config.tile_d))):
        at = bases["dq"] + group * box
        regions["dq", group] = region(f"dq[{group}]", at, box, config.dq_shape)
        size = MMA_ROWS * width * ELEMENT_BYTES
        regions[name, group] = region(name, bases[name], size, (MMA_ROWS, width))
    return regions


def _mailbox(cta: Cta, regions) -> Mailbox | None:
    """Where the other CTA's dS arrives; None where CTAs send none."""
    if ("peer ds",) not in regions:
        return None
    full, empty = cta.barrier("peer ds full", 1), cta.barrier("peer ds empty", MMA_WARPS)
    return Mailbox(regions["peer ds",], full, empty)


def _fill_cta(call: Call, variation: WideVariation, cta: Cta, memory):
    """Barriers and roles of one CTA, by the config's graph; ``memory`` is its rings, regions and both mailboxes."""
    machine, schedule, tiles, joint = cta.machine, variation.roles(), call.tiles, call.config.joint
    rings, regions, mailboxes = memory

    def ends(role):
        miscounts = variation.miscounts
        return [End(ring, miscounts.get((role, ring.spec.name), 0)) for ring in rings]

    def both(number, name):
        return cta.named_barrier(number, name, EXCHANGE_THREADS, WARPGROUP)

    barriers = (both(BARRIER_EXCHANGE, "exchange"), both(BARRIER_P, "P"), both(BARRIER_DS, "dS"))
    exchange = Exchange(*barriers)
    if joint:
        exchange = JointExchange(barriers, regions["ds", 0, 0], *mailboxes)
    machine.name_barrier(BARRIER_OWN_DS, "own dS", cta)
    load = (JointLoadOps if joint else LoadOps)(call, cta.rank * MMA_ROWS, MMA_ROWS)
    cta.spawn("load", plain(variation.roles.load), schedule, load, tiles, *ends("load"))
    for group, role in enumerate(MMA_ROLES):
        machine.name_barrier(BARRIER_STORE + group, f"store of {role}", cta)
        barriers = (
            cta.named_barrier(number + group, f"dq[{group}] {what}", BOX_THREADS, WARP)
            for number, what in ((BARRIER_DQ_FULL, "full"), (BARRIER_DQ_EMPTY, "empty"))
        )
        box = Box(regions["dq", group], *barriers)
        kind = JointMmaOps if joint else WideMmaOps
        ops = kind(machine, call, f"{cta.name}.", (group, cta.rank), regions, box)
        function = plain(getattr(variation.roles, role))
        cta.spawn(role, function, schedule, ops, tiles, *ends(role), exchange, Outbox(box))
        ops = WideReduceOps(machine, call, box, regions, (group, cta.rank))
        function = plain(variation.roles.reduce)
        cta.spawn(f"reduce[{group}]", function, schedule, ops, tiles, Inbox(box))
