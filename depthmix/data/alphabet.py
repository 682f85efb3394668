"""Find characters that a tokenizer's vocabulary lacks.

A byte-pair encoding without an unknown token silently drops characters that it has no token for. Other models replace
them by their unknown token, which can be counted among the tokens (`unknown_token`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from depthmix.errors import DATA, UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHOWN = 5  # characters in a message


class Alphabet:
    """Checks texts for characters that a tokenizer would drop. Each character is looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        described = json.loads(tokenizer.to_str())
        model = described["model"]
        self.drops = model["type"] == "BPE" and model["unk_token"] is None and not _has_all_bytes(described)
        self.tokenizer, self.known = tokenizer, set[str]()
        self.vocabulary = model["vocab"] if self.drops else {}
        self.prefixes = {"", model.get("continuing_subword_prefix") or ""}
        self.suffixes = {"", model.get("end_of_word_suffix") or ""}
        self.by_bytes = model.get("byte_fallback", False)

    def check(self, text: str) -> None:
        """Refuse a text with characters that the tokenizer would drop.

        Raises:
            UserError: The text has such characters. The message names some of them.
        """
        new = set(text) - self.known if self.drops else set()
        if lacking := sorted(character for character in new if not self._has(character)):
            names = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in lacking[:SHOWN])
            more = f" and for {len(lacking) - SHOWN} more characters" if len(lacking) > SHOWN else ""
            advice = "take another tokenizer, let one be trained on this text, or leave such text out"
            raise UserError(f"The tokenizer has no token for {names}{more}, and would drop them: {advice}.", DATA)
        self.known |= new

    def _has(self, character: str) -> bool:
        """Tell whether the vocabulary holds every symbol that the model receives for a character."""
        normalizer, splitter = self.tokenizer.normalizer, self.tokenizer.pre_tokenizer
        text = normalizer.normalize_str(character) if normalizer else character
        symbols = "".join(part for part, _ in splitter.pre_tokenize_str(text)) if splitter else text
        return all(self._has_symbol(symbol) for symbol in symbols)

    def _has_symbol(self, symbol: str) -> bool:
        if self.by_bytes and all(f"<0x{byte:02X}>" in self.vocabulary for byte in symbol.encode()):
            return True
        return any(before + symbol + after in self.vocabulary for before in self.prefixes for after in self.suffixes)


def _has_all_bytes(described: dict[str, Any]) -> bool:
    """Tell whether every byte has a token, as in most vocabularies. Such a tokenizer drops nothing."""
    from tokenizers import pre_tokenizers

    splitter, vocabulary = described["pre_tokenizer"] or {}, described["model"]["vocab"]
    by_bytes = any(part["type"] == "ByteLevel" for part in splitter.get("pretokenizers", [splitter]) if part)
    return by_bytes and all(symbol in vocabulary for symbol in pre_tokenizers.ByteLevel.alphabet())


def unknown_token(tokenizer: Tokenizer) -> tuple[str, int] | None:
    """Return a tokenizer's token for unknown text, and its id; None if it has no such token."""
    model = json.loads(tokenizer.to_str())["model"]
    number = model.get("unk_id")  # of a unigram model; the others name the token
    token = model.get("unk_token") if number is None else tokenizer.id_to_token(number)
    number = tokenizer.token_to_id(token) if token is not None and number is None else number
    return None if token is None or number is None else (token, number)
