"""What a study found: results.csv with a line a run, table.md, and figures."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from depthmix.compare.costs import at_step_times, cost_note, doubts
from depthmix.compare.interval import OWN_SEEDS
from depthmix.compare.pictures import draw_study
from depthmix.compare.power import POWER, detectable, seeds_needed
from depthmix.compare.recipe import Cell, Study
from depthmix.compare.records import RUNS, Records
from depthmix.compare.rows import Row, Run, make_rows
from depthmix.compare.sections import points, sections
from depthmix.compare.spread import Spread, group_of, spreads
from depthmix.compare.table import (
    COSTS,
    DASH,
    OF_A_MACHINE,
    TIME_TO_REACH,
    cells,
    learnt,
    markdown_line,
    markdown_text,
    of_images,
    plus_minus,
)
from depthmix.compare.verdict import footnotes, verdict
from depthmix.files import write_text
from depthmix.runs.code_checksums import KERNELS, changed_since

RESULTS, TABLE = "results.csv", "table.md"
NAMES = ("arm", "domain", "size", "seed", "mixer", "steps", "tokens", "val_loss", "bits_per_byte", "parameters")
NUMBERS = ("step_seconds", "seconds", "wall_seconds", "peak_memory")  # what it cost, if nothing else ran meanwhile
OTHERS = ("diverged", "device_name", "torch", "git_commit", "code", "data", "images", "accuracy", "lanes")

OF_A_BATCH = ("steps", "batch_size", "seq_len")  # of which the steps and tokens of an arm are made
UNTIMED = "A dash: that arm was not timed with the others, and its runs say nothing of what it costs."
SHARED = "Several runs shared the machine, so what they took says nothing of what an arm costs, and is left out."


def write_sheet(study: Study, records: Records, used: Sequence[dict[str, Any]], out: Path, figures: bool) -> list[str]:
    """Write everything into the folder; returns what to tell the user."""
    write_text(out / RESULTS, to_csv(study, used))
    by_cell = {cell.name: at_known_times(study, records, cell, as_runs(used, cell)) for cell in study.cells}
    asked = "power-laws" in study.sections
    laws = {domain: points(study, used, by_cell, domain) for domain in study.domains} if asked else None
    drawn, said = list[str](), list[str]()  # figures of another state are not shown
    if figures and any(by_cell.values()):
        drawn, said = draw_study(study, by_cell, train_curves(used), out, laws)
    said += _changed(records, used)
    usual = out == Path("docs") / "results" / study.name
    write_text(out / TABLE, to_markdown(study, records, used, by_cell, drawn, usual))
    return [*said, f"Table: {out / TABLE}"]


def as_runs(used: Iterable[Mapping[str, Any]], cell: Cell) -> list[Run]:
    """The runs of one cell that finished, as comparisons have them."""
    runs = []
    for record in used:
        if (record["domain"], record["size"]) != (cell.domain, cell.size) or "result" not in record:
            continue
        r = record["result"]
        counted = r["images"] if "images" in r else r["tokens"]
        parameters, per_step = r.get("parameters", {}), counted / r["steps"]
        curve = [(step * per_step, step * r["step_seconds"], loss) for step, loss in r.get("val_curve", [])][:-1]
        quartiles = r.get("step_quartiles")
        runs.append(
            Run(
                arm=record["arm"],
                seed=record["seed"],
                path="",
                steps=r["steps"],
                tokens=counted,
                val_loss=r["val_loss"],
                bits_per_byte=r.get("bits_per_byte"),
                parameters=parameters.get("total", 0),
                added_by_mixer=parameters.get("added_by_mixer", 0),
                step_seconds=r["step_seconds"],
                seconds=r["seconds"],
                peak_memory=r.get("peak_memory"),
                curve=[*curve, (counted, r["steps"] * r["step_seconds"], r["val_loss"])],
                step_quartiles=(quartiles[0], quartiles[1]) if quartiles else None,
                core_wait=r.get("core_wait"),
                accuracy=r.get("accuracy"),
                shared=record.get("lanes", 1) > 1,
            )
        )
    return runs


def at_known_times(study: Study, records: Records, cell: Cell, runs: Sequence[Run]) -> list[Run]:
    """The runs of a cell, those of arms that were timed in turns with the first one at these times, if the study asks for them."""
    lines = [r for r in records.of("step_times") if (r["domain"], r["size"]) == (cell.domain, cell.size)]
    times: dict[str, float] = lines[0]["seconds"] if lines and study.step_times else {}
    if study.labels[0] not in times:
        return list(runs)
    alone: dict[str, Any] = {"shared": False, "step_quartiles": None, "core_wait": None}
    timed = at_step_times([run for run in runs if run.arm in times], times)
    others = [replace(run, shared=True) for run in runs if run.arm not in times]  # what they took is another machine's
    return [
        *(replace(run, **alone, peak_memory=None if run.shared else run.peak_memory) for run in timed),
        *others,
    ]


def train_curves(used: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, int], list[tuple[float, float]]]:
    """{(cell, arm, seed): [(tokens, training loss)]}."""
    return {
        (" ".join(w for w in (r["domain"], r["size"]) if w), r["arm"], r["seed"]): [
            (step * r["result"].get("images", r["result"].get("tokens", 0)) / r["result"]["steps"], loss)
            for step, loss in r["result"]["train_curve"]
        ]
        for r in used
        if r.get("result", {}).get("train_curve")
    }


def to_csv(study: Study, used: Sequence[Mapping[str, Any]]) -> str:
    """A line a run in the study's order, with full precision; empty where there is no value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*NAMES, *NUMBERS, *OTHERS])
    order = {label: i for i, label in enumerate(study.labels)}
    for run in sorted(used, key=lambda r: (r["domain"], r["size"], order[r["arm"]], r["seed"])):
        result, where = run.get("result", {}), run["environment"]
        known = {**where, **run["config"], **result, **run, "parameters": result.get("parameters", {}).get("total")}
        known |= dict.fromkeys(NUMBERS) if "lanes" in run else {}
        writer.writerow(["" if (v := known.get(name)) is None else v for name in (*NAMES, *NUMBERS, *OTHERS)])
    return out.getvalue()


