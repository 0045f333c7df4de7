"""Every rung of the ladder is right on a CPU, and compiles. ``python -m tests.host.test_ladder80`` runs all of them."""

import numpy as np
import pytest

from bench.ladder80 import RUNGS, Rung
from flash4.jit.compile import compile_kernel
from flash4.sim.sm80_fwd import Variation, simulate_forward


def simulate(rung: Rung, causal: bool, seed: int = 0) -> float:
    """Run a rung's schedule on a CPU, with a small tile; returns the largest error against float64."""
    config = rung.config(causal, tile_d=32, tile_dv=32, tile_n=16, ctas_per_sm=1)
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, 150, 1, 32)).astype(np.float32) for _ in range(3))
    out, _ = simulate_forward(
        config, q, k, v, 0.2, seed=seed, variation=Variation(rung.kernel.schedule)
    )
    s = np.einsum("bihd,bjhd->bhij", q, k, dtype=np.float64) * 0.2
    if causal:
        s = np.where(np.tri(150, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    expected = np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v)
    return float(np.abs(out - expected).max())


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
@pytest.mark.parametrize("causal", [False, True])
def test_a_rung_is_right(rung, causal):
    assert simulate(rung, causal) < 0.02


def test_the_lowest_rung_compiles():
    rung = RUNGS[0]
    path = f"{rung.kernel.__module__}:{rung.kernel.__name__}"
    compile_kernel(path, rung.config(True, tile_d=32, tile_dv=32, tile_n=32), "sm_80")


if __name__ == "__main__":
    for rung in RUNGS:
        errors = ", ".join(f"{simulate(rung, causal):.4f}" for causal in (False, True))
        print(f"{rung.name:44} no hazard; largest error, full and causal: {errors}")
