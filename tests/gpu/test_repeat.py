"""The same call gives the same bits, run after run, and whatever its neighbours in the batch hold."""

from __future__ import annotations

import pytest
import torch

from tests.strategies import Problem

DEVICE = "cuda"
REPEATS = 100
F16, BF16 = torch.float16, torch.bfloat16

PROBLEMS = {
    "d128 causal, many tiles": Problem(
        dtype=BF16, batch=2, heads_kv=8, head_dim=128, head_dim_v=128, seqlen_q=2048,
        seqlen_k=2048, causal=True,
    ),
    "d128 full, odd lengths": Problem(
        dtype=F16, batch=3, heads_kv=5, head_dim=128, head_dim_v=128, seqlen_q=777, seqlen_k=1031
    ),
    "d64 causal": Problem(
        dtype=BF16, batch=2, heads_kv=16, head_dim=64, head_dim_v=64, seqlen_q=1025,
        seqlen_k=1025, causal=True,
    ),
    "d64 full, long": Problem(
        dtype=F16, batch=1, heads_kv=4, head_dim=64, head_dim_v=64, seqlen_q=4500, seqlen_k=5000
    ),
    "d256 causal": Problem(
        dtype=BF16, batch=2, heads_kv=4, head_dim=256, head_dim_v=256, seqlen_q=1000,
        seqlen_k=1100, causal=True,
    ),
    "d192 and 128": Problem(
        dtype=BF16, batch=2, heads_kv=6, head_dim=192, head_dim_v=128, seqlen_q=900,
        seqlen_k=1500, causal=True,
    ),
    "packed decode": Problem(
        dtype=BF16, batch=16, heads_kv=8, ratio=5, head_dim=128, head_dim_v=128, seqlen_q=3,
        seqlen_k=2000, causal=True,
    ),
    "rows without keys, peaked": Problem(
        dtype=F16, batch=4, heads_kv=3, ratio=3, head_dim=96, head_dim_v=40, seqlen_q=1500,
        seqlen_k=400, causal=True, softmax_scale=0.7,
    ),
}  # fmt: skip
every_problem = pytest.mark.parametrize("name", PROBLEMS)
# Repeated only: entries and heads of these have neighbours that matter, as lengths, slopes and tables.
WITH_FEATURES = {
    "windows, cap and sink": Problem(
        dtype=BF16, batch=3, heads_kv=6, head_dim=128, head_dim_v=128, seqlen_q=1500, seqlen_k=1700,
        window_size=(400, 90), softcap=8.0, sink=1.0,
    ),
    "d64 causal window": Problem(
        dtype=BF16, batch=3, heads_kv=6, head_dim=64, head_dim_v=64, seqlen_q=1500, seqlen_k=1700,
        window_size=(300, 0), alibi="by head",
    ),
    "packed sequences": Problem(
        dtype=BF16, heads_kv=4, ratio=3, head_dim=128, head_dim_v=128, causal=True, around=(3, 200),
        lengths_q=(2000, 1, 0, 300, 129) * 3, lengths_k=(2500, 700, 5, 0, 128) * 3,
    ),
    "d64 packed sequences in use": Problem(
        dtype=F16, heads_kv=8, head_dim=64, head_dim_v=64, lengths_q=(900, 100, 1) * 3,
        lengths_k=(900, 1200, 300) * 3, used_q=(899, 0, 1) * 3, used_k=(0, 1199, 65) * 3,
    ),
    "d256 packed sequences": Problem(
        dtype=BF16, heads_kv=4, head_dim=256, head_dim_v=256, causal=True,
        lengths_q=(700, 3, 90) * 4, lengths_k=(700, 3, 90) * 4,
    ),
    "keys in use": Problem(
        dtype=BF16, heads_kv=4, ratio=8, head_dim=128, head_dim_v=128, seqlen_q=2, seqlen_k=3000,
        causal=True, used_k=(3000, 1, 0, 2999, 700, 64, 65, 1024),
    ),
    "mods": Problem(
        dtype=BF16, batch=2, heads_kv=4, head_dim=128, head_dim_v=128, seqlen_q=900, seqlen_k=900,
        score_mod="heads", mask_mod="documents", causal=True,
    ),
}  # fmt: skip


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of x, so that NaNs compare too."""
    return x.view(torch.int16 if x.itemsize == 2 else torch.int32)


def attend(problem: Problem, inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of out and lse."""
    out, lse = problem.function(*inputs, return_lse=True, **problem.keywords(DEVICE))
    return bits(out), bits(lse)


class Disturber:
    """Copies memory on another stream, to move the timing of what runs beside it."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.source = torch.empty(2**27, dtype=torch.int32, device=DEVICE)
        self.target = torch.empty_like(self.source)

    def start(self, share: int) -> None:
        """Queue a copy of one `share`-th of the buffer."""
        with torch.cuda.stream(self.stream):
            n = len(self.source) // share
            self.target[:n].copy_(self.source[:n])


@pytest.mark.parametrize("name", [*PROBLEMS, *WITH_FEATURES])
def test_repeats_are_bitwise_equal(name: str):
    problem = (PROBLEMS | WITH_FEATURES)[name]
    inputs = problem.tensors(DEVICE)
    expected = attend(problem, inputs)
    disturber = Disturber()
    different = torch.zeros(2, REPEATS, dtype=torch.bool, device=DEVICE)
    for i in range(REPEATS):
        if i % 2:
            disturber.start(share=1 + i % 7)
        for j, (got, first) in enumerate(zip(attend(problem, inputs), expected, strict=True)):
            different[j, i] = (got != first).any()
    out_runs, lse_runs = (row.nonzero().flatten().tolist() for row in different)
    assert not out_runs and not lse_runs, f"out differs in runs {out_runs}, lse in {lse_runs}"


@every_problem
@pytest.mark.parametrize("neighbours", ["other values", "NaN", "Inf", "none"])
def test_a_batch_entry_does_not_depend_on_its_neighbours(name: str, neighbours: str):
    problem = PROBLEMS[name]
    inputs = problem.tensors(DEVICE)
    for own in {0, problem.batch - 1}:
        expected = [x[own] for x in attend(problem, inputs)]
        changed = [x[own : own + 1] for x in inputs]
        position = 0
        if neighbours != "none":
            position = 1
            changed = [
                torch.cat([filled(x, neighbours), x, filled(x, neighbours)]) for x in changed
            ]
        for got, wanted in zip(attend(problem, changed), expected, strict=True):
            assert torch.equal(got[position], wanted)


def filled(x: torch.Tensor, what: str) -> torch.Tensor:
    """A tensor like x that holds something else."""
    if what == "other values":
        return torch.randn_like(x) * 5
    return torch.full_like(x, {"NaN": torch.nan, "Inf": torch.inf}[what])


@every_problem
def test_a_head_does_not_depend_on_the_other_kv_heads(name: str):
    problem = PROBLEMS[name]
    inputs = problem.tensors(DEVICE)
    expected_out, expected_lse = attend(problem, inputs)
    own = slice((problem.heads_kv - 1) * problem.ratio, None)
    changed = [x.clone() for x in inputs]
    changed[0][:, :, : own.start] = torch.nan
    for x in changed[1:]:
        x[:, :, : problem.heads_kv - 1] = torch.nan
    out, lse = attend(problem, changed)
    assert torch.equal(out[:, :, own], expected_out[:, :, own])
    assert torch.equal(lse[:, own], expected_lse[:, own])