def to_markdown(
    study: Study,
    records: Records,
    used: Sequence[Mapping[str, Any]],
    by_cell: Mapping[str, Sequence[Run]],
    drawn: Sequence[str],
    usual: bool = True,
) -> str:
    """The question, the table of losses, costs and verdicts by cell, what the seeds can show, and how it was made.

    usual: whether it is in the folder where a study finds its results.
    """
    by_chance = spreads(study, by_cell)
    rows = {
        name: [_with_interval(row, by_chance[name]) for row in make_rows(runs, study.labels)]
        for name, runs in by_cell.items()
    }
    text = [f"# {study.name}", "", markdown_text(study.question), ""]
    diverged = {(r["arm"], " ".join(w for w in (r["domain"], r["size"]) if w)) for r in used if "diverged" in r}
    if not any(rows.values()) and not diverged:
        text.append("No run has finished yet.")
    else:
        text += [
            *_main_table(study, rows, diverged),
            "",
            *_bullets(_legend(study, rows)),
            *(f"\n![{n}]({n}.png)" for n in drawn),
        ]
        for name, own in rows.items():
            text += ["", *_cell(name, own, by_cell[name], _timed(study, records, name), by_chance[name].freedom > 0)]
        text += sections(study, used, by_cell)
    if shown := [*power_lines(study), *_measured(study, by_chance)]:
        text += ["", "## What the seeds can show", "", *_bullets(shown)]
    text += ["", "## How this was made", "", *_bullets(_made(study, records, used, usual))]
    return "\n".join(text) + "\n"


def _with_interval(row: Row, by_chance: Spread) -> Row:
    """The row with the interval that all arms' spread gives its difference, unless its own seeds are enough, or nothing is known."""
    half = by_chance.half_width(row.paired)
    own = row.difference is None or half is None or row.paired >= OWN_SEEDS
    return row if own else replace(row, difference_interval=half)


def _main_table(study: Study, rows: Mapping[str, Sequence[Row]], diverged: set[tuple[str, str]]) -> list[str]:
    """A row an arm, whether it has finished or not."""
    first = study.labels[0]
    heading = ["arm"]
    for name in rows:
        of = f"{name}: " if name else ""
        heading += [f"{of}val. loss", f"{of}against {first}", "seeds"]
    lines = [markdown_line(heading), "|---|" + "---:|" * (len(heading) - 1)]
    for arm in study.arms:
        cells_ = [arm.label]
        for name, own in rows.items():
            row = next((row for row in own if row.arm == arm.label), None)
            none = "diverged" if (arm.label, name) in diverged else DASH
            cells_ += [none, DASH, "0"] if row is None else [f"{row.val_loss:.4f}", _against(row), _seeds(row)]
        lines.append(markdown_line(cells_))
    return lines


