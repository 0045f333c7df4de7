"""The Blackwell backward compiles for every kind of config that ships, within limits that are checked in.

The tests compile a few; ``python -m tests.host.test_compile_bwd100 --all`` every kind. Nothing here has run on a GPU. Spills, MMAs, exponentials, waits, posts and barriers must be what config and schedule say.
Instruction counts, of the kernel and of each role's inner loop, are those of one compiler; ``bwd100_limits.json`` holds
them, and ``python -m tests.host.test_compile_bwd100`` writes it anew after a change of the kernel that is meant to change them.
"""

import argparse
import json
import multiprocessing
import re
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flash4.common import mods
from flash4.jit import compile as jit_compile
from flash4.jit.inspect import count_resources, disassemble
from flash4.problem import AttentionProblem
from flash4.sim.sm100_bwd import check_limits
from flash4.sm100.bwd import BackwardSm100
from flash4.sm100.bwd_config import SMEM_LIMIT, BackwardConfig, can_implement, choose_config
from flash4.sm100.bwd_graph import SLICE, TmemMap
from flash4.sm100.bwd_wide_config import WideBackwardConfig
from tests import strategies
from tests.host.sass_loops import loops

LIMITS = Path(__file__).with_name("bwd100_limits.json")
LOOPS = ("mma", "compute", "masked compute", "reduce", "load")
SLACK = 1.01  # of the instruction counts
WORKERS = 2
KERNELS = {
    BackwardConfig: "flash4.sm100.bwd:BackwardSm100",
    WideBackwardConfig: "flash4.sm100.bwd_wide:WideBackwardSm100",
}


def problem(head_dim, head_dim_v, causal=False, bf16=True, **facts):
    dtype = torch.bfloat16 if bf16 else torch.float16
    sizes = (1, 4096, 4096, 2, 1, head_dim, head_dim_v)
    return AttentionProblem(dtype, *sizes, causal, **facts)


def config_for(*arguments, **keywords) -> BackwardConfig:
    """Config that a call gets."""
    facts = problem(*arguments, **keywords)
    assert can_implement(facts) is None
    return choose_config(facts)[0]


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
PACKED = {"cu_q": True, "cu_k": True}
LENGTHS = PACKED | {"used_q": True, "used_k": True}
EVERYTHING = {"softcap": True, "alibi": True, "window_left": True, "deterministic": True}


def shipped_mods() -> dict[str, BackwardConfig]:
    """Kinds with mods."""
    return {
        "64/64 causal, score_mod": config_for(64, 64, True, **SCORE),
        "64/64 mask_mod": config_for(64, 64, **MASK),
        "64/128 mods that read, lengths": config_for(64, 128, **READING, **LENGTHS),
        "128/128 score_mod": config_for(128, 128, **SCORE),
        "128/128 causal, mask_mod": config_for(128, 128, True, **MASK),
        "128/128 mods that read": config_for(128, 128, **READING),
        "128/128 causal, mods, everything": config_for(
            128, 128, True, **SCORE, **MASK, **EVERYTHING
        ),
        "128/128 packed, score_mod": config_for(128, 128, **SCORE, **PACKED),
        "128/128 packed, mask_mod": config_for(128, 128, **MASK, **PACKED),
        "128/128 mods that read, everything, lengths": config_for(
            128, 128, True, **READING, **EVERYTHING, **LENGTHS
        ),
    }


def shipped() -> dict[str, tuple[BackwardConfig, str]]:
    """Name -> config and target, of every kind that ships."""
    window = {"window_left": True, "window_right": True}
    kinds = {
        "64/64 full": config_for(64, 64),
        "64/64 causal, fp16": config_for(64, 64, True, bf16=False),
        "64/64 causal, everything": config_for(64, 64, True, **EVERYTHING),
        "128/128 full": config_for(128, 128),
        "128/128 causal": config_for(128, 128, True),
        "128/128 causal, fp16, deterministic": config_for(
            128, 128, True, bf16=False, deterministic=True
        ),
        "128/128 window": config_for(128, 128, **window),
        "128/128 causal, window, alibi, deterministic": config_for(
            128, 128, True, window_left=True, alibi=True, deterministic=True
        ),
        "128/128 alibi": config_for(128, 128, alibi=True),
        "128/128 softcap": config_for(128, 128, softcap=True),
        "128/128 softcap, window": config_for(128, 128, softcap=True, **window),
        "128/128 causal, everything": config_for(128, 128, True, **EVERYTHING),
        "128/64 causal": config_for(128, 64, True),
        "128/64 causal, packed": config_for(128, 64, True, cu_q=True, cu_k=True),
        "128/128 in use, window": config_for(128, 128, used_q=True, used_k=True, **window),
        "64/64 packed, softcap, alibi": config_for(
            64, 64, cu_q=True, cu_k=True, softcap=True, alibi=True
        ),
        "64/128 alibi": config_for(64, 128, alibi=True),
        "64/128 softcap, window": config_for(64, 128, softcap=True, **window),
        "128/128 causal, packed, alibi": config_for(128, 128, True, alibi=True, **PACKED),
        "128/128 causal, everything, lengths": config_for(128, 128, True, **EVERYTHING, **LENGTHS),
    } | shipped_mods()
    alone = replace(kinds["128/128 full"], ctas=1)
    kinds["128/128 full, one CTA"] = alone
    kinds["128/128 causal, one CTA, deterministic"] = replace(alone, causal=True, ordered=True)
    found = {name: (config, "sm_100a") for name, config in kinds.items()}
    of_103 = ("64/64 full", "128/128 full", "128/128 causal", "128/128 full, one CTA")
    of_103 += ("128/128 causal, fp16, deterministic", "64/64 causal, everything")
    of_103 += tuple(shipped_mods()) + ("128/128 causal, everything, lengths",)
    found |= {f"{name}, sm_103a": (kinds[name], "sm_103a") for name in of_103}
    return found | {"128/128 causal, sm_110a": (kinds["128/128 causal"], "sm_110a")}


