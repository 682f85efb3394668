"""The table of a comparison: what finished run folders say, arm by arm, and how it is written."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from depthmix.errors import CHECKPOINT, DIVERGED, UserError

Point = tuple[float, float, float]  # tokens, seconds, validation loss


@dataclass(frozen=True)
class Run:
    """One finished training: one arm with one seed."""

    arm: str
    seed: int
    path: str
    steps: int
    tokens: int
    val_loss: float
    bits_per_byte: float | None
    parameters: int
    added_by_mixer: int
    step_seconds: float
    seconds: float | None  # by the clock, with compilation and pauses
    peak_memory: int | None
    curve: list[Point]

    @property
    def train_seconds(self) -> float:
        """Steps at the median step time: compilation, other processes and pauses do not count."""
        return self.steps * self.step_seconds


@dataclass(frozen=True)
class Row:
    """One arm over its seeds. A spread is half the range over seeds; None where there is nothing to say."""

    arm: str
    baseline: str  # the first arm, which the others are compared with
    seeds: int
    steps: int
    tokens: int
    val_loss: float
    val_loss_spread: float | None
    difference: float | None  # to the baseline, seed by seed
    difference_spread: float | None
    perplexity: float
    bits_per_byte: float | None
    parameters: int
    added_by_mixer: int
    step_ms: float
    step_ratio: float | None
    train_seconds: float
    peak_memory: int | None
    tokens_to_reach: float | None  # the baseline's final loss, as a fraction of the baseline's tokens
    time_to_reach: float | None
    reached: int  # seeds that reached it
    paired: int  # seeds both arms have finished


def read_run(path: str | Path, arm: str) -> Run:
    """A finished run folder; UserError names the folder when it cannot be used."""
    path = Path(path)
    result = _read_result(path)
    try:
        steps, tokens = int(result["steps"]), int(result["tokens"])
        parameters = result["parameters"]
        seconds: Any = result.get("seconds")
        step_seconds = float(result.get("step_seconds") or seconds / steps)
        run = Run(
            arm=arm,
            seed=int(result["seed"]),
            path=str(path),
            steps=steps,
            tokens=tokens,
            val_loss=float(result["val_loss"]),
            bits_per_byte=result.get("bits_per_byte"),
            parameters=int(parameters["total"]),
            added_by_mixer=int(parameters.get("added_by_mixer", 0)),
            step_seconds=step_seconds,
            seconds=seconds,
            peak_memory=result.get("peak_memory"),
            curve=[],
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{path / 'result.json'} is not the result of a training ({reason}); delete {path} and run again",
            CHECKPOINT,
        ) from None
    if not math.isfinite(run.val_loss):
        message = f"the run in {path} diverged: its validation loss is {run.val_loss}; lower the learning rate"
        raise UserError(f"{message} or leave the arm out", DIVERGED)
    if not (math.isfinite(step_seconds) and step_seconds > 0 and steps > 0):
        raise UserError(f"{path / 'result.json'} has no usable step time; delete {path} and run again", CHECKPOINT)
    run.curve.extend(_read_curve(path, run))
    return run


def _read_result(path: Path) -> dict[str, Any]:
    try:
        result = json.loads((path / "result.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path} has no result.json: that run has not finished; run again to resume it", CHECKPOINT
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path / 'result.json'} cannot be read ({error}); delete {path} and run again", CHECKPOINT
        ) from None
    if not isinstance(result, dict):
        raise UserError(
            f"{path / 'result.json'} is not the result of a training; delete {path} and run again", CHECKPOINT
        )
    return result


def _read_curve(path: Path, run: Run) -> list[Point]:
    """The evaluations by tokens and time; the result is the last of them."""
    points: dict[int, Point] = {}
    try:
        lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        for line in lines:
            entry = json.loads(line)
            loss = entry.get("val_loss")
            if loss is not None and math.isfinite(loss):
                step = int(entry["step"])
                points[step] = (entry["tokens"], step * run.step_seconds, loss)
    except FileNotFoundError:
        raise UserError(f"{path} has no metrics.jsonl; delete the folder and run again", CHECKPOINT) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path / 'metrics.jsonl'} cannot be read ({error}); delete {path} and run again"
        raise UserError(message, CHECKPOINT) from None
    points[run.steps] = (run.tokens, run.train_seconds, run.val_loss)
    return [points[step] for step in sorted(points)]


def reach(curve: Sequence[Point], target: float) -> tuple[float, float] | None:
    """Tokens and seconds at which a curve first is at the target or below, linear between evaluations; None if never.

    Nothing is known before the first evaluation: a curve that starts below the target gets that point.
    """
    before: Point | None = None
    for tokens, seconds, loss in curve:
        if loss <= target:
            if before is None:
                return tokens, seconds
            share = (before[2] - target) / (before[2] - loss)
            return before[0] + share * (tokens - before[0]), before[1] + share * (seconds - before[1])
        before = (tokens, seconds, loss)
    return None


def make_rows(runs: Sequence[Run], arms: Sequence[str]) -> list[Row]:
    """One row an arm, in the order given, for the arms that have runs; the first arm is what the others are compared with."""
    base = {run.seed: run for run in runs if arms and run.arm == arms[0]}
    rows = []
    for arm in arms:
        own = sorted((run for run in runs if run.arm == arm), key=lambda run: run.seed)
        if own:
            rows.append(_row(own, base, arms[0]))
    return rows


def _row(own: Sequence[Run], base: dict[int, Run], baseline: str) -> Row:
    pairs = [(run, base[run.seed]) for run in own if run.seed in base]
    differences = [run.val_loss - plain.val_loss for run, plain in pairs]
    fractions = [found for run, plain in pairs if (found := _fractions(run, plain))]
    everywhere = bool(pairs) and len(fractions) == len(pairs)
    losses = [run.val_loss for run in own]
    bits = [run.bits_per_byte for run in own if run.bits_per_byte is not None]
    memory = [run.peak_memory for run in own if run.peak_memory is not None]
    ratio = [median_seconds([p[i] for p in pairs]) for i in (0, 1)] if pairs else None
    return Row(
        arm=own[0].arm,
        baseline=baseline,
        seeds=len(own),
        steps=own[0].steps,
        tokens=own[0].tokens,
        val_loss=statistics.fmean(losses),
        val_loss_spread=spread(losses),
        difference=statistics.fmean(differences) if pairs and own[0].arm != baseline else None,
        difference_spread=spread(differences) if own[0].arm != baseline else None,
        perplexity=math.exp(min(statistics.fmean(losses), 700.0)),
        bits_per_byte=statistics.fmean(bits) if len(bits) == len(own) else None,
        parameters=own[0].parameters,
        added_by_mixer=own[0].added_by_mixer,
        step_ms=1000 * median_seconds(own),
        step_ratio=ratio[0] / ratio[1] if ratio else None,
        train_seconds=statistics.fmean(run.train_seconds for run in own),
        peak_memory=max(memory) if memory else None,
        tokens_to_reach=statistics.fmean(f[0] for f in fractions) if everywhere else None,
        time_to_reach=statistics.fmean(f[1] for f in fractions) if everywhere else None,
        reached=len(fractions),
        paired=len(pairs),
    )


def _fractions(run: Run, plain: Run) -> tuple[float, float] | None:
    if run.arm == plain.arm:
        return 1.0, 1.0
    found = reach(run.curve, plain.val_loss)
    return None if found is None else (found[0] / plain.tokens, found[1] / plain.train_seconds)


def spread(values: Sequence[float]) -> float | None:
    """Half the range: with two or three seeds it says all there is, and promises no distribution."""
    return (max(values) - min(values)) / 2 if len(values) > 1 else None


def median_seconds(runs: Sequence[Run]) -> float:
    """The median over seeds of the median step time."""
    return statistics.median(run.step_seconds for run in runs)


# What a person reads.

DASH = "–"


@dataclass(frozen=True)
class Column:
    """A column: its heading, given the first arm's name, and its cell."""

    heading: Callable[[str], str]
    cell: Callable[[Row], str]