def _against(row: Row) -> str:
    return plus_minus(row.difference, row.difference_interval, sign="+z")


def _seeds(row: Row) -> str:
    """How many there are, and of how many of them the difference is, where the first arm lacks some."""
    return str(row.seeds) if row.difference is None or row.paired == row.seeds else f"{row.seeds}, {row.paired} of both"


def _legend(study: Study, rows: Mapping[str, Sequence[Row]]) -> list[str]:
    budget = "the same steps" if study.budget == "tokens" else "the steps that fit into the first arm's time"
    own = {arm.label: [key for key in OF_A_BATCH if key in arm.settings] for arm in study.arms}
    if others := [f"{label} ({', '.join(keys)})" for label, keys in own.items() if keys]:
        budget += f", but for what arms set themselves: {', '.join(others)}"
    each = "image" if any(map(of_images, rows.values())) else "token"
    enough = any(r.paired >= OWN_SEEDS and r.difference is not None for own in rows.values() for r in own)
    alone = f", and from {OWN_SEEDS} seeds on with their own" if enough else ""
    return [
        f"Loss: nats per {each} on the validation split at the end, mean over seeds; every arm makes {budget}. Differences are taken seed by seed, ± half the 95% interval of their mean, with the spread that all arms have together on these data{alone} (depthmix/compare/spread.py).",
    ]


def _cell(name: str, rows: Sequence[Row], runs: Sequence[Run], timed: Sequence[str], together: bool) -> list[str]:
    """Costs and verdicts of one cell; timed: how its step times were measured, if not with the runs; together: see verdict."""
    if not rows:
        return [f"## {name or 'Costs'}", "", "No run has finished."]
    several, busy = all(len(run.curve) > 1 for run in runs), {run.arm for run in runs if run.shared}
    shared = bool(busy) and not timed  # else arms that were timed have costs
    found = learnt(rows)
    columns = [c for c in found if several or "to reach" not in c.heading("")]
    columns += [c for c in COSTS if not (shared and c in OF_A_MACHINE)]
    if shared:
        columns = [c for c in columns if c is not TIME_TO_REACH]
    heading, *lines = cells(rows, columns)
    of_a_machine = [i for i, c in enumerate(columns, start=1) if c in (*OF_A_MACHINE, TIME_TO_REACH)]
    lines = [[DASH if line[0] in busy and i in of_a_machine else text for i, text in enumerate(line)] for line in lines]
    notes = [
        n
        for n in footnotes(rows)
        if "±" not in n and (several or "to reach" not in n) and not (shared and "ratio" in n)
    ]  # of these columns
    remarks = (
        [SHARED]
        if shared
        else [*timed, *[UNTIMED] * bool(busy)] or cost_note(doubts(runs, [row.arm for row in rows]), False)
    )
    table = [markdown_line(heading), "|---|" + "---:|" * (len(heading) - 1), *map(markdown_line, lines)]
    verdicts = _bullets(verdict(rows, together))
    return [
        f"## {name or 'Verdicts and costs'}",
        "",
        *verdicts,
        *[""] * bool(verdicts),
        *table,
        "",
        *_bullets([*remarks, *notes]),
    ]


def _timed(study: Study, records: Records, name: str) -> list[str]:
    """Where the step times of a cell are from, if they were measured in turns."""
    for line in records.of("step_times") if study.step_times else ():
        if " ".join(word for word in (line["domain"], line["size"]) if word) == name:
            where = line.get("environment", {})
            return [
                f"Step times were measured in turns on {where.get('device_name')}, apart from the runs (commit {str(where.get('git_commit'))[:12]})."
            ]
    return []


def power_lines(study: Study) -> list[str]:
    """How many paired seeds the difference of interest needs, and what those of the study can show."""
    lines, difference = [], study.power.get("difference")
    seeds = len(study.seeds)
    for spread in study.power["spread"]:
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


def _paired(seeds: int | str) -> str:
    return f"{seeds} paired seed{'s' * (seeds != 1)}"


