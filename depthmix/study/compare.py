"""Train several mechanisms on the same data in the same order, at equal tokens or equal time, and compare them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from depthmix.config import CompareConfig, TrainConfig
from depthmix.data.dataset import TokenData
from depthmix.device import choose_device, release_memory
from depthmix.errors import CHECKPOINT, DISK, DIVERGED, UserError
from depthmix.files import check_above, write_text
from depthmix.mixers.base import DEFAULT_MIXER
from depthmix.runs.folder import RunFolder
from depthmix.study.arms import Arm, check_arms, parse_arms
from depthmix.study.figures import draw_figures, load
from depthmix.study.report import continuation, make_report
from depthmix.study.rows import Row, Run, make_rows, read_run
from depthmix.study.table import print_table, to_csv, to_markdown
from depthmix.study.verdict import verdict

# What may change between two calls for one folder, since no number in the table depends on it.
FREE = {
    "out",
    "quiet",
    "tensorboard",
    "wandb",
    "keep",
    "save_every",
    "on_nan",
    "prompt",
    "sample_tokens",
    "mixer",
    "mixer_options",
    "seed",
}
TEMPERATURE, TOP_P = 0.8, 0.95
COMPARISON, STEP_TIMES = "comparison.json", "step_times.json"


@dataclass
class Comparison:
    """What a comparison found so far; `save` writes all of it into its folder."""

    path: Path
    recipe: dict[str, Any]
    arms: list[Arm]
    data: str | None = None  # fingerprint of the prepared data
    step_times: list[float] | None = None
    runs: list[Run] = field(default_factory=list)
    samples: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    finished: bool = False
    drawn: tuple[int, list[str]] = (0, [])  # runs that the figures show, and why there are none

    @property
    def rows(self) -> list[Row]:
        """The table, one row an arm."""
        return make_rows(self.runs, [arm.label for arm in self.arms])

    @property
    def report(self) -> Path:
        """Where the report lies."""
        return self.path / "report.html"

    def show(self) -> None:
        """Print the table, what it says, the samples and where the report lies."""
        rows = self.rows
        print_table(rows)
        for sentence in [*verdict(rows), *self.notes, *_time_notes(self.recipe, rows)]:
            print(sentence)
        for sample in self.samples:
            print(f"\n{sample['arm']}: {sample['prompt']}{continuation(sample)}")
        print(f"\nTable: {self.path / 'table.md'}\nReport: {self.report}")

    def save(self) -> None:
        """comparison.json, table.csv, table.md, the figures and report.html."""
        rows = self.rows
        notes = [*self.notes, *_time_notes(self.recipe, rows)]
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
        }
        write_text(self.path / COMPARISON, json.dumps(everything, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        if rows:
            write_text(self.path / "table.csv", to_csv(rows))
            write_text(self.path / "table.md", to_markdown(rows, notes))
            if self.drawn[0] != len(self.runs):  # drawing takes longer than all the rest
                self.drawn = len(self.runs), draw_figures(self.runs, [arm.label for arm in self.arms], self.path)
            notes += self.drawn[1]
        page = make_report(self.recipe, rows, self.samples, notes, self.path, self.finished)
        write_text(self.report, page)


def compare(config: CompareConfig, *, say: Callable[[str], None] | None = None) -> Comparison:
    """Run what is missing of a comparison and save its tables, figures and report after every run.

    say receives a sentence for the user now and then (none given: it is printed, unless config.quiet). An arm that diverges does not stop the others; it is reported at the end.
    """
    from depthmix.train.loop import train

    say = say or (_silent if config.quiet else print)
    arms = check_config(config)
    comparison = open_comparison(config, arms)
    if config.budget == "time":
        if not (comparison.path / COMPARISON).exists():
            comparison.save()  # so that step times are never found without the recipe they belong to
        comparison.step_times = measured_step_times(config, arms, say)
    plan = make_plan(config, arms, comparison.step_times)
    comparison.runs = _finished_runs(plan)
    comparison.save()
    diverged = []
    load()  # what is loaded between two runs would count as memory of the second
    for i, (arm, run_config) in enumerate(plan):
        if _is_finished(run_config):
            continue
        try:
            release_memory(choose_device(run_config.device))  # the last run's memory is not this one's
            train(run_config, label=f"{arm.label}, seed {run_config.seed} ({i + 1} of {len(plan)})")
            comparison.runs.append(_checked_run(arm, run_config))
        except UserError as error:
            if error.exit_code != DIVERGED:
                raise
            diverged.append(run_config.out)
            comparison.notes.append(f"{arm.label} with seed {run_config.seed} diverged: {error}")
            say(comparison.notes[-1])
        comparison.save()
    comparison.samples = _make_samples(config, comparison, plan)
    comparison.finished = not diverged
    comparison.save()
    if diverged:
        message = f"{len(diverged)} of {len(plan)} runs diverged ({', '.join(diverged)})"
        raise UserError(
            f"{message}; the others are in {comparison.path / 'table.md'} and {comparison.report}", DIVERGED
        )
    return comparison


def _silent(text: str) -> None:
    pass


def check_config(config: CompareConfig) -> list[Arm]:
    """The arms, or a UserError for what can be known to be wrong before anything runs."""
    if not config.out:
        raise UserError("compare needs --out, the folder for its runs and its report")
    if config.mixer != DEFAULT_MIXER or config.mixer_options:
        raise UserError("compare takes its mechanisms from --arms, not from --mixer and --mixer-options")
    if config.budget not in ("tokens", "time"):
        raise UserError(f"budget must be tokens or time, got {config.budget!r}")
    if not config.seeds or any(isinstance(seed, bool) or not isinstance(seed, int) for seed in config.seeds):
        raise UserError(f"seeds must be a list of at least one integer, got {config.seeds!r}")
    if len(set(config.seeds)) < len(config.seeds):
        raise UserError(f"every seed counts once, got {config.seeds!r}")
    for name in ("steps", "eval_every", "save_every", "sample_tokens"):
        if getattr(config, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(config, name)}")
    arms = parse_arms(config.arms)
    check_arms(arms, config.dim, config.n_blocks)
    _check_plan(make_plan(config, arms))
    return arms


def _check_plan(plan: Sequence[tuple[Arm, TrainConfig]]) -> None:
    """What would stop a run is said before anything is written, or the folder would refuse the corrected command."""
    from depthmix.train.loop import check_config, check_run

    data = None
    for _, config in plan:
        check_config(config)
        if not _is_finished(config):  # those that are do not need the data any more
            data = data or TokenData.open(config.data)
            check_run(config, data)


def make_plan(
    config: CompareConfig, arms: Sequence[Arm], step_times: Sequence[float] | None = None
) -> list[tuple[Arm, TrainConfig]]:
    """Every run in its order: seed by seed, arm by arm. With step times every arm gets the steps that fit into the first's time."""
    budgets = [config.steps for _ in arms]
    if step_times is not None:
        # The hair added keeps 3 * 0.1 / 0.3 from becoming no step at all.
        budgets = [max(1, math.floor(config.steps * step_times[0] / t * (1 + 1e-9))) for t in step_times]
    return [
        (arm, run_config(config, arm, seed, steps))
        for seed in config.seeds
        for arm, steps in zip(arms, budgets, strict=True)
    ]


