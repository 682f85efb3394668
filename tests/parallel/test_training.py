"""`depthmix train` among many processes: the curve of one process, whatever the layout, and whichever of them went on from which."""

import dataclasses
import json
import shutil

import pytest
import torch
import torch.utils._pytree as pytree
from safetensors.torch import load_file

import depthmix
from depthmix.data.dataset import Batches, TokenData
from depthmix.data.images import ImageBatches, ImageData
from depthmix.runs.checkpoint import list_checkpoints, load_checkpoint
from depthmix.runs.folder import RunFolder
from depthmix.train.loop import train
from parallel.curves import goes_on, interrupted, same_curve, same_weights
from train import pictures, small

SIZE = {"n_blocks": 1, "n_heads": 4, "dim": 16, "batch_size": 4, "eval_tokens": 48, "mixer": "attnres", "warmup": 1}
SIZE |= {"mixer_options": {"ways": 2}, "tie_embeddings": True, "mlp_dim": 16}


def config(out, **changes):
    return small.config(out, **{**SIZE, "steps": 3, "save_every": 2, "eval_every": 3, **changes})


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The run of one process."""
    return train(config(tmp_path_factory.mktemp("one") / "run", dynamics_every=2))


def same_dynamics(found, expected):
    """Of the same rows of the batch, and of gradients of all of it."""
    ours, theirs = found.read_dynamics(), expected.read_dynamics()
    assert len(ours) == len(theirs) == 2
    for a, b in zip(ours, theirs, strict=True):
        numbers = [torch.tensor(pytree.tree_leaves(line)) for line in (a, b)]
        torch.testing.assert_close(*numbers, rtol=1e-4, atol=1e-5)


def test_the_curve_of_one_process(workers, one, tmp_path):
    given = config(tmp_path / "run", dynamics_every=2, save_every=3, micro_batch_size=1)
    workers.run(2, "parallel.jobs:trains", {"dp": 2}, given)
    folder = RunFolder(given.out)
    same_curve(folder, one)
    same_weights(folder, one)
    same_dynamics(folder, one)
    logs = sorted(p.name for p in (folder.path / "ranks").iterdir())
    assert logs == ["rank-00001.txt"]
    assert "starting at step 0" in (folder.path / "ranks" / logs[0]).read_text()
    assert folder.read_recipe()["parallel"] == {"dp": 2}


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"shard": 1, "cp": 2}, {"shard": 1}], ids=str)
def test_in_bf16(workers, tmp_path, sizes):
    """Matrices of others are gathered in bf16, and everything else is as under autocast in one process: near it, and as far from fp32.

    What was gathered to evaluate, before the last checkpoint, is not what is saved.
    """
    changes = {"precision": "bf16", "steps": 2, "save_every": 2}
    given = config(tmp_path / "run", **changes)
    if sizes == {"shard": 1}:
        train(dataclasses.replace(given, parallel=sizes))
    else:
        workers.run(2, "parallel.jobs:trains", sizes, given)
    folder, alone = RunFolder(given.out), train(config(tmp_path / "alone", **changes))
    for ours, theirs in zip(folder.read_metrics(), alone.read_metrics(), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2)
        assert ours.get("loss", 0) == pytest.approx(theirs.get("loss", 0), rel=1e-3)
    saved = load_checkpoint(list_checkpoints(folder.checkpoints)[0])
    assert {t.dtype for t in saved.model.values()} == {torch.float32}


@pytest.fixture(scope="module")
def of_four(workers, tmp_path_factory):
    """A run of four processes, which has recomputed its sublayers."""
    given = config(tmp_path_factory.mktemp("four") / "run", checkpoint_activations=True)
    workers.run(4, "parallel.jobs:trains", {"shard": 2, "tp": 2}, given)
    return RunFolder(given.out)


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"tp": 2}, {"cp": 2}, {}], ids=str)
def test_four_processes_save_and_others_go_on(workers, one, of_four, tmp_path, sizes):
    goes_on(workers, 2, sizes, of_four, one, config(tmp_path / "run", checkpoint_activations=True), begins=2)


def test_one_process_saves_and_two_go_on(workers, one, tmp_path):
    folder = interrupted(one.path, tmp_path / "run")
    workers.run(2, "parallel.jobs:trains", {"dp": 2}, config(folder.path))
    same_curve(folder, one)
    same_weights(folder, one)


def test_a_damaged_part_is_noticed(one, of_four, tmp_path):
    shutil.copytree(of_four.path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    (folder.path / "result.json").unlink()
    newest = list_checkpoints(folder.checkpoints)[0]
    part = sorted((newest / "parts").iterdir())[-1]
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    train(config(folder.path, checkpoint_activations=True))
    assert f"{part.name} does not match its checksum" in (folder.path / "log.txt").read_text()
    same_weights(folder, one)


def test_four_processes_have_the_curve_of_one(one, of_four):
    same_curve(of_four, one)
    same_weights(of_four, one)


def test_everybody_else_reads_the_run(of_four):
    """depthmix.load, and Hugging Face by the index: the model lies there in one piece."""
    trained = depthmix.load(of_four.path, device="cpu")
    index = json.loads((of_four.path / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = load_file(of_four.path / index["embedding.weight"])
    assert set(index) == set(tensors) == {name for name, _ in trained.model.named_parameters()}
    assert trained.model.head.weight is trained.model.embedding.weight
    assert torch.equal(tensors["mixer.query"], trained.model.mixer.query)
    assert trained.step == 3


@pytest.mark.parametrize(
    ("sizes", "tune"), [({"shard": 2}, "mixer"), ({"tp": 2}, "all"), ({"pp": 2}, "mixer")], ids=str
)
def test_a_training_that_starts_from_a_model(workers, tmp_path, sizes, tune):
    """The loss before the first step is the plain model's, and what follows is as in one process."""
    shape = {"mixer_options": {}, "steps": 2, "save_every": 2, "n_blocks": 1 + ("pp" in sizes)}
    plain = train(config(tmp_path / "plain", **shape, mixer="residual"))
    start = {**shape, "init": str(plain.path), "tune": tune}
    alone = train(config(tmp_path / "alone", **start))
    given = config(tmp_path / "run", **start)
    workers.run(2, "parallel.jobs:trains", sizes, given)
    folder = RunFolder(given.out)
    same_curve(folder, alone, since=-1)
    same_weights(folder, alone)
    assert folder.read_metrics()[0]["val_loss"] == pytest.approx(plain.read_result()["val_loss"], rel=2e-5)
    for key in ("init", "trained_parameters", "parameters"):
        assert folder.read_result()[key] == alone.read_result()[key]
    environments = [json.loads((f.path / "environment.json").read_text())["init"] for f in (folder, alone)]
    assert environments[0] == environments[1]


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"shard": 2}], ids=str)
def test_images(workers, tmp_path, sizes):
    changes = {
        "dim": 16,
        "pool": "token",
        "mixer": "attnres",
        "steps": 2,
        "warmup": 1,
        "save_every": 2,
        "eval_every": 2,
    }
    alone = train(pictures.config(tmp_path / "alone", **changes, dynamics_every=2))
    given = pictures.config(tmp_path / "run", **changes, dynamics_every=2)
    workers.run(2, "parallel.jobs:trains", sizes, given)
    folder = RunFolder(given.out)
    same_curve(folder, alone)
    same_weights(folder, alone)
    assert folder.read_result()["accuracy"] == alone.read_result()["accuracy"]
    same_dynamics(folder, alone)


def test_every_process_sees_its_rows_of_the_same_batch():
    text, images = TokenData.open(small.data()).split("train"), ImageData.open(pictures.stripes()).split("train")
    for make in (
        lambda **rows: Batches(text, 16, 8, 3, **rows),
        lambda **rows: ImageBatches(images, 8, 3, 1, True, **rows),
    ):
        whole = make()
        for n in (2, 4):
            parts = [make(rows=slice(i * 8 // n, (i + 1) * 8 // n)) for i in range(n)]
            for step in (0, 5, 40):
                assert torch.equal(torch.cat([part.get(step) for part in parts]), whole.get(step))
                assert torch.equal(parts[-1].get(step, range(3)), whole.get(step)[:3])
