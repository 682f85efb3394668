"""x + gamma ⊙ y and its gradients, against their definition in fp64."""

import pytest
import torch

from depthmix.ops import use_backend
from depthmix.ops.scaled_add import scaled_add, scaled_add_norm
from ops.helpers import rand
from small_cases import each

pytest.importorskip("triton")
pytestmark = [pytest.mark.usefixtures("quick_interpreter"), pytest.mark.covered]


@each("backend", ["triton", "reference"])
@each(
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


@each("backend", ["triton", "reference"])
@each("used", ["both", "sum", "norm"])
@each(
    ("shape", "dtype", "layout"),
    [
        ((7, 5), torch.float32, "contiguous"),
        ((2, 3, 24), torch.float16, "contiguous"),
        ((3, 1), torch.float32, "expanded"),
        ((2, 2100), torch.float32, "strided"),  # a row of more than a tile
        ((130, 40), torch.float32, "transposed"),  # several tiles of tokens
        ((0, 4), torch.float32, "contiguous"),
    ],
)
def test_the_sum_with_its_norm(shape, dtype, layout, used, backend):
    given = [rand(*shape, seed=s, dtype=dtype, layout=layout) for s in (1, 2)]
    given += [rand(shape[-1], seed=s, dtype=torch.float32) for s in (3, 4)]
    d = [rand(*shape, seed=s, dtype=dtype) for s in (5, 6)]
    leaves = [t.detach().requires_grad_() for t in given]
    exact = [t.detach().double().requires_grad_() for t in given]
    outs = scaled_add_norm(*leaves, 1e-3, backend=backend)
    assert [t.dtype for t in outs] == [dtype, dtype]
    whole = exact[0] + exact[2] * exact[1]
    expected = whole, exact[3] * whole * (whole.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    some = [k for k in (0, 1) if used in ("both", ("sum", "norm")[k])]
    grads = torch.autograd.grad([outs[k] for k in some], leaves, [d[k] for k in some], allow_unused=True)
    wanted = torch.autograd.grad([expected[k] for k in some], exact, [d[k].double() for k in some], allow_unused=True)
    close = {"rtol": 2e-5, "atol": 5e-5} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 4e-3}
    for found, e in zip((*outs, *grads), (*expected, *wanted), strict=True):
        if e is None:
            assert found is None or not found.any()
        else:
            torch.testing.assert_close(found.double(), e, **close)


def with_its_norm(*leaves):
    return sum(t.pow(3).sum() for t in scaled_add_norm(*leaves, 1e-3))


def alone(*leaves):
    return scaled_add(*leaves).pow(3).sum()


@each("function", [alone, with_its_norm])
def test_the_second_derivative_is_that_of_the_reference(function):
    found = []
    for backend in ("triton", "reference"):
        leaves = [
            rand(*s, seed=k, dtype=torch.float32).requires_grad_() for k, s in enumerate(((2, 4), (2, 4), (4,), (4,)))
        ]
        leaves = leaves if function is with_its_norm else leaves[:3]
        with use_backend(backend):
            grads = torch.autograd.grad(function(*leaves), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert a.abs().max() > 0


@each("function", [alone, with_its_norm])
def test_the_second_derivative_with_a_weight_that_has_none(function):
    sizes = ((2, 4), (2, 4), (4,), (4,))[: 4 if function is with_its_norm else 3]
    found = []
    for backend in ("triton", "reference"):
        leaves = [rand(*s, seed=k, dtype=torch.float32).requires_grad_(k != 2) for k, s in enumerate(sizes)]
        with use_backend(backend):
            (first,) = torch.autograd.grad(function(*leaves), leaves[:1], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaves[:2]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_only_the_output_and_the_weights_are_kept():
    x, y, gamma = (rand(*s, seed=1, dtype=torch.float32).requires_grad_() for s in ((3, 8), (3, 8), (8,)))
    out = scaled_add(x, y, gamma, backend="triton")
    kept = [t.data_ptr() for t in out.grad_fn.saved_tensors if t.numel()]
    assert kept == [y.data_ptr(), gamma.data_ptr()]


def test_with_the_norm_the_sum_is_kept_and_not_the_stream():
    x, y, gamma, gain = (rand(*s, seed=1, dtype=torch.float32).requires_grad_() for s in ((3, 8), (3, 8), (8,), (8,)))
    out, h = scaled_add_norm(x, y, gamma, gain, 1e-3, backend="triton")
    kept = [t.data_ptr() for t in h.grad_fn.saved_tensors]
    assert kept[:4] == [t.data_ptr() for t in (out, y, gamma, gain)]
    assert x.data_ptr() not in kept
