"""Kernels of weighted sums over depth for the registry in kernels.py: reads of eight sources by DCA and DenseFormer, and their backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.check import relative_error
from benchmarks.stacks import EPS
from benchmarks.work import Work, first_rows, normed

N_SOURCES, READERS = 8, 15
CLAMPED = 1  # the dynamic weights


class Read:
    """A read of eight sources. DCA has three ways with rows of static weights, scores and norms; DenseFormer has single numbers."""

    def __init__(self, ways: int, tokens: int, dim: int, device: torch.device) -> None:
        self.like = torch.empty(tokens, dim, device=device, dtype=torch.bfloat16)
        self.sources = [torch.randn_like(self.like) for _ in range(N_SOURCES)]
        dca = ways > 1
        self.static = torch.rand(ways, N_SOURCES, dim if dca else 1, device=device)
        self.dynamic = [torch.randn(tokens, ways, device=device) for _ in self.sources] if dca else None
        self.gain = torch.rand(ways, dim, device=device) + 0.5 if dca else None
        self.dy = [torch.randn_like(self.like) for _ in range(ways)]
        self.units = N_SOURCES + ways + dca  # results, and one mixture before its norm

    def __call__(self) -> object:
        from depthmix.ops.depth_sum.kernels.read import read

        raw = None if self.gain is None else 0
        return read(self.sources, None, self.static, self.dynamic, CLAMPED, self.gain, EPS, raw, True)

    def exact(self, way: int) -> Tensor:
        """Compute a way's mixture of some tokens in fp64, before its norm."""
        total = torch.zeros(())
        for i, v in enumerate(first_rows(self.sources)):
            weight = self.static[way, i].double()
            if self.dynamic is not None:
                weight = weight + first_rows([self.dynamic[i]])[0][:, way : way + 1].clamp(min=0)
            total = total.to(v.device) + weight * v
        return total


def sum_read(ways: int) -> Callable[[int, int, torch.device], Work]:
    """Set up a read that computes all ways from one pass over the sources, with the norms that follow."""

    def make(tokens: int, dim: int, device: torch.device) -> Work:
        case, results = Read(ways, tokens, dim, device), list[object]()

        def run() -> None:
            results[:] = [case()]

        def errors() -> dict[str, float]:
            expected = [case.exact(w) for w in range(ways)]
            if case.gain is not None:
                expected = [normed(o, k, EPS) for o, k in zip(expected, case.gain, strict=True)]
            return {"y": max(map(relative_error, first_rows(results[0].y), expected))}  # type: ignore[attr-defined]

        return Work(run, case.units * case.like.nbytes, errors)

    return make


def sum_read_backward(ways: int) -> Callable[[int, int, torch.device], Work]:
    """Set up the gradients of a read's weights and gains, and of its mixtures."""

    def make(tokens: int, dim: int, device: torch.device) -> Work:
        from depthmix.ops.depth_sum.kernels.read_backward import Need, read_backward

        case = Read(ways, tokens, dim, device)
        kept, dca = case(), case.gain is not None
        need, results = Need(True, dca), list[object]()
        raw, draw = (0, torch.randn_like(case.like)) if dca else (None, None)

        def run() -> None:
            rows, rms = kept.kept, kept.rms  # type: ignore[attr-defined]
            given = (case.dy, draw, raw, rows, rms, case.gain, case.sources, case.static, case.dynamic, CLAMPED)
            results[:] = [read_backward(*given, need, kept.mixtures)]  # type: ignore[attr-defined]

        def errors() -> dict[str, float]:
            do = results[0].do  # type: ignore[attr-defined]
            products = [[d.double() * v.double() for v in case.sources] for d in do[:1]]
            expected = torch.stack([p.sum(0) if dca else p.sum()[None] for p in products[0]])
            return {"dstatic": relative_error(results[0].dstatic[0], expected)}  # type: ignore[attr-defined]

        # With norms: the gradient of each result, x̂, do, and the gradient of the mixture that is passed on.
        return Work(run, (N_SOURCES + (3 * ways + 1 if dca else ways)) * case.like.nbytes, errors)

    return make


def sum_source_backward(tokens: int, dim: int, device: torch.device) -> Work:
    """Set up the gradients of two sources from fifteen ways that read them, as in DCA."""
    from depthmix.ops.depth_sum.kernels.source_backward import Reader, Target, source_backward

    like = torch.empty(tokens, dim, device=device, dtype=torch.bfloat16)
    rows = torch.rand(READERS, 3, dim, device=device)  # static weights for both sources, and what scores them
    numbers = torch.randn(READERS, 4, tokens, device=device)  # scores and their gradients
    do = [torch.randn_like(like) for _ in range(READERS)]
    readers = [
        Reader(d, [r[0], r[1]], [n[0], n[1]], CLAMPED, [n[2], n[3]], [r[2], r[2]])
        for d, r, n in zip(do, rows, numbers, strict=True)
    ]
    results: list[Tensor] = []

    def run() -> None:
        results[:] = source_backward([Target(like), Target(like)], readers)

    def errors() -> dict[str, float]:
        expected = []
        for j in range(2):
            parts = (
                (r[j].double() + n[j, : len(d), None].double().clamp(min=0)) * d
                + n[2 + j, : len(d), None].double() * r[2].double()
                for d, r, n in zip(first_rows(do), rows, numbers, strict=True)
            )
            expected.append(torch.stack(list(parts)).sum(0))
        return {"dv": max(map(relative_error, first_rows(results), expected))}

    return Work(run, (READERS + 2) * like.nbytes + numbers.nbytes, errors)


def add_and_score(tokens: int, dim: int, device: torch.device) -> Work:
    """Set up the sum of two tensors, and its dot products with 33 rows of weights."""
    from depthmix.ops.depth_sum.kernels.scores import add_and_score

    like = torch.empty(tokens, dim, device=device, dtype=torch.bfloat16)
    v, add, w = torch.randn_like(like), torch.randn_like(like), torch.randn(33, dim, device=device) / dim**0.5
    results: list[Tensor] = []

    def run() -> None:
        results[:] = add_and_score(v, add, w)

    def errors() -> dict[str, float]:
        (fresh,) = first_rows(results[:1])
        return {"scores": relative_error(first_rows(results[1:])[0], fresh @ w.double().T)}

    return Work(run, 3 * like.nbytes + 4 * 33 * tokens, errors)
