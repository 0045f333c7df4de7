"""Which code ran, on which software and which GPU."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def _output(*command: str) -> str | None:
    """Return what a command prints, or None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str:
    """Return FLASH4_COMMIT (for copies without history), else git's, with `-dirty` if edited."""
    given = os.environ.get("FLASH4_COMMIT", "").strip()
    if given:
        return given
    found = _output("git", "rev-parse", "--short=12", "HEAD")
    if not found:
        return "unknown"
    edited = _output("git", "status", "--porcelain", "--untracked-files=no", "--", ".")
    return found + ("-dirty" if edited else "")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    printed = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if printed and re.match(r"\d+\.\d+", printed):
        return printed.split()[0]
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
    return match.group(1) if match else None


def versions() -> dict[str, Any]:
    """Return the versions that decide speed."""
    import torch

    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "cutlass_dsl": _version("nvidia-cutlass-dsl"),
        "flash_attn_4": _version("flash-attn-4"),
        "triton": _version("triton"),
        "driver": _driver(),
    }


def gpu() -> dict[str, Any]:
    """Return the current GPU's name and size."""
    import torch

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "sms": found.multi_processor_count,
        "l2_bytes": int(getattr(found, "L2_cache_size", 0)) or 64 << 20,
        "memory_bytes": found.total_memory,
    }


def gpu_uuid() -> str:
    """Return the current GPU's UUID as the driver spells it; not part of a record."""
    import torch

    uuid = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def now() -> str:
    """Return the time in UTC, to the second, fit for a file name."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H%M%SZ")


def results_path(started: str, revision: str, gpu_name: str, direction: str) -> Path:
    """Return where a run's record goes by default."""
    words = (started, revision, gpu_name.lower()) + ((direction,) * (direction != "forward"))
    name = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", w).strip("-") for w in words)
    return ROOT / "bench" / "results" / f"{name}.json"
