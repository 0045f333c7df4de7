"""Every feature's gradients, as the kernels' own roles compute them, against differences of a float64 forward."""

import pytest
import torch

import flash4
from tests import gradchecks
from tests.gradchecks import TINY, check_by_differences, differences
from tests.host.test_bwd90_roles import simulator_of
from tests.host.test_bwd90_sequences import arrays_of


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "turns"])
@pytest.mark.parametrize("name", TINY)
def test_simulated_gradients(name, deterministic):
    problem = TINY[name]
    inputs, keywords = problem.tensors(), problem.keywords()
    config = flash4.explain(
        *inputs, backward=True, deterministic=deterministic, arch="sm_90a", **keywords
    ).config
    arrays, options, dout = arrays_of(problem, inputs)
    dlse = torch.randn(arrays[4].shape, generator=torch.Generator().manual_seed(2))
    simulate = simulator_of(config)
    results = simulate(config, arrays, options, 2, seed=1, dlse=dlse.numpy())
    gradients = [torch.from_numpy(x).to(problem.dtype) for x in results]
    check_by_differences(gradients, problem, inputs, dout, dlse)


def test_differences_are_derivatives():
    x = torch.tensor([0.3, -2.0, torch.nan], dtype=torch.float64)
    (found,) = differences(lambda x: x.nan_to_num().pow(3).sum(), [x])
    torch.testing.assert_close(found, torch.tensor([0.27, 12.0, 0.0], dtype=torch.float64))


def test_a_wrong_gradient_shows():
    problem = TINY["full"]
    inputs = problem.tensors()
    _, _, dout = arrays_of(problem, inputs)
    keywords = problem.keywords()
    right = flash4.reference.attention_gradients(*inputs, dout, **keywords)
    check_by_differences(right[:3], problem, inputs, dout)
    for i in range(3):
        wrong = [x.clone() for x in right[:3]]
        wrong[i].view(-1)[3] += 0.05
        with pytest.raises(AssertionError):
            check_by_differences(wrong, problem, inputs, dout)
    assert gradchecks.STEP < 1e-3
