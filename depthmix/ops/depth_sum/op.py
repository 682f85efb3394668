"""depth_sum and depth_scores: checks, and the choice between kernels and the reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthmix.ops.backend import choose
from depthmix.ops.checks import check_shape, check_sources, leading
from depthmix.ops.depth_sum import library  # noqa: F401  (registers the operators)
from depthmix.ops.depth_sum.reference import depth_scores_reference, depth_sum_reference
from depthmix.ops.depth_sum.reference_autograd import DepthScores, DepthSum, SourceScores, scores, sums
from depthmix.ops.depth_sum.source_order import ADDED, SUM_CLAMPED, Weights, read_sums
from depthmix.ops.precision import promoted_dtype, without_autocast
from depthmix.ops.torch_internals import transformed

MAX_DIM = 16384  # channels of a row that fit in the registers of 32 warps
MAX_WAYS = 4  # sums that one kernel forms at once


def why_unsupported(sources: Sequence[Tensor], *, wide: bool) -> str | None:
    """Why the kernels cannot read these sources, or None if they can. wide: the weights are float64."""
    dtype, dim = sources[0].dtype, sources[0].shape[-1]
    if wide:
        return "they compute in float32, and the weights are float64"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) or any(v.dtype != dtype for v in sources):
        return "they know sources of one dtype, float32, bfloat16 or float16"
    return None if dim <= MAX_DIM else f"a token's {dim} channels do not fit; they hold up to {MAX_DIM}"


def depth_sum(
    sources: Sequence[Tensor],
    static: Tensor | None = None,
    dynamic: Tensor | None = None,
    relu: bool = False,
    *,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """W weighted sums of the same n sources [..., D] (equations in reference.py), rounded once to the sources' dtype.

    static: [W, n, D] or [W, n, 1]; dynamic: [..., W, n]; at least one of them. relu clamps the weights at zero, with derivative 1 there.
    backend: "triton" or "reference" forces one; by default, and unless `use_backend` says otherwise, kernels run where they can.
    """
    op = "depth_sum"
    check_sources(op, sources)
    first, n = sources[0], len(sources)
    if static is None and dynamic is None:
        raise ValueError(f"{op}: expected static or dynamic weights, or both, got none")
    if static is not None:
        check_shape(op, "static", static, first, (leading(static), n, first.shape[-1]), (leading(static), n, 1))
    if dynamic is not None:
        n_ways = leading(static) if static is not None else dynamic.shape[-2] if dynamic.ndim > 1 else 1
        check_shape(op, "dynamic", dynamic, first, (*first.shape[:-1], n_ways, n))
    dtype = promoted_dtype(tuple(sources))
    given = [t for t in (static, dynamic) if t is not None]
    n_ways = leading(static) if static is not None else given[0].shape[-2]
    why = why_unsupported(sources, wide=any(t.dtype == torch.float64 for t in given))
    why = why or (f"they form up to {MAX_WAYS} sums at once" if n_ways > MAX_WAYS else None)
    with without_autocast(first):
        if choose(op, first, why, backend) == "triton":
            b, a = (None if t is None else t.float() for t in (static, dynamic))
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
    """depth_sum on the reference, the first sums under RMSNorms with the rows of gain [V, D] and rounded after them; then sum `raw` as it is.

    For those who have checked what they give, and want gradients: it is one node of autograd.
    """
    dtype = promoted_dtype(tuple(sources))
    with without_autocast(sources[0]):
        outs = DepthSum.apply(relu, (eps, raw), static, dynamic, gain, *sources)
        return tuple(out.to(dtype) for out in outs)


def depth_scores(sources: Sequence[Tensor], w: Tensor) -> Tensor:
    """The dot product of every source [..., D] with w [W, n, D] or [W, 1, D]: [..., W, n], not rounded."""
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
    """The dot products of one source [..., D] with the vectors w [R, D] of several readers, [size, ...] for each; as depth_sum_normed."""
    with without_autocast(v):
        found: tuple[Tensor, ...] = SourceScores.apply(tuple(sizes), w, v)
        return found
