"""cp.async: copies in groups that a warp waits for itself; who else sees them, and when."""

from types import SimpleNamespace

import numpy as np
import pytest

from flash4.sim.barriers import Barrier, NamedBarrier
from flash4.sim.cp_async import CpAsync
from flash4.sim.machine import Hazard, Machine
from flash4.sim.memory import Fragment, Region, Space
from flash4.sim.rings import MmaQueue
from tests.host.sim_tools import assert_reported, assert_right, replaced, swapped, without

BLOCKS, STAGES, WARPS = 4, 2, 2


def one(value=1.0):
    return np.full((1, 1), value, np.float32)


def attend(x):
    """Two warps fill each slot together, one block ahead, and read all of it."""
    for n in range(BLOCKS):
        if n == 0:
            x.cp.copy(x.mine[0], one(0))
            x.cp.commit_group()
        if n + 1 < BLOCKS:
            x.cp.copy(x.mine[(n + 1) % STAGES], one(n + 1))
        x.cp.commit_group()
        x.cp.wait_group(1)
        x.staged.sync()
        x.got += [part.read().item() for part in x.slots[n % STAGES]]
        x.consumed.sync()


def attention(role):
    def build(seed):
        machine = Machine(seed)
        memory = Space(machine)
        slots = [
            [
                Region(memory, f"k[{s}] part {w}", 8 * s + 4 * w, 8 * s + 4 * w + 4, (1, 1))
                for w in range(WARPS)
            ]
            for s in range(STAGES)
        ]
        bars = [NamedBarrier(machine, i, n, 64, 32) for i, n in ((1, "staged"), (2, "consumed"))]
        machine.views = []
        for w in range(WARPS):
            x = SimpleNamespace(slots=slots, mine=[s[w] for s in slots], got=[])
            x.cp, x.staged, x.consumed = CpAsync(machine, f"warp {w}"), *bars
            machine.views.append(x)
            machine.spawn(f"warp {w}", role, x)
        return machine

    return build


def test_a_double_buffered_loop():
    assert assert_right(attention(attend)).states > 100
    machine = attention(attend)(3)
    machine.run()
    assert all(x.got == [n for n in range(BLOCKS) for _ in range(WARPS)] for x in machine.views)


@pytest.mark.parametrize(
    ("role", "culprits"),
    [
        (without(attend, "x.cp.wait_group"), ("race on k[0] part", "x.cp.copy(")),
        (replaced(attend, "x.cp.wait_group", "x.cp.wait_group(2)"), ("race on k[0] part",)),
        (without(attend, "x.cp.commit_group"), ("race on k[", "x.cp.copy(")),
        (without(attend, "x.staged.sync"), ("race on k[", "x.cp.copy(", "part.read()")),
        (swapped(attend, "x.cp.wait_group"), ("race on k[0] part", "x.cp.copy(")),
        (without(attend, "x.consumed.sync"), ("race on k[", "cp.async into k[", "part.read()")),
    ],
)
def test_a_loop_with_one_mistake(role, culprits):
    assert_reported(attention(role), *culprits)


def copies(x):
    """The copies themselves arrive, when they have landed."""
    for n in range(BLOCKS):
        x.empty.wait(n - 1)
        x.cp.copy(x.k, one(n))
        x.cp.arrive(x.full)
    x.empty.wait(BLOCKS - 1)


def reads(x):
    for n in range(BLOCKS):
        x.full.wait(n)
        x.got.append(x.k.read().item())
        x.empty.arrive()


def handed_over(copies=copies, reads=reads):
    def build(seed):
        machine = Machine(seed)
        x = machine.x = SimpleNamespace(machine=machine, got=[])
        x.k, x.cp = Region(Space(machine), "k", 0, 4, (1, 1)), CpAsync(machine, "load")
        x.full, x.empty = Barrier(machine, "full", 1), Barrier(machine, "empty", 1)
        machine.spawn("load", copies, x)
        machine.spawn("mma", reads, x)
        return machine

    return build


def test_copies_that_arrive_at_a_barrier():
    assert assert_right(handed_over()).states > 20
    machine = handed_over()(3)
    machine.run()
    assert machine.x.got == list(range(BLOCKS))


@pytest.mark.parametrize(
    ("roles", "culprits"),
    [
        (
            {"copies": replaced(copies, "x.cp.arrive", "x.full.arrive()")},
            ("race on k", "x.cp.copy("),
        ),
        ({"copies": swapped(copies, "x.cp.copy")}, ("race on k", "cp.async into k of load")),
        ({"copies": without(copies, "x.cp.arrive")}, ("mma waits for phase 0 of full",)),
        ({"copies": without(copies, "x.empty.wait")}, ("race on k", "x.cp.copy(")),
        ({"reads": without(reads, "x.full.wait")}, ("test_sim_cp_async.py",)),
        ({"reads": swapped(reads, "x.got")}, ("race on k", "x.k.read()")),
        ({"copies": without(copies, "x.empty.wait", 1)}, ()),
    ],
)
def test_copies_that_arrive_with_one_mistake(roles, culprits):
    if culprits:
        assert_reported(handed_over(**roles), *culprits)
    else:  # the reader has waited for every copy, which is as good
        assert_right(handed_over(**roles))


def both_ways(x):
    """Arrives by the copies, and waits for the same copies later."""
    x.cp.copy(x.k, one(0))
    x.cp.arrive(x.full)
    x.cp.commit_group()
    x.empty.wait(0)
    x.cp.wait_group(0)


def reads_once(x):
    x.full.wait(0)
    x.k.read()
    x.empty.arrive()


def test_copies_that_arrive_and_are_waited_for():
    assert_right(handed_over(both_ways, reads_once))


def stages(x):
    """cp.async fills what an MMA reads through the other proxy."""
    x.cp.copy(x.k, one(2))
    x.cp.commit_group()
    x.cp.wait_group(0)
    x.machine.fence()
    x.full.arrive()


def multiplies(x):
    x.full.wait(0)
    x.queue.issue(x.acc, lambda k: k, (x.k,), False, "S = K")
    x.queue.wait(0)


def mixed(stages=stages):
    def build(seed):
        machine = handed_over(stages, multiplies)(seed)
        x = machine.x
        x.queue, x.acc = MmaQueue(machine, "mma"), Fragment(machine, "S", (1, 1))
        return machine

    return build


def test_mmas_need_a_proxy_fence_behind_cp_async():
    assert_right(mixed())
    culprits = "proxy fence missing: S = K of mma", "x.queue.issue(", "x.cp.copy("
    assert_reported(mixed(without(stages, "x.machine.fence")), *culprits)
    assert_reported(mixed(swapped(stages, "x.machine.fence")), *culprits)
    assert_reported(mixed(swapped(stages, "x.cp.wait_group")), *culprits)
    assert_reported(mixed(without(stages, "x.cp.wait_group")), "race on k: S = K of mma")


def foreign(x):
    x.cp.wait_group(0)
    x.k.read()


def test_a_wait_for_the_copies_of_another_warp():
    fills = without(stages, "x.full.arrive")
    assert_reported(handed_over(fills, foreign), "handles copies of", "groups only of its own")


def forgets(x):
    x.cp.copy(x.k, one())


def test_a_copy_that_nobody_waits_for():
    machine = Machine(0)
    x = SimpleNamespace(k=Region(Space(machine), "k", 0, 4, (1, 1)), cp=CpAsync(machine, "load"))
    machine.spawn("load", forgets, x)
    with pytest.raises(Hazard, match="nobody has waited for cp.async into k of load"):
        machine.run()
