"""`python -m bench.micro --out FILE`: run all microbenchmarks on the current GPU, print and record them.

Everything is in SM cycles, so that clocks and power do not matter.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import product

from bench import provenance
from bench.micro.handoffs import (
    BOX_BYTES,
    BOX_COLUMNS,
    BOX_ROWS,
    CopyConfig,
    EmptyConfig,
    HandoffConfig,
)
from bench.micro.streams import KINDS, PER_TURN, StreamConfig
from flash4.jit.compile import compile_kernel

MMA_TURNS = 300
OP_TURNS = 300
LOAD_FACTOR = 4  # how much longer the stream runs that only keeps the SM busy
FOOTPRINT_BYTES = 32 << 20


def compiled(kernel: str, config):
    """Launch function of a microbenchmark."""
    return compile_kernel(f"bench.micro.{kernel}", config, "sm_90a")


def clocks_of(shape):
    """Zeroed clock tensor on the GPU."""
    import torch

    return torch.zeros(shape, dtype=torch.int64, device="cuda")


class StreamBench:
    """Runs stream kernels on every SM."""

    def __init__(self, sms: int):
        import torch

        self._sms = sms
        self._data = torch.randn(1 << 17, device="cuda").to(torch.bfloat16).view(torch.float32)

    def _cycles(self, config, launch, mma_turns, op_turns):
        """Median over CTAs of the longest MMA warp and of the longest other warp."""
        clocks = clocks_of((self._sms, 16, 4))
        for _ in range(2):
            launch(self._data, clocks, mma_turns, op_turns)
        taken = (clocks[..., 1] - clocks[..., 0]).cpu()
        warps = 4 * config.mma_warpgroups
        used = warps + 4 * config.op_warpgroups
        mma = taken[:, :warps].amax(1).median().item() if warps else 0
        ops = taken[:, warps:used].amax(1).median().item() if used > warps else 0
        shorter = slice(0, warps) if warps and (not ops or mma < ops) else slice(warps, used)
        ns = (clocks[..., 3] - clocks[..., 2]).cpu()[:, shorter].double()
        return mma, ops, (taken[:, shorter] / ns).median().item() * 1e3

    def run(self, config: StreamConfig) -> dict:
        """Cycles per group of MMAs and groups of instructions per cycle and SM, each beside the other."""
        launch = compiled("streams:Streams", config)
        row = dict(vars(config), kind=list(KINDS)[config.kind] if config.op_warpgroups else None)
        group = config.mma_warpgroups * config.steps * config.n / 2
        mma_cycles = MMA_TURNS * config.groups * group
        op_cycles = OP_TURNS * PER_TURN * 4 * config.op_warpgroups  # a guess: one group per cycle
        op_load = max(OP_TURNS, int(LOAD_FACTOR * mma_cycles / (PER_TURN * 4)))
        mma_load = max(MMA_TURNS, int(LOAD_FACTOR * MMA_TURNS * op_cycles * 4 / max(mma_cycles, 1)))
        if config.mma_warpgroups:
            mma, ops, mhz = self._cycles(config, launch, MMA_TURNS, op_load)
            row["mma_rate"] = round(mma_cycles / mma, 4)
            row["cycles_per_turn"] = round(mma / MMA_TURNS, 1)
            row["mhz"] = round(mhz)
            row["mma_was_never_alone"] = ops == 0 or ops >= mma
        if config.op_warpgroups:
            mma, ops, mhz = self._cycles(config, launch, mma_load, OP_TURNS)
            row.setdefault("mhz", round(mhz))
            groups = OP_TURNS * PER_TURN * WARP_LANES * 4 * config.op_warpgroups
            row["ops_per_cycle"] = round(groups / ops, 2)
            row["ops_were_never_alone"] = mma == 0 or mma >= ops
        return row


WARP_LANES = 32


def stream_configs():
    """Every pair of streams that is measured."""
    kinds, softmax = range(len(KINDS)), list(KINDS).index("softmax")
    yield from (StreamConfig(0, ops, kind) for kind, ops in product(kinds, (1, 2, 4)))
    yield from (StreamConfig(mmas, 2, kind, groups=4) for kind, mmas in product(kinds, (1, 2)))
    # The groups of the forward's tiles: S = Q K^T from shared memory, O += P V with P in registers.
    for n, steps, registers in (
        (128, 8, False),
        (64, 4, False),
        (64, 16, False),
        (128, 8, True),
        (64, 4, True),
        (256, 4, True),
    ):
        for mmas, others in ((1, 0), (2, 0), (1, 1), (2, 1), (2, 2)):
            if n <= 128 or mmas + others <= 3:  # the register file
                yield StreamConfig(mmas, others, softmax, n, steps, 4, registers)
    # One group at a time: what waiting for it adds.
    for n, steps, registers in product((64, 128), (4, 8), (False, True)):
        yield StreamConfig(1, 0, 0, n, steps, 1, registers)


def run_handoffs() -> list[dict]:
    """Cycles of one hand-over, half of a round trip; alone, of an arrival and a wait that ends at once."""
    rows, turns = [], 2000
    for mbarrier, alone in product((True, False), (False, True)):
        launch = compiled("handoffs:Handoffs", HandoffConfig(mbarrier, alone))
        clocks = clocks_of((8, 2))
        for _ in range(2):
            launch(clocks, turns)
        taken = (clocks[:, 1] - clocks[:, 0]).median().item()
        cycles = taken / turns / (1 if alone else 2)
        rows.append({"mbarrier": mbarrier, "alone": alone, "cycles": round(cycles, 1)})
    return rows


def run_copies(sms: int) -> list[dict]:
    """Latency of one TMA copy of 16 KB from L2, and bytes per cycle and SM with eight in flight."""
    import torch

    rows = []
    x = torch.zeros(FOOTPRINT_BYTES // 2 // BOX_COLUMNS, BOX_COLUMNS, dtype=torch.bfloat16).cuda()
    for flying, ctas in product((1, 2, 8), (1, sms)):
        launch = compiled("handoffs:Copies", CopyConfig(flying))
        turns = max(64, FOOTPRINT_BYTES // BOX_BYTES // ctas // flying)
        clocks = clocks_of((ctas, 2))
        for count in (turns, turns, 1):  # the first brings the data into L2
            first, clocks = clocks, clocks_of((ctas, 2))
            launch(x, clocks, count)
        taken, once = ((c[:, 1] - c[:, 0]).double().median().item() for c in (first, clocks))
        per_round = taken / turns
        rows.append(
            {
                "flying": flying,
                "ctas": ctas,
                "cycles_of_first_round": round(once, 1),
                "cycles_per_round": round(per_round, 1),
                "bytes_per_cycle": round(flying * BOX_BYTES / per_round, 2),
            }
        )
    assert x.shape[0] % BOX_ROWS == 0
    return rows


def run_launch(sms: int) -> dict:
    """Microseconds from event to event around an empty kernel, back to back; and the clock."""
    import torch

    launch = compiled("handoffs:Empty", EmptyConfig(384))
    clocks = clocks_of((sms, 4))
    launch(clocks, 200_000)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(41)]
    torch.cuda._sleep(4_000_000)
    for event in events:
        event.record()
        launch(clocks, 0)
    torch.cuda.synchronize()
    spans = [a.elapsed_time(b) * 1e3 for a, b in zip(events[:-1], events[1:])]
    cycles, ns = (clocks[0, 1] - clocks[0, 0]).item(), (clocks[0, 3] - clocks[0, 2]).item()
    return {"empty_us": round(statistics.median(spans), 2), "mhz": round(cycles / ns * 1e3, 1)}


def main() -> None:
    """Run and report."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--out", required=True, help="JSON record")
    out = options.parse_args().out
    gpu = provenance.gpu()
    record = {
        "started": provenance.now(),
        "commit": provenance.commit(),
        "versions": provenance.versions(),
        "gpu": gpu,
        "launch": run_launch(gpu["sms"]),
        "handoffs": run_handoffs(),
        "copies": run_copies(gpu["sms"]),
        "streams": [],
    }
    for name in ("launch", "handoffs", "copies"):
        print(name, record[name], flush=True)
    bench = StreamBench(gpu["sms"])
    for config in stream_configs():
        row = bench.run(config)
        record["streams"].append(row)
        print(" ".join(f"{k}={v}" for k, v in row.items() if v is not None), flush=True)
    with open(out, "w") as file:
        json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
