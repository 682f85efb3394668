"""depth_sum and depth_scores: check arguments and choose between kernels and the reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthmix.ops.backend import choose
from depthmix.ops.checks import KERNEL_DTYPES, check_shape, check_sources, leading, why_too_wide
from depthmix.ops.depth_sum import library  # noqa: F401  (registers the operators)
from depthmix.ops.depth_sum.reference import depth_scores_reference, depth_sum_reference
from depthmix.ops.depth_sum.reference_autograd import DepthScores, DepthSum, SourceScores, scores, sums
from depthmix.ops.depth_sum.source_order import ADDED, SUM_CLAMPED, Weights, read_sums
from depthmix.ops.precision import promoted_dtype, widen, without_autocast
from depthmix.ops.torch_internals import transformed

# Sums that one kernel computes at once.
MAX_WAYS = 4


def why_unsupported(sources: Sequence[Tensor], *, wide: bool) -> str | None:
    """Return why the kernels cannot read these sources, or None if they can. wide: the weights are float64."""
    dtype, dim = sources[0].dtype, sources[0].shape[-1]
    if wide:
        return "they compute in float32, and the weights are float64"
    if dtype not in KERNEL_DTYPES or any(v.dtype != dtype for v in sources):
        return "they know sources of one dtype, float32, bfloat16 or float16"
    return why_too_wide(dim)


def depth_sum(
    sources: Sequence[Tensor],
    static: Tensor | None = None,
    dynamic: Tensor | None = None,
    relu: bool = False,
    *,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """Compute W weighted sums of the same n sources (equations in reference.py).

    Args:
        sources: n tensors [..., D].
        static: [W, n, D] or [W, n, 1], shared by all tokens.
        dynamic: [..., W, n], one weight per token. At least one of static and dynamic is needed; both are added.
        relu: clamp the weights at zero, with derivative 1 at zero.
        backend: "triton" or "reference". By default `use_backend` decides, then kernels run where they can.

    Returns:
        W tensors [..., D], rounded once to the sources' dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        BackendError: "triton" was asked for and cannot run this call.

    Examples:
        >>> sources = [torch.ones(2, 16, 64), torch.ones(2, 16, 64)]
        >>> (total,) = depth_sum(sources, static=torch.ones(1, 2, 1))  # the plain residual sum
    """
    op = "depth_sum"
    alike = check_sources(op, sources)
    first, n = sources[0], len(sources)
    if static is None and dynamic is None:
        raise ValueError(f"{op}: expected static or dynamic weights, or both, got none")
    if static is not None:
        check_shape(op, "static", static, first, (leading(static), n, first.shape[-1]), (leading(static), n, 1))
    if dynamic is not None:
        n_ways = leading(static) if static is not None else dynamic.shape[-2] if dynamic.ndim > 1 else 1
        check_shape(op, "dynamic", dynamic, first, (*first.shape[:-1], n_ways, n))
    # One for all of its dtype.
    kinds = (first,) if alike else tuple(sources)
    dtype = promoted_dtype(kinds)
    weights = [t for t in (static, dynamic) if t is not None]
    n_ways = leading(static) if static is not None else weights[0].shape[-2]
    why = why_unsupported(kinds, wide=any(t.dtype == torch.float64 for t in weights))
    why = why or (f"they form up to {MAX_WAYS} sums at once" if n_ways > MAX_WAYS else None)
    with without_autocast(first):
        if choose(op, first, why, backend) == "triton":
            b, a = (None if t is None else widen(t, torch.float32) for t in (static, dynamic))
            if torch.compiler.is_compiling():
                return tuple(torch.ops.depthmix.depth_sum_read(sources, b, a, relu))
            return read_sums(sources, Weights(static=b, dynamic=a, relu=SUM_CLAMPED if relu else ADDED)).y
        if transformed():
            outs = depth_sum_reference(sources, static, dynamic, relu)
        elif torch.is_grad_enabled():
            outs = DepthSum.apply(relu, None, static, dynamic, None, *sources)
        else:
            outs = sums(relu, static, dynamic, sources)
        return tuple(out.to(dtype) for out in outs)


def depth_sum_normed(
    sources: Sequence[Tensor],
    gain: Tensor,
    eps: float,
    raw: int,
    static: Tensor | None = None,
    dynamic: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, ...]:
    """Run depth_sum on the reference with RMSNorms after the first sums, as one autograd node.

    The caller has checked the arguments and wants gradients.

    Args:
        sources, static, dynamic, relu: as for `depth_sum`.
        gain: [V, D], of the norms of the first V sums.
        eps: of the norms.
        raw: the sum to return unnormed as well.

    Returns:
        The V normed sums and then sum `raw`, each rounded once.
    """
    dtype = promoted_dtype(tuple(sources))
    with without_autocast(sources[0]):
        outs = DepthSum.apply(relu, (eps, raw), static, dynamic, gain, *sources)
        return tuple(out.to(dtype) for out in outs)


def depth_scores(sources: Sequence[Tensor], w: Tensor) -> Tensor:
    """Compute the dot product of every source with its vectors.

    Args:
        sources: n tensors [..., D].
        w: [W, n, D], or [W, 1, D] shared by all sources.

    Returns:
        [..., W, n] in fp32 (fp64 for fp64), not rounded.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.

    Examples:
        >>> depth_scores([torch.randn(2, 16, 64)] * 3, torch.randn(1, 3, 64)).shape
        torch.Size([2, 16, 1, 3])
    """
    op = "depth_scores"
    check_sources(op, sources)
    first = sources[0]
    n_ways, dim = leading(w), first.shape[-1]
    check_shape(op, "w", w, first, (n_ways, len(sources), dim), (n_ways, 1, dim))
    with without_autocast(first):
        if transformed():
            return depth_scores_reference(sources, w)
        return DepthScores.apply(w, *sources) if torch.is_grad_enabled() else scores(w, sources)


def source_scores(v: Tensor, w: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Compute the dot products of one source v [..., D] with the vectors w [R, D] of several readers: [size, ...] for each.

    The caller has checked the arguments and wants gradients.
    """
    with without_autocast(v):
        products: tuple[Tensor, ...] = SourceScores.apply(tuple(sizes), w, v)
        return products
