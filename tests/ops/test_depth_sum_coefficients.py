"""Coefficients from two small layers: the kernels, in Triton's interpreter, against the equations in fp64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ops.helpers import assert_near, rand

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")

from depthmix.ops.depth_sum.coefficients import coefficients, coefficients_reference  # noqa: E402

FP32, FP16 = torch.float32, torch.float16
EPS = 0.1


def exact(x: Tensor, w_1: Tensor, w_2: Tensor, b: Tensor) -> Tensor:
    z = torch.einsum("...d,kd->...k", x / (x.square().mean(-1, keepdim=True) + EPS).sqrt(), w_1)
    return torch.einsum("...k,ck->...c", functional.gelu(z), w_2).unflatten(-1, b.shape) + b


def given(lead: tuple[int, ...], dim: int, hidden: int, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    x, w_1 = rand(*lead, dim, seed=1, dtype=dtype), rand(hidden, dim, seed=2, dtype=FP32) / dim**0.5
    w_2, b = rand(shape[0] * shape[1], hidden, seed=3, dtype=FP32) / hidden**0.5, rand(*shape, seed=4, dtype=FP32)
    return [t.requires_grad_() for t in (x, w_1, w_2, b)]


@pytest.mark.covered
@pytest.mark.parametrize(
    ("lead", "dim", "hidden", "shape", "dtype"),
    [
        ((2, 3), 20, 64, (4, 3), FP32),
        ((67,), 40, 64, (1, 4), FP32),  # two tiles of tokens
        ((5,), 72, 128, (4, 17), FP32),  # two blocks of rows in either layer
        ((7,), 20, 64, (4, 2), FP16),
        ((0, 3), 20, 64, (4, 2), FP32),
    ],
)
def test_values_and_gradients(
    lead: tuple[int, ...], dim: int, hidden: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    leaves = given(lead, dim, hidden, shape, dtype)
    found = coefficients(*leaves, EPS)
    da = rand(*found.shape, seed=5, dtype=FP32)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = exact(*wide)
    assert found.dtype == FP32
    assert_near([found], [expected], 3e-6)
    grads = torch.autograd.grad(found, leaves, da)
    assert [g.dtype for g in grads] == [t.dtype for t in leaves]
    dx, *rest = torch.autograd.grad(expected, wide, da.double())
    assert_near(grads[:1], [dx], 3e-6 if dtype == FP32 else 1e-3)
    assert_near(grads[1:], rest, 1e-5)


def test_only_what_is_needed_and_second_derivatives() -> None:
    leaves = given((3,), 20, 64, (4, 2), FP32)
    frozen = [t.detach() for t in leaves]
    frozen[2].requires_grad_()
    coefficients(*frozen, EPS).sum().backward()
    coefficients_reference(*leaves, EPS).sum().backward()
    assert_near([frozen[2].grad], [leaves[2].grad], 1e-5)
    assert [t.grad is None for t in frozen] == [True, True, False, True]

    def second(of: object) -> Tensor:
        (dx,) = torch.autograd.grad(of(*leaves, EPS).square().sum(), leaves[:1], create_graph=True)  # type: ignore[operator]
        return torch.autograd.grad(dx.square().sum(), leaves[1])[0]

    assert_near([second(coefficients)], [second(coefficients_reference)], 1e-5)
