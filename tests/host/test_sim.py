"""The simulator itself: what a machine lets pass, what it reports, and how the story reads."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from flash4.common.graph import Buffer, PipelineGraph, Role
from flash4.common.graph import Ring as RingSpec
from flash4.sim.barriers import Barrier, NamedBarrier, Semaphore
from flash4.sim.explore import TooManyStates, explore
from flash4.sim.limits import check_graph
from flash4.sim.machine import Deadlock, Hazard, Machine
from flash4.sim.memory import Fragment, Region, Space
from flash4.sim.rings import End, MmaQueue, Ring
from flash4.sm90.fwd_config import SMEM_LIMIT, ForwardConfig

SEEDS = range(6)


@dataclass(frozen=True)
class Spec:
    """A ring of two slots for one reader with one arrival."""

    name: str = "k"
    stages: int = 2
    stage_bytes: int = 4
    consumer_arrivals: int = 1


def one(value: float):
    return np.full((1, 1), value, np.float32)


def produce(end, count, nbytes=4):
    for i in range(count):
        slot = end.acquire_and_advance()
        slot.fill(one(i), nbytes)
        slot.commit()


def consume(end, count):
    for i in range(count):
        slot = end.wait_and_advance()
        assert slot.region.read().item() == i
        slot.release()


def machine_with(producer, consumer, count, seed=0, strict=True):
    """A machine whose tasks ``load`` and ``mma`` hold the ends of one ring, and use it ``count`` times."""
    machine = Machine(seed, strict)
    ring = Ring(machine, Spec(), 1)
    machine.spawn("load", producer, End(ring), count)
    machine.spawn("mma", consumer, End(ring), count)
    return machine


def story(machine) -> str:
    """What the machine reports; it must report something."""
    with pytest.raises(Hazard) as hazard:
        machine.run()
    return str(hazard.value)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_ring_delivers_in_order(seed):
    machine = machine_with(produce, consume, 7, seed)
    machine.run()
    assert explore(machine).states > 50


@pytest.mark.parametrize(
    ("made", "used", "nbytes", "message"),
    [
        (5, 1, 4, r"^load waits for phase 0 of k empty\[1\] .*1 of 1 arrivals.*; mma has left$"),
        (1, 2, 4, r"^mma waits for phase 0 of k full\[1\] .*1 of 1 arrivals"),
        (1, 1, 2, r"^mma waits for phase 0 of k full\[0\] .* 2 bytes missing"),
        (1, 1, 6, r"^mma waits for phase 0 of k full\[0\] .* 2 unannounced ones"),
    ],
)
def test_a_deadlock_says_who_waits_for_what_and_where(made, used, nbytes, message):
    machine = Machine(0)
    ring = Ring(machine, Spec(), 1)
    machine.spawn("load", produce, End(ring), made, nbytes)
    machine.spawn("mma", consume, End(ring), used)
    with pytest.raises(Deadlock, match=message) as deadlock:
        machine.run()
    assert "test_sim.py" in str(deadlock.value) and "_and_advance()`" in str(deadlock.value)


def consume_early(end, count):
    for _ in range(count):
        slot = end.wait_and_advance()
        slot.release()
        slot.region.read()


def consume_twice(end, count):
    for _ in range(count):
        slot = end.wait_and_advance()
        slot.release()
        slot.release()


def consume_unseen(end, count):
    for i in range(count):
        slot = end.advance_unwaited() if i == 1 else end.wait_and_advance()
        slot.region.read()
        slot.release()


def consume_and_forget(end, count):
    for i in range(count):
        slot = end.wait_and_advance()
        if i < count - 1:
            slot.release()


def produce_unacquired(end, count):
    for i in range(count):
        slot = end.advance_unwaited()
        slot.fill(one(i), 4)
        slot.commit()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("producer", "consumer", "culprits"),
    [
        (produce, consume_early, ("race on k[", "the copy into k[", "region.read()")),
        (produce, consume_twice, ("mma gives k[0] away twice", "slot.release()")),
        (produce, consume_unseen, ("[1]",)),
        (produce, consume_and_forget, ("k full[1] filled 2 times and released 1 times",)),
        (produce_unacquired, consume, ("race on k[", "copy into k[")),
    ],
)
def test_misused_rings_are_reported_in_every_order(producer, consumer, culprits, seed):
    told = story(machine_with(producer, consumer, 4, seed))
    for culprit in culprits:
        assert culprit in told, told


def test_unwritten_memory_is_nan():
    machine = Machine(0)
    region = Region(Space(machine), "x", 0, 8, (1, 2))
    assert np.isnan(region.read()).all()


def test_writing_spoils_what_overlaps():
    machine = Machine(0)
    space = Space(machine)
    q, o = Region(space, "q", 0, 8, (1, 1)), Region(space, "o", 4, 12, (1, 1))
    q.write(one(1.0))
    assert q.read().item() == 1.0
    o.write(one(2.0))
    assert o.read().item() == 2.0 and np.isnan(q.read()).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("waits", [True, False])
def test_aliases_race(waits, seed):
    """O in Q's memory: whoever writes one must have waited for the readers of the other."""
    machine = Machine(seed)
    space, barrier = Space(machine), Barrier(machine, "read", 1)
    q, o = Region(space, "q", 0, 8, (1, 1)), Region(space, "o", 4, 12, (1, 1))

    def reader():
        q.read()
        barrier.arrive()

    def writer(waits):
        if waits:
            barrier.wait(0)
        o.write(one(2.0))

    machine.spawn("reader", reader)
    machine.spawn("writer", writer, waits)
    if waits:
        machine.run()
    else:
        told = story(machine)
        assert "race on" in told and "reader" in told and "writer" in told


