"""Tokenizers: train, load, and apply to a stream of documents in bounded memory."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from depthmix.data.alphabet import Alphabet
from depthmix.errors import DATA, UserError
from depthmix.names import install_command

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"
BYTES = 256
CHUNK = 1 << 14  # characters encoded in one piece, small enough to keep every core busy
BATCH = 1 << 21  # characters encoded at a time, at about 100 bytes of memory per token
BATCH_CHUNKS = 8192

# Places where cutting a text does not change its tokens. First choice: the usual pre-tokenizers start a new word at a space
# between two words. Second choice: the tokenizer trained here starts a new word at any white space after another character.
_CUTS = (re.compile(r"(?<=\w)[ \n](?=\w)"), re.compile(r"(?<=\S)\s"))


@dataclass(frozen=True)
class Encoded:
    """Tokens of one chunk of a document, and the number of bytes of its text. A `last` chunk ends in <|endoftext|>."""

    ids: np.ndarray
    n_bytes: int
    last: bool


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with `vocab_size` entries, the first of which is <|endoftext|>."""
    _require_tokenizers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (entries := tokenizer.get_vocab_size()) < vocab_size:
        raise UserError(
            f"The corpus is too small for a vocabulary of {vocab_size}: it yields {entries} entries; set vocab_size to that or less.",
            DATA,
        )
    return _ready(tokenizer)


def numbers_tokenizer(vocab_size: int) -> Tokenizer:
    """Make a tokenizer for tokens without a known text: token 12 decodes to the word "12"."""
    _require_tokenizers()
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(vocab_size)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def load_tokenizer(path: str | Path, add_end: bool = True) -> Tokenizer:
    """Load a tokenizer.json, adding <|endoftext|> where it is missing unless add_end is False."""
    _require_tokenizers()
    from tokenizers import Tokenizer

    try:
        text = Path(path).read_bytes().decode()
    except FileNotFoundError as e:
        raise UserError(f"There is no tokenizer file {path}.", DATA) from e
    except OSError as e:
        raise UserError(f"The tokenizer file {path} cannot be read: {e.strerror or e}.", DATA) from e
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not a tokenizer.json: it is not UTF-8 text.", DATA) from e
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as e:  # the library raises nothing narrower
        raise UserError(f"{path} is not a tokenizer.json of the tokenizers library: {_first_line(e)}.", DATA) from e
    return _ready(tokenizer, add_end)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _require_tokenizers() -> None:
    if importlib.util.find_spec("tokenizers") is None:
        raise UserError(f"Tokenizing needs the tokenizers library: {install_command('train')}.")


def _ready(tokenizer: Tokenizer, add_end: bool = True) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if add_end and tokenizer.token_to_id(END) is None:
        taken = set(tokenizer.get_vocab().values())
        tokenizer.add_special_tokens([END])
        if tokenizer.token_to_id(END) in taken:  # the library counts entries, whatever their ids
            raise UserError(
                f"The tokenizer has no {END} and gaps in its ids, so none can be added: add it yourself.", DATA
            )
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" written in a document is text, not the end of it
    return tokenizer


def end_token(path: Path) -> int | None:
    """Return the id of <|endoftext|> in a tokenizer.json, without the tokenizers library; None if the file does not
    say.
    """
    try:
        added = json.loads(path.read_bytes())["added_tokens"]
        return next((token["id"] for token in added if token["content"] == END), None)
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def vocabulary(tokenizer: Tokenizer) -> int:
    """Return the number of rows an embedding needs: one more than the largest id, since ids may have gaps."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def chunks(pieces: Iterable[tuple[str, bool]], size: int = CHUNK) -> Iterator[tuple[str, bool]]:
    """Split documents into chunks of about `size` characters, cut where tokens end. The cuts depend only on the text."""
    buffer = ""
    for text, last in pieces:
        buffer += text
        start = 0
        while len(buffer) - start > size + 1:
            stop = _cut(buffer, start, start + size)
            yield buffer[start:stop], False
            start = stop
        buffer = buffer[start:]
        if last:
            yield buffer, True
            buffer = ""


def _cut(text: str, start: int, stop: int) -> int:
    near = max(start + 1, stop - 4096)
    for low in (near, start + 1):
        for pattern in _CUTS:
            cut = 0
            for match in pattern.finditer(text, low, stop + 1):
                cut = match.start()
            if cut > start:
                return cut
    return stop  # a word longer than a chunk


def encode(
    tokenizer: Tokenizer, pieces: Iterable[tuple[str, bool]], progress: Callable[[int], None] | None = None
) -> Iterator[Encoded]:
    """Encode a stream of (text, last) pieces. `progress` is called with the bytes done so far."""
    end = tokenizer.token_to_id(END)
    assert end is not None, "train_tokenizer and load_tokenizer add it"
    # Some tokenizers put a token or a space before every text. They must see whole documents.
    size = CHUNK if _adds_up(tokenizer) else 1 << 62
    done, alphabet = 0, Alphabet(tokenizer)
    for batch in _batches(chunks(pieces, size)):
        alphabet.check("".join(text for text, _ in batch))
        try:
            encodings = tokenizer.encode_batch_fast([text for text, _ in batch], add_special_tokens=False)
        except Exception as e:  # the library raises nothing narrower, say for a model without its unknown token
            raise UserError(
                f"The tokenizer cannot encode this text: {_first_line(e)}; take another tokenizer.", DATA
            ) from e
        for (text, last), encoding in zip(batch, encodings, strict=True):
            ids = encoding.ids
            if last:
                ids.append(end)
            n_bytes = len(text.encode())
            done += n_bytes
            yield Encoded(np.array(ids, np.int64), n_bytes, last)
        if progress:
            progress(done)


def _adds_up(tokenizer: Tokenizer) -> bool:
    """Tell whether two texts have the same tokens together and apart."""
    parts = "the first part", " and the second"
    try:
        whole, *apart = tokenizer.encode_batch_fast(["".join(parts), *parts], add_special_tokens=False)
    except Exception:  # it has neither all letters of these words nor an unknown token
        return False
    return bool(whole.ids == [number for part in apart for number in part.ids])


def _batches(items: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item[0])
        if size >= BATCH or len(batch) >= BATCH_CHUNKS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
