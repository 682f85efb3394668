"""The page of a comparison, and `depthmix report`: the same page of any runs, with what their layers read from each other."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING as NONE
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from depthmix.compare.arms import Arm
from depthmix.compare.costs import at_step_times, doubts
from depthmix.compare.figures import NAMES, curve_over_seeds, draw_figures
from depthmix.compare.insides import MAP, OVER_DEPTH, draw_insides, file_names
from depthmix.compare.rows import Row, Run, make_rows, read_run
from depthmix.compare.saved import COMPARISON, fingerprint, is_time, read_json
from depthmix.compare.table import AGAINST, COSTS, VAL_LOSS, Column, cells, human, human_time, learnt, of_images
from depthmix.compare.verdict import footnotes, verdict
from depthmix.config import CompareConfig, InspectConfig, ReportConfig
from depthmix.errors import CHECKPOINT, UserError
from depthmix.files import check_above, write_text
from depthmix.mixers.defaults import chosen_options
from depthmix.ownership import check_replaceable
from depthmix.report.content import Content, Curve, Table
from depthmix.report.measure import known, measured, opening_text
from depthmix.report.page import make_page
from depthmix.runs.code_checksums import differences
from depthmix.runs.code_record import read_code
from depthmix.runs.folder import DATA_META, ENVIRONMENT, RunFolder
from depthmix.train.progress import phases

KEPT = ("depthmix", "git_commit", "python", "torch", "cuda", "device_name", "started")  # of an environment: no paths
# What may differ between runs that one table compares.
OWN = {"out", "mixer", "mixer_options", "seed", "quiet", "tensorboard", "wandb", "keep", "save_every", "log_every", "dynamics_every"}  # fmt: skip


@dataclass
class Found:
    """Runs to report on: those of the table, and where the models lie that are looked into."""

    runs: list[Run] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)  # in the order of the table
    models: list[tuple[str, Path]] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    samples: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    comparable: bool = True


def report(config: ReportConfig) -> Path:
    """Measure what is not known yet and write the page, with figures for papers beside it."""
    out = Path(config.out)
    _check(config, out)
    found = gather([Path(run) for run in config.run])
    folder = out.parent / "figures"
    for path in figure_files(found, folder):
        check_replaceable(path, "figure")
    documents = []
    with phases() as progress:
        for label, path in found.models:
            text = config.text or opening_text(path)
            asked = InspectConfig(
                run=str(path), input=config.input, data=config.data, text=text, tokens=config.tokens,
                causal_tokens=config.causal_tokens, device=config.device,
            )  # fmt: skip
            chosen = [name for name in ("text", "input", "data") if getattr(config, name)]
            documents.append({**measured(asked, progress, chosen), "label": label})
    check_replaceable(out, "page")  # again: measuring took a while
    notes = draw_figures(found.runs, found.labels, folder) or draw_insides(documents, folder)
    found.notes += notes
    page = make_page(content_of(found, documents, command_of("report", config)))
    write_text(out, page)
    return out


def figure_files(found: Found, folder: Path) -> list[Path]:
    """Return the files that a report draws into its folder of figures."""
    stems = [
        *NAMES.values(),
        OVER_DEPTH,
        *(f"{MAP}-{name}" for name in file_names([label for label, _ in found.models])),
    ]
    return [folder / f"{stem}.{ending}" for stem in stems for ending in ("svg", "png")]


def explored(runs: Sequence[str]) -> Content | None:
    """The same of runs whose texts are looked into live: with what is known of them, or takes seconds to measure."""
    try:
        found = gather([Path(run) for run in runs])
        with phases() as progress:
            documents = [
                {**(known(path) or measured(InspectConfig(run=str(path), causal_tokens=0), progress)), "label": label}
                for label, path in found.models
            ]
    except UserError:  # a checkpoint alone, or a folder that `save_pretrained` wrote: the text is all there is to show
        return None
    return content_of(found, documents, shlex.join(["depthmix", "explore", *runs]))


def _check(config: ReportConfig, out: Path) -> None:
    if not config.run:
        raise UserError("report needs at least one run: folders of `depthmix train` or `depthmix compare`")
    if config.data and config.input:
        raise UserError("give either data or input, not both")
    for name, least in (("tokens", 1), ("causal_tokens", 0)):
        if getattr(config, name) < least:
            raise UserError(f"{name} must be at least {least}, got {getattr(config, name)}")
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"out must be a file that ends in .html, got {config.out!r}")
    check_above(out)
    if out.is_dir():
        raise UserError(f"{out} is a folder; give a file that ends in .html")
    check_replaceable(out, "page")


def gather(paths: Sequence[Path]) -> Found:
    """The runs in folders of trainings and comparisons; UserError for anything else."""
    if len(paths) == 1 and (paths[0] / COMPARISON).is_file():
        return of_comparison(paths[0])
    folders: list[Path] = []
    for path in paths:
        folders += [Path(r.path) for r in of_comparison(path).runs] if (path / COMPARISON).is_file() else [path]
    seen: dict[Path, Path] = {folder.resolve(): folder for folder in folders}
    return of_trainings(list(seen.values()))


def of_comparison(path: Path) -> Found:
    """All arms of a comparison; the inside is that of the first seed each."""
    saved = read_json(path / COMPARISON)
    try:
        assert saved is not None
        recipe = dict(saved["recipe"])
        labels = [str(label) for label in recipe["arms"]]
        places = [(str(run["arm"]), path / str(run["path"])) for run in saved["runs"]]
        samples = [{key: str(s[key]) for key in ("arm", "prompt", "text")} for s in saved.get("samples") or []]
        found = Found(labels=labels, recipe=recipe, samples=samples, notes=[str(n) for n in saved.get("notes") or []])
        finished = bool(saved["finished"])
    except (AssertionError, KeyError, TypeError, ValueError):
        what = f"{path / COMPARISON} is damaged"
        raise UserError(f"{what}: run the comparison again, which makes it from its runs", CHECKPOINT) from None
    if not places:
        raise UserError(f"no run of the comparison in {path} has finished yet", CHECKPOINT)
    found.runs = [read_run(place, arm) for arm, place in places]
    times = saved.get("step_times")
    if (
        isinstance(times, list)
        and len(times) == len(labels)
        and all(map(is_time, times))
        and doubts(found.runs, labels)
    ):
        found.runs = at_step_times(found.runs, dict(zip(labels, times, strict=True)))  # as the comparison's own table
    for label in labels:
        first = next((place for arm, place in places if arm == label), None)
        found.models += [] if first is None else [(label, first)]
    found.warnings += [] if finished else [UNFINISHED]
    return found


def _label(recipe: dict[str, Any]) -> str:
    mixer, options = str(recipe.get("mixer", "")), recipe.get("mixer_options")
    return Arm(mixer, chosen_options(mixer, options if isinstance(options, dict) else {})).label


UNFINISHED = "This comparison is not finished: run the same command again and it goes on."


def of_trainings(folders: Sequence[Path]) -> Found:
    """Runs given one by one: seeds of one arm are one row, if they are of one recipe but for what OWN names."""
    opened = [RunFolder.open(folder) for folder in folders]
    recipes = [folder.read_recipe() for folder in opened]
    names = [_label(recipe) for recipe in recipes]
    differ = sorted(
        key for key in {k for r in recipes for k in r} - OWN if any(r.get(key) != recipes[0].get(key) for r in recipes)
    )
    seeds = [(name, r.get("seed")) for name, r in zip(names, recipes, strict=True)]
    data = {mark for folder in folders if (mark := fingerprint(folder, DATA_META))}
    if differ or len(data) > 1 or len(set(seeds)) < len(seeds):  # then each run is by itself
        names = [
            f"{name} ({folder})" if names.count(name) > 1 else name for name, folder in zip(names, folders, strict=True)
        ]
    found = Found(labels=list(dict.fromkeys(names)), recipe=recipes[0], comparable=not differ and len(data) < 2)
    found.warnings += _code_warnings(opened, recipes)
    if len(data) > 1 and "data" not in differ:
        found.warnings.append(
            "These runs were trained on data that was prepared differently, so their losses do not compare."
        )
    if differ:
        shown = "; ".join(f"{key}: {' and '.join(dict.fromkeys(str(r.get(key)) for r in recipes))}" for key in differ)
        found.warnings.append(
            f"These runs differ in more than their mechanism, so their losses do not compare ({shown})."
        )
    for name, folder in zip(names, opened, strict=True):
        if folder.has_result():
            found.runs.append(read_run(folder.path, name))
        else:
            found.notes.append(f"{folder.path} has not finished: the table and the curves are without it.")
        if name not in [label for label, _ in found.models]:
            found.models.append((name, folder.path))
    return found


def _code_warnings(folders: Sequence[RunFolder], recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say where runs were made by different code; of a run without a record nothing is known."""
    mixers = [str(recipe.get("mixer", "")) for recipe in recipes]
    tables = [(m, table) for m, folder in zip(mixers, folders, strict=True) for table in read_code(folder) if table]
    changed = sorted(differences(tables, kernels=False))
    advice = "a difference between them may come from that"
    return [f"These runs were made by different code ({', '.join(changed)} changed): {advice}."] if changed else []


