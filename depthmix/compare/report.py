"""The report: a page on a comparison, or on any runs (`depthmix report`), with the depth maps of their models."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING as NONE
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthmix.compare.arms import Arm
from depthmix.compare.columns import (
    AGAINST,
    COSTS,
    TIME_TO_REACH,
    TIMES,
    VAL_LOSS,
    Column,
    cells,
    human,
    human_time,
    learnt,
    of_images,
)
from depthmix.compare.costs import busy_arms
from depthmix.compare.figures import CURVES, curve_over_seeds, draw_curves
from depthmix.compare.recipe import check_recipe
from depthmix.compare.records import RUNS, read_records
from depthmix.compare.results import Results
from depthmix.compare.rows import Row, Run, make_rows, read_run
from depthmix.compare.table import conclusion
from depthmix.compare.verdict import footnotes, headline, verdict
from depthmix.config import CompareConfig, InspectConfig, ReportConfig
from depthmix.errors import CHECKPOINT, UserError
from depthmix.files import check_above, find_json_object, write_text
from depthmix.mixers import list_mixers, rule_title
from depthmix.mixers.defaults import chosen_options
from depthmix.ownership import check_replaceable
from depthmix.report.content import BETTER, BUSY, WORSE, Content, Curve, Effect, Table
from depthmix.report.depth_figures import MAP, OVER_DEPTH, draw_insides, file_names
from depthmix.report.measure import known, measured, opening_text
from depthmix.report.page import make_page
from depthmix.runs.code_checksums import differences
from depthmix.runs.code_record import read_code
from depthmix.runs.folder import DATA_META, ENVIRONMENT, RunFolder
from depthmix.train.progress import phases
from depthmix.values import build_config, check_at_least

if TYPE_CHECKING:
    from depthmix.compare.engine import Comparison

# The recipe of a comparison, in its folder.
RECIPE = "comparison.yaml"
# Fields of an environment that the page shows: none with paths.
KEPT = ("depthmix", "git_commit", "python", "torch", "cuda", "device_name", "started")
# Options that may differ between runs that one table compares.
MAY_DIFFER = {"out", "mixer", "mixer_options", "seed", "quiet", "tensorboard", "wandb", "keep", "save_every", "log_every", "dynamics_every"}  # fmt: skip
# Shorter trainings than this say little about long ones (lab/LOG.md).
TOKENS_PER_PARAMETER = 15
UNFINISHED = "This comparison is not finished: run the same command again and it goes on."


@dataclass
class ReportedRuns:
    """Runs to report on: those of the tables, by cell, and the folders of the models to look into."""

    runs: dict[str, list[Run]] = field(default_factory=dict)
    rows: dict[str, list[Row]] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)  # in the order of the table
    models: list[tuple[str, Path]] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    comparable: bool = True
    pooled: bool = False  # the intervals use the spread of all arms
    conclusion: str = ""  # of a comparison: the best arm, in plain words


def report(config: ReportConfig) -> Path:
    """Measure what is not known yet, and write the page with figures for papers beside it. Returns the page."""
    out = Path(config.out)
    _check(config, out)
    reported = gather([Path(run) for run in config.run])
    folder = out.parent / "figures"
    for path in figure_files(reported, folder):
        check_replaceable(path, "figure")
    documents = []
    with phases() as progress:
        for label, path in reported.models:
            text = config.text or opening_text(path)
            inspection = InspectConfig(
                run=str(path), input=config.input, data=config.data, text=text, tokens=config.tokens,
                causal_tokens=config.causal_tokens, device=config.device,
            )  # fmt: skip
            chosen = [name for name in ("text", "input", "data") if getattr(config, name)]
            documents.append({**measured(inspection, progress, chosen), "label": label})
    check_replaceable(out, "page")  # again: measuring took a while
    runs = next(iter(reported.runs.values()), []) if len(reported.runs) == 1 else []
    reported.notes += draw_curves(runs, reported.labels, folder) or draw_insides(documents, folder)
    write_text(out, make_page(content_of(reported, documents, command_of("report", config))))
    return out


def write_page(comparison: Comparison) -> None:
    """Write the report of a comparison, with whatever there is so far."""
    reported = of_results(comparison.results)
    reported.notes += [*comparison.not_drawn, *comparison.not_inspected]
    config = comparison.recipe.config
    nested = any(isinstance(arm, dict) for arm in config.arms) or config.sizes
    command = f"depthmix compare {comparison.path / RECIPE}" if nested else command_of("compare", config)
    write_text(comparison.report, make_page(content_of(reported, comparison.documents, command)))


def figure_files(reported: ReportedRuns, folder: Path) -> list[Path]:
    """Return the files that a report draws into its folder of figures."""
    maps = [f"{MAP}-{name}" for name in file_names([label for label, _ in reported.models])]
    return [folder / f"{stem}.{ending}" for stem in (*CURVES.values(), OVER_DEPTH, *maps) for ending in ("svg", "png")]


def explored(runs: Sequence[str]) -> Content | None:
    """Return the content of a page on runs whose texts are explored live; None where there is only a checkpoint.

    Measurements are those known, or the ones that take seconds.
    """
    try:
        reported = gather([Path(run) for run in runs])
        with phases() as progress:
            documents = [
                {**(known(path) or measured(InspectConfig(run=str(path), causal_tokens=0), progress)), "label": label}
                for label, path in reported.models
            ]
    except UserError:  # a checkpoint alone, or a folder that `save_pretrained` wrote
        return None
    return content_of(reported, documents, shlex.join(["depthmix", "explore", *runs]))


def _check(config: ReportConfig, out: Path) -> None:
    if not config.run:
        raise UserError("report needs at least one run: folders of `depthmix train` or `depthmix compare`")
    if config.data and config.input:
        raise UserError("give either data or input, not both")
    check_at_least(config, 1, "tokens")
    check_at_least(config, 0, "causal_tokens")
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"out must be a file that ends in .html, got {config.out!r}")
    check_above(out)
    if out.is_dir():
        raise UserError(f"{out} is a folder; give a file that ends in .html")
    check_replaceable(out, "page")


def gather(paths: Sequence[Path]) -> ReportedRuns:
    """Return the runs in folders of trainings and comparisons. Raises UserError for any other folder."""
    if len(paths) == 1 and (paths[0] / RECIPE).is_file():
        return of_results(_finished(paths[0]))
    folders: list[Path] = []
    for path in paths:
        if (path / RECIPE).is_file():
            folders += [Path(run.path) for runs in _finished(path).runs.values() for run in runs if run.path]
        else:
            folders.append(path)
    # Each folder once, under the name that it was given last.
    by_place: dict[Path, Path] = {folder.resolve(): folder for folder in folders}
    return of_trainings(list(by_place.values()))


def _finished(path: Path) -> Results:
    """Read the results of a comparison from its folder. Raises UserError if no run has finished."""
    config = build_config("report", CompareConfig, {"recipe": str(path / RECIPE)})
    config.out = str(path)
    results = Results(check_recipe(config), read_records([path / RUNS]), path)
    if not results.used:
        raise UserError(f"no run of the comparison in {path} has finished yet", CHECKPOINT)
    return results


def of_results(results: Results) -> ReportedRuns:
    """Return what a page shows of a comparison's results, with the model of each arm's first seed."""
    return ReportedRuns(
        runs={name: runs for name, runs in results.runs.items() if runs},
        rows={name: rows for name, rows in results.rows.items() if rows},
        labels=results.recipe.labels,
        models=[(label, Path(run.path)) for label, run in results.first_runs() if run.path],
        recipe=dict(vars(results.recipe.config)),
        samples=results.samples,
        notes=[*results.notes(), *(note for cell in results.recipe.cells for note in results.cost_notes(cell))],
        warnings=[] if len(results.used) == len(results.recipe.run_keys) else [UNFINISHED],
        pooled=any(spread.freedom for spread in results.spreads.values()),
        conclusion=conclusion(results),
    )


def _label(recipe: dict[str, Any]) -> str:
    mixer, options = str(recipe.get("mixer", "")), recipe.get("mixer_options")
    return Arm(mixer, chosen_options(mixer, options if isinstance(options, dict) else {})).label


def of_trainings(folders: Sequence[Path]) -> ReportedRuns:
    """Return runs given one by one. Seeds of one arm share a row if their recipes differ only in what MAY_DIFFER names."""
    opened = [RunFolder.open(folder) for folder in folders]
    recipes = [folder.read_recipe() for folder in opened]
    names = [_label(recipe) for recipe in recipes]
    differ = sorted(
        key
        for key in {k for r in recipes for k in r} - MAY_DIFFER
        if any(r.get(key) != recipes[0].get(key) for r in recipes)
    )
    seeds = [(name, r.get("seed")) for name, r in zip(names, recipes, strict=True)]
    data = {meta for folder in opened if (meta := folder.read_file(DATA_META))}
    if differ or len(data) > 1 or len(set(seeds)) < len(seeds):  # then each run is by itself
        names = [
            f"{name} ({folder})" if names.count(name) > 1 else name for name, folder in zip(names, folders, strict=True)
        ]
    reported = ReportedRuns(
        labels=list(dict.fromkeys(names)), recipe=recipes[0], comparable=not differ and len(data) < 2
    )
    reported.warnings += _code_warnings(opened, recipes)
    if len(data) > 1 and "data" not in differ:
        reported.warnings.append(
            "These runs were trained on data that was prepared differently, so their losses do not compare."
        )
    if differ:
        shown = "; ".join(f"{key}: {' and '.join(dict.fromkeys(str(r.get(key)) for r in recipes))}" for key in differ)
        reported.warnings.append(
            f"These runs differ in more than their rule, so their losses do not compare ({shown})."
        )
    runs = []
    for name, folder in zip(names, opened, strict=True):
        if folder.has_result():
            runs.append(read_run(folder.path, name))
        else:
            reported.notes.append(f"{folder.path} has not finished: the table and the curves are without it.")
        if name not in [label for label, _ in reported.models]:
            reported.models.append((name, folder.path))
    if runs:
        reported.runs, reported.rows = {"": runs}, {"": make_rows(runs, reported.labels)}
    return reported


def _code_warnings(folders: Sequence[RunFolder], recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say where runs were made by different code, as far as it is recorded."""
    mixers = [str(recipe.get("mixer", "")) for recipe in recipes]
    tables = [(m, table) for m, folder in zip(mixers, folders, strict=True) for table in read_code(folder) if table]
    changed = sorted(differences(tables, kernels=False))
    advice = "a difference between them may come from that"
    return [f"These runs were made by different code ({', '.join(changed)} changed): {advice}."] if changed else []


