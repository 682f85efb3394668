"""Training on images: the same loop, folder, resuming and comparison as for text, with accuracy in the place of perplexity."""

import csv
import dataclasses
import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import depthmix
from depthmix.cli import main
from depthmix.compare.engine import compare
from depthmix.config import CompareConfig, DataConfig
from depthmix.data.images import ImageData
from depthmix.data.prepare_images import prepare_images
from depthmix.errors import CHECKPOINT, DATA, INTERRUPTED, UserError
from depthmix.runs.folder import RunFolder
from depthmix.runs.init import init_values
from depthmix.train import step_times
from depthmix.train.loop import Trainer, train
from train import small
from train.pictures import config, stripes
from train.refused import refused
from train.runs import losses, metrics, train_refused

CPU = torch.device("cpu")


@functools.cache
def run():
    return train(config(small.place() / "vision", dim=32, n_blocks=2, steps=40, eval_every=10, save_every=20))


def test_it_learns_and_says_how_well():
    result = run().read_result()
    assert result["accuracy"] > 0.9
    assert result["val_loss"] < 0.5 * math.log(2)
    assert result["images"] == 40 * 16
    assert not {"tokens", "perplexity", "bits_per_byte"} & result.keys()
    assert losses(run(), "val_accuracy")[-1] == result["accuracy"]
    assert losses(run(), "images")[-1] == 640
    assert not (run().path / "tokenizer.json").exists()


def test_loss_and_accuracy_are_those_of_the_images_of_the_split():
    trained, data = depthmix.load(run().path, "cpu"), ImageData.open(stripes())
    val = data.split("val")
    pixels = torch.from_numpy(val.images.astype(np.float32)) / 255
    pixels = (pixels - torch.tensor(data.mean)) / torch.tensor(data.std)
    with torch.no_grad():
        logits = trained.model(pixels.permute(0, 3, 1, 2))
    labels = torch.from_numpy(val.labels.copy()).long()
    result = run().read_result()
    assert functional.cross_entropy(logits, labels).item() == pytest.approx(result["val_loss"], abs=1e-5)
    assert (logits.argmax(-1) == labels).float().mean().item() == pytest.approx(result["accuracy"])
    assert (trained.tokenizer, trained.step) == (None, 40)


def test_a_run_that_was_stopped_ends_like_one_that_was_not(tmp_path, monkeypatch):
    whole = train(config(tmp_path / "whole", mixer="attnres"))
    real = Trainer.step

    def stop(self, step):
        if step == 4:
            raise UserError("stopped", INTERRUPTED)
        return real(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stop)
        train_refused(config(tmp_path / "half", mixer="attnres"), "stopped", code=INTERRUPTED)
    half = train(config(tmp_path / "half", mixer="attnres"))
    assert metrics(half) == metrics(whole)


def test_micro_batches_give_the_same_step(tmp_path):
    data = ImageData.open(stripes())
    whole, parts = (Trainer(config(tmp_path, **c), data, CPU) for c in ({}, {"micro_batch_size": 4}))
    assert whole.step(0) == pytest.approx(parts.step(0), rel=1e-5)


def test_a_loss_has_exploded_at_ten_times_that_of_guessing(tmp_path):
    """Of images learnt by heart the validation loss may well be three times as high."""
    trainer = Trainer(config(tmp_path), ImageData.open(stripes()), CPU)
    assert trainer.is_usable(9.9 * math.log(2))
    assert not trainer.is_usable(10.1 * math.log(2))
    assert "ten times that of guessing (0.6931)" in trainer.describe_unusable(10.1 * math.log(2))


