"""is_available() with its reasons, and what the first compilation says when it fails."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from unittest import mock

import pytest
import torch

import flash4
from flash4.jit import cache, compile, versions
from flash4.jit.cache import KernelCache
from flash4.sm90.fwd_config import ForwardConfig
from tests.source_tree import ROOT

CONFIG = ForwardConfig(True, 64, 64, 128, 64, True)


@pytest.fixture
def hopper(tmp_path, monkeypatch):
    """A machine with two GPUs, of which the second is too old; and an empty cache."""
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    for name, value in (
        ("device_count", lambda: 2),
        ("current_device", lambda: 1),
        ("get_device_capability", lambda index: ((9, 0), (7, 5))[index]),
        ("get_device_name", lambda index: ("H200", "T4")[index]),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def missing(monkeypatch, package, module=None):
    """Make a package look as if it were not installed."""
    real, find = importlib.metadata.version, versions.util.find_spec

    def version(name):
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(versions.metadata, "version", version)
    if module is not None:
        monkeypatch.setattr(versions.util, "find_spec", lambda m: None if m == module else find(m))


def test_here():
    found = flash4.is_available()
    assert not found and "CUDA" in found.reasons[0] and str(found).startswith("flash4 cannot run")


def test_on_a_gpu(hopper):
    found = flash4.is_available()
    assert found and found.devices == (0,) and found.reasons == () == found.notes
    assert str(found) == "flash4 runs on cuda:0"
    for device in (0, "cuda:0", torch.device("cuda", 0)):
        assert flash4.is_available(device)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (1, r"cuda:1 \(T4\): .*7\.5; supported are 9\.0"),
        ("cuda", r"cuda:1 \(T4\)"),
        ("cuda:7", "no cuda:7, PyTorch sees 2"),
        ("cpu", "cpu is no CUDA device"),
        ("nonsense", "cannot ask for CUDA devices"),
    ],
)
def test_devices_that_will_not_do(hopper, device, reason):
    found = flash4.is_available(device)
    assert not found and found.devices == () and re.search(reason, found.reasons[0])


def test_no_device(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "sees no CUDA device" in flash4.is_available().reasons[0]


def test_a_driver_that_fails(hopper, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "device_count", mock.Mock(side_effect=RuntimeError("no driver"))
    )
    assert "RuntimeError: no driver" in flash4.is_available().reasons[0]


def test_without_the_dsl(hopper, monkeypatch):
    """A filled cache will do without it."""
    missing(monkeypatch, versions.DSL)
    (reason,) = flash4.is_available().reasons
    assert "is not installed" in reason and versions.INSTALL in reason
    monkeypatch.setattr(cache.CACHE, "entries", lambda: ["one"])
    found = flash4.is_available()
    assert found and reason in found.notes and f"note: {reason}" in str(found)


def test_another_version_of_the_dsl(hopper, monkeypatch):
    monkeypatch.setattr(versions, "DSL_VERSION", "99.9")
    found = flash4.is_available()
    assert found and "99.9" in found.notes[0], "it may do, but nobody has tried"
    assert importlib.metadata.version(versions.DSL) in found.notes[0]


def test_without_the_loader(hopper, monkeypatch):
    missing(monkeypatch, versions.FFI, "tvm_ffi")
    assert flash4.is_available().reasons == (
        f"{versions.FFI} is not installed; pip install {versions.FFI}",
    )


def test_a_folder_that_cannot_be_used_is_a_note(hopper, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, str(tmp_path / "file" / "cache"))
    found = flash4.is_available()
    assert found and "file is no folder" in found.notes[0]
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, str(tmp_path))
    assert "belongs to another user" in flash4.is_available().notes[0]


def test_asking_imports_and_makes_nothing(tmp_path):
    code = (
        "import sys, flash4, torch; found = flash4.is_available(); "
        "assert not torch.cuda.is_initialized(); print('cutlass' in sys.modules, bool(found))"
    )
    environment = {**os.environ, cache.CACHE_DIR_VARIABLE: str(tmp_path / "none")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert result.stdout.split() == ["False", "False"] and not (tmp_path / "none").exists()


def test_the_tested_version_is_the_required_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"{versions.DSL}[cu13]=={versions.DSL_VERSION}" in project["dependencies"]


FACTS = (
    "flash4.sm90.fwd:ForwardSm90", "sm_90a", "tile_d=64", versions.DSL, versions.DSL_VERSION,
    versions.FFI, "Python", sys.executable, "cutlass", "to do:",
)  # fmt: skip


def failure(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeError) as caught:
        KernelCache().get("flash4.sm90.fwd:ForwardSm90", CONFIG, "sm_90a")
    text = str(caught.value)
    assert all(fact in text for fact in FACTS), text
    return text, caught.value.__cause__


def test_a_compiler_that_fails_is_reported_with_versions_and_paths(tmp_path, monkeypatch):
    def fail(*arguments):
        raise AttributeError("module 'cutlass' has no attribute 'gone'")

    monkeypatch.setattr(compile, "_compile", fail)
    text, cause = failure(monkeypatch, tmp_path)
    assert "no attribute 'gone'" in text and isinstance(cause, AttributeError)


def test_a_missing_dsl_is_reported_with_what_to_install(tmp_path, monkeypatch):
    missing(monkeypatch, versions.DSL)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cutlass"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cutlass", None)  # importing it raises ImportError
    text, cause = failure(monkeypatch, tmp_path)
    assert versions.INSTALL in text and isinstance(cause, ImportError)


def test_a_library_of_another_machine_is_compiled_anew(tmp_path, monkeypatch):
    """What does not load is as good as no entry; an intact file with nonsense in it, say."""
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, str(tmp_path))
    kernels = KernelCache()
    path = tmp_path / f"{cache.entry_name('kernel', CONFIG, 'sm_90a')}.so"
    path.write_bytes(b"no library")
    cache.seal(path)
    monkeypatch.setattr(compile, "compile_kernel", lambda *key: "compiled")
    monkeypatch.setattr(compile, "link", lambda compiled, target: target.write_bytes(b"new") > 0)
    assert kernels.get("kernel", CONFIG, "sm_90a") == "compiled" and kernels.compiles == 1
    assert cache.is_intact(path) and path.read_bytes().startswith(b"new")
