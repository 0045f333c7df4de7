"""The Hopper backward's own role functions, in plain Python: right numbers, and no hazard, in any order.

As a script, with more random problems: ``python -m tests.host.test_bwd90_roles --n 1000 --seed 1``.
"""

import argparse
import time
from dataclasses import dataclass, replace

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import flash4
from flash4 import reference
from flash4.interface import options_of
from flash4.jit.compile import compile_kernel
from flash4.problem import AttentionProblem, CallOptions
from flash4.sim.explore import explore
from flash4.sim.sm90_bwd import backward_machines, simulate_backward
from flash4.sim.sm90_bwd_192 import simulate_backward_192
from flash4.sim.sm90_bwd_wide import simulate_wide_backward
from flash4.sm90.bwd_192_config import Backward192Config
from flash4.sm90.bwd_config import BackwardConfig, choose_config
from flash4.sm90.bwd_wide_config import WideBackwardConfig
from tests import strategies
from tests.checks import assert_gradients_close
from tests.gpu.gradients import is_built


@dataclass(frozen=True)
class Case:
    """A problem for a config."""

    config: BackwardConfig
    head_dim: int
    head_dim_v: int
    batch: int = 1
    seqlen_q: int = 200
    seqlen_k: int = 200
    heads_kv: int = 1
    ratio: int = 1
    softmax_scale: float = 0.1
    value_scale: float = 1.0
    workers: int = 2
    dlse: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    sink: float | None = None  # mean of the sinks

    @property
    def heads(self):
        """Query heads."""
        return self.heads_kv * self.ratio

    @property
    def keywords(self):
        """Keywords of the reference; the config's flags are the other half of the problem."""
        heads = torch.arange(float(self.heads))
        return {
            "softmax_scale": self.softmax_scale,
            "causal": self.config.causal,
            "window_size": self.window_size,
            "softcap": self.softcap,
            "learnable_sink": None if self.sink is None else self.sink + heads,
            "alibi_slopes": 0.02 * (heads + 1) if self.config.alibi else None,
        }

    @property
    def options(self):
        """What the simulator takes; a sink is in the log-sum-exp alone."""
        sides = (-1 if side is None else side for side in self.window_size)
        options = CallOptions(self.softmax_scale, self.config.causal, None, *sides, self.softcap)
        slopes = self.keywords["alibi_slopes"]
        return options._replace(alibi_slopes=None if slopes is None else slopes.numpy())

    def tensors(self):
        """Random normal q, k, v and dout in the config's dtype, and dlse or None."""
        generator = torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if self.config.bf16 else torch.float16

        def draw(seqlen, heads, head_dim, scale=self.value_scale):
            x = torch.randn(self.batch, seqlen, heads, head_dim, generator=generator)
            return (x * scale).to(dtype)

        tensors = (
            draw(self.seqlen_q, self.heads, self.head_dim),
            draw(self.seqlen_k, self.heads_kv, self.head_dim),
            draw(self.seqlen_k, self.heads_kv, self.head_dim_v),
            draw(self.seqlen_q, self.heads, self.head_dim_v, 1.0),
        )
        dlse = torch.randn(self.batch, self.heads, self.seqlen_q, generator=generator)
        return *tensors, dlse if self.dlse else None

    def arrays(self):
        """What ``simulate_backward`` takes, and dlse: with the results of a forward that is right."""
        q, k, v, dout, dlse = self.tensors()
        out, lse = reference.attention(q, k, v, return_lse=True, **self.keywords)
        arrays = [x.float().numpy() for x in (q, k, v, out.to(q.dtype), lse, dout)]
        return arrays, None if dlse is None else dlse.numpy()


def shipped(head_dim, head_dim_v, causal, bf16=True, **features):
    """Config that a call with these head dims and features gets."""
    dtype = torch.bfloat16 if bf16 else torch.float16
    facts = AttentionProblem(dtype, 1, 4096, 4096, 1, 1, head_dim, head_dim_v, causal, **features)
    return choose_config(facts)[0]


KINDS = (
    # head_dim, head_dim_v, causal, bf16
    (64, 64, True, True),
    (64, 64, False, False),
    (40, 8, True, False),
    (128, 128, True, True),
    (128, 128, False, False),
    (128, 72, True, True),
    (96, 96, True, True),
    (72, 96, False, True),
    (64, 128, True, True),
)
CONFIGS = [(shipped(*kind), *kind[:2]) for kind in KINDS]
# Not shipped, but supported: dQ not swapped at head dim 128, and short steps at 64.
CONFIGS += [(BackwardConfig(True, d, d, 64, True), d, d) for d in (64, 128)]
CONFIGS += [(BackwardConfig(True, 128, 128, 80, True, swap_dq=True), 128, 128)]


