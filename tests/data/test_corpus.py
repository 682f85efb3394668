"""What is read, in what order, and what is said about what cannot be read."""

import gzip
import json
import os
import re
import sys
import tracemalloc
import types

import pyarrow
import pyarrow.parquet
import pytest

from depthmix.data import corpus
from depthmix.data.corpus import documents, find_sources, pieces
from depthmix.errors import DATA, USAGE, UserError
from project import ROOT


def refuses(message, *inputs, code=DATA, **options):
    with pytest.raises(UserError, match=message) as caught:
        list(documents([str(i) for i in inputs], **options))
    text = str(caught.value)
    assert caught.value.exit_code == code
    assert text.endswith(".")
    assert "\n" not in text


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_folders_are_walked_in_sorted_order(tmp_path):
    for name in ("b/2.txt", "a/z.md", "b/1.TXT", "c.jsonl", "a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) if name.endswith("jsonl") else name)
    assert list(documents([tmp_path])) == ["a/z.md", "a.txt", "b/1.TXT", "b/2.txt", "c.jsonl"]
    assert list(documents([tmp_path / "b", tmp_path / "a.txt"])) == ["b/1.TXT", "b/2.txt", "a.txt"]
    assert list(documents([tmp_path / "b", tmp_path])) == [
        "b/1.TXT",
        "b/2.txt",
        "a/z.md",
        "a.txt",
        "c.jsonl",
    ]  # each once
    assert len(list(documents([tmp_path, tmp_path / "b"]))) == 5


def test_other_files_in_folders_are_skipped_and_counted(tmp_path):
    for name in ("a.txt", "b.png", "c.PNG", "d.csv.gz", "README.md", "LICENSE", ".hidden.txt", "license.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe.txt")
    listing = find_sources([tmp_path])
    assert [os.path.basename(s.name) for s in listing.sources] == ["a.txt"]
    assert len(listing.skipped) == 10
    assert listing.counts() == {
        "files": {".txt": 1},
        "skipped_files": {
            "README or the like": 3,
            ".png": 2,
            ".csv.gz": 1,
            "broken link": 1,
            "empty": 1,
            "hidden": 1,
            "no file": 1,
        },
    }
    assert list(documents([tmp_path / "README.md"])) == ["text"]  # named directly it is read


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("file", ["one\ntwo\r\n \r\n\n  three\n\n\nfour"]),
        ("line", ["one", "two", "  three", "four"]),
        ("blank", ["one\ntwo", "  three", "four"]),
    ],
)
def test_what_a_document_is(tmp_path, document, expected):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\ntwo\r\n \r\n\n  three\n\n\nfour")
    assert list(documents([tmp_path / "a.txt"], document=document)) == expected


