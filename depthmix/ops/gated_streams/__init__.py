"""Gated residual streams: a write with the norms that follow it, and a mean with a gate for each channel."""

from depthmix.ops.gated_streams.op import gated_mean, write_norm

__all__ = ["gated_mean", "write_norm"]
