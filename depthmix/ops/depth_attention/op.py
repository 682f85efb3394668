"""depth_attention: checks, the choice between kernels and the reference, and the reference's autograd with a lean backward."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backend import choose
from depthmix.ops.checks import check_shape, check_sources, leading
from depthmix.ops.depth_attention.reference import depth_attention_reference
from depthmix.ops.precision import compute_dtype, promoted_dtype, rms_normalize, widen, without_autocast

MAX_DIM = 16384  # channels of a row that fit in the registers of 32 warps
MAX_WAYS = 3  # mixtures that one kernel reads at once


Options = tuple[float, bool, int, str]  # eps, key_norm, heads, activation


class Mixed(NamedTuple):
    """What a read worked out, by way: results (not rounded), weights and logits [n, ..., H], ρ [..., 1]; and r [n, ..., 1]."""

    outs: list[Tensor]
    p: list[Tensor]
    s: list[Tensor]
    rho: list[Tensor]
    r: Tensor | None


class DepthAttention(torch.autograd.Function):
    """The reference in few operators, and a backward that keeps references to the sources and a few numbers a token.

    With a gain g for the norm of the result, y = g ⊙ ρ o with ρ = (mean(o²) + out_eps)^(-1/2), and o is mixed again:

        dg = Σ_tokens ρ o ⊙ dy
        do = ρ (g ⊙ dy − (g · (o ⊙ dy)) ρ² / D · o)

    With do_w the gradient of o_w, and a weight's own gradient dp where the caller uses the weights:

        dp_i += do · v_i                       per head
        ds_i  = p_i (dp_i − Σ_j p_j dp_j)      softmax;   dp_i p_i (1 − p_i)   sigmoid
        dv_i  = Σ_w  p_i do + ds_i r_i u − (Σ_heads ds_i s_i) r_i² / D · v_i
        du    = Σ_i ds_i r_i v_i               summed over tokens unless u is per token
    """

    @staticmethod
    def forward(
        ctx: Any, options: Options, out_eps: float, with_weights: bool, u: Tensor, gain: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        mixed = _forward(options, out_eps, u, gain, sources)
        ctx.options, ctx.out_eps, ctx.with_weights, ctx.n = options, out_eps, with_weights, len(sources)
        ctx.save_for_backward(u, gain, mixed.r, *sources, *mixed.p, *mixed.s, *mixed.rho)
        return (*mixed.outs, *mixed.p) if with_weights else tuple(mixed.outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        u, gain, r, *rest = ctx.saved_tensors  # once: a second access fails inside a checkpointed region
        n, ways, needs = ctx.n, u.shape[0], ctx.needs_input_grad[3:]
        sources, by_way = rest[:n], rest[n:]
        mixed = Mixed([], by_way[:ways], by_way[ways : 2 * ways], by_way[2 * ways :], r)
        with without_autocast(u):
            if torch.is_grad_enabled():
                reference = partial(_reference, ctx.options, ctx.out_eps, ctx.with_weights)
                found = reference_gradients(reference, (u, gain, *sources), needs, grads)
            else:
                found = _backward(ctx.options, u, gain, sources, mixed, grads[:ways], grads[ways:], needs)
        return (None, None, None, *found)


def _reference(
    options: Options, out_eps: float, with_weights: bool, u: Tensor, gain: Tensor | None, *sources: Tensor
) -> tuple[Tensor, ...]:
    outs, p = depth_attention_reference(u, sources, *options)
    if gain is not None:
        outs = tuple(rms_normalize(o, out_eps) * g for o, g in zip(outs, gain, strict=True))
    return (*outs, *p.movedim(-2, 1)) if with_weights else outs


def _forward(options: Options, out_eps: float, u: Tensor, gain: Tensor | None, sources: Sequence[Tensor]) -> Mixed:
    eps, key_norm, heads, activation = options
    ways, norms = u.unbind(), []
    dots: list[list[Tensor]] = [[] for _ in ways]
    for source in sources:
        v = widen(source, u.dtype)
        for found, u_w in zip(dots, ways, strict=True):
            found.append(_dot(u_w, v, heads))
        if key_norm:
            norms.append(torch.linalg.vector_norm(v, dim=-1, keepdim=True))
    mixed = Mixed([], [], [], [], _rstd(torch.stack(norms), u.shape[-1], eps) if key_norm else None)
    for w, found in enumerate(dots):
        s = _stack(found, heads)
        s = s if mixed.r is None else s.mul_(mixed.r)
        p = torch.softmax(s, dim=0) if activation == "softmax" else torch.sigmoid(s)
        o = _mix(p.unbind(), sources)
        if gain is not None:
            mixed.rho.append(_rstd(torch.linalg.vector_norm(o, dim=-1, keepdim=True), u.shape[-1], out_eps))
            o.mul_(mixed.rho[-1]).mul_(gain[w])
        mixed.outs.append(o)
        mixed.p.append(p)
        mixed.s.append(s)
    return mixed


def _backward(
    options: Options,
    u: Tensor,
    gain: Tensor | None,
    sources: Sequence[Tensor],
    mixed: Mixed,
    dy: Sequence[Tensor],
    dweights: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    _, _, heads, activation = options
    (need_u, _, *need_v), dim, r = needs, u.shape[-1], mixed.r
    ways, weights, radial = u.unbind(), [p.unbind() for p in mixed.p], None
    do, dgain, steps, du = list(dy), [], [], []
    for w, (p, s) in enumerate(zip(mixed.p, mixed.s, strict=True)):
        if gain is not None:
            rho, o = mixed.rho[w], _mix(weights[w], sources)
            product = (o * dy[w]).reshape(-1, dim)
            dgain.append(product.T.mv(rho.reshape(-1)))
            along = product.mv(gain[w]).view_as(rho).mul_(rho).mul_(rho)
            do[w] = (dy[w] * gain[w]).addcmul_(o, along, value=-1 / dim).mul_(rho)
        dp = _stack([_dot(do[w], widen(v, u.dtype), heads) for v in sources], heads)
        dp = dp + dweights[w] if dweights else dp
        ds = p * (dp - (p * dp).sum(0)) if activation == "softmax" else dp * p * (1 - p)  # [n, ..., H]
        t = ds if r is None else ds * r
        if r is not None:
            own = t * s if heads == 1 else (t * s).sum(-1, keepdim=True)
            radial = own * r if radial is None else radial.addcmul_(own, r)  # [n, ..., 1]
        steps.append(t.unbind())
        if need_u:
            by_token = _mix(steps[w], sources)
            du.append(by_token if u.ndim > 2 else by_token.reshape(-1, dim).sum(0))
    dv: list[Tensor | None] = [None] * len(sources)
    for i, source in enumerate(sources):
        if need_v[i]:
            total = _mix([p_w[i] for p_w in weights], do)
            for u_w, t_w in zip(ways, steps, strict=True):
                _by_head(total, heads).addcmul_(_by_head(u_w, heads), _to_group(t_w[i]))
            if radial is not None:
                total.addcmul_(radial[i], widen(source, u.dtype), value=-1 / dim)
            dv[i] = widen(total, source.dtype)
    return [torch.stack(du) if need_u else None, torch.stack(dgain) if dgain else None, *dv]


def _by_head(x: Tensor, heads: int) -> Tensor:
    """x with its channels in groups, [..., D] -> [..., H, D/H]; with one head as it is."""
    return x if heads == 1 else x.unflatten(-1, (heads, -1))


def _to_group(p: Tensor) -> Tensor:
    """A number a head, [..., H], so that it multiplies the head's group of channels in `_by_head`."""
    return p if p.shape[-1] == 1 else p.unsqueeze(-1)


