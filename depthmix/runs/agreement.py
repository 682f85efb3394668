"""Check that the files of a run folder belong together: recipe, checkpoints, metrics, data and tokenizer.

A checkpoint is protected by its own checksums, but the files around it are not. So the state of every checkpoint describes the run
at the time of saving, and every reader of a checkpoint compares:

    state["config"]          the recipe, with every option of the mixer spelt out
    state["data"]            the SHA-256 of the data (see depthmix/data/integrity.py)
    state["run"]["id"]       the run's random id, which environment.json holds as well
    state["run"]["files"]    SHA-256 of data.json and tokenizer.json
    state["run"]["metrics"]  length and SHA-256 of metrics.jsonl up to this step

Files that are missing from the folder are not compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from depthmix.config import FREE, TrainConfig
from depthmix.data.integrity import data_hash
from depthmix.errors import CHECKPOINT, UserError
from depthmix.files import file_sha256, reading
from depthmix.mixers.defaults import all_options
from depthmix.runs.checkpoint import Checkpoint, is_sound, latest_checkpoint, list_checkpoints, read_state_alone
from depthmix.runs.folder import DATA_META, METRICS, RECIPE, TOKENIZER, RunFolder, check_options, with_all_options
from depthmix.schedule import first_changed_step

KEPT = (DATA_META, TOKENIZER)  # files that do not change once a run has begun
SHOWN = 3  # maximum differences named in a message


def spell_out(config: TrainConfig) -> TrainConfig:
    """Return the configuration with every option of its mixer, as recipe.yaml and checkpoints hold it."""
    return dataclasses.replace(config, mixer_options=all_options(config.mixer, config.mixer_options))


def describe_run_files(folder: RunFolder) -> dict[str, Any]:
    """Describe the files around a checkpoint that is saved now: its state["run"]."""
    with reading(folder.path):
        files = {name: file_sha256(folder.path / name) for name in KEPT if (folder.path / name).is_file()}
    raw = folder.read_file(METRICS)
    metrics = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    return {"id": folder.identity(), "files": files, "metrics": metrics}


def check_agreement(folder: RunFolder, saved: Checkpoint) -> None:
    """Refuse a checkpoint of another run, or of another recipe, data or tokenizer than the folder holds.

    Raises:
        UserError: Something differs. The message names it with both values.
    """
    if not {"config", "data", "run"} <= saved.state.keys():
        raise UserError(f"the checkpoint {saved.path} was not written by `depthmix train`", CHECKPOINT)
    described = saved.state["run"]
    run_id, saved_id = folder.identity(), described["id"]
    if run_id and run_id != saved_id:
        what = f"the checkpoint is of run {saved_id} and {folder.path} is run {run_id}"
        raise UserError(f"Cannot use the checkpoint {saved.path}: {what}; put the run's own ones back.", CHECKPOINT)
    recipe = folder.read_recipe()
    check_options(folder, recipe, [field.name for field in dataclasses.fields(TrainConfig)])
    if differences := _recipe_differences(recipe, saved):
        more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        advice = "put the recipe back as it was; another recipe needs another run"
        what = f"was changed since the run was trained: {', '.join(differences[:SHOWN])}{more}"
        raise UserError(f"{folder.path / RECIPE} {what}; {advice}.", CHECKPOINT)
    kept, trained_on = folder.data_meta(), saved.state["data"]["sha256"]
    if kept and (actual := data_hash(kept)) != trained_on:
        what = f"its SHA-256 is {actual[:12]}… and step {saved.step} was trained on {trained_on[:12]}…"
        raise UserError(f"{folder.path / DATA_META} is that of other data: {what}; put it back.", CHECKPOINT)
    for name, expected in described["files"].items():
        path = folder.path / name
        if not path.is_file():
            continue
        with reading(path):
            actual = file_sha256(path)
        if actual != expected:
            what = f"its SHA-256 was {expected[:12]}… at step {saved.step} and is {actual[:12]}…"
            raise UserError(f"{path} is not that of this run: {what}; put it back.", CHECKPOINT)


def check_tokenizer(folder: RunFolder) -> None:
    """Compare a run's tokenizer.json with the checksum in the run's copy of its data's meta.json.

    With another vocabulary of the same size every token would stand for other text, which only the loss would show.

    Args:
        folder: The run. A run without such a checksum passes.

    Raises:
        UserError: The tokenizer differs.
    """
    meta = folder.data_meta()
    sums, name = meta.get("sha256"), meta.get("tokenizer")
    expected = sums.get(name) if isinstance(sums, dict) and isinstance(name, str) else None
    if expected is None:
        return
    path = folder.path / TOKENIZER
    with reading(path):
        actual = file_sha256(path)
    if actual != expected:
        what = f"{path} is not the tokenizer that the run was trained with ({DATA_META} has another checksum)"
        raise UserError(f"{what}: put it back, from the run's data or from a copy.", CHECKPOINT)


def check_metrics(folder: RunFolder, saved: Checkpoint) -> None:
    """Refuse a metrics.jsonl that does not begin with the lines it had when a checkpoint was saved.

    Raises:
        UserError: Lines are missing or were changed.
    """
    raw, recorded = folder.read_file(METRICS), saved.state["run"]["metrics"]
    path = folder.path / METRICS
    if len(raw) < recorded["bytes"]:
        what = f"has {len(raw)} bytes and had {recorded['bytes']} at step {saved.step}: lines are missing"
    elif hashlib.sha256(raw[: recorded["bytes"]]).hexdigest() != recorded["sha256"]:
        what = f"does not hold the lines that it had at step {saved.step}: it was changed"
    else:
        return
    raise UserError(f"{path} {what}; put it back from a copy.", CHECKPOINT)


def checkpoint_to_go_on_from(folder: RunFolder, tell: Callable[[str], object], tensors: bool) -> Checkpoint | None:
    """Return the newest good checkpoint of a run, and give the run its id if it has none.

    Args:
        folder: The run, whose lock the caller holds.
        tell: Called with one sentence for each newer broken checkpoint.
        tensors: Whether to read the tensors, too.

    Raises:
        UserError: Recipe, data, tokenizer or metrics are not those that the checkpoint was saved with.
    """
    saved = latest_checkpoint(folder.checkpoints, tell, tensors=tensors)
    if saved is not None:
        check_agreement(folder, saved)
        check_metrics(folder, saved)
    folder.keep_identity(None if saved is None else saved.state["run"]["id"])
    return saved


def check_run_files(folder: RunFolder) -> None:
    """Compare a run folder with its newest good checkpoint, reading no tensors unless something is wrong.

    A run without checkpoints passes, and so does a run whose checkpoints are all broken.

    Raises:
        UserError: Recipe, data, tokenizer or metrics are not those that the checkpoint was saved with.
    """
    for path in list_checkpoints(folder.checkpoints):
        state = read_state_alone(path)
        if state is None:
            continue
        saved = Checkpoint(*state, {}, {}, path)
        try:
            check_agreement(folder, saved)
            check_metrics(folder, saved)
            return
        except UserError:
            # A run that continued from an older checkpoint, because this one is broken, has truncated its metrics.
            if is_sound(path):
                raise


def _recipe_differences(recipe: Mapping[str, Any], saved: Checkpoint) -> list[str]:
    """List the options whose value in the recipe differs from the value the checkpoint was trained with."""
    current, trained_with = _filled_in(recipe), _filled_in(saved.state["config"])
    free = FREE | {"steps"} if _only_has_more_steps(current, trained_with, saved.step) else FREE
    changed = [name for name in current if name not in free and current[name] != trained_with[name]]
    return [f"{name} is {current[name]!r} and was {trained_with[name]!r}" for name in changed]


def _only_has_more_steps(current: dict[str, Any], trained_with: dict[str, Any], made: int) -> bool:
    """Tell whether a run may be extended: its steps so far would have had the same learning rates (train/extend.py)."""
    if type(current["steps"]) is not int or current["steps"] < trained_with["steps"]:
        return False
    before = TrainConfig(**trained_with)
    return first_changed_step(before, dataclasses.replace(before, steps=current["steps"]), made) is None


def _filled_in(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of options that the recipe's version did not have."""
    values = {name: recipe.get(name, default) for name, default in dataclasses.asdict(TrainConfig()).items()}
    return with_all_options(values)
