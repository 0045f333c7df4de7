"""Feature cells of the benchmark: what is asked for, what is right, bars and verdicts; on a fake clock."""

import dataclasses
import json
import math

import pytest
import torch

import flash4
from bench import core, feature_calls, features, report
from bench.baselines import FromCallable
from bench.feature_cells import (
    CELLS,
    GROUPS,
    LENGTHS,
    PEER,
    SKEWED,
    USED,
    Arm,
    Bar,
    FeatureCell,
    Problem,
    select,
)
from bench.shapes import Cell
from flash4 import reference
from flash4.sm90 import fwd_config
from tests.host.test_bench import FakeDevice, launch

SMALL = Cell(d=16, dv=16, causal=True, seqlen=300, batch=2, heads_q=4, heads_kv=2)
PROBLEMS = {
    "plain": Problem(SMALL),
    "full": Problem(dataclasses.replace(SMALL, causal=False)),
    "window": Problem(SMALL, window=70),
    "softcap": Problem(SMALL, softcap=1.5),
    "sink": Problem(SMALL, sink=True),
    "alibi": Problem(SMALL, alibi=True),
    "packed": Problem(dataclasses.replace(SMALL, batch=1, seqlen=340), lengths=(300, 3, 37)),
    "used": Problem(dataclasses.replace(SMALL, causal=False), used_k=(300, 40)),
    "all": Problem(SMALL, window=70, softcap=1.5, sink=True, alibi=True),
}
PROBLEMS |= {
    f"{name} backward": dataclasses.replace(PROBLEMS[name], backward=True, deterministic=fixed)
    for name, fixed in (("plain", True), ("full", False), ("all", False), ("packed", False))
}


def exact(problem, x):
    """What flash4's reference makes of a problem, rounded as a kernel's results."""
    keywords = problem.keywords(x)
    keywords.pop("deterministic", None)
    if not problem.backward:
        return (reference.attention(x.q, x.k, x.v, **keywords).to(x.q.dtype),)
    leaves = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    out = reference.attention(*leaves, **keywords)
    gradients = torch.autograd.grad(out, leaves, x.dout.double())
    return tuple(gradient.to(x.q.dtype) for gradient in gradients)


def test_the_cells_are_those_of_the_bars():
    forward = ("varlen", "window", "cost", "dims", "redo", "gemm")
    assert GROUPS == (*forward, "backward-varlen", "backward-cost")
    names = [f"{c.group}/{c.name}" for c in CELLS]
    assert len(set(names)) == len(names)
    assert len(LENGTHS) == 10 and sum(LENGTHS) == 22_185
    assert (min(LENGTHS), max(LENGTHS)) == (33, 8192)
    assert max(SKEWED) >= 1000 * min(SKEWED)
    assert len(USED) == 16 and 100 == min(USED) and max(USED) == 4096
    limits = {name: [b.limit for b in c.bars] for name, c in zip(names, CELLS)}
    varlen = [n for n in limits if n.startswith("varlen/")]
    assert [limits[n][0] for n in varlen if "10seqs" in n and "causal" in n] == [1.10] * 3
    assert limits["backward-varlen/d128-causal-h16-10seqs"] == [1.10]
    assert limits["backward-cost/d128-causal-s8192-b2-h16"] == [1.08, 1.20]
    assert [limits[n] for n in limits if "window" in n] == [[1.20], [1.10]]
    assert limits["cost/d128-causal-s8192-b2-h16"] == [1.12, 1.03, 1.10]
    assert all(limits[n] == [2.2, 2.2] for n in limits if n.startswith("redo/"))
    assert all(limits[n] == [0.97] for n in limits if n.startswith("gemm/"))
    assert sum(n.startswith("dims/") for n in names) == 4
    for cell in CELLS:
        arms = [arm.name for arm in cell.arms]
        assert len(set(arms)) == len(arms)
        for bar in cell.bars:
            assert bar.of in arms and bar.over in (*arms, PEER)


