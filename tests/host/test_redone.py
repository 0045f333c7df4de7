"""The counter of tiles that are worked on twice: in the simulator, compiled, and through the public function."""

import itertools
import math
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import flash4
from flash4.interface import options_of
from flash4.jit.compile import compile_kernel
from flash4.jit.inspect import disassemble
from flash4.problem import LENGTHS, CallOptions
from flash4.sim import sm90_fwd
from flash4.sim.explore import explore
from flash4.sim.handout import HostToldTiles
from flash4.sim.machine import Hazard
from flash4.sim.sm90_fwd import forward_machines
from flash4.sm90.fwd_config import MARKS, ForwardConfig
from tests.checks import assert_forward_close
from tests.host.test_dispatch import stand_in_gpu
from tests.host.test_fwd90_roles import shipped

ATOMICS = re.compile(r"\b(?:ATOM|ATOMG|RED|REDG)\b")


def outgrow(q, k, rows, ramp=False):
    """Let rows (head, query, log2) of q see the first key so far above all others, at a scale of 0.1.

    With a ramp a key in the middle is somewhat more than half as far above, and the first four all the way.
    """
    k[:, 0, :, 0] = 16.0
    if ramp:
        k[:, k.shape[1] // 2, :, 0], k[:, :4, :, 0] = 9.3125, 16.0
    for head, query, log2 in rows:
        q[:, query, head, 0] = log2 * math.log(2) / 0.1 / 16
    return q, k


def simulated(config, rows, seqlen_q, seqlen_k, workers=2, heads=2, ramp=False):
    """A simulated call in which these rows outgrow the shift."""
    generator = np.random.default_rng(0)
    q, k, v = (
        generator.standard_normal((1, n, heads, config.tile_d)).astype(np.float32) * 0.5
        for n in (seqlen_q, seqlen_k, seqlen_k)
    )
    q, k = outgrow(q, k, rows, ramp)
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


def test_a_foreseen_tile_is_trusted_however_large_its_sums():
    """Sums of P that grew by nearly 2^64 since the shift moved last exceed what a fixed shift is trusted with."""
    config = shipped(64, 64, False)
    rows = [(0, i * config.tile_q + 70, 148) for i in range(4)]
    call = simulated(config, rows, 4 * config.tile_q, 700, workers=1, heads=1, ramp=True)
    assert (int(call.redone[0]), call.tiles.grid.total) == (1, 4)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_a_tile_all_of_whose_rows_outgrow_their_shift_is_worked_on_twice_not_thrice(
    head_dim, causal
):
    """Sums overflow, in all warps: what one notes must not make another take its shift for one that may move."""
    config = shipped(head_dim, head_dim, causal)
    seqlen = 2 * config.tile_q
    q, k, v = (np.random.default_rng(i).standard_normal((1, seqlen, 2, head_dim)) for i in range(3))
    q[..., 0], k[..., 0] = 16, np.linspace(1.5 * seqlen, 0, seqlen)[:, None]
    arrays = (torch.from_numpy(x).bfloat16().float().numpy() for x in (q, k, v))
    options = CallOptions(head_dim**-0.5, causal)
    redone = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for machine, call in forward_machines(config.counted, [*arrays], options, 4, 0):
            machine.run()
            redone = int(call.redone[0])
    assert redone == call.tiles.grid.total == 4 and np.isfinite(call.out).all()


def test_marks_that_are_shared_work_on_more_than_those_that_outgrew():
    """A mark stands for all tiles of a worker whose waves are equal modulo their number."""
    config = replace(shipped(64, 64, False), tile_m=64, turns=False)
    heads = MARKS + 3
    redone, tiles = counted(config, [(1, 3)], 64, 129, workers=1, heads=heads)
    assert (redone, tiles) == (2, heads)


SEQUENCES = (600, 0, 250, 40)


def outgrowing_sequences(rows):
    """(q, k, v, keywords) of a call of ``SEQUENCES`` in which rows (head, row of packed q) outgrow their shift."""
    cu = torch.tensor([0, *itertools.accumulate(SEQUENCES)], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(SEQUENCES), 2, 64, generator=generator) / 2 for _ in range(3))
    q[..., 0], k[..., 0], k[[0, 600, 850], :, 0] = 0.0, 0.0, 16.0  # the first keys
    for head, row in rows:
        q[row, head, 0] = 400 * math.log(2) / 0.1 / 16
    keywords = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, softmax_scale=0.1, causal=True)
    return (*(x.bfloat16() for x in (q, k, v)), keywords)


