"""From text to prepared data: exact, deterministic, and complete or not there at all."""

import errno
import hashlib
import json
import os
import random
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import forking
from depthmix.config import DataConfig
from depthmix.data import prepare as module
from depthmix.data import staging, writing
from depthmix.data import tokenizer as tokenizing
from depthmix.data.corpus import documents, find_sources, pieces
from depthmix.data.dataset import TokenData
from depthmix.data.prepare import prepare, summary
from depthmix.data.tokenizer import END, chunks, encode, load_tokenizer, train_tokenizer, vocabulary
from depthmix.errors import DATA, DISK, USAGE, UserError
from project import ROOT

SOTU = ROOT / "corpora" / "sotu"
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "was",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "from",
    "have",
    "or",
    "by",
    "one",
    "had",
    "not",
    "but",
    "what",
    "all",
]


def text(seed, words=300):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) + rng.choice(["", "", ".", "\n", "\n\n", " é😀"]) for _ in range(words))


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i:02d}.txt").write_text(text(i), newline="")
    return folder


def config(corpus, tmp_path, **options):
    return DataConfig(**{"input": [str(corpus)], "out": str(tmp_path / "out"), "vocab_size": 300, **options})


def refuses(message, config, code):
    with pytest.raises(UserError, match=message) as caught:
        prepare(config)
    assert caught.value.exit_code == code
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def split_texts(folder):
    """The documents of each split, decoded."""
    data = TokenData.open(folder)
    tokenizer = Tokenizer.from_file(str(data.tokenizer_path))
    end = tokenizer.token_to_id(END)
    result = {}
    for name in ("train", "val"):
        split = data.split(name)
        ids = split.window(0, split.n_tokens)
        assert ids[-1] == end
        stops = np.flatnonzero(ids == end)
        starts = [0, *(stops[:-1] + 1)]
        result[name] = [
            tokenizer.decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in zip(starts, stops, strict=True)
        ]
    return result


