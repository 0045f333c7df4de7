"""The Blackwell forward's own role functions, in plain Python: right numbers, and no hazard, in any order."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4.jit.compile import compile_kernel
from flash4.problem import AttentionProblem
from flash4.sim.explore import explore
from flash4.sim.machine import Hazard
from flash4.sim.mutants import JURIES, SM100_PROBLEMS, Mutant, sm100_fwd_mutants
from flash4.sim.sm90_fwd import round_to_16_bit
from flash4.sim.sm100_fwd import (
    Variation,
    exp2_on_fma,
    forward_machines,
    pack_16_bit,
    simulate_forward,
    unpack_16_bit,
)
from flash4.sm100.fwd_config import ForwardConfig, choose_config
from tests.checks import assert_forward_close


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
        return forward_machines(
            self.config, arrays, self.softmax_scale, self.workers, seed, variation
        )


def shipped(head_dim, head_dim_v, causal, bf16=True):
    """Config that a call with these head dims gets."""
    dtype = torch.bfloat16 if bf16 else torch.float16
    facts = AttentionProblem(dtype, 1, 4096, 4096, 1, 1, head_dim, head_dim_v, causal)
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
)
CONFIGS = [(shipped(*kind), *kind[:2]) for kind in KINDS]
# Not shipped: short blocks, other shares of exponentials on the FMA units, P handed over in other parts.
CONFIGS += [
    (replace(CONFIGS[0][0], tile_n=64, head=32, stages=2, o_slots=1), 64, 64),
    (replace(CONFIGS[4][0], poly=0, head=64), 128, 128),
    (replace(CONFIGS[3][0], poly=16, head=32), 128, 128),
]


def run(case: Case, seed: int = 0):
    """Simulate a case and check it against float64."""
    inputs = case.tensors()
    arrays = (x.float().numpy() for x in inputs)
    out, lse = simulate_forward(case.config, *arrays, case.softmax_scale, case.workers, seed)
    assert_forward_close(
        torch.from_numpy(out).to(inputs[0].dtype),
        torch.from_numpy(lse),
        inputs,
        softmax_scale=case.softmax_scale,
        causal=case.config.causal,
    )


def test_the_configs_cover_what_can_differ():
    configs = [config for config, *_ in CONFIGS]
    assert {config.o_slots for config in configs} == {1, 2}
    assert {config.tile_d for config in configs} == {64, 128, 192}
    assert {config.tile_dv for config in configs} == {64, 128}
    assert {config.kv_columns > config.tile_d for config in configs} == {False, True}


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
    config = replace(config, pack=pack, negate=scale < 0)
    return Case(
        config,
        head_dim,
        head_dim_v,
        batch=draw(st.integers(1, 2)),
        seqlen_q=draw(lengths(max(config.tile_q // 2, 2), 4)),
        seqlen_k=draw(lengths(config.tile_n, 4)),
        heads_kv=draw(st.integers(1, 2)),
        ratio=draw(st.sampled_from((1, 2, 3, 5, 8))),
        softmax_scale=scale,
        value_scale=draw(st.sampled_from((1.0, 0.1, 3.0))),
        workers=draw(st.integers(1, 4)),
    )


@settings(max_examples=80)
@given(case=cases(), seed=st.integers(0, 2**16))
def test_numbers_of_random_problems(case, seed):
    run(case, seed)


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


@pytest.mark.parametrize("seqlen_k", [64, 128, 192])
def test_every_order_of_a_small_problem(seqlen_k):
    """One tile, up to three blocks: the loops' steady state."""
    ((machine, _),) = Case(SMALL, 8, 8, seqlen_q=256, seqlen_k=seqlen_k, workers=1).machines()
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
    assert (jury.verdict(MUTANTS[name]) is None) == (name in HARMLESS)


SIGNALS = [signal.name for signal in SMALL.graph.signals]


@pytest.mark.parametrize("name", SIGNALS)
def test_a_cover_is_not_a_matter_of_belief(name):
    """Each signal is freed by the edges that the graph names, and not by nothing."""
    config, problem = SM100_PROBLEMS[2].config, SM100_PROBLEMS[2]
    variation = Variation(covers=((name, ()),))
    with pytest.raises(Hazard, match=f"{name} is said to be freed by"):
        simulate_forward(config, *problem.tensors(), 0.1, variation=variation)


def test_16_bit_words():
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0)).numpy()
    for bf16 in (True, False):
        rounded = round_to_16_bit(x, bf16)
        assert (unpack_16_bit(pack_16_bit(rounded, bf16), bf16) == rounded).all()


def test_exponentials_on_the_fma_units():
    x = np.linspace(-140, 10, 300_001, dtype=np.float32)
    y, exact = exp2_on_fma(x), np.exp2(x.astype(np.float64))
    normal = x > -126
    assert (np.abs(y - exact)[normal] < 3.1e-6 * exact[normal]).all()
    assert (np.abs(y[~normal]) <= 2.0**-125).all()
    assert exp2_on_fma(np.float32([-np.inf, np.nan])).tolist() == [0, 0]
    assert (np.diff(y) >= -4e-6 * y[1:]).all(), (
        "steps back at integers are of the size of the error"
    )
