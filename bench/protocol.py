"""The measuring protocol: interleaved bursts of launches, timed by device events.

A burst is: a spinning kernel that keeps the device busy, then launches with an event between
each. The host enqueues the whole burst while the spin lasts, so what is timed is the device's
work alone, also for a contender whose Python call takes longer than its kernel. Whether that
held is checked per burst (the event right behind the spin must still be pending once the last
launch is enqueued); if not, the spin is lengthened and the burst repeated.

All contenders of a cell take turns burst by burst, so that clocks, temperature and neighbours
treat them alike. Nothing here imports torch at module level or touches a GPU but through
`CudaDevice`, so a test can put a clock of its own in its place.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

BURST_US = 10_000.0  # device time of one burst: long enough to reach the clocks of steady work
KEPT_LAUNCHES = (3, 24)  # per burst, without the first, which finds cold caches and is dropped
WARM_UP_SHARE = 0.2  # of the budget
MIN_ROUNDS = 3  # of which a spread can be told; may exceed the budget, up to OVERRUN times
OVERRUN = 4.0
ATTEMPTS = 4  # at a burst that the host could not feed fast enough


class DeviceLost(RuntimeError):
    """The device no longer answers: every later measurement in this process would fail too."""


@dataclass(frozen=True)
class Entry:
    """A contender ready to run: one launch callable per set of inputs.

    `context` is entered once around every burst, for settings that cost host time to change.
    """

    name: str
    launches: tuple[Callable[[], Any], ...]
    context: Callable[[], AbstractContextManager] = nullcontext


@dataclass
class Timing:
    """Device times of one contender in microseconds, one list per round."""

    rounds: list[list[float]] = field(default_factory=list)
    dry: int = 0  # bursts in which the device may have waited for the host
    error: str | None = None

    def summary(self) -> dict[str, Any]:
        """Return median, p10 and p90 over launches and the run-to-run spread over rounds."""
        times = sorted(t for r in self.rounds for t in r)
        if not times:
            return {"launches": 0}
        medians = [statistics.median(r) for r in self.rounds]
        middle = statistics.median(times)
        spread = (percentile(medians, 90) - percentile(medians, 10)) / middle
        return {
            "median_us": round(middle, 3),
            "p10_us": round(percentile(times, 10), 3),
            "p90_us": round(percentile(times, 90), 3),
            "spread": round(spread, 5),
            "launches": len(times),
            "dry_bursts": self.dry,
            "round_medians_us": [round(m, 3) for m in medians],
        }


@dataclass
class Measurement:
    """What `measure` found, and the stretch of host time in which the rounds ran."""

    timings: dict[str, Timing]
    started: float
    ended: float
    kept_per_burst: int
    spin_us: float


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile with linear interpolation between the closest ranks."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def input_sets(set_bytes: int, l2_bytes: int) -> int:
    """Return how many sets of inputs to rotate so that none is still in the L2 at its next turn.

    The sets together exceed twice the L2. One set that does so by itself is enough: by the end
    of a launch its beginning has been evicted.
    """
    return 2 * l2_bytes // set_bytes + 1


def describe(error: BaseException, limit: int = 600) -> str:
    """Return an error as one line of bounded length."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


class CudaDevice:
    """The current CUDA device and stream, as the protocol sees them."""

    # The spin kernel counts SM cycles; these parts boost to about 2 GHz at most, so the spin
    # never falls short of what was asked for by much. The pending-event check is what counts.
    CYCLES_PER_US = 2000

    def __init__(self):
        import torch

        self._cuda = torch.cuda
        self._events: list[Any] = []

    def now(self) -> float:
        """Return host seconds on a monotonic clock."""
        return time.perf_counter()

    def spin(self, microseconds: float) -> None:
        """Enqueue a kernel that occupies the stream for about this long."""
        self._cuda._sleep(int(microseconds * self.CYCLES_PER_US))

    def events(self, count: int) -> list[Any]:
        """Return reusable timing events: making new ones would cost host time in every burst."""
        while len(self._events) < count:
            self._events.append(self._cuda.Event(enable_timing=True))
        return self._events[:count]

    def record(self, event: Any) -> None:
        """Enqueue an event on the current stream."""
        event.record()

    def pending(self, event: Any) -> bool:
        """Tell whether the device has yet to reach an event."""
        return not event.query()

    def elapsed_us(self, first: Any, second: Any) -> float:
        """Return the device time between two completed events."""
        return first.elapsed_time(second) * 1e3

    def synchronize(self) -> None:
        """Wait until all enqueued work is done; raises if any of it failed."""
        self._cuda.synchronize()


def is_alive(device: Any) -> bool:
    """Tell whether the device still works: a CUDA fault poisons the whole process."""
    try:
        device.synchronize()
    except Exception:
        return False
    return True


