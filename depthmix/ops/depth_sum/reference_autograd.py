"""The reference's sums and scores in few PyTorch operators, with backwards that save only the sources and round each gradient once."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.depth_sum.reference import depth_scores_reference, depth_sum_reference
from depthmix.ops.matmul import matmul
from depthmix.ops.norm import normed, normed_backward
from depthmix.ops.precision import compute_dtype, rms_normalize, widen, without_autocast


class DepthSum(torch.autograd.Function):
    """Compute the W sums, not rounded. The backward adds up a source's gradient over ways and terms in fp32.

        dv_i = Σ_w weight[w, i] ⊙ do_w;    dstatic[w, i] = Σ_tokens do_w ⊙ v_i;    ddynamic[w, i] = do_w · v_i

    with relu only where static + dynamic ≥ 0. With norm = (eps, raw), return the first sums normed with the rows of a gain, then sum
    `raw` unnormed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        relu: bool,
        norm: tuple[float, int] | None,
        static: Tensor | None,
        dynamic: Tensor | None,
        gain: Tensor | None,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        outs = sums(relu, static, dynamic, sources)
        ctx.relu, ctx.norm, ctx.n = relu, norm, len(sources)
        if gain is None or norm is None:
            ctx.save_for_backward(static, dynamic, gain, *sources)
            return outs
        (eps, raw), gains = norm, widen(gain, outs[0].dtype).unbind()
        made = [normed(o, g, eps) for o, g in zip(outs, gains, strict=False)]
        ctx.save_for_backward(static, dynamic, gain, *sources, *outs[: len(made)], *(rho for _, rho in made))
        return (*(y for y, _ in made), outs[raw])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        static, dynamic, gain, *rest = ctx.saved_tensors
        sources, kept, do, dgain = rest[: ctx.n], rest[ctx.n :], list(grads), None
        with without_autocast(grads[0]):
            if torch.is_grad_enabled():
                inputs, needed = (static, dynamic, gain, *sources), ctx.needs_input_grad[2:]
                return None, None, *reference_gradients(partial(_sum_reference, ctx.relu, ctx.norm), inputs, needed, do)
            if kept:
                do, dgain = _norms_backward(gain, kept, ctx.norm[1], grads)
            need_static, need_dynamic, _, *need_v = ctx.needs_input_grad[2:]
            dstatic, ddynamic, *dv = _sums_backward(
                ctx.relu, static, dynamic, sources, do, (need_static, need_dynamic, *need_v)
            )
            return None, None, dstatic, ddynamic, dgain, *dv


def _norms_backward(
    gain: Tensor, kept: Sequence[Tensor], raw: int, grads: Sequence[Tensor]
) -> tuple[list[Tensor], Tensor]:
    """Return the gradients of the sums and of the gain, from those of the normed sums and of sum `raw`."""
    n, wide = len(gain), kept[0].dtype
    pairs = [
        normed_backward(o, g, rho, widen(dy, wide))
        for o, g, rho, dy in zip(kept[:n], widen(gain, wide).unbind(), kept[n:], grads[:n], strict=True)
    ]
    do = [d for d, _ in pairs]
    if raw < n:
        do[raw] = do[raw].add_(grads[n])
    else:
        do.append(widen(grads[n], wide))
    return do, widen(torch.stack([d for _, d in pairs]), gain.dtype)


