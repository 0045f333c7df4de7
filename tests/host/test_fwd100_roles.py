"""The Blackwell forward's own role functions, in plain Python: right numbers, and no hazard, in any order.

As a script, with more random problems: ``python -m tests.host.test_fwd100_roles --n 2000 --seed 1``.
"""

import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flash4.interface import options_of
from flash4.jit.compile import compile_kernel
from flash4.problem import AttentionProblem, CallOptions
from flash4.sim.explore import explore
from flash4.sim.machine import Hazard
from flash4.sim.mutants import JURIES, SM100_PROBLEMS, Mutant, sm100_fwd_mutants
from flash4.sim.sm90_fwd import round_to_16_bit
from flash4.sim.sm100_fwd import (
    Variation,
    exp2_on_fma,
    forward_machines,
    pack_16_bit,
    part_of_range,
    simulate_forward,
    unpack_16_bit,
)
from flash4.sm100.fwd_config import (
    LARGEST_TOTAL,
    ForwardConfig,
    can_implement,
    choose_config,
)
from tests import strategies
from tests.checks import assert_forward_close
from tests.host.random_runs import arguments_of, check_random


@dataclass(frozen=True)
class Case:
    """A problem for a config."""

    config: ForwardConfig
    head_dim: int
    head_dim_v: int
    batch: int = 1
    seqlen_q: int = 300
    seqlen_k: int = 300
    heads_kv: int = 1
    ratio: int = 1
    softmax_scale: float = 0.1
    value_scale: float = 1.0
    workers: int = 2
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    sink: float | None = None  # mean of the sinks

    @property
    def keywords(self):
        """Keywords of the reference; the config's flags are the other half of the problem."""
        heads = torch.arange(float(self.heads_kv * self.ratio))
        return {
            "softmax_scale": self.softmax_scale,
            "causal": self.config.causal,
            "window_size": self.window_size,
            "softcap": self.softcap,
            "learnable_sink": None if self.sink is None else self.sink + heads,
        }

    @property
    def options(self):
        """What the simulator takes."""
        sides = (-1 if side is None else side for side in self.window_size)
        sink = self.keywords["learnable_sink"]
        sink = None if sink is None else sink.numpy()
        return CallOptions(self.softmax_scale, self.config.causal, None, *sides, self.softcap, sink)

    def tensors(self):
        """Random normal q, k, v in the config's dtype."""
        generator = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if self.config.bf16 else torch.float16

        def draw(seqlen, heads, head_dim):
            x = torch.randn(self.batch, seqlen, heads, head_dim, generator=generator)
            return (x * self.value_scale).to(dtype)

        return (
            draw(self.seqlen_q, self.heads_kv * self.ratio, self.head_dim),
            draw(self.seqlen_k, self.heads_kv, self.head_dim),
            draw(self.seqlen_k, self.heads_kv, self.head_dim_v),
        )

    def machines(self, seed=0, variation=None):
        """Machine and call of every CTA."""
        arrays = tuple(x.float().numpy() for x in self.tensors())
        return forward_machines(self.config, arrays, self.options, self.workers, seed, variation)


def shipped(head_dim, head_dim_v, causal, bf16=True, **features):
    """Config that a call with these head dims gets."""
    dtype = torch.bfloat16 if bf16 else torch.float16
    facts = AttentionProblem(dtype, 1, 4096, 4096, 1, 1, head_dim, head_dim_v, causal, **features)
    return choose_config(facts)[0]


