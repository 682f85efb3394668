"""Hugging Face: the decoder as a PreTrainedModel, other decoders with a mixer put in, and models that
mix over depth themselves, made faster.

Importing this package registers the model type `depthmix` and those of retrofitted models with the Auto classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from depthmix.hf.accelerated.accelerate import accelerate
from depthmix.hf.architectures import LLAMA, Architecture, Site
from depthmix.hf.configuration import DepthmixConfig
from depthmix.hf.decay import PaperDecay
from depthmix.hf.modeling import DepthmixForCausalLM, DepthmixForSequenceClassification, DepthmixModel
from depthmix.hf.published import published_mixer
from depthmix.hf.retrofitted import known_to_trainer, register, register_architecture
from depthmix.hf.surgery import mixer_of, restore, retrofit

AutoConfig.register(DepthmixConfig.model_type, DepthmixConfig, exist_ok=True)
AutoModel.register(DepthmixConfig, DepthmixModel, exist_ok=True)
AutoModelForCausalLM.register(DepthmixConfig, DepthmixForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(DepthmixConfig, DepthmixForSequenceClassification, exist_ok=True)
known_to_trainer(DepthmixConfig.model_type, DepthmixForCausalLM)
register()

__all__ = [
    "LLAMA",
    "Architecture",
    "DepthmixConfig",
    "DepthmixForCausalLM",
    "DepthmixForSequenceClassification",
    "DepthmixModel",
    "PaperDecay",
    "Site",
    "accelerate",
    "mixer_of",
    "published_mixer",
    "register_architecture",
    "restore",
    "retrofit",
]