def content_of(reported: ReportedRuns, documents: Sequence[Mapping[str, Any]], command: str) -> Content:
    """Return the content of a page on some runs."""
    rows = next(iter(reported.rows.values()), [])
    several = len(reported.labels) > 1
    compared = several and reported.comparable and bool(rows)
    finding = (
        f"{len(reported.labels)} ways to mix over depth" if several else f"Mixing over depth: {reported.labels[0]}"
    )
    # The first of several domains and sizes is the one at the top.
    cell = next(iter(reported.rows)) if len(reported.rows) > 1 else ""
    if compared:
        said = headline(rows, reported.recipe.get("budget") == "time", titles_of(reported.labels))
        finding = f"{cell}: {said}" if cell else said
    busy = {name: busy_arms(runs) for name, runs in reported.runs.items()}
    runs = next(iter(reported.runs.values())) if len(reported.runs) == 1 else []
    notes_by_cell = [_footnotes(rows, reported.comparable) for rows in reported.rows.values()]
    explained = list(dict.fromkeys(note for notes in notes_by_cell for note in notes))
    return Content(
        title=finding,
        subtitle=subtitle(reported.recipe, rows),
        badge=badge(rows) if compared else "",
        baseline=rows[0].baseline if rows else "",
        effects=effects(rows, next(iter(busy.values()), set())) if compared else [],
        cell=cell,
        warnings=reported.warnings,
        verdict=_verdicts(reported) if reported.comparable else [],
        facts=facts(reported.recipe, reported.labels, rows, reported.comparable),
        tables=[
            table
            for name, rows in reported.rows.items()
            for table in tables(rows, reported.comparable, name, busy.get(name, set()))
        ],
        notes=[*reported.notes, *(explained if rows else ["No run has finished yet."])],
        reading=how_to_read(reported.recipe, rows) if several and reported.comparable else [],
        curves=curves(runs, reported.labels),
        images=of_images(rows),
        samples=reported.samples,
        documents=documents,
        recipe=recipe_text(reported.recipe),
        environment=environments([path for _, path in reported.models]),
        command=command,
    )


