"""Classes for retrofitted models, so that their folders are ordinary ones: `AutoModelForCausalLM.from_pretrained` finds the way back.

The model type of a retrofitted llama is depthmix_llama: a llama whose configuration says which mixer it has, and whose
constructor puts it in. `register` makes the configurations known to the Auto classes; a model's class is made and known when
its first configuration is, since the code of all architectures takes long to import.
"""

from __future__ import annotations

import functools
from typing import Any

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
    PreTrainedConfig,
    PreTrainedModel,
)

from depthmix.hf.architectures import ARCHITECTURES, PREFIX
from depthmix.hf.carried import CarriesCode
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
    """The configuration of a retrofitted model, from that of the plain one."""

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
    """A model that puts the mixer of its configuration in, from the class of the plain one."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, config, *args, **kwargs)
        said = getattr(config, "depthmix", None)
        if not isinstance(said, dict) or said.keys() != {"mixer", "options"}:
            expected = "expected the mixer's name and its options"
            raise ValueError(f"the configuration of a {config.model_type} has {said!r} as depthmix: {expected}")
        if self.base_model is self or not hasattr(self.base_model, MIXER):
            install(self, said["mixer"], said["options"])

    kept = list(getattr(plain, "_keep_in_fp32_modules_strict", None) or [])
    body = {"__init__": __init__, "config_class": config_class(plain.config_class), "__module__": __name__}
    return type(_name(plain), (plain,), {**body, "_keep_in_fp32_modules_strict": [*kept, MIXER]})


def register() -> None:
    """Make the configuration of every retrofitted architecture known to the Auto classes."""
    for kind in ARCHITECTURES:
        if kind in CONFIG_MAPPING:
            config = config_class(CONFIG_MAPPING[kind])
            AutoConfig.register(config.model_type, config, exist_ok=True)


@functools.cache
def register_models(plain: Any) -> None:
    """Make the models of a retrofitted architecture known, by the configuration of the plain one."""
    for auto, mapping in AUTO:
        if plain in mapping:
            auto.register(config_class(plain), model_class(mapping[plain]), exist_ok=True)


def _name(plain: Any) -> str:
    return f"Depthmix{plain.__name__}"


def __getattr__(name: str) -> type[Any]:
    """The class of that name, for a folder's code and for pickle, which look for it here."""
    plain: Any = getattr(transformers, name.removeprefix("Depthmix"), None) if name.startswith("Depthmix") else None
    is_config, is_model = (
        isinstance(plain, type) and issubclass(plain, x) for x in (PreTrainedConfig, PreTrainedModel)
    )
    config = plain if is_config else plain.config_class if is_model else None
    if config is None or config.model_type not in ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return config_class(plain) if is_config else model_class(plain)
