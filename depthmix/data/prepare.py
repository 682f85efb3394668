"""`depthmix data`: turn a corpus into a tokenizer and memory-mapped tokens, all or nothing."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from depthmix.config import DataConfig
from depthmix.data.alphabet import unknown_token
from depthmix.data.corpus import Listing, find_sources, pieces
from depthmix.data.dataset import TokenData, read_meta
from depthmix.data.staging import staged
from depthmix.data.tokenizer import BYTES, END, chunks, encode, load_tokenizer, train_tokenizer, vocabulary
from depthmix.data.validation_split import as_keys, check_split, choose, content_hash
from depthmix.data.writing import SHARD_TOKENS, open_shards, write_meta, write_tokenizer
from depthmix.errors import DATA, USAGE, UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Bytes of the training documents that the tokenizer is trained on. More bytes hardly change it.
SAMPLE_BYTES = 32 * 2**20
NEAR = 1 << 16  # characters around the wanted cut of a single document that are searched for a good place

Progress = Callable[[str, int, "int | None"], None]
Pieces = Iterable[tuple[str, bool]]


@dataclass
class Scan:
    """Findings of the first pass, at 16 bytes per document."""

    keys: np.ndarray  # a hash of the seed and the text
    sizes: np.ndarray  # bytes
    characters: int
    domains: dict[str, int]  # documents of each domain, in the order of the corpus


def prepare(
    config: DataConfig,
    progress: Progress | None = None,
    *,
    listing: Listing | None = None,
    shard_tokens: int = SHARD_TOKENS,
    sample_bytes: int = SAMPLE_BYTES,
) -> Path:
    """Write the prepared corpus to config.out.

    Args:
        config: What to prepare.
        progress: Called with (phase, done, total) in bytes of text, with the phases scan, tokenizer and encode.
        listing: Sources to read instead of the files that config.input names.
        shard_tokens: Largest number of tokens in a file.
        sample_bytes: Bytes of text to train the tokenizer on.

    Returns:
        The folder.

    Raises:
        UserError: The input or the output folder cannot be used.
    """
    _check(config)
    report: Progress = progress or (lambda phase, done, total: None)
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
    with staged(Path(config.out), config.overwrite) as folder:
        listing = find_sources(config.input) if listing is None else listing
        scan = _scan_domains(listing, config, report)
        total = int(scan.sizes.sum())
        split: dict[str, Any]
        if len(scan.keys) == 1 and scan.domains.keys() == {""}:
            at, boundary = _cut(_pieces(listing, config), scan.characters, config.val_fraction)
            in_val = np.array([False, True])
            scan.domains[""] = 2
            split = {"by": boundary, "character": at, "note": "one document only: its end is the validation split"}
        else:
            at = 0
            in_val, by = _choose_by_domain(scan, config)
            split = {"by": by}

        def corpus() -> Iterator[tuple[str, bool]]:
            return _cut_at(_pieces(listing, config), at) if at else _pieces(listing, config)

        if tokenizer is None:
            of = total * at // scan.characters if at else int(scan.sizes[~in_val].sum())
            sample = _sample(corpus(), in_val, min(sample_bytes, of), of, report)
            tokenizer = train_tokenizer(sample, config.vocab_size)
        meta = _write(folder, tokenizer, corpus(), in_val, scan.domains, total, shard_tokens, report)
        meta["source"] = [str(item) for item in config.input]
        meta |= listing.counts()
        meta["split"] = {**split, "val_fraction": config.val_fraction, "seed": config.seed}
        meta["document"], meta["text_field"] = config.document, config.text_field
        write_meta(folder, meta)
    return Path(config.out)


def summary(folder: str | Path) -> str:
    """Summarise in a few lines what prepared data holds and where it came from."""
    meta = TokenData.open(folder).meta
    lines = [f"prepared data in {folder}, with a vocabulary of {meta['vocab_size']:,}"]
    for name, split in meta["splits"].items():
        lines.append(f"    {name}: {_sizes(split)}")
        lines += [f"        {domain}: {_sizes(part)}" for domain, part in split.get("domains", {}).items()]
    for name, what in (("files", "read"), ("skipped_files", "skipped")):
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in meta[name].items())
        lines += [f"    {what}: {_count(sum(meta[name].values()), 'file')} ({kinds})"] if kinds else []
    return "\n".join(lines)


def _sizes(part: dict[str, Any]) -> str:
    counted = ("document", "token", "byte") if part["bytes"] else ("document", "token")  # of tokens alone
    return ", ".join(_count(part[f"{what}s"], what) for what in counted)


def warnings(folder: str | Path) -> list[str]:
    """Return warnings about prepared data that concern a training on it."""
    unknown = read_meta(Path(folder)).get("unknown_tokens")
    if not unknown:
        return []
    what = f"{unknown['count']:,} tokens are {unknown['token']}, which replaced text that the tokenizer does not know"
    return [f"{what}; bits per byte count the lost text as if it were present"]


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _check(config: DataConfig) -> None:
    check_split(config)
    if not config.tokenizer and config.vocab_size < BYTES + 1:
        raise UserError(
            f"vocab_size is {config.vocab_size}: it must be at least {BYTES + 1}, the {BYTES} bytes and {END}.", USAGE
        )
    if not config.tokenizer and config.vocab_size > 2**31:
        raise UserError(f"vocab_size is {config.vocab_size}: no corpus yields that many entries.", USAGE)


def _pieces(listing: Listing, config: DataConfig) -> Iterator[tuple[str, bool]]:
    return pieces(listing, config.text_field, config.document)


def _scan_domains(listing: Listing, config: DataConfig, report: Progress) -> Scan:
    """Scan one domain after the other; without named domains, all text as one."""
    parts: dict[str, Scan] = {}
    done = 0
    for name, part in listing.by_domain().items():

        def go_on(phase: str, size: int, total: int | None, before: int = done) -> None:
            report(phase, before + size, None)

        parts[name] = _scan(_pieces(part, config), config.seed, go_on)
        done += int(parts[name].sizes.sum())
        if name and len(parts[name].keys) == 1:
            what = f"The domain {name} is one document, which cannot be split"
            raise UserError(f"{what}: add documents, or set document to line or blank.", DATA)
    report("scan", done, done)
    return Scan(
        np.concatenate([scan.keys for scan in parts.values()]),
        np.concatenate([scan.sizes for scan in parts.values()]),
        sum(scan.characters for scan in parts.values()),
        {name: len(scan.keys) for name, scan in parts.items()},
    )


def _choose_by_domain(scan: Scan, config: DataConfig) -> tuple[np.ndarray, str]:
    """Choose the validation documents of each domain separately, the same share of each."""
    chosen, ways, first = [], [], 0
    for count in scan.domains.values():
        part, by = choose(scan.keys[first : first + count], config.val_fraction, config.seed)
        chosen.append(part)
        ways.append(by)
        first += count
    return np.concatenate(chosen), max(ways, key=len)


def _scan(corpus: Pieces, seed: int, report: Progress) -> Scan:
    keys, sizes = bytearray(), array("Q")
    characters = done = shown = size = 0
    digest = content_hash(seed)
    for text, last in corpus:
        data = text.encode()
        digest.update(data)
        characters += len(text)
        size += len(data)
        if last:
            keys += digest.digest()
            sizes.append(size)
            digest, size = content_hash(seed), 0
        done += len(data)
        if done - shown >= 1 << 20:
            report("scan", done, None)
            shown = done
    report("scan", done, done)
    return Scan(as_keys([keys]), np.array(sizes, np.int64), characters, {"": len(sizes)})


def _cut(corpus: Pieces, characters: int, fraction: float) -> tuple[int, str]:
    """Choose where to cut a single document, and name the place: at a nearby blank line, else a line's end, else a
    space.
    """
    wanted = min(max(1, round((1 - fraction) * characters)), characters - 1)
    if wanted < 1:
        raise UserError("The corpus is too short: it is one character, which cannot be split.", DATA)
    low, high = max(0, wanted - NEAR), min(characters, wanted + NEAR)
    position, window = 0, ""
    for text, _ in corpus:
        window += text[max(0, low - position) : max(0, high - position)]
        position += len(text)
    first = len(window) - len(window.lstrip())
    end = len(window.rstrip())
    for pattern, name in ((r"\n[ \t\r]*\n\s*", "paragraph"), (r"\n", "line"), (r"\s", "space")):
        cuts = [m.end() for m in re.finditer(pattern, window) if first < m.end() < end]
        if cuts:
            return low + min(cuts, key=lambda c: abs(low + c - wanted)), name
    raise UserError(
        "The corpus is too short: it is one document without a place to split it in two; add documents, or set document to line or blank.",
        DATA,
    )


def _cut_at(corpus: Pieces, at: int) -> Iterator[tuple[str, bool]]:
    position = 0
    for text, last in corpus:
        if position < at <= position + len(text):
            yield text[: at - position], True
            yield text[at - position :], last
        else:
            yield text, last
        position += len(text)


def _sample(corpus: Pieces, in_val: np.ndarray, wanted: int, of: int, report: Progress) -> Iterator[str]:
    """Yield the training documents, or evenly spaced chunks of them if they are more than wanted."""
    index, due, done = 0, 0.0, 0
    for text, last in chunks(corpus):
        if not in_val[min(index, len(in_val) - 1)]:
            due += wanted / of
            if due >= 1 or wanted >= of:
                due -= 1
                done += len(text.encode())
                report("tokenizer", min(done, wanted), wanted)
                yield text
            if wanted < of and done > 1.25 * wanted:  # chunks of very unequal length
                return
        index += last


def _write(
    folder: Path,
    tokenizer: Tokenizer,
    corpus: Pieces,
    in_val: np.ndarray,
    domains: dict[str, int],
    total: int,
    shard_tokens: int,
    report: Progress,
) -> dict[str, Any]:
    size = vocabulary(tokenizer)
    splits = open_shards(folder, size, shard_tokens)
    upcoming, domain, end = iter(domains.items()), "", 0
    index = lost = 0
    unknown = unknown_token(tokenizer)
    for encoded in encode(tokenizer, corpus, lambda done: report("encode", min(done, total), total)):
        if index >= len(in_val):
            break
        split = splits[int(in_val[index])]
        if index >= end:
            domain, count = next(upcoming)
            end += count
        split.write(encoded.ids, encoded.n_bytes, encoded.last, domain)
        index += encoded.last
        lost += 0 if unknown is None else int((encoded.ids == unknown[1]).sum())
    for shards in splits:
        shards.close()
    if index != len(in_val) or sum(s.bytes for s in splits) != total:
        raise UserError("The corpus changed while it was read: prepare it again.", DATA)
    report("encode", total, total)
    meta = write_tokenizer(folder, tokenizer, size, splits)
    if unknown is not None and lost:
        meta["unknown_tokens"] = {"token": unknown[0], "count": lost}
    return meta
