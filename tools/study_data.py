"""Prepare the data of the studies from the sets they were made with: python tools/study_data.py SETS [--out data].

SETS holds gutenberg100 (train.txt.bz2, valid.txt.bz2, index.json) and pycode (train.jsonl.xz, valid.jsonl.xz); what is missing is
left out. The same tokens come out bit for bit, so that results of several machines and days can be mixed: `depthmix study`
compares their checksums. Anybody's texts do for studies of their own (docs/data.md).
"""

from __future__ import annotations

import argparse
import bz2
import json
import lzma
import tempfile
from collections.abc import Iterator
from pathlib import Path

from depthmix.cli import main

VOCABULARY = "16384"
BETWEEN = "\n\n\n"  # files of code


def books(source: Path, out: Path) -> None:
    """A file a book, by the index's lengths; the blank lines between books are not counted there, so they shift the cuts."""
    index = json.loads((source / "index.json").read_text(encoding="utf-8"))
    texts = [(book, name) for name in ("train", "valid") for book in index if book["split"] == name]
    raw = {name: bz2.decompress((source / f"{name}.txt.bz2").read_bytes()) for name in ("train", "valid")}
    at = dict.fromkeys(raw, 0)
    for i, (book, name) in enumerate(texts):
        text = raw[name][at[name] : at[name] + book["bytes"]].decode(errors="ignore")
        at[name] += book["bytes"]
        (out / f"{i:03d}.txt").write_text(text, encoding="utf-8", newline="")


def code(source: Path, out: Path) -> float:
    """Every second training file and then all of the validation packages as one text; the share of the latter."""
    parts = {name: list(_files(source / f"{name}.jsonl.xz")) for name in ("train", "valid")}
    train, valid = BETWEEN.join(parts["train"][::2]) + BETWEEN, BETWEEN.join(parts["valid"])
    (out / "code.txt").write_text(train + valid, encoding="utf-8", newline="")
    return len(valid) / (len(train) + len(valid))


def _files(path: Path) -> Iterator[str]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def prepare(sets: Path, out: Path) -> None:
    """Both sets, as far as they are there."""
    done = False
    for name, target in (("gutenberg100", "gutenberg"), ("pycode", "pycode")):
        if not (sets / name).is_dir() or (out / target).exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            more: list[str] = []
            if name == "pycode":
                more = ["--val-fraction", f"{code(sets / name, Path(folder)):.9f}"]
            else:
                books(sets / name, Path(folder))
            given = ["--input", folder, "--out", str(out / target), "--vocab-size", VOCABULARY, *more]
            if failed := main(["data", *given]):
                raise SystemExit(failed)
        done = True
    if not done:
        raise SystemExit(f"{sets} has neither gutenberg100 nor pycode, or both are in {out} already")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sets", type=Path, help="folder of the sets")
    parser.add_argument("--out", type=Path, default=Path("data"), help="where prepared folders go")
    options = parser.parse_args()
    prepare(options.sets, options.out)
