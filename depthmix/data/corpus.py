"""Read documents from files, folders and Hugging Face datasets, piece by piece."""

from __future__ import annotations

import codecs
import gzip
import importlib
import json
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from depthmix.errors import DATA, USAGE, UserError

PROSE = (".txt", ".md", ".rst", ".tex")
# Not markup, configuration and data, such as .html, .json or .csv: most of it is not written by people.
SOURCE = (
    ".bash .c .cc .clj .cpp .cs .cu .cuh .cxx .dart .erl .ex .exs .f90 .go .h .hpp .hs .java .jl .js .jsx .kt .lua .m .mjs "
    ".ml .php .pl .pm .proto .py .pyi .r .rb .rs .s .scala .sh .sql .swift .ts .tsx .v .vhd .zig"
)
CODE = tuple(SOURCE.split())
JSONL, PARQUET, GZIP = ".jsonl", ".parquet", ".gz"
KNOWN = f"{', '.join(PROSE)}, source code (.c, .py, .rs and so on), {JSONL}, any of these with {GZIP}, or {PARQUET}"
ABOUT = {"readme", "license", "licence", "notice", "copying"}  # files in a folder that describe the corpus
BLOCK = 1 << 20  # bytes read at a time
PARQUET_ROWS = 64  # rows decoded at a time: rows may be books
_TEXT = re.compile(r"\S")
_DOMAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Source:
    """A file, or a Hugging Face dataset when `hub` is set."""

    name: str
    direct: bool  # named by the user, not found in a folder: then it must hold text
    hub: str = ""  # the split
    domain: str = ""  # the user's name for what the source belongs to, if there is one

    @property
    def extension(self) -> str:
        return _extension(self.name)

    @property
    def kind(self) -> str:
        """The extension of a file, including .gz, or the dataset's name."""
        return f"hf:{self.name}" if self.hub else _splitext(self.name)


@dataclass
class Listing:
    """The sources that inputs expand to, in order, and the skipped files in folders with the reason."""

    sources: list[Source] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def by_domain(self) -> dict[str, Listing]:
        """Return the sources of each domain, in the order in which the domains were named."""
        parts: dict[str, Listing] = {}
        for source in self.sources:
            parts.setdefault(source.domain, Listing()).sources.append(source)
        return parts

    def counts(self) -> dict[str, dict[str, int]]:
        """Count the files taken by kind, and the skipped files by reason, largest first."""
        kinds = {"files": [s.kind for s in self.sources], "skipped_files": list(self.skipped.values())}
        return {name: dict(Counter(sorted(entries)).most_common()) for name, entries in kinds.items()}


def documents(inputs: Sequence[str | Path], text_field: str = "text", document: str = "file") -> Iterator[str]:
    """Yield the documents of the inputs in order. White space alone is not a document."""
    parts: list[str] = []
    for text, last in pieces(find_sources(inputs), text_field, document):
        parts.append(text)
        if last:
            yield "".join(parts)
            parts.clear()


def find_sources(inputs: Sequence[str | Path]) -> Listing:
    """List the files of the inputs: folders recursively in sorted order, each file once even if inputs overlap."""
    if isinstance(inputs, str | Path):
        inputs = [inputs]
    if not inputs:
        raise UserError("No input was given: name files, folders or hf:NAME[:SPLIT].", USAGE)
    listing = Listing()
    listed: set[tuple[int, int]] = set()
    named = {item: split_domain(item) for item in map(str, inputs)}
    if len(bare := [item for item, (domain, _) in named.items() if not domain]) not in (0, len(named)):
        raise UserError(f"{bare[0]} has no domain and other inputs have one: write NAME={bare[0]}.", USAGE)
    for domain, place in named.values():
        begun = len(listing.sources)
        _find(place, listing, listed)
        listing.sources[begun:] = [replace(source, domain=domain) for source in listing.sources[begun:]]
        if domain and domain not in listing.by_domain():
            raise UserError(f"The domain {domain} has no files of its own: {place} was named before.", DATA)
    # The text of a domain is contiguous, even if its inputs were not named one after the other.
    listing.sources = [source for part in listing.by_domain().values() for source in part.sources]
    return listing


def split_domain(item: str) -> tuple[str, str]:
    """Split an input NAME=PLACE into the domain's name and the place; the name is empty for an input without one."""
    name, equals, place = item.partition("=")
    if not equals or os.path.lexists(item) or not _DOMAIN.fullmatch(name):
        return "", item
    return name, place


