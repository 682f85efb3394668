"""Prepare the data of the studies from the sets they were made with: python tools/study_data.py SETS [--out data].

SETS holds gutenberg100 (train.txt.bz2, valid.txt.bz2, index.json), pycode (train.jsonl.xz, valid.jsonl.xz) and cifar10 (an archive
of JPEGs, a folder a class in train and in test); a set that is missing is left out. The same tokens come out bit for bit, so that
results of several machines and days can be mixed: `depthmix study` compares their checksums. Anybody's texts do for studies of their own (docs/data.md).
"""

from __future__ import annotations

import argparse
import bz2
import json
import lzma
import tarfile
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


def images(source: Path, out: Path) -> None:
    """The archive, unpacked."""
    found = list(source.glob("*.tar.xz"))
    if len(found) != 1:
        raise FileNotFoundError(f"{source} has {len(found)} files .tar.xz, and one is needed")
    with tarfile.open(found[0]) as packed:
        packed.extractall(out, filter="data")


def prepare(sets: Path, out: Path) -> None:
    """All sets that are there and not yet prepared."""
    done = False
    for name, target in (("gutenberg100", "gutenberg"), ("pycode", "pycode"), ("cifar10", "cifar10")):
        if not (sets / name).is_dir() or (out / target).exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            given = ["--out", str(out / target)]
            if name == "cifar10":
                images(sets / name, Path(folder))
                given += ["--images", folder]
            else:
                given += ["--input", folder, "--vocab-size", VOCABULARY]
                if name == "pycode":
                    given += ["--val-fraction", f"{code(sets / name, Path(folder)):.9f}"]
                else:
                    books(sets / name, Path(folder))
            if failed := main(["data", *given]):
                raise SystemExit(failed)
        done = True
    if not done:
        raise SystemExit(f"{sets} has none of gutenberg100, pycode and cifar10 that is not in {out} already")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sets", type=Path, help="folder of the sets")
    parser.add_argument("--out", type=Path, default=Path("data"), help="where prepared folders go")
    options = parser.parse_args()
    try:
        prepare(options.sets, options.out)
    except (OSError, EOFError, ValueError, KeyError, lzma.LZMAError, tarfile.TarError) as error:
        raise SystemExit(f"study_data: a set in {options.sets} cannot be read: {error}") from None