IN_ORDER = {"handed_out": False, "first_stores": False, "backwards": False}
CONFIGS += [
    (replace(config, **IN_ORDER, late=late, alternate=alternate), *dims)
    for config, *dims in CONFIGS[:2]
    for late, alternate in ((False, False), (True, False), (True, True))
]


def simulator_of(config):
    """Function that simulates the kernel of a config."""
    own = {Backward192Config: simulate_backward_192, WideBackwardConfig: simulate_wide_backward}
    return own.get(type(config), simulate_backward)


def run(case: Case, seed: int = 0):
    """Simulate a case, without what its lengths exclude, and check it against float64."""
    if case.config.lengths_obstacle(case.seqlen_q, case.seqlen_k):
        case = replace(case, config=replace(case.config, first_stores=False))
    q, k, v, dout, dlse = case.tensors()
    arrays, dlse_array = case.arrays()
    results = simulator_of(case.config)(
        case.config, arrays, case.options, case.workers, seed, dlse=dlse_array
    )
    gradients = [torch.from_numpy(x).to(q.dtype) for x in results]
    assert_gradients_close(gradients, (q, k, v), dout, dlse=dlse, **case.keywords)


def test_the_configs_cover_what_can_differ():
    configs = [config for config, *_ in CONFIGS]
    assert {config.swap_dq for config in configs} == {False, True}
    assert {config.splits_queries for config in configs} == {False, True}
    assert {(config.tile_d, config.tile_dv) for config in configs} >= {
        (64, 64),
        (96, 96),
        (128, 128),
    }


@pytest.mark.parametrize("index", range(len(CONFIGS)), ids=lambda i: f"{i}-{CONFIGS[i][1:]}")
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(150, 300), (300, 150), (256, 256)])
def test_numbers(index, seqlen_q, seqlen_k):
    config, head_dim, head_dim_v = CONFIGS[index]
    run(Case(config, head_dim, head_dim_v, 1, seqlen_q, seqlen_k, 2, dlse=True), seed=index)


def lengths(unit: int, most: int):
    """Lengths at the edges of tiles, and others."""
    edges = st.builds(lambda n, d: n * unit + d, st.integers(1, most), st.sampled_from((0, 1, -1)))
    return st.one_of(edges, st.integers(1, most * unit))


