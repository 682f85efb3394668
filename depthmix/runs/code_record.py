"""Record in a run's code.json which code made its steps: one entry of checksums per version of the code.

    [{"from_step": 0, "files": {"mixers/attnres.py": "3f0c…", …}}, {"from_step": 400, "files": {…}}]

A run that continues after an edit is made by two versions of the code, which no other file records. `files` is null for steps
without a record, for example after code.json was deleted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from depthmix.errors import CHECKPOINT, UserError
from depthmix.files import reading, write_text
from depthmix.runs.code_checksums import differences
from depthmix.runs.folder import RunFolder

CODE = "code.json"


def read_code(folder: RunFolder) -> list[dict[str, str] | None]:
    """Return the checksums of every version of the code that made a run.

    Args:
        folder: The run.

    Returns:
        One table {file: checksum} per version, in the order of the steps; None for steps whose code is not recorded.

    Raises:
        UserError: code.json is damaged.
    """
    return [part["files"] for part in _read_parts(folder)] or [None]


def record_code(folder: RunFolder, step: int, mixer: str, files: Mapping[str, str]) -> list[str]:
    """Record which code makes the steps from `step` on.

    Args:
        folder: The run, whose lock the caller holds.
        step: Steps made so far. Records of later steps are dropped.
        mixer: The run's rule.
        files: {file: checksum} of the current code.

    Returns:
        The files that differ from the code of the last step; none for a new run or a step without a record.

    Raises:
        UserError: code.json is damaged or cannot be written.
    """
    parts = [part for part in _read_parts(folder) if part["from_step"] < step]
    if step > 0 and not parts:
        parts = [{"from_step": 0, "files": None}]
    if parts and parts[-1]["files"] == files:
        return []
    before = parts[-1]["files"] if parts else None
    parts.append({"from_step": step, "files": dict(files)})
    write_text(folder.path / CODE, json.dumps(parts, indent=1) + "\n")
    return [] if before is None else sorted(differences([(mixer, before), (mixer, files)], kernels=False))


def _read_parts(folder: RunFolder) -> list[dict[str, Any]]:
    path = folder.path / CODE
    with reading(path):
        raw = path.read_bytes() if path.exists() else b"[]"
    try:
        parts = json.loads(raw)
        good = isinstance(parts, list) and all(map(_is_part, parts))
    except (ValueError, RecursionError):
        good = False
    if not good:
        advice = "put it back from a copy, or delete it, and the run counts as one of unknown code"
        raise UserError(f"{path} is damaged: it holds no checksums of code; {advice}.", CHECKPOINT)
    return parts


def _is_part(part: Any) -> bool:
    if not isinstance(part, dict) or type(part.get("from_step")) is not int:
        return False
    files = part.get("files", 0)
    return files is None or (isinstance(files, dict) and all(isinstance(digest, str) for digest in files.values()))
