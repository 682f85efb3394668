"""Every file of a run, damaged in every way: a reader refuses it in one sentence, or finds exactly what it would have found."""

import random
import shutil

import pytest
import torch

from depthmix.compare.rows import read_run
from depthmix.config import TrainConfig
from depthmix.errors import UserError
from depthmix.runs.checkpoint import list_checkpoints
from depthmix.runs.folder import RunFolder
from depthmix.runs.restore import load_model
from depthmix.train.loop import train
from train import small

NEWEST = "checkpoints/step-00000006"
# Files whose every changed byte is refused by whoever reads them, wherever it lies.
SEALED = [
    "tokenizer.json",
    "data.json",
    "metrics.jsonl",
    *(f"{NEWEST}/{name}" for name in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")),
]
# Files of which some bytes mean nothing: comments, spaces, names that older versions do not have.
OPEN = ["recipe.yaml", "result.json", "environment.json"]
RANDOM = 2  # positions besides the first, the middle and the last


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return train(small.config(tmp_path_factory.mktemp("damage") / "run", mixer="attnres")).path


@pytest.fixture(scope="module")
def expected(original, tmp_path_factory):
    return outcome(shutil.copytree(original, tmp_path_factory.mktemp("whole") / "run"))


def outcome(path):
    """What readers find: the model with its configuration and tokens, the numbers of a table, and how the run ends if it goes on."""
    trained = load_model(path, torch.device("cpu"))
    weights = b"".join(p.detach().numpy().tobytes() for p in trained.model.parameters())
    config = {
        k: v for k, v in vars(trained.config).items() if k in ("dim", "n_heads", "seq_len", "norm_eps", "lr", "seed")
    }
    tokens = trained.tokenizer.encode("The sea is deep, 東京").ids
    row = read_run(path, "attnres")
    again = RunFolder(path)
    recipe = again.read_recipe()
    (path / "result.json").unlink()
    train(TrainConfig(**{k: v for k, v in recipe.items() if k in vars(TrainConfig())} | {"out": str(path)}))
    lines = (path / "metrics.jsonl").read_bytes()
    return (
        weights,
        config,
        str(trained.model.mixer),
        tokens,
        row.val_loss,
        row.curve,
        lines,
        again.read_result()["val_loss"],
    )


def damaged(raw, rng):
    """(what was done, the content then) for every kind of damage."""
    places = [0, len(raw) // 2, len(raw) - 1, *rng.sample(range(len(raw)), RANDOM)]
    for place in places:
        bad = bytearray(raw)
        bad[place] ^= 1 << rng.randrange(8)
        yield f"bit at {place}", bytes(bad)
    digits = [i for i, byte in enumerate(raw) if byte in b"123456789"]
    if digits:  # what a bit seldom does, and hurts most: a number that is another number
        place = rng.choice(digits)
        yield f"digit at {place}", raw[:place] + bytes([raw[place] - 1]) + raw[place + 1 :]
    for size in (0, len(raw) // 2, len(raw) - 1):
        yield f"cut to {size}", raw[:size]
    yield "longer", raw + b"\0"
    yield "zeros", bytes(len(raw))


def found(path, name, content, original):
    """The outcome for a copy of the run with another content of one file; None where it is refused."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(original, path)
    (path / name).write_bytes(content)
    try:
        return outcome(path)
    except UserError as error:
        return None if "\n" not in str(error) else str(error)


@pytest.mark.parametrize("name", SEALED)
def test_a_sealed_file_is_refused_whatever_byte_has_changed(tmp_path, original, name):
    raw, rng = (original / name).read_bytes(), random.Random(name)
    for what, content in damaged(raw, rng):
        assert found(tmp_path / "run", name, content, original) is None, (name, what)


@pytest.mark.parametrize("name", OPEN)
def test_other_files_are_refused_or_change_no_number(tmp_path, original, expected, name):
    raw, rng = (original / name).read_bytes(), random.Random(name)
    refused = 0
    for what, content in damaged(raw, rng):
        ending = found(tmp_path / "run", name, content, original)
        assert ending in (None, expected), (name, what)
        refused += ending is None
    assert refused or name == "environment.json"


def test_the_damage_is_of_the_newest_checkpoint(original):
    assert list_checkpoints(original / "checkpoints")[0] == original / NEWEST
