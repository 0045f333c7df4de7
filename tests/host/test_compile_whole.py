"""The function that launches a whole backward: it compiles to the machine code of its three kernels, each by itself.

One config of each architecture with every run; ``python -m tests.host.test_compile_whole`` takes more.
"""

import re
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

from flash4.dispatch import plan_backward
from flash4.jit import compile as jit_compile
from flash4.jit.inspect import disassemble
from flash4.passes.bwd_config import FINISH, PREPARE, WHOLE, WholeConfig
from flash4.problem import AttentionProblem

EVERYTHING = {"window_left": True, "window_right": True, "softcap": True, "alibi": True}
LENGTHS = {"cu_q": True, "cu_k": True, "used_q": True, "used_k": True}
CALLS = {  # arch, head dims, facts, gradient of lse
    "sm90 everything": ("sm_90a", (64, 64), {**EVERYTHING, **LENGTHS, "deterministic": True}, True),
    "sm80 causal": ("sm_80", (64, 64), {"causal": True}, False),
    "sm100 causal": ("sm_100a", (64, 64), {"causal": True}, False),
}
MORE = {
    "sm90 d128": ("sm_90a", (128, 128), {}, False),
    "sm90 d128 causal": ("sm_90a", (128, 128), {"causal": True}, False),
    "sm90 d128 cap": ("sm_90a", (128, 128), {"softcap": True}, True),
    "sm90 d64 turns": ("sm_90a", (64, 64), {"deterministic": True}, False),
    "sm90 d128 packed": ("sm_90a", (128, 128), {"cu_q": True, "cu_k": True}, False),
    "sm90 d96 packed queries": ("sm_90a", (96, 96), {"cu_q": True, "alibi": True}, False),
    "sm90 d192": ("sm_90a", (192, 128), {"causal": True}, False),
    "sm90 d192 packed": ("sm_90a", (192, 128), {"causal": True, "cu_q": True, "cu_k": True}, True),
    "sm90 d256": ("sm_90a", (256, 256), {"causal": True}, False),
    "sm90 d256 turns": ("sm_90a", (256, 256), {"causal": True, "deterministic": True}, False),
    "sm80 everything": ("sm_86", (128, 128), {**EVERYTHING, **LENGTHS}, True),
    "sm100 d128": ("sm_100a", (128, 128), {}, False),
    "sm100 d128 packed": ("sm_100a", (128, 128), {"cu_q": True, "cu_k": True}, True),
    "sm100 turns": ("sm_100a", (128, 128), {"causal": True, "deterministic": True}, False),
    "sm100 d192 packed": (
        "sm_100a",
        (192, 128),
        {"causal": True, "cu_q": True, "cu_k": True},
        True,
    ),
    "sm100 d256 turns": ("sm_100a", (256, 256), {"causal": True, "deterministic": True}, False),
}
_FUNCTION = re.compile(r'^\s*\.section\s+"?\.text\.([^,"]+)', re.M)
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+([^;]*;)", re.M)


def functions(kernel, config, arch) -> dict[str, list[str]]:
    """Instructions of the kernels that a compiled function launches, by a part of their names; labels are left out."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        jit_compile.compile_kernel(kernel, config, arch, folder)
        (cubin,) = Path(folder).glob("*.cubin")
        _, *rest = _FUNCTION.split(disassemble(cubin))
    found = {}
    for name, sass in zip(rest[::2], rest[1::2], strict=True):
        (kind,) = re.findall("PrepareBackward|FinishBackward|Backward\\w*Sm\\d+", name)
        instructions = _INSTRUCTION.findall(sass)
        found[kind] = [re.sub(r"\s+|`\([^)]*\)", " ", text) for text in instructions]
    return found


def config_of(call) -> tuple[WholeConfig, str]:
    """Config and architecture of a call."""
    arch, dims, facts, dlse = call
    problem = AttentionProblem(torch.bfloat16, 2, 4096, 4096, 4, 2, *dims, **facts)
    ((kernel, config, arch),) = plan_backward(problem, arch, 132, dlse).kernels
    assert kernel == WHOLE
    return config, arch


def problem_of(call) -> str | None:
    """What is wrong with a call's kernels, or None."""
    config, arch = config_of(call)
    whole = functions(WHOLE, config, arch)
    before, after = config.passes
    alone = {}
    for one in ((PREPARE, before), (config.kernel, config.main), (FINISH, after)):
        alone |= functions(*one, arch)
    assert len(alone) == 3 and all(len(code) > 100 for code in alone.values())
    if whole.keys() != alone.keys():
        return f"kernels {sorted(whole)} instead of {sorted(alone)}"
    other = [name for name, code in alone.items() if whole[name] != code]
    return f"{', '.join(other)} differ" if other else None


@pytest.mark.parametrize("name", CALLS)
def test_kernels_are_those_that_are_compiled_alone(name):
    assert problem_of(CALLS[name]) is None


if __name__ == "__main__":
    for name, call in (CALLS | MORE).items():
        print(name, problem_of(call) or "the same", flush=True)
