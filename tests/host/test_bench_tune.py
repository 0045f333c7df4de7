"""Candidates of the tuner: what dispatch chooses first, each once, and nothing that cannot run."""

import argparse
import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch

import flash4
from bench import tune, tune_backward
from bench.shapes import TRAINING, select
from flash4 import dispatch, ops
from flash4.interface import options_of
from flash4.passes.bwd_config import FINISH, PREPARE
from flash4.problem import AttentionProblem
from flash4.sm90.fwd_config import choose_config
from tests.host.backward_kernels import finish, multiply, prepare
from tests.host.test_backward_ops import NARROW, Inputs, stand_in


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


def test_a_backward_taken_apart_is_the_whole():
    """As ``bench.tune_backward`` times its kernels."""
    x, calls = Inputs.draw(dims=(64, 64)), []
    kinds = {PREPARE: prepare, NARROW: multiply, FINISH: finish}
    with stand_in():
        options = options_of(*x.three, causal=True)
        out, lse = flash4.flash_attn_func(*x.three, causal=True, return_lse=True)
        problem = AttentionProblem.of_call(*x.three, options)
        plan = dispatch.plan_backward(problem, "sm_90a", 132)
        found = ops.launch_of(plan, ops.slots_of_call(x.q, x.k, plan.config, options), 132)
        noted = replace(
            found, function=lambda *given: calls.append(given) or found.function(*given)
        )
        inputs = [t.detach() for t in x.three]
        ops.launch_backward(noted, x.dout, None, inputs, out.detach(), lse.detach(), options)
    (given,) = calls
    expected = [t.clone() for t in given[0][6:9]]
    for t in given[0][6:10]:
        t.fill_(torch.nan)
    with mock.patch.object(
        ops, "kernel_for", lambda name, config, _: functools.partial(kinds[name], config)
    ):
        parts = tune_backward.parts_of(plan, given)
    assert list(parts) == ["prepare", "main", "finish"]
    for part in parts.values():
        part()
    assert all(torch.equal(a, b) for a, b in zip(given[0][6:9], expected, strict=True))
