"""What ncu's command-line profiler prints, read back."""

from __future__ import annotations

import csv
from collections import defaultdict

# Of the columns "Metric Unit" that are scaled; all others count as they stand.
_SCALES = {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}


def launches(text: str) -> list[dict[str, float]]:
    """Return the metrics of every profiled launch, in order, from what `ncu --csv` printed.

    Lines that are not of the table (ncu's own messages, what the program prints) are passed over.

    Raises:
        ValueError: a metric without a number, such as one that the GPU does not have.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for row in csv.DictReader(lines):
        name, value = row["Metric Name"], row["Metric Value"].replace(",", "")
        try:
            found[int(row["ID"])][name] = float(value) * _SCALES.get(row.get("Metric Unit"), 1)
        except ValueError as error:
            raise ValueError(f"ncu gives {value!r} for {name}") from error
    return [found[i] for i in sorted(found)]
