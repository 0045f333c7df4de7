"""A small Blackwell forward, for one CTA and for a pair: right numbers in every order, and no call that can go."""

import numpy as np
import pytest

from flash4.sim.machine import Hazard
from tests.host.sim_tools import (
    assert_reductions_agree,
    assert_reported,
    calls,
    replaced,
    swapped,
    walk,
    without,
)
from tests.host.toy_sm100 import ROLES, VERBS, Toy

DROPS = [(name, *call) for name, role in ROLES.items() for call in calls(role, VERBS)]
UNWAITED = {"acquire_and_advance": "advance_unwaited", "wait_and_advance": "advance_unwaited"}
HARMLESS = {
    # Q is released by a commit that comes before the last one of KV, and KV's tail waits for that.
    ("load", "x.q_producer.tail()", 0),
    # A tile's first K comes behind its Q, and the commit that frees Q comes behind what used the slot before.
    ("load", "k = x.kv_producer.acquire_and_advance()", 0),
}


def broken(name, text, nth):
    """The role without one call; a slot that nobody waited for is still the next slot."""
    for verb, instead in UNWAITED.items():
        if verb in text:
            return replaced(ROLES[name], text, text.replace(verb, instead), nth)
    return without(ROLES[name], text, nth)


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize(
    ("tiles", "blocks", "stages"), [(2, 2, 2), (1, 1, 2), (3, 3, 3), (1, 5, 4)]
)
def test_right_numbers(ctas, tiles, blocks, stages):
    toy = Toy(ctas, tiles, blocks, stages)
    expected = toy.reference()
    for seed in range(50 if (tiles, blocks) == (2, 2) else 6):
        machine = toy.build(seed)
        machine.run()
        assert np.abs(machine.out - expected).max() < 4e-3


NONE, EVERY = (False,) * 4, (True,) * 4


def verdicts(toy) -> tuple[bool, ...]:
    """Whether a hazard is reported, for some seeds."""
    found = []
    for seed in range(len(EVERY)):
        try:
            toy.build(seed).run()
            found.append(False)
        except Hazard:
            found.append(True)
    return tuple(found)


@pytest.mark.parametrize(
    ("toy", "states"),
    [
        (Toy(1, 1, 1), 2_000),
        (Toy(1, 1, 2, bare=True), 2_000),
        (Toy(1, 2, 2, bare=True), 10_000),
        (Toy(2, 1, 1, bare=True), 50_000),
    ],
    ids=str,
)
def test_every_order(toy, states):
    assert walk(toy.build(0)).states > states


ALIKE = [drop for drop in DROPS if drop[0] != "owner" and "everyone" not in drop[1]]


@pytest.mark.parametrize(("name", "text", "nth"), ALIKE)
def test_reductions_change_no_verdict(name, text, nth, monkeypatch):
    toy = Toy(1, 1, 1, 2, {name: broken(name, text, nth)}, bare=True)
    assert_reductions_agree(lambda: toy.build(0, strict=False), monkeypatch)


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize(("name", "text", "nth"), DROPS)
def test_no_call_can_go(ctas, name, text, nth):
    roles = {name: broken(name, text, nth)}
    found = [verdicts(Toy(ctas, 2, 2, 2, roles)), verdicts(Toy(ctas, 3, 2, 6, roles))]
    assert set(found) <= {NONE, EVERY}, "it depends on the order"
    assert (EVERY in found) == ((name, text, nth) not in HARMLESS)


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize(
    ("name", "text", "nth", "culprits"),
    [
        ("mma", "x.qk", 0, ("race on cta", "S", "the load of cta")),
        ("mma", "x.qk", 1, ("race on cta", "S", "the load of cta")),
        ("mma", "x.pv", 1, ("race on cta", "O += P V of cta0.mma")),
        ("mma", "x.p_signal.wait", 0, ("race on cta", "O += P V of cta0.mma")),
        ("softmax", "x.s_signal.wait", 0, ("race on cta", "the load of cta", "x.port.load(x.s)")),
        ("softmax", "x.port.wait_st", 0, ("race on cta", "P", "TMEM stores of cta")),
        ("softmax", "x.scale.write", 0, ("race on cta", "scale")),
        ("correction", "x.port.wait_st", 0, ("race on cta", "O", "TMEM stores of cta")),
        ("correction", "x.out.write", 0, ("proxy fence missing: the store of cta",)),
        ("correction", "x.store_o", 0, ("race on cta", "out", "the store of cta")),
    ],
)
def test_no_call_can_move(ctas, name, text, nth, culprits):
    """Each of these statements exchanged with the one behind it."""
    roles = {name: swapped(ROLES[name], text, nth)}
    assert_reported(Toy(ctas, 3, 2, 6, roles).build, *culprits)


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize(
    ("name", "text", "blocks"), [("mma", "x.pv", 2), ("correction", "total = x.total.read", 1)]
)
def test_what_may_move_may_not_at_the_edges(ctas, name, text, blocks):
    """O's commit may go first where S's commit behind it is waited for, too; with one block there is none.

    And the last sum may be read behind its answer where the next tile has a second block, which waits for the reader.
    """
    roles = {name: swapped(ROLES[name], text)}
    Toy(ctas, 3, 2, 6, roles).build(0).run()
    if blocks == 1:
        assert_reported(Toy(ctas, 3, 1, 6, roles).build, "race on cta", "total")


@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize(
    ("changes", "culprits"),
    [
        ({"fences": False}, ("tcgen05 fence missing",)),
        ({"columns": (0, 16, 24)}, ("race on cta",)),
        ({"columns": (0, 0, 16)}, ("race on cta",)),
        ({"columns": (0, 16, 48)}, ("not allocated",)),
        ({"signals": {"p": {"covered_by": ("s",)}}}, ("p is said to be freed by s", "correction")),
        ({"signals": {"p": {"covered_by": ("o",)}}}, ("p is said to be freed by o", "softmax")),
        ({"signals": {"m": {"covered_by": ("p",)}}}, ("m is said to be freed by p", "softmax")),
        ({"signals": {"o": {"covered_by": ("s",)}}}, ("o is said to be freed by s", "correction")),
        ({"signals": {"f": {"credit": 0}}}, ("waits for phase 0 of cta0.f",)),
        ({"signals": {"p": {"arrivals": 1}}}, ("cta",)),
        ({"signals": {"p": {"arrivals": 5}}}, ("cta0.mma waits for phase 0 of cta0.p",)),
    ],
)
def test_a_wrong_map_or_signal(ctas, changes, culprits):
    assert_reported(Toy(ctas, **changes).build, *culprits)


def test_a_pair_needs_the_leaders_barrier():
    changes = {"p": {"shared": False}}
    assert_reported(Toy(2, signals=changes).build, "cta0.mma waits for phase 0 of cta0.p")