def _dot(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """a · b by head: a [D] or [..., D], b [..., D] -> [..., H], or with one head [...]."""
    if a.ndim == 1 and heads == 1:
        return b @ a  # a matrix times a vector: no setting lets a GPU do that in TF32
    return _by_head(a * b, heads).sum(-1)


def _stack(dots: list[Tensor], heads: int) -> Tensor:
    """The dot products of n sources as one tensor [n, ..., H]."""
    return torch.stack(dots).unsqueeze_(-1) if heads == 1 else torch.stack(dots)


def _rstd(norm: Tensor, dim: int, eps: float) -> Tensor:
    """(mean(x²) + eps)^(-1/2) in the place of |x|."""
    return norm.square_().div_(dim).add_(eps).rsqrt_()


def _mix(p: Sequence[Tensor], sources: Sequence[Tensor]) -> Tensor:
    """Σ_i p_i v_i: n weights [..., H], n sources [..., D] -> [..., D]."""
    heads = p[0].shape[-1]
    o = _by_head(sources[0], heads) * _to_group(p[0])
    for p_i, v in zip(p[1:], sources[1:], strict=True):
        o.addcmul_(_by_head(widen(v, o.dtype), heads), _to_group(p_i))
    return o if heads == 1 else o.flatten(-2)


def why_unsupported(
    sources: Sequence[Tensor], *, static: bool, wide: bool, key_norm: bool, heads: int, activation: str
) -> str | None:
    """Why the kernels cannot do a read, or None if they can. static: queries that all tokens share; wide: in float64."""
    dtype, dim = sources[0].dtype, sources[0].shape[-1]
    if not static or not key_norm or heads != 1 or activation != "softmax":
        return "they know one head, softmax, normed keys and queries that all tokens share"
    if wide:
        return "they compute in float32, and the queries are float64"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) or any(v.dtype != dtype for v in sources):
        return "they know sources of one dtype, float32, bfloat16 or float16"
    return None if dim <= MAX_DIM else f"a token's {dim} channels do not fit; they hold up to {MAX_DIM}"


