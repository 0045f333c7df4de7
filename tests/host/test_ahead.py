"""Compiling ahead: the set of kernels, processes, memory, progress, failures; and the commands about the cache."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch

import flash4
from flash4 import ahead, cli, ops
from flash4.common import mods
from flash4.jit import cache, farm
from flash4.jit.cache import CACHE
from tests.host.test_backward_ops import stand_in
from tests.host.test_cache import FakeToolchain
from tests.host.test_dispatch import stand_in_gpu
from tests.source_tree import ROOT

BF16 = torch.bfloat16


def call(batch=2, seqlen=300, heads=4, head_dim=64, **keywords):
    x = torch.empty(batch, seqlen, heads, head_dim, dtype=BF16, device="meta")
    return {"q": x, "k": x, "v": x, **keywords}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(CACHE, "_launchers", {})
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch):
    """Keys that the farm was asked for; nothing is compiled."""
    asked = []

    def compile_all(keys, workers, done):
        asked.append((list(keys), workers))
        for key in keys:
            done(key, None, True)

    monkeypatch.setattr(farm, "compile_all", compile_all)
    return asked


def test_every_kernel_of_the_calls_is_compiled_once(folder, compiled):
    calls = [call(), call(batch=3), call(causal=True), call(return_lse=True)]
    done = flash4.precompile(calls, arch="sm_90a", backward=True)
    ((keys, _),) = compiled
    assert len(keys) == len(set(keys)) == done.compiled == len(done.kernels) and not done.failed
    kernels = [kernel.rpartition(":")[2] for kernel, *_ in keys]
    assert sorted(kernels) == ["ForwardSm90"] * 2 + ["WholeBackward"] * 2
    for one in calls:
        given = {name: x for name, x in one.items() if name != "return_lse"}
        plan = flash4.explain(**given)
        assert (plan.kernel, plan.config, plan.arch) in keys
        assert {*flash4.explain(**given, backward=True).kernels} <= {*keys}


def test_any_length_is_what_lengths_need(folder, compiled):
    one = call(heads=8)
    one["k"] = one["v"] = one["k"][:, :, :2]
    flash4.precompile([one], arch="sm_90a", any_length=True)
    ((keys, _),) = compiled
    for seqlen_q, seqlen_k in itertools.product((1, 3, 17, 100, 129, 700, 5000), (1, 77, 4000)):
        q = torch.empty(2, seqlen_q, 8, 64, dtype=BF16, device="meta")
        k = torch.empty(2, seqlen_k, 2, 64, dtype=BF16, device="meta")
        plan = flash4.explain(q, k, k)
        assert (plan.kernel, plan.config, plan.arch) in keys


def test_blackwell_without_a_gpu(folder, compiled):
    flash4.precompile([call()], arch="sm_100a")
    (((key,), _),) = compiled
    assert key[2] == "sm_100a" and "sm100" in key[0]


@pytest.mark.parametrize(
    ("calls", "given", "message"),
    [
        ([call()], {}, "no GPU: name the target"),
        (
            [call()],
            {"arch": "sm_70"},
            r"supported are \['sm_100a', 'sm_103a', 'sm_110a', 'sm_120', 'sm_121', 'sm_80', .*'sm_90a'\]",
        ),
        ([{"q": 1}], {"arch": "sm_90a"}, "lacks q, k, v"),
        ([call()], {"arch": "sm_90a", "workers": 0}, "at least 1"),
        ([call()], {"arch": "sm_90a", "memory_gib": -1}, "more than 0"),
    ],
)
def test_bad_requests(folder, compiled, calls, given, message):
    with pytest.raises(ValueError, match=message):
        flash4.precompile(calls, **given)
    assert not compiled


def test_not_within_a_capture(folder, compiled, monkeypatch):
    monkeypatch.setattr(ops, "is_capturing", lambda: True)
    with pytest.raises(ValueError, match="before a CUDA graph is captured"):
        flash4.precompile([call()], arch="sm_90a")


@pytest.mark.parametrize(
    ("jobs", "workers", "gib", "expected"),
    [(100, 8, 7, 3), (100, 8, 100, 8), (3, 8, 100, 3), (100, 8, 0.5, 1), (1, None, 64, 1)],
)
def test_the_memory_limits_the_processes(jobs, workers, gib, expected):
    memory = int(gib * 2**30)
    assert farm.worker_count(jobs, workers, memory) == expected
    cpus = len(os.sched_getaffinity(0))
    assert farm.worker_count(1000, None, 1 << 50) == cpus
    with mock.patch.object(farm, "available_bytes", lambda: 3 * farm.WORKER_BYTES):
        assert farm.worker_count(1000, 99, None) == 1


def test_progress_and_failures(folder, monkeypatch, capsys):
    def compile_all(keys, workers, done):
        for i, key in enumerate(keys):
            done(key, "it rains" if i == 0 else None, i > 0)

    monkeypatch.setattr(farm, "compile_all", compile_all)
    seen = []
    calls = [call(), call(causal=True), call(head_dim=128)]
    done = flash4.precompile(calls, arch="sm_90a", progress=lambda *x: seen.append(x))
    assert [x[:2] for x in seen] == [(1, 3), (2, 3), (3, 3)] and "failed" in seen[0][2]
    assert done.compiled == 2 and done.failed[0][3] == "it rains" and "it rains" in str(done)
    flash4.precompile(calls, arch="sm_90a", progress=True)
    assert "flash4: 3 of 3:" in capsys.readouterr().err


def test_without_a_disk_cache_this_process_compiles(tmp_path, monkeypatch, compiled):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.CACHE_DIR_VARIABLE, str(tmp_path / "file"))
    asked = []
    monkeypatch.setattr(CACHE, "get", lambda *key: asked.append(key))
    done = flash4.precompile([call()], arch="sm_90a")
    assert not compiled and asked == list(done.kernels)


def tenth(score, b, h, q, k, info, aux):
    return score * 0.1


def test_mods_are_compiled_here(folder, compiled, monkeypatch):
    asked = []
    monkeypatch.setattr(CACHE, "get", lambda *key: asked.append(key))
    flash4.precompile([call(score_mod=tenth), call()], arch="sm_90a")
    ((keys, _),) = compiled
    assert len(keys) == 1 and len(asked) == 1 and asked[0][1].score_mod


def tenth_bwd(grad, *_):
    return grad * 0.1


def test_mods_of_gradients_are_compiled_here(folder, compiled, monkeypatch):
    """With the kernels around them, which one function launches."""
    asked = []
    monkeypatch.setattr(CACHE, "get", lambda *key: asked.append(key))
    made = call(score_mod=tenth, score_mod_bwd=tenth_bwd)
    flash4.precompile([made], arch="sm_90a", backward=True)
    assert not compiled
    assert [key[1].score_mod for key in asked] == [mods.register(tenth)] * 2
    assert asked[1][1].main.score_mod_bwd == mods.register(tenth_bwd)
    with pytest.raises(NotImplementedError, match="pass score_mod_bwd"):
        flash4.precompile([call(score_mod=tenth)], arch="sm_90a", backward=True)


# A worker that sleeps, dies or answers by the number in its key.
WORKER = """
import os, pickle, sys, time
out = os.fdopen(os.dup(1), "wb")
while True:
    try:
        name, number, arch = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    if number == 3:
        os._exit(7)
    with open(os.environ["LOG"], "a") as log:
        log.write(f"{os.getpid()}\\n")
    time.sleep(0.2)
    pickle.dump(("no" if number == 5 else None, True, (1 << 40) if number == 6 else 1), out)
    out.flush()
