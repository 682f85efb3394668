"""The result of `depthmix.compare`: a table, sentences about it, and the arms with their models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from depthmix.api.owned_folder import OwnedFolder
from depthmix.api.tables import as_table, to_html
from depthmix.compare.arms import parse_arm
from depthmix.compare.columns import cells, to_text
from depthmix.compare.engine import Comparison
from depthmix.compare.rows import Row, Run
from depthmix.compare.verdict import verdict
from depthmix.device import choose_device
from depthmix.errors import CHECKPOINT, UserError
from depthmix.names import nearest
from depthmix.runs.restore import load_model


class LazyModels(Mapping[int, nn.Module]):
    """The models of an arm by seed, in eval mode, each loaded from its run when it is first asked for."""

    def __init__(self, runs: Mapping[int, Run], owned: OwnedFolder, device: str) -> None:
        self._runs, self._owned, self._device = runs, owned, device
        self._loaded: dict[int, nn.Module] = {}

    def __getitem__(self, seed: int) -> nn.Module:
        if seed not in self._loaded:
            self._loaded[seed] = load_model(self._runs[seed].path, choose_device(self._device)).model
        return self._loaded[seed]

    def __iter__(self) -> Iterator[int]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)


class ArmResult:
    """An arm of a comparison, with its runs and models.

    Attributes:
        label: The arm as tables write it.
        runs: {seed: run}; a run has `path`, `val_loss`, `curve`, `step_seconds` and more.
        losses: {seed: final validation loss}, which `depthmix.compare_runs` takes.
        models: {seed: model}, loaded on first use.
        row: The arm's row of the table; None if every run diverged.
    """

    def __init__(self, label: str, runs: Mapping[int, Run], row: Row | None, models: LazyModels) -> None:
        self.label, self.runs, self.row, self.models = label, dict(runs), row, models
        self.losses = {seed: run.val_loss for seed, run in self.runs.items()}

    @property
    def model(self) -> nn.Module:
        """The model of the first seed, in eval mode."""
        if not self.runs:
            raise UserError(f"{self.label} has no model: none of its runs finished", CHECKPOINT)
        return self.models[next(iter(self.runs))]

    def __repr__(self) -> str:
        losses = ", ".join(f"{seed}: {loss:.4f}" for seed, loss in self.losses.items())
        return f"<arm {self.label!r}, validation loss by seed: {losses or 'none'}>"


class ComparisonResult(Mapping[str, ArmResult]):
    """The result of a comparison: `result["attnres:block_size=4"]` is an arm, `table()` has all numbers.

    A temporary folder is removed with the last object that uses it.
    """

    def __init__(self, comparison: Comparison, data: Any, owned: OwnedFolder, device: str) -> None:
        self._comparison, self._owned = comparison, owned
        # Kept so that temporary data lives as long as the result.
        self.data = data
        self.rows, all_runs = comparison.rows, comparison.runs
        rows = {row.arm: row for row in self.rows}
        self._arms = {}
        for label in comparison.recipe.labels:
            done = {run.seed: run for run in all_runs if run.arm == label}
            runs = {seed: done[seed] for seed in comparison.recipe.config.seeds if seed in done}
            self._arms[label] = ArmResult(label, runs, rows.get(label), LazyModels(runs, owned, device))

    @property
    def folder(self) -> Path:
        """The folder of the comparison."""
        return self._comparison.path

    @property
    def report(self) -> Path:
        """A page to open in a browser."""
        return self._comparison.report

    @property
    def arms(self) -> list[str]:
        """The labels of the arms, the baseline first."""
        return list(self._arms)

    @property
    def verdict(self) -> list[str]:
        """A sentence for every arm but the baseline: its difference, with the 95% interval."""
        return verdict(self.rows)

    @property
    def notes(self) -> list[str]:
        """Remarks that a reader of the table needs, such as runs that diverged or step times that are unreliable."""
        return self._comparison.notes

    def table(self) -> Any:
        """Return all numbers, one row per arm: a `pandas.DataFrame`, or a plain table where pandas is not installed."""
        return as_table([asdict(row) for row in self.rows])

    def __getitem__(self, label: str) -> ArmResult:
        if label in self._arms:
            return self._arms[label]
        try:
            # The caller may have written other spaces, or the options in another order.
            meant = parse_arm(label).label
        except UserError:
            meant = label
        if meant not in self._arms:
            raise KeyError(f"no arm {label!r}; there are {', '.join(self._arms)}{nearest(str(label), self._arms)}")
        return self._arms[meant]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arms)

    def __len__(self) -> int:
        return len(self._arms)

    def __repr__(self) -> str:
        return "\n".join([to_text(self.rows, width=120), *self.verdict, *self.notes])

    def _repr_html_(self) -> str:
        return to_html(cells(self.rows), [*self.verdict, *self.notes])
