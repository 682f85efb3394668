"""Prepare an array of existing tokens. They are written as they are, with nothing added between sequences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from depthmix.config import DataConfig
from depthmix.data.staging import staged
from depthmix.data.tokenizer import numbers_tokenizer, vocabulary
from depthmix.data.validation_split import as_keys, check_split, choose, content_hash
from depthmix.data.writing import SHARD_TOKENS, open_shards, write_meta, write_tokenizer
from depthmix.errors import DATA, USAGE, UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def prepare_tokens(
    config: DataConfig, tokens: np.ndarray, tokenizer: Tokenizer | None = None, *, shard_tokens: int = SHARD_TOKENS
) -> Path:
    """Write tokens to config.out as prepared data.

    Args:
        config: `out`, `vocab_size`, `val_fraction`, `seed` and `overwrite` are used; `input` names the origin of the
            tokens.
        tokens: Integers [N], whose end becomes the validation split, or [sequences, T], of which some sequences do.
        tokenizer: Tokenizer of the tokens. By default a token decodes to its number.
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
    with staged(Path(config.out), config.overwrite) as folder:
        train, val = writers = open_shards(folder, config.vocab_size, shard_tokens)
        if len(rows) == 1:
            at = min(max(1, round((1 - config.val_fraction) * rows.size)), rows.size - 1)
            train.write(rows[0, :at], 0, True)
            val.write(rows[0, at:], 0, True)
            split: dict[str, Any] = {"by": "token", "token": at, "note": "one sequence only: its end is for validation"}
        else:
            # Hashed as int64, so that the split does not depend on the dtype of the array.
            keys = as_keys(content_hash(config.seed, row.astype("<i8").tobytes()).digest() for row in rows)
            in_val, by = choose(keys, config.val_fraction, config.seed)
            for row, held_out in zip(rows, in_val, strict=True):
                (val if held_out else train).write(row, 0, True)
            split = {"by": by}
        for writer in writers:
            writer.close()
        meta = write_tokenizer(folder, tokenizer, config.vocab_size, writers)
        meta |= {"source": list(config.input), "files": {}, "skipped_files": {}}
        meta["split"] = {**split, "val_fraction": config.val_fraction, "seed": config.seed}
        write_meta(folder, meta)
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