def read_sources(
    queries: Tensor,
    row: int,
    ways: int,
    sources: Sequence[Tensor],
    add: Tensor | None,
    gain: Tensor | None,
    eps: float,
    out_eps: float,
    far: Any = None,
) -> tuple[list[Tensor], Tensor]:
    """Read with kernels: the results of queries[row : row + ways] and the newest source, sources[-1] (+ add).

    queries: [R, D] fp32, key gains included. gain: [W, D] of the norm that follows, or None. A stack of reads is
    differentiated in source-major order if `queries` came through `collect_queries`, the sources are newest sources that
    earlier reads returned, and nothing is being compiled. far: what `far_sources` or `known_sources` found for this row.
    The caller has checked that the kernels can do it.
    """
    from depthmix.ops.depth_attention.ahead import read
    from depthmix.ops.depth_attention.source_major import ReadSources

    queries, sources = queries.contiguous(), [v.contiguous() for v in sources]
    add, gain = (None if t is None else t.contiguous() for t in (add, gain))
    given = (queries, gain, add, *sources)
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    if wanted and not torch.compiler.is_compiling():
        *y, fresh = ReadSources.apply((row, ways), (eps, out_eps), far, queries, gain, add, *sources)
        return y, fresh
    (y, _, _, _, fresh), _ = read(queries, row, ways, sources, far, add, gain, eps, out_eps, int(wanted))
    return y, sources[-1] if add is None else fresh


FAR_TOKENS, FAR_SOURCES = 512, 8  # from which on it pays to look at old sources for a group of sites at once


def far_sources(queries: Tensor, row: int, olds: Sequence[Tensor], far: Any, eps: float) -> Any:
    """What the group of sites that a row belongs to sees of the sources before it, for `read_sources`; None if nothing.

    For stacks in which site number `row` reads `row` older sources. far: what the last call returned. Depth is tiled: the
    queries are known beforehand, so the first site of a group reads the older sources once for the whole group.
    """
    from depthmix.ops.depth_attention.ahead import look_ahead
    from depthmix.ops.depth_attention.tiling import GROUP

    if not _worth_it(olds) or len(olds) != row:
        return None
    if row % GROUP == 0 and FAR_SOURCES <= row <= len(queries) - 2:
        return look_ahead(queries, row, [v.contiguous() for v in olds], far, eps)
    return far if far is not None and far.row <= row < far.row + len(far.lse) else None


