"""Classes for retrofitted models, so that `AutoModelForCausalLM.from_pretrained` loads their folders like any others.

The model type of a retrofitted llama is depthmix_llama: a llama whose configuration names a mixer and whose constructor installs
it. `register` registers the configurations with the Auto classes. A model class is created and registered with its first
configuration, since importing the code of all architectures takes long.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from depthmix.hf.architectures import ARCHITECTURES, LLAMA, PREFIX, Architecture
from depthmix.hf.carried import CarriesCode
from depthmix.hf.depth_weights import GeneratesDepthWeights, forward_with_weights
from depthmix.hf.layer_count import explained
from depthmix.hf.surgery import MIXER, install

AUTO = (
    (AutoModel, MODEL_MAPPING),
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
    (AutoModelForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING),
    (AutoModelForQuestionAnswering, MODEL_FOR_QUESTION_ANSWERING_MAPPING),
)


@functools.cache
def config_class(plain: Any) -> type[Any]:
    """Make the configuration class of a retrofitted model from that of the plain model."""

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        register_models(plain)
        return object.__new__(cls)

    def classes(self: Any) -> tuple[dict[str, str], str]:
        models = {auto.__name__: model_class(mapping[plain]).__name__ for auto, mapping in AUTO if plain in mapping}
        return {"AutoConfig": config_class(plain).__name__, **models}, __name__

    body = {"model_type": PREFIX + plain.model_type, "__module__": __name__, "__new__": __new__, "classes": classes}
    return type(_name(plain), (CarriesCode, plain), body)


@functools.cache
def model_class(plain: Any) -> type[Any]:
    """Make a model class that installs the mixer of its configuration, from the class of the plain model."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, config, *args, **kwargs)
        recorded = getattr(config, "depthmix", None)
        if not isinstance(recorded, dict) or recorded.keys() != {"mixer", "options"}:
            expected = "expected the mixer's name and its options"
            raise ValueError(f"the configuration of a {config.model_type} has {recorded!r} as depthmix: {expected}")
        if self.base_model is self or not hasattr(self.base_model, MIXER):
            install(self, recorded["mixer"], recorded["options"])

    def from_pretrained(cls: Any, folder: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        with explained(folder, kwargs):
            model, loading = plain.from_pretrained.__func__(cls, folder, *args, output_loading_info=True, **kwargs)
        _reset_missing(model, loading["missing_keys"])
        return (model, loading) if output_loading_info else model

    kept = list(getattr(plain, "_keep_in_fp32_modules_strict", None) or [])
    body = {"__init__": __init__, "config_class": config_class(plain.config_class), "__module__": __name__}
    # For some classes and model types, such as those with experts, the names of weights differ between folder and model.
    model_type = plain.config_class.model_type
    for known, ours in ((plain.__name__, _name(plain)), (model_type, PREFIX + model_type)):
        renamed = get_checkpoint_conversion_mapping(known)
        if renamed is not None:
            register_checkpoint_conversion_mapping(ours, renamed, overwrite=True)
    more = {"from_pretrained": classmethod(from_pretrained), "_keep_in_fp32_modules_strict": [*kept, MIXER]}
    generates = (GeneratesDepthWeights,) if issubclass(plain, GenerationMixin) else ()
    return type(_name(plain), (*generates, plain), {**body, **more, "forward": forward_with_weights(plain)})


@torch.no_grad()
def _reset_missing(model: Any, names: Iterable[str]) -> None:
    """Initialise the mixer's tensors that a folder lacks. transformers initialises modules of the plain model only."""
    mixer = getattr(model.base_model, MIXER)
    missing = {name.rpartition(f"{MIXER}.")[2] for name in names if f"{MIXER}." in name}
    if not missing:
        return
    tensors = {**dict(mixer.named_parameters()), **dict(mixer.named_buffers())}
    loaded = {name: tensor.clone() for name, tensor in tensors.items() if name not in missing}
    mixer.reset_parameters()
    for name, value in loaded.items():
        tensors[name].copy_(value)


def register() -> None:
    """Register the configurations of all retrofitted architectures with the Auto classes."""
    for kind in ARCHITECTURES:
        _register_config(kind)


def _register_config(kind: str) -> None:
    if kind in CONFIG_MAPPING:
        config = config_class(CONFIG_MAPPING[kind])
        AutoConfig.register(config.model_type, config, exist_ok=True)


def register_architecture(model_type: str, structure: Architecture = LLAMA) -> None:
    """Say how the layers of a model type are made, so that `retrofit` and `from_pretrained` know it in this process.

    Args:
        model_type: `model_type` of the model's configuration.
        structure: Names of the modules of a layer; by default those of Llama.

    Examples:
        >>> depthmix.hf.register_architecture("minimax_m2")
    """
    ARCHITECTURES[model_type] = structure
    _register_config(model_type)


@functools.cache
def register_models(plain: Any) -> None:
    """Register the models of a retrofitted architecture, given the configuration class of the plain model."""
    for auto, mapping in AUTO:
        if plain in mapping:
            auto.register(config_class(plain), model_class(mapping[plain]), exist_ok=True)
    if plain in MODEL_FOR_CAUSAL_LM_MAPPING:
        known_to_trainer(config_class(plain).model_type, model_class(MODEL_FOR_CAUSAL_LM_MAPPING[plain]))


def known_to_trainer(model_type: str, model: type[Any]) -> None:
    """Register a class as a causal language model. With label smoothing, Trainer shifts labels only for classes
    registered by name.
    """
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] = model.__name__


def _name(plain: Any) -> str:
    return f"Depthmix{plain.__name__}"


def __getattr__(name: str) -> type[Any]:
    """Return the class of that name. Modeling files in folders, and pickle, look for it here."""
    plain: Any = getattr(transformers, name.removeprefix("Depthmix"), None) if name.startswith("Depthmix") else None
    is_config, is_model = (
        isinstance(plain, type) and issubclass(plain, x) for x in (PreTrainedConfig, PreTrainedModel)
    )
    config = plain if is_config else plain.config_class if is_model else None
    if config is None or config.model_type not in ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return config_class(plain) if is_config else model_class(plain)
