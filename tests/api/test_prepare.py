"""dm.prepare: every way of giving texts and tokens, and where the data lives."""

import gc
import json
import os
import re

import numpy as np
import pytest
import torch

import depthmix as dm
from depthmix.api.owned_folder import _remove
from depthmix.config import DataConfig
from depthmix.data.prepare import prepare
from depthmix.errors import UserError
from train import small

TEXTS = [f"{i}. The sea is deep, and the sky above it is wide and blue. Café, 東京 and 🌊. " * 4 for i in range(30)]


def tokens_of(data):
    return {name: split.window(0, split.n_tokens).tolist() for name, split in data.splits.items()}


class Dataset:
    """What datasets.Dataset has, as far as it is used."""

    def __init__(self, column, texts):
        self.column_names, self.rows = [column, "id"], [{column: text, "id": i} for i, text in enumerate(texts)]

    def __iter__(self):
        return iter(self.rows)


class Streamed:
    """A datasets.IterableDataset that does not know its columns."""

    column_names = None

    def __init__(self, texts):
        self.texts = texts

    def __iter__(self):
        return ({"text": text} for text in self.texts)


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        (TEXTS, {}),
        ((text for text in TEXTS), {}),
        (np.array(TEXTS), {}),
        (Dataset("text", TEXTS), {}),
        (Dataset("body", TEXTS), {"text_field": "body"}),
        (Streamed(TEXTS), {}),
    ],
    ids=["a list", "a generator", "an array of texts", "a dataset", "another column", "a streamed dataset"],
)
def test_all_ways_of_giving_texts_are_the_same_data(texts, options, tmp_path):
    data = dm.prepare(texts, vocab_size=300, **options)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "texts.jsonl").write_text(lines)
    engine = prepare(DataConfig(input=[str(tmp_path / "texts.jsonl")], out=str(tmp_path / "out"), vocab_size=300))
    expected = dm.PreparedData(engine)
    assert tokens_of(data) == tokens_of(expected)
    assert data.tokenizer.to_str() == expected.tokenizer.to_str()
    assert data.vocab_size == expected.vocab_size == 300
    assert repr(data).splitlines()[1:] == repr(expected).splitlines()[1:3]


def test_a_repr_says_what_is_there():
    found = repr(dm.prepare(TEXTS, vocab_size=300))
    assert re.fullmatch(
        r"prepared data in \S+, with a vocabulary of 300\n    train: 28 documents, .* tokens, .* bytes\n    val: 2 .*",
        found,
    )


def test_the_same_texts_are_the_same_data_wherever_they_lie(tmp_path):
    """A comparison's folder is resumed with data that was prepared again."""
    folders = [dm.prepare(iter(TEXTS), vocab_size=300, out=tmp_path / name).folder for name in ("one", "two")]
    assert len({(folder / "meta.json").read_bytes() for folder in folders}) == 1
    assert str(tmp_path) not in (folders[0] / "meta.json").read_text()


def test_a_temporary_folder_lives_as_long_as_its_object_and_a_given_one_longer(tmp_path):
    data, kept = dm.prepare(TEXTS, vocab_size=300), dm.prepare(TEXTS, vocab_size=300, out=tmp_path / "kept")
    folder, above = data.folder, data.folder.parent
    assert (folder / "meta.json").exists()
    assert [p.name for p in above.iterdir()] == ["data"]
    del data, kept
    gc.collect()
    assert not above.exists()
    assert dm.PreparedData(tmp_path / "kept").vocab_size == 300
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_a_forked_process_leaves_the_folder_to_the_one_that_made_it(tmp_path):
    (tmp_path / "data").mkdir()
    _remove(str(tmp_path / "data"), os.getpid() + 1)
    assert (tmp_path / "data").exists()
    _remove(str(tmp_path / "data"), os.getpid())
    assert not (tmp_path / "data").exists()


def test_a_folder_that_is_taken_is_left_alone_unless_told_otherwise(tmp_path):
    dm.prepare(TEXTS, vocab_size=300, out=tmp_path / "data")
    with pytest.raises(UserError, match="already holds prepared data"):
        dm.prepare(TEXTS[1:], vocab_size=300, out=tmp_path / "data")
    again = dm.prepare(TEXTS[1:], vocab_size=300, out=tmp_path / "data", overwrite=True)
    assert sum(split.n_documents for split in again.splits.values()) == 29


def test_a_tokenizer_of_ones_own(tmp_path):
    first = dm.prepare(TEXTS, vocab_size=300)
    for given in (first.tokenizer, first.folder / "tokenizer.json"):
        assert tokens_of(dm.prepare(TEXTS, tokenizer=given)) == tokens_of(first)
    with pytest.raises(UserError, match="vocab_size is that of the tokenizer"):
        dm.prepare(TEXTS, tokenizer=first.tokenizer, vocab_size=300)
    with pytest.raises(UserError, match=r"tokenizer is int: give a tokenizers\.Tokenizer or the path"):
        dm.prepare(TEXTS, tokenizer=3)


# Tokens.


@pytest.mark.parametrize("as_given", [np.asarray, torch.as_tensor], ids=["NumPy", "torch"])
@pytest.mark.parametrize("dtype", ["int64", "uint8"])
def test_one_sequence_of_tokens_is_cut_near_its_end(as_given, dtype):
    ids = (np.arange(200) * 7 % 50).astype(dtype)
    data = dm.prepare(as_given(ids), vocab_size=50, val_fraction=0.1)
    assert tokens_of(data) == {"train": ids[:180].tolist(), "val": ids[180:].tolist()}
    assert data.vocab_size == 50
    assert data.tokenizer.encode("3 49").ids == [3, 49]
    assert data.tokenizer.decode([3, 49]) == "3 49"
    assert repr(data).splitlines()[1] == "    train: 1 document, 180 tokens"


