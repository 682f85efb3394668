"""The runs of a comparison in their order, their steps at equal time, and how long each will take."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from depthmix.compare.recipe import Cell, Key, Recipe, RecipeArm
from depthmix.config import TrainConfig

# An arm that nobody has timed may take this multiple of what the others take.
FIRST_TIME = 1.5


@dataclass(frozen=True)
class PlannedRun:
    """A run that the recipe asks for: an arm in a cell with one seed."""

    arm: RecipeArm
    cell: Cell
    config: TrainConfig

    @property
    def key(self) -> Key:
        """Identity of the run within the comparison."""
        return self.arm.label, self.cell.domain, self.cell.size, self.config.seed

    @property
    def title(self) -> str:
        """Name on the progress bar."""
        return f"{self.arm.label}{', ' * bool(self.cell.name)}{self.cell.name}, seed {self.config.seed}"


def key_of(record: Mapping[str, Any]) -> Key:
    """Return the identity of a recorded run."""
    return record["arm"], record["domain"], record["size"], record["seed"]


def plan_runs(recipe: Recipe, step_times: Mapping[tuple[str, str], Mapping[str, float]]) -> list[PlannedRun]:
    """List all runs: every arm with the first seed, then every arm with the second, so partial results stay balanced.

    Args:
        recipe: The comparison.
        step_times: Seconds per step by (domain, size) and arm. At equal time, runs without one are left out.
    """
    seed_lists = [recipe.config.seeds, *(seeds for arm in recipe.arms for seeds in arm.seeds.values())]
    runs = []
    for seed in dict.fromkeys(seed for seeds in seed_lists for seed in seeds):
        for cell in recipe.cells:
            seeds = recipe.seeds_at(cell)
            for arm in (arm for arm in recipe.arms if seed in seeds.get(arm.label, ())):
                config = recipe.train_config(arm, cell, seed)
                if recipe.config.budget == "time":
                    times = step_times.get((cell.domain, cell.size), {})
                    if arm.label not in times:
                        continue
                    config = at_equal_time(config, times[recipe.labels[0]], times[arm.label])
                runs.append(PlannedRun(arm, cell, config))
    return runs


def at_equal_time(config: TrainConfig, baseline: float, step_seconds: float) -> TrainConfig:
    """Give a training the steps that fit into the baseline's time, and a whole schedule over them.

    Warmup and the intervals of evaluation and saving shrink with the steps.

    Args:
        config: The training, with the baseline's steps.
        baseline: Seconds per step of the baseline.
        step_seconds: Seconds per step of this training.
    """
    # The factor keeps 3 * 0.1 / 0.3 from rounding down to 2.
    steps = max(1, math.floor(config.steps * baseline / step_seconds * (1 + 1e-9)))
    share = steps / config.steps
    warmup = min(max(1, round(config.warmup * share)), steps - 1) if config.warmup and share != 1 else config.warmup
    intervals = {name: max(1, round(getattr(config, name) * share)) for name in ("eval_every", "save_every")}
    return dataclasses.replace(config, steps=steps, warmup=warmup, **intervals)


def predict_seconds(run: PlannedRun, records: Sequence[Mapping[str, Any]], device_name: str) -> float:
    """Predict the seconds that a run will take from those finished on the same device; 0 if nothing is known."""
    on_device = [r for r in records if "result" in r and r["environment"].get("device_name") == device_name]
    in_cell = [r for r in on_device if (r["domain"], r["size"]) == (run.cell.domain, run.cell.size)]
    # The median, since the first run of a process includes compilation.
    if seconds := [_wall_seconds(r) for r in in_cell if r["arm"] == run.arm.label]:
        return statistics.median(seconds)
    seconds_per_step = [_wall_seconds(r) / r["result"]["steps"] for r in in_cell]
    return FIRST_TIME * statistics.median(seconds_per_step) * run.config.steps if seconds_per_step else 0.0


def _wall_seconds(record: Mapping[str, Any]) -> float:
    # Earlier versions let several runs (`lanes`) share a GPU.
    return float(record["result"]["wall_seconds"]) / record.get("lanes", 1)


class Deadline:
    """The end of the time limit. A twentieth of the time, 20 s at most, is kept for writing tables and figures."""

    def __init__(self, minutes: float, begun: float) -> None:
        seconds = 60 * minutes
        self.end = begun + seconds - min(20.0, seconds / 20) if minutes else math.inf

    def fits(self, seconds: float) -> bool:
        """Tell whether more than this many seconds are left."""
        return time.monotonic() + seconds < self.end
