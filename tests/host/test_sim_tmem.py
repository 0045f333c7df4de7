"""Tensor memory: allocation, MMAs and commits, loads and stores, fences, aliases; each rule kept, and broken once."""

from types import SimpleNamespace

import numpy as np
import pytest

from flash4.sim.barriers import Barrier
from flash4.sim.limits import WarpRole, check_registers, check_tmem
from flash4.sim.machine import Hazard, Machine
from flash4.sim.memory import Region, Space
from flash4.sim.tmem import TensorCore, Tmem, TmemPort, fence_after, fence_before
from tests.host.sim_tools import assert_reported, assert_right, replaced, swapped, without

WARPGROUP = range(4)


def full(value, columns=32):
    return np.full((128, columns), value, np.float32)


def mma(x):
    """Allocates, computes S, lets softmax turn it into P over its upper half, computes O from P, frees."""
    x.held = x.tmem.allocate(64)
    x.ready.arrive()
    x.s_free.wait(0)
    x.core.issue(x.s, lambda q: full(q[0, 0]), (x.q,), False, "S = Q K")
    x.core.commit(x.s_full)
    x.p_full.wait(0)
    fence_after(x.machine)
    x.core.issue(x.o, lambda p: np.tile(p, 2), (x.p,), False, "O = P V")
    x.core.issue(x.s, lambda q: full(0), (x.q,), False, "S = 0")
    x.core.commit(x.o_full)
    x.done.wait(0)
    x.tmem.free(x.held)


def softmax(x):
    x.q.write(np.full((1, 1), 3, np.float32))
    x.machine.fence()
    x.s_free.arrive()
    x.ready.wait(0)
    x.s_full.wait(0)
    fence_after(x.machine)
    scores = x.port.load(x.s)
    x.port.wait_ld()
    probs = scores.values[:, 16:] * 2
    x.port.store(x.p, probs)
    x.port.wait_st()
    fence_before(x.machine)
    x.p_full.arrive()


def correction(x):
    x.ready.wait(0)
    x.o_full.wait(0)
    fence_after(x.machine)
    out = x.other.load(x.o)
    x.other.wait_ld()
    x.got = out.values
    x.done.arrive()


def small(mma=mma, softmax=softmax, correction=correction, softmax_warps=WARPGROUP, residents=1):
    """Builder of a machine with these three roles."""

    def build(seed):
        machine = Machine(seed)
        names = ("ready", "s_free", "s_full", "p_full", "o_full", "done")
        x = machine.x = SimpleNamespace(
            machine=machine, **{n: Barrier(machine, n, 1) for n in names}
        )
        x.tmem = Tmem(machine, residents=residents)
        x.s, x.p = x.tmem.tile("S", 0, 32), x.tmem.tile("P", 16, 16)
        x.o = x.tmem.tile("O", 32, 32)
        x.q = Region(Space(machine), "q", 0, 4, (1, 1))
        x.core = TensorCore(machine)
        x.port = TmemPort(x.tmem, "softmax", softmax_warps)
        x.other = TmemPort(x.tmem, "correction", WARPGROUP)
        for name, role in (("mma", mma), ("softmax", softmax), ("correction", correction)):
            machine.spawn(name, role, x)
        return machine

    return build


def test_the_right_schedule():
    assert assert_right(small()).states > 20
    for seed in range(6):
        machine = small()(seed)
        machine.run()
        assert (machine.x.got == 6).all()


