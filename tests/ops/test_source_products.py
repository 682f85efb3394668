"""source_products: w · v and w · RMS(v) with every gradient, in fp64, fp32, and bf16 in halves."""

import pytest
import torch

from depthmix.ops.source_products import source_products
from small_cases import each

EPS = pytest.mark.parametrize("eps", [None, 1e-6, 0.1], ids=str)


def plainly(v, w, eps):
    x = v if eps is None else v / torch.sqrt((v * v).mean(-1, keepdim=True) + eps)
    return torch.einsum("...d,rd->r...", x, w)


def both(v, w, ds, f):
    v, w = (t.detach().clone().requires_grad_() for t in (v, w))
    s = f(v, w)
    return s.detach(), *torch.autograd.grad(s, [v, w], ds.to(s.dtype))


@EPS
@each(("tokens", "rows", "dim"), [((2, 3), 5, 7), ((11,), 1, 24), ((), 3, 8), ((0,), 2, 8)])
def test_values_and_gradients_in_fp64(tokens, rows, dim, eps):
    v, w = torch.randn(*tokens, dim, dtype=torch.float64), torch.randn(rows, dim, dtype=torch.float64)
    ds = torch.randn(rows, *tokens, dtype=torch.float64)
    found = both(v, w, ds, lambda v, w: source_products(v, w, eps))
    for a, b in zip(found, both(v, w, ds, lambda v, w: plainly(v, w, eps)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(source_products(v, w, eps), found[0], rtol=1e-12, atol=1e-12)


@EPS
def test_bf16_loses_nothing_but_one_rounding_of_the_gradient(eps):
    """Rows and gradients that bf16 could not hold: their first half alone would be off by 2^-9."""
    v, w, ds = torch.randn(40, 64).bfloat16(), torch.randn(9, 64), torch.randn(9, 40)
    s, dv, dw = both(v, w, ds, lambda v, w: source_products(v, w, eps))
    exact = both(v.double(), w.double(), ds, lambda v, w: plainly(v, w, eps))
    assert (s.dtype, dv.dtype, dw.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    for a, b, bits in zip((s, dv, dw), exact, (15, 8, 15), strict=True):
        assert float((a.double() - b).abs().max()) <= 2**-bits * float(b.abs().max())


def test_under_autocast_and_twice_differentiated():
    v, w = torch.randn(3, 8), torch.randn(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = source_products(v, w, 1e-6)
    torch.testing.assert_close(found, plainly(v, w, 1e-6), rtol=1e-5, atol=1e-5)
    leaves = [t.double().requires_grad_() for t in (v, w)]
    assert torch.autograd.gradgradcheck(lambda v, w: source_products(v, w, 0.1), leaves)
