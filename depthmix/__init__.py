"""depthmix: mixing over depth in Transformers."""

from depthmix import ops
from depthmix.insight import depth_mixing
from depthmix.mixers import ContractError, Mixer, OptionError, create_mixer, list_mixers, param_groups, shard_mixer
from depthmix.models import Decoder, DecoderConfig

__version__ = "0.1.0"
__all__ = [
    "ContractError",
    "Decoder",
    "DecoderConfig",
    "Mixer",
    "OptionError",
    "create_mixer",
    "depth_mixing",
    "list_mixers",
    "ops",
    "param_groups",
    "shard_mixer",
]
