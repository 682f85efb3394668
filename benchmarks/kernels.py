"""The registry of kernels that `bandwidth` and `first-call` measure one by one.

To add a kernel, write a function make(N, D, device) that allocates its tensors and returns a `Work`, and add a line to `registry`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import reference
from benchmarks.check import relative_error
from benchmarks.stacks import EPS
from benchmarks.stream_kernels import (
    stream_products,
    stream_read,
    stream_read_backward,
    stream_write,
    stream_write_backward,
)
from benchmarks.sum_kernels import add_and_score, sum_read, sum_read_backward, sum_source_backward
from benchmarks.work import ROWS, Work, first_rows, normed
from depthmix.ops.backend import why_no_kernels


class Kernel(NamedTuple):
    """A kernel with its name, and a function that sets it up for N tokens of D channels."""

    name: str
    make: Callable[[int, int, torch.device], Work]
    wide: bool = False  # also measured at the widths of large models


def copy(tokens: int, dim: int, device: torch.device) -> Work:
    """Set up torch's copy of one tensor as large as 16 activations in bf16, with which the others are compared."""
    a = torch.randn(16 * tokens, dim, device=device, dtype=torch.bfloat16)
    b = torch.zeros_like(a)
    return Work(
        lambda: b.copy_(a), 2 * a.numel() * a.element_size(), lambda: {"copy": 0.0 if torch.equal(a, b) else 1.0}
    )


_norm = functools.partial(normed, eps=EPS)
# Sources of a read, and readers of a source.
N_SOURCES = 8


def read(ways: int, pair: bool = False) -> Callable[[int, int, torch.device], Work]:
    """Set up a read of eight sources, the newest one added up on the way, with the norm that follows.

    With `pair`, the read has two sources and a kernel of its own.
    """

    def make(tokens: int, dim: int, device: torch.device) -> Work:
        from depthmix.ops.depth_attention.kernels import read as kernel
        from depthmix.ops.depth_attention.kernels.pair import PairRead, pair_read

        like = torch.empty(tokens, dim, device=device, dtype=torch.bfloat16)
        sources = [torch.randn_like(like) for _ in range(2 if pair else N_SOURCES)]
        add, u = torch.randn_like(like), torch.randn(ways, dim, device=device) / dim**0.5
        gain = torch.rand(ways, dim, device=device) + 0.5
        results: list[kernel.Result | PairRead] = []

        def run() -> None:
            if pair:
                results[:] = [pair_read(u, sources[0], sources[1], add, gain, EPS, EPS)]
            else:
                results[:] = [kernel.read(u, sources, add, gain, EPS, EPS, keep=2)]

        def errors() -> dict[str, float]:
            assert results[0].fresh is not None
            sources_fp64 = first_rows([*sources[:-1], results[0].fresh])
            expected = [
                _norm(reference.read(q.double(), sources_fp64, torch.ones_like(q).double()), k)
                for q, k in zip(u, gain, strict=True)
            ]
            return {"y": max(map(relative_error, first_rows(results[0].y), expected))}

        return Work(run, (len(sources) + 2 + (2 - pair) * ways) * like.nbytes, errors)

    return make


