"""Convert texts and tokens from Python to the input of `depthmix data`'s engine."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from depthmix.config import DataConfig
from depthmix.data.corpus import Listing, Source, as_text, no_column
from depthmix.data.prepare import prepare as prepare_listing
from depthmix.data.prepare_tokens import prepare_tokens
from depthmix.data.tokenizer import load_tokenizer, vocabulary
from depthmix.errors import DATA, USAGE, UserError

FROM_PYTHON = "given in Python"


def write_prepared(config: DataConfig, texts: Any, vocab_size: int | None, tokenizer: Any) -> None:
    """Write texts or tokens to config.out as prepared data. `depthmix.prepare` lists the accepted types."""
    with tempfile.TemporaryDirectory(prefix="depthmix-") as scratch:
        if tokenizer is not None:
            config.tokenizer = _tokenizer_file(tokenizer, Path(scratch))
        tokens = _as_tokens(texts)
        if tokens is not None:
            config.input = [f"tokens {FROM_PYTHON}"]
            known = load_tokenizer(config.tokenizer, add_end=False) if config.tokenizer else None
            config.vocab_size = _size_of_vocabulary(vocab_size, known)
            prepare_tokens(config, tokens, known)
            return
        if vocab_size is not None:
            if config.tokenizer:
                raise UserError("prepare: vocab_size is that of the tokenizer; give one of the two.", USAGE)
            config.vocab_size = int(vocab_size)
        config.input = [f"texts {FROM_PYTHON}"]
        prepare_listing(
            config, listing=_spooled(_documents(texts, config.text_field), config.text_field, Path(scratch))
        )


class _Spool(Listing):
    """Documents from Python in one temporary file. The prepared data does not name the file, which is deleted."""

    def counts(self) -> dict[str, dict[str, int]]:
        return {"files": {}, "skipped_files": {}}


def _spooled(documents: Iterable[str], text_field: str, scratch: Path) -> Listing:
    """Write documents to a file, since the engine reads a corpus several times and a generator can be read once."""
    path = scratch / "texts.jsonl"
    has_text = False
    with open(path, "w", encoding="ascii") as file:
        for document in documents:
            has_text = has_text or bool(document.strip())
            file.write(json.dumps({text_field: document}) + "\n")
    if not has_text:
        raise UserError("prepare: there is no text: every document is empty, or there are none.", DATA)
    return _Spool([Source(str(path), direct=True)])


def _documents(texts: Any, text_field: str) -> Iterator[str]:
    """Yield every document of the texts that a caller gave."""
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
    """Return an array of tokens as a NumPy array; None for anything that is not an array of numbers."""
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
    """Return the path of a tokenizer.json. A tokenizer in memory is written to `scratch` first."""
    if isinstance(tokenizer, str | os.PathLike):
        return os.fspath(tokenizer)
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)  # a fast tokenizer of transformers
    if not hasattr(tokenizer, "to_str"):
        kinds = "a tokenizers.Tokenizer or the path of a tokenizer.json"
        raise UserError(f"prepare: tokenizer is {type(tokenizer).__name__}: give {kinds}.", USAGE)
    path = scratch / "tokenizer.json"
    path.write_text(tokenizer.to_str(), encoding="utf-8")
    return str(path)
