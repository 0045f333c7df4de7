"""The Hopper backward and the kernels around it compile for every config that ships, within limits that are checked in.

As ``test_compile_fwd90``; ``python -m tests.host.test_compile_bwd90`` writes ``bwd90_limits.json`` anew.
"""

import json
import multiprocessing
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch

from flash4.common import mods
from flash4.jit import compile as jit_compile
from flash4.jit.inspect import Resources, resources
from flash4.passes.bwd_config import FINISH, PREPARE, passes_of
from flash4.problem import AttentionProblem
from flash4.sm90.bwd_alternate_roles import AlternateRoles
from flash4.sm90.bwd_config import MMA_WARPGROUPS, TILE_N, BackwardConfig, choose_config
from flash4.sm90.bwd_late_roles import LateRoles
from flash4.sm90.bwd_ops import PARTS_OF_CAP
from flash4.sm90.bwd_roles import BackwardRoles
from flash4.sm90.fwd_config import SMEM_ALIGN, SMEM_LIMIT
from tests import strategies
from tests.host.test_compile_fwd90 import MMA_K, SLACK, WORKERS, calls

LIMITS = Path(__file__).with_name("bwd90_limits.json")
KERNEL = "flash4.sm90.bwd:BackwardSm90"
PHASES = 2  # with and without a mask; a window at the left makes a third
DIMS = (64, 96, 128)


def config_for(head_dim, head_dim_v, causal=False, bf16=True, **facts):
    """Config that a call with these facts gets."""
    dtype = torch.bfloat16 if bf16 else torch.float16
    problem = AttentionProblem(dtype, 1, 4096, 4096, 1, 1, head_dim, head_dim_v, causal, **facts)
    return choose_config(problem)[0]


CONFIGS = {
    f"{d}/{dv} {'causal' if causal else 'full'}{'' if bf16 else ', fp16'}": config_for(
        d, dv, causal, bf16
    )
    for d, dv, causal, bf16 in (
        *((d, d, causal, True) for d in DIMS for causal in (False, True)),
        *((d, dv, True, True) for d in DIMS for dv in DIMS if d != dv),
        (128, 128, True, False),
        (64, 64, False, False),
    )
}
EVERYTHING = {"window_left": True, "window_right": True, "softcap": True, "alibi": True}
PACKED = {"cu_q": True, "cu_k": True}
LENGTHS = PACKED | {"used_q": True, "used_k": True}
WINDOW_TURNS = {"causal": True, "window_left": True, "deterministic": True}
CONFIGS |= {
    f"{d}/{dv} {name}": config_for(d, dv, **facts)
    for d, dv, name, facts in (
        (128, 128, "causal window", {"causal": True, "window_left": True}),
        (64, 64, "window", {"window_left": True, "window_right": True}),
        (128, 128, "causal, cap", {"causal": True, "softcap": True}),
        (64, 64, "cap", {"softcap": True}),
        (128, 128, "alibi", {"alibi": True}),
        (64, 64, "causal, alibi", {"causal": True, "alibi": True}),
        (128, 128, "causal, turns", {"causal": True, "deterministic": True}),
        (64, 64, "turns", {"deterministic": True}),
        (64, 64, "causal, alibi, turns", {"causal": True, "alibi": True, "deterministic": True}),
        (128, 128, "causal window, turns", WINDOW_TURNS),
        (64, 64, "causal window, turns", WINDOW_TURNS),
        (128, 128, "everything, turns", EVERYTHING | {"deterministic": True}),
        (128, 128, "causal window, cap", {"causal": True, "window_left": True, "softcap": True}),
        (128, 128, "packed", PACKED),
        (128, 128, "causal, packed", PACKED | {"causal": True}),
        (64, 64, "packed", PACKED),
        (64, 64, "causal, all lengths", LENGTHS | {"causal": True}),
        (64, 64, "alibi, in use", {"alibi": True, "used_q": True, "used_k": True}),
        (96, 96, "causal, packed, turns", PACKED | {"causal": True, "deterministic": True}),
        (
            128,
            128,
            "everything, turns, all lengths",
            EVERYTHING | LENGTHS | {"deterministic": True},
        ),
        (64, 64, "everything, turns, all lengths", EVERYTHING | LENGTHS | {"deterministic": True}),
        *(
            (d, dv, "everything", EVERYTHING)
            for d in DIMS
            for dv in DIMS
            if d == dv or d + dv > 192
        ),
    )
}
SCORE = {
    "score_mod": mods.register(strategies.bent),
    "score_mod_bwd": mods.register(strategies.bent_bwd),
}
MASK = {"mask_mod": mods.register(strategies.dilated)}
READING = {  # mods that read tensors
    "score_mod": mods.register(strategies.bias_of_heads),
    "score_mod_bwd": mods.register(strategies.bias_of_heads_bwd),
    "mask_mod": mods.register(strategies.same_document),
    "aux": mods.encode_aux([torch.empty(4, 8), torch.empty(2, 8, dtype=torch.int32)]),
}
CONFIGS |= {
    f"{d}/{dv} {name}": config_for(d, dv, **facts)
    for d, dv, name, facts in (
        (64, 64, "causal, score_mod", {"causal": True} | SCORE),
        (64, 64, "mods, everything, all lengths", EVERYTHING | LENGTHS | SCORE | MASK),
        (64, 64, "mods that read", READING),
        (128, 128, "causal, mask_mod", {"causal": True} | MASK),
        (128, 128, "causal, score_mod", {"causal": True} | SCORE),
        (128, 128, "mods that read, packed", PACKED | READING),
        (
            128,
            128,
            "mods, everything, turns, all lengths",
            EVERYTHING | LENGTHS | SCORE | MASK | {"deterministic": True},
        ),
        (96, 128, "mods that read, everything", EVERYTHING | READING),
    )
}
TOO_LARGE = BackwardConfig(True, 128, 128, 96, True, swap_dq=True)