def known_sources(queries: Tensor, row: int, olds: Sequence[Tensor], known: Any, eps: float) -> Any:
    """The logits of the older sources of a row for all the rows from it on, for `read_sources`; None if that does not pay.

    For reads of several ways, whose dot products would take longer than their memory. known: what the last call returned.
    """
    from depthmix.ops.depth_attention.ahead import know

    return know(queries, row, [v.contiguous() for v in olds], known, eps) if _worth_it(olds) else None


def _worth_it(olds: Sequence[Tensor]) -> bool:
    tokens = olds[0].numel() // olds[0].shape[-1] if olds else 0
    return tokens >= FAR_TOKENS and not torch.compiler.is_compiling()


def collect_queries(queries: Tensor) -> Tensor:
    """The queries of a stack of reads, [R, D], as `read_sources` wants them."""
    from depthmix.ops.depth_attention.source_major import CollectQueries

    collect = queries.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return CollectQueries.apply(queries) if collect else queries


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
    backend: str | None = None,
) -> Any:
    """Attention of one token's query over its sources in depth (equations in reference.py).

    query: [D], the same for every token, or [..., D] like the sources (three dimensions or more), one a token;
        with a leading dimension W, W queries read the same sources and a tuple of W results comes back.
    sources: a list of n tensors [..., D]; they are neither stacked nor copied.
    key_gain: [D] or [W, D], the gain of the keys' RMSNorm.
    out_gain: [D] or [W, D]: the result goes through an RMSNorm with this gain (and `out_eps`, by default eps) before it is rounded.
    return_weights: also return the weights, [..., n] ([W, ..., n] with ways), with heads > 1 [..., n, heads].
    backend: "triton" or "reference" forces one; by default, and unless `use_backend` says otherwise, kernels run where they can.
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
        u = widen(query, wide)
        if key_gain is not None:
            gain = widen(key_gain, wide)
            u = u * (gain if gain.ndim == 1 or u.ndim == 2 else gain.reshape(n_ways, *(1,) * (u.ndim - 2), dim))
        u = u if many else u.unsqueeze(0)
        gains, norm_eps = None, eps if out_eps is None else out_eps
        if out_gain is not None:
            gains = out_gain if out_gain.ndim == 2 else out_gain.unsqueeze(0).expand(n_ways, -1)
            gains = widen(gains, wide)
        why = (
            "they do not return weights"
            if return_weights
            else why_unsupported(
                sources,
                static=u.ndim == 2,
                wide=query.dtype == torch.float64,
                key_norm=key_norm,
                heads=heads,
                activation=activation,
            )
        )
        if choose(op, first, why, backend) == "triton":
            results = []
            step = MAX_WAYS if n_ways % MAX_WAYS == 0 else 1
            for w in range(0, n_ways, step):
                gain = None if gains is None else gains[w : w + step].contiguous()
                results += read_sources(u, w, step, sources, None, gain, eps, norm_eps)[0]
            return tuple(results) if many else results[0]
        options = (eps, key_norm, heads, activation)
        if torch.is_grad_enabled():
            found = DepthAttention.apply(options, norm_eps, return_weights, u, gains, *sources)
            outs, p = found[:n_ways], found[n_ways:]
        else:
            outs, p = _forward(options, norm_eps, u, gains, sources)[:2]
        outs = [widen(o, dtype) for o in outs]
    result = tuple(outs) if many else outs[0]
    if not return_weights:
        return result
    p = torch.stack([p_w.movedim(0, -2) if heads > 1 else p_w.squeeze(-1).movedim(0, -1) for p_w in p])
    return result, (p if many else p[0])