def _or_dash(value: float | None, form: str) -> str:
    return DASH if value is None else format(value, form)


def _plus_minus(value: float | None, around: float | None, form: str) -> str:
    if value is None:
        return DASH
    return format(value, form) + ("" if around is None else f" ± {around:.4f}")


def _fraction(value: float | None, row: Row) -> str:
    if value is not None:
        return f"{value:.2f}"
    if row.paired == 0:
        return DASH
    return "not reached" if row.reached == 0 else f"{row.reached} of {row.paired} seeds"


def human(number: float) -> str:
    """1234567 as 1.23M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


def human_time(seconds: float) -> str:
    """Seconds as 8.2 s, 12.3 min or 4.56 h."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.2f} h"


COLUMNS = (
    Column(lambda first: "val. loss", lambda r: _plus_minus(r.val_loss, r.val_loss_spread, ".4f")),
    Column(lambda first: f"against {first}", lambda r: _plus_minus(r.difference, r.difference_spread, "+.4f")),
    Column(lambda first: "perplexity", lambda r: f"{r.perplexity:.2f}"),
    Column(lambda first: "bits/byte", lambda r: _or_dash(r.bits_per_byte, ".4f")),
    Column(lambda first: "tokens to reach", lambda r: _fraction(r.tokens_to_reach, r)),
    Column(lambda first: "time to reach", lambda r: _fraction(r.time_to_reach, r)),
    Column(lambda first: "parameters", lambda r: human(r.parameters)),
    Column(lambda first: "of the mixer", lambda r: human(r.added_by_mixer)),
    Column(lambda first: "step, ms", lambda r: f"{r.step_ms:.1f}"),
    Column(lambda first: "ratio", lambda r: _or_dash(r.step_ratio, ".2f")),
    Column(lambda first: "memory, GiB", lambda r: _or_dash(r.peak_memory and r.peak_memory / 2**30, ".2f")),
    Column(lambda first: "steps", lambda r: f"{r.steps:,}"),
    Column(lambda first: "time", lambda r: human_time(r.train_seconds)),
    Column(lambda first: "seeds", lambda r: str(r.seeds)),
)


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Heading and one line a row, as strings."""
    first = rows[0].baseline.partition(":")[0] if rows else ""
    heading = ["arm", *(c.heading(first) for c in COLUMNS)]
    return [heading, *([r.arm, *(c.cell(r) for c in COLUMNS)] for r in rows)]


def verdict(rows: Sequence[Row]) -> list[str]:
    """What the table says, in a sentence an arm, claiming no more than the seeds allow."""
    sentences = []
    for row in rows:
        if row.difference is None:
            continue
        side = "below" if row.difference < 0 else "above"
        text = f"{row.arm}: {abs(row.difference):.4f} nats {side} {row.baseline}"
        if row.difference_spread is None:
            text += " with one seed, so chance is not ruled out; run two or more seeds to see the spread."
        elif abs(row.difference) <= row.difference_spread:
            text += f", but seeds move that by ± {row.difference_spread:.4f}: no difference shown."
        else:
            text += f" (± {row.difference_spread:.4f} over {row.paired} seeds)."
        sentences.append(text)
    return sentences


def footnotes(rows: Sequence[Row]) -> list[str]:
    """What the columns mean."""
    first = rows[0].baseline if rows else "the first arm"
    notes = [
        f"“to reach”: what an arm needs to come down to {first}'s final validation loss, as a fraction of what {first} needs; below 1 is better.",
        "“ratio”: step time against the first arm's; “time”: steps at the median step time, without compilation, evaluation and pauses.",
    ]
    if any(row.val_loss_spread is not None for row in rows):
        notes.insert(0, "“±”: half the range over seeds; differences are taken seed by seed.")
    return notes


def to_text(rows: Sequence[Row], width: int | None = None) -> str:
    """Plain text; in parts one below the other where one does not fit into the width."""
    return "\n".join("".join(line + "\n" for line in part) for part in _parts(rows, width))


def _parts(rows: Sequence[Row], width: int | None) -> list[list[str]]:
    """Aligned lines, the heading and a rule first; every part begins with the arm."""
    table = cells(rows)
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    parts: list[list[int]] = [[]]
    for column in range(1, len(widths)):
        needed = widths[0] + sum(2 + widths[i] for i in [*parts[-1], column])
        if width is not None and parts[-1] and needed > width:
            parts.append([])
        parts[-1].append(column)
    table.insert(1, ["─" * w for w in widths])
    return [
        ["  ".join([line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in part)]) for line in table]
        for part in parts
    ]


def print_table(rows: Sequence[Row], file: TextIO | None = None) -> None:
    """Print the table, with colours where rich is installed and the output is a terminal."""
    file = file or sys.stdout
    width = shutil.get_terminal_size((120, 24)).columns if file.isatty() else 120
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(to_text(rows, width), file=file)
        return
    console = Console(file=file)
    best = min((row.val_loss for row in rows), default=None)
    styles = ["bold", "dim", *("bold green" if row.val_loss == best else "" for row in rows)]
    for part in _parts(rows, width):
        for line, style in zip(part, styles, strict=True):
            console.print(Text(line, style=style), soft_wrap=True)
        console.print()


# What a program reads.


def to_csv(rows: Sequence[Row]) -> str:
    """One line an arm with full precision; empty where there is no value, “not reached” where a loss was not reached."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [f.name for f in fields(Row)]
    writer.writerow(names)
    for row in rows:
        values = {k: "" if v is None else v for k, v in asdict(row).items()}
        for name in ("tokens_to_reach", "time_to_reach"):
            if values[name] == "" and row.paired:
                values[name] = "not reached"
        writer.writerow([values[name] for name in names])
    return out.getvalue()