KINDS = (
    # head_dim, head_dim_v, causal, bf16
    (64, 64, True, True),
    (64, 64, False, False),
    (40, 8, True, False),
    (128, 128, True, True),
    (128, 128, False, True),
    (192, 128, True, True),
    (136, 72, False, False),
    (64, 128, True, True),
    (128, 48, False, True),
    (256, 256, True, True),
    (136, 200, False, False),
    (248, 40, False, True),
)
CONFIGS = [(shipped(*kind), *kind[:2]) for kind in KINDS]
# Not shipped: short blocks, other shares of exponentials on the FMA units, P handed over in other parts.
CONFIGS += [
    (replace(CONFIGS[0][0], tile_n=64, head=32, stages=2, o_slots=1), 64, 64),
    (replace(CONFIGS[4][0], poly=0, head=64), 128, 128),
    (replace(CONFIGS[3][0], poly=16, head=32), 128, 128),
]
# Pairs, not shipped: under a causal mask, and with K and V of other widths.
CONFIGS += [
    (replace(CONFIGS[3][0], ctas=2, stages=6), 128, 128),
    (replace(CONFIGS[5][0], ctas=2, stages=3, o_slots=1), 192, 128),
    (replace(CONFIGS[7][0], ctas=2, tile_n=64, head=32), 64, 128),
]
# One CTA with one Q tile, as for few rows; and both kinds with other blocks, where two Q tiles would do.
ONE_TILE = {"ctas": 1, "tile_n": 64, "head": 32, "stages": 4}
CONFIGS += [
    (replace(CONFIGS[9][0], **ONE_TILE), 256, 256),
    (replace(CONFIGS[10][0], **ONE_TILE, o_slots=1), 136, 200),
    (replace(CONFIGS[0][0], q_tiles=1, o_slots=1, stages=2), 64, 64),
    (replace(CONFIGS[3][0], ctas=2, q_tiles=1, tile_n=64, head=32, stages=5), 128, 128),
]


def run(case: Case, seed: int = 0):
    """Simulate a case and check it against float64."""
    inputs = case.tensors()
    arrays = (x.float().numpy() for x in inputs)
    out, lse = simulate_forward(case.config, *arrays, case.options, case.workers, seed)
    assert_forward_close(
        torch.from_numpy(out).to(inputs[0].dtype), torch.from_numpy(lse), inputs, **case.keywords
    )
    return case.config


def test_the_configs_cover_what_can_differ():
    configs = [config for config, *_ in CONFIGS]
    assert {config.o_slots for config in configs} == {1, 2}
    assert {config.tile_d for config in configs} == {64, 128, 192, 256}
    assert {config.tile_dv for config in configs} == {64, 128, 256}
    assert {config.kv_columns > config.tile_d for config in configs} == {False, True}
    kinds = {(config.ctas, config.q_tiles, config.causal) for config in configs}
    assert kinds == set(product((1, 2), (1, 2), (False, True)))


@pytest.mark.parametrize("index", range(len(CONFIGS)), ids=lambda i: f"{i}-{CONFIGS[i][1:]}")
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(150, 300), (300, 150), (257, 257), (520, 64)])
def test_numbers(index, seqlen_q, seqlen_k):
    config, head_dim, head_dim_v = CONFIGS[index]
    run(Case(config, head_dim, head_dim_v, 1, seqlen_q, seqlen_k, 2), seed=index)


def lengths(unit: int, most: int):
    """Lengths at the edges of tiles, and others."""
    edges = st.builds(lambda n, d: n * unit + d, st.integers(1, most), st.sampled_from((0, 1, -1)))
    return st.one_of(edges, st.integers(1, most * unit))


