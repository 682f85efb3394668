"""The engine of `depthmix compare`: run what is missing of a comparison, and write its table, figures and report.

    recipe ──> planned runs ──> one run at a time ──> runs.jsonl ──> table.md, table.csv, figures, report.html

Every run is written to runs.jsonl when it ends, so a kill loses at most the run in progress. A run whose model is saved resumes
from its last checkpoint.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from depthmix.compare.checks import check_code, check_planned, check_records, data_checksum
from depthmix.compare.costs import doubts
from depthmix.compare.figures import FIGURES, draw_figures
from depthmix.compare.inside import look_inside, make_samples
from depthmix.compare.plan import Deadline, PlannedRun, key_of, plan_runs, predict_seconds
from depthmix.compare.recipe import Cell, Key, Recipe, RecipeArm, check_only, check_recipe, is_chosen
from depthmix.compare.records import RUNS, Records, read_records, write_records
from depthmix.compare.report import RECIPE, write_page
from depthmix.compare.results import Results
from depthmix.compare.rows import Row, Run
from depthmix.compare.runs import Outcome, describe_error, make_run
from depthmix.compare.table import CSV, TABLE, conclusion, power_lines, show, to_csv, to_markdown
from depthmix.compare.workers import Workers, threads_of_a_run
from depthmix.config import CompareConfig, TrainConfig
from depthmix.data.images import ImageData
from depthmix.data.prepared import open_data
from depthmix.device import choose_device, release_memory
from depthmix.errors import CHECKPOINT, DIVERGED, INTERNAL, INTERRUPTED, UserError
from depthmix.files import check_above, check_writable, write_text
from depthmix.ownership import check_foreign_files, check_new_folder
from depthmix.report.figures import load
from depthmix.runs.environment import environment
from depthmix.train.events import OnStep
from depthmix.values import typed

REPORT = "report.html"
# Options of one call, which the recipe in the folder leaves out.
OF_A_CALL = {"only", "jobs", "minutes", "report", "results", "accept_code", "quiet"}
# Seconds that measuring an arm's step times may take: a model is built three times, for a second of steps each.
MEASURING = 20.0
# Seconds between two looks at signals while runs are under way in other processes.
A_MOMENT = 0.2
# Seconds that measuring takes on any machine.
AT_LEAST = 4.0
# Fields of a run's environment that are kept: none with paths.
KEPT = ("depthmix", "git_commit", "python", "torch", "cuda", "device", "device_name")


def compare(config: CompareConfig, *, on_step: OnStep | None = None, begun: float | None = None) -> Comparison:
    """Run what is missing of a comparison, as far as the time limit allows, and write its results.

    Args:
        config: The comparison.
        on_step: Called with a `StepEvent` after every step of a run whose model is saved.
        begun: Start of the time limit, by time.monotonic(); by default now.

    Returns:
        The comparison with all its results.

    Raises:
        UserError: Something in the recipe, the data, the folder or the results cannot be used, or a signal stopped the
            comparison.
        ArmsDiverged: An arm has no result, since all its runs diverged.
    """
    config = typed("compare", config)
    comparison = Comparison(check_recipe(config))
    comparison.open()
    if config.report:
        comparison.check_results([], {}, None)
        comparison.write()
    else:
        _Runner(comparison, on_step, time.monotonic() if begun is None else begun).run()
    return comparison


class ArmsDiverged(UserError):
    """All runs of an arm diverged. `comparison` holds the other arms."""

    def __init__(self, message: str, comparison: Comparison) -> None:
        super().__init__(message, DIVERGED)
        self.comparison = comparison


class Comparison:
    """A comparison's folder: its recipe, its records, and what is written about them."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.path = Path(recipe.config.out)
        self.records = Records()
        self.documents: list[dict[str, Any]] = []
        self.drawn: list[str] = []
        self.not_drawn: list[str] = []
        self.not_inspected: list[str] = []
        self.unfinished = True

    def say(self, text: str) -> None:
        """Print a sentence for the user, unless the comparison is quiet."""
        if not self.recipe.config.quiet:
            print(text, flush=True)

    @property
    def results(self) -> Results:
        """Results so far."""
        return Results(self.recipe, self.records, self.path)

    @property
    def rows(self) -> list[Row]:
        """Rows of the first cell, one per arm."""
        return self.results.rows[self.recipe.cells[0].name]

    @property
    def runs(self) -> list[Run]:
        """Finished runs of all cells, at the step times that count."""
        return [run for runs in self.results.runs.values() for run in runs]

    @property
    def notes(self) -> list[str]:
        """Sentences that must be known to read the table."""
        results = self.results
        return [
            *results.notes(),
            *(note for cell in self.recipe.cells for note in results.cost_notes(cell)),
            *self.not_drawn,
            *self.not_inspected,
        ]

    @property
    def report(self) -> Path:
        """File of the report."""
        return self.path / REPORT

    def open(self) -> None:
        """Read the results in the folder and in further files.

        Raises:
            UserError: The folder is something else, or a file of results is missing or damaged.
        """
        config, out = self.recipe.config, self.path
        check_only(self.recipe)
        check_above(out)
        if out.exists() and not out.is_dir():
            raise UserError(f"{out} is a file; choose a folder for the comparison", CHECKPOINT)
        check_new_folder(out, "the comparison")
        if (out / "result.json").exists() or (out / "metrics.jsonl").exists():
            raise UserError(
                f"{out} is the run folder of one training; choose another folder for the comparison", CHECKPOINT
            )
        if not (out / RUNS).exists() and not (out / RECIPE).exists():
            figures = (f"{stem}.{ending}" for stem in FIGURES for ending in ("svg", "png"))
            check_foreign_files(out, (TABLE, CSV, REPORT, *figures), RUNS)
        if missing := next((name for name in config.results if not Path(name).is_file()), None):
            raise UserError(f"compare: there is no file of results {missing}", CHECKPOINT)
        self.records = read_records(dict.fromkeys([out / RUNS, *map(Path, config.results)]))

    def planned(self) -> list[PlannedRun]:
        """Return all runs in their order; at equal time those whose steps are known."""
        times: dict[tuple[str, str], dict[str, float]] = {}
        for line in self.records.of("step_times"):
            times.setdefault((line["domain"], line["size"]), line["seconds"])
        return plan_runs(self.recipe, times)

    def check_results(
        self, missing: Sequence[PlannedRun], checksums: dict[str, str], device: str | None, images: Iterable[str] = ()
    ) -> None:
        """Refuse results that may not share the table with each other or with the missing runs."""
        used, config = self.results.used, self.recipe.config
        check_records(used, self.planned(), checksums, device)
        check_code(self.records, used, missing, config.accept_code, config.budget == "time", images)

    def save(self) -> None:
        """Write the records and the table, as after every run."""
        if self.records.lines:
            write_records(self.path, self.records)
        results = self.results
        if results.used:
            write_text(self.path / TABLE, to_markdown(results, self.drawn))
            write_text(self.path / CSV, to_csv(results))

    def write(self, figures: bool = True) -> None:
        """Write everything: records, figures, table and report."""
        results = self.results
        if not results.used:
            self.say(f"No run has finished yet: there are no results in {self.path}.")
            return
        if figures:
            self.drawn, self.not_drawn = draw_figures(results, self.path)
        self.save()
        self._write_recipe()
        write_page(self)
        for sentence in results.changed_rules():
            self.say(sentence)

    def _write_recipe(self) -> None:
        """Write the recipe without the options of this call, with paths relative to the folder."""
        import yaml

        defaults = CompareConfig()
        lines = {name: value for name, value in asdict(self.recipe.config).items() if value != getattr(defaults, name)}
        lines = {name: value for name, value in lines.items() if name not in OF_A_CALL}
        if "modules" in lines:
            lines["modules"] = [os.path.relpath(module, self.path) for module in lines["modules"]]
        write_text(self.path / RECIPE, yaml.safe_dump(lines, sort_keys=False, allow_unicode=True))

    def show(self) -> None:
        """Print the table, its verdict, the samples, and at last one sentence and the path of the report."""
        results = self.results
        if not results.used:
            return
        show(results)
        for note in (*self.not_drawn, *self.not_inspected):
            print(note)
        print(f"\nTable: {self.path / TABLE}\n{conclusion(results)}\nReport: {self.report}")


