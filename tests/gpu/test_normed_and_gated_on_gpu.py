"""Reads of normed values and gated streams on a GPU: outputs and every gradient against fp64, from threads and on streams."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.ops import use_backend
from depthmix.ops.depth_attention.normed_read import NormedRead
from depthmix.ops.gated_streams import Inputs, can_read, few_write, gated_mean, gated_read, write_norm
from gpu import test_threads_on_gpu as threads
from gpu.exact import BF16, FP16, FP32, GRADIENT, OUTPUT, Round, draw, error

EPS, OUT_EPS = 1e-6, 1e-5
Op = Callable[..., Any]
Case = tuple[Op, Op, list[Tensor]]  # the operator, the same in fp64, and what both are differentiated by


def read_case(
    tokens: int, dim: int, blocks: int, ways: int, dtype: torch.dtype, with_sum: bool, with_gain: bool, seed: int = 0
) -> Case:
    """A read of blocks in one tensor, of a further source, and of a newest one, which may be a sum."""
    shapes = [(tokens, blocks, dim), *[(tokens, dim)] * (2 + with_sum)]
    leaves = [draw(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]
    leaves.append(draw(ways, dim, seed=seed + 8, scale=2 / dim**0.5))
    leaves += [draw(ways, dim, seed=seed + 9)] * with_gain

    def op(stack: Tensor, older: Tensor, newest: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        add, (u, *gain) = rest[0] if with_sum else None, rest[with_sum:]
        with use_backend("triton"):
            read: Sequence[Tensor] = NormedRead.apply(
                (EPS, OUT_EPS), dtype, True, False, u, gain[0] if gain else None, stack, add, older, newest
            )
        return read

    def exact(stack: Tensor, older: Tensor, newest: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        newest, (u, *gain) = newest + rest[0] if with_sum else newest, rest[with_sum:]
        v = torch.stack([*stack.unbind(1), older, newest])
        normed = v / (v.square().mean(-1, keepdim=True) + EPS).sqrt()
        outs = [(torch.softmax(normed @ row, 0).unsqueeze(-1) * normed).sum(0) for row in u]
        if not gain:
            return outs
        return [
            g * o / (o.square().mean(-1, keepdim=True) + OUT_EPS).sqrt() for o, g in zip(outs, gain[0], strict=True)
        ]

    return op, exact, leaves


def write_case(tokens: int, n: int, dim: int, dtype: torch.dtype, writes: bool, seed: int = 0) -> Case:
    """A write to n streams, or none, with the norms that follow. These norm the streams as they are stored."""
    leaves = [draw(tokens, n, dim, seed=seed, dtype=dtype), draw(n, dim, seed=seed + 1)]
    leaves += [draw(tokens, dim, seed=seed + 2, dtype=dtype), draw(tokens, n, seed=seed + 3)] * writes

    def op(x: Tensor, gain: Tensor, *written: Tensor) -> Sequence[Tensor]:
        with use_backend("triton"):
            new, normed = write_norm(x, *(written or (None, None)), gain, EPS)
        # A copy, so that the new streams have a gradient of their own, as from the next write.
        return new * 1, normed

    def exact(x: Tensor, gain: Tensor, *written: Tensor) -> Sequence[Tensor]:
        if written:
            y, post = written
            x = Round.apply(x + post.unsqueeze(-1) * y.unsqueeze(1), dtype)
        return x, gain * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()

    return op, exact, leaves


def mean_case(tokens: int, n: int, dim: int, dtype: torch.dtype, seed: int = 0) -> Case:
    """A mean over n streams with a gate for each channel."""

    def op(z: Tensor, normed: Tensor) -> Sequence[Tensor]:
        with use_backend("triton"):
            return (gated_mean(z, normed),)

    def exact(z: Tensor, normed: Tensor) -> Sequence[Tensor]:
        return ((torch.sigmoid(z) * normed).mean(1),)

    return op, exact, [draw(tokens, n, dim, seed=seed + i, dtype=dtype, scale=2.0) for i in range(2)]


def gated_case(tokens: int, n: int, dim: int, rank: int, dtype: torch.dtype, writes: bool, seed: int = 0) -> Case:
    """A read through gates with the write before it, if there is one. All weights are in the streams' dtype."""
    width = n * dim
    leaves = [draw(tokens, n, dim, seed=seed, dtype=dtype), draw(width, seed=seed + 1, dtype=dtype, scale=0.2)]
    shapes = ((rank, width), (width, rank), (n, width))
    leaves += [draw(*s, seed=seed + 2 + i, dtype=dtype, scale=2 / s[1] ** 0.5) for i, s in enumerate(shapes)]
    leaves += [draw(tokens, dim, seed=seed + 5, dtype=dtype), draw(tokens, n, seed=seed + 6)] * writes

    def op(x: Tensor, gain: Tensor, down: Tensor, up: Tensor, inject: Tensor, *written: Tensor) -> Sequence[Tensor]:
        y, post = written or (None, None)
        with use_backend("triton"):
            assert can_read(x, y, gain, down, up, inject)
            new, h, after = gated_read(Inputs(x, y, post, gain, down, up, inject), EPS, 1.0)
        assert after is not None
        # A copy, so that the new streams have a gradient of their own, as from the next write.
        return new * 1, h, after

    def exact(x: Tensor, gain: Tensor, down: Tensor, up: Tensor, inject: Tensor, *written: Tensor) -> Sequence[Tensor]:
        if written:
            y, post = written
            x = Round.apply(x + post.unsqueeze(-1) * y.unsqueeze(1), dtype)
        normed = (1 + gain).view(n, dim) * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        t = normed.flatten(1) @ down.T / n
        z = (t * torch.sigmoid(t)) @ up.T
        h = (torch.sigmoid(z).view_as(x) * normed).mean(1)
        return x, h, 2 * torch.sigmoid(normed.flatten(1) @ inject.T / n)

    return op, exact, leaves