def _find(item: str, listing: Listing, listed: set[tuple[int, int]]) -> None:
    """Add the sources of one input to the listing."""
    if item.startswith("hf:"):
        name, _, split = item[3:].partition(":")
        if not name:
            raise UserError(f"{item!r} names no dataset: write hf:NAME or hf:NAME:SPLIT.", USAGE)
        listing.sources.append(Source(name, True, split or "train"))
        return
    info = _stat(item)
    if stat.S_ISDIR(info.st_mode):
        if not _walk(item, listing, listed, {(info.st_dev, info.st_ino): item}):
            raise UserError(
                f"The folder {item} holds no corpus: it has no file that ends in {KNOWN} and holds something"
                f" ({len(listing.skipped)} skipped; README and LICENSE files do not count).",
                DATA,
            )
    elif not stat.S_ISREG(info.st_mode):
        raise UserError(f"{item} is neither a file nor a folder (it is read several times, so no pipe).", DATA)
    elif not _extension(item):
        raise UserError(f"{item} has an extension that is not known: use {KNOWN}.", DATA)
    elif info.st_size == 0:
        raise UserError(f"The file {item} is empty.", DATA)
    elif (key := (info.st_dev, info.st_ino)) not in listed:
        listed.add(key)
        listing.sources.append(Source(item, True))


def pieces(listing: Listing, text_field: str = "text", document: str = "file") -> Iterator[tuple[str, bool]]:
    """Yield (text, last) for each piece of each document. A file that is one document comes in blocks, so it need not
    fit into memory.
    """
    if document not in ("file", "line", "blank"):
        raise UserError(f"document is {document!r}: it must be file, line or blank.", USAGE)
    nothing = True
    for source in listing.sources:
        empty = True
        for piece in _read(source, text_field, document):
            empty = nothing = False
            yield piece
        if empty and source.direct:
            raise UserError(f"{source.name} holds no text.", DATA)
    if nothing:
        raise UserError("The corpus is empty: no input holds any text.", DATA)


def _read(source: Source, text_field: str, document: str) -> Iterator[tuple[str, bool]]:
    if source.hub:
        texts = _hub(source, text_field)
    elif source.extension == PARQUET:
        texts = _parquet(source.name, text_field)
    elif source.extension == JSONL:
        texts = _jsonl(source.name, text_field)
    elif document == "file":
        yield from _whole(source.name)
        return
    else:
        texts = _lines(source.name) if document == "line" else _paragraphs(source.name)
    for text in texts:
        if _TEXT.search(text):
            yield text, True


def _walk(folder: str, listing: Listing, listed: set[tuple[int, int]], above: dict[tuple[int, int], str]) -> int:
    """Add a folder's files; returns how many there are, including those already seen."""
    count = 0
    try:
        names = sorted(os.listdir(folder))
    except OSError as e:
        raise _unreadable(folder, e) from e
    for name in names:
        path = os.path.join(folder, name)
        if name.startswith("."):
            listing.skipped[path] = "hidden"
            continue
        ending = _extension(name)
        try:
            info = os.stat(path)
        except OSError as e:
            if not ending:  # a dangling link that nobody would read
                listing.skipped[path] = "broken link"
                continue
            raise _unreadable(path, e) from e
        key = info.st_dev, info.st_ino
        if stat.S_ISDIR(info.st_mode):
            if key in above:
                raise UserError(f"{path} is a link back to the folder {above[key]}: the folders go in a circle.", DATA)
            count += _walk(path, listing, listed, {**above, key: path})
        elif not stat.S_ISREG(info.st_mode):
            listing.skipped[path] = "no file"
        elif ending not in CODE and name.split(".")[0].lower() in ABOUT:
            listing.skipped[path] = "README or the like"
        elif not ending:
            listing.skipped[path] = _splitext(name) or "without extension"
        elif info.st_size == 0:
            listing.skipped[path] = "empty"
        else:
            count += 1
            if key not in listed:
                listed.add(key)
                listing.sources.append(Source(path, False))
    return count


def _splitext(name: str) -> str:
    """Return the extension of a name in lower case, with .gz: .txt.gz for x.TXT.gz."""
    plain = name.lower().removesuffix(GZIP)
    return os.path.splitext(plain)[1] + name.lower()[len(plain) :]


def _extension(name: str) -> str:
    """Return the extension without .gz if it is a known one, else ""."""
    extension = _splitext(name)
    bare = extension.removesuffix(GZIP)
    return bare if bare in (*PROSE, *CODE, JSONL) or extension == PARQUET else ""


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except FileNotFoundError as e:
        raise UserError(f"There is no file or folder {path}.", DATA) from e
    except (OSError, ValueError) as e:
        raise _unreadable(path, e) from e


def _unreadable(path: str, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return UserError(f"{path} cannot be read: {reason}.", DATA)


def _binary(path: str, offset: int, what: str) -> UserError:
    return UserError(f"{path} is not UTF-8 text: {what} at byte {offset}.", DATA)


def _decode(path: str, data: bytes, offset: int) -> str:
    if (nul := data.find(b"\0")) >= 0:
        raise _binary(path, offset + nul, "a NUL byte")
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise _binary(path, offset + e.start, f"byte 0x{data[e.start]:02x} does not decode") from e


def _whole(path: str) -> Iterator[tuple[str, bool]]:
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    offset = 0
    # White space before the first word is held back, because the file may hold nothing else.
    held, started = "", False
    with _open(path) as file:
        while data := _call(path, file.read, BLOCK):
            if (nul := data.find(b"\0")) >= 0:
                raise _binary(path, offset + nul, "a NUL byte")
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data)
            except UnicodeDecodeError as e:
                wrong = e.object[e.start]
                raise _binary(path, offset - pending + e.start, f"byte 0x{wrong:02x} does not decode") from e
            if offset == 0:
                text = text.removeprefix("\ufeff")
            offset += len(data)
            if not started:
                held += text
                if not _TEXT.search(text):
                    continue
                text, started = held, True
            yield text, False
    if rest := decoder.getstate()[0]:
        raise _binary(path, offset - len(rest), "the last character is cut off")
    if started:
        yield "", True