@st.composite
def cases(draw):
    config, head_dim, head_dim_v = draw(st.sampled_from(CONFIGS))
    pack = draw(st.sampled_from((1, 1, 2, 4, 8, 64)))
    scale = draw(st.sampled_from((0.1, 0.1, 0.02, 0.7, 0.0, -0.1)))
    left, right = (draw(st.one_of(st.none(), st.integers(0, 600))) for _ in range(2))
    window = draw(st.sampled_from(((None, None), (left, None), (left, right))))
    if config.causal:
        limited = {"causal": window[1] is None, "right": window[1] is not None}
    else:
        window, limited = (window[0], None), {}
    softcap, sink = draw(st.sampled_from((0.0, 0.0, 2.0, 50.0))), draw(st.sampled_from((None, 1.0)))
    limited |= {"left": window[0] is not None, "softcap": softcap != 0, "sink": sink is not None}
    config = replace(config, pack=pack, negate=scale < 0, **limited)
    return Case(
        config,
        head_dim,
        head_dim_v,
        batch=draw(st.integers(1, 2)),
        seqlen_q=draw(lengths(max(config.tile_q // 2, 2), 4 // config.ctas)),
        seqlen_k=draw(lengths(config.tile_n, 4)),
        heads_kv=draw(st.integers(1, 2)),
        ratio=draw(st.sampled_from((1, 2, 3, 5, 8))),
        softmax_scale=scale,
        value_scale=draw(st.sampled_from((1.0, 0.1, 3.0))),
        workers=draw(st.integers(1, 4)),
        window_size=window,
        softcap=softcap,
        sink=sink,
    )


@settings(max_examples=80)
@given(case=cases(), seed=st.integers(0, 2**16))
def test_numbers_of_random_problems(case, seed):
    run(case, seed)


def run_call(problem, seed):
    """Any call of the public functions, with the config that it would get and NaN in what is not in use."""
    inputs, keywords = problem.tensors(seed=seed), problem.keywords()
    assume(all(x.numel() for x in inputs))
    options = options_of(*inputs, **keywords)
    facts = AttentionProblem.of_call(*inputs, options)
    assume(can_implement(facts) is None)
    config = choose_config(facts)[0]
    for name in ("sink", "alibi_slopes"):
        if getattr(options, name) is not None:
            options = options._replace(**{name: getattr(options, name).numpy()})
    if options.aux_tensors is not None:
        options = options._replace(aux_tensors=[x.numpy() for x in options.aux_tensors])
    arrays = (x.float().numpy() for x in inputs)
    with np.errstate(invalid="ignore"):  # NaN in rows that are not in use
        out, lse = simulate_forward(config, *arrays, options, workers=1 + seed % 3, seed=seed)
    out = torch.from_numpy(out).to(problem.dtype)
    assert_forward_close(out, torch.from_numpy(lse), inputs, **keywords)
    return config


CALLS = strategies.problems(max_seqlen=600, max_scores=2**19)


@settings(max_examples=150)
@given(CALLS, st.integers(0, 2**16))
def test_calls_of_every_feature(problem, seed):
    run_call(problem, seed)


WINDOWS = ((0, 0), (0, None), (70, None), (None, 90), (64, 64), (130, 0), (2**29, 2**29))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("head_dim", "seqlen_q", "seqlen_k"), [(64, 700, 400), (128, 300, 500)])
def test_windows(head_dim, seqlen_q, seqlen_k, window):
    facts = {"window_left": window[0] is not None, "window_right": window[1] is not None}
    config = shipped(head_dim, head_dim, False, **facts)
    run(Case(config, head_dim, head_dim, 1, seqlen_q, seqlen_k, 2, window_size=window))


def test_blocks_outside_a_window_are_not_loaded():
    """Each tile of 256 queries loads the three blocks of 16 that its window touches, the first one two."""
    config = shipped(128, 128, True, window_left=True)
    case = Case(config, 128, 128, 1, 2048, 2048, window_size=(127, None), workers=1)
    ((machine, _),) = case.machines()
    machine.run()
    loads = [
        s
        for s in machine.trace
        if s.kind == "issue" and s.target.startswith("copies of load into kv")
    ]
    assert len(loads) == 2 * (8 * 3 - 1)


@pytest.mark.parametrize("scale", [0.1, -0.2, 0.0])
@pytest.mark.parametrize("sink", [None, -50.0, 0.0, 50.0])
@pytest.mark.parametrize("softcap", [0.0, 0.5, 30.0])
def test_caps_and_sinks(softcap, sink, scale):
    """Sinks far below and above the scores, with rows that see no key."""
    flags = {"softcap": softcap != 0, "sink": sink is not None, "negate": scale < 0, "pack": 2}
    config = replace(shipped(64, 64, True), **flags)
    run(Case(config, 64, 64, 1, 300, 250, 2, 3, softmax_scale=scale, softcap=softcap, sink=sink))


@pytest.mark.parametrize("ratio", [1, 3, 8])
@pytest.mark.parametrize("pack", [2, 8, 64])
def test_packed_heads(pack, ratio):
    config = replace(shipped(64, 64, True), pack=pack)
    run(Case(config, 64, 64, 1, 70, 130, 2, ratio), seed=ratio)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1.5, 100.0])
@pytest.mark.parametrize("causal", [False, True])
def test_scales(scale, causal):
    config = replace(shipped(128, 128, causal), negate=scale < 0)
    run(Case(config, 128, 128, 1, 130, 300, 2, softmax_scale=scale))


