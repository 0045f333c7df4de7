"""The kernel cache: one compilation per key, on disk under every mishap, and never a wrong or torn entry."""

import contextlib
import dataclasses
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from flash4.dispatch import plan_forward
from flash4.jit import cache, compile
from flash4.jit.cache import KernelCache
from flash4.problem import AttentionProblem
from flash4.sm90.fwd_config import ForwardConfig
from tests.source_tree import ROOT

KERNEL = "flash4.sm90.fwd:ForwardSm90"
CONFIG = ForwardConfig(True, 128, 128, 128, 128, True)
KEY = (KERNEL, CONFIG, "sm_90a")
MAGIC = b"a kernel\n"


@dataclass(frozen=True)
class FakeKernel:
    """A launch function that says which key it was compiled for."""

    name: str

    def __call__(self):
        return self.name


class FakeToolchain:
    """Stands in for `flash4.jit.compile`: a compiled kernel is a text file.

    Args:
        log: file that gets a line for every compilation, of whichever process.
        seconds: how long a compilation takes.
    """

    def __init__(self, log: Path, seconds: float = 0.0):
        self.log, self.seconds = log, seconds
        self.links = True

    def compile_kernel(self, kernel, config, arch):
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(self.seconds)
        return FakeKernel(f"{kernel} {config} {arch}")

    def link(self, compiled, target):
        if self.links:
            target.write_bytes(MAGIC + compiled.name.encode())
        return self.links

    def load_library(self, path):
        magic, name = path.read_bytes()[: -cache._TRAILER].split(b"\n")
        assert magic + b"\n" == MAGIC
        return FakeKernel(name.decode())

    def install(self, folder):
        """Put it in the place of the real one, with `folder` as the cache."""
        os.environ[cache.CACHE_DIR_VARIABLE] = str(folder)
        for name in ("compile_kernel", "link", "load_library"):
            setattr(compile, name, getattr(self, name))

    @property
    def compiled_by(self):
        """Process ids of all compilations."""
        return self.log.read_text().split() if self.log.exists() else []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Folder of the disk cache; it does not exist yet."""
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def toolchain(tmp_path, folder, monkeypatch):
    fake = FakeToolchain(tmp_path / "compilations")
    for name in ("compile_kernel", "link", "load_library"):
        monkeypatch.setattr(compile, name, getattr(fake, name))
    return fake


def check_kernel(launcher, key=KEY):
    assert launcher() == "{} {} {}".format(*key)


def entries(folder, suffix=".so"):
    return sorted(folder.glob(f"*{suffix}"))


def test_one_compilation_per_key(toolchain, folder):
    cold, warm = KernelCache(), KernelCache()
    assert not cold.contains(*KEY)
    launcher = cold.get(*KEY)
    check_kernel(launcher)
    assert cold.contains(*KEY) and cold.get(*KEY) is launcher
    assert cold.get(KERNEL, replace(CONFIG), "sm_90a") is launcher, (
        "an equal config is the same key"
    )
    assert (cold.compiles, cold.loads) == (1, 0)

    check_kernel(warm.get(*KEY))
    assert (warm.compiles, warm.loads) == (0, 1)
    warm.clear_memory()
    assert not warm.contains(*KEY)
    check_kernel(warm.get(*KEY))
    assert (warm.compiles, warm.loads) == (0, 2)
    assert len(entries(folder)) == 1 and not entries(folder, ".tmp")


def test_new_shapes_do_not_compile(toolchain):
    kernels = KernelCache()
    for i in range(50):
        problem = AttentionProblem(
            torch.bfloat16, 1 + i % 5, 129 + 37 * i, 1 + 211 * i, 4, 4, 128, 120 + 8 * (i % 2), True
        )
        plan = plan_forward(problem, "sm_90a", 132)
        kernels.get(plan.kernel, plan.config, plan.arch)
    assert kernels.compiles == 1 and len(toolchain.compiled_by) == 1


def neighbours(field):
    """Two valid configs that differ in one field."""
    bases = (CONFIG, replace(CONFIG, causal=False), replace(CONFIG, fixed_shift=True))
    for config in bases:
        value = getattr(config, field)
        others = [not value] if isinstance(value, bool) else range(value + 1, 2 * value + 65)
        for other in others:
            with contextlib.suppress(ValueError):
                return config, replace(config, **{field: other})
    raise AssertionError(f"{field} has one value only")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ForwardConfig)])
def test_every_config_field_is_in_the_key(field, toolchain, folder):
    kernels = KernelCache()
    for config in neighbours(field):
        key = (KERNEL, config, "sm_90a")
        check_kernel(kernels.get(*key), key)
    assert kernels.compiles == 2 and len(entries(folder)) == 2


@pytest.mark.parametrize(
    "other",
    [(KERNEL, CONFIG, "sm_100a"), ("flash4.sm90.fwd:Other", CONFIG, "sm_90a")],
    ids=["arch", "kernel"],
)
def test_kernel_and_architecture_are_in_the_key(other, toolchain, folder):
    kernels = KernelCache()
    check_kernel(kernels.get(*KEY))
    check_kernel(kernels.get(*other), other)
    assert kernels.compiles == 2 and len(entries(folder)) == 2


def test_equal_values_of_another_type_of_config_are_another_key(toolchain, folder):
    other = dataclasses.make_dataclass("Config", ["bf16"], frozen=True)(True)
    same_values = dataclasses.make_dataclass("Other", ["bf16"], frozen=True)(True)
    kernels = KernelCache()
    for config in (other, same_values):
        check_kernel(kernels.get(KERNEL, config, "sm_90a"), (KERNEL, config, "sm_90a"))
    assert kernels.compiles == 2


def test_the_sources_are_in_the_key(tmp_path, monkeypatch):
    def fingerprint_of(sources):
        root = tmp_path / f"tree{len(list(tmp_path.iterdir()))}"
        for name, text in {"jit/cache.py": "", **sources}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        monkeypatch.setattr(cache, "__file__", str(root / "jit/cache.py"))
        return cache.fingerprint.__wrapped__()

    base = {"sm90/fwd.py": "a = 1\n", "common/tiles.py": "b = 2\n"}
    assert fingerprint_of(base) == fingerprint_of(dict(reversed(base.items())))
    changes = [
        {**base, "sm90/fwd.py": "a = 2\n"},
        {**base, "common/tiles.py": "b = 2\n\n"},
        {**base, "common/new.py": ""},
        {"sm90/fwd.py": "a = 1\n"},
        {"sm90/fwd.py": "b = 2\n", "common/tiles.py": "a = 1\n"},
        {"sm90/fwd2.py": "a = 1\n", "common/tiles.py": "b = 2\n"},
    ]
    prints = [fingerprint_of(sources) for sources in (base, *changes)]
    assert len(set(prints)) == len(prints)


DSL_PACKAGES = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi")


@pytest.mark.parametrize("package", DSL_PACKAGES)
def test_versions_are_in_the_key(package, monkeypatch):
    before, real = cache.fingerprint.__wrapped__(), cache.version
    monkeypatch.setattr(cache, "version", lambda name: "0" if name == package else real(name))
    assert cache.fingerprint.__wrapped__() != before


def test_a_new_fingerprint_is_a_miss(toolchain, monkeypatch):
    KernelCache().get(*KEY)
    monkeypatch.setattr(cache, "fingerprint", lambda: "other sources")
    kernels = KernelCache()
    check_kernel(kernels.get(*KEY))
    assert (kernels.compiles, kernels.loads) == (1, 0)


DAMAGES = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "without trailer": lambda data: data[: -cache._TRAILER],
    "last byte missing": lambda data: data[:-1],
    "one byte too many": lambda data: data + b"\0",
    "first bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "a bit of the hash": lambda data: data[:-20] + bytes([data[-20] ^ 1]) + data[-19:],
    "zeros": lambda data: bytes(len(data)),
    "garbage": lambda data: b"garbage" * 100,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_a_miss_and_is_repaired(damage, toolchain, folder):
    KernelCache().get(*KEY)
    (entry,) = entries(folder)
    intact = entry.read_bytes()
    entry.write_bytes(DAMAGES[damage](intact))
    assert not cache.is_intact(entry)
    kernels = KernelCache()
    check_kernel(kernels.get(*KEY))
    assert (kernels.compiles, kernels.loads) == (1, 0)
    assert entry.read_bytes() == intact and cache.is_intact(entry)
    kernels = KernelCache()
    check_kernel(kernels.get(*KEY))
    assert (kernels.compiles, kernels.loads) == (0, 1)


def test_an_intact_entry_that_does_not_load_is_a_miss_and_is_repaired(toolchain, folder):
    KernelCache().get(*KEY)
    (entry,) = entries(folder)
    entry.write_bytes(b"a library of another machine")
    cache.seal(entry)
    assert cache.is_intact(entry)
    for compiles, loads in ((1, 0), (0, 1)):
        kernels = KernelCache()
        check_kernel(kernels.get(*KEY))
        assert (kernels.compiles, kernels.loads) == (compiles, loads)


def test_an_entry_of_another_user_is_not_loaded(toolchain, folder, monkeypatch):
    KernelCache().get(*KEY)
    (entry,) = entries(folder)
    assert cache.is_intact(entry)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert not cache.is_intact(entry)


def check_memory_only(toolchain, words=("in memory only", cache.CACHE_DIR_VARIABLE)):
    """Check that a cache works in memory alone, and warns exactly once, whatever it is asked for."""
    kernels = KernelCache()
    other = (KERNEL, replace(CONFIG, bf16=False), "sm_90a")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in (KEY, KEY, other, KEY):
            check_kernel(kernels.get(*key), key)
    assert [w.category for w in caught] == [RuntimeWarning], [str(w.message) for w in caught]
    message = str(caught[0].message)
    assert all(word in message for word in words)
    assert (kernels.compiles, kernels.loads) == (2, 0)
    return message


def test_a_file_in_the_folders_place(toolchain, folder):
    folder.write_text("")
    assert str(folder) in check_memory_only(toolchain)
    assert folder.read_text() == ""


def test_a_folder_that_cannot_be_made(toolchain, monkeypatch):
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, "/proc/no such folder/flash4")  # for root, too
    assert "/proc/no such folder" in check_memory_only(toolchain)


def test_a_folder_that_is_not_writable(toolchain, folder, monkeypatch):
    folder.mkdir(mode=0o500)
    real = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda p, mode: mode != os.W_OK and real(p, mode))
    assert "not writable" in check_memory_only(toolchain)
    assert not list(folder.iterdir())


def test_a_folder_of_another_user(toolchain, folder, monkeypatch):
    folder.mkdir()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert "belongs to another user" in check_memory_only(toolchain)
    assert not list(folder.iterdir())


def test_no_home(toolchain, monkeypatch):
    """As in a container with a user id that the system does not know."""
    import pwd

    def unknown(uid):
        raise KeyError(uid)

    for name in (cache.CACHE_DIR_VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    check_memory_only(toolchain)


def test_where_the_folder_is(monkeypatch, tmp_path):
    monkeypatch.delenv(cache.CACHE_DIR_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / ".cache" / "flash4"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "xdg" / "flash4"
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, str(tmp_path / "own"))
    assert cache.cache_dir() == tmp_path / "own"


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


FULL_DISK = {
    "temporary file": (cache.tempfile, "mkstemp"),
    "link": (compile, "link"),
    "seal": (cache, "seal"),
    "rename": (os, "replace"),
    "lock": (cache, "_file_lock"),
}


@pytest.mark.parametrize("step", FULL_DISK)
def test_a_full_disk(step, toolchain, folder, monkeypatch):
    monkeypatch.setattr(*FULL_DISK[step], no_space)
    assert "No space left" in check_memory_only(toolchain)
    assert not entries(folder) and not entries(folder, ".tmp")
    monkeypatch.undo()


def test_without_a_linker(toolchain, folder):
    toolchain.links = False
    assert "`cc`" in check_memory_only(toolchain, words=("in memory only",))
    assert not entries(folder) and not entries(folder, ".tmp")


def test_an_export_that_fails_costs_only_the_disk(toolchain, folder, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("cannot export")

    monkeypatch.setattr(compile, "link", fail)
    assert "cannot export" in check_memory_only(toolchain)
    monkeypatch.undo()


def test_a_filled_folder_that_is_read_only_is_read(toolchain, folder, monkeypatch):
    check_kernel(KernelCache().get(*KEY))
    monkeypatch.setattr(cache, "_file_lock", no_space)
    kernels = KernelCache()
    check_kernel(kernels.get(*KEY))
    assert (kernels.compiles, kernels.loads) == (0, 1)


def test_the_variable_may_name_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, "~/kernels")
    assert cache.cache_dir() == tmp_path / "kernels"


def test_options_of_the_dsl_are_part_of_the_fingerprint(monkeypatch):
    before = cache.fingerprint.__wrapped__()
    monkeypatch.setenv("CUTE_DSL_ENABLE_ASSERTIONS", "1")
    assert cache.fingerprint.__wrapped__() != before


def test_a_failed_compilation_is_tried_again(toolchain, folder, monkeypatch):
    kernels = KernelCache()

    def fail(*key):
        raise RuntimeError("does not compile")

    with monkeypatch.context() as patch:
        patch.setattr(compile, "compile_kernel", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="does not compile"):
                kernels.get(*KEY)
    assert kernels.compiles == 0 and not entries(folder)
    check_kernel(kernels.get(*KEY))


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o000])
def test_nobody_else_can_write_what_is_loaded(mask, toolchain, tmp_path, monkeypatch):
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, str(tmp_path / "a" / "b"))
    before = os.umask(mask)
    try:
        KernelCache().get(*KEY)
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    (entry,) = entries(tmp_path / "a" / "b")
    assert entry.stat().st_mode & 0o022 == 0


def test_threads_share_one_compilation(toolchain):
    toolchain.seconds = 0.2
    kernels, start, found = KernelCache(), threading.Barrier(16), []

    def work():
        start.wait()
        found.append(kernels.get(*KEY))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 16 and len({id(launcher) for launcher in found}) == 1
    assert kernels.compiles == 1


def racing_process(folder, log, seconds, start, results):
    toolchain = FakeToolchain(Path(log), seconds)
    toolchain.install(folder)
    kernels = KernelCache()
    start.wait(60)
    check_kernel(kernels.get(*KEY))
    results.put((kernels.compiles, kernels.loads))


def stuck_process(folder, log, ready):
    toolchain = FakeToolchain(Path(log), 600)
    toolchain.install(folder)
    ready.set()
    KernelCache().get(*KEY)


@pytest.fixture(scope="module")
def processes():
    """Processes that share nothing with this one; the forkserver imports torch for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def test_processes_share_one_compilation(processes, folder, tmp_path):
    count, log = 8, tmp_path / "compilations"
    start, results = processes.Barrier(count), processes.Queue()
    arguments = (folder, log, 0.5, start, results)
    racing = [processes.Process(target=racing_process, args=arguments) for _ in range(count)]
    for process in racing:
        process.start()
    found = [results.get(timeout=120) for _ in racing]
    for process in racing:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(found) == [(0, 1)] * (count - 1) + [(1, 0)]
    assert len(FakeToolchain(log).compiled_by) == 1
    assert len(entries(folder)) == 1 and not entries(folder, ".tmp")


