"""The ladder of docs/kernels/sm80-fwd.md: from the plain tiled loop to the Ampere forward that ships, one idea a rung.

    python -m bench.ladder80              # TFLOP/s of each rung on this GPU, next to torch's FlashAttention-2
    python -m tests.host.test_ladder80    # the schedule of each rung on a CPU: numbers and hazards

Rungs change the schedule, some verbs, or the tile, and nothing else.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, replace

import cutlass.cute as cute
import torch

from flash4.common.geometry import Phase
from flash4.jit.cache import CACHE
from flash4.sm80.copies import ldmatrix
from flash4.sm80.fwd import ForwardSm80
from flash4.sm80.fwd_config import KEY_STEP, ForwardConfig
from flash4.sm80.fwd_ops import ForwardOps, move_shifts, scale_rows
from flash4.sm80.products import element, multiply, rows_of
from flash4.sm80.scores import prepare

HEADS, HEAD_DIM, TOKENS = 16, 128, 16_384


class PlainRoles:
    """Copy a block, wait for it, work on it: no copy runs beside a product."""

    @cute.jit
    def attend(self, ops, tiles):
        """As ``ForwardRoles.attend``, with the next block's copies at the end of a block."""
        tile = tiles.first()
        if tile.valid:
            ops.begin(tile)
            ops.copy_q(tile)
            ops.copy_first(tile, 0)
            ops.commit()
            for phase in ops.phases(tile):
                for i in range(phase.begin, phase.end):
                    ops.wait_copies()
                    ops.sync()
                    s = ops.qk(i)
                    ops.move_shift(tile, i, s, phase)
                    ops.softmax_pv(i, s, phase)
                    ops.sync()
                    ops.copy_next(tile, i)
                    ops.commit()
            ops.store(tile)


class LumpOps(ForwardOps):
    """All of P before the first product with V."""

    def softmax_pv(self, i, s, phase):
        """As in the kernel, one after the other."""
        c, rows, S = self.config, self.config.rows_v, rows_of(s)
        shifts = [self.state.shift_log2[r] for r in range(2 * c.atoms)]
        if phase.masked or c.may_hide_any:
            shifts = [
                cute.arch.fmax(x, -1e30) for x in shifts
            ]  # exp2(-inf + 1e30) is 0, and no NaN
        sums = [None] * (2 * c.atoms)
        steps = range(c.tile_n // KEY_STEP)
        tOrP = [
            [self._probabilities(S, m, step, shifts, sums) for m in range(c.atoms)]
            for step in steps
        ]
        v_at = self.sV + self.v_row + i % c.stages * rows.nbytes
        for step in steps:
            for group in range(c.tile_dv // 16):
                at = rows.pair_at(v_at, group) + step * KEY_STEP * rows.row_bytes
                multiply(c, self.tOrO, tOrP[step], ldmatrix(element(c), at, True), 2 * group)
        for r in range(2 * c.atoms):
            self.state.total[r] = self.state.total[r] + sums[r]


class EagerOps(LumpOps):
    """Every block looks for its rows' maxima, and scales O."""

    def move_shift(self, tile, i, s, phase):
        """As in the kernel, without asking whether a row has outgrown its shift."""
        S = rows_of(s)
        prepare(self, tile, i, S, phase.masked)
        scale_rows(rows_of(self.tOrO), move_shifts(S, self.state, self.scores.scale_log2))


class MaskedOps(EagerOps):
    """Every block is masked."""

    def phases(self, tile):
        """All blocks, with a mask."""
        return (Phase(0, tile.n_blocks, True),)


class Plain(ForwardSm80):
    """Rungs 1 and 2 differ in the schedule."""

    schedule, verbs = PlainRoles, MaskedOps


class Ahead(ForwardSm80):
    """Copies run ahead."""

    verbs = MaskedOps


class Phased(ForwardSm80):
    """Masks where a block needs one."""

    verbs = EagerOps


class Lazy(ForwardSm80):
    """The shift moves when a row outgrows it."""

    verbs = LumpOps


@dataclass(frozen=True)
class Rung:
    """One rung: kernel class, and rows of 16 to each warp."""

    name: str
    kernel: type
    atoms: int

    def config(self, causal: bool, **change) -> ForwardConfig:
        """Of the rung, at head dim 128."""
        ctas = 2 if self.atoms == 2 else 3
        config = ForwardConfig(
            True, HEAD_DIM, HEAD_DIM, 4, self.atoms, 64, causal, ctas_per_sm=ctas
        )
        return replace(config, **change)


RUNGS = (
    Rung("1 plain tiled loop", Plain, 1),
    Rung("2 copies a block ahead", Ahead, 1),
    Rung("3 two atoms to a warp", Ahead, 2),
    Rung("4 masks where they cut", Phased, 2),
    Rung("5 a lazy shift", Lazy, 2),
    Rung("6 exponentials beside products: what ships", ForwardSm80, 2),
)


def measure(calls: dict, seconds: float = 0.5) -> dict[str, float]:
    """Median milliseconds of calls, interleaved."""
    times: dict[str, list] = {name: [] for name in calls}
    for _ in range(max(5, int(seconds * 60))):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            times[name].append((begin, end))
    torch.cuda.synchronize()
    return {n: statistics.median(a.elapsed_time(b) for a, b in t) for n, t in times.items()}


def time_rungs(seqlen: int, causal: bool, arch: str) -> dict[str, float]:
    """TFLOP/s of all rungs, and of torch's FlashAttention-2."""
    shape = (TOKENS // seqlen, seqlen, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = torch.empty_like(q)
    lse = torch.empty(shape[0], HEADS, seqlen, device="cuda")
    calls = {}
    for rung in RUNGS:
        path = f"{rung.kernel.__module__}:{rung.kernel.__name__}"
        kernel = CACHE.get(path, rung.config(causal), arch)
        calls[rung.name] = lambda kernel=kernel: kernel(
            (q, k, v, out, lse), (HEAD_DIM**-0.5,), shape[0] * HEADS, 1
        )
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        calls["FlashAttention-2"] = lambda: torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=causal
        )
        found = measure(calls)
    flops = 4 * seqlen * TOKENS * HEADS * HEAD_DIM / (2 if causal else 1)
    return {name: flops / ms / 1e9 for name, ms in found.items()}


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", default="sm_90", help="target; default: sm_90, for Hopper")
    parser.add_argument("--seqlen", type=int, default=4096)
    options = parser.parse_args()
    for causal in (False, True):
        print("causal" if causal else "full")
        for name, tflops in time_rungs(options.seqlen, causal, options.arch).items():
            print(f"  {name:44} {tflops:5.0f}")


if __name__ == "__main__":
    main()
