"""The Hopper backward for head dims above 128 compiles for configs of every kind, within limits that are checked in.

As ``test_compile_fwd90``; ``python -m tests.host.test_compile_bwd90_wide`` writes ``bwd90_wide_limits.json`` anew.
"""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from flash4.jit import compile as jit_compile
from flash4.passes.bwd_config import FINISH, PREPARE, passes_of
from flash4.problem import AttentionProblem
from flash4.sm90.bwd_config import MMA_WARPGROUPS
from flash4.sm90.bwd_joint_roles import JointBackwardRoles
from flash4.sm90.bwd_wide_config import WideBackwardConfig, choose_config
from flash4.sm90.bwd_wide_roles import WideBackwardRoles
from flash4.sm90.fwd_config import MMA_ROWS, SMEM_ALIGN, SMEM_LIMIT
from tests.host.test_compile_bwd90 import (
    EVERYTHING,
    LENGTHS,
    MASK,
    PACKED,
    PHASES,
    READING,
    SCORE,
    WINDOW_TURNS,
    compile_all,
)
from tests.host.test_compile_fwd90 import MMA_K, SLACK, calls

LIMITS = Path(__file__).with_name("bwd90_wide_limits.json")
KERNEL = "flash4.sm90.bwd_wide:WideBackwardSm90"


def config_for(head_dim, head_dim_v, causal=False, bf16=True, **facts):
    """Config that a call with these facts gets."""
    dtype = torch.bfloat16 if bf16 else torch.float16
    problem = AttentionProblem(dtype, 1, 4096, 4096, 1, 1, head_dim, head_dim_v, causal, **facts)
    return choose_config(problem)[0]


CONFIGS = {
    f"{d}/{dv} {name}": config_for(d, dv, **facts)
    for d, dv, name, facts in (
        (256, 256, "full", {}),
        (256, 256, "causal", {"causal": True}),
        (256, 256, "causal, fp16", {"causal": True, "bf16": False}),
        (192, 128, "full", {}),
        (192, 128, "causal", {"causal": True}),
        (192, 192, "causal", {"causal": True}),
        (256, 64, "causal", {"causal": True}),
        (128, 256, "causal", {"causal": True}),
        (256, 192, "full", {}),
        (256, 256, "causal window", {"causal": True, "window_left": True}),
        (256, 256, "causal, cap", {"causal": True, "softcap": True}),
        (256, 256, "causal, alibi", {"causal": True, "alibi": True}),
        (256, 256, "causal, turns", {"causal": True, "deterministic": True}),
        (256, 256, "causal window, turns", WINDOW_TURNS),
        (192, 128, "causal window, turns", WINDOW_TURNS),
        (256, 256, "everything", EVERYTHING),
        (256, 256, "everything, turns", EVERYTHING | {"deterministic": True}),
        (192, 128, "everything", EVERYTHING),
        (128, 256, "everything", EVERYTHING),
        (256, 128, "everything", EVERYTHING),
        (192, 128, "packed", PACKED),
        (256, 256, "causal, all lengths", LENGTHS | {"causal": True}),
        (
            256,
            256,
            "everything, turns, all lengths",
            EVERYTHING | LENGTHS | {"deterministic": True},
        ),
        (192, 128, "causal, score_mod", {"causal": True} | SCORE),
        (192, 128, "mods that read", READING),
        (256, 256, "causal, score_mod", {"causal": True} | SCORE),
        (256, 256, "mask_mod", MASK),
        (192, 128, "mods, everything, all lengths", EVERYTHING | LENGTHS | SCORE | MASK),
    )
}
# Not chosen: CTAs that share loads alone, and a single one at 256/256.
CONFIGS |= {
    f"{name}, pairs": replace(CONFIGS[name], ctas=2, joint=False)
    for name in ("256/256 full", "256/256 causal, turns", "256/256 everything", "192/128 causal")
}
CONFIGS["256/256 full, one CTA"] = replace(CONFIGS["256/256 full"], ctas=1, joint=False)
TOO_LARGE = WideBackwardConfig(True, 256, 256, True, do_stages=2)


@pytest.fixture(scope="module")
def compiled():
    return compile_all({name: (KERNEL, config) for name, config in CONFIGS.items()})


def products(config: WideBackwardConfig) -> tuple[int, int]:
    """WGMMAs that a step takes of ``mma_v`` and of ``mma_k``: each contracts 16 numbers."""
    over_queries, over_keys = config.tile_m // MMA_K, MMA_ROWS // MMA_K
    parts = [len(range(group, config.dq_parts, MMA_WARPGROUPS)) for group in (0, 1)]
    if config.joint:
        parts = [2, 2]  # one, over the keys of both CTAs
    # A group without a second part is committed all the same, for which ptxas takes a WGMMA of nothing.
    of_v, of_k = (over_keys * count + (count == 1) for count in parts)
    of_v += config.tile_d // MMA_K + over_queries  # S, dV
    of_k += config.tile_dv // MMA_K + over_queries  # dP, dK
    return of_v, of_k


@pytest.mark.parametrize("name", CONFIGS)
def test_resources(name, compiled):
    config, found = CONFIGS[name], compiled[name]
    assert found.spill_loads == found.spill_stores == 0, f"spills: {found}"
    assert not found.serialised, f"MMAs are serialised: {found}"
    phases = PHASES + config.left  # ``mma_k`` has no masks
    roles = JointBackwardRoles if config.joint else WideBackwardRoles
    waits = calls(roles.mma_v, phases)["wait_mma"] + calls(roles.mma_k, 1)["wait_mma"]
    of_v, of_k = products(config)
    exponentials = config.tile_m * MMA_ROWS // 128 * (1 + config.softcap)
    assert found.waits == waits, found
    assert found.hgmma == phases * of_v + of_k, found
    again = 1 if config.score_mod else 0  # by ``mma_k``
    assert found.exp2 == (phases + again) * exponentials, found
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
    for d, dv, dlse in ((192, 128, False), (256, 192, True), (256, 256, True)):
        prepare, finish = passes_of(config_for(d, dv), dlse)
        jobs[d, dv, PREPARE], jobs[d, dv, FINISH] = (PREPARE, prepare), (FINISH, finish)
    for name, found in compile_all(jobs).items():
        assert found.spill_loads == found.spill_stores == 0, (name, found)
        assert found.registers <= 128, (name, found)


def test_what_shared_memory_cannot_hold_is_refused():
    assert not TOO_LARGE.fits
    with pytest.raises(RuntimeError, match="bytes of shared memory"):
        jit_compile.compile_kernel(KERNEL, TOO_LARGE, "sm_90a")


@pytest.mark.parametrize("causal", [False, True])
def test_every_config_fits(causal):
    """More than is compiled here: all head dims, by the graph's sums."""
    for d, dv in product(range(8, 257, 8), repeat=2):
        config = config_for(d, dv, causal)
        assert config.graph.smem_bytes + SMEM_ALIGN <= SMEM_LIMIT, (d, dv)
        assert config.graph.registers <= config.graph.launch_registers
        assert config.tile_d >= d and config.tile_dv >= dv
        assert config_for(config.tile_d, config.tile_dv, causal) == config


if __name__ == "__main__":
    jobs = {name: (KERNEL, config) for name, config in CONFIGS.items()}
    counts = {name: found.instructions for name, found in compile_all(jobs).items()}
    LIMITS.write_text(json.dumps(counts, indent=1) + "\n", "utf-8")
