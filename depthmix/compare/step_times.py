"""Step times of the arms, taken in turns: what budgets are made of, and costs on a busy machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from depthmix.compare.arms import Arm
from depthmix.compare.plan import run_config
from depthmix.compare.rows import Run
from depthmix.compare.saved import STEP_TIMES, is_time, saved_step_times
from depthmix.config import CompareConfig
from depthmix.errors import CHECKPOINT, UserError
from depthmix.files import write_text


def measured_step_times(config: CompareConfig, arms: Sequence[Arm], say: Callable[[str], None]) -> list[float]:
    """Seconds per step for every arm: those known, or measured now and saved, so that a resume has the same budgets."""
    known = saved_step_times(Path(config.out))
    missing = [arm for arm in arms if arm.label not in known]
    if missing:
        from depthmix.train.step_times import measure_step_times

        say("Measuring step times …")
        # The first arm is measured again with arms that came later, and they are scaled to its saved time.
        group = missing if missing[0] == arms[0] else [arms[0], *missing]
        times = measure_step_times([run_config(config, arm, config.seeds[0], config.steps) for arm in group])
        if len(times) != len(group) or not all(map(is_time, times)):
            raise UserError(f"step times could not be measured: got {times!r}", CHECKPOINT)
        scale = known.get(arms[0].label, times[0]) / times[0]
        known = {**{arm.label: t * scale for arm, t in zip(group, times, strict=True)}, **known}
    write_text(Path(config.out) / STEP_TIMES, json.dumps(known, indent=1) + "\n")
    return [known[arm.label] for arm in arms]


def turns_are_cheap(config: CompareConfig, runs: Sequence[Run]) -> bool:
    """Whether timing the arms in turns takes less than a tenth of the training: without anything to compile each time."""
    turns = 3 * sum(max(1.0, 8 * seconds) for seconds in {run.arm: run.step_seconds for run in runs}.values())
    spent = sum(run.seconds or run.train_seconds for run in runs)
    return config.compile == "off" and not config.cuda_graph and turns < spent / 10