def _verdicts(reported: ReportedRuns) -> list[str]:
    """Return the comparison in plain words, and below it a sentence for each arm if there are several."""
    by_arm = [
        f"{name}: {sentence}" if name else sentence
        for name, rows in reported.rows.items()
        for sentence in verdict(rows, reported.pooled)
    ]
    return [reported.conclusion, *(by_arm if len(by_arm) > 1 else [])] if reported.conclusion and by_arm else by_arm


def _footnotes(rows: Sequence[Row], comparable: bool) -> list[str]:
    """Return the footnotes of the columns that the tables have."""
    return [n for n in footnotes(rows) if "to reach" not in n or (len(rows) > 1 and comparable)]


def facts(
    recipe: Mapping[str, Any], labels: Sequence[str], rows: Sequence[Row], comparable: bool = True
) -> list[tuple[str, str]]:
    """Describe what was compared in a few lines. For runs that do not compare, describe the first one."""
    get = recipe.get
    size = f"{get('n_blocks')} blocks, width {get('dim')}, {get('n_heads')} heads"
    if rows:
        size += f", {human(rows[0].parameters)} parameters"
    unit = "images" if of_images(rows) else "tokens"
    kind = "images" if of_images(rows) else f"sequences of {get('seq_len')} tokens" if rows else "examples"
    per_step = f"{get('batch_size')} {kind} per step, {get('optimizer')}, {get('schedule')} schedule"
    if get("budget") == "time":
        budget = (
            "equal time: each arm gets as many steps as fit into the baseline's time, and a full schedule over them"
        )
        budget += f" ({human_time(rows[0].train_seconds)})" if rows else ""
    else:
        budget = f"{get('steps')} steps"
        if len(labels) > 1 and comparable:
            budget = f"equal {unit}: every arm makes {budget}"
        budget += f" ({human(rows[0].tokens)} {unit})" if rows else ""
    seeds = ", ".join(str(seed) for seed in get("seeds", [get("seed")]))
    order = ", in the same order for every arm" if len(labels) > 1 and comparable else ""
    of = "" if comparable else " of the first"
    data = get("data") or ", ".join(f"{name}: {folder}" for name, folder in (get("domains") or {}).items())
    question = " ".join(str(get("question") or "").split())
    return [
        *([("question", question)] if question else []),
        ("arms" if len(labels) > 1 else "arm", ", ".join(labels)),
        (f"data{of}", f"{data}{order}"),
        (f"model{of}", size),
        (f"training{of}", per_step),
        (f"budget{of}", budget),
        (f"seeds{of}", seeds),
    ]


