"""Products of residual streams with fp32 weights, in bf16 parts and in fp32, and a write with them inside its kernel or outside."""

import pytest
import torch
from torch import Tensor

from depthmix.ops.stream_mix.products import halves_of, product, product_backward, split_by_kernels, weight_gradient
from ops.helpers import assert_near, rand
from small_cases import each

N, D, n = 5, 24, 3
WIDTHS = {"joint": (n * D, 15), "each": (D, 5)}  # of W, whose columns are padded to 16 and 8


def parts(dz: Tensor) -> Tensor:
    """dz as the backward of the coefficients leaves it: high, high and low, with zeros where nothing is."""
    high = dz.bfloat16()
    low = (dz - high.float()).bfloat16()
    columns = torch.nn.functional.pad(torch.stack([high, high, low], -2), (0, -dz.shape[-1] % 8))
    return columns.flatten(-2)


@each("kind", WIDTHS)
def test_parts_lose_nothing_that_fp32_would_keep(kind: str) -> None:
    rows, columns = WIDTHS[kind]
    w, x = rand(rows, columns).float(), rand(N, n, D, seed=1).bfloat16()
    dz = rand(*((N,) if kind == "joint" else (N, n)), columns, seed=2).float()
    flat, exact = x.double().view(-1, rows), (dz.double().view(-1, columns), w.double())
    if kind == "joint":
        p = product_backward(parts(dz), w, halves_of(w), n)
        assert p.dtype == torch.bfloat16
        assert p.shape == (N, n, D)
        assert_near([p], [(exact[0] @ exact[1].t()).view(N, n, D)], 2**-8)  # its own rounding
        assert_near([product_backward(dz, w, None, n)], [(exact[0] @ exact[1].t()).view(N, n, D)], 2e-6)
    for given in (parts(dz), dz):  # whose first third, if any, weight_gradient does not look at
        tol = 2e-6 if given is dz else 2e-5
        assert_near([weight_gradient(x, given, w, n)], [flat.t() @ exact[0]], tol)
    for halves, tol in ((None, 2e-6), (halves_of(w), 2e-5)):
        z = product(x, w, halves, kind == "joint")
        assert z.shape[:-1] == dz.shape[:-1]
        assert_near([z.reshape(-1, columns)], [flat @ exact[1]], tol)
    high, low, again = halves_of(w).unflatten(0, (3, -1))[:, :columns].mT.double().unbind(0)
    assert torch.equal(high, again)
    assert_near([high + low], [w], 2**-16)


def test_the_weight_gradient_of_copies() -> None:
    x, w, dz = rand(N, D), rand(n * D, 4, seed=1).float(), rand(N, 4, seed=2).float()
    assert_near([weight_gradient(x, dz, w, n)], [x.repeat(1, n).t() @ dz.double()], 2e-6)


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize(("scan", "copies", "shared"), [(1, False, False), (2, False, True), (1, True, False)])
def test_a_write_with_its_products_inside_is_one_with_them_outside(scan: int, copies: bool, shared: bool) -> None:
    """And the read with it, where the weights are known, is a read after it."""
    pytest.importorskip("triton")
    from depthmix.ops.stream_mix.kernels.read import read
    from depthmix.ops.stream_mix.kernels.rows import Reading
    from depthmix.ops.stream_mix.kernels.write import write

    lead = () if shared else (N,)
    w = rand(*WIDTHS["joint" if scan == 1 else "each"]).float()
    x, y = rand(N, D).float() if copies else rand(N, n, D).float(), rand(N, D, seed=1).float()
    post, pre, gain = rand(*lead, n, seed=2).float(), rand(*lead, n, seed=3).float(), rand(D, seed=4).float()
    given = (x, copies, n, y, post, rand(*lead, n, n, seed=5).float(), w, None, scan)
    inside, outside = write(*given, inside=True), write(*given, Reading(pre, gain, 1e-6))
    assert_near([t for t in outside[:3] if t is not None], [t for t in inside[:3] if t is not None], 3e-6)
    assert inside.h is None
    after = read(inside.x, False, n, pre, gain, 1e-6)
    assert_near([t for t in outside[3:] if t is not None], [t for t in after if t is not None], 3e-6)


def test_kernels_split_w_for_few_tokens_only() -> None:
    """Let kernels split W where it is a parameter's transpose.

    A test on a GPU compares their numbers, because the interpreter has no products in bf16.
    """
    columns = WIDTHS["joint"][1]
    w, x = rand(columns, n * D).float().T, rand(N, n, D).to(torch.bfloat16)
    assert split_by_kernels(x, w)
    assert not split_by_kernels(x.repeat(13, 1, 1), w)
    assert not split_by_kernels(x, w.contiguous())
    assert not split_by_kernels(x.float(), w)
    assert_near([product(x, w, None, True)], [product(x, w, halves_of(w), True)], 1e-4)
