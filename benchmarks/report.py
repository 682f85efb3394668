"""Results, printed and appended to a CSV as they come, then a table and a plot.

A run that is stopped keeps what it had measured.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.environment import COLUMNS


@dataclass(frozen=True)
class Row:
    """A row of the results: one number."""

    entry: str
    case: str  # sizes
    who: str  # ours, a rival, an arm, a kernel
    metric: str
    value: float | None  # None if it could not be measured; the note says why
    unit: str = ""
    target: str = ""  # required of the value, such as "<= 0.27"
    note: str = ""

    @property
    def met(self) -> bool | None:
        """True if the target is met, None without a target or a value."""
        if not self.target or self.value is None:
            return None
        relation, bound = self.target.split()
        return self.value <= float(bound) if relation == "<=" else self.value >= float(bound)


ROW_COLUMNS = tuple(f.name for f in fields(Row))
CSV_COLUMNS = (*ROW_COLUMNS, *COLUMNS)
# Only in the CSV, to keep the tables short: single errors of entries on other subjects, and ratios of half a pass.
DETAILS = ("error of ", "forward / ", "backward / ")
PLOTTED = (
    "forward+backward",
    "share of copy bandwidth",
    "step / ",
    "time / ",
    "peak memory / ",
    "tokens / ",
    "first call",
    "error of output",
    "tuning",
)


class Report:
    """The rows of one entry, in a folder."""

    def __init__(self, entry: str, folder: Path, environment: dict[str, str]) -> None:
        self.entry, self.folder, self.environment = entry, folder, environment
        self.rows: list[Row] = []
        folder.mkdir(parents=True, exist_ok=True)
        with self.csv.open("w", newline="") as f:
            csv.writer(f).writerow(CSV_COLUMNS)

    @property
    def csv(self) -> Path:
        """The file that grows row by row."""
        return self.folder / f"{self.entry}.csv"

    def add(
        self,
        case: str,
        who: str,
        metric: str,
        value: float | None,
        unit: str = "",
        target: str = "",
        note: str = "",
    ) -> None:
        """Add a number: print it and write it to disk at once."""
        self.append(Row(self.entry, case, who, metric, value, unit, target, note))

    def append(self, row: Row, quiet: bool = False) -> None:
        """Add a row as it is."""
        self.rows.append(row)
        with self.csv.open("a", newline="") as f:
            csv.DictWriter(f, CSV_COLUMNS).writerow({**asdict(row), **self.environment})
        # A run that is stopped has a table too.
        self.write_table()
        if quiet:
            return
        shown = f"{format_value(row.value)} {row.unit}".strip()
        verdict = f"  [{_verdict(row)}]" if row.target else ""
        print(f"{row.entry} | {row.case} | {row.who} | {row.metric}: {shown}{verdict}  {row.note}".rstrip(), flush=True)

    def close(self) -> None:
        """Write the plot beside the CSV and the table."""
        self.write_table()
        plot(self.rows, self.folder / f"{self.entry}.png")

    def write_table(self) -> None:
        """Write the table beside the CSV."""
        (self.folder / f"{self.entry}.md").write_text(markdown(self.rows, self.environment), encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a CSV that `Report` wrote. It may be cut short."""
    with path.open(newline="") as f:
        lines = [line for line in csv.DictReader(f) if line.get("note") is not None]
    return [
        Row(**{**{c: line[c] for c in ROW_COLUMNS}, "value": float(line["value"]) if line["value"] else None})  # type: ignore[arg-type]
        for line in lines
    ]


def format_value(value: float | None) -> str:
    """Format a value with three significant digits, or as a dash if it was not measured."""
    if value is None:
        return "–"
    return (
        f"{value:.3g}" if value and (abs(value) < 0.01 or abs(value) >= 1e5) else f"{value:.3f}".rstrip("0").rstrip(".")
    )


def _verdict(row: Row) -> str:
    shown = row.target.replace("<=", "≤").replace(">=", "≥")
    return shown if row.met is None else f"{shown}: {'met' if row.met else 'missed'}"


def markdown(rows: Sequence[Row], environment: dict[str, str]) -> str:
    """Format a table for each entry, with a line per contender and a column per metric.

    Targets stand beside the numbers, notes below the table.
    """
    parts = []
    for entry in dict.fromkeys(r.entry for r in rows):
        of_entry = [r for r in rows if r.entry == entry]
        hidden = DETAILS if entry != "errors" else ()
        shown_rows = [r for r in of_entry if r.value is not None and not r.metric.startswith(hidden)]
        metrics = list(dict.fromkeys((r.metric, r.unit) for r in shown_rows))
        heads = [f"{m}, {u}" if u else m for m, u in metrics]
        lines = [f"| {' | '.join([entry, '', *heads])} |", f"|{'---|' * (2 + len(heads))}"]
        for case, who in dict.fromkeys((r.case, r.who) for r in of_entry):
            cells = {(r.metric, r.unit): r for r in of_entry if (r.case, r.who) == (case, who)}
            shown = [_cell(cells.get(m)) for m in metrics]
            if any(shown):
                lines.append(f"| {' | '.join([case, who, *shown])} |")
        notes = dict.fromkeys(f"* {', '.join(filter(None, (r.case, r.who)))}: {r.note}" for r in of_entry if r.note)
        parts.append("\n".join([*lines, *(["", *notes] if notes else [])]))
    setting = ", ".join(f"{k} {v}" if k != "hardware" else v for k, v in environment.items() if v)
    return "\n\n".join([*parts, f"Measured on {setting}."]) + "\n"


def _cell(row: Row | None) -> str:
    if row is None or row.value is None:
        return ""
    return format_value(row.value) + (f" ({_verdict(row)})" if row.target else "")


def _main_metric(rows: Sequence[Row]) -> tuple[str, str]:
    ranks = {name: i for i, name in enumerate(PLOTTED)}
    row = min(rows, key=lambda r: next((ranks[n] for n in PLOTTED if r.metric.startswith(n)), len(PLOTTED)))
    return row.metric, row.unit


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the main metric (PLOTTED) of each entry as bars, by case and contender. Do nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed", flush=True)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = [r for r in rows if r.value is not None and math.isfinite(r.value) and " / " not in r.who]
    entries = list(dict.fromkeys(r.entry for r in measured))
    if not entries:
        print("no plot: nothing was measured", flush=True)
        return
    shown = {e: _main_metric([r for r in measured if r.entry == e]) for e in entries}
    bars = {e: [r for r in measured if r.entry == e and (r.metric, r.unit) == shown[e]] for e in entries}
    heights = [1 + 0.3 * len(b) for b in bars.values()]
    figure, axes = pyplot.subplots(
        len(entries), 1, figsize=(9, sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    for axis, entry in zip(axes[:, 0], entries, strict=True):
        metric, unit = shown[entry]
        colors = {who: f"C{i}" for i, who in enumerate(dict.fromkeys(r.who for r in bars[entry]))}
        names = [f"{r.case}: {r.who}" for r in bars[entry]]
        drawn = axis.barh(range(len(names)), [r.value for r in bars[entry]], color=[colors[r.who] for r in bars[entry]])
        axis.bar_label(drawn, [format_value(r.value) for r in bars[entry]], padding=3, fontsize=8)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_title(f"{entry}: {metric}{f', {unit}' if unit else ''}", fontsize=10, loc="left")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
