"""Check a run folder that Hugging Face's `from_pretrained` is about to read.

transformers reads config.json and the weights that model.safetensors.index.json names. It ignores recipe.yaml and the checksums of
the checkpoint, so a changed or damaged file would silently give other numbers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from depthmix.errors import CHECKPOINT, UserError
from depthmix.files import read_json_object
from depthmix.mixers.defaults import all_options
from depthmix.models.exchange import FIELDS, MODEL_TYPE
from depthmix.runs.agreement import check_agreement
from depthmix.runs.checkpoint import load_checkpoint
from depthmix.runs.folder import CHECKPOINTS, RECIPE, RunFolder
from depthmix.runs.pretrained import CONFIG, INDEX, model_type
from depthmix.runs.restore import model_config, read_train_config


def check_run_folder(place: Any) -> None:
    """Check the files of a run folder before transformers reads them. Other folders and names pass.

    Args:
        place: The argument of `from_pretrained`: a path or the name of a model.

    Raises:
        UserError: The checkpoint is broken, or config.json or recipe.yaml have changed since the training.
    """
    path = Path(place) if isinstance(place, str | os.PathLike) else None
    if path is None or not ((path / RECIPE).is_file() and (path / CHECKPOINTS).is_dir() and (path / INDEX).is_file()):
        return
    folder = RunFolder(path)
    for checkpoint in _named_checkpoints(path):
        saved = load_checkpoint(checkpoint, tensors=False)
        check_agreement(folder, saved)
        if model_type(path) == MODEL_TYPE:
            _check_config(folder)


def _named_checkpoints(path: Path) -> list[Path]:
    places = read_json_object(path / INDEX).get("weight_map")
    names = places.values() if isinstance(places, dict) else ()
    return [path / name for name in sorted({os.path.dirname(str(name)) for name in names})]


def _check_config(folder: RunFolder) -> None:
    written, path = read_json_object(folder.path / CONFIG), folder.path / CONFIG
    vocab_size = written.get("vocab_size")  # not in the recipe; the weights are checked against it
    described = model_config(read_train_config(folder), vocab_size if type(vocab_size) is int else 1)
    for ours, theirs in FIELDS.items():
        given, expected = written.get(theirs), getattr(described, ours)
        if ours == "mixer_options":  # recipe.yaml may lack options that are at their defaults
            given, expected = (all_options(described.mixer, o) if isinstance(o, dict) else o for o in (given, expected))
        if theirs in written and given != expected:
            what = f"{theirs} is {given!r} and the run was trained with {expected!r}"
            raise UserError(f"{path} was changed: {what}; put it back as it was.", CHECKPOINT)
