"""The Blackwell backward for head dims above 128 compiles for what ships, within limits that are checked in.

The tests compile a few; ``python -m tests.host.test_compile_bwd100_wide --all`` every kind. Nothing here has run on a GPU.
What is counted, and ``bwd100_wide_limits.json``, as in ``test_compile_bwd100``, whose tools these are.
"""

import argparse
import json
from pathlib import Path

import pytest

from flash4.sim.sm100_bwd import check_limits
from flash4.sm100.bwd_config import SMEM_LIMIT
from flash4.sm100.bwd_graph import SLICE
from flash4.sm100.bwd_wide_config import WideBackwardConfig
from tests.host.test_bwd100_wide_roles import config_for
from tests.host.test_compile_bwd100 import (
    EVERYTHING,
    LENGTHS,
    LOOPS,
    MASK,
    PACKED,
    READING,
    SCORE,
    check_counts,
    compile_all,
    instruction_descriptor,
)

LIMITS = Path(__file__).with_name("bwd100_wide_limits.json")


def shipped_mods() -> dict[str, WideBackwardConfig]:
    """Kinds with mods."""
    return {
        "192/128 score_mod": config_for(192, 128, **SCORE),
        "192/128 causal, mask_mod": config_for(192, 128, True, **MASK),
        "192/128 mods that read": config_for(192, 128, **READING),
        "192/128 causal, mods, everything": config_for(
            192, 128, True, **SCORE, **MASK, **EVERYTHING
        ),
        "192/128 packed, score_mod": config_for(192, 128, **SCORE, **PACKED),
        "192/128 mods that read, everything, lengths": config_for(
            192, 128, True, **READING, **EVERYTHING, **LENGTHS
        ),
        "256/64 causal, score_mod, softcap": config_for(256, 64, True, **SCORE, softcap=True),
        "256/256 causal, score_mod": config_for(256, 256, True, **SCORE),
        "256/256 mask_mod, lengths": config_for(256, 256, **MASK, **LENGTHS),
        "256/256 causal, mods, everything": config_for(
            256, 256, True, **SCORE, **MASK, **EVERYTHING
        ),
        "256/256 mods that read, everything, lengths": config_for(
            256, 256, True, **READING, **EVERYTHING, **LENGTHS
        ),
        "128/256 mods that read": config_for(128, 256, **READING),
    }


def shipped() -> dict[str, tuple[WideBackwardConfig, str]]:
    """Name -> config and target, of every kind that ships."""
    window = {"window_left": True, "window_right": True}
    kinds = {
        "192/128 full": config_for(192, 128),
        "192/128 causal": config_for(192, 128, True),
        "192/128 causal, fp16, deterministic": config_for(
            192, 128, True, bf16=False, deterministic=True
        ),
        "192/128 window, alibi": config_for(192, 128, **window, alibi=True),
        "192/128 causal, packed": config_for(192, 128, True, **PACKED),
        "192/128 softcap": config_for(192, 128, softcap=True),
        "192/128 causal, everything": config_for(192, 128, True, **EVERYTHING),
        "192/128 packed, window, alibi": config_for(192, 128, **PACKED, **window, alibi=True),
        "192/128 causal, everything, lengths": config_for(192, 128, True, **EVERYTHING, **LENGTHS),
        "256/256 full": config_for(256, 256),
        "256/256 causal": config_for(256, 256, True),
        "256/256 causal, fp16, everything": config_for(256, 256, True, bf16=False, **EVERYTHING),
        "256/256 in use, window": config_for(256, 256, used_q=True, used_k=True, **window),
        "256/256 causal, packed": config_for(256, 256, True, **PACKED),
        "160/160 causal": config_for(160, 160, True),
        "256/128 causal, packed": config_for(256, 128, True, **PACKED),
        "256/128 full, softcap": config_for(256, 128, softcap=True),
        "128/256 causal, alibi": config_for(128, 256, True, alibi=True),
        "136/8 causal": config_for(136, 8, True),
        "8/192 full": config_for(8, 192),
        "256/64 full": config_for(256, 64),
        "256/64 softcap": config_for(256, 64, softcap=True),
    } | shipped_mods()
    found = {name: (config, "sm_100a") for name, config in kinds.items()}
    of_103 = ("192/128 full", "192/128 causal", "256/256 full", "256/256 causal, fp16, everything")
    of_103 += (*shipped_mods(), "192/128 causal, everything, lengths", "256/64 softcap")
    found |= {f"{name}, sm_103a": (kinds[name], "sm_103a") for name in of_103}
    of_110 = ("256/256 causal", "192/128 causal, mods, everything")
    return found | {f"{name}, sm_110a": (kinds[name], "sm_110a") for name in of_110}


