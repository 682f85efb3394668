"""The table of a comparison: table.md for people, table.csv for programs, and what the terminal shows."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from depthmix.compare.columns import (
    AGAINST,
    COSTS,
    DASH,
    OF_A_MACHINE,
    TIME_TO_REACH,
    bullets,
    cells,
    learnt,
    markdown_table,
    markdown_text,
    of_images,
    print_table,
)
from depthmix.compare.interval import OWN_SEEDS
from depthmix.compare.power import POWER, detectable, seeds_needed
from depthmix.compare.recipe import Cell, Recipe
from depthmix.compare.records import RUNS
from depthmix.compare.results import Results
from depthmix.compare.rows import Row
from depthmix.compare.sections import sections
from depthmix.compare.spread import Spread, group_of
from depthmix.compare.verdict import footnotes, summary, verdict
from depthmix.mixers import rule_title

TABLE, CSV = "table.md", "table.csv"
# The steps and tokens of an arm depend on these.
OF_A_BATCH = ("steps", "batch_size", "seq_len")


def show(results: Results) -> None:
    """Print the table of every cell, its verdict, what must be known to read it, and the samples."""
    for cell in results.recipe.cells:
        rows = results.rows[cell.name]
        if rows:
            print(f"\n{cell.name}" * bool(cell.name))
            print_table(rows)
            for sentence in [*verdict(rows, results.spreads[cell.name].freedom > 0), *results.cost_notes(cell)]:
                print(sentence)
    for sentence in results.notes():
        print(sentence)
    for sample in results.samples:
        print(f"\n{sample['arm']}: {sample['prompt']}{sample['text'].removeprefix(sample['prompt'])}")


def conclusion(results: Results) -> str:
    """Return one sentence on the best arm of the first cell that has results."""
    recipe = results.recipe
    # A label of its own already says what an arm is.
    titles = {arm.label: rule_title(arm.arm.name) for arm in recipe.arms if arm.label == arm.arm.label}
    for cell in recipe.cells:
        if rows := results.rows[cell.name]:
            timed = results.are_costs_trusted(cell)
            return summary(rows, cell.name, recipe.config.budget == "time", timed, titles)
    return "No run has finished yet."


def to_csv(results: Results) -> str:
    """Return one line per arm and cell with full precision; empty where there is no value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [f.name for f in fields(Row)]
    writer.writerow([*names, "domain", "size"])
    for cell in results.recipe.cells:
        for row in results.rows[cell.name]:
            values = {k: "" if v is None else v for k, v in asdict(row).items()}
            for name in ("tokens_to_reach", "time_to_reach"):
                if values[name] == "" and row.paired:
                    values[name] = "not reached"
            writer.writerow([*(values[name] for name in names), cell.domain, cell.size])
    return out.getvalue()


def to_markdown(results: Results, drawn: Sequence[str] = ()) -> str:
    """Return the question, losses, verdicts and costs by cell, what the seeds can show, and how the table was made.

    Args:
        results: The results.
        drawn: Names of the figures to show.
    """
    recipe, rows = results.recipe, results.rows
    text = [f"# {recipe.name}", ""]
    if recipe.config.question:
        text += [markdown_text(recipe.config.question), ""]
    if not any(rows.values()) and not results.diverged:
        text.append("No run has finished yet.")
    else:
        text += [*_losses(results), "", *bullets(_legend(results)), *(f"\n![{name}]({name}.png)" for name in drawn)]
        for cell in recipe.cells:
            text += ["", *_cell(results, cell)]
        text += sections(recipe, results.used)
    if shown := [*power_lines(recipe), *_measured(recipe, results.spreads)]:
        text += ["", "## What the seeds can show", "", *bullets(shown)]
    text += ["", "## How this was made", "", *bullets(_how_made(results))]
    return "\n".join(text) + "\n"


def _losses(results: Results) -> list[str]:
    """Return the main table: a line per arm, whether it has finished or not."""
    first, rows = results.recipe.labels[0], results.rows
    diverged = {(r["arm"], " ".join(w for w in (r["domain"], r["size"]) if w)) for r in results.diverged}
    heading = ["arm"]
    for name in rows:
        of = f"{name}: " if name else ""
        heading += [f"{of}val. loss", f"{of}against {first}", "seeds"]
    lines = []
    for label in results.recipe.labels:
        line = [label]
        for name, by_arm in rows.items():
            row = next((row for row in by_arm if row.arm == label), None)
            no_loss = "diverged" if (label, name) in diverged else DASH
            line += [no_loss, DASH, "0"] if row is None else [f"{row.val_loss:.4f}", AGAINST.cell(row), _seeds(row)]
        lines.append(line)
    return markdown_table(heading, lines)


def _seeds(row: Row) -> str:
    """Return the number of seeds, and how many of them have a pair where the baseline lacks some."""
    return str(row.seeds) if row.difference is None or row.paired == row.seeds else f"{row.seeds}, {row.paired} of both"


def _legend(results: Results) -> list[str]:
    recipe, rows = results.recipe, results.rows
    budget = "the same steps" if recipe.config.budget == "tokens" else "the steps that fit into the baseline's time"
    set_by_arm = {arm.label: [key for key in OF_A_BATCH if key in arm.settings] for arm in recipe.arms}
    if others := [f"{label} ({', '.join(keys)})" for label, keys in set_by_arm.items() if keys]:
        budget += f", but for what arms set themselves: {', '.join(others)}"
    each = "image" if any(map(of_images, rows.values())) else "token"
    enough = any(r.paired >= OWN_SEEDS and r.difference is not None for by_cell in rows.values() for r in by_cell)
    alone = f", and from {OWN_SEEDS} seeds on with their own" if enough else ""
    return [
        f"Loss: nats (natural-log loss units) per {each} on the validation split at the end, mean over seeds; every arm takes {budget}. Differences are taken seed by seed, ± half the 95% interval of their mean, with the spread that all arms have together on these data{alone} (depthmix/compare/spread.py).",
    ]


