"""Several CTAs in one machine: starts and ends, remote arrivals, copies between CTAs, bulk copies.

Each rule is kept by a small schedule, under many seeds and in every order, and broken by the same schedule with one
statement dropped or changed; the story names the culprit.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from flash4.sim.barriers import Semaphore
from flash4.sim.bulk import Accumulator, BulkGroups, load_multicast
from flash4.sim.cluster import Cluster, arrive_at, copy_to_peer
from flash4.sim.explore import explore
from flash4.sim.machine import Hazard, Machine
from flash4.sim.memory import Region, Space
from flash4.sim.tmem import TensorCore, Tmem
from tests.host.sim_tools import assert_reported, assert_right, replaced, swapped, without


def one(value=1.0):
    return np.full((1, 1), value, np.float32)


def pair(machine, role, synced=True, tasks=2):
    """Both CTAs of a cluster run ``role``, each with its own view ``x`` and that of its peer."""
    cluster = Cluster(machine, 2, synced)
    views = [SimpleNamespace(machine=machine, cta=cta) for cta in cluster.ctas]
    for x, peer in zip(views, reversed(views)):
        x.sync, x.peer, x.rank = cluster.barrier, peer, x.cta.rank
        x.full, x.empty = x.cta.barrier("full", 1), x.cta.barrier("empty", 2)
        x.source, x.target = (
            x.cta.region("source", 0, 4, (1, 1)),
            x.cta.region("target", 4, 8, (1, 1)),
        )
        x.groups = BulkGroups(machine)
    everyone = cluster.barrier("cluster", tasks)
    for x in views:
        x.cluster, x.leader = everyone, views[0]
        x.cta.spawn("role", role, x)
    return views


def machine_of(role, synced=True):
    def build(seed):
        machine = Machine(seed)
        pair(machine, role, synced)
        return machine

    return build


def exchange(x):
    """Sends a value to the peer, and waits for the peer's."""
    x.cluster.sync()
    x.source.write(one(x.rank))
    x.machine.fence()
    x.full.arrive(1, 4)
    copy_to_peer(x.source, x.peer.target, x.peer.full, 4)
    x.full.wait(0)
    x.got = x.target.read().item()
    x.cluster.arrive()
    x.cluster.wait()


def test_an_exchange_through_distributed_shared_memory():
    assert assert_right(machine_of(exchange, synced=False)).states > 30
    machine = Machine(0)
    views = pair(machine, exchange, synced=False)
    machine.run()
    assert [x.got for x in views] == [1, 0]


@pytest.mark.parametrize(
    ("role", "culprits"),
    [
        (
            without(exchange, "x.cluster.sync"),
            ("nothing makes it come after the start of cta", "a cluster barrier", "copy_to_peer("),
        ),
        (
            without(exchange, "x.machine.fence"),
            ("proxy fence missing: the copy of cta", "x.source.write(one(x.rank))"),
        ),
        (without(exchange, "x.full.arrive"), ("waits for phase 0 of cta", "4 unannounced ones")),
        (without(exchange, "copy_to_peer"), ("waits for phase 0 of cta", "4 bytes missing")),
        (
            without(exchange, "x.full.wait"),
            ("race on cta", "target", "x.target.read()"),
        ),
        (
            without(exchange, "x.cluster.wait"),
            ("may end before the copy of cta", "which uses cta", "copy_to_peer("),
        ),
        (
            replaced(exchange, "copy_to_peer", "copy_to_peer(x.source, x.peer.target, x.full, 4)"),
            ("its bytes are to count at cta", "must be in the same CTA"),
        ),
        (
            replaced(exchange, "copy_to_peer", "copy_to_peer(x.peer.source, x.target, x.full, 4)"),
            ("a copy to a peer begins in own memory",),
        ),
        (
            replaced(exchange, "x.full.wait", "x.peer.full.wait(0)"),
            ("a task can wait only at barriers of its own CTA", "x.full.wait(0)"),
        ),
        (
            replaced(exchange, "x.full.arrive", "x.peer.full.arrive(1, 4)"),
            ("as if it were its own", "takes remote arrivals"),
        ),
    ],
)
def test_an_exchange_with_one_mistake(role, culprits):
    assert_reported(machine_of(role, synced=False), *culprits)


def early(x):
    x.source.write(one())
    x.cluster.arrive()
    x.cluster.arrive()


def unarrived(x):
    x.cluster.wait()


def half(x):
    if x.rank == 0:
        x.cluster.arrive()
        x.cluster.wait()


def unwaited(x):
    x.cluster.arrive()