def other_read(heads: int, by_token: bool, backward: bool = False) -> Callable[[int, int, torch.device], Work]:
    """Set up a read of eight sources with heads, or with a query for each token, and the norm that follows.

    With `backward`, all of its gradients are computed instead.
    """

    def make(tokens: int, dim: int, device: torch.device) -> Work:
        from depthmix.ops.depth_attention.kernels import general_read as kernel

        like = torch.empty(tokens, dim, device=device, dtype=torch.bfloat16)
        sources, dy = [torch.randn_like(like) for _ in range(N_SOURCES)], torch.randn_like(like)
        u = torch.randn(*((tokens,) if by_token else ()), dim, device=device) / (dim // heads) ** 0.5
        gain = torch.rand(dim, device=device) + 0.5
        rule: dict[str, Any] = {"eps": EPS, "out_eps": EPS, "key_norm": True, "heads": heads, "softmax": True}
        _, s, lse = kernel.read(u, gain, sources, **rule, keep=True)
        results: list[Tensor] = []

        def run() -> None:
            if backward:
                results[:] = kernel.backward(dy, u, gain, sources, s, lse, **rule, before=None, last=True)[2]
            else:
                results[:] = [kernel.read(u, gain, sources, **rule, keep=True)[0]]

        def errors() -> dict[str, float]:
            sources_fp64 = [v.requires_grad_() for v in first_rows(sources)]
            out = _norm(
                reference.read_by_heads(u[:ROWS].double() if by_token else u.double(), sources_fp64, heads), gain
            )
            expected = torch.autograd.grad(out, sources_fp64, first_rows([dy])[0]) if backward else [out.detach()]
            return {"dv" if backward else "y": max(map(relative_error, first_rows(results), expected))}

        moved = (2 * N_SOURCES if backward else N_SOURCES) + 1
        queries = (1 + backward) * u.nbytes if by_token else 0
        return Work(run, moved * like.nbytes + queries + s.nbytes + lse.nbytes, errors)

    return make


def read_known(ways: int) -> Callable[[int, int, torch.device], Work]:
    """Set up a read of eight sources with known logits of the seven older ones."""

    def make(tokens: int, dim: int, device: torch.device) -> Work:
        from depthmix.ops.depth_attention.kernels import tiling
        from depthmix.ops.depth_attention.kernels.read import Result

        like = torch.empty(tokens, dim, device=device, dtype=torch.bfloat16)
        sources = [torch.randn_like(like) for _ in range(N_SOURCES)]
        add, u = torch.randn_like(like), torch.randn(ways, dim, device=device) / dim**0.5
        gain = torch.rand(ways, dim, device=device) + 0.5
        halves = tiling.SplitRows.of(u, like.dtype)
        logits = [tiling.scores(halves, [v], EPS).squeeze(1) for v in sources[:-1]]
        results: list[Result] = []

        def run() -> None:
            results[:] = [tiling.read_known(u, sources, logits, add, gain, EPS, EPS, keep=2)]

        def errors() -> dict[str, float]:
            assert results[0].fresh is not None
            sources_fp64, ones = first_rows([*sources[:-1], results[0].fresh]), torch.ones(dim, device=device).double()
            expected = [_norm(reference.read(q.double(), sources_fp64, ones), k) for q, k in zip(u, gain, strict=True)]
            return {"y": max(map(relative_error, first_rows(results[0].y), expected))}

        return Work(run, (N_SOURCES + 2 + 2 * ways) * like.nbytes, errors)

    return make


def scores(tokens: int, dim: int, device: torch.device) -> Work:
    """Set up the logits of four sources for 32 queries."""
    from depthmix.ops.depth_attention.kernels import tiling

    like = torch.empty(tokens, dim, device=device, dtype=torch.bfloat16)
    sources, u = [torch.randn_like(like) for _ in range(4)], torch.randn(32, dim, device=device) / dim**0.5
    halves, results = tiling.SplitRows.of(u, like.dtype), list[Tensor]()

    def run() -> None:
        results[:] = [tiling.scores(halves, sources, EPS)]

    def errors() -> dict[str, float]:
        expected = [_norm(v, torch.ones_like(u[0])) @ u.double().T for v in first_rows(sources)]  # [ROWS, 32] each
        return {"s": max(relative_error(results[0][:, k, :ROWS].T.double(), w) for k, w in enumerate(expected))}

    return Work(run, 4 * like.nbytes + 4 * 32 * 4 * tokens, errors)


def make_bank(tokens: int, dim: int, device: torch.device) -> Work:
    """Set up the mixtures, in fp32, of sixteen sources for four queries."""
    from depthmix.ops.depth_attention.kernels import tiling

    like = torch.empty(tokens, dim, device=device, dtype=torch.bfloat16)
    sources, u = [torch.randn_like(like) for _ in range(16)], torch.randn(4, dim, device=device) / dim**0.5
    halves = tiling.SplitRows.of(u, like.dtype)
    groups = [tiling.scores(halves, sources[i : i + 4], EPS) for i in range(0, 16, 4)]
    first = [s[0, k] for s in groups for k in range(4)]
    results: list[Tensor] = []

    def run() -> None:
        results[:] = tiling.make_bank(first, sources, 4)[0]

    def errors() -> dict[str, float]:
        expected = [reference.read(q.double(), first_rows(sources), torch.ones_like(q).double()) for q in u]
        return {"bank": max(map(relative_error, first_rows(results), expected))}

    return Work(run, (16 + 2 * 4) * like.nbytes + 16 * 4 * 4 * tokens, errors)


def layer_backward(ways: int, value_norm: bool = False) -> Callable[[int, int, torch.device], Work]:
    """Set up all gradients of a read of eight sources with the norm that follows, in layer order.

    Its sources are in the cache at best. With `value_norm`, normalised sources are mixed.
    """

    def make(tokens: int, dim: int, device: torch.device) -> Work:
        from depthmix.ops.depth_attention.kernels import read as kernel
        from depthmix.ops.depth_attention.kernels.layer_backward import layer_backward

        like = torch.empty(tokens, dim, device=device, dtype=torch.bfloat16)
        sources, dy = [torch.randn_like(like) for _ in range(N_SOURCES)], [torch.randn_like(like) for _ in range(ways)]
        u, gain = torch.randn(ways, dim, device=device) / dim**0.5, torch.rand(ways, dim, device=device) + 0.5
        forward = kernel.read(u, sources, None, gain, EPS, EPS, keep=1, value_norm=value_norm)
        results: list[Tensor] = []

        def run() -> None:
            results[:] = layer_backward(
                dy, u, gain, forward.s, forward.lse[:, 0], sources, None, EPS, EPS, value_norm=value_norm
            )[0]

        def errors() -> dict[str, float]:
            sources_fp64 = [v.requires_grad_() for v in first_rows(sources)]
            ones = torch.ones_like(u[0]).double()
            values = [_norm(v, ones) for v in sources_fp64] if value_norm else sources_fp64
            outs = [_norm(reference.read(q.double(), values, ones), k) for q, k in zip(u, gain, strict=True)]
            expected = torch.autograd.grad(outs, sources_fp64, first_rows(dy))
            return {"dv": max(map(relative_error, first_rows(results), expected))}

        return Work(run, (2 * N_SOURCES + ways) * like.nbytes, errors)

    return make


def read_backward(ways: int, pair: bool = False) -> Callable[[int, int, torch.device], Work]:
    """Set up the gradients of the norm and of the newest source, for a read of two sources.

    With `pair`, both sources' gradients are computed, from what such a read saves.
    """

    def make(tokens: int, dim: int, device: torch.device) -> Work:
        from depthmix.ops.depth_attention.kernels import read as kernel
        from depthmix.ops.depth_attention.kernels.pair import pair_backward, pair_read

        like = torch.empty(tokens, dim, device=device, dtype=torch.bfloat16)
        sources, g = [torch.randn_like(like) for _ in range(2)], torch.randn_like(like)
        dy = [torch.randn_like(like) for _ in range(ways)]
        u, gain = torch.randn(ways, dim, device=device) / dim**0.5, torch.rand(ways, dim, device=device) + 0.5
        old, new = sources
        _, o, s, lse, _ = kernel.read(u, sources, None, gain, EPS, EPS, keep=2)
        both = pair_read(u, old, new, None, gain, EPS, EPS)
        newest = kernel.Newest(new, g, True)
        results: list[Tensor | None] = []

        def run() -> None:
            if pair:
                back = pair_backward(dy, old, new, u, gain, both.s, both.lse, g, None, EPS, (True, True))
                results[:] = [back.db, back.da]
            else:
                results[:] = [kernel.read_backward(dy, o, u, gain, s, lse, newest, EPS, store=True).dv]

        def errors() -> dict[str, float]:
            sources_fp64, ones = (
                [v.requires_grad_() for v in first_rows(sources)],
                torch.ones(dim, device=device).double(),
            )
            outs = [_norm(reference.read(q.double(), sources_fp64, ones), k) for q, k in zip(u, gain, strict=True)]
            older, newer = torch.autograd.grad(outs, sources_fp64, first_rows(dy))
            expected = [newer + first_rows([g])[0], older]
            return {"dv": max(map(relative_error, first_rows(results), expected))}

        return Work(run, (5 + ways if pair else 3 + 3 * ways) * like.nbytes, errors)

    return make


def source_backward(n_sources: int) -> Callable[[int, int, torch.device], Work]:
    """Set up the gradients of sources that eight reads of four have read, without the readers' own du."""

    def make(tokens: int, dim: int, device: torch.device) -> Work:
        from depthmix.ops.depth_attention.kernels import read as kernel
        from depthmix.ops.depth_attention.kernels import source_backward

        like = torch.empty(tokens, dim, device=device, dtype=torch.bfloat16)
        sources, u = [torch.randn_like(like) for _ in range(4)], torch.randn(N_SOURCES, dim, device=device) / dim**0.5
        dy, readers = [torch.randn_like(like) for _ in u], []
        for q, d in zip(u, dy, strict=True):
            forward = kernel.read(q[None], sources, None, None, EPS, EPS, keep=2)
            back = kernel.read_backward([d], forward.y, q[None], None, forward.s, forward.lse, None, EPS, store=True)
            readers.append(source_backward.Reader(back.do[0], list(forward.s[0, 4 - n_sources :]), back.ld[0], q))
        last = [source_backward.Source(v) for v in sources[-n_sources:]]
        results: list[Tensor | None] = []

        def run() -> None:
            results[:] = source_backward.source_backward(last, readers, EPS, need_du=False)[0]

        def errors() -> dict[str, float]:
            sources_fp64 = [v.requires_grad_() for v in first_rows(sources)]
            outs = [reference.read(q.double(), sources_fp64, torch.ones_like(q).double()) for q in u]
            expected = torch.autograd.grad(outs, sources_fp64[-n_sources:], first_rows(dy))
            return {"dv": max(map(relative_error, first_rows(results), expected))}

        return Work(run, (N_SOURCES + 2 * n_sources) * like.nbytes, errors)

    return make


def registry() -> list[Kernel]:
    """Return every kernel that can run on this machine, the copy first."""
    kernels = [Kernel("copy", copy)]
    if torch.cuda.is_available() and why_no_kernels("cuda", torch.cuda.current_device()) is None:
        kernels += [
            Kernel("read", read(1), wide=True),
            Kernel("read, two ways", read(2), wide=True),
            Kernel("read, three ways", read(3), wide=True),
            Kernel("read_known, two ways", read_known(2)),
            Kernel("read_known, three ways", read_known(3)),
            Kernel("other read, 16 heads", other_read(16, False)),
            Kernel("other read, a query per token", other_read(1, True)),
            Kernel("other backward, 16 heads", other_read(16, False, backward=True)),
            Kernel("other backward, a query per token", other_read(1, True, backward=True)),
            Kernel("scores", scores),
            Kernel("make_bank", make_bank),
            Kernel("read_backward", read_backward(1)),
            Kernel("read_backward, two ways", read_backward(2)),
            Kernel("pair_read", read(1, pair=True)),
            Kernel("pair_read, two ways", read(2, pair=True)),
            Kernel("pair_backward", read_backward(1, pair=True)),
            Kernel("pair_backward, two ways", read_backward(2, pair=True)),
            Kernel("source_backward, one source", source_backward(1)),
            Kernel("source_backward, two sources", source_backward(2)),
            Kernel("layer_backward", layer_backward(1), wide=True),
            Kernel("layer_backward, three ways of normed values", layer_backward(3, value_norm=True), wide=True),
            Kernel("sum read, DCA", sum_read(3)),
            Kernel("sum read, DenseFormer", sum_read(1)),
            Kernel("sum read_backward, DCA", sum_read_backward(3)),
            Kernel("sum read_backward, DenseFormer", sum_read_backward(1)),
            Kernel("sum source_backward, two sources", sum_source_backward),
            Kernel("add_and_score", add_and_score),
            Kernel("stream write", stream_write(False)),
            Kernel("stream write and read", stream_write(True)),
            Kernel("stream read", stream_read),
            Kernel("stream products, mHC", stream_products(24)),
            Kernel("stream products and sums, mHC", stream_products(24, sums=True)),
            Kernel("stream products, Hyper-Connections", stream_products(6)),
            Kernel("stream read_backward", stream_read_backward(False)),
            Kernel("stream read_backward, known weights", stream_read_backward(True)),
            Kernel("stream write_backward, mHC", stream_write_backward(24)),
            Kernel("stream write_backward, Hyper-Connections", stream_write_backward(6)),
        ]
    return kernels