def run_config(config: CompareConfig, arm: Arm, seed: int, steps: int) -> TrainConfig:
    """One arm's training: the comparison's own, with a full schedule over its own number of steps.

    Warm-up and the intervals of evaluation and saving shrink with the steps: as many points on every curve, and as long between two saves.
    """
    values = {f.name: getattr(config, f.name) for f in fields(TrainConfig)}
    share = steps / config.steps
    values |= {
        "out": str(Path(config.out) / arm.folder / f"seed-{seed}"),
        "mixer": arm.name,
        "mixer_options": dict(arm.options),
        "seed": seed,
        "steps": steps,
        "warmup": min(max(1, round(config.warmup * share)), steps - 1)
        if share != 1 and config.warmup > 0
        else config.warmup,
        "eval_every": max(1, round(config.eval_every * share)),
        "save_every": max(1, round(config.save_every * share)),
    }
    return TrainConfig(**values)


def measured_step_times(config: CompareConfig, arms: Sequence[Arm], say: Callable[[str], None]) -> list[float]:
    """Seconds a step for every arm: from step_times.json, or measured now and saved, so that a resume has the same budgets."""
    path = Path(config.out) / STEP_TIMES
    saved = _read_json(path) or {}
    first = arms[0].label
    missing = [arm for arm in arms if not _is_time(saved.get(arm.label))]
    if missing:
        from depthmix.train.loop import measure_step_times

        say("Measuring step times …")
        # The first arm is measured again with arms that came later, and they are scaled to its saved time.
        group = missing if missing[0].label == first else [arms[0], *missing]
        times = measure_step_times([run_config(config, arm, config.seeds[0], config.steps) for arm in group])
        if len(times) != len(group) or not all(map(_is_time, times)):
            raise UserError(f"step times could not be measured: got {times!r}", CHECKPOINT)
        scale = saved.get(first, times[0]) / times[0]
        saved = {**{arm.label: t * scale for arm, t in zip(group, times, strict=True)}, **saved}
        write_text(path, json.dumps(saved, indent=1) + "\n")
    times = [saved[arm.label] for arm in arms]
    steps = {arm.label: c.steps for arm, c in make_plan(config, arms, times)}
    say(
        "Steps at equal time: "
        + ", ".join(f"{a.label} {steps[a.label]:,} ({1000 * t:.1f} ms)" for a, t in zip(arms, times, strict=True))
    )
    return times


