"""``tests/faults.md``: every test that it names exists, and every class is tested through a public function."""

import ast
import re
from functools import cache

import pytest

from tests.source_tree import ROOT

TABLE = ROOT / "tests" / "faults.md"
CLASSES = {*range(1, 23)} - {15}  # splits of the keys are not built
NAME = re.compile(r"`((?:gpu|host)/\w+\.py)::(\w+)(?:\[(.+?)\])?`")
# What a test that goes through a public function has in it, or in a helper that it calls.
PUBLIC = re.compile(
    r"flash_attn_func|flash_attn_varlen_func|\bproblem\.function|\bchanged\.function"
)


def rows(text: str) -> dict[int, list[tuple[str, str, str | None]]]:
    """Class -> (file, test, parameter or None) of the tests in its row."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if len(cells) == 3 and cells[0].isdigit():
            named = [(file, test, case or None) for file, test, case in NAME.findall(cells[2])]
            assert len(named) == cells[2].count("`") // 2, f"class {cells[0]}: not all are tests"
            found[int(cells[0])] = named
    return found


@cache
def functions(file: str) -> dict[str, str]:
    """Source of every function of a test file, by name."""
    source = (ROOT / "tests" / file).read_text("utf-8")
    tree = ast.parse(source)
    return {
        node.name: ast.get_source_segment(source, node)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }


def missing(named: list[tuple[str, str, str | None]]) -> list[str]:
    """Tests that are named and do not exist, or that no parameter of that name is given to."""
    found = []
    for file, test, case in named:
        path = ROOT / "tests" / file
        if not path.is_file() or test not in functions(file) or not test.startswith("test_"):
            found.append(f"{file}::{test}")
        elif case is not None and f'"{case}"' not in path.read_text("utf-8"):
            found.append(f"{file}::{test}[{case}]")
    return found


def is_public(file: str, test: str) -> bool:
    """Whether a test, or a function of its file that it calls, calls a public function of flash4."""
    own, seen, waiting = functions(file), set(), [test]
    while waiting:
        name = waiting.pop()
        seen.add(name)
        if PUBLIC.search(own[name]):
            return True
        called = set(re.findall(r"\b(\w+)\(", own[name])) & own.keys()
        waiting += called - seen
    return False


TESTS = rows(TABLE.read_text("utf-8"))


def test_every_class_of_the_forward_is_listed():
    assert TESTS.keys() >= CLASSES
    assert sorted(TESTS) == list(TESTS)


@pytest.mark.parametrize("number", TESTS)
def test_the_tests_of_a_class_exist(number):
    assert TESTS[number] and not missing(TESTS[number])


@pytest.mark.parametrize("number", TESTS)
def test_a_class_is_tested_through_a_public_function(number):
    assert any(is_public(file, test) for file, test, _ in TESTS[number])


def test_what_is_named_wrongly_is_found():
    text = "| 7 | x | `host/test_faults.py::test_gone`, `host/test_none.py::test_x`, `host/test_faults.py::rows` |"
    (named,) = rows(text).values()
    assert missing(named) == [f"{file}::{test}" for file, test, _ in named]
    cases = [("gpu/test_smoke.py", "test_against_the_reference", "d128 pa" + "cked nowhere")]
    assert missing(cases) and not missing([(*cases[0][:2], "d128 packed")])
    with pytest.raises(AssertionError, match="class 3"):
        rows("| 3 | x | `host/test_faults.py` |")
    assert is_public("gpu/test_smoke.py", "test_against_the_reference")
    assert not is_public("host/test_faults.py", "missing")
