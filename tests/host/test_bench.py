"""The benchmark's own arithmetic and protocol, on a clock of the test's making."""

import functools
import json
import math
import time
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from bench import (
    baselines,
    check,
    core,
    host_time,
    protocol,
    provenance,
    report,
    run,
    variants,
)
from bench.shapes import SUBSETS, TRAINING, Cell, select
from bench.telemetry import Reading, Telemetry, parse_smi


class FakeDevice:
    """A host clock and a stream that works off what is enqueued, both in seconds."""

    def __init__(self):
        self.host = self.free = 0.0
        self.spins = []

    def now(self):
        return self.host

    def enqueue(self, microseconds):
        self.free = max(self.free, self.host) + microseconds * 1e-6

    def spin(self, microseconds):
        self.spins.append(microseconds)
        self.enqueue(microseconds)

    def events(self, count):
        return [[0.0] for _ in range(count)]

    def record(self, event):
        event[0] = max(self.free, self.host)

    def pending(self, event):
        return event[0] > self.host

    def elapsed_us(self, first, second):
        return (second[0] - first[0]) * 1e6

    def synchronize(self):
        self.host = max(self.host, self.free)


def launch(device, log, name, times, host_us=5.0):
    """Return a fake launch that costs host time and enqueues the next of `times`."""
    count = Counter()

    def call(which=0):
        device.host += host_us * 1e-6
        device.enqueue(times[count["calls"] % len(times)])
        count["calls"] += 1
        log.append((name, which))

    return call


# Shapes


@pytest.mark.parametrize("text", ["d8x4-full-s6-b2-h2", "d4-causal-s64-b3-h4x2"])
def test_flops_equal_a_count_of_multiply_adds(text):
    cell = Cell.parse(text)
    visible = sum(
        1 for i in range(cell.seqlen) for j in range(cell.seqlen) if not cell.causal or j <= i
    )
    counted = 2 * visible * (cell.d + cell.dv) * cell.heads_q * cell.batch
    # The convention counts S^2 / 2 pairs where a causal mask leaves S (S + 1) / 2.
    expected = counted * cell.seqlen / (cell.seqlen + 1) if cell.causal else counted
    assert cell.flops() == pytest.approx(expected, rel=1e-12)
    assert cell.flops("backward") == 2.5 * cell.flops()
    with pytest.raises(ValueError, match="sideways"):
        cell.flops("sideways")


def test_flops_of_equal_dims_take_the_papers_form():
    for c in TRAINING:
        if c.d == c.dv:
            papers = 4 * c.seqlen**2 * c.d * c.heads_q * c.batch
            assert c.flops() == papers // (2 if c.causal else 1)


def test_training_cells():
    assert len(TRAINING) == len(set(TRAINING)) == 32
    kinds = Counter((c.d, c.dv, c.heads_q, c.heads_kv) for c in TRAINING)
    assert kinds == {
        (128, 128, 16, 16): 12,
        (64, 64, 32, 32): 12,
        (256, 256, 8, 8): 6,
        (192, 128, 16, 16): 1,
        (128, 128, 32, 8): 1,
    }
    assert all(c.seqlen * c.batch == 16384 for c in TRAINING)
    assert {c.seqlen for c in TRAINING if c.d == 256} == {16384, 4096, 1024}
    sizes = {name: len(cells) for name, cells in SUBSETS.items()}
    assert sizes == {
        "training": 32,
        "d64": 12,
        "d128": 12,
        "d256": 6,
        "short": 10,
        "causal": 17,
        "quick": 6,
    }
    assert set(SUBSETS["quick"]) <= set(TRAINING)


def test_names_round_trip_and_selection_keeps_each_once():
    for cell in TRAINING:
        assert Cell.parse(cell.name) == cell
    extra = "d192x128-full-s77-b1-h6x2"
    chosen = select(f"quick,d64,{extra}")
    assert len(chosen) == len(set(chosen)) and Cell.parse(extra) in chosen
    for bad in ("d9000", "d64-full-s1-b1", "d64-full-s1-b1-h3x2"):
        with pytest.raises(ValueError):
            select(bad)


# Protocol


def test_percentile_and_summary():
    assert protocol.percentile([3, 1, 2], 50) == 2
    assert protocol.percentile([0, 10], 25) == 2.5
    assert protocol.percentile([7], 90) == 7
    timing = protocol.Timing([[10.0, 12.0, 11.0], [11.0, 11.0, 50.0]])
    found = timing.summary()
    assert found["median_us"] == 11.0 and found["round_medians_us"] == [11.0, 11.0]
    assert found["spread"] == 0 and found["p90_us"] > 12 and found["launches"] == 6
    assert protocol.Timing().summary() == {"launches": 0}


