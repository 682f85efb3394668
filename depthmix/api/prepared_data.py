"""`depthmix.prepare`: texts or tokens from Python become prepared data, with the engine of `depthmix data`."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from depthmix.api.owned_folder import OwnedFolder
from depthmix.config import DataConfig
from depthmix.data import prepare as prepare_texts
from depthmix.data import prepare_images
from depthmix.data.corpus import Listing, Source, as_text, no_column
from depthmix.data.dataset import SPLITS, TokenData
from depthmix.data.prepare_tokens import prepare_tokens
from depthmix.data.prepared import open_data
from depthmix.data.tokenizer import load_tokenizer, vocabulary
from depthmix.errors import DATA, USAGE, UserError

FROM_PYTHON = "given in Python"
Folder = str | os.PathLike[str]


class PreparedData:
    """Data in a folder, ready to train on: what `depthmix.prepare` returns.

    A temporary folder is removed with the last object that uses it.

    Attributes:
        folder: The folder, which `depthmix train --data` takes, too.
        splits: `{"train": …, "val": …}`; of text each has `n_tokens`, `n_bytes` and `n_documents`.
        tokenizer: The `tokenizers.Tokenizer` of the data; None for images.
        vocab_size: Entries of the vocabulary; None for images.

    Example:
        >>> data = depthmix.prepare(texts, vocab_size=512)
        >>> data.splits["val"].n_tokens
        1873
    """

    def __init__(self, folder: Folder, *, _owned: OwnedFolder | None = None) -> None:
        self.folder = Path(folder)
        self._owned = _owned
        self._data = open_data(self.folder)
        self.splits = {name: self._data.split(name) for name in SPLITS}

    @property
    def vocab_size(self) -> int | None:
        return self._data.vocab_size if isinstance(self._data, TokenData) else None

    @functools.cached_property
    def tokenizer(self) -> Any:
        if not isinstance(self._data, TokenData):
            return None
        return load_tokenizer(self._data.tokenizer_path, add_end=self._data.meta.get("end_of_text") is not None)

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        summary = prepare_texts.summary if isinstance(self._data, TokenData) else prepare_images.summary
        return summary(self.folder)


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
            a NumPy array or torch tensor of tokens, [N] or [sequences, T], taken as they are.
        vocab_size: Entries of the byte-level BPE tokenizer that is trained on the texts (default: 16384), or of the
            vocabulary that tokens belong to, where it must be given.
        tokenizer: A `tokenizers.Tokenizer`, or the path of a tokenizer.json, instead of training one.
        out: Folder to write and keep. By default a temporary one, which is removed with the returned object.
        val_fraction: Share of the documents or sequences kept for validation; of a single one, its end.
        seed: Seed of that split.
        text_field: Column of a dataset that holds the text.
        overwrite: Replace prepared data in `out`.

    Returns:
        The data, for `depthmix.compare` and `depthmix.TrainConfig(data=…)`.

    Raises:
        UserError: The texts or tokens cannot be used; one sentence says why.

    Example:
        >>> depthmix.prepare(["One document.", "Another one."] * 50, vocab_size=300)
    """
    with tempfile.TemporaryDirectory(prefix="depthmix-") as scratch:
        owned = OwnedFolder(out, "data")
        config = DataConfig(
            out=str(owned.path), val_fraction=val_fraction, seed=seed, text_field=text_field, overwrite=overwrite
        )
        if tokenizer is not None:
            config.tokenizer = _tokenizer_file(tokenizer, Path(scratch))
        if (tokens := _as_tokens(texts)) is not None:
            config.input = [f"tokens {FROM_PYTHON}"]
            known = load_tokenizer(config.tokenizer, add_end=False) if config.tokenizer else None
            config.vocab_size = _size_of_vocabulary(vocab_size, known)
            prepare_tokens(config, tokens, known)
        else:
            if vocab_size is not None:
                if config.tokenizer:
                    raise UserError("prepare: vocab_size is that of the tokenizer; give one of the two.", USAGE)
                config.vocab_size = int(vocab_size)
            config.input = [f"texts {FROM_PYTHON}"]
            prepare_texts.prepare(config, listing=_spooled(_documents(texts, text_field), Path(scratch)))
    return PreparedData(owned.path, _owned=owned)


