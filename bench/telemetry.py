"""SM clock, power and temperature, sampled in the background while contenders run.

Only reads: nothing here changes a clock or a limit.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

PERIOD_S = 0.05
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Reading:
    """One sample; None where the driver does not tell."""

    sm_mhz: float | None = None
    watts: float | None = None
    celsius: float | None = None


class Telemetry:
    """Collects readings from a source in a daemon thread."""

    def __init__(
        self,
        source: Iterator[Reading],
        name: str,
        close: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.perf_counter,
    ):
        self.name = name
        self._source, self._close, self._now = source, close, now
        self._samples: list[tuple[float, Reading]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._collect, name="telemetry", daemon=True)

    def start(self) -> Telemetry:
        """Begin to collect."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End collecting and release the source."""
        self._stopping.set()
        self._close()
        self._thread.join(timeout=2)

    def _collect(self) -> None:
        try:
            for reading in self._source:
                if self._stopping.is_set():
                    return
                self._samples.append((self._now(), reading))
        except Exception:
            # Losing the log must not cost the measurement; the summary says "samples: 0".
            return

    def window(self, started: float, ended: float) -> dict[str, Any]:
        """Summarise the samples taken between two host times."""
        inside = [r for t, r in list(self._samples) if started <= t <= ended]
        clocks = [r.sm_mhz for r in inside if r.sm_mhz is not None]
        watts = [r.watts for r in inside if r.watts is not None]
        heat = [r.celsius for r in inside if r.celsius is not None]
        return {
            "samples": len(inside),
            "sm_mhz": statistics.median(clocks) if clocks else None,
            "sm_mhz_min": min(clocks, default=None),
            "sm_mhz_max": max(clocks, default=None),
            "watts": round(statistics.median(watts), 1) if watts else None,
            "watts_max": max(watts, default=None),
            "celsius": max(heat, default=None),
        }


def parse_smi(line: str) -> Reading:
    """Read `clock, power, temperature`; units are skipped, `[N/A]` and the like give None."""
    fields = [_NUMBER.search(part) for part in line.split(",")]
    numbers = [float(m.group()) if m else None for m in fields] + [None] * 3
    return Reading(*numbers[:3])


def _nvml(uuid: str) -> Telemetry:
    """Sample through NVML: no second process, and power at the instant.

    `torch.cuda.power_draw` reads the average over the last second, most of a cell's whole time.
    """
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def value(query: Callable[[], float]) -> float | None:
        try:
            return float(query())
        except Exception:
            return None

    def instant_watts() -> float:
        found = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])[0]
        if found.nvmlReturn != 0:
            raise OSError(found.nvmlReturn)
        return found.value.uiVal / 1e3

    def read() -> Reading:
        watts = value(instant_watts)
        if watts is None:
            watts = value(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3)
        return Reading(
            value(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            watts,
            value(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        )

    first = read()
    if first.sm_mhz is None and first.watts is None:
        raise OSError("NVML tells neither clock nor power")

    def poll() -> Iterator[Reading]:
        while True:
            yield read()
            time.sleep(PERIOD_S)

    return Telemetry(poll(), "nvml")


def _smi(uuid: str) -> Telemetry:
    """Sample through a looping `nvidia-smi`."""
    for power in ("power.draw.instant", "power.draw"):
        query = [
            "nvidia-smi",
            f"--id={uuid}",
            f"--query-gpu=clocks.sm,{power},temperature.gpu",
            "--format=csv,noheader,nounits",
        ]
        probe = subprocess.run(query, capture_output=True, text=True, timeout=20)
        if probe.returncode == 0 and parse_smi(probe.stdout).sm_mhz is not None:
            break
    else:
        raise OSError(f"nvidia-smi: {(probe.stdout or probe.stderr).strip()[:200]}")
    process = subprocess.Popen(
        [*query, "-lms", str(int(PERIOD_S * 1e3))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def close() -> None:
        process.kill()
        process.wait(timeout=5)

    return Telemetry((parse_smi(line) for line in process.stdout), "nvidia-smi", close)


def open_telemetry(uuid: str) -> Telemetry | None:
    """Start sampling the GPU with this UUID (`GPU-...`), or return None where nothing can."""
    for opener in (_nvml, _smi):
        try:
            return opener(uuid).start()
        except Exception:
            continue
    return None