def test_a_killed_process_leaves_no_lock(processes, folder, tmp_path, toolchain):
    ready = processes.Event()
    log = tmp_path / "stuck"
    stuck = processes.Process(target=stuck_process, args=(folder, log, ready))
    stuck.start()
    assert ready.wait(60)
    deadline = time.monotonic() + 60
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert entries(folder, ".lock"), "it compiles under the lock"
    os.kill(stuck.pid, signal.SIGKILL)
    stuck.join(60)
    kernels, found = KernelCache(), []
    thread = threading.Thread(target=lambda: found.append(kernels.get(*KEY)), daemon=True)
    thread.start()
    thread.join(30)
    assert found, "the lock outlived its process"
    check_kernel(found[0])
    assert kernels.compiles == 1 and len(entries(folder)) == 1


# Two threads, each with its own kernel; the DSL itself is not thread-safe.
COLD = """
import sys, threading
from flash4.jit.cache import CACHE
from flash4.sm90.fwd_config import ForwardConfig
launchers = []
def get(causal):
    config = ForwardConfig(True, 64, 64, 64, 64, causal)
    launchers.append(CACHE.get("flash4.sm90.fwd:ForwardSm90", config, "sm_90a"))
threads = [threading.Thread(target=get, args=(causal,)) for causal in (False, True)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(launchers) == 2 and all(map(callable, launchers))
torch = sys.modules.get("torch")
initialized = torch is not None and torch.cuda.is_initialized()
print(CACHE.compiles, CACHE.loads, "cutlass" in sys.modules, initialized)
"""
# The library must outlive all but its launch function.
WARM = (
    COLD
    + """
import gc
CACHE.clear_memory()
gc.collect()
for launch in launchers:
    try:
        launch("not", "its", "arguments")
    except Exception as error:
        print(type(error).__name__)
"""
)


def python(code):
    """Run code in a fresh process without a GPU; returns its output's lines."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_real_kernels_are_compiled_once_and_then_loaded_without_the_dsl(folder):
    assert python(COLD) == ["2 0 True False"]
    assert len(entries(folder)) == 2 and not entries(folder, ".tmp")
    for entry in entries(folder):
        assert cache.is_intact(entry) and entry.stat().st_mode & 0o022 == 0
    assert folder.stat().st_mode & 0o777 == 0o700
    loaded, *refusals = python(WARM)
    assert loaded == "0 2 False False", "a warm process must not import the DSL"
    assert len(refusals) == 2 and all(refusal.endswith("Error") for refusal in refusals)
