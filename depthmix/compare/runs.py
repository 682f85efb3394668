"""Make one run of a comparison, with or without a run folder, and the record of its results."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from depthmix.compare.checks import plain_config
from depthmix.compare.plan import PlannedRun
from depthmix.compare.rows import result_of_folder
from depthmix.data.dataset import TokenData
from depthmix.data.images import ImageData
from depthmix.errors import DIVERGED, UserError
from depthmix.runs.code_checksums import code_id, code_of
from depthmix.runs.code_record import read_code
from depthmix.runs.folder import RunFolder
from depthmix.train.events import OnStep, StepEvent

Data = TokenData | ImageData


class OutOfTime(Exception):
    """Raised in a step's callback to save a run and end it."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run: its records, or the error of a run that failed; neither if it was stopped."""

    lines: tuple[dict[str, Any], ...] = ()  # checksums of its code, then the run itself
    error: str = ""


def make_run(
    run: PlannedRun,
    data: Data,
    data_checksum: str,
    environment: Mapping[str, Any],
    out: Path | None,
    label: str,
    stop: Callable[[float], bool],
    on_step: OnStep | None = None,
) -> Outcome:
    """Train one model and record its results.

    A training that diverges is a result. A run that cannot be made is an error in words, so that other arms can still run.

    Args:
        run: The run.
        data: Its data, already open.
        data_checksum: Checksum of the data.
        environment: Machine and versions, for the record.
        out: The comparison's folder, in which the run keeps its checkpoints; None: only the results are kept.
        label: Name on the progress bar.
        stop: Called after each step with an estimate of the seconds that the run still needs; returns True to give up.
        on_step: Called with a `StepEvent` after every step of a run with a folder.

    Raises:
        UserError: The run folder cannot be used, or a signal interrupted a run whose model is saved.
    """
    from depthmix.runs.init import settled
    from depthmix.train.brief import train_briefly

    codes = [code_of(run.config.mixer, images=isinstance(data, ImageData))]
    outcome: dict[str, Any] = {}
    try:
        if out is not None:
            folder = _train_in_folder(run, label, stop, on_step)
            if folder is None:
                return Outcome()
            # Steps whose code the run folder does not record have an empty table.
            codes = [table or {} for table in read_code(folder)]
            outcome["result"] = rounded(result_of_folder(folder)[1])
        else:
            result = train_briefly(settled(run.config), data, label=label, stop=stop)
            if result is None:
                return Outcome()
            outcome["result"] = rounded(result)
    except UserError as error:
        if error.exit_code == DIVERGED:
            outcome["diverged"] = str(error)
        elif out is not None:
            raise
        else:
            return _failed(run, error)
    except Exception as error:
        if out is not None:
            raise
        return _failed(run, error)
    lines = [{"kind": "code", "id": code_id(table), "files": dict(table)} for table in codes]
    record = {
        "kind": "run",
        "arm": run.arm.label,
        "domain": run.cell.domain,
        "size": run.cell.size,
        "seed": run.config.seed,
        "config": plain_config(run.config),
        "data": data_checksum,
        "code": lines[-1]["id"],
        "environment": {**environment, "started": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())},
        **({"path": Path(run.config.out).relative_to(out).as_posix()} if out is not None else {}),
        **({"earlier_code": [line["id"] for line in lines[:-1]]} if len(lines) > 1 else {}),
        **outcome,
    }
    return Outcome((*lines, record))


def _failed(run: PlannedRun, error: Exception) -> Outcome:
    text = describe_error(error)
    print(f"{run.title} failed: {text}", file=sys.stderr, flush=True)
    return Outcome(error=text)


def describe_error(error: Exception) -> str:
    """Return an error on one line. The traceback of an internal error is printed as well."""
    if not isinstance(error, UserError):
        traceback.print_exception(error)
    return " ".join(str(error).split())[:300] or type(error).__name__


def _train_in_folder(
    run: PlannedRun, label: str, stop: Callable[[float], bool], on_step: OnStep | None
) -> RunFolder | None:
    """Train in the run's folder, or resume it. Returns None if `stop` ended it; what was done is saved."""
    from depthmix.train.loop import train

    def after_step(event: StepEvent) -> None:
        if on_step is not None:
            on_step(replace(event, arm=run.arm.label))
        if event.step < event.steps and stop(0.0):
            raise OutOfTime

    try:
        return train(run.config, label=label, on_step=after_step)
    except OutOfTime:
        return None


def rounded(result: dict[str, Any]) -> dict[str, Any]:
    """Round curves to five digits: they are only drawn, and the file is committed."""
    return {
        key: [[step, float(f"{loss:.5g}")] for step, loss in value] if key.endswith("_curve") else value
        for key, value in result.items()
    }