@pytest.mark.parametrize("pending", [0, 1])
def test_registers_of_an_mma_in_flight(pending):
    machine = Machine(0)
    queue, acc = MmaQueue(machine, "mma"), Fragment(machine, "S", (1, 1), 0.0)

    def role():
        for _ in range(2):
            queue.issue(acc, lambda: one(1.0), (), True, "S += 1")
        queue.wait(pending)
        assert acc.values.item() == 2.0

    machine.spawn("mma", role)
    if not pending:
        machine.run()
        return
    assert "race on S: mma writes it" in (told := story(machine)) and "S += 1 of mma" in told


def stage_out(machine, region, fences):
    """Registers -> shared memory -> asynchronous store."""
    lane = machine.lane("stores", ordered=True)

    def role():
        region.write(one(1.0))
        if fences:
            machine.fence()
        lane.issue("the store of O", region.peek, reads=[region])
        lane.join(1)

    return role


@pytest.mark.parametrize("seed", SEEDS)
def test_a_missing_proxy_fence_is_reported(seed):
    for fences in (True, False):
        machine = Machine(seed)
        machine.spawn("mma", stage_out(machine, Region(Space(machine), "o", 0, 4, (1, 1)), fences))
        if fences:
            machine.run()
    told = story(machine)
    assert told.startswith("proxy fence missing: the store of O of mma") and "region.write" in told


def test_operations_that_nobody_waits_for():
    machine = Machine(0)
    lane = machine.lane("stores", ordered=True)
    machine.spawn("mma", lambda: lane.issue("the store of O", lambda: None))
    assert "nobody has waited for the store of O of mma" in story(machine)


def test_arrive_counts():
    barrier = Barrier(Machine(0), "b", 1)
    with pytest.raises(Hazard, match="b: more than 1 arrivals in phase 0"):
        barrier.arrive(2)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_phase_that_ends_unseen(seed):
    """Two arrivals, and a waiter that the second one does not wait for."""
    machine = Machine(seed)
    barrier, start = Barrier(machine, "b", 1), Barrier(machine, "start", 1)

    def raiser():
        barrier.arrive()
        machine.give_way()
        barrier.arrive()
        start.arrive()

    def waiter():
        barrier.wait(0)

    machine.spawn("raiser", raiser)
    machine.spawn("waiter", waiter)
    assert "phase" in (told := story(machine)) and "waiter" in told and "parity" in told


@pytest.mark.parametrize("number", [0, 16, -1])
def test_barrier_ids(number):
    with pytest.raises(Hazard, match="there are 1 to 15"):
        NamedBarrier(Machine(0), number, "turn", 256, 128)


