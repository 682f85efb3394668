"""Checkpoints under real failures: kills, full disks, flipped bytes, foreign files.

Run as a script, this file is the process that gets killed (see `killed` and `killed_everywhere`).
"""

import hashlib
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from depthmix.train.checkpoint import latest_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from depthmix.train.errors import CHECKPOINT, DISK, UserError

FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


def save(folder, step, keep=2, n=None, size=64):
    n = step if n is None else n
    model = {"w": torch.full((size,), float(n)), "b": torch.arange(n, n + 3)}
    return save_checkpoint(folder, step, model, {"exp_avg/w": torch.full((size,), n / 8)}, {"n": n}, keep)


def holds(checkpoint, n):
    return (
        checkpoint.state == {"n": n}
        and bool((checkpoint.model["w"] == n).all())
        and checkpoint.model["b"].tolist() == [n, n + 1, n + 2]
        and bool((checkpoint.optimizer["exp_avg/w"] == n / 8).all())
    )


def refused(call, *words, code=CHECKPOINT):
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert caught.value.exit_code == code, message
    for word in words:
        assert str(word) in message
    assert "\n" not in message
    return message


def no_warning(sentence):
    raise AssertionError(sentence)


def forge(path, **contents):
    """Replace files of a checkpoint and make the manifest agree, as only malice or a bug would."""
    for name, data in contents.items():
        (path / name.replace("_", ".")).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_bytes())
    for name, entry in manifest["files"].items():
        data = (path / name).read_bytes()
        entry["size"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


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


@pytest.mark.parametrize(("step", "keep"), [(-1, 1), (True, 1), (1.0, 1), (1, 0)])
def test_wrong_step_or_keep(tmp_path, step, keep):
    with pytest.raises(ValueError, match="must be"):
        save_checkpoint(tmp_path, step, {}, {}, {}, keep)


# Which ones are there


def test_newest_first_and_pruned(tmp_path):
    for folder in (tmp_path / "nowhere", tmp_path):
        assert list_checkpoints(folder) == []
        assert latest_checkpoint(folder) is None
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


@pytest.mark.parametrize("field", ["version", "more", "null", "numbers", "swapped"])
def test_manifest_with_other_content(tmp_path, field):
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_bytes())
    files = manifest["files"]
    if field == "version":
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
    assert ("format version 2" in message) == (field == "version")


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
    assert "state.json is missing" in heard[0]
    assert "model.safetensors has 4 bytes" in heard[1]
    with pytest.warns(UserWarning, match="is broken and was passed over"):
        latest_checkpoint(tmp_path)
    shutil.rmtree(tmp_path / "step-00000001")
    refused(lambda: latest_checkpoint(tmp_path, heard.append), tmp_path, "state.json is missing")


# A disk that fails


