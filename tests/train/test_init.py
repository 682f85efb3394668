"""`--init`: trainings that start from a model in a folder, with its own mixer or with another in the place of plain residuals."""

import json
import shlex
import shutil
from dataclasses import replace

import pytest
import torch
import yaml

from depthmix.cli import main
from depthmix.config import TrainConfig
from depthmix.data.dataset import validation_batches
from depthmix.errors import CHECKPOINT, DATA, USAGE
from depthmix.mixers.defaults import all_options
from depthmix.runs.checkpoint import list_checkpoints, load_checkpoint
from depthmix.runs.folder import RunFolder
from depthmix.runs.init import init_values
from depthmix.train.evaluate import evaluate
from depthmix.train.loop import Trainer, train
from train import bad, small
from train.runs import losses, metrics, train_refused

fails = bad.fails
LENGTHS = {"seq_len": 32, "batch_size": 4, "eval_tokens": 128}


def config(out, init=None, **changes) -> TrainConfig:
    """A training on from the small run, whose shape is taken as the command line takes it."""
    init = str(init or small.run().path)
    plain = vars(small.config(out, **LENGTHS)) | init_values(init, "mixer" not in changes)
    return TrainConfig(**{**plain, "init": init, **changes})


def weights(folder: RunFolder):
    return load_checkpoint(list_checkpoints(folder.checkpoints)[0]).model


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> RunFolder:
    """Two ways of attention residuals, trained alone."""
    changes = {"mixer": "attnres", "mixer_options": {"block_size": 2, "ways": 2}}
    return train(config(tmp_path_factory.mktemp("init") / "tuned", tune="mixer", weight_decay=0.5, **changes))


@pytest.mark.parametrize("mixer", ["residual", "attnres", "dca", "mhc"])
def test_the_loss_at_step_0_is_that_of_the_plain_model(mixer, tmp_path):
    trained = small.load_run()
    run = train(config(tmp_path / "run", mixer=mixer, steps=2, warmup=1))
    batches = validation_batches(small.token_data().split("val"), 32, 4, 128)
    plain = evaluate(trained.model, {"": batches}, torch.device("cpu"), "fp32", 1.0).loss
    first, *_ = run.read_metrics()
    assert first["step"] == first["tokens"] == 0
    assert first["val_loss"] == pytest.approx(plain, rel=1e-6)
    assert losses(run)[0] < 1.2 * plain  # of the first batch: nothing like a new model's
    again = small.load_run(run.path)
    assert again.config.plain_eps is (mixer != "residual")
    assert again.model.config.mixer == mixer


def test_the_mixer_alone(tuned):
    before, after = weights(small.run()), weights(tuned)
    assert all(torch.equal(after[n], p) for n, p in before.items())
    added = {n for n in after if n not in before}
    assert {n.split(".")[0] for n in added} == {"mixer", "norms"}
    start = torch.zeros_like(after["mixer.query"])
    assert not torch.equal(after["mixer.query"], start)
    saved = load_checkpoint(list_checkpoints(tuned.checkpoints)[0]).optimizer
    assert {n.split("/", 2)[2] for n in saved if n.startswith("adamw/")} == added
    result = tuned.read_result()
    assert result["trained_parameters"] == result["parameters"]["added_by_mixer"]
    assert result["trained_parameters"] == sum(after[n].numel() for n in added)


def test_where_a_run_came_from_is_recorded(tuned):
    origin = {"folder": str(small.run().path), "mixer": "residual", "options": {}, "step": 60}
    assert json.loads((tuned.path / "environment.json").read_text())["init"] == origin
    assert tuned.read_result()["init"] == origin
    recipe = tuned.read_recipe()
    assert (recipe["init"], recipe["tune"], recipe["dim"]) == (str(small.run().path), "mixer", 32)
    assert (
        f"the weights are those of {small.run().path} at step 60; trained: mixer"
        in (tuned.path / "log.txt").read_text()
    )


def test_all_of_a_tuned_model_by_another_optimizer(tuned, tmp_path):
    """Whatever the folder's mixer, it goes on with that: from where it was, with an optimizer of its own."""
    run = train(config(tmp_path / "run", tuned.path, optimizer="muon", steps=3))
    last = [line["val_loss"] for line in tuned.read_metrics() if "val_loss" in line][-1]
    assert run.read_metrics()[0]["val_loss"] == last
    assert run.read_recipe()["mixer_options"] == all_options("attnres", {"block_size": 2, "ways": 2})
    before, after = weights(tuned), weights(run)
    assert before.keys() == after.keys()
    assert [n for n in before if torch.equal(before[n], after[n])] == []
    one = train(config(tmp_path / "one", list_checkpoints(tuned.checkpoints)[-1], steps=3))
    assert one.read_result()["init"]["step"] == 3