def test_selection_by_group_and_name():
    assert [c.group for c in select("gemm,dims")] == ["dims"] * 4 + ["gemm"] * 2
    name = f"{CELLS[0].group}/{CELLS[0].name}"
    assert select(name) == CELLS[:1]
    for bad in ("", "gemmm", CELLS[0].name):
        with pytest.raises(ValueError, match="groups are"):
            select(bad)


def test_every_cell_asks_flash4_for_a_kernel_and_torch_for_what_it_has(monkeypatch):
    for cell in CELLS:
        asked = {arm.problem for arm in cell.arms if arm.package == "flash4"}
        assert features.kernel_keys([cell], "sm_90a"), cell.name
        for problem in asked:
            x = feature_calls.make_tensors(problem, 1, 0, "meta")[0]
            assert x.q.shape[-2:] == (problem.shape.heads_q, problem.shape.d)
    for arm in (arm for cell in CELLS for arm in cell.arms if arm.package == "fa2"):
        x = feature_calls.make_tensors(arm.problem, 1, 0, "meta")[0]
        assert feature_calls.CALLS["fa2"](arm.problem, x)()[0].shape == x.q.shape

    def refuse(*tensors, **keywords):
        raise NotImplementedError("not yet")

    monkeypatch.setattr(flash4, "explain", refuse)
    assert features.kernel_keys(select("varlen"), "sm_90a") == []


@pytest.mark.parametrize("name", PROBLEMS)
def test_flops_of_a_problem_equal_a_count_of_pairs(name):
    problem = PROBLEMS[name]
    pairs = 0
    for _, _, queries, keys in problem.sequences():
        i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
        if problem.window:
            pairs += 2 * int(((j <= i) & (j > i - problem.window)).sum())
        else:
            pairs += queries * keys * (1 if SMALL.causal and problem.shape.causal else 2)
    both = 2.5 if problem.backward else 1
    assert problem.flops() == both * pairs * problem.shape.heads_q * 2 * problem.shape.d


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_right_result_passes_and_one_that_ignores_a_feature_does_not(name):
    problem = PROBLEMS[name]
    x = feature_calls.make_tensors(problem, 1, 5, "cpu")[0]
    results = exact(problem, x)
    assert feature_calls.mismatch(problem, x, results) is None
    plain = Problem(problem.shape, problem.lengths and (3, 37, 300), backward=problem.backward)
    if name.split()[0] in ("plain", "full"):
        plain = Problem(dataclasses.replace(problem.shape, causal=not problem.shape.causal))
    other = feature_calls.make_tensors(plain, 1, 5, "cpu")[0]
    ignored = exact(plain, dataclasses.replace(other, q=x.q, k=x.k, v=x.v, dout=x.dout))
    assert "off by too much" in feature_calls.mismatch(problem, x, ignored)
    assert "shape" in feature_calls.mismatch(problem, x, (results[0][..., :8],))


def test_whole_gradients_are_compared_with_those_of_a_peer():
    """What the slices of dq do not show: dk and dv."""
    problem = PROBLEMS["packed backward"]
    x = feature_calls.make_tensors(problem, 1, 5, "cpu")[0]
    right, (dq, dk, dv) = exact(problem, x), exact(problem, x)
    fixed = dataclasses.replace(problem, deterministic=True)
    arms = {"fa4": Arm("fa4", problem), "flash4": Arm("flash4", fixed)}
    inputs = {problem: x, fixed: x}

    def wrong(found):
        results = {"fa4": (arms["fa4"], right), "flash4": (arms["flash4"], found)}
        return feature_calls.mismatches(results, inputs)

    assert wrong((dq, dk, dv)) == {}
    dv[200, 1] += 1
    assert "against fa4: dv differs" in wrong((dq, dk, dv))["flash4"]


