"""The clock: how work shares units, what a run takes, and how far its predictions are from an H200."""

import json
import re
import statistics
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import predict
from bench.shapes import Cell
from flash4.common.tiles import grid_of
from flash4.sim import draw
from flash4.sim.chips import H200, UNITS
from flash4.sim.clock import Activity, ClockedMachine, Span, Work, share
from flash4.sim.machine import Deadlock
from flash4.sim.mutants import sm90_fwd_mutants
from flash4.sim.rings import End, Ring
from flash4.sim.sm90_fwd_clock import MmaShape, ops, time_forward
from flash4.sim.timing import critical_path
from tests.host.test_sim import Spec
from tests.source_tree import ROOT

RESULTS = ROOT / "bench" / "results"
MICRO = json.loads((RESULTS / "2026-11-29-h200-micro.json").read_text())
CELLS = json.loads((RESULTS / "2026-11-29-h200-predict.json").read_text())


def speeds(*works: Work) -> list[float]:
    """Speeds of works side by side."""
    activities = [Activity(work, print, work.cycles) for work in works]
    share(activities)
    return [a.speed for a in activities]


def work(cycles=10.0, **use) -> Work:
    return Work("work", cycles, {unit: cycles * part for unit, part in use.items()})


def test_sharing():
    assert speeds(work(mufu=0.5)) == [1]
    assert speeds(work(mufu=0.5), work(mufu=0.5), work(alu=1)) == [1, 1, 1]
    assert speeds(work(mufu=1), work(5.0, mufu=1)) == [0.5, 0.5]
    assert speeds(work(mufu=1), work(mufu=1, alu=1), work(alu=0.5)) == [0.5, 0.5, 1]
    assert speeds(work(tensor=1), work(tensor=1), work(mufu=1)) == [1, 0, 1], "one at a time"


works = st.builds(
    lambda cycles, use: Work("work", cycles, {u: cycles * x for u, x in use.items()}),
    st.floats(1, 1000),
    st.dictionaries(st.sampled_from(UNITS), st.floats(0.01, 1), min_size=1),
)


@given(st.lists(works, min_size=1, max_size=7))
def test_no_unit_does_more_than_it_can_and_nobody_is_held_up_for_nothing(found):
    activities = [Activity(work, print, work.cycles) for work in found]
    share(activities)
    load = Counter()
    for a in activities:
        assert 0 <= a.speed <= 1
        for unit, amount in a.work.use.items():
            load[unit] += a.speed * amount / a.work.cycles
    assert all(amount <= 1 + 1e-6 for amount in load.values())
    for a in activities:
        full = any(load[unit] > 1 - 1e-6 for unit in a.work.use)
        queues = "tensor" in a.work.use and a.speed == 0
        assert a.speed > 1 - 1e-6 or full or queues


def clocked(*roles):
    """Run roles that get the machine; returns it."""
    machine = ClockedMachine(H200)
    for i, role in enumerate(roles):
        machine.spawn(f"role {i}", role, machine)
    machine.run()
    return machine


def test_work_side_by_side_takes_as_long_as_the_longest():
    def role(cycles, **use):
        return lambda machine: machine.spend(work(cycles, **use))

    assert clocked(role(100, mufu=1), role(70, alu=1)).now == pytest.approx(100)
    assert clocked(role(100, mufu=1), role(70, mufu=1)).now == pytest.approx(170)
    machine = clocked(role(100, mufu=0.6), role(100, mufu=0.6))
    assert machine.now == pytest.approx(120)
    assert machine.busy["mufu"] == pytest.approx(120)


def ring_run(producer, consumer):
    machine = ClockedMachine(H200)
    ring = Ring(machine, Spec(stage_bytes=3540), 1)
    machine.spawn("load", producer, machine, End(ring))
    machine.spawn("mma", consumer, machine, End(ring))
    machine.run()
    return machine


def produce(machine, end):
    for _ in range(10):
        slot = end.acquire_and_advance()
        slot.fill(torch.zeros(1, 1).numpy(), 3540)
        slot.commit()


def test_a_ring_runs_at_the_pace_of_its_slower_end():
    def consume(cycles):
        def role(machine, end):
            for _ in range(10):
                slot = end.wait_and_advance()
                machine.spend(work(cycles, alu=1))
                slot.release()

        return role

    copy = 3540 / H200.fill_bytes
    slow = ring_run(produce, consume(2000)).now
    begin = H200.poll + copy + H200.copy_latency + H200.mbarrier
    assert slow == pytest.approx(begin + 10 * 2000 + 9 * H200.poll, rel=0.01)
    fast = ring_run(produce, consume(1)).now
    assert fast == pytest.approx(begin + 9 * (copy + H200.copy_latency + 83 + 83) / 2, rel=0.2)


def test_a_deadlock_is_told():
    def forget(machine, end):
        for _ in range(10):
            end.wait_and_advance()

    with pytest.raises(Deadlock, match="load waits for .* k empty"):
        ring_run(produce, forget)