def test_a_run_that_was_killed_goes_on(tmp_path, monkeypatch):
    whole = train(config(tmp_path / "whole", mixer="dca", tune="mixer"))
    killed, step = config(tmp_path / "killed", mixer="dca", tune="mixer"), Trainer.step

    def dies(self, number):
        if number == 4:
            raise KeyboardInterrupt
        return step(self, number)

    monkeypatch.setattr(Trainer, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        train(killed)
    monkeypatch.undo()
    again = train(killed)
    assert metrics(again) == metrics(whole)
    assert all(torch.equal(p, weights(whole)[n]) for n, p in weights(again).items())
    assert train(killed).path == again.path  # finished: given back as it is
    train_refused(replace(killed, tune="all"), "tune was 'mixer'", code=CHECKPOINT)


def test_the_seed_decides_how_a_mixer_begins(tmp_path):
    """Rules that begin at random do so by the seed of this training."""
    models = [
        Trainer(config(tmp_path, mixer="mudd", seed=seed, plain_eps=True), small.token_data(), torch.device("cpu"))
        for seed in (0, 0, 1)
    ]
    one, same, other = ({n: p.detach() for n, p in t.model.mixer.named_parameters()} for t in models)
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert any(not torch.equal(one[n], other[n]) for n in one)


TRAIN = "train --data {data} --out out --seq-len 32 --batch-size 4 --steps 2 --warmup 1 --device cpu --init "


def test_a_recipe_takes_the_same_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = {"data": str(small.data()), "init": str(small.run().path), "tune": "mixer", "mixer": "attnres", "steps": 2}
    lines |= {"warmup": 1, "device": "cpu", "quiet": True, "seq_len": 32, "batch_size": 4, "dim": 32}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(lines))
    assert main(["train", "--recipe", "recipe.yaml", "--out", "out"]) == 0
    assert RunFolder("out").read_recipe()["n_blocks"] == 2


def test_arms_that_start_from_one_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("depthmix.compare.engine.draw_figures", lambda *_: ([], []))
    monkeypatch.setattr("depthmix.compare.engine.look_inside", lambda *_: None)
    given = ["--data", str(small.data()), "--init", str(small.run().path), "--out", str(tmp_path / "out")]
    given += shlex.split("--seq-len 32 --batch-size 4 --steps 2 --warmup 1 --eval-tokens 64 --device cpu --quiet")
    assert main(["compare", *given, "--arms", "residual", "attnres:block_size=2", "dca"]) == 0
    table = capsys.readouterr().out
    assert "attnres:block_size=2" in table
    runs = [RunFolder(p) for p in sorted((tmp_path / "out").glob("*/seed-0"))]
    first = [run.read_metrics()[0]["val_loss"] for run in runs]
    assert len(first) == 3
    assert first == pytest.approx([first[0]] * 3, rel=1e-6)
    assert {run.read_result()["init"]["step"] for run in runs} == {60}
    assert main(["compare", *given, "--arms", "residual", "attnres:block_size=2", "dca"]) == 0  # shown again


CASES = [
    (TRAIN + "nowhere", CHECKPOINT, "init 'nowhere' does not exist"),
    (TRAIN + "{corpus}", CHECKPOINT, "{corpus} is not a run folder"),
    (TRAIN + "{broken}", CHECKPOINT, "config.json", "describes no model"),
    (TRAIN + "{damaged}", CHECKPOINT, "recipe.yaml describes no model: n_heads must divide"),
    (TRAIN + "{empty}", CHECKPOINT, "has no checkpoint yet"),
    (TRAIN + "{run} --mixer highway", USAGE, "highway", "does not begin as the plain residual"),
    (TRAIN + "{run} --mixer nothing", USAGE, "unknown mixer 'nothing'"),
    (TRAIN + "{run} --mixer attnres --mixer-options heads=5", USAGE, "heads must divide dim=32"),
    (TRAIN + "{tuned} --mixer residual", USAGE, "was trained with attnres block_size=2 ways=2"),
    (TRAIN + "{tuned} --mixer attnres", USAGE, "was trained with attnres block_size=2 ways=2"),
    (TRAIN + "{run} --dim 64", USAGE, "dim is 64 and that of the model in {run} is 32"),
    (TRAIN + "{run} --dim 512", USAGE, "dim is 512 and that of the model in {run} is 32"),
    (TRAIN + "{run} --n-blocks 3", USAGE, "n_blocks is 3"),
    (TRAIN + "{run} --output-scale 0", USAGE, "output_scale is about random initial weights", "{run} are loaded"),
    (TRAIN + "{run} --embedding-std 0.5", USAGE, "embedding_std is about random initial weights"),
    (TRAIN + "{run} --tune mixer", USAGE, "residual has no parameters to train"),
    (TRAIN.replace(" --init ", "") + " --dim 16 --n-heads 2 --tune mixer", USAGE, "tune mixer needs init"),
    (TRAIN.replace("{data}", "{other}") + "{run}", DATA, "other tokens", "--tokenizer {run}/tokenizer.json"),
    (TRAIN.replace("train", "compare", 1) + "{run} --arms residual rezero", USAGE, "rezero"),
    (TRAIN.replace("train", "compare", 1) + "{unfinished} --arms residual dca", CHECKPOINT, "has not finished"),
]


@bad.table(CASES)
def test_what_cannot_be_is_said_in_one_sentence(case, fails, tuned, tmp_path):
    line, code, *words = case
    places = {"broken": tmp_path / "broken", "tuned": tuned.path}
    places["broken"].mkdir()
    (places["broken"] / "config.json").write_text('{"model_type": "depthmix", "hidden_size": 3}')
    for name in ("unfinished", "damaged", "empty"):
        if f"{{{name}}}" in line:
            places[name] = tmp_path / name
            shutil.copytree(small.run().path, places[name])
            (places[name] / "result.json").unlink()
    if "{damaged}" in line:
        (tmp_path / "damaged" / "recipe.yaml").write_text(yaml.safe_dump({"dim": 32, "n_heads": 5}))
    if "{empty}" in line:
        shutil.rmtree(tmp_path / "empty" / "checkpoints")
    if "{other}" in line:
        places["other"] = small.other_data()
    fails(line, code, *words, **places)
    assert not (tmp_path / "out").exists()
