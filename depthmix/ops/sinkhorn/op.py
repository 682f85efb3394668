"""sinkhorn: checks and (when kernels come) the choice between them and the reference."""

from torch import Tensor

from depthmix.ops.precision import without_autocast
from depthmix.ops.sinkhorn.reference import sinkhorn_reference


def sinkhorn(logits: Tensor, iterations: int = 20, convention: str = "paper") -> Tensor:
    """An (almost) doubly stochastic matrix from logits [..., n, n], in their layout (conventions in reference.py)."""
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2] or not logits.is_floating_point():
        raise ValueError(
            f"sinkhorn: expected floating-point logits [..., n, n], got {list(logits.shape)} of {logits.dtype}"
        )
    if iterations < 1:
        raise ValueError(f"sinkhorn: expected at least one iteration, got {iterations}")
    if convention not in ("paper", "deepseek"):
        raise ValueError(f"sinkhorn: convention must be 'paper' or 'deepseek', got {convention!r}")
    with without_autocast(logits):
        return sinkhorn_reference(logits, iterations, convention)
