"""Candidates of the tuner: what dispatch chooses first, each once, and nothing that cannot run."""

import argparse

import pytest

from bench import tune
from bench.shapes import TRAINING, select
from flash4.sm90.fwd_config import choose_config


def asked(**options):
    """Command-line arguments with defaults."""
    return argparse.Namespace(**{"sections": None, "only": "", "without": None, **options})


@pytest.mark.parametrize("cell", TRAINING, ids=lambda cell: cell.name)
def test_candidates_of_a_cell(cell):
    found = tune.candidates(cell)
    assert found[0] == choose_config(cell.problem())[0]
    assert len(found) == len(set(found)) > 3 and all(config.fits for config in found)
    labels = [tune.label(tune.Candidate(config)) for config in found]
    assert len(labels) == len(set(labels)), "the table could not tell them apart"
    for config in found:
        warpgroups = config.mma_warpgroups
        assert warpgroups > 1 and config.graph.registers <= config.graph.launch_registers


def test_what_the_command_line_asks_for():
    (cell,) = select("d256-full-s4096-b4-h8")
    chosen, *others = tune.compared(cell, asked(only="cluster2"))
    assert chosen.config.cluster == 2 and all(c.config.cluster == 2 for c in others)
    chosen, *others = tune.compared(cell, asked(without="cluster2"))
    assert others and all(c.config.cluster == 1 for c in others)
    found = tune.compared(cell, asked(sections="2,5"))
    assert [c.section for c in found] == [None, 2, 5] and len({c.config for c in found}) == 1


def test_the_list_needs_no_gpu(capsys):
    assert tune.main(["--list", "--cells", "d64-causal-s4096-b4-h32"]) == 0
    assert "256x64-s4" in capsys.readouterr().out
