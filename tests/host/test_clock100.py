"""The clock's model of Blackwell: published speeds to 10 percent, and our own schedule against that one."""

from dataclasses import replace

import pytest

from flash4.common.tiles import Grid, TileSchedule
from flash4.sim.chips import B200
from flash4.sim.sm100_fwd_clock import costs_of, shape_of, time_tiles, work
from flash4.sim.sm100_published import SPEEDS, our_tflops, published_tflops
from flash4.sm100.fwd_config import ForwardConfig

PUBLISHED = {call: published_tflops(call, B200) for call, _ in SPEEDS}


@pytest.mark.parametrize(("call", "speed"), SPEEDS, ids=str)
def test_published_speeds(call, speed):
    assert 0.9 < PUBLISHED[call] / speed < 1.1


@pytest.mark.parametrize("call", PUBLISHED, ids=str)
def test_our_schedule_is_faster_in_the_model(call):
    assert our_tflops(call, B200) > 1.05 * PUBLISHED[call]


def test_what_the_gain_comes_from():
    """With a look at every maximum a pair's schedule is the published one, and as fast."""
    call = SPEEDS[0][0]
    looking = our_tflops(call, B200, fixed_shift=False)
    assert looking == pytest.approx(PUBLISHED[call], rel=0.02)
    assert our_tflops(call, B200) > 1.1 * looking


def test_costs_are_linear_enough():
    """A run of several tiles takes what its blocks and tiles add up to."""
    shape = shape_of(ForwardConfig(True, 128, 128, False, fixed_shift=True))
    costs, blocks, tiles = costs_of(shape, B200), 20, 3
    rows = blocks * shape.config.tile_n
    schedule = TileSchedule(shape.config.blocks(), Grid(1, 1, tiles, 1), tiles, 0, 1, rows, rows)
    found = time_tiles(shape, B200, schedule).now
    assert found == pytest.approx(costs.cta(tiles * blocks, tiles), rel=0.02)


def test_units_bound_a_block():
    """No block is faster than what its scarcest unit needs."""
    for changes in ({"poly": 0}, {"poly": 16, "head": 96}, {"ctas": 2, "stages": 6}):
        config = ForwardConfig(True, 128, 128, False, fixed_shift=True, **changes)
        shape = shape_of(config)
        mufu = 2 * (128 - shape.emulated) / B200.mufu
        assert costs_of(shape, B200).block >= max(2048, mufu)


def test_slots_matter():
    """Loads of V and K take turns with their uses: a third slot hides most of what a second cannot."""
    config = ForwardConfig(True, 128, 128, False, fixed_shift=True)
    blocks = [
        costs_of(shape_of(replace(config, stages=stages)), B200).block for stages in (2, 3, 6)
    ]
    assert blocks[0] > 1.2 * blocks[1] and blocks[1] < 1.2 * blocks[2]


def test_work_takes_as_long_as_its_scarcest_unit():
    found = work(B200, "x", fma=10, mufu=10, tmem=8, stall=5)
    assert found.cycles == 10 / B200.mufu + 5
    assert found.use["fma"] == 20 and found.use["issue"] == 20.25


def test_one_q_tile_keeps_the_tensor_cores_busy():
    """A block's softmax runs beside the products of its neighbours; a CTA alone waits for loads instead."""
    pair = ForwardConfig(True, 256, 256, True, q_tiles=1, ctas=2, stages=4, fixed_shift=True)
    products = 2 * (2 * 128 * 128 * 256) / B200.mma_flops  # Q K^T and P V, of one CTA
    assert products < costs_of(shape_of(pair), B200).block < 1.1 * products
    alone = replace(pair, ctas=1, tile_n=64, head=32)
    assert costs_of(shape_of(alone), B200).block > 1.5 * products / 2
