"""`depthmix train` with pp: the curve of one process over ten steps, and checkpoints that any layout goes on from."""

import json

import pytest
import torch
from safetensors.torch import load_file

import depthmix
from depthmix.runs.folder import RunFolder
from depthmix.train.loop import train
from parallel.curves import goes_on, interrupted, same_curve, same_weights
from train import small

# Rows of the mixer's parameters are in several pieces, and the tied matrix at both ends; the validation split fills no schedule.
GROUPS = [{"match": "embedding.weight", "lr": 0.5}, {"match": "mixer.query*", "lr": 2.0, "weight_decay": 0.1}]
SIZE = {"n_blocks": 4, "n_heads": 2, "dim": 16, "mlp_dim": 16, "tie_embeddings": True, "mixer": "attnres"}
SIZE |= {
    "mixer_options": {"ways": 2, "block_size": 3},
    "batch_size": 4,
    "eval_tokens": 48,
    "groups": GROUPS,
    "clip": 0.5,
}


def config(out, **changes):
    return small.config(out, **{**SIZE, "steps": 10, "save_every": 8, "eval_every": 10, **changes})


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The run of one process."""
    return train(config(tmp_path_factory.mktemp("one") / "run"))


@pytest.fixture(scope="module")
def in_stages(workers, tmp_path_factory):
    """A run of two processes with two stages each, which has recomputed its sublayers."""
    given = config(tmp_path_factory.mktemp("stages") / "run", checkpoint_activations=True)
    workers.run(2, "parallel.jobs:trains", {"pp": 2, "virtual": 2, "microbatches": 2}, given)
    return RunFolder(given.out)


def test_ten_steps_stay_together(one, in_stages):
    same_curve(in_stages, one)
    same_weights(in_stages, one)
    assert in_stages.read_result()["parameters"] == one.read_result()["parameters"]
    assert [p.name for p in (in_stages.path / "ranks").iterdir()] == ["rank-00001.txt"]


def test_everybody_else_reads_the_run(in_stages):
    trained = depthmix.load(in_stages.path, device="cpu")
    index = json.loads((in_stages.path / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = load_file(in_stages.path / index["mixer.query"])
    assert set(index) == set(tensors) == {name for name, _ in trained.model.named_parameters()}
    assert torch.equal(tensors["mixer.query"], trained.model.mixer.query)


@pytest.mark.parametrize("sizes", [{}, {"pp": 2, "shard": 2}], ids=str)
def test_stages_save_and_others_go_on(workers, one, in_stages, tmp_path, sizes):
    goes_on(workers, 4, sizes, in_stages, one, config(tmp_path / "run", checkpoint_activations=True), begins=8)


def test_one_process_saves_and_stages_go_on(workers, one, tmp_path):
    folder = interrupted(one.path, tmp_path / "run")
    workers.run(4, "parallel.jobs:trains", {"pp": 2, "tp": 2, "microbatches": 2}, config(folder.path))
    same_curve(folder, one)
    same_weights(folder, one)


def test_muon_has_whole_matrices(workers, tmp_path):
    changes = {"optimizer": "muon", "mixer": "mhc", "mixer_options": {"n": 2, "iterations": 2}, "groups": []}
    changes |= {
        "steps": 3,
        "save_every": 3,
        "eval_every": 3,
        "n_blocks": 2,
        "tie_embeddings": False,
        "micro_batch_size": 2,
    }
    alone, given = train(config(tmp_path / "alone", **changes)), config(tmp_path / "run", **changes)
    workers.run(2, "parallel.jobs:trains", {"pp": 2, "microbatches": 2}, given)
    same_curve(RunFolder(given.out), alone)
    same_weights(RunFolder(given.out), alone)
