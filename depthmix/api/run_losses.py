"""`depthmix.compare_runs`: the statistics of `depthmix compare` for losses from any training loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from depthmix.errors import UserError
from depthmix.names import nearest

if TYPE_CHECKING:
    from depthmix.api.loss_comparison import LossComparison


def compare_runs(losses: Any, baseline: str | None = None) -> LossComparison:
    """Compare the final losses of runs that were trained elsewhere, seed by seed.

    Args:
        losses: {arm: losses}. An arm's losses are a list, whose i-th entry belongs to the same seed in every arm, or
            {seed: loss}, where the seeds that an arm shares with the baseline are paired. A DataFrame with one column
            per arm and one row per seed works, too.
        baseline: The arm that the others are compared with. By default the first.

    Returns:
        The differences, with the 95% intervals that `depthmix compare` prints.

    Raises:
        UserError: A loss is not a finite number, or an arm shares no seed with the baseline.

    Examples:
        >>> result = depthmix.compare_runs({"plain": [3.31, 3.35, 3.29], "mine": [3.27, 3.30, 3.26]})
        >>> result["mine"].low, result["mine"].high
    """
    if not hasattr(losses, "items"):
        raise UserError(f"compare_runs takes a dictionary of losses by arm, got {type(losses).__name__}")
    by_arm = {str(arm): _by_seed(str(arm), values) for arm, values in losses.items()}
    if not by_arm:
        raise UserError("compare_runs needs the losses of at least one arm")
    baseline = next(iter(by_arm)) if baseline is None else baseline
    if baseline not in by_arm:
        raise UserError(f"compare_runs: there is no arm {baseline!r} to compare with{nearest(str(baseline), by_arm)}")
    for arm, by_seed in by_arm.items():
        if not by_seed.keys() & by_arm[baseline].keys():
            seeds = f"{_names(by_seed)} and {_names(by_arm[baseline])}"
            raise UserError(f"compare_runs: {arm!r} and {baseline!r} share no seed ({seeds}): differences need pairs")
    from depthmix.api.loss_comparison import compare_losses  # slow to import

    return compare_losses(by_arm, baseline)


def _by_seed(arm: str, values: Any) -> dict[Any, float]:
    try:
        pairs = list(values.items() if hasattr(values, "items") else enumerate(values))
        by_seed = {seed: float(loss) for seed, loss in pairs}
    except (TypeError, ValueError):
        raise UserError(f"compare_runs: the losses of {arm!r} are one number per seed, got {values!r}") from None
    if not by_seed:
        raise UserError(f"compare_runs: {arm!r} has no losses")
    for seed, loss in by_seed.items():
        if not math.isfinite(loss):
            raise UserError(f"compare_runs: the loss of {arm!r} with seed {seed} is {loss}: leave that run out")
    return by_seed


def _names(losses: Mapping[Any, float]) -> str:
    return ", ".join(map(str, losses))
