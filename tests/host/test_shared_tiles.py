"""Which calls get tiles that two CTAs share, and how many workers there are then."""

from dataclasses import replace

import pytest
import torch

from flash4 import dispatch
from flash4.dispatch import plan_forward
from flash4.problem import AttentionProblem
from flash4.sm90.fwd_config import ForwardConfig

WORKERS = 132
WIDE = AttentionProblem(torch.bfloat16, 4, 4096, 4096, 8, 8, 256, 256, False)


@pytest.mark.parametrize(
    ("changes", "ctas", "reason"),
    [
        ({}, 2, "at least 1024 keys, 132 tiles"),
        ({"head_dim": 192, "head_dim_v": 128}, 2, "at least 1024 keys"),
        ({"heads_kv": 2}, 2, "at least 1024 keys"),
        ({"seqlen_q": 64, "batch": 8, "heads_q": 128, "seqlen_k": 1024}, 2, "at least 1024 keys"),
        ({"head_dim": 128, "head_dim_v": 128}, 1, "head dims up to 128"),
        ({"head_dim": 192, "head_dim_v": 192}, 1, "a fixed shift"),
        ({"used_k": True}, 1, "sequences of different lengths"),
        ({"window_left": True}, 1, "a left window"),
        ({"seqlen_k": 1023}, 1, "fewer than 1024 keys"),
        ({"causal": True}, 1, "being handed out"),
        ({"window_right": True}, 1, "being handed out"),
        ({"batch": 1}, 1, "fewer than 132 tiles"),
        ({"seqlen_q": 4097}, 1, "half of the last tile"),
        ({"seqlen_q": 128, "batch": 64}, 1, "half of the last tile"),
    ],
)
def test_two_ctas_share_tiles_where_that_was_faster(changes, ctas, reason):
    plan = plan_forward(replace(WIDE, **changes), "sm_90a", WORKERS)
    config = plan.config
    assert config.cluster == ctas
    assert any(reason in why and "to a tile" in why for why in plan.reasons), plan.reasons
    assert config.fits and config.cta_rows == config.tile_m // ctas == 128
    if ctas == 2:
        assert not config.skip and not config.fixed_shift


@pytest.mark.parametrize("multiprocessors", [132, 131, 114, 3, 2, 1])
def test_workers_are_clusters_where_ctas_share_tiles(multiprocessors):
    """Sections and schedule are those of half as many CTAs that each have a tile of their own."""
    plan = plan_forward(WIDE, "sm_90a", multiprocessors)
    clusters = max(1, multiprocessors // 2)
    assert (plan.config.cluster, plan.grid.total) == (2, 512)
    schedule = plan.schedule(multiprocessors)
    used = plan.multiprocessors_of(multiprocessors) // 2
    assert schedule.step == used <= clusters and -(-512 // used) == -(-512 // clusters)
    alone = replace(plan, config=ForwardConfig(True, 256, 256, 256, 64, False))
    section = dispatch.choose_section(plan.problem, alone.config, plan.grid, clusters)
    assert plan.section == section
    assert schedule.imbalance() == alone.schedule(clusters).imbalance()
