"""Hugging Face decoders that can be retrofitted, and the names of their parts.

A pre-norm layer is a chain of sites: x = x + after(sublayer(norm(x))). In a parallel layer the sublayers form one site: they read
the same stream, each with its own norm, and their outputs are added. Other architectures, and those that scale their residuals,
are refused with the reason, because a mixer would silently change them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from depthmix.models.exchange import MODEL_TYPE


class Site(NamedTuple):
    """A sublayer of a layer, by the names of its modules. In a parallel layer, several share a site."""

    norm: str
    sublayer: str
    after: tuple[str, ...] = ()  # modules applied to the output, in this order
    attention: bool = False


class Architecture(NamedTuple):
    """Structure of the layers of a model type."""

    layers: str  # attribute of the base model
    final_norm: str
    sites: tuple[Site, ...]
    # The attention's projections of queries, keys and values; one name if they are fused, none if they cannot read apart.
    projections: tuple[str, ...]
    by_head: bool = False  # whether a fused projection returns q, k and v head by head, not one after the other
    parallel: bool = False  # whether the sublayers of a layer form one site

    def layout(self, n_layers: int) -> dict[str, Any]:
        """Return the arguments of `create_mixer` that describe the sites."""
        return {"n_blocks": n_layers, "sites": ("attention",) if self.parallel else None}


LLAMA = Architecture(
    "layers",
    "norm",
    (Site("input_layernorm", "self_attn", attention=True), Site("post_attention_layernorm", "mlp")),
    ("q_proj", "k_proj", "v_proj"),
)
_GEMMA2 = LLAMA._replace(
    sites=(
        Site("input_layernorm", "self_attn", ("post_attention_layernorm",), attention=True),
        Site("pre_feedforward_layernorm", "mlp", ("post_feedforward_layernorm",)),
    )
)
_GPT2 = Architecture("h", "ln_f", (Site("ln_1", "attn", attention=True), Site("ln_2", "mlp")), ("c_attn",))
_NEOX = Architecture(
    "layers",
    "final_layer_norm",
    (
        Site("input_layernorm", "attention", ("post_attention_dropout",), attention=True),
        Site("post_attention_layernorm", "mlp", ("post_mlp_dropout",)),
    ),
    ("query_key_value",),
    by_head=True,
)
_PHI3 = LLAMA._replace(
    sites=(
        Site("input_layernorm", "self_attn", ("resid_attn_dropout",), attention=True),
        Site("post_attention_layernorm", "mlp", ("resid_mlp_dropout",)),
    ),
    projections=(),
)
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma": LLAMA,
    "smollm3": LLAMA,
    "olmo": LLAMA,
    "helium": LLAMA,
    "starcoder2": LLAMA,
    "mixtral": LLAMA,
    "qwen3_moe": LLAMA,
    "gpt_oss": LLAMA,
    "deepseek_v3": LLAMA._replace(projections=()),
    "phi3": _PHI3,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "gpt2": _GPT2,
    "gpt_neox": _NEOX,
}
_POST_NORM = "it normalises after each addition and has no residual stream for a mixer to read"
PREFIX = "depthmix_"  # prefix of the model types of retrofitted models
POST_NORM = {"bert", "roberta"}  # norm(x + f(x))
NORMED_OUTPUTS = {"olmo2", "olmo3"}  # x + norm(f(x))


def plain_type(config: Any) -> str:
    """Strip our prefix from the model type."""
    return str(config.model_type).removeprefix(PREFIX)


def architecture(config: Any) -> Architecture:
    """Return the structure of the layers of a model with this configuration."""
    structure = ARCHITECTURES[plain_type(config)]
    return structure._replace(parallel=True) if getattr(config, "use_parallel_residual", False) else structure


def why_not(model: Any) -> str | None:
    """Explain why a model cannot be retrofitted; None if it can."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind is None or not hasattr(model, "base_model"):
        return f"expected a Hugging Face model, got {type(model).__name__}"
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        return "this model is wrapped in adapters: retrofit the model inside, `model.get_base_model()`"
    if kind == MODEL_TYPE:
        return "a model of depthmix already has a mixer, which is chosen when the model is built"
    if kind in POST_NORM:
        return f"{kind} is a post-norm model: {_POST_NORM}"
    if kind in NORMED_OUTPUTS:
        what = f"{kind} norms what sublayers return and not what they read, x + norm(f(x))"
        return f"{what}: a rule may begin with a share of the stream, for which only a norm before a sublayer makes up"
    if kind == "opt":
        if not config.do_layer_norm_before:  # type: ignore[union-attr]
            return f"opt with do_layer_norm_before=False is a post-norm model: {_POST_NORM}"
        return "the MLP of opt is no module of its own: its layer calls fc1 and fc2 between two additions"
    if kind not in ARCHITECTURES:
        # The check runs the model, and registers what it recognises.
        from depthmix.hf.recognised import why_not_recognised

        return why_not_recognised(model)
    if kind == "gpt2" and config.add_cross_attention:  # type: ignore[union-attr]
        return "gpt2 with cross attention has three sublayers per layer"
    structure, base = ARCHITECTURES[kind], model.base_model
    layers: Any = getattr(base, structure.layers, None)
    if not isinstance(layers, nn.ModuleList) or not hasattr(base, structure.final_norm):
        return f"this {kind} has no {structure.layers} and {structure.final_norm} where they are expected"
    names = [n for site in structure.sites for n in (site.norm, site.sublayer, *site.after)]
    missing = [n for n in names if any(not hasattr(layer, n) for layer in layers)]
    return f"a layer of this {kind} has no {missing[0]}" if missing else None
