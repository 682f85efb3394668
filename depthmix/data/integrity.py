"""Check that prepared data is unchanged since `depthmix data` wrote it, and identify it by one hash.

meta.json holds the SHA-256 of every other file. Reading all files takes about a second per gigabyte, so the checksums are cached
in `.verified.json` beside the data, with each file's identity: inode, size, and the times of the last changes to its content and
its entry. A file with an unchanged identity is not read again. If the folder is not writable, the cache lives in this process.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from depthmix.errors import DATA, UserError
from depthmix.files import file_sha256, find_json_object, is_plain_file, reason, write_file

VERIFIED = ".verified.json"
# Two changes within one tick of a file system's clock leave the same times. A checksum is cached only for a file that had not
# changed for longer than the coarsest tick, which is two seconds (FAT).
SETTLED = 2_000_000_000
# Entries of meta.json about the origin of the data. They do not count: data are their tokens or pixels.
ORIGIN = {"source", "files", "skipped_files", "split", "document", "text_field", "unknown_tokens"}

Entry = list[Any]  # inode, size, two times and the checksum
_remembered: dict[str, Entry] = {}  # by path


def data_hash(data: str | Path | Mapping[str, Any]) -> str:
    """Return the SHA-256 that identifies prepared data, independent of its place and origin.

    Args:
        data: A folder of prepared data, or the content of its meta.json.

    Returns:
        64 hexadecimal digits, which depend on the checksums of all files and on how the files are read, such as the
            type of the tokens and the sizes of the splits.

    Raises:
        UserError: The folder is not prepared data.

    Examples:
        >>> data_hash("data/sotu") == data_hash(TokenData.open("data/sotu").meta)
        True
    """
    if not isinstance(data, Mapping):
        from depthmix.data.dataset import read_meta  # imports this module

        data = read_meta(Path(data))
    content = {key: value for key, value in data.items() if key not in ORIGIN}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def verify_files(folder: Path, meta: Mapping[str, Any], names: Iterable[str], cached: bool = True) -> None:
    """Compare files of prepared data with their checksums.

    Args:
        folder: The prepared data.
        meta: The content of its meta.json.
        names: Files to compare. Each must have a checksum in meta.json.
        cached: Whether to skip files that were verified before and have the same identity.

    Raises:
        UserError: A file has no checksum, cannot be read, or has changed.
    """
    known = {**_read_cache(folder), **_recall(folder)} if cached else {}
    fresh: dict[str, Entry] = {}
    for name in dict.fromkeys(names):
        expected = meta["sha256"].get(name)
        if expected is None:
            raise UserError(f"{folder / 'meta.json'} is damaged (no checksum of {name}): prepare the data again.", DATA)
        path = folder / name
        try:
            entry, settled = _read_entry(path, known.get(name))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {reason(error, path)}.", DATA) from error
        if entry[-1] != expected:
            what = "it is not what `depthmix data` wrote"
            raise UserError(
                f"{path} is damaged (wrong checksum): {what}; prepare the data again or put a good copy back.", DATA
            )
        if settled and entry != known.get(name):
            fresh[name] = entry
    if fresh:
        _remembered.update({os.path.abspath(folder / name): entry for name, entry in fresh.items()})
        with suppress(OSError):  # not writable: other processes read the files again
            write_file(folder / VERIFIED, json.dumps({**_read_cache(folder), **fresh}, indent=1).encode())


def describe_change(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe in a few words what differs between the meta.json of two data sets."""
    kinds = ["images" if "classes" in meta else "text" for meta in (then, now)]
    if kinds[0] != kinds[1]:
        return f"it held {kinds[0]} and holds {kinds[1]}"
    for name, what in (("vocab_size", "entries in its vocabulary"), ("classes", "classes")):
        old, new = (len(v) if isinstance(v := meta.get(name), list) else v for meta in (then, now))
        if old != new:
            return f"it had {old} {what} and has {new}"
    changed = {
        name
        for name in {**_sums(then), **_sums(now)}
        if _sums(then).get(name) != _sums(now).get(name) and isinstance(name, str)
    }
    for begins, what in (
        ("tokenizer", "its tokenizer"),
        ("train", "its training split"),
        ("val", "its validation split"),
    ):
        if any(name.startswith(begins) for name in changed):
            return f"{what} is another"
    return "its meta.json is another"


def _sums(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    sums = meta.get("sha256")
    return sums if isinstance(sums, Mapping) else {}


def _read_entry(path: Path, known: Entry | None) -> tuple[Entry, bool]:
    """Return the identity and the checksum of a file, and whether they can be cached."""
    before, started = _identity(path), time.time_ns()
    if known is not None and known[:-1] == before:
        return known, True
    return [*before, file_sha256(path)], _identity(path) == before and started - max(before[2:]) > SETTLED


def _identity(path: Path) -> list[int]:
    info = path.stat()
    return [info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]


def _recall(folder: Path) -> dict[str, Entry]:
    parent = os.path.abspath(folder)
    return {os.path.basename(path): entry for path, entry in _remembered.items() if os.path.dirname(path) == parent}


def _read_cache(folder: Path) -> dict[str, Entry]:
    """Return the content of the cache file; nothing if it is missing or damaged."""
    cached = find_json_object(folder / VERIFIED) if is_plain_file(folder / VERIFIED) else {}
    return {name: entry for name, entry in cached.items() if isinstance(entry, list) and len(entry) == 5}
