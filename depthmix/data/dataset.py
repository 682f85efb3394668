"""Prepared text: its files on disk, and the batches read from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from depthmix.data.integrity import data_hash, verify_files
from depthmix.errors import DATA, USAGE, UserError

VERSION = 1
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SPLITS = ("train", "val")
SIZES = ("tokens", "bytes", "documents")
SplitKind = TypeVar("SplitKind")


@dataclass
class Split:
    """The tokens of one split, memory-mapped."""

    name: str
    n_tokens: int
    n_bytes: int
    n_documents: int
    shards: list[np.ndarray]
    domains: dict[str, dict[str, int]] = field(default_factory=dict)  # tokens, bytes and documents of each, in order

    def __post_init__(self) -> None:
        self._starts = np.cumsum([0, *map(len, self.shards)])

    def parts(self) -> dict[str, Split]:
        """Return the text of each named domain as a split of its own, or the whole split under an empty name."""
        if not self.domains:
            return {"": self}
        parts, start = {}, 0
        for domain, size in self.domains.items():
            stop = start + size["tokens"]
            bounds = [(max(start - first, 0), max(stop - first, 0)) for first in map(int, self._starts[:-1])]
            shards = [shard[a:b] for shard, (a, b) in zip(self.shards, bounds, strict=True) if a < min(b, len(shard))]
            parts[domain] = Split(f"{self.name} ({domain})", size["tokens"], size["bytes"], size["documents"], shards)
            start = stop
        return parts

    def window(self, start: int, length: int) -> np.ndarray:
        """Read `length` tokens from `start` on, as int64, across shards."""
        out = np.empty(length, np.int64)
        self.read(start, out)
        return out

    def read(self, start: int, out: np.ndarray) -> None:
        """Fill `out` with the tokens from `start` on."""
        length = len(out)
        if start < 0 or start + length > self.n_tokens:
            raise IndexError(f"tokens {start} to {start + length} of {self.n_tokens}")
        shard = int(self._starts.searchsorted(start, "right")) - 1 if len(self.shards) > 1 else 0
        done = 0
        while done < length:
            at = start + done - int(self._starts[shard])
            part = self.shards[shard][at : at + length - done]
            out[done : done + len(part)] = part
            done += len(part)
            shard += 1


class Prepared(Generic[SplitKind]):
    """A folder of prepared data, of text or of images."""

    def __init__(self, folder: Path, meta: dict[str, Any], splits: dict[str, SplitKind]) -> None:
        self.folder, self.meta, self._splits, self.meta_path = folder, meta, splits, folder / "meta.json"
        self.sha256 = data_hash(meta)

    def split(self, name: str) -> SplitKind:
        """Return the split `train` or `val`."""
        if name not in self._splits:
            raise UserError(f"There is no split {name!r}: it is train or val.", USAGE)
        return self._splits[name]

    def verify(self) -> None:
        """Compare every file with its checksum, including files that were verified before."""
        verify_files(self.folder, self.meta, self.meta["sha256"], cached=False)


class TokenData(Prepared[Split]):
    """A folder written by `depthmix data`."""

    def __init__(self, folder: Path, meta: dict[str, Any], splits: dict[str, Split]) -> None:
        super().__init__(folder, meta, splits)
        self.vocab_size: int = meta["vocab_size"]
        self.tokenizer_path = folder / meta["tokenizer"]

    @classmethod
    def open(cls, folder: str | Path) -> TokenData:
        """Check the folder's version, sizes and checksums against its meta.json, and map its files."""
        folder = Path(folder)
        meta = read_meta(folder)
        if "classes" in meta:
            raise UserError(f"{folder} holds images, and this needs text: choose another folder.", DATA)
        if (wrong := _wrong(meta)) is not None:
            raise UserError(f"{folder / 'meta.json'} is damaged ({wrong}): prepare the data again.", DATA)
        dtype = DTYPES[meta["dtype"]]
        if not (folder / meta["tokenizer"]).is_file():
            raise UserError(f"{folder} is incomplete: {meta['tokenizer']} is missing; prepare the data again.", DATA)
        splits = {}
        for name in SPLITS:
            info = meta["splits"][name]
            shards = [map_file(folder / shard, dtype) for shard in info["shards"]]
            if (on_disk := sum(map(len, shards))) != info["tokens"]:
                raise UserError(
                    f"{folder} is damaged: its {name} split has {on_disk} tokens on disk and {info['tokens']} in meta.json"
                    " (a file was cut short or replaced); prepare the data again.",
                    DATA,
                )
            splits[name] = Split(
                name, info["tokens"], info["bytes"], info["documents"], shards, info.get("domains", {})
            )
        verify_files(folder, meta, [meta["tokenizer"], *(s for name in SPLITS for s in meta["splits"][name]["shards"])])
        return cls(folder, meta, splits)


