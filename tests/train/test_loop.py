"""The training loop: what it learns, that it repeats itself exactly, and what it does when things go wrong."""

import contextlib
import dataclasses
import json
import math
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from depthmix import create_mixer, device
from depthmix.data.dataset import TokenData
from depthmix.data.integrity import data_hash
from depthmix.data.prepared import open_data
from depthmix.errors import CHECKPOINT, DATA, UserError
from depthmix.runs.checkpoint import list_checkpoints, load_checkpoint
from depthmix.runs.init import start_model
from depthmix.train import check, progress
from depthmix.train.check import facts
from depthmix.train.loop import Trainer, train
from train import small
from train.runs import losses, metrics, train_refused

# Learning.


def test_it_learns():
    run = small.run()
    found = losses(run)
    assert found[0] == pytest.approx(math.log(small.VOCAB), rel=0.05)
    assert found[-1] < 1.2
    validation = losses(run, "val_loss")
    assert len(validation) == 12
    assert validation[-1] < validation[4] < validation[0]


def test_metrics_and_result(tmp_path):
    config = small.config(tmp_path / "run", mixer="attnres", mixer_options={"block_size": 2}, log_every=2, steps=7)
    run = train(config)
    lines = run.read_metrics()
    steps = [(line["step"], "val_loss" in line) for line in lines]
    assert steps == [(2, False), (4, False), (5, True), (6, False), (7, False), (7, True)]
    for line in lines:
        assert line["tokens"] == line["step"] * 4 * 16
        assert set(line) == {"step", "tokens", *(["val_loss"] if "val_loss" in line else ["loss", "lr", "grad_norm"])}
    assert lines[0]["lr"] == config.lr  # the warm-up of two steps is over
    assert [p.name for p in list_checkpoints(run.checkpoints)] == ["step-00000007", "step-00000006"]
    result = run.read_result()
    assert set(result) == {
        "mixer",
        "mixer_options",
        "seed",
        "steps",
        "tokens",
        "val_loss",
        "perplexity",
        "bits_per_byte",
        "parameters",
        "step_seconds",
        "step_quartiles",
        "core_wait",
        "seconds",
        "peak_memory",
        "skipped_batches",
    }
    assert (result["mixer"], result["mixer_options"]) == ("attnres", {"block_size": 2})
    assert (result["seed"], result["steps"], result["tokens"]) == (0, 7, 448)
    assert result["val_loss"] == lines[-1]["val_loss"]
    assert result["perplexity"] == pytest.approx(math.exp(result["val_loss"]))
    val = TokenData.open(config.data).split("val")
    ratio = val.n_bytes / val.n_tokens
    assert result["bits_per_byte"] == pytest.approx(result["val_loss"] / math.log(2) / ratio)
    counts = start_model(config, small.VOCAB).model.parameter_counts()
    assert result["parameters"] == counts
    assert counts["added_by_mixer"] > 0
    assert 0 < result["step_seconds"] <= result["seconds"]
    assert result["peak_memory"] > 2**20
    assert result["skipped_batches"] == 0
    speed = run.read_speed()
    assert [s["step"] for s in speed] == [2, 4, 6, 7]
    assert speed[-1]["seconds"] == pytest.approx(result["seconds"])
    assert all(s["tokens_per_s"] > 0 for s in speed)
    assert (run.path / "tokenizer.json").read_bytes() == (small.data() / "tokenizer.json").read_bytes()


