"""Kernels of residual streams for kernels.py and streams.py: a site of Hyper-Connections or mHC with four streams, and its backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.check import relative_error
from benchmarks.stacks import EPS
from benchmarks.work import ROWS, Work, normed

STREAMS = 4


class Site:
    """The tensors of one site, with weights for every token. Activations are in bf16, and without a GPU in fp32."""

    def __init__(self, tokens: int, dim: int, device: torch.device) -> None:
        # Triton's interpreter has no products in bf16.
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32

        def rand(*shape: int, dtype: torch.dtype = kind) -> Tensor:
            return torch.randn(tokens, *shape, device=device).to(dtype)

        self.x, self.y, self.dh, self.g = rand(STREAMS, dim), rand(dim), rand(dim), rand(STREAMS, dim)
        self.post, self.res = rand(STREAMS, dtype=torch.float32), rand(STREAMS, STREAMS, dtype=torch.float32)
        self.pre, self.gain = rand(STREAMS, dtype=torch.float32), torch.rand(dim, device=device) + 0.5
        self.unit = self.y.nbytes

    def first(self, *names: str) -> list[Tensor]:
        """Return the first tokens of some tensors in fp64."""
        return [getattr(self, name)[:ROWS].double() for name in names]

    def written(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute exactly what the site writes."""
        post, res = self.first("post", "res")
        return torch.einsum("toi,tid->tod", res, x) + torch.einsum("to,td->tod", post, y)

    def normed(self, x: Tensor) -> Tensor:
        """Compute exactly the normed read of some streams."""
        return normed(torch.einsum("ti,tid->td", *self.first("pre"), x), self.gain, EPS)


def stream_write(reads: bool) -> Callable[[int, int, torch.device], Work]:
    """Set up the write to all streams with the sums that mHC's weights need.

    With `reads`, the next read is part of it, since its weights are known.
    """

    def make(tokens: int, dim: int, device: torch.device) -> Work:
        from depthmix.ops.stream_mix.kernels.rows import Reading, Rows, write_rows

        site, results = Site(tokens, dim, device), list[Rows]()
        reading = Reading(site.pre, site.gain, EPS) if reads else None

        def run() -> None:
            results[:] = [write_rows(site.x, False, STREAMS, site.y, site.post, site.res, 1, reading)]

        def errors() -> dict[str, float]:
            x = site.written(*site.first("x", "y"))
            differences = {"x": relative_error(results[0].x[:ROWS].double(), x)}
            if results[0].h is not None:
                differences["h"] = relative_error(results[0].h[:ROWS].double(), site.normed(x))
            return differences

        return Work(run, (2 * STREAMS + 1 + reads) * site.unit, errors)

    return make


def stream_read(tokens: int, dim: int, device: torch.device) -> Work:
    """Set up a read with the norm that follows."""
    from depthmix.ops.stream_mix.kernels.read import read

    site, results = Site(tokens, dim, device), list[Tensor]()

    def run() -> None:
        results[:] = [read(site.x, False, STREAMS, site.pre, site.gain, EPS)[0]]

    def errors() -> dict[str, float]:
        return {"h": relative_error(results[0][:ROWS].double(), site.normed(*site.first("x")))}

    return Work(run, (STREAMS + 1) * site.unit, errors)


def stream_products(columns: int, sums: bool = False) -> Callable[[int, int, torch.device], Work]:
    """Set up the products of all streams with W, as inference runs them.

    mHC has 24 columns for all channels together, Hyper-Connections 6 for each stream. With `sums`, those of the streams too, which
    no write has computed.
    """

    def make(tokens: int, dim: int, device: torch.device) -> Work:
        from depthmix.ops.stream_mix.kernels.split_product import split_product
        from depthmix.ops.stream_mix.products import halves_of, split_by_kernels

        site, joint, results = Site(tokens, dim, device), columns > STREAMS + 2, list[Tensor | None]()
        w = torch.randn(columns, STREAMS * dim if joint else dim, device=device).T / dim**0.5
        halves = halves_of(w) if site.x.dtype == torch.bfloat16 and not split_by_kernels(site.x, w) else None

        def run() -> None:
            results[:] = split_product(site.x, STREAMS, w, halves, joint=joint, sums=sums)

        def errors() -> dict[str, float]:
            (x,), (z, squares) = site.first("x"), results
            assert z is not None
            expected = x.flatten(1) @ w.double() if joint else x @ w.double()
            differences = {"z": relative_error(z.double().sum(0)[:ROWS], expected)}
            if squares is not None and joint:
                differences["sums"] = relative_error(squares.double().sum(0)[:ROWS], x.square().sum((1, 2)))
            return differences

        weights = w.nbytes if halves is None else 2 * halves.nbytes // 3
        numbers = tokens * (columns if joint else columns * STREAMS) * 4
        return Work(run, STREAMS * site.unit + weights + numbers, errors)

    return make


