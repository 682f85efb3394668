"""Refuse unknown fields of a configuration. transformers would keep any name as an attribute, even a misspelt one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from depthmix.mixers import list_mixers, mixer_class
from depthmix.models.exchange import FIELDS
from depthmix.names import DEFAULT_MIXER

# Names that transformers uses in configurations besides the declared fields.
OF_TRANSFORMERS = {
    "model_type",
    "auto_map",
    "num_labels",
    "name_or_path",
    "torch_dtype",
    "attn_implementation",
    "experts_implementation",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
    "distributed_config",
    # Fields of older versions of transformers, which tools still set.
    "add_cross_attention",
    "decoder_start_token_id",
    "finetuning_task",
    "is_decoder",
    "prefix",
    "pruned_heads",
    "sep_token_id",
    "task_specific_params",
    "tie_encoder_decoder",
    "tokenizer_class",
    "torchscript",
    "use_bfloat16",
}
OURS = {
    *FIELDS.values(),
    "max_position_embeddings",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "output_depth_weights",
    "retrofitted_from",
}
# Similarity to a field's name above which an unknown field in a file counts as misspelt and not as another tool's.
MISSPELT = 0.9


def _known(name: str) -> bool:
    declared = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    generation = GenerationConfig._get_default_generation_params()
    known = OURS | OF_TRANSFORMERS | declared | set(generation)
    return name in known or name.startswith("_") or hasattr(PreTrainedConfig, name)


def refuse_unknown(given: Mapping[str, Any]) -> None:
    """Refuse fields that a configuration does not have.

    Args:
        given: Fields that the constructor does not name.

    Raises:
        ValueError: A field is unknown. The message suggests the right spelling, if there is one.
    """
    for name, value in given.items():
        if not _known(name):
            raise ValueError(f"DepthmixConfig has no field {name!r}{_advice(name, value, list_mixers())}")


def foreign_fields(given: Mapping[str, Any]) -> set[str]:
    """Return the names of fields in a file that belong to other tools. They have no effect and are kept.

    Raises:
        ValueError: A field is an option of the mixer, or its name is almost that of a known field.
    """
    mixer = given.get("mixer", DEFAULT_MIXER)
    foreign = {name for name in given if not _known(name)}
    for name in foreign:
        advice = _advice(name, given[name], [mixer] if mixer in list_mixers() else [], MISSPELT)
        if advice:
            raise ValueError(f"DepthmixConfig has no field {name!r}{advice}")
    return foreign


def _advice(name: str, value: Any, rules: Iterable[str], cutoff: float = 0.7) -> str:
    """Return the end of the error message: where the value belongs or the right spelling; "" if neither is known."""
    options = {option for rule in rules for option in mixer_class(rule).options}
    if name in options:
        return f": it is an option of a mixer, to be given as mixer_options={{{name!r}: {value!r}}}"
    if name in FIELDS:
        return f"; here it is called {FIELDS[name]!r}"
    close = difflib.get_close_matches(name, [*OURS, *options], n=1, cutoff=cutoff)
    where = ", an option, in mixer_options" if close and close[0] in options else ""
    return f"; did you mean {close[0]!r}{where}?" if close else ""