def read_meta(folder: Path) -> dict[str, Any]:
    """Read the meta.json of prepared data of any kind. Raises UserError if the folder is not prepared data."""
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: make it with `depthmix data --input … --out {folder}`.", DATA)
    path = folder / "meta.json"
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is no plain file: choose a folder that `depthmix data` wrote.", DATA)
    try:
        meta = json.loads(path.read_bytes())
    except FileNotFoundError as e:
        raise UserError(f"{folder} is not prepared data, it has no meta.json: run `depthmix data`.", DATA) from e
    except OSError as e:
        raise UserError(f"{folder / 'meta.json'} cannot be read: {e.strerror or e}.", DATA) from e
    except (ValueError, RecursionError) as e:
        raise UserError(f"{folder / 'meta.json'} is damaged, it is not JSON: prepare the data again.", DATA) from e
    version = meta.get("version") if isinstance(meta, dict) else None
    if not isinstance(version, int) or "splits" not in meta:
        raise UserError(f"{folder / 'meta.json'} is not one of `depthmix data`: choose a folder that it wrote.", DATA)
    if version != VERSION:
        raise UserError(
            f"{folder} has version {version} of the format and this depthmix reads {VERSION}: prepare the data again.",
            DATA,
        )
    return meta


def _wrong(meta: dict[str, Any]) -> str | None:
    """Name the field that makes a meta.json unusable, or None. File names are checked, too: nothing outside the folder
    may be read.
    """
    if meta.get("dtype") not in DTYPES:
        return "dtype"
    if not is_count(meta.get("vocab_size"), 1):
        return "vocab_size"
    if not is_name(meta.get("tokenizer")):
        return "tokenizer"
    sums = meta.get("sha256")
    if not isinstance(sums, dict) or not all(map(is_name, sums)):
        return "sha256"
    for split in SPLITS:
        info = meta["splits"].get(split) if isinstance(meta["splits"], dict) else None
        if not isinstance(info, dict) or not all(is_count(info.get(k), 0) for k in SIZES):
            return f"split {split}"
        shards = info.get("shards")
        if not isinstance(shards, list) or not shards or not all(map(is_name, shards)):
            return f"shards of {split}"
        if (domains := info.get("domains")) is not None and not _add_up(domains, info):
            return f"domains of {split}"
    return None


def _add_up(domains: Any, info: dict[str, Any]) -> bool:
    """Tell whether the sizes of the domains add up to those of their split."""
    if not isinstance(domains, dict) or not all(isinstance(part, dict) for part in domains.values()):
        return False
    if not all(is_count(part.get(size), 1) for part in domains.values() for size in SIZES):
        return False
    return all(sum(part[size] for part in domains.values()) == info[size] for size in SIZES)