def test_shared_barrier_ids():
    machine = Machine(0)
    machine.name_barrier(3, "turn")
    machine.name_barrier(3, "turn")
    with pytest.raises(Hazard, match="store: named barrier 3 is already that of turn"):
        machine.name_barrier(3, "store")


def graph(registers=240, slot=1024, buffer=2048, load=24) -> PipelineGraph:
    load, mma = Role("load", range(0, 1), 1, load), Role("mma", range(1, 3), 8, registers)
    ring = RingSpec("k", load, mma, 2, slot)
    return PipelineGraph((load, mma), (ring,), (Buffer("k", buffer),))


def test_graphs_within_limits():
    check_graph(graph(), SMEM_LIMIT)
    check_graph(ForwardConfig(True, 128, 128, 128, 128, True).graph, SMEM_LIMIT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"registers": 248}, r"128 x 24 \(load\) \+ 2 x 128 x 248 .* = 66560 registers"),
        ({"registers": 240, "load": 32}, "= 65536 registers; 384 threads have 64512 at launch"),
        ({"registers": 236}, "mma: 236 registers; setmaxnreg takes multiples of 8"),
        ({"registers": 264}, "from 24 to 256"),
        ({"slot": 116_224, "buffer": 232_448}, "232480 bytes of shared memory"),
        ({"slot": 2048}, "ring k: 2 x 2048 bytes in 2048"),
    ],
)
def test_graphs_over_limits(changes, message):
    with pytest.raises(Hazard, match=message):
        check_graph(graph(**changes), SMEM_LIMIT)


def test_exploration_finds_what_a_patient_run_hides():
    """Recorded leniently, the early release runs through; in some order the copy meets the reader."""
    machine = machine_with(produce, consume_late_mma, 4, strict=False)
    machine.run()
    assert machine.hazards
    with pytest.raises(Hazard, match=r"race on k\[\d\]: .*; the last steps before: "):
        explore(machine)


def consume_late_mma(end, count):
    """Releases each slot while the MMA that reads it may be in flight."""
    machine = end._ring.machine
    queue = MmaQueue(machine, "mma")
    for _ in range(count):
        slot = end.wait_and_advance()
        acc = Fragment(machine, "S", (1, 1))
        queue.issue(acc, lambda k: k, (slot.region,), False, "S = K")
        slot.release()
        queue.wait(0)


def test_exploration_finds_deadlocks():
    """Two locks taken in opposite orders: most runs get through."""
    machine = Machine(1)
    turns = [Semaphore(machine, f"lock {i}") for i in range(2)]

    def role(first, second):
        turns[first].add()
        turns[second].wait(1)

    machine.spawn("a", role, 0, 1)
    machine.spawn("b", role, 1, 0)
    machine.run()
    explore(machine)
    machine.trace = [s for s in machine.trace if not (s.actor == "b" and s.kind == "arrive")]
    with pytest.raises(Deadlock, match="a waits for phase 1 of lock 1 .*; the last steps before"):
        explore(machine)


def test_exploration_gives_up_in_time():
    machine = machine_with(produce, consume, 9)
    machine.run()
    with pytest.raises(TooManyStates, match="more than 20 states"):
        explore(machine, max_states=20)


def test_stages_that_ends_count_differently():
    machine = Machine(0)
    ring = Ring(machine, replace(Spec(), stages=3), 1)
    machine.spawn("load", produce, End(ring), 6)
    machine.spawn("mma", consume, End(ring, miscount=-1), 6)
    with pytest.raises((Hazard, AssertionError)):
        machine.run()


def test_exploration_needs_names():
    machine = Machine(0)
    for _ in range(2):
        Barrier(machine, "b", 1)
    with pytest.raises(ValueError, match="the same name"):
        explore(machine)


def test_the_host_cannot_wait():
    with pytest.raises(Deadlock, match=r"the host waits for phase 0 of b"):
        Barrier(Machine(0), "b", 1).wait(0)


def consume_slowly(end, count):
    slot = end.wait_and_advance()
    for _ in range(count):
        end._ring.machine.give_way()
    slot.release()


def test_a_role_without_end_is_reported(monkeypatch):
    monkeypatch.setattr("flash4.sim.machine.SWITCHES", 100)
    assert "no end after 100 switches" in story(machine_with(produce, consume_slowly, 200))
