"""Columns of a comparison's table, and its layout as text and as Markdown."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from depthmix.compare.rows import Row

DASH = "–"
ROUNDING = 1e-12  # equal differences, such as 4.0 - 3.9 and 4.01 - 3.91, have such spreads in float64


@dataclass(frozen=True)
class Column:
    """A column: its heading, given the baseline's name, and its cell."""

    heading: Callable[[str], str]
    cell: Callable[[Row], str]


def _or_dash(value: float | None, form: str) -> str:
    return DASH if value is None else format(value, form)


def plus_minus(value: float | None, around: float | None) -> str:
    """Write a difference and its spread with four decimals, or up to six where the spread would read as zero.

    Args:
        value: The difference; a dash stands for None.
        around: What follows the ±; None for nothing.

    Examples:
        >>> plus_minus(-0.00012, 0.00003), plus_minus(0.1, 1e-8), plus_minus(-0.1, 0.0)
        ('-0.00012 ± 0.00003', '+0.1000 ± <0.0001', '-0.1000 ± 0.0000')
    """
    if value is None:
        return DASH
    if around is None:
        return f"{value:+z.4f}"
    for digits in (4, 5, 6):
        if float(f"{around:.{digits}f}"):
            return f"{value:+z.{digits}f} ± {around:.{digits}f}"
    return f"{value:+z.4f} ± {'<0.0001' if around > ROUNDING else '0.0000'}"


def _fraction(value: float | None, row: Row) -> str:
    if value is not None:
        return f"{value:.2f}"
    if row.paired == 0:
        return DASH
    return "not reached" if row.reached == 0 else f"{row.reached} of {row.paired} seeds"


def human(number: float) -> str:
    """Format a number briefly: 1234567 as 1.23M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


def human_time(seconds: float) -> str:
    """Format seconds as 8.2 s, 12.3 min or 4.56 h."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.2f} h"


VAL_LOSS = Column(lambda first: "val. loss", lambda r: f"{r.val_loss:.4f}")
AGAINST = Column(lambda first: f"against {first}", lambda r: plus_minus(r.difference, r.difference_interval))
TIME_TO_REACH = Column(lambda first: "time to reach", lambda r: _fraction(r.time_to_reach, r))
OF_TEXT = (
    Column(lambda first: "perplexity", lambda r: f"{r.perplexity:.2f}"),
    Column(lambda first: "bits/byte", lambda r: _or_dash(r.bits_per_byte, ".4f")),
    Column(lambda first: "tokens to reach", lambda r: _fraction(r.tokens_to_reach, r)),
    TIME_TO_REACH,
)
OF_IMAGES = (
    Column(lambda first: "accuracy", lambda r: _or_dash(r.accuracy, ".2%")),
    Column(lambda first: "images to reach", lambda r: _fraction(r.tokens_to_reach, r)),
    TIME_TO_REACH,
)
COSTS = (
    Column(lambda first: "parameters", lambda r: human(r.parameters)),
    Column(lambda first: "of the mixer", lambda r: human(r.added_by_mixer)),
    Column(lambda first: "step, ms", lambda r: f"{r.step_ms:.1f}"),
    Column(lambda first: "ratio", lambda r: _or_dash(r.step_ratio, ".2f")),
    Column(lambda first: "memory, GiB", lambda r: _or_dash(r.peak_memory and r.peak_memory / 2**30, ".2f")),
    Column(lambda first: "steps", lambda r: f"{r.steps:,}"),
    Column(lambda first: "time", lambda r: human_time(r.train_seconds)),
    Column(lambda first: "seeds", lambda r: str(r.seeds)),
)

# Step, ratio and time: what other programs on a machine distort.
TIMES = tuple(COSTS[i] for i in (2, 3, 6))
# These and memory are known only of runs that had the machine to themselves.
OF_A_MACHINE = (*TIMES, COSTS[4])


def of_images(rows: Sequence[Row]) -> bool:
    """Tell whether the runs were trained on images."""
    return any(row.accuracy is not None for row in rows)


def learnt(rows: Sequence[Row]) -> tuple[Column, ...]:
    """Return the columns on what was learnt besides the loss, which depend on the data."""
    return OF_IMAGES if of_images(rows) else OF_TEXT


def cells(rows: Sequence[Row], columns: Sequence[Column] | None = None) -> list[list[str]]:
    """Return the heading and one line per row, as strings; the arm comes first."""
    columns = (VAL_LOSS, AGAINST, *learnt(rows), *COSTS) if columns is None else columns
    first = rows[0].baseline.partition(":")[0] if rows else ""
    heading = ["arm", *(c.heading(first) for c in columns)]
    return [heading, *([r.arm, *(c.cell(r) for c in columns)] for r in rows)]


def to_text(rows: Sequence[Row], width: int | None = None) -> str:
    """Format rows as plain text, in several parts if the table is wider than `width`."""
    return "\n".join("".join(line + "\n" for line in part) for part in _parts(rows, width))


def _parts(rows: Sequence[Row], width: int | None) -> list[list[str]]:
    """Split the table into parts that fit into the width; every part begins with the arm."""
    table = cells(rows)
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    parts: list[list[int]] = [[]]
    for column in range(1, len(widths)):
        needed = widths[0] + sum(2 + widths[i] for i in [*parts[-1], column])
        if width is not None and parts[-1] and needed > width:
            parts.append([])
        parts[-1].append(column)
    return [lines_of([[line[0], *(line[i] for i in part)] for line in table]) for part in parts]


def lines_of(table: Sequence[Sequence[str]]) -> list[str]:
    """Align a heading and its lines: the first column left, numbers right, a rule below the heading."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    heading, *rows = table
    lines = [heading, ["─" * width for width in widths], *rows]
    return [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]


def print_table(rows: Sequence[Row]) -> None:
    """Print rows, with colours where rich is installed and the output is a terminal."""
    width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 120
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(to_text(rows, width))
        return
    console = Console()
    best = min((row.val_loss for row in rows), default=None)
    styles = ["bold", "dim", *("bold green" if row.val_loss == best else "" for row in rows)]
    for part in _parts(rows, width):
        for line, style in zip(part, styles, strict=True):
            console.print(Text(line, style=style), soft_wrap=True)
        console.print()


def markdown_line(line: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return "| " + " | ".join(markdown_text(cell) for cell in line) + " |"


def markdown_text(text: str) -> str:
    """Escape text for Markdown, on one line."""
    text = " ".join(text.split())
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|")):
        text = text.replace(character, entity)
    return text


def markdown_table(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table. The first column is aligned left, the others right."""
    return [markdown_line(heading), "|---|" + "---:|" * (len(heading) - 1), *map(markdown_line, lines)]


def bullets(sentences: Iterable[str]) -> list[str]:
    """Return sentences as a Markdown list."""
    return [f"* {markdown_text(sentence)}" for sentence in sentences]
