"""Results of a comparison: a file of JSON lines, small enough to commit. Files of several machines can be merged.

    {"kind": "run", "arm": …, "domain": …, "size": …, "seed": …, "config": {…}, "data": …, "code": …, "result": {…}, "environment": {…}}
    {"kind": "code", "id": …, "files": {file: checksum}}            the code of runs
    {"kind": "accept", "reason": …, "files": {file: [checksums]}}     versions of the code that may be mixed
    {"kind": "step_times", "domain": …, "size": …, "seconds": {arm: seconds}}     measured in turns
    {"kind": "sample", "arm": …, "run": …, "prompt": …, "tokens": …, "text": …}   a model's continuation of the prompt

A run that diverged has `diverged`, a sentence, instead of a result. `path` is the folder of a run whose model is saved.
`earlier_code` lists further code of a run that was resumed by other code. Image runs count `images` instead of `tokens`.
Runs of earlier versions may have `lanes`, the number of runs that shared their GPU (their times and memory are no costs),
and `from`, the study they were taken from. The file is replaced after every run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from depthmix.errors import CHECKPOINT, UserError
from depthmix.files import check_above, reading, write_text, writing

RUNS = "runs.jsonl"
NEEDED: dict[str, dict[str, type]] = {
    "run": {
        "arm": str,
        "domain": str,
        "size": str,
        "seed": int,
        "config": dict,
        "data": str,
        "code": str,
        "environment": dict,
    },
    "code": {"id": str, "files": dict},
    "accept": {"reason": str, "files": dict},
    "step_times": {"domain": str, "size": str, "seconds": dict},
    "sample": {"arm": str, "run": str, "prompt": str, "tokens": int, "text": str},
}
OTHERS: dict[str, type] = {"parameters": dict, "val_curve": list, "train_curve": list, "spikes": list}
NUMBERS = ("steps", "val_loss", "step_seconds", "seconds", "wall_seconds")


@dataclass
class Records:
    """Lines of one or several result files. If two runs have one arm, cell, seed and configuration, the first counts."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def runs(self) -> list[dict[str, Any]]:
        """Records of runs."""
        return self.of("run")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of one kind."""
        return [line for line in self.lines if line["kind"] == kind]

    def step_times(self, domain: str, size: str) -> list[dict[str, Any]]:
        """Return the lines on step times of one cell. The first one counts."""
        return [line for line in self.of("step_times") if (line["domain"], line["size"]) == (domain, size)]

    def code(self, run: dict[str, Any]) -> dict[str, str]:
        """Return the checksums of the code that made a run, or its last part."""
        return self.codes(run)[-1]

    def codes(self, run: dict[str, Any]) -> list[dict[str, str]]:
        """Return the checksums of every version of the code that made a run.

        Raises:
            UserError: The line of checksums is missing.
        """
        tables = {line["id"]: line["files"] for line in self.of("code")}
        ids = [*run.get("earlier_code", []), run["code"]]
        if missing := [name for name in ids if name not in tables]:
            what = (
                f"the results lack the line on the code {missing[0]}, which made {run['arm']} with seed {run['seed']}"
            )
            raise UserError(f"{what}; take the file from a copy, or remove all runs of that code", CHECKPOINT)
        return [dict(tables[name]) for name in ids]

    def add(self, *lines: dict[str, Any]) -> None:
        """Add lines that are not there yet."""
        known = {_key(line) for line in self.lines}
        for line in lines:
            if (key := _key(line)) not in known:
                known.add(key)
                self.lines.append(line)


def read_records(paths: Iterable[Path]) -> Records:
    """Read the results in files; a file that does not exist is empty. Raises UserError for a damaged line."""
    lines = list[dict[str, Any]]()
    for path in paths:
        with reading(path):
            raw = path.read_bytes() if path.exists() else b""
        for number, line in enumerate(raw.splitlines(), 1):
            if line.strip():
                lines.append(_checked(path, number, line))
    records = Records()
    records.add(*lines)
    return records


def _checked(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Parse a line and check the types of what tables and figures read."""

    def damaged(what: str) -> UserError:
        advice = "take the file from a copy, or, if it is a run's, remove that line, and the run is made again"
        return UserError(f"{path}:{number} is damaged ({what}); {advice}", CHECKPOINT)

    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise damaged("it is not JSON") from None
    if not isinstance(record, dict) or record.get("kind") not in NEEDED:
        raise damaged("it is no line of results")
    for key, kind in NEEDED[record["kind"]].items():
        if not isinstance(record.get(key), kind) or isinstance(record.get(key), bool):
            raise damaged(f"{key} is missing or of another kind")
    if record["kind"] == "run" and "diverged" not in record and (problem := find_problem(record.get("result"))):
        raise damaged(f"of its result {problem}")
    if not _is_number(record.get("lanes", 1)):
        raise damaged("lanes is no number")
    if record["kind"] in ("code", "accept"):
        several = record["kind"] == "accept"
        for sums in record["files"].values():
            checksums = sums if several else [sums]
            if not isinstance(checksums, list) or not all(isinstance(text, str) for text in checksums):
                raise damaged("files holds something else than checksums")
    if record["kind"] == "step_times" and not all(_is_number(t) and t > 0 for t in record["seconds"].values()):
        raise damaged("seconds holds something else than times")
    return record


def find_problem(result: Any) -> str:
    """Describe what is wrong with the types of a result; empty if nothing is."""
    if not isinstance(result, dict):
        return "there is nothing"
    counted = "images" if "images" in result else "tokens"
    if wrong := [key for key in (*NUMBERS, counted) if not _is_number(result.get(key))]:
        return f"{wrong[0]} is no number"
    if min(result["steps"], result["step_seconds"], result[counted]) <= 0:
        return f"steps, step_seconds and {counted} are not above 0"
    for key, kind in OTHERS.items():
        if not isinstance(result.get(key, kind()), kind):
            return f"{key} is of another kind"
    if not all(_is_number(value) for value in result.get("parameters", {}).values()):
        return "parameters are no numbers"
    for key in ("peak_memory", "bits_per_byte", "accuracy", "core_wait"):
        if result.get(key) is not None and not _is_number(result[key]):
            return f"{key} is no number"
    for key in ("val_curve", "train_curve"):
        if not all(_are_numbers(point) and len(point) == 2 for point in result.get(key, [])):
            return f"{key} is no list of points"
    if result.get("step_quartiles") is not None and not _are_numbers(result["step_quartiles"], 2):
        return "step_quartiles are no two numbers"
    depth = result.get("depth") or {"block_rms": [0], "gradient_norm": [0]}
    if not isinstance(depth, dict) or not all(_are_numbers(depth.get(k), 1) for k in ("block_rms", "gradient_norm")):
        return "depth is no list of numbers"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _are_numbers(value: Any, least: int = 0) -> bool:
    return isinstance(value, list) and len(value) >= least and all(map(_is_number, value))


def _key(line: dict[str, Any]) -> str:
    parts: list[Any] = {
        "run": ["arm", "domain", "size", "seed", "config", "data", "code"],
        "code": ["id"],
        "accept": ["reason", "files"],
        "step_times": ["domain", "size", "environment"],
        "sample": ["arm", "run", "prompt", "tokens"],
    }[line["kind"]]
    return json.dumps([line["kind"], *(line.get(part) for part in parts)], sort_keys=True)


def write_records(folder: Path, records: Records) -> None:
    """Replace the file of results. Lines that another process has written meanwhile are kept."""
    path = folder / RUNS
    check_above(path)
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        records.add(*read_records([path]).lines)
        write_text(
            path, "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in records.lines)
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this process, on systems that have locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