@pytest.mark.parametrize(
    ("role", "culprits"),
    [
        (
            early,
            ("arrives at cluster at", "has not waited since it arrived at", "x.cluster.arrive()"),
        ),
        (unarrived, ("waits at cluster at", "without having arrived")),
        (half, ("cta0.role waits for phase 0 of cluster", "1 of 2 arrivals", "cta1.role has left")),
        (unwaited, ("leaves without having waited at cluster", "x.cluster.arrive()")),
    ],
)
def test_the_cluster_barrier(role, culprits):
    assert_reported(machine_of(role), *culprits)


def visit(x):
    """The leader reads its peer's memory by ordinary loads."""
    if x.rank == 1:
        x.source.write(one(7))
    x.cluster.sync()
    if x.rank == 0:
        x.peer.source.read()
    x.cluster.sync()


def test_ordinary_accesses_to_the_peer():
    assert_right(machine_of(visit))
    assert_reported(
        machine_of(without(visit, "x.cluster.sync")), "race on cta1.source", "cta0.role"
    )
    assert_reported(
        machine_of(without(visit, "x.cluster.sync", 1)),
        "cta1 may end before cta0.role, which uses cta1.source",
        "x.peer.source.read()",
    )


def tell_leader(x):
    """Both CTAs arrive at the leader's barrier, and only the leader waits."""
    arrive_at(x.leader.empty)
    if x.rank == 0:
        x.empty.wait(0)


def test_remote_arrivals():
    assert assert_right(machine_of(tell_leader)).states >= 5
    assert_reported(
        machine_of(without(tell_leader, "x.empty.wait")),
        "nobody has waited for the arrival of cta1.role",
        "arrive_at(x.leader.empty)",
    )


def fetch_and_end(x):
    """CTA 1 tells the leader that it may end, and then arrives there once more."""
    if x.rank == 0:
        x.empty.wait(0)
    else:
        arrive_at(x.leader.empty, 2)
        arrive_at(x.leader.full)
        x.full.arrive()


def test_a_cta_that_ends_before_an_arrival():
    def build(seed):
        machine = Machine(seed, strict=False)
        pair(machine, fetch_and_end)
        machine.run()
        return machine

    for seed in range(6):
        machine = build(seed)
        assert any("nobody has waited for the arrival of cta1" in s for s in machine.hazards)
    late = [build(seed) for seed in range(60)]
    landed = [m for m in late if any("cta0 may end before the arrival" in s for s in m.hazards)]
    assert landed, "in some runs the arrival has landed"
    with pytest.raises(Hazard, match=r"uses cta0, all of whose tasks have ended"):
        explore(landed[0])


def exploring(role, synced=False):
    """Found in the trace of a lenient run, too, by a search that knows no clocks."""
    machine = Machine(0, strict=False)
    pair(machine, role, synced)
    machine.run()
    explore(machine)


def test_the_search_knows_starts_and_ends():
    with pytest.raises(Hazard, match=r"uses cta\d, which has not started"):
        exploring(without(exchange, "x.cluster.sync"))
    late = without(without_wait, "x.cluster.arrive")
    with pytest.raises(Hazard, match=r"uses cta\d, all of whose tasks have ended"):
        exploring(late)


def without_wait(x):
    """As ``exchange``, but nobody waits for the peer at the end."""
    x.cluster.sync()
    x.source.write(one(x.rank))
    x.machine.fence()
    x.full.arrive(1, 4)
    copy_to_peer(x.source, x.peer.target, x.peer.full, 4)
    x.full.wait(0)
    x.cluster.arrive()


def multicast(x):
    """The leader loads into both CTAs' buffers twice; each reader tells the leader that its buffer is free."""
    for i in range(3):
        x.full.arrive(1, 4)
        if x.rank == 0:
            x.empty.wait(i - 1)
            load_multicast([x.target, x.peer.target], one(i), [x.full, x.peer.full], 4)
        x.full.wait(i)
        x.got = x.target.read().item()
        arrive_at(x.leader.empty)
    if x.rank == 0:
        x.empty.wait(2)


def test_a_multicast_load():
    assert assert_right(machine_of(multicast)).states > 50


@pytest.mark.parametrize(
    ("role", "culprits"),
    [
        (without(multicast, "x.empty.wait"), ("cta0.role", "cta1")),
        (without(multicast, "x.full.wait"), ("cta",)),
        (without(multicast, "x.full.arrive"), ("cta",)),
        (swapped(multicast, "x.got"), ("race on cta", "the copy into cta", "of cta0.role")),
        (replaced(multicast, "arrive_at", "arrive_at(x.empty)"), ("waits for phase", "cta0.empty")),
        (
            without(multicast, "x.empty.wait", 1),
            ("nobody has waited for the arrival of cta1.role",),
        ),
    ],
)
def test_a_multicast_load_with_one_mistake(role, culprits):
    assert_reported(machine_of(role), *culprits)


