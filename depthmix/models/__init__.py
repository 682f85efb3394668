"""Models in which no mechanism is named."""

from depthmix.models.decoder import Decoder, DecoderConfig

__all__ = ["Decoder", "DecoderConfig"]
