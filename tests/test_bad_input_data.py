"""Corpora and prepared data that cannot be used. Each ends in one clear sentence."""

import gzip
import hashlib
import os
import shutil
import sys

import numpy as np
import pytest

from depthmix.cli import main
from depthmix.data import integrity
from depthmix.data.prepared import open_data
from depthmix.errors import DATA
from train import bad, small
from train.bad import TRAIN, cut, meta, remove, table, write

fails = bad.fails

# Corpora.

GOOD = "\n".join(small.LINES * 10).encode()
CORPORA = [
    ("empty file", {"a.txt": b""}, "a.txt", "", "a.txt is empty"),
    ("white space", {"a.txt": b" \n\n\t "}, "a.txt", "", "holds no text"),
    ("one character", {"a.txt": b"x"}, "a.txt", "", "too short"),
    ("one word", {"a.txt": b"word"}, "a.txt", "", "too short"),
    ("one line as lines", {"a.txt": b"word"}, "a.txt", "--document line", "too short"),
    ("binary", {"a.txt": GOOD + bytes(range(256))}, "a.txt", "", "a.txt is not UTF-8 text", "NUL byte"),
    ("latin-1", {"a.txt": "caf\xe9 au lait".encode("latin-1")}, "a.txt", "", "not UTF-8 text", "0xe9", "byte 3"),
    ("cut off", {"a.txt": GOOD + "é".encode()[:1]}, "a.txt", "", "the last character is cut off"),
    ("UTF-16", {"a.txt": GOOD.decode().encode("utf-16")}, "a.txt", "", "not UTF-8 text"),
    ("unknown extension", {"a.docx": GOOD}, "a.docx", "", "extension that is not known", ".txt", ".parquet"),
    ("no extension", {"a": GOOD}, "a", "", "extension that is not known"),
    ("empty folder", {"sub/x.log": b"x"}, "sub", "", "holds no corpus", ".txt"),
    ("folder of empty files", {"sub/x.txt": b"", "sub/y.md": b""}, "sub", "", "holds no corpus"),
    ("a broken file in a folder", {"sub/x.txt": GOOD, "sub/y.txt": b"\xff\xfe"}, "sub", "", "y.txt is not UTF-8"),
    ("too few entries", {"a.txt": b"a b\n\nc d"}, "a.txt", "", "too small for a vocabulary of 300", "it yields"),
    ("no JSON", {"a.jsonl": b"{'text': 1}\n"}, "a.jsonl", "", "a.jsonl:1 is not JSON"),
    ("no JSON on line 2", {"a.jsonl": b'{"text": "a"}\n{"text"'}, "a.jsonl", "", "a.jsonl:2 is not JSON"),
    ("JSON list", {"a.jsonl": b'["text"]\n'}, "a.jsonl", "", "a.jsonl:1 is JSON but no object"),
    ("no such field", {"a.jsonl": b'{"body": "x"}\n'}, "a.jsonl", "", "no field 'text'", "'body'", "text_field"),
    ("wrong text field", {"a.jsonl": b'{"text": "x"}\n'}, "a.jsonl", "--text-field body", "no field 'body'"),
    ("number as text", {"a.jsonl": b'{"text": 5}\n'}, "a.jsonl", "", "field 'text' is int, not text"),
    ("half a pair", {"a.jsonl": b'{"text": "\\ud83c"}\n'}, "a.jsonl", "", "half a surrogate pair"),
    ("empty jsonl", {"a.jsonl": b"\n\n"}, "a.jsonl", "", "holds no text"),
    ("no gzip", {"a.jsonl.gz": b'{"text": "x"}\n'}, "a.jsonl.gz", "", "does not decompress"),
    ("cut gzip", {"a.jsonl.gz": gzip.compress(b'{"text": "x"}\n' * 99)[:-9]}, "a.jsonl.gz", "", "does not decompress"),
    ("no parquet", {"a.parquet": GOOD}, "a.parquet", "", "cannot be read as parquet"),
    ("link to nothing", {"sub/b.txt": None}, "sub", "", "b.txt cannot be read"),
    ("missing among others", {"a.txt": GOOD}, "a.txt b.txt", "", "There is no file or folder b.txt"),
]


@table(CORPORA)
def test_corpora(case, fails, tmp_path):
    _, files, inputs, flags, *words = case
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if content is None:
            path.symlink_to(tmp_path / "nowhere")
        else:
            path.write_bytes(content)
    fails(f"data --input {inputs} --out d --vocab-size 300 {flags}", DATA, *words)
    assert not (tmp_path / "d").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("content", [b"", b"\0binary\xff", b"   "])
def test_text_that_cannot_be_measured(content, fails, tmp_path):
    (tmp_path / "a.txt").write_bytes(content)
    fails("eval --run {run} --input a.txt", DATA, "a.txt")


