"""Memory and disk cache of compiled kernels.

A key is (kernel, config, architecture) plus a fingerprint of everything else that changes the code: the sources of
flash4 and the versions of DSL, tvm-ffi and Python. Configs are plain data, so equal keys mean equal code.

On disk an entry is a shared library with a trailer (its SHA-256 and a magic word); what does not check is a miss, so a
file cut short by a crash is never loaded. Processes compile under a lock of the key, write to a temporary file and
rename it. Beside it lies a note of what it is, for people. A folder that cannot be used (unwritable, full, owned by someone else) is warned about once, and the
process goes on with its memory cache.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flash4.jit import compile as jit_compile

CACHE_DIR_VARIABLE = "FLASH4_CACHE_DIR"
ABANDONED_S = 3600  # a temporary file of this age is of a process that was killed
_MAGIC = b"flash4-1"
_TRAILER = hashlib.sha256().digest_size + len(_MAGIC)


class KernelCache:
    """Compiled kernels by key.

    Attributes:
        compiles: kernels compiled by this process, for tests and monitors.
        loads: kernels loaded from disk by this process.
    """

    def __init__(self):
        self.compiles = 0
        self.loads = 0
        self._launchers = {}
        self._warned = False
        self._make_locks()

    def _make_locks(self):
        self._locks = {}
        self._guard = threading.Lock()

    def get(self, kernel: str, config, arch: str):
        """Return the launch function of a kernel, compiling it if no cache has it.

        Args:
            kernel: ``"module:class"``.
            config: frozen config.
            arch: target such as ``"sm_90a"``.
        """
        key = (kernel, config, arch)
        launcher = self._launchers.get(key)
        if launcher is not None:
            return launcher
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._launchers:
                self._launchers[key] = jit_compile.launcher(self._load_or_compile(key))
            return self._launchers[key]

    def contains(self, kernel: str, config, arch: str) -> bool:
        """Whether this process has the kernel in memory."""
        return (kernel, config, arch) in self._launchers

    def on_disk(self, kernel: str, config, arch: str) -> bool:
        """Whether an intact entry of the kernel lies in the disk cache."""
        folder = self._folder()
        return folder is not None and is_intact(folder / f"{entry_name(kernel, config, arch)}.so")

    def entries(self) -> list["Entry"]:
        """What lies in the disk cache, newest first."""
        try:
            paths = sorted(cache_dir().glob("*.so"), key=_modified, reverse=True)
        except (OSError, RuntimeError):
            return []
        return [Entry.of(path) for path in paths]

    def clear_disk(self, stale: bool = False) -> int:
        """Remove entries, and what processes that were killed left; returns how many entries.

        Args:
            stale: only entries that this version of flash4 and of what compiles it never loads.
        """
        doomed = [entry for entry in self.entries() if not stale or entry.stale]
        for entry in doomed:
            for suffix in (".so", ".json", ".lock"):
                entry.path.with_suffix(suffix).unlink(missing_ok=True)
        if cache_dir().is_dir():
            _remove_abandoned(cache_dir(), ABANDONED_S if stale else 0)
        return len(doomed)

    def folder_obstacle(self) -> str | None:
        """Why compiled kernels cannot be kept on disk, or None; makes nothing."""
        try:
            folder = cache_dir()
            _check_owner(folder)
            while not folder.exists():  # the nearest that does must let us make the rest
                folder = folder.parent
            if not folder.is_dir():
                return f"{folder} is no folder"
            return None if os.access(folder, os.W_OK) else f"{folder} is not writable"
        except (OSError, RuntimeError) as error:
            return str(error)

    def clear_memory(self):
        """Forget what this process loaded or compiled; the disk keeps it."""
        self._launchers.clear()

    def _load_or_compile(self, key):
        folder = self._folder()
        if folder is None:
            return self._compile(key)
        path = folder / f"{entry_name(*key)}.so"
        launcher = self._load(path)
        if launcher is not None:
            return launcher
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(f"{folder} is not writable")
            with _file_lock(path.with_suffix(".lock")):
                launcher = self._load(path)  # another process may have compiled it meanwhile
                return launcher if launcher is not None else self._compile_to(path, key)
        except OSError as error:
            self._warn_of_folder(folder, error)
            return self._compile(key)

    def _load(self, path: Path):
        if not is_intact(path):
            return None
        try:
            launcher = jit_compile.load_library(path)
        except Exception:  # a library of another machine, say: as good as no entry
            return None
        self.loads += 1
        return launcher

    def _compile(self, key):
        compiled = jit_compile.compile_kernel(*key)
        self.compiles += 1
        return compiled

    def _compile_to(self, path: Path, key):
        compiled = self._compile(key)
        try:
            handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            os.close(handle)
            temporary = Path(name)
            try:
                if jit_compile.link(compiled, temporary):
                    seal(temporary)
                    os.replace(temporary, path)
                    _write_note(path, key)
                    _remove_abandoned(path.parent, ABANDONED_S)
                else:
                    self._warn(
                        "the C compiler `cc`, which links them for the disk, is missing or failed"
                    )
            finally:
                temporary.unlink(missing_ok=True)
        except Exception as error:  # whatever the export runs into: the kernel itself is there
            self._warn_of_folder(path.parent, error)
        return compiled

    def _folder(self) -> Path | None:
        """Folder of this user's entries, which may not exist yet; None where it cannot be trusted."""
        folder = "the user's cache folder"
        try:
            folder = cache_dir()
            _check_owner(folder)
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
            self._warn_of_folder(folder, error)
            return None
        return folder

    def _warn_of_folder(self, folder: Path | str, error: Exception):
        self._warn(
            f"cannot use {folder} ({error}); set {CACHE_DIR_VARIABLE} to a folder of your own"
        )

    def _warn(self, why: str):
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"flash4 keeps compiled kernels in memory only: {why}",
                RuntimeWarning,
                stacklevel=2,
            )


