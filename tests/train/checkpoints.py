"""Small checkpoints that can be told apart, for the tests of saving and loading them."""

import hashlib
import json

import torch

from depthmix.runs.agreement import describe_run_files
from depthmix.runs.checkpoint import list_checkpoints, save_checkpoint
from depthmix.runs.folder import RunFolder

FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


def save(folder, step, keep=2, n=None, size=64):
    n = step if n is None else n
    model = {"w": torch.full((size,), float(n)), "b": torch.arange(n, n + 3)}
    return save_checkpoint(folder, step, model, {"exp_avg/w": torch.full((size,), n / 8)}, {"n": n}, keep)


def holds(checkpoint, n):
    return (
        checkpoint.state == {"n": n}
        and bool((checkpoint.model["w"] == n).all())
        and checkpoint.model["b"].tolist() == [n, n + 1, n + 2]
        and bool((checkpoint.optimizer["exp_avg/w"] == n / 8).all())
    )


def no_warning(sentence):
    raise AssertionError(sentence)


def match_run(folder):
    """Make checkpoints describe the recipe and the files that are around them now."""
    run = RunFolder(folder)
    for path in list_checkpoints(run.checkpoints):
        found = json.loads((path / "state.json").read_text())
        found["state"] |= {"config": run.read_recipe(), "run": describe_run_files(run)}
        forge(path, state_json=(json.dumps(found) + "\n").encode())


def forge(path, **contents):
    """Replace files of a checkpoint and make the manifest agree, as only malice or a bug would."""
    for name, data in contents.items():
        (path / name.replace("_", ".")).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_bytes())
    for name, entry in manifest["files"].items():
        data = (path / name).read_bytes()
        entry["size"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
