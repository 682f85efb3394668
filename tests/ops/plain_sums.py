"""The kernels of weighted sums over depth in plain PyTorch, with the same signatures: what the autograd around them is tested with.

A result is computed in fp32 and rounded once, as a kernel does it. Nothing here is differentiable.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from depthmix.ops.depth_attention.kernels.tiling import SplitRows


class Sums(NamedTuple):
    y: list[Tensor]
    raw: Tensor | None
    kept: list[Tensor]
    mixtures: int
    rms: Tensor | None
    fresh: Tensor | None


class Need(NamedTuple):
    static: bool
    dynamic: bool
    by_source: bool = False


class ReadGradients(NamedTuple):
    do: list[Tensor]
    dgain: Tensor | None
    dstatic: Tensor | None
    ddynamic: Tensor | None
    through: Tensor | None


class Target(NamedTuple):
    like: Tensor
    g: Tensor | None
    part: Tensor | None
    whole: bool


class Reader(NamedTuple):
    do: Tensor
    static: list[Tensor] | None
    dynamic: list[Tensor] | None
    relu: int
    ds: list[Tensor] | None
    w: list[Tensor] | None


def rows(x: Tensor) -> Tensor:
    assert x.is_contiguous()
    return x.reshape(-1, x.shape[-1]).float()


@torch.no_grad()
def add_and_score(v: Tensor, add: Tensor | None, w: SplitRows, across: bool = False) -> tuple[Tensor, Tensor]:
    fresh = v if add is None else (v.float() + add.float()).to(v.dtype)
    w = w.high if v.dtype == torch.float32 else w.high.float() + w.low.float()
    scores = rows(fresh) @ w.T
    return fresh, scores.t().contiguous().t() if across else scores


@torch.no_grad()
def score_backward(v: Tensor, ds: Sequence[Tensor]) -> Tensor:
    return (torch.stack(list(ds)) @ rows(v)).unsqueeze(0)


def weight(static: Tensor | None, dynamic: Tensor | None, relu: int) -> Tensor:
    """Of one way and source: [N or 1, D or 1]. static [D or 1], dynamic [N]."""
    d: Any = 0 if dynamic is None else dynamic.unsqueeze(-1)
    d = d.clamp(min=0) if relu == 1 and dynamic is not None else d
    total = d if static is None else static.unsqueeze(0) + d
    return total.clamp(min=0) if relu == 2 else total


def counts(static: Tensor | None, dynamic: Tensor | None, relu: int) -> Any:
    """Where the clamped weight has a derivative with respect to the dynamic part."""
    if relu == 0:
        return 1.0
    assert dynamic is not None
    d = dynamic.unsqueeze(-1)
    return ((d if relu == 1 or static is None else static.unsqueeze(0) + d) >= 0).float()


def at(x: Tensor | None, w: int, i: int) -> Tensor | None:
    return None if x is None else x[w, i]


@torch.no_grad()
def read(
    sources: Sequence[Tensor], add: Tensor | None, static: Tensor | None, dynamic: Sequence[Tensor] | None, relu: int,
    gain: Tensor | None, out_eps: float, raw: int | None, keep: bool, plain: bool = False,
) -> Sums:  # fmt: skip
    fresh = None
    if add is not None:
        assert dynamic is None
        fresh = (sources[-1].float() + add.float()).to(add.dtype)
        sources = [*sources[:-1], fresh]
    ways = len(static) if static is not None else dynamic[0].shape[-1]
    like, mixed = sources[-1], []
    for w in range(ways):
        out: Any = 0
        for i, v in enumerate(sources):
            out = out + weight(at(static, w, i), None if dynamic is None else dynamic[i][:, w], relu) * rows(v)
        mixed.append(out)
    if gain is None:
        assert raw is None
        return Sums([o.to(like.dtype).view_as(like).clone() for o in mixed], None, [], 0, None, fresh)
    normed = mixed[: len(gain)]
    rms = torch.stack([(o.square().mean(-1) + out_eps).rsqrt() for o in normed])
    y = [
        (o * r.unsqueeze(-1) * k).to(like.dtype).view_as(like).clone()
        for o, r, k in zip(normed, rms, gain, strict=True)
    ]
    rough = None if raw is None else mixed[raw].to(like.dtype).view_as(like).clone()
    own = [like if plain and len(sources) == 1 else rough if w == raw else None for w in range(len(gain))]
    kept = [x if m is None else m for x, m in zip(y, own, strict=True)]
    mixtures = sum(1 << w for w, m in enumerate(own) if m is not None)
    return Sums(y, rough, kept if keep else [], mixtures, rms, fresh)


@torch.no_grad()
def read_backward(
    dy: Sequence[Tensor | None], draw: Tensor | None, raw: int | None, kept: Sequence[Tensor], rms: Tensor | None,
    gain: Tensor | None, sources: Sequence[Tensor], static: Tensor | None, dynamic: Sequence[Tensor] | None, relu: int,
    need: Need, mixtures: int = 0, passed: Tensor | None = None,
) -> ReadGradients:  # fmt: skip
    like, n = sources[-1], len(sources)
    ways = len(static) if static is not None else dynamic[0].shape[-1]
    do, dgain, through = [], None if gain is None else torch.zeros_like(gain), None
    for way in range(ways):
        given = dy[way] if way < len(dy) else None
        d = torch.zeros_like(rows(like)) if given is None else rows(given)
        if gain is not None and way < len(gain):
            assert gain[way].all()  # otherwise the sources would have to be mixed again
            x = rows(kept[way]) * (rms[way].unsqueeze(-1) if (mixtures >> way) % 2 else 1 / gain[way])
            dgain[way] = (d * x).sum(0)
            d = d * gain[way]
            d = (d - x * (d * x).mean(-1, keepdim=True)) * rms[way].unsqueeze(-1)
        if draw is not None and way == raw:
            d = d + rows(draw)
        do.append(d.to(like.dtype).view_as(like))
        if way == 0 and passed is not None:
            through = (d + rows(passed)).to(like.dtype).view_as(like)
    tokens = rows(like).shape[0]
    dstatic = None if static is None else torch.zeros_like(static)
    ddynamic = torch.zeros(tokens, ways, n) if dynamic is not None else None
    for way in range(ways):
        for i, v in enumerate(sources):
            s, t = at(static, way, i), None if dynamic is None else dynamic[i][:, way]
            product = rows(do[way]) * rows(v)
            if dstatic is not None:
                total = (product * (counts(s, t, relu) if relu == 2 else 1.0)).sum(0)
                dstatic[way, i] = total if dstatic.shape[-1] > 1 or len(total) == 1 else total.sum()
            if ddynamic is not None:
                ddynamic[:, way, i] = (product * counts(s, t, relu)).sum(-1)
    return ReadGradients(do, dgain, dstatic if need[0] else None, ddynamic if need[1] else None, through)


@torch.no_grad()
def source_backward(targets: Sequence[Target], readers: Sequence[Reader]) -> list[Tensor]:
    assert len(targets) in (1, 2)
    found = []
    for k, target in enumerate(targets):
        total = torch.zeros_like(rows(torch.zeros_like(target.like)))
        for reader in readers:
            if all(x is None or x[k] is None for x in (reader.static, reader.dynamic)):
                continue  # it does not read this source
            static, dynamic = (None if x is None else x[k] for x in (reader.static, reader.dynamic))
            total = total + weight(static, dynamic, reader.relu) * rows(reader.do)
            if reader.ds is not None:
                total = total + reader.ds[k].unsqueeze(-1) * reader.w[k]
        for other in (target.g, target.part):
            total = total if other is None else total + rows(other)
        total = total.view(target.like.shape)
        found.append(total.to(target.like.dtype) if target.whole else total)
    return found


class Kept(NamedTuple):
    z: Tensor
    r: Tensor


class CoefficientGradients(NamedTuple):
    dx: Tensor
    dw_1: Tensor
    dw_2: Tensor
    db: Tensor


@torch.no_grad()
def coefficients(x: Tensor, w_1: Tensor, w_2: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Kept]:
    r = (rows(x).square().mean(-1) + eps).rsqrt()
    z = (rows(x) @ w_1.T) * r.unsqueeze(-1)
    return functional.gelu(z) @ w_2.T + b, Kept(z, r)


@torch.no_grad()
def coefficients_backward(
    da: Tensor, x: Tensor, w_1: Tensor, w_2: Tensor, kept: Kept, need_x: bool, need_w_1: bool
) -> CoefficientGradients:
    (z, r), v = kept, rows(x)
    dz = da @ w_2 * (0.5 * (1 + (z / 2**0.5).erf()) + z * (-0.5 * z.square()).exp() / (2 * torch.pi) ** 0.5)
    e = dz * r.unsqueeze(-1)
    dx = e @ w_1 - v * (r.square() * (dz * z).sum(-1) / v.shape[-1]).unsqueeze(-1)
    return CoefficientGradients(dx.to(x.dtype).view_as(x), e.T @ v, da.T @ functional.gelu(z), da.sum(0))


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Run these in place of the kernels."""
    files = ("coefficients", "scores", "read", "read_backward", "source_backward")
    names = [f"depthmix.ops.depth_sum.kernels.{n}" for n in files]
    before = {n: sys.modules[n] for n in names if n in sys.modules}
    sys.modules.update(dict.fromkeys(names, sys.modules[__name__]))
    try:
        yield
    finally:
        for n in names:
            del sys.modules[n]
        sys.modules.update(before)
