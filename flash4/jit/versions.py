"""Versions and places of what compiles and loads kernels, for error messages; imports none of it."""

import platform
import sys
from importlib import metadata, util
from pathlib import Path

DSL, DSL_VERSION = "nvidia-cutlass-dsl", "4.8.1"  # the release that flash4 is tested with
FFI = "apache-tvm-ffi"
INSTALL = f"pip install '{DSL}[cu13]=={DSL_VERSION}' {FFI}"


def installed(package: str) -> str | None:
    """Version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def toolchain_obstacle() -> str | None:
    """Why kernels cannot be compiled here, with what to do about it; None if nothing speaks against it."""
    found = installed(DSL)
    if found is None:
        return f"{DSL} is not installed; {INSTALL}"
    if found != DSL_VERSION:
        return f"{DSL} is {found}, flash4 is written for {DSL_VERSION}; {INSTALL}"
    return loader_obstacle()


def loader_obstacle() -> str | None:
    """Why kernels cannot be loaded here, not even from the disk cache; None if nothing speaks against it."""
    if util.find_spec("tvm_ffi") is None:
        return f"{FFI} is not installed; pip install {FFI}"
    return None


def _place(module: str) -> str:
    try:
        spec = util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else "not found"


def report() -> str:
    """Lines about what is installed and where."""
    torch = sys.modules.get("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    lines = [
        f"{DSL} {installed(DSL)} in {_place('cutlass')}, flash4 is tested with {DSL_VERSION}",
        f"{DSL}-libs-cu13 {installed(f'{DSL}-libs-cu13')}, -libs-base {installed(f'{DSL}-libs-base')}",
        f"{FFI} {installed(FFI)} in {_place('tvm_ffi')}",
        f"torch {installed('torch')} for CUDA {cuda}",
        f"Python {platform.python_version()} on {platform.machine()}, {sys.executable}",
    ]
    return "\n".join(f"  {line}" for line in lines)