def titles_of(labels: Sequence[str]) -> dict[str, str]:
    """Return what the labels stand for in words, for rules of which only one arm is compared."""
    names = [label.partition(":")[0] for label in labels]
    known = {name: rule_title(name) for name in set(names) & set(list_mixers())}
    return {label: known[n] for label, n in zip(labels, names, strict=True) if n in known and names.count(n) == 1}


def subtitle(recipe: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Say in one line how large the models are and how long they trained."""
    if not rows:
        return ""
    first, unit = rows[0], "images" if of_images(rows) else "tokens"
    others = len(rows) - 1
    count = f"{others} rule{'s' * (others > 1)} against {first.baseline}, " if others else ""
    length = "" if unit == "images" else f", {first.tokens / first.parameters:.2g} per parameter"
    data = str(recipe.get("data") or "several data sets")
    return f"{count}{human(first.parameters)} parameters, {human(first.tokens)} {unit} of {data}{length}."


def badge(rows: Sequence[Row]) -> str:
    """Return a warning of a few words where one seed or a short training makes a result a lead."""
    if all(row.difference_interval is None for row in rows):
        return "1 seed: a lead, not evidence"
    short = not of_images(rows) and rows[0].tokens < TOKENS_PER_PARAMETER * rows[0].parameters
    return "short training: a lead, not evidence" if short else ""


def effects(rows: Sequence[Row], busy: Collection[str]) -> list[Effect]:
    """Return the difference and the price of every arm but the baseline, the lowest loss first."""
    titles = titles_of([row.arm for row in rows])
    found = [
        Effect(
            label=row.arm,
            difference=row.difference,
            interval=row.difference_interval,
            step_ratio=row.step_ratio,
            busy=row.arm in busy or row.baseline in busy,
            title=titles.get(row.arm, ""),
        )
        for row in rows
        if row.difference is not None
    ]
    return sorted(found, key=lambda effect: effect.difference)


def tables(
    rows: Sequence[Row], comparable: bool = True, cell: str = "", busy: Collection[str] = frozenset()
) -> list[Table]:
    """Return two tables: what was learnt, and what it cost.

    Args:
        rows: One row per arm, the baseline first.
        comparable: Whether the losses compare.
        cell: Name of the domain and size, if there are several.
        busy: Arms whose step times were taken on a busy machine.
    """
    if not rows:
        return []
    # What counts comes first, where a narrow screen shows it.
    alone: Sequence[Column] = (VAL_LOSS, *(c for c in learnt(rows) if "to reach" not in c.heading("")))
    if len(rows) > 1 and comparable:
        alone = (AGAINST, VAL_LOSS, *learnt(rows))
    made = []
    for title, columns in ((cell, alone), (f"What it cost{', ' * bool(cell)}{cell}", COSTS)):
        heading, *lines = cells(rows, columns)
        made.append(Table(title, heading, lines, _marks(rows, columns, busy)))
    return made


def _marks(rows: Sequence[Row], columns: Sequence[Column], busy: Collection[str]) -> dict[tuple[int, int], str]:
    """Mark the differences whose interval excludes zero, and the times of a busy machine."""
    marks: dict[tuple[int, int], str] = {}
    for i, row in enumerate(rows):
        for j, column in enumerate(columns, start=1):
            half, difference = row.difference_interval, row.difference
            if column is AGAINST and half is not None and difference is not None and abs(difference) > half:
                marks[i, j] = BETTER if difference < 0 else WORSE
            # A ratio is as doubtful as the baseline's time.
            elif column in (*TIMES, TIME_TO_REACH) and (row.arm in busy or row.baseline in busy):
                marks[i, j] = BUSY
    return marks


def how_to_read(recipe: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Explain the tables to a reader who is new to them."""
    if not rows:
        return []
    data, each = ("images", "image") if of_images(rows) else ("text", "token")
    cost = "training time" if recipe.get("budget") == "time" else f"training {data}"
    return [
        f"Validation loss says how surprised a model is by {data} it has never seen, so lower is better, and all arms got the same amount of {cost}. "
        f"The column “against {rows[0].baseline}” is what counts: believe a difference when the sentence at the top gives an interval that excludes zero, and remember that it holds for one arm at a time. "
        f"“Ratio” and “time to reach” are the price: an arm that learns more from each {each} but whose steps are much slower can still be the worse choice for your time."
    ]


def curves(runs: Sequence[Run], labels: Sequence[str]) -> list[Curve]:
    """Return one curve per arm that has runs."""
    drawn = []
    for label in labels:
        if of_arm := [run for run in runs if run.arm == label]:
            tokens, mean, low, high = curve_over_seeds(of_arm, "tokens")
            drawn.append(Curve(label, tokens, curve_over_seeds(of_arm, "time")[0], mean, low, high))
    return drawn


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """Return lines that can be pasted into a recipe: JSON values are YAML values."""
    return "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in recipe.items())


def environments(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Return versions and devices of runs; where they differ, all of them."""
    by_name: dict[str, list[str]] = {}
    for path in paths:
        environment = find_json_object(path / ENVIRONMENT)
        for name in KEPT:
            value = environment.get(name)
            if value is not None and str(value) not in by_name.setdefault(name, []):
                by_name[name].append(str(value))
    times = sorted(by_name.pop("started", []))
    by_name["started"] = times if len(times) < 2 else [f"{times[0]} to {times[-1]}"]
    return [(name.replace("_", " "), ", ".join(values)) for name, values in by_name.items() if values]


def command_of(command: str, config: ReportConfig | CompareConfig) -> str:
    """Return the command line of a configuration, with the options that are not at their defaults."""
    words = ["depthmix", command]
    for f in fields(config):
        value = getattr(config, f.name)
        usual = f.default_factory() if f.default_factory is not NONE else f.default
        if value == usual or f.name == "quiet" or not f.metadata["flag"]:
            continue
        flag = "--" + f.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, dict):
            words += [flag, *(f"{k}={v}" for k, v in value.items())]
        elif isinstance(value, list):
            words += [] if f.metadata["first"] else [flag]
            words += [
                ",".join(f"{k}={v}" for k, v in item.items()) if isinstance(item, dict) else str(item) for item in value
            ]
        else:
            words += [flag, str(value)]
    return shlex.join(words)
