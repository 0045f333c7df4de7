"""Every feature's gradients at tiny sizes, through the public functions, against differences of a float64 forward."""

from __future__ import annotations

import pytest

from tests.gpu.gradients import GradientCase, poison
from tests.gradchecks import TINY, check_by_differences


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("name", TINY)
def test_gradients(name: str, deterministic: bool):
    case = GradientCase(TINY[name], dlse=True, deterministic=deterministic)
    inputs = case.inputs()
    poison()
    gradients = case.gradients(inputs)
    check_by_differences(
        gradients, case.problem, inputs, case.gradient_of_out(), case.gradient_of_lse()
    )