def test_bursts_take_turns_and_every_second_round_is_reversed():
    device, log = FakeDevice(), []
    entries = [
        protocol.Entry(name, (launch(device, log, name, [us]),))
        for name, us in (("a", 100.0), ("b", 200.0), ("c", 400.0))
    ]
    found = protocol.measure(entries, device, budget_s=0.3)
    kept = found.kept_per_burst
    per_burst = kept + 1
    rounds = len(found.timings["a"].rounds)
    assert kept == protocol.KEPT_LAUNCHES[1] and rounds >= 4
    names = [name for name, _ in log[-rounds * 3 * per_burst :]]
    bursts = [names[i : i + per_burst] for i in range(0, len(names), per_burst)]
    assert all(len(set(burst)) == 1 for burst in bursts)
    assert [burst[0] for burst in bursts] == list(("abc" + "cba") * rounds)[: 3 * rounds]
    for name, us in (("a", 100.0), ("b", 200.0), ("c", 400.0)):
        summary = found.timings[name].summary()
        assert summary["median_us"] == pytest.approx(us)
        assert summary["dry_bursts"] == 0 and summary["launches"] == kept * rounds
    assert device.now() <= 0.35 and found.started < found.ended <= device.now()


def test_median_ignores_outliers_and_the_first_launch_is_dropped():
    device = FakeDevice()
    # A burst has 4 launches in the warm-up and here: the first of each is cold.
    call = launch(device, [], "a", [50_000.0, 8000.0, 8000.0, 9000.0])
    found = protocol.measure([protocol.Entry("a", (call,))], device, budget_s=1.0)
    assert found.kept_per_burst == 3
    assert found.timings["a"].rounds[0] == pytest.approx([8000.0, 8000.0, 9000.0])
    assert found.timings["a"].summary()["median_us"] == pytest.approx(8000.0)


def test_a_slow_host_lengthens_the_spin_until_only_the_device_is_timed():
    device = FakeDevice()
    call = launch(device, [], "slow host", [20.0], host_us=100.0)
    found = protocol.measure([protocol.Entry("slow host", (call,))], device, budget_s=0.5)
    summary = found.timings["slow host"].summary()
    assert summary["median_us"] == pytest.approx(20.0)
    assert summary["dry_bursts"] == 0
    assert found.spin_us > 100.0 * (found.kept_per_burst + 1)


def test_a_host_that_no_spin_outlasts_is_reported():
    device = FakeDevice()

    def waits():
        device.synchronize()
        device.host += 1e-4
        device.enqueue(20.0)

    found = protocol.measure([protocol.Entry("waits", (waits,))], device, budget_s=0.5)
    timing = found.timings["waits"]
    assert timing.dry == len(timing.rounds) > 0
    assert max(device.spins) == protocol.Pace().longest_us


def test_the_budget_bounds_slow_contenders():
    device = FakeDevice()
    call = launch(device, [], "a", [400_000.0])
    found = protocol.measure([protocol.Entry("a", (call,))], device, budget_s=1.0)
    assert 1 <= len(found.timings["a"].rounds) < protocol.MIN_ROUNDS
    assert device.now() < 2 * protocol.OVERRUN


def test_input_sets_exceed_twice_the_l2_and_rotate_over_all_contenders():
    l2 = 50 << 20
    for size in (1, 3 << 20, 99 << 20, 100 << 20, 101 << 20):
        sets = protocol.input_sets(size, l2)
        assert sets * size > 2 * l2 >= (sets - 1) * size
    device, log = FakeDevice(), []
    entries = []
    for name in "ab":
        call = launch(device, log, name, [100.0])
        entries.append(protocol.Entry(name, tuple(functools.partial(call, i) for i in range(7))))
    protocol.measure(entries, device, budget_s=0.05)
    used = [which for _, which in log]
    assert used == [i % 7 for i in range(len(used))]


