"""depth_attention: check arguments and choose between kernels and the reference."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.backend import choose
from depthmix.ops.checks import KERNEL_DTYPES, all_plain, check_shape, check_sources, leading, why_too_wide
from depthmix.ops.depth_attention.general_read import GeneralRead
from depthmix.ops.depth_attention.normed_read import read_normed, reads_normed
from depthmix.ops.depth_attention.reference_autograd import DepthAttention, Options, attend, differentiable
from depthmix.ops.depth_attention.source_order import read_sources
from depthmix.ops.precision import compute_dtype, promoted_dtype, widen, without_autocast
from depthmix.ops.torch_internals import dispatcher_is_idle, transformed

# Mixtures that one kernel computes at once.
MAX_WAYS = 3


def is_usual(options: Options, static: bool) -> bool:
    """Return whether the kernels of whole stacks know a read. Other reads have kernels of their own (general_read.py).

    Args:
        options: how the read weighs its sources.
        static: all tokens share the query.
    """
    _, key_norm, heads, activation, value_norm = options
    return static and key_norm and heads == 1 and activation == "softmax" and not value_norm


def why_unsupported(sources: Sequence[Tensor], *, wide: bool, heads: int = 1) -> str | None:
    """Return why the kernels cannot do a read, or None if they can. wide: the queries are float64."""
    dtype, dim = sources[0].dtype, sources[0].shape[-1]
    if wide:
        return "they compute in float32, and the queries are float64"
    if dtype not in KERNEL_DTYPES or any(v.dtype != dtype for v in sources):
        return "they know sources of one dtype, float32, bfloat16 or float16"
    return why_too_wide(dim, power_of_two(heads) * power_of_two(dim // heads))


def power_of_two(n: int) -> int:
    """Return the next power of two, or n itself; torch.jit.trace has tensors for sizes."""
    return 1 << (int(n) - 1).bit_length()


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
    value_norm: bool = False,
    out_eps: float | None = None,
    backend: str | None = None,
) -> Any:
    """Mix n sources by attention over depth: each token's query attends to its own n sources (equations in reference.py).

    Args:
        query: [D], shared by all tokens, or [..., D] like the sources (three dimensions or more), one per token. With a leading
            dimension W, W queries read the same sources.
        sources: list of n tensors [..., D]. They are neither stacked nor copied.
        key_gain: [D] or [W, D], gain of the keys' RMSNorm.
        eps: of the RMSNorm of keys and values.
        out_gain: [D] or [W, D]. The result goes through an RMSNorm with this gain before it is rounded.
        return_weights: also return the attention weights.
        key_norm: normalise the keys; without it key_gain must be None.
        heads: number of channel groups with weights of their own; divides D.
        activation: "softmax" over sources, or "sigmoid" element by element.
        value_norm: mix normalised sources; their norm has no gain.
        out_eps: of the RMSNorm with out_gain, by default eps.
        backend: "triton" or "reference". By default `use_backend` decides, then kernels run where they can.

    Returns:
        The mixture [..., D] in the sources' dtype, or a tuple of W of them. With return_weights a pair: the mixture and the weights
        [..., n], with ways [W, ..., n], with heads > 1 [..., n, heads].

    Raises:
        ValueError: shapes, dtypes, devices or options do not fit together.
        BackendError: "triton" was asked for and cannot run this call.

    Examples:
        >>> sources = [torch.randn(2, 16, 64) for _ in range(3)]
        >>> depth_attention(torch.zeros(64), sources).shape  # a zero query averages the sources
        torch.Size([2, 16, 64])
    """
    op = "depth_attention"
    alike = check_sources(op, sources)
    first = sources[0]
    shape = tuple(first.shape)
    dim = shape[-1]
    many = not (query.ndim == 1 or (query.ndim == first.ndim >= 3 and query.shape == first.shape))
    n_ways = leading(query) if many else 1
    static, lead = (dim,), (n_ways,) if many else ()
    check_shape(op, "query", query, first, (*lead, *static), (*lead, *shape))
    for name, gain in (("key_gain", key_gain), ("out_gain", out_gain)):
        if gain is not None:
            check_shape(op, name, gain, first, static, (*lead, *static))
    if heads < 1 or dim % heads:
        raise ValueError(f"{op}: heads must divide the {dim} channels, got {heads}")
    if activation not in ("softmax", "sigmoid"):
        raise ValueError(f"{op}: activation must be 'softmax' or 'sigmoid', got {activation!r}")
    if key_gain is not None and not key_norm:
        raise ValueError(f"{op}: key_gain belongs to the keys' norm, but key_norm is False")
    norm_eps = eps if out_eps is None else out_eps
    if (
        alike
        and all_plain(query, key_gain, out_gain)
        and dispatcher_is_idle()
        and query.ndim == 1 + many
        and key_norm
        and heads == 1
        and activation == "softmax"
        and not return_weights
        and choose(op, first, why_unsupported((first,), wide=query.dtype == torch.float64), backend) == "triton"
    ):
        mixtures = _read_without_gradients(query, sources, key_gain, out_gain, eps, norm_eps, value_norm)
        return tuple(mixtures) if many else mixtures[0]

    # One for all of its dtype.
    kinds = (first,) if all(v.dtype == first.dtype for v in sources) else tuple(sources)
    dtype = promoted_dtype(kinds)
    with without_autocast(first):
        wide = compute_dtype(query, *kinds)
        u = widen(query, wide)
        if key_gain is not None:
            gain = widen(key_gain, wide)
            u = u * (gain if gain.ndim == 1 or u.ndim == 2 else gain.reshape(n_ways, *(1,) * (u.ndim - 2), dim))
        u = u if many else u.unsqueeze(0)
        gains = None
        if out_gain is not None:
            gains = out_gain if out_gain.ndim == 2 else out_gain.unsqueeze(0).expand(n_ways, -1)
            gains = widen(gains, wide)
        options = Options(eps, key_norm, heads, activation, value_norm)
        usual = is_usual(options, static=u.ndim == 2)
        why = why_unsupported(kinds, wide=query.dtype == torch.float64, heads=heads)
        if return_weights:
            why = "they do not return weights"
        elif not usual and torch.compiler.is_compiling() and not (u.ndim == 2 and reads_normed(options)):
            why = "torch.compile makes its own of reads with these options"
        kernels = choose(op, first, why, backend) == "triton"
        results: list[Tensor]
        if kernels and u.ndim == 2 and reads_normed(options):
            results = []
            for w in range(0, n_ways, MAX_WAYS):
                gain = None if gains is None else gains[w : w + MAX_WAYS]
                rows = u[w : w + MAX_WAYS]
                results += read_normed((eps, norm_eps), dtype, False, rows, gain, None, None, sources)[0]
            return tuple(results) if many else results[0]
        if kernels and not usual:
            mixtures = GeneralRead.apply(options, norm_eps, torch.is_grad_enabled(), u, gains, *sources)
            return tuple(mixtures) if many else mixtures[0]
        if kernels:
            results = []
            for w in range(0, n_ways, MAX_WAYS):
                step = min(MAX_WAYS, n_ways - w)
                gain = None if gains is None else gains[w : w + step].contiguous()
                results += read_sources(u, w, step, sources, None, gain, eps, norm_eps)[0]
            return tuple(results) if many else results[0]
        # torch.func and torch.compile derive a backward of their own.
        by_torch = transformed() or torch.compiler.is_compiling()
        if by_torch or torch.is_grad_enabled():
            compute = differentiable if by_torch else DepthAttention.apply
            outputs: list[Tensor] = [*compute(options, norm_eps, return_weights, u, gains, *sources)]
            outs, p = outputs[:n_ways], outputs[n_ways:]
        else:
            outs, p = attend(options, norm_eps, u, gains, sources)[:2]
        outs = [widen(o, dtype) for o in outs]
    result = tuple(outs) if many else outs[0]
    if not return_weights:
        return result
    weights = torch.stack([p_w.movedim(0, -2) if heads > 1 else p_w.squeeze(-1).movedim(0, -1) for p_w in p])
    return result, (weights if many else weights[0])


def _read_without_gradients(
    query: Tensor, sources: Sequence[Tensor], key_gain: Tensor | None, out_gain: Tensor | None, eps: float, norm_eps: float, value_norm: bool
) -> list[Tensor]:  # fmt: skip
    """Read by softmax with queries [D] or [W, D] that all tokens share, by kernels. The caller has checked that they can do it.

    A read of few tokens takes a GPU 15 µs, so what counts is how little is done here. Nothing passes the dispatcher or autograd, and
    nothing is kept for a backward.
    """
    mixtures = _mixtures_by_kernel()
    query = widen(query, torch.float32)
    if key_gain is not None:
        query = query * widen(key_gain, torch.float32)
    if out_gain is not None:
        out_gain = widen(out_gain, torch.float32).expand(query.shape).contiguous()
    query, sources = query.contiguous(), [v.contiguous() for v in sources]
    if query.ndim == 1:
        return mixtures(query, sources, None, out_gain, eps, norm_eps, value_norm)
    results: list[Tensor] = []
    for w in range(0, len(query), MAX_WAYS):
        gain = None if out_gain is None else out_gain[w : w + MAX_WAYS]
        results += mixtures(query[w : w + MAX_WAYS], sources, None, gain, eps, norm_eps, value_norm)
    return results


@functools.cache
def _mixtures_by_kernel() -> Callable[..., list[Tensor]]:
    """Return the launch of a read. Importing it at each call would take 1 µs; triton is not imported before it is needed."""
    from depthmix.ops.depth_attention.kernels.read import mixtures

    return mixtures
