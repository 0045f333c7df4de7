"""The selftest: stages, time limits, what survives a child that dies, the report; with mocked children, and real ones."""

import json
import re
import sys
from pathlib import Path

import pytest

from bench import report
from flash4 import cli, dispatch, selftest
from flash4.selftest import Done, Request, Told, run_child, suite

FACTS = {
    "available": True, "started": "2026-01-02T030405Z", "flash4": "0.1.0", "commit": "abc",
    "versions": {"torch": "2.13.0", "triton": None}, "capability": [9, 0],
    "gpu": {"name": "NVIDIA H200", "sms": 132},
}  # fmt: skip
TESTS = [f"tests/gpu/test_x.py::test_{name}" for name in "abcde"]


def entries(tests=TESTS, *, stop=None, finished=True, **outcomes):
    """Lines of a journal: all tests pass but those given; `stop` is begun and has no outcome."""
    lines = [{"collected": list(tests)}]
    for test in tests:
        lines.append({"began": test})
        if test == stop:
            return lines
        outcome, message = outcomes.get(test[-1], ("passed", ""))
        lines.append({"test": test, "outcome": outcome, "message": message})
    return [*lines, {"finished": True}] if finished else lines


class Children:
    """Stands for `run_child`: answers by kind, and keeps what it was asked."""

    def __init__(self, journals=(), **answers):
        self.journals = list(journals) or [(0, entries())]
        self.answers = {
            "facts": (0, "\n" + json.dumps(FACTS)),
            "fuzz": (0, "100 problems, 0 failures, 30 configs, compile 9 s, run 2 s"),
            "bench": (0, ""),
        } | answers
        self.asked, self.tests = [], []

    def __call__(self, arguments, limit_s):
        self.asked.append(arguments)
        kind, words = arguments[0], arguments[arguments.index("--") + 1 :]
        if kind == "suite":
            self.tests.append(json.loads(Path(words[1]).read_text()))
            status, lines = self.journals.pop(0)
            Path(words[0]).write_text("\n".join(map(json.dumps, lines)))
            return Done(status, 10.0, "the end of it")
        if kind == "bench" and self.answers["bench"][0] is not None:
            row = {
                "cell": "d64-full-s1024-b16-h32",
                "contenders": {
                    name: {"status": "ok", "tflops": rate, "round_medians_us": [1.0]}
                    for name, rate in (("flash4", 400.0), ("fa4", 320.0))
                },
            }
            results = {"schema": report.SCHEMA, "contenders": ["flash4", "fa4"], "cells": [row]}
            report.save(results, Path(words[words.index("--out") + 1]))
        status, output = self.answers[kind]
        return Done(status, 5.0, output)


def run(children, tmp_path, *options):
    """Exit status of the command, its report, and the JSON in it."""
    out = tmp_path / "report.md"
    arguments = cli._parser().parse_args(["selftest", "--out", str(out), *options])
    status = selftest.command(arguments, children)
    text = out.read_text() if out.exists() else ""
    found = re.search(r"^```json\n(.*)^```$", text, re.M | re.S)
    return status, text, json.loads(found.group(1)) if found else None


def test_all_stages_pass(tmp_path, capsys):
    children = Children()
    status, text, found = run(children, tmp_path, "--seed", "7")
    assert status == 0 and "**all passed**" in text and "NVIDIA H200" in text
    assert "5 passed, 0 failed, 0 skipped" in text and "100 problems, 0 failures" in text
    assert "flash4 / best peer: geomean 1.250" in text and "torch 2.13.0" in text
    assert [stage["status"] for stage in found["stages"]] == ["passed"] * 3
    assert found["facts"] == FACTS and not found["untried"]
    assert found["stages"][2]["record"]["cells"][0]["cell"] == "d64-full-s1024-b16-h32"
    assert [asked[0] for asked in children.asked] == ["facts", "suite", "fuzz", "bench"]
    assert children.tests == [["tests/gpu"]] and not any("--untried" in a for a in children.asked)
    assert children.asked[2][-4:] == ["--n", "500", "--seed", "7"]
    assert "attach it" in capsys.readouterr().out


def test_some_stages_quickly(tmp_path):
    children = Children()
    status, _, found = run(children, tmp_path, "--stages", "bench,suite", "--quick")
    assert status == 0 and [s["name"] for s in found["stages"]] == ["suite", "bench"]
    assert children.tests == [["tests/gpu/test_smoke.py"]]
    with pytest.raises(SystemExit):
        run(children, tmp_path, "--stages", "bench,sweet")