def _shows(spread: float, seeds: int, freedom: int | None = None) -> str:
    least = detectable(spread, seeds, freedom)
    return (
        "one seed shows nothing" if least is None else f"{seeds} seed{'s show' if seeds > 1 else ' shows'} {least:.3f}"
    )


def _measured(study: Study, found: Mapping[str, Spread]) -> list[str]:
    """The same with the spread that intervals of few seeds have, which the seeds of all arms tell."""
    lines, difference = [], study.power.get("difference")
    known = [cell for cell in study.cells if found[cell.name].freedom]
    groups = {(*group_of(study, cell), cell.size if cell.seeds else ""): cell for cell in known}  # seeds of its own
    for (domain, *sizes), cell in groups.items():
        own, name = found[cell.name], " ".join(dict.fromkeys(word for word in (domain, *sizes) if word))
        line = f"Measured here{', ' * bool(name)}{name}: {own.deviation:.4f}, by all arms together"
        if difference is not None:
            needed = seeds_needed(difference, own.deviation, own.freedom)
            line += f"; a difference of {difference:g} needs {_paired('too many' if needed is None else needed)}"
        lines.append(f"{line}; {_shows(own.deviation, len(cell.seeds or study.seeds), own.freedom)}.")
    return lines


def _made(study: Study, records: Records, used: Sequence[Mapping[str, Any]], usual: bool) -> list[str]:
    """The commands, where it ran, and what the reader has to know of the code."""
    planned = sum(len(seeds) for cell in study.cells for seeds in study.runs_at(cell).values())
    data = " ".join(f"{name}=FOLDER" if name else "FOLDER" for name in study.domains)
    where = "" if usual else " --out FOLDER"
    lines = [
        f"Runs: `depthmix study {study.called} --data {data}{where}`, in pieces with `--minutes`; {len(used)} of {planned} are done ({RUNS}, {RESULTS}).",
        f"This page and its figures: `depthmix study {study.called} --report{where}`.",
    ]
    places = {(r["environment"].get("device_name"), r["environment"].get("torch")) for r in used}
    lines += [
        f"{n} runs on {name}, torch {torch}."
        for name, torch in sorted(places, key=str)
        if (n := _count(used, name, torch))
    ]
    lines += [
        f"{', '.join(w for w in (r['arm'] + ' with seed ' + str(r['seed']), r['domain'], r['size']) if w)} diverged: {r['diverged']}."
        for r in used
        if "diverged" in r
    ]
    kernels = {(m, records.code(dict(r)).get(f"{KERNELS}{m}")) for r in used for m in [r["config"].get("mixer")]}
    twice = sorted({str(m) for m, _ in kernels if sum(m == other for other, _ in kernels) > 1})
    if twice:
        lines.append(
            f"Runs of {', '.join(twice)} were made with more than one version of the kernels, which differ in speed and rounding."
        )
    for reason, files in _accepted(records).items():
        lines.append(f"Results of different code are mixed ({', '.join(sorted(files))}), accepted because: {reason}.")
    lines += _changed(records, used)
    left_out = len({(r["arm"], r["domain"], r["size"], r["seed"]) for r in records.runs}) - len(used)
    if left_out:
        lines.append(
            f"{left_out} runs in {RUNS} are of arms, seeds, sizes or data that the study does not name, and are left out."
        )
    return [*lines, *study.notes]


def _changed(records: Records, used: Iterable[Mapping[str, Any]]) -> list[str]:
    return changed_since([(run, records.code(dict(run))) for run in used], records.of("accept"))


def _accepted(records: Records) -> dict[str, set[str]]:
    """Files of which versions are mixed, by reason; one that begins with an earlier one, which went on later, stands for both."""
    reasons = [line["reason"] for line in records.of("accept")]
    files: dict[str, set[str]] = {}
    for line in records.of("accept"):
        last = max((reason for reason in reasons if reason.startswith(line["reason"])), key=len)
        files.setdefault(last, set()).update(line["files"])
    return files


def _count(used: Sequence[Mapping[str, Any]], name: Any, torch: Any) -> int:
    where = [(r["environment"].get("device_name"), r["environment"].get("torch")) for r in used]
    return where.count((name, torch))


def _bullets(sentences: Iterable[str]) -> list[str]:
    return [f"* {markdown_text(sentence)}" for sentence in sentences]
