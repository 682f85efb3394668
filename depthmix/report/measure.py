"""The document of `depthmix inspect`, cached in a run's folder together with the checkpoint it was computed from."""

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
# Options that change no number.
IRRELEVANT = {"run", "json", "device", "batch_size"}
# Tokens of the text if the user gives none.
PIECES = 32


def measured(
    config: InspectConfig,
    progress: Callable[[str, int, int | None], None] | None = None,
    chosen: Collection[str] = (),
) -> dict[str, Any]:
    """Return the document of a run.

    The cached document is returned if it belongs to the newest checkpoint and to the same options. Otherwise the run is inspected.

    Args:
        config: the run, and how to inspect it.
        progress: called with a name, steps done and steps in all.
        chosen: options that the user gave. A folder without weights can only be asked with the options it was inspected with.

    Raises:
        UserError: the run cannot be inspected.
    """
    folder = RunFolder.open(config.run)
    options = {name: value for name, value in asdict(config).items() if name not in IRRELEVANT}
    cached = find_json_object(folder.path / INSIGHT)
    has_weights = bool(list_checkpoints(folder.checkpoints))
    if not has_weights and isinstance(cached.get("document"), dict) and cached.get("schema") != SCHEMA:
        problem = f"{config.run} has no weights any more, and another version of depthmix made its measurements"
        raise UserError(f"{problem}: train the model again, or leave this run out", CHECKPOINT)
    if not has_weights and (document_without_weights := known(config.run)) is not None:
        earlier_options = cached.get("asked", {})
        if changed := [name for name in chosen if earlier_options.get(name) != options[name]]:
            problem = f"{config.run} has no weights any more, only earlier measurements"
            raise UserError(f"{problem}: leave --{changed[0]} out", CHECKPOINT)
        return document_without_weights
    key = {"schema": SCHEMA, "checkpoint": newest(folder), "asked": options}
    if key == {name: cached.get(name) for name in key} and isinstance(cached.get("document"), dict):
        return {**cached["document"], "run": str(config.run)}
    from depthmix.train.inspect import inspect_run

    document = inspect_run(config, progress)
    # A read-only folder is no reason to show nothing.
    with suppress(UserError):
        write_text(folder.path / INSIGHT, json.dumps({**key, "document": document}, allow_nan=False) + "\n")
    return document


def known(run: str | Path) -> dict[str, Any] | None:
    """Return a run's cached document, whatever its options, or None if there is none of the newest checkpoint.

    A folder whose checkpoints were deleted keeps the document of its last one.
    """
    folder = RunFolder.open(run)
    cached = find_json_object(folder.path / INSIGHT)
    fits = cached.get("schema") == SCHEMA and newest(folder) in ("", cached.get("checkpoint"))
    return {**cached["document"], "run": str(run)} if fits and isinstance(cached.get("document"), dict) else None


def newest(folder: RunFolder) -> str:
    """Identify a run's newest checkpoint by its name and the hash of its manifest, which has its files' checksums."""
    paths = list_checkpoints(folder.checkpoints)
    try:
        return f"{paths[0].name} {hashlib.sha256((paths[0] / MANIFEST).read_bytes()).hexdigest()[:16]}"
    except (OSError, IndexError):
        return ""


def opening_text(run: str | Path) -> str:
    """Return the beginning of the validation text that a run was measured with, or "" if the data is gone."""
    try:
        folder = RunFolder.open(run)
        config = read_train_config(folder)
        data = TokenData.open(folder.find_data(config.data))
        split = data.split("val")
        ids = split.window(0, min(PIECES, config.seq_len // 2, split.n_tokens)).tolist()
        return str(load_tokenizer(data.tokenizer_path).decode(ids)).strip()
    except UserError:
        return ""
