"""Compile kernels with fake tensors, and turn them into loadable shared libraries.

The DSL is imported here and in the kernels only, and only when something must be compiled: a process that finds its
kernels in the disk cache never imports it.
"""

import os
import subprocess
import tempfile
import threading
from pathlib import Path

from flash4.common.kernels import load_kernel
from flash4.jit import versions

ENTRY = "flash4_launch"  # exported function of every compiled kernel
_COMPILING = threading.Lock()  # the DSL traces one function at a time


def _after_fork():
    global _COMPILING
    _COMPILING = threading.Lock()  # a thread of the parent may have held the other


os.register_at_fork(after_in_child=_after_fork)


def compile_kernel(kernel: str, config, arch: str, dump_dir: str | None = None):
    """Compile one kernel; works without a GPU.

    Args:
        kernel: ``"module:class"``; the class takes the config and offers ``fake_arguments()``.
        config: frozen config.
        arch: target such as ``"sm_90a"``.
        dump_dir: if given, PTX and cubin are kept there. Their names do not tell configs apart: one folder each.

    Returns:
        The DSL's compiled function.

    Raises:
        RuntimeError: the DSL is missing or could not compile it; the message names kernel, config, versions and paths.
    """
    with _COMPILING:
        try:
            import cutlass.cute as cute

            return _compile(cute, kernel, config, arch, dump_dir)
        except Exception as error:
            raise RuntimeError(_failure(kernel, config, arch, error)) from error


def _compile(cute, kernel, config, arch, dump_dir):
    options = f"--enable-tvm-ffi --gpu-arch {arch}"
    if dump_dir is not None:
        options += f" --keep-ptx --keep-cubin --dump-dir {dump_dir}"
    instance = load_kernel(kernel, config)
    return cute.compile(instance, *instance.fake_arguments(), options=options)


def _failure(kernel, config, arch, error) -> str:
    """What to say of a kernel that does not compile: what it was, what is installed, and the nearest thing to do."""
    obstacle = versions.toolchain_obstacle()
    advice = (
        obstacle
        or "if the versions are right, report it with the output of `python -m flash4 describe`"
    )
    return (
        f"flash4 could not compile {kernel} for {arch} with {config}: {type(error).__name__}: {error}\n"
        f"{versions.report()}\n  to do: {advice}"
    )


def launcher(compiled):
    """What to call of a compiled kernel: the function behind the DSL's object, which looks for keywords at every call.

    There is none where a kernel is compiled for another machine.
    """
    function = getattr(compiled, "__tvm_ffi_object__", lambda: None)()
    if function is None:
        return compiled
    function.compiled = compiled  # for as long as it lives
    return function


def link(compiled, target: Path) -> bool:
    """Export a compiled kernel and link it into a shared library that loads without the DSL.

    Args:
        compiled: result of ``compile_kernel``.
        target: path of the library.

    Returns:
        Whether that worked; without a C compiler on the machine it does not.
    """
    import cutlass.cute as cute

    libraries = cute.runtime.find_runtime_libraries(enable_tvm_ffi=True)
    with tempfile.TemporaryDirectory() as folder:
        obj = Path(folder) / "kernel.o"
        compiled.export_to_c(str(obj), function_name=ENTRY)
        rpaths = {f"-Wl,-rpath,{Path(library).parent}" for library in libraries}
        command = ["cc", "-shared", "-o", str(target), str(obj), *libraries, *sorted(rpaths)]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            return False


def load_library(path: Path):
    """Load a linked kernel; returns its launch function. Imports ``tvm_ffi``, not the DSL."""
    import tvm_ffi

    return tvm_ffi.load_module(str(path))[ENTRY]
