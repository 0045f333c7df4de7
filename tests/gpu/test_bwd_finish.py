"""The kernel after a backward makes rows of sums in every order that tensor memory has them, on any GPU: it is the same for all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flash4.common.fragments import GROUP_NUMBERS, dq_place
from flash4.ops import device_facts, kernel_for
from flash4.passes.bwd_config import FINISH, FinishConfig

CONFIGS = (
    FinishConfig(True, 128, 64, False, dq_lanes=1),
    FinishConfig(False, 128, 128, False, dq_lanes=1),
    FinishConfig(True, 128, 128, False, dq_lanes=2),
    *(FinishConfig(True, 64, d, False, dq_turned=True) for d in (128, 192, 256)),
)
SCALE = 0.5


def in_rows(config: FinishConfig, sums: np.ndarray) -> np.ndarray:
    """Blocks of sums (.., numbers) -> (.., queries, head dims)."""
    part, group, thread, number = np.meshgrid(
        np.arange(2), np.arange(sums.shape[-1] // 1024), np.arange(128), np.arange(GROUP_NUMBERS),
        indexing="ij",
    )  # fmt: skip
    query, column = (x.ravel() for x in dq_place(config, part, thread, group, number))
    found = np.full((*sums.shape[:-1], config.tile_m, config.tile_d), np.nan, np.float32)
    found[..., query, column] = sums
    return found


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rows_are_made_of_sums(config):
    generator = torch.Generator().manual_seed(0)
    sums = torch.randn(2, 3, 2, config.tile_m * config.tile_d, generator=generator)
    rows, columns = 2 * config.tile_m - 5, config.tile_d - 8
    dtype = torch.bfloat16 if config.bf16 else torch.float16
    dq = torch.full((2, rows, 3, columns), torch.nan, dtype=dtype, device="cuda")
    finish = kernel_for(FINISH, config, device_facts(torch.cuda.current_device())[0])
    finish((sums.cuda(), dq), SCALE)
    expected = in_rows(config, sums.numpy()).reshape(2, 3, -1, config.tile_d)
    expected = torch.from_numpy(expected)[:, :, :rows, :columns].transpose(1, 2)
    assert torch.equal(dq.cpu(), (expected * SCALE).to(dtype))
