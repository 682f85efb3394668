"""The results of a comparison: its records, and the rows that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from depthmix.compare.costs import at_step_time, cost_notes, doubts, moved_step_times
from depthmix.compare.interval import OWN_SEEDS
from depthmix.compare.plan import key_of
from depthmix.compare.recipe import Cell, Key, Recipe
from depthmix.compare.records import Records
from depthmix.compare.rows import Row, Run, as_runs, make_rows
from depthmix.compare.spread import Spread, spreads
from depthmix.runs.code_checksums import KERNELS, changed_since

SHARED = "Several runs shared the machine, so what they took says nothing of what an arm costs, and is left out."
UNTIMED = "A dash: that arm was not timed with the others, and its runs say nothing of what it costs."


@dataclass
class Results:
    """Records of a comparison as tables, figures and pages need them."""

    recipe: Recipe
    records: Records
    out: Path | None = None

    @cached_property
    def used(self) -> list[dict[str, Any]]:
        """The first record of every run that the recipe names. Others stay in the file and out of the table."""
        keys = set(self.recipe.run_keys)
        first: dict[Key, dict[str, Any]] = {}
        for run in self.records.runs:
            if key_of(run) in keys:
                first.setdefault(key_of(run), run)
        return list(first.values())

    @cached_property
    def own_times(self) -> dict[str, list[Run]]:
        """Finished runs by cell, with their own step times."""
        return {cell.name: as_runs(self.used, cell, self.out) for cell in self.recipe.cells}

    @cached_property
    def runs(self) -> dict[str, list[Run]]:
        """Finished runs by cell, with the step times that count: those measured in turns where they are needed and known."""
        return {cell.name: self._at_known_times(cell) for cell in self.recipe.cells}

    @cached_property
    def spreads(self) -> dict[str, Spread]:
        """Chance in every cell."""
        return spreads(self.recipe, self.runs)

    @cached_property
    def rows(self) -> dict[str, list[Row]]:
        """Rows of the table by cell, with the intervals that the spread of all arms gives."""
        return {
            name: [with_interval(row, self.spreads[name]) for row in make_rows(runs, self.recipe.labels)]
            for name, runs in self.runs.items()
        }

    @property
    def diverged(self) -> list[dict[str, Any]]:
        """Records of runs that diverged."""
        return [record for record in self.used if "diverged" in record]

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Continuations of the recipe's prompt, in the order of the arms."""
        config = self.recipe.config
        prompt = config.prompt, config.sample_tokens
        by_arm = {line["arm"]: line for line in self.records.of("sample") if (line["prompt"], line["tokens"]) == prompt}
        return [by_arm[label] for label in self.recipe.labels if label in by_arm]

    def first_runs(self) -> list[tuple[str, Run]]:
        """Return every arm's first finished run in the first cell that has it."""
        runs = [run for by_cell in self.runs.values() for run in by_cell]
        firsts = ((label, next((run for run in runs if run.arm == label), None)) for label in self.recipe.labels)
        return [(label, run) for label, run in firsts if run is not None]

    def _at_known_times(self, cell: Cell) -> list[Run]:
        """Replace the step times of runs by those measured in turns, if the recipe asks for them or the runs' own are in doubt."""
        runs, lines = self.own_times[cell.name], self.records.step_times(cell.domain, cell.size)
        needed = self.recipe.timed or doubts(runs, self.recipe.labels)
        times: dict[str, float] = lines[0]["seconds"] if lines and needed else {}
        if self.recipe.labels[0] not in times:
            return runs
        timed = [at_step_time(run, times[run.arm]) for run in runs if run.arm in times]
        # Arms without a measurement took their times on another machine.
        return timed + [replace(run, shared=True) for run in runs if run.arm not in times]

    def timing(self, cell: Cell) -> list[str]:
        """Say where the step times of a cell were measured in turns, if the recipe asks for that."""
        lines = self.records.step_times(cell.domain, cell.size)
        if not lines or not self.recipe.timed:
            return []
        where: Mapping[str, Any] = lines[0].get("environment", {})
        device, commit = where.get("device_name"), str(where.get("git_commit"))[:12]
        return [f"Step times were measured in turns on {device}, apart from the runs (commit {commit})."]

    def are_costs_trusted(self, cell: Cell) -> bool:
        """Tell whether the step times of a cell are costs: measured in turns, or by runs that nothing disturbed."""
        runs = self.runs[cell.name]
        return not any(run.shared for run in runs) and not doubts(runs, self.recipe.labels)

    def cost_notes(self, cell: Cell) -> list[str]:
        """Return the sentences that belong under a cell's costs."""
        runs = self.own_times[cell.name]
        equal_time = self.recipe.config.budget == "time"
        timed = self.timing(cell)
        busy = any(run.shared for run in self.runs[cell.name])
        if busy and not timed:
            return [SHARED]
        doubtful = doubts(runs, self.recipe.labels)
        known = bool(self.records.step_times(cell.domain, cell.size))
        notes = [*timed, *[UNTIMED] * busy, *cost_notes(doubtful, known, equal_time)]
        return [*notes, *(moved_step_times(runs, self.recipe.labels[0]) if equal_time else [])]

    def notes(self) -> list[str]:
        """Return what must be known to read the table: runs that diverged, mixed code, and the recipe's own notes."""
        lines = []
        for record in self.diverged:
            words = (f"{record['arm']} with seed {record['seed']}", record["domain"], record["size"])
            lines.append(f"{', '.join(word for word in words if word)} diverged: {record['diverged']}.")
        kernels_by_mixer: dict[str, set[str | None]] = {}
        for record in self.used:
            mixer = str(record["config"].get("mixer"))
            kernels_by_mixer.setdefault(mixer, set()).add(self.records.code(record).get(f"{KERNELS}{mixer}"))
        if mixed := sorted(mixer for mixer, versions in kernels_by_mixer.items() if len(versions) > 1):
            what = f"Runs of {', '.join(mixed)} were made with more than one version of the kernels"
            lines.append(f"{what}, which differ in speed and rounding.")
        for reason, files in _accepted(self.records).items():
            files_named = ", ".join(sorted(files))
            lines.append(
                f"Results of different code are mixed ({files_named}), accepted because: {reason.rstrip('.')}."
            )
        lines += self.changed_rules()
        return [*lines, *(" ".join(note.split()) for note in self.recipe.config.notes)]

    def changed_rules(self) -> list[str]:
        """Name the user's own rules whose files have changed since their runs were made."""
        return changed_since([(r, self.records.code(r)) for r in self.used], self.records.of("accept"))


def with_interval(row: Row, chance: Spread) -> Row:
    """Give a row the interval from the spread of all arms, unless it has enough seeds of its own or no spread is known."""
    half = chance.half_width(row.paired)
    if row.difference is None or half is None or row.paired >= OWN_SEEDS:
        return row
    return replace(row, difference_interval=half)


def _accepted(records: Records) -> dict[str, set[str]]:
    """Return the files of which versions are mixed, by reason. A reason that continues an earlier one stands for both."""
    reasons = [line["reason"] for line in records.of("accept")]
    files: dict[str, set[str]] = {}
    for line in records.of("accept"):
        last = max((reason for reason in reasons if reason.startswith(line["reason"])), key=len)
        files.setdefault(last, set()).update(line["files"])
    return files
