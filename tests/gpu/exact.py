"""What GPU tests compare with: depth attention from its equations in fp64, and a stack whose values are rounded where kernels round."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from depthmix import create_mixer

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OUTPUT = {BF16: 2e-3, FP16: 3e-4, FP32: 2e-6}  # relative errors: of one rounding, and of a few
GRADIENT = {BF16: 1e-2, FP16: 2e-3, FP32: 2e-6}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
    g = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=g, device=DEVICE, dtype=FP32) * scale).to(dtype)


def error(actual: Tensor, expected: Tensor) -> float:
    """The length of the difference, relative to the length of what is expected. NaN counts as infinitely wrong."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    actual, expected = actual.detach().double(), expected.detach().double()
    difference = (actual - expected).norm() / expected.norm().clamp(min=1e-30)
    return float(difference.nan_to_num(nan=float("inf")))


def attend(
    u: Tensor, sources: Sequence[Tensor], eps: float, gain: Tensor | None = None, out_eps: float = 0.0
) -> list[Tensor]:
    """A mixture for each row of u [W, D], of sources [..., D]; with a gain [W, D] each through its RMSNorm."""
    v = torch.stack(list(sources))  # [n, ..., D]
    keys = v / (v.square().mean(-1, keepdim=True) + eps).sqrt()
    outs = [(torch.softmax(keys @ row, 0).unsqueeze(-1) * v).sum(0) for row in u]
    if gain is None:
        return outs
    return [o / (o.square().mean(-1, keepdim=True) + out_eps).sqrt() * g for o, g in zip(outs, gain, strict=True)]


class Stack(nn.Module):
    """A mixer, the norms behind its reads, and sublayers that scale channels, which is exact up to one rounding."""

    def __init__(self, n_blocks: int, dim: int, **options: Any) -> None:
        super().__init__()
        self.mixer = create_mixer("attnres", dim=dim, n_blocks=n_blocks, **options)
        sites = range(2 * n_blocks)
        self.weight = nn.Parameter(torch.empty(len(sites), 3, dim))
        self.norms = nn.ModuleList(
            nn.ModuleList(nn.RMSNorm(dim, eps=1e-5) for _ in range(self.mixer.ways(s))) for s in sites
        )
        self.to(DEVICE)
        for i, (name, p) in enumerate(self.named_parameters()):
            noise = draw(*p.shape, seed=100 + i)
            p.data.copy_(noise / dim**0.5 if name.startswith("mixer.query") else 1 + 0.3 * noise)

    def sublayer(self, site: int, h: Any) -> Tensor:
        ways = h if isinstance(h, tuple) else (h,)
        return sum(t * w.to(t.dtype) for t, w in zip(ways, self.weight[site], strict=False))

    def forward(self, x: Tensor) -> Tensor:
        state = self.mixer.start(x)
        for site in range(self.mixer.n_sites):
            h = self.mixer.read(state, site, self.norms[site])
            state = self.mixer.write(state, site, self.sublayer(site, h))
        return self.mixer.finish(state)


class Round(torch.autograd.Function):
    """fp64 numbers as a narrower dtype holds them; the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).double()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def exact_stack(stack: Stack, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The stack (fp64 parameters, fp64 x) from the equations, with reads, outputs and block sums rounded to dtype."""
    m, n_sites, size = stack.mixer, stack.mixer.n_sites, stack.mixer.block_size
    blocks, partial = [x], None
    for site in range(n_sites + 1):
        sources = blocks if partial is None else [*blocks, partial]
        rows = [m.query[site] * m.key_gain[site]]
        if site < n_sites and m.ways(site) == 2:
            rows.append(m.query_v[site // 2] * m.key_gain_v[site // 2])
        if site < n_sites and m.ways(site) == 3:
            rows += list(m.query_kv[site // 2] * m.key_gain_kv[site // 2])
        if site == n_sites:
            return Round.apply(attend(rows, sources, m.eps)[0], dtype)
        gain = torch.stack([n.weight for n in stack.norms[site]])
        h = [Round.apply(t, dtype) for t in attend(rows, sources, m.eps, gain, 1e-5)]
        y = Round.apply(stack.sublayer(site, tuple(h)), dtype)
        if m.output_gain is not None:
            y = m.gamma[site] * y
        partial = Round.apply(y if partial is None else partial + y, dtype)
        if (site + 1) % size == 0:
            blocks, partial = [*blocks, partial], None
    raise AssertionError
