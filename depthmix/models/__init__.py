"""Models in which no mechanism is named."""

from depthmix.models.decoder import Decoder, DecoderConfig
from depthmix.models.vit import Vit, VitConfig

__all__ = ["Decoder", "DecoderConfig", "Vit", "VitConfig"]
