"""What a comparison's folder holds from before: its recipe, step times and runs, some of it perhaps damaged."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from depthmix.compare.arms import Arm
from depthmix.config import TrainConfig
from depthmix.errors import CHECKPOINT, UserError
from depthmix.files import reading
from depthmix.mixers import OptionError, mixer_class
from depthmix.runs.folder import DATA_META, RunFolder

COMPARISON, STEP_TIMES = "comparison.json", "step_times.json"
# What may change between two calls for one folder, since no number in the table depends on it.
FREE = {
    "out",
    "quiet",
    "tensorboard",
    "wandb",
    "keep",
    "save_every",
    "log_every",
    "dynamics_every",
    "on_nan",
    "hang_limit",
    "prompt",
    "sample_tokens",
    "accept_code",
    "mixer",
    "mixer_options",
    "seed",
}


def read_json(path: Path) -> dict[str, Any] | None:
    """None for a file that is not there, or not whole: a full disk may have left that."""
    with reading(path):
        try:
            value = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def recipe_changes(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(field, old, new) for what makes runs incomparable; added arms and seeds do not."""
    changed = []
    for name in new:
        if name in FREE or name not in old or old[name] == new[name]:
            continue
        grown = (name == "arms" and new[name][: len(old[name])] == old[name]) or (
            name == "seeds" and set(old[name]) <= set(new[name])
        )
        if not grown:
            changed.append((name, old[name], new[name]))
    return changed


def check_runs(plan: Sequence[tuple[Arm, TrainConfig]], lost: bool) -> None:
    """Check that each run that is there has the recipe, the resolved options and the data of the planned one.

    Args:
        plan: All runs of a comparison.
        lost: Whether comparison.json, which says so of all of them, is lost.

    Raises:
        UserError: A run is of another recipe or of other data.
    """
    from depthmix.train.loop import FREE as free_in_a_run

    usual = asdict(TrainConfig())  # a recipe of an older version lacks the fields that came later
    for _, config in plan:
        folder = RunFolder(config.out)
        if not folder.has_begun():
            continue
        then, now = _resolved({**usual, **folder.read_recipe()}), _resolved(json.loads(json.dumps(asdict(config))))
        changed = [
            f"{k} was {then[k]!r} and is {v!r}" for k, v in now.items() if k not in free_in_a_run and then[k] != v
        ]
        kept = fingerprint(folder.path, DATA_META)
        if kept and fingerprint(config.data) not in (None, kept):
            changed.append("its data was prepared otherwise")
        if changed:
            what = f"{folder.path} is a run of another recipe ({', '.join(changed)})"
            what += f", and {COMPARISON} is lost" if lost else ""
            raise UserError(f"{what}; give that recipe, delete that run or choose another --out", CHECKPOINT)


def _resolved(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe with every option of its mixer, those left out at their defaults."""
    try:
        defaults = {name: option.default for name, option in mixer_class(recipe["mixer"]).options.items()}
    except OptionError:  # a rule that is not here, so not the planned one
        return recipe
    return {**recipe, "mixer_options": {**defaults, **(recipe["mixer_options"] or {})}}


def known_step_times(out: Path, arms: Sequence[Arm]) -> list[float] | None:
    """Step times measured before; None unless every arm has one."""
    known = saved_step_times(out)
    return [known[arm.label] for arm in arms] if all(arm.label in known for arm in arms) else None


def saved_step_times(out: Path) -> dict[str, float]:
    """Arm by arm from step_times.json and, where that is damaged, from comparison.json."""
    saved = read_json(out / COMPARISON) or {}
    try:
        before = dict(zip(saved["recipe"]["arms"], saved["step_times"], strict=True))
    except (KeyError, TypeError, ValueError):
        before = {}
    measured = read_json(out / STEP_TIMES) or {}
    return {arm: t for source in (before, measured) for arm, t in source.items() if is_time(t)}


def is_time(value: Any) -> bool:
    """Whether a value is a number of seconds that something can take."""
    return isinstance(value, float | int) and not isinstance(value, bool) and 0 < value < math.inf


def fingerprint(folder: str | Path, name: str = "meta.json") -> str | None:
    """What tells prepared data apart; None where there is none."""
    try:
        return hashlib.sha256((Path(folder) / name).read_bytes()).hexdigest()
    except OSError:
        return None
