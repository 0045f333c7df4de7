"""What a clocked run says: time and rate, who was busy, what roles waited for, and the critical path."""

import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

from flash4.sim.chips import Chip
from flash4.sim.clock import ClockedMachine, Span

NEAR = 1e-6
FULL_LOAD = 0.3  # share of the chip's tensor cycles from which on power decides the clock


@dataclass(frozen=True)
class Timing:
    """A clocked run of the worker with the most to do.

    Attributes:
        machine: with spans, stalls and busy units.
        chip: whose rates it took.
        workers: CTAs, each on an SM of its own.
        flops: of the whole call, as benchmarks count.
    """

    machine: ClockedMachine
    chip: Chip
    workers: int
    flops: float

    @property
    def cycles(self) -> float:
        """SM cycles of the kernel."""
        return self.machine.now

    def busy(self, unit: str) -> float:
        """Share of the time in which a unit of the worker's SM was busy."""
        return self.machine.busy[unit] / self.cycles

    @property
    def mhz(self) -> float:
        """SM clock: the highest, or what is left of it when most tensor cores are busy."""
        loaded = self.busy("tensor") * self.workers / self.chip.sms > FULL_LOAD
        return self.chip.mma_mhz if loaded else self.chip.mhz

    @property
    def microseconds(self) -> float:
        """From event to event around the launch."""
        return self.cycles / self.mhz + self.chip.launch_us

    @property
    def tflops(self) -> float:
        """Rate, as benchmarks count."""
        return self.flops / self.microseconds / 1e6

    def __str__(self):
        chip, machine = self.chip, self.machine
        units = ", ".join(f"{unit} {self.busy(unit):.0%}" for unit in machine.busy)
        lines = [
            f"time on an {chip.name} (model): {self.cycles:.0f} cycles, {self.microseconds:.1f} us at "
            f"{self.mhz:.0f} MHz, {self.tflops:.0f} TFLOP/s",
            f"  busy: {units}",
        ]
        tasks = dict.fromkeys(task for task, _ in machine.stalls)
        for task in tasks:
            waits = sorted(
                ((c, r) for (t, r), c in machine.stalls.items() if t == task), reverse=True
            )
            shown = ", ".join(
                f"{re.sub('^the tensor core.*', 'tensor cores', what)} {c / self.cycles:.0%}"
                for c, what in waits[:4]
            )
            lines.append(f"  {task} waits for: {shown}")
        path = critical_path(machine.spans)
        whole = sum(path.values())
        if whole:
            best = sorted(path.items(), key=lambda item: -item[1])[:8]
            shown = ", ".join(f"{label} {c / whole:.0%}" for label, c in best)
            lines.append(f"  critical path: {shown}")
        return "\n".join(lines)


def critical_path(spans: list[Span]) -> dict[str, float]:
    """Cycles by label along the chain of events that ends last, walked backwards from its end.

    Args:
        spans: of a whole run.
    """
    rows = defaultdict(list)
    for span in spans:  # by the order of their ends
        rows[span.row].append(span)
    ends = {row: [span.end for span in of_row] for row, of_row in rows.items()}
    if not spans:
        return {}
    path, row, at = defaultdict(float), spans[-1].row, spans[-1].end
    while row in rows:
        index = bisect_right(ends[row], at + NEAR) - 1
        if index < 0:
            break
        span = rows[row][index]
        path["until others know"] += at - span.end
        row, at = _before(span, rows, ends, path)
    return dict(path)


def _before(span: Span, rows, ends, path) -> tuple[str, float]:
    """(row, time) of what a span had to wait for; its own cycles go to ``path``."""
    if span.waits and span.cause and span.cause[1] > span.begin + NEAR:
        path["until others know"] += span.end - span.cause[1]
        return span.cause
    path["waits that need not wait" if span.waits else span.label] += span.end - span.begin
    if span.waits or span.cause is None:
        return span.row, span.begin
    if span.begin > span.cause[1] + NEAR:  # it queued for its unit
        for row, of_row in ends.items():
            index = bisect_right(of_row, span.begin + NEAR) - 1
            if row != span.row and index >= 0 and of_row[index] > span.begin - NEAR:
                if rows[row][index].cause is not None and not rows[row][index].waits:
                    return row, span.begin
    return span.cause
