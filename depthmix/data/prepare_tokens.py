"""Prepare an array of existing tokens. They are written as they are, with nothing added between sequences."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from depthmix.config import DataConfig
from depthmix.data.dataset import VERSION, ShardWriter
from depthmix.data.prepare import SHARD_TOKENS, check_split, choose
from depthmix.data.staging import staged
from depthmix.data.tokenizer import END, numbers_tokenizer, vocabulary
from depthmix.errors import DATA, USAGE, UserError
from depthmix.files import write_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def prepare_tokens(
    config: DataConfig, tokens: np.ndarray, tokenizer: Tokenizer | None = None, *, shard_tokens: int = SHARD_TOKENS
) -> Path:
    """Write tokens to config.out as prepared data.

    Args:
        config: `out`, `vocab_size`, `val_fraction`, `seed` and `overwrite` count; `input` says in a word where the tokens are from.
        tokens: Integers [N], of which the end is the validation split, or [sequences, T], of which some sequences are.
        tokenizer: What the tokens mean; without one a token reads as its number.
        shard_tokens: Largest number of tokens in a file.

    Returns:
        The folder.

    Raises:
        UserError: The tokens do not fit the vocabulary, or are too few to be split.
    """
    check_split(config)
    _check_tokens(tokens, config.vocab_size)
    if tokenizer is None:
        tokenizer = numbers_tokenizer(config.vocab_size)
    elif (size := vocabulary(tokenizer)) > config.vocab_size:
        raise UserError(f"vocab_size is {config.vocab_size} and the tokenizer has {size} entries: raise it.", USAGE)
    rows = tokens.reshape(1, -1) if tokens.ndim == 1 or len(tokens) == 1 else tokens
    dtype = np.dtype("<u2" if config.vocab_size <= 2**16 else "<u4")
    with staged(Path(config.out), config.overwrite) as folder:
        writers = {name: ShardWriter(folder, name, dtype, shard_tokens) for name in ("train", "val")}
        if len(rows) == 1:
            at = min(max(1, round((1 - config.val_fraction) * rows.size)), rows.size - 1)
            writers["train"].write(rows[0, :at], 0, True)
            writers["val"].write(rows[0, at:], 0, True)
            split: dict[str, Any] = {"by": "token", "token": at, "note": "one sequence only: its end is for validation"}
        else:
            in_val, by = choose(_keys(rows, config.seed), config.val_fraction, config.seed)
            for row, held_out in zip(rows, in_val, strict=True):
                writers["val" if held_out else "train"].write(row, 0, True)
            split = {"by": by}
        for writer in writers.values():
            writer.close()
        text = tokenizer.to_str(pretty=True).encode()
        write_file(folder / "tokenizer.json", text)
        end = tokenizer.token_to_id(END)
        meta = {
            "version": VERSION,
            "dtype": "uint16" if dtype.itemsize == 2 else "uint32",
            "vocab_size": config.vocab_size,
            "tokenizer": "tokenizer.json",
            "end_of_text": None if end is None else {"token": END, "id": end},
            "splits": {name: writer.meta() for name, writer in writers.items()},
            "sha256": {
                "tokenizer.json": hashlib.sha256(text).hexdigest(),
                **{name: digest for writer in writers.values() for name, digest in writer.sha256.items()},
            },
            "source": list(config.input),
            "files": {},
            "skipped_files": {},
            "split": {**split, "val_fraction": config.val_fraction, "seed": config.seed},
        }
        write_file(folder / "meta.json", json.dumps(meta, indent=2, ensure_ascii=False).encode() + b"\n")
    return Path(config.out)


def _check_tokens(tokens: np.ndarray, vocab_size: int) -> None:
    if tokens.ndim not in (1, 2):
        raise UserError(f"The array of tokens has shape {list(tokens.shape)}: give [N] or [sequences, T].", DATA)
    if tokens.dtype.kind not in "iu":
        raise UserError(f"The array of tokens has dtype {tokens.dtype}: tokens are integers.", DATA)
    if tokens.size < 2:
        raise UserError(f"There is nothing to split in an array of {tokens.size} tokens: give more.", DATA)
    if not 1 <= vocab_size <= 2**31:
        raise UserError(f"vocab_size is {vocab_size}: it must be between 1 and 2**31.", USAGE)
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= vocab_size:
        wrong = f"The tokens lie between {least} and {most}, and a vocabulary of {vocab_size} has 0 to {vocab_size - 1}"
        raise UserError(f"{wrong}: set vocab_size to at least {most + 1}, and leave negative ones out.", DATA)


def _keys(rows: np.ndarray, seed: int) -> np.ndarray:
    """Hash every sequence with the seed, as texts are: the split depends on neither order nor dtype."""
    start = f"{seed}\n".encode()
    digests = (hashlib.blake2b(start + row.astype("<i8").tobytes(), digest_size=8).digest() for row in rows)
    return np.array([int.from_bytes(digest, "little") for digest in digests], np.uint64)