def content_of(found: Found, documents: Sequence[Mapping[str, Any]], command: str) -> Content:
    """What the page of some runs says."""
    rows = make_rows(found.runs, found.labels)
    several = len(found.labels) > 1
    title = (
        f"{len(found.labels)} ways to mix over depth, compared" if several else f"Mixing over depth: {found.labels[0]}"
    )
    return Content(
        title=title,
        warnings=found.warnings,
        verdict=verdict(rows) if found.comparable else [],
        facts=facts(found.recipe, found.labels, rows, found.comparable),
        tables=tables(rows, found.comparable),
        notes=[*found.notes, *(_footnotes(rows, found.comparable) if rows else ["No run has finished yet."])],
        reading=how_to_read(found.recipe, rows) if several and found.comparable else [],
        curves=curves(found.runs, found.labels),
        images=of_images(rows),
        samples=found.samples,
        documents=documents,
        recipe=recipe_text(found.recipe),
        environment=environments([path for _, path in found.models]),
        command=command,
    )


def _footnotes(rows: Sequence[Row], comparable: bool) -> list[str]:
    """Those of columns that the tables have."""
    return [n for n in footnotes(rows) if "to reach" not in n or (len(rows) > 1 and comparable)]


def facts(
    recipe: Mapping[str, Any], labels: Sequence[str], rows: Sequence[Row], comparable: bool = True
) -> list[tuple[str, str]]:
    """What was compared, in a few lines; of runs that do not compare what the first one is."""
    get = recipe.get
    size = f"{get('n_blocks')} blocks, width {get('dim')}, {get('n_heads')} heads"
    if rows:
        size += f", {human(rows[0].parameters)} parameters"
    unit = "images" if of_images(rows) else "tokens"
    kind = "images" if of_images(rows) else f"sequences of {get('seq_len')} tokens" if rows else "examples"
    per_step = f"{get('batch_size')} {kind} per step, {get('optimizer')}, {get('schedule')} schedule"
    if get("budget") == "time":
        budget = (
            "equal time: each arm gets as many steps as fit into the first arm's time, and a full schedule over them"
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
    return [
        ("arms" if len(labels) > 1 else "arm", ", ".join(labels)),
        (f"data{of}", f"{get('data')}{order}"),
        (f"model{of}", size),
        (f"training{of}", per_step),
        (f"budget{of}", budget),
        (f"seeds{of}", seeds),
    ]


def tables(rows: Sequence[Row], comparable: bool = True) -> list[Table]:
    """What was learnt, and what it cost."""
    if not rows:
        return []
    best = min(row.val_loss for row in rows)
    marked = frozenset(i for i, row in enumerate(rows) if row.val_loss == best and len(rows) > 1 and comparable)
    # What counts comes first, where a narrow screen shows it.
    alone: Sequence[Column] = (VAL_LOSS, *(c for c in learnt(rows) if "to reach" not in c.heading("")))
    if len(rows) > 1 and comparable:
        alone = (AGAINST, VAL_LOSS, *learnt(rows))
    return [
        Table("", *_parted(cells(rows, alone)), best=marked),
        Table("What it cost", *_parted(cells(rows, COSTS)), best=marked),
    ]


def _parted(lines: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    return lines[0], lines[1:]


def how_to_read(recipe: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    data, each = ("images", "image") if of_images(rows) else ("text", "token")
    cost = "training time" if recipe.get("budget") == "time" else f"training {data}"
    return [
        f"Validation loss says how surprised a model is by {data} it has never seen, so lower is better, and all arms got the same amount of {cost}. "
        f"The column “against {rows[0].baseline}” is what counts: believe a difference when the sentence at the top gives an interval that leaves zero out, and remember that it speaks of one arm at a time. "
        f"“Ratio” and “time to reach” are the price: an arm that learns more from each {each} but whose steps are much slower can still be the worse choice for your time."
    ]


def curves(runs: Sequence[Run], labels: Sequence[str]) -> list[Curve]:
    """One for each arm that has runs."""
    found = []
    for label in labels:
        if own := [run for run in runs if run.arm == label]:
            tokens, mean, low, high = curve_over_seeds(own, "tokens")
            found.append(Curve(label, tokens, curve_over_seeds(own, "time")[0], mean, low, high))
    return found


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """JSON values are YAML values: these lines can be pasted into a recipe."""
    return "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in recipe.items())


def environments(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Versions and devices of runs; where they differ, all that there are."""
    seen: dict[str, list[str]] = {}
    for path in paths:
        known = read_json(path / ENVIRONMENT) or {}
        for name in KEPT:
            value = known.get(name)
            if value is not None and str(value) not in seen.setdefault(name, []):
                seen[name].append(str(value))
    times = sorted(seen.pop("started", []))
    seen["started"] = times if len(times) < 2 else [f"{times[0]} to {times[-1]}"]
    return [(name.replace("_", " "), ", ".join(values)) for name, values in seen.items() if values]


def command_of(command: str, config: ReportConfig | CompareConfig) -> str:
    """The command line that a configuration comes from, with what is not as usual."""
    words = ["depthmix", command]
    for f in fields(config):
        value = getattr(config, f.name)
        usual = f.default_factory() if f.default_factory is not NONE else f.default
        if value == usual or f.name == "quiet":
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
