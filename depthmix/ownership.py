"""Recognise the files and folders that depthmix wrote. Commands never change or delete anything else.

A command replaces an existing file only if depthmix wrote it as a document of the same kind. Commands do not write into run
folders and prepared data of others, except for new documents that a user places beside a run's files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from depthmix.errors import CHECKPOINT, DATA, USAGE, UserError
from depthmix.files import find_json_object, is_plain_file

RECIPE, ENVIRONMENT, META = (
    "recipe.yaml",
    "environment.json",
    "meta.json",
)  # files that mark run folders and prepared data
DRAWN = "drawn by depthmix"  # in the metadata of every figure
PART = 4096  # bytes at either end of a file that are searched for the mark
# Names in a run folder that are reserved for the run. Other commands do not write files of these names there.
RUN_FILES = {
    RECIPE, ENVIRONMENT, "metrics.jsonl", "speed.jsonl", "dynamics.jsonl", "log.txt", "result.json", "tokenizer.json", ".lock",
    "wandb.json", "code.json", "data.json", "insight.json", "config.json", "generation_config.json", "tokenizer_config.json",
    "model.safetensors.index.json", "modeling_depthmix.py",
}  # fmt: skip
RUN_FOLDERS = {"checkpoints", "ranks", "tensorboard"}


def is_run(folder: Path) -> bool:
    """Tell whether a folder is a run folder. A folder with a recipe alone may be the user's."""
    return os.path.lexists(folder / RECIPE) and os.path.lexists(folder / ENVIRONMENT)


def is_prepared(folder: Path) -> bool:
    """Tell whether a folder holds data that `depthmix data` prepared."""
    return read_prepared(folder) is not None


def read_prepared(folder: Path) -> dict[str, Any] | None:
    """Return the meta.json of prepared data; None for any other folder."""
    meta = find_json_object(folder / META)
    known = "splits" in meta and ("vocab_size" in meta or "classes" in meta)
    return meta if known else None


def check_new_folder(path: Path, what: str) -> None:
    """Refuse a folder that is, or lies in, a run folder or prepared data.

    Args:
        path: The folder that a command would make or write into.
        what: The command's output, for the message.

    Raises:
        UserError: The folder is refused. The message names the run or the prepared data.
    """
    real = Path(os.path.realpath(path))
    for folder in (real, *real.parents):
        kind = "a run" if is_run(folder) else "prepared data" if is_prepared(folder) else ""
        if kind:
            where = f"holds {kind}" if folder == real else f"lies in {folder}, which holds {kind}"
            raise UserError(f"{path} {where}: choose another folder for {what}.", DATA)


def check_foreign_files(folder: Path, names: Iterable[str], missing: str) -> None:
    """Refuse a folder that has files of these names, but lacks the file that depthmix writes before them.

    Args:
        folder: The folder that a command would write into.
        names: The files that the command would write.
        missing: The file that marks the others as depthmix's.

    Raises:
        UserError: The folder is refused. The message names the first such file.
    """
    present = next((name for name in names if os.path.lexists(folder / name)), None)
    if present is not None:
        what = f"{folder} holds {present} and no {missing}, so that file is not depthmix's"
        raise UserError(f"{what}: choose another folder, or move it away.", CHECKPOINT)


def check_replaceable(path: Path, kind: str) -> None:
    """Refuse to replace a file that depthmix did not write as a document of this kind, or to write into a run or prepared data.

    Args:
        path: The file that a command would write.
        kind: "inspection" (the JSON of `depthmix inspect`), "page" (a report's HTML) or "figure" (.png, .svg or .pdf).

    Raises:
        UserError: The file is refused. The message names the obstacle.
    """
    real = Path(os.path.realpath(path.parent)) / path.name
    for folder in real.parents:
        inside = real.relative_to(folder).parts
        if is_run(folder) and (inside[0] in RUN_FOLDERS or (len(inside) == 1 and path.name in RUN_FILES)):
            raise UserError(f"{path} belongs to the run in {folder}: choose another file.", USAGE)
        if is_prepared(folder):
            raise UserError(f"{path} lies in the prepared data {folder}: choose a place outside of it.", USAGE)
    if not os.path.lexists(path):
        return
    if not is_plain_file(path):
        kind_of_path = "a symbolic link" if path.is_symlink() else "a folder" if path.is_dir() else "no plain file"
        raise UserError(f"{path} is {kind_of_path}: choose another file.", USAGE)
    if not _WRITTEN[kind](path):
        advice = "choose another file, or move this one away"
        raise UserError(f"{path} exists and is no {kind} of depthmix's, so it is left alone: {advice}.", USAGE)


def _is_inspection(path: Path) -> bool:
    return {"schema", "run", "step", "mixer", "mixing"} <= find_json_object(path).keys()


def _is_page(path: Path) -> bool:
    begin = _part(path, 0)
    return all(mark in begin for mark in (b"<!doctype html>", b'"Content-Security-Policy"', b"<title>depthmix: "))


def _is_figure(path: Path) -> bool:
    # A PDF names its maker at the end, the others at the beginning.
    return any(DRAWN.encode() in _part(path, whence) for whence in (os.SEEK_SET, os.SEEK_END))


_WRITTEN = {"inspection": _is_inspection, "page": _is_page, "figure": _is_figure}


def _part(path: Path, whence: int) -> bytes:
    """Return the first or the last bytes of a file."""
    try:
        with open(path, "rb") as file:
            if whence == os.SEEK_END:
                file.seek(max(0, os.fstat(file.fileno()).st_size - PART))
            return file.read(PART)
    except OSError:
        return b""
