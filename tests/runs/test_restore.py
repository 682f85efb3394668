"""`depthmix.load`: a trained model in somebody's own script."""

import shutil
import sys

import pytest
import torch

import depthmix
from depthmix.data.dataset import TokenData
from depthmix.errors import CHECKPOINT, USAGE
from depthmix.runs.checkpoint import list_checkpoints, load_checkpoint
from project import ROOT, code_blocks
from train import small
from train.refused import refused


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "auto"])
def test_load_gives_the_trained_model(device):
    run = small.run()
    trained = depthmix.load(run.path, device)
    saved = load_checkpoint(list_checkpoints(run.checkpoints)[0])
    assert trained.step == saved.step == 60
    assert not trained.model.training
    found = dict(trained.model.named_parameters())
    assert all(torch.equal(found[name].cpu(), value) for name, value in saved.model.items())
    assert (trained.config.dim, trained.config.mixer) == (32, run.read_recipe()["mixer"])
    val = TokenData.open(small.data()).split("val")
    first = val.window(0, 20).tolist()
    assert trained.tokenizer.encode(trained.tokenizer.decode(first)).ids == first


def test_load_takes_one_checkpoint():
    older = list_checkpoints(small.run().checkpoints)[1]
    assert depthmix.load(str(older), "cpu").step == 40


def test_what_cannot_be_loaded(tmp_path, monkeypatch):
    refused(lambda: depthmix.load(tmp_path / "gone"), "gone' does not exist", code=CHECKPOINT)
    refused(lambda: depthmix.load(tmp_path), "is not a run folder: it has no recipe.yaml", code=CHECKPOINT)
    refused(lambda: depthmix.load(small.run().path, "gpu"), "device must be cpu, cuda", code=USAGE)
    for package in ("tokenizers", "yaml"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            refused(
                lambda: depthmix.load(small.run().path),
                package,
                "pip install '.[train]' in a clone of depthmix",
                code=USAGE,
            )


def test_the_pages_example_runs(tmp_path, monkeypatch, capsys):
    (code,) = (b for b in code_blocks(ROOT / "docs" / "guides" / "own-model.md") if "depthmix.load(" in b)
    shutil.copytree(small.run().path, tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    place: dict = {}
    exec(code, place)
    assert place["logits"].shape[-1] == small.VOCAB
    assert place["m"].shape == (1, 5, 5)
    assert capsys.readouterr().out.startswith("residual 60 ")
