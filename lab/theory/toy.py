"""The toy training of Figure 1: ten linear layers of rank 3 learn the identity, or a random affine map, of 100 channels.

    f_t(z) = V_t U_t z;   residual: g_t = Σ_j f_j;   GRN-v1: g_t = Σ_j b_tj f_j, b = 1 at the start;   f_0 = x ~ N(0, I)
    target x, or A x + b with A, b ~ N(0, 1);   plain SGD on the mean squared error per channel, 1,000 steps of 100 examples

The paper gives neither the initialisation of U and V nor its learning rate, and the result depends on both: `train` runs a grid.
The layers' inputs matter only through a_t = U_t g_t, three numbers. So only these are computed: U_t g_t = b_t0 U_t x + Σ_j b_tj (U_t V_j) a_j.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

# The standard deviation of U and V, or "torch" for the initialisation of nn.Linear.
Init = float | Literal["torch"]


@dataclass(frozen=True)
class Setting:
    """Settings of one training."""

    target: str  # identity or random
    rule: str  # residual or grn-v1
    init: Init
    lr: float


@dataclass(frozen=True)
class Size:
    """Sizes of the network and of its training. The defaults are the paper's."""

    d: int = 100
    n_layers: int = 10
    rank: int = 3
    steps: int = 1000
    batch: int = 100


PAPER = Size()


@dataclass
class Curves:
    """The loss of every setting [settings, steps + 1] on a held-out batch. It is inf after a run has diverged."""

    settings: list[Setting]
    losses: Tensor
    steps: list[int] = field(default_factory=list)

    def final(self, setting: Setting) -> float:
        """Return the loss at the end."""
        return float(self.losses[self.settings.index(setting), -1])


def train(settings: Sequence[Setting], size: Size = PAPER, seed: int = 0, every: int = 10) -> Curves:
    """Train all settings at once, on the same batches, in fp64.

    The loss is recorded before each `every`th step and at the end.
    """
    generator = torch.Generator().manual_seed(seed)
    n, d = len(settings), size.d
    draw: Any = {"generator": generator, "dtype": torch.float64}
    matrix, offset = torch.randn(d, d, **draw), torch.randn(d, **draw)
    identity = torch.tensor([s.target == "identity" for s in settings]).view(n, 1, 1)
    u, v = _start(settings, size, generator)
    b = torch.ones(n, size.n_layers, size.n_layers + 1, dtype=torch.float64)  # [settings, reader, entry], x is entry 0
    lr = torch.tensor([s.lr for s in settings], dtype=torch.float64).view(n, 1, 1)
    trains_b = torch.tensor([float(s.rule == "grn-v1") for s in settings], dtype=torch.float64).view(n, 1, 1)
    held_out = torch.randn(200, d, **draw)
    weights = [w.requires_grad_() for w in (u, v, b)]

    def losses(x: Tensor) -> Tensor:
        goal = torch.where(identity, x, x @ matrix.T + offset)  # [n, examples, d]
        return (_forward(x, u, v, b, size.rank) - goal).square().mean(dim=(1, 2))

    steps, recorded = [], []
    for step in range(size.steps + 1):
        if step % every == 0 or step == size.steps:
            with torch.no_grad():
                steps.append(step)
                recorded.append(losses(held_out))
        if step == size.steps:
            break
        gradients = torch.autograd.grad(losses(torch.randn(size.batch, d, **draw)).sum(), weights)
        with torch.no_grad():
            for w, g, rate in zip(weights, gradients, (lr, lr, lr * trains_b), strict=True):
                # A diverged gradient times zero is not zero.
                w -= torch.where(rate == 0, 0.0, rate * g)
    return Curves(list(settings), torch.stack(recorded, 1).nan_to_num(nan=math.inf), steps)


def _start(settings: Sequence[Setting], size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return U [n, layers x rank, d] and V [n, d, layers x rank]: the same random numbers, scaled, for every setting."""
    d, k = size.d, size.n_layers * size.rank
    options: Any = {"generator": generator, "dtype": torch.float64}
    normal = torch.randn(k, d, **options), torch.randn(d, k, **options)
    uniform = 2 * torch.rand(k, d, **options) - 1, 2 * torch.rand(d, k, **options) - 1
    as_linear = uniform[0] / math.sqrt(d), uniform[1] / math.sqrt(size.rank)  # ±1/sqrt(inputs)
    starts = [as_linear if s.init == "torch" else tuple(s.init * w for w in normal) for s in settings]
    return torch.stack([u for u, _ in starts]), torch.stack([v for _, v in starts])


def _forward(x: Tensor, u: Tensor, v: Tensor, b: Tensor, rank: int) -> Tensor:
    """Return the output [n, examples, d] for x [examples, d].

    In b [n, layers, layers + 1], row i reads for layer i + 2, and the last row for the output.
    """
    n_layers = b.shape[1]
    # [n, examples, layers x rank], by one product.
    ux = (x @ u.flatten(0, 1).T).unflatten(-1, (len(u), -1)).transpose(0, 1)
    uv = u @ v  # [n, layers x rank, layers x rank]
    # Outputs of the layers so far, before V. Layer 1 reads x alone.
    a = ux[..., :rank]
    for layer in range(1, n_layers):
        of_layer = slice(layer * rank, (layer + 1) * rank)
        scale = b[:, layer - 1, 1 : layer + 1].repeat_interleave(rank, -1).unsqueeze(1)  # [n, 1, entries x rank]
        read = b[:, layer - 1, 0].view(-1, 1, 1) * ux[..., of_layer] + (a * scale) @ uv[:, of_layer, : layer * rank].mT
        a = torch.cat([a, read], dim=-1)
    scale = b[:, -1, 1:].repeat_interleave(rank, -1).unsqueeze(1)
    return b[:, -1, 0].view(-1, 1, 1) * x + (a * scale) @ v.mT