def compile_one(kernel: str, config) -> Resources:
    """Compile a config and count; runs in a worker process. The compiler must have nothing to warn of."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        jit_compile.compile_kernel(kernel, config, "sm_90a", folder)
        (cubin,) = Path(folder).glob("*.cubin")
        return resources(cubin)


def compile_all(jobs: dict) -> dict[object, Resources]:
    """Resources of (kernel, config) pairs by name."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        found = pool.map(compile_one, *zip(*jobs.values(), strict=True))
        return dict(zip(jobs, found, strict=True))


@pytest.fixture(scope="module")
def compiled():
    return compile_all({name: (KERNEL, config) for name, config in CONFIGS.items()})


def products(config: BackwardConfig) -> int:
    """WGMMAs of one warpgroup that a step takes: each contracts 16 numbers."""
    over_d, over_dv = config.tile_d // MMA_K, config.tile_dv // MMA_K
    over_queries, over_keys = config.tile_m // MMA_K, TILE_N // MMA_K
    return over_d + over_dv + 2 * over_queries + over_keys  # S, dP, dV and dK, dQ


@pytest.mark.parametrize("name", CONFIGS)
def test_resources(name, compiled):
    config, found = CONFIGS[name], compiled[name]
    assert found.spill_loads == found.spill_stores == 0, f"spills: {found}"
    assert not found.serialised, f"MMAs are serialised: {found}"
    phases = PHASES + config.left
    again = 1 if config.score_mod else 0  # P is made twice, but no tanh
    # Of a cap: near zero without an exponential of its own, and beyond.
    ways = 1 + config.softcap + config.near_cap + again
    exponentials = config.tile_m * TILE_N // MMA_WARPGROUPS // 128 * ways
    exponentials -= PARTS_OF_CAP * config.near_cap  # the last, in which both ways end
    roles, rest = (LateRoles, TILE_N // MMA_K) if config.late else (BackwardRoles, 0)
    roles = AlternateRoles if config.alternate else roles
    assert found.waits == calls(roles.mma, phases)["wait_mma"], found
    assert found.hgmma == phases * products(config) + rest, found  # the last dQ behind the loop
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
    for d, dv, dlse, lengths in (
        (64, 64, False, {}), (96, 128, True, {}), (128, 128, True, {}), (128, 128, True, {"alibi": True}),
        (64, 64, True, PACKED), (128, 128, True, LENGTHS), (128, 128, False, {"used_q": True}),
    ):  # fmt: skip
        prepare, finish = passes_of(config_for(d, dv, **lengths), dlse)
        name = (d, dlse, *lengths)
        jobs[*name, PREPARE] = PREPARE, prepare
        jobs[*name, FINISH] = FINISH, finish
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
    for d, dv in product(range(8, 129, 8), repeat=2):
        config = config_for(d, dv, causal)
        assert config.graph.smem_bytes + SMEM_ALIGN <= SMEM_LIMIT, (d, dv)
        assert config.graph.registers <= config.graph.launch_registers
        assert config.tile_d >= d and config.tile_dv >= dv
        assert config_for(config.tile_d, config.tile_dv, causal) == config


if __name__ == "__main__":
    jobs = {name: (KERNEL, config) for name, config in CONFIGS.items()}
    counts = {name: found.instructions for name, found in compile_all(jobs).items()}
    LIMITS.write_text(json.dumps(counts, indent=1) + "\n", "utf-8")
