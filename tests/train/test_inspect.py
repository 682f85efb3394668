"""`depthmix inspect`: the document of every mixer's model, the tables, and what a user can get wrong."""

import dataclasses
import json
import math
import shutil

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from depthmix import Decoder, list_mixers
from depthmix.cli import main
from depthmix.config import DataConfig, InspectConfig
from depthmix.data.prepare import prepare
from depthmix.errors import CHECKPOINT, DATA, DISK, USAGE
from depthmix.insight import streams_of
from depthmix.insight.summary import summary, table
from depthmix.runs.checkpoint import list_checkpoints
from depthmix.runs.restore import load_model
from depthmix.train import inspect as command
from depthmix.train.evaluate import token_losses
from depthmix.train.inspect import (
    encode_text,
    first_tokens,
    inspect_run,
    losses_of_cut,
    text_by_token,
    token_names,
)
from train import small
from train.refused import refused

SENTENCE = "The sea is deep, and the sky."


def config(**changes):
    values = {"run": str(small.run().path), "tokens": 100, "causal_tokens": 32, "batch_size": 2, "device": "cpu"}
    return InspectConfig(**{**values, **changes})


def pretrained(folder):
    """A run as a folder of `save_pretrained`: nothing but its model and tokenizer."""
    run, newest = small.run(), list_checkpoints(small.run().checkpoints)[0]
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(run.path / name, folder)
    shutil.copy(newest / "model.safetensors", folder)
    return str(folder)


def ragged(found, depth, sources=True):
    """Every reader has its ways, and of each as many sources as there are by then."""
    assert len(found) == len(depth)
    for r, (ways, reader) in enumerate(zip(found, depth, strict=True)):
        assert len(ways) == reader["ways"]
        assert not sources or all(len(way) == r + 1 for way in ways)


@pytest.mark.parametrize("mixer", list_mixers())
def test_the_document_of_every_mixer_is_whole(mixer, monkeypatch):
    trained = load_model(small.run().path, torch.device("cpu"))
    model = Decoder(dataclasses.replace(trained.model.config, mixer=mixer))
    trained = dataclasses.replace(
        trained, model=model, config=dataclasses.replace(trained.config, mixer=mixer, mixer_options={})
    )
    monkeypatch.setattr(command, "load_model", lambda run, device: trained)
    found = inspect_run(config(tokens=32, causal_tokens=16, text="sea"))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    readers, n = found["readers"], 4
    assert [r["name"] for r in readers] == ["attention", "mlp"] * 2 + ["finish"]
    assert [r["ways"] for r in readers] == [*(model.mixer.ways(s) for s in range(n)), 1]
    assert found["sources"] == ["embedding", "attention 0", "mlp 0", "attention 1", "mlp 1"]
    for name in ("mean", "std", "contribution", "projection"):
        ragged(found["mixing"][name], readers)
    for name in ("contribution", "projection"):
        assert all(sum(way) == pytest.approx(1, abs=1e-3) for reader in found["mixing"][name] for way in reader)
    for name in ("entropy", "effective", "newest", "embedding", "effective_std"):
        ragged(found["mixing"][name], readers, sources=False)
    for each in found["mixing"]["quantiles"].values():
        ragged(each, readers)
    ragged(found["edges"]["change"], readers)
    ragged(found["dynamics"]["input_rms"], readers, sources=False)
    assert len(found["skips"]["change"]) == len(found["dynamics"]["gradient_norm"]) == n
    assert len(found["structure"]) == max(r["ways"] for r in readers)
    assert (found["streams"] is None) == (streams_of(model.mixer, model.mixer.start(torch.zeros(1, 32))) is None)
    assert "".join(found["text"]["tokens"]) == "sea"
    text = found["text"]
    for token in text["weights"] + text["contributions"]:
        ragged(token, readers)
    assert text["cuts"][-1] is None
    assert all([len(sources) for sources in token] == [1, 2, 3, 4, 5] for token in text["cuts"][:-1])
    for losses, predicted, lens in zip([*text["losses"][1:], None], text["predictions"], text["lens"], strict=True):
        assert [p["probability"] for p in predicted] == sorted((p["probability"] for p in predicted), reverse=True)
        assert len(predicted) == 5
        assert len(lens) == len(readers)
        assert {"token": lens[-1]["token"], "probability": lens[-1]["probability"]} == predicted[0]
        after = lens[-1]["next"]
        assert (after is losses is None) or -math.log(after) == pytest.approx(losses, abs=1e-3)
    assert found["loss"] == pytest.approx(found["skips"]["loss"], rel=0.2)
    assert all(p.grad is None for p in model.parameters())
    shown = summary(found)
    assert "most needed" in shown
    finish = next(line for line in shown.splitlines() if line.startswith("   finish"))
    assert finish.split()[3] == f"{found['mixing']['contribution'][-1][0][0]:.3f}"
    assert ("streams:" in shown) == (found["streams"] is not None)


