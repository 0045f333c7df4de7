"""The counter that hands out tiles of dense calls: every tile once, and zero again behind each launch, in any order."""

import random
from dataclasses import fields, replace

import pytest
import torch

from flash4.common.dsl import plain
from flash4.common.geometry import KvBlocks
from flash4.common.handout import DenseEntry, GivenDense
from flash4.common.tiles import Grid, TileSchedule
from flash4.common.varlen import Entry
from flash4.dispatch import choose_section, plan_forward
from flash4.problem import AttentionProblem
from flash4.sm90.fwd_config import DENSE_WORDS, PASSES, TILE_WORDS

MULTIPROCESSORS = 132  # of an H200


class Counter:
    """One counter of several launches, as the kernel's slots use it."""

    def __init__(self):
        self.value, self.wraps = 0, 0

    def up(self, last):
        """As ``fwd_tiles.count_up``."""
        before = self.value
        self.value = 0 if before >= last else before + 1
        self.wraps += before >= last
        return before


class Slots:
    """What ``GivenDense`` does with the ring of one worker, whose tiles are done at once and never marked."""

    zero, count = 0, 4

    def __init__(self, counter, worker, workers, answers):
        self._counter, self._worker, self._workers = counter, worker, workers
        self._answers, self.posted = answers, []

    def acquire(self, number):
        """No slot is in use."""

    def marked(self, number):
        """Nothing is marked."""
        return 0, 0

    def ask(self):
        """As ``fwd_tiles.DenseSlots``."""
        return self._counter.up(self._answers - 1)

    def answered(self, number, answer):
        """As ``fwd_tiles.DenseSlots``."""
        if number == 0:
            return self._worker
        return answer + self._workers

    def post(self, number, entry: DenseEntry):
        """Keep what is told."""
        self.posted.append(entry)

    def post_nothing(self, number):
        """Nothing to keep."""


class Given(GivenDense):
    """In plain Python."""

    _next, _ask = plain(GivenDense._next), plain(GivenDense._ask)


class Greedy(Given):
    """Asks once more when no tile is left."""

    def next(self, tile):
        """As ``GivenDense.next``."""
        following = super().next(tile)
        if not following.valid:
            self.slots.ask()
        return following


CAUSAL = KvBlocks(64, 64, True)
# Sides of a window that cuts nothing, some blocks, all but one; at the left alone, too.
WINDOWS = [KvBlocks(64, 64, True, left) for left in (0, 70, 4096)]
WINDOWS += [
    KvBlocks(64, 64, False, 100),
    KvBlocks(64, 64, False, 64, 0),
    KvBlocks(64, 64, False, 1, 90),
]


def launch(counter, workers, heads, redoes, rng, kind=Given, blocks=CAUSAL):
    """Indices of the tiles that all workers of one launch got, which take turns in a random order."""
    grid = Grid(3, 1, heads, 1)
    schedule = TileSchedule(blocks, grid, 2, 0, workers, 192, 192)
    givers = [
        kind(schedule, Slots(counter, worker, workers, grid.total), redoes)
        for worker in range(workers)
    ]
    tiles, steps = [None] * workers, [0] * workers
    busy = list(range(workers))
    while busy:
        worker = rng.choice(busy)
        giver = givers[worker]
        if tiles[worker] is None:
            tiles[worker] = giver.first()
        elif steps[worker] % 2:
            tiles[worker] = giver.ask(tiles[worker])
        else:
            tiles[worker] = giver.next(tiles[worker])
        steps[worker] += 1
        if not tiles[worker].valid:
            busy.remove(worker)
    entries = [entry for giver in givers for entry in giver.slots.posted]
    return sorted(e.index for e in entries if e.index < grid.total), grid.total


@pytest.mark.parametrize("redoes", [False, True])
@pytest.mark.parametrize(("workers", "heads"), [(1, 1), (3, 1), (2, 2), (5, 7), (12, 40)])
def test_every_tile_once_and_a_counter_at_zero(workers, heads, redoes):
    counter = Counter()
    for seed, blocks in enumerate((CAUSAL, *WINDOWS) * 6):
        found, total = launch(counter, workers, heads, redoes, random.Random(seed), blocks=blocks)
        assert found == list(range(total))
        assert counter.value == 0 and counter.wraps == seed + 1


def plan(*shape, **mask):
    """Plan of a call on an H200: batch, queries, keys, heads, KV heads and head dim."""
    *sizes, head_dim = shape
    problem = AttentionProblem(torch.bfloat16, *sizes, head_dim, head_dim, **mask)
    return plan_forward(problem, "sm_90a", MULTIPROCESSORS)


MASKS = {
    "causal, left": {"causal": True, "window_left": True},
    "both sides": {"window_left": True, "window_right": True},
    "left": {"window_left": True},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_tiles_of_a_left_window_are_handed_out(head_dim, mask):
    for shape in (
        (2, 8192, 8192, 16, 16),
        (1, 100, 300, 8, 2),
        (1, 1, 4096, 2, 2),
        (3, 700, 5000, 12, 4),
    ):
        found = plan(*shape, head_dim, **MASKS[mask])
        assert found.config.handed_out
        assert 1 <= found.section <= found.grid.head_count
        right = 64 if found.config.right else None
        schedule = found.schedule(MULTIPROCESSORS, left=200, right=right)
        lists, imbalance = schedule.handed_out()
        assert sorted(index for mine in lists for index in mine) == list(range(found.grid.total))
        assert imbalance >= 1 - 1e-9


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((2, 8192, 8192, 16, 16, 128), 1024),
        ((2, 8192, 8192, 16, 16, 128), 4096),
        ((4, 4096, 4096, 16, 16, 128), 1024),
        ((1, 16384, 16384, 16, 16, 128), 1024),
        ((2, 8192, 8192, 32, 32, 64), 1024),
    ],
    ids=str,
)
def test_left_windows_balance_better_than_in_a_fixed_order(shape, window):
    """Few tiles of a call differ, but these come last: a fixed order has whole waves, 15.5 of 16 at the most."""
    found = plan(*shape, **MASKS["causal, left"])
    handed_out = found.schedule(MULTIPROCESSORS, left=window - 1)
    section = choose_section(
        found.problem, replace(found.config, handed_out=False), found.grid, MULTIPROCESSORS
    )
    assert section != found.section
    assert handed_out.handed_out()[1] < replace(handed_out, section=section).imbalance() - 0.01
    assert handed_out.handed_out()[1] < 1.025


def test_the_window_of_the_benchmark():
    found = plan(2, 8192, 8192, 16, 16, 128, **MASKS["causal, left"])
    assert found.section == 16
    assert found.schedule(MULTIPROCESSORS, left=1023).handed_out()[1] == pytest.approx(
        1.0118, abs=5e-4
    )


def test_asking_once_too_often_is_seen():
    counter = Counter()
    launch(counter, 3, 4, False, random.Random(0), Greedy)
    assert counter.value != 0


def test_slots_have_a_word_for_each_field_and_pass():
    """Counted by hand in the config, which knows no DSL: one more field would reach into the next slot."""
    for words, entry in ((TILE_WORDS, Entry), (DENSE_WORDS, DenseEntry)):
        assert words == len(fields(entry)) + PASSES
