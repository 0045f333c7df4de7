"""The command line: each command once in a process of its own, its answers to other options in this one."""

import os
import re
import subprocess
import sys

import pytest
import torch

from flash4 import cli, demo
from flash4.dispatch import choose_section
from flash4.sim import rings, sm90_fwd
from flash4.sim.chips import H200
from flash4.sm90.fwd_config import ForwardConfig
from tests.source_tree import ROOT


def output(*command, timeout=60) -> str:
    """Standard output of a Python command that must succeed and stay silent on the other stream."""
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert not result.stderr, result.stderr
    return result.stdout


@pytest.fixture
def refused(capsys, monkeypatch):
    """Run a command here that must fail with status 2; returns what it says."""

    def run(*arguments) -> str:
        monkeypatch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as exit_:
            cli.main([str(argument) for argument in arguments])
        assert exit_.value.code == 2
        return capsys.readouterr().err

    return run


def test_help_names_the_commands():
    text = output("-m", "flash4", "--help")
    for command in (
        "demo",
        "explain",
        "describe",
        "sass",
        "simulate",
        "time",
        "mutants",
        "selftest",
    ):
        assert re.search(rf"^    {command} +\w", text, re.M), text


def test_explain():
    text = output("-m", "flash4", "explain", "--batch", 2, "--seqlen-q", 1000, "--seqlen-k", 3000,
                  "--heads", 12, "--heads-kv", 4, "--head-dim", 192, "--head-dim-v", 128,
                  "--dtype", "fp16", "--causal")  # fmt: skip
    assert "sm90-fwd for sm_90a: batch 2, queries 1000, keys 3000, heads 12/4" in text
    assert "head dim 192/128, float16, causal" in text
    assert "bf16=False" in text and "because" in text and "copies nothing" in text


FEATURES = ("--window-left", "70", "--window-right", "9", "--softcap", "5", "--sink", "--alibi")


def test_features_are_options(capsys):
    call = ("--batch", "1", "--seqlen", "200", "--heads", "2", "--head-dim", "64", *FEATURES)
    assert cli.main(["explain", *call]) == 0
    text = capsys.readouterr().out
    assert "window at the left, window at the right, softcap, sink, alibi" in text
    for kernel in ("sm90-fwd", "sm100-fwd"):
        assert cli.main(["simulate", kernel, *call]) == 0
        text = capsys.readouterr().out
        assert "hazards: none" in text and text.count(" ok\n") == 1


def test_the_blackwell_kernel(capsys, refused):
    """Explained, described, simulated and timed."""
    call = ("--batch", "1", "--seqlen", "300", "--heads", "2", "--head-dim", "64", "--causal")
    assert cli.main(["explain", *call, "--arch", "sm_100a"]) == 0
    assert "sm100-fwd for sm_100a" in capsys.readouterr().out
    assert cli.main(["describe", "sm100-fwd", *call]) == 0
    assert "p0         64..127  over s0" in capsys.readouterr().out
    assert cli.main(["simulate", "sm100-fwd", *call]) == 0
    text = capsys.readouterr().out
    assert "hazards: none" in text and text.count(" ok\n") == 1
    assert "time on an B200 (model): " in text
    assert cli.main(["time", "sm100-fwd", *call, "--set", "poly=8"]) == 0
    text = capsys.readouterr().out
    assert "tensor cores |" in text and "softmax1     |" in text
    wide = (*call, "--head-dim-v", "256")
    for name in ("simulate", "time"):
        assert cli.main([name, "sm100-fwd", *wide]) == 0
    mutant = ("--mutant", "wide mma: drop s_signal.post(following)")
    assert cli.main(["simulate", "sm100-fwd", *wide, *mutant]) == 1
    assert "a deadlock" in capsys.readouterr().out
    text = refused("simulate", "sm100-fwd", *call, *mutant)
    assert "is of other roles than those of this call's config" in text
    wider = (*call, "--head-dim-v", "264")
    assert "head_dim of v is 264; supported are multiples of 8 up to 256" in refused(
        "describe", "sm100-fwd", *wider
    )


def test_options_default_to_one_another(capsys):
    assert cli.main(["explain", "--seqlen-q", "300", "--heads", "6", "--head-dim", "64"]) == 0
    assert "queries 300, keys 300, heads 6/6, head dim 64/64" in capsys.readouterr().out


@pytest.mark.parametrize("command", [(), ("nothing",), ("describe",), ("describe", "sm10-fwd")])
def test_wrong_usage(command, refused):
    assert "usage: python -m flash4" in refused(*command)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--head-dim", 100), "head_dim of q and k is 100; supported are multiples of 8"),
        (("--heads", 5, "--heads-kv", 2), "query heads must be a multiple of KV heads"),
        (("--arch", "sm_35"), "sm90-fwd: runs on sm_90a, not sm_35"),
        (("--seqlen-q", 0), "an empty problem"),
    ],
)
def test_what_cannot_be_served_is_one_line(options, message, refused):
    said = refused("explain", *options)
    assert message in said and said.count("\n") == 1