@pytest.mark.parametrize("q_tiles", [1, 2])
@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_outgrow_a_fixed_shift_are_done_again(causal, ctas, q_tiles):
    """Scores in front are far above those of the masked blocks: P overflows, and O with it."""
    config = replace(shipped(128, 128, causal), ctas=ctas, stages=3, fixed_shift=True)
    config = replace(config, q_tiles=q_tiles)
    case = Case(config, 128, 128, 1, 600, 600, softmax_scale=0.7, value_scale=3.0, workers=1)
    run(case)
    ((machine, call),) = case.machines()
    machine.run()
    first = [
        s
        for s in machine.trace
        if s.kind == "issue" and "load into" in s.target and "q[0]" in s.target
    ]
    assert len(first) > call.tiles.grid.total * ctas, "Q of a tile is loaded twice"
    quiet = replace(case, value_scale=0.1)
    ((machine, call),) = quiet.machines()
    machine.run()
    first = [
        s
        for s in machine.trace
        if s.kind == "issue" and "load into" in s.target and "q[0]" in s.target
    ]
    assert len(first) == call.tiles.grid.total * ctas


def test_rows_without_keys():
    case = Case(shipped(64, 64, True), 64, 64, 1, 400, 100)
    arrays = (x.float().numpy() for x in case.tensors())
    out, lse = simulate_forward(case.config, *arrays, 0.1)
    assert (out[0, :300] == 0).all() and (lse[0, 0, :300] == -np.inf).all()
    assert np.isfinite(lse[0, 0, 300:]).all()


def test_every_order_gives_the_same_bits():
    case = Case(shipped(64, 64, True), 64, 64, 2, 600, 300, 2)
    arrays = [x.float().numpy() for x in case.tensors()]
    results = [
        simulate_forward(case.config, *arrays, 0.1, workers, seed)
        for workers, seed in ((1, 0), (2, 1), (3, 2), (8, 3))
    ]
    for out, lse in results[1:]:
        assert (out == results[0][0]).all() and (lse == results[0][1]).all()


def test_simulates_after_compiling():
    """Tracing replaces the code of the role functions; ``plain`` finds the original."""
    config = shipped(64, 64, False)
    compile_kernel("flash4.sm100.fwd:ForwardSm100", config, "sm_100a")
    run(Case(config, 64, 64, 1, 100, 150, 2))


def test_steps_do_not_depend_on_the_order():
    """What lets one recorded run stand for all orders."""
    case = Case(shipped(64, 64, True), 64, 64, seqlen_q=600, seqlen_k=300, workers=1)
    programs = []
    for seed in range(4):
        ((machine, _),) = case.machines(seed)
        machine.run()
        actors = {step.actor for step in machine.trace}
        steps = [(s.actor, s.kind, s.target, s.count, s.nbytes) for s in machine.trace]
        programs.append({actor: [s for s in steps if s[0] == actor] for actor in actors})
    assert programs[1:] == programs[:-1]


SMALL = ForwardConfig(True, 64, 64, False, tile_n=64, head=32, stages=2, o_slots=1)


@pytest.mark.parametrize("q_tiles", [1, 2])
@pytest.mark.parametrize("seqlen_k", [64, 128, 192])
def test_every_order_of_a_small_problem(seqlen_k, q_tiles):
    """One tile, up to three blocks: the loops' steady state."""
    config = replace(SMALL, q_tiles=q_tiles)
    case = Case(config, 8, 8, seqlen_q=128 * q_tiles, seqlen_k=seqlen_k, workers=1)
    ((machine, _),) = case.machines()
    machine.run()
    found = explore(machine)
    assert found.steps > found.states > len(machine.tasks)


MUTANTS = {mutant.name: mutant for mutant in sm100_fwd_mutants()}
SYNCHRONISING = [name for name, mutant in MUTANTS.items() if mutant.synchronises]
FILE = Path(__file__).with_name("sm100_fwd_harmless_mutants.json")
HARMLESS = json.loads(FILE.read_text("utf-8"))  # name -> why nothing is wrong


@pytest.fixture(scope="module")
def jury():
    return JURIES["sm100-fwd"]()