def test_the_command_prints_tables_and_writes_the_document(tmp_path, capsys):
    out = tmp_path / "new" / "out.json"
    flags = ["--tokens", "100", "--causal-tokens", "0", "--device", "cpu", "--text", SENTENCE, "--json", str(out)]
    assert main(["inspect", str(small.run().path), *flags]) == 0
    shown = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["schema"] == 2
    assert found["step"] == 60
    assert found["mixing"]["tokens"] == 96  # rows of 32
    assert found["edges"] is found["skips"] is found["text"]["cuts"] is None
    for words in ("step 60", " 3 mlp", "finish", "of 5", "Semiseparable rank", "'T", str(out)):
        assert words in shown
    assert "skipped" not in shown
    assert "".join(found["text"]["tokens"]) == SENTENCE
    assert found["text"]["losses"][0] is None


def test_lines_of_training_come_along(tmp_path):
    from depthmix.train.loop import train

    run = train(small.config(tmp_path / "run", steps=2, warmup=0, dynamics_every=1))
    found = inspect_run(config(run=str(run.path), causal_tokens=0))
    assert [line["step"] for line in found["training"]] == [0, 1]
    assert found["training"][0].keys() == {"step", *found["dynamics"]} - {"tokens"}


def test_a_folder_of_save_pretrained_is_measured_on_text_on_data_or_on_the_text_to_show(tmp_path):
    folder = pretrained(tmp_path / "model")
    run = inspect_run(config(causal_tokens=0))
    by_data = inspect_run(config(run=folder, data=str(small.data()), causal_tokens=0))
    assert by_data["mixing"] == run["mixing"]
    assert by_data["step"] == 0
    by_text = inspect_run(config(run=folder, text=SENTENCE, causal_tokens=0))
    assert by_text["mixing"]["tokens"] == len(by_text["text"]["tokens"]) - 1
    by_input = inspect_run(config(run=folder, input=[str(small.corpus())], causal_tokens=0))
    assert by_input["mixing"]["tokens"] == 96
    words = ("does not name the data that its model was trained on", "--input")
    refused(lambda: inspect_run(config(run=folder)), *words, code=DATA)
    refused(lambda: inspect_run(config(run=folder, text="s")), "too short to measure", code=DATA)