def test_an_error_ends_one_contender_and_the_context_surrounds_each_burst():
    device, log, entered = FakeDevice(), [], []
    calls = Counter()
    fine = launch(device, log, "fine", [100.0])

    def breaks():
        calls["breaks"] += 1
        if calls["breaks"] > 100:
            raise RuntimeError("went\nwrong")
        fine()

    @contextmanager
    def context():
        entered.append("in")
        yield
        entered.append("out")

    entries = [protocol.Entry("breaks", (breaks,)), protocol.Entry("fine", (fine,), context)]
    found = protocol.measure(entries, device, budget_s=0.2)
    assert found.timings["breaks"].error == "while timing: RuntimeError: went wrong"
    assert found.timings["fine"].error is None and len(found.timings["fine"].rounds) > 10
    assert entered == ["in", "out"] * (len(entered) // 2)
    assert protocol.measure([], device).timings == {}


def test_a_lost_device_is_not_one_contenders_error():
    device = FakeDevice()

    def fault():
        device.synchronize = lambda: (_ for _ in ()).throw(RuntimeError("illegal access"))
        raise RuntimeError("launch failed")

    with pytest.raises(protocol.DeviceLost, match="bad: while timing"):
        protocol.measure([protocol.Entry("bad", (fault,))], device)


# Telemetry


def test_smi_lines_of_all_sorts():
    assert parse_smi("1980, 690.12, 54\n") == Reading(1980.0, 690.12, 54.0)
    assert parse_smi("1980 MHz, [N/A], 54 C") == Reading(1980.0, None, 54.0)
    assert parse_smi("[Unknown Error]") == Reading()
    assert parse_smi("") == Reading()


def test_telemetry_summarises_a_window_and_survives_its_source():
    def source():
        yield from (
            Reading(1000.0, 100.0, 30.0),
            Reading(2000.0, None, 50.0),
            Reading(1800.0, 600.0),
        )
        raise OSError("driver went away")

    ticks = iter((1.0, 2.0, 3.0))
    telemetry = Telemetry(source(), "fake", now=lambda: next(ticks)).start()
    telemetry.stop()
    found = telemetry.window(1.5, 9.0)
    assert found["samples"] == 2 and found["sm_mhz"] == 1900.0 and found["watts"] == 600.0
    assert found["celsius"] == 50.0 and telemetry.window(5.0, 6.0)["sm_mhz"] is None


# Correctness, and one cell from start to end


def attention(q, k, v, causal, row_shift=0):
    """Plain attention on (batch, seqlen, heads, head_dim); `row_shift` moves the diagonal."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * q.shape[-1] ** -0.5
    if causal:
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(row_shift)
        scores = scores.masked_fill(~seen, -math.inf)
    p = torch.softmax(scores, -1).to(q.dtype).float()
    return torch.einsum("bhqk,bkhd->bqhd", p, v.float()).to(q.dtype)


SMALL = Cell(d=16, dv=8, causal=True, seqlen=300, batch=2, heads_q=4, heads_kv=2)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_right_results_pass_and_each_kind_of_wrong_one_is_named(direction):
    one = baselines.make_inputs(SMALL, 1, direction, seed=3, device="cpu")[0]

    def results(change=lambda out: out, **keywords):
        def factory(q, k, v):
            return lambda: change(attention(q, k, v, SMALL.causal, **keywords))

        made = baselines.FromCallable("x", factory)
        return made.results(made.prepare(SMALL, one, direction)(), direction)

    right = results()
    assert check.mismatches(SMALL, one, {"a": right, "b": results()}, direction) == {}
    masked = results(row_shift=-1) if direction == "backward" else results(row_shift=1)
    nan = tuple(t.clone() for t in right)
    nan[0][-1, -1, -1, 0] = math.nan
    patch = tuple(t.clone() for t in right)
    patch[-1][0, 290:, 0] = patch[-1][0, 280:290, 0]  # beside every slice: found only as a whole
    short = tuple(t[:, :-1] for t in right)
    found = check.mismatches(
        SMALL,
        one,
        {"right": right, "mask": masked, "nan": nan, "patch": patch, "short": short},
        direction,
    )
    assert set(found) == {"mask", "nan", "patch", "short"}
    assert "not finite" in found["nan"] and "shape" in found["short"]
    assert "against right" in found["patch"]


def small_bench(direction="forward"):
    return core.Bench(FakeDevice(), 1 << 10, direction, 0.05, seed=1, torch_device="cpu")


def contender(bench, name, us, row_shift=0):
    """A contender that computes on the CPU and advances the fake clock."""
    tick = launch(bench.device, [], name, [us])

    def factory(q, k, v):
        def call():
            tick()
            # Computing once is enough for the check; timing only needs the tick.
            if "out" not in kept:
                kept["out"] = attention(q, k, v, SMALL.causal, row_shift)
            return kept["out"]

        kept = {}
        return call

    return baselines.FromCallable(name, factory)


class Missing(baselines.Contender):
    name = "fa2"

    def available(self):
        return "not here"


def refusing(q, k, v):
    raise NotImplementedError("no such head_dim")


def test_a_cell_from_inputs_to_table_and_json(tmp_path, capsys):
    bench = small_bench()
    contenders = [
        contender(bench, "flash4", 100.0),
        contender(bench, "fa4", 150.0),
        contender(bench, "wrong", 50.0, row_shift=1),
        baselines.FromCallable("cudnn", refusing),
        Missing(),
    ]
    results = {
        "schema": report.SCHEMA,
        "commit": "abc",
        "contenders": [c.name for c in contenders],
        "ceilings": [{"when": "start", "gemm_tflops": 700.0, "copy_gbs": 4200.0}],
        "cells": [],
        "complete": True,
    }
    out = tmp_path / "deep" / "record.json"
    run.run_cells([SMALL, SMALL], contenders, bench, results, out)
    row = results["cells"][0]
    status = {name: r["status"] for name, r in row["contenders"].items()}
    assert status == {
        "flash4": "ok",
        "fa4": "ok",
        "wrong": "mismatch",
        "cudnn": "refused",
        "fa2": "absent",
    }
    assert "no such head_dim" in row["contenders"]["cudnn"]["error"]
    assert "median_us" not in row["contenders"]["wrong"]
    assert row["contenders"]["flash4"]["tflops"] == pytest.approx(SMALL.flops() / 1e8, abs=0.01)
    assert report.ratio(row) == pytest.approx(1.5, rel=0.02)
    assert report.ratio_noise(row) == pytest.approx(0, abs=1e-3)
    assert report.load(out) == json.loads(json.dumps(results))
    assert not list(out.parent.glob("*.partial"))
    assert run.main(["--show", str(out)]) == 1
    shown = capsys.readouterr()
    assert "mismatch" in shown.out and "no such head_dim" in shown.out
    assert "wrong mismatch" in shown.err and "cudnn" not in shown.err


def test_an_error_outside_the_timing_costs_one_cell(tmp_path, monkeypatch):
    results = {"contenders": ["flash4"], "cells": []}
    bench = small_bench()
    monkeypatch.setattr(core, "make_inputs", lambda *a: (_ for _ in ()).throw(MemoryError("none")))
    run.run_cells([SMALL, SMALL], [contender(bench, "flash4", 1.0)], bench, results, tmp_path / "r")
    assert len(results["cells"]) == 2 and len(report.verdicts(results)) == 2
    assert "MemoryError" in report.table(results)

    def lost(*args):
        raise protocol.DeviceLost("flash4: gone")

    monkeypatch.setattr(core, "measure_cell", lost)
    run.run_cells([SMALL, SMALL], [contender(bench, "flash4", 1.0)], bench, results, tmp_path / "r")
    assert len(results["cells"]) == 2 and "device lost" in report.verdicts(results)[0]


def test_the_backward_of_a_cell():
    bench = small_bench("backward")
    tick = launch(bench.device, [], "flash4", [100.0])

    class Once(baselines.FromCallable):
        """Computes the gradients once, for the check, and only ticks while timed."""

        def prepare(self, *arguments):
            grads = super().prepare(*arguments)()
            return lambda: (tick(), grads)[1]

    def factory(q, k, v):
        return lambda: attention(q, k, v, SMALL.causal)

    found = core.measure_cell(SMALL, [Once("flash4", factory)], bench)
    assert found["contenders"]["flash4"]["status"] == "ok"
    assert found["contenders"]["flash4"]["median_us"] == pytest.approx(100.0)
    assert found["flops"] == SMALL.flops("backward")

    def no_graph(q, k, v):
        return lambda: attention(q, k, v, SMALL.causal).detach()

    found = core.measure_cell(SMALL, [baselines.FromCallable("flash4", no_graph)], bench)
    assert "does not require a gradient" in found["contenders"]["flash4"]["error"]


def test_variants_come_fastest_first_with_errors_last(capsys, monkeypatch):
    bench = small_bench()
    made = {n: contender(bench, n, us) for n, us in (("fa4", 80.0), ("(1,)", 60.0), ("(2,)", 90.0))}
    monkeypatch.setattr(variants, "CONTENDERS", {"fa4": lambda: made["fa4"]})

    bound = {}

    def call(config, q, k, v):
        if config == (3,):
            raise ValueError("too many stages")
        if config not in bound:
            bound[config] = made[str(config)].bind(SMALL, q, k, v)
        return bound[config]()

    found = variants.tune(SMALL, [(3,), (2,), (1,)], call, peers=("fa4",), bench=bench)
    assert [config for config, _ in found] == [(1,), None, (2,), (3,)]
    text = capsys.readouterr().out
    assert text.index("(1,)") < text.index("fa4") < text.index("(2,)") < text.index("too many")
    with pytest.raises(ValueError, match="called"):
        variants.tune(SMALL, [1, 1], call, bench=bench)


# Report


def fake_row(cell, **rates):
    records = {
        name: {
            "status": "ok",
            "tflops": rate,
            "dry_bursts": 0,
            "round_medians_us": [1e3 / rate, 1.1e3 / rate],
        }
        for name, rate in rates.items()
    }
    return {"cell": cell, "contenders": records, "clocks": {"sm_mhz": 1755.0, "watts": 640.0}}


def fake_results():
    return {
        "schema": report.SCHEMA,
        "contenders": ["flash4", "fa4", "cudnn"],
        "ceilings": [
            {"when": "start", "gemm_tflops": 720.0, "copy_gbs": 4300.0},
            {"when": "end", "gemm_tflops": 680.0, "copy_gbs": 4300.0},
        ],
        "cells": [
            fake_row("d64-full-s1024-b16-h32", flash4=400.0, fa4=390.0, cudnn=500.0),
            fake_row("d128-causal-s4096-b4-h16", flash4=600.0, fa4=480.0, cudnn=300.0),
        ],
        "complete": True,
    }


def test_ratios_geomeans_and_subsets():
    results = fake_results()
    first, second = results["cells"]
    assert report.best_peer(first) == "cudnn" and report.best_peer(second) == "fa4"
    assert report.ratio(first) == pytest.approx(0.8) and report.ratio(second) == pytest.approx(1.25)
    assert report.geomean(report.ratios(results).values()) == pytest.approx(1.0)
    assert report.geomean([]) is None
    assert report.gemm_tflops(results) == 700.0
    text = report.table(results)
    assert "geomean 1.000 over 2 cells, worst 0.800 (d64-full-s1024-b16-h32), ahead on 1" in text
    assert "d64 0.800 (1), d128 1.250 (1), causal 1.250 (1), S<=1024 0.800 (1)" in text
    assert "57.1" in text and "85.7" in text and "1755" in text


def test_paired_rounds_tell_noise_from_drift():
    row = fake_row("d64-full-s1024-b16-h32", flash4=400.0, fa4=500.0)
    assert report.ratio_noise(row) == pytest.approx(0)
    row["contenders"]["fa4"]["round_medians_us"] = [2.0, 2.4]
    assert report.ratio_noise(row) > 0.01
    row["contenders"]["fa4"]["round_medians_us"] = [2.0]
    assert report.ratio_noise(row) is None


def test_verdicts():
    results = fake_results()
    assert report.verdicts(results, 0.99, 0.8 - 1e-9) == []
    assert report.verdicts(results, 1.01) == ["geomean 1.000 is below 1.01"]
    assert len(report.verdicts(results, None, 0.9)) == 1
    peers = results["cells"][0]["contenders"]
    peers["cudnn"] = {"status": "refused", "error": "no"}
    assert report.verdicts(results) == []
    peers["flash4"] = {"status": "refused", "error": "no"}
    assert "flash4 refused" in report.verdicts(results)[0]
    assert "no ratio to assert on 1 cells" in report.verdicts(results, 0.5)[1]
    peers["flash4"] = fake_row("", flash4=1.0)["contenders"]["flash4"]
    peers["fa4"] = {"status": "mismatch", "error": "off"}
    assert "fa4 mismatch" in report.verdicts(results)[0]
    results["fatal"] = "device lost"
    assert "stopped: device lost" in report.verdicts(results)
    assert report.verdicts({"cells": []}, 1.0)


def test_a_record_of_another_schema_is_refused(tmp_path):
    path = tmp_path / "old.json"
    path.write_text('{"schema": 0}')
    with pytest.raises(ValueError, match="schema 0"):
        report.load(path)


# Commands and provenance


def test_commit_and_file_name(monkeypatch):
    monkeypatch.setenv("FLASH4_COMMIT", "1234abcd")
    assert provenance.commit() == "1234abcd"
    path = provenance.results_path("2026-01-02T030405Z", "1234abcd", "NVIDIA H200", "forward")
    assert path.name == "2026-01-02T030405Z-1234abcd-nvidia-h200.json"
    assert path.parent.parts[-2:] == ("bench", "results")
    monkeypatch.delenv("FLASH4_COMMIT")
    monkeypatch.setattr(provenance, "_output", lambda *command: None)
    assert provenance.commit() == "unknown"


def test_command_line_errors(capsys, monkeypatch):
    assert run.main(["--cells", "nonsense"]) == 2
    assert run.main(["--contenders", "fa5"]) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main(["--cells", "quick"]) == 2
    text = capsys.readouterr().err
    assert "nonsense" in text and "fa5" in text and "no CUDA device" in text
    for name, kind in baselines.CONTENDERS.items():
        assert kind().available() == "no CUDA device", name


def test_the_whole_command_on_a_pretended_gpu(tmp_path, capsys, monkeypatch):
    out = tmp_path / "record.json"
    written = []

    def measure_cell(cell, contenders, bench):
        written.append(out.exists() and len(report.load(out)["cells"]))
        assert (bench.direction, bench.budget_s, bench.seed) == ("backward", 0.5, 7)
        return fake_row(cell.name, flash4=600.0, fa4=500.0)

    ceilings = {"gemm_tflops": 700.0, "copy_gbs": 4200.0}
    gpu = {"name": "NVIDIA H200", "l2_bytes": 60 << 20}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(provenance, "gpu", lambda: gpu)
    monkeypatch.setattr(provenance, "gpu_uuid", lambda: "GPU-0")
    monkeypatch.setattr(baselines, "measure_ceilings", lambda device: ceilings)
    monkeypatch.setattr(core, "measure_cell", measure_cell)
    command = "--cells quick --contenders flash4,fa4 --direction backward --budget-s 0.5 --seed 7"
    arguments = [*command.split(), "--out", str(out)]
    assert run.main([*arguments, "--assert-geomean", "1.19", "--assert-worst", "1.19"]) == 0
    assert written == [False, 1, 2, 3, 4, 5]
    record = report.load(out)
    assert record["complete"] and len(record["ceilings"]) == 2 and record["versions"]["torch"]
    text = capsys.readouterr().out
    assert "geomean 1.200 over 6 cells" in text and "NVIDIA H200" in text
    assert run.main(["--show", str(out), "--assert-geomean", "1.3"]) == 1

    def killed(cell, contenders, bench):
        raise KeyboardInterrupt

    monkeypatch.setattr(core, "measure_cell", killed)
    with pytest.raises(KeyboardInterrupt):
        run.main(arguments)
    assert not report.load(out)["complete"]


def test_sdpa_contender_equals_plain_attention():
    one = baselines.make_inputs(SMALL, 1, "forward", seed=5, device="cpu")[0]

    class Math(baselines.Cudnn):
        backend = "MATH"

    made = Math()
    with made.context():
        results = made.results(made.prepare(SMALL, one)(), "forward")
    assert results[0].shape == (SMALL.batch, SMALL.seqlen, SMALL.heads_q, SMALL.dv)
    theirs = attention(one.q, one.k, one.v, SMALL.causal)
    assert torch.allclose(results[0].float(), theirs.float(), atol=0.05)


def test_host_time_of_a_backward_beyond_the_engine(monkeypatch):
    """What a function does in its backward is found again, in either thread."""
    monkeypatch.setattr(host_time, "CALLS", 20)
    monkeypatch.setattr(host_time, "WARM_UP", 1)
    (one,) = baselines.make_inputs(SMALL, 1, "backward", seed=0, device="cpu")
    alone = host_time.engine_alone(one)
    assert [x.shape for x in alone()] == [x.shape for x in (one.q, one.k, one.v)]

    def call():
        time.sleep(0.01)
        return alone()

    for threads in (False, True):
        for whole, least, most in ((call, 8000, math.inf), (alone, -4000, 4000)):
            own = host_time.own_us(whole, alone, lambda: None, threads)
            assert least < own["median_us"] < most and own.keys() == {"median_us", "min_us"}


def test_host_time_of_a_call_and_its_child():
    ticks = iter(range(1000))
    found = host_time.per_call_us(lambda: None, lambda: None, clock=lambda: next(ticks) * 1e-2)
    assert found == {"median_us": 10.0, "min_us": 10.0}
    assert host_time.parse_child('noise\n{"import_ms": 1}\n[1]\nmore', "", 0) == {"import_ms": 1}
    assert host_time.parse_child("", "x\nboom", 3) == {"error": "exit status 3: x boom"}
