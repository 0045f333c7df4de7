"""The counter of tiles that are worked on twice: in the simulator, compiled, and through the public function."""

import math
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import flash4
from flash4.jit.compile import compile_kernel
from flash4.jit.inspect import disassemble
from flash4.problem import CallOptions
from flash4.sim.sm90_fwd import forward_machines
from flash4.sm90.fwd_config import MARKS
from tests.host.test_dispatch import stand_in_gpu
from tests.host.test_fwd90_roles import shipped

ATOMICS = re.compile(r"\b(?:ATOM|ATOMG|RED|REDG)\b")


def outgrow(q, k, rows):
    """Let rows (head, query, log2) of q see the first key so far above all others, at a scale of 0.1."""
    k[:, 0, :, 0] = 16.0
    for head, query, log2 in rows:
        q[:, query, head, 0] = log2 * math.log(2) / 0.1 / 16
    return q, k


def simulated(config, rows, seqlen_q, seqlen_k, workers=2, heads=2):
    """A simulated call in which these rows outgrow the shift."""
    generator = np.random.default_rng(0)
    q, k, v = (
        generator.standard_normal((1, n, heads, config.tile_d)).astype(np.float32) * 0.5
        for n in (seqlen_q, seqlen_k, seqlen_k)
    )
    q, k = outgrow(q, k, rows)
    q, k, v = (torch.from_numpy(x).bfloat16().float().numpy() for x in (q, k, v))
    options = CallOptions(0.1, config.causal)
    with np.errstate(over="ignore", invalid="ignore"):
        for machine, call in forward_machines(config.counted, (q, k, v), options, workers, 0):
            machine.run()
            last = call
    assert np.isfinite(last.out).all()
    return last


def counted(config, rows, *sizes, **more):
    """(tiles worked on again, tiles) of a call in which these rows (head, query) outgrow the shift."""
    call = simulated(config, [(*row, 400) for row in rows], *sizes, **more)
    return int(call.redone[0]), call.tiles.grid.total


@pytest.mark.parametrize("causal", [False, True])
def test_the_first_tile_of_a_worker_that_outgrows_its_shift_is_counted_once(causal):
    """Those after it are foreseen, by the same warpgroup."""
    config = shipped(64, 64, causal)
    tile, seqlen = config.tile_q, 3 * config.tile_q
    assert counted(config, [], seqlen, seqlen) == (0, 6)
    one_tile = [(1, tile + 5), (1, tile + 200)]  # rows of two warpgroups
    assert counted(config, one_tile, seqlen, seqlen) == (1, 6)
    rows = [(head, i * tile + 70) for head in range(2) for i in range(3)]
    assert counted(config, rows, seqlen, seqlen) == (2, 6)


@pytest.mark.parametrize("grown", [0, 20, 63])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128)])
def test_a_row_has_the_same_bits_whatever_its_worker_did_before(head_dims, grown):
    """With the shift fixed, foreseen not to be, or as one of those that share a mark."""
    config = replace(shipped(*head_dims, False), tile_m=128, turns=False)
    mine = [(1, 70, grown)] * (grown > 0)
    plain = simulated(config, mine, 256, 300, workers=1)
    for row in (3, 200):
        other = simulated(config, [(0, row, 400), *mine], 256, 300, workers=1)
        assert other.redone[0] == 1 and plain.redone[0] == 0
        assert (other.out[:, :, 1] == plain.out[:, :, 1]).all()
        assert (other.lse[:, 1] == plain.lse[:, 1]).all()


def test_marks_that_are_shared_work_on_more_than_those_that_outgrew():
    """A mark stands for all tiles of a worker whose waves are equal modulo their number."""
    config = replace(shipped(64, 64, False), tile_m=64, turns=False)
    heads = MARKS + 3
    redone, tiles = counted(config, [(1, 3)], 64, 129, workers=1, heads=heads)
    assert (redone, tiles) == (2, heads)


def test_only_a_kernel_that_is_asked_to_count_has_the_instruction_for_it():
    config = shipped(64, 64, True)
    for asked, atomics in ((config, 0), (config.counted, 1)):
        with tempfile.TemporaryDirectory() as folder:
            compile_kernel("flash4.sm90.fwd:ForwardSm90", asked, "sm_90a", folder)
            (cubin,) = Path(folder).glob("*.cubin")
            assert len(ATOMICS.findall(disassemble(cubin))) == atomics


def test_nothing_is_counted_where_no_shift_is_fixed():
    config = shipped(256, 256, False)
    assert not config.fixed_shift and config.counted is None
    with pytest.raises(ValueError, match="counts needs fixed_shift"):
        replace(config, counts=True)


def test_the_public_function_reads_the_kernels_counter():
    x = torch.zeros(2, 300, 3, 64, dtype=torch.bfloat16)

    def kernel(launch):
        *_, redone = launch.tensors
        assert launch.config.counts and redone.dtype == torch.int32 and redone.tolist() == [0]
        redone += 5

    with stand_in_gpu(kernel) as launches:
        found = flash4.redone_tiles(x, x, x, causal=True)
        assert found == (5, 12) and (found.redone, found.tiles) == (5, 12)
        assert flash4.redone_tiles(x.half(), x.half(), x.half()) == (0, 12)
        assert flash4.redone_tiles(x[:0], x[:0], x[:0]) == (0, 0)
    assert len(launches) == 1
    assert launches[0].config == flash4.explain(x, x, x, causal=True).config.counted
    with stand_in_gpu(lambda launch: None) as launches:
        flash4.flash_attn_func(x, x, x)
    assert not launches[0].config.counts and len(launches[0].tensors) == 5


def test_a_call_without_a_gpu_is_refused():
    x = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="CUDA device"):
        flash4.redone_tiles(x, x, x)
    with pytest.raises(TypeError):
        flash4.redone_tiles(x, x, x, nonsense=1)
