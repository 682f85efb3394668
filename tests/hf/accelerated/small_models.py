"""Small models of the families that mix over depth, with random weights: real modules of transformers at width 32."""

from typing import Any

import torch

VOCAB, DIM, LENGTH = 61, 32, 9


def deepseek_v4(**fields: Any) -> Any:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    shape = {
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 16,
        "q_lora_rank": 16,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "sliding_window": 4,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 2,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": None,
    }
    return DeepseekV4ForCausalLM(DeepseekV4Config(**{**shape, **fields}))


def glm5_next(**fields: Any) -> Any:
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    text = {
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 8,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 8,
        "index_kpool": 4,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "indexer_types": ["full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": None,
    }
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": DIM}
    vision |= {"image_size": 28, "patch_size": 14, "projection_intermediate_size": 16}
    tokens = {f"{kind}_{part}token_id": 50 for kind in ("image", "video") for part in ("", "start_", "end_")}
    config = Glm5NextConfig(text_config={**text, **fields}, vision_config=vision, **tokens)
    return Glm5NextForConditionalGeneration(config)


def hy_v4(**fields: Any) -> Any:
    from transformers import HYV4Config, HYV4ForCausalLM

    shape = {
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "index_topk": 4,
        "index_head_dim": 8,
        "index_n_heads": 2,
        "indexer_types": ["full", "full", "shared"],
        "hc_magnitude": 1.5,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return HYV4ForCausalLM(HYV4Config(**{**shape, **fields}))


def inkling2(**fields: Any) -> Any:
    """Blocks of two layers. The second layer reads three mixtures, inside a block; the third reads one and opens a block."""
    from transformers import Inkling2ForCausalLM
    from transformers.models.inkling2.configuration_inkling2 import Inkling2TextConfig

    shape = {
        "vocab_size": VOCAB,
        "unpadded_vocab_size": VOCAB,
        "hidden_size": DIM,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 4,
        "d_rel": 4,
        "rel_extent": 8,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "n_layers_per_attn_res_block": 2,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "eos_token_id": None,
    }
    return Inkling2ForCausalLM(Inkling2TextConfig(**{**shape, **fields}))


def qwen4_exp(**fields: Any) -> Any:
    """The second layer adds embeddings of n-grams to the streams."""
    from transformers import Qwen4ExpForCausalLM
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    shape = {
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
        "ple_layer_ids": [2],
        "ple_embed_dim": 16,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
        "hc_lowrank": 6,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": VOCAB - 1,
    }
    return Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**{**shape, **fields}))


BUILD = {build.__name__: build for build in (deepseek_v4, glm5_next, hy_v4, inkling2, qwen4_exp)}


def small_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any) -> Any:
    """Return a model in eval mode whose mixing is far from its initial state: every weight of it matters."""
    torch.manual_seed(seed)
    model = BUILD[family](**fields).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("_input.query"):
                p += 2.0 * torch.randn_like(p)
            elif "hyper_connection" in name and p.ndim > 1:
                p.mul_(25.0)
            elif "_hc." in name or "hc_head" in name:
                p += (0.1 if p.ndim > 1 else 0.5) * torch.randn_like(p)
            elif "norm" in name:
                p += 0.2 * torch.randn_like(p)
            elif p.ndim > 1 and "vision" not in name:
                p.mul_(5.0)
    # Their grouped products know no fp64.
    model.set_experts_implementation("eager")
    model.to(dtype)
    for name, p in model.named_parameters():
        if any(part in name for part in model._keep_in_fp32_modules_strict or ()):
            p.data = p.data.float()
    return model


def tokens(batch: int = 2, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(49, (batch, length), generator=torch.Generator().manual_seed(seed))


def layers_of(model: Any) -> Any:
    base = model.model
    return (base.language_model if hasattr(base, "language_model") else base).layers


class Times(torch.nn.Module):
    """A sublayer without an error of its own: x times ±2, each channel from one of the inputs."""

    def __init__(self, outputs: int, seed: int, dim: int = DIM) -> None:
        super().__init__()
        self.outputs = outputs
        factors = 2.0 * torch.randn(dim, generator=torch.Generator().manual_seed(seed)).sign()
        self.register_buffer("factors", factors, persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dim = len(self.factors)
        inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.shape[-1] == dim]
        channel, factors = torch.arange(dim, device=inputs[0].device), self.factors.to(inputs[0].dtype)
        y = sum(x * factors * (channel % len(inputs) == k) for k, x in enumerate(inputs))
        return (y, *[None] * (self.outputs - 1)) if self.outputs else y


# Layers whose mixing is compared, with the number of things that their attention returns; 0: a tensor alone.
LAYERS = [
    ("deepseek_v4", 0, 2),
    ("glm5_next", 0, 0),
    ("hy_v4", 0, 3),
    ("inkling2", 1, 2),
    ("inkling2", 2, 2),
    ("qwen4_exp", 2, 2),
]
SUBLAYERS = ("mlp", "post_attention_convolution", "post_mlp_convolution")


def mixing_alone(family: str, dtype: torch.dtype, index: int = 0, dim: int = DIM, **fields: Any) -> Any:
    """Return a model with a layer that has sublayers without rounding errors."""
    model = small_model(family, dtype, hidden_size=dim, **fields)
    layer, outputs = layers_of(model)[index], {(f, i): n for f, i, n in LAYERS}[family, index]
    layer.self_attn = Times(outputs, 5, dim)
    for k, name in enumerate(SUBLAYERS):
        if hasattr(layer, name):
            setattr(layer, name, Times(0, 6 + k, dim))
    return model


def layer_inputs(family: str, batch: int, length: int, dtype: torch.dtype, dim: int = DIM) -> list[Any]:
    """Return random activations as a layer receives them. None stands for an argument that is None."""
    generator = torch.Generator().manual_seed(1)
    shapes: Any = {"inkling2": ((dim,), (3, dim)), "qwen4_exp": ((4 * dim,), None)}.get(family, ((4, dim),))
    return [
        None if shape is None else torch.randn(batch, length, *shape, generator=generator).to(dtype) for shape in shapes
    ]
