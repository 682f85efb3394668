"""The loss of a token and its gradient, against their definition in fp64."""

import math

import pytest
import torch

from depthmix.ops import use_backend
from depthmix.ops.token_loss import kernels, token_loss
from ops.helpers import rand

pytest.importorskip("triton")
pytestmark = [pytest.mark.usefixtures("quick_interpreter"), pytest.mark.covered]


def by_definition(logits, targets, dlosses):
    """-log of the softmax at the target, and (softmax - one) times what comes back, in fp64."""
    wide = logits.double()
    shares = wide.exp() / wide.exp().sum(-1, keepdim=True)
    losses = -shares[torch.arange(len(targets)), targets].log()
    ones = torch.zeros_like(wide)
    ones[torch.arange(len(targets)), targets] = 1.0
    return losses, (shares - ones) * dlosses.double()[:, None]


def computed(logits, targets, dlosses, backend):
    leaf = logits.detach().requires_grad_()
    losses = token_loss(leaf, targets, backend=backend)
    assert losses.dtype == torch.float32
    (d,) = torch.autograd.grad(losses, leaf, dlosses)
    assert d.dtype == logits.dtype
    return losses.detach(), d


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    ("n", "vocab", "dtype", "layout"),
    [
        (3, 7, torch.float32, "contiguous"),
        (2, 300, torch.float32, "strided"),  # several blocks of columns, below, the last one in part
        (5, 64, torch.float16, "transposed"),
        (1, 1, torch.float32, "contiguous"),
    ],
)
def test_loss_and_gradient(n, vocab, dtype, layout, backend, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 128)
    logits = 4 * rand(n, vocab, layout=layout, dtype=dtype)
    targets = torch.arange(n) * (vocab // 2) % vocab
    dlosses = rand(n, seed=3, dtype=torch.float32)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-3, "atol": 1e-3}
    found, expected = computed(logits, targets, dlosses, backend), by_definition(logits, targets, dlosses)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), e, **close)


def test_large_logits_and_impossible_tokens():
    logits = torch.full((3, 200), -math.inf)
    logits[0, :2] = torch.tensor([3e4, 3e4 - 1.0])
    logits[1, 150] = -3e4  # what comes before it is all impossible
    logits[2, 7] = math.nan
    losses = token_loss(logits, torch.tensor([1, 150, 0]), backend="triton")
    assert losses[0].item() == pytest.approx(1.0 + math.log1p(math.exp(-1.0)), rel=1e-6)
    assert losses[1].item() == 0.0
    assert losses[2].isnan()


def test_a_target_that_is_no_column_is_not_a_number():
    losses = token_loss(torch.zeros(3, 10), torch.tensor([-1, 10, 9]), backend="triton")
    assert losses.isnan().tolist() == [True, True, False]


def test_no_tokens():
    logits = torch.zeros(0, 5, requires_grad=True)
    token_loss(logits, torch.zeros(0, dtype=torch.long), backend="triton").sum().backward()
    assert logits.grad.shape == (0, 5)


def test_the_second_derivative_is_that_of_the_reference():
    targets, found = torch.tensor([2, 0]), []
    for backend in ("triton", "reference"):
        logits = rand(2, 4, dtype=torch.float32).requires_grad_()
        with use_backend(backend):
            (d,) = torch.autograd.grad(token_loss(logits, targets).square().sum(), logits, create_graph=True)
        found.append(torch.autograd.grad(d.square().sum(), logits)[0])
    torch.testing.assert_close(*found)
    assert found[0].abs().max() > 0


def test_fp64_is_left_to_the_reference():
    with pytest.raises(ValueError, match="compute in float32"):
        token_loss(rand(2, 3), torch.tensor([0, 1]), backend="triton")
