"""Dynamics during training: what dynamics.jsonl holds, that nothing else changes, and that a killed run has every line once."""

import json

import pytest
import torch

from depthmix.cli import main
from depthmix.data.dataset import TokenData
from depthmix.train.evaluate import token_losses
from depthmix.train.loop import Trainer, train
from train import small
from train.runs import metrics, train_refused


def lines(folder):
    return folder.read_dynamics()


def test_lines_are_of_the_first_step_every_nth_and_the_last(tmp_path):
    watched = train(small.config(tmp_path / "a", n_blocks=2, steps=6, dynamics_every=2))
    assert [line["step"] for line in lines(watched)] == [0, 2, 4, 5]
    for line in lines(watched):
        shape = {"input_rms": 5, "output_rms": 4, "stream_rms": 5, "block_rms": 2, "share": 5, "gradient_norm": 4}
        assert {k: len(v) for k, v in line.items() if k != "step"} == shape
        assert sum(line["share"]) == pytest.approx(1, abs=1e-5)
        assert all(v > 0 for v in line["gradient_norm"])
    plain = train(small.config(tmp_path / "b", n_blocks=2, steps=6))
    assert lines(plain) == []
    assert metrics(plain) == metrics(watched)  # watching changes nothing


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_gradient_norms_are_those_of_the_whole_batch_before_clipping(tmp_path, clip):
    config = small.config(tmp_path / "a", steps=1, warmup=0, dynamics_every=1, micro_batch_size=2, clip=clip)
    (line,) = lines(train(config))
    trainer = Trainer(config, TokenData.open(config.data), torch.device("cpu"))
    token_losses(trainer.model, trainer.get_batch(0)).mean().backward()
    for norm, sublayer in zip(line["gradient_norm"], trainer.model.sublayers, strict=True):
        whole = torch.cat([p.grad.flatten() for p in sublayer.parameters()])
        assert norm == pytest.approx(float(whole.norm()), rel=1e-4)


def test_a_run_that_goes_on_has_every_line_once_and_the_same(tmp_path, monkeypatch):
    """Killed after its checkpoint at step 3 and some steps more, twice; and before there is any checkpoint."""
    whole = train(small.config(tmp_path / "whole", steps=6, dynamics_every=1))

    class Killed(BaseException):
        pass

    step = Trainer.step
    for last in (1, 4, 5):

        def stops(self, n, last=last):
            if n == last:
                raise Killed
            return step(self, n)

        monkeypatch.setattr(Trainer, "step", stops)
        with pytest.raises(Killed):
            train(small.config(tmp_path / "killed", steps=6, dynamics_every=1))
    monkeypatch.undo()
    killed = train(small.config(tmp_path / "killed", steps=6, dynamics_every=1))
    assert [line["step"] for line in lines(killed)] == list(range(6))
    assert (killed.path / "dynamics.jsonl").read_bytes() == (whole.path / "dynamics.jsonl").read_bytes()


def test_how_often_may_change_when_a_run_goes_on(tmp_path):
    config = small.config(tmp_path / "a", steps=4, dynamics_every=1)
    train(config)
    config.dynamics_every = None
    assert train(config).has_result()


def test_what_is_compiled_is_watched_without_compiling_it_anew(tmp_path):
    config = small.config(tmp_path / "a")
    trainer = Trainer(config, TokenData.open(config.data), torch.device("cpu"))
    expected = trainer.magnitudes(0)

    def refuses(graph, inputs):
        raise AssertionError("compiled")

    for sublayer in trainer.model.sublayers:
        sublayer.compile(backend=refuses)
    config.compile = "sublayers"
    assert trainer.magnitudes(0) == expected


def test_checkpointed_sublayers_are_watched_too(tmp_path):
    eager = train(small.config(tmp_path / "a", steps=1, warmup=0, dynamics_every=1))
    config = small.config(tmp_path / "b", steps=1, warmup=0, dynamics_every=1, checkpoint_activations=True)
    assert lines(train(config)) == lines(eager)


def test_a_flag_of_the_command(tmp_path, capsys):
    config = small.config(tmp_path / "a", steps=1, warmup=0, dynamics_every=1)
    assert main(["train", *small.flags(config)]) == 0
    assert json.loads((tmp_path / "a" / "dynamics.jsonl").read_text())["step"] == 0
    train_refused(small.config(tmp_path / "b", dynamics_every=0), "dynamics_every must be at least 1 or none, got 0")
