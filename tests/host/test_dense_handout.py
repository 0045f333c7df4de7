"""The counter that hands out tiles of dense calls: every tile once, and zero again behind each launch, in any order."""

import random
from dataclasses import fields

import pytest

from flash4.common.dsl import plain
from flash4.common.geometry import KvBlocks
from flash4.common.handout import DenseEntry, GivenDense
from flash4.common.tiles import Grid, TileSchedule
from flash4.common.varlen import Entry
from flash4.sm90.fwd_config import DENSE_WORDS, PASSES, TILE_WORDS


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


def launch(counter, workers, heads, redoes, rng, kind=Given):
    """Indices of the tiles that all workers of one launch got, which take turns in a random order."""
    grid = Grid(3, 1, heads, 1)
    schedule = TileSchedule(KvBlocks(64, 64, True), grid, 2, 0, workers, 192, 192)
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
    for seed in range(40):
        found, total = launch(counter, workers, heads, redoes, random.Random(seed))
        assert found == list(range(total))
        assert counter.value == 0 and counter.wraps == seed + 1


def test_asking_once_too_often_is_seen():
    counter = Counter()
    launch(counter, 3, 4, False, random.Random(0), Greedy)
    assert counter.value != 0


def test_slots_have_a_word_for_each_field_and_pass():
    """Counted by hand in the config, which knows no DSL: one more field would reach into the next slot."""
    for words, entry in ((TILE_WORDS, Entry), (DENSE_WORDS, DenseEntry)):
        assert words == len(fields(entry)) + PASSES
