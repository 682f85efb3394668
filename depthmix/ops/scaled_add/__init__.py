"""An output joins a stream channel by channel, each with a weight of its own."""

from depthmix.ops.scaled_add.op import scaled_add, scaled_add_norm

__all__ = ["scaled_add", "scaled_add_norm"]
