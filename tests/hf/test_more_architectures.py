"""Decoders that are retrofitted as Llama is: with experts, with one way only, and ones that nobody has registered."""

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM

from depthmix import restore, retrofit
from depthmix.errors import UserError
from depthmix.hf import mixer_of
from depthmix.hf.architectures import ARCHITECTURES
from hf.test_retrofit import ids, make, stir

WITH_EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
RULES = {"attnres": {"block_size": 2}, "dca": {}, "mhc": {"n": 2}}


def change(model, before):
    return ((model(ids()).logits - before).abs().max() / before.abs().max()).item()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "kind", ["smollm3", "mixtral", "qwen3_moe", "gpt_oss", "olmo", "helium", "starcoder2", "deepseek_v3", "phi3"]
)
def test_logits_stay_and_then_change(kind, rule):
    model = make(kind)
    if rule == "dca" and not ARCHITECTURES[kind].projections:
        with pytest.raises(UserError, match="has no projections of queries, keys and values that could read apart"):
            retrofit(model, "dca")
        return
    before = model(ids()).logits
    retrofit(model, rule, quiet=True, **RULES[rule])
    assert change(model, before) <= 1e-5
    assert change(stir(model), before) > 1e-4
    assert torch.equal(restore(model)(ids()).logits, before)


@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_experts_get_gradients_and_a_folder_comes_back(kind, tmp_path):
    model = stir(retrofit(make(kind), "attnres", quiet=True, block_size=2))
    out = model(ids(), labels=ids())
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert any("experts" in name and g is not None and g.abs().max() > 0 for name, g in gradients.items())
    assert mixer_of(model).query.grad[1:].abs().max() > 0
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids()).logits, model(ids()).logits)


def test_the_router_s_loss_is_that_of_the_plain_model():
    model = make("mixtral", output_router_logits=True)
    plain = model(ids(), labels=ids())
    out = retrofit(model, "attnres", quiet=True)(ids(), labels=ids())
    assert plain.aux_loss > 0
    torch.testing.assert_close(out.aux_loss, plain.aux_loss)
    torch.testing.assert_close(out.loss, plain.loss)


@pytest.fixture
def registered():
    """Forget what a test registers."""
    before = dict(ARCHITECTURES)
    yield
    ARCHITECTURES.clear()
    ARCHITECTURES.update(before)


def test_a_decoder_like_llama_is_recognised(registered, tmp_path):
    model = make("minimax_m2", **EXPERTS)
    before = model(ids()).logits
    retrofit(model, "attnres", quiet=True, ways=3)
    assert "minimax_m2" in ARCHITECTURES
    assert change(model, before) <= 1e-5
    stir(model).save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids()).logits, model(ids()).logits)


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("granite", {"residual_multiplier": 0.22}, r"layer 0: post_attention_layernorm receives something else than the stream: they differ by"),
        ("cohere", {}, "a layer has no post_attention_layernorm"),
        ("glm4", {"pad_token_id": 0}, "a layer also has post_"),
        ("olmo2", {}, r"olmo2 norms what sublayers return and not what they read"),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, "the MLP of opt is no module of its own"),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": False}, "opt with do_layer_norm_before=False is a post-norm model"),
    ],
)  # fmt: skip
def test_other_layers_are_refused_with_the_reason(registered, kind, fields, message):
    model = make(kind, **fields)
    before = model(ids()).logits
    with pytest.raises(UserError, match=message):
        retrofit(model, "attnres")
    assert kind not in ARCHITECTURES
    assert torch.equal(model(ids()).logits, before)


def test_granite_with_factors_of_one_is_recognised(registered):
    """The check is of numbers, not of names."""
    model = make("granite", residual_multiplier=1.0)
    before = model(ids()).logits
    assert change(retrofit(model, "attnres", quiet=True), before) <= 1e-5


def test_an_architecture_can_be_registered(registered):
    from depthmix.hf import register_architecture

    with torch.device("meta"):
        model = make("minimax_m2", **EXPERTS)
    with pytest.raises(UserError, match="it has no weights to compare its layers with; load them, or register"):
        retrofit(model, "attnres")
    register_architecture("minimax_m2")
    retrofit(model, "attnres")
    assert mixer_of(model).n_sites == 6


def test_a_model_that_does_not_run_on_tokens_is_refused(registered, monkeypatch):
    model = make("minimax_m2", **EXPERTS)

    def fail(*args, **kwargs):
        raise ValueError("pixel_values are missing")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", fail)
    with pytest.raises(UserError, match=r"it does not run on token ids alone \(pixel_values are missing\)"):
        retrofit(model, "attnres")


def test_a_command_takes_a_file_that_registers(registered, tmp_path, capsys):
    from depthmix.cli import main
    from hf.test_foreign_folders import save

    folder = save(tmp_path / "model", "minimax_m2", "attnres", **EXPERTS)
    given = ["generate", "--run", str(folder), "--prompt", "The", "--max-tokens", "3", "--device", "cpu"]
    del ARCHITECTURES["minimax_m2"]
    assert main(given) == 4
    assert "holds a model of type 'depthmix_minimax_m2'" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text('import depthmix.hf\n\ndepthmix.hf.register_architecture("minimax_m2")\n')
    assert main([*given, "--modules", str(tmp_path / "mine.py")]) == 0
