"""What the Blackwell backward's config says of a call: registers, runs, mods, sections."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from flash4.common.graph import BARRIER_BYTES
from flash4.common.kv_tiles import KvTileSchedule
from flash4.dispatch import backward_section, plan_backward
from flash4.problem import AttentionProblem
from flash4.sm100.bwd_config import BackwardConfig, can_implement, choose_config
from flash4.sm100.bwd_wide_config import WideBackwardConfig
from flash4.sm100.fwd_config import SMEM_ALIGN

SIZES = (torch.bfloat16, 4, 8192, 8192, 16, 16)
MODS = {"score_mod": 1, "score_mod_bwd": 2, "mask_mod": 3}


def config_of(*dims, causal=False, **facts):
    """Config that a call gets."""
    return choose_config(AttentionProblem(*SIZES, *dims, causal, **facts))[0]


def test_a_score_mod_needs_its_derivative():
    problem = AttentionProblem(*SIZES, 128, 128, False, **MODS)
    assert can_implement(problem) is None
    assert "score_mod_bwd" in can_implement(replace(problem, score_mod_bwd=0))
    with pytest.raises(ValueError, match="go together"):
        BackwardConfig(True, 64, 64, False, score_mod=1)
    with pytest.raises(ValueError, match="aux without a mod"):
        BackwardConfig(True, 64, 64, False, aux=1)


@pytest.mark.parametrize("dims", [(128, 128), (96, 64)], ids=str)
def test_mods_at_head_dim_128_run_as_a_pair(dims):
    """Unless lengths differ, for which pairs are not built."""
    for mods in (MODS, {"mask_mod": 3}):
        assert config_of(*dims, window_left=True, **mods).ctas == 2
        assert config_of(*dims, cu_q=True, cu_k=True, **mods).ctas == 1
        assert config_of(64, 64, **mods).ctas == 1


def test_registers_and_runs_of_any_config():
    """All registers of a CTA at most, and whole runs of each part of the queries."""
    flags = ("left", "softcap", "alibi", "cu_q", "ordered")
    for dims, ctas, mods in product((64, 128), (1, 2), ({}, MODS, {"mask_mod": 3, "aux": 1})):
        for given in product((False, True), repeat=len(flags)):
            facts = dict(zip(flags, given, strict=True))
            if ctas == 2 and (dims == 64 or facts["cu_q"]):
                continue
            config = BackwardConfig(True, dims, dims, False, ctas=ctas, **facts, **mods)
            assert config.graph.registers <= config.graph.launch_registers
            queries = config.queries
            assert config.run in (queries, queries // 2, queries // 4, queries // 8)
            assert config.run < queries or not config.score_mod, "P is made twice by runs alone"


NARROW, WIDE = (
    (
        BackwardConfig(True, 128, 64, True, cu_q=True),
        BackwardConfig(True, 128, 128, False, ctas=2),
    ),
    (
        WideBackwardConfig(True, 192, 128, True, cu_k=True),
        WideBackwardConfig(True, 256, 256, True, splits=2),
    ),
)


@pytest.mark.parametrize("config", [*NARROW, *WIDE], ids=lambda c: f"{c.tile_d}/{c.tile_dv}")
def test_buffers_and_barriers_have_places(config):
    """One behind the other, aligned as TMA and swizzles ask, of the memory that the graph says."""
    graph = config.graph
    sizes = {("buffer", b.name): b.nbytes for b in graph.buffers}
    sizes |= {("full", r.name): BARRIER_BYTES * r.stages for r in graph.rings}
    sizes |= {("empty", r.name): BARRIER_BYTES * r.stages for r in graph.rings if r.releases}
    sizes |= {("signal", s.name): BARRIER_BYTES for s in graph.signals}
    places = graph.places()
    assert places.keys() == sizes.keys()
    for (kind, name), at in places.items():
        asked = min(SMEM_ALIGN, sizes[kind, name]) if kind == "buffer" else BARRIER_BYTES
        assert at % asked == 0, name
    ranges = sorted((at, at + sizes[name]) for name, at in places.items())
    assert [end for _, end in ranges[:-1]] == [at for at, _ in ranges[1:]] and ranges[0][0] == 0
    assert ranges[-1][1] == graph.placed_bytes < graph.smem_bytes


@pytest.mark.parametrize(("ctas", "ordered"), [*product((1, 2), (False, True))])
def test_sections_share_causal_tiles_out(ctas, ordered):
    """As evenly as some sizes of a section allow, none of which is far from what L2 holds."""
    config = BackwardConfig(True, 128, 128, True, ctas=ctas, ordered=ordered)
    problem = AttentionProblem(*SIZES, 128, 128, True, deterministic=ordered)
    found = backward_section(problem, config, 148)
    if ordered:  # a group is a wave
        assert found == 148 // ctas // config.blocks().group
        return
    assert config.least_heads <= found <= config.least_heads * 3 // 2
    grid, lengths = plan_backward(problem, "sm_100a", 148).grid, (8192, 8192)
    grid = replace(grid, n_blocks=8192 // config.tile_n)
    imbalances = {
        heads: KvTileSchedule(config.blocks(), grid, heads, 0, 148 // ctas, *lengths).imbalance()
        for heads in (config.least_heads, found)
    }
    assert imbalances[found] == min(imbalances.values()) < 1.05
