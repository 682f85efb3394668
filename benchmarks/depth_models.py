"""Random models of the families that mix over depth: at their real width, or tiny, whole or with sublayers that pass their input on."""

from __future__ import annotations

import copy
import importlib
import re
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 4
# The prefix of a family's classes, and its widths: the published one first.
CLASSES = {
    "deepseek_v4": ("DeepseekV4", ""),
    "glm5_next": ("Glm5Next", "Text"),
    "hy_v4": ("HYV4", ""),
    "inkling2": ("Inkling2", "Text"),
    "qwen4_exp": ("Qwen4Exp", "Text"),
}
WIDTHS = {
    "deepseek_v4": (4096, 4608),
    "glm5_next": (4096,),
    "hy_v4": (2816, 4096),
    "inkling2": (4608, 4096),
    "qwen4_exp": (2048, 4096),
}
# Four layers with every kind of attention and MLP of the family, few experts, and a small vocabulary.
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "mlp_layer_types": ["moe"] * LAYERS,
        "n_routed_experts": 8,
    },
    "glm5_next": {
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "indexed_attention"],
        "indexer_types": ["full"] * LAYERS,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "n_routed_experts": 8,
        "pad_token_id": None,
    },
    "hy_v4": {
        "layer_types": ["indexed_attention"] * LAYERS,
        "indexer_types": ["full", "full", "shared", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "n_routed_experts": 8,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "inkling2": {
        "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding"],
        "n_layers_per_attn_res_block": 1,
        "n_routed_experts": 8,
        "eos_token_id": None,
    },
    "qwen4_exp": {
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "indexed_attention"],
        "num_experts": 16,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 16,
    },
}
# Sublayers of a width that the CPU computes in a second.
TINY: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "moe_intermediate_size": 16,
        "num_attention_heads": 4,
        "head_dim": 16,
        "q_lora_rank": 16,
        "num_experts_per_tok": 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "sliding_window": 4,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 2,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 64,
    },
    "glm5_next": {
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 8,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 8,
        "index_kpool": 4,
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "max_position_embeddings": 64,
    },
    "hy_v4": {
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "num_attention_heads": 2,
        "num_experts_per_tok": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "index_topk": 4,
        "index_head_dim": 8,
        "index_n_heads": 2,
        "max_position_embeddings": 64,
    },
    "inkling2": {
        "moe_intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 1,
        "swa_head_dim": 16,
        "num_experts_per_tok": 2,
        "sliding_window_size": 8,
        "rel_extent": 8,
        "unpadded_vocab_size": 64,
        "max_position_embeddings": 64,
    },
    "qwen4_exp": {
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts_per_tok": 2,
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_value_head_dim": 8,
        "linear_num_value_heads": 2,
        "indexer_n_heads": 2,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "max_position_embeddings": 64,
    },
}
VOCABULARY = {True: 64, False: 8192}
# Modules of a layer that are no part of its mixing.
SUBLAYERS = ("self_attn", "linear_attn", "mlp", "post_attention_convolution", "post_mlp_convolution")
# How many things an attention returns; a linear attention, an MLP and a convolution return a tensor alone.
RETURNED = {"deepseek_v4": 2, "glm5_next": 3, "hy_v4": 3, "inkling2": 2, "qwen4_exp": 2}


class PassOn(nn.Module):
    """A sublayer that returns the sum of its inputs, which costs nothing where there is one."""

    def __init__(self, returned: int) -> None:
        super().__init__()
        self.returned = returned

    def forward(self, *args: Tensor, **kwargs: Any) -> Any:
        """Return the sum of the first argument and those named as hidden states."""
        y: Any = sum(
            (x for name, x in kwargs.items() if name.endswith("hidden_states")), start=args[0] if args else 0.0
        )
        return (y, *[None] * (self.returned - 1)) if self.returned else y


def depth_model(
    family: str, dim: int, device: torch.device, *, whole: bool, small: bool, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """Return a text model of four layers with random weights.

    Args:
        family: Folder of the family in transformers.
        dim: Width.
        device: Where the model is made.
        whole: Keep attention, MLP and convolutions. Otherwise they pass on what they receive.
        small: Make sublayers that fit a CPU.
        dtype: Dtype of the weights, except of those that the family keeps in fp32.
    """
    prefix, part = CLASSES[family]
    home = f"transformers.models.{family}"
    configuration = importlib.import_module(f"{home}.configuration_{family}")
    modeling = importlib.import_module(f"{home}.modeling_{family}")
    fields = {"hidden_size": dim, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY[small], **SHAPES[family]}
    fields |= TINY[family] if small or not whole else {}
    if "max_position_embeddings" in fields and not small:
        fields["max_position_embeddings"] = 65536
    config = getattr(configuration, f"{prefix}{part}Config")(**fields)
    torch.manual_seed(0)
    with device:
        model = getattr(modeling, f"{prefix}{part}Model")(config).eval()
    if not whole:
        for layer in model.layers:
            _pass_on(family, layer)
    _move_weights(model)
    kept = [re.compile(rf"(^|\.){re.escape(name)}($|\.)") for name in model._keep_in_fp32_modules_strict or ()]
    for name, p in model.named_parameters():
        if not any(pattern.search(name) for pattern in kept):
            p.data = p.data.to(dtype)
    return model


def twin(model: Any) -> Any:
    """Return a copy of a model that shares its weights."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def mixing_parameters(model: Any) -> list[nn.Parameter]:
    """Return the parameters of a model whose sublayers pass on, without those of its embedding."""
    return [p for layer in model.layers for p in layer.parameters()]


def run_layers(family: str, model: Any, x: Tensor) -> Tensor:
    """Run the layers of a model on x [1, T, D] and return what follows: streams, or the end's state.

    The layers of Inkling 2 get a list that the model keeps, so the model runs as a whole.
    """
    if family == "inkling2":
        out: Tensor = model(inputs_embeds=x, use_cache=False).last_hidden_state
        return out
    n = getattr(model.config, "hc_mult", None) or model.config.hc_count
    state = x.unsqueeze(-2).expand(*x.shape[:-1], n, x.shape[-1])
    more: dict[str, Any] = {}
    if family == "qwen4_exp":
        state, more = state.flatten(-2), {"position_embeddings": None}
    state = state.contiguous()
    for layer in model.layers:
        out = layer(state, **more)
        state = out[0] if isinstance(out, tuple) else out
    return state


def _pass_on(family: str, layer: Any) -> None:
    for name in SUBLAYERS:
        if isinstance(getattr(layer, name, None), nn.Module):
            linear = getattr(layer, "block_type", None) == "linear_attention"
            returned = RETURNED[family] if name == "self_attn" and not linear else 0
            setattr(layer, name, PassOn(returned))


def _move_weights(model: Any) -> None:
    """Move weights that begin as zeros or ones: equal coefficients could hide what a kernel costs, or a mistake."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim < 2 or not bool(p.any()):
                p += 0.1 * torch.randn_like(p)