@dataclass
class Pace:
    """How long to spin before a burst, and which input set comes next.

    Both are shared by all contenders of a cell: an equal spin gives all of them the same rest
    between bursts, and one cursor over the sets keeps a burst from reading what the burst before
    it left in the L2.
    """

    spin_us: float = 200.0
    cursor: int = 0
    longest_us: float = 20_000.0

    def next_set(self, count: int) -> int:
        """Return the index of the next input set."""
        index = self.cursor % count
        self.cursor += 1
        return index

    def lengthen(self, host_us: float) -> bool:
        """Spin longer than a burst's host time; False when that is out of reach."""
        if self.spin_us >= self.longest_us:
            return False
        self.spin_us = min(self.longest_us, max(2 * self.spin_us, 1.5 * host_us))
        return True


def _burst(entry: Entry, device: Any, kept: int, pace: Pace) -> tuple[list[float], bool]:
    """Time one burst; also tell whether the device may have run dry in its last attempt."""
    for _ in range(ATTEMPTS):
        events = device.events(kept + 2)
        device.spin(pace.spin_us)
        device.record(events[0])
        began = device.now()
        for event in events[1:]:
            entry.launches[pace.next_set(len(entry.launches))]()
            device.record(event)
        fed = device.pending(events[0])
        host_us = (device.now() - began) * 1e6
        device.synchronize()
        times = [device.elapsed_us(a, b) for a, b in zip(events[1:-1], events[2:])]
        if fed or not pace.lengthen(host_us):
            break
    return times, not fed


def _try_burst(
    entry: Entry, device: Any, kept: int, pace: Pace, timing: Timing
) -> tuple[list[float], bool] | None:
    """Run a burst; an error goes to the contender's record, a lost device to the caller."""
    try:
        with entry.context():
            return _burst(entry, device, kept, pace)
    except Exception as error:
        timing.error = f"while timing: {describe(error)}"
        if not is_alive(device):
            raise DeviceLost(f"{entry.name}: {timing.error}") from error
        return None


def _warm_up(
    entries: Sequence[Entry], device: Any, pace: Pace, seconds: float, timings: dict[str, Timing]
) -> dict[str, float]:
    """Run every contender for its share of the time; return microseconds per launch."""
    estimates: dict[str, float] = {}
    for entry in entries:
        until = device.now() + seconds / len(entries)
        bursts = 0
        while bursts < 2 or device.now() < until:
            found = _try_burst(entry, device, KEPT_LAUNCHES[0], pace, timings[entry.name])
            if found is None:
                estimates.pop(entry.name, None)
                break
            estimates[entry.name] = statistics.median(found[0])
            bursts += 1
    return estimates


@contextmanager
def _no_garbage_collection():
    """Keep the collector from pausing the host in the middle of a burst."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def measure(entries: Sequence[Entry], device: Any, budget_s: float = 1.2) -> Measurement:
    """Time all entries, taking turns, within about `budget_s` seconds in all.

    Every second round runs in reverse order (A B C, C B A): nobody always follows the same
    neighbour, and a drift of the clocks hits all alike.

    Args:
        entries: The contenders; each has been called before (compiled).
        device: A `CudaDevice`, or a stand-in with its methods.
        budget_s: Host seconds for warm-up and rounds together. At least `MIN_ROUNDS` rounds run
            unless that takes `OVERRUN` times the budget.

    Returns:
        Timings by name. An entry that raised has `error` set and takes no further part.

    Raises:
        DeviceLost: A launch left the device unusable.
    """
    timings = {entry.name: Timing() for entry in entries}
    pace = Pace()
    with _no_garbage_collection():
        began = device.now()
        estimates = _warm_up(entries, device, pace, WARM_UP_SHARE * budget_s, timings)
        turn = [entry for entry in entries if entry.name in estimates]
        low, high = KEPT_LAUNCHES
        typical_us = statistics.median(estimates.values()) if estimates else BURST_US
        kept = min(high, max(low, round(BURST_US / max(typical_us, 1e-3))))
        started = ended = device.now()
        rounds, longest_round = 0, 0.0
        while turn:
            if rounds >= MIN_ROUNDS and ended - began + longest_round > budget_s:
                break
            if rounds and ended - began + longest_round > OVERRUN * budget_s:
                break
            for entry in turn if rounds % 2 == 0 else turn[::-1]:
                timing = timings[entry.name]
                found = _try_burst(entry, device, kept, pace, timing)
                if found is not None:
                    timing.rounds.append(found[0])
                    timing.dry += found[1]
            turn = [entry for entry in turn if timings[entry.name].error is None]
            rounds += 1
            longest_round = max(longest_round, device.now() - ended)
            ended = device.now()
    return Measurement(timings, started, ended, kept, pace.spin_us)