def is_count(value: Any, least: int) -> bool:
    """Tell whether a value of meta.json is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_name(value: Any) -> bool:
    """Tell whether a value of meta.json names a file in its own folder."""
    return isinstance(value, str) and value not in ("", ".", "..") and not set(value) & set("/\\:\0")


def map_file(path: Path, dtype: np.dtype) -> np.ndarray:
    """Memory-map a file of prepared data. Raises UserError if it is missing or cut short."""
    try:
        size = path.stat().st_size
        if size == 0 or size % dtype.itemsize:
            raise UserError(f"{path} is damaged, it is cut short: prepare the data again.", DATA)
        return np.asarray(np.memmap(path, dtype, "r"))
    except FileNotFoundError as e:
        raise UserError(f"{path} is missing: prepare the data again.", DATA) from e
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror or e}.", DATA) from e


def _windows(split: Split, seq_len: int, batch_size: int) -> int:
    """Count the windows of seq_len + 1 tokens that start at multiples of seq_len. Raises UserError if there are none."""
    if seq_len < 1 or batch_size < 1:
        raise UserError(f"seq_len is {seq_len} and batch_size {batch_size}: both must be at least 1.", USAGE)
    if split.n_tokens < seq_len + 1:
        raise UserError(
            f"The {split.name} split has {split.n_tokens} tokens, fewer than seq_len + 1 = {seq_len + 1}:"
            " choose a shorter seq_len or prepare more text"
            + (" (or a larger val_fraction)." if split.name == "val" else "."),
            DATA,
        )
    return (split.n_tokens - 1) // seq_len


class Order:
    """Shuffled order of n items for a seed. Each epoch contains every item once, in a different order."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.seed = n, seed
        self._orders: dict[int, np.ndarray] = {}

    def take(self, first: int, count: int) -> list[int]:
        """Return the items number `first` to `first + count`, continuing into the next epoch."""
        places = (divmod(first + i, self.n) for i in range(count))
        return [int(self._order(epoch)[position]) for epoch, position in places]

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            # Raw bits are sorted because NumPy guarantees the bits of Philox, but not the results of its shuffles.
            key = np.array([self.seed % 2**64, epoch], np.uint64)
            bits = np.random.Philox(key=key).random_raw(self.n)
            order = bits.argsort(kind="stable")
            self._orders = {k: v for k, v in self._orders.items() if k == epoch - 1} | {epoch: order}
        return order


class Batches:
    """Training batches. `get(step)` depends on the data, the arguments and the step only.

    Windows of seq_len + 1 tokens start at multiples of seq_len. A batch may span two epochs.
    """

    def __init__(self, split: Split, seq_len: int, batch_size: int, seed: int, rows: slice = slice(None)) -> None:
        self.split, self.seq_len, self.batch_size, self.seed = split, seq_len, batch_size, seed
        self.rows = range(batch_size)[rows]  # this process's rows of every batch
        self.n_windows = _windows(split, seq_len, batch_size)
        self.steps_per_epoch = -(-self.n_windows // batch_size)
        self.order = Order(self.n_windows, seed)

    def get(self, step: int, rows: range | None = None) -> Tensor:
        """Return rows of batch `step` (from 0) as a LongTensor [rows, seq_len + 1]; by default the rows of this
        process.
        """
        if step < 0:
            raise IndexError(f"step {step}")
        rows = self.rows if rows is None else rows
        out = np.empty((len(rows), self.seq_len + 1), np.int64)
        for row, window in zip(out, self.order.take(step * self.batch_size + rows.start, len(rows)), strict=True):
            self.split.read(window * self.seq_len, row)
        return torch.from_numpy(out)


def validation_batches(
    split: Split, seq_len: int, batch_size: int, limit_tokens: int | None = None
) -> Iterator[Tensor]:
    """Return the split's windows in order; the last batch may be smaller. At most `limit_tokens` predicted tokens, but
    at least one window.
    """
    n_windows = _windows(split, seq_len, batch_size)
    if limit_tokens is not None:
        n_windows = min(n_windows, max(1, limit_tokens // seq_len))

    def batches() -> Iterator[Tensor]:
        for first in range(0, n_windows, batch_size):
            out = np.empty((min(batch_size, n_windows - first), seq_len + 1), np.int64)
            for i in range(len(out)):
                split.read((first + i) * seq_len, out[i])
            yield torch.from_numpy(out)

    return batches()


def validation_parts(
    split: Split, seq_len: int, batch_size: int, limit_tokens: int | None = None
) -> dict[str, Iterator[Tensor]]:
    """Return the batches of each domain by its name; each domain has its share of `limit_tokens`."""
    return {
        domain: validation_batches(
            part,
            seq_len,
            batch_size,
            None if limit_tokens is None else limit_tokens * part.n_tokens // split.n_tokens,
        )
        for domain, part in split.parts().items()
    }
