"""Cross entropy of every token from its logits."""

from depthmix.ops.token_loss.op import token_loss

__all__ = ["token_loss"]
