"""Imports go one way, and ``import flash4`` stays light. Read from the source, nested imports too."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.source_tree import ROOT, python_files

KERNELS = {"sm80", "sm90", "sm100", "passes"}
BELOW_DISPATCH = KERNELS | {"jit", "common", "problem", "reference"}

# What each layer of flash4 may import of flash4 and of the DSL. Only what compiles or simulates
# kernels imports the DSL: a process that finds its kernels in the disk cache must not load it.
# A module that is not named here belongs to the command line: it imports what it likes, and no
# layer imports it. "flash4" is the package's own __init__.
MAY_IMPORT = {
    "flash4": {"ahead", "availability", "sdpa", "interface", "ops", "dispatch", *BELOW_DISPATCH},
    "ahead": {"interface", "ops", "dispatch", *BELOW_DISPATCH},
    "availability": {"dispatch", *BELOW_DISPATCH},
    "sdpa": {"interface", "launch", "ops", "dispatch", *BELOW_DISPATCH} - {"jit"},
    "interface": {"launch", "ops", "dispatch", *BELOW_DISPATCH} - {"jit"},
    "launch": {"ops", *BELOW_DISPATCH} - {"jit"},
    "ops": {"dispatch", *BELOW_DISPATCH},
    "dispatch": BELOW_DISPATCH,
    "jit": {"common", "cutlass"},
    **dict.fromkeys(KERNELS, {"common", "problem", "cutlass"}),
    "common": {"cutlass"},
    "problem": {"common"},
    "reference": {"common", "problem"},
}
IMPORTS_ANYTHING = {"sim"}
PREDICTS = "bench.predict"  # compares the simulator's clock with a GPU's
DSL_SHIM = "flash4.common.dsl"
DSL_INTERNALS = {"_mlir", "_mlir_libs", "base_dsl", "_original_code"}


def layer_of(name: str) -> str:
    """flash4.sm90.fwd -> sm90; cutlass.cute -> cutlass; flash4 -> flash4."""
    package, *inner = name.split(".")
    return inner[0] if package == "flash4" and inner else package


def imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported, at any depth of the source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                own = module.split(".")
                base = own[: len(own) + is_package - node.level] + base
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def internals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Uses of the DSL's internals by attribute, or by a string as in getattr."""
    for node in ast.walk(tree):
        name = getattr(node, "attr", getattr(node, "value", None))
        if isinstance(node, ast.Attribute | ast.Constant) and str(name) in DSL_INTERNALS:
            yield node.lineno, str(name)


def is_internal(name: str) -> bool:
    """Whether a dotted name leads into a private part of the DSL."""
    parts = name.split(".")
    private = [p for p in parts if p.startswith("_") and not p.endswith("__")]
    return parts[0] == "cutlass" and bool(private or DSL_INTERNALS & set(parts))


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """Imports of one module, of flash4 or of bench, that go the wrong way."""
    tree = ast.parse(source)
    layer = layer_of(module)
    imported = list(imports(tree, module, is_package))
    found = []
    for line, name in imported:
        target = layer_of(name)
        ours = name.split(".")[0] in ("flash4", "cutlass") and target != layer
        if ours and layer in MAY_IMPORT and target not in MAY_IMPORT[layer]:
            found.append(f"{module}:{line}: {layer} must not import {name}")
        if ours and layer == "bench" and target == "sim" and module != PREDICTS:
            found.append(f"{module}:{line}: only the command line and tests import {name}")
    if module != DSL_SHIM:
        uses = [(line, name) for line, name in imported if is_internal(name)]
        uses += internals(tree)
        found += [f"{module}:{line}: only {DSL_SHIM} may use {name}" for line, name in uses]
    return found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("flash4.interface", "from flash4 import ops, dispatch\nimport torch"),
        ("flash4.ops", "import flash4.jit.cache"),
        ("flash4.dispatch", "def plan():\n    from flash4.sm90.fwd import Forward"),
        ("flash4.sm90.fwd", "from flash4.common import dsl\nfrom flash4.sm90 import config"),
        ("flash4.sm90.fwd", "from . import config\nfrom ..common.tiles import Tile"),
        ("flash4.passes.combine", "import cutlass.cute as cute\nfrom cutlass import __version__"),
        ("flash4.jit.compile", "from flash4.common.dsl import plain\nimport cutlass"),
        ("flash4.common.dsl", "from cutlass._mlir import ir\nf._original_code"),
        ("flash4.sim.run", "import flash4\nfrom flash4.sm100.fwd import roles"),
        ("flash4.__main__", "from flash4 import demo, sim\nimport cutlass"),
        ("flash4.demo", "from flash4.sim import run"),
        ("bench.run", "from flash4 import flash_attn_func\nfrom flash4.sm90 import fwd"),
        ("bench.predict", "from flash4.sim.chips import H200"),
    ],
)
def test_the_right_way_passes(module, source):
    assert violations(module, source) == []