@pytest.mark.parametrize(
    ("roles", "culprits"),
    [
        # a load before the MMA is known to be done
        (
            {"softmax": without(softmax, "x.s_full.wait")},
            ("race on S", "the load of S of softmax", "x.port.load(x.s)", "S = Q K of mma"),
        ),
        (
            {"mma": without(mma, "x.core.commit(x.s_full)")},
            ("softmax waits for phase 0 of s_full",),
        ),
        # the commit before the MMA
        (
            {"mma": swapped(mma, "x.core.issue(x.s")},
            ("race on S", "x.core.issue(x.s, lambda q: full(q[0, 0])"),
        ),
        # no fence after the wait, in who loads and in who issues MMAs
        (
            {"softmax": without(softmax, "fence_after")},
            (
                "tcgen05 fence missing: the load of S of softmax",
                "after thread sync",
                "x.port.load(x.s)",
            ),
        ),
        (
            {"mma": without(mma, "fence_after")},
            ("tcgen05 fence missing: O = P V of mma", "after thread sync", "x.port.store(x.p"),
        ),
        (
            {"softmax": swapped(softmax, "x.s_full.wait")},
            ("tcgen05 fence missing: the load of S of softmax", "after thread sync"),
        ),
        # no fence before the arrival
        (
            {"softmax": without(softmax, "fence_before")},
            ("tcgen05 fence missing: O = P V of mma", "before thread sync", "x.port.store(x.p"),
        ),
        (
            {"softmax": swapped(softmax, "fence_before")},
            ("tcgen05 fence missing: O = P V of mma", "before thread sync"),
        ),
        (
            {"softmax": swapped(softmax, "x.port.wait_st")},
            ("tcgen05 fence missing: O = P V of mma", "before thread sync"),
        ),
        # registers before the load has filled them, and a store behind which nobody waited
        (
            {"softmax": without(softmax, "x.port.wait_ld")},
            ("race on registers for S", "the load of S of softmax", "scores = x.port.load"),
        ),
        (
            {"softmax": without(softmax, "x.port.wait_st")},
            ("race on P", "TMEM stores of softmax, 0 are known to have landed", "x.port.store(x.p"),
        ),
        (
            {"correction": without(correction, "x.o_full.wait")},
            ("race on O", "the load of O of correction", "x.core.issue(x.o"),
        ),
        # P, which lies over S, is read before it is written
        ({"mma": without(mma, "x.p_full.wait")}, ("race on", "of mma", "softmax")),
        # the freeing warp does not wait for the last reader
        (
            {"mma": without(mma, "x.done.wait")},
            ("race on columns 0..63: the end of the allocation by mma", "x.tmem.free(x.held)"),
        ),
        (
            {"mma": without(mma, "x.tmem.free")},
            ("TMEM is not freed: columns 0..63, which mma allocated at", "x.tmem.allocate(64)"),
        ),
        (
            {"softmax": without(softmax, "x.machine.fence")},
            ("proxy fence missing: S = Q K of mma", "x.q.write("),
        ),
    ],
    ids=lambda value: None if isinstance(value, tuple) else "-".join(value),
)
def test_one_call_dropped_or_moved(roles, culprits):
    assert_reported(small(**roles), *culprits)


def early_user(x):
    x.s_free.wait(0)
    x.port.store(x.s, full(1))
    x.port.wait_st()
    x.done.arrive()


def allocator(x):
    x.held = x.tmem.allocate(64)
    x.s_free.arrive()
    x.done.wait(0)
    x.tmem.free(x.held)


def nothing(x):
    pass


def test_whoever_uses_columns_must_know_of_their_allocation():
    roles = {"correction": nothing}
    assert_right(small(allocator, early_user, **roles))
    early = without(early_user, "x.s_free.wait")
    late = replaced(allocator, "x.s_free.arrive", "pass")
    for seed in range(6):
        with pytest.raises(Hazard, match=r"not allocated, or freed already|the allocation by mma"):
            small(late, early, **roles)(seed).run()


def test_columns_that_were_freed():
    late = swapped(allocator, "x.done.wait")
    for seed in range(6):
        with pytest.raises(Hazard, match=r"freed already|the end of the allocation by mma"):
            small(late, early_user, nothing)(seed).run()


@pytest.mark.parametrize(
    ("calls", "residents", "message"),
    [
        ((48,), 1, "allocates 48 columns at .*powers of two from 32 to 512"),
        ((16,), 1, "powers of two from 32"),
        ((1024,), 1, "powers of two from 32 to 512"),
        ((256, 256, 32), 1, r"1 CTAs x \(512 \+ 32\) columns; a multiprocessor has 512"),
        ((256,), 2, None),
        ((512,), 2, r"2 CTAs x \(0 \+ 512\) columns"),
        ((256, 64), 2, r"2 CTAs x \(256 \+ 64\) columns"),
    ],
)
def test_sizes_of_allocations(calls, residents, message):
    machine = Machine(0)
    tmem = Tmem(machine, residents=residents)

    def role():
        for columns in calls:
            tmem.free(tmem.allocate(columns)) if len(calls) == 1 else tmem.allocate(columns)

    machine.spawn("mma", role)
    if message is None:
        machine.run()
    else:
        with pytest.raises(Hazard, match=message):
            machine.run()


def test_columns_are_reused_and_given_up():
    machine = Machine(0)
    tmem = Tmem(machine)

    def role():
        first, second = tmem.allocate(128), tmem.allocate(64)
        assert (first.lo, first.hi, second.lo, second.hi) == (0, 128, 128, 192)
        tmem.free(first)
        third = tmem.allocate(64)
        assert (third.lo, third.hi) == (0, 64)
        tmem.free(third)
        tmem.free(second)
        tmem.relinquish()
        with pytest.raises(Hazard, match="that are not allocated"):
            tmem.free(second)
        with pytest.raises(Hazard, match=r"after mma at .*tmem.relinquish.* gave that up"):
            tmem.allocate(32)

    machine.spawn("mma", role)
    machine.run()


