"""Loss and gradient of a row of logits, each in one pass over the row, in the logits' dtype.

ℓ = log Σ_v exp(x_v) − x_t        dx_v = (exp(x_v − log Σ exp(x)) − [v = t]) dℓ

PyTorch's operators write the logits three times in fp32 (widened, their logarithm, its gradient). These are the largest tensors
of a training step. A target outside the columns gives NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.launch import launch
from depthmix.ops.gpu.sizes import cdiv, next_power_of_2

# Columns that a program processes at a time.
BLOCK = 4096


@triton.jit(do_not_specialize=["units"])
def _forward_kernel(logits, targets, losses, sums, units: tl.int32, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    # A multiple of 16 bytes where D allows it.
    row, V = tl.program_id(0).to(tl.int64), units * UNIT
    logits += row * V
    column = tl.arange(0, BLOCK)
    # One maximum per lane: lanes are reduced once, at the end.
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, units, BLOCK // UNIT):
        at = first * UNIT + column
        x = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x, propagate_nan=tl.PropagateNan.ALL)
        # Differences of -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.exp(x - base)
        top = higher
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    # Kept apart from the highest logit, which may be large.
    log_sum = tl.log(tl.sum(total * tl.exp(top - base), 0))
    target = tl.load(targets + row)
    inside = (target >= 0) & (target < V)
    target_logit = tl.load(logits + target, mask=inside, other=float("nan")).to(tl.float32)
    tl.store(losses + row, log_sum - (target_logit - base))
    tl.store(sums + 2 * row, base)
    tl.store(sums + 2 * row + 1, log_sum)


@triton.jit(do_not_specialize=["units"])
def _backward_kernel(
    logits, targets, sums, dlosses, dlogits, units: tl.int32, UNIT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, V = tl.program_id(0).to(tl.int64), units * UNIT
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < V
    x = tl.load(logits + row * V + column, mask=ok, other=0.0).to(tl.float32)
    share = tl.exp((x - tl.load(sums + 2 * row)) - tl.load(sums + 2 * row + 1))
    d = (share - tl.where(column == tl.load(targets + row), 1.0, 0.0)) * tl.load(dlosses + row)
    tl.store(dlogits + row * V + column, d.to(dlogits.dtype.element_ty), mask=ok)


def forward(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the losses of logits [N, V] at targets [N].

    Returns:
        Losses [N]; and for each row its largest logit and the logarithm of Σ exp(x − largest), [N, 2]. Both fp32.
    """
    n, vocab = logits.shape
    losses, sums = (logits.new_empty(*shape, dtype=torch.float32) for shape in ((n,), (n, 2)))
    if n:
        launch(_forward_kernel, (n,), logits, logits, targets, losses, sums, **_sizes(vocab))
    return losses, sums


def backward(logits: Tensor, targets: Tensor, sums: Tensor, dlosses: Tensor) -> Tensor:
    """Return the gradient of the logits, rounded once to their dtype."""
    n, vocab = logits.shape
    dlogits = torch.empty_like(logits)
    if n:
        sizes = _sizes(vocab)
        grid = n, cdiv(vocab, sizes["BLOCK"])
        launch(_backward_kernel, grid, logits, logits, targets, sums, dlosses, dlogits, **sizes)
    return dlogits


def _sizes(vocab: int) -> dict[str, int]:
    block = min(BLOCK, max(128, next_power_of_2(vocab)))
    unit = 8 if vocab % 8 == 0 else 1
    return {"units": vocab // unit, "UNIT": unit, "BLOCK": block, "num_warps": max(1, block // 512)}
