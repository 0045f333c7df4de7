"""A small forward in the manner of a Blackwell kernel, for one CTA and for a pair: S, P and O in tensor memory.

P lies over the upper half of S. Softmax works on S while the tensor core is busy with the block before; correction
rescales O. Every edge but the rings is a signal. In a pair the leader's MMAs work on both CTAs, each of which holds its
own queries, half of the keys and half of V's columns.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from flash4.sim.bulk import BulkGroups
from flash4.sim.cluster import Cluster
from flash4.sim.machine import Machine, join
from flash4.sim.signals import Edges, Signal, SignalSpec, TmaRing, TmaRingSpec
from flash4.sim.tmem import TensorCore, Tmem, TmemPort

ROWS, TILE_N, DIM = 128, 32, 32
ELEMENT = 2
VERBS = {
    *("acquire_and_advance", "wait_and_advance", "commit", "release", "tail"),
    *("wait", "post", "sync", "wait_ld", "wait_st", "fence", "commit_group", "wait_group"),
}


def load(x):
    for tile in range(x.tiles):
        q = x.q_producer.acquire_and_advance()
        x.load_q(q, tile)
        q.commit()
        k = x.kv_producer.acquire_and_advance()
        x.load_k(k, 0)
        k.commit()
        for n in range(1, x.blocks):
            k = x.kv_producer.acquire_and_advance()
            x.load_k(k, n)
            k.commit()
            v = x.kv_producer.acquire_and_advance()
            x.load_v(v, n - 1)
            v.commit()
        v = x.kv_producer.acquire_and_advance()
        x.load_v(v, x.blocks - 1)
        v.commit()
    x.q_producer.tail()
    x.kv_producer.tail()


def owner(x):
    held = x.tmem.allocate(64)
    x.tmem.relinquish()
    x.everyone.sync()
    x.everyone.sync()
    x.tmem.free(held)


def mma(x):
    x.everyone.sync()
    for _ in range(x.tiles):
        q = x.q_consumer.wait_and_advance()
        k = x.kv_consumer.wait_and_advance()
        x.qk(q, k)
        x.s_signal.post()
        k.release()
        for n in range(1, x.blocks):
            k = x.kv_consumer.wait_and_advance()
            v = x.kv_consumer.wait_and_advance()
            x.p_signal.wait()
            x.pv(v, n > 1)
            x.o_signal.post()
            x.qk(q, k)
            x.s_signal.post()
            k.release()
            v.release()
        q.release()
        v = x.kv_consumer.wait_and_advance()
        x.p_signal.wait()
        x.pv(v, x.blocks > 1)
        x.o_signal.post()
        v.release()
    x.everyone.sync()


def softmax(x):
    x.everyone.sync()
    for _ in range(x.tiles):
        row_max, row_sum = np.full(ROWS, -np.inf, np.float32), np.zeros(ROWS, np.float32)
        for _ in range(x.blocks):
            x.s_signal.wait()
            scores = x.port.load(x.s)
            x.port.wait_ld()
            row_max, scale = x.update_max(scores, row_max)
            x.scale.write(scale)
            x.m_signal.post()
            row_sum = x.exp(scores, row_max, row_sum * scale)
            x.port.wait_st()
            x.p_signal.post()
        x.f_signal.wait()
        x.total.write(row_sum)
        x.l_signal.post()
    x.everyone.sync()


def correction(x):
    x.everyone.sync()
    for tile in range(x.tiles):
        x.m_signal.wait()
        x.scale.read()
        x.p_signal.post()
        for _ in range(1, x.blocks):
            x.m_signal.wait()
            scale = x.scale.read()
            x.o_signal.wait()
            o = x.port.load(x.o)
            x.port.wait_ld()
            x.port.store(x.o, o.values * scale[:, None])
            x.port.wait_st()
            x.p_signal.post()
        x.l_signal.wait()
        total = x.total.read()
        x.f_signal.post()
        x.o_signal.wait()
        o = x.port.load(x.o)
        x.port.wait_ld()
        x.groups.wait_group(0, read=True)
        x.out.write(o.values / total[:, None])
        x.machine.fence()
        x.store_o(tile)
        x.groups.commit_group()
    x.groups.wait_group(0)
    x.everyone.sync()


ROLES = {role.__name__: role for role in (load, owner, mma, softmax, correction)}


@dataclass(frozen=True)
class Toy:
    """A forward to run.

    Attributes:
        ctas: 1, or 2 for a pair.
        tiles: of queries, one after the other.
        blocks: of keys.
        stages: slots for K and V.
        roles: name -> role, where it is not that of this file.
        fences: whether signals have tcgen05 fences.
        signals: name -> changes to a signal.
        columns: first column of S, P and O.
        bare: without the barriers of prologue and epilogue; tensor memory is there all the time.
    """

    ctas: int = 1
    tiles: int = 2
    blocks: int = 2
    stages: int = 2
    roles: dict = field(default_factory=dict)
    fences: bool = True
    signals: dict = field(default_factory=dict)
    columns: tuple = (0, 16, 32)
    bare: bool = False

    def tensors(self):
        """q (tiles, CTAs, rows, dim), k and v (blocks, keys, dim)."""
        rng = np.random.default_rng(0)

        def draw(*shape):
            return rng.standard_normal(shape).astype(np.float16).astype(np.float32)

        kv = (self.blocks, TILE_N, DIM)
        return draw(self.tiles, self.ctas, ROWS, DIM), draw(*kv), draw(*kv)

    def reference(self):
        """Output in float64."""
        q, k, v = (x.astype(np.float64) for x in self.tensors())
        s = q @ k.reshape(-1, DIM).T
        p = np.exp(s - s.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True) @ v.reshape(-1, DIM)

    def specs(self):
        """Signals: who raises them, and who frees them."""
        raisers = 2 * self.ctas  # of P: softmax and correction of every CTA
        specs = {
            "s": SignalSpec("s", covered_by=("p",)),
            "p": SignalSpec("p", raisers, covered_by=("s", "o"), shared=True),
            "o": SignalSpec("o", covered_by=("p",)),
            "m": SignalSpec("m", covered_by=("p", "s")),
            "l": SignalSpec("l", covered_by=("f",)),
            "f": SignalSpec("f", covered_by=("l",), credit=1),
        }
        return {n: SignalSpec(**(vars(s) | self.signals.get(n, {}))) for n, s in specs.items()}

    def build(self, seed: int, strict: bool = True) -> Machine:
        """The machine, ready to run; ``machine.out`` is what it is to compute."""
        machine = Machine(seed, strict)
        cluster = Cluster(machine, self.ctas)
        ctas = cluster.ctas
        edges, pair = Edges(machine, ctas, self.fences), ctas if self.ctas > 1 else ()
        q, k, v = self.tensors()
        machine.out = np.full(q.shape, np.nan, np.float32)
        signals = {name: Signal(edges, spec) for name, spec in self.specs().items()}
        rings = self._rings(edges, ctas)
        tasks = 4 * self.ctas - (self.ctas - 1)  # all but load; one mma
        everyone = (
            cluster.barrier("everyone", tasks)
            if pair
            else ctas[0].named_barrier(1, "everyone", tasks, 1)
        )
        core = TensorCore(machine, pair)
        tmems = [Tmem(machine, cta) for cta in ctas]
        if self.bare:
            everyone = SimpleNamespace(sync=lambda: None)
            held = [tmem.allocate(64) for tmem in tmems]
            machine.at_exit.insert(0, lambda: free_all(machine, tmems, held))
        for cta, tmem in zip(ctas, tmems):
            for name in ROLES:
                if (name != "mma" or cta.rank == 0) and not (name == "owner" and self.bare):
                    x = SimpleNamespace(machine=machine, tiles=self.tiles, blocks=self.blocks)
                    x.everyone, x.tmem = everyone, tmem
                    self._ends(x, name, cta, signals, rings, core)
                    Verbs(self, x, cta, tmems, core, (q, k, v), machine.out)
                    if name in ("softmax", "correction"):
                        x.port = TmemPort(tmem, name, range(4))
                    cta.spawn(name, self.roles.get(name, ROLES[name]), x)
        return machine

    def _rings(self, edges, ctas):
        q_bytes, kv_bytes = ROWS * DIM * ELEMENT, TILE_N * DIM * ELEMENT // self.ctas
        at = [[0], [q_bytes + i * kv_bytes for i in range(self.stages)]]
        sizes, rings = (q_bytes, kv_bytes), {}
        shapes = (
            (ROWS, DIM),
            (TILE_N, DIM),
        )  # what a slot holds that was not waited for is NaN anyway
        for name, starts, size, shape in zip(("q", "kv"), at, sizes, shapes):
            regions = [
                [c.region(f"{name}[{i}]", lo, lo + size, shape) for i, lo in enumerate(starts)]
                for c in ctas
            ]
            rings[name] = TmaRing(edges, TmaRingSpec(name, len(starts), size), regions)
        return rings

    def _ends(self, x, role, cta, signals, rings, core):
        commits = core if role == "mma" else None
        for name, signal in signals.items():
            setattr(x, f"{name}_signal", signal.end(cta, core=commits))
        for name, ring in rings.items():
            if role == "load":
                setattr(x, f"{name}_producer", ring.producer(cta))
            if role == "mma":
                setattr(x, f"{name}_consumer", ring.consumer(cta, core))


def free_all(machine, tmems, held):
    """What the CTA's end does, when everybody has left."""
    for task in machine.tasks:
        join(machine.host.clock, task.clock)
    for tmem, allocation in zip(tmems, held):
        tmem.free(allocation)


