"""Every synchronisation of the Ampere kernels matters, and the simulator says so when one is dropped or moved."""

import json
from pathlib import Path

import pytest

from flash4.sim.mutants import JURIES, KERNELS, Mutant
from flash4.sim.sm80_bwd import Variation as BackwardVariation
from flash4.sim.sm80_fwd import Variation as ForwardVariation

KINDS = {
    "sm80-fwd": ForwardVariation,
    "sm80-bwd": BackwardVariation,
    "sm80-bwd-two": BackwardVariation,
}
HARMLESS = {
    kernel: json.loads(
        Path(__file__)
        .with_name(f"{kernel.replace('-', '_')}_harmless_mutants.json")
        .read_text("utf-8")
    )
    for kernel in KINDS
}
MUTANTS = [(kernel, mutant) for kernel in KINDS for mutant in KERNELS[kernel]()]


@pytest.fixture(scope="module")
def juries():
    return {kernel: JURIES[kernel]() for kernel in KINDS}


@pytest.mark.parametrize("kernel", KINDS)
def test_the_kernel_itself_is_not_reported(kernel, juries):
    assert juries[kernel].verdict(Mutant("nothing", 0, False, KINDS[kernel])) is None


@pytest.mark.parametrize("kernel", KINDS)
def test_what_is_harmless_says_why(kernel):
    names = {mutant.name for known, mutant in MUTANTS if known == kernel}
    assert set(HARMLESS[kernel]) <= names
    assert all(len(reason) > 20 for reason in HARMLESS[kernel].values())


@pytest.mark.parametrize(
    ("kernel", "mutant"), MUTANTS, ids=[f"{k} {m.line} {m.name}" for k, m in MUTANTS]
)
def test_mutants(kernel, mutant, juries):
    """Reported exactly if it is not listed as harmless."""
    assert bool(juries[kernel].verdict(mutant)) != (mutant.name in HARMLESS[kernel])
