"""Every run of a comparison, in its order, and what can be known to be wrong before any of them runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from depthmix.compare.arms import Arm, check_arms, parse_arms
from depthmix.config import CompareConfig, TrainConfig
from depthmix.data.images import ImageData
from depthmix.data.prepared import open_data
from depthmix.errors import UserError
from depthmix.names import DEFAULT_MIXER
from depthmix.runs.init import check_finished, settled


def check_config(config: CompareConfig) -> list[Arm]:
    """The arms, or a UserError for what can be known to be wrong before anything runs."""
    from depthmix.train.generate import check_prompt

    if not config.out:
        raise UserError("compare needs --out, the folder for its runs and its report")
    if config.mixer != DEFAULT_MIXER or config.mixer_options:
        raise UserError("compare takes its mechanisms from --arms, not from --mixer and --mixer-options")
    if config.parallel:
        raise UserError("compare runs in one process: train the arms one by one with `depthmix train` and parallel")
    if config.seed != CompareConfig.seed:
        raise UserError(f"compare takes its seeds from --seeds, not from --seed: --seeds {config.seed}")
    if config.budget not in ("tokens", "time"):
        raise UserError(f"budget must be tokens or time, got {config.budget!r}")
    if not config.seeds or any(isinstance(seed, bool) or not isinstance(seed, int) for seed in config.seeds):
        raise UserError(f"seeds must be a list of at least one integer, got {config.seeds!r}")
    if len(set(config.seeds)) < len(config.seeds):
        raise UserError(f"every seed counts once, got {config.seeds!r}")
    for name in ("steps", "eval_every", "save_every", "sample_tokens"):
        if getattr(config, name) < 1:
            raise UserError(f"{name} must be at least 1, got {getattr(config, name)}")
    check_prompt(config.prompt)
    arms = parse_arms(config.arms)
    check_finished(config.init)
    check_arms(arms, config.dim, config.n_blocks)
    _check_plan(make_plan(config, arms), bool(config.prompt))
    return arms


def _check_plan(plan: Sequence[tuple[Arm, TrainConfig]], prompted: bool) -> None:
    """What would stop a run is said before anything is written, or the folder would refuse the corrected command."""
    from depthmix.train.check import check_config, check_run

    data = None
    for _, config in plan:
        check_config(config)
        if not is_finished(config):  # those that are do not need the data any more
            data = data or open_data(config.data)
            check_run(config, data)
            if prompted and isinstance(data, ImageData):
                raise UserError(f"prompt is for text, and {config.data} holds images: leave it out")


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
    return settled(TrainConfig(**values))


def is_finished(config: TrainConfig) -> bool:
    """Whether the run is there with its result."""
    return (Path(config.out) / "result.json").exists()
