"""A stack of L sites around trivial sublayers: the cost of depth attention alone.

Timing uses identity sublayers, y = h. Checks use y = h ⊙ scale_s: with y = h every source of a Full stack would be the embedding, and
the gradient of every query zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import depthmix
from benchmarks.check import Results
from benchmarks.timing import Mark, Run

EPS = 1e-6
Sublayer = Callable[[int, Tensor], Tensor]  # (site, h) -> y
Read = Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]  # (query, sources, key_gain) -> h


@dataclass
class Problem:
    """A stack: sizes, parameters, input and the gradient of its output."""

    sites: int
    block_size: int | None  # sites per block; None: Full
    x: Tensor  # [1, N, D]
    query: Tensor  # [L + 1, D], fp32
    key_gain: Tensor  # [L + 1, D], fp32
    scale: Tensor  # [L, D]
    grad: Tensor  # [1, N, D]

    @classmethod
    def make(
        cls, sites: int, tokens: int, dim: int, block_size: int | None, dtype: torch.dtype, device: torch.device
    ) -> Problem:
        """Return a problem with logits of about one, so that the softmax is neither flat nor one-hot. Every call gives the same numbers."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator)

        scale = torch.rand(sites, dim, device=device, generator=generator) + 0.5
        return cls(
            sites,
            block_size,
            x=normal(1, tokens, dim).to(dtype),
            query=normal(sites + 1, dim) / dim**0.5,
            key_gain=1 + 0.1 * normal(sites + 1, dim),
            scale=(scale * normal(sites, dim).sign()).to(dtype),
            grad=normal(1, tokens, dim).to(dtype),
        )

    def scaled(self, site: int, h: Tensor) -> Tensor:
        """Apply the sublayer for checks."""
        return h * self.scale[site]


def identity(site: int, h: Tensor) -> Tensor:
    """Apply the sublayer for timing."""
    return h


@dataclass
class Built:
    """An implementation of a problem: its leaves, and its forward pass around given sublayers."""

    leaves: dict[str, Tensor]  # x, query, key_gain
    forward: Callable[[Sublayer], Tensor]


Build = Callable[[Problem], Built]


def ours(problem: Problem) -> Built:
    """Build depthmix's stack: the mixer's own four calls, as a model makes them."""
    dim, x = problem.x.shape[-1], problem.x.detach().clone().requires_grad_()
    options: dict[str, Any] = {} if problem.block_size is None else {"block_size": problem.block_size}
    mixer = depthmix.create_mixer("attnres", dim=dim, n_blocks=problem.sites // 2, eps=EPS, **options).to(x.device)
    parameters = dict(mixer.named_parameters())
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(getattr(problem, name))

    def forward(sublayer: Sublayer) -> Tensor:
        state = mixer.start(x)
        for site in range(problem.sites):
            h = mixer.read(state, site)
            assert isinstance(h, Tensor)
            state = mixer.write(state, site, sublayer(site, h))
        return mixer.finish(state)

    return Built({"x": x, **parameters}, forward)


def from_read(problem: Problem, read: Read) -> Built:
    """Build an implementation that offers one read."""
    leaves = {n: getattr(problem, n).detach().clone().requires_grad_() for n in ("x", "query", "key_gain")}
    with_leaves = replace(problem, **leaves)
    return Built(leaves, lambda sublayer: walk(with_leaves, read, sublayer))


def walk(problem: Problem, read: Read, sublayer: Sublayer) -> Tensor:
    """Do the paper's bookkeeping around one read.

    The first site reads its only source. As in the rivals' own models, nothing is computed for it.
    """
    size = problem.block_size or 1
    queries, gains = problem.query.unbind(0), problem.key_gain.unbind(0)
    blocks: list[Tensor] = [problem.x]
    partial: Tensor | None = None
    for site in range(problem.sites):
        sources = blocks if partial is None else [*blocks, partial]
        h = read(queries[site], sources, gains[site]) if len(sources) > 1 else sources[0]
        y = sublayer(site, h)
        partial = y if partial is None else partial + y
        if (site + 1) % size == 0:
            blocks, partial = [*blocks, partial], None
    sources = blocks if partial is None else [*blocks, partial]
    return read(queries[-1], sources, gains[-1])


def results(problem: Problem, build: Build) -> Results:
    """Return output and gradients, with the sublayers for checks."""
    built = build(problem)
    out = built.forward(problem.scaled)
    out.backward(problem.grad)
    return {"output": out.detach(), **gradients(built.leaves)}


def gradients(leaves: dict[str, Tensor]) -> Results:
    """Return the gradients of the leaves."""
    return {f"d {n}": leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}


def timed(problem: Problem, build: Build) -> Run:
    """Return a run with identity sublayers: forward, mark, backward, mark."""
    built = build(problem)

    def run(mark: Mark) -> None:
        for leaf in built.leaves.values():
            leaf.grad = None
        out = built.forward(identity)
        mark()
        out.backward(problem.grad)
        mark()

    return run
