"""Nothing is deleted or replaced that `depthmix data` did not write."""

import os
import shutil

import pytest

from depthmix.config import DataConfig
from depthmix.data import staging
from depthmix.data.dataset import TokenData
from depthmix.data.prepare import prepare
from depthmix.data.staging import MARK, MARKER, staged
from depthmix.errors import DATA
from train import small
from train.refused import refused


def make(out, **options):
    return prepare(DataConfig(**{"input": [str(small.corpus())], "out": str(out), "vocab_size": 300, **options}))


def everything(folder):
    """Every path below a folder with what it holds, links as links."""
    return {
        str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


def a_note(out):
    (out / "notes.txt").write_text("mine")


def a_run(out):
    (out / "run").mkdir()
    (out / "run" / "recipe.yaml").write_text("lr: 1")


def a_shard(out):
    (out / "train-00007.bin").write_bytes(b"mine")


def a_link(out):
    (out.parent / "mine").write_text("mine")
    (out / ".tmp-mine").symlink_to(out.parent / "mine")


@pytest.mark.parametrize("put", [a_note, a_run, a_shard, a_link])
def test_overwriting_deletes_nothing_else(tmp_path, put):
    out = shutil.copytree(small.data(), tmp_path / "out")
    put(out)
    before = everything(tmp_path)
    words = "is not a file that `depthmix data` wrote, and overwrite would delete it: move it away"
    refused(lambda: make(out, overwrite=True), words, code=DATA)
    assert everything(tmp_path) == before


def test_a_file_that_arrives_meanwhile_is_kept(tmp_path, monkeypatch):
    """At the last moment, after the folder was looked at again."""
    out = shutil.copytree(small.data(), tmp_path / "out")
    exchange = staging._exchange

    def late(new, old):
        a_note(old)
        exchange(new, old)

    monkeypatch.setattr(staging, "_exchange", late)
    words = f"{out} is written, and notes.txt", f"now lies in {tmp_path / '.out.partial'}"
    refused(lambda: make(out, overwrite=True, vocab_size=310), *words, code=DATA)
    assert TokenData.open(out).vocab_size == 310
    assert everything(tmp_path / ".out.partial") == {"notes.txt": b"mine"}


def folder_of_another(partial):
    partial.mkdir()
    (partial / "thesis.tex").write_text("mine")


def tokens_of_another(partial):
    partial.mkdir()
    (partial / "train-00000.bin").write_text("mine")


def link_to_a_folder(partial):
    (partial.parent / "mine").mkdir()
    (partial.parent / "mine" / "train-00000.bin").write_text("mine")
    partial.symlink_to(partial.parent / "mine")


def link_to_what_was_left(partial):
    link_to_a_folder(partial)
    (partial.parent / "mine" / MARKER).write_bytes(MARK)


def file_of_another(partial):
    partial.write_text("mine")


def link_to_nothing(partial):
    partial.symlink_to(partial.parent / "nowhere")


def another_marker(partial):
    tokens_of_another(partial)
    (partial / MARKER).write_text("mine")


def linked_marker(partial):
    tokens_of_another(partial)
    (partial.parent / "mine").write_bytes(MARK)
    (partial / MARKER).symlink_to(partial.parent / "mine")


def note_in_what_was_left(partial):
    partial.mkdir()
    (partial / MARKER).write_bytes(MARK)
    (partial / "notes.txt").write_text("mine")


TAKEN = [
    folder_of_another,
    tokens_of_another,
    link_to_a_folder,
    link_to_what_was_left,
    file_of_another,
    link_to_nothing,
    another_marker,
    linked_marker,
    note_in_what_was_left,
]


@pytest.mark.parametrize("put", TAKEN)
def test_what_lies_where_data_would_be_prepared_is_left_alone(tmp_path, put):
    put(tmp_path / ".out.partial")
    before = everything(tmp_path)
    words = f"{tmp_path / '.out.partial'}, in which {tmp_path / 'out'} would be prepared, is not depthmix's"
    refused(lambda: make(tmp_path / "out"), words, "move it away", code=DATA)
    assert everything(tmp_path) == before


def killed_at_once(partial):
    partial.mkdir()


def killed_on_the_way(partial):
    partial.mkdir()
    (partial / MARKER).write_bytes(MARK)
    (partial / "train-00000.bin").write_bytes(b"\0")
    (partial / ".tmp-tokenizer.json-77").write_bytes(b"{")


def killed_before_the_old_data_was_removed(partial):
    shutil.copytree(small.data(), partial)


@pytest.mark.parametrize("left", [killed_at_once, killed_on_the_way, killed_before_the_old_data_was_removed])
def test_what_a_kill_left_is_taken_over(tmp_path, left):
    left(tmp_path / ".out.partial")
    make(tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if not p.name.startswith(".")) == [
        "meta.json",
        "tokenizer.json",
        "train-00000.bin",
        "val-00000.bin",
    ]
    assert not (tmp_path / "out" / MARKER).exists()


def test_a_failure_leaves_what_is_not_ours(tmp_path):
    def stop():
        with staged(tmp_path / "out", False) as folder:
            (folder / "train-00000.bin").write_bytes(b"\0")
            a_note(folder)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert everything(tmp_path) == {".out.partial": None, ".out.partial/notes.txt": b"mine"}


def test_data_is_not_prepared_inside_a_run_or_other_data(tmp_path):
    data = shutil.copytree(small.data(), tmp_path / "data")
    refused(lambda: make(data / "new"), f"{data} holds prepared data", code=DATA)
    run = shutil.copytree(small.run().path, tmp_path / "run")
    refused(lambda: make(run / "sub" / "new"), f"lies in {run}, which holds a run", code=DATA)