@pytest.mark.parametrize(
    ("module", "source", "name"),
    [
        ("flash4.interface", "import cutlass.cute", "cutlass.cute"),
        ("flash4.interface", "from flash4 import demo", "flash4.demo"),
        ("flash4.interface", "from flash4.jit import cache", "flash4.jit.cache"),
        ("flash4.ops", "from flash4 import interface", "flash4.interface"),
        ("flash4.ops", "import flash4", "flash4"),
        ("flash4.dispatch", "from .ops import forward", "flash4.ops.forward"),
        ("flash4.dispatch", "from flash4 import sim", "flash4.sim"),
        ("flash4.sm90.fwd", "from ..sm100 import fwd", "flash4.sm100.fwd"),
        ("flash4.sm90.fwd", "def f():\n    import flash4.sm80.fwd", "flash4.sm80.fwd"),
        ("flash4.sm90.fwd", "import_module('flash4.sm80')", "flash4.sm80"),
        ("flash4.sm90.fwd", "from flash4.jit import compile", "flash4.jit.compile"),
        ("flash4.sm80.fwd", "import flash4.passes.combine", "flash4.passes.combine"),
        ("flash4.common.tiles", "from flash4.sm90.fwd import x", "flash4.sm90.fwd.x"),
        ("flash4.common.tiles", "from flash4.problem import x", "flash4.problem.x"),
        ("flash4.problem", "from flash4.sm90.config import x", "flash4.sm90.config.x"),
        ("flash4.reference", "if x:\n    import cutlass", "cutlass"),
        ("flash4.jit.cache", "from flash4.dispatch import plan", "flash4.dispatch.plan"),
        ("flash4.sm90.fwd", "from cutlass._mlir.dialects import llvm", "cutlass._mlir.dialects"),
        ("flash4.sim.run", "import cutlass.base_dsl.dsl", "cutlass.base_dsl.dsl"),
        ("flash4.sim.run", "getattr(f, '_original_code')", "_original_code"),
        ("flash4.common.tiles", "import cutlass\ncutlass._mlir.ir", "_mlir"),
        ("bench.run", "import flash4.sim.timeline", "flash4.sim.timeline"),
    ],
)
def test_the_wrong_way_is_reported(module, source, name):
    (found,) = violations(module, source)
    assert found.startswith(module) and name in found


def test_relative_imports_of_a_package():
    assert violations("flash4.sm90", "from . import fwd\nfrom ..common import tiles", True) == []
    (found,) = violations("flash4.sm90", "from ..sm80 import fwd", True)
    assert "flash4.sm80.fwd" in found


def test_flash4_imports_one_way():
    files = python_files("flash4", "bench")
    assert files
    found = []
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found += violations(module, file.read_text("utf-8"), is_package)
    assert not found, "\n" + "\n".join(found)


IMPORT_FLASH4 = """
import sys
import flash4, flash4.problem, flash4.reference
import torch
assert not torch.cuda.is_initialized(), "a CUDA context was made"
heavy = {"cutlass", "greenlet", "matplotlib", "flash4.sim"} & set(sys.modules)
assert not heavy, f"imported {heavy}"
"""


def test_import_is_light_and_needs_no_gpu():
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_FLASH4],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