@pytest.mark.parametrize(("workers", "seed"), [(1, 0), (2, 1), (5, 2)])
@pytest.mark.parametrize(
    ("rows", "redone"),
    [
        ([], 0),
        ([(0, 599)], 1),
        ([(0, 599), (0, 512), (1, 599), (1, 400)], 3),
        (
            [(h, i) for h in range(2) for i in range(890)],
            8,
        ),  # all but those with masked blocks alone
    ],
)
def test_sequences_work_on_marked_tiles_again(rows, redone, workers, seed):
    q, k, v, keywords = outgrowing_sequences(rows)
    config = flash4.explain(q, k, v, **keywords).config.counted
    options = options_of(q, k, v, **keywords)
    arrays = [x.float().numpy() for x in (q, k, v)]
    with np.errstate(over="ignore", invalid="ignore"):
        for machine, call in forward_machines(config, arrays, options, workers, seed):
            machine.run()
            last = call
    assert int(last.redone[0]) == redone
    out, lse = torch.from_numpy(last.out[0]).bfloat16(), torch.from_numpy(last.lse[0])
    assert_forward_close(out, lse, (q, k, v), **keywords)


def test_every_order_of_tiles_that_are_worked_on_again():
    """Two warpgroups, a ring of tiles that wraps, and a tile that is marked by one of them."""
    config = ForwardConfig(True, 64, 64, 128, 16, False, fixed_shift=True, cu_q=True, cu_k=True)
    q, k, v = (np.zeros((n, 1, 64), np.float32) for n in (70, 24, 24))
    v[:], k[0, 0, 0], q[60, 0, 0] = 1.0, 16.0, 400 * math.log(2) / 0.1 / 16
    lengths = (np.array([0, 0, n], np.int32) for n in (70, 24))
    options = CallOptions(0.1)._replace(**dict(zip(LENGTHS, lengths)))
    for machine, call in forward_machines(replace(config, counts=True), (q, k, v), options, 1, 0):
        with np.errstate(over="ignore", invalid="ignore"):
            machine.run()
        assert call.redone[0] == 1
        found = explore(machine)
        assert found.steps > found.states > len(machine.tasks)


class Hasty(HostToldTiles):
    """Gives tiles back before it is done with them."""

    def first(self):
        tile = super().first()
        self.slots.release(tile.number)
        return tile

    def next(self, tile):
        tile = self._next(tile.number + 1)
        self.slots.release(tile.number)
        return tile


class Forgetful(HostToldTiles):
    """Never gives tiles back."""

    def next(self, tile):
        return self._next(tile.number + 1)


@pytest.mark.parametrize(("kind", "story"), [(Hasty, "race on tiles"), (Forgetful, "waits for")])
def test_tiles_that_are_given_back_wrongly_are_reported(kind, story):
    rows = [(1, 599)]
    q, k, v, keywords = outgrowing_sequences(rows)
    config = flash4.explain(q, k, v, **keywords).config
    arrays, options = [x.float().numpy() for x in (q, k, v)], options_of(q, k, v, **keywords)
    with mock.patch.object(sm90_fwd, "HostToldTiles", kind), pytest.raises(Hazard, match=story):
        sm90_fwd.simulate_forward(config, *arrays, options, workers=1)


def test_only_a_kernel_that_is_asked_to_count_has_the_instruction_for_it():
    """A kernel that hands tiles out has another."""
    config, handed_out = (shipped(64, 64, causal) for causal in (False, True))
    assert (config.handed_out, handed_out.handed_out) == (False, True)
    kinds = ((config, 0), (config.counted, 1), (handed_out, 1), (handed_out.counted, 2))
    for asked, atomics in kinds:
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