def _raw_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line without its end)."""
    offset = 0
    with _open(path) as file:
        number = 0
        while data := _call(path, file.readline):
            number += 1
            if number == 1 and data.startswith(codecs.BOM_UTF8):
                data, offset = data[3:], 3
            yield number, _decode(path, data, offset).rstrip("\r\n")
            offset += len(data)


def _lines(path: str) -> Iterator[str]:
    return (line for _, line in _raw_lines(path))


def _paragraphs(path: str) -> Iterator[str]:
    paragraph: list[str] = []
    for line in _lines(path):
        if _TEXT.search(line):
            paragraph.append(line)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph.clear()
    if paragraph:
        yield "\n".join(paragraph)


def _jsonl(path: str, text_field: str) -> Iterator[str]:
    for number, line in _raw_lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise UserError(f"{where} is not JSON ({getattr(e, 'msg', e)}).", DATA) from e
        if not isinstance(record, dict):
            raise UserError(f"{where} is JSON but no object: each line must be an object with a text field.", DATA)
        if text_field not in record:
            fields = ", ".join(map(repr, record)) or "none"
            raise UserError(f"{where} has no field {text_field!r} (its fields: {fields}): set text_field.", DATA)
        yield as_text(record[text_field], where, f"field {text_field!r}")


def as_text(value: Any, where: str, what: str) -> str:
    """Return a value that must be text. Raises UserError, with the place, for another type or text that UTF-8 cannot hold."""
    if not isinstance(value, str):
        raise UserError(f"{where}: {what} is {type(value).__name__}, not text.", DATA)
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise UserError(f"{where}: {what} has half a surrogate pair at character {e.start}.", DATA) from e
    return value


def _parquet(path: str, column: str) -> Iterator[str]:
    try:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as e:
        raise UserError(f"Reading {path} needs pyarrow: pip install pyarrow.", DATA) from e
    row = 0
    try:
        with parquet.ParquetFile(path, memory_map=True) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise no_column(path, column, names)
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[column], use_threads=False):
                for value in batch.column(0):
                    row += 1
                    yield as_text(value.as_py(), f"{path}, row {row}", f"column {column!r}")
    except UnicodeDecodeError as e:
        raise UserError(f"{path}, row {row}: column {column!r} is not UTF-8 text.", DATA) from e
    except (OSError, pyarrow.ArrowException) as e:
        reason = str(e).splitlines()[0].rstrip(".") if str(e) else type(e).__name__
        raise UserError(f"{path} cannot be read as parquet: {reason}.", DATA) from e


def _hub(source: Source, column: str) -> Iterator[str]:
    name, split = source.name, source.hub
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as e:
        raise UserError(f"Reading hf:{name} needs the datasets library: pip install datasets.", DATA) from e
    try:
        # Not streamed: the corpus is read several times, and the library keeps it on disk.
        data = datasets.load_dataset(name, split=split)
    except Exception as e:  # whatever the library, the hub or the network raise
        reason = (str(e) or type(e).__name__).splitlines()[0].rstrip(".")
        raise UserError(
            f"The Hugging Face dataset {name} (split {split}) cannot be loaded: {reason}; "
            "without access to the hub, download its files elsewhere and name them instead.",
            DATA,
        ) from e
    if column not in data.column_names:
        raise no_column(f"hf:{name}", column, data.column_names)
    for row, record in enumerate(data.select_columns([column]), 1):
        yield as_text(record[column], f"hf:{name}, row {row}", f"column {column!r}")


def no_column(where: str, column: str, names: Sequence[str]) -> UserError:
    """Return the error for a table without the column that was asked for."""
    return UserError(f"{where} has no column {column!r} (its columns: {', '.join(names)}): set text_field.", DATA)


def _open(path: str) -> BinaryIO:
    try:
        file: Any = gzip.open(path, "rb") if path.lower().endswith(GZIP) else open(path, "rb")  # noqa: SIM115
    except OSError as e:
        raise _unreadable(path, e) from e
    return file


def _call(path: str, read: Any, *args: int) -> bytes:
    try:
        data: bytes = read(*args)
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise UserError(f"{path} is damaged: it does not decompress ({e}).", DATA) from e
    except OSError as e:
        raise _unreadable(path, e) from e
    return data
