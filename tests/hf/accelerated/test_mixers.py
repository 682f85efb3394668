"""Our mixers with the weights of models that mix over depth: the same logits with the model's own sublayers, and the same files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers.models.hy_v4")
from depthmix import OptionError
from depthmix.hf import published_mixer
from depthmix.hf.published import mixer_of_published
from depthmix.mixers.published import published_weights
from hf.accelerated.small_models import BUILD, layers_of, small_model, tokens

FIELDS: dict[str, dict[str, Any]] = {"qwen4_exp": {"ple_layer_ids": []}}  # n-grams enter the streams past the rule
INPUTS = ("hidden_states", "key_hidden_states", "value_hidden_states")
Calls = dict[Any, tuple[tuple[Any, ...], dict[str, Any]]]


def sublayers(layer: Any) -> list[tuple[list[Any], list[Any]]]:
    """The norms and the modules of attention and MLP."""
    attention = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
    names = [n for n, _ in layer.named_children() if n.endswith("input_layernorm")]
    last = [layer.post_attention_layernorm] if hasattr(layer, "post_attention_layernorm") else []
    parts = [[attention], [layer.mlp]]
    if hasattr(layer, "post_mlp_convolution"):
        parts = [[attention, layer.post_attention_convolution], [layer.mlp, layer.post_mlp_convolution]]
    return list(zip([[getattr(layer, n) for n in names], last], parts, strict=True))


def record(model: Any, ids: Tensor) -> tuple[Calls, Tensor]:
    """Describe how the model calls its sublayers and what its output projection returns."""
    calls: Calls = {}
    modules = [m for layer in layers_of(model) for _, parts in sublayers(layer) for m in parts]
    handles = [
        m.register_forward_pre_hook(lambda m, a, k: calls.update({m: (a, k)}), with_kwargs=True)
        for m in (*modules, model.lm_head)
    ]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return calls, model.lm_head(calls[model.lm_head][0][0])


def call(module: Any, calls: Calls, inputs: list[Tensor]) -> Tensor:
    """Call a module as the model did, with other activations."""
    args, kwargs = calls[module]
    if "hidden_states" in kwargs:
        kwargs = kwargs | dict(zip(INPUTS, inputs, strict=False))
    else:
        args = (inputs[0], *args[1:])
    y = module(*args, **kwargs)
    return y[0] if isinstance(y, tuple) else y


@torch.no_grad()
def logits_with(mixer: Any, model: Any, calls: Calls, ids: Tensor) -> Tensor:
    base = model.model.language_model if hasattr(model.model, "language_model") else model.model
    state, site = mixer.start(base.embed_tokens(ids)), 0
    for layer in layers_of(model):
        for norms, parts in sublayers(layer):
            h = mixer.read(state, site)
            h = list(h) if isinstance(h, tuple) else [h]
            # A layer that reads one mixture has the same queries for all three.
            y = [norm(x) for norm, x in zip(norms, h, strict=False)] if norms else h
            for part in parts:
                y = [call(part, calls, y)]
            state, site = mixer.write(state, site, y[0]), site + 1
    out = mixer.finish(state)
    return model.lm_head(base.norm(out) if hasattr(base, "norm") else out)


@pytest.mark.parametrize("family", list(BUILD))
def test_equal_logits(family: str, tmp_path: Path) -> None:
    """Weights in memory and weights in files make the same mixer, and it gives the model's logits."""
    model, ids = small_model(family, **FIELDS.get(family, {})), tokens()
    calls, expected = record(model, ids)
    mixer = mixer_of_published(model)
    torch.testing.assert_close(logits_with(mixer, model, calls, ids), expected, rtol=1e-4, atol=2e-5)
    model.save_pretrained(tmp_path)
    of_files = published_mixer(tmp_path)
    assert of_files.signature == mixer.signature
    for (name, p), q in zip(mixer.named_parameters(), of_files.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_the_comparison_can_fail() -> None:
    """Other options of the same rule give other logits."""
    model, ids = small_model("inkling2"), tokens()
    calls, expected = record(model, ids)
    mixer = mixer_of_published(model)
    mixer.logit_scale = 1.0
    assert (logits_with(mixer, model, calls, ids) - expected).abs().max() > 1e-2


def test_what_is_missing_is_said() -> None:
    model = small_model("qwen4_exp", ple_layer_ids=[])
    state = {k: v for k, v in model.state_dict().items() if "hyper_connection_mixer" not in k}
    with pytest.raises(OptionError, match=r"qwen4-exp: .*hyper_connection_mixer, are missing"):
        published_weights("qwen4-exp", state)
    with pytest.raises(OptionError, match="inkling-2: its tensors do not say how many layers a block has"):
        published_weights("inkling-2", small_model("inkling2").state_dict())
    with pytest.raises(OptionError, match=r"its hc_eps is 0\.001"):
        mixer_of_published(small_model("hy_v4", hc_eps=1e-3))
