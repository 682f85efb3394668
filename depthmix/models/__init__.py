"""Decoder and vision transformer. No file here names a rule for mixing over depth."""

from depthmix.models.decoder import Decoder, DecoderConfig
from depthmix.models.vit import Vit, VitConfig

__all__ = ["Decoder", "DecoderConfig", "Vit", "VitConfig"]
