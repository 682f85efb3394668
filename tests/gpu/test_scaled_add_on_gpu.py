"""x + gamma ⊙ y, alone and with its norm, on a GPU at real shapes, against fp64."""

import pytest
import torch

from depthmix.ops.scaled_add import scaled_add, scaled_add_norm
from gpu.exact import BF16, FP16, FP32, GRADIENT, OUTPUT, draw, error


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(32768, 512), (1000, 2048), (777, 333), (100000, 1), (3, 20000)])
def test_sums_and_gradients(tokens: int, dim: int, dtype: torch.dtype) -> None:
    x, y, d = (draw(tokens, dim, seed=s, dtype=dtype) for s in (1, 2, 3))
    leaves = [t.requires_grad_() for t in (x, y, draw(dim, seed=4))]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out, expected = scaled_add(*leaves, backend="triton"), exact[0] + exact[2] * exact[1]
    assert error(out, expected) < OUTPUT[dtype]
    found, wanted = torch.autograd.grad(out, leaves, d), torch.autograd.grad(expected, exact, d.double())
    for name, a, b in zip(("x", "y", "gamma"), found, wanted, strict=True):
        assert error(a, b) < GRADIENT[FP32 if name == "gamma" else dtype], name
    again = torch.autograd.grad(scaled_add(*leaves, backend="triton"), leaves, d)
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(32768, 512), (1000, 2048), (777, 333), (100000, 1), (3, 16384)])
def test_sums_with_their_norms(tokens: int, dim: int, dtype: torch.dtype) -> None:
    leaves = [draw(tokens, dim, seed=s, dtype=dtype) for s in (1, 2)] + [draw(dim, seed=s) for s in (3, 4)]
    d = [draw(tokens, dim, seed=s, dtype=dtype) for s in (5, 6)]
    leaves = [t.requires_grad_() for t in leaves]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    outs, whole = scaled_add_norm(*leaves, 1e-3, backend="triton"), exact[0] + exact[2] * exact[1]
    expected = whole, exact[3] * whole * (whole.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    for name, a, b in zip(("sum", "norm"), outs, expected, strict=True):
        assert error(a, b) < OUTPUT[dtype], name
    found, wanted = torch.autograd.grad(outs, leaves, d), torch.autograd.grad(expected, exact, [t.double() for t in d])
    for name, a, b in zip(("x", "y", "gamma", "gain"), found, wanted, strict=True):
        assert error(a, b) < GRADIENT[dtype], (
            name
        )  # rows of parameters, too: the backward norms the sum as it was rounded
    again = torch.autograd.grad(scaled_add_norm(*leaves, 1e-3, backend="triton"), leaves, d)
    assert all(map(torch.equal, found, again))
