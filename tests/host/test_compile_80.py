"""The Ampere kernels compile for every card that they serve, spill nothing in their main loops, and fit the card.

A few configs with every run; ``sweep_80`` takes many.
"""

import re
import tempfile
from pathlib import Path

import pytest
import torch

from flash4.common import mods
from flash4.jit.compile import compile_kernel
from flash4.jit.inspect import disassemble
from flash4.problem import AttentionProblem
from flash4.sm80 import bwd_config, fwd_config

FORWARD, BACKWARD = "flash4.sm80.fwd:ForwardSm80", "flash4.sm80.bwd:BackwardSm80"
CARDS = {
    "sm_80": "A100",
    "sm_86": "SMALL",
    "sm_89": "SMALL",
    "sm_120": "CONSUMER_BLACKWELL",
    "sm_90": "HOPPER",
}
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*);")
_LABEL = re.compile(r"(\.L_x_\d+):")


def double(score, batch, head, q_idx, kv_idx, seqlen_info, aux):
    """A mod that reads a tensor."""
    return score + aux[0][head]


def double_bwd(grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux):
    """Its derivative."""
    return grad


def odd(batch, head, q_idx, kv_idx, seqlen_info, aux):
    """A mask that reads one."""
    return kv_idx >= aux[1][batch]


AUX = mods.encode_aux((torch.zeros(4), torch.zeros(4, dtype=torch.int32)))
FACTS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_left": True, "window_right": True},
    "cap, sink": {"causal": True, "softcap": True, "sink": True},
    "alibi": {"alibi": True, "causal": True},
    "packed": {"cu_q": True, "cu_k": True, "causal": True},
    "in use": {"used_q": True, "used_k": True},
    "mods": {
        "score_mod": mods.register(double),
        "score_mod_bwd": mods.register(double_bwd),
        "mask_mod": mods.register(odd),
        "aux": AUX,
    },
    "turns": {"causal": True, "deterministic": True},
}


def main_loops(sass: str) -> list[tuple[int, int]]:
    """(instructions, loads and stores of spilled registers) of every loop with products."""
    lines, labels, found = [], {}, []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label.group(1)] = len(lines)
        elif instruction := _INSTRUCTION.match(line):
            lines.append(instruction.group(1))
            jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction.group(1))
            begin = labels.get(jump.group(1)) if jump else None
            if begin is not None and any("HMMA" in x for x in lines[begin:]):
                body = lines[begin:]
                found.append(
                    (len(body), sum(x.startswith(("LDL", "STL")) or " LDL" in x for x in body))
                )
    return found


def compiled(kernel, config, arch):
    """(main loops of a kernel, loads and stores of spilled registers in all of it)."""
    with tempfile.TemporaryDirectory() as folder:
        compile_kernel(kernel, config, arch, folder)
        (cubin,) = Path(folder).glob("*.cubin")
        sass = disassemble(cubin)
        return main_loops(sass), sum(sass.count(f" {name}") for name in ("LDL", "STL"))


def config_of(kernel, arch, head_dim, facts):
    """Config that a call gets."""
    module = fwd_config if kernel == FORWARD else bwd_config
    dims = (head_dim, head_dim)
    batch = 1 if kernel == FORWARD else 4  # where there are few tiles, two roles do not pay
    problem = AttentionProblem(torch.bfloat16, batch, 4096, 4096, 2, 2, *dims, **facts)
    return getattr(module, CARDS[arch]).choose_config(problem)[0]


def problem_of(kernel, arch, head_dim, name) -> str | None:
    """What is wrong with a kernel, or None."""
    loops, _ = compiled(kernel, config_of(kernel, arch, head_dim, FACTS[name]), arch)
    spilled = [loop for loop in loops if loop[1]]
    if not loops or spilled:
        return f"{kernel} {arch} {head_dim} {name}: (instructions, spills) of loops {loops}"
    return None


FEW = (
    (FORWARD, "sm_80", 128, "full"),
    (FORWARD, "sm_90", 128, "causal"),
    (FORWARD, "sm_86", 256, "window"),
    (FORWARD, "sm_120", 64, "mods"),
    (BACKWARD, "sm_80", 64, "causal"),
    (BACKWARD, "sm_86", 128, "packed"),
    (BACKWARD, "sm_80", 256, "causal"),
    (BACKWARD, "sm_90", 256, "full"),
    (BACKWARD, "sm_80", 128, "mods"),
    (BACKWARD, "sm_120", 64, "mods"),
    (BACKWARD, "sm_86", 256, "mods"),
    (BACKWARD, "sm_90", 128, "window"),
    (BACKWARD, "sm_86", 64, "full"),
    (BACKWARD, "sm_90", 64, "turns"),
)


@pytest.mark.parametrize(("kernel", "arch", "head_dim", "name"), FEW)
def test_a_kernel_compiles_without_spills_in_its_main_loops(kernel, arch, head_dim, name):
    assert problem_of(kernel, arch, head_dim, name) is None


def test_loops_are_found_in_sass():
    sass = """
.L_x_1:
        /*0010*/    HMMA.16816.F32 R0, R4, R8, R0 ;
        /*0020*/    LDL R1, [R1+0x4] ;
        /*0030*/    @P0 BRA `(.L_x_1) ;
        /*0040*/    STL [R1], R2 ;
"""
    assert main_loops(sass) == [(3, 1)]