def test_a_test_that_takes_its_process_with_it_costs_itself_alone(tmp_path):
    children = Children([(-11, entries(stop=TESTS[1])), (0, entries(TESTS[2:], d=("skipped", "")))])
    status, text, found = run(children, tmp_path, "--stages", "suite")
    assert status == 1 and children.tests[1] == TESTS[2:]
    assert "3 passed, 1 failed, 1 skipped (in 2 processes)" in text
    (failure,) = found["stages"][0]["failures"]
    assert failure["what"] == TESTS[1] and "ended its process (-11)" in failure["message"]
    assert "the end of it" in failure["message"]


def test_what_runs_on_a_lost_gpu_runs_again(tmp_path):
    lost = ("failed", "call: RuntimeError: CUDA error: an illegal memory access")
    first = entries(b=lost, c=lost, d=lost, e=lost)
    children = Children([(1, first), (1, entries(TESTS[2:], d=("failed", "AssertionError: off")))])
    status, text, found = run(children, tmp_path, "--stages", "suite")
    assert status == 1 and children.tests[1] == TESTS[2:]
    assert [f["what"][-1] for f in found["stages"][0]["failures"]] == ["b", "d"]
    assert "3 passed, 2 failed" in text and "AssertionError: off" in text


def test_the_number_of_children_is_bounded(tmp_path):
    tests = [f"t::test_{i}" for i in range(2 * selftest.ROUNDS)]
    journals = [(-6, entries(tests[i:], stop=tests[i])) for i in range(selftest.ROUNDS)]
    status, text, _ = run(Children(journals), tmp_path, "--stages", "suite")
    assert status == 1 and f"{selftest.ROUNDS} not run" in text


def test_a_suite_that_runs_out_of_time(tmp_path):
    children = Children([(None, entries(stop=TESTS[3]))])
    status, text, found = run(children, tmp_path, "--stages", "suite", "--limit-s", "10")
    assert status == 1 and found["stages"][0]["status"] == "out of time"
    assert "3 passed, 1 failed, 0 skipped, 1 not run" in text and "ran out of time" in text


def test_a_suite_that_does_not_begin(tmp_path):
    status, text, found = run(Children([(2, [])]), tmp_path, "--stages", "suite")
    assert status == 1 and found["stages"][0]["status"] == "broken"
    assert "no test ran; exit status 2" in text and "the end of it" in text


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ((1, "FAILS python -m x --seed 3\n      AssertionError: off\n9 problems, 1 failures,"),
         "failed", "`FAILS python -m x --seed 3`: AssertionError: off"),
        ((3, "HANGS for 120 s: python -m x"), "failed", "HANGS for 120 s"),
        ((1, "ImportError: no hypothesis"), "failed", "ImportError: no hypothesis"),
        ((-9, ""), "broken", "exit status -9"),
        ((None, "compiling"), "out of time", "compiling"),
    ],
)  # fmt: skip
def test_a_fuzz_that_fails(answer, status, words, tmp_path):
    found_status, text, found = run(Children(fuzz=answer), tmp_path, "--stages", "fuzz")
    assert found_status == 1 and found["stages"][0]["status"] == status and words in text


def test_a_benchmark_that_fails_or_leaves_no_record(tmp_path):
    _, text, found = run(Children(bench=(1, "FAIL d64: fa4 wrong")), tmp_path, "--stages", "bench")
    assert found["stages"][0]["failures"] == [{"what": "d64: fa4 wrong", "message": ""}]
    assert "geomean 1.250" in text
    status, _, found = run(Children(bench=(None, "")), tmp_path, "--stages", "bench")
    assert status == 1 and found["stages"][0]["record"] is None


def test_without_a_gpu_or_a_kernel_for_it(tmp_path, capsys):
    none = FACTS | {"available": False}
    assert run(Children(facts=(0, json.dumps(none))), tmp_path) == (2, "", None)
    assert "no CUDA GPU is present" in capsys.readouterr().out
    old = FACTS | {"capability": [7, 0]}
    assert run(Children(facts=(0, json.dumps(old))), tmp_path)[0] == 2
    assert "no kernel for this GPU" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="did not answer in time"):
        run(Children(facts=(None, "")), tmp_path)


