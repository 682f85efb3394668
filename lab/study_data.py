"""Prepare the data of the studies from the sets they were made with: python lab/study_data.py SETS [--out data] [--only NAME …].

SETS holds gutenberg100 (train.txt.bz2, valid.txt.bz2, index.json), pycode and docs (train.jsonl.xz, valid.jsonl.xz) and cifar10 (an
archive of JPEGs, one folder per class in train and in test). Four folders can be made of them: gutenberg, pycode, cifar10, and mix.
mix is the text of the long study, in which books, code and docs are domains. A folder whose sets are missing is left out.

The tokens are the same bit for bit every time. Results of several machines and days can therefore be mixed: `depthmix compare` compares
their checksums. Any text will do for studies of your own (docs/guides/data.md).
"""

from __future__ import annotations

import argparse
import bz2
import json
import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from depthmix.cli import main

VOCABULARY = "16384"
# The sets that each folder is made of.
FOLDERS = {
    "gutenberg": ["gutenberg100"],
    "pycode": ["pycode"],
    "cifar10": ["cifar10"],
    "mix": ["gutenberg100", "pycode", "docs"],
}
# Between files of code.
BETWEEN = "\n\n\n"


def books(source: Path, out: Path) -> None:
    """Write one file per book, by the lengths in the index.

    The index does not count the blank lines between books, so the cuts are shifted.
    """
    index = json.loads((source / "index.json").read_text(encoding="utf-8"))
    texts = [(book, name) for name in ("train", "valid") for book in index if book["split"] == name]
    raw = {name: bz2.decompress((source / f"{name}.txt.bz2").read_bytes()) for name in ("train", "valid")}
    at = dict.fromkeys(raw, 0)
    for i, (book, name) in enumerate(texts):
        text = raw[name][at[name] : at[name] + book["bytes"]].decode(errors="ignore")
        at[name] += book["bytes"]
        (out / f"{i:03d}.txt").write_text(text, encoding="utf-8", newline="")


def code(source: Path, out: Path) -> float:
    """Write every second training file, then all validation packages, as one text. Return the share of the latter."""
    parts = {name: list(_files(source / f"{name}.jsonl.xz")) for name in ("train", "valid")}
    train, valid = BETWEEN.join(parts["train"][::2]) + BETWEEN, BETWEEN.join(parts["valid"])
    (out / "code.txt").write_text(train + valid, encoding="utf-8", newline="")
    return len(valid) / (len(train) + len(valid))


def _files(path: Path) -> Iterator[str]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def mix(sets: Path, out: Path) -> list[str]:
    """Write one file or folder per domain, with all documents of both parts of its set; return the inputs as NAME=PATH."""
    (out / "books").mkdir()
    books(sets / "gutenberg100", out / "books")
    for domain, name in (("code", "pycode"), ("docs", "docs")):
        with open(out / f"{domain}.jsonl", "wb") as file:
            for part in ("train", "valid"):
                with lzma.open(sets / name / f"{part}.jsonl.xz") as packed:
                    shutil.copyfileobj(packed, file)
    return [f"books={out / 'books'}", f"code={out / 'code.jsonl'}", f"docs={out / 'docs.jsonl'}"]


def images(source: Path, out: Path) -> None:
    """Unpack the archive."""
    archives = list(source.glob("*.tar.xz"))
    if len(archives) != 1:
        raise FileNotFoundError(f"{source} has {len(archives)} files .tar.xz, and one is needed")
    with tarfile.open(archives[0]) as packed:
        packed.extractall(out, filter="data")


def prepare(sets: Path, out: Path, only: Sequence[str] = tuple(FOLDERS)) -> None:
    """Prepare every wanted folder whose sets exist and which does not exist yet."""
    done = False
    for target in only:
        if not all((sets / name).is_dir() for name in FOLDERS[target]) or (out / target).exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            place, source = Path(folder), sets / FOLDERS[target][0]
            given = ["--vocab-size", VOCABULARY, "--input", folder]
            if target == "cifar10":
                images(source, place)
                given = ["--images", folder]
            elif target == "mix":
                given = ["--vocab-size", VOCABULARY, "--val-fraction", "0.02", "--input", *mix(sets, place)]
            elif target == "pycode":
                given += ["--val-fraction", f"{code(source, place):.9f}"]
            else:
                books(source, place)
            if failed := main(["data", *given, "--out", str(out / target)]):
                raise SystemExit(failed)
        done = True
    if not done:
        raise SystemExit(f"{sets} has no complete sets for any of {', '.join(only)} that {out} lacks")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sets", type=Path, help="folder of the sets")
    parser.add_argument("--out", type=Path, default=Path("data"), help="where prepared folders go")
    parser.add_argument("--only", nargs="+", choices=FOLDERS, default=list(FOLDERS), help="folders to prepare")
    options = parser.parse_args()
    try:
        prepare(options.sets, options.out, options.only)
    except (OSError, EOFError, ValueError, KeyError, lzma.LZMAError, tarfile.TarError) as error:
        raise SystemExit(f"study_data: a set in {options.sets} cannot be read: {error}") from None
