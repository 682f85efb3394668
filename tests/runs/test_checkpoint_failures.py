"""Checkpoints under real failures: full disks and kills.

Run as a script, this file is the process that gets killed (see `killed`, `killed_everywhere` and `described_everywhere`).
"""

import gc
import json
import os
import random
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
from safetensors.torch import load_file

import forking
from depthmix import Decoder, DecoderConfig
from depthmix.errors import DISK
from depthmix.runs.checkpoint import latest_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from depthmix.runs.pretrained import describe_run
from train.checkpoints import holds, no_warning, save
from train.full_disk import file_size_limit
from train.refused import refused

# A disk that fails


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
    root = os.geteuid() == 0
    # Root's TMPDIR may be closed to other users, and then the folder is not even found.
    base = Path(tempfile.mkdtemp(dir="/tmp" if root else None))
    request.addfinalizer(lambda: shutil.rmtree(base))
    folder = base / "checkpoints"
    path = save(folder, 1)
    for p, mode in ((base, 0o755), (folder, 0o555), (path / "state.json", 0o644)):
        p.chmod(mode)
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

WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir"}


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


def die_at(k):
    """From now on, die before the k-th thing that is done to the file system."""
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event in WATCHED:
            seen += 1
            if seen == k:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def killed_everywhere(base):
    """Die before the k-th thing a save does to the file system, for every k."""
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
                die_at(k)
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


def described_everywhere(base):
    """The same, for a run folder that keeps one checkpoint: what its index names is there and whole after every kill."""
    run, model = (
        base / "described",
        Decoder(DecoderConfig(vocab_size=5, dim=4, n_blocks=1, n_heads=1, mixer="residual")),
    )
    run.mkdir()
    tensors = {name: p.detach() for name, p in model.named_parameters()}

    def save_and_describe(step):
        named = {name: torch.full_like(p, step) for name, p in tensors.items()}
        announce = lambda path: describe_run(run, path, model, 8, None)  # noqa: E731
        save_checkpoint(run / "checkpoints", step, named, {}, {"n": step}, 1, announce)

    save_and_describe(1)
    steps, found = 1, set()
    for k in range(1, 200):
        steps += 1
        child = os.fork()
        if child == 0:
            die_at(k)
            save_and_describe(steps)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        places = json.loads((run / "model.safetensors.index.json").read_text())["weight_map"]
        assert places.keys() == tensors.keys()
        for name, place in places.items():
            found.add(load_file(run / place)[name].unique().item())
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert max(found) == steps, (found, steps)
    assert 15 < k < 199, k
    print("events of a described save", k)


def test_a_kill_at_any_instant(tmp_path):
    code = f"import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(str(p) for p in Path(__file__).parents[1:3])}
    # A process of one thread, which can fork without danger.
    done = forking.python(code, tmp_path, env=here, first=forking.TRAINING)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or every process would look through all that was imported, and copy its memory doing so
    killed(Path(sys.argv[1]))
    killed_everywhere(Path(sys.argv[1]))
    described_everywhere(Path(sys.argv[1]))
