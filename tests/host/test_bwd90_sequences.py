"""Gradients of sequences of different lengths, simulated with the kernel's own roles and schedule: numbers, and what must
not reach them."""

import functools
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import flash4
from flash4 import reference
from flash4.common.kv_handout import ToldSequenceTiles
from flash4.common.kv_one_tile import TILE_WORDS
from flash4.common.kv_sequences import SequenceSchedule, Side
from flash4.common.kv_tiles import KvSteps
from flash4.interface import options_of
from flash4.sim import bwd_sequences
from flash4.sim.machine import Hazard
from flash4.sim.sm90_bwd import simulate_backward
from flash4.sm90.bwd_config import SEQUENCE_WORDS, TILE_N
from tests import strategies
from tests.checks import assert_gradients_close
from tests.gpu.gradients import is_built
from tests.host.test_bwd90_roles import numpy_options, simulator_of
from tests.strategies import Problem

BF16 = torch.bfloat16
D64 = dict(head_dim=64, head_dim_v=64)
PACKED = dict(lengths_q=(70, 0, 300, 1), lengths_k=(150, 40, 260, 0), around=(3, 140))
PROBLEMS = {
    "packed": Problem(**D64, **PACKED),
    "packed, causal": Problem(**D64, **PACKED, causal=True, heads_kv=2),
    "packed, one length": Problem(**D64, lengths_q=(200, 200), lengths_k=(200, 200), causal=True),
    "packed, one key": Problem(**D64, lengths_q=(130,), lengths_k=(1,)),
    "queries packed": Problem(**D64, lengths_q=(70, 0, 300), seqlen_k=140, batch=3),
    "keys packed": Problem(**D64, lengths_k=(70, 0, 300), seqlen_q=90, batch=3, around=(5, 9)),
    "in use": Problem(
        **D64, seqlen_q=150, seqlen_k=270, batch=3, used_q=(150, 0, 66), used_k=(3, 270, 128)
    ),
    "keys in use": Problem(**D64, seqlen_q=90, seqlen_k=300, batch=3, used_k=(0, 1, 290)),
    "queries in use": Problem(**D64, seqlen_q=200, seqlen_k=140, batch=2, used_q=(0, 130)),
    "all": Problem(
        **D64, **PACKED, used_q=(60, 0, 280, 0), used_k=(100, 40, 129, 0), ratio=2, causal=True
    ),
    "queries packed, keys in use": Problem(
        **D64, lengths_q=(130, 7, 0), seqlen_k=140, batch=3, used_k=(0, 140, 3), causal=True
    ),
    "d128": Problem(head_dim=128, head_dim_v=128, dtype=BF16, **PACKED, causal=True),
    "d96": Problem(head_dim=96, head_dim_v=96, dtype=BF16, **PACKED),
    "d40 and 128": Problem(head_dim=40, head_dim_v=128, dtype=BF16, **PACKED, causal=True),
    "d128 and 96, all features": Problem(
        head_dim=128, head_dim_v=96, dtype=BF16, **PACKED, softcap=3.0, alibi="by head", ratio=2,
        window_size=(40, 9),
    ),
    "d192 and 128": Problem(head_dim=192, head_dim_v=128, dtype=BF16, **PACKED, causal=True, ratio=2),
    "d160, in use": Problem(
        head_dim=160, head_dim_v=160, seqlen_q=150, seqlen_k=270, batch=3, used_q=(150, 0, 66),
        used_k=(3, 270, 128),
    ),
    "d192 and 128, all features": Problem(
        head_dim=192, head_dim_v=128, dtype=BF16, **PACKED, softcap=3.0, alibi="by head", ratio=2,
        window_size=(40, 9),
    ),
    "window": Problem(**D64, **PACKED, window_size=(40, 9)),
    "mods": Problem(**D64, **PACKED, score_mod="bent", mask_mod="dilated", causal=True),
    "mods in use": Problem(
        **D64, lengths_q=(70, 0, 200), seqlen_k=140, batch=3, used_k=(140, 30, 99), alibi="by head",
        softcap=3.0, score_mod="relative", mask_mod="documents",
    ),
    "d256 in use, mods": Problem(
        head_dim=256, head_dim_v=256, seqlen_q=90, seqlen_k=150, batch=3, used_q=(90, 0, 66),
        used_k=(3, 150, 128), score_mod="heads", sink=0.0,
    ),
    "d72 and 136, all features": Problem(
        head_dim=72, head_dim_v=136, **PACKED, softcap=3.0, alibi="by head", ratio=2,
        window_size=(40, 9), sink=1.0,
    ),
    "causal window": Problem(**D64, **PACKED, window_size=(100, 0), ratio=3),
    "cap, sink and slopes": Problem(
        **D64, **PACKED, softcap=3.0, sink=1.0, alibi="by batch and head", ratio=2
    ),
    "many": Problem(
        **D64, lengths_q=tuple(i % 7 for i in range(70)), lengths_k=tuple(i % 5 for i in range(70))
    ),
}  # fmt: skip