DESCRIBE = """
import sys
from flash4.cli import main
assert main(["describe", "sm90-fwd", "--head-dim", "256", "--causal", "--softmax-scale", "-1"]) == 0
heavy = {"cutlass", "greenlet", "flash4.sim"} & set(sys.modules)
assert not heavy, f"imported {heavy}"
"""


def test_describe_needs_no_dsl():
    text = output("-c", DESCRIBE)
    for fact in (
        "sm90-fwd for sm_90a: flash4.sm90.fwd:ForwardSm90",
        "  tile_d   256",
        "  causal   True",
        "  negate   True",
        "  load --[q x1 tma->warps]--> mma",
        "of 64512",
        "  o_parts  2",
        "with barriers",
    ):
        assert fact in text, text


def test_sass(tmp_path):
    folder = tmp_path / "made" / "here"
    text = output("-m", "flash4", "sass", "sm90-fwd", "--head-dim", 64, "--dump-dir", folder)
    for name in ("registers at launch", "instructions", "HGMMA", "WARPGROUP.DEPBAR", "MUFU.EX2"):
        assert int(re.search(rf"^{re.escape(name)} +(\d+)$", text, re.M)[1]) > 0, text
    for name in ("LDL", "STL"):
        assert re.search(rf"^{name} +0$", text, re.M), text
    assert re.search(r"^MMAs serialised +no$", text, re.M), text
    names = {path.name for path in folder.iterdir()}
    assert names == {"sm90-fwd.ptx", "sm90-fwd.cubin", "sm90-fwd.sass"}
    assert "HGMMA" in (folder / "sm90-fwd.sass").read_text("utf-8")


def test_sass_without_its_tool_says_what_to_install(monkeypatch, refused):
    monkeypatch.setattr("flash4.jit.inspect.NVDISASM_PACKAGE", "no-such-package")
    monkeypatch.setenv("PATH", "")
    assert "pip install no-such-package" in refused("sass", "sm90-fwd")


def test_simulate():
    text = output("-m", "flash4", "simulate", "sm90-fwd", "--seqlen", 1024, "--head-dim", 128,
                  "--causal", "--seed", 3)  # fmt: skip
    for pattern in (
        r"^hazards: none",
        r"^  against float64: largest error \S+, allowed \S+ .* ok$",
        r"^load( +\d+){6}$",
        r"^mma\[1\]( +\d+){6}$",
        r"^  load +mma\[0\] +mma\[1\] +lands$",
        r"^  issue k\[0\] #1$",
        r"^ +-> k empty\[0\]$",
    ):
        assert re.search(pattern, text, re.M), text


def test_simulate_every_order(capsys):
    arguments = ["simulate", "sm90-fwd", "--seqlen", "200", "--head-dim", "128", "--ctas", "1"]
    arguments += ["--set", "stages=1", "--set", "q_stages=1"]
    assert cli.main([*arguments, "--exhaustive", "--rows", "5"]) == 0
    assert re.search(r"every order of CTA 0: \d{4,} states, no hazard", capsys.readouterr().out)


def test_simulate_tells_the_story_of_a_hazard(monkeypatch, capsys):
    monkeypatch.setattr(sm90_fwd.MmaOps, "wait_mma", lambda *_: None)
    assert cli.main(["simulate", "sm90-fwd", "--seqlen", "200", "--rows", "9"]) == 1
    said = capsys.readouterr().out
    assert "HAZARD in CTA 0, a hazard:\n  race on S of mma[" in said
    assert "the last steps before it\n  load" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without a GPU sees")
def test_time(tmp_path):
    trace, picture = tmp_path / "trace.json", tmp_path / "chart.png"
    text = output("-m", "flash4", "time", "sm90-fwd", "--seqlen", 512, "--causal", "--cycles", "2000:4000",
                  "--set", "stages=1", "--trace", trace, "--draw", picture)  # fmt: skip
    assert "changed: stages=1" in text and "stages=1" in text.splitlines()[0]
    assert re.search(
        r"time on an H200 \(model\): \d+ cycles, [\d.]+ us at \d+ MHz, \d+ TFLOP/s", text
    )
    assert re.search(r"^  busy: .*tensor \d+%", text, re.M) and "critical path: " in text
    assert re.search(r"^mma\[1\] +\|.{100}\|$", text, re.M) and "cycles 2000 to 4000" in text
    assert trace.stat().st_size > 1000 and picture.stat().st_size > 1000


