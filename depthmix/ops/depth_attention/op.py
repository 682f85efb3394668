"""depth_attention: checks, autograd with a lean backward, and (when kernels come) the choice between them and the reference."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.checks import check_shape, check_sources, leading
from depthmix.ops.depth_attention.reference import depth_attention_reference, spread, weighted_sum, weights
from depthmix.ops.precision import compute_dtype, promoted_dtype, rms_normalize, without_autocast


class DepthAttention(torch.autograd.Function):
    """The reference with a backward that keeps nothing but references to the sources and a few numbers a token.

    With do_w the gradient of o_w, and a weight's own gradient dp where the caller uses the weights:

        dp_i += do · v_i                       per head
        ds_i  = p_i (dp_i − Σ_j p_j dp_j)      softmax;   dp_i p_i (1 − p_i)   sigmoid
        dv_i  = Σ_w  p_i do + ds_i r_i u − (Σ_heads ds_i s_i) r_i² / D · v_i
        du    = Σ_i ds_i r_i v_i               summed over tokens unless u is per token
    """

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, eps: float, key_norm: bool, heads: int, activation: str, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        s, p, rs = weights(u, sources, eps, key_norm, heads, activation)
        ctx.options, ctx.n = (eps, key_norm, heads, activation), len(sources)
        ctx.save_for_backward(u, s, p, *(rs or ()), *sources)
        return (p, *[weighted_sum(p_w, sources) for p_w in p])

    @staticmethod
    def backward(ctx: Any, dp: Tensor, *do: Tensor) -> tuple[Tensor | None, ...]:
        u, s, p, *rest = ctx.saved_tensors  # once: a second access fails inside a checkpointed region
        sources, rs = rest[-ctx.n :], rest[: -ctx.n]
        need_u, need_v = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        with without_autocast(dp):
            if torch.is_grad_enabled():
                du, *dv = reference_gradients(
                    partial(_with_weights, ctx.options), (u, *sources), (need_u, *need_v), (dp, *do)
                )
            else:
                du, dv = _backward(ctx.options, u, s, p, rs, sources, dp, do, need_u, need_v)
        return (du, None, None, None, None, *dv)


def _with_weights(options: tuple[Any, ...], u: Tensor, *sources: Tensor) -> tuple[Tensor, ...]:
    outs, p = depth_attention_reference(u, sources, *options)
    return (p, *outs)


def _backward(
    options: tuple[Any, ...],
    query: Tensor,
    s: Tensor,
    p: Tensor,
    rs: Sequence[Tensor],
    sources: Sequence[Tensor],
    dp: Tensor,
    do: Sequence[Tensor],
    need_u: bool,
    need_v: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    _, key_norm, heads, activation = options
    wide, u, dim = s.dtype, query.to(s.dtype), query.shape[-1]
    dp = dp + torch.stack([torch.stack([_dot(d, v.to(wide), heads) for v in sources], dim=-2) for d in do])
    ds = p * (dp - (p * dp).sum(-2, keepdim=True)) if activation == "softmax" else dp * p * (1 - p)  # [W, ..., n, H]
    du = torch.zeros_like(u)
    dv: list[Tensor | None] = []
    for i, source in enumerate(sources):
        v, total = source.to(wide), None
        for w, d in enumerate(do):
            t = ds[w, ..., i, :]  # [..., H]
            radial = (t * s[w, ..., i, :]).sum(-1, keepdim=True)
            t = t * rs[i].unsqueeze(-1) if key_norm else t
            if need_u:
                du[w] += spread(t, v) if u.ndim > 2 else spread(t, v).reshape(-1, dim).sum(0)
            if need_v[i]:
                g = spread(p[w, ..., i, :], d) + spread(t, u[w].expand_as(v))
                g = g - radial * rs[i].square().unsqueeze(-1) / dim * v if key_norm else g
                total = g if total is None else total + g
        dv.append(None if total is None else total.to(source.dtype))
    return du.to(query.dtype) if need_u else None, dv


def _dot(a: Tensor, b: Tensor, heads: int) -> Tensor:
    return (a * b).unflatten(-1, (heads, -1)).sum(-1)


def depth_attention(
    query: Tensor,
    sources: Sequence[Tensor],
    key_gain: Tensor | None = None,
    eps: float = 1e-6,
    out_gain: Tensor | None = None,
    return_weights: bool = False,
    *,
    key_norm: bool = True,
    heads: int = 1,
    activation: str = "softmax",
    out_eps: float | None = None,
) -> Any:
    """Attention of one token's query over its sources in depth (equations in reference.py).

    query: [D], the same for every token, or [..., D] like the sources (three dimensions or more), one a token;
        with a leading dimension W, W queries read the same sources and a tuple of W results comes back.
    sources: a list of n tensors [..., D]; they are neither stacked nor copied.
    key_gain: [D] or [W, D], the gain of the keys' RMSNorm.
    out_gain: [D] or [W, D]: the result goes through an RMSNorm with this gain (and `out_eps`, by default eps) before it is rounded.
    return_weights: also return the weights, [..., n] ([W, ..., n] with ways), with heads > 1 [..., n, heads].
    """
    op = "depth_attention"
    check_sources(op, sources)
    first = sources[0]
    dim, tokens = first.shape[-1], tuple(first.shape[:-1])
    many = not (query.ndim == 1 or (query.ndim == first.ndim >= 3 and query.shape == first.shape))
    n_ways = leading(query) if many else 1
    static, lead = (dim,), (n_ways,) if many else ()
    check_shape(op, "query", query, first, (*lead, *static), (*lead, *tokens, dim))
    for name, gain in (("key_gain", key_gain), ("out_gain", out_gain)):
        if gain is not None:
            check_shape(op, name, gain, first, static, (*lead, *static))
    if heads < 1 or dim % heads:
        raise ValueError(f"{op}: heads must divide the {dim} channels, got {heads}")
    if activation not in ("softmax", "sigmoid"):
        raise ValueError(f"{op}: activation must be 'softmax' or 'sigmoid', got {activation!r}")
    if key_gain is not None and not key_norm:
        raise ValueError(f"{op}: key_gain belongs to the keys' norm, but key_norm is False")

    dtype = promoted_dtype(tuple(sources))
    with without_autocast(first):
        wide = compute_dtype(query, *sources)
        u = query.to(wide)
        if key_gain is not None:
            gain = key_gain.to(wide)
            u = u * (gain if gain.ndim == 1 else gain.reshape(n_ways, *(1,) * (u.ndim - 2), dim))
        u = u if many else u.unsqueeze(0)
        if torch.is_grad_enabled():
            p, *outs = DepthAttention.apply(u, eps, key_norm, heads, activation, *sources)
        else:
            results, p = depth_attention_reference(u, sources, eps, key_norm, heads, activation)
            outs = list(results)
        if out_gain is not None:
            gains = (out_gain if out_gain.ndim == 2 else out_gain.unsqueeze(0).expand(n_ways, -1)).to(wide)
            norm_eps = eps if out_eps is None else out_eps
            outs = [rms_normalize(o, norm_eps) * g for o, g in zip(outs, gains, strict=True)]
        outs = [o.to(dtype) for o in outs]
    result = tuple(outs) if many else outs[0]
    if not return_weights:
        return result
    p = p if heads > 1 else p.squeeze(-1)
    return result, (p if many else p[0])
