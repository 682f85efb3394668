"""The one atomic write: a file is there whole or not at all, nothing is left beside it, and a refusal is one sentence."""

import errno
import os
from pathlib import Path

import pytest

from depthmix.cli import explain
from depthmix.errors import DISK, INTERNAL, UserError
from depthmix.files import check_writable, is_plain_file, open_no_link, write_file, write_text, writing


def test_writes_and_replaces(tmp_path):
    write_text(tmp_path / "new" / "table.csv", "é")
    assert (tmp_path / "new" / "table.csv").read_bytes() == "é".encode()
    write_file(tmp_path / "new" / "table.csv", b"2")
    assert [(p.name, p.read_bytes()) for p in (tmp_path / "new").iterdir()] == [("table.csv", b"2")]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    path = tmp_path / "comparison.json"
    write_file(path, b"old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(UserError, match=r"comparison\.json: the disk is full; make room") as caught:
        write_text(path, "new")
    assert caught.value.exit_code == DISK
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("comparison.json", b"old")]


def test_what_is_written_is_durable_before_it_has_its_name(tmp_path, monkeypatch):
    """fsync of the content, then the rename, then fsync of the folder."""
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda d: (calls.append("folder" if Path(f"/proc/self/fd/{d}").is_dir() else "file"), fsync(d))
    )
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    write_file(tmp_path / "a", b"1")
    assert calls == ["file", "replace", "folder"]


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Could not write") as caught:
        write_text(tmp_path / "file" / "table.csv", "")
    assert caught.value.exit_code == DISK


def test_whether_a_folder_can_be_written_is_found_without_leaving_anything(tmp_path):
    check_writable(tmp_path / "new" / "deep")
    assert not list(tmp_path.iterdir())
    (tmp_path / "there").mkdir()
    check_writable(tmp_path / "there")
    assert not list((tmp_path / "there").iterdir())
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "deep"):
        with pytest.raises(UserError, match="Could not write"):
            check_writable(place)


def test_a_folder_that_somebody_else_has_begun_to_use_stays(tmp_path, monkeypatch):
    def used(path):
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(Path, "rmdir", used)
    check_writable(tmp_path / "new")
    assert (tmp_path / "new").is_dir()


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="there is no /proc")
def test_a_disk_that_fails_is_not_taken_for_a_full_one(tmp_path):
    """A write to the address 0 of this process is an input/output error."""
    words = "input/output error; the disk or the connection to it is failing: see the system's log, then run the same"
    memory = open("/proc/self/mem", "r+b", buffering=0)  # noqa: SIM115
    with memory, pytest.raises(UserError, match=words) as caught, writing(tmp_path):
        memory.write(b"x")
    assert caught.value.exit_code == DISK


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "out of memory: use a smaller model"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory: "),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "out of memory: "),
        (RuntimeError("unable to mmap 9 bytes from file <f>: Cannot allocate memory (12)"), "out of memory: "),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "out of memory: "),
        (OSError(errno.EIO, "Input/output error", "f"), "cannot write or read f: Input/output error; the disk or the"),
        (OSError(errno.EMFILE, "Too many open files", "f"), "raise the limit of open files (ulimit -n), then run"),
        (OSError(errno.ENOSPC, "No space left on device", "f"), "make room, then run the same command again"),
    ],
)
def test_what_the_system_refuses_is_no_bug(error, words):
    sentence, code = explain(error)
    assert words in sentence
    assert code != INTERNAL


def test_links_and_pipes_are_not_written_to(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        assert not is_plain_file(tmp_path / name)
        for flags in (os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_APPEND, os.O_RDWR):
            with pytest.raises(OSError, match=name):
                open_no_link(str(tmp_path / name), flags)
    temporary = tmp_path / f".tmp-table-{os.getpid()}"
    temporary.symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="it is a symbolic link"):
        write_text(tmp_path / "table", "new")
    assert (tmp_path / "mine").read_text() == "mine"
