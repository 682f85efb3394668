"""A study's results: one file of JSON lines, small enough to commit, merged from several machines and days.

    {"kind": "run", "arm": …, "domain": …, "size": …, "seed": …, "config": {…}, "data": …, "code": …, "result": {…}, "environment": {…}}
    {"kind": "code", "id": …, "files": {file: checksum}}          the code of runs
    {"kind": "accept", "reason": …, "files": {file: [checksums]}}   which versions of it may be mixed
    {"kind": "step_times", "domain": …, "size": …, "seconds": {arm: seconds}}   at equal time

A run that diverged has `diverged`, a sentence, in the place of its result; one that shared its GPU with others, as
earlier versions could, has `lanes`, their number, and its times and memory are no costs; one that was taken over from another study has
`from`, its name. Images are counted instead of tokens. The file is written whole after every run.
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
}
OTHERS: dict[str, type] = {"parameters": dict, "val_curve": list, "train_curve": list, "spikes": list}
NUMBERS = ("steps", "val_loss", "step_seconds", "seconds", "wall_seconds")


@dataclass
class Records:
    """The lines of one or several result files; the first of two runs with one arm, cell, seed and configuration counts."""

    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The runs."""
        return self.of("run")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The lines of a kind."""
        return [line for line in self.lines if line["kind"] == kind]

    def code(self, run: dict[str, Any]) -> dict[str, str]:
        """The checksums of the code that made a run."""
        found = next((line["files"] for line in self.of("code") if line["id"] == run["code"]), None)
        if found is None:
            what = (
                f"the results lack the line on the code {run['code']} that {run['arm']} with seed {run['seed']} is of"
            )
            raise UserError(f"{what}; take the file from a copy, or remove all runs of that code", CHECKPOINT)
        return dict(found)

    def add(self, *lines: dict[str, Any]) -> None:
        """More lines, each once."""
        known = {_key(line) for line in self.lines}
        for line in lines:
            if _key(line) not in known:
                known.add(_key(line))
                self.lines.append(line)


def read_records(paths: Iterable[Path]) -> Records:
    """The results in files, where there are any; UserError names a line that is damaged."""
    records = Records()
    for path in paths:
        with reading(path):
            raw = path.read_bytes() if path.exists() else b""
        for number, line in enumerate(raw.splitlines(), 1):
            if line.strip():
                records.add(_checked(path, number, line))
    return records


def _checked(path: Path, number: int, line: bytes) -> dict[str, Any]:
    def damaged(what: str) -> UserError:
        advice = "take the file from a copy, or, if it is a run's, remove that line, and the run is made again"
        return UserError(f"{path}:{number} is damaged ({what}); {advice}", CHECKPOINT)

    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise damaged("it is not JSON") from None
    if not isinstance(found, dict) or found.get("kind") not in NEEDED:
        raise damaged("it is no line of results")
    for key, kind in NEEDED[found["kind"]].items():
        if not isinstance(found.get(key), kind) or isinstance(found.get(key), bool):
            raise damaged(f"{key} is missing or of another kind")
    if found["kind"] == "run" and "diverged" not in found:
        result = found.get("result")
        if not isinstance(result, dict):
            raise damaged("it has no result")
        for key in (*NUMBERS, "images" if "images" in result else "tokens"):
            value = result.get(key)
            if not _is_number(value):
                raise damaged(f"its result has no {key}")
        if min(result["steps"], result["step_seconds"], result.get("images", result.get("tokens"))) <= 0:
            raise damaged("its result is of no step")
        for key, kind in OTHERS.items():
            if not isinstance(result.get(key, kind()), kind):
                raise damaged(f"{key} of its result is of another kind")
        if not all(map(_is_number, result.get("parameters", {}).values())):
            raise damaged("parameters of its result are no numbers")
        for key in ("peak_memory", "bits_per_byte", "accuracy", "core_wait"):
            if result.get(key) is not None and not _is_number(result[key]):
                raise damaged(f"{key} of its result is no number")
        for key in ("val_curve", "train_curve"):
            if not all(_are_numbers(point) and len(point) == 2 for point in result.get(key, [])):
                raise damaged(f"{key} of its result is no list of points")
        if result.get("step_quartiles") is not None and not _are_numbers(result["step_quartiles"], 2):
            raise damaged("step_quartiles of its result are no two numbers")
        depth = result.get("depth")
        if depth and not (
            isinstance(depth, dict) and all(_are_numbers(depth.get(k), 1) for k in ("block_rms", "gradient_norm"))
        ):
            raise damaged("depth of its result is no list of numbers")
    if not _is_number(found.get("lanes", 1)):
        raise damaged("lanes is no number")
    if found["kind"] in ("code", "accept"):
        several = found["kind"] == "accept"
        for sums in found["files"].values():
            own = sums if several else [sums]
            if not isinstance(own, list) or not all(isinstance(text, str) for text in own):
                raise damaged("files holds something else than checksums")
    if found["kind"] == "step_times" and not all(_is_number(t) and t > 0 for t in found["seconds"].values()):
        raise damaged("seconds holds something else than times")
    return found


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
    }[line["kind"]]
    return json.dumps([line["kind"], *(line.get(part) for part in parts)], sort_keys=True)


def write_records(folder: Path, records: Records) -> None:
    """Write a study's results, with those that another process has written meanwhile."""
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
    """One process at a time, where the system has locks."""
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