@pytest.mark.parametrize(
    ("changes", "said", "code"),
    [
        ({"run": ""}, "run is needed", USAGE),
        ({"run": "/nowhere"}, "'/nowhere' does not exist", CHECKPOINT),
        ({"tokens": 0}, "tokens must be at least 1, got 0", USAGE),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0", USAGE),
        ({"seq_len": 0}, "seq_len must be at least 1 or none, got 0", USAGE),
        ({"causal_tokens": -1}, "causal_tokens must be at least 0, got -1", USAGE),
        ({"data": "a", "input": ["b"]}, "either data or input", USAGE),
        ({"data": "/nowhere"}, "/nowhere", DATA),
        ({"input": ["/nowhere"]}, "/nowhere", DATA),
        ({"text": SENTENCE * 9}, "tokens and the model's sequences 32: give a shorter one", USAGE),
        ({"text": "a\udcff"}, "text must be UTF-8 text", USAGE),
        ({"device": "cuda:77"}, "cuda:77", USAGE),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_in_one_sentence(changes, said, code):
    refused(lambda: inspect_run(config(**changes)), said, code=code)


def test_pieces_add_up_to_the_text_whatever_its_characters_take():
    ids, pieces = encode_text(small.load_run(), "é 🌊!\n東")
    assert pieces == ["é", "", " ", "🌊", "", "", "", "!", "\n", "東", "", ""]
    assert ids.shape == (1, 12)


def test_cuts_of_a_text_are_the_rises_of_its_losses():
    """The reads at a token make the prediction of the token after it."""
    trained = small.load_run()
    ids, pieces = encode_text(trained, SENTENCE)
    found = text_by_token(trained.model, ids, pieces, trained.tokenizer, cuts=True)
    assert found["losses"] == pytest.approx([None, *token_losses(trained.model, ids)[0].tolist()])
    for reader, source in ((0, 0), (3, 1), (4, 4)):
        cut = losses_of_cut(trained.model, ids, reader, source)
        rises = [b - a for a, b in zip(found["losses"][1:], cut[1:], strict=True)]
        assert [token[reader][source] for token in found["cuts"][:-1]] == pytest.approx(rises, abs=1e-5)
        assert max(map(abs, rises)) > 1e-3
    only = text_by_token(trained.model, ids[:, :1], pieces[:1], trained.tokenizer, cuts=True)
    assert (only["losses"], only["cuts"], only["lens"][0][-1]["next"]) == ([None], [None], None)
    assert losses_of_cut(trained.model, ids[:, :1], 4, 0) == [None]


def test_names_of_predicted_tokens_keep_a_space_and_show_single_bytes():
    tokenizer = small.load_run().tokenizer
    name = token_names(tokenizer)
    ids = tokenizer.encode(" sea é", add_special_tokens=False).ids
    assert "".join(map(name, ids[:-2])) == " sea "
    assert [name(token) for token in ids[-2:]] == ["\ufffd", "\ufffd"]
    assert name(0) == "<|endoftext|>"
    # A decoder that drops the space before the first word.
    words = Tokenizer(models.WordLevel({"\u2581sea": 0, "b": 1}))
    words.decoder = decoders.Metaspace()
    assert [token_names(words)(token) for token in (0, 1)] == [" sea", "b"]


def test_data_of_another_tokenizer_is_refused(tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Entirely different words make other merges; zebras jump quickly over vexed wizards.\n" * 400)
    data = prepare(DataConfig(input=[str(other)], out=str(tmp_path / "data"), vocab_size=small.VOCAB, document="line"))
    refused(lambda: inspect_run(config(data=str(data))), str(tmp_path / "data"), code=DATA)


def test_a_place_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(command, "load_model", None)
    refused(lambda: command.inspect(config(json=str(tmp_path / "file" / "out.json"))), "is a file", code=DISK)


@pytest.mark.parametrize(("tokens", "rows"), [(1, [1]), (31, [1]), (64, [2]), (100, [2, 1]), (1000, [2, 2, 1])])
def test_as_many_rows_as_have_so_many_tokens(tokens, rows):
    batches = [torch.zeros(2, 33), torch.zeros(2, 33), torch.zeros(1, 33)]
    assert [len(b) for b in first_tokens(batches, tokens)] == rows


def test_columns_of_a_table_are_as_wide_as_they_need_to_be():
    assert table(["a", "long"], [["name", "1"]]).splitlines() == ["a     long", "────  ────", "name     1"]