def rows(**wanted):
    """Rows of the recorded streams."""
    return [r for r in MICRO["streams"] if all(r[k] == v for k, v in wanted.items())]


def rate(kind, warpgroups):
    (row,) = rows(mma_warpgroups=0, op_warpgroups=warpgroups, kind=kind)
    return row["ops_per_cycle"]


def test_rates_are_those_that_were_measured():
    close = pytest.approx
    assert H200.mufu * 128 == close(rate("mufu", 2), rel=0.01)
    assert H200.alu * 128 == close(rate("max3", 2), rel=0.01)
    assert H200.alu * 128 == close(rate("pack", 2), rel=0.01)
    assert H200.fma * 128 == close(rate("fma", 2), rel=0.01)
    assert H200.alone["fma"] == close(rate("fma", 1) / rate("fma", 2), rel=0.02)
    assert H200.alone["alu"] == close(rate("max3", 1) / rate("max3", 2), rel=0.02)
    assert H200.alone["mufu"] == close(rate("softmax", 1) / rate("softmax", 2), rel=0.02)
    assert H200.alone["issue"] == close(rate("fma", 1) / 128, rel=0.02)
    for unit, kind in (("mufu", "mufu"), ("alu", "max3")):
        (row,) = rows(mma_warpgroups=2, op_warpgroups=2, kind=kind)
        lost = 1 - row["ops_per_cycle"] / rate(kind, 2)
        assert H200.mma_beside[unit] == close(lost, abs=0.02)
    for row in MICRO["handoffs"]:
        if not row["alone"]:
            measured = H200.mbarrier if row["mbarrier"] else H200.named_barrier
            assert measured == close(row["cycles"], rel=0.01)
    copies = {(r["flying"], r["ctas"]): r for r in MICRO["copies"]}
    assert H200.fill_bytes == close(copies[8, 132]["bytes_per_cycle"], rel=0.01)
    one = copies[1, 132]
    assert H200.copy_latency == close(one["cycles_per_round"] - 16384 / H200.fill_bytes, rel=0.02)
    assert H200.first_copy == close(
        one["cycles_of_first_round"] - one["cycles_per_round"], rel=0.02
    )
    assert H200.launch_us == close(MICRO["launch"]["empty_us"], rel=0.01)
    assert H200.mma_mhz == close(
        statistics.median(r["mhz"] for r in MICRO["streams"] if r.get("mma_rate", 0) > 0.5),
        rel=0.01,
    )


# Two warpgroups that multiply keep the tensor cores busy. With 256 columns they lose more to the softmax than the rule
# says (0.70 of the full rate, for 0.86); one alone loses what it says.
SATURATED = [
    r
    for r in rows(kind="softmax", op_warpgroups=1)
    if r["mma_warpgroups"] == (1 if r["n"] == 256 else 2)
]


@pytest.mark.parametrize(
    "row", SATURATED, ids=lambda r: f"{r['n']} x {r['steps']} {r['a_in_registers']}"
)
def test_sharing_gives_what_streams_beside_mmas_gave(row):
    """Two warpgroups multiply, one runs a softmax: MMAs and softmax slow each other down as measured."""
    shape = MmaShape(row["n"], row["steps"], row["a_in_registers"])
    mma = shape.work(H200, "mma")
    softmax = ops(H200, "softmax", fma=4, alu=2, mufu=2)
    mma_speed, op_speed = speeds(mma, softmax)
    per_cycle = 128 * op_speed / softmax.cycles
    assert mma_speed == pytest.approx(row["mma_rate"], rel=0.15)
    assert per_cycle == pytest.approx(row["ops_per_cycle"], rel=0.15)


def test_predictions_against_an_h200():
    """Rates from microbenchmarks, counts from machine code, nothing from these cells."""
    times, cycles = predict.errors(CELLS)
    assert len(times) == len(cycles) == 12
    assert statistics.median(map(abs, times)) <= 0.10 and max(map(abs, times)) <= 0.20
    assert statistics.median(map(abs, cycles)) <= 0.05 and max(map(abs, cycles)) <= 0.10


@pytest.mark.parametrize(
    "row", [r for r in CELLS["cells"] if "s2048" in r["cell"]], ids=lambda r: r["cell"]
)
def test_instructions_are_those_that_were_counted(row):
    """All MMA warps of the busiest worker, against the share that a worker has of the profiler's count."""
    timing = predict.predict(row)
    plan = predict.planned(Cell.parse(row["cell"]), row["config"])
    schedule = plan.schedule(H200.sms)
    total = sum(t.n_blocks + 1 for mine in schedule.workers() for t in mine)
    mine = max(sum(t.n_blocks + 1 for t in worker) for worker in schedule.workers())
    counted = row["instructions"] * mine / total / 4  # of one quarter of its SM
    assert timing.machine.busy["issue"] == pytest.approx(counted, rel=0.15)


def small(**options):
    """Timing of a small call, with options of the cell."""
    cell = Cell(**{"d": 128, "dv": 128, "causal": False, "seqlen": 1024, "batch": 8, "heads_q": 16,
                   "heads_kv": 16, **options})  # fmt: skip
    return time_forward(predict.planned(cell), H200)


