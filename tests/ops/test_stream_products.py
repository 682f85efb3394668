"""Products of residual streams with fp32 weights, in bf16 parts and in fp32, and with the channels split among programs."""

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
        (z,) = product(x, w, halves, kind == "joint")
        assert z.shape[:-1] == dz.shape[:-1]
        assert_near([z.reshape(-1, columns)], [flat @ exact[1]], tol)
    high, low, again = halves_of(w).unflatten(0, (3, -1))[:, :columns].mT.double().unbind(0)
    assert torch.equal(high, again)
    assert_near([high + low], [w], 2**-16)


def test_the_weight_gradient_of_copies() -> None:
    x, w, dz = rand(N, D), rand(n * D, 4, seed=1).float(), rand(N, 4, seed=2).float()
    assert_near([weight_gradient(x, dz, w, n)], [x.repeat(1, n).t() @ dz.double()], 2e-6)


@each(("tokens", "dim", "tile", "parts"), [
    (1, 4096, 16, 64),  # a decoded token: as many as there may be
    (64, 4096, 16, 64),
    (65, 4096, 64, 64),
    (1, 2816, 16, 30),  # 88 blocks of 128 channels by threes: 32 parts would be of two or three
    (1, 136, 16, 2),
    (3, 63, 16, 1),  # at least 256 channels
    (576, 4096, 64, 32),
    (8192, 4096, 64, 4),
    (16384, 4096, 64, 2),
    (32768, 4096, 64, 1),
    (1 << 18, 4096, 64, 1),
])  # fmt: skip
def test_how_many_programs(tokens: int, dim: int, tile: int, parts: int) -> None:
    """Four streams are split into at most 528 programs, four for each multiprocessor."""
    pytest.importorskip("triton")
    from depthmix.ops.stream_mix.kernels.split_product import plan

    found = plan(tokens, tokens <= 64, 4, dim, True)
    assert (found.tile, found.parts) == (tile, parts)
    assert found.tiles * found.tile >= tokens
    assert found.parts * found.blocks * found.depth >= 4 * dim
    assert found.parts == 1 or found.tiles * found.parts <= 4 * 132


@pytest.mark.usefixtures("quick_interpreter")
@each("joint", [True, False])
@each("copies", [True, False])
@each(("tokens", "dim", "parts"), [(5, 24, 1), (70, 264, 4), (3, 520, 8)])
def test_slices_add_up_to_products_and_sums(joint: bool, copies: bool, tokens: int, dim: int, parts: int) -> None:
    """With as many slices as there are parts of 256 channels, except that a stream alone has a fourth of them."""
    pytest.importorskip("triton")
    from depthmix.ops.stream_mix.kernels.split_product import split_product

    n, columns = 4, 15 if joint else 6
    x = (rand(tokens, dim) if copies else rand(tokens, n, dim)).float()
    w = rand(n * dim if joint else dim, columns, seed=1).float()
    z, sums = split_product(x, n, w, None, joint=joint, sums=True)
    assert sums is not None
    assert len(z) == len(sums) == (parts if joint else max(1, parts // n))
    wide = (x.unsqueeze(1).expand(-1, n, -1) if copies else x).double()
    flat = wide.flatten(1) if joint else wide
    squares = flat.square().sum(-1)
    exact = squares if joint else torch.stack([flat.sum(-1), squares], -1)
    assert_near([z.double().sum(0), sums.double().sum(0)], [flat @ w.double(), exact], 3e-6)
    assert torch.equal(split_product(x, n, w.T.contiguous().T, None, joint=joint)[0], z)


@pytest.mark.usefixtures("quick_interpreter")
@pytest.mark.parametrize("scan", [0, 1, 2])
@pytest.mark.parametrize("copies", [True, False])
def test_a_long_row_is_written_in_parts(scan: int, copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not read on the way."""
    pytest.importorskip("triton")
    from depthmix.ops.stream_mix.kernels import rows

    x, y = rand(N, D).float() if copies else rand(N, n, D).float(), rand(N, D, seed=1).float()
    post, res = rand(N, n, seed=2).float(), rand(N, n, n, seed=3).float()
    given = (x, copies, n, y, post, res, scan, rows.Reading(rand(N, n, seed=4).float(), None, 0.0))
    whole = rows.write_rows(*given)
    monkeypatch.setattr(rows, "MAX_ROW", 16)
    monkeypatch.setattr(rows, "PART", 16)
    parts = rows.write_rows(*given)
    assert torch.equal(parts.x, whole.x)
    assert whole.h is not None
    assert parts.h is None
    streams = whole.x.double()
    if scan == 1:
        assert parts.sums is not None
        assert_near(parts.sums.double().unbind(0), [t.square().sum((1, 2)) for t in streams.split(16, -1)], 2e-6)
    if scan == 2:
        assert parts.sums is not None
        expected = [torch.stack([t.sum(-1), t.square().sum(-1)], -1) for t in streams.split(16, -1)]
        assert_near(parts.sums.double().unbind(0), expected, 2e-6)


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