class DepthScores(torch.autograd.Function):
    """Compute the scores of all sources.

    dv_i = Σ_w ds[w, i] w[w, i];    dw[w, i] = Σ_tokens ds[w, i] v_i,    summed over the sources where they share w
    """

    @staticmethod
    def forward(ctx: Any, w: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(w, *sources)
        return scores(w, sources)

    @staticmethod
    def backward(ctx: Any, ds: Tensor) -> tuple[Tensor | None, ...]:
        w, *sources = ctx.saved_tensors
        with without_autocast(ds):
            if torch.is_grad_enabled():
                return tuple(reference_gradients(_scores_reference, (w, *sources), ctx.needs_input_grad, [ds]))
            return tuple(_scores_backward(w, sources, ds, ctx.needs_input_grad))


class SourceScores(torch.autograd.Function):
    """Compute the scores of one source with the vectors [R, D] of several readers: [R_r, ...] for each reader.

    dv = Σ_r ds[r] w[r];    dw[r] = Σ_tokens ds[r] v
    """

    @staticmethod
    def forward(ctx: Any, sizes: tuple[int, ...], w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        ctx.sizes, wide = sizes, compute_dtype(w, v)
        ctx.save_for_backward(w, v)
        return matmul(widen(w, wide), _rows(v, wide).T).view(len(w), *v.shape[:-1]).split(sizes)

    @staticmethod
    def backward(ctx: Any, *ds: Tensor) -> tuple[Tensor | None, ...]:
        w, v = ctx.saved_tensors
        with without_autocast(v):
            if torch.is_grad_enabled():
                needed = ctx.needs_input_grad[1:]
                return None, *reference_gradients(partial(source_scores_reference, ctx.sizes), (w, v), needed, ds)
            d, wide = torch.cat(ds).view(len(w), v.shape[:-1].numel()), ds[0].dtype
            dw = widen(matmul(d, _rows(v, wide)), w.dtype) if ctx.needs_input_grad[1] else None
            return None, dw, widen(matmul(d.T, widen(w, wide)).view(v.shape), v.dtype)


def source_scores_reference(sizes: tuple[int, ...], w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Compute SourceScores in plain PyTorch."""
    return depth_scores_reference([v], w.unsqueeze(1)).squeeze(-1).movedim(-1, 0).split(sizes)


def _sum_reference(
    relu: bool,
    norm: tuple[float, int] | None,
    static: Tensor | None,
    dynamic: Tensor | None,
    gain: Tensor | None,
    *sources: Tensor,
) -> tuple[Tensor, ...]:
    outs = depth_sum_reference(sources, static, dynamic, relu)
    return outs if gain is None or norm is None else depth_norms_reference(outs, gain, *norm)


def depth_norms_reference(outs: Sequence[Tensor], gain: Tensor, eps: float, raw: int) -> tuple[Tensor, ...]:
    """Return the first sums normed, then sum `raw` unnormed."""
    return *(rms_normalize(o, eps) * g.to(o.dtype) for o, g in zip(outs, gain, strict=False)), outs[raw]


def _scores_reference(w: Tensor, *sources: Tensor) -> Tensor:
    return depth_scores_reference(sources, w)


class _Weights:
    """Hold the weights by way and source, each shaped to multiply a source: [D] or [1], [..., 1], or their sum."""

    def __init__(self, relu: bool, static: Tensor | None, dynamic: Tensor | None, wide: torch.dtype) -> None:
        self.relu = relu
        self.static = None if static is None else [s.unbind() for s in widen(static, wide).unbind()]
        self.dynamic = None
        if dynamic is not None:
            # Tokens last, so that each way's numbers are contiguous.
            tokens_last = widen(dynamic, wide).movedim((-2, -1), (0, 1)).contiguous()
            self.dynamic = [d.unsqueeze(-1).unbind() for d in tokens_last.unbind()]
        self.n_ways = len(self.static or self.dynamic or ())

    def of(self, way: int, i: int) -> Tensor:
        """Return the weight of a source in a way, before its relu."""
        if self.static is None or self.dynamic is None:
            return (self.static or self.dynamic)[way][i]  # type: ignore[index]
        return self.static[way][i] + self.dynamic[way][i]


def sums(relu: bool, static: Tensor | None, dynamic: Tensor | None, sources: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Compute depth_sum_reference with one pass over each sum per source."""
    wide = compute_dtype(*sources, *(t for t in (static, dynamic) if t is not None))
    weights = _Weights(relu, static, dynamic, wide)
    outs: list[Tensor] = []
    for i, source in enumerate(sources):
        v = widen(source, wide)
        for w in range(weights.n_ways):
            weight = weights.of(w, i)
            weight = weight.clamp(min=0) if relu else weight
            if i == 0:
                outs.append(v * weight)
            else:
                outs[w].addcmul_(v, weight)
    return tuple(outs)


def _sums_backward(
    relu: bool,
    static: Tensor | None,
    dynamic: Tensor | None,
    sources: Sequence[Tensor],
    do: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    need_static, need_dynamic, *need_v = needs
    wide, rows, dim = do[0].dtype, do[0].shape[:-1].numel(), do[0].shape[-1]
    weights = _Weights(relu, static, dynamic, wide)
    all_ways = torch.stack(list(do)) if len(do) > 1 else do[0].unsqueeze(0)  # [W, ..., D]
    dstatic: list[Tensor] = []
    ddynamic: list[Tensor] = []
    dv: list[Tensor | None] = []
    for i, source in enumerate(sources):
        by_way = [weights.of(w, i) for w in range(len(do))]
        if need_static or need_dynamic:
            product = all_ways * widen(source, wide)
            if relu:
                for p, weight in zip(product.unbind(), by_way, strict=True):
                    p.mul_(weight >= 0)
            if need_static and static is not None:
                by_channel = product.reshape(len(do), rows, dim).sum(1)
                dstatic.append(by_channel if static.shape[-1] == dim else by_channel.sum(1, keepdim=True))
            if need_dynamic:
                ddynamic.append(product.sum(-1))
        total = None
        for d, weight in zip(do, by_way if need_v[i] else (), strict=False):
            weight = weight.clamp(min=0) if relu else weight
            total = d * weight if total is None else total.addcmul_(d, weight)
        dv.append(None if total is None else widen(total, source.dtype))
    by_token = _stacked(ddynamic, dynamic)
    return [_stacked(dstatic, static), None if by_token is None else by_token.movedim((0, 1), (-2, -1)), *dv]


def _stacked(grads: list[Tensor], like: Tensor | None) -> Tensor | None:
    """Stack gradients by source, [W, ...] each, into [W, n, ...]."""
    return widen(torch.stack(grads, dim=1), like.dtype) if grads and like is not None else None


def scores(w: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """Compute depth_scores_reference with one matrix product per source."""
    wide = compute_dtype(w, *sources)
    products = [matmul(w_i, _rows(v, wide).T) for w_i, v in zip(_by_source(w, sources, wide), sources, strict=True)]
    return torch.stack(products).view(len(sources), len(w), *sources[0].shape[:-1]).movedim((1, 0), (-2, -1))


def _by_source(w: Tensor, sources: Sequence[Tensor], wide: torch.dtype) -> tuple[Tensor, ...]:
    """Return the vectors [W, D] for every source."""
    return widen(w, wide).expand(-1, len(sources), -1).unbind(1)


def _rows(v: Tensor, wide: torch.dtype) -> Tensor:
    return widen(v, wide).reshape(-1, v.shape[-1])


def _scores_backward(w: Tensor, sources: Sequence[Tensor], ds: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    need_w, *need_v = needs
    dw: list[Tensor] = []
    dv: list[Tensor | None] = []
    by_source = ds.movedim((-2, -1), (1, 0)).flatten(2) if ds.ndim > 2 else ds.T.unsqueeze(-1)  # [n, W, N]
    for i, (d, w_i, v) in enumerate(zip(by_source.unbind(), _by_source(w, sources, ds.dtype), sources, strict=True)):
        if need_w:
            dw.append(matmul(d, _rows(v, ds.dtype)))
        dv.append(widen(matmul(d.T, w_i).view(v.shape), v.dtype) if need_v[i] else None)
    if not need_w:
        return [None, *dv]
    total = torch.stack(dw, dim=1)
    return [widen(total if w.shape[1] == len(sources) else total.sum(1, keepdim=True), w.dtype), *dv]
