"""Checkpoints that are saved, listed, broken and foreign: what is saved is what is loaded, or a sentence says why not."""

import json
import math
import os
import pickle
import random
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

import forking
from depthmix.errors import DISK
from depthmix.runs import checkpoint
from depthmix.runs.checkpoint import (
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from project import ROOT
from train.checkpoints import FILES, forge, holds, no_warning, save
from train.refused import refused

# What is saved is what is loaded


def test_every_tensor_comes_back_bit_for_bit(tmp_path):
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    whole = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    model = {f"{d}": torch.randn(3, 5).to(d) for d in kinds} | {f"{d}": torch.randint(0, 2, (7,)).to(d) for d in whole}
    model["strided"] = torch.randn(4, 6).t()[::2]
    model["expanded"] = torch.randn(3, 1).expand(3, 4)
    model["scalar"] = torch.tensor(-0.0)
    model["empty"] = torch.zeros(0, 3, dtype=torch.bfloat16)
    model["grad"] = torch.nn.Parameter(torch.randn(2))
    model["tied"] = model["grad"]
    model['odd names: ü " \\ \n 名'] = torch.tensor([math.nan, math.inf, -math.inf])
    optimizer = {"rng": torch.get_rng_state()}
    path = save_checkpoint(tmp_path / "c", 7, model, optimizer, {}, 1)
    loaded = load_checkpoint(path)
    assert (loaded.step, loaded.state, loaded.path) == (7, {}, path)
    theirs = load_file(path / "model.safetensors")  # a plain safetensors file
    assert set(loaded.model) == set(model) == set(theirs)
    for name, tensor in model.items():
        for got in (loaded.model[name], theirs[name]):
            assert (got.dtype, got.shape, got.requires_grad) == (tensor.dtype, tensor.shape, False)
            assert torch.equal(
                got.reshape(-1).view(torch.uint8), tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            )
    assert torch.equal(loaded.optimizer["rng"], optimizer["rng"])
    torch.set_rng_state(loaded.optimizer["rng"])
    loaded.model["grad"].add_(1)  # memory of its own: the file stays as it is
    assert torch.equal(load_checkpoint(path).model["grad"], model["grad"])


def test_safetensors_reads_and_writes_the_same_bytes(tmp_path):
    model = {"b": torch.randn(3), "a": torch.ones(2, dtype=torch.uint8), "c": torch.zeros(1, dtype=torch.float64)}
    path = save_checkpoint(tmp_path, 0, model, {}, {}, 1)
    save_file(model, tmp_path / "reference", metadata={"format": "pt"})
    assert (path / "model.safetensors").read_bytes() == (tmp_path / "reference").read_bytes()


def test_state_comes_back_exactly(tmp_path):
    rng = random.Random(0)
    floats = [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(500)]
    floats = [f for f in floats if math.isfinite(f)] + [5e-324, -0.0, 0.1, 1e308]
    state = {
        "floats": floats,
        "ints": [0, -1, 2**63, 10**40],
        "s": "ü\0\n\ud800 名",
        "deep": {"a": [{}, [], None, True]},
    }
    got = load_checkpoint(save_checkpoint(tmp_path, 1, {}, {}, state, 1)).state
    assert got == state
    assert [struct.pack("<d", f) for f in got["floats"]] == [struct.pack("<d", f) for f in floats]
    assert [type(x) for x in got["deep"]["a"]] == [dict, list, type(None), bool]


@pytest.mark.parametrize(
    "state", [{"x": math.nan}, {"x": [math.inf]}, {1: 2}, {"x": (1, 2)}, {"x": {1}}, {"x": torch.ones(1)}, [1], None]
)
def test_state_json_cannot_hold_is_refused_before_anything_is_written(tmp_path, state):
    with pytest.raises(ValueError, match="state"):
        save_checkpoint(tmp_path / "c", 1, {}, {}, state, 1)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "model",
    [{"a": torch.zeros(1, dtype=torch.complex64)}, {"__metadata__": torch.ones(1)}, {"s": torch.eye(2).to_sparse()}],
)
def test_tensors_the_format_cannot_hold_are_refused(tmp_path, model):
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="cannot hold"):
        save_checkpoint(tmp_path, 2, {"fine": torch.ones(2)}, model, {}, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


# Which ones are there


def test_newest_first_and_pruned(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        assert list_checkpoints(folder) == []
        assert latest_checkpoint(folder, warn=no_warning) is None
    for step in (5, 10, 99_999_999, 100_000_000):
        path = save(tmp_path, step, keep=2)
        assert path == list_checkpoints(tmp_path)[0]
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-100000000", "step-99999999"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-100000000", "step-99999999"]
    save(tmp_path, 100_000_001, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-100000001"]


def test_a_save_behind_newer_checkpoints_is_kept(tmp_path):
    for step in (1, 2, 9):
        save(tmp_path, step, keep=3)
    (tmp_path / "step-00000009" / "state.json").write_text("{}")
    save(tmp_path, 3, keep=1)  # a run that went on from 2 because 9 is broken
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000009", "step-00000003"]
    assert latest_checkpoint(tmp_path, warn=lambda sentence: None).step == 3


def test_the_same_step_again_replaces_it(tmp_path):
    save(tmp_path, 4, n=1)
    save(tmp_path, 4, n=2)
    assert holds(load_checkpoint(tmp_path / "step-00000004"), 2)
    shutil.rmtree(tmp_path / "step-00000004")
    (tmp_path / "step-00000004").write_text("a file in the way")
    save(tmp_path, 4, n=3)
    assert holds(latest_checkpoint(tmp_path, warn=no_warning), 3)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def test_leftovers_are_removed_and_other_files_are_not(tmp_path):
    (tmp_path / ".tmp-step-00000003-1").mkdir()
    (tmp_path / ".tmp-step-00000003-1" / "model.safetensors").write_text("half")
    (tmp_path / ".tmp-step-00000004-2").write_text("a file")
    (tmp_path / "notes.txt").write_text("mine")
    save(tmp_path, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-00000005"]


def test_a_replacement_cut_short_is_undone(tmp_path):
    save(tmp_path, 3, n=1)
    (tmp_path / "step-00000003").rename(tmp_path / ".old-step-00000003")  # killed between the two renames
    assert holds(latest_checkpoint(tmp_path, warn=no_warning), 1)
    save(tmp_path, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


# Broken and foreign


def test_every_flipped_byte_is_found(tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    rng = random.Random(1)
    for name in FILES:
        good = (path / name).read_bytes()
        positions = range(len(good)) if name == "manifest.json" else rng.sample(range(len(good)), min(60, len(good)))
        for position in positions:
            bad = bytearray(good)
            bad[position] ^= rng.randrange(1, 256)
            (path / name).write_bytes(bad)
            message = refused(lambda: load_checkpoint(path), name)
            assert message.endswith(f"the newest older good one is {tmp_path / 'step-00000001'}.")
        (path / name).write_bytes(good)
    assert holds(load_checkpoint(path), 2)


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_is_found(tmp_path, name):
    path = save(tmp_path, 2)
    good = (path / name).read_bytes()
    lengths = {0, 1, 7, 8, 9, len(good) - 1, len(good) // 2, *random.Random(2).sample(range(len(good)), 20)} - {
        len(good)
    }
    for length in sorted(n for n in lengths if n < len(good)):
        (path / name).write_bytes(good[:length])
        refused(lambda: load_checkpoint(path), name, "there is no older good one")
    (path / name).write_bytes(good + b"\0")
    refused(lambda: load_checkpoint(path), name)
    (path / name).unlink()
    refused(lambda: load_checkpoint(path), name)
    (path / name).mkdir()
    refused(lambda: load_checkpoint(path), name)


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch exploded",))


def test_pickles_are_never_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data in (pickle.dumps(Bomb()), pickle.dumps(Bomb(), protocol=0), b"\x80\x04" + b"\0" * 100, b""):
        for name in ("model_safetensors", "optimizer_safetensors", "state_json"):
            path = save(tmp_path / "c", 1)
            forge(path, **{name: data})
            refused(lambda: load_checkpoint(path), name.replace("_", "."))  # noqa: B023
    path = save(tmp_path / "c", 1)
    torch.save({"w": torch.ones(3)}, path / "model.safetensors")
    forge(path)
    refused(lambda: load_checkpoint(path), "model.safetensors")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "state",
    [
        *(
            b"[]",
            b"null",
            b"3",
            b'"x"',
            b"{}",
            b'{"step": 1}',
            b'{"step": 1, "state": []}',
            b'{"step": "1", "state": {}}',
        ),
        *(b'{"step": true, "state": {}}', b'{"step": 1.0, "state": {}}', b'{"step": 2, "state": {}}', b"\xff\xfe"),
        *(b'{"step": 1, "state": {"x": NaN}}', b"[" * 100_000, b'{"step": -1, "state": {}}', b"{" * 10),
    ],
)
def test_state_of_the_wrong_kind(tmp_path, state):
    path = save(tmp_path, 1)
    forge(path, state_json=state)
    refused(lambda: load_checkpoint(path), "state.json")


@pytest.mark.parametrize(
    "manifest",
    [
        *(b"", b"[]", b"null", b"{}", b"\0\0\0", b"\xff\xfe\xfd", b"[" * 100_000, b"x" * 1_000_000, b'{"files": NaN}'),
        *(b'{"format": "depthmix checkpoint"}', b'{"format": "depthmix checkpoint", "version": true}'),
        *(b'{"format": "depthmix checkpoint", "version": 1}', b'{"format": "other", "version": 1, "files": {}}'),
        *(b'{"format": "depthmix checkpoint", "version": 1, "files": {"../../x": {"size": 0, "sha256": ""}}}',),
        *(b'{"format": "depthmix checkpoint", "version": 1, "files": []}',),
    ],
)
def test_manifest_of_the_wrong_kind(tmp_path, manifest):
    path = save(tmp_path, 1)
    (path / "manifest.json").write_bytes(manifest)
    refused(lambda: load_checkpoint(path), "manifest.json")


@pytest.mark.parametrize("field", ["version", "in parts", "more", "null", "numbers", "swapped"])
def test_manifest_with_other_content(tmp_path, field):
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_bytes())
    files = manifest["files"]
    if field == "version":
        manifest["version"] = 3
    elif field == "in parts":  # which an optimizer in one piece is not
        manifest["version"] = 2
    elif field == "more":
        files["../state.json"] = files["state.json"]
    elif field == "null":
        files["state.json"] = None
    elif field == "numbers":
        files["state.json"] = {"size": "1", "sha256": 7}
    else:
        files["model.safetensors"], files["optimizer.safetensors"] = list(files.values())[1::-1]
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    message = refused(lambda: load_checkpoint(path))
    assert ("format version 3" in message) == (field == "version")


def test_paths_that_are_no_checkpoint(tmp_path):
    save(tmp_path / "c", 3)
    refused(lambda: load_checkpoint(tmp_path / "gone"), tmp_path / "gone", "no such folder")
    refused(lambda: load_checkpoint(tmp_path / "c" / "step-00000007"), tmp_path / "c" / "step-00000003")
    refused(lambda: load_checkpoint(tmp_path / "c"), "no manifest.json")
    (tmp_path / "c" / "step-00000009").mkdir()
    refused(lambda: load_checkpoint(tmp_path / "c" / "step-00000009"), "no manifest.json", "step-00000003")
    (tmp_path / "file").write_text("x")
    refused(lambda: load_checkpoint(tmp_path / "file"), "is a file")
    refused(lambda: list_checkpoints(tmp_path / "file"), tmp_path / "file")
    refused(lambda: load_checkpoint("x" * 5000), "too long")
    refused(lambda: save(tmp_path / "file", 1), tmp_path / "file", code=DISK)


def test_a_copy_under_another_name_loads(tmp_path):
    shutil.copytree(save(tmp_path, 3), tmp_path / "best")
    assert load_checkpoint(tmp_path / "best").step == 3
    shutil.copytree(tmp_path / "best", tmp_path / "step-00000004")
    refused(lambda: load_checkpoint(tmp_path / "step-00000004"), "step 3", "step-00000003")


def test_latest_passes_over_broken_ones_aloud(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=9)
    (tmp_path / "step-00000003" / "state.json").unlink()
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"junk")
    heard = []
    assert holds(latest_checkpoint(tmp_path, heard.append), 1)
    assert [("00000003" in s, "00000002" in s) for s in heard] == [(True, False), (False, True)]
    assert "is broken and was passed over: state.json is missing" in heard[0]
    assert "model.safetensors has 4 bytes" in heard[1]
    shutil.rmtree(tmp_path / "step-00000001")
    refused(lambda: latest_checkpoint(tmp_path, heard.append), tmp_path, "state.json is missing")


# What the system refuses says nothing about a checkpoint


def unreadable(path):
    """A file of which every read is an input/output error: address 0 of this process."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="there is no /proc")
def test_a_disk_that_fails_does_not_make_an_older_checkpoint_the_newest(tmp_path):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    unreadable(newest / "manifest.json")
    words = f"Cannot read the checkpoint {newest}: input/output error", "it may be whole: try again, or move it away"
    for read in (
        lambda folder: latest_checkpoint(folder, no_warning),
        newest_checkpoint,
        lambda folder: load_checkpoint(newest),
    ):
        refused(lambda: read(tmp_path), *words)  # noqa: B023
    newest.rename(tmp_path / "away")
    assert holds(latest_checkpoint(tmp_path, warn=no_warning), 1)


SHORT_OF_MEMORY = """
import resource, sys
from pathlib import Path
from depthmix.runs.checkpoint import latest_checkpoint
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]), resource.RLIM_INFINITY))
latest_checkpoint(sys.argv[1], warn=print)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="there is no /proc")
@pytest.mark.parametrize("room", [10_000_000, 50_000_000])
def test_a_lack_of_memory_does_not_make_an_older_checkpoint_the_newest(tmp_path, room):
    """10 MB are too few to map the file, 50 MB to copy what is in it."""
    save(tmp_path, 1)
    save(tmp_path, 2, size=10_000_000)
    done = forking.python(SHORT_OF_MEMORY, tmp_path, room, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("MemoryError") or "can't allocate memory" in last, done.stderr


def test_a_checkpoint_that_goes_while_it_is_read(tmp_path, monkeypatch):
    """A reader beside a training takes the next newest; who asked for the one that went is told."""
    read = checkpoint._read
    older, newer = save(tmp_path, 1), []

    def goes(path, name):
        if path == older and not newer:
            newer.append(save(tmp_path, 2, keep=1))
            assert not older.exists()
        return read(path, name)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_read", goes)
        assert holds(newest_checkpoint(tmp_path), 2)
        shutil.copytree(newer.pop(), older)  # there again, to go again
        for name in ("state.json", "manifest.json"):
            (older / name).write_bytes((older / name).read_bytes().replace(b'"step": 2', b'"step": 1'))
        forge(older)
        refused(
            lambda: load_checkpoint(older),
            f"There is no checkpoint {older} any more; the newest good one is {tmp_path}",
        )
    shutil.rmtree(tmp_path / "step-00000002")
    assert newest_checkpoint(tmp_path) is None


def test_a_reader_takes_no_older_checkpoint_for_a_broken_newest(tmp_path):
    older, newest = save(tmp_path, 1), save(tmp_path, 2)
    (newest / "optimizer.safetensors").write_bytes(b"torn")
    refused(lambda: newest_checkpoint(tmp_path), newest, "has 4 bytes", f"the newest older good one is {older}")
    assert holds(latest_checkpoint(tmp_path, warn=lambda sentence: None), 1)