def stream_coefficients(tokens: int, dim: int, device: torch.device) -> Work:
    """Set up mHC's coefficients with Sinkhorn's map, from as many slices of the products as a GPU makes."""
    from depthmix.ops.stream_mix.kernels import coefficients as kernel
    from depthmix.ops.stream_mix.kernels.split_product import split_product
    from depthmix.ops.stream_mix.rules import Rule, coefficients

    rule, site, results = Rule(STREAMS, joint=True, eps=EPS), Site(tokens, dim, device), list[kernel.Made]()
    columns = 2 * STREAMS + STREAMS**2
    w = torch.randn(columns, STREAMS * dim, device=device).T / (STREAMS * dim) ** 0.5
    base, scale = torch.randn(columns, device=device), torch.randn(3, device=device)
    slices, squares = split_product(site.x.float(), STREAMS, w, None, joint=True, sums=True)
    assert squares is not None
    # Where a row is written whole, one slice has its sums.
    squares = squares.sum(0, keepdim=True)

    def run() -> None:
        results[:] = [kernel.forward(rule, dim, slices, squares, base, scale, keep=True)]

    def errors() -> dict[str, float]:
        z, square = slices[:, :ROWS].double().sum(0), squares[:1, :ROWS].double().sum(0)
        expected = coefficients(rule, dim, z, square, base.double(), scale.double())
        pairs = zip(("pre", "post", "res"), results[0], expected, strict=False)
        return {k: relative_error(a[:ROWS].double(), e) for k, a, e in pairs if a is not None and e is not None}

    return Work(run, slices.nbytes + (2 * columns + 2) * tokens * 4, errors)


def stream_read_backward(known: bool) -> Callable[[int, int, torch.device], Work]:
    """Set up the sums over channels in the backward of a read and its norm.

    If the weights were known, the sums are over the result instead of the streams.
    """

    def make(tokens: int, dim: int, device: torch.device) -> Work:
        from depthmix.ops.stream_mix.kernels.read import norm_backward, read, read_backward

        site, results = Site(tokens, dim, device), list[Tensor | None]()
        h, rho = read(site.x, False, STREAMS, site.pre, site.gain, EPS)
        assert rho is not None
        given = (site.x, False, STREAMS, site.pre, site.gain, rho)

        def run() -> None:
            results[:] = norm_backward(site.dh, h, *given) if known else read_backward(site.dh, *given)[1:]

        def errors() -> dict[str, float]:
            (dh, x), c = site.first("dh", "x"), results[0]
            assert c is not None
            return {"c": relative_error(c[:ROWS].double(), (dh * site.normed(x)).mean(-1))}

        return Work(run, (2 if known else STREAMS + 1) * site.unit, errors)

    return make


def stream_write_backward(columns: int) -> Callable[[int, int, torch.device], Work]:
    """Set up the gradients of the streams, of the written output and of its weights.

    mHC (24 columns) reads a product, Hyper-Connections compute it.
    """

    def make(tokens: int, dim: int, device: torch.device) -> Work:
        from depthmix.ops.stream_mix.kernels.read import read, read_backward
        from depthmix.ops.stream_mix.kernels.write_backward import (
            ReadGradient,
            ScanGradient,
            WriteGradients,
            write_backward,
        )
        from depthmix.ops.stream_mix.products import halves_of

        site, joint, results = Site(tokens, dim, device), columns > STREAMS + 2, list[WriteGradients]()
        new = torch.einsum("toi,tid->tod", site.res, site.x.float()) + site.post[..., None] * site.y[:, None]
        new = new.bfloat16()
        _, rho = read(new, False, STREAMS, site.pre, site.gain, EPS)
        assert rho is not None
        _, c, _ = read_backward(site.dh, new, False, STREAMS, site.pre, site.gain, rho)
        reading = ReadGradient(site.dh, site.pre, site.gain, rho, c)
        slopes = torch.randn(tokens, *(() if joint else (STREAMS,)), 2, device=device)
        if joint:
            # Streams are not centred.
            slopes[..., 1] = 0.0
            scan = ScanGradient(torch.randn_like(new), slopes)
        else:
            w = torch.randn(dim, columns, device=device)
            scan = ScanGradient(torch.randn(tokens, STREAMS, columns, device=device), slopes, halves_of(w))

        def run() -> None:
            results[:] = [write_backward(site.g, site.x, False, STREAMS, site.y, site.post, site.res, reading, scan)]

        def errors() -> dict[str, float]:
            """Compare with autograd of a function that has these gradients."""
            x, y = (t.requires_grad_() for t in site.first("x", "y"))
            g, dh = site.first("g", "dh")
            p = scan.products[:ROWS].double()
            p = p if joint else p @ w.double().t()
            slope, shift = slopes[:ROWS].double().view(len(g), -1, 1, 2).unbind(-1)
            z = site.written(x, y)
            total = (z * (g + p + shift)).sum() + (slope * z.square()).sum() / 2 + (dh * site.normed(z)).sum()
            expected = torch.autograd.grad(total, (x, y))
            actual = (results[0].dx, results[0].dy)
            pairs = zip("xy", actual, expected, strict=True)
            return {f"d{k}": relative_error(a[:ROWS].double(), b) for k, a, b in pairs if a is not None}

        return Work(run, (3 * STREAMS + 3 + STREAMS * joint) * site.unit, errors)

    return make
