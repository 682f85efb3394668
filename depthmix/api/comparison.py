"""`depthmix.compare`: the engine of `depthmix compare`, called from Python."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthmix.api.interruption import as_keyboard_interrupt
from depthmix.api.owned_folder import OwnedFolder
from depthmix.api.prepared_data import Folder, PreparedData, as_folder
from depthmix.config import CompareConfig
from depthmix.errors import UserError
from depthmix.train.events import StepEvent
from depthmix.values import build_config, nearest

if TYPE_CHECKING:
    from depthmix.api.comparison_result import ComparisonResult

# They are arguments of their own here, or those of one training.
NOT_OPTIONS = {"data", "out", "arms", "seeds", "quiet", "mixer", "mixer_options", "seed", "parallel"}
# Options of the command line: the result of a call is one table of models.
NOT_OPTIONS |= {"domains", "sizes", "only", "jobs", "minutes", "save_models", "report", "results", "modules"}
OPTIONS = [f.name for f in fields(CompareConfig) if f.name not in NOT_OPTIONS]


def compare(
    data: PreparedData | Folder,
    arms: Sequence[str],
    *,
    seeds: int | Iterable[int] = 1,
    out: Folder | None = None,
    on_step: Callable[[StepEvent], object] | None = None,
    progress: bool = False,
    **options: Any,
) -> ComparisonResult:
    """Train several mixers on the same data and compare them; see the package `depthmix.compare` for the arguments."""
    # Slow to import, and looked up on first use: `from depthmix import *` stays fast.
    from depthmix.api.comparison_result import ComparisonResult
    from depthmix.compare.engine import ArmsDiverged
    from depthmix.compare.engine import compare as run_comparison

    for name in options:
        if name not in OPTIONS:
            raise UserError(f"compare: unknown option {name!r}{nearest(name, [*OPTIONS, *_OWN])}")
    owned = OwnedFolder(out, "comparison")
    given = {
        **options,
        "data": as_folder(data),
        "arms": arms if isinstance(arms, str) else list(arms),
        "seeds": _as_seeds(seeds),
        "out": str(owned.path),
        "quiet": not progress,
    }
    config = build_config("compare", CompareConfig, given, _shape_of_init)
    try:
        with as_keyboard_interrupt():
            comparison = run_comparison(config, on_step=on_step)
    except ArmsDiverged as error:
        if not error.comparison.runs:
            raise
        warnings.warn(str(error), RuntimeWarning, stacklevel=3)
        comparison = error.comparison
    except BaseException as error:
        if owned.temporary and any(owned.path.glob("*/seed-*")):
            owned.keep()
            error.add_note(f"The same call with out={str(owned.path)!r} resumes, as long as this process lives.")
        raise
    return ComparisonResult(comparison, data, owned, config.device)


_OWN = ("seeds", "out", "on_step", "progress")


def _as_seeds(seeds: int | Iterable[int]) -> list[int]:
    try:
        count = operator.index(seeds)  # type: ignore[arg-type]
    except TypeError:
        if isinstance(seeds, str) or not isinstance(seeds, Iterable):
            raise UserError(f"compare: seeds must be a number of seeds or a list of them, got {seeds!r}") from None
        return list(seeds)
    if isinstance(seeds, bool) or count < 1:
        raise UserError(f"compare: seeds must be at least 1, or a list of seeds, got {seeds!r}")
    return list(range(count))


def _shape_of_init(given: dict[str, Any]) -> dict[str, Any]:
    """Return the model options that the model in `init` decides; a folder that is not there is reported later."""
    from depthmix.runs.init import init_values

    init = given.get("init")
    return init_values(init, False) if init and Path(init).exists() else {}
