"""Places that cannot be written, and disks that fill up. Each ends in one clear sentence."""

import shlex

from depthmix.cli import main
from depthmix.errors import CHECKPOINT, DISK
from train import bad, small
from train.bad import TRAIN, table
from train.full_disk import file_size_limit

fails = bad.fails


@table(
    [
        ("train", "f", CHECKPOINT, "f is a file; choose another folder"),
        ("train", "f/run", DISK, "f/run cannot be written: f is a file; choose another folder"),
        ("train", "full", CHECKPOINT, "is not a run folder (it holds mine.txt and no recipe.yaml)"),
        ("train", "/proc/run", DISK, "Could not write /proc/run"),
        ("train", "x" * 300, DISK, "File name too long; choose a shorter name"),
        ("compare --arms residual", "f", CHECKPOINT, "f is a file; choose a folder"),
        ("compare --arms residual", "f/run", DISK, "f/run cannot be written: f is a file; choose another folder"),
        ("compare --arms residual", "/proc/run", DISK, "/proc/run"),
    ]
)
def test_out(case, fails, tmp_path):
    command, out, code, *words = case
    (tmp_path / "f").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    line = TRAIN.replace("train", command, 1).replace("--out run", f"--out {out}")
    fails(line, code, *words)
    assert (tmp_path / "f").read_text() == "mine"


def test_a_disk_that_fills_up_while_training(fails, tmp_path):
    """The first checkpoint does not fit: nothing broken is left, and the run goes on once there is room."""
    line = shlex.join(["train", *small.flags(small.config(tmp_path / "run", steps=4, save_every=1))])
    with file_size_limit(20_000):
        fails(line, DISK, "Could not write the checkpoint of step 1", "larger than a limit", "no earlier one")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert main(shlex.split(line)) == 0


def test_a_disk_that_is_full_while_preparing(fails, tmp_path):
    small.corpus(), small.data()  # made before there is a limit
    with file_size_limit(2000):
        fails("data --input {corpus} --out d --vocab-size 300", DISK, "d cannot be written")
    assert list(tmp_path.iterdir()) == []