class Verbs:
    """What the roles call, in NumPy; sets itself as attributes of ``x``."""

    def __init__(self, toy, x, cta, tmems, core, tensors, out):
        (self.q, self.k, self.v), self.result = tensors, out
        self.x, self.cta, self.core, self.ctas = x, cta, core, toy.ctas
        s, p, o = toy.columns
        self.s = [t.tile("S", s, TILE_N) for t in tmems]
        self.p = [t.tile("P", p, TILE_N // 2) for t in tmems]
        self.o = [t.tile("O", o, DIM) for t in tmems]
        x.s, x.p, x.o = (tiles[cta.rank] for tiles in (self.s, self.p, self.o))
        base = 1 << 20
        x.scale = cta.region("scale", base, base + 512, (ROWS,))
        x.total = cta.region("total", base + 512, base + 1024, (ROWS,))
        x.out = cta.region("out", base + 1024, base + 2048, (ROWS, DIM))
        x.groups = BulkGroups(x.machine)
        for verb in ("load_q", "load_k", "load_v", "qk", "pv", "update_max", "exp", "store_o"):
            setattr(x, verb, getattr(self, verb))

    def load_q(self, slot, tile):
        slot.fill(self.q[tile, self.cta.rank])

    def load_k(self, slot, n):
        rows = TILE_N // self.ctas
        slot.fill(self.k[n, self.cta.rank * rows : (self.cta.rank + 1) * rows])

    def load_v(self, slot, n):
        columns = DIM // self.ctas
        slot.fill(self.v[n, :, self.cta.rank * columns : (self.cta.rank + 1) * columns])

    def qk(self, q_slot, k_slot):
        n = self.ctas

        def product(*arrays):
            k = np.concatenate(arrays[n:])
            return tuple(q @ k.T for q in arrays[:n])

        operands = (*q_slot.regions, *k_slot.regions)
        self.core.issue(tuple(self.s), product, operands, False, "S = Q K^T")

    def pv(self, v_slot, accumulate):
        n = self.ctas

        def product(*arrays):
            v = np.concatenate(arrays[n:], 1)
            return tuple(p.view(np.float16).astype(np.float32) @ v for p in arrays[:n])

        operands = (*self.p, *v_slot.regions)
        self.core.issue(tuple(self.o), product, operands, accumulate, "O += P V")

    def update_max(self, scores, old):
        new = np.maximum(old, scores.values.max(1))
        return new, np.exp(old - new)

    def exp(self, scores, row_max, row_sum):
        p = np.exp(scores.values - row_max[:, None])
        self.x.port.store(self.x.p, p.astype(np.float16).view(np.float32))
        return row_sum + p.sum(1)

    def store_o(self, tile):
        def put(array):
            self.result[tile, self.cta.rank] = array

        self.x.groups.store(self.x.out, put)