@pytest.mark.parametrize("warps", [range(4), range(4, 8), [3, 2, 1, 0], range(1), range(5, 7)])
def test_warps_reach_their_own_lanes(warps):
    if len(warps) == 4:
        assert_right(small(softmax_warps=warps), seeds=range(3))
    else:
        assert_reported(
            small(softmax_warps=warps), "are out of reach of warps", "x.port.load(x.s)", "softmax"
        )


def two_warps(machine, lanes):
    """Two warps write and read their own lanes of the same columns."""
    tmem = Tmem(machine)
    held = []
    start, end = Barrier(machine, "start", 1), Barrier(machine, "end", 2)

    def owner():
        held.append(tmem.allocate(32))
        start.arrive()
        end.wait(0)
        tmem.free(held[0])

    def warp(w):
        port, tile = (
            TmemPort(tmem, f"warp {w}", (w,)),
            tmem.tile(f"T{w}", 0, 32, range(*lanes[w])),
        )
        start.wait(0)
        port.store(tile, np.full((len(tile.lanes), 32), w, np.float32))
        port.wait_st()
        got = port.load(tile)
        port.wait_ld()
        assert (got.values == w).all()
        end.arrive()

    machine.spawn("owner", owner)
    for w in range(2):
        machine.spawn(f"warp {w}", warp, w)
    return machine


def test_lanes_of_warps_do_not_collide():
    lanes = [(0, 32), (32, 64)]
    assert_right(lambda seed: two_warps(Machine(seed), lanes))
    assert_reported(
        lambda seed: two_warps(Machine(seed), [(0, 32), (16, 64)]), "warp 1", "lanes 0..31"
    )


def scores(x):
    x.held = x.tmem.allocate(64)
    x.core.issue(x.s, lambda: full(1, 64), (), False, "S = K Q")
    x.core.commit(x.s_full)
    x.p_full.wait(0)
    fence_after(x.machine)
    x.core.issue(x.done_p, lambda *parts: parts[0], x.parts, False, "dV = P dO")
    x.core.commit(x.done)
    x.done.wait(0)
    x.tmem.free(x.held)


def half(x):
    """One warpgroup reads its half of S's columns and packs P into half as many."""
    x.s_full.wait(0)
    fence_after(x.machine)
    mine = x.port.load(x.reads)
    x.port.wait_ld()
    x.port.store(x.writes, mine.values[:, ::2])
    x.port.wait_st()
    fence_before(x.machine)
    x.p_full.arrive()


def two_warpgroups(columns):
    """Both halves of S at 0 and 32; ``columns`` are the first ones of the packed halves."""

    def build(seed):
        machine = Machine(seed)
        tmem = Tmem(machine)
        bars = {
            n: Barrier(machine, n, 2 if n == "p_full" else 1) for n in ("s_full", "p_full", "done")
        }
        common = {"machine": machine, "tmem": tmem, "core": TensorCore(machine), **bars}
        x = SimpleNamespace(**common, s=tmem.tile("S", 0, 64), done_p=tmem.tile("dV", 48, 16))
        x.parts = [tmem.tile(f"P{w}", lo, 16) for w, lo in enumerate(columns)]
        machine.spawn("mma", scores, x)
        for w in range(2):
            y = SimpleNamespace(**common, reads=tmem.tile(f"S{w}", 32 * w, 32), writes=x.parts[w])
            y.port = TmemPort(tmem, f"compute {w}", range(4 * w, 4 * w + 4))
            machine.spawn(f"compute {w}", half, y)
        return machine

    return build


def test_a_warpgroup_overwrites_only_what_it_has_read():
    assert_right(two_warpgroups((0, 32)))
    assert_reported(
        two_warpgroups((0, 16)),
        "race on",
        "compute 0",
        "the store of P1 of compute 1",
        "x.port.store(",
    )


def second_issuer(x):
    """Another warp whose MMA reads P behind which nobody of its own has waited."""
    x.ready.wait(0)
    x.p_full.wait(0)
    fence_after(x.machine)
    x.core.issue(x.o, lambda p: np.tile(p, 2), (x.p,), False, "O = P V, again")
    x.core.commit(x.o_full)
    x.o_full.wait(0)
    x.done.arrive()


def first_issuer(x):
    x.held = x.tmem.allocate(64)
    x.ready.arrive()
    x.s_free.wait(0)
    x.core.issue(x.s, lambda q: full(q[0, 0]), (x.q,), False, "S = Q K")
    x.core.commit(x.s_full)
    x.p_full.wait(0)
    fence_after(x.machine)
    x.core.issue(x.s, lambda q: full(0), (x.q,), False, "S = 0")
    x.core.commit(x.s_full)
    x.s_full.wait(1)
    x.done.wait(0)
    x.tmem.free(x.held)