def from_csv(text: str) -> list[Row]:
    """The rows that to_csv wrote."""
    kinds = {f.name: f.type for f in fields(Row)}
    rows = []
    for line in csv.DictReader(io.StringIO(text)):
        values: dict[str, Any] = {}
        for name, value in line.items():
            kind = str(kinds[name])
            missing = "None" in kind and value in ("", "not reached")
            values[name] = None if missing else value if kind == "str" else (int if "int" in kind else float)(value)
        rows.append(Row(**values))
    return rows


def to_markdown(rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    """A Markdown table, what it says and what the columns mean."""
    if not rows:
        return "No run has finished yet.\n"
    heading, *lines = cells(rows)
    text = [_markdown_line(heading), "|" + "---|" + "---:|" * (len(heading) - 1)]
    text += [_markdown_line(line) for line in lines]
    for block in (verdict(rows), [*notes, *footnotes(rows)]):
        if block:
            text += ["", *(f"* {_markdown(sentence)}" for sentence in block)]
    return "\n".join(text) + "\n"


def _markdown_line(line: Sequence[str]) -> str:
    return "| " + " | ".join(_markdown(cell) for cell in line) + " |"


def _markdown(text: str) -> str:
    text = " ".join(text.split())
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|")):
        text = text.replace(character, entity)
    return text
