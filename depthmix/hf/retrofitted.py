"""Classes for retrofitted models, so that their folders are ordinary ones: `AutoModelForCausalLM.from_pretrained` finds the way back.

The model type of a retrofitted llama is depthmix_llama: a llama whose configuration says which mixer it has, and whose
constructor puts it in. `register` makes them known to the Auto classes.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
)

from depthmix.hf.architectures import ARCHITECTURES, PREFIX
from depthmix.hf.surgery import MIXER, install


@functools.cache
def config_class(plain: type[Any]) -> type[Any]:
    """The configuration of a retrofitted model, from that of the plain one."""
    return type(
        f"Depthmix{plain.__name__}", (plain,), {"model_type": PREFIX + plain.model_type, "__module__": __name__}
    )


@functools.cache
def model_class(plain: type[Any]) -> type[Any]:
    """A model that puts the mixer of its configuration in, from the class of the plain one."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, config, *args, **kwargs)
        if self.base_model is self or not hasattr(self.base_model, MIXER):
            install(self, config.depthmix["mixer"], config.depthmix["options"])

    kept = list(getattr(plain, "_keep_in_fp32_modules_strict", None) or [])
    body = {"__init__": __init__, "config_class": config_class(plain.config_class), "__module__": __name__}
    return type(f"Depthmix{plain.__name__}", (plain,), {**body, "_keep_in_fp32_modules_strict": [*kept, MIXER]})


def register() -> None:
    """Make every retrofitted architecture known to the Auto classes."""
    for kind in ARCHITECTURES:
        if kind in CONFIG_MAPPING:
            plain: Any = CONFIG_MAPPING[kind]
            config = config_class(plain)
            AutoConfig.register(config.model_type, config, exist_ok=True)
            for auto, mapping in ((AutoModel, MODEL_MAPPING), (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING)):
                auto.register(config, model_class(mapping[plain]), exist_ok=True)
