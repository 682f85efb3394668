"""depth_attention's kernels on a GPU at real shapes, against fp64."""

import pytest
import torch
from torch import Tensor

from depthmix.ops import depth_attention
from gpu.exact import BF16, FP16, FP32, GRADIENT, OUTPUT, attend, draw, error

SHAPES = [  # tokens, channels, sources, ways
    (4096, 512, 13, 1),
    (4096, 512, 13, 3),
    (1024, 2048, 33, 1),
    (1024, 2048, 9, 3),
    (1024, 2048, 9, 2),
    (777, 1000, 7, 2),  # not a multiple of 16
    (300, 333, 5, 1),  # odd
    (64, 4096, 4, 2),
    (16, 16384, 3, 3),  # as wide as it gets
    (1000, 1, 3, 1),
    (1, 512, 200, 1),
    (64, 64, 200, 2),
    (5, 2048, 1, 3),
]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("tokens", "dim", "n", "ways"), SHAPES)
def test_outputs_and_gradients(tokens: int, dim: int, n: int, ways: int, dtype: torch.dtype, norm: bool) -> None:
    """Every gradient within a few roundings of fp64's."""
    small = [draw(ways, dim, seed=50 + i) for i in range(2 + norm)]
    small[0] *= 2 / dim**0.5
    leaves = [t.requires_grad_() for t in (*small, *(draw(tokens, dim, seed=i, dtype=dtype) for i in range(n)))]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    query, key_gain, *rest = leaves
    gain, sources = (rest[0], rest[1:]) if norm else (None, rest)
    outs = depth_attention(query, sources, key_gain, 1e-6, gain, out_eps=1e-5, backend="triton")
    expected = attend(exact[0] * exact[1], exact[2 + norm :], 1e-6, exact[2] if norm else None, 1e-5)
    cotangents = [64 * draw(tokens, dim, seed=90 + i, dtype=dtype) for i in range(ways)]  # 1/200 of it is fp16's still
    grads = torch.autograd.grad(outs, leaves, cotangents)
    exact_grads = torch.autograd.grad(expected, exact, [c.double() for c in cotangents])
    for out, e in zip(outs, expected, strict=True):
        assert out.dtype == dtype
        assert error(out, e) < OUTPUT[dtype]
    if n == 1:  # the weight of an only source is 1, whatever the query
        assert not grads[0].any()
        grads, exact_grads = grads[2:], exact_grads[2:]
    if dim == 1 and norm:  # one channel, normed, is a sign
        return
    for i, (grad, e) in enumerate(zip(grads, exact_grads, strict=True)):
        assert error(grad, e) < GRADIENT[dtype], i


@pytest.mark.parametrize("heads", [1, 8])
def test_kernels_are_the_default_on_a_gpu(heads: int) -> None:
    """The same bits as when they are asked for; two runs give the same bits."""
    query, v = draw(512).requires_grad_(), [draw(4096, 512, seed=i, dtype=BF16).requires_grad_() for i in range(5)]
    results = []
    for backend in (None, "triton", "triton"):
        out = depth_attention(query, v, heads=heads, backend=backend)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [query, *v])])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("shape", [(0, 512), (2, 0, 24)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    """Nothing is launched, and the query's gradient is zero."""
    query, v = draw(shape[-1]).requires_grad_(), [draw(*shape, dtype=BF16).requires_grad_() for _ in range(3)]
    out = depth_attention(query, v, backend="triton")
    dq, *dv = torch.autograd.grad(out, [query, *v], torch.ones_like(out))
    assert out.shape == torch.Size(shape)
    assert not dq.any()
    assert {g.shape for g in dv} == {torch.Size(shape)}


def test_more_than_two_to_the_31_elements() -> None:
    """Offsets into one source do not overflow, forward or backward: rows before, at and behind 2^31 elements."""
    tokens, dim = 4_300_000, 512
    assert tokens * dim > 2**31
    query = draw(dim, scale=2 / dim**0.5).requires_grad_()
    v = [torch.empty(tokens, dim, dtype=BF16, device="cuda") for _ in range(2)]
    for i, t in enumerate(v):
        t.normal_(generator=torch.Generator("cuda").manual_seed(i))
        t.requires_grad_()
    g = torch.empty_like(v[0]).normal_(generator=torch.Generator("cuda").manual_seed(9))
    out = depth_attention(query, v, backend="triton")
    dq, *dv = torch.autograd.grad(out, [query, *v], g)

    edge = 2**31 // dim
    rows = torch.randint(tokens, (2000,), generator=torch.Generator("cuda").manual_seed(3), device="cuda")
    rows = torch.cat([rows, torch.tensor([0, edge - 1, edge, edge + 1, tokens - 1], device="cuda")])
    some = [query.detach().double().requires_grad_(), *(t.detach()[rows].double().requires_grad_() for t in v)]
    (expected,) = attend(some[0].unsqueeze(0), some[1:], 1e-6)
    _, *exact = torch.autograd.grad(expected, some, g[rows].double())
    assert error(out[rows], expected) < OUTPUT[BF16]
    assert max(error(d[rows], e) for d, e in zip(dv, exact, strict=True)) < GRADIENT[BF16]
    del out, dv
    assert error(dq, in_pieces(query, v, g)) < GRADIENT[BF16]


def in_pieces(query: Tensor, v: list[Tensor], g: Tensor, size: int = 430_000) -> Tensor:
    """The query's gradient, a piece of the tokens at a time."""
    q, total = query.detach().float().requires_grad_(), 0
    for at in range(0, g.shape[0], size):
        (out,) = attend(q.unsqueeze(0), [t.detach()[at : at + size].float() for t in v], 1e-6)
        total = total + torch.autograd.grad(out, q, g[at : at + size].float())[0].double()
    return total
