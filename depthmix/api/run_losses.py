"""`depthmix.compare_runs`: the statistics of `depthmix compare` for losses from anybody's own training loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from depthmix.api.tables import as_table, to_html
from depthmix.errors import UserError
from depthmix.names import nearest
from depthmix.study.rows import Row, Run, make_rows
from depthmix.study.table import AGAINST, VAL_LOSS, Column, cells, lines_of
from depthmix.study.verdict import verdict

COLUMNS = (
    Column(lambda first: "loss", VAL_LOSS.cell),
    AGAINST,
    Column(lambda first: "95% interval", lambda row: _interval(row)),
    Column(lambda first: "paired seeds", lambda row: str(row.paired)),
)


@dataclass(frozen=True)
class LossDifference:
    """How an arm's loss differs from the baseline's.

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
    """What `compare_runs` found: `found["dca"].difference`, `found.table()`, `found.verdict`."""

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


def compare_runs(losses: Any, baseline: str | None = None) -> LossComparison:
    """Compare the final losses of runs that were trained elsewhere, seed by seed.

    Args:
        losses: {arm: losses}, where losses are a list, of which the i-th belongs to the same seed in every arm, or
            {seed: loss}, where seeds that an arm and the baseline share are paired. A DataFrame with one column per arm
            and one row per seed is the same.
        baseline: The arm that the others are compared with. By default the first.

    Returns:
        The differences, with the 95% intervals that `depthmix compare` prints.

    Raises:
        UserError: A loss is not a finite number, or an arm shares no seed with the baseline.

    Example:
        >>> found = depthmix.compare_runs({"plain": [3.31, 3.35, 3.29], "mine": [3.27, 3.30, 3.26]})
        >>> found["mine"].low, found["mine"].high
    """
    if not hasattr(losses, "items"):
        raise UserError(f"compare_runs takes a dictionary of losses by arm, got {type(losses).__name__}")
    by_arm = {str(arm): _by_seed(str(arm), values) for arm, values in losses.items()}
    if not by_arm:
        raise UserError("compare_runs needs the losses of at least one arm")
    baseline = next(iter(by_arm)) if baseline is None else baseline
    if baseline not in by_arm:
        raise UserError(f"compare_runs: there is no arm {baseline!r} to compare with{nearest(str(baseline), by_arm)}")
    for arm, own in by_arm.items():
        if not own.keys() & by_arm[baseline].keys():
            seeds = f"{_names(own)} and {_names(by_arm[baseline])}"
            raise UserError(f"compare_runs: {arm!r} and {baseline!r} share no seed ({seeds}): differences need pairs")
    number = {seed: i for i, seed in enumerate(dict.fromkeys(s for own in by_arm.values() for s in own))}
    runs = [_run(arm, number[seed], loss) for arm, own in by_arm.items() for seed, loss in own.items()]
    rows = make_rows(runs, [baseline, *(arm for arm in by_arm if arm != baseline)])
    return LossComparison(rows, by_arm)


def _by_seed(arm: str, values: Any) -> dict[Any, float]:
    try:
        pairs = list(values.items() if hasattr(values, "items") else enumerate(values))
        found = {seed: float(loss) for seed, loss in pairs}
    except (TypeError, ValueError):
        raise UserError(f"compare_runs: the losses of {arm!r} are one number per seed, got {values!r}") from None
    if not found:
        raise UserError(f"compare_runs: {arm!r} has no losses")
    for seed, loss in found.items():
        if not math.isfinite(loss):
            raise UserError(f"compare_runs: the loss of {arm!r} with seed {seed} is {loss}: leave that run out")
    return found


def _run(arm: str, seed: int, loss: float) -> Run:
    """Return a run as the statistics take it; of its costs nothing is known, and nothing is shown."""
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


def _names(losses: Mapping[Any, float]) -> str:
    return ", ".join(map(str, losses))