"""


def test_the_farm_survives_workers_that_die_and_replaces_large_ones(tmp_path, monkeypatch):
    started = []

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "LOG": str(tmp_path / "log")},
        )
        started.append(process)
        return process

    monkeypatch.setattr(farm, "_start", start)
    found = {}
    keys = [("kernel", number, "arch") for number in range(9)]
    farm.compile_all(keys, 2, lambda key, problem, compiled: found.update({key[1]: problem}))
    assert found.pop(3) == "the process that compiled it ended with status 7"
    assert found.pop(5) == "no" and set(found.values()) == {None} and len(found) == 7
    assert 4 <= len(started) <= 5, "two, one for that which died, one for that which grew"
    assert all(process.poll() is not None for process in started)


def test_calls_are_run_once_on_a_gpu(folder):
    """A small call with the same kernels loads them, forward and backward."""
    with stand_in() as launched, mock.patch.object(CACHE, "contains", lambda *key: True):
        x = torch.zeros(3, 700, 4, 64, dtype=BF16)
        sink, slopes = torch.zeros(4), torch.zeros(3, 4)
        device = torch.device("cpu")
        with (
            mock.patch.object(ahead, "_target", lambda q, arch: ("sm_90a", device)),
            mock.patch.object(torch.cuda, "synchronize"),
        ):
            given = {"q": x, "k": x, "v": x, "causal": True, "alibi_slopes": slopes}
            done = flash4.precompile([given], backward=True)
            assert done.loaded == 1 and len(launched) == 3
            lengths = torch.tensor([0, 300, 700], dtype=torch.int32)
            given = {name: x[0] for name in "qkv"} | {"learnable_sink": sink}
            given |= {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": 400}
            assert flash4.precompile([given]).loaded == 1
            sizes = []

            def kernels(call, *rest):
                sizes.append(tuple(call["q"].shape[:2]))
                return [sizes[-1]]

            with (
                mock.patch.object(ahead, "_kernels", kernels),
                mock.patch.object(ahead, "_compile", lambda *keys: ([], 0)),
            ):
                assert flash4.precompile([{"q": x, "k": x, "v": x}]).loaded == 1
            assert sizes == [(3, 700), (3, 700), (1, 256), (1, 700), (3, 700)], "as small as may be"


def test_a_real_farm_with_the_real_compiler(folder):
    """Two processes, two kernels; a second time nothing is compiled, and nothing is left behind."""
    command = [sys.executable, "-m", "flash4", "precompile", "--arch", "sm_90a", "--seqlen", "256"]
    command += ["--head-dim", "64", "--workers", "2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

    def run():
        return subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )

    first, second = run(), run()
    assert "1 kernels, 1 compiled, 0 failed" in first.stdout and "compiled" in first.stderr
    assert "1 kernels, 0 compiled, 0 failed" in second.stdout and "was there" in second.stderr
    assert {path.suffix for path in folder.iterdir()} == {".so", ".json", ".lock"}


def fill(tmp_path, folder, monkeypatch, configs=2):
    """Entries by the fake toolchain."""
    fake = FakeToolchain(tmp_path / "log")
    for name in ("compile_kernel", "link", "load_library"):
        monkeypatch.setattr(cache.jit_compile, name, getattr(fake, name))
    from flash4.sm90.fwd_config import ForwardConfig

    kernels = cache.KernelCache()
    for i in range(configs):
        config = ForwardConfig(True, 64, 64, 128, 64, bool(i))
        kernels.get("flash4.sm90.fwd:ForwardSm90", config, "sm_90a")
    return kernels


def test_the_cache_is_listed_and_cleared(tmp_path, folder, monkeypatch, capsys):
    fill(tmp_path, folder, monkeypatch)
    assert cli.main(["cache"]) == 0
    text = capsys.readouterr().out
    assert text.count("flash4.sm90.fwd:ForwardSm90") == 2 and "causal=True" in text
    assert f"2 kernels, 0 of them stale, 0.0 MiB in {folder}" in text
    assert cli.main(["cache", "--clear", "--stale"]) == 0
    assert "removed 0 kernels" in capsys.readouterr().out
    monkeypatch.setattr(cache, "fingerprint", lambda: "another")
    assert cli.main(["cache", "--stale"]) == 0
    assert "(stale)" in capsys.readouterr().out
    assert cli.main(["cache", "--clear", "--stale"]) == 0
    assert "removed 2 kernels" in capsys.readouterr().out and not list(folder.iterdir())


@pytest.mark.parametrize("damage", [None, b"", b"{}", b"\xff\x00", b"[1]", b'{"kernel": 1}'])
def test_notes_are_for_people_only(damage, tmp_path, folder, monkeypatch, capsys):
    """An entry whose note is missing or damaged is listed, loaded, and removed."""
    fill(tmp_path, folder, monkeypatch, 1)
    (note,) = folder.glob("*.json")
    note.unlink() if damage is None else note.write_bytes(damage)
    kernels = fill(tmp_path, folder, monkeypatch, 1)
    assert (kernels.compiles, kernels.loads) == (0, 1)
    (entry,) = kernels.entries()
    assert entry.kernel == "?" and entry.stale and entry.bytes > 0
    assert cli.main(["cache"]) == 0 and cli.main(["cache", "--clear"]) == 0
    assert not list(folder.iterdir())


def test_an_empty_cache(folder, capsys):
    assert cli.main(["cache"]) == 0 and cli.main(["cache", "--clear"]) == 0
    assert "0 kernels" in capsys.readouterr().out and not folder.exists()


def test_what_killed_processes_left_is_removed_in_time(tmp_path, folder, monkeypatch):
    folder.mkdir(mode=0o700)
    old, new = folder / "old.tmp", folder / "new.tmp"
    for path in (old, new):
        path.write_text("half an entry")
    os.utime(old, (1, 1))
    kernels = fill(tmp_path, folder, monkeypatch)
    assert not old.exists() and new.exists(), "another process may be at work on it"
    assert kernels.clear_disk() == 2 and not list(folder.iterdir())


def test_a_full_disk_for_the_note_costs_the_note_only(tmp_path, folder, monkeypatch, recwarn):
    def full(*arguments, **keywords):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.Path, "write_text", full)
    kernels = fill(tmp_path, folder, monkeypatch, 1)
    assert len(kernels.entries()) == 1 and not list(folder.glob("*.tmp")) and not recwarn.list


def test_a_writer_killed_in_the_middle(tmp_path, folder, monkeypatch):
    """Between linking and the rename: the next process compiles, and finds no half entry."""
    child = os.fork()
    if child == 0:  # replaces nothing: it dies where the entry would get its name
        monkeypatch.setattr(os, "replace", lambda *paths: os.kill(os.getpid(), signal.SIGKILL))
        fill(tmp_path, folder, monkeypatch, 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert list(folder.glob("*.tmp")) and not list(folder.glob("*.so"))
    monkeypatch.setattr(cache, "ABANDONED_S", 0)
    kernels = fill(tmp_path, folder, monkeypatch, 1)
    assert kernels.compiles == 1 and len(kernels.entries()) == 1
    assert not list(folder.glob("*.tmp"))


def test_a_fork_inherits_no_lock(tmp_path, folder, monkeypatch):
    """A thread of the parent may hold the lock of a key while another forks."""
    key = ("kernel", 1, "arch")
    with CACHE._guard:
        child = os.fork()
        if child == 0:
            os._exit(0 if CACHE._guard.acquire(timeout=5) else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert key not in CACHE._locks


def test_threads_with_one_cold_call_compile_once(folder, tmp_path, monkeypatch):
    """Through the public function."""
    fake = FakeToolchain(tmp_path / "log", seconds=0.2)
    for name in ("compile_kernel", "link", "load_library"):
        monkeypatch.setattr(cache.jit_compile, name, getattr(fake, name))
    kernels, real = cache.KernelCache(), []
    x = torch.zeros(1, 70, 2, 64, dtype=BF16)
    start, failures = threading.Barrier(16), []

    def get(*key):
        kernels.get(*key)
        real.append(key)
        return lambda *arguments: None

    def work():
        start.wait()
        try:
            flash4.flash_attn_func(x, x, x)
        except Exception as error:
            failures.append(error)

    with stand_in_gpu(), mock.patch.object(ops.CACHE, "get", get):
        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not failures and real and len({*real}) == 1
    assert kernels.compiles == 1 and len(fake.compiled_by) == 1


def test_200_random_calls_of_one_feature_set_need_one_kernel():
    """Lengths, batches, heads, scales, caps and windows are numbers of the launch."""
    generator = torch.Generator().manual_seed(0)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    configs = set()
    for _ in range(200):
        heads, batch = number(1, 33), number(1, 9)
        q = torch.empty(batch, number(129, 9000), heads, 128, dtype=BF16, device="meta")
        k = torch.empty(batch, number(1, 9000), heads, 128, dtype=BF16, device="meta")
        plan = flash4.explain(
            q, k, k, softmax_scale=number(1, 99) / 50, softcap=number(1, 99) / 3,
            window_size=(number(0, 5000), number(1, 5000)),
        )  # fmt: skip
        configs.add((plan.kernel, plan.config))
    assert len(configs) == 1


IMPORT = """
import sys, time
import torch
began = time.process_time()
import flash4
print(time.process_time() - began, "cutlass" in sys.modules, "tvm_ffi" in sys.modules)
"""


def test_import_after_torch_is_quick(tmp_path):
    """With compiled modules, as after the first import; process time, since others may be at work."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, "-c", IMPORT],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    seconds, dsl, ffi = result.stdout.split()
    assert float(seconds) <= 0.15 and (dsl, ffi) == ("False", "False")