EVERY_KIND = shipped()
TESTED = (
    "192/128 full",
    "192/128 causal, fp16, deterministic",
    "256/256 causal, packed",
    "256/256 causal, fp16, everything, sm_103a",
    "256/128 full, softcap",
    "192/128 causal, everything, lengths",
    "256/64 softcap, sm_103a",
    "192/128 causal, mask_mod",
    "192/128 causal, mods, everything",
    "192/128 mods that read, everything, lengths, sm_103a",
    "256/256 causal, score_mod, sm_103a",
    "256/256 mods that read, everything, lengths",
)
CONFIGS = {name: EVERY_KIND[name] for name in TESTED}


def mmas(c: WideBackwardConfig) -> int:
    """MMAs in the code: of a tile's first step, of the loop and of the last step."""
    d, dv, queries, keys = (n // SLICE for n in (c.tile_d, c.tile_dv, c.tile_m, c.tile_n))
    return 2 * (d + dv + queries + queries + keys * len(c.dq_accumulators))


@pytest.fixture(scope="module")
def compiled():
    return compile_all(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_spills(name, compiled):
    assert compiled[name]["loop spills"] == compiled[name]["spills"] == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_code_is_what_the_schedule_says(name, compiled):
    """Waits, posts and barriers of a step, and MMAs: none is gone, none came in addition."""
    (config, _), found = CONFIGS[name], compiled[name]
    assert found["registers"] == config.graph.launch_registers // config.graph.threads
    assert found["mmas"] == mmas(config)
    for role, count in {"mma": 5, "compute": 3, "reduce": 1}.items():
        assert found[f"{role} loop waits"] == count, role
    assert found["load loop waits"] in (2, 4)  # for Q and dO; some loops are unrolled to two steps
    assert found["mma loop posts"] == 5
    assert found["compute loop posts"] == 2
    assert found["reduce loop posts"] == 1
    assert found["compute loop barriers"] == found["masked compute loop barriers"] == 0
    assert found["reduce loop barriers"] == config.dq_steps


@pytest.mark.parametrize("name", CONFIGS)
def test_instruction_descriptors_are_those_of_the_isa(name, compiled):
    c, _ = CONFIGS[name]
    expected = {
        instruction_descriptor(c, c.tile_n, c.tile_m, False, False),
        instruction_descriptor(c, c.tile_n, c.part_dv, False, True),
        instruction_descriptor(c, c.tile_n, c.part_d, False, True),
    }
    products = {rows for _, rows in c.dq_accumulators}
    expected |= {instruction_descriptor(c, rows, c.tile_m, True, True) for rows in products}
    assert compiled[name]["descriptors"] == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_instruction_counts(name, compiled):
    check_counts(compiled[name], json.loads(LIMITS.read_text("utf-8"))[name])


@pytest.mark.parametrize("name", EVERY_KIND)
def test_limits_of_the_hardware(name):
    config, _ = EVERY_KIND[name]
    check_limits(config)
    assert config.fits and config.graph.smem_bytes <= SMEM_LIMIT


def main():
    """Write the limits; or compile every kind, print counts, and fail if anything spills."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("--all", action="store_true")
    if options.parse_args().all:
        found = compile_all(EVERY_KIND)
        for name, counts in found.items():
            shown = ", ".join(f"{x} {counts[f'{x} loop']}" for x in LOOPS)
            print(f"{name}: {shown}; {counts['spills']} spills, {counts['loop spills']} in loops")
        raise SystemExit(any(counts["spills"] for counts in found.values()))
    counted = ("kernel", *(f"{name} loop" for name in LOOPS))
    found = {
        name: {key: counts[key] for key in counted} for name, counts in compile_all(CONFIGS).items()
    }
    LIMITS.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