def test_the_kernel_itself_is_not_reported(jury):
    assert jury.verdict(Mutant("nothing", 0, False, Variation)) is None
    assert len(MUTANTS) == len(sm100_fwd_mutants()) and set(HARMLESS) <= set(MUTANTS)


@pytest.mark.parametrize("name", SYNCHRONISING)
def test_no_synchronisation_can_go_or_move(name, jury):
    """What is listed as harmless in one order only; the command tries all."""
    seeds = 1 if name in HARMLESS else None
    assert (jury.verdict(MUTANTS[name], seeds) is None) == (name in HARMLESS)


SIGNALS = [
    (index, signal.name)
    for index in (2, 3, 7, 8)  # alone and a pair, with two Q tiles and with one
    for signal in SM100_PROBLEMS[index].config.graph.signals
]


@pytest.mark.parametrize(("index", "name"), SIGNALS)
def test_a_cover_is_not_a_matter_of_belief(name, index):
    """Each signal is freed by the edges that the graph names, and not by nothing."""
    config, problem = SM100_PROBLEMS[index].config, SM100_PROBLEMS[index]
    variation = Variation(covers=((name, ()),))
    with pytest.raises(Hazard, match=f"{name} is said to be freed by"):
        simulate_forward(config, *problem.tensors(), 0.1, variation=variation)


def test_16_bit_words():
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0)).numpy()
    for bf16 in (True, False):
        rounded = round_to_16_bit(x, bf16)
        assert (unpack_16_bit(pack_16_bit(rounded, bf16), bf16) == rounded).all()


@pytest.mark.parametrize("bounded", [False, True])
def test_exponentials_on_the_fma_units(bounded):
    x = np.linspace(-140, 10, 300_001, dtype=np.float32)
    y, exact = exp2_on_fma(part_of_range(x, 1, 0), bounded), np.exp2(x.astype(np.float64))
    normal = x > -126
    error = np.abs(y - exact)[normal] / exact[normal]
    assert (error < np.where(x[normal] < 1, 5.7e-6, 8.5e-6)).all(), "of the quartic and of y"
    assert ((y[~normal] >= 0) & (y[~normal] <= 2.0**-125)).all()
    lowest = part_of_range(np.float32([-np.inf, np.nan, -1e38]), 1, 0)
    assert exp2_on_fma(lowest, bounded).tolist() == [0, 0, 0]
    assert (np.diff(y) >= -8e-6 * y[1:]).all(), (
        "steps back at integers are of the size of the error"
    )


@pytest.mark.parametrize("shift", [0, 0.3, 13.7, -13.7, 900.1, -900.1])
def test_exponentials_on_the_fma_units_agree_with_the_others(shift):
    """A row's shift is rounded once for both, however large."""
    scale, offset = np.float32(0.1275), np.float32(-shift)
    s = ((shift + np.linspace(-20, 8, 10_001)) / scale).astype(np.float32)
    x = s.astype(np.float64) * scale + offset
    found = exp2_on_fma(part_of_range(s, scale, offset), bounded=True)
    # What is left of a shift below zero, beside 127, has the places of their sum.
    allowed = 1.2e-5 if shift > -100 else 7e-5
    assert (np.abs(found / np.exp2(x) - 1) < allowed).all()


def test_exponentials_on_the_fma_units_that_overflow_are_noticed():
    """A row's sum is looked at, and a fixed shift's tile worked on again."""
    x = np.concatenate([np.linspace(128, 131, 1001), [1e3, 1e38, np.inf]]).astype(np.float32)
    y = exp2_on_fma(part_of_range(x, 1, 0), bounded=False)
    assert not (y <= LARGEST_TOTAL).any() and not np.isfinite(y[1:]).any()
    last = exp2_on_fma(part_of_range(np.float32([127, 127.9]), 1, 0), bounded=False)
    assert np.isfinite(last).all() and (last > 1e38).all()


def main():
    """Run random (problem, seed) pairs, of configs and of calls by turns; a failure is shrunk and raised."""
    check_random(arguments_of(main.__doc__), ((cases(), run), (CALLS, run_call)))


if __name__ == "__main__":
    main()