EVERY_KIND = shipped()
TESTED = (
    "64/64 full, sm_103a",
    "128/128 full",
    "128/128 causal, fp16, deterministic",
    "128/128 causal, window, alibi, deterministic",
    "128/64 causal, packed",
    "128/128 score_mod, sm_103a",
    "128/128 mods that read, everything, lengths",
)
CONFIGS = {name: EVERY_KIND[name] for name in TESTED}


def loops_of(sass: str, config: BackwardConfig):
    """Name -> loop of each role's steps, the shortest that has what makes it that."""
    inner = loops(sass)
    exponentials = config.run * (2 if config.score_mod else 1)  # P is made twice
    stores = config.queries // 8
    compute = [
        x
        for x in inner
        if x.count("MUFU.EX2") >= exponentials
        and x.count("STTM")
        and x.count("STTM", "STS") > stores
    ][:3]
    plain = min(compute, key=lambda x: x.count())
    return {
        "mma": next(x for x in inner if x.count("UTCHMMA") >= mmas(config) // 2),
        "compute": plain,
        "masked compute": next(x for x in compute if x is not plain),
        "reduce": next(x for x in inner if x.count("UBLKRED")),
        "load": next(x for x in inner if x.count("UTMALDG") >= 2),
    }


def features(sass: str, config: BackwardConfig) -> dict[str, int]:
    """Instructions of the kernel, of the inner loop of each role, and what else is looked at."""
    found, inner = count_resources(sass), loops_of(sass, config)
    counts = {
        "registers": found.registers,
        "spills": found.spill_loads + found.spill_stores,
        "stores": found.spill_stores,
        "loop spills": sum(x.count("LDL", "STL") for x in inner.values()),
        "mmas": found.tcgen05,
        "kernel": found.instructions,
    }
    for name, loop in inner.items():
        counts[f"{name} loop"] = loop.count()
        counts[f"{name} loop spilled"] = loop.count("LDL", "STL")
        counts[f"{name} loop waits"] = loop.count("SYNCS.PHASECHK")
        counts[f"{name} loop posts"] = loop.count("SYNCS.ARRIVE") + loop.count("UTCBAR")
        counts[f"{name} loop barriers"] = loop.count("BAR.SYNC")
    return counts


def mmas(config: BackwardConfig) -> int:
    """MMAs in the code: of S and dP, dV, dK and dQ, of a tile's first step, of the loop and of the last step."""
    d, dv, queries, keys = (
        n // SLICE for n in (config.tile_d, config.tile_dv, config.tile_m, config.tile_n)
    )
    return 2 * (d + dv + queries + queries + keys)


BIG = re.compile(r"(?<![\w.])\d{6,}\b")


def instruction_descriptor(config, rows, columns, a_transposed, b_transposed) -> int:
    """Descriptor of an MMA with float32 accumulators, as the PTX ISA has it."""
    kind = int(config.bf16)
    majors = a_transposed << 15 | b_transposed << 16
    return 1 << 4 | kind << 7 | kind << 10 | majors | columns // 8 << 17 | rows // 16 << 24


def compile_one(case: tuple[BackwardConfig, str]) -> dict[str, int]:
    """Compile a config and count; runs in a worker process. The compiler must have nothing to warn of."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        jit_compile.compile_kernel(KERNELS[type(case[0])], *case, folder)
        (cubin,), (ptx,) = (list(Path(folder).glob(f"*.{kind}")) for kind in ("cubin", "ptx"))
        numbers = {int(text) for text in BIG.findall(ptx.read_text("utf-8"))}
        instructions = {x for x in numbers if x >> 24 in (4, 8, 16) and x & 0x3F == 1 << 4}
        return {**features(disassemble(cubin), case[0]), "descriptors": instructions}


def compile_all(cases) -> dict[str, dict[str, int]]:
    """Counts of configs by name; two processes, because tracing holds the interpreter."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        return dict(zip(cases, pool.map(compile_one, cases.values()), strict=True))


@pytest.fixture(scope="module")
def compiled():
    return compile_all(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_spills(name, compiled):
    assert compiled[name]["loop spills"] == 0
    assert compiled[name]["spills"] == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_code_is_what_the_schedule_says(name, compiled):
    """Waits, posts and barriers of a step, and MMAs: none is gone, none came in addition."""
    (config, _), found = CONFIGS[name], compiled[name]
    pair = config.ctas == 2
    assert found["registers"] == config.graph.launch_registers // config.graph.threads
    assert found["mmas"] == mmas(config)
    waits = {"mma": 7, "compute": 4, "reduce": 1, "load": 2} if pair else {
        "mma": 5, "compute": 3, "reduce": 1, "load": 4
    }  # fmt: skip
    for role, count in waits.items():
        assert found[f"{role} loop waits"] == count, role
    assert found["mma loop posts"] == (3 if pair else 5)
    assert found["compute loop posts"] == (4 if pair else 2)
    assert found["reduce loop posts"] == 1
    assert found["compute loop barriers"] == found["masked compute loop barriers"] == 0
    assert found["reduce loop barriers"] == config.dq_steps


@pytest.mark.parametrize("name", CONFIGS)
def test_instruction_descriptors_are_those_of_the_isa(name, compiled):
    c, _ = CONFIGS[name]
    expected = {
        instruction_descriptor(c, c.tile_n, c.tile_m, False, False),
        instruction_descriptor(c, c.tile_n, c.tile_dv, False, True),
        instruction_descriptor(c, c.tile_n, c.tile_d, False, True),
        instruction_descriptor(c, c.tile_m, c.tile_d, True, True),
    }
    assert compiled[name]["descriptors"] == expected


def check_counts(found: dict, limits: dict):
    """No count is far above what it was when it was last looked at."""
    for key, limit in limits.items():
        assert found[key] <= limit * SLACK, key


@pytest.mark.parametrize("name", CONFIGS)
def test_instruction_counts(name, compiled):
    check_counts(compiled[name], json.loads(LIMITS.read_text("utf-8"))[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_limits_of_the_hardware(name):
    config, _ = CONFIGS[name]
    check_limits(config)
    assert config.fits and config.graph.smem_bytes <= SMEM_LIMIT


def test_slices_lie_where_threads_store_them():
    """Every query of a step once, in the first half of the columns."""
    stored = {}
    for warpgroup in (0, 1):
        for part in (0, 1):
            for i in range(32):
                column = TmemMap.packed(warpgroup, part) + i // 2
                stored[TmemMap.loaded(warpgroup, part) + i] = (column, i % 2)
    for query in range(128):
        within = query % SLICE
        assert stored[query] == (TmemMap.slice_of(query // SLICE) + within // 2, within % 2)
    assert sorted(set(stored.values())) == [
        (column, half) for column in range(64) for half in (0, 1)
    ]
    for warpgroup in (0, 1):  # a warpgroup overwrites only what it has read
        read = {TmemMap.loaded(warpgroup, part) + i for part in (0, 1) for i in range(32)}
        written = {TmemMap.packed(warpgroup, part) + i for part in (0, 1) for i in range(16)}
        assert written <= read


@pytest.mark.parametrize("run", [8, 16, 32])
def test_runs_are_loaded_and_stored_where_parts_are(run):
    """Each of them a part of a part, at a place that is known at run time."""
    for warpgroup in (0, 1):
        places, read = {}, set()
        for part in (0, 1):
            for i in range(32):
                column = TmemMap.packed(warpgroup, part) + i // 2
                places[TmemMap.loaded(warpgroup, part) + i] = (column, i % 2)
        for number in range(64 // run):
            first = TmemMap.loaded_run(warpgroup, number, run)
            column = TmemMap.packed_run(warpgroup, number, run)
            read |= set(range(first, first + run))
            for i in range(run):
                assert places.pop(first + i) == (column + i // 2, i % 2)
        assert not places and len(read) == 64


def test_what_does_not_fit_is_refused():
    class Wide(BackwardConfig):
        k_bytes = 100_000

    with pytest.raises(ValueError, match=f"one CTA has {SMEM_LIMIT}"):
        BackwardSm100(Wide(True, 128, 128, False))


def main():
    """Write the limits; or compile every kind, print counts, and fail if a loop spills."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("--all", action="store_true")
    if options.parse_args().all:
        found = compile_all(EVERY_KIND)
        for name, counts in found.items():
            shown = ", ".join(f"{x} {counts[f'{x} loop']}" for x in LOOPS)
            print(f"{name}: {shown}; {counts['spills']} spills, {counts['loop spills']} in loops")
        raise SystemExit(any(counts["loop spills"] for counts in found.values()))
    counted = ("kernel", *(f"{name} loop" for name in LOOPS))
    found = {
        name: {key: counts[key] for key in counted} for name, counts in compile_all(CONFIGS).items()
    }
    LIMITS.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
