"""Depth-mixing matrices as an output, of our own models and of retrofitted ones, in a call and in `generate`."""

import functools

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

from depthmix import depth_mixing, restore, retrofit
from hf.test_concurrent_calls import prompts
from hf.test_retrofit import ids, make, stir
from hf.tiny import causal_lm
from threads import at_once, meet_at

MODELS = {
    "own": lambda: causal_lm("attnres", {"vocab_size": 61}),
    "llama": lambda: stir(retrofit(make("llama"), "attnres", quiet=True, ways=2)),
    "gpt2": lambda: stir(retrofit(make("gpt2"), "dca", quiet=True)),
    "parallel": lambda: stir(retrofit(make("gpt_neox", use_parallel_residual=True), "mhc", n=2, quiet=True)),
}
every_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


@every_model
@torch.no_grad()
def test_a_call_returns_them_if_asked(build):
    model = build()
    expected = depth_mixing(model, ids(), per_token=True)
    logits = model(ids()).logits
    out = model(ids(), output_depth_weights=True)
    assert torch.equal(out.depth_weights, expected)
    assert torch.equal(out.logits, logits)
    assert torch.equal(model(ids(), output_depth_weights=True, return_dict=False)[-1], expected)
    assert torch.equal(model.base_model(ids(), output_depth_weights=True).depth_weights, expected)
    assert getattr(model(ids()), "depth_weights", None) is None
    model.config.output_depth_weights = True
    assert torch.equal(model(ids()).depth_weights, expected)
    assert getattr(model(ids(), output_depth_weights=False), "depth_weights", None) is None


@every_model
def test_generate_returns_those_of_every_step(build):
    model = build()
    how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    made = model.generate(ids(), output_depth_weights=True, return_dict_in_generate=True, **how)
    assert torch.equal(made.sequences, model.generate(ids(), **how))
    assert [weights.shape[:2] for weights in made.depth_weights] == [(2, 6), (2, 1), (2, 1)]
    whole = depth_mixing(model, made.sequences[:, :-1], per_token=True)
    torch.testing.assert_close(torch.cat(made.depth_weights, dim=1), whole, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="output_depth_weights=True needs return_dict_in_generate=True"):
        model.generate(ids(), output_depth_weights=True, **how)


def test_of_a_model_in_training_with_checkpoints_adapters_and_after_loading(tmp_path):
    peft = pytest.importorskip("peft")
    model = MODELS["llama"]()
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = depth_mixing(model, ids(), per_token=True)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).train()
    tuned.gradient_checkpointing_enable({"use_reentrant": False})
    out = tuned(input_ids=ids(), labels=ids(), output_depth_weights=True)
    out.loss.backward()
    assert not out.depth_weights.requires_grad
    torch.testing.assert_close(out.depth_weights, expected, rtol=1e-4, atol=1e-5)


def test_of_a_classifier_and_no_longer_of_a_restored_model():
    config = make("llama", pad_token_id=0).config
    model = retrofit(LlamaForSequenceClassification(config).eval(), "attnres", quiet=True)
    assert torch.equal(
        model(ids(), output_depth_weights=True).depth_weights, depth_mixing(model, ids(), per_token=True)
    )
    assert getattr(restore(model)(ids()), "depth_weights", None) is None


def test_concurrent_calls_have_their_own():
    model = MODELS["llama"]()
    calls = [functools.partial(model, x, output_depth_weights=True) for x in prompts(2)]
    alone = [call().depth_weights for call in calls]
    meet_at(model.model.layers[1], 2)
    assert all(torch.equal(out.depth_weights, w) for out, w in zip(at_once(*calls), alone, strict=True))
