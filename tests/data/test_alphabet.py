"""No character is lost in silence: what a tokenizer would drop is refused, what it does not know is counted."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from depthmix.cli import main
from depthmix.data.alphabet import Alphabet, unknown_token
from depthmix.data.tokenizer import encode, train_tokenizer
from depthmix.errors import DATA
from train import small
from train.refused import refused

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(symbols=BYTES, **options):
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(symbols)}, [], **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def by_characters(symbols, **options):
    return Tokenizer(models.BPE({c: i for i, c in enumerate(symbols)}, [], **options))


def normalized(tokenizer):
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return tokenizer


def apart(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def in_sequence(tokenizer):
    whole_words = pre_tokenizers.Split(" ", "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([whole_words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer


FALLBACK = [*"abc", *(f"<0x{i:02X}>" for i in range(256))]
LOSE = [
    (by_characters("abc "), "ab é東c", "'é' (U+00E9), '東' (U+6771), and would drop them"),
    (
        by_characters("abc "),
        "abcdefghij",
        "'d' (U+0064), 'e' (U+0065), 'f' (U+0066), 'g' (U+0067), 'h' (U+0068) and for 2 more",
    ),
    (by_characters("abc"), "a b", "' ' (U+0020)"),
    (byte_level([c for c in BYTES if c != "Ã"]), "naïve", "'ï' (U+00EF)"),  # of its two bytes one is known
    (byte_level([c for c in BYTES if c != "Ġ"]), "a b", "' ' (U+0020)"),
    (by_characters([c for c in FALLBACK if c != "<0xC3>"], byte_fallback=True), "aé", "'é' (U+00E9)"),
    (normalized(by_characters("abcABC")), "AÉ", "'É' (U+00C9)"),
]
KEEP = [
    (byte_level(), "naïve 東京 🌊\n\0"),
    (by_characters(FALLBACK, byte_fallback=True), "naïve 東京"),
    (normalized(by_characters("abcfi")), "ABﬁ"),
    (apart(by_characters("abc")), "a b\n\nc"),
    (by_characters(["##a", "b", "c</w>"], continuing_subword_prefix="##", end_of_word_suffix="</w>"), "bac"),
    (by_characters(["a", "?"], unk_token="?"), "ab"),
    (Tokenizer(models.WordPiece({"?": 0, "a": 1}, unk_token="?")), "é"),
    (train_tokenizer(["abc"], 257), "naïve 東京 🌊"),
    (in_sequence(byte_level()), "naïve 東京 🌊"),
]


@pytest.mark.parametrize(("tokenizer", "text", "words"), LOSE)
def test_dropped_characters_are_refused(tokenizer, text, words):
    assert len("".join(tokenizer.encode(text).tokens)) < len(text.encode())  # it does lose some
    refused(lambda: Alphabet(tokenizer).check(text), words, code=DATA)


@pytest.mark.parametrize(("tokenizer", "text"), KEEP)
def test_others_are_not(tokenizer, text):
    alphabet = Alphabet(tokenizer)
    if tokenizer.pre_tokenizer and "ByteLevel" in str(tokenizer.pre_tokenizer):
        assert not alphabet.drops
    for _ in range(2):
        alphabet.check(text)


def test_the_token_for_what_is_not_known():
    unigram = Tokenizer(models.Unigram([("a", -1.0), ("?", -2.0)], unk_id=1))
    assert unknown_token(unigram) == ("?", 1)
    assert unknown_token(by_characters(["a", "?"], unk_token="?")) == ("?", 1)
    assert unknown_token(by_characters(["a"], unk_token="?")) is None
    assert unknown_token(byte_level()) is None


def test_a_tokenizer_that_fails_is_said():
    broken = by_characters(["a", "<|endoftext|>"], unk_token="?")
    refused(lambda: list(encode(broken, [("ab", True)])), "cannot encode this text: Unk token `?` not found", code=DATA)


def save(tokenizer, path):
    tokenizer.save(str(path))
    return str(path)


def test_preparing_with_a_tokenizer_that_drops_text(tmp_path, capsys):
    ascii_only = byte_level([c for c in BYTES if ord(c) < 128 or c in "ĠĊ"])
    given = ["--input", str(small.corpus()), "--out", str(tmp_path / "out")]
    assert main(["data", *given, "--tokenizer", save(ascii_only, tmp_path / "t.json")]) == DATA
    assert "The tokenizer has no token for 'é' (U+00E9), 'ï' (U+00EF)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_preparing_with_a_tokenizer_that_does_not_know_text(tmp_path, capsys):
    known = by_characters(
        ["?", *sorted({c for line in small.LINES for c in line if c.isascii()} | {"\n"})], unk_token="?"
    )
    given = ["--input", str(small.corpus()), "--out", str(tmp_path / "out")]
    assert main(["data", *given, "--tokenizer", save(known, tmp_path / "t.json")]) == 0
    text = "".join(path.read_text(encoding="utf-8") for path in small.corpus().iterdir())
    lost = sum(not c.isascii() for c in text)
    assert f"depthmix: warning: {lost:,} tokens are ?" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["unknown_tokens"] == {"token": "?", "count": lost}


def test_measuring_text_that_a_models_tokenizer_drops(tmp_path, capsys):
    """Its loss per byte would count what was dropped."""
    plain = "\n".join(line for line in small.LINES if line.isascii())
    (tmp_path / "a.txt").write_text(plain * 40)
    given = ["--input", str(tmp_path / "a.txt"), "--out", str(tmp_path / "data"), "--val-fraction", "0.3"]
    tokenizer = save(by_characters(sorted(set(plain))), tmp_path / "t.json")
    assert main(["data", *given, "--tokenizer", tokenizer]) == 0
    config = small.config(tmp_path / "run", data=str(tmp_path / "data"))
    assert main(["train", *small.flags(config)]) == 0
    (tmp_path / "b.txt").write_text("né")
    assert main(["eval", "--run", str(tmp_path / "run"), "--input", str(tmp_path / "b.txt"), "--device", "cpu"]) == DATA
    assert "The tokenizer has no token for 'é'" in capsys.readouterr().err