def contents(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_the_bundled_corpus(tmp_path):
    texts = list(documents([SOTU]))
    assert len(texts) == 52
    assert 1_700_000 < sum(len(t.encode()) for t in texts) < 1_900_000
    assert all(t == t.strip() + "\n" and "  " not in t for t in texts)
    out = prepare(config(SOTU, tmp_path, vocab_size=512), shard_tokens=100_000)
    splits = split_texts(out)
    assert sorted(splits["train"] + splits["val"]) == sorted(texts)
    data = TokenData.open(out)
    data.verify()
    assert (data.vocab_size, data.meta["dtype"], data.meta["files"]) == (512, "uint16", {".txt": 52})
    assert data.meta["skipped_files"] == {"README or the like": 2}
    assert len(splits["val"]) == 3
    for name, documents_ in splits.items():
        assert data.split(name).n_bytes == sum(len(t.encode()) for t in documents_)
        assert data.split(name).n_documents == len(documents_)
    shards = data.meta["splits"]["train"]["shards"]
    assert shards[:2] == ["train-00000.bin", "train-00001.bin"]
    assert len(shards) == -(-data.split("train").n_tokens // 100_000)


def test_tokens_are_those_of_whole_documents(corpus, tmp_path, monkeypatch):
    """Cut into small pieces, encoded in small batches: the same tokens."""
    monkeypatch.setattr(tokenizing, "CHUNK", 50)
    monkeypatch.setattr(tokenizing, "BATCH", 500)
    out = prepare(config(corpus, tmp_path))
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    split = TokenData.open(out).split("val")
    (val,) = split_texts(out)["val"]
    assert split.window(0, split.n_tokens).tolist() == [*tokenizer.encode(val).ids, tokenizer.token_to_id(END)]


def test_two_runs_write_the_same_bytes(corpus, tmp_path):
    """In another process, which has another hash seed, from a folder made in another order."""
    first = prepare(config(corpus, tmp_path))
    other = tmp_path / "other"
    other.mkdir()
    for path in sorted(corpus.iterdir(), reverse=True):
        shutil.copy(path, other)
    again = tmp_path / "again"
    code = (
        "from depthmix.config import DataConfig; from depthmix.data.prepare import prepare;"
        f"prepare(DataConfig(input=[{str(other)!r}], out={str(again)!r}, vocab_size=300))"
    )
    done = forking.python(code, env={**os.environ, "RAYON_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    a, b = contents(first), contents(again)
    assert a.pop("meta.json") != b.pop("meta.json")  # the sources differ
    assert a == b


def test_the_split_depends_on_the_seed_and_the_text_alone(corpus, tmp_path):
    val = split_texts(prepare(config(corpus, tmp_path, val_fraction=0.3)))["val"]
    assert len(val) == 6
    for i, path in enumerate(sorted(corpus.iterdir())):
        path.rename(corpus / f"{97 - i}.txt")
    again = split_texts(prepare(config(corpus, tmp_path, val_fraction=0.3, overwrite=True)))["val"]
    assert sorted(again) == sorted(val)
    other = split_texts(prepare(config(corpus, tmp_path, val_fraction=0.3, overwrite=True, seed=1)))["val"]
    assert sorted(other) != sorted(val)


@pytest.mark.parametrize(("fraction", "expected"), [(0.001, 1), (0.25, 5), (0.999, 19)])
def test_both_splits_have_a_document(corpus, tmp_path, fraction, expected):
    splits = split_texts(prepare(config(corpus, tmp_path, val_fraction=fraction)))
    assert (len(splits["train"]), len(splits["val"])) == (20 - expected, expected)


def test_copies_stay_together(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n".join(f"this is line number {i % 10}" for i in range(100)))
    for seed in range(3):
        splits = split_texts(
            prepare(
                config(path, tmp_path, document="line", val_fraction=0.2, seed=seed, overwrite=True, vocab_size=257)
            )
        )
        assert not set(splits["train"]) & set(splits["val"])
        assert len(splits["val"]) == 20
    path.write_text("a\na\nb\nb\n")  # a copy more than wanted
    assert (
        len(split_texts(prepare(config(path, tmp_path, document="line", overwrite=True, vocab_size=257)))["val"]) == 2
    )
    path.write_text("the same\n" * 30)
    out = prepare(config(path, tmp_path, document="line", val_fraction=0.1, overwrite=True, vocab_size=257))
    assert len(split_texts(out)["val"]) == 3
    assert "all are the same" in json.loads((out / "meta.json").read_text())["split"]["by"]


@pytest.mark.parametrize(
    ("joint", "by"), [("\n\n", "paragraph"), ("\r\n\r\n", "paragraph"), ("\n", "line"), (" ", "space")]
)
def test_a_single_document_is_cut(tmp_path, joint, by):
    whole = joint.join("w" * 40 + str(i) for i in range(100))
    (tmp_path / "a.txt").write_text(whole, newline="")
    out = prepare(config(tmp_path / "a.txt", tmp_path, val_fraction=0.1, vocab_size=260))
    splits = split_texts(out)
    (train,), (val,) = splits["train"], splits["val"]
    assert train + val == whole
    assert train.endswith(joint)
    assert abs(len(val) / len(whole) - 0.1) < 0.02
    meta = json.loads((out / "meta.json").read_text())
    assert meta["split"]["by"] == by
    assert meta["split"]["character"] == len(train)
    assert "one document only" in meta["split"]["note"]


def test_a_bounded_sample_trains_the_tokenizer(corpus, tmp_path):
    seen = []
    prepare(config(corpus, tmp_path), lambda *a: seen.append(a), sample_bytes=10_000)
    phases = [p for p, _, _ in seen]
    assert sorted(set(phases), key=phases.index) == ["scan", "tokenizer", "encode"]
    total = sum(p.stat().st_size for p in corpus.iterdir())
    assert seen[-1] == ("encode", total, total)
    listing = find_sources([corpus])
    in_val = np.array([True] + 19 * [False])
    sample = list(module._sample(pieces(listing), in_val, 10_000, total, lambda *a: None))
    assert 5_000 < sum(len(s.encode()) for s in sample) < 15_000
    everything = list(module._sample(pieces(listing), in_val, total, total, lambda *a: None))
    assert everything == list(documents([corpus]))[1:]  # never the validation documents


def test_more_than_65536_entries_need_uint32(corpus, tmp_path):
    tokenizer = train_tokenizer(documents([corpus]), 300)
    tokenizer.add_tokens([f"<t{i}>" for i in range(65536)])
    tokenizer.save(str(tmp_path / "t.json"))
    (corpus / "x.txt").write_text("<t65000> and <t65535>")
    out = prepare(config(corpus, tmp_path, tokenizer=str(tmp_path / "t.json"), vocab_size=3, val_fraction=0.5))
    data = TokenData.open(out)
    assert (data.vocab_size, data.meta["dtype"]) == (65836, "uint32")
    splits = split_texts(out)
    assert sorted(splits["train"] + splits["val"]) == sorted(documents([corpus]))
    top = max(data.split(n).window(0, data.split(n).n_tokens).max() for n in ("train", "val"))
    assert top == 65835


def test_a_tokenizer_of_another_make(corpus, tmp_path):
    """It cuts texts off, pads, puts a space before every text and has no <|endoftext|>: documents still come whole."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.enable_truncation(10)
    tokenizer.enable_padding()
    tokenizer.save(str(tmp_path / "t.json"))
    (corpus / "long.txt").write_text(text(99, 10_000))
    splits = split_texts(prepare(config(corpus, tmp_path, tokenizer=str(tmp_path / "t.json"))))
    assert sorted(splits["train"] + splits["val"]) == sorted(" " + t for t in documents([corpus]))
    gaps = Tokenizer(models.BPE({c: 2 * i for i, c in enumerate(alphabet)}, []))
    gaps.save(str(tmp_path / "t.json"))
    refuses("gaps in its ids", config(corpus, tmp_path, tokenizer=str(tmp_path / "t.json"), overwrite=True), DATA)
    gaps = Tokenizer(models.BPE({c: 2 * i for i, c in enumerate([END, *alphabet])}, []))
    gaps.save(str(tmp_path / "t.json"))
    assert vocabulary(load_tokenizer(tmp_path / "t.json")) == 513


def test_the_end_written_in_a_document_is_text():
    tokenizer = train_tokenizer(["a"], 257)
    (encoded,) = encode(tokenizer, [(f"a{END}b", True)])
    assert encoded.ids.tolist().count(tokenizer.token_to_id(END)) == 1
    assert tokenizer.decode(encoded.ids[:-1].tolist(), skip_special_tokens=False) == f"a{END}b"


@pytest.mark.parametrize("whole", [text(3), "x" * 500, "四。\n" * 200, " \n\t" * 200, "a  b\t\t c\n\n\nd " * 60, ""])
def test_cuts_depend_on_the_text_alone_and_change_no_token(whole):
    tokenizer = train_tokenizer([text(i) for i in range(5)], 300)
    cuts = list(chunks([(whole, True)], 40))
    assert "".join(t for t, _ in cuts) == whole
    assert [last for _, last in cuts] == [False] * (len(cuts) - 1) + [True]
    for step in (1, 7, 64):
        stream = [(whole[i : i + step], False) for i in range(0, len(whole), step)]
        assert list(chunks([*stream, ("", True)], 40)) == cuts
    if any(c.isspace() for c in whole.strip()) or not whole:
        ids = [i for t, _ in cuts for i in tokenizer.encode(t).ids]
        assert ids == tokenizer.encode(whole).ids


def test_options_that_cannot_be(corpus, tmp_path):
    for fraction in (0, 1, -0.1, 2, float("nan")):
        refuses(
            "val_fraction is .*: it must lie between 0 and 1", config(corpus, tmp_path, val_fraction=fraction), USAGE
        )
    refuses("vocab_size is 256: it must be at least 257", config(corpus, tmp_path, vocab_size=256), USAGE)
    refuses("vocab_size is .* no corpus yields", config(corpus, tmp_path, vocab_size=2**40), USAGE)
    refuses(
        r"too small for a vocabulary of 50000: it yields \d+ entries", config(corpus, tmp_path, vocab_size=50000), DATA
    )
    refuses("No folder to write", config(corpus, tmp_path, out=""), USAGE)
    refuses("name a new folder", config(corpus, tmp_path, out="."), USAGE)
    refuses("There is no file or folder .*gone", config(tmp_path / "gone", tmp_path), DATA)
    assert [p.name for p in tmp_path.iterdir()] == ["corpus"]


def test_a_corpus_that_is_too_short(tmp_path):
    path = tmp_path / "a.txt"
    for whole in ("x", "word", "word\n", "\n word "):
        path.write_text(whole)
        refuses("The corpus is too short", config(path, tmp_path, vocab_size=257), DATA)
    path.write_text("two words")
    assert split_texts(prepare(config(path, tmp_path, vocab_size=257))) == {"train": ["two "], "val": ["words"]}


def test_tokenizers_that_are_none(corpus, tmp_path, monkeypatch):
    refuses("There is no tokenizer file .*gone", config(corpus, tmp_path, tokenizer=str(tmp_path / "gone")), DATA)
    refuses("tokenizer file .* cannot be read: Is a directory", config(corpus, tmp_path, tokenizer=str(tmp_path)), DATA)
    for data, reason in (
        (b"{}", "of the tokenizers library"),
        (b"hello", "of the tokenizers library"),
        (b"\xff", "UTF-8"),
    ):
        (tmp_path / "t.json").write_bytes(data)
        refuses(
            f"t.json is not a tokenizer.json.*{reason}",
            config(corpus, tmp_path, tokenizer=str(tmp_path / "t.json")),
            DATA,
        )
    monkeypatch.setattr(tokenizing.importlib.util, "find_spec", lambda name: None)
    refuses("needs the tokenizers library", config(corpus, tmp_path), USAGE)


def test_a_corpus_that_changes_meanwhile(corpus, tmp_path):
    def add(phase, done, total):
        if phase == "tokenizer":
            (corpus / "00.txt").write_text("shorter")

    with pytest.raises(UserError, match="changed while it was read"):
        prepare(config(corpus, tmp_path), add)
    assert not (tmp_path / "out").exists()


def test_what_is_there_already(corpus, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    prepare(config(corpus, tmp_path))  # an empty folder is as good as none
    before = contents(out)
    refuses("out already holds prepared data: choose another folder or set overwrite", config(corpus, tmp_path), DATA)
    refuses("too small", config(corpus, tmp_path, overwrite=True, vocab_size=50000), DATA)
    assert contents(out) == before
    prepare(config(corpus, tmp_path, overwrite=True, vocab_size=310))
    assert TokenData.open(out).vocab_size == 310
    for overwrite in (False, True):
        refuses(
            "is not prepared data, so it is left alone",
            config(corpus, tmp_path, out=str(corpus), overwrite=overwrite),
            DATA,
        )
    (tmp_path / "file").touch()
    refuses("file exists and is not a folder", config(corpus, tmp_path, out=str(tmp_path / "file")), DATA)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus", "file", "out"]


@pytest.mark.parametrize("fails", [False, True])
def test_replacing_where_folders_cannot_be_exchanged(corpus, tmp_path, monkeypatch, fails):
    out = prepare(config(corpus, tmp_path))
    before = contents(out)
    monkeypatch.setattr(staging.ctypes, "CDLL", lambda name: None)
    if fails:
        rename = os.rename

        def broken(a, b):
            if str(a).endswith(".partial") and str(b).endswith("out"):
                raise OSError(errno.EIO, "Input/output error")
            rename(a, b)

        monkeypatch.setattr(staging.os, "rename", broken)
        refuses("out cannot be written: Input/output error", config(corpus, tmp_path, overwrite=True, seed=1), DISK)
        assert contents(out) == before
    else:
        prepare(config(corpus, tmp_path, overwrite=True, seed=1))
        assert contents(out) != before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus", "out"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "The disk is full, so .*out was not written"),
        (errno.EDQUOT, "The disk is full"),
        (errno.EROFS, "out cannot be written: Read-only file system"),
    ],
)
def test_a_disk_that_takes_no_more(corpus, tmp_path, monkeypatch, number, message):
    class Full(writing.ShardWriter):
        def write(self, *given):
            super().write(*given)
            if self.documents > 3:
                raise OSError(number, os.strerror(number))

    monkeypatch.setattr(writing, "ShardWriter", Full)
    refuses(message, config(corpus, tmp_path), DISK)
    assert [p.name for p in tmp_path.iterdir()] == ["corpus"]


def test_a_really_full_disk_and_a_place_that_is_no_folder(corpus, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    refuses(
        "file/out cannot be written: .*file is a file; choose another folder",
        config(corpus, tmp_path, out=str(tmp_path / "file" / "out")),
        DISK,
    )
    refuses("cannot be written", config(corpus, tmp_path, out="/proc/out"), DISK)
    if os.path.exists("/dev/full"):
        monkeypatch.setattr(writing, "open", lambda path, mode: open("/dev/full", mode), raising=False)  # noqa: SIM115
        refuses("The disk is full", config(corpus, tmp_path), DISK)


SLOW = """
import sys, time
from depthmix.data import prepare as module
from depthmix.config import DataConfig
from depthmix.data.writing import ShardWriter
write = ShardWriter.write
def slow(self, *args):
    write(self, *args)
    if self.documents > 2:
        open(sys.argv[3], "w").close()
        time.sleep(60)
ShardWriter.write = slow
module.prepare(DataConfig(input=[sys.argv[1]], out=sys.argv[2], vocab_size=300))
"""


def test_killed_on_the_way(corpus, tmp_path, tmp_path_factory):
    out, writing = tmp_path / "out", tmp_path_factory.mktemp("said") / "writing"
    with forking.started(SLOW, corpus, out, writing, until=writing.exists):
        refuses("Another process is writing .*out: wait", config(corpus, tmp_path), DATA)
    assert not out.exists()
    (partial,) = (p for p in tmp_path.iterdir() if p != corpus)
    assert partial.name == ".out.partial"
    assert any(partial.iterdir())
    with pytest.raises(UserError, match=r"has no meta\.json"):
        TokenData.open(partial)
    prepare(config(corpus, tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus", "out"]
    TokenData.open(out).verify()


def test_interrupted_on_the_way(corpus, tmp_path):
    def stop(phase, done, total):
        if phase == "encode":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config(corpus, tmp_path), stop)
    assert [p.name for p in tmp_path.iterdir()] == ["corpus"]


MEMORY = """
import resource, sys
from depthmix.config import DataConfig
from depthmix.data.prepare import prepare, summary
from depthmix.data import tokenizer
import tokenizers
tokenizer.BATCH = 1 << 18
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prepare(DataConfig(input=[sys.argv[1]], out=sys.argv[2], tokenizer=sys.argv[3]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """2.5 megabytes in one file: at 100 bytes a token all at once they would take over 120 MB."""
    (tmp_path / "a.txt").write_text(text(0, 20_000) * 30)
    train_tokenizer([text(0)], 300).save(str(tmp_path / "t.json"))
    used = int(forking.python(MEMORY, tmp_path / "a.txt", tmp_path / "out", tmp_path / "t.json").stdout)
    assert used < 60 * 1024
    assert (tmp_path / "a.txt").stat().st_size > 2_500_000


def test_named_inputs_are_domains(tmp_path):
    words = {"books": "the king rode out", "code": "def f(x): return x", "docs": "press the button twice"}
    for name, text in words.items():
        lines = [json.dumps({"text": f"{text} {i}"}) for i in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    # The middle input is named twice as often, and apart: a domain's text lies together all the same.
    (tmp_path / "more.jsonl").write_text("\n".join(json.dumps({"text": f"x = {i}"}) for i in range(20)))
    inputs = [f"books={tmp_path}/books.jsonl", f"code={tmp_path}/code.jsonl", f"docs={tmp_path}/docs.jsonl"]
    config = DataConfig(
        input=[*inputs, f"code={tmp_path}/more.jsonl"], out=str(tmp_path / "data"), vocab_size=300, val_fraction=0.1
    )
    data = TokenData.open(prepare(config, shard_tokens=100))
    train, val = data.split("train"), data.split("val")
    assert {name: part["documents"] for name, part in val.domains.items()} == {"books": 4, "code": 6, "docs": 4}
    assert {name: part["documents"] for name, part in train.domains.items()} == {"books": 36, "code": 54, "docs": 36}
    tokenizer = load_tokenizer(data.tokenizer_path)
    for split in (train, val):
        parts = split.parts()
        assert [part.n_tokens for part in parts.values()] == [size["tokens"] for size in split.domains.values()]
        whole = np.concatenate([part.window(0, part.n_tokens) for part in parts.values()])
        assert (whole == split.window(0, split.n_tokens)).all()
        for name, part in parts.items():
            text = tokenizer.decode(part.window(0, part.n_tokens).tolist())
            starts = {"books": ("the king",), "code": ("def f", "x ="), "docs": ("press",)}[name]
            documents = text.split("<|endoftext|>") if "<|endoftext|>" in text else [text]
            assert all(document.startswith(starts) for document in documents if document)
    assert "code: 6 documents" in summary(data.folder)


def test_domains_without_documents_of_their_own_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one text")
    (tmp_path / "b.txt").write_text("another text")
    for inputs, sentence in (
        ([f"a={tmp_path}/a.txt", f"{tmp_path}/b.txt"], "b.txt has no domain and other inputs have one"),
        ([f"a={tmp_path}/a.txt", f"b={tmp_path}/a.txt"], "domain b has no files of its own"),
        ([f"a={tmp_path}/a.txt", f"b={tmp_path}/b.txt"], "domain a is one document"),
    ):
        with pytest.raises(UserError, match=sentence):
            prepare(DataConfig(input=inputs, out=str(tmp_path / "data"), vocab_size=300))


def test_an_input_with_an_equals_sign_that_exists_is_a_path(tmp_path):
    (tmp_path / "k=2").mkdir()
    (tmp_path / "k=2" / "a.txt").write_text("some text")
    listing = find_sources([f"{tmp_path}/k=2"])
    assert [source.domain for source in listing.sources] == [""]


def test_meta_with_domains_that_do_not_add_up_is_damaged(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": f"{name} {i} text"}) for i in range(20)))
    inputs = [f"{name}={tmp_path}/{name}.jsonl" for name in ("a", "b")]
    folder = prepare(DataConfig(input=inputs, out=str(tmp_path / "data"), vocab_size=270))
    meta = json.loads((folder / "meta.json").read_text())
    meta["splits"]["val"]["domains"]["a"]["tokens"] += 1
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="domains of val"):
        TokenData.open(folder)
