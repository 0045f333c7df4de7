"""Ends of rings that look ahead, and that find their slot beside another ring's, on the simulator's machine."""

import pytest

from flash4.sim.explore import explore
from flash4.sim.machine import Hazard, Machine
from flash4.sim.rings import End, Ring
from tests.host.test_sim import Spec, one

SEEDS = range(6)
COUNT = 7  # the slots are used four times


def produce(k_end, v_end):
    """K one block ahead of V."""
    for i in range(COUNT + 1):
        for end, block in ((k_end, i), (v_end, i - 1)):
            if 0 <= block < COUNT:
                slot = end.acquire_and_advance()
                slot.fill(one(block), 4)
                slot.commit()


def consume(k_end, v_end):
    """Each V beside its K, which may have been released."""
    k_slot = k_end.wait_and_advance()
    for i in range(COUNT):
        before = k_slot
        assert before.region.read().item() == i
        before.release()
        if i + 1 < COUNT:
            k_end.look_ahead()
        v_end.look_ahead(before)
        if i + 1 < COUNT:
            k_slot = k_end.wait_and_advance()
        v_slot = v_end.wait_beside(before)
        assert v_slot.region.read().item() == i
        v_slot.release()


def machine_with(consumer, machine=None):
    """A machine with a ring of K and one of V, two slots each."""
    machine = machine or Machine(0)
    rings = [Ring(machine, Spec(name), 1) for name in "kv"]
    for name, role in (("load", produce), ("mma", consumer)):
        machine.spawn(name, role, *(End(ring) for ring in rings))
    return machine


@pytest.mark.parametrize("seed", SEEDS)
def test_looks_change_nothing(seed):
    machine = machine_with(consume, Machine(seed))
    machine.run()
    assert explore(machine).states > 50


def look_too_far(k_end, v_end):
    """Looks at V of a block whose slot held another that nobody has waited for."""
    slots = []
    for _ in range(2):
        slots.append(k_end.wait_and_advance())
        slots[-1].release()
    third = k_end.wait_and_advance()
    v_end.look_ahead(third)


def look_elsewhere(k_end, v_end):
    """Looks whether V of one block is there, and takes that of another for it."""
    first = k_end.wait_and_advance()
    second = k_end.wait_and_advance()
    v_end.look_ahead(second)
    v_end.wait_beside(first)


def wait_for_another(k_end, v_end):
    """Waits for the first V twice, and for each V after that a block late."""
    before = None
    for _ in range(COUNT):
        k_slot = k_end.wait_and_advance()
        k_slot.release()
        v_end.wait_beside(before or k_slot).release()
        before = k_slot


def unwaited(k_end, v_end):
    """Reads the V beside a K without a wait."""
    k_slot = k_end.wait_and_advance()
    v_end.advance_unwaited(k_slot).region.read()


MISTAKES = {
    look_too_far: r"mma looks at phase 1 of v full\[0\] at .* without having seen phase 0",
    look_elsewhere: r"v: mma waits for slot 0, use 0, but looked whether slot 1 is full for use 0",
    wait_for_another: r"phase 1 of v empty\[0\] (may end|ended) before load",
    unwaited: r"race on v\[0\]",
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("consumer", MISTAKES, ids=lambda role: role.__name__)
def test_mistakes_are_reported_in_every_order(consumer, seed):
    with pytest.raises(Hazard, match=MISTAKES[consumer]):
        machine_with(consumer, Machine(seed)).run()