def test_outside_a_checkout(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(selftest, "ROOT", tmp_path)
    assert run(Children(), tmp_path)[0] == 2
    assert "needs a checkout" in capsys.readouterr().out


def test_kernels_that_nobody_has_run_are_launched_with_a_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(dispatch, "NEVER_RUN", {(10, 0): "Blackwell"})
    new = FACTS | {"capability": [10, 0], "gpu": {"name": "NVIDIA B200", "sms": 148}}
    children = Children(facts=(0, json.dumps(new)))
    status, text, found = run(children, tmp_path)
    said = capsys.readouterr().out
    assert status == 0 and found["untried"]
    for where in (said, text):
        assert "WARNING: flash4's kernels for Blackwell" in where and "hang" in where
    assert said.index("WARNING") < said.index("suite: at most")
    assert all("--untried" in asked for asked in children.asked[1:])


def test_this_process_alone_is_let_through(monkeypatch):
    monkeypatch.setattr(dispatch, "NEVER_RUN", {(10, 0): "Blackwell"})
    monkeypatch.setattr(dispatch, "ARCHITECTURES", dict(dispatch.ARCHITECTURES))
    with pytest.raises(NotImplementedError, match="never run"):
        dispatch.architecture((10, 0))
    dispatch.allow_untried((10, 0))
    assert dispatch.architecture((10, 0)) == "sm_100a"
    with pytest.raises(ValueError, match=r"8\.0"):
        dispatch.allow_untried((8, 0))


def test_folders_of_this_machine_stay_out_of_the_report(tmp_path):
    output = f"FAIL {selftest.ROOT}/bench/run.py and {Path.home()}/cache"
    _, text, _ = run(Children(bench=(1, output)), tmp_path, "--stages", "bench")
    assert str(selftest.ROOT) not in text and "./bench/run.py and ~/cache" in text


# Real children


def test_a_real_child_that_looks_for_a_gpu():
    done = run_child(["facts", "--"], 120)
    assert done.status == 0, done.output
    found = json.loads(done.output.splitlines()[-1])
    assert found["versions"]["torch"] and isinstance(found["available"], bool)


def test_a_real_child_that_runs_out_of_time():
    done = run_child(["facts", "--"], 0.05)
    assert done.status is None and done.seconds < 20


SOURCE = """
import os, pytest

def test_a():
    pass

def test_b():
    assert 1 == 2, "so it is"

def test_c():
    os._exit(5)

@pytest.mark.skip(reason="not today")
def test_d():
    pass

@pytest.fixture
def broken():
    yield
    raise RuntimeError("CUDA error: lost")

def test_e(broken):
    pass

def test_f():
    pass
"""


def test_a_real_suite_goes_on_behind_tests_that_end_it(tmp_path):
    """b fails, c ends the first child, e loses the GPU in the second, f runs in the third."""
    target = tmp_path / "test_some.py"
    target.write_text(SOURCE)
    asked = []

    def run_there(arguments, limit_s):
        path = Path(arguments[-2])
        tests = json.loads(path.read_text())
        asked.append(tests)
        if tests == ["tests/gpu"]:
            path.write_text(json.dumps([str(target)]))
        else:  # names are relative to where pytest begins
            names = [test.rpartition("::")[2] for test in tests]
            path.write_text(json.dumps([f"{target}::{name}" for name in names]))
        return run_child(arguments, limit_s)

    limits = {"suite": 120}
    stage = suite(Request(tmp_path, False, False, 0, limits), run_there)
    names = [failure["what"].rpartition("::")[2] for failure in stage.failures]
    assert names == ["test_b", "test_c", "test_e"] and len(asked) == 3
    assert stage.summary == "2 passed, 3 failed, 1 skipped (in 3 processes)"
    assert "so it is" in stage.failures[0]["message"]
    assert "ended its process (5)" in stage.failures[1]["message"]
    assert "CUDA error: lost" in stage.failures[2]["message"]


def test_a_journal_that_ends_in_the_middle(tmp_path):
    path = tmp_path / "journal"
    lines = [json.dumps(x) for x in entries(stop=TESTS[2])]
    path.write_text("\n".join([*lines, '{"test": "tes']))
    told = Told.read(path)
    assert told.running == TESTS[2] and len(told.outcomes) == 2 and not told.finished
    assert Told.read(tmp_path / "none").collected == []


def test_children_take_what_is_behind_the_dashes(monkeypatch):
    seen = []
    monkeypatch.setitem(selftest.CHILDREN, "fuzz", lambda *words: seen.append(words) or 4)
    assert selftest.child_main(["fuzz", "--", "--n", "3"]) == 4
    assert seen == [("--n", "3")] and "hypothesis" in sys.modules