def as_folder(data: PreparedData | Folder) -> str:
    """Return the folder of prepared data as text; UserError for data that is not prepared yet."""
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    raise UserError(
        f"data is {type(data).__name__}: give what depthmix.prepare returns, or the folder of prepared data."
    )


class _Spool(Listing):
    """Documents from Python in one file; the data does not name it, for it is gone by then."""

    def counts(self) -> dict[str, dict[str, int]]:
        return {"files": {}, "skipped_files": {}}


def _spooled(documents: Iterable[str], scratch: Path) -> Listing:
    """Write documents down, since the engine reads a corpus several times and a generator can be read once."""
    path = scratch / "texts.jsonl"
    found = False
    with open(path, "w", encoding="ascii") as file:
        for document in documents:
            found = found or bool(document.strip())
            file.write(json.dumps({DataConfig.text_field: document}) + "\n")
    if not found:
        raise UserError("prepare: there is no text: every document is empty, or there are none.", DATA)
    return _Spool([Source(str(path), direct=True)])


def _documents(texts: Any, text_field: str) -> Iterator[str]:
    """Every document of what a caller may give as texts."""
    if isinstance(texts, str | bytes | os.PathLike):
        kind = "one text" if isinstance(texts, str) else type(texts).__name__
        raise UserError(
            f"prepare: texts is {kind}: give a list of documents; `depthmix data` prepares files and folders.", USAGE
        )
    columns = getattr(texts, "column_names", None)
    if isinstance(texts, Mapping) or isinstance(columns, Mapping):
        raise UserError(
            f"prepare: texts has the parts {', '.join(map(str, texts))}: give one of them, as in texts['train'].", USAGE
        )
    if hasattr(texts, "columns") and not hasattr(texts, "column_names"):
        raise UserError(
            f"prepare: texts is a {type(texts).__name__}: give the column that holds the text, as in frame['text'].",
            USAGE,
        )
    if hasattr(texts, "column_names"):
        if columns is not None and text_field not in columns:
            raise no_column("prepare: the dataset", text_field, columns)
        rows = texts.select_columns([text_field]) if hasattr(texts, "select_columns") else texts
        for row, record in enumerate(rows):
            if not isinstance(record, Mapping) or text_field not in record:
                raise UserError(f"prepare: row {row} of the dataset has no {text_field!r}: set text_field.", DATA)
            yield as_text(record[text_field], f"prepare: row {row}", f"column {text_field!r}")
        return
    try:
        documents = iter(texts)
    except TypeError:
        kinds = "an iterable of documents, a dataset with a text column, or an array of tokens"
        raise UserError(f"prepare: texts is {type(texts).__name__}: give {kinds}.", USAGE) from None
    for i, document in enumerate(documents):
        if isinstance(document, list | tuple) and document and isinstance(document[0], int):
            raise UserError("prepare: lists of tokens are given as one NumPy array or torch tensor.", USAGE)
        yield as_text(document, "prepare", f"texts[{i}]")


def _as_tokens(texts: Any) -> np.ndarray | None:
    """Return an array of tokens as NumPy's; None for anything that is no array of numbers."""
    if isinstance(texts, torch.Tensor):
        return texts.detach().cpu().numpy()
    if isinstance(texts, np.ndarray) and texts.dtype.kind not in "UOST":
        return texts
    return None


def _size_of_vocabulary(vocab_size: int | None, tokenizer: Any) -> int:
    if vocab_size is not None:
        return int(vocab_size)
    if tokenizer is None:
        raise UserError("prepare: tokens need vocab_size, the number of entries in their vocabulary.", USAGE)
    return vocabulary(tokenizer)


def _tokenizer_file(tokenizer: Any, scratch: Path) -> str:
    """Return the path of a tokenizer.json, written here for a tokenizer in memory."""
    if isinstance(tokenizer, str | os.PathLike):
        return os.fspath(tokenizer)
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)  # of a fast tokenizer of transformers
    if not hasattr(tokenizer, "to_str"):
        kinds = "a tokenizers.Tokenizer or the path of a tokenizer.json"
        raise UserError(f"prepare: tokenizer is {type(tokenizer).__name__}: give {kinds}.", USAGE)
    path = scratch / "tokenizer.json"
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    return str(path)
