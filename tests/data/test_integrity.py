"""Prepared data is verified at every start, read once, and named by one hash."""

import json
import os
import shutil

import pytest

from depthmix.data import integrity
from depthmix.data.dataset import TokenData
from depthmix.data.integrity import VERIFIED, data_hash, describe_change
from depthmix.data.prepared import open_data
from depthmix.errors import DATA
from train import small
from train.refused import refused


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy that counts as left alone, as if it had been made long ago."""
    monkeypatch.setattr(integrity, "SETTLED", -(10**12))
    return shutil.copytree(small.data(), tmp_path / "data", ignore=shutil.ignore_patterns(VERIFIED))


@pytest.fixture
def read(monkeypatch):
    """The names of the files that were read for their checksums."""
    names = []
    digest = integrity.hashlib.file_digest

    def noted(file, kind):
        names.append(os.path.basename(file.name))
        return digest(file, kind)

    monkeypatch.setattr(integrity.hashlib, "file_digest", noted)
    return names


FILES = ["tokenizer.json", "train-00000.bin", "val-00000.bin"]


def test_a_second_start_reads_nothing(folder, read):
    TokenData.open(folder)
    assert sorted(read) == FILES
    TokenData.open(folder)
    integrity._remembered.clear()  # as in a new process
    TokenData.open(folder)
    assert sorted(read) == FILES
    TokenData.open(folder).verify()
    assert sorted(read) == sorted(2 * FILES)


def test_only_what_changed_is_read_again(folder, read):
    TokenData.open(folder)
    read.clear()
    small.next_tick(folder / "val-00000.bin")
    os.utime(folder / "val-00000.bin")
    TokenData.open(folder)
    assert read == ["val-00000.bin"]
    small.next_tick(folder / "val-00000.bin")
    (folder / "val-00000.bin").write_bytes(bytes((folder / "val-00000.bin").stat().st_size))
    refused(lambda: TokenData.open(folder), "val-00000.bin is damaged (wrong checksum)", code=DATA)


def test_what_changed_a_moment_ago_is_not_remembered(folder, read, monkeypatch):
    """Two changes within one tick of the clock leave the same times."""
    monkeypatch.setattr(integrity, "SETTLED", 3600 * 10**9)
    TokenData.open(folder)
    TokenData.open(folder)
    assert sorted(read) == sorted(2 * FILES)
    assert not (folder / VERIFIED).exists()


def test_a_copy_is_read_although_the_list_came_along(folder, read, tmp_path):
    TokenData.open(folder)
    read.clear()
    TokenData.open(shutil.copytree(folder, tmp_path / "copy"))
    assert sorted(read) == FILES


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"val-00000.bin": 5}', b'{"val-00000.bin": [1, 2, 3, 4, "x"]}']
)
def test_a_damaged_list_is_no_list(folder, read, content):
    (folder / VERIFIED).write_bytes(content)
    TokenData.open(folder)
    assert sorted(read) == FILES
    assert sorted(json.loads((folder / VERIFIED).read_bytes())) == FILES


def test_the_list_never_writes_through_a_link(folder, tmp_path):
    (tmp_path / "mine").write_text("mine")
    (folder / VERIFIED).symlink_to(tmp_path / "mine")
    TokenData.open(folder)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_remembered_here(folder, read, monkeypatch):
    def full(path, data):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(integrity, "write_file", full)
    for _ in range(2):
        TokenData.open(folder)
    assert sorted(read) == FILES
    assert not (folder / VERIFIED).exists()


def test_the_hash_is_that_of_the_content(folder, tmp_path):
    data = open_data(folder)
    assert data.sha256 == data_hash(folder) == data_hash(data.meta)
    assert len(data.sha256) == 64
    assert data_hash({**data.meta, "source": ["elsewhere"], "files": {}}) == data.sha256
    changes = (
        ("vocab_size", 301, "it had 300 entries in its vocabulary and has 301"),
        ("dtype", "uint32", "its meta.json is another"),
        ("sha256", {**data.meta["sha256"], "tokenizer.json": "0"}, "its tokenizer is another"),
        ("sha256", {**data.meta["sha256"], "train-00000.bin": "0"}, "its training split is another"),
        ("sha256", {**data.meta["sha256"], "val-00000.bin": "0"}, "its validation split is another"),
        ("classes", ["a"], "it held text and holds images"),
    )
    for name, value, said in changes:
        other = {**data.meta, name: value}
        assert data_hash(other) != data.sha256
        assert describe_change(data.meta, other) == said