def test_sequences_of_tokens_are_split_whole_with_their_copies():
    rows = np.arange(20).repeat(8).reshape(20, 8)
    rows = np.concatenate([rows, rows[:5]])
    data = dm.prepare(rows, vocab_size=20, val_fraction=0.2)
    found = tokens_of(data)
    assert sorted(found["train"] + found["val"]) == sorted(rows.flatten().tolist())
    assert not set(found["train"]) & set(found["val"])  # no sequence, and no copy of one, is on both sides
    assert data.splits["val"].n_documents == 5
    other = tokens_of(dm.prepare(rows, vocab_size=20, val_fraction=0.2, seed=1))
    assert other != found


def test_large_vocabularies_and_several_files(tmp_path):
    from depthmix.data.prepare_tokens import prepare_tokens

    ids = np.array([0, 70_000, 65_536, 3] * 10)
    config = DataConfig(input=["tokens"], out=str(tmp_path / "data"), vocab_size=70_001, val_fraction=0.1)
    data = dm.PreparedData(prepare_tokens(config, ids, shard_tokens=7))
    assert tokens_of(data) == {"train": ids[:36].tolist(), "val": ids[36:].tolist()}
    assert len(list(data.folder.glob("train-*.bin"))) == 6
    dm.PreparedData(data.folder)._data.verify()


def test_tokens_with_the_tokenizer_that_made_them():
    text = dm.prepare(TEXTS, vocab_size=300)
    ids = np.array(tokens_of(text)["train"])
    data = dm.prepare(ids, tokenizer=text.tokenizer)
    assert data.vocab_size == 300
    assert data.tokenizer.get_vocab() == text.tokenizer.get_vocab()
    with pytest.raises(UserError, match="vocab_size is 299 and the tokenizer has 300 entries"):
        dm.prepare(ids % 10, tokenizer=text.tokenizer, vocab_size=299)


def test_a_model_learns_from_tokens_and_knows_no_bytes(tmp_path, capsys):
    """The whole way of tokens: training, evaluating, generating; the model has as many rows as the vocabulary."""
    from depthmix.cli import main

    data = dm.prepare(np.arange(400) % 10, vocab_size=10, out=tmp_path / "data")
    run = dm.train(small.config(tmp_path / "run", data=data, steps=4))
    assert run.read_result()["bits_per_byte"] is None
    trained = dm.load(run.path)
    assert trained.model.config.vocab_size == 10
    assert trained.end is None
    capsys.readouterr()
    assert main(["eval", str(run.path), "--device", "cpu"]) == 0
    assert re.search(r"perplexity [\d.]+, [\d,]+ tokens$", capsys.readouterr().out.strip())
    assert main(["generate", str(run.path), "--prompt", "3 4", "--max-tokens", "3", "--device", "cpu"]) == 0
    assert re.fullmatch(r"\d \d \d", capsys.readouterr().out.strip())
    assert main(["train", "--recipe", str(run.path / "recipe.yaml"), "--out", str(tmp_path / "run")]) == 0
    assert "bits per byte" not in capsys.readouterr().out


class Frame:
    columns = ["text"]


@pytest.mark.parametrize(
    ("texts", "options", "said"),
    [
        ("one text", {}, "texts is one text: give a list of documents"),
        (3, {}, "texts is int: give an iterable of documents, a dataset with a text column, or an array of tokens"),
        ([], {}, "there is no text: every document is empty, or there are none"),
        ([" ", "\n"], {}, "there is no text: every document is empty, or there are none"),
        (["a", None], {}, r"prepare: texts\[1\] is NoneType, not text"),
        (["a", "\ud800"], {}, r"prepare: texts\[1\] has half a surrogate pair at character 0"),
        ([[1, 2], [3, 4]], {}, "lists of tokens are given as one NumPy array or torch tensor"),
        ({"train": ["a"], "test": ["b"]}, {}, r"texts has the parts train, test: give one of them"),
        (Frame(), {}, r"texts is a Frame: give the column that holds the text, as in frame\['text'\]"),
        (Dataset("body", TEXTS), {}, r"the dataset has no column 'text' \(its columns: body, id\): set text_field"),
        (TEXTS, {"vocab_size": 9}, "vocab_size is 9: it must be at least 257"),
        (TEXTS, {"val_fraction": 1.0}, "val_fraction is 1.0: it must lie between 0 and 1"),
        (np.arange(9), {}, "tokens need vocab_size, the number of entries in their vocabulary"),
        (
            np.arange(9),
            {"vocab_size": 8},
            "between 0 and 8, and a vocabulary of 8 has 0 to 7: set vocab_size to at least 9",
        ),
        (np.array([-1, 2]), {"vocab_size": 8}, "The tokens lie between -1 and 2"),
        (np.array([1.0, 2.0]), {"vocab_size": 8}, "has dtype float64: tokens are integers"),
        (np.ones(4, bool), {"vocab_size": 8}, "has dtype bool: tokens are integers"),
        (np.zeros((2, 2, 2), int), {"vocab_size": 8}, r"has shape \[2, 2, 2\]: give \[N\] or \[sequences, T\]"),
        (np.zeros(1, int), {"vocab_size": 8}, "nothing to split in an array of 1 tokens"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_sentence(texts, options, said, tmp_path):
    with pytest.raises(UserError, match=said) as found:
        dm.prepare(texts, out=tmp_path / "data", **options)
    assert "\n" not in str(found.value)
    assert not list(tmp_path.iterdir())
