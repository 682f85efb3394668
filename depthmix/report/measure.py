"""What `depthmix inspect` finds of a run, kept in its folder with the checkpoint it is of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from depthmix.config import InspectConfig
from depthmix.data.dataset import TokenData
from depthmix.data.tokenizer import load_tokenizer
from depthmix.errors import CHECKPOINT, UserError
from depthmix.files import find_json_object, write_text
from depthmix.insight.document import SCHEMA
from depthmix.runs.checkpoint import MANIFEST, list_checkpoints
from depthmix.runs.folder import RunFolder
from depthmix.runs.restore import read_train_config

INSIGHT = "insight.json"
ELSEWHERE = {"run", "json", "device", "batch_size"}  # options that no number depends on
PIECES = 48  # tokens of a text that nobody chose


def measured(
    config: InspectConfig,
    progress: Callable[[str, int, int | None], None] | None = None,
    chosen: Collection[str] = (),
) -> dict[str, Any]:
    """The document of a run folder: the one kept there, if it is of the newest checkpoint and of the same questions.

    chosen: the options that somebody gave, which a folder without weights can only answer as it has before.
    """
    folder = RunFolder.open(config.run)
    asked = {name: value for name, value in asdict(config).items() if name not in ELSEWHERE}
    kept = find_json_object(folder.path / INSIGHT)
    if not list_checkpoints(folder.checkpoints) and (without := known(config.run)) is not None:
        before = kept.get("asked", {})
        if other := [name for name in chosen if before.get(name) != asked[name]]:
            what = f"{config.run} has no weights any more, only what was measured of them"
            raise UserError(f"{what}: leave --{other[0]} out", CHECKPOINT)
        return without
    key = {"schema": SCHEMA, "checkpoint": newest(folder), "asked": asked}
    if key == {name: kept.get(name) for name in key} and isinstance(kept.get("document"), dict):
        return {**kept["document"], "run": str(config.run)}
    from depthmix.train.inspect import inspect_run

    document = inspect_run(config, progress)
    with suppress(UserError):  # a folder that is not ours to write is no reason to show nothing
        write_text(folder.path / INSIGHT, json.dumps({**key, "document": document}, allow_nan=False) + "\n")
    return document


def known(run: str | Path) -> dict[str, Any] | None:
    """The document kept in a run folder, whatever was asked, if it is of the newest checkpoint, or of the last one there was."""
    folder = RunFolder.open(run)
    kept = find_json_object(folder.path / INSIGHT)
    fits = kept.get("schema") == SCHEMA and newest(folder) in ("", kept.get("checkpoint"))
    return {**kept["document"], "run": str(run)} if fits and isinstance(kept.get("document"), dict) else None


def newest(folder: RunFolder) -> str:
    """What tells a run's newest checkpoint from others: its manifest has the checksums of its files."""
    paths = list_checkpoints(folder.checkpoints)
    try:
        return f"{paths[0].name} {hashlib.sha256((paths[0] / MANIFEST).read_bytes()).hexdigest()[:16]}"
    except (OSError, IndexError):
        return ""


def opening_text(run: str | Path) -> str:
    """The beginning of the validation text that a run was measured with; "" where there is none any more."""
    try:
        folder = RunFolder.open(run)
        config = read_train_config(folder)
        data = TokenData.open(folder.find_data(config.data))
        split = data.split("val")
        ids = split.window(0, min(PIECES, config.seq_len // 2, split.n_tokens)).tolist()
        return str(load_tokenizer(data.tokenizer_path).decode(ids)).strip()
    except UserError:
        return ""