def arrays_of(problem, inputs, seed=0):
    """What ``simulate_backward`` takes beside a config, with the results of a forward that is right, and dout."""
    keywords = problem.keywords()
    options = numpy_options(options_of(*inputs, **keywords))
    out, lse = reference.attention(*inputs, return_lse=True, **keywords)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(problem.dtype)
    arrays = [x.float().numpy() for x in (*inputs, out.to(problem.dtype), lse, dout)]
    return arrays, options, dout


def run(problem, seed=0, workers=2, deterministic=False, **changes):
    """Simulate a problem, with changes of the config that it gets, and check it."""
    inputs, keywords = problem.tensors(seed=seed), problem.keywords()
    config = flash4.explain(
        *inputs, backward=True, deterministic=deterministic, arch="sm_90a", **keywords
    ).config
    assert config.varlen
    config = replace(config, **changes)
    arrays, options, dout = arrays_of(problem, inputs, seed)
    results = simulator_of(config)(config, arrays, options, workers, seed)
    gradients = [torch.from_numpy(x).to(problem.dtype) for x in results]
    assert_gradients_close(gradients, inputs, dout, **keywords)
    return results


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "turns"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_numbers(name, deterministic):
    run(PROBLEMS[name], workers=3, deterministic=deterministic)


ONE_TILE = {"handed_out": False, "first_stores": False, "backwards": False}
ORDERS = {
    "one tile": ONE_TILE,
    "one tile, first stores": ONE_TILE | {"first_stores": True, "backwards": True},
    "handed out": ONE_TILE | {"handed_out": True},
    "handed out, first stores": {"handed_out": True, "first_stores": True, "backwards": False},
    "handed out, late": {"handed_out": True, "first_stores": True, "late": True},
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["packed, causal", "all", "in use", "many", "d40 and 128"])
def test_orders(name, order):
    """Those that dispatch does not choose, too."""
    for workers in (1, 4):
        run(PROBLEMS[name], workers=workers, **ORDERS[order])


def test_a_slot_of_the_ring_holds_a_tile():
    assert SEQUENCE_WORDS == TILE_WORDS


def given_back_at_once(self, number, told=ToldSequenceTiles._next):
    """A slot is given back before its tile is done."""
    tile = told(self, number)
    self.slots.release(number)
    return tile


def not_given_back(self, tile):
    """A slot is not given back."""
    return self._next(tile.number + 1)


@pytest.mark.parametrize(
    "method, broken, hazard",
    [("_next", given_back_at_once, "tiles"), ("next", not_given_back, "waits for.*tiles empty")],
    ids=("early", "never"),
)
def test_slots_of_tiles_are_given_back_when_these_are_done(method, broken, hazard):
    run(PROBLEMS["many"], workers=1)
    with mock.patch.object(ToldSequenceTiles, method, broken):
        with pytest.raises(Hazard, match=hazard):
            run(PROBLEMS["many"], workers=1)


def all_visited(blocks, keys, rows):
    """Sums that nobody stored are read."""
    return rows.used


@pytest.mark.parametrize("name", ["packed, causal", "packed"])
def test_sums_that_no_tile_stores_are_not_read(name):
    """Of causal queries before all keys, and of queries without keys."""
    run(PROBLEMS[name])
    with mock.patch.object(bwd_sequences, "visited_rows", all_visited):
        with pytest.raises(AssertionError):
            run(PROBLEMS[name])


SEQUENCE_PROBLEMS = strategies.problems(max_seqlen=300, max_scores=2**16).filter(
    lambda p: p.varlen and is_built(p) and all(x.numel() for x in p.shapes)
)


@settings(max_examples=40)
@given(SEQUENCE_PROBLEMS, st.integers(0, 2**16), st.booleans())
def test_random_sequences(problem, seed, deterministic):
    """Random lengths with any features, and CTAs that share the tiles anyhow."""
    assume(problem.scores)
    run(problem, seed, 1 + seed % 4, deterministic)


@pytest.mark.parametrize("name", ["all", "packed, causal", "causal window", "in use"])
def test_turns_give_the_same_bits_of_dq(name):
    """Whatever the order of CTAs, and whichever tiles add nothing."""
    results = [run(PROBLEMS[name], 0, workers, True) for workers in (1, 3, 8)]
    for gradients in results[1:]:
        assert all((a == b).all() for a, b in zip(gradients, results[0], strict=True))


