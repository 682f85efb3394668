"""Which run comes next, how long it will take, and how many steps it has: a study in pieces that are balanced."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from depthmix.compare.recipe import Cell, Study, StudyArm
from depthmix.config import TrainConfig

FIRST_TIME = 1.5  # times what other arms take: for an arm that nobody has timed


@dataclass(frozen=True)
class Piece:
    """One run of a study."""

    arm: StudyArm
    cell: Cell
    config: TrainConfig

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What tells runs of a study apart."""
        return self.arm.label, self.cell.domain, self.cell.size, self.config.seed

    @property
    def title(self) -> str:
        """What a progress bar calls it."""
        return f"{self.arm.label}{', ' * bool(self.cell.name)}{self.cell.name}, seed {self.config.seed}"


def in_order(
    study: Study, device: str, out: str, quiet: bool, step_times: Mapping[tuple[str, str], Mapping[str, float]]
) -> list[Piece]:
    """All runs: every arm with the first seed, then every arm with the second, so that what is done is balanced.

    step_times: with a budget of time, seconds per step by cell and arm; cells that have none yet are left out.
    """
    pieces = []
    asked = [study.seeds, *(own for arm in study.arms for own in arm.seeds.values())]
    seeds = list(dict.fromkeys(seed for own in asked for seed in own))
    for seed in seeds:
        for cell in study.cells:
            own = study.runs_at(cell)
            for arm in (arm for arm in study.arms if seed in own.get(arm.label, ())):
                config = study.config(arm, cell, seed, device=device, out=out, quiet=quiet)
                if study.budget == "time":
                    times = step_times.get((cell.domain, cell.size), {})
                    if arm.label not in times:
                        continue
                    config = at_equal_time(config, times[study.labels[0]], times[arm.label])
                pieces.append(Piece(arm, cell, config))
    return pieces


def at_equal_time(config: TrainConfig, first: float, own: float) -> TrainConfig:
    """The training with the steps that fit into the first arm's time, and a whole schedule over them."""
    # The hair added keeps 3 * 0.1 / 0.3 from becoming no step at all.
    steps = max(1, math.floor(config.steps * first / own * (1 + 1e-9)))
    warmup = min(max(1, round(config.warmup * steps / config.steps)), steps - 1) if config.warmup else 0
    every = max(1, round(config.eval_every * steps / config.steps))
    return dataclasses.replace(config, steps=steps, warmup=warmup, eval_every=every)


def predicted(piece: Piece, runs: Sequence[Mapping[str, Any]], device_name: str) -> float:
    """Return the seconds that a run will take, from those finished on the same device; 0 where nothing is known."""
    here = [r for r in runs if "result" in r and r["environment"].get("device_name") == device_name]
    cell = [r for r in here if (r["domain"], r["size"]) == (piece.cell.domain, piece.cell.size)]
    own = [_wall(r) for r in cell if r["arm"] == piece.arm.label]
    if own:
        return statistics.median(own)  # the first of a process compiles, too
    others = [_wall(r) / r["result"]["steps"] for r in cell]
    return FIRST_TIME * statistics.median(others) * piece.config.steps if others else 0.0


def _wall(run: Mapping[str, Any]) -> float:
    # Earlier versions let several runs (`lanes`) share a GPU.
    return float(run["result"]["wall_seconds"]) / run.get("lanes", 1)


class Deadline:
    """The end of the time given, and whether something still fits before it."""

    def __init__(self, minutes: float, begun: float) -> None:
        """A twentieth of the time, 20 s at most, is kept for writing tables and figures."""
        seconds = 60 * minutes
        self.end = begun + seconds - min(20.0, seconds / 20) if minutes else math.inf

    def fits(self, seconds: float) -> bool:
        """Whether so many seconds are left, and a hair."""
        return time.monotonic() + seconds < self.end