def test_fewer_stages_and_a_dropped_turn_take_time():
    plan = predict.planned(Cell(128, 128, False, 1024, 8, 16, 16))
    one = time_forward(replace(plan, config=replace(plan.config, stages=1)), H200)
    assert one.cycles > 1.2 * small().cycles


def test_tiles_that_ctas_share_take_all_multiprocessors():
    """As many rows and blocks for each CTA: without the traffic to L2, which is not modelled, nothing is gained."""
    plan = predict.planned(Cell(256, 256, False, 4096, 4, 8, 8))
    assert plan.config.cluster == 2
    alone = replace(plan.config, cluster=1, tile_m=128)
    alone = replace(plan, config=alone, grid=grid_of(plan.problem, alone.tile_q, 1))
    shared, one = time_forward(plan, H200), time_forward(alone, H200)
    used = [x.multiprocessors_of(H200.sms) for x in (plan, alone)]
    assert [shared.workers, one.workers] == used == [128, 128], "16 waves, as with 132"
    assert shared.cycles == pytest.approx(one.cycles, rel=0.02)


def test_a_mutated_schedule_runs_under_the_clock():
    mutants = [m for m in sm90_fwd_mutants() if "swap turn.pass_on()" in m.name]
    plan = predict.planned(Cell(128, 128, False, 1024, 8, 16, 16))
    for mutant in mutants:
        assert time_forward(plan, H200, mutant.build().roles).cycles > 0
    assert mutants


def test_critical_path_of_a_chain():
    """One producer and one consumer that always wait for each other: the path is all there is."""
    timing = small(batch=1, heads_q=1, heads_kv=1, seqlen=256)
    path = critical_path(timing.machine.spans)
    assert sum(path.values()) == pytest.approx(timing.cycles, rel=0.02)
    assert {"S = Q K^T", "O += P V", "exponentials"} <= path.keys()
    spans = [
        Span("a", "first", 0, 10),
        Span("b", "a", 0, 13, waits=True, cause=("a", 10)),
        Span("b", "second", 13, 20),
    ]
    assert critical_path(spans) == {"second": 7, "until others know": 3, "first": 10}


def test_a_window_counts_what_it_shows():
    cell = Cell(128, 128, False, 1024, 1, 1, 1)
    plan = predict.planned(cell)
    config = replace(plan.config, left=True, right=True, fixed_shift=False)
    timing = time_forward(replace(plan, config=config), H200, window=(100, 20))
    pairs = sum(min(i + 20, 1023) - max(i - 100, 0) + 1 for i in range(1024))
    assert timing.flops == 2 * pairs * 256
    assert timing.cycles < time_forward(plan, H200).cycles


def test_every_cycle_of_a_role_is_work_or_waiting():
    timing = small(causal=True)
    for name in ("mma[0]", "mma[1]"):
        mine = sorted((s.begin, s.end) for s in timing.machine.spans if s.row == name)
        assert mine[0][0] == 0
        for (_, end), (begin, _) in zip(mine[:-1], mine[1:]):
            assert begin == pytest.approx(end, abs=1e-3)


def test_tensor_cores_serve_one_at_a_time():
    mmas = sorted((s.begin, s.end) for s in small().machine.spans if "tensor core" in s.row)
    assert len(mmas) > 100
    assert all(later[0] >= earlier[1] - 1e-3 for earlier, later in zip(mmas[:-1], mmas[1:]))


def test_chart_and_trace(tmp_path):
    timing = small()
    text = draw.chart(timing.machine.spans, 5000, 9000, 80)
    lines = text.splitlines()
    assert [line[:13].strip() for line in lines[:4]] == ["load", "mma[0]", "mma[1]", "tensor cores"]
    assert all(len(line) == 13 + 82 for line in lines[:4])
    assert re.search("[SO]{20}", lines[3]) and "S S = Q K^T" in lines[-1]
    draw.trace(timing.machine.spans, tmp_path / "trace.json", timing.mhz)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"}
    assert len([e for e in events if e["ph"] == "X"]) == len(timing.machine.spans)
    assert any("fwd_roles.py" in e["args"].get("line", "") for e in events)
    ends = {}
    for e in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        assert e["ts"] >= ends.get(e["tid"], 0) - 1e-6, "two at a time on one thread"
        ends[e["tid"]] = e["ts"] + e["dur"]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_gantt(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    timing, path = small(), tmp_path / f"chart.{suffix}"
    draw.gantt(timing.machine.spans, path, 5000, 9000, "a title")
    content = path.read_bytes()
    assert len(content) > 5000
    if suffix == "svg":
        for word in ("a title", "mma[1]", "tensor cores", "exponentials", "TMA K"):
            assert word.encode() in content
        again = tmp_path / "again.svg"
        draw.gantt(timing.machine.spans, again, 5000, 9000, "a title")
        assert again.read_bytes() == content
