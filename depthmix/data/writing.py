"""Write prepared data: tokens in shards, the tokenizer, and at last meta.json."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from depthmix.data.dataset import DTYPES, SIZES, VERSION
from depthmix.data.tokenizer import END
from depthmix.files import write_file
from depthmix.ownership import META

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHARD_TOKENS = 64 * 2**20
TOKENIZER = "tokenizer.json"


class ShardWriter:
    """Writes the tokens of a split into files of at most `limit` tokens."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, limit: int) -> None:
        self.folder, self.name, self.dtype, self.limit = folder, name, dtype, max(1, limit)
        self.sha256: dict[str, str] = {}
        self.tokens = self.bytes = self.documents = 0
        self.domains: dict[str, dict[str, int]] = {}
        self._file: BinaryIO | None = None
        self._digest, self._room = hashlib.sha256(), 0

    def write(self, ids: np.ndarray, n_bytes: int, last: bool, domain: str = "") -> None:
        """Add tokens of `n_bytes` bytes of text. `last`: they end a document."""
        self.tokens += len(ids)
        self.bytes += n_bytes
        self.documents += last
        if domain:
            sizes = self.domains.setdefault(domain, dict.fromkeys(SIZES, 0))
            for name, more in zip(SIZES, (len(ids), n_bytes, int(last)), strict=True):
                sizes[name] += more
        while len(ids):
            if self._file is None:
                self._file = open(self.folder / f"{self.name}-{len(self.sha256):05d}.bin", "wb")  # noqa: SIM115
                self._digest, self._room = hashlib.sha256(), self.limit
            part, ids = ids[: self._room], ids[self._room :]
            data = part.astype(self.dtype).tobytes()
            self._file.write(data)
            self._digest.update(data)
            self._room -= len(part)
            if not self._room:
                self.close()

    def close(self) -> None:
        """Finish the current file, down to the disk."""
        if self._file:
            with self._file as file:
                file.flush()
                os.fsync(file.fileno())
            self.sha256[Path(file.name).name] = self._digest.hexdigest()
            self._file = None

    def meta(self) -> dict[str, Any]:
        """Return the split's entry in meta.json."""
        sizes = {"tokens": self.tokens, "bytes": self.bytes, "documents": self.documents}
        return {**sizes, "shards": list(self.sha256), **({"domains": self.domains} if self.domains else {})}


def open_shards(folder: Path, vocab_size: int, limit: int) -> tuple[ShardWriter, ShardWriter]:
    """Return the writers of the training and of the validation split."""
    dtype = DTYPES["uint16" if vocab_size <= 2**16 else "uint32"]
    return ShardWriter(folder, "train", dtype, limit), ShardWriter(folder, "val", dtype, limit)


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer, vocab_size: int, splits: Sequence[ShardWriter]
) -> dict[str, Any]:
    """Write the tokenizer beside finished splits, and return the entries of meta.json that describe both."""
    text = tokenizer.to_str(pretty=True).encode()
    write_file(folder / TOKENIZER, text)
    end = tokenizer.token_to_id(END)
    sums = {name: digest for split in splits for name, digest in split.sha256.items()}
    return {
        "version": VERSION,
        "dtype": splits[0].dtype.name,
        "vocab_size": vocab_size,
        "tokenizer": TOKENIZER,
        "end_of_text": None if end is None else {"token": END, "id": end},
        "splits": {split.name: split.meta() for split in splits},
        "sha256": {TOKENIZER: hashlib.sha256(text).hexdigest(), **sums},
    }


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Write meta.json, which makes a folder prepared data."""
    text = json.dumps(meta, indent=2, ensure_ascii=False)
    # Names of files need not be valid Unicode.
    write_file(folder / META, text.encode("utf-8", "backslashreplace") + b"\n")
