"""A training that dies before its k-th file operation, or loses power after its k-th sync, ends as if nothing had happened.

Run as a script, this file is the process that dies again and again (`die_everywhere`, `lose_power`): it forks the trainings.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import forking
from depthmix.runs.checkpoint import list_checkpoints, load_checkpoint
from depthmix.runs.folder import RunFolder
from depthmix.train.loop import train
from train import small

WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.listdir", "os.scandir")
TRIALS = 8  # deaths, spread evenly over all operations of a training
CUTS = 3  # losses of power
SHAPE = {"steps": 6, "save_every": 2, "eval_every": 3, "keep": 2}


def outcome(folder):
    newest = list_checkpoints(folder / "checkpoints")[0]
    return (folder / "metrics.jsonl").read_bytes(), (newest / "model.safetensors").read_bytes()


def in_child(call):
    """How a process ended that made a call: 0, or the number of a signal with a minus."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(k, folder):
    """From now on, die before the k-th thing that is done to files in a folder; count them where k is 0."""
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event not in WATCHED or not str(arguments[0]).startswith(str(folder)):
            return
        seen += 1
        if seen == k:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return lambda: seen


def check_good(folder):
    """Whatever is there after a death or a loss of power is whole."""
    for path in list_checkpoints(folder / "checkpoints"):
        load_checkpoint(path)


def check_ended(folder, expected):
    """The run has ended as an uninterrupted one, and nothing is left over."""
    assert outcome(folder) == expected, folder
    assert RunFolder(folder).has_result()
    names = [p.name for p in (folder / "checkpoints").iterdir()]
    assert sorted(names) == ["step-00000004", "step-00000006"], names
    assert not list(folder.glob(".tmp-*")), folder


def die_everywhere(work, data):
    whole, count = work / "whole", work / "count"

    def counted():
        seen = die_at(0, whole)
        train(small.config(whole, data=data, **SHAPE))
        count.write_text(str(seen()))

    # In this process, so that the children have imported everything.
    expected = outcome(train(small.config(work / "first", data=data, **SHAPE)).path)
    assert in_child(counted) == 0
    operations = int(count.read_text())
    assert operations > 100, operations
    for trial in range(TRIALS):
        k = 1 + trial * (operations - 1) // (TRIALS - 1)
        config = small.config(work / f"run-{k}", data=data, **SHAPE)
        out = Path(config.out)

        def dies(k=k, config=config, out=out):
            die_at(k, out)
            train(config)

        assert in_child(dies) == -signal.SIGKILL, k
        check_good(out)
        assert in_child(lambda config=config: train(config)) == 0, k
        check_ended(out, expected)
    print(json.dumps({"operations": operations, "trials": TRIALS}))


def lose_power(work, data):
    """What is on a disk when the power goes: what was synced, and whatever else the system has come to write.

    A file system in a file: its pages wait in memory as those of a disk would, and a copy of the file is the disk at that instant.
    """
    with mounted(work) as (disk, image):
        count, cuts = work / "count", work / "cuts"
        cuts.mkdir()
        config = small.config(disk / "run", data=data, **SHAPE)
        sync = os.fsync

        def cut(at):
            """Copy the disk after some of the syncs; how many there were."""
            seen = 0

            def synced(descriptor):
                nonlocal seen
                sync(descriptor)
                seen += 1
                if seen in at:
                    shutil.copyfile(image, cuts / f"{seen}.img")

            os.fsync = synced
            train(config)
            count.write_text(str(seen))

        expected = outcome(train(small.config(work / "first", data=data, **SHAPE)).path)
        assert in_child(lambda: cut(())) == 0
        syncs = int(count.read_text())
        shutil.rmtree(disk / "run")
        assert syncs > 30, syncs
        at = {1 + i * (syncs - 1) // (CUTS - 1) for i in range(CUTS)}
        assert in_child(lambda: cut(at)) == 0
    steps = []
    for image in sorted(cuts.iterdir()):
        with mounted(work, image) as (disk, _):
            check_good(disk / "run")
            steps += [int(p.name[-8:]) for p in list_checkpoints(disk / "run" / "checkpoints")[:1]]
            assert in_child(lambda disk=disk: train(small.config(disk / "run", data=data, **SHAPE))) == 0, image
            check_ended(disk / "run", expected)
    assert set(steps) > {2}, steps  # some cuts came after a checkpoint, and it was there
    print(json.dumps({"syncs": syncs, "cuts": len(at)}))


@contextmanager
def mounted(work, image=None):
    """A small ext4 in a file, new or as it was copied; its journal is written back late, so that unsynced data is lost."""
    disk = work / "disk"
    disk.mkdir(exist_ok=True)
    if image is None:
        image = work / "disk.img"
        with open(image, "wb") as file:
            file.truncate(12 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop,commit=300", str(image), str(disk)], check=True)
    try:
        yield disk, image
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def why_not_mounted(work):
    """Why no file system can be mounted here; None if one can."""
    if os.geteuid():
        return "mounting needs root"
    if shutil.which("mkfs.ext4") is None:
        return "there is no mkfs.ext4"
    try:
        with mounted(work):
            return None
    except subprocess.CalledProcessError as error:
        return f"{error.cmd[0]} is not permitted here"


def asked(what, work):
    code = f"import runpy, sys; sys.argv[0] = {__file__!r}; runpy.run_path({__file__!r}, run_name='__main__')"
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(str(p) for p in Path(__file__).parents[1:3])}
    # A process of one thread, which can fork without danger.
    done = forking.python(code, what, work, small.data(), env=here, first=forking.TRAINING)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_death_before_any_file_operation_loses_nothing(tmp_path):
    assert asked("die_everywhere", tmp_path)["trials"] == TRIALS


def test_a_power_cut_after_any_sync_loses_nothing(tmp_path):
    if reason := why_not_mounted(tmp_path):
        pytest.skip(reason)
    assert asked("lose_power", tmp_path)["cuts"] >= CUTS


if __name__ == "__main__":
    torch.set_num_threads(1)
    small.prepare_to_fork("residual")
    {"die_everywhere": die_everywhere, "lose_power": lose_power}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
