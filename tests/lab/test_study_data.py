"""lab/study_data.py: the texts that it cuts from the sets of the studies; and what is wrong with a call of either tool."""

import bz2
import importlib.util
import json
import lzma
import os
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from PIL import Image

from depthmix.data.corpus import find_sources, pieces
from depthmix.data.prepared import open_data
from project import ROOT

_spec = importlib.util.spec_from_file_location("study_data", ROOT / "lab" / "study_data.py")
study_data = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(study_data)


def test_a_file_a_book_training_books_first(tmp_path):
    index = [("valid", "éa"), ("train", "first"), ("train", "second")]
    entries = [{"split": split, "bytes": len(text.encode())} for split, text in index]
    (tmp_path / "index.json").write_text(json.dumps(entries))
    (tmp_path / "train.txt.bz2").write_bytes(bz2.compress(b"first\n\n\n\nsecond"))
    (tmp_path / "valid.txt.bz2").write_bytes(bz2.compress("éa".encode()))
    out = tmp_path / "out"
    out.mkdir()
    study_data.books(tmp_path, out)
    texts = [path.read_bytes().decode() for path in sorted(out.iterdir())]
    assert texts == ["first", "\n\n\n\nse", "éa"]  # the index does not count what is between books


def test_code_is_one_text_that_ends_with_the_validation_files(tmp_path):
    for name, files in (("train", "abc"), ("valid", "xy")):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in files)
        (tmp_path / f"{name}.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    share = study_data.code(tmp_path, tmp_path)
    text = (tmp_path / "code.txt").read_text()
    assert text == "a\n\n\nc\n\n\nx\n\n\ny"
    assert share * len(text) == pytest.approx(5)


def test_the_mix_has_all_documents_of_three_domains(tmp_path):
    sets, out = tmp_path / "sets", tmp_path / "out"
    for name in ("pycode", "docs", "gutenberg100"):
        (sets / name).mkdir(parents=True)
    index = [{"split": "train", "bytes": 4}, {"split": "train", "bytes": 4}, {"split": "valid", "bytes": 3}]
    (sets / "gutenberg100" / "index.json").write_text(json.dumps(index))
    (sets / "gutenberg100" / "train.txt.bz2").write_bytes(bz2.compress(b"one two."))
    (sets / "gutenberg100" / "valid.txt.bz2").write_bytes(bz2.compress(b"end"))
    for name in ("pycode", "docs"):
        for part, texts in (("train", [f"{name} 1", f"{name} 2"]), ("valid", [f"{name} 3"])):
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (sets / name / f"{part}.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    out.mkdir()
    inputs = study_data.mix(sets, out)
    found = {
        name: [text for text, _ in pieces(part) if text] for name, part in find_sources(inputs).by_domain().items()
    }
    assert found == {
        "books": ["one ", "two.", "end"],
        "code": ["pycode 1", "pycode 2", "pycode 3"],
        "docs": ["docs 1", "docs 2", "docs 3"],
    }


def test_pictures_are_prepared_from_their_archive(tmp_path):
    pixels = np.zeros((8, 8, 3), np.uint8)
    for split, name, n in (("train", "cat", 0), ("train", "dog", 90), ("test", "cat", 10), ("test", "dog", 99)):
        (tmp_path / split / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels + n).save(tmp_path / split / name / "0.png")
    (tmp_path / "sets" / "cifar10").mkdir(parents=True)
    with tarfile.open(tmp_path / "sets" / "cifar10" / "a.tar.xz", "w:xz") as archive:
        for split in ("train", "test"):
            archive.add(tmp_path / split, split)
    study_data.prepare(tmp_path / "sets", tmp_path / "data")
    assert open_data(tmp_path / "data" / "cifar10").meta["classes"] == ["cat", "dog"]


def test_sets_that_are_not_there_are_named(tmp_path):
    with pytest.raises(SystemExit, match="no complete sets for any of gutenberg, pycode, cifar10, mix"):
        study_data.prepare(tmp_path, tmp_path)


def test_a_set_that_cannot_be_read_ends_in_one_sentence(tmp_path):
    (tmp_path / "cifar10").mkdir()
    call = [sys.executable, str(ROOT / "lab" / "study_data.py"), str(tmp_path), "--out", str(tmp_path / "data")]
    ended = subprocess.run(call, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ended.returncode == 1
    assert "0 files .tar.xz, and one is needed" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_options_of_a_study_that_cannot_be_read_are_named_and_not_run(tmp_path):
    call = [str(ROOT / "lab" / "studies.sh"), "out", "60", "tiny --sizes '6 blocks"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    ended = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert ended.returncode == 1
    assert "cannot read the options of: tiny --sizes '6 blocks" in ended.stderr
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("given", [[], ["out", "many", "tiny"], ["out", "60"]], ids=str)
def test_studies_says_how_it_is_called(tmp_path, given):
    ended = subprocess.run([str(ROOT / "lab" / "studies.sh"), *given], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2
    assert "usage: lab/studies.sh" in ended.stderr
    assert not list(tmp_path.iterdir())
