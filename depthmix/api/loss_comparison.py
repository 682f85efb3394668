"""The result of `depthmix.compare_runs`: differences from a baseline with their 95% intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from depthmix.api.tables import as_table, to_html
from depthmix.compare.columns import AGAINST, VAL_LOSS, Column, cells, lines_of
from depthmix.compare.rows import Row, Run, make_rows
from depthmix.compare.verdict import verdict
from depthmix.names import nearest

COLUMNS = (
    Column(lambda first: "loss", VAL_LOSS.cell),
    AGAINST,
    Column(lambda first: "95% interval", lambda row: _interval(row)),
    Column(lambda first: "paired seeds", lambda row: str(row.paired)),
)


@dataclass(frozen=True)
class LossDifference:
    """The difference of an arm's loss from the baseline's.

    Attributes:
        arm: The arm.
        baseline: The arm that it is compared with.
        losses: {seed: loss}.
        mean: Mean loss over all seeds of the arm.
        paired: Seeds that both arms have.
        difference: Mean of arm minus baseline over the paired seeds; negative is better. None for the baseline.
        low, high: 95% interval of that mean, by Student's t over the paired differences; None with one paired seed.
    """

    arm: str
    baseline: str
    losses: dict[Any, float]
    mean: float
    paired: int
    difference: float | None = None
    low: float | None = None
    high: float | None = None


class LossComparison(Mapping[str, LossDifference]):
    """The result of `compare_runs`: `result["dca"].difference`, `result.table()`, `result.verdict`."""

    def __init__(self, rows: list[Row], losses: Mapping[str, dict[Any, float]]) -> None:
        self._rows = rows
        self._arms = {row.arm: _difference(row, losses[row.arm]) for row in rows}

    @property
    def verdict(self) -> list[str]:
        """A sentence for every arm but the baseline: its difference, with the 95% interval."""
        return verdict(self._rows)

    def table(self) -> Any:
        """Return all numbers, one row per arm: a `pandas.DataFrame`, or a plain table where pandas is not installed."""
        names = ("arm", "mean", "difference", "low", "high", "paired")
        return as_table([{name: getattr(arm, name) for name in names} for arm in self._arms.values()])

    def __getitem__(self, arm: str) -> LossDifference:
        if arm not in self._arms:
            raise KeyError(f"no arm {arm!r}; there are {', '.join(self._arms)}{nearest(str(arm), self._arms)}")
        return self._arms[arm]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arms)

    def __len__(self) -> int:
        return len(self._arms)

    def __repr__(self) -> str:
        return "\n".join([*lines_of(cells(self._rows, COLUMNS)), "", *self.verdict])

    def _repr_html_(self) -> str:
        return to_html(cells(self._rows, COLUMNS), self.verdict)


def compare_losses(losses: Mapping[str, dict[Any, float]], baseline: str) -> LossComparison:
    """Compare losses by arm and seed with the baseline's, using the statistics of `depthmix compare`."""
    number = {seed: i for i, seed in enumerate(dict.fromkeys(s for by_seed in losses.values() for s in by_seed))}
    runs = [_run(arm, number[seed], loss) for arm, by_seed in losses.items() for seed, loss in by_seed.items()]
    rows = make_rows(runs, [baseline, *(arm for arm in losses if arm != baseline)])
    return LossComparison(rows, losses)


def _run(arm: str, seed: int, loss: float) -> Run:
    """Build a run for the statistics. Its costs are placeholders, and no column shows them."""
    return Run(
        arm=arm,
        seed=seed,
        path="",
        steps=1,
        tokens=1,
        val_loss=loss,
        bits_per_byte=None,
        parameters=0,
        added_by_mixer=0,
        step_seconds=1.0,
        seconds=None,
        peak_memory=None,
        curve=[(1, 1.0, loss)],
    )


def _difference(row: Row, losses: dict[Any, float]) -> LossDifference:
    low = high = None
    if row.difference is not None and row.difference_interval is not None:
        low, high = row.difference - row.difference_interval, row.difference + row.difference_interval
    return LossDifference(row.arm, row.baseline, losses, row.val_loss, row.paired, row.difference, low, high)


def _interval(row: Row) -> str:
    if row.difference is None or row.difference_interval is None:
        return "–"
    low, high = row.difference - row.difference_interval, row.difference + row.difference_interval
    return f"{low:+z.4f} to {high:+z.4f}"
