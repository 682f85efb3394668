"""Losses that are no numbers, or exploded: the run stops or leaves the batch out, and the weights stay as they were."""

import dataclasses
import itertools
import math
import shutil

import pytest
import torch

from depthmix.errors import DIVERGED
from depthmix.runs.checkpoint import list_checkpoints, load_checkpoint
from depthmix.train import loop, task
from depthmix.train.evaluate import token_losses
from depthmix.train.loop import Trainer, train
from train import small
from train.runs import losses, metrics, train_refused


def test_host_and_gpu_judge_by_the_same_number():
    """The limit is a float32: compared with a loss on either side, it gives the same answer at the limit itself."""
    limit = Trainer(small.config("unused"), loop.TokenData.open(small.data()), torch.device("cpu")).loss_limit
    at = torch.tensor(limit, dtype=torch.float32)
    assert at.item() == limit
    for loss in (at, torch.nextafter(at, torch.tensor(math.inf)), torch.nextafter(at, torch.tensor(0.0))):
        assert (loss.item() > limit) == bool(loss > limit)


@pytest.fixture(params=[False, True], ids=["told by the host", "fused"])
def either_optimizer(monkeypatch, request):
    """AdamW as on a CPU, which is not called for a step that is not usable, and fused as on a GPU, where it is called and told."""
    adamw = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *args, **given: adamw(*args, **{**given, "fused": request.param}))


@pytest.fixture
def bad_batch(monkeypatch, either_optimizer):
    """Batch 4 gives NaN, until told otherwise."""
    bad = {"on": True, "step": 4}
    real_get = task.Batches.get

    def get(self, step):
        batch = real_get(self, step)
        bad["batch"] = batch if bad["on"] and step == bad["step"] else None
        return batch

    def spoiled(model, batch, *share):
        found = token_losses(model, batch, *share)
        return found * math.nan if bad["batch"] is not None and torch.equal(batch, bad["batch"]) else found

    monkeypatch.setattr(task.Batches, "get", get)
    monkeypatch.setattr(task, "token_losses", spoiled)
    return bad


def test_nan_stops_the_run(tmp_path, bad_batch):
    config = small.config(tmp_path / "run", seed=7, steps=8)
    good = tmp_path / "run" / "checkpoints" / "step-00000003"
    train_refused(
        config,
        "the loss became nan at step 5 (batch 4 of seed 7)",
        f"last good checkpoint is {good}",
        "the weights are still usable: the same command with --on-nan skip goes on",
        code=DIVERGED,
    )
    assert load_checkpoint(good).step == 3
    assert not (tmp_path / "run" / "result.json").exists()
    assert "nan" in (tmp_path / "run" / "log.txt").read_text()
    skipped = train(dataclasses.replace(config, on_nan="skip"))  # as advised
    assert skipped.read_result()["skipped_batches"] == 1
    shutil.rmtree(tmp_path / "run")
    train_refused(config, code=DIVERGED)
    bad_batch["on"] = False  # whatever it was, it is gone
    assert metrics(train(config)) == metrics(train(small.config(tmp_path / "whole", seed=7, steps=8)))


def test_nan_is_skipped_when_asked_to(tmp_path, bad_batch):
    run = train(small.config(tmp_path / "run", steps=8, on_nan="skip"))
    result = run.read_result()
    assert result["skipped_batches"] == 1
    assert math.isfinite(result["val_loss"])
    assert losses(run)[4] is None
    assert all(math.isfinite(x) for i, x in enumerate(losses(run)) if i != 4)
    assert load_checkpoint(list_checkpoints(run.checkpoints)[0]).state["skipped"] == 1


def test_a_skipped_batch_leaves_the_weights_alone(tmp_path, bad_batch):
    bad_batch["step"] = 2
    train(small.config(tmp_path / "run", save_every=1, keep=9, on_nan="skip"))
    saved = [load_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{n:08d}") for n in (2, 3, 4)]
    same = [all(torch.equal(a.model[k], b.model[k]) for k in a.model) for a, b in itertools.pairwise(saved)]
    assert same == [True, False]


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
@pytest.mark.parametrize(("lr", "what"), [(1e3, "loss"), (1e30, "gradient")])
def test_a_learning_rate_beyond_all_measure(tmp_path, either_optimizer, lr, what, on_nan):
    """A real explosion, finite and huge or past what a float holds: leaving batches out does not mend the weights."""
    config = small.config(tmp_path / "run", lr=lr, save_every=1, warmup=0, qk_norm=False, on_nan=on_nan)
    found = {
        "loss": ", three times that of guessing (5.704) and more at step 2",
        "gradient": "the gradient's norm became nan (at a loss of 5.704) at step 2",
    }
    sentence = train_refused(
        config,
        found[what],
        "(batch 1 of seed 0): the weights are not usable any more, whatever the batch",
        "no good checkpoint was saved before it",
        f"start again in another folder, with an lr lower than {lr:g}",
        code=DIVERGED,
    )
    assert "--on-nan" not in sentence  # it was tried, or would not help
    assert not (tmp_path / "run" / "result.json").exists()
    assert train_refused(config, code=DIVERGED) == sentence  # from the checkpoint, at once
    other = dataclasses.replace(config, on_nan="skip" if on_nan == "stop" else "stop")
    assert train_refused(other, code=DIVERGED) == sentence
    train(dataclasses.replace(config, lr=1e-3, out=str(tmp_path / "advised")))


def test_weights_beyond_use_do_not_push_out_good_checkpoints(tmp_path, monkeypatch):
    """Step 4 spoils the weights; its checkpoint is the only one that holds them."""
    real = Trainer.step

    def step(self, step):
        found = real(self, step)
        if step == 3:
            with torch.no_grad():
                self.model.head.weight.normal_(std=1e30)
        return found

    monkeypatch.setattr(Trainer, "step", step)
    config = small.config(tmp_path / "run", steps=9, eval_every=9, save_every=1, on_nan="skip")
    good = tmp_path / "run" / "checkpoints" / "step-00000003"
    train_refused(config, "at step 5 (batch 4", f"the last good checkpoint is {good};", code=DIVERGED)
    assert all(p.isfinite().all() and p.abs().max() < 10 for p in load_checkpoint(good).model.values())


def test_an_explosion_seen_in_the_validation(tmp_path):
    for on_nan in ("stop", "skip"):
        config = small.config(tmp_path / on_nan, lr=1e3, warmup=0, eval_every=1, qk_norm=False, on_nan=on_nan)
        train_refused(
            config, "the validation loss became", "at step 1 (batch 0 of seed 0)", "not usable", code=DIVERGED
        )
        assert not list_checkpoints(tmp_path / on_nan / "checkpoints")


def test_a_gradient_that_is_no_number(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(math.nan))
    config = small.config(tmp_path / "run")
    words = "the gradient's norm became nan (at a loss of 5.", "at step 1", "the weights are still usable"
    train_refused(config, *words, code=DIVERGED)