@dataclass(frozen=True)
class Entry:
    """A file of the disk cache.

    Attributes:
        path: of the shared library.
        bytes: its size.
        modified: when it was written, in seconds since 1970.
        kernel: its class as "module:class"; "?" if the note beside it is missing.
        config: as text.
        arch: target.
        stale: another version of flash4, or of what compiles it, wrote it.
    """

    path: Path
    bytes: int
    modified: float
    kernel: str
    config: str
    arch: str
    stale: bool

    @classmethod
    def of(cls, path: Path):
        """That of a file, which another process may remove meanwhile."""
        try:
            note = json.loads(path.with_suffix(".json").read_text("utf-8"))
            facts = [str(note[name]) for name in ("kernel", "config", "arch")]
            stale = note["fingerprint"] != fingerprint()
        except (OSError, ValueError, TypeError, KeyError):
            facts, stale = ["?", "?", "?"], True
        try:
            size = path.stat().st_size
        except OSError:
            size = 0
        return cls(path, size, _modified(path), *facts, stale)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _check_owner(folder: Path):
    """Check that a folder, if it exists, is this user's.

    Raises:
        PermissionError: it is someone else's.
    """
    if folder.exists() and folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")


def _write_note(path: Path, key):
    """Say beside an entry what it is; nothing depends on it."""
    kernel, config, arch = key
    note = {"kernel": kernel, "config": repr(config), "arch": arch, "fingerprint": fingerprint()}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(note), "utf-8")
        os.replace(temporary, path.with_suffix(".json"))
    except OSError:  # the entry itself is there
        temporary.unlink(missing_ok=True)


def _remove_abandoned(folder: Path, age_s: float):
    """Remove temporary files of processes that were killed."""
    for path in folder.glob("*.tmp"):
        if time.time() - _modified(path) >= age_s:
            path.unlink(missing_ok=True)


def cache_dir() -> Path:
    """Folder of the disk cache: ``$FLASH4_CACHE_DIR``, or ``flash4`` in the user's cache folder."""
    explicit = os.environ.get(CACHE_DIR_VARIABLE)
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flash4"


@functools.cache
def fingerprint() -> str:
    """Hash of what changes generated code besides the key: our sources, and the versions that compile and load it."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    for package in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi"):
        try:
            digest.update(f"{package} {version(package)}\0".encode())
        except PackageNotFoundError:
            digest.update(f"{package} missing\0".encode())
    for name in sorted(os.environ):
        if name.startswith("CUTE_DSL_"):  # options of the DSL, some of which change code
            digest.update(f"{name}={os.environ[name]}\0".encode())
    # Entries carry the path of the runtime libraries, hence the prefix.
    digest.update(f"{sys.version} {platform.machine()} {sys.prefix}".encode())
    return digest.hexdigest()


def entry_name(kernel: str, config, arch: str) -> str:
    """File name of an entry, without suffix."""
    return hashlib.sha256(f"{fingerprint()} {kernel} {config!r} {arch}".encode()).hexdigest()


def seal(path: Path):
    """Append the trailer that ``is_intact`` checks; loaders of shared libraries ignore it."""
    data = path.read_bytes()
    with path.open("ab") as file:
        file.write(hashlib.sha256(data).digest() + _MAGIC)


def is_intact(path: Path) -> bool:
    """Whether the file is a complete entry owned by this user."""
    try:
        if path.stat().st_uid != os.getuid():
            return False
        data = path.read_bytes()
    except OSError:
        return False
    body, trailer = data[:-_TRAILER], data[-_TRAILER:]
    return trailer == hashlib.sha256(body).digest() + _MAGIC


@contextlib.contextmanager
def _file_lock(path: Path):
    """Exclusive lock between processes; the system drops it when its holder dies."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


CACHE = KernelCache()
os.register_at_fork(after_in_child=CACHE._make_locks)  # a thread of the parent may have held one
