"""The examples of docs/guides/accelerate.md, on a small model with random weights."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
import peft
from transformers import AutoModelForCausalLM

from depthmix.hf.accelerated.accelerate import is_accelerated
from hf.accelerated.small_models import small_model, tokens
from project import ROOT, code_blocks

BLOCKS = code_blocks(ROOT / "docs" / "guides" / "accelerate.md")
FOLDER = "path/to/DeepSeek-V4-Flash"


def block(words):
    (found,) = [text for text in BLOCKS if words in text]
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_model("deepseek_v4").save_pretrained(FOLDER)
    return tmp_path


def test_an_adapter_is_trained_on_an_accelerated_model_and_loads_on_a_plain_one(folder):
    torch.manual_seed(0)
    names = {}
    exec(compile(block("LoraConfig("), "guide", "exec"), names)
    tuned = names["model"].eval()
    assert is_accelerated(tuned)
    plain = AutoModelForCausalLM.from_pretrained(FOLDER)
    with torch.no_grad():
        before = plain(input_ids=tokens()).logits
        adapted = peft.PeftModel.from_pretrained(plain, "adapter").eval()
        assert not is_accelerated(adapted)
        logits = adapted(input_ids=tokens()).logits
        found = tuned(input_ids=tokens()).logits
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    assert (logits - before).abs().max() > 1e-4


def test_one_line_accelerates(folder):
    names = {}
    text = block("dtype=").replace(', device_map="auto"', "")
    exec(compile(text, "guide", "exec"), names)
    assert is_accelerated(names["model"])


def test_the_mixer_is_taken_out(folder):
    names = {}
    exec(compile(block("published_mixer").replace("range(24, 28)", "range(1, 3)"), "guide", "exec"), names)
    assert (names["mixer"].n_sites, names["some"].n_sites) == (6, 4)
