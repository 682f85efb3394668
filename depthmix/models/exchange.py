"""The names under which Hugging Face knows what a decoder is made of: its configuration's fields and its weights.

Nothing here imports transformers: `depthmix generate` reads such a folder without it, and `depthmix train` writes one.
"""

from __future__ import annotations

MODEL_TYPE, ARCHITECTURE = "depthmix", "DepthmixForCausalLM"
BASE, HEAD = "model.", "lm_head."  # how the weights' names begin in a model with a head: the backbone's, the head's

# Fields of a config.json, by the field of DecoderConfig they hold.
FIELDS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_blocks": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp": "mlp",
    "mlp_dim": "intermediate_size",
    "qk_norm": "qk_norm",
    "tie_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "mixer": "mixer",
    "mixer_options": "mixer_options",
}