def test_gradients_are_those_of_a_graph_that_is_built_before():
    problem = PROBLEMS["all backward"]
    x = feature_calls.make_tensors(problem, 1, 5, "cpu")[0]
    contender = feature_calls.FeatureContender(Arm("here", problem))

    def call(problem, x):
        return lambda: (reference.attention(x.q, x.k, x.v, **problem.keywords(x)), None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(feature_calls.CALLS, "here", call)
        timed = contender.prepare(problem.shape, x)
    results = contender.results(timed(), "forward")
    assert [r.shape for r in results] == [t.shape for t in (x.q, x.k, x.v)]
    assert all(torch.equal(a, b) for a, b in zip(results, timed()))


def test_inputs_that_are_to_be_worked_on_twice_are_counted(monkeypatch):
    redo = select("redo")[0]
    monkeypatch.setattr(flash4, "redone_tiles", lambda *x, causal: flash4.interface.Redone(7, 8))
    found = {
        arm.name: feature_calls.FeatureContender(arm).counts(
            feature_calls.make_tensors(arm.problem, 1, 0, "meta")[0]
        )
        for arm in redo.arms
    }
    again = {"redone": 7, "tiles": 8}
    assert found == {"flash4": {}, "flash4 ramp": again, "flash4 peaked": again}
    configs = [config for _, config, _ in features.kernel_keys([redo], "sm_90a")]
    assert [config.counts for config in configs] == [False, True]


def test_problems_that_differ_in_features_share_their_data():
    problems = [PROBLEMS[n] for n in ("plain", "softcap", "sink", "alibi")]
    peaked = dataclasses.replace(PROBLEMS["plain"], data="peaked")
    made = feature_calls.draw_all([*problems, peaked], 2, 1, "cpu")
    q = made[problems[0]][1].q
    assert all(made[p][1].q.data_ptr() == q.data_ptr() for p in problems)
    assert made[peaked][1].q.data_ptr() != q.data_ptr()
    assert made[PROBLEMS["sink"]][0].sink is not None and made[PROBLEMS["plain"]][0].sink is None
    assert not torch.equal(made[problems[0]][0].q, q)


@pytest.mark.parametrize("d", [64, 128])
def test_rows_outgrow_a_shift_that_their_first_keys_set(d):
    """The row sum of P, with the maximum over the last block as its shift, leaves 2^64 behind."""
    shape = Cell(d, d, False, 2048, 1, 2, 2)
    for data, share in (("normal", 0.0), ("ramp", 1.0), ("peaked", 1.0)):
        x = feature_calls.make_tensors(Problem(shape, data=data), 1, 3, "cpu")[0]
        scores = torch.einsum("bqhd,bkhd->bhqk", x.q.double(), x.k.double()) * d**-0.5
        if data == "peaked":
            assert scores.std().item() == pytest.approx(60, rel=0.05)
        if data == "ramp":
            assert scores[..., 0].mean().item() == pytest.approx(1400, rel=0.05)
        log2 = scores / math.log(2)
        growth = log2.amax(-1) - log2[..., -128:].amax(-1)
        outgrown = growth.unflatten(-1, (-1, 128)).amax(-1) > fwd_config.TRUSTED_LOG2
        assert outgrown.double().mean().item() == share, data


# One cell, start to end


def small_cell():
    arms = (
        Arm("flash4", PROBLEMS["plain"]),
        Arm("flash4", PROBLEMS["sink"], "sink"),
        Arm("fa4", PROBLEMS["plain"]),
        Arm("fa2", PROBLEMS["plain"]),
        Arm("gemm", None),
    )
    return FeatureCell("cost", CELLS_OF["cost"], arms, ())


CELLS_OF = {c.group: c.name for c in CELLS}
TIMES = {"flash4": 100.0, "flash4 sink": 103.0, "fa4": 125.0, "fa2": 300.0, "gemm": 50.0}


def fake_bench():
    return core.Bench(FakeDevice(), 1 << 10, "forward", 0.05, seed=1, torch_device="cpu")


def maker(bench, wrong=(), refused=()):
    """From an arm to a contender that computes once on the CPU and advances the fake clock."""

    def make(arm):
        tick = launch(bench.device, [], arm.name, [TIMES[arm.name]])

        class Made(FromCallable):
            def prepare(self, cell, x, direction="forward"):
                if arm.name in refused:
                    raise NotImplementedError("no such feature")
                if arm.problem is None:
                    return lambda: (tick(), torch.zeros(2))[1]
                (out,) = exact(arm.problem, x)
                if arm.name in wrong:
                    out[0, 280, 1] += 1  # beside every slice
                return lambda: (tick(), out)[1]

        made = Made(arm.name, None)
        made.counts = lambda x: {"redone": 3, "tiles": 4} if arm.name == "flash4 sink" else {}
        return made

    return make


def test_a_feature_cell_from_inputs_to_bars():
    bench = fake_bench()
    row = features.measure_feature_cell(small_cell(), bench, maker(bench, refused=("fa2",)))
    status = {name: r["status"] for name, r in row["contenders"].items()}
    assert status == dict.fromkeys(TIMES, "ok") | {"fa2": "refused"}
    assert list(row["contenders"]) == [arm.name for arm in small_cell().arms]
    (counted,) = (line for line in features.lines_of(row) if "tiles twice" in line)
    assert "flash4 sink" in counted and "3 of 4" in counted

    def value(bar):
        return features.quotient(row, bar)

    assert value(Bar("time", "flash4 sink", "flash4", 1.0))[0] == pytest.approx(1.03)
    assert value(Bar("rate", "flash4", PEER, 1.0))[0] == pytest.approx(1.25)
    flops = PROBLEMS["plain"].flops() / (2 * 8192**3)
    assert value(Bar("rate", "flash4", "gemm", 1.0))[0] == pytest.approx(flops / 2)
    assert value(Bar("rate", "flash4", "gemm", 1.0))[1] == pytest.approx(0, abs=1e-9)
    assert value(Bar("rate", "flash4", "fa2", 1.0)) is None
    held, text = features.verdict(row, Bar("time", "flash4 sink", "flash4", 1.02))
    assert not held and text.startswith("MISSED: time of flash4 sink over flash4 1.030 +- 0.000")
    held, text = features.verdict(row, Bar("rate", "flash4", PEER, 1.2))
    assert held and "over fa4 1.250" in text
    assert features.verdict(row, Bar("rate", "flash4", "fa2", 1.0))[1].startswith("no figure")


def test_a_counter_that_fails_costs_no_measurement():
    bench = fake_bench()
    make = maker(bench)

    def failing(arm):
        made = make(arm)
        made.counts = lambda x: 1 / 0
        return made

    row = features.measure_feature_cell(small_cell(), bench, failing)
    assert all(r["status"] == "ok" and r["median_us"] for r in row["contenders"].values())
    assert "not counted: ZeroDivisionError" in features.lines_of(row)[1]


def test_what_is_wrong_beside_every_slice_is_found_against_a_peer():
    bench = fake_bench()
    row = features.measure_feature_cell(small_cell(), bench, maker(bench, wrong=("flash4",)))
    assert row["contenders"]["flash4"]["status"] == "mismatch"
    assert "against fa" in row["contenders"]["flash4"]["error"]
    assert row["contenders"]["flash4 sink"]["status"] == "ok"
    assert "flash4 mismatch" in features.failures({"cells": [row], "complete": True}, False)[0]


def fake_row(cell, **changed):
    """A row of a record in which all arms take TIMES-like times."""
    records, flops = {}, {}
    for arm in cell.arms:
        us = changed.get(arm.name.replace(" ", "_"), 100.0)
        flops[arm.name] = 10**9
        records[arm.name] = {
            "status": "ok", "tflops": 1e3 / us, "median_us": us, "p10_us": us, "p90_us": us,
            "spread": 0.0, "dry_bursts": 0, "first_call_s": 1.0, "round_medians_us": [us, us, us],
        }  # fmt: skip
    clocks = {"sm_mhz": 1755.0, "watts": 640.0}
    return {
        "group": cell.group, "cell": cell.name, "contenders": records, "flops": flops,
        "clocks": clocks,
    }  # fmt: skip


def test_asserted_bars_set_the_exit_status(tmp_path, capsys):
    cost = select("cost")[0]
    good = fake_row(cost, flash4_softcap=111.0, flash4_sink=102.0, flash4_alibi=109.0)
    results = {"schema": report.SCHEMA, "kind": features.KIND, "cells": [good], "complete": True}
    path = tmp_path / "record.json"

    def shown(*arguments):
        path.write_text(json.dumps(results))
        status = features.main(["--show", str(path), *arguments])
        return status, capsys.readouterr()

    status, text = shown("--assert")
    assert status == 0 and text.out.count("holds: time of flash4") == 3 and "1755" in text.out
    results["cells"] = [fake_row(cost, flash4_softcap=111.0, flash4_sink=104.0)]
    assert shown()[0] == 0
    status, text = shown("--assert")
    assert status == 1 and "MISSED: time of flash4 sink over flash4 1.040" in text.err
    results["cells"] = [fake_row(cost)]
    results["cells"][0]["contenders"]["flash4 alibi"] = {"status": "refused", "error": "not yet"}
    status, text = shown()
    assert status == 1 and "flash4 alibi refused: not yet" in text.err
    results["cells"] = [fake_row(select("dims")[0])]
    results["cells"][0]["contenders"]["fa4"] = {"status": "absent", "error": "not here"}
    assert shown()[0] == 0
    status, text = shown("--assert")
    assert status == 1 and "no figure: rate of flash4 over best peer >= 1.00" in text.err
    results |= {"cells": [good], "complete": False}
    status, text = shown("--assert")
    assert status == 1 and "did not finish" in text.err
    results["kind"] = "other"
    assert shown()[0] == 2


def test_the_command_without_a_gpu(capsys, monkeypatch):
    assert features.main(["--list"]) == 0
    assert capsys.readouterr().out.count("\n") == len(CELLS)
    assert features.main(["--cells", "nonsense"]) == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert features.main(["--cells", "dims"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    for arm in (arm for cell in CELLS for arm in cell.arms):
        assert feature_calls.FeatureContender(arm).available() == "no CUDA device"


def test_the_whole_command_on_a_pretended_gpu(tmp_path, capsys, monkeypatch):
    out = tmp_path / "record.json"
    bench = fake_bench()
    rows = iter([fake_row(c) for c in select("dims")])

    def measured(cell, bench):
        row = next(rows)
        if cell.name.startswith("d80"):
            raise MemoryError("none left")
        return row

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(core, "bench_here", lambda *a: bench)
    monkeypatch.setattr(
        features.provenance, "gpu", lambda: {"name": "NVIDIA H200", "capability": "9.0"}
    )
    monkeypatch.setattr(features, "measure_feature_cell", measured)
    arguments = ["--cells", "dims", "--workers", "0", "--out", str(out)]
    assert features.main(arguments) == 1
    record = features.load(out)
    assert record["complete"] and len(record["cells"]) == 4 and record["versions"]["torch"]
    text = capsys.readouterr()
    assert "MemoryError" in text.err and "holds: rate of flash4 over fa4 1.000" in text.out
    rows = iter([fake_row(c) for c in select("dims")])
    assert features.main([*arguments, "--limit-s", "0"]) == 0
    assert not features.load(out)["complete"] and features.load(out)["cells"] == []

    def lost(cell, bench):
        raise features.DeviceLost("flash4: gone")

    monkeypatch.setattr(features, "measure_feature_cell", lost)
    assert features.main(arguments) == 1
    assert "device lost" in capsys.readouterr().err
