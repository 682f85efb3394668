"""Hugging Face's names for the parts of a decoder: configuration fields, weights, classes.

Nothing here imports transformers: `depthmix train` writes and `depthmix generate` reads such folders without it.
"""

from __future__ import annotations

from collections.abc import Mapping

from depthmix.names import install_command

MODEL_TYPE, ARCHITECTURE = "depthmix", "DepthmixForCausalLM"
BASE, HEAD = "model.", "lm_head."  # prefixes of the weights' names in a model with a head

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
    "qk_gain": "qk_gain",
    "tie_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "embedding_std": "initializer_range",
    "embedding_norm": "embedding_norm",
    "output_scale": "output_scale",
    "plain_eps": "plain_eps",
    "value_residual": "value_residual",
    "value_embeddings": "value_embeddings",
    "mixer": "mixer",
    "mixer_options": "mixer_options",
}

# A saved folder holds two lines of code. With `trust_remote_code=True`, tools that do not know depthmix (evaluation harnesses,
# servers) import the classes from the package.
CODE = "modeling_depthmix.py"
CLASSES = {
    "AutoConfig": "DepthmixConfig",
    "AutoModel": "DepthmixModel",
    "AutoModelForCausalLM": ARCHITECTURE,
    "AutoModelForSequenceClassification": "DepthmixForSequenceClassification",
}


def auto_map(classes: Mapping[str, str] = CLASSES) -> dict[str, str]:
    """Return the `auto_map` entry of a config.json: the class in the folder's code for each Auto class."""
    return {auto: f"{CODE.removesuffix('.py')}.{name}" for auto, name in classes.items()}


def code(classes: Mapping[str, str] = CLASSES, module: str = "depthmix.hf") -> str:
    """Return the source of the modeling file that a model folder carries."""
    names = ", ".join(sorted(set(classes.values())))
    where = f"# The model is in the package depthmix: {install_command('hf')}."
    return f"{where}\nfrom {module} import {names}  # noqa: F401\n"
