"""Schedules for the simulator's tests: roles as plain functions, and the same with one statement dropped or moved."""

import ast
import copy
import inspect
import textwrap

import pytest

from flash4.sim.explore import Explorer, Found, explore
from flash4.sim.independence import Independence
from flash4.sim.machine import Hazard

RIGHT_SEEDS = range(50)
WRONG_SEEDS = range(6)


def tree_of(role):
    """Syntax tree of a role, edited or not, with the lines of its file."""
    if hasattr(role, "tree"):
        return copy.deepcopy(role.tree)
    lines, first = inspect.getsourcelines(role)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    return tree


def statements_of(tree):
    """(list, index) of every statement of a role but itself, as they stand in the source."""
    found = []
    for node in ast.walk(tree.body[0]):
        for field in ("body", "orelse"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                found += [(block, i) for i in range(len(block))]
    return sorted(found, key=lambda place: place[0][place[1]].lineno)


def edited(role, edit):
    """The role after ``edit(block, index)`` of the first statement for which that returns true.

    Lines stay what they are in the file, for stories.
    """
    tree = tree_of(role)
    done = any(edit(block, i) for block, i in statements_of(tree))
    assert done, f"nothing to edit in {role.__name__}"
    namespace = dict(role.__globals__)
    exec(compile(tree, role.__code__.co_filename, "exec"), namespace)
    namespace[role.__name__].tree = tree
    return namespace[role.__name__]


def matches(statement, text, counter) -> bool:
    """Whether this is the statement, or the one of that number among several, that begins with ``text``."""
    if not ast.unparse(statement).startswith(text):
        return False
    counter.append(statement)
    return True


def without(role, text: str, nth: int = 0):
    """The role without its ``nth`` statement that begins with ``text``."""
    met = []

    def edit(block, i):
        if matches(block[i], text, met) and len(met) == nth + 1:
            block[i] = ast.copy_location(ast.Pass(), block[i])
            return True
        return False

    return edited(role, edit)


def swapped(role, text: str, nth: int = 0):
    """The role with its ``nth`` statement that begins with ``text`` and the following one exchanged."""
    met = []

    def edit(block, i):
        if matches(block[i], text, met) and len(met) == nth + 1:
            block[i : i + 2] = block[i + 1], block[i]
            return True
        return False

    return edited(role, edit)


def replaced(role, text: str, new: str, nth: int = 0):
    """The role with its ``nth`` statement that begins with ``text`` replaced by other source."""
    met = []

    def edit(block, i):
        if matches(block[i], text, met) and len(met) == nth + 1:
            (statement,) = ast.parse(new).body
            block[i] = ast.fix_missing_locations(ast.copy_location(statement, block[i]))
            for node in ast.walk(block[i]):
                if hasattr(node, "lineno"):
                    node.lineno = node.end_lineno = met[-1].lineno
            return True
        return False

    return edited(role, edit)


def calls(role, verbs) -> list[tuple[str, int]]:
    """(source, which of those equal to it) of every statement that calls one of the verbs as a method."""
    found, seen = [], {}
    for block, i in statements_of(tree_of(role)):
        if not isinstance(block[i], ast.Expr | ast.Assign):
            continue
        call = block[i].value
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") in verbs:
            text = ast.unparse(block[i])
            seen[text] = seen.get(text, -1) + 1
            found.append((text, seen[text]))
    return found


def story(machine) -> str:
    """The hazard of a run, or of another order of it; empty if there is none."""
    try:
        machine.run()
        explore(machine)
    except Hazard as hazard:
        return str(hazard)
    return ""


def assert_right(build, seeds=RIGHT_SEEDS) -> Found:
    """``build(seed)`` gives machines that run through, under every seed, and one of them in every order."""
    for seed in seeds:
        machine = build(seed)
        machine.run()
    return explore(machine)


def assert_reported(build, *culprits: str, seeds=WRONG_SEEDS):
    """``build(seed)`` gives machines that are reported under every seed, with stories that hold all culprits."""
    for seed in seeds:
        with pytest.raises(Hazard) as hazard:
            build(seed).run()
        told = str(hazard.value)
        assert all(culprit in told for culprit in culprits), told


def walk(machine) -> Found | str:
    """What a search through the orders of a run sees, even of a run that a hazard has stopped."""
    try:
        machine.run()
    except Hazard:
        pass
    # Memory that the host has set up is no part of it.
    machine.trace = [step for step in machine.trace if step.actor != machine.host.name]
    try:
        return explore(machine)
    except Hazard:
        return "hazard"


def assert_reductions_agree(build, monkeypatch):
    """A search that leaves nothing out finds a hazard exactly where the one that does finds one."""
    reduced = walk(build()) == "hazard"
    monkeypatch.setattr(Independence, "pick", lambda self, positions, able: able)
    assert (walk(build()) == "hazard") == reduced

    def at_any_time(self, lanes):
        self._joiners, self._late = {}, set()

    monkeypatch.setattr(Explorer, "_delay_landings", at_any_time)
    assert (walk(build()) == "hazard") == reduced
