"""The clocked Blackwell backward: near the speeds that were published for flash-attn-4's schedule, and ours ahead in the same model."""

from dataclasses import replace

import pytest

from flash4.sim.chips import B200
from flash4.sim.sm100_bwd_clock import Shape, Tiles, costs_of, time_tiles
from flash4.sim.sm100_bwd_published import SEQLENS, SPEEDS, model
from flash4.sm100.bwd_config import BackwardConfig
from flash4.sm100.bwd_roles import BackwardRoles
from flash4.sm100.bwd_wide_config import WideBackwardConfig
from flash4.sm100.bwd_wide_roles import KeptRoles


@pytest.mark.parametrize("call", SPEEDS)
def test_published_speeds(call):
    """Constants are those that ten speeds of the forward gave: nothing is fitted here."""
    assert model(SEQLENS[0], call, True, B200) == pytest.approx(SPEEDS[call], rel=0.1)


@pytest.mark.parametrize("causal", [False, True])
def test_our_schedule_is_ahead(causal):
    theirs, ours = (model(SEQLENS[0], (2, causal), which, B200) for which in (True, False))
    assert ours >= 1.08 * theirs


WIDE = {
    (192, 128): (WideBackwardConfig(True, 192, 128, False), BackwardRoles, 1.16),
    (256, 256): (WideBackwardConfig(True, 256, 256, False, splits=2), KeptRoles, 1.35),
}


@pytest.mark.parametrize("dims", WIDE)
def test_wide_steps_are_near_their_bound(dims):
    """Shared memory's, without loads. A CTA's step, of which all CTAs of a tile have one."""
    config, roles, most = WIDE[dims]
    bound = config.bounds()["shared memory"] / config.splits
    assert bound <= costs_of(Shape(config, roles), B200).step <= most * bound


@pytest.mark.parametrize("ctas", [1, 2])
def test_nothing_is_faster_than_its_unit(ctas):
    config = BackwardConfig(True, 128, 128, False, ctas=ctas)
    shape = Shape(config)
    assert costs_of(shape, B200).step >= max(config.bounds().values())
    slower = replace(B200, mma_flops=B200.mma_flops / 2)
    assert time_tiles(shape, slower, Tiles(8, 1)).now > time_tiles(shape, B200, Tiles(8, 1)).now
