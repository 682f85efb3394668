"""Losses that are no numbers, or exploded: the run stops or leaves the batch out, and the weights stay as they were."""

import dataclasses
import itertools
import math

import pytest
import torch

from depthmix.errors import DIVERGED
from depthmix.runs.checkpoint import list_checkpoints, load_checkpoint
from depthmix.train import loop
from depthmix.train.evaluate import token_losses
from depthmix.train.loop import Trainer, train
from train import small
from train.runs import losses, metrics, train_refused


def test_host_and_gpu_judge_by_the_same_number():
    """The limit is a float32: compared with a loss on either side, it gives the same answer at the limit itself."""
    limit = Trainer(small.config("unused"), loop.TokenData.open(small.data()), torch.device("cpu")).too_large
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
    real_get = loop.Batches.get

    def get(self, step):
        bad["now"] = step
        return real_get(self, step)

    def spoiled(model, batch):
        found = token_losses(model, batch)
        return found * math.nan if bad["on"] and bad["now"] == bad["step"] else found

    monkeypatch.setattr(loop.Batches, "get", get)
    monkeypatch.setattr(loop, "token_losses", spoiled)
    return bad


def test_nan_stops_the_run(tmp_path, bad_batch):
    config = small.config(tmp_path / "run", seed=7, steps=8)
    good = tmp_path / "run" / "checkpoints" / "step-00000003"
    train_refused(
        config, "loss became nan", "step 5 (batch 4 of seed 7)", f"last good checkpoint is {good}", code=DIVERGED
    )
    assert load_checkpoint(good).step == 3
    assert not (tmp_path / "run" / "result.json").exists()
    assert "nan" in (tmp_path / "run" / "log.txt").read_text()
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


@pytest.mark.parametrize("lr", [1e3, 1e30])
def test_a_learning_rate_beyond_all_measure(tmp_path, either_optimizer, lr):
    """A real explosion: finite and huge, or past what a float holds."""
    config = small.config(tmp_path / "run", lr=lr, save_every=1, warmup=0, qk_norm=False)
    train_refused(
        config, "loss became", "at step 2 (batch 1 of seed 0)", "no good checkpoint", "lower lr", code=DIVERGED
    )
    run = train(dataclasses.replace(config, out=str(tmp_path / "skipping"), on_nan="skip"))
    assert run.read_result()["skipped_batches"] == 5  # all that came after the first step
    assert [p.name for p in list_checkpoints(run.checkpoints)] == ["step-00000006", "step-00000005"]


def test_an_explosion_seen_in_the_validation(tmp_path):
    config = small.config(tmp_path / "run", lr=1e3, warmup=0, eval_every=1, qk_norm=False)
    train_refused(config, "validation loss became", "at step 1 (batch 0 of seed 0)", code=DIVERGED)
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")
