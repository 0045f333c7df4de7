"""``python -m flash4 selftest``: GPU tests, fuzz and benchmark on the GPU at hand, and one report to attach to an issue.

Everything that touches the GPU runs in a child process with a time limit, which is this module as a script
(``python -m flash4.selftest KIND ...``). A test that ends its process, or a fault after which the GPU no longer answers
that process, costs that test alone: the ones behind it run in a new child.

Kernels that nobody has run on a GPU yet (``dispatch.NEVER_RUN``) are launched here, and nowhere else.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import flash4
from flash4 import dispatch

ROOT = Path(__file__).resolve().parents[1]
LIMITS_S = {"suite": 2400, "fuzz": 900, "bench": 600}
FACTS_LIMIT_S = 120
ROUNDS = 25  # children of the suite, one more for every test that takes its process with it
FUZZ_PROBLEMS, QUICK_PROBLEMS = 500, 100
TAIL = 3_000  # characters of a child's output that a report keeps
SHOWN = 60  # failures that the readable part lists
MESSAGE = 600  # characters of a failure
LOST = ("CUDA error", "cudaError", "CUDA_ERROR", "illegal memory access", "device-side assert")


@dataclass(frozen=True)
class Done:
    """A child that has ended: its exit status, None if it ran out of time."""

    status: int | None
    seconds: float
    output: str


@dataclass
class Stage:
    """What came of a stage.

    Attributes:
        name: of the stage.
        status: "passed", "failed", "out of time" or "broken" (it ended before it could tell anything).
        seconds: that it took.
        summary: one line.
        failures: {"what", "message"} of everything that failed.
        details: text for the reader, such as a table.
        tail: end of what the last child printed, unless all passed.
        record: what the benchmark wrote.
    """

    name: str
    status: str
    seconds: float
    summary: str
    failures: list[dict[str, str]] = field(default_factory=list)
    details: str = ""
    tail: str = ""
    record: dict | None = None


def run_child(arguments: list[str], limit_s: float) -> Done:
    """Run this module as a script, and end it with all that it started when the time is up."""
    command = [sys.executable, "-m", "flash4.selftest", *arguments]
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"},  # reports are read
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)  # one that waits for a driver may not end at all
        log.seek(0)
        output = log.read().decode("utf-8", "replace")
    return Done(status, time.monotonic() - began, output)


def scrub(text: str) -> str:
    """Text without the folders of this machine."""
    return text.replace(str(ROOT), ".").replace(str(Path.home()), "~")


# Stages


@dataclass(frozen=True)
class Request:
    """What a run is asked for.

    Attributes:
        folder: for files that pass between the processes.
        untried: kernels that nobody has run yet are launched.
        quick: the smoke test only, and fewer problems.
        seed: of the fuzz.
        limits_s: seconds of each stage.
    """

    folder: Path
    untried: bool
    quick: bool
    seed: int
    limits_s: dict[str, float]

    def child(self, kind: str, *arguments: str) -> list[str]:
        """Command line of a child."""
        return [kind, *(["--untried"] if self.untried else []), "--", *arguments]


@dataclass
class Told:
    """What the journal of one child of the suite says."""

    collected: list[str]
    outcomes: dict[str, tuple[str, str]]  # test -> (outcome, message), in order
    running: str | None  # the test that was begun and has no outcome
    finished: bool

    @classmethod
    def read(cls, path: Path) -> "Told":
        """Read a journal, which may end in the middle of a line."""
        told = cls([], {}, None, False)
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        for line in lines:
            with contextlib.suppress(ValueError):
                told._add(json.loads(line))
        return told

    def _add(self, entry: dict):
        if "collected" in entry:
            self.collected = entry["collected"]
        elif "began" in entry:
            self.running = entry["began"]
        elif "test" in entry:
            self.outcomes[entry["test"]] = (entry["outcome"], entry["message"])
            self.running = None
        elif "finished" in entry:
            self.finished = True

    def drop_after_loss(self) -> bool:
        """Forget what ran after the GPU was lost; whether it was."""
        tests = list(self.outcomes)
        for i, test in enumerate(tests):
            outcome, message = self.outcomes[test]
            if outcome == "failed" and any(word in message for word in LOST):
                for later in tests[i + 1 :]:
                    del self.outcomes[later]
                self.running = None
                return True
        return False


def suite(request: Request, run=run_child) -> Stage:
    """The GPU tests, in as many children as it takes."""
    waiting = ["tests/gpu/test_smoke.py" if request.quick else "tests/gpu"]
    limit_s = request.limits_s["suite"]
    outcomes: dict[str, tuple[str, str]] = {}
    seconds, collected, done, rounds = 0.0, None, None, 0
    while waiting and rounds < ROUNDS and seconds < limit_s:
        journal = request.folder / f"journal-{rounds}"
        asked = request.folder / f"tests-{rounds}.json"
        asked.write_text(json.dumps(waiting))
        rounds += 1
        arguments = request.child("suite", str(journal), str(asked), str(request.seed))
        done = run(arguments, limit_s - seconds)
        seconds += done.seconds
        told = Told.read(journal)
        collected = told.collected if collected is None else collected
        lost = told.drop_after_loss()
        outcomes |= told.outcomes
        if told.running is not None:
            why = "ran out of time" if done.status is None else f"ended its process ({done.status})"
            outcomes[told.running] = ("failed", f"{why}\n{done.output[-MESSAGE:]}")
        waiting = [test for test in collected if test not in outcomes]
        if not told.outcomes and told.running is None or told.finished and not lost:
            break
    return _suite_stage(outcomes, collected or [], seconds, rounds, done)


def _suite_stage(outcomes, collected, seconds: float, rounds: int, done: Done) -> Stage:
    counts = Counter(outcome for outcome, _ in outcomes.values())
    unseen = [test for test in collected if test not in outcomes]
    summary = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped"))
    summary += f", {len(unseen)} not run" if unseen else ""
    summary += f" (in {rounds} processes)" if rounds > 1 else ""
    failures = [
        {"what": test, "message": scrub(message)[:MESSAGE]}
        for test, (outcome, message) in outcomes.items()
        if outcome == "failed"
    ]
    status = "failed" if failures or unseen else "passed"
    if not outcomes:
        status, summary = "broken", f"no test ran; exit status {done.status}"
    elif done.status is None:
        status = "out of time"
    tail = "" if status == "passed" else scrub(done.output[-TAIL:])
    return Stage("suite", status, seconds, summary, failures, tail=tail)


def fuzz(request: Request, run=run_child) -> Stage:
    """Random problems against the reference."""
    n = QUICK_PROBLEMS if request.quick else FUZZ_PROBLEMS
    words = ("--n", str(n), "--seed", str(request.seed))
    done = run(request.child("fuzz", *words), request.limits_s["fuzz"])
    lines = scrub(done.output).splitlines()
    marks = ("FAILS ", "HANGS ", "DOES NOT COMPILE ")
    failures = []
    for i, line in enumerate(lines):
        if line.startswith(marks):
            more = lines[i + 1].strip() if line.startswith("FAILS") and i + 1 < len(lines) else ""
            failures.append({"what": line[:MESSAGE], "message": more[:MESSAGE]})
    summary = next((x for x in reversed(lines) if " problems, " in x), "")
    return _single("fuzz", done, summary, failures)


def bench(request: Request, run=run_child) -> Stage:
    """flash4 beside its peers on a few shapes."""
    out = request.folder / "bench.json"
    words = ("--cells", "quick", "--out", str(out))
    done = run(request.child("bench", *words), request.limits_s["bench"])
    record, details, summary = None, "", ""
    if out.exists():
        from bench import report

        record = report.load(out)
        details = scrub(report.table(record))
        summary = next((x for x in report.summary(record) if "best peer" in x), "")
    lines = scrub(done.output).splitlines()
    failures = [{"what": x[5:][:MESSAGE], "message": ""} for x in lines if x.startswith("FAIL ")]
    stage = _single("bench", done, summary, failures)
    stage.record, stage.details = record, details
    return stage


def _single(name: str, done: Done, summary: str, failures: list[dict[str, str]]) -> Stage:
    """A stage of one child, from its exit status."""
    status = {None: "out of time", 0: "passed", 1: "failed"}.get(done.status, "broken")
    if failures and status != "out of time":
        status = "failed"
    tail = "" if status == "passed" else scrub(done.output[-TAIL:])
    summary = summary or f"exit status {done.status}"
    return Stage(name, status, done.seconds, summary, failures, tail=tail)


STAGES = {"suite": suite, "fuzz": fuzz, "bench": bench}


# The command


def _facts(run) -> dict:
    """What the first child says about GPU and software.

    Raises:
        RuntimeError: it says nothing.
    """
    done = run(["facts", "--"], FACTS_LIMIT_S)
    for line in reversed(done.output.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    why = "did not answer in time" if done.status is None else f"ended with {done.status}"
    raise RuntimeError(f"selftest: a process that looks for a GPU {why}: {done.output[-TAIL:]}")


def warning(capability: tuple[int, int]) -> str:
    """What to know before kernels run that nobody has run."""
    name = dispatch.NEVER_RUN[capability]
    return (
        f"WARNING: flash4's kernels for {name} have been compiled and simulated, but nobody has run one on a GPU. This "
        "selftest launches them, and is the only command that does: they may give wrong results, fault or hang, "
        "and a GPU that hangs may need a reset. Do not run it beside work that matters."
    )


def command(arguments, run=run_child) -> int:
    """Run the stages and write the report; returns 0, 1 if something failed, 2 if nothing could be tested.

    Args:
        arguments: of the command line.
        run: runs a child; for tests.
    """
    if not all((ROOT / name).is_dir() for name in ("tests/gpu", "bench")):
        print(
            "selftest: needs a checkout of flash4: tests and benchmark are no part of the package"
        )
        return 2
    facts = _facts(run)
    if not facts["available"]:
        print("selftest: no CUDA GPU is present; nothing was tested")
        return 2
    capability = tuple(facts["capability"])
    untried = capability in dispatch.NEVER_RUN
    print(f"selftest: {facts['gpu']['name']}, compute capability {capability[0]}.{capability[1]}")
    if untried:
        print(f"\n{warning(capability)}\n", flush=True)
    elif capability not in dispatch.ARCHITECTURES:
        print("selftest: flash4 has no kernel for this GPU; nothing was tested")
        return 2
    limits = {name: arguments.limit_s or limit for name, limit in LIMITS_S.items()}
    stages = []
    with tempfile.TemporaryDirectory(prefix="flash4-selftest-") as folder:
        request = Request(Path(folder), untried, arguments.quick, arguments.seed, limits)
        for name in arguments.stages:
            print(f"{name}: at most {limits[name]:.0f} s ...", flush=True)
            stages.append(STAGES[name](request, run))
            print(f"{name}: {stages[-1].status}, {stages[-1].summary}", flush=True)
    path = arguments.out or Path(f"flash4-selftest-{facts['started']}.md")
    path.write_text(report_of(facts, stages, untried), "utf-8")
    print(f"wrote {path}: attach it to an issue if something failed")
    return 0 if all(stage.status == "passed" for stage in stages) else 1


def report_of(facts: dict, stages: list[Stage], untried: bool) -> str:
    """The report: text for a reader, then everything as JSON."""
    bad = [stage.name for stage in stages if stage.status != "passed"]
    capability = tuple(facts["capability"])
    versions = ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v)
    lines = [
        "# flash4 selftest",
        "",
        f"**{'not passed: ' + ', '.join(bad) if bad else 'all passed'}**",
        "",
        f"- {facts['gpu']['name']}, compute capability {capability[0]}.{capability[1]}, "
        f"{facts['gpu']['sms']} multiprocessors",
        f"- flash4 {facts['flash4']}, commit {facts['commit']}, {facts['started']}",
        f"- {versions}",
    ]
    if untried:
        lines += ["", f"> {warning(capability)}"]
    for stage in stages:
        lines += ["", f"## {stage.name}: {stage.status}, {stage.seconds:.0f} s", "", stage.summary]
        shown = stage.failures[:SHOWN]
        lines += [""] * bool(shown)
        for failure in shown:
            first = failure["message"].strip().splitlines()[:1]
            lines.append(f"- `{failure['what']}`" + (f": {first[0]}" if first else ""))
        if len(stage.failures) > SHOWN:
            lines.append(f"- and {len(stage.failures) - SHOWN} more, in the JSON below")
        for text in (stage.details, stage.tail):
            if text:
                lines += ["", "```text", text.replace("```", "'''").strip(), "```"]
    found = {"facts": facts, "untried": untried, "stages": [asdict(stage) for stage in stages]}
    lines += ["", "## Everything as JSON", "", "```json", json.dumps(found, indent=1), "```", ""]
    return "\n".join(lines)


# Children


class Journal:
    """A pytest plugin that writes down what happens as it happens, so that it outlives the process."""

    def __init__(self, path: Path):
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._bad: str | None = None

    def _write(self, **entry):
        self._file.write(json.dumps(entry) + "\n")

    def pytest_collection_finish(self, session):
        """All tests that are about to run, in order."""
        self._write(collected=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid, location):
        """A test begins."""
        self._bad, self._skipped = None, False
        self._write(began=nodeid)

    def pytest_runtest_logreport(self, report):
        """A phase of a test has ended."""
        self._skipped |= report.skipped
        if report.failed and self._bad is None:
            text = str(report.longrepr)
            crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", text)
            self._bad = f"{report.when}: {crash}"[: 2 * MESSAGE]

    def pytest_runtest_logfinish(self, nodeid, location):
        """A test has ended."""
        outcome = "failed" if self._bad is not None else "skipped" if self._skipped else "passed"
        self._write(test=nodeid, outcome=outcome, message=self._bad or "")

    def pytest_sessionfinish(self, session, exitstatus):
        """All of them have."""
        self._write(finished=True)


def _child_suite(journal: str, asked: str, seed: str) -> int:
    import pytest

    words = ["-q", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}", "--tb=short"]
    targets = json.loads(Path(asked).read_text("utf-8"))
    return int(pytest.main([*words, *targets], plugins=[Journal(Path(journal))]))


def _child_fuzz(*words: str) -> int:
    from tests.gpu import test_fuzz

    return test_fuzz.main(list(words))


def _child_bench(*words: str) -> int:
    from bench import run

    return run.main(list(words))


def _child_facts() -> int:
    import torch

    from bench import provenance

    available = torch.cuda.is_available()
    found = {
        "available": available,
        "started": provenance.now(),
        "flash4": flash4.__version__,
        "commit": provenance.commit(),
        "versions": provenance.versions(),
    }
    if available:
        found["gpu"] = provenance.gpu()
        found["capability"] = torch.cuda.get_device_capability()
    print("\n" + json.dumps(found), flush=True)
    return 0


CHILDREN = {
    "suite": _child_suite,
    "fuzz": _child_fuzz,
    "bench": _child_bench,
    "facts": _child_facts,
}


def child_main(argv: list[str] | None = None) -> int:
    """Run a child; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m flash4.selftest", description=__doc__)
    parser.add_argument("kind", choices=CHILDREN)
    parser.add_argument("--untried", action="store_true", help="launch what nobody has run yet")
    parser.add_argument("words", nargs="*")
    arguments = parser.parse_args(argv)
    if arguments.untried:
        import torch

        dispatch.allow_untried(torch.cuda.get_device_capability())
    return CHILDREN[arguments.kind](*arguments.words)


if __name__ == "__main__":
    sys.exit(child_main())
