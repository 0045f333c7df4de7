"""The clocked Blackwell backward: near the speeds that were published for flash-attn-4's schedule, and ours ahead in the same model."""

from dataclasses import replace

import pytest

from flash4.sim.chips import B200
from flash4.sim.sm100_bwd_clock import Costs, Shape, Tiles, costs_of, time_tiles
from flash4.sim.sm100_bwd_published import SEQLENS, SPEEDS, model
from flash4.sim.sm100_bwd_turns import (
    DETERMINISTIC_SPEEDS,
    Handover,
    config_of,
    cycles,
    schedule_of,
    speed,
)
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


@pytest.mark.parametrize(
    ("call", "least"),
    [
        ((1, False, 8192), 1.4),
        ((1, True, 8192), 1.28),
        ((1, True, 32_768), 1.3),
        ((2, True, 8192), 1.3),
    ],
)
def test_a_fixed_order_is_ahead_of_the_published_one(call, least):
    """Of CTAs that wait for one another's turns, all of a launch."""
    ctas, causal, seqlen = call
    assert speed(config_of(ctas, causal, True), seqlen, B200) >= least * DETERMINISTIC_SPEEDS[call]


def test_turns_cost_what_they_must():
    """Eight CTAs with a head at a time: 1, 2, .. 8 steps each, which the last tiles wait for at the diagonal anyway."""
    schedule, costs = schedule_of(config_of(1, True, True), 1024, 1, 8), Costs(0.0, 1000.0)
    steps = 8 * schedule.grid.head_count
    assert (
        cycles(schedule, costs, None) == cycles(schedule, costs, Handover(0.0, 0.0)) == 1000 * steps
    )
    assert cycles(schedule, costs, Handover(0.0, 3000.0)) >= 3000 * steps
    behind = schedule_of(config_of(1, False, True), 1024, 1, 8)
    first = cycles(behind, costs, Handover(0.0, 0.0))
    trailing = cycles(behind, costs, Handover(0.0, 900.0)) - first
    assert 7 * 900 <= trailing <= 9 * 900, "each tile trails the one before by an addition, once"


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


def test_ctas_of_a_tile_are_counted_in_the_model():
    """Dense tiles at 8k: 128 steps each, 74 tiles at a time of the 4096 that there are."""
    config, roles, _ = WIDE[256, 256]
    costs = costs_of(Shape(config, roles), B200)
    flops = 2.5 * 4 * 8192**2 * 64 * 256
    waves, steps = -(-4096 // 74), 128
    microseconds = waves * (costs.tile + steps * costs.step) / B200.mma_mhz + B200.launch_us
    assert speed(config, 8192, B200, roles) == pytest.approx(flops / microseconds / 1e6, rel=1e-3)


@pytest.mark.parametrize("ctas", [1, 2])
def test_nothing_is_faster_than_its_unit(ctas):
    config = BackwardConfig(True, 128, 128, False, ctas=ctas)
    shape = Shape(config)
    assert costs_of(shape, B200).step >= max(config.bounds().values())
    slower = replace(B200, mma_flops=B200.mma_flops / 2)
    assert time_tiles(shape, slower, Tiles(8, 1)).now > time_tiles(shape, B200, Tiles(8, 1)).now