def test_only_mmas_of_one_issuer_are_in_order():
    """S may be written over P behind the MMA that reads P, if the same thread issues both."""
    assert_reported(
        small(first_issuer, softmax, second_issuer),
        "race on",
        "O = P V, again of correction",
        "S = 0 of mma",
    )


def committing(x):
    """Commits what somebody else has issued, which is nothing of its own."""
    x.ready.wait(0)
    x.core.commit(x.s_full)
    x.done.arrive()


def test_a_commit_speaks_for_its_own_thread_only():
    foreign = without(allocating_mma, "x.core.commit")
    assert_right(small(allocating_mma, reader, committing_nothing))
    assert_reported(small(foreign, reader, committing), "race on S: the load of S of softmax")


def allocating_mma(x):
    x.held = x.tmem.allocate(64)
    x.core.issue(x.s, lambda: full(1), (), False, "S = 1")
    x.core.commit(x.s_full)
    x.ready.arrive()
    x.p_full.wait(0)
    x.done.wait(0)
    x.tmem.free(x.held)


def reader(x):
    x.ready.wait(0)
    x.s_full.wait(0)
    fence_after(x.machine)
    x.port.load(x.s)
    x.port.wait_ld()
    x.p_full.arrive()


def committing_nothing(x):
    x.ready.wait(0)
    x.done.arrive()


def test_16_bit_values_survive_in_halves_of_columns():
    tmem = Tmem(Machine(0))
    x = np.random.default_rng(0).standard_normal((128, 32)).astype(np.float16)
    tmem.tile("P", 16, 16).poke(x.view(np.float32))
    assert (tmem.tile("P", 16, 16).peek().view(np.float16) == x).all()
    assert np.isnan(tmem.tile("S", 0, 16).peek()).all()
    upper = tmem.tile("upper half of P", 24, 8, range(32, 64)).peek()
    assert (upper.view(np.float16) == x[32:64, 16:]).all()


def test_overlap_of_tiles():
    tmem, other = Tmem(Machine(0)), Tmem(Machine(0))
    s, p = tmem.tile("S", 0, 32), tmem.tile("P", 16, 32)
    assert s.overlaps(p) and not s.overlaps(tmem.tile("O", 32, 32))
    assert not s.overlaps(other.tile("S", 0, 32))
    assert not tmem.tile("a", 0, 32, range(32)).overlaps(tmem.tile("b", 0, 32, range(32, 64)))


def roles(softmax=184, correction=96, rest=48, store=None):
    return (
        WarpRole("softmax", range(0, 8), softmax),
        WarpRole("correction", range(8, 12), correction),
        WarpRole("mma", range(12, 13), rest),
        WarpRole("load", range(13, 14), rest),
        WarpRole("store", range(14, 15), rest if store is None else store),
    )


def test_registers_of_roles_that_share_a_warpgroup():
    check_registers(roles(), 128)
    for changed, launch, message in (
        (roles(softmax=192), 128, r"128 x 192 \(softmax\) \+ 128 x 192 .* = 67584 registers"),
        (roles(store=56), 128, "warpgroup 3: 48 registers in mma, 56 in store"),
        (roles(rest=44), 128, "mma: 44 registers; setmaxnreg takes multiples of 8"),
        (roles(), 120, "4 x 128 x 120 are there at launch"),
        ((*roles(), WarpRole("again", range(14, 16), 48)), 128, "warp 14 is in store and in again"),
        (roles()[:1], 128, r"2 x 128 x 128 are there"),
    ):
        with pytest.raises(Hazard, match=message):
            check_registers(changed, launch)


def test_maps_of_tensor_memory():
    ranges = {"s0": (0, 128), "s1": (128, 128), "p0": (64, 64), "p1": (192, 64), "o": (256, 256)}
    aliases = [("s0", "p0"), ("p1", "s1")]
    assert check_tmem(ranges, aliases) == 512
    assert check_tmem({"s": (0, 40)}) == 64
    for changes, pairs, residents, message in (
        ({}, aliases[:1], 1, r"s1, columns 128..255, and p1, columns 192..255, overlap"),
        ({}, aliases, 2, "512 columns take an allocation of 512; 2 CTAs share 512"),
        ({"o": (384, 256)}, aliases, 1, "640 columns take an allocation of 1024"),
        ({"o": (255, 256)}, aliases, 1, "s1, columns 128..255, and o, columns 255..510"),
    ):
        with pytest.raises(Hazard, match=message):
            check_tmem(ranges | changes, pairs, residents)