def test_source_code_and_compressed_text(tmp_path):
    for name in ("a.py", "b.C", "c.tar.rs", "license.js", "notes.rst", "readme.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    for name in ("d.txt.gz", "e.py.GZ", "notes.md.gz", "readme.txt.gz", "f.parquet.gz", "g.gz"):
        (tmp_path / name).write_bytes(gzip.compress(f"# {name}\nand more\n".encode()))
    listing = find_sources([tmp_path])
    names = ["a.py", "b.C", "c.tar.rs", "d.txt.gz", "e.py.GZ", "license.js", "notes.md.gz", "notes.rst", "readme.py"]
    assert [os.path.basename(s.name) for s in listing.sources] == names
    assert sorted(os.path.basename(p) for p in listing.skipped) == ["f.parquet.gz", "g.gz", "readme.txt.gz"]
    found = list(documents([tmp_path]))
    assert [text.split("\n")[0] for text in found] == [f"# {name}" for name in names]
    assert list(documents([tmp_path / "d.txt.gz"], document="line")) == ["# d.txt.gz", "and more"]
    (tmp_path / "d.txt.gz").write_bytes((tmp_path / "d.txt.gz").read_bytes()[:-9])
    refuses("d.txt.gz is damaged: it does not decompress", tmp_path)


def test_the_page_lists_what_is_source_code():
    page = (ROOT / "docs" / "guides" / "data.md").read_text()
    listed = page[page.index("Source code is recognised") : page.index("Markup, configuration")]
    assert tuple(re.findall(r"\.\w+", listed)) == corpus.CODE


def test_jsonl_gzip_and_parquet_say_the_same(tmp_path):
    texts = ["first", "zweites, größer", "  ", "third\nline", "四" * 300]
    lines = "\n\n".join(json.dumps({"id": i, "body": t}) for i, t in enumerate(texts))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    write_parquet(tmp_path / "a.parquet", id=range(5), body=texts)
    expected = [t for t in texts if t.strip()]
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet"):
        assert list(documents([tmp_path / name], text_field="body")) == expected


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
def test_blocks_do_not_matter(tmp_path, monkeypatch, block):
    monkeypatch.setattr(corpus, "BLOCK", block)
    text = " \n a é 四 😀 b\r\n" * 5
    (tmp_path / "a.txt").write_text(text, newline="")
    assert list(documents([tmp_path / "a.txt"])) == [text]
    (tmp_path / "a.txt").write_bytes(text.encode() + b"ab\xff")
    refuses(f"a.txt is not UTF-8 text: byte 0xff does not decode at byte {len(text.encode()) + 2}", tmp_path)
    (tmp_path / "a.txt").write_bytes(text.encode() + b"\xf0\x9f\x98")
    refuses(f"a.txt is not UTF-8 text: .* cut off at byte {len(text.encode())}", tmp_path)
    (tmp_path / "a.txt").write_bytes(text.encode() + b"x\0")
    refuses(f"a.txt is not UTF-8 text: a NUL byte at byte {len(text.encode()) + 1}", tmp_path)


def test_a_large_file_is_never_in_memory(tmp_path):
    (tmp_path / "a.txt").write_text(
        "a line of plain text, as long as four lines of those that stand in a printed book.\n" * 80_000
    )
    tracemalloc.start()
    size = sum(len(text) for text, _ in pieces(find_sources([tmp_path])))
    lines = sum(1 for _ in pieces(find_sources([tmp_path]), document="line"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (size, lines) == (6_640_000, 80_000)
    assert peak < 5 * 2**20


def test_a_hugging_face_dataset(monkeypatch):
    class Data(list):
        column_names = ("text", "label")

        def select_columns(self, names):
            return self

    asked = []
    fake = types.ModuleType("datasets")
    fake.load_dataset = lambda name, split: asked.append((name, split)) or Data([{"text": "a"}, {"text": "b"}])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert list(documents(["hf:org/name:test", "hf:other"])) == ["a", "b", "a", "b"]
    assert asked == [("org/name", "test"), ("other", "train")]
    refuses(r"hf:x has no column 'body' \(its columns: text, label\)", "hf:x", text_field="body")

    def offline(name, split):
        raise ConnectionError("Couldn't reach the Hub.\nTraceback")

    fake.load_dataset = offline
    refuses(r"dataset org/name \(split train\) cannot be loaded: Couldn't reach the Hub; without access", "hf:org/name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refuses("hf:x needs the datasets library: pip install datasets", "hf:x")
    refuses("names no dataset", "hf:", code=USAGE)


def test_paths_that_cannot_be_used(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="No input was given"):
        list(documents([]))
    refuses("There is no file or folder .*gone", tmp_path / "gone")
    refuses("holds no corpus", tmp_path)
    (tmp_path / "a.docx").write_text("x")
    refuses(r"a\.docx has an extension that is not known: use \.txt, \.md", tmp_path / "a.docx")
    refuses(r"holds no corpus.*\(1 skipped", tmp_path)
    (tmp_path / "empty.txt").touch()
    refuses("The file .*empty.txt is empty", tmp_path / "empty.txt")
    (tmp_path / "blank.txt").write_text("\n \n")
    refuses("blank.txt holds no text", tmp_path / "blank.txt")
    refuses("The corpus is empty", tmp_path)
    os.mkfifo(tmp_path / "pipe")
    refuses("pipe is neither a file nor a folder", tmp_path / "pipe")
    (tmp_path / "circle.txt").symlink_to(tmp_path / "circle.txt")
    refuses("circle.txt cannot be read: Too many levels of symbolic links", tmp_path / "circle.txt")
    refuses("circle.txt cannot be read", tmp_path)
    refuses("document is 'page'", tmp_path / "blank.txt", document="page", code=USAGE)


def test_folders_in_a_circle(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("x")
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    refuses("back is a link back to the folder .*: the folders go in a circle", tmp_path)


def test_files_without_permission(tmp_path, monkeypatch):
    """The errors are raised by hand: root may read everything."""

    def denied(*args):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.jsonl.gz").write_bytes(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "open", denied, raising=False)
        refuses("a.txt cannot be read: Permission denied", tmp_path / "a.txt")
    with monkeypatch.context() as patch:
        patch.setattr(gzip, "open", denied)
        refuses("a.jsonl.gz cannot be read: Permission denied", tmp_path / "a.jsonl.gz")
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", denied)
        refuses(f"{tmp_path} cannot be read: Permission denied", tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a.jsonl:3 is not JSON \(Expecting"),
        ("[" * 100_000, r"a.jsonl:3 is not JSON"),
        ('["text"]', r"a.jsonl:3 is JSON but no object"),
        ('{"body": "x", "id": 1}', r"a.jsonl:3 has no field 'text' \(its fields: 'body', 'id'\)"),
        ("{}", r"its fields: none"),
        ('{"text": 7}', r"a.jsonl:3: field 'text' is int, not text"),
        ('{"text": "\\ud800"}', r"a.jsonl:3: field 'text' has half a surrogate pair at character 0"),
        (b'{"text": "\xff"}', r"a.jsonl is not UTF-8 text: byte 0xff does not decode at byte 27"),
        (b"\0", r"a.jsonl is not UTF-8 text: a NUL byte at byte 17"),
    ],
)
def test_lines_that_are_no_records(tmp_path, line, message):
    data = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"text":"good"}\n\n' + data)
    refuses(message, tmp_path / "a.jsonl")


def test_damaged_gzip(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"no gzip at all")
    refuses("a.jsonl.gz is damaged", path)
    path.write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-12])
    refuses("a.jsonl.gz is damaged: it does not decompress", path)


def test_parquet_that_cannot_be_used(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", body=["x", None], id=[1, 2])
    refuses(r"a.parquet has no column 'text' \(its columns: body, id\): set text_field", path)
    refuses("a.parquet, row 1: column 'id' is int, not text", path, text_field="id")
    refuses("a.parquet, row 2: column 'body' is NoneType, not text", path, text_field="body")
    raw = pyarrow.array([b"ok", b"\xff"]).view(pyarrow.string())
    refuses("row 2: column 'text' is not UTF-8", write_parquet(tmp_path / "b.parquet", text=raw))
    (tmp_path / "c.parquet").write_bytes(path.read_bytes()[:-20])
    refuses("c.parquet cannot be read as parquet: ", tmp_path / "c.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refuses(rf"Reading {re.escape(str(path))} needs pyarrow: pip install pyarrow", path)
