"""`depthmix accelerate`, and `--accelerate` of commands that load a model."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from depthmix.cli import main
from depthmix.train.accelerate import to_bf16
from hf.accelerated.small_models import layers_of, small_model
from hf.test_inspect_others import TEXT, folder_of

SHORT = ["--tokens", "6", "--repeats", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of("deepseek_v4", tmp_path_factory.mktemp("models") / "deepseek")


def said(capsys, *argv):
    code = main([*argv])
    read = capsys.readouterr()
    return code, read.out + read.err


def numbers(text, row):
    """Return the numbers of a row of the table."""
    (line,) = [line for line in text.splitlines() if line.lstrip().startswith(row)]
    return [float(word.rstrip("x")) for word in line[len(row) :].split() if word[0].isdigit()]


def test_a_folder_is_compared_and_timed(folder, capsys):
    code, text = said(capsys, "accelerate", str(folder), *SHORT)
    assert code == 0
    assert "deepseek_v4, 3 layers, 1 x 6 tokens, on " in text
    assert "DeepSeek-V4: 6 mHC modules and the head" in text
    for row in ("largest difference of logits, fp32", "largest difference of a gradient, fp32"):
        assert 0 < numbers(text, row)[0] < 1e-4
    for row in ("training, fp32, ms", "prefill, fp32, ms", "decoding a token, fp32, ms"):
        before, after, gain = numbers(text, row)
        assert gain == pytest.approx(before / after, rel=0.05)


@pytest.mark.parametrize(("family", "layers"), [("glm5_next", 2), ("hy_v4", 2), ("inkling2", 2), ("qwen4_exp", 3)])
def test_a_configuration_gets_random_weights_and_fewer_layers(family, layers, tmp_path, capsys):
    config = small_model(family).config
    config.save_pretrained(tmp_path)
    file = str(tmp_path / "config.json")
    code, text = said(capsys, "accelerate", file, "--layers", str(layers), "--experts", "2", *SHORT)
    assert code == 0
    described = f"random weights, width 32, {layers} of 3 layers, 2 of 4 experts, 1 x 6 tokens"
    assert f"{config.model_type}, {described}" in text
    assert numbers(text, "largest difference of a gradient, fp32")[0] < 1e-3


def test_in_bf16_the_mixing_s_weights_stay_as_transformers_keeps_them(folder, capsys):
    code, text = said(capsys, "accelerate", str(folder), "--precision", "bf16", *SHORT)
    assert code == 0
    assert numbers(text, "training, bf16, ms")[0] > 0
    model = small_model("deepseek_v4")
    to_bf16(model)
    (layer, *_) = layers_of(model)
    assert (layer.attn_hc.fn.dtype, layer.self_attn.q_a_proj.weight.dtype) == (torch.float32, torch.bfloat16)


def test_a_model_with_another_rule_fails_the_check(folder, capsys, monkeypatch):
    """Read with twice the weights: the check of layers is off, and the one of the whole model must see it."""
    from depthmix.hf.accelerated import accelerate as module
    from depthmix.hf.accelerated import streams

    real = streams.write
    monkeypatch.setattr(streams, "write", lambda held, y, *rest: real(held, 2 * y, *rest))
    monkeypatch.setattr(module, "largest_difference", lambda *args: 0.0)
    code, text = said(capsys, "accelerate", str(folder), *SHORT)
    assert code == 1
    assert "the accelerated model gives other results: the largest relative difference is" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist: give a folder of a model; nothing is fetched"),
        ({}, "describes no model that transformers builds"),
        ({"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1,
          "intermediate_size": 8, "vocab_size": 8}, "no layers that mix over depth in it are known"),
        ({"model_type": "deepseek_v4", "hidden_size": "wide"}, "describes no model that transformers builds"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(content, message, tmp_path, capsys):
    place = tmp_path / "model"
    if content is not None:
        place.mkdir()
        (place / "config.json").write_text(json.dumps(content))
    code, text = said(capsys, "accelerate", str(place), *SHORT)
    assert code not in (0, 1)
    assert message in text
    assert text.count("depthmix: ") == 1


def test_numbers_below_one_and_a_missing_model_are_refused(folder, capsys):
    assert said(capsys, "accelerate") == (2, "depthmix: accelerate: model is missing: give a folder with config.json, or a config.json\n")  # fmt: skip
    code, text = said(capsys, "accelerate", str(folder), "--tokens", "0")
    assert code == 2
    assert "tokens must be at least 1" in text


def test_eval_and_generate_accelerate(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    loss = ["eval", "--run", str(folder), "--input", str(tmp_path / "text.txt"), "--device", "cpu", "--json"]
    plain, fast = (json.loads(said(capsys, *loss, *more)[1].splitlines()[0]) for more in ((), ("--accelerate",)))
    assert fast["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    more = ["generate", "--run", str(folder), "--prompt", "The", "--max-tokens", "5", "--temperature", "0"]
    texts = [said(capsys, *more, "--device", "cpu", *flag) for flag in ((), ("--accelerate",))]
    assert texts[0][0] == texts[1][0] == 0
    assert texts[1][1].startswith(texts[0][1])
    assert "mHC modules" in texts[1][1]


def test_other_models_are_not_accelerated(tmp_path, capsys):
    from hf.test_foreign_folders import save

    code, text = said(capsys, "generate", "--run", str(save(tmp_path)), "--accelerate", "--device", "cpu")
    assert code == 2
    assert "cannot accelerate a LlamaForCausalLM" in text
    assert torch.is_grad_enabled()


def test_the_layers_that_are_kept_have_all_kinds_if_there_is_room() -> None:
    from depthmix.train.accelerate import varied

    linear_and_full = ["linear", "linear", "linear", "full"] * 3
    assert varied(linear_and_full, 2) == [0, 3]
    assert varied(linear_and_full, 4) == [0, 1, 2, 3]
    assert varied(linear_and_full, 1) == [0]
    assert varied([None] * 5, 3) == [0, 1, 2]
    assert varied(list("abcd"), 3) == [0, 1, 2]
