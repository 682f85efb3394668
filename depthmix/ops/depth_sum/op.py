"""depth_sum and depth_scores: checks and (when kernels come) the choice between them and the reference."""

from collections.abc import Sequence

from torch import Tensor

from depthmix.ops.checks import check_shape, check_sources
from depthmix.ops.depth_sum.reference import depth_scores_reference, depth_sum_reference
from depthmix.ops.precision import promoted_dtype, without_autocast


def depth_sum(
    sources: Sequence[Tensor], static: Tensor | None = None, dynamic: Tensor | None = None, relu: bool = False
) -> tuple[Tensor, ...]:
    """W weighted sums of the same n sources [..., D] (equations in reference.py), rounded once to the sources' dtype.

    static: [W, n, D] or [W, n, 1]; dynamic: [..., W, n]; at least one of them. relu clamps the weights at zero, with derivative 1 there.
    """
    op = "depth_sum"
    check_sources(op, sources)
    first, n = sources[0], len(sources)
    if static is None and dynamic is None:
        raise ValueError(f"{op}: expected static or dynamic weights, or both")
    if static is not None:
        check_shape(op, "static", static, first, (len(static), n, first.shape[-1]), (len(static), n, 1))
    if dynamic is not None:
        n_ways = dynamic.shape[-2] if static is None else len(static)
        check_shape(op, "dynamic", dynamic, first, (*first.shape[:-1], n_ways, n))
    dtype = promoted_dtype(tuple(sources))
    with without_autocast(first):
        return tuple(out.to(dtype) for out in depth_sum_reference(sources, static, dynamic, relu))


def depth_scores(sources: Sequence[Tensor], w: Tensor) -> Tensor:
    """The dot product of every source [..., D] with w [W, n, D] or [W, 1, D]: [..., W, n], not rounded."""
    op = "depth_scores"
    check_sources(op, sources)
    first = sources[0]
    check_shape(op, "w", w, first, (len(w), len(sources), first.shape[-1]), (len(w), 1, first.shape[-1]))
    with without_autocast(first):
        return depth_scores_reference(sources, w)
