"""HBM traffic of the forward: reading what ncu prints, compulsory bytes, bars; no GPU and no ncu."""

import json
import subprocess
import sys
import types

import pytest
import torch

import flash4
from bench import baselines, report, traffic
from bench.ncu import launches
from bench.shapes import Cell, select

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def ncu_prints(*rows):
    """Output of `ncu --csv` for (id, metric, unit, value) rows, with its messages and the program's around."""
    lines = [
        "==PROF== Connected to process 4711 (/usr/bin/python3.12)",
        "chatter, of the program",
        HEAD,
    ]
    for number, metric, unit, value in rows:
        lines.append(
            f'"{number}","4711","python3.12","127.0.0.1","kernel_cutlass_ForwardSm90","1","7",'
            f'"(384, 1, 1)","(132, 1, 1)","0","9.0","Command line profiler metrics",'
            f'"{metric}","{unit}","{value}"'
        )
    return "\n".join([*lines, "==PROF== Disconnected from process 4711"])


def test_units_thousands_and_order_of_launches():
    text = ncu_prints(
        (1, traffic.READ, "Mbyte", "201.5"),
        (0, traffic.READ, "byte", "201,326,592"),
        (0, traffic.WRITTEN, "byte", "68,000,000"),
        (1, traffic.WRITTEN, "Gbyte", "0.07"),
    )
    first, second = launches(text)
    assert first == {traffic.READ: 201_326_592, traffic.WRITTEN: 68_000_000}
    assert second[traffic.READ] == pytest.approx(201.5e6)
    assert second[traffic.WRITTEN] == pytest.approx(70e6)
    assert launches("==ERROR== nothing\n") == []
    with pytest.raises(ValueError, match="'n/a' for dram"):
        launches(ncu_prints((0, traffic.READ, "", "n/a")))


def test_compulsory_bytes_are_those_of_the_tensors():
    cell = Cell.parse("d192x128-causal-s96-b3-h8x2")
    q, k, v, out = (
        torch.empty(3, 96, heads, dim, dtype=torch.bfloat16)
        for heads, dim in ((8, 192), (2, 192), (2, 128), (8, 128))
    )
    read = sum(x.nbytes for x in (q, k, v))
    assert traffic.compulsory(cell) == (read, out.nbytes + 3 * 8 * 96 * 4)


def test_the_cells_go_from_1k_to_32k():
    for causal in (False, True):
        mine = [c for c in traffic.CELLS if c.causal == causal]
        assert [c.seqlen for c in mine] == [1024 << n for n in range(6)]
        assert all(c.seqlen * c.batch == 16384 for c in mine[:-1])
        assert (mine[-1].batch, mine[-1].heads_q) == (1, 8)


def rows(read=lambda cell: 1.0, written=lambda cell: 1.0):
    """Rows with so many times the compulsory bytes."""
    found = []
    for cell in traffic.CELLS:
        least = traffic.compulsory(cell)
        metrics = {traffic.READ: least[0] * read(cell), traffic.WRITTEN: least[1] * written(cell)}
        found.append(traffic.row_of(cell, metrics))
    return found


def test_bars_on_bytes_and_on_their_growth():
    assert traffic.failures({"cells": rows(lambda c: 1.1, lambda c: 0.6)}) == []
    found = traffic.failures(
        {"cells": rows(lambda c: 1.2 if c.name == "d128-full-s4096-b4-h16" else 1)}
    )
    assert len(found) == 1 and "read 1.200" in found[0] and "s4096" in found[0]
    assert "written 1.300" in traffic.failures({"cells": rows(written=lambda c: 1.3)})[0]
    # Within 15 % everywhere, but growing with S: 1.00 to 1.15 over five doublings of 3 %.
    growing = rows(lambda c: 0.98 * (c.seqlen / 1024) ** 0.04 if c.causal else 1)
    assert traffic.failures({"cells": growing}) == []
    found = traffic.failures({"cells": rows(lambda c: 0.95 * (c.seqlen / 1024) ** 0.055)})
    assert len(found) == 2 and "S^1.055" in found[0] and "causal" in found[1]
    assert traffic.exponent(rows()[:1]) is None
    assert traffic.failures({"cells": []}) == ["no cells"]


