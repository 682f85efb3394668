"""Choose which documents, sequences or images are kept for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from depthmix.config import DataConfig
from depthmix.errors import USAGE, UserError


def check_split(config: DataConfig) -> None:
    """Refuse a configuration without a folder to write, or whose split would leave one side empty."""
    if not config.out:
        raise UserError("No folder to write was given: set out.", USAGE)
    if not 0 < config.val_fraction < 1:
        raise UserError(f"val_fraction is {config.val_fraction}: it must lie between 0 and 1, both excluded.", USAGE)


def content_hash(seed: int, content: bytes = b"") -> Any:
    """Begin the hash of a document's content. The 8 bytes are a key for `choose`, so order and names do not count."""
    return hashlib.blake2b(f"{seed}\n".encode() + content, digest_size=8)


def as_keys(digests: Iterable[bytes | bytearray]) -> np.ndarray:
    """Return finished hashes as the keys [N] that `choose` takes."""
    return np.frombuffer(b"".join(digests), "<u8")


def choose(keys: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, str]:
    """Choose the validation documents: those with the smallest keys. Copies of a document stay together, so that none
    is in both splits.
    """
    unique, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
    by = "document"
    if len(unique) == 1:
        by = "document, though all are the same"
        group = np.random.Philox(key=seed % 2**64).random_raw(len(keys)).argsort(kind="stable").argsort(kind="stable")
        counts = np.ones(len(keys), np.int64)
    wanted = min(max(1, round(fraction * len(keys))), len(keys) - 1)
    taken = np.zeros(len(counts), bool)
    remaining = wanted
    for i, count in enumerate(counts):
        if count <= remaining:
            taken[i] = True
            remaining -= int(count)
        if not remaining:
            break
    if remaining == wanted:  # every document has more copies than wanted
        taken[counts.argmin()] = True
    return taken[group], by