class _Runner:
    """Runner of one call: it opens the data once, checks everything that is missing, and runs it."""

    def __init__(self, comparison: Comparison, on_step: OnStep | None, begun: float) -> None:
        self.comparison, self.recipe, self.config = comparison, comparison.recipe, comparison.recipe.config
        self.on_step, self.say = on_step, comparison.say
        self.chosen = check_only(self.recipe)
        self.deadline = Deadline(self.config.minutes, begun)
        self.failed: dict[str, str] = {}  # errors by arm
        self.started: set[Key] = set()
        self.stopped_measuring = False
        # Set in `run`, once everything that needs no device or data is checked.
        self.queue: list[PlannedRun] = []
        self.requested: set[Key] = set()
        self.total = 0

    @property
    def records(self) -> Records:
        return self.comparison.records

    def run(self) -> None:
        """Run everything that is missing and fits into the time, then write the results."""
        from depthmix.train.compiled import compiled_once
        from depthmix.train.signals import StopSignal

        self._open_data()
        comparison = self.comparison
        with StopSignal() as signal, compiled_once(self._compiles()), threads_of_a_run(self.config.jobs):
            if self.config.budget == "time":
                self._measure(signal)
            missing = self._missing()
            comparison.check_results(missing, self.checksums, self.device.type, self.images)
            check_planned(missing, self.data)
            self.total = len(self.recipe.run_keys)
            if self.config.question:
                for line in (self.config.question, *power_lines(self.recipe)):
                    self.say(" ".join(line.split()))
            self.say(f"{self._done()} of {self.total} runs are done.")
            self.queue = self._chosen(missing)
            self.requested = {run.key for run in self.queue}
            if self.queue:
                check_writable(comparison.path)  # before a run is made that could not be kept
                load()  # the memory that matplotlib takes would count as that of the second run
            try:
                self._run_queue(signal)
                if not self._chosen(self._missing()) and not signal.requested and self._wants_step_times():
                    self._measure(signal)
            except BaseException:
                if comparison.results.used:
                    comparison.write(figures=False)
                raise
        comparison.unfinished = self._done() < self.total
        if not signal.requested:
            make_samples(comparison)
            look_inside(comparison)
        comparison.write(figures=not signal.requested)
        self._end(signal)

    def _end(self, signal: Any) -> None:
        """Say how much is done, or raise the error that the call ends with."""
        progress = f"{self._done()} of {self.total} runs are done"
        again = f"{progress}; the same command goes on from there"
        if signal.requested and (self._done() < self.total or self.stopped_measuring):
            raise UserError(f"stopped by {signal.name}: {again}", INTERRUPTED)
        if self.failed:
            what = "; ".join(f"{arm}: {error}" for arm, error in self.failed.items())
            arms = "1 arm" if len(self.failed) == 1 else f"{len(self.failed)} arms"
            raise UserError(f"{arms} could not be run ({what}); {again}", INTERNAL)
        used = self.comparison.results.used
        finished = {record["arm"] for record in used if "diverged" not in record}
        diverged = [record["arm"] for record in used if "diverged" in record]
        if arms_lost := [label for label in self.recipe.labels if label in diverged and label not in finished]:
            remains = f"the table is {self.comparison.path / TABLE}"
            if len(arms_lost) == len(self.recipe.arms):
                remains = "there is nothing to compare"
            message = f"{len(diverged)} of {self.total} runs diverged, all of {', '.join(arms_lost)}; {remains}"
            raise ArmsDiverged(f"{message}; lower lr or leave those arms out, with another --out", self.comparison)
        self.say(f"{progress}." if self._done() == self.total else f"{again}.")

    def _open_data(self) -> None:
        """Open the data of every chosen domain. Data of finished runs may be gone."""
        self.device = choose_device(self.config.device)
        if self.config.jobs > 1 and self.device.type != "cpu":
            raise UserError(f"jobs: concurrent runs share the CPU, and this comparison runs on {self.device.type}")
        machine = environment(self.config.device)
        self.environment = {key: machine[key] for key in KEPT}
        self.data, done = {}, {key_of(record) for record in self.records.runs}
        for name, folder in self.recipe.domains.items():
            chosen = {key for key in self.recipe.run_keys if key[1] == name and is_chosen(self.chosen, key)}
            if chosen - done or (chosen and Path(folder, "meta.json").exists()):
                self.data[name] = open_data(folder)
        self.checksums = {name: data_checksum(data) for name, data in self.data.items()}
        self.images = [name for name, data in self.data.items() if isinstance(data, ImageData)]
        if self.images and self.config.prompt:
            raise UserError(f"prompt is for text, and {self.recipe.domains[self.images[0]]} holds images: leave it out")

    def _done(self) -> int:
        return len(self.comparison.results.used)

    def _missing(self) -> list[PlannedRun]:
        """Return the planned runs without a record, of data that is open."""
        done = {key_of(record) for record in self.records.runs}
        return [run for run in self.comparison.planned() if run.key not in done and run.cell.domain in self.data]

    def _chosen(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        return [run for run in runs if is_chosen(self.chosen, run.key)]

    def _compiles(self) -> bool:
        by_part = [vars(self.config), *(c.settings for c in self.recipe.cells), *(a.settings for a in self.recipe.arms)]
        return any(settings.get("compile", "off") != "off" for settings in by_part)

    def _run_queue(self, signal: Any) -> None:
        """Run the queue until it is empty, a signal comes or the time is over."""
        if self.config.jobs > 1 and len(self.queue) > 1:
            self._run_at_once(signal)
            return
        while not signal.requested and (task := self._next()):
            run, evaluating = task

            def stop(left: float, evaluating: float = evaluating) -> bool:
                if signal.requested and not self.config.save_models:  # a run with a folder saves and stops by itself
                    return True
                return not self.deadline.fits(left + (evaluating or left / 20))

            release_memory(self.device)  # the last run's memory is not this one's
            data = self.data[run.cell.domain]
            outcome = make_run(run, data, *self._arguments(run), stop, self.on_step)
            if signal.requested and not outcome.lines and not outcome.error:
                self.say("Stopping.")
            else:
                self._keep(run, outcome)

    def _run_at_once(self, signal: Any) -> None:
        """Run the queue in several processes."""
        running: dict[Future[Outcome], PlannedRun] = {}
        with Workers(self.config.jobs, self.deadline) as workers:
            while True:
                while len(running) < self.config.jobs and not signal.requested and (task := self._next()):
                    running[workers.submit(task[0], *self._arguments(task[0]))] = task[0]
                if not running:
                    return
                for future in wait(running, A_MOMENT, FIRST_COMPLETED).done:
                    run = running.pop(future)
                    try:
                        self._keep(run, future.result())
                    except UserError as error:
                        if error.exit_code != INTERRUPTED or not signal.requested:
                            raise
                if signal.requested:
                    workers.stop()

    def _arguments(self, run: PlannedRun) -> tuple[str, dict[str, Any], Path | None, str]:
        """Return the checksum of a run's data, its environment, the folder for its model and its name for progress."""
        place = [planned.key for planned in self.comparison.planned()].index(run.key) + 1
        out = self.comparison.path if self.config.save_models else None
        return self.checksums[run.cell.domain], self.environment, out, f"{run.title} ({place} of {self.total})"

    def _next(self) -> tuple[PlannedRun, float] | None:
        """Take the next run that there is time for, and the longest time that an evaluation has taken."""
        self.queue = [run for run in self.queue if run.arm.label not in self.failed]
        name = self.environment["device_name"]
        times = [predict_seconds(run, self.records.runs, name) for run in self.queue]
        baseline = self.recipe.labels[0]
        begun = self.started | {key_of(record) for record in self.records.runs}
        for run, seconds in zip(self.queue, times, strict=True):
            pair = (baseline, *run.key[1:])
            # A run without the baseline's run of the same seed has nothing to be compared with.
            is_paired = pair == run.key or pair in begun or pair not in self.requested
            if self.deadline.fits(seconds) and is_paired:  # perhaps a shorter one than the next
                self.queue.remove(run)
                self.started.add(run.key)
                evaluating = [r["result"].get("eval_seconds", 0.0) for r in self.records.runs if "result" in r]
                return run, max(evaluating, default=0.0)
        if self.queue and baseline in self.failed:
            self.say(f"Without {baseline} the others have nothing to be compared with.")
        elif self.queue:
            takes = f", which takes about {times[0]:.0f} s" if times[0] else ""
            self.say(f"No time for {self.queue[0].title}{takes}.")
        self.queue.clear()
        return None

    def _keep(self, run: PlannedRun, outcome: Outcome) -> None:
        """Record the outcome of a run, and print it."""
        if not outcome.lines:
            self.started.discard(run.key)
        if outcome.error:
            self.failed[run.arm.label] = outcome.error
            return
        if not outcome.lines:
            what = "is saved and resumes later" if self.config.save_models else "would not end in time and is left out"
            self.say(f"{run.title} {what}.")
            self.queue = [other for other in self.queue if other.arm is not run.arm]
            return
        record = outcome.lines[-1]
        if "diverged" in record:
            self.say(f"{run.title} diverged: {record['diverged']}.")
        else:
            result, parts = record["result"], ""
            # Only a run without a folder measures its parts.
            if "build_seconds" in result:
                parts = f" ({result['build_seconds']:.1f} to build it, {result['first_seconds']:.1f} for its first steps, {result['eval_seconds']:.1f} to evaluate it)"
            self.say(f"{run.title}: {result['val_loss']:.4f} in {result['wall_seconds']:.0f} s{parts}")
        self.records.add(*outcome.lines)
        self.comparison.save()

    def _wants_step_times(self) -> bool:
        """Tell whether step times are measured after the runs: the recipe asks for it, or the runs' own are in doubt and
        measuring takes less than a tenth of the training.
        """
        if self.recipe.timed:
            return True
        runs = [run for run in self.comparison.runs if not run.shared]
        if self.config.compile != "off" or self.config.cuda_graph or not doubts(runs, self.recipe.labels):
            return False
        turns = 3 * sum(max(1.0, 8 * seconds) for seconds in {run.arm: run.step_seconds for run in runs}.values())
        return turns < sum(run.seconds or run.train_seconds for run in runs) / 10

    def _measure(self, signal: Any) -> None:
        """Measure step times in turns in every cell that lacks some, and record them."""
        for cell in self.recipe.cells:
            if (
                not signal.requested
                and cell.domain in self.data
                and (not self.chosen["size"] or cell.size in self.chosen["size"])
            ):
                self._measure_cell(cell, signal)

    def _measure_cell(self, cell: Cell, signal: Any) -> None:
        """Measure the step times of a cell's arms that have none, and record them."""
        first, place = self.recipe.arms[0], (cell.domain, cell.size)
        labels, chosen = self.recipe.seeds_at(cell), self.chosen["arm"]
        arms = [a for a in self.recipe.arms if a.label in labels and (not chosen or a is first or a.label in chosen)]
        lines = self.records.step_times(*place)
        known = dict(lines[0]["seconds"]) if lines else self._times_of_same_shapes(cell)
        missing = [arm for arm in arms if arm.label not in known and arm.label not in self.failed]
        if not missing and lines:
            return
        if missing:
            each = MEASURING if self.config.budget == "tokens" else AT_LEAST  # without step times nothing can be run
            if not self.deadline.fits(each * len(missing)):
                return
            # The baseline is measured again with arms that came later, and they are scaled to its recorded time.
            group = missing if missing[0] is first else [first, *missing]
            configs = [self.recipe.train_config(arm, cell, self.config.seeds[0]) for arm in group]
            check_planned(map(PlannedRun, group, [cell] * len(group), configs), self.data)
            self.say("Measuring step times …")
            times = self._step_times(group, configs, lambda: signal.requested)
            if times is None:
                self.stopped_measuring = True
                return
            scale = known.get(first.label, times[first.label]) / times[first.label]
            known = {**{arm: seconds * scale for arm, seconds in times.items()}, **known}
            # Another process may have recorded step times meanwhile. Its runs have the steps that these give.
            others = [r for r in read_records([self.comparison.path / RUNS]).step_times(*place) if r not in lines]
            theirs = [r["seconds"] for r in others if known.keys() <= r["seconds"].keys()]
            known = theirs[0] if theirs else known
        self.records.lines = [line for line in self.records.lines if line not in lines]
        line = {"kind": "step_times", "domain": cell.domain, "size": cell.size, "seconds": known}
        self.records.add({**line, "environment": self.environment})
        write_records(self.comparison.path, self.records)
        if self.config.budget == "time":
            times_by_arm = ", ".join(f"{arm} {1000 * seconds:.1f} ms" for arm, seconds in known.items())
            self.say(f"Steps at equal time{', ' * bool(cell.name)}{cell.name}: {times_by_arm}")

    def _step_times(
        self, group: Sequence[RecipeArm], configs: Sequence[TrainConfig], stopping: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Measure step times by arm, and return None if a signal stopped it.

        An arm that fails is left out. The baseline's error is raised.
        """
        from depthmix.train.step_times import measure_step_times

        arms = list(zip(group, configs, strict=True))
        while True:
            try:
                times = measure_step_times([config for _, config in arms], stopping=stopping)
                return {arm.label: seconds for (arm, _), seconds in zip(arms, times, strict=True)} if times else None
            except Exception as error:
                # The number of arms measured before the one that failed.
                place = getattr(error, "measured", 0)
                if place == 0:
                    raise
                self.failed[arms[place][0].label] = describe_error(error)
                del arms[place]

    def _times_of_same_shapes(self, cell: Cell) -> dict[str, float]:
        """Return the step times that another domain with as many vocabulary entries has at this size on this device."""
        words = getattr(self.data[cell.domain], "vocab_size", None)
        for line in self.records.of("step_times"):
            other_words = getattr(self.data.get(line["domain"]), "vocab_size", None)
            on_device = line.get("environment", {}).get("device_name") == self.environment.get("device_name")
            if on_device and line["size"] == cell.size and words is not None and other_words == words:
                return dict(line["seconds"])
        return {}
