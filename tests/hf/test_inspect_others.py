"""`depthmix inspect` and the explorer on Hugging Face's models that mix over depth: by themselves, or retrofitted."""

import json

import pytest
import torch

pytest.importorskip("transformers")
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import depthmix
from depthmix.cli import main
from depthmix.report.serve import Models
from depthmix.runs.restore import load_model
from hf.accelerated.small_models import small_model
from hf.test_foreign_folders import END, save
from train import small

TEXT = "A small boat goes out at dawn, and the sea is calm."


def folder_of(family, folder):
    tokenizer = Tokenizer.from_file(str(small.data() / "tokenizer.json"))
    small_model(family, vocab_size=small.VOCAB).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("family", "rule"), [("deepseek_v4", "mhc"), ("glm5_next", "mhc"), ("llama", "attnres")])
def test_a_folder_is_inspected_and_explored(family, rule, tmp_path, capsys):
    folder = tmp_path / "model"
    folder = save(folder, family, rule) if family == "llama" else folder_of(family, folder)
    out = tmp_path / "inside.json"
    causal = ("--causal-tokens", "0" if family != "llama" else "8")
    given = ["--run", str(folder), "--text", TEXT, "--seq-len", "60", "--json", str(out), "--device", "cpu"]
    assert main(["inspect", *given, *causal]) == 0
    document = json.loads(out.read_text())
    assert document["mixer"] == rule
    trained = load_model(folder, torch.device("cpu"))
    model = trained.model.model
    ids = torch.tensor([trained.tokenizer.encode(TEXT, add_special_tokens=False).ids])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(input_ids=ids[:, :-1]).logits[0], ids[0, 1:]).item()
    assert document["loss"] == pytest.approx(loss, rel=1e-3)
    expected = depthmix.depth_mixing(model, input_ids=ids[:, :-1])[0]
    last = document["mixing"]["mean"][-1][0]
    torch.testing.assert_close(torch.tensor(last), expected[-1], rtol=1e-3, atol=1e-3)
    assert len(document["dynamics"]["gradient_norm"]) == len(document["readers"]) - 1
    assert all(norm > 0 for norm in document["dynamics"]["gradient_norm"])
    text = document["text"]
    for lens, (best, *_) in zip(text["lens"], text["predictions"], strict=True):
        assert lens[-1]["token"] == best["token"]
        assert lens[-1]["probability"] == pytest.approx(best["probability"], rel=1e-3)
    assert (text["cuts"] is None) == (family != "llama")
    (shown,) = Models([(str(folder), trained)]).documents(TEXT)
    assert "".join(shown["text"]["tokens"]) == TEXT
    capsys.readouterr()


def test_a_model_without_a_rule_is_refused(tmp_path, capsys):
    folder = save(tmp_path)
    assert main(["inspect", "--run", str(folder), "--text", TEXT, "--device", "cpu"]) == 4
    assert "holds a model without a rule for mixing over depth: retrofit it first" in capsys.readouterr().err


def test_a_training_does_not_begin_with_a_model_that_mixes_by_itself(tmp_path, capsys):
    folder = folder_of("deepseek_v4", tmp_path / "model")
    out = ["--out", str(tmp_path / "run"), "--device", "cpu"]
    assert main(["train", "--data", str(small.data()), "--init", str(folder), *out]) == 4
    assert "holds a model of type 'deepseek_v4'" in capsys.readouterr().err
