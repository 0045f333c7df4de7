"""The Hopper backward for head dims of 136 to 192 compiles for configs of every kind, within limits that are checked in.

As ``test_compile_fwd90``; ``python -m tests.host.test_compile_bwd90_192`` writes ``bwd90_192_limits.json`` anew.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flash4.jit import compile as jit_compile
from flash4.passes.bwd_config import FINISH, PREPARE, passes_of
from flash4.problem import AttentionProblem
from flash4.sm90.bwd_192_config import Backward192Config, choose_config
from flash4.sm90.bwd_192_roles import Backward192Roles
from flash4.sm90.bwd_config import MMA_WARPGROUPS, TILE_N
from tests.host.test_compile_bwd90 import (
    EVERYTHING,
    LENGTHS,
    PACKED,
    PHASES,
    WINDOW_TURNS,
    compile_all,
)
from tests.host.test_compile_fwd90 import MMA_K, SLACK, calls

LIMITS = Path(__file__).with_name("bwd90_192_limits.json")
KERNEL = "flash4.sm90.bwd_192:Backward192Sm90"
CAUSAL = {"causal": True}


def config_for(head_dim, head_dim_v, causal=False, bf16=True, **facts):
    """Config that a call with these facts gets."""
    dtype = torch.bfloat16 if bf16 else torch.float16
    problem = AttentionProblem(dtype, 1, 4096, 4096, 1, 1, head_dim, head_dim_v, causal, **facts)
    return choose_config(problem)[0]


CONFIGS = {
    f"{d}/{dv} {name}": config_for(d, dv, **facts)
    for d, dv, name, facts in (
        (192, 128, "full", {}),
        (192, 128, "causal", CAUSAL),
        (192, 128, "causal, fp16", CAUSAL | {"bf16": False}),
        (160, 160, "full", {}),
        (160, 160, "causal", CAUSAL),
        (160, 128, "causal", CAUSAL),
        (192, 64, "causal", CAUSAL),
        (192, 128, "causal window", CAUSAL | {"window_left": True}),
        (192, 128, "window at the right", {"window_right": True}),
        (192, 128, "causal, cap", CAUSAL | {"softcap": True}),
        (192, 128, "causal, alibi", CAUSAL | {"alibi": True}),
        (192, 128, "causal, turns", CAUSAL | {"deterministic": True}),
        (192, 128, "causal, alibi, turns", CAUSAL | {"alibi": True, "deterministic": True}),
        (192, 128, "causal window, turns", WINDOW_TURNS),
        (192, 128, "packed", PACKED),
        (192, 128, "causal, all lengths", CAUSAL | LENGTHS),
        (192, 128, "causal, alibi, all lengths, turns", CAUSAL | LENGTHS | {"alibi": True, "deterministic": True}),
        (192, 128, "everything", EVERYTHING),
        (192, 128, "everything, turns, all lengths", EVERYTHING | LENGTHS | {"deterministic": True}),
        (160, 160, "everything", EVERYTHING),
        (160, 160, "everything, turns, all lengths", EVERYTHING | LENGTHS | {"deterministic": True}),
        (160, 160, "causal, alibi, all lengths, turns", CAUSAL | LENGTHS | {"alibi": True, "deterministic": True}),
    )
}  # fmt: skip
CONFIGS["192/128 causal, not handed out"] = replace(
    CONFIGS["192/128 causal"], handed_out=False, first_stores=False, backwards=False, chained=False
)
TOO_LARGE = Backward192Config(True, 192, 128, 64, True, swap_dq=True, handed_out=True)


@pytest.fixture(scope="module")
def compiled():
    return compile_all({name: (KERNEL, config) for name, config in CONFIGS.items()})


def products(config: Backward192Config) -> int:
    """WGMMAs of one warpgroup that a step takes: each contracts 16 numbers."""
    over_d, over_dv = config.tile_d // MMA_K, config.tile_dv // MMA_K
    over_queries, over_keys = config.tile_m // MMA_K, TILE_N // MMA_K
    return over_d + over_dv + 2 * over_queries + 2 * over_keys  # S, dP, dV and dK, dQ's two parts


@pytest.mark.parametrize("name", CONFIGS)
def test_resources(name, compiled):
    config, found = CONFIGS[name], compiled[name]
    assert found.spill_loads == found.spill_stores == 0, f"spills: {found}"
    assert not found.serialised, f"MMAs are serialised: {found}"
    phases = PHASES + config.left
    exponentials = config.tile_m * TILE_N // MMA_WARPGROUPS // 128 * (1 + config.softcap)
    assert found.waits == calls(Backward192Roles.mma, phases)["wait_mma"], found
    assert found.hgmma == phases * products(config), found
    assert found.exp2 == phases * exponentials, found
    graph = config.graph
    assert found.registers * graph.threads == graph.launch_registers >= graph.registers, found


@pytest.mark.parametrize("name", CONFIGS)
def test_instructions(name, compiled):
    limit = json.loads(LIMITS.read_text("utf-8"))[name]
    found = compiled[name].instructions
    assert found <= limit * SLACK, f"{found} instructions, {limit} when they were last looked at"


def test_the_limits_are_of_these_configs():
    assert json.loads(LIMITS.read_text("utf-8")).keys() == CONFIGS.keys()


def test_the_kernels_around_it():
    """No spills, and at least two CTAs of an SM."""
    jobs = {}
    for d, dv, dlse in ((192, 128, False), (160, 160, True)):
        prepare, finish = passes_of(config_for(d, dv), dlse)
        jobs[d, dv, PREPARE], jobs[d, dv, FINISH] = (PREPARE, prepare), (FINISH, finish)
    for name, found in compile_all(jobs).items():
        assert found.spill_loads == found.spill_stores == 0, (name, found)
        assert found.registers <= 128, (name, found)


def test_what_shared_memory_cannot_hold_is_refused():
    assert not TOO_LARGE.fits
    with pytest.raises(RuntimeError, match="bytes of shared memory"):
        jit_compile.compile_kernel(KERNEL, TOO_LARGE, "sm_90a")


if __name__ == "__main__":
    jobs = {name: (KERNEL, config) for name, config in CONFIGS.items()}
    counts = {name: found.instructions for name, found in compile_all(jobs).items()}
    LIMITS.write_text(json.dumps(counts, indent=1) + "\n", "utf-8")
