"""The Blackwell backward's own role functions, in plain Python: right numbers, and no hazard, in any order.

As a script, with more random problems: ``python -m tests.host.test_bwd100_roles --n 2000 --seed 1``; with ``--ordered``
problems whose dQ is summed in a fixed order, each in several orders of everything else.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash4.problem import AttentionProblem
from flash4.sim.sm100_bwd import simulate_backward
from flash4.sm100.bwd_config import BackwardConfig, choose_config
from tests.checks import assert_gradients_close
from tests.host.test_bwd90_roles import Case, lengths


def shipped(head_dim, head_dim_v, causal, bf16=True, **features):
    """Config that a call with these head dims and features gets."""
    dtype = torch.bfloat16 if bf16 else torch.float16
    facts = AttentionProblem(dtype, 1, 4096, 4096, 1, 1, head_dim, head_dim_v, causal, **features)
    return choose_config(facts)[0]


KINDS = (
    # config, head_dim, head_dim_v
    (BackwardConfig(True, 64, 64, True), 64, 64),
    (BackwardConfig(False, 64, 64, False), 64, 64),
    (BackwardConfig(True, 128, 128, False), 128, 128),
    (BackwardConfig(True, 128, 128, True), 96, 120),
    (BackwardConfig(True, 128, 128, False, ctas=2), 128, 128),
    (BackwardConfig(True, 128, 128, True, ctas=2), 128, 128),
    (BackwardConfig(False, 128, 128, True, ctas=2), 104, 72),
    (BackwardConfig(True, 64, 128, True), 40, 128),
    (BackwardConfig(True, 128, 64, False), 128, 8),
)
IDS = [
    f"{i}-{c.tile_d}-{c.tile_dv}-{'causal' if c.causal else 'full'}-{c.ctas}"
    for i, (c, _, _) in enumerate(KINDS)
]


def gradients(case: Case, seed: int = 0, variation=None):
    """What the simulated kernel makes of a case."""
    arrays, dlse = case.arrays()
    return simulate_backward(case.config, arrays, case.options, case.workers, seed, variation, dlse)


def run(case: Case, seed: int = 0):
    """Simulate a case, and check it against float64."""
    q, k, v, dout, dlse = case.tensors()
    results = [torch.from_numpy(x).to(q.dtype) for x in gradients(case, seed)]
    assert_gradients_close(results, (q, k, v), dout, dlse=dlse, **case.keywords)
    return case.config


@pytest.mark.parametrize("index", range(len(KINDS)), ids=lambda i: IDS[i])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(150, 300), (300, 150), (256, 256)])
def test_numbers(index, seqlen_q, seqlen_k):
    config, head_dim, head_dim_v = KINDS[index]
    run(Case(config, head_dim, head_dim_v, 1, seqlen_q, seqlen_k, 2, dlse=True), seed=index)


@st.composite
def cases(draw, ordered=st.sampled_from((False, False, True))):
    config, head_dim, head_dim_v = draw(st.sampled_from(KINDS))
    left, right = (draw(st.one_of(st.none(), st.integers(0, 300))) for _ in range(2))
    window = draw(st.sampled_from(((None, None), (None, None), (left, None), (left, right))))
    causal, softcap = draw(st.booleans()), draw(st.sampled_from((0.0, 0.0, 2.0, 50.0)))
    if causal:
        window = (window[0], None)
    features = {
        "left": window[0] is not None,
        "right": window[1] is not None,
        "softcap": softcap != 0,
        "alibi": draw(st.sampled_from((False, False, True))),
        "ordered": draw(ordered),
    }
    return Case(
        replace(config, causal=causal, **features),
        draw(st.sampled_from((head_dim, 8 * draw(st.integers(1, head_dim // 8))))),
        draw(st.sampled_from((head_dim_v, 8 * draw(st.integers(1, head_dim_v // 8))))),
        batch=draw(st.integers(1, 2)),
        seqlen_q=draw(lengths(config.tile_m, 3)),
        seqlen_k=draw(lengths(config.tile_n, 2 if config.ctas == 2 else 3)),
        heads_kv=draw(st.integers(1, 2)),
        ratio=draw(st.sampled_from((1, 1, 2, 3))),
        softmax_scale=draw(st.sampled_from((0.1, 0.1, 0.02, 0.7, 0.0, -0.1))),
        value_scale=draw(st.sampled_from((1.0, 0.1, 3.0))),
        workers=draw(st.integers(1, 4)),
        dlse=draw(st.booleans()),
        window_size=window,
        softcap=softcap,
        sink=draw(st.sampled_from((None, None, 1.0))),
    )


@settings(max_examples=40)
@given(case=cases(), seed=st.integers(0, 2**16))
def test_numbers_of_random_problems(case, seed):
    run(case, seed)
