"""What turns cost the deterministic Blackwell backward: all CTAs of a launch, tile after tile in the kernel's own order.

The clock of ``sm100_bwd_clock`` knows one CTA, whose ``reduce`` never waits for another's turn. Here its costs are those of a
step, and only what turns change is worked out: a tile adds to a block of queries when all that come first have; ``reduce``
has one dQ in registers meanwhile, and the products of its CTA stop behind the next one.

``python -m flash4.sim.sm100_bwd_turns`` prints.
"""

from dataclasses import dataclass

import torch

from flash4.common.geometry import ceil_div
from flash4.common.kv_tiles import KvGrid, KvTileSchedule
from flash4.dispatch import backward_section
from flash4.problem import AttentionProblem
from flash4.sim.chips import B200, TensorMemoryChip
from flash4.sim.sm100_bwd_clock import BULK_LATENCY, ROUND_TRIP, Costs, Shape, costs_of
from flash4.sm100.bwd_config import FLOAT_BYTES, BackwardConfig
from flash4.sm100.bwd_roles import BackwardRoles

TOKENS, HEADS = 32_768, 16
# (CTAs, causal, length): TFLOP/s of flash-attn-4's deterministic backward on a B200, head dim 128. One CTA: figure 8 of its
# paper, read from the chart; a pair: its pull request 2280.
DETERMINISTIC_SPEEDS = {
    (1, False, 8_192): 850,
    (1, True, 8_192): 920,
    (1, False, 32_768): 880,
    (1, True, 32_768): 950,
    (2, False, 8_192): 1_167,
    (2, True, 8_192): 1_097,
}


@dataclass(frozen=True)
class Handover:
    """Cycles of ``reduce``: from dQ to registers, and from a turn to the next tile's."""

    load: float
    addition: float

    @classmethod
    def of(cls, config: BackwardConfig, chip: TensorMemoryChip):
        """A look at the counter, parts on their way to L2 one after the other, and the end of the last one."""
        load = config.graph.tmem.dq_columns / chip.tmem_columns + chip.tmem_latency
        part = config.dq_floats * FLOAT_BYTES
        parts = config.dq_steps * part / chip.fill_bytes + part / chip.smem_bytes
        return cls(load, ROUND_TRIP + parts + chip.tmem_latency + BULK_LATENCY)


def schedule_of(config: BackwardConfig, seqlen: int, section: int, workers: int) -> KvTileSchedule:
    """Tiles of a benchmark's call, as its first CTA has them."""
    grid = KvGrid(ceil_div(seqlen, config.tile_n), HEADS, TOKENS // seqlen, 1)
    return KvTileSchedule(config.blocks(), grid, section, 0, workers, seqlen, seqlen)


def cycles(schedule: KvTileSchedule, costs: Costs, handover: Handover | None) -> float:
    """From the first step of the first tile to the end of the last; without ``handover`` nobody waits for turns."""
    # Of CTAs, where their products and where ``reduce`` are; (batch entry, head, block) -> the end of its last addition.
    ends, added, turns = [0.0] * schedule.step, [0.0] * schedule.step, {}
    for index in range(schedule.grid.total):  # a tile depends on lower ones alone
        tile, worker = schedule.at(index), index % schedule.step
        at, reduced = ends[worker] + costs.tile, added[worker]
        for i in range(tile.steps):
            at += costs.step
            if handover is not None:
                block, head = schedule.place(tile, i)
                place = tile.batch, head, block
                at = max(at, reduced)  # dQ leaves tensor memory, as the next one needs
                reduced = max(at + handover.load, turns.get(place, 0.0)) + handover.addition
                turns[place] = reduced
        ends[worker], added[worker] = at, reduced
    return max(*ends, *added)


def speed(
    config: BackwardConfig, seqlen: int, chip: TensorMemoryChip, roles: type = BackwardRoles
) -> float:
    """TFLOP/s of a benchmark's call in the model, tiles shared out as they are before the launch."""
    heads, workers = HEADS * TOKENS // seqlen, chip.sms // config.team
    sizes = (TOKENS // seqlen, seqlen, seqlen, HEADS, HEADS, config.tile_d, config.tile_dv)
    problem = AttentionProblem(torch.bfloat16, *sizes, config.causal, deterministic=config.ordered)
    section = backward_section(problem, config, chip.sms)
    schedule = schedule_of(config, seqlen, section, workers)
    costs = costs_of(Shape(config, roles), chip)
    handover = Handover.of(config, chip) if config.ordered else None
    microseconds = cycles(schedule, costs, handover) / chip.mma_mhz + chip.launch_us
    pairs = seqlen**2 / (2 if config.causal else 1) * heads
    flops = 2 * pairs * (3 * config.tile_d + 2 * config.tile_dv)
    return flops / microseconds / 1e6


def config_of(ctas: int, causal: bool, ordered: bool = False) -> BackwardConfig:
    """Config of a benchmark's call."""
    return BackwardConfig(True, 128, 128, causal, ctas=ctas, ordered=ordered)


def main():
    """Print."""
    print("CTAs mask    length  published  with turns  over it  without")
    for (ctas, causal, seqlen), published in DETERMINISTIC_SPEEDS.items():
        turns, plain = (speed(config_of(ctas, causal, x), seqlen, B200) for x in (True, False))
        mask = "causal" if causal else "full"
        print(
            f"{ctas:4} {mask:6} {seqlen:7} {published:10} {turns:11.0f} {turns / published:8.3f} {plain:8.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