def results(op: Op, leaves: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the outputs for copies of the leaves, and the gradients of these."""
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    outs = op(*leaves)
    cotangents = [draw(*o.shape, seed=90 + i, dtype=dtype).to(o.dtype) for i, o in enumerate(outs)]
    return [*(o.detach() for o in outs), *torch.autograd.grad(outs, leaves, cotangents)]


def assert_as_fp64(case: Case, dtype: torch.dtype) -> None:
    op, exact, leaves = case
    found, expected = results(op, leaves, dtype), results(exact, [t.double() for t in leaves], dtype)
    n = len(found) - len(leaves)
    assert [t.dtype for t in found] == [*[dtype] * n, *(t.dtype for t in leaves)]
    for i, (a, e) in enumerate(zip(found, expected, strict=True)):
        assert error(a, e) < (OUTPUT if i < n else GRADIENT)[dtype], i


# Each case compiles kernels of its own, most of the time: tokens, channels, and every dtype with small and large ones.
READS = [  # tokens, channels, blocks, ways, dtype, whether the newest source is a sum, whether a norm follows
    (1, 96, 1, 3, BF16, True, True),
    (7, 2048, 7, 1, BF16, True, True),
    (300, 4608, 4, 3, BF16, False, True),
    (63, 200, 8, 2, FP16, True, True),
    (300, 2048, 2, 1, FP16, False, False),
    (300, 96, 3, 1, FP32, True, False),
    (63, 4608, 5, 2, FP32, False, True),
    (7, 200, 1, 3, FP32, True, True),
]


@pytest.mark.parametrize("case", READS, ids=str)
def test_reads_of_normed_values(case: Any) -> None:
    assert_as_fp64(read_case(*case), case[4])


GATED = [  # tokens, streams, channels, dtype, whether something is written
    (1, 4, 96, BF16, True),
    (300, 4, 2048, BF16, True),
    (63, 2, 4608, BF16, False),
    (63, 3, 200, FP16, True),
    (7, 2, 4608, FP16, True),
    (300, 4, 200, FP32, True),
    (7, 4, 2048, FP32, False),
    (63, 3, 96, FP32, True),
]


@pytest.mark.parametrize("case", GATED, ids=str)
def test_gated_streams(case: Any) -> None:
    *shape, dtype, writes = case
    assert_as_fp64(write_case(*shape, dtype, writes), dtype)
    assert_as_fp64(mean_case(*shape, dtype), dtype)


GATED_READS = [  # tokens, streams, channels, rank, dtype, whether something is written
    (1, 4, 2048, 320, BF16, True),
    (300, 4, 2048, 320, BF16, True),
    (65, 4, 2048, 320, BF16, False),
    (3, 4, 4096, 320, BF16, True),
    (63, 3, 200, 40, BF16, True),
    (300, 4, 2048, 320, FP16, True),
    (7, 2, 4608, 33, FP16, False),
    (65, 3, 100, 9, FP32, True),
    (300, 4, 512, 64, FP32, True),
]


@pytest.mark.parametrize("case", GATED_READS, ids=str)
def test_gated_reads(case: Any) -> None:
    """Outputs and gradients, and the outputs without gradients, twice: by Triton's launches and by addresses, with the same bits."""
    *shape, dtype, writes = case
    op, exact, leaves = gated_case(*shape, dtype, writes)
    found, expected = results(op, leaves, dtype), results(exact, [t.double() for t in leaves], dtype)
    for i, (a, e) in enumerate(zip(found, expected, strict=True)):
        # A product's operands and its result are rounded, where a single operator rounds once.
        assert error(a, e) < (2 * OUTPUT[dtype] if i < 3 else GRADIENT[dtype]), i
    with torch.no_grad():
        runs = [op(*leaves) for _ in range(3)]
        written = few_write(leaves[0], *leaves[5:]) if writes else None
    for other in runs[1:]:
        assert_equal(other, runs[0])
    for i, (a, e) in enumerate(zip(runs[0], expected, strict=False)):
        assert error(a, e) < 2 * OUTPUT[dtype], i
    if written is not None:
        assert error(written, expected[0]) < OUTPUT[dtype]


# Shapes of the tests above, whose kernels are compiled by then.
SHARED = {
    "read": lambda seed: (read_case(*READS[1], seed=seed), BF16),
    "write": lambda seed: (write_case(*GATED[1], seed=seed), BF16),
    "mean": lambda seed: (mean_case(*GATED[1][:4], seed=seed), BF16),
    "gated read": lambda seed: (gated_case(*GATED_READS[1], seed=seed), BF16),
}


def assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("own", [False, True], ids=["default stream", "own streams"])
def test_two_threads(own: bool) -> None:
    """Each thread has the bits that it has alone."""
    cases = [make(seed) for seed in (20, 40) for make in SHARED.values()]
    expected = [results(op, leaves, dtype) for (op, _, leaves), dtype in cases]

    def job(which: Sequence[int]) -> None:
        for _ in range(3):
            for i in which:
                (op, _, leaves), dtype = cases[i]
                assert_equal(results(op, leaves, dtype), expected[i])

    threads.in_threads([lambda: job((0, 1, 2, 3)), lambda: job((7, 6, 5, 4))], own)


@pytest.mark.parametrize("name", SHARED)
def test_two_streams(name: str) -> None:
    """Two calls that share their inputs, each on a stream of its own, and one backward for both."""
    (op, _, leaves), dtype = SHARED[name](60)

    def twice(own: bool) -> Op:
        def run(*shared: Tensor) -> list[Tensor]:
            outs: list[Tensor] = []
            for _ in range(2):
                with threads.on_stream(own):
                    outs += op(*shared)
            threads.synchronize()
            return outs

        return run

    expected = results(twice(False), leaves, dtype)
    for _ in range(3):
        assert_equal(results(twice(True), leaves, dtype), expected)