def test_a_pipe_is_no_corpus(fails, tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    fails("data --input a.txt --out d", DATA, "a.txt is neither a file nor a folder")


def test_a_pipe_in_a_folder_is_skipped(tmp_path, capsys):
    shutil.copytree(small.corpus(), tmp_path / "in")
    os.mkfifo(tmp_path / "in" / "x.txt")
    assert main(["data", "--input", str(tmp_path / "in"), "--out", str(tmp_path / "d"), "--vocab-size", "300"]) == 0
    assert "1 file (1 no file)" in capsys.readouterr().out


def test_a_dataset_from_elsewhere(fails, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    fails("data --input hf:some/name --out d", DATA, "needs the datasets library", "pip install datasets")


# Prepared data.

PREPARED = [
    ("no meta", remove("meta.json"), "it has no meta.json"),
    ("meta cut", cut("meta.json", 40), "meta.json is damaged, it is not JSON"),
    ("meta binary", write("meta.json", b"\x80\x02}q"), "meta.json is damaged, it is not JSON"),
    ("meta of somebody else", write("meta.json", b'{"a": 1}'), "is not one of `depthmix data`"),
    ("meta a list", write("meta.json", b"[1]"), "is not one of `depthmix data`"),
    ("of a later version", meta(version=2), "has version 2 of the format"),
    ("unknown type", meta(dtype="float32"), "damaged (dtype)"),
    ("no vocabulary", meta(vocab_size="many"), "damaged (vocab_size)"),
    ("a path as a name", meta(tokenizer="../tokenizer.json"), "damaged (tokenizer)"),
    ("a path as a shard", meta(splits__train__shards=["../../etc/passwd"]), "damaged (shards of train)"),
    ("no validation", meta(splits={"train": {}}), "damaged (split train)"),
    ("other counts", meta(splits__val__tokens=lambda n: n + 1), "val split has 1235 tokens on disk and 1236"),
    ("no tokenizer", remove("tokenizer.json"), "tokenizer.json is missing"),
    ("no shard", remove("val-00000.bin"), "val-00000.bin is missing"),
    ("empty shard", cut("train-00000.bin", 0), "train-00000.bin is damaged, it is cut short"),
    ("half a token", cut("train-00000.bin", 101), "train-00000.bin is damaged, it is cut short"),
    ("shard cut", cut("train-00000.bin", 100), "train split has 50 tokens on disk and 4912"),
]


@table(PREPARED)
def test_prepared_data(case, fails, tmp_path):
    _, change, *words = case
    shutil.copytree(small.data(), tmp_path / "data")
    change(tmp_path / "data")
    fails(TRAIN, DATA, *words, data=tmp_path / "data")
    assert not (tmp_path / "run").exists()


def test_tokens_beyond_the_vocabulary(fails, tmp_path):
    """With checksums that fit, too, no token may point past the embedding."""
    shutil.copytree(small.data(), tmp_path / "data")
    tokens = np.full(4912, 65535, np.uint16).tobytes()
    (tmp_path / "data" / "train-00000.bin").write_bytes(tokens)
    sums = {"train-00000.bin": hashlib.sha256(tokens).hexdigest()}
    meta(sha256=lambda before: {**before, **sums})(tmp_path / "data")
    fails(TRAIN, DATA, "is damaged: token 65535 is beyond the vocabulary of 300", data=tmp_path / "data")


def zeros(path):
    raw = bytearray(path.read_bytes())
    raw[512:1024] = bytes(512)
    path.write_bytes(raw)


def turned(path):
    path.write_bytes(np.fromfile(path, np.uint16)[::-1].tobytes())


def restored_times(change):
    """A change that also puts the file's time back, as some tools do."""

    def changed(path):
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        change(path)
        os.utime(path, ns=times)

    return changed


CHANGED = [
    ("zeros", "train-00000.bin", zeros),
    ("zeros in validation", "val-00000.bin", zeros),
    ("tokens the other way round", "train-00000.bin", turned),
    ("with the time put back", "train-00000.bin", restored_times(turned)),
    ("another tokenizer", "tokenizer.json", lambda path: path.write_bytes(path.read_bytes() + b" ")),
]


@table(CHANGED)
def test_data_that_was_changed_is_noticed_by_its_checksums(case, fails, tmp_path, monkeypatch):
    """Also after a start that found it whole, and remembered that."""
    monkeypatch.setattr(integrity, "SETTLED", -(10**12))  # as if the data had been prepared long ago
    _, name, change = case
    data = shutil.copytree(small.data(), tmp_path / "data")
    open_data(data)
    small.next_tick(data / name)
    change(data / name)
    words = f"{data}/{name} is damaged (wrong checksum)", "put a good copy back"
    fails(TRAIN, DATA, *words, data=data)
    fails(bad.COMPARE + " --arms residual rezero", DATA, *words, data=data)
    assert not (tmp_path / "run").exists()


def test_data_without_a_checksum_is_not_taken(fails, tmp_path):
    shutil.copytree(small.data(), tmp_path / "data")
    meta(sha256={})(tmp_path / "data")
    fails(TRAIN, DATA, "damaged (no checksum of tokenizer.json)", data=tmp_path / "data")


def test_a_pipe_in_prepared_data(fails, tmp_path):
    shutil.copytree(small.data(), tmp_path / "data")
    (tmp_path / "data" / "meta.json").unlink()
    os.mkfifo(tmp_path / "data" / "meta.json")
    fails(TRAIN, DATA, "meta.json is no plain file", data=tmp_path / "data")
