"""Models whose weights accelerate keeps in memory or on disk until they run, and models of which some layers are asked for."""

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
import accelerate
from transformers import AutoModelForCausalLM

from depthmix import retrofit
from depthmix.errors import UserError
from depthmix.hf import mixer_of
from hf.test_retrofit import ids, make, stir
from hf.tiny import causal_lm, tokens

MODELS = {
    **{f"own-{name}": lambda name=name: causal_lm(name) for name in ("residual", "attnres", "hyper", "mudd")},
    "llama": lambda: stir(retrofit(make("llama"), "attnres", ways=2, quiet=True)),
    "gpt2": lambda: stir(retrofit(make("gpt2"), "dca", quiet=True)),
}


def by_memory(model, folder):
    return accelerate.cpu_offload(model, execution_device="cpu")


def by_disk(model, folder):
    return accelerate.disk_offload(model, folder / "weights", execution_device="cpu")


def by_device_map(model, folder):
    """Some parts stay on the CPU, where the others come from the disk to run."""
    model.save_pretrained(folder / "model")
    prefix = model.base_model_prefix
    places = {f"{prefix}.{name}": "disk" for name, _ in model.base_model.named_children()} | {"lm_head": "disk"}
    places[f"{prefix}.{'norms' if 'norms' in dict(model.base_model.named_children()) else 'rotary_emb'}"] = "cpu"
    places = {name: place for name, place in places.items() if name in dict(model.named_modules())}
    return AutoModelForCausalLM.from_pretrained(
        folder / "model", device_map=places, offload_folder=folder / "weights", dtype=model.dtype
    )


# A device map meets every model, and each of the others half of them.
OFFLOADED = [
    *((name, by_device_map) for name in MODELS),
    *((name, by_memory) for name in ("own-attnres", "own-mudd", "gpt2")),
    *((name, by_disk) for name in ("own-residual", "own-hyper", "llama")),
]


@pytest.mark.parametrize(("name", "offload"), OFFLOADED)
@torch.no_grad()
def test_offloaded_weights(name, offload, tmp_path):
    model, how = MODELS[name](), {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected, answer = model(tokens()).logits, model.generate(tokens(), **how)
    model = offload(model, tmp_path)
    assert any(p.device.type == "meta" for p in model.parameters())
    torch.testing.assert_close(model(tokens()).logits, expected)  # a norm by itself rounds otherwise than in a read
    assert torch.equal(model.generate(tokens(), **how), answer)
    assert not any(p.device.type == "meta" for p in mixer_of(model).parameters())
    assert any(p.device.type == "meta" for p in model.parameters())
    if offload is by_device_map:
        model.save_pretrained(tmp_path / "again")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        torch.testing.assert_close(again(tokens()).logits, expected)


def test_a_mixer_stays_in_fp32_when_it_comes_back(tmp_path):
    model = causal_lm("attnres").bfloat16()
    expected = model(tokens()).logits
    model = by_device_map(model, tmp_path)
    torch.testing.assert_close(model(tokens()).logits, expected, rtol=0.05, atol=0.02)
    assert {p.dtype for p in mixer_of(model).parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["own", "llama", "gpt2"])
def test_fewer_or_more_layers_than_a_mixer_is_for_are_refused_with_a_way_out(kind, tmp_path):
    build = (lambda: causal_lm("attnres")) if kind == "own" else MODELS[kind]
    build().save_pretrained(tmp_path)
    name = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    other = "train a model of that depth"
    fewer = other if kind == "gpt2" else "load all and set model.config.num_hidden_layers = 2"
    for layers, advice in ((2, fewer), (5, other)):
        with pytest.raises(UserError, match=f"is for 3 layers, so the model cannot be loaded with {layers}: {advice}"):
            AutoModelForCausalLM.from_pretrained(tmp_path, **{name: layers})
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):  # for another reason
        AutoModelForCausalLM.from_pretrained(tmp_path, vocab_size=5)
    if kind == "gpt2":
        return
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    whole = model(ids() % 13).logits
    model.config.num_hidden_layers = 2
    assert not torch.equal(model(ids() % 13).logits, whole)
