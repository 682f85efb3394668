"""The loss of tokens on a GPU, at the sizes of vocabularies, against fp64."""

import pytest
import torch

from depthmix.ops.token_loss import token_loss
from gpu.exact import BF16, FP16, FP32, GRADIENT, OUTPUT, draw, error


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("n", "vocab"), [(1000, 16384), (300, 50257), (64, 128256), (5, 3), (70000, 128)])
def test_losses_and_gradients(n: int, vocab: int, dtype: torch.dtype) -> None:
    logits = (3 * draw(n, vocab, seed=1)).to(dtype).requires_grad_()
    targets = torch.arange(n, device="cuda") * 7919 % vocab
    dlosses = draw(n, seed=2)
    exact = logits.detach().double().requires_grad_()
    expected = torch.logsumexp(exact, 1) - exact.gather(1, targets[:, None])[:, 0]
    losses = token_loss(logits, targets, backend="triton")
    assert losses.dtype == torch.float32
    assert error(losses, expected) < OUTPUT[FP32]
    (d,) = torch.autograd.grad(losses, logits, dlosses)
    (e,) = torch.autograd.grad(expected, exact, dlosses.double())
    assert d.dtype == dtype
    assert error(d, e) < GRADIENT[dtype]
