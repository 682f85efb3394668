"""`depthmix generate` and `eval` of Hugging Face's models in folders of `save_pretrained`, retrofitted and plain, with their tokenizers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import depthmix
from depthmix.cli import main
from depthmix.errors import CHECKPOINT, DATA, USAGE
from hf.test_retrofit import make, stir
from train import small

END = "<|endoftext|>"
PROMPT = "The sea is"


def save(folder: Path, kind: str = "llama", mixer: str = "", begins: bool = False, **more: Any) -> Path:
    """A random model, retrofitted if a mixer is named and moved away from where it began, beside the tokenizer of the small corpus."""
    tokenizer = Tokenizer.from_file(str(small.data() / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    if begins:  # as Llama's own does
        tokenizer.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, end)])
    tokens = {"bos_token_id": end, "eos_token_id": end}
    model = make(kind, vocab_size=small.VOCAB, **tokens, initializer_range=0.5, **more)
    if mixer:
        stir(depthmix.retrofit(model, mixer, quiet=True))
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    return folder


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main([*argv, "--device", "cpu"]) == 0
    return capsys.readouterr().out


CASES = [("llama", "attnres"), ("llama", "dca"), ("llama", ""), ("gpt2", "mhc")]


@pytest.mark.parametrize(("kind", "mixer", "begins"), [(*case, i % 2 == 0) for i, case in enumerate(CASES)])
def test_text_is_what_transformers_generates(
    kind: str, mixer: str, begins: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the tokens that its tokenizer puts before a prompt."""
    folder = save(tmp_path, kind, mixer, begins)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert bool(mixer) == hasattr(model.config, "depthmix")
    given = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    made = model.generate(given, max_new_tokens=9, do_sample=False, pad_token_id=0)[0, given.shape[1] :]
    assert len(made) > 1
    text = said(capsys, "generate", "--run", str(folder), "--prompt", PROMPT, "--max-tokens", "9", "--temperature", "0")
    assert text == tokenizer.decode(made, skip_special_tokens=True) + "\n"


@pytest.mark.parametrize(("kind", "mixer"), CASES)
def test_the_loss_is_that_of_its_logits(
    kind: str, mixer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text = save(tmp_path / "model", kind, mixer), "A small boat goes out at dawn."
    (tmp_path / "text.txt").write_text(text)
    found = json.loads(said(capsys, "eval", "--run", str(folder), "--input", str(tmp_path / "text.txt"), "--json"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(ids[:, :-1]).logits
    assert found["tokens"] == ids.shape[1] - 1
    assert found["loss"] == pytest.approx(float(cross_entropy(logits[0], ids[0, 1:])), rel=1e-5)


def test_load_says_what_the_model_is(tmp_path: Path) -> None:
    trained = depthmix.load(save(tmp_path, "llama", "attnres", begins=True), "cpu")
    assert (trained.config.mixer, trained.config.dim, trained.config.n_blocks) == ("attnres", 32, 3)
    assert trained.model(torch.tensor([[1, 2]])).shape == (1, 2, small.VOCAB)
    assert trained.tokenizer.decode(trained.tokenizer.encode(PROMPT).ids) == PROMPT
    assert not trained.model.model.training


def refused(capsys: pytest.CaptureFixture[str], code: int, words: str, *argv: str) -> None:
    capsys.readouterr()
    assert main([*argv, "--device", "cpu"]) == code
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_what_cannot_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "model", "gpt2", "dca")
    generate = ["generate", "--run", str(folder), "--prompt", PROMPT]
    refused(capsys, USAGE, "the model has 64 positions: lower max_tokens", *generate)
    refused(capsys, USAGE, "shorten the prompt", "generate", "--run", str(folder), "--prompt", PROMPT * 40)
    refused(capsys, DATA, "give the text to measure it on with --input", "eval", "--run", str(folder))
    refused(capsys, DATA, "give the text to measure it on with --input", "inspect", "--run", str(folder))
    for name, words in (("model.safetensors", "cannot be loaded"), ("tokenizer.json", "There is no tokenizer file")):
        copy = shutil.copytree(folder, tmp_path / name)
        (copy / name).unlink()
        refused(capsys, CHECKPOINT, words, "generate", "--run", str(copy), "--prompt", PROMPT)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 100}))
    refused(capsys, CHECKPOINT, "has 300 entries and the model 100", *generate)
