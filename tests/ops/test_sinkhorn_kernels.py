"""Sinkhorn by kernels, in Triton's interpreter: the reference in fp64, also where logits are far apart."""

import pytest
import torch

from depthmix.ops import BackendError, sinkhorn
from ops.helpers import assert_near, rand
from small_cases import each

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")


@pytest.mark.covered
@each("convention", ["paper", "deepseek"])
@each(("n", "iterations", "scale"), [(4, 20, 1.0), (3, 2, 20.0), (2, 1, 200.0), (1, 3, 1.0), (5, 4, 3.0)])
def test_matrices_and_gradients(n: int, iterations: int, scale: float, convention: str) -> None:
    logits = (scale * rand(3, 2, n, n)).float().requires_grad_()
    exact = logits.detach().double().requires_grad_()
    g = rand(3, 2, n, n, seed=1)
    m = sinkhorn(logits, iterations, convention, backend="triton")
    expected = sinkhorn(exact, iterations, convention, backend="reference")
    assert_near([m], [expected], 2e-6)
    got = torch.autograd.grad(m, logits, g.float())
    assert_near(got, torch.autograd.grad(expected, exact, g), 3e-6)


def test_second_derivatives_and_odd_inputs() -> None:
    logits = rand(2, 3, 3).float().mT.requires_grad_()  # not contiguous
    results = []
    for backend in ("triton", "reference"):
        (g,) = torch.autograd.grad(sinkhorn(logits, 3, backend=backend).pow(2).sum(), logits, create_graph=True)
        results.append(torch.autograd.grad(g.pow(2).sum(), logits))
    assert_near(*results, 1e-5)
    assert sinkhorn(torch.zeros(0, 2, 2), backend="triton").shape == (0, 2, 2)
    assert sinkhorn(rand(2, 2, 2).half(), backend="triton").dtype == torch.float32
    with pytest.raises(BackendError, match="up to 8 rows, got 9"):
        sinkhorn(torch.zeros(1, 9, 9), backend="triton")
    with pytest.raises(BackendError, match="the logits are float64"):
        sinkhorn(rand(1, 2, 2), backend="triton")