def _cell(results: Results, cell: Cell) -> list[str]:
    """Return verdicts and costs of one cell."""
    rows, runs = results.rows[cell.name], results.runs[cell.name]
    if not rows:
        return [f"## {cell.name or 'Verdicts and costs'}", "", "No run has finished."]
    columns, several = cost_columns(results, cell)
    heading, *lines = cells(rows, columns)
    busy = {run.arm for run in runs if run.shared}
    of_a_machine = [i for i, column in enumerate(columns, start=1) if column in (*OF_A_MACHINE, TIME_TO_REACH)]
    lines = [[DASH if line[0] in busy and i in of_a_machine else text for i, text in enumerate(line)] for line in lines]
    timed = any(column in columns for column in OF_A_MACHINE)
    # Footnotes of the columns that are shown. The main table explains ±.
    notes = [
        n for n in footnotes(rows) if "±" not in n and (several or "to reach" not in n) and (timed or "ratio" not in n)
    ]
    verdicts = bullets(verdict(rows, results.spreads[cell.name].freedom > 0))
    return [
        f"## {cell.name or 'Verdicts and costs'}",
        "",
        *verdicts,
        *[""] * bool(verdicts),
        *markdown_table(heading, lines),
        "",
        *bullets([*results.cost_notes(cell), *notes]),
    ]


def cost_columns(results: Results, cell: Cell) -> tuple[list[Any], bool]:
    """Return the columns of a cell's second table, and whether curves tell when a loss was reached."""
    rows, runs = results.rows[cell.name], results.runs[cell.name]
    several = all(len(run.curve) > 1 for run in runs)
    shared = any(run.shared for run in runs) and not results.timing(cell)
    columns = [c for c in learnt(rows) if several or "to reach" not in c.heading("")]
    columns += [c for c in COSTS if not (shared and c in OF_A_MACHINE)]
    return [c for c in columns if not (shared and c is TIME_TO_REACH)], several


def power_lines(recipe: Recipe) -> list[str]:
    """Say how many paired seeds the difference of interest needs, and what the recipe's seeds can show."""
    lines, difference = [], recipe.config.power.get("difference")
    seeds = len(recipe.config.seeds)
    for spread in spreads_assumed(recipe):
        begin = f"If a paired difference varies by {spread:g} nats from seed to seed (standard deviation)"
        if difference is not None:
            needed = seeds_needed(difference, spread)
            words = "more seeds than anyone runs" if needed is None else _paired(needed)
            lines.append(
                f"{begin}, one of {difference:g} needs {words} to be shown with a chance of {POWER:.0%}; {_shows(spread, seeds)}."
            )
        else:
            lines.append(f"{begin}: {_shows(spread, seeds)}.")
    return lines


def spreads_assumed(recipe: Recipe) -> list[float]:
    """Return the standard deviations of a paired difference that the recipe assumes."""
    spread = recipe.config.power.get("spread", [])
    return spread if isinstance(spread, list) else [spread]


def _paired(seeds: int | str) -> str:
    return f"{seeds} paired seed{'s' * (seeds != 1)}"


def _shows(spread: float, seeds: int, freedom: int | None = None) -> str:
    least = detectable(spread, seeds, freedom)
    shown = f"{seeds} seed{'s show' if seeds > 1 else ' shows'}"
    return "one seed shows nothing" if least is None else f"{shown} {least:.3f}"


def _measured(recipe: Recipe, spreads: Mapping[str, Spread]) -> list[str]:
    """Return the lines of `power_lines` for the measured spread of all arms."""
    lines, difference = [], recipe.config.power.get("difference")
    known = [cell for cell in recipe.cells if spreads[cell.name].freedom]
    # Sizes with seeds of their own are listed apart.
    groups = {(*group_of(recipe, cell), cell.size if cell.seeds else ""): cell for cell in known}
    for (domain, *sizes), cell in groups.items():
        spread, name = spreads[cell.name], " ".join(dict.fromkeys(word for word in (domain, *sizes) if word))
        line = f"Measured here{', ' * bool(name)}{name}: {spread.deviation:.4f}, by all arms together"
        if difference is not None:
            needed = seeds_needed(difference, spread.deviation, spread.freedom)
            line += f"; a difference of {difference:g} needs {_paired('too many' if needed is None else needed)}"
        lines.append(f"{line}; {_shows(spread.deviation, len(cell.seeds or recipe.config.seeds), spread.freedom)}.")
    return lines


def _how_made(results: Results) -> list[str]:
    """Return how many runs are done, where they ran, and what the reader has to know of their code."""
    recipe, used = results.recipe, results.used
    lines = [f"{len(used)} of {len(recipe.run_keys)} runs are done ({RUNS})."]
    places = [(r["environment"].get("device_name"), r["environment"].get("torch")) for r in used]
    lines += [f"{places.count(p)} runs on {p[0]}, torch {p[1]}." for p in sorted(set(places), key=str)]
    lines += results.notes()
    left_out = len({(r["arm"], r["domain"], r["size"], r["seed"]) for r in results.records.runs}) - len(used)
    if left_out:
        lines.append(
            f"{left_out} runs in {RUNS} are of arms, seeds, sizes or data that the recipe does not name, and are left out."
        )
    return lines