def test_a_slot_freed_by_one_reader_of_two():
    """The leader's barrier counts one arrival, though both CTAs read."""

    def build(seed):
        machine = Machine(seed)
        views = pair(machine, multicast)
        views[0].empty.arrivals = views[0].empty.missing = 1
        return machine

    assert_reported(build, "cta0.")


def stores(x):
    """Stores to the same place twice, and waits only for the reads in between: either may land last."""
    for i in range(2):
        x.source.write(one(i))
        x.machine.fence()
        x.groups.store(x.source, x.put, x.out)
        x.groups.commit_group()
        x.groups.wait_group(0, read=True)
    x.groups.wait_group(0)
    x.done.add()


def sees(x):
    x.done.wait(1)
    x.out.read()


def storing(stores=stores, sees=sees):
    def build(seed):
        machine = Machine(seed)
        out = Region(Space(machine, proxies=False), "out", 0, 4, (1, 1))
        ctas, done = Cluster(machine, 2).ctas, Semaphore(machine, "done")
        source = ctas[0].region("source", 0, 4, (1, 1))
        x = SimpleNamespace(machine=machine, source=source, out=out, put=out.poke, done=done)
        x.groups = BulkGroups(machine)
        ctas[0].spawn("stores", stores, x)
        ctas[1].spawn("sees", sees, x)
        return machine

    return build


def two_buffers(x):
    """Stages one tile while the one before it is still read."""
    for i in range(3):
        x.groups.wait_group(1, read=True)
        x.buffers[i % 2].write(one(i))
        x.machine.fence()
        x.groups.store(x.buffers[i % 2], lambda array: None)
        x.groups.commit_group()
    x.groups.wait_group(0)


def one_store(x):
    """Stores, and tells the peer that it may look."""
    x.source.write(one(5))
    x.machine.fence()
    x.groups.store(x.source, x.put, x.out)
    x.groups.commit_group()
    x.groups.wait_group(0)
    x.done.add()


def test_stores_in_groups():
    assert_right(storing(one_store))
    for role, culprits in (
        (
            replaced(one_store, "x.groups.wait_group", "x.groups.wait_group(0, read=True)"),
            ("race on out: cta1.sees reads it", "the store of cta0.source of cta0.stores"),
        ),
        (without(one_store, "x.groups.wait_group"), ("race on out",)),
        (without(one_store, "x.groups.commit_group"), ("race on out",)),
        (replaced(one_store, "x.groups.wait_group", "x.groups.wait_group(1)"), ("race on out",)),
        (without(one_store, "x.machine.fence"), ("proxy fence missing: the store of cta0.source",)),
    ):
        with pytest.raises(Hazard) as hazard:
            for seed in range(50):  # until the reader comes second, or the store
                storing(role)(seed).run()
        assert all(culprit in str(hazard.value) for culprit in culprits), hazard.value
        for seed in range(6):
            with pytest.raises(Hazard):
                storing(role)(seed).run()
    assert_reported(storing(stores), "race on out: the store of cta0.source", "x.groups.store(")
    assert_reported(storing(one_store, without(sees, "x.done.wait")), "race on out")


def buffered(role):
    def build(seed):
        machine = Machine(seed)
        memory = Space(machine)
        buffers = [Region(memory, f"o[{i}]", 4 * i, 4 * i + 4, (1, 1)) for i in range(2)]
        x = machine.x = SimpleNamespace(machine=machine, buffers=buffers)
        x.groups = BulkGroups(machine)
        machine.spawn("store", role, x)
        return machine

    return build


def test_all_but_the_last_groups():
    assert_right(buffered(two_buffers))
    for role in (
        without(two_buffers, "x.groups.wait_group"),
        without(two_buffers, "x.groups.commit_group"),
        replaced(two_buffers, "x.groups.wait_group", "x.groups.wait_group(2, read=True)"),
    ):
        assert_reported(buffered(role), "race on o[0]: store writes it", "x.groups.store(")
    last = without(two_buffers, "x.groups.wait_group", 1)
    assert_reported(buffered(last), "nobody has waited for the store of o[")
    last = replaced(two_buffers, "x.groups.wait_group", "x.groups.wait_group(0, read=True)", 1)
    assert_reported(buffered(last), "nobody has waited for the store of o[")


def foreign_wait(x):
    x.groups.wait_group(0)


