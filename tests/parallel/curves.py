"""Runs compared with others, and cut short, for tests of trainings."""

import shutil
from pathlib import Path

import pytest
import torch

from depthmix.runs.checkpoint import list_checkpoints, load_checkpoint
from depthmix.runs.folder import RunFolder
from depthmix.train.loop import train


def same_curve(found, expected, since=0):
    lines = [line for line in expected.read_metrics() if line["step"] > since]
    same = [line for line in found.read_metrics() if line["step"] > since]
    assert [line.keys() for line in same] == [line.keys() for line in lines]
    for ours, theirs in zip(same, lines, strict=True):
        norms = ours.pop("grad_norm", 0.0), theirs.pop("grad_norm", 0.0)
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)  # Adam blows up the rounding of gradients near zero
        assert ours == pytest.approx(theirs, rel=2e-5), (ours, theirs)


def same_weights(found, expected):
    ours, theirs = (load_checkpoint(list_checkpoints(f.checkpoints)[0]) for f in (found, expected))
    assert ours.step == theirs.step
    for kind in ("model", "optimizer"):
        a, b = getattr(ours, kind), getattr(theirs, kind)
        assert a.keys() == b.keys()
        for name in a:
            scale = max(1e-4, float(b[name].abs().max())) if b[name].is_floating_point() else 0
            torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-3 * scale)


def interrupted(source, target):
    """A run as it was before its last checkpoint."""
    shutil.copytree(source, target)
    (target / "result.json").unlink()
    shutil.rmtree(list_checkpoints(target / "checkpoints")[0])
    return RunFolder(target)


def goes_on(workers, processes, sizes, saved, expected, given, begins):
    """A run of others, interrupted, goes on with so many processes laid out so, or in one, as if it had always been theirs."""
    folder = interrupted(saved.path, Path(given.out))
    if sizes:
        workers.run(processes, "parallel.jobs:trains", sizes, given)
    else:
        train(given)
    assert f"resuming at step {begins}" in (folder.path / "log.txt").read_text()
    same_curve(folder, expected)
    same_weights(folder, expected)
