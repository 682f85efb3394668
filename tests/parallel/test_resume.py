"""A run of many processes that was interrupted ends with the bits of one that was not."""

import dataclasses

import pytest

from depthmix.runs.checkpoint import list_checkpoints
from depthmix.runs.folder import RunFolder
from parallel.curves import interrupted
from parallel.test_training import config


@pytest.mark.parametrize(
    ("sizes", "changes"), [({"dp": 3}, {"micro_batch_size": 1}), ({"cp": 3}, {"seq_len": 18})], ids=str
)
def test_three_replicas_go_on_bit_for_bit(workers, tmp_path, sizes, changes):
    """A sum of two has no order. That of three depends on where in its bucket a gradient stands."""
    given = config(tmp_path / "run", batch_size=6, steps=4, **changes)
    workers.run(3, "parallel.jobs:trains", sizes, given)
    whole = RunFolder(given.out)
    resumed = interrupted(whole.path, tmp_path / "resumed")
    workers.run(3, "parallel.jobs:trains", sizes, dataclasses.replace(given, out=str(resumed.path)))
    assert "resuming at step 2" in (resumed.path / "log.txt").read_text()
    assert resumed.read_metrics() == whole.read_metrics()
    ours, theirs = (list_checkpoints(f.checkpoints)[0] / "model.safetensors" for f in (resumed, whole))
    assert ours.read_bytes() == theirs.read_bytes()