def test_the_commands(tmp_path, capsys):
    np.savez(tmp_path / "in.npz", images=np.zeros((8, 4, 4, 3), np.uint8), labels=np.arange(8) % 2)
    assert main(["data", "--images", str(tmp_path / "in.npz"), "--out", str(tmp_path / "data")]) == 0
    assert "prepared images" in capsys.readouterr().out
    given = small.flags(config(tmp_path / "run", data=str(tmp_path / "data"), crop=0, steps=3))
    assert main(["train", *given]) == 0
    assert "accuracy 50.00%" in capsys.readouterr().out
    assert main(["eval", "--run", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == 0.5
    assert main(["eval", "--run", str(tmp_path / "run")]) == 0
    assert "nats per image, accuracy 50.00%, 2 images" in capsys.readouterr().out
    for command in ("generate", "inspect", "explore"):
        assert main([command, "--run", str(tmp_path / "run")]) == CHECKPOINT
        assert "was trained on images" in capsys.readouterr().err
    assert main(["eval", "--run", str(tmp_path / "run"), "--input", "x.txt"]) == 2


def test_a_comparison_has_accuracy_in_the_place_of_perplexity(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step_times, "A_SECOND", 0.01)
    plain = {k: v for k, v in vars(config(tmp_path / "both")).items() if k not in ("mixer", "mixer_options")}
    given = CompareConfig(**plain, arms=["residual", "dca"], seeds=[0, 1])
    refused(lambda: compare(dataclasses.replace(given, prompt="Once")), "prompt is for text", code=2)
    assert not (tmp_path / "both").exists()
    compare(given).show()
    shown = capsys.readouterr().out
    assert "accuracy" in shown
    assert "images to reach" in shown
    page = (tmp_path / "both" / "report.html").read_text().partition("<body>")[2].partition("<script>")[0]
    for word in ("perplexity", "bits/byte", "per token", "training tokens", "tokens to reach", "same text"):
        assert word not in shown
        assert word not in page.partition("<summary>Recipe")[0]
    for word in ("nats per image", "training images", "16 images per step", "equal images"):
        assert word in page
    rows = list(csv.DictReader((tmp_path / "both" / "table.csv").read_text().splitlines()))
    found = [RunFolder(tmp_path / "both" / "dca" / f"seed-{s}").read_result()["accuracy"] for s in (0, 1)]
    assert float(rows[1]["accuracy"]) == pytest.approx(sum(found) / 2)
    assert float(rows[1]["accuracy_spread"]) == pytest.approx(abs(found[0] - found[1]) / 2)
    assert rows[1]["tokens"] == str(6 * 16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": 3}, "patch_size must divide images of 8 x 8, got 3"),
        ({"crop": 9}, "crop must be from 0"),
        ({"crop": -1}, "crop must be from 0"),
        ({"seq_len": 64}, "seq_len is for text"),
        ({"tie_embeddings": True}, "tie_embeddings is for text"),
        ({"plain_eps": True}, "plain_eps is for text"),
        ({"positions": "sincos", "dim": 6}, "multiple of 4"),
    ],
)
def test_what_does_not_fit_images_is_refused_and_nothing_is_written(tmp_path, changes, words):
    train_refused(config(tmp_path / "run", **changes), words)
    assert not (tmp_path / "run").exists()


def test_options_of_images_are_refused_for_text(tmp_path):
    train_refused(small.config(tmp_path / "run", flip=True), "flip is for images, and", "holds text")


def test_no_training_starts_from_a_model_of_images(tmp_path):
    for given in (config(tmp_path / "run", init=str(run().path)), small.config(tmp_path / "run", init=str(run().path))):
        train_refused(given, "was trained on images: only models of text", code=CHECKPOINT)
    text = str(small.run().path)
    train_refused(config(tmp_path / "run", **init_values(text), init=text), "init is for text, and", "holds images")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_dynamics_are_those_of_the_images_of_the_batch(tmp_path, pool):
    given = config(tmp_path / "run", steps=2, warmup=1, dynamics_every=1, pool=pool)
    lines = train(given).read_dynamics()
    assert [line["step"] for line in lines] == [0, 1]
    assert metrics(train(dataclasses.replace(given, out=str(tmp_path / "b"), dynamics_every=None))) == metrics(
        RunFolder(tmp_path / "run")
    )
    trainer = Trainer(given, ImageData.open(stripes()), CPU)
    with torch.no_grad():
        x = trainer.model.embedding(trainer.task.inputs(trainer.get_batch(0)))
    assert lines[0]["stream_rms"][0] == pytest.approx(x.square().mean().sqrt().item(), rel=1e-4)
    assert len(lines[0]["gradient_norm"]) == 2


def test_a_run_goes_on_with_its_own_images_only(tmp_path):
    train(config(tmp_path / "run"))
    np.savez(tmp_path / "in.npz", images=np.zeros((8, 8, 8), np.uint8), labels=np.arange(8) % 2)
    other = prepare_images(DataConfig(images=str(tmp_path / "in.npz"), out=str(tmp_path / "other")))
    train_refused(config(tmp_path / "run", data=str(other)), "is not that of the data this run began with", code=DATA)


def test_digits_are_learnt():
    """The 1,797 digits of 8 x 8 pixels that scikit-learn has (Alpaydin and Kaynak, UCI, CC BY 4.0), to over 97% on one CPU core."""
    digits = np.load(Path(__file__).with_name("digits.npz"))
    images = (digits["images"] * (255 / 16)).round().astype(np.uint8)
    folder = small.place() / "digits"
    np.savez(small.place() / "digits.npz", images=images, labels=digits["labels"].astype(np.int64))
    prepare_images(DataConfig(images=f"{folder}.npz", out=str(folder), val_fraction=0.2))
    found = train(
        config(
            small.place() / "digits-run",
            data=str(folder),
            dim=48,
            n_blocks=2,
            n_heads=4,
            batch_size=64,
            flip=False,
            steps=240,
            warmup=20,
            lr=5e-3,
            eval_every=240,
            save_every=240,
        )
    )
    assert found.read_result()["accuracy"] > 0.97