def pretend_ncu(monkeypatch, stdout="", stderr="", status=0):
    """Let the profiler print this; returns the commands that it was asked for."""
    asked = []

    def run(words, **keywords):
        asked.append(words)
        if status is None:
            raise subprocess.TimeoutExpired(words, keywords["timeout"])
        return subprocess.CompletedProcess(words, status, stdout, stderr)

    monkeypatch.setattr(traffic.subprocess, "run", run)
    monkeypatch.setattr(traffic.shutil, "which", lambda name: f"/opt/{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(traffic.provenance, "gpu", lambda: {"name": "NVIDIA H200"})
    return asked


def test_the_whole_command_with_a_pretended_profiler(tmp_path, capsys, monkeypatch):
    cell = Cell.parse("d128-full-s1024-b16-h16")
    read, written = traffic.compulsory(cell)
    text = ncu_prints(
        (0, traffic.READ, "byte", f"{round(1.02 * read):,}"),
        (0, traffic.WRITTEN, "byte", f"{round(1.3 * written):,}"),
    )
    monkeypatch.setenv("FLASH4_COMMIT", "abc")
    asked = pretend_ncu(monkeypatch, text)
    out = tmp_path / "record.json"
    arguments = ["--cells", cell.name, "--out", str(out)]
    assert traffic.main(arguments) == 0
    words = asked[-1]
    assert words[0] == "/opt/ncu" and words[-2:] == ["--calls", cell.name]
    assert words[words.index(sys.executable) + 1 :][:2] == ["-m", "bench.traffic"]
    assert words[words.index("--cache-control") + 1] == "all"
    assert words[words.index("--clock-control") + 1] == "none"
    printed = capsys.readouterr()
    assert "1.020" in printed.out and "1.300" in printed.out and "missed: d128" in printed.err
    assert traffic.main(["--show", str(out), "--assert"]) == 1
    assert "FAIL d128-full-s1024-b16-h16: written 1.300" in capsys.readouterr().err
    assert traffic.load(out)["cells"][0]["compulsory_read"] == read
    out.write_text(json.dumps({"schema": report.SCHEMA, "kind": "features"}))
    assert traffic.main(["--show", str(out)]) == 2


@pytest.mark.parametrize(
    ("stdout", "stderr", "status", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", "", 0, "ERR_NVGPUCTRPERM"),
        ("", "ImportError: no flash4", 1, "exit status 1: ImportError"),
        (ncu_prints((0, traffic.READ, "byte", "1")), "", 0, "saw 1 launches of 12 calls"),
        ("", "", None, "timed out"),
    ],
)
def test_what_a_profiler_that_fails_says(stdout, stderr, status, message, capsys, monkeypatch):
    pretend_ncu(monkeypatch, stdout, stderr, status)
    assert traffic.main([]) == 2
    assert message in capsys.readouterr().err


def test_without_a_profiler_or_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(traffic.shutil, "which", lambda name: None)
    assert traffic.main([]) == 2
    assert "no ncu here" in capsys.readouterr().err
    pretend_ncu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert traffic.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_one_call_of_each_cell_is_profiled(monkeypatch):
    log = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: log.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: log.append("stop"))
    monkeypatch.setattr(
        baselines, "make_inputs", lambda cell, *a, **k: [types.SimpleNamespace(q=cell, k=0, v=0)]
    )
    monkeypatch.setattr(flash4, "flash_attn_func", lambda q, k, v, causal: log.append((q, causal)))
    assert traffic.main(["--calls", "d64"]) == 0
    cells = select("d64")
    assert log == [x for c in cells for x in ((c, c.causal), "start", (c, c.causal), "stop")]
