"""`depthmix.prepare`: prepare texts or tokens from Python with the engine of `depthmix data`."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from depthmix.api.owned_folder import OwnedFolder
from depthmix.config import DataConfig
from depthmix.errors import UserError

# The engines are slow to import. Functions import them on first use, so that `from depthmix import *` stays fast.

Folder = str | os.PathLike[str]


class PreparedData:
    """Prepared data in a folder, as `depthmix.prepare` returns it.

    A temporary folder is removed with the last object that uses it.

    Attributes:
        folder: The folder, which `depthmix train --data` takes, too.
        splits: `{"train": …, "val": …}`. Splits of text have `n_tokens`, `n_bytes` and `n_documents`.
        tokenizer: The `tokenizers.Tokenizer` of the data; None for images.
        vocab_size: Entries of the vocabulary; None for images.

    Examples:
        >>> data = depthmix.prepare(texts, vocab_size=512)
        >>> data.splits["val"].n_tokens
        1873
    """

    def __init__(self, folder: Folder, *, _owned: OwnedFolder | None = None) -> None:
        from depthmix.data.dataset import SPLITS, TokenData
        from depthmix.data.prepared import open_data

        self.folder = Path(folder)
        self._owned = _owned
        self._data: Any = open_data(self.folder)
        self._is_text = isinstance(self._data, TokenData)
        self.splits: dict[str, Any] = {name: self._data.split(name) for name in SPLITS}

    @property
    def vocab_size(self) -> int | None:
        return self._data.vocab_size if self._is_text else None

    @functools.cached_property
    def tokenizer(self) -> Any:
        if not self._is_text:
            return None
        from depthmix.data.tokenizer import load_tokenizer

        return load_tokenizer(self._data.tokenizer_path, add_end=self._data.meta.get("end_of_text") is not None)

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        from depthmix.data import prepare, prepare_images

        return (prepare if self._is_text else prepare_images).summary(self.folder)


def prepare(
    texts: Any,
    *,
    vocab_size: int | None = None,
    tokenizer: Any = None,
    out: Folder | None = None,
    val_fraction: float = DataConfig.val_fraction,
    seed: int = DataConfig.seed,
    text_field: str = DataConfig.text_field,
    overwrite: bool = False,
) -> PreparedData:
    """Prepare texts or tokens for training.

    Args:
        texts: One of
            an iterable of documents (a generator is read once, and need not fit into memory);
            a `datasets.Dataset`, or anything else with `column_names` whose rows are dictionaries;
            a NumPy array or torch tensor of tokens, [N] or [sequences, T], which are not changed.
        vocab_size: Entries of the byte-level BPE tokenizer that is trained on the texts (default: 16384). Required for
            tokens: the size of their vocabulary.
        tokenizer: A `tokenizers.Tokenizer`, or the path of a tokenizer.json, instead of training one.
        out: Folder to write and keep. By default a temporary one, which is removed with the returned object.
        val_fraction: Share of the documents or sequences kept for validation. A single document or sequence gives
            its end.
        seed: Seed of the train/validation split.
        text_field: Column of a dataset that holds the text.
        overwrite: Replace prepared data in `out`.

    Returns:
        The data, for `depthmix.compare` and `depthmix.TrainConfig(data=…)`.

    Raises:
        UserError: The texts or tokens cannot be used. The message says why.

    Examples:
        >>> depthmix.prepare(["One document.", "Another one."] * 50, vocab_size=300)
    """
    from depthmix.api.given_texts import write_prepared

    owned = OwnedFolder(out, "data")
    config = DataConfig(
        out=str(owned.path), val_fraction=val_fraction, seed=seed, text_field=text_field, overwrite=overwrite
    )
    write_prepared(config, texts, vocab_size, tokenizer)
    return PreparedData(owned.path, _owned=owned)


def as_folder(data: PreparedData | Folder) -> str:
    """Return the folder of prepared data as text; UserError for data that is not prepared yet."""
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    raise UserError(
        f"data is {type(data).__name__}: give what depthmix.prepare returns, or the folder of prepared data."
    )
