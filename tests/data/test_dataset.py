"""Prepared data, read back: windows across shards, batches that are functions of the step, folders that are refused."""

import hashlib
import json
import time

import numpy as np
import pytest
import torch

from depthmix.data.dataset import Batches, TokenData, validation_batches
from depthmix.data.writing import ShardWriter
from depthmix.errors import DATA, USAGE, UserError

TRAIN = np.random.default_rng(0).integers(0, 300, 1003)
VAL = np.arange(95) % 300
SHA256 = hashlib.sha256(b"{}").hexdigest()


def write(folder, train=TRAIN, val=VAL, dtype="uint16", limit=1 << 20, **meta):
    folder.mkdir(exist_ok=True)
    splits = []
    for name, ids in (("train", train), ("val", val)):
        writer = ShardWriter(folder, name, np.dtype(dtype), limit)
        writer.write(ids[:13], 20, False)
        writer.write(ids[13:], 30, True)
        writer.close()
        splits.append(writer)
    (folder / "tokenizer.json").write_text("{}")
    content = {
        "version": 1,
        "dtype": dtype,
        "vocab_size": 300,
        "tokenizer": "tokenizer.json",
        "splits": {s.name: s.meta() for s in splits},
        "sha256": {"tokenizer.json": SHA256, **{k: v for s in splits for k, v in s.sha256.items()}},
        **meta,
    }
    (folder / "meta.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "data")


def refuses(message, call, code=DATA):
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert caught.value.exit_code == code
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("limit", [1, 7, 100, 1003, 1 << 20])
def test_windows_do_not_see_the_shards(tmp_path, dtype, limit):
    ids = TRAIN + (70_000 if dtype == "uint32" else 0)
    data = TokenData.open(write(tmp_path / "data", train=ids, dtype=dtype, limit=limit))
    split = data.split("train")
    assert len(split.shards) == -(-1003 // limit)
    assert (split.n_tokens, split.n_bytes, split.n_documents, data.vocab_size) == (1003, 50, 1, 300)
    assert data.tokenizer_path == tmp_path / "data" / "tokenizer.json"
    for start, length in ((0, 1003), (5, 300), (99, 2), (700, 303), (3, 0)):
        window = split.window(start, length)
        assert window.dtype == np.int64
        assert window.tolist() == ids[start : start + length].tolist()
    for start, length in ((-1, 5), (1000, 4)):
        with pytest.raises(IndexError):
            split.window(start, length)


def test_an_epoch_takes_every_window_once(folder):
    split = TokenData.open(folder).split("train")
    batches = Batches(split, 10, 7, seed=3)
    assert (batches.n_windows, batches.steps_per_epoch) == (100, 15)
    rows = torch.cat([batches.get(i) for i in range(100)])  # seven epochs exactly
    assert rows.shape == (700, 11)
    assert rows.dtype == torch.int64
    expected = sorted(split.window(10 * i, 11).tolist() for i in range(100))
    epochs = [rows[100 * i : 100 * i + 100].tolist() for i in range(7)]
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert all(a != b for i, a in enumerate(epochs) for b in epochs[:i])


def test_a_batch_is_a_function_of_the_step(folder, tmp_path):
    split = TokenData.open(folder).split("train")
    forward = [Batches(split, 10, 7, 0).get(i).tolist() for i in range(40)]
    batches = Batches(TokenData.open(write(tmp_path / "other", limit=9)).split("train"), 10, 7, 0)
    torch.manual_seed(5)
    np.random.seed(5)
    for i in (39, 0, 17, 16, 38, 3, 3):
        assert batches.get(i).tolist() == forward[i]
    assert Batches(split, 10, 7, 1).get(0).tolist() != forward[0]
    with pytest.raises(IndexError):
        batches.get(-1)


def test_the_order_never_changes(folder):
    """Written down: old runs must resume with the same data."""
    split = TokenData.open(folder).split("val")
    assert Batches(split, 10, 4, 0).get(0)[:, 0].tolist() == [0, 20, 10, 80]
    assert Batches(split, 10, 4, -1).get(0).tolist() != Batches(split, 10, 4, -2).get(0).tolist()


def test_a_batch_larger_than_the_split(folder):
    rows = Batches(TokenData.open(folder).split("val"), 30, 10, 0).get(0)
    assert sorted(rows[:3, 0].tolist()) == sorted(rows[3:6, 0].tolist()) == [0, 30, 60]


def test_validation_batches_come_in_order(folder):
    split = TokenData.open(folder).split("val")
    rows = list(validation_batches(split, 10, 4, None))
    assert [len(r) for r in rows] == [4, 4, 1]
    assert torch.cat(rows).tolist() == [list(range(i, i + 11)) for i in range(0, 90, 10)]
    assert torch.cat(list(validation_batches(split, 10, 4, 59))).shape == (5, 11)
    assert torch.cat(list(validation_batches(split, 10, 4, 3))).shape == (1, 11)


def test_exact_fit(tmp_path):
    split = TokenData.open(write(tmp_path / "data", val=np.arange(41))).split("val")
    assert Batches(split, 40, 1, 0).get(5).tolist() == [list(range(41))]
    assert Batches(split, 10, 1, 0).n_windows == 4
    short = "The val split has 41 tokens, fewer than seq_len \\+ 1 = 42: .* larger val_fraction"
    refuses(short, lambda: Batches(split, 41, 1, 0))
    refuses(short, lambda: validation_batches(split, 41, 1))
    refuses("both must be at least 1", lambda: Batches(split, 0, 1, 0), USAGE)
    refuses("both must be at least 1", lambda: Batches(split, 4, 0, 0), USAGE)


def test_a_batch_takes_less_than_a_millisecond(tmp_path):
    data = TokenData.open(write(tmp_path / "data", train=np.arange(2_000_000) % 300, limit=300_000))
    batches = Batches(data.split("train"), 512, 64, 0)
    batches.get(0)
    seconds = []
    for step in range(1, 40):
        start = time.perf_counter()
        batches.get(step)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1e-3  # the best: others share the machine


def test_folders_that_are_none(tmp_path):
    refuses("There is no folder .*gone: make it with `depthmix data", lambda: TokenData.open(tmp_path / "gone"))
    refuses("is not prepared data, it has no meta.json", lambda: TokenData.open(tmp_path))
    (tmp_path / "meta.json").mkdir()
    refuses("meta.json cannot be read: Is a directory", lambda: TokenData.open(tmp_path))
    refuses("no split 'test'", lambda: TokenData.open(write(tmp_path / "data")).split("test"), USAGE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is damaged, it is not JSON"),
        ('{"version": 1, "spl', "is damaged, it is not JSON"),
        ("\xff", "is damaged, it is not JSON"),
        ("[1]", "is not one of `depthmix data`"),
        ('{"name": "x"}', "is not one of `depthmix data`"),
        ('{"version": 1}', "is not one of `depthmix data`"),
    ],
)
def test_meta_that_is_none(folder, content, message):
    (folder / "meta.json").write_bytes(content.encode("latin-1"))
    refuses(f"meta.json {message}", lambda: TokenData.open(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has version 2 of the format and this depthmix reads 1"),
        ({"dtype": "float32"}, r"is damaged \(dtype\)"),
        ({"vocab_size": 0}, r"is damaged \(vocab_size\)"),
        ({"vocab_size": "many"}, r"is damaged \(vocab_size\)"),
        ({"tokenizer": "../tokenizer.json"}, r"is damaged \(tokenizer\)"),
        ({"tokenizer": "gone.json"}, "gone.json is missing"),
        ({"sha256": None}, r"is damaged \(sha256\)"),
        ({"splits": []}, r"is damaged \(split train\)"),
        (
            {"splits": {"train": {"tokens": 1, "bytes": True, "documents": 1, "shards": ["a"]}}},
            r"is damaged \(split train\)",
        ),
        (
            {"splits": {"train": {"tokens": 1, "bytes": 1, "documents": 1, "shards": ["/etc/passwd"]}}},
            r"is damaged \(shards of train\)",
        ),
        (
            {"splits": {"train": {"tokens": 1, "bytes": 1, "documents": 1, "shards": []}}},
            r"is damaged \(shards of train\)",
        ),
    ],
)
def test_meta_that_does_not_fit(tmp_path, change, message):
    folder = write(tmp_path / "data", **change)
    refuses(message, lambda: TokenData.open(folder))


def test_files_that_do_not_fit(folder):
    path = folder / "train-00000.bin"
    good = path.read_bytes()
    path.write_bytes(good[:-3])
    refuses("train-00000.bin is damaged, it is cut short", lambda: TokenData.open(folder))
    path.write_bytes(b"")
    refuses("train-00000.bin is damaged, it is cut short", lambda: TokenData.open(folder))
    path.write_bytes(good[:-2])
    refuses("its train split has 1002 tokens on disk and 1003 in meta.json", lambda: TokenData.open(folder))
    path.write_bytes(good[:-2] + b"\1\1")
    refuses(r"train-00000.bin is damaged \(wrong checksum\)", lambda: TokenData.open(folder))
    path.unlink()
    refuses("train-00000.bin is missing", lambda: TokenData.open(folder))
    path.write_bytes(good)
    TokenData.open(folder).verify()
