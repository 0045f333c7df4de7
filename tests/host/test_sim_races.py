"""Races that attention kernels have had in public, as small schedules: each right as it should be, and as it was.

Every wrong one is reported under every seed, with a story that names the culprit's line.
"""

import numpy as np
import pytest

from flash4.sim.barriers import Barrier, Semaphore
from flash4.sim.bulk import Accumulator, BulkGroups
from flash4.sim.cluster import Cluster
from flash4.sim.explore import explore
from flash4.sim.machine import Hazard, Machine
from flash4.sim.memory import Fragment, Region, Space
from flash4.sim.rings import End, MmaQueue, Ring

SEEDS = range(8)


class Spec:
    """Three slots for one reader."""

    name, stages, stage_bytes, consumer_arrivals = "kv", 3, 4, 1


def one(value=1.0):
    return np.full((1, 1), value, np.float32)


def verdict(machine) -> str:
    """Story of the hazard; empty if there is none, in this order and in all others."""
    try:
        machine.run()
        explore(machine)
    except Hazard as hazard:
        return str(hazard)
    return ""


def softmax_statistics(machine, fence_first):
    """Row statistics go to shared memory by ordinary stores, and from there by a bulk copy of another warp."""
    stat = Region(Space(machine), "statistics", 0, 4, (1, 1))
    full, empty = Barrier(machine, "stat full", 1), Barrier(machine, "stat empty", 1)
    lane = machine.lane("bulk copies", ordered=True)

    def softmax():
        for i in range(3):
            empty.wait(i - 1)
            stat.write(one(i))
            if fence_first:
                machine.fence()
                full.arrive()
            else:
                full.arrive()  # the slot is handed over ...
                machine.fence()  # ... before its contents are visible to the copy

    def copy():
        for i in range(3):
            full.wait(i)
            lane.issue("the copy of statistics", stat.peek, reads=[stat])
            lane.join(i + 1)
            empty.arrive()

    machine.spawn("softmax", softmax)
    machine.spawn("copy", copy)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fence_first", [True, False])
def test_a_slot_released_before_its_store_is_fenced(fence_first, seed):
    machine = Machine(seed)
    softmax_statistics(machine, fence_first)
    told = verdict(machine)
    if fence_first:
        assert not told
    else:
        assert told.startswith("proxy fence missing: the copy of statistics of copy")
        assert "wrote at test_sim_races.py" in told and "stat.write(one(i))" in told


def epilogue(machine, barrier):
    """Four warps stage a tile; the first one stores it. ``barrier`` counts the warps that it waits for."""
    space = Space(machine)
    parts = [Region(space, f"o[{i}]", 4 * i, 4 * i + 4, (1, 1)) for i in range(4)]
    staged = [Barrier(machine, f"staged {i}", barrier) for i in range(4 // barrier)]
    lane = machine.lane("stores", ordered=True)

    def warp(i):
        parts[i].write(one(i))
        machine.fence()
        staged[i // barrier].sync()
        if i == 0:
            lane.issue("the store of O", lambda: None, reads=parts)
            lane.join(1)

    for i in range(4):
        machine.spawn(f"warp {i}", warp, i)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("barrier", [4, 1])
def test_a_warp_waits_where_its_warpgroup_must(barrier, seed):
    machine = Machine(seed)
    epilogue(machine, barrier)
    told = verdict(machine)
    if barrier == 4:
        assert not told
    else:
        assert "race on o[" in told and "the store of O of warp 0" in told
        assert "parts[i].write(one(i))" in told or "lane.issue(" in told


def ordered_dq(machine, target):
    """Both CTAs of a cluster add their half of dQ; the next cluster, in its turn, waits for ``target`` of them."""
    done = Semaphore(machine, "dq semaphore")
    halves = [Accumulator(machine, f"dq half {i}", (1, 1), ordered=True) for i in range(2)]

    def add(cta, groups, part, turn):
        part.write(one())
        machine.fence()
        done.wait(turn)
        groups.reduce_add(part, halves[cta.rank], cta.name)
        groups.commit_group()
        groups.wait_group(0)
        done.add()

    for name, turn in (("first", 0), ("second", target)):
        for cta in Cluster(machine, 2, name=name).ctas:
            part = cta.region("part", 0, 4, (1, 1))
            cta.spawn("reduce", add, cta, BulkGroups(machine), part, turn)
    return halves


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("target", [2, 1])
def test_a_semaphore_counted_for_one_cta_of_two(target, seed):
    machine = Machine(seed)
    halves = ordered_dq(machine, target)
    told = verdict(machine)
    if target == 2:
        assert not told
        for i, half in enumerate(halves):
            assert half.order == [f"first.cta{i}", f"second.cta{i}"] and half.values.item() == 2
    else:
        assert "race on dq half" in told and "of first.cta" in told and "of second.cta" in told
        assert "groups.reduce_add(part" in told and "test_sim_races.py" in told


def two_gemms(machine, pending):
    """K and V share a ring; the slot of K is freed while ``pending`` of the MMAs behind it are in flight."""
    ring, queue = Ring(machine, Spec, 1), MmaQueue(machine, "mma")

    def load(end):
        for i in range(8):
            slot = end.acquire_and_advance()
            slot.fill(one(i), 4)
            slot.commit()

    def mma(end):
        s, o = Fragment(machine, "S", (1, 1)), Fragment(machine, "O", (1, 1), 0.0)
        for _ in range(4):
            k_slot = end.wait_and_advance()
            queue.issue(s, lambda k: k, (k_slot.region,), False, "S = Q K^T")
            v_slot = end.wait_and_advance()
            queue.issue(o, lambda v: v, (v_slot.region,), True, "O += P V")
            queue.wait(pending)
            k_slot.release()
            queue.wait(0)
            v_slot.release()

    machine.spawn("load", load, End(ring))
    machine.spawn("mma", mma, End(ring))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pending", [1, 2])
def test_a_ring_freed_one_mma_too_early(pending, seed):
    machine = Machine(seed)
    two_gemms(machine, pending)
    told = verdict(machine)
    if pending == 1:
        assert not told
    else:
        assert "race on kv[" in told and "the copy into kv[" in told
        assert "S = Q K^T of mma" in told and "queue.issue(s," in told