def test_groups_belong_to_a_task():
    """Another task's wait covers nothing."""

    def build(seed):
        machine = buffered(without(two_buffers, "x.groups.wait_group", 1))(seed)
        machine.spawn("other", foreign_wait, machine.x)
        return machine

    assert_reported(build, "nobody has waited for the store of o[")


def reduce(x):
    """Adds to one place, in turn if there is one."""
    x.source.write(one(x.rank + 1))
    x.machine.fence()
    x.turn.wait(x.rank)
    x.groups.reduce_add(x.source, x.dq, x.cta.name)
    x.groups.commit_group()
    x.groups.wait_group(0)
    x.turn.add()


def reducing(role, ordered):
    def build(seed):
        machine = Machine(seed)
        machine.dq = Accumulator(machine, "dq", (1, 1), ordered)
        turn = Semaphore(machine, "turn")
        for x in pair(machine, role):
            x.dq, x.turn = machine.dq, turn
        return machine

    return build


def orders(role, ordered):
    found = set()
    for seed in range(50):
        machine = reducing(role, ordered)(seed)
        machine.run()
        assert machine.dq.values.item() == 3
        found.add(tuple(machine.dq.order))
    return found


def test_additions_to_global_memory():
    free = without(without(reduce, "x.turn.wait"), "x.turn.add")
    assert orders(free, False) == {("cta0", "cta1"), ("cta1", "cta0")}
    assert orders(reduce, True) == {("cta0", "cta1")}
    assert_right(reducing(free, False), seeds=range(1))
    assert_right(reducing(reduce, True), seeds=range(1))
    culprits = ("race on dq: the addition of cta", "x.groups.reduce_add(")
    assert_reported(reducing(free, True), *culprits)
    assert_reported(reducing(without(reduce, "x.turn.wait"), True), *culprits)
    read = replaced(reduce, "x.groups.wait_group", "x.groups.wait_group(0, read=True)")
    assert_reported(reducing(read, True), *culprits)
    early = swapped(reduce, "x.groups.wait_group")
    assert_reported(reducing(early, True), *culprits)


def looks(x):
    x.dq.region.read()


def test_a_sum_that_is_read_too_early():
    def build(seed):
        machine = reducing(reduce, True)(seed)
        machine.ctas[0].spawn("reader", looks, SimpleNamespace(dq=machine.dq))
        return machine

    assert_reported(build, "race on dq", "cta0.reader", "x.dq.region.read()")


def named(x):
    x.bar.sync()


def test_named_barriers_are_a_ctas_own():
    machine = Machine(0)
    ctas = Cluster(machine, 2).ctas
    bars = [cta.named_barrier(3, "turn", 64, 32) for cta in ctas]
    for cta, bar in zip(ctas, bars):
        for i in range(2):
            cta.spawn(f"warp {i}", named, SimpleNamespace(bar=bar))
    machine.run()
    explore(machine)
    with pytest.raises(Hazard, match=r"cta1\.store: named barrier 3 is already that of cta1\.turn"):
        ctas[1].named_barrier(3, "store", 64, 32)
    with pytest.raises(Hazard, match="there are 1 to 15"):
        ctas[1].named_barrier(16, "more", 64, 32)


def test_a_named_barrier_for_both_ctas_by_mistake():
    def build(seed):
        machine = Machine(seed)
        ctas = Cluster(machine, 2).ctas
        bar = ctas[0].named_barrier(3, "turn", 64, 32)
        for cta in ctas:
            cta.spawn("warp", named, SimpleNamespace(bar=bar))
        return machine

    assert_reported(build, "cta1.warp", "cta0.turn (barrier 3)", "x.bar.sync()")


def follower_issues(x):
    x.core.issue((), lambda: (), (), False, "S = Q K")


def reaches_over(x):
    x.alone.issue((), lambda *_: (), (x.peer.source,), False, "S = Q K")


def test_who_issues_and_what_an_mma_reaches():
    for role, culprits in (
        (follower_issues, ("S = Q K of cta1.role", "only cta0, the leader, issues MMAs")),
        (reaches_over, ("uses cta", "source, which is not in a CTA that it works on")),
    ):

        def build(seed, role=role):
            machine = Machine(seed)
            views = pair(machine, role)
            for x in views:
                x.core = TensorCore(machine, [v.cta for v in views])
                x.alone = TensorCore(machine)
            return machine

        assert_reported(build, *culprits)


def allocates_over(x):
    if x.rank == 0:
        x.peer.tmem.allocate(32)


def test_tensor_memory_is_a_ctas_own():
    def build(seed):
        machine = Machine(seed)
        for x in pair(machine, allocates_over):
            x.tmem = Tmem(machine, x.cta)
        return machine

    assert_reported(build, "cta0.role allocates columns of TMEM of cta1", "another CTA's")
