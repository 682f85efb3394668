"""Train several mechanisms on the same data in the same order, at equal tokens or equal time, and compare them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from depthmix.compare.arms import Arm
from depthmix.compare.compare_code import CodeCheck, check_code, read_acceptances
from depthmix.compare.costs import at_step_times, cost_note, doubts
from depthmix.compare.figures import NAMES, draw_figures, load
from depthmix.compare.plan import check_config, is_finished, make_plan
from depthmix.compare.report import UNFINISHED, Found, command_of, content_of
from depthmix.compare.rows import Row, Run, make_rows, read_run
from depthmix.compare.saved import (
    COMPARISON,
    STEP_TIMES,
    check_runs,
    fingerprint,
    known_step_times,
    read_json,
    recipe_changes,
)
from depthmix.compare.step_times import measured_step_times, turns_are_cheap
from depthmix.compare.table import print_table, to_csv, to_markdown
from depthmix.compare.verdict import verdict
from depthmix.config import CompareConfig, InspectConfig, TrainConfig
from depthmix.device import choose_device, release_memory
from depthmix.errors import CHECKPOINT, DISK, DIVERGED, UserError
from depthmix.files import check_above, write_text
from depthmix.ownership import check_foreign_files, check_new_folder
from depthmix.report.measure import measured, opening_text
from depthmix.report.page import load as load_plotly
from depthmix.report.page import make_page
from depthmix.runs.folder import RunFolder
from depthmix.train.events import OnStep
from depthmix.values import typed

OUTPUTS = (
    "table.csv",
    "table.md",
    "report.html",
    *(f"{stem}.{end}" for stem in NAMES.values() for end in ("svg", "png")),
)
TEMPERATURE, TOP_P = 0.8, 0.95
MAP_TOKENS = 2048  # that depth maps of the page are of
CUTTING = 3.0  # seconds that cutting connections may take, of all arms together; `depthmix report` takes its time


@dataclass
class Comparison:
    """What a comparison found so far; `save` writes all of it into its folder."""

    path: Path
    recipe: dict[str, Any]
    arms: list[Arm]
    data: str | None = None  # fingerprint of the prepared data
    step_times: list[float] | None = None  # of the arms, timed in turns
    runs: list[Run] = field(default_factory=list)
    samples: list[dict[str, str]] = field(default_factory=list)
    documents: list[dict[str, Any]] = field(default_factory=list)  # what is inside the arms' models
    notes: list[str] = field(default_factory=list)
    code: CodeCheck = field(default_factory=CodeCheck)
    finished: bool = False
    rebuilt: bool = False  # its file was lost: whether the runs are of this recipe, only they can say
    drawn: tuple[list[Run], list[str]] = ([], [])  # runs that the figures show, and why there are none
    draw_again: float = 0.0  # when drawing will have taken a twentieth of the time at most

    @property
    def labels(self) -> list[str]:
        """The arms' names."""
        return [arm.label for arm in self.arms]

    @property
    def doubts(self) -> list[str]:
        """Why the step times of the runs are not to be trusted."""
        return doubts(self.runs, self.labels)

    @property
    def costed(self) -> list[Run]:
        """The runs at the step times that count: their own or, on a busy machine, those of the arms timed in turns."""
        if self.step_times is None or not self.doubts:
            return self.runs
        return at_step_times(self.runs, dict(zip(self.labels, self.step_times, strict=True)))

    @property
    def rows(self) -> list[Row]:
        """The table, one row for each arm."""
        return make_rows(self.costed, self.labels)

    @property
    def remarks(self) -> list[str]:
        """What has to be said under the table."""
        costs = cost_note(self.doubts, self.step_times is not None, self.recipe.get("budget") == "time")
        return [*self.notes, *self.code.notes, *costs, *_time_notes(self.recipe, self.rows)]

    @property
    def report(self) -> Path:
        """Where the report lies."""
        return self.path / "report.html"

    def show(self) -> None:
        """Print the table, what it says, the samples and where the report lies."""
        rows = self.rows
        print_table(rows)
        for sentence in [*verdict(rows), *self.remarks]:
            print(sentence)
        for sample in self.samples:
            print(f"\n{sample['arm']}: {sample['prompt']}{sample['text'].removeprefix(sample['prompt'])}")
        print(f"\nTable: {self.path / 'table.md'}\nReport: {self.report}")

    def save(self, last: bool = False) -> None:
        """comparison.json, table.csv, table.md, the figures and report.html; the figures of short runs only the last time."""
        rows, notes = self.rows, self.remarks
        everything = {
            "version": 1,
            "finished": self.finished,
            "recipe": self.recipe,
            "data": self.data,
            "step_times": self.step_times,
            "rows": [asdict(row) for row in rows],
            # Paths within the folder: a comparison can be moved or published.
            "runs": [{**asdict(run), "path": _within(run.path, self.path)} for run in self.runs],
            "samples": self.samples,
            "notes": notes,
            "accepted": self.code.acceptances,
        }
        write_text(self.path / COMPARISON, json.dumps(everything, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        if rows:
            write_text(self.path / "table.csv", to_csv(rows))
            write_text(self.path / "table.md", to_markdown(rows, notes))
            costed, now = self.costed, time.monotonic()
            if self.drawn[0] != costed and (last or now >= self.draw_again):  # it takes longer than all the rest
                self.drawn = list(costed), draw_figures(costed, self.labels, self.path)
                self.draw_again = now + 20 * (time.monotonic() - now)
            notes += self.drawn[1]
        write_text(self.report, self.page(notes))

    def page(self, notes: Sequence[str]) -> str:
        """The report, with whatever there is so far."""
        found = Found(self.costed, self.labels, recipe=self.recipe, samples=self.samples, notes=list(notes))
        found.models = [(label, Path(run.path)) for label, run in self.first_runs()]
        found.warnings += [] if self.finished else [UNFINISHED]
        command = command_of("compare", CompareConfig(**self.recipe))
        return make_page(content_of(found, self.documents, command))

    def first_runs(self) -> list[tuple[str, Run]]:
        """Every arm's first finished seed."""
        firsts = ((label, next((run for run in self.runs if run.arm == label), None)) for label in self.labels)
        return [(label, run) for label, run in firsts if run is not None]


class ArmsDiverged(UserError):
    """Some runs of a comparison diverged; `comparison` holds the others."""

    def __init__(self, message: str, comparison: Comparison) -> None:
        super().__init__(message, DIVERGED)
        self.comparison = comparison


def compare(
    config: CompareConfig, *, say: Callable[[str], None] | None = None, on_step: OnStep | None = None
) -> Comparison:
    """Run what is missing of a comparison and save its tables, figures and report after every run.

    say receives a sentence for the user now and then (none given: it is printed, unless config.quiet). An arm that diverges does not stop the others; it is reported at the end.
    on_step receives every step of every run, with the arm's label.
    """
    from depthmix.train.loop import train

    config = typed("compare", config)

    def train_arm(arm: Arm, run_config: TrainConfig, label: str) -> None:
        if on_step is None:
            train(run_config, label=label)
        else:
            train(run_config, label=label, on_step=lambda event: on_step(replace(event, arm=arm.label)))

    say = say or (_silent if config.quiet else print)
    arms = check_config(config)
    comparison = open_comparison(config, arms)
    comparison.code = check_code(
        comparison.path,
        make_plan(config, arms),
        comparison.code.acceptances,
        config.accept_code,
        kernels=config.budget == "time",
    )
    if comparison.code.unrecorded:
        say(f"Warning: {comparison.code.notes[-1]}")
    if config.budget == "time":
        if not (comparison.rebuilt or (comparison.path / COMPARISON).exists()):
            comparison.save()  # so that step times are never found without the recipe they belong to
        comparison.step_times = measured_step_times(config, arms, say)
        plan = make_plan(config, arms, comparison.step_times)
        steps = {arm.label: c.steps for arm, c in plan}
        times = zip(comparison.labels, comparison.step_times, strict=True)
        say("Steps at equal time: " + ", ".join(f"{a} {steps[a]:,} ({1000 * t:.1f} ms)" for a, t in times))
    else:
        plan = make_plan(config, arms)
        comparison.step_times = known_step_times(comparison.path, arms)
    check_runs(plan, comparison.rebuilt)
    if comparison.rebuilt:
        say(f"{comparison.path / COMPARISON} was lost and is made again from the runs.")
    diverged: list[str] = []

    def take(arm: Arm, run_config: TrainConfig, label: str | None = None) -> None:
        try:
            if label is not None:  # else it has finished before
                train_arm(arm, run_config, label)
            comparison.runs.append(_checked_run(arm, run_config))
        except UserError as error:
            if error.exit_code != DIVERGED:
                raise
            diverged.append(run_config.out)
            comparison.notes.append(f"{arm.label} with seed {run_config.seed} diverged: {error}")
            say(comparison.notes[-1])

    missing = [(i, *item) for i, item in enumerate(plan, 1) if not is_finished(item[1])]
    for arm, run_config in plan:
        if is_finished(run_config):
            take(arm, run_config)
    comparison.save()
    load()  # what is loaded between two runs would count as memory of the second
    load_plotly()
    for i, arm, run_config in missing:
        release_memory(choose_device(run_config.device))  # the last run's memory is not this one's
        take(arm, run_config, f"{arm.label}, seed {run_config.seed} ({i} of {len(plan)})")
        comparison.save()
    if missing and comparison.step_times is None and comparison.doubts and turns_are_cheap(config, comparison.runs):
        comparison.step_times = measured_step_times(config, arms, say)
    comparison.samples = _make_samples(config, comparison)
    comparison.documents = _look_inside(config, comparison)
    comparison.finished = not diverged
    comparison.save(last=True)
    if diverged:
        others = (
            f"the others are in {comparison.path / 'table.md'}" if comparison.runs else "there is nothing to compare"
        )
        message = f"{len(diverged)} of {len(plan)} runs diverged ({', '.join(diverged)}); {others}"
        raise ArmsDiverged(f"{message}; lower lr or leave those arms out, with another --out", comparison)
    return comparison


def _silent(text: str) -> None:
    pass


def open_comparison(config: CompareConfig, arms: Sequence[Arm]) -> Comparison:
    """A new comparison, or the one in the folder if its recipe is the same; arms and seeds may be added to it."""
    out = Path(config.out)
    recipe = {**asdict(config), "arms": [arm.label for arm in arms]}
    comparison = Comparison(out, recipe, list(arms), fingerprint(config.data))
    check_above(out)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose a folder for the comparison", CHECKPOINT)
    runs = any(out.glob("*/seed-*"))
    saved = read_json(out / COMPARISON)
    if saved is None or not isinstance(saved.get("recipe"), dict):
        if (out / "result.json").exists() or (out / "metrics.jsonl").exists():
            raise UserError(
                f"{out} is the run folder of one training; choose another folder for the comparison", CHECKPOINT
            )
        if (out / COMPARISON).exists() and not runs:
            raise UserError(f"{out / COMPARISON} is not a comparison; delete it or choose another folder", CHECKPOINT)
        if runs and config.budget == "time" and known_step_times(out, arms) is None:
            lost = f"{COMPARISON} and {STEP_TIMES}, which say how long each was to train, are lost"
            raise UserError(f"{out} holds runs, but {lost}; delete {out} or choose another --out", CHECKPOINT)
        comparison.rebuilt = runs
        check_new_folder(out, "the comparison")
        if not runs:
            check_foreign_files(out, OUTPUTS, COMPARISON)
        return comparison
    changed = recipe_changes(saved["recipe"], recipe)
    if comparison.data and saved.get("data"):
        changed = [c for c in changed if c[0] != "data"]  # the content decides, not where it lies
        if comparison.data != saved["data"]:
            changed.append(("data", "prepared otherwise", config.data))
    if changed and not any(RunFolder(path).has_begun() for path in out.glob("*/seed-*")):
        # Nothing to lose yet, say because the first model did not fit into memory: this recipe takes the other's place.
        for name in (STEP_TIMES, COMPARISON):
            try:
                (out / name).unlink(missing_ok=True)
            except OSError as error:
                raise UserError(f"cannot remove {out / name} ({error.strerror or error})", DISK) from None
        return comparison
    if changed:
        differences = ", ".join(f"{name} (was {json.dumps(old)}, now {json.dumps(new)})" for name, old, new in changed)
        message = f"{out} holds a comparison with another recipe, which differs in {differences}"
        raise UserError(f"{message}; choose another --out, or delete the folder to start afresh", CHECKPOINT)
    comparison.samples = saved.get("samples") or []
    comparison.code.acceptances = read_acceptances(saved.get("accepted"))
    return comparison


def _checked_run(arm: Arm, config: TrainConfig) -> Run:
    run = read_run(config.out, arm.label)
    if (run.steps, run.seed) != (config.steps, config.seed):
        found = f"{run.steps} steps with seed {run.seed}, expected {config.steps} with seed {config.seed}"
        raise UserError(f"{config.out} is another run ({found}); delete it and run again", CHECKPOINT)
    return run


def _make_samples(config: CompareConfig, comparison: Comparison) -> list[dict[str, str]]:
    """What every arm's first finished seed makes of the prompt; those made before are kept."""
    if not config.prompt:
        return []
    from depthmix.train.generate import generate_text

    request = {"prompt": config.prompt, "tokens": str(config.sample_tokens)}
    samples = []
    for label, run in comparison.first_runs():
        known = {"arm": label, "run": _within(run.path, comparison.path), **request}
        old = next((s for s in comparison.samples if known.items() <= s.items()), None)
        text = (
            old["text"]
            if old
            else generate_text(Path(run.path), config.prompt, config.sample_tokens, TEMPERATURE, TOP_P, 0)
        )
        samples.append({**known, "text": text})
    return samples


def _look_inside(config: CompareConfig, comparison: Comparison) -> list[dict[str, Any]]:
    """What `depthmix inspect` finds in every arm's first finished seed, on few tokens; one that cannot be shown is a note."""
    documents = []
    firsts = comparison.first_runs()
    for label, run in firsts:
        cut = affordable(run, config.n_blocks, config.batch_size * config.seq_len, CUTTING / len(firsts))
        asked = InspectConfig(run.path, text=opening_text(run.path), tokens=MAP_TOKENS, device=config.device)
        asked.causal_tokens = cut if cut >= config.seq_len else 0  # one sequence at least
        try:
            found = measured(asked)
        except (UserError, RuntimeError) as error:  # out of memory, say: what was compared is there all the same
            reason = str(error).strip().splitlines() or [type(error).__name__]
            comparison.notes.append(f"What is inside {label} is not shown: {reason[0]}")
            continue
        documents.append({**found, "label": label})
    return documents


def affordable(run: Run, n_blocks: int, tokens: int, seconds: float) -> int:
    """On how many tokens connections can be cut in the time, by the run's own step time; tokens: of a step.

    A cut at reader r runs what comes after it once more for each of its r + 1 sources; ways and overheads come on top.
    """
    sites = 2 * n_blocks
    passes = sum((r + 1) * (sites + 1 - r) for r in range(sites + 1)) / sites
    forward = run.step_seconds / 3 / tokens
    return min(4096, int(seconds / (3 * passes * forward)))


def _time_notes(recipe: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """At equal time, say where the runs' own step times disagree with those the budget was made from."""
    if recipe["budget"] != "time" or not rows:
        return []
    notes = []
    for row in rows[1:]:
        off = row.train_seconds / rows[0].train_seconds - 1
        # A short arm cannot come closer than half a step.
        if abs(off) > max(0.05, 1 / row.steps):
            word = "longer" if off > 0 else "shorter"
            notes.append(
                f"{row.arm} trained {abs(off):.0%} {word} than {rows[0].arm}: step times moved after they were measured."
            )
    return notes


def _within(path: str, folder: Path) -> str:
    return Path(path).relative_to(folder).as_posix()
