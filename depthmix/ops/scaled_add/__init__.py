"""x + gamma ⊙ y: add an output to a stream with one weight per channel."""

from depthmix.ops.scaled_add.op import scaled_add, scaled_add_norm

__all__ = ["scaled_add", "scaled_add_norm"]
