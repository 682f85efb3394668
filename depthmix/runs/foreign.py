"""Load Hugging Face models from folders. Nothing is downloaded and nothing unpickled."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch

from depthmix.errors import CHECKPOINT, UserError
from depthmix.mixers.options import OptionError
from depthmix.mixers.published import MODEL_TYPES, meta_mixer, source_of
from depthmix.models import Decoder
from depthmix.models.exchange import MODEL_TYPE
from depthmix.models.with_mixer import with_mixer
from depthmix.names import install_command
from depthmix.runs.pretrained import CONFIG


def need_transformers(what: str) -> None:
    """Raise UserError if transformers is not installed."""
    try:
        import depthmix.hf  # noqa: F401  (registers the model types)
    except ImportError:
        raise UserError(f"{what} needs transformers: {install_command('hf')}") from None


def retrofitted(model: Any, mixer: str, options: dict[str, Any]) -> Any:
    """Put a mixer into a loaded model."""
    from depthmix.hf import retrofit

    return retrofit(model, mixer, **options)


def load(folder: Path, what: str, **options: Any) -> Any:
    """Load a language model that `save_pretrained` wrote. `what` names the option in error messages."""
    need_transformers(what)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    # A model that also reads images has no class of its own for text.
    kind = type(_config(folder, what))
    auto: Any = AutoModelForCausalLM if kind in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # commands show their own
    try:
        model, loading = auto.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
            **options,
        )
    # transformers, safetensors and the hub's validation each raise their own types.
    except Exception as error:
        raise UserError(f"{what}: the model in {folder} cannot be loaded: {_first(error)}", CHECKPOINT) from None
    finally:
        if bars:
            logging.enable_progress_bar()
    for name, *shapes in sorted(loading["mismatched_keys"]):
        sizes = " and not ".join(str(list(shape)) for shape in shapes)
        raise UserError(f"{what}: {folder} does not fit together: {name} has the shape {sizes}", CHECKPOINT)
    for name in sorted(loading["missing_keys"]):
        raise UserError(f"{what}: {folder} does not fit together: {name} is not in its weights", CHECKPOINT)
    return model


class Description(NamedTuple):
    """Fields of a config.json that depthmix reads."""

    shape: dict[str, int]  # dim, n_blocks, n_heads
    vocab_size: int
    seq_len: int | None  # the longest sequence that the model accepts
    mixer: dict[str, Any] | None  # name and options of a retrofitted model's mixer
    sites: dict[str, Any]  # arguments of `create_mixer` that describe the sites


def describe(folder: Path, what: str, mixing: bool = False) -> Description:
    """Describe the model in a folder without loading its weights.

    Args:
        folder: The folder.
        what: The option, for error messages.
        mixing: Whether a model that mixes over depth with modules of its own will do.
    """
    config = _config(folder, what)
    from depthmix.hf.architectures import ARCHITECTURES, architecture, plain_type

    if mixing and config.model_type in MODEL_TYPES:
        return _describe_mixing(config, folder, what)
    if plain_type(config) not in ARCHITECTURES:
        known = ", ".join([MODEL_TYPE, *sorted(ARCHITECTURES), *(MODEL_TYPES if mixing else ())])
        raise UserError(f"{what} {folder} holds a model of type {config.model_type!r}; known are {known}", CHECKPOINT)
    recorded = getattr(config, "depthmix", None)
    right = (
        isinstance(recorded, dict)
        and isinstance(recorded.get("mixer"), str)
        and isinstance(recorded.get("options"), dict)
    )
    if recorded is not None and not right:
        raise UserError(f"{folder / CONFIG} is damaged: depthmix is {recorded!r}", CHECKPOINT)
    n_blocks = config.num_hidden_layers
    shape = {"dim": config.hidden_size, "n_blocks": n_blocks, "n_heads": config.num_attention_heads}
    longest, sites = getattr(config, "max_position_embeddings", None), architecture(config).layout(n_blocks)
    return Description(shape, config.vocab_size, longest, recorded, sites)


def _describe_mixing(config: Any, folder: Path, what: str) -> Description:
    """Describe a model that mixes over depth with modules of its own."""
    fields, text = config.to_dict(), config.get_text_config()
    layers = text.num_hidden_layers
    try:
        mixer = meta_mixer(source_of(fields), fields, range(layers))
    except OptionError as error:
        raise UserError(f"{what} {folder}: {error}", CHECKPOINT) from None
    shape = {"dim": text.hidden_size, "n_blocks": layers, "n_heads": text.num_attention_heads}
    given = {name: value for name, value in mixer.chosen.items() if value != mixer.options[name].default}
    rule = {"mixer": mixer.name, "options": given}
    return Description(shape, text.vocab_size, text.max_position_embeddings, rule, {})


def measured(model: Any, what: str) -> Any:
    """Return a loaded model in the form that `depthmix inspect` measures, with its mixer as `model.mixer`.

    Raises:
        UserError: The model has no mixer and does not mix over depth.
    """
    if isinstance(model, Decoder):
        return model
    from depthmix.hf.adapter import Adapter
    from depthmix.hf.viewed import ViewedAdapter

    if isinstance(model, Adapter):
        view = with_mixer(model.model)
        if view is not model.model:
            return ViewedAdapter(view)
        if model.has_mixer:
            return model
    raise UserError(f"{what} holds a model without a rule for mixing over depth: retrofit it first", CHECKPOINT)


def accelerate(model: Any) -> None:
    """Run the mixing of a loaded model on this package's operators. Says on stderr what it does, as stdout has results."""
    from depthmix.hf import accelerate

    with redirect_stdout(sys.stderr):
        accelerate(model)


def from_description(folder: Path) -> Any:
    """Build the model that a run folder's config.json describes, with a Decoder's interface. The caller loads its
    weights.
    """
    config = _config(folder, "run")
    from transformers import AutoModelForCausalLM

    from depthmix.hf.adapter import Adapter

    return Adapter(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def load_adapted(folder: Path, what: str) -> Any:
    """Load a model that `save_pretrained` wrote, in fp32, with a Decoder's interface."""
    model = load(folder, what, dtype=torch.float32)
    from depthmix.hf.adapter import Adapter

    return Adapter(model)


def _config(folder: Path, what: str) -> Any:
    need_transformers(what)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    # The hub's validation raises a type of its own.
    except Exception as error:
        raise UserError(f"{what}: the model in {folder} cannot be loaded: {_first(error)}", CHECKPOINT) from None


def _first(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