def test_the_first_loss_is_that_of_the_first_batch(tmp_path):
    """By hand: the model of the seed on batch 0, and its gradient's norm."""
    config = small.config(tmp_path / "run", steps=2, warmup=0)
    first = train(config).read_metrics()[0]
    model = start_model(config, small.VOCAB).model
    batch = Trainer(config, TokenData.open(config.data), torch.device("cpu")).batches.get(0)
    logits = model(batch[:, :-1]).log_softmax(-1)
    loss = -logits.gather(-1, batch[:, 1:, None]).mean()
    loss.backward()
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-6)
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert first["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


# The same again.


def test_one_seed_one_run(tmp_path):
    runs = [train(small.config(tmp_path / str(i), seed=seed)) for i, seed in enumerate((3, 3, 4))]
    assert metrics(runs[0]) == metrics(runs[1]) != metrics(runs[2])
    weights = [(list_checkpoints(r.checkpoints)[0] / "model.safetensors").read_bytes() for r in runs]
    assert weights[0] == weights[1] != weights[2]


def test_a_finished_run_is_not_run_again(tmp_path):
    config = small.config(tmp_path / "run")
    first = train(config)
    before = {p: p.stat().st_mtime_ns for p in first.path.rglob("*") if p.is_file() and p.name != ".lock"}
    train(config)
    assert {p: p.stat().st_mtime_ns for p in before} == before


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("mixer", ["residual", "attnres"])
def test_accumulated_gradients_are_the_whole_batchs(tmp_path, mixer, micro):
    whole = train(small.config(tmp_path / "whole", mixer=mixer))
    parts = train(small.config(tmp_path / "parts", mixer=mixer, micro_batch_size=micro))
    for key in ("loss", "grad_norm", "val_loss"):
        assert losses(parts, key) == pytest.approx(losses(whole, key), abs=1e-5)


@pytest.mark.parametrize("mixer", ["residual", "attnres", "mhc"])
def test_checkpointed_activations_change_nothing(tmp_path, mixer):
    plain = train(small.config(tmp_path / "plain", mixer=mixer, n_blocks=2))
    again = train(small.config(tmp_path / "again", mixer=mixer, n_blocks=2, checkpoint_activations=True))
    assert metrics(plain) == metrics(again)


def check_compiled(tmp_path, what, **shape):
    plain = train(small.config(tmp_path / "plain", steps=3, **shape))
    compiled = train(small.config(tmp_path / what, steps=3, compile=what, **shape))
    for key in ("loss", "val_loss"):
        assert losses(compiled, key) == pytest.approx(losses(plain, key), abs=1e-4)
    saved = [load_checkpoint(list_checkpoints(run.checkpoints)[0]).model for run in (plain, compiled)]
    assert saved[0].keys() == saved[1].keys()


@pytest.mark.uncovered
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_compiled_sublayers(tmp_path, monkeypatch, quick_inductor):
    """Every kind of module is compiled, one of them by Inductor, in training. For each of the others Inductor would take as long again."""
    real, calls = torch.nn.Module.compile, []

    def by_inductor(graph, inputs):
        return torch._dynamo.lookup_backend("inductor" if torch.is_grad_enabled() else "eager")(graph, inputs)

    def compile_one(module):
        calls.append(type(module).__name__)
        real(module, backend=by_inductor if calls[-1] == "Mlp" else "eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_one)
    check_compiled(tmp_path, "sublayers", n_blocks=1)
    assert set(calls) == {"Attention", "Mlp", "RMSNorm"}


@pytest.mark.uncovered
def test_compiled_as_one_graph(tmp_path, monkeypatch):
    real, calls = torch.nn.Module.compile, []

    def traced(module):  # the graph is what this is about, code for it is tested above
        calls.append(type(module).__name__)
        real(module, backend="eager", fullgraph=True)

    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    check_compiled(tmp_path, "model")
    assert calls == ["Decoder"]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bf16 says so at length
def test_bf16(tmp_path):
    exact = train(small.config(tmp_path / "exact", steps=2, warmup=1))
    rounded = train(small.config(tmp_path / "rounded", steps=2, warmup=1, precision="bf16"))
    assert losses(rounded) != losses(exact)
    assert losses(rounded) == pytest.approx(losses(exact), abs=0.05)
    assert all(
        t.dtype == torch.float32 for t in load_checkpoint(list_checkpoints(rounded.checkpoints)[0]).model.values()
    )


def test_clipping_and_decay_matter(tmp_path):
    base = {"steps": 4, "warmup": 0, "schedule": "wsd"}
    runs = {
        name: losses(train(small.config(tmp_path / name, **base, **changes)))
        for name, changes in {
            "plain": {},
            "clipped": {"clip": 1e-9, "adam_eps": 1e-3},
            "unclipped": {"clip": 0},
            "decayed": {"weight_decay": 50.0},
        }.items()
    }
    assert len({tuple(found) for found in runs.values()}) == len(runs)
    assert runs["clipped"][-1] > runs["plain"][-1]  # it hardly moves


# Folders.


def test_another_recipe_is_refused(tmp_path):
    config = small.config(tmp_path / "run")
    run = train(config)
    for name, value in (("lr", 0.02), ("seed", 1), ("mixer", "dca"), ("steps", 5), ("dim", 32)):
        train_refused(dataclasses.replace(config, **{name: value}), f"{name} was", run.path, code=CHECKPOINT)
    train(dataclasses.replace(config, save_every=2, keep=1))  # what no number depends on may change


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"seq_len": 1300, "batch_size": 1}, "val split has 1235 tokens"),
        ({"seq_len": 5000, "batch_size": 1}, "train split has 4912 tokens"),
        ({"mixer": "attnres", "mixer_options": {"size": 3}}, "unknown option 'size'"),
        ({"mixer": "attnres", "mixer_options": {"heads": 3}}, "heads must divide dim=16"),
        ({"dim": 18}, "head_dim must be even"),
        ({"device": "cuda:99"}, "not available here"),
        ({"seed": 2**64}, "below 2**64"),
    ],
)
def test_what_cannot_be_run_leaves_no_folder(tmp_path, changes, word):
    with pytest.raises((UserError, ValueError), match=word.replace("**", r"\*\*")):
        train(small.config(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_a_run_that_died_at_its_first_step_takes_another_recipe(tmp_path, monkeypatch):
    config = small.config(tmp_path / "run")

    def die(*_):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", die)
        with pytest.raises(torch.OutOfMemoryError):
            train(config)
    smaller = dataclasses.replace(config, batch_size=2)
    assert train(smaller).read_recipe()["batch_size"] == 2
    train_refused(config, "batch_size was 2 and is 4", code=CHECKPOINT)


def test_another_interval_of_the_metrics_does_not_make_another_run(tmp_path):
    """Every line is the one an uninterrupted run has at that step; there are only more or fewer of them."""
    whole = train(small.config(tmp_path / "whole", steps=9, eval_every=9))
    config = small.config(tmp_path / "run", steps=9, eval_every=9, log_every=2)
    train(config)
    (tmp_path / "run" / "result.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000009")
    run = train(dataclasses.replace(config, log_every=1))
    assert run.read_recipe()["log_every"] == 1
    lines = {line["step"]: line for line in whole.read_metrics() if "loss" in line}
    found = [line for line in run.read_metrics() if "loss" in line]
    assert [line["step"] for line in found] == [2, 4, 6, 7, 8, 9]  # on from step 6
    assert all(line == lines[line["step"]] for line in found)


def test_other_data_is_refused_and_a_copy_of_it_is_not(tmp_path):
    config = small.config(tmp_path / "run")
    run = train(config)
    (run.path / "result.json").unlink()
    copy = tmp_path / "copy"
    shutil.copytree(small.data(), copy)
    train(dataclasses.replace(config, data=str(copy), on_nan="skip"))
    small.replace_file(copy, "train-00000.bin", np.fromfile(copy / "train-00000.bin", np.uint16)[::-1].tobytes())
    for finished in (True, False):
        train_refused(
            dataclasses.replace(config, data=str(copy)), "not that of the data this run began with", code=DATA
        )
        if finished:
            (run.path / "result.json").unlink()


def test_a_checkpoint_names_its_data(tmp_path):
    """So that whoever loads it can tell other data."""
    run = train(small.config(tmp_path / "run"))
    for path in list_checkpoints(run.checkpoints):
        assert load_checkpoint(path).state["data"] == {"sha256": data_hash(small.data())}
    assert data_hash(run.data_meta()) == data_hash(small.data())


def test_ranks_agree_on_the_content_of_the_data(tmp_path):
    """Not on where it was prepared, nor from what."""
    config, copy = small.config(tmp_path / "run"), shutil.copytree(small.data(), tmp_path / "copy")
    here = facts(config, open_data(small.data()))
    meta = json.loads((copy / "meta.json").read_text())
    (copy / "meta.json").write_text(json.dumps({**meta, "source": ["elsewhere"]}))
    assert facts(config, open_data(copy)) == here
    tokens = np.fromfile(copy / "train-00000.bin", np.uint16)
    small.replace_file(copy, "train-00000.bin", tokens[::-1].tobytes())
    other = facts(config, open_data(copy))
    assert {name for name in here if other[name] != here[name]} == {"the data"}


def test_another_tokenizer_is_refused(tmp_path):
    config = small.config(tmp_path / "run")
    run = train(config)
    (run.path / "result.json").unlink()
    other = tmp_path / "data"
    shutil.copytree(small.data(), other)
    small.replace_file(other, "tokenizer.json", (other / "tokenizer.json").read_bytes() + b"\n")
    train_refused(dataclasses.replace(config, data=str(other)), "not the tokenizer this run began with", code=DATA)


# Elsewhere: TensorBoard, Weights & Biases, the screen.


def test_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = small.config(tmp_path / "run", tensorboard=True)
    run = train(config)
    assert list((run.path / "tensorboard").glob("events.out.tfevents.*"))

    def scalars(name):
        events = accumulator.EventAccumulator(str(run.path / "tensorboard"))
        events.Reload()
        return {e.step: e.value for e in events.Scalars(name)}, len(events.Scalars(name))

    for name in ("loss", "val_loss", "lr", "grad_norm"):
        expected = {line["step"]: line[name] for line in run.read_metrics() if name in line}
        assert scalars(name)[0] == pytest.approx(expected, rel=1e-6)
    (run.path / "result.json").unlink()
    shutil.rmtree(run.checkpoints / "step-00000006")
    train(config)  # from step 3 on again: the steps after it are not there twice
    assert scalars("loss")[1] == 6


def test_wandb(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, numbers, step):
            calls.append((step, numbers))

        def finish(self):
            calls.append("finished")

    ids = []

    def init(project, id, resume, **rest):
        assert resume == "allow"
        assert rest["config"]["dim"] == 16
        ids.append((project, id))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = small.config(tmp_path / "run", wandb="depths")
    run = train(config)
    assert calls[-1] == "finished"
    assert [n["loss"] for _, n in calls[:-1] if "loss" in n] == losses(run)
    assert calls[0][0] == 1
    for project in ("depths", "others", "depths"):  # going on, in another project, and back
        (run.path / "result.json").unlink()
        train(dataclasses.replace(config, wandb=project))
    assert [project for project, _ in ids] == ["depths", "depths", "others", "depths"]
    assert ids[0] == ids[1] == ids[3]
    train(dataclasses.replace(config, out=str(tmp_path / "another")))
    assert len({name for _, name in ids}) == 3


@pytest.mark.parametrize(("option", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_logger_that_is_not_installed(tmp_path, monkeypatch, option, module):
    monkeypatch.setitem(sys.modules, module, None)
    value = "depths" if option == "wandb" else True
    train_refused(small.config(tmp_path / "run", **{option: value}), f"{option} is not installed", "pip install")


def test_progress_in_plain_lines(tmp_path, capsys):
    train(small.config(tmp_path / "run", quiet=False), label="my run")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("my run  6/6  loss ")
    assert all(word in err for word in ("val ", "tokens/s", "0:00 left"))
    train(small.config(tmp_path / "quiet"))
    assert capsys.readouterr() == ("", "")


def test_progress_with_rich(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_rich", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    train(small.config(tmp_path / "run", quiet=False, steps=20, warmup=1))
    err = capsys.readouterr().err
    assert all(word in err for word in ("residual", "20/20", "loss", "tokens/s", "GiB"))
    with progress.phases() as show:
        show("scan", 1, None)
        show("scan", 3, 3)
    assert "scan" in capsys.readouterr().err


def test_durations():
    assert [progress.duration(s) for s in (-1, 0, 59.6, 125, 3723)] == ["0:00", "0:00", "1:00", "2:05", "1:02:03"]


# Devices and step times.


def test_devices(monkeypatch):
    assert device.choose_device("cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.choose_device("auto").type == "cuda"
    assert device.choose_device("cuda:1").index == 1
    with pytest.raises(UserError, match="there are 2 GPUs"):
        device.choose_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert device.choose_device("auto").type == "mps"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert device.choose_device("auto").type == "cpu"
    for name in ("cuda", "mps", "meta"):
        with pytest.raises(UserError, match="not available here"):
            device.choose_device(name)
    for name in ("", "gpu", "0", "cuda:x"):
        with pytest.raises(UserError, match="must be cpu, cuda"):
            device.choose_device(name)


def test_one_output_that_would_stay_at_zero_is_enough(tmp_path, monkeypatch):
    mixer = create_mixer("rezero", dim=8, n_blocks=1)
    monkeypatch.setattr(check, "create_mixer", lambda name, **sizes: mixer)
    config = small.config(tmp_path / "x", mixer="rezero", output_scale=0.0)
    for start, refused in ([0.0, 0.0], True), ([0.0, 1.0], True), ([1.0, 1.0], False):
        mixer.alpha.data = torch.tensor(start)
        with pytest.raises(UserError, match="never learn") if refused else contextlib.nullcontext():
            check.check_start(config)
    mixer.alpha.data.zero_()
    check.check_start(dataclasses.replace(config, init="a model that is trained"))


def test_peak_memory_is_that_of_the_run_or_unknown(monkeypatch):
    large = b"x" * 200_000_000  # torch gives memory back a little later
    before = device.PeakMemory(torch.device("cpu"))
    if not before.known:
        pytest.skip("this system does not start the count anew")
    peak = before.read()
    assert peak > 200_000_000
    del large
    assert before.read() > peak - 50_000_000  # the system counts roughly
    assert device.PeakMemory(torch.device("cpu")).read() < peak - 100_000_000

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refuse)
    assert device.PeakMemory(torch.device("cpu")).read() is None


def test_the_environment_is_written(tmp_path):
    run = train(small.config(tmp_path / "run"))
    found = json.loads((run.path / "environment.json").read_text())
    assert found["torch"] == torch.__version__
    assert found["device"] == "cpu"