def test_other_roles(tmp_path, capsys):
    """A copy of the roles runs as they do; with a wait taken out the simulator tells its line."""
    source = (ROOT / "flash4" / "sm90" / "fwd_roles.py").read_text()
    roles = tmp_path / "mine.py"
    roles.write_text(source)
    command = ["simulate", "sm90-fwd", "--seqlen", "300", "--roles", str(roles)]
    assert cli.main(command) == 0
    assert f"changed: roles of {roles}" in capsys.readouterr().out
    assert "ops.wait_mma(1)" in source
    roles.write_text(source.replace("ops.wait_mma(1)", "pass"))
    assert cli.main(command) == 1
    assert re.search(r"race on S of .*mine\.py:\d+", capsys.readouterr().out, re.S)
    assert cli.main([*command[:4], "--mutant", "mma: drop ops.wait_mma(1)"]) == 1
    assert "changed: mma: drop ops.wait_mma(1) (line" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--set", "stage=1"), "'stage' cannot be set; tile_m, tile_n, stages"),
        (("--set", "causal=True"), "'causal' cannot be set; tile_m, tile_n, stages"),
        (("--set", "tile_m"), "'tile_m' sets nothing; write tile_m=VALUE"),
        (("--set", "settle=65"), "settle is 65; supported are 0 to 64"),
        (("--set", "turns=1"), "turns is True or False, not '1'"),
        (("--set", "stages=many"), "invalid literal"),
        (("--set", "tile_m=100"), "tile_m is 100; supported are 64, 128"),
        (("--mutant", "drop k_slot.release()"), "mma: drop k_slot.release() #2 (line"),
        (("--set", "stages=9"), "bytes of shared memory with barriers; a CTA has 232448"),
        (("--mutant", "nonsense"), "no mutant"),
        (("--roles", "/nowhere.py"), "nowhere.py"),
        (("--cycles", "9:3"), "9:3: write BEGIN:END"),
        (("--draw", "chart.gif"), "pictures end in .svg or .png"),
    ],
)
def test_studies_that_cannot_be(options, message, refused):
    assert message in refused("time", "sm90-fwd", "--seqlen", 256, *options)


@pytest.mark.parametrize(
    "window",
    [("--window-right", 0), ("--window-left", -1, "--window-right", -1), ("--window-left", 1 << 31),
     ("--causal", "--window-left", 100, "--window-right", 5)],
)  # fmt: skip
def test_windows_of_every_kind_are_timed(window, capsys):
    assert cli.main(["time", "sm90-fwd", "--seqlen", "200", *map(str, window)]) == 0
    assert "TFLOP/s" in capsys.readouterr().out


def test_a_changed_tile_gets_its_own_order():
    """Heads per section follow the tile, as in a call with that tile."""
    arguments = cli._parser().parse_args(
        ["time", "sm90-fwd", "--seqlen", "2048", "--causal", "--set", "tile_m=192", "--set", "stages=2"]
    )  # fmt: skip
    plan = cli._study(arguments).plan
    assert plan.section == choose_section(plan.problem, plan.config, plan.grid, H200.sms)
    assert plan.grid.m_blocks == -(-2048 // 192)


def test_roles_that_cannot_be_read(tmp_path, refused):
    for text, message in (
        ("def (", "SyntaxError"),
        ("import nowhere", "ModuleNotFoundError"),
        ("x = 1", "no class"),
    ):
        roles = tmp_path / "mine.py"
        roles.write_text(text)
        assert message in refused("time", "sm90-fwd", "--seqlen", 256, "--roles", roles)


def test_demo():
    """About 15 seconds: it compiles a kernel and simulates it."""
    text = output("-m", "flash4", "demo", timeout=120)
    for fact in (
        "there is no CUDA GPU here",
        "sm90-fwd for sm_90a",
        "load --[q x2 tma->warps]--> mma",
        "0 LDL, 0 STL",
        "no spills, ok",
        "Everything is as it should be.",
    ):
        assert fact in text, text
    assert len(re.findall(r"largest error \S+, allowed \S+ .* ok$", text, re.M)) == demo.SEEDS


@pytest.mark.parametrize(
    ("owner", "verb", "message"),
    [
        (sm90_fwd.MmaOps, "convert_p", r"CTAs: .* WRONG$"),
        (rings.Slot, "commit", r"order 0: WRONG, load waits for .*; mma\[0\] waits for"),
    ],
    ids=["numbers", "deadlock"],
)
def test_demo_reports_a_broken_schedule(owner, verb, message, monkeypatch, capsys):
    monkeypatch.setattr(owner, verb, lambda *_: None)
    assert not demo.simulates_well(ForwardConfig(True, 128, 128, 128, 128, True))
    assert re.search(message, capsys.readouterr().out, re.M)


def test_demo_fails_if_a_check_fails(monkeypatch):
    monkeypatch.setattr(demo, "gpu_obstacle", lambda: "it is looked away from")
    monkeypatch.setattr(demo, "compiles_well", lambda plan: False)
    monkeypatch.setattr(demo, "simulates_well", lambda config: True)
    assert demo.run() == 1
    monkeypatch.setattr(demo, "compiles_well", lambda plan: True)
    assert demo.run() == 0