@st.composite
def cases(
    draw, configs, caps=(2.0, 50.0), scales=(0.1, 0.1, 0.02, 0.7, 0.0, -0.1), values=(1.0, 0.1, 3.0)
):
    """A case for one of the configs, with whatever features it can have; caps, scales of scores and of tensors to choose from."""
    config, head_dim, head_dim_v = draw(st.sampled_from(configs))
    left, right = (draw(st.one_of(st.none(), st.integers(0, 300))) for _ in range(2))
    window = draw(st.sampled_from(((None, None), (None, None), (left, None), (left, right))))
    causal, softcap = draw(st.booleans()), draw(st.sampled_from((0.0, 0.0, *caps)))
    if causal:
        window = (window[0], None)
    limited = {"left": window[0] is not None, "right": window[1] is not None}
    features = {"softcap": softcap != 0, "alibi": draw(st.sampled_from((False, False, True)))}
    wide = isinstance(config, WideBackwardConfig)
    features["ordered"] = draw(st.sampled_from((False, False, not (wide and config.joint))))
    if any(limited.values()) and not wide:
        features |= IN_ORDER
    return Case(
        replace(config, causal=causal, **limited, **features),
        draw(st.sampled_from((head_dim, 8 * draw(st.integers(1, head_dim // 8))))),
        draw(st.sampled_from((head_dim_v, 8 * draw(st.integers(1, head_dim_v // 8))))),
        batch=draw(st.integers(1, 2)),
        seqlen_q=draw(lengths(config.tile_m, max(3, 192 // config.tile_m))),
        seqlen_k=draw(lengths(config.tile_n, 256 // config.tile_n)),
        heads_kv=draw(st.integers(1, 2)),
        ratio=draw(st.sampled_from((1, 1, 2, 3, 5))),
        softmax_scale=draw(st.sampled_from(scales)),
        value_scale=draw(st.sampled_from(values)),
        workers=draw(st.integers(1, 4)),
        dlse=draw(st.booleans()),
        window_size=window,
        softcap=softcap,
        sink=draw(st.sampled_from((None, None, 1.0))),
    )


# Where head dims are above 128.
WIDE = {"caps": (20.0, 50.0), "scales": (0.06, 0.06, 0.02, 0.3, 0.0, -0.06), "values": (1.0,)}


# Slopes of the cap of 1e-30, which float32 holds, and 1 - tanh^2 in float64 does not.
STEEP = Case(
    replace(shipped(64, 64, False), softcap=True), 64, 64, 1, 5, 40, softmax_scale=0.7,
    value_scale=3.0, softcap=2.0,
)  # fmt: skip


@settings(max_examples=60)
@given(case=cases(CONFIGS), seed=st.integers(0, 2**16))
@example(STEEP, 1)
def test_numbers_of_random_problems(case, seed):
    run(case, seed)


# Scores far above their cap, whose slopes are far below the spacing of numbers at 1.
SATURATED = strategies.Problem(
    torch.float16, 3, 2, 4, 40, 56, 223, 2, value_scale=3.0, window_size=(201, 0), softcap=1.0
)


def numpy_options(options: CallOptions) -> CallOptions:
    """Options with what the simulator takes for tensors."""
    if options.alibi_slopes is not None:
        options = options._replace(alibi_slopes=options.alibi_slopes.numpy())
    if options.aux_tensors is not None:
        options = options._replace(aux_tensors=[x.numpy() for x in options.aux_tensors])
    return options


@settings(max_examples=60)
@given(strategies.problems(max_seqlen=400, max_scores=2**17), st.integers(0, 2**16))
@example(SATURATED, 29379)
def test_calls_of_every_feature(problem, seed):
    """Any call of the public function that has gradients, with the config that it would get."""
    inputs, keywords = problem.tensors(seed=seed), problem.keywords()
    assume(is_built(problem) and all(x.numel() for x in inputs))
    config = flash4.explain(*inputs, backward=True, **keywords).config
    options = options_of(*inputs, **keywords)
    options = numpy_options(options)
    out, lse = reference.attention(*inputs, return_lse=True, **keywords)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(problem.dtype)
    arrays = [x.float().numpy() for x in (*inputs, out.to(problem.dtype), lse, dout)]
    results = simulator_of(config)(config, arrays, options, 1 + seed % 3, seed)
    gradients = [torch.from_numpy(x).to(problem.dtype) for x in results]
    assert_gradients_close(gradients, inputs, dout, **keywords)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 1.5])
@pytest.mark.parametrize("causal", [False, True])
def test_scales(scale, causal):
    run(Case(shipped(64, 64, causal), 64, 64, 1, 130, 300, 2, softmax_scale=scale))


WINDOWS = ((0, 0), (0, None), (70, None), (None, 90), (64, 64), (130, 0), (2**29, 2**29))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("head_dim", "seqlen_q", "seqlen_k"), [(64, 500, 300), (128, 200, 500)])
def test_windows(head_dim, seqlen_q, seqlen_k, window):
    facts = {"window_left": window[0] is not None, "window_right": window[1] is not None}
    config = shipped(head_dim, head_dim, False, **facts)
    run(Case(config, head_dim, head_dim, 1, seqlen_q, seqlen_k, 1, 2, window_size=window))


def test_blocks_outside_a_window_are_not_loaded():
    """A tile of 128 keys is seen by 128 + 127 queries: by two or three blocks of 128."""
    config = shipped(64, 64, True, window_left=True)
    case = Case(config, 64, 64, 1, 2048, 2048, window_size=(127, None), workers=1)
    arrays, _ = case.arrays()
    ((machine, _),) = backward_machines(config, arrays, case.options, workers=1, seed=0)
    machine.run()
    loads = [s for s in machine.trace if s.kind == "issue" and s.target.startswith("copies into q")]
    assert len(loads) == 16 + 15


@pytest.mark.parametrize("scale", [0.1, -0.2, 0.0])
@pytest.mark.parametrize("sink", [None, -50.0, 0.0, 50.0])
@pytest.mark.parametrize("softcap", [0.0, 0.5, 30.0])
def test_caps_and_sinks(softcap, sink, scale):
    """Sinks far below and above the scores, with rows that see no key."""
    config = shipped(64, 64, True, softcap=softcap != 0)
    run(Case(config, 64, 64, 1, 200, 150, 1, 2, softmax_scale=scale, softcap=softcap, sink=sink))


def test_keys_behind_the_last_add_nothing_however_low_the_scores():
    """Their scores are 0, far above an LSE of -2000: P would be infinite."""
    case = Case(shipped(64, 64, False, bf16=False), 64, 64, 1, 70, 70, softmax_scale=-1.0)
    q, k, v, dout, _ = case.tensors()
    q, k = q.abs() * 5, k.abs() * 5
    out, lse = reference.attention(q, k, v, return_lse=True, softmax_scale=-1.0)
    assert lse.max() < -500
    arrays = [x.float().numpy() for x in (q, k, v, out.to(q.dtype), lse, dout)]
    results = simulate_backward(case.config, arrays, -1.0)
    gradients = [torch.from_numpy(x).to(q.dtype) for x in results]
    assert_gradients_close(gradients, (q, k, v), dout, softmax_scale=-1.0)


def test_rows_without_keys_add_nothing():
    case = Case(shipped(128, 128, True), 128, 128, 1, 300, 40, dlse=True)
    arrays, dlse = case.arrays()
    dq, *_ = simulate_backward(case.config, arrays, 0.1, dlse=dlse * np.inf)
    assert not dq[:, :260].any()


def test_every_order_gives_the_same_bits_of_dk_and_dv():
    case = Case(shipped(64, 64, True), 64, 64, 2, 300, 300, 2, 2)
    arrays, _ = case.arrays()
    results = [
        simulate_backward(case.config, arrays, 0.1, workers, seed)
        for workers, seed in ((1, 0), (2, 1), (3, 2), (8, 3))
    ]
    for _, dk, dv in results[1:]:
        assert (dk == results[0][1]).all() and (dv == results[0][2]).all()


WITH_TURNS = {
    "full": (False, (None, None)),
    "causal": (True, (None, None)),
    "causal window": (True, (40, None)),
    "window": (False, (100, 200)),
}


@pytest.mark.parametrize("name", WITH_TURNS)
def test_turns_give_the_same_bits_of_dq(name):
    """Whatever the order of CTAs; without turns it would matter."""
    causal, window = WITH_TURNS[name]
    facts = {"window_left": window[0] is not None, "window_right": window[1] is not None}
    config = shipped(64, 64, causal, deterministic=True, **facts)
    case = Case(config, 64, 64, 1, 300, 600, 1, 2, window_size=window)
    arrays, _ = case.arrays()
    results = [
        simulate_backward(config, arrays, case.options, workers, seed)
        for workers, seed in ((5, 0), (2, 1), (3, 2), (4, 3), (1, 4))
    ]
    for gradients in results[1:]:
        assert all((a == b).all() for a, b in zip(gradients, results[0], strict=True))
    run(case)


def test_simulates_after_compiling():
    """Tracing replaces the code of the role functions; ``plain`` finds the original."""
    config = shipped(64, 64, False)
    compile_kernel("flash4.sm90.bwd:BackwardSm90", config, "sm_90a")
    run(Case(config, 64, 64, 1, 100, 150, 2))


@pytest.mark.parametrize("causal", [False, True])
def test_every_order_of_a_small_problem(causal):
    """Narrow heads: the schedule is that of the config, the numbers are few. Two tiles, three steps."""
    config = BackwardConfig(True, 16, 16, 64, causal)
    case = Case(config, 8, 8, seqlen_q=100, seqlen_k=140, workers=1)
    arrays, _ = case.arrays()
    for machine, _ in backward_machines(config, arrays, 0.1, workers=1, seed=0):
        machine.run()
        found = explore(machine)
        assert found.steps > found.states > len(machine.tasks)


def test_steps_do_not_depend_on_the_order():
    """What lets one recorded run stand for all orders."""
    case = Case(shipped(64, 64, True), 64, 64, seqlen_q=300, seqlen_k=300)
    arrays, _ = case.arrays()
    programs = []
    for seed in range(4):
        ((machine, _),) = backward_machines(case.config, arrays, 0.1, workers=1, seed=seed)
        machine.run()
        actors = {step.actor for step in machine.trace}
        steps = [(s.actor, s.kind, s.target, s.count, s.nbytes) for s in machine.trace]
        programs.append({actor: [s for s in steps if s[0] == actor] for actor in actors})
    assert programs[1:] == programs[:-1]


def main():
    """Run random (problem, seed) pairs; a failure is shrunk and raised."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("--n", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    runs, start = [], time.perf_counter()

    @hypothesis.seed(arguments.seed)
    @settings(
        max_examples=arguments.n, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=cases(), seed=st.integers(0, 2**16))
    def check(case, seed):
        run(case, seed)
        runs.append(case.config)

    check()
    seconds = time.perf_counter() - start
    print(f"{len(runs)} runs of {len(set(runs))} configs, no alarm, numbers right, {seconds:.0f} s")


if __name__ == "__main__":
    main()
