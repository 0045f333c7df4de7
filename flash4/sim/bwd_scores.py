"""What a step of the simulated backward makes of its scores: P, and of P and dP dS; in NumPy."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flash4.common import mods
from flash4.common.mods import SeqlenInfo
from flash4.common.numerics import LOG2E


@dataclass(frozen=True)
class Pairs:
    """What is known of the pairs of a step before dP is, by key and query; as in ``bwd_ops``."""

    p: np.ndarray
    score: np.ndarray  # as a score_mod is given it
    slope: object  # of the cap, or 1
    seen: np.ndarray


@dataclass(frozen=True)
class Step:
    """A step of a tile, of some of its keys.

    Attributes:
        call: whose step it is.
        rows: which of the tile's keys.
        tile: of the schedule.
        i: number of the step.
        masked: whether there is a mask.
        columns: which of the step's queries.
        hides_all: whether the kernel hides all of them, whatever else it knows.
    """

    call: object
    rows: slice
    tile: object
    i: int
    masked: bool
    columns: object = ...
    hides_all: bool = False

    @property
    def _queries(self):
        block, _ = self.call.tiles.place(self.tile, self.i)
        return block * self.call.config.tile_m + np.arange(self.call.config.tile_m)[self.columns]

    @property
    def _keys(self):
        first, tile_n = self.tile.n_block * self.call.config.tile_n, self.call.config.tile_n
        return range(first, first + tile_n)[self.rows]

    def pairs(self, products, lse) -> Pairs:
        """P^T = exp2(scale_log2 S^T - LSE) of products K Q^T, and what else is known of them."""
        call, config, tiles = self.call, self.call.config, self.call.tiles
        options, values, unit = call.options, products.copy(), 1 if config.natural else LOG2E
        scale, slope = np.float32(options.softmax_scale), 1
        if options.softcap:
            within = values * np.float32(options.softmax_scale / options.softcap)
            rest = 1 / (np.exp(2 * np.abs(within)) + 1)
            scale, slope = np.float32(options.softcap), 4 * rest * (1 - rest)
            values[:] = np.tanh(within)
        values[:] = values * (scale * np.float32(unit))
        if not config.natural:
            values[:] -= lse
        values[:] -= self._bias(unit)
        score, seen = values.copy(), np.ones(values.shape, bool)
        if config.score_mod:
            modified = mods.function(config.score_mod)(score, *self.where())
            values[:] = np.asarray(modified, np.float32) * np.float32(LOG2E) - lse
            seen &= lse < np.inf
        if config.mask_mod:
            seen &= np.asarray(mods.function(config.mask_mod)(*self.where()))
        if self.masked:
            lengths, queries = tiles.lengths(self.tile), self._queries
            begins, ends = (
                np.array([edge(key, *lengths) for key in self._keys])[:, None]
                for edge in (tiles.blocks.query_begin, tiles.blocks.query_end)
            )
            seen &= (queries >= begins) & ((queries < ends) | (not config.left))
        seen &= not self.hides_all
        return Pairs(np.exp2(np.where(seen, values, np.float32(-np.inf))), score, slope, seen)

    def _bias(self, unit):
        """What ALiBi takes from scores."""
        tiles, options = self.call.tiles, self.call.options
        if not self.call.config.alibi:
            return 0
        (_, head), lengths = tiles.place(self.tile, self.i), tiles.lengths(self.tile)
        distance = self._queries + lengths[1] - lengths[0] - np.array(self._keys)[:, None]
        slope = options.alibi_slopes[tiles.where(self.tile).batch, head] * np.float32(unit)
        return slope * np.abs(distance)

    def where(self):
        """What mods are told beside the score."""
        tiles, lengths = self.call.tiles, self.call.tiles.lengths(self.tile)
        (_, head), place = tiles.place(self.tile, self.i), tiles.where(self.tile)
        query, key = (
            np.clip(x, 0, max(n - 1, 0))
            for x, n in zip((self._queries, np.array(self._keys)), lengths, strict=True)
        )
        info = SeqlenInfo(*lengths, place.row_q, place.row_k)
        return place.batch, head, query, key[:, None], info, self.call.options.aux_tensors


@dataclass(frozen=True)
class Scores:
    """What dS of a step takes of S^T: P^T, times the slope of the cap, or with a score_mod S^T itself.

    Attributes:
        step: whose they are.
        values: by key and query.
        lse: reads the LSE of the queries.
        hides: whether dS of a mask's pairs is 0 whatever D is.
    """

    step: Step
    values: np.ndarray
    lse: Callable[[], np.ndarray]
    hides: bool = True

    def ds(self, difference):
        """dS^T = P^T (dP^T - D), of that difference, and through a score_mod."""
        config = self.step.call.config
        if not config.score_mod:
            hidden = (self.values == 0) & (self.step.masked and config.varlen and self.hides)
            with np.errstate(invalid="ignore"):
                return np.where(hidden, np.float32(0), self.values * difference)
        pairs = self.step.pairs(self.values, self.lse())
        derivative = mods.function(config.score_mod_bwd)
        gradient = derivative(pairs.p * difference, pairs.score, *self.step.where())
        return np.where(pairs.seen, gradient, np.float32(0)) * pairs.slope
