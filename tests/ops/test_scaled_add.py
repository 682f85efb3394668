"""x + gamma ⊙ y and its gradients, against their definition in fp64."""

import pytest
import torch

from depthmix.ops import use_backend
from depthmix.ops.scaled_add import scaled_add
from ops.helpers import rand

pytest.importorskip("triton")
pytestmark = [pytest.mark.usefixtures("quick_interpreter"), pytest.mark.covered]


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [
        ((7, 5), torch.float32, "contiguous"),
        ((2, 3, 24), torch.float16, "contiguous"),
        ((3, 1), torch.float32, "expanded"),
        ((2, 520), torch.float32, "strided"),  # two parts of a row
        ((130, 40), torch.float32, "transposed"),  # two tiles of tokens
        ((0, 4), torch.float32, "contiguous"),
    ],
)
def test_sum_and_gradients(shape, dtype, layout, backend):
    x, y, d = (rand(*shape, seed=s, dtype=dtype, layout=layout) for s in (1, 2, 3))
    gamma = rand(shape[-1], seed=4, dtype=torch.float32)
    leaves = [t.detach().requires_grad_() for t in (x, y, gamma)]
    out = scaled_add(*leaves, backend=backend)
    grads = torch.autograd.grad(out, leaves, d)
    assert [t.dtype for t in (out, *grads)] == [dtype, dtype, dtype, torch.float32]
    wide, dim = [t.double() for t in (x, y, gamma, d)], shape[-1]
    expected = [wide[0] + wide[2] * wide[1], wide[3], wide[2] * wide[3], (wide[3] * wide[1]).reshape(-1, dim).sum(0)]
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-3, "atol": 1e-3}
    for found, e in zip((out, *grads), expected, strict=True):
        torch.testing.assert_close(found.double(), e, **close)


def test_the_second_derivative_is_that_of_the_reference():
    found = []
    for backend in ("triton", "reference"):
        leaves = [rand(*s, seed=1, dtype=torch.float32).requires_grad_() for s in ((2, 4), (2, 4), (4,))]
        with use_backend(backend):
            grads = torch.autograd.grad(scaled_add(*leaves).pow(3).sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
        assert a.abs().max() > 0


def test_only_the_output_and_the_weights_are_kept():
    x, y, gamma = (rand(*s, seed=1, dtype=torch.float32).requires_grad_() for s in ((3, 8), (3, 8), (8,)))
    out = scaled_add(x, y, gamma, backend="triton")
    kept = [t.data_ptr() for t in out.grad_fn.saved_tensors if t.numel()]
    assert kept == [y.data_ptr(), gamma.data_ptr()]
