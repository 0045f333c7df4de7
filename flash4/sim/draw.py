"""Pictures of a clocked run: a Gantt chart as text, SVG or PNG, and a trace for Perfetto or chrome://tracing."""

import hashlib
import json
import re
from collections import defaultdict
from pathlib import Path

from flash4.sim.clock import Span

TENSOR, COPIES, STORES = "tensor cores", "TMA loads", "TMA stores"
LETTERS = {
    "S = Q K^T": "S",
    "O += P V": "O",
    "load S": "l",
    "row maximum": "m",
    "row sum": "s",
    "exact maximum": "M",
    "exponentials": "e",
    "P to 16 bit": "p",
    "mask": "k",
    "O / l": "/",
    "begin": "b",
    "TMA Q": "Q",
    "TMA K": "K",
    "TMA V": "V",
    "TMA store of O": "W",
}
WAIT, IDLE, OTHER = ".", " ", "i"


def row_of(span: Span) -> str:
    """Row of the picture: a role, or the unit that a lane's operations run on."""
    for start, unit in (
        ("the tensor core", TENSOR),
        ("copies into", COPIES),
        ("stores of", STORES),
    ):
        if span.row.startswith(start):
            return unit
    return span.row


def label_of(span: Span) -> str:
    """Label in the words of the diagram, without the number of a slot."""
    label = re.sub(r"^the tensor core for .*", "tensor cores", span.label)
    return re.sub(r"^the copy into (\w+)\[\d+\]$", lambda m: f"TMA {m[1].upper()}", label)


def rows_of(spans: list[Span]) -> dict[str, list[Span]]:
    """Spans by row: roles in the order of their first span, then units."""
    rows = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.begin):
        rows[row_of(span)].append(span)
    units = (TENSOR, COPIES, STORES)
    roles = sorted(row for row in rows if row not in units)
    return {row: rows[row] for row in (*roles, *units) if row in rows}


def chart(spans: list[Span], begin: float, end: float, columns: int = 100) -> str:
    """Gantt chart of text between two cycles: a letter per column, for what took most of it."""
    step, lines, seen = (end - begin) / columns, [], set()
    for row, of_row in rows_of(spans).items():
        cells = [defaultdict(float) for _ in range(columns)]
        for span in of_row:
            letter = WAIT if span.waits else LETTERS.get(label_of(span), OTHER)
            first, last = int((span.begin - begin) // step), int((span.end - begin) // step)
            for i in range(max(first, 0), min(last, columns - 1) + 1):
                lo, hi = begin + i * step, begin + (i + 1) * step
                cells[i][letter] += min(span.end, hi) - max(span.begin, lo)
        text = "".join(max(c, key=c.get) if sum(c.values()) > step / 2 else IDLE for c in cells)
        seen |= set(text)
        lines.append(f"{row:13}|{text}|")
    words = {letter: label for label, letter in LETTERS.items()} | {WAIT: "waits", OTHER: "issues"}
    legend = ", ".join(f"{letter} {words[letter]}" for letter in words if letter in seen)
    scale = f"{'':13} {begin:<.0f}{'cycles':^{max(columns - 12, 0)}}{end:>.0f}"
    return "\n".join([*lines, scale, legend])


def digest(spans: list[Span]) -> str:
    """What a picture shows, as a word: cycles are rounded, so that another machine finds the same."""
    lines = [f"{s.row} {s.label} {s.begin:.0f} {s.end:.0f} {s.waits}" for s in spans]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def gantt(spans: list[Span], path: Path, begin: float, end: float, title: str):
    """Draw a Gantt chart into an SVG or PNG file, by its suffix; an SVG's description holds the ``digest``.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("pictures need matplotlib: pip install 'flash4[sim]'") from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = rows_of(spans)
    shown = [s for of_row in rows.values() for s in of_row if s.end > begin and s.begin < end]
    labels = sorted({label_of(s) for s in shown if not s.waits})
    palette = matplotlib.colormaps["tab20"].colors
    colours = {label: palette[i % len(palette)] for i, label in enumerate(labels)}
    figure = Figure(figsize=(13, 0.9 + 0.45 * len(rows) + 0.25 * (1 + len(labels) // 7)))
    axes = figure.add_subplot()
    for y, of_row in enumerate(rows.values()):
        for span in of_row:
            lo, hi = max(span.begin, begin), min(span.end, end)
            if lo < hi:
                style = {"color": "0.92"} if span.waits else {"color": colours[label_of(span)]}
                axes.broken_barh([(lo, hi - lo)], (y - 0.4, 0.8), **style)
                if span.waits and hi - lo > (end - begin) / 25:
                    axes.text(
                        (lo + hi) / 2, y, label_of(span), ha="center", va="center", fontsize=6
                    )
    axes.set(xlim=(begin, end), ylim=(len(rows) - 0.4, -0.6), xlabel="SM cycles", title=title)
    axes.set_yticks(range(len(rows)), list(rows))
    patches = [Patch(color=colours[label], label=label) for label in labels]
    patches.append(Patch(color="0.92", label="waits for"))
    axes.legend(
        handles=patches, ncols=7, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2)
    )
    figure.set_layout_engine("tight")
    if path.suffix == ".svg":
        with matplotlib.rc_context({"svg.hashsalt": "flash4", "svg.fonttype": "none"}):
            FigureCanvasSVG(figure).print_svg(
                str(path), metadata={"Date": None, "Description": f"spans {digest(spans)}"}
            )
    elif path.suffix == ".png":
        FigureCanvasAgg(figure).print_png(str(path))
    else:
        raise ValueError(f"{path}: pictures end in .svg or .png")


def trace(spans: list[Span], path: Path, mhz: float):
    """Write a trace in the Chrome format: https://ui.perfetto.dev opens it. Times in us.

    One thread per role, and one per queue of a unit: what is on a thread does not overlap.
    """
    threads = {}
    for row, of_row in rows_of(spans).items():
        for span in of_row:
            threads.setdefault(span.row, row if row == span.row else f"{row}: {span.row}")
    numbers = {row: i for i, row in enumerate(threads)}
    events = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": numbers[row], "args": {"name": name}}
        for row, name in threads.items()
    ]
    for span in spans:
        event = {
            "name": ("wait: " if span.waits else "") + label_of(span),
            "cat": "wait" if span.waits else "work",
            "ph": "X",
            "pid": 0,
            "tid": numbers[span.row],
            "ts": span.begin / mhz,
            "dur": (span.end - span.begin) / mhz,
            "args": {"cycles": round(span.end - span.begin)},
        }
        if span.place is not None:
            event["args"]["line"] = str(span.place)
        if span.waits and span.cause is not None:
            event["args"]["ended by"] = span.cause[0]
        events.append(event)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
