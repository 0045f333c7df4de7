"""Hypothesis profiles, threads, and which GPU a test needs."""

import faulthandler
import os
from functools import cache
from pathlib import Path

import hypothesis
import pytest
import torch

GPU_TESTS = Path(__file__).parent / "gpu"
LOWEST_CAPABILITY = (8, 0)
GPU_TEST_SECONDS = 300

# The tensors are small: threads cost more than they bring.
torch.set_num_threads(1)

# No deadlines and no complaint about slow inputs: a first example may compile a kernel.
hypothesis.settings.register_profile(
    "dev",
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
DEV = hypothesis.settings.get_profile("dev")
# The same examples every time, so that a red run is about the change.
hypothesis.settings.register_profile("ci", DEV, derandomize=True)
hypothesis.settings.register_profile("nightly", DEV, max_examples=5_000)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(autouse=True)
def end_what_hangs(request: pytest.FixtureRequest):
    """End the process, with every stack, when a GPU test hangs: a kernel that waits cannot be stopped."""
    hangs = request.node.get_closest_marker("gpu") is not None
    if hangs:
        faulthandler.dump_traceback_later(GPU_TEST_SECONDS, exit=True)
    yield
    if hangs:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem):
    """Fail a test that leaves CPU tensors taken for CUDA ones: the next test would not test what it says."""
    yield
    assert "is_cuda" not in vars(torch.Tensor), "a patch of torch.Tensor.is_cuda outlives the test"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "gpu(major=None): needs a CUDA GPU, of that compute capability major if given; every test "
        "under tests/gpu has it",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests under tests/gpu, and skip those that need another GPU than there is."""
    for item in items:
        if item.path.is_relative_to(GPU_TESTS) and item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.gpu)
        marker = item.get_closest_marker("gpu")
        if marker is not None and (reason := _missing(**marker.kwargs)):
            item.add_marker(pytest.mark.skip(reason=reason))


def _missing(major: int | None = None) -> str | None:
    """Why this machine cannot run a test, or None."""
    lowest = ".".join(map(str, LOWEST_CAPABILITY))
    needed = f"compute capability {lowest} or newer" if major is None else f"sm_{major}x"
    present = _capability()
    if present is None:
        return f"no CUDA GPU is present; {needed} is needed"
    if present < LOWEST_CAPABILITY or major not in (None, present[0]):
        return f"the GPU has compute capability {present[0]}.{present[1]}; {needed} is needed"
    return None


@cache
def _capability() -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None