def test_gradients_of_out_outside_the_sequences_do_not_matter():
    """Those of rows that are of no sequence, or not in use, may hold anything; so may out there."""
    problem = PROBLEMS["all"]
    inputs, keywords = problem.tensors(), problem.keywords()
    config = flash4.explain(*inputs, backward=True, arch="sm_90a", **keywords).config
    arrays, options, _ = arrays_of(problem, inputs)
    outside = problem._outside(problem.lengths_q, problem.used_q, problem.seqlen_q).numpy()
    assert outside.any()
    expected = simulate_backward(config, arrays, options)
    for x in (arrays[3], arrays[5]):
        x[outside] = np.nan
    found = simulate_backward(config, arrays, options)
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


# What the rules of sequences are there for: each broken by itself must show.


def shared_slots(self, index):
    """Sequences begin in the slot that the one before ends in."""
    return self._begin(index) // self.tile if self.cu is not None else index * 5


def all_in_use(self, index, at=Side.at):
    """All stored rows are taken for rows in use."""
    rows = at(self, index)
    return replace(rows, used=rows.stored)


def stored_beyond(self, tile, where=SequenceSchedule.where):
    """Stores do not end with the sequence."""
    place = where(self, tile)
    return replace(place, stored_k=place.stored_k + TILE_N)


def not_around(self, index, at=Side.at):
    """Rows around the sequences are nobody's."""
    rows = at(self, index)
    return replace(rows, stored=0) if index in (0, self.count - 1) else rows


def steps_behind(self, valid, index, within, at=SequenceSchedule.at):
    """A tile that nobody sees visits the blocks of its place."""
    tile = at(self, valid, index, within)
    return tile if tile.seen else replace(tile, first_block=tile.n_block + 9)


BROKEN = {
    shared_slots: (Side, "slot", "packed", False),
    all_in_use: (Side, "at", "in use", False),
    stored_beyond: (SequenceSchedule, "where", "packed", False),
    not_around: (Side, "at", "packed", False),
    steps_behind: (SequenceSchedule, "at", "all", False),
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__doc__)
def test_broken_rules_show(broken):
    owner, method, name, deterministic = BROKEN[broken]
    with mock.patch.object(owner, method, broken):
        with pytest.raises((AssertionError, Hazard, ValueError, IndexError)):
            run(PROBLEMS[name], deterministic=deterministic)


def rank_of_all(self, tile, i):
    """Tiles that nobody sees have turns, too."""
    return self.blocks.rank(tile.n_block, self.place(tile, i)[0], *self.lengths(tile))


def test_turns_of_tiles_that_nobody_sees_would_wait_for_ever():
    problem = Problem(**D64, seqlen_q=200, seqlen_k=400, batch=1, used_k=(200,), causal=True)
    run(problem, deterministic=True)
    with mock.patch.object(KvSteps, "rank", rank_of_all):
        with pytest.raises(Hazard, match="waits for.*turns"):
            run(problem, deterministic=True)


NEIGHBOURS = {
    "d64": Problem(**D64, **PACKED),
    "d64, causal": Problem(**D64, **PACKED, causal=True, ratio=2),
    "d128, cap and slopes": Problem(
        head_dim=128, head_dim_v=128, **PACKED, softcap=3.0, alibi="by head", window_size=(90, 40)
    ),
    "d64, mods": Problem(**D64, **PACKED, score_mod="bent", mask_mod="dilated"),
    "d192 and 128": Problem(head_dim=192, head_dim_v=128, **PACKED, causal=True),
}


def assert_neighbours_are_apart(problem, value, simulate):
    """Check that what a sequence holds reaches no row of another; ``simulate`` takes arrays and options."""
    spoilt, inputs = 0, problem.tensors()
    (q, k, v, out, lse, dout), options, _ = arrays_of(problem, inputs)
    expected = simulate((q, k, v, out, lse, dout), options)
    rows_q, rows_k = (
        slice(begins[spoilt], begins[spoilt + 1])
        for begins in (problem._begins(problem.lengths_q), problem._begins(problem.lengths_k))
    )
    for x, rows in ((q, rows_q), (out, rows_q), (dout, rows_q), (k, rows_k), (v, rows_k)):
        x[rows] = value
    lse[:, rows_q] = np.nan
    with np.errstate(all="ignore"):
        found = simulate((q, k, v, out, lse, dout), options)
    for got, wanted, rows in zip(found, expected, (rows_q, rows_k, rows_k), strict=True):
        others = np.ones(len(got), bool)
        others[rows] = False
        assert (got[others] == wanted[others]).all()


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "turns"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_what_a_sequence_holds_reaches_no_other_row(name, value, deterministic):
    """Not even the rows around the sequences, whose tiles have no queries of their own but somebody's statistics."""
    problem = NEIGHBOURS[name]
    config = flash4.explain(
        *problem.tensors(), backward=True, deterministic=deterministic, arch="sm_90a",
        **problem.keywords(),
    ).config  # fmt: skip
    simulate = functools.partial(simulator_of(config), config)
    assert_neighbours_are_apart(problem, value, simulate)