def open_comparison(config: CompareConfig, arms: Sequence[Arm]) -> Comparison:
    """A new comparison, or the one in the folder if its recipe is the same; arms and seeds may be added to it."""
    out = Path(config.out)
    recipe = {**asdict(config), "arms": [arm.label for arm in arms]}
    comparison = Comparison(out, recipe, list(arms), _fingerprint(config.data))
    check_above(out)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; choose a folder for the comparison", CHECKPOINT)
    saved = _read_json(out / COMPARISON)
    if saved is None:
        if (out / "result.json").exists() or (out / "metrics.jsonl").exists():
            raise UserError(
                f"{out} is the run folder of one training; choose another folder for the comparison", CHECKPOINT
            )
        if any(out.glob("*/seed-*")):
            raise UserError(f"{out} holds runs but no {COMPARISON}; delete it or choose another folder", CHECKPOINT)
        return comparison
    if not isinstance(saved.get("recipe"), dict):
        raise UserError(f"{out / COMPARISON} is not a comparison; delete it or choose another folder", CHECKPOINT)
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
    return comparison


def recipe_changes(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(field, old, new) for what makes runs incomparable; added arms and seeds do not."""
    changed = []
    for name in new:
        if name in FREE or name not in old or old[name] == new[name]:
            continue
        grown = (name == "arms" and new[name][: len(old[name])] == old[name]) or (
            name == "seeds" and set(old[name]) <= set(new[name])
        )
        if not grown:
            changed.append((name, old[name], new[name]))
    return changed


def _finished_runs(plan: Sequence[tuple[Arm, TrainConfig]]) -> list[Run]:
    return [_checked_run(arm, config) for arm, config in plan if _is_finished(config)]


def _is_finished(config: TrainConfig) -> bool:
    return (Path(config.out) / "result.json").exists()


def _checked_run(arm: Arm, config: TrainConfig) -> Run:
    run = read_run(config.out, arm.label)
    if (run.steps, run.seed) != (config.steps, config.seed):
        found = f"{run.steps} steps with seed {run.seed}, expected {config.steps} with seed {config.seed}"
        raise UserError(f"{config.out} is another run ({found}); delete it and run again", CHECKPOINT)
    return run


def _make_samples(
    config: CompareConfig, comparison: Comparison, plan: Sequence[tuple[Arm, TrainConfig]]
) -> list[dict[str, str]]:
    """What every arm's first finished seed makes of the prompt; those made before are kept."""
    if not config.prompt:
        return []
    from depthmix.train.generate import generate_text

    request = {"prompt": config.prompt, "tokens": str(config.sample_tokens)}
    samples = []
    for arm in comparison.arms:
        run = next((run for run in comparison.runs if run.arm == arm.label), None)
        if run is None:
            continue
        known = {"arm": arm.label, "run": _within(run.path, comparison.path), **request}
        old = next((s for s in comparison.samples if known.items() <= s.items()), None)
        text = (
            old["text"]
            if old
            else generate_text(Path(run.path), config.prompt, config.sample_tokens, TEMPERATURE, TOP_P, 0)
        )
        samples.append({**known, "text": text})
    return samples


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


def _fingerprint(data: str) -> str | None:
    try:
        return hashlib.sha256((Path(data) / "meta.json").read_bytes()).hexdigest()
    except OSError:
        return None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); delete it or choose another folder", CHECKPOINT) from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not what depthmix wrote; delete it or choose another folder", CHECKPOINT)
    return value


def _within(path: str, folder: Path) -> str:
    return Path(path).relative_to(folder).as_posix()


def _is_time(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value) and value > 0
