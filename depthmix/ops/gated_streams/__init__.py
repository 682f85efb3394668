"""Gated residual streams: a write with the norms that follow it, a mean with a gate for each channel, and a read that is all of it."""

from depthmix.ops.gated_streams.op import gated_mean, write_norm
from depthmix.ops.gated_streams.read import can_read, few_write, gated_read
from depthmix.ops.gated_streams.reference import Inputs

__all__ = ["Inputs", "can_read", "few_write", "gated_mean", "gated_read", "write_norm"]
