"""What people get wrong with Hugging Face models: one clear sentence each, and nothing is changed or written."""

import json
import runpy
import sys

import pytest
import torch

from depthmix import restore, retrofit
from depthmix.cli import main
from depthmix.errors import CHECKPOINT, USAGE, UserError
from depthmix.hf import mixer_of
from hf.test_retrofit import ids, make
from hf.tiny import causal_lm
from project import ROOT
from train import small


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.tensor([[1, 13]]), "token id 13 is not in the vocabulary of 13 entries"),
        (torch.tensor([[-1, 1]]), "token id -1 is not in the vocabulary"),
        (torch.tensor([1, 2]), r"input_ids must be integers \[batch, tokens\], got torch.int64 of shape \[2\]"),
        (torch.tensor([[1.0, 2.0]]), "input_ids must be integers .* got torch.float32"),
    ],
    ids=["beyond", "negative", "one-row", "floats"],
)
def test_token_ids_that_are_none(given, words):
    with pytest.raises((IndexError, ValueError), match=words):
        causal_lm()(given)


@pytest.mark.parametrize("named", [True, False])
def test_generate_of_an_empty_prompt(named):
    empty = torch.zeros(1, 0, dtype=torch.long)
    with pytest.raises(ValueError, match="the prompt is empty; begin with a token"):
        causal_lm().generate(**{"input_ids": empty}) if named else causal_lm().generate(empty)


def test_generate_of_embeddings_alone_is_no_empty_prompt():
    model = causal_lm()
    made = model.generate(inputs_embeds=model.model.embedding(torch.tensor([[1, 2, 3]])), max_new_tokens=2)
    assert made.shape == (1, 2)


def test_a_prompt_longer_than_the_sequences_of_training(capsys):
    prompt = "The sea is " * 40
    assert main(["generate", "--run", str(small.run().path), "--prompt", prompt]) == USAGE
    out, err = capsys.readouterr()
    assert out == ""
    length = small.run().read_recipe()["seq_len"]
    assert f"tokens and the model was trained on sequences of {length}: shorten the prompt" in err


@pytest.mark.parametrize("name", ["dim", "n_blocks", "sites"])
def test_retrofit_with_what_is_the_models_own(name):
    model = make("llama")
    before = model(ids()).logits
    with pytest.raises(UserError, match=f"the model decides {name}"):
        retrofit(model, "attnres", **{name: 3})
    assert torch.equal(model(ids()).logits, before)


def test_models_that_cannot_be_retrofitted_or_have_no_mixer():
    with pytest.raises(UserError, match="was trained with attnres, and only plain residuals can be replaced"):
        retrofit(causal_lm(), "dca")
    with pytest.raises(UserError, match="not retrofitted"):
        mixer_of(make("llama"))
    with pytest.raises(UserError, match="not retrofitted"):
        mixer_of("a name")
    with pytest.raises(UserError, match="not retrofitted"):
        restore(causal_lm())
    model = causal_lm()
    assert mixer_of(model) is model.model.mixer


def test_a_model_without_weights_is_retrofitted_without_comparing(capsys):
    model = retrofit(make("llama").to("meta"), "attnres")
    assert mixer_of(model).query.is_meta
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("said", [None, {"mixer": "dca"}, "dca"])
def test_a_retrofitted_configuration_that_names_no_mixer(said):
    from depthmix.hf.retrofitted import DepthmixLlamaConfig, DepthmixLlamaForCausalLM

    config = DepthmixLlamaConfig(**make("llama").config.to_dict(), depthmix=said)
    with pytest.raises(ValueError, match="expected the mixer's name and its options"):
        DepthmixLlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "lm_head.weight has the shape [61, 32] and not [61, 64]"),
        ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight is not in its weights"),
        ({"vocab_size": "many"}, "Validation error for field 'vocab_size'"),
    ],
    ids=["size", "layers", "type"],
)
def test_retrofit_of_a_folder_whose_weights_do_not_fit_its_configuration(tmp_path, capsys, changes, words):
    make("llama").save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    given = ["--model", str(tmp_path / "model"), "--mixer", "dca", "--out", str(tmp_path / "out")]
    assert main(["retrofit", *given]) == CHECKPOINT
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_retrofit_of_a_folder_whose_weights_are_not_numbers(tmp_path, capsys):
    model = make("llama")
    model.lm_head.weight.data[3] = float("nan")
    model.save_pretrained(tmp_path / "model")
    given = ["--model", str(tmp_path / "model"), "--mixer", "dca", "--out", str(tmp_path / "out")]
    assert main(["retrofit", *given]) == CHECKPOINT
    assert "its weights are not usable" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_retrofit_runs_no_code_of_a_folder(tmp_path, capsys):
    make("llama").save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    code = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": code, "model_type": "mine"}))
    (tmp_path / "model" / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Mine: pass\n")
    given = ["--model", str(tmp_path / "model"), "--mixer", "dca", "--out", str(tmp_path / "out")]
    assert main(["retrofit", *given]) == CHECKPOINT
    assert "cannot be loaded" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("mixer", "words"), [("layerscale", "does not begin as the plain residual"), ("nothing", "'nothing'")]
)
def test_the_example_with_a_rule_that_is_refused(mixer, words, monkeypatch):
    path = str(ROOT / "examples" / "hugging_face.py")
    monkeypatch.setattr(sys, "argv", [path, mixer])
    with pytest.raises(SystemExit, match=words):  # which Python prints, with an exit code of 1
        runpy.run_path(path, run_name="__main__")
