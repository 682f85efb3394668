"""x + gamma ⊙ y on a GPU at real shapes, against fp64."""

import pytest
import torch

from depthmix.ops.scaled_add import scaled_add
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