@contextmanager
def file_size_limit(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_cannot_be_written_whole(tmp_path):
    refused_first = tmp_path / "first"
    with file_size_limit(10_000):
        refused(lambda: save(refused_first, 1, size=10_000), "there is no earlier one", refused_first, code=DISK)
    assert list(refused_first.iterdir()) == []
    save(tmp_path, 1)
    for size in (0, 1, 100, 300, 39_000, 40_000):
        with file_size_limit(size):
            message = refused(lambda: save(tmp_path, 2, size=10_000), "step 2", "step-00000001", code=DISK)
        assert "larger than a limit" in message
        assert holds(latest_checkpoint(tmp_path, warn=no_warning), 1)
        assert not any(p.name.startswith(".") for p in tmp_path.iterdir())
        with file_size_limit(size):
            refused(lambda: save(tmp_path, 1, n=5, size=10_000), code=DISK)
        assert holds(latest_checkpoint(tmp_path, warn=no_warning), 1)  # the one it would have replaced
    save(tmp_path, 2, size=10_000)
    assert holds(latest_checkpoint(tmp_path, warn=no_warning), 2)


@contextmanager
def small_disk(path):
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=40", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        folder = disk / "checkpoints"
        save(folder, 1, size=20_000)  # 160 kB
        filler = disk / "filler"
        for room in (300_000, 200_000, 150_000, 100_000, 50_000, 4096, 0):
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            filler.write_bytes(b"x" * max(0, free + (filler.stat().st_size if filler.exists() else 0) - room))
            if room >= 200_000:
                save(folder, 2, size=20_000)
                assert holds(latest_checkpoint(folder, warn=no_warning), 2)
                shutil.rmtree(folder / "step-00000002")
            else:
                still = f"still there: {folder / 'step-00000001'}"
                refused(lambda: save(folder, 2, size=20_000), "the disk is full", still, code=DISK)
                assert [p.name for p in folder.iterdir()] == ["step-00000001"]
                assert holds(latest_checkpoint(folder, warn=no_warning), 1)
        filler.unlink()
        for i in range(40):  # out of inodes instead of blocks
            with suppress(OSError):
                (disk / f"f{i}").touch()
        refused(lambda: save(folder, 2), "the disk is full", "step-00000001", code=DISK)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        refused(lambda: save(folder, 2), "read-only", "step-00000001", code=DISK)
        assert holds(latest_checkpoint(folder, warn=no_warning), 1)


def test_a_folder_that_vanished(tmp_path):
    (tmp_path / "run").mkdir()
    save(tmp_path / "run" / "checkpoints", 1)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    save(tmp_path / "run" / "checkpoints", 2)  # made again
    shutil.rmtree(tmp_path / "run")
    refused(lambda: save(tmp_path / "run" / "checkpoints", 3), tmp_path / "run", "no such file", code=DISK)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_may_not_be_written(request):
    base = Path(tempfile.mkdtemp())
    request.addfinalizer(lambda: shutil.rmtree(base))
    folder = base / "checkpoints"
    path = save(folder, 1)
    for p, mode in ((base, 0o755), (folder, 0o555), (path / "state.json", 0o644)):
        p.chmod(mode)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        refused(lambda: save(folder, 2), "permission denied", path, code=DISK)
    finally:
        if root:
            os.seteuid(0)
        (path / "state.json").chmod(0)
        folder.chmod(0o755)
    if root:
        os.seteuid(65534)
    try:
        refused(lambda: load_checkpoint(path), "permission denied", "state.json")
    finally:
        if root:
            os.seteuid(0)


# Kills


def check_after_kill(folder, announced):
    latest = latest_checkpoint(folder, warn=no_warning)
    n = -1 if latest is None else latest.state["n"]
    assert latest is None or holds(latest, n)
    assert n >= announced, f"{announced} was announced as complete, {n} was found"
    for path in list_checkpoints(folder):
        load_checkpoint(path)  # none of them is broken, the older ones neither
    return n


def fork_and_kill(folder, n, same_step, delay):
    """A child that saves over and over; the last n it announced before it was killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            os.close(read)
            while True:
                n += 1
                save(folder, 7 if same_step else n, keep=2, n=n, size=5000)
                os.write(write, struct.pack("<q", n))
        os._exit(1)
    os.close(write)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with open(read, "rb") as pipe:
        said = pipe.read()
    return struct.unpack("<q", said[-8:])[0] if said else None


def killed(base):
    rng = random.Random(3)
    for same_step in (False, True):
        folder, n, left = base / f"random-{same_step}", -1, 0
        for _ in range(25):
            announced = fork_and_kill(folder, n, same_step, rng.uniform(0.005, 0.06))
            n = check_after_kill(folder, n if announced is None else announced)
            left += any(p.name.startswith(".") for p in folder.iterdir()) if folder.exists() else 0
        assert left, "no kill hit a save"
        print("random kills", same_step, "saves", n, "kills inside a save", left)


def killed_everywhere(base):
    """Die before the k-th thing a save does to the file system, for every k."""
    watched = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir"}
    for same_step in (False, True):
        folder = base / f"everywhere-{same_step}"
        n = check_after_kill(folder, -1)
        for _ in range(3):
            n += 1
            save(folder, 7 if same_step else n, n=n)
        for k in range(1, 200):
            n += 1
            child = os.fork()
            if child == 0:
                seen = 0

                def hook(event, arguments):
                    nonlocal seen
                    if event in watched:
                        seen += 1
                        if seen == k:  # noqa: B023
                            os.kill(os.getpid(), signal.SIGKILL)

                sys.addaudithook(hook)
                save(folder, 7 if same_step else n, n=n)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            n = check_after_kill(folder, n if code == 0 else n - 1)
            if code == 0:
                break
            assert code == -signal.SIGKILL
        assert 15 < k < 199, k
        save(folder, 7 if same_step else n + 1, n=n + 1)
        names = sorted(p.name for p in folder.iterdir())  # tidy again
        assert len(names) == 2 - same_step, names
        assert not any(name.startswith(".") for name in names), names
        print("events of a save", same_step, k)


def test_a_kill_at_any_instant(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]  # a process of one thread, which can fork without danger
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    torch.set_num_threads(1)
    killed(Path(sys.argv[1]))
    killed_everywhere(Path(sys.argv[1]))
