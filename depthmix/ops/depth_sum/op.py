"""depth_sum and depth_scores: checks, autograd that rounds once, and the choice between kernels and the reference."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backend import choose
from depthmix.ops.checks import check_shape, check_sources, leading
from depthmix.ops.depth_sum import library  # noqa: F401  (registers the operators)
from depthmix.ops.depth_sum.reference import depth_scores_reference, depth_sum_reference
from depthmix.ops.depth_sum.source_order import ADDED, SUM_CLAMPED, Weights, read_sums
from depthmix.ops.precision import promoted_dtype, without_autocast
from depthmix.ops.torch_internals import transformed


class DepthSum(torch.autograd.Function):
    """The reference with a backward that sums a source's gradient over ways and terms in fp32 and rounds it once.

        dv_i = Σ_w weight[w, i] ⊙ do_w;    dstatic[w, i] = Σ_tokens do_w ⊙ v_i;    ddynamic[w, i] = do_w · v_i

    with relu only where static + dynamic ≥ 0.
    """

    @staticmethod
    def forward(
        ctx: Any, relu: bool, static: Tensor | None, dynamic: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.relu = relu
        ctx.save_for_backward(static, dynamic, *sources)
        return depth_sum_reference(sources, static, dynamic, relu)

    @staticmethod
    def backward(ctx: Any, *do: Tensor) -> tuple[Tensor | None, ...]:
        static, dynamic, *sources = ctx.saved_tensors
        with without_autocast(do[0]):
            if torch.is_grad_enabled():
                inputs, needed = (static, dynamic, *sources), ctx.needs_input_grad[1:]
                return (None, *reference_gradients(partial(_reference, ctx.relu), inputs, needed, do))
            return (None, *_backward(ctx.relu, static, dynamic, sources, do, ctx.needs_input_grad[3:]))


def _reference(relu: bool, static: Tensor | None, dynamic: Tensor | None, *sources: Tensor) -> tuple[Tensor, ...]:
    return depth_sum_reference(sources, static, dynamic, relu)


def _backward(
    relu: bool,
    static: Tensor | None,
    dynamic: Tensor | None,
    sources: Sequence[Tensor],
    do: Sequence[Tensor],
    need_v: Sequence[bool],
) -> list[Tensor | None]:
    wide = do[0].dtype
    dstatic = None if static is None else torch.zeros_like(static, dtype=wide)
    ddynamic = None if dynamic is None else torch.zeros_like(dynamic, dtype=wide)
    dv: list[Tensor | None] = []
    for i, v in enumerate(sources):
        total: Any = 0
        for w, d in enumerate(do):
            weight: Any = 0 if static is None else static[w, i].to(wide)
            weight = weight if dynamic is None else weight + dynamic[..., w, i].to(wide).unsqueeze(-1)
            product = d * v
            if relu:
                weight, product = weight.clamp(min=0), product * (weight >= 0)
            if need_v[i]:
                total = total + weight * d
            if dstatic is not None:
                channels = product.reshape(-1, product.shape[-1]).sum(0)
                dstatic[w, i] = channels if dstatic.shape[-1] == len(channels) else channels.sum()
            if ddynamic is not None:
                ddynamic[..., w, i] = product.sum(-1)
        dv.append(total.to(v.dtype) if need_v[i] else None)
    return [
        None if dstatic is None or static is None else dstatic.to(static.dtype),
        None if ddynamic is None or dynamic is None else ddynamic.to(dynamic.dtype),
        *dv,
    ]


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
        if torch.is_grad_enabled() and not transformed():
            outs = DepthSum.apply(relu, static, dynamic, *sources)
        else:
            outs = depth_sum_reference(sources, static, dynamic, relu)
        return tuple(out.to(dtype) for out in outs)


def depth_scores(sources: Sequence[Tensor], w: Tensor) -> Tensor:
    """The dot product of every source [..., D] with w [W, n, D] or [W, 1, D]: [..., W, n], not rounded."""
    op = "depth_scores"
    check_sources(op, sources)
    first = sources[0]
    n_ways, dim = leading(w), first.shape[-1]
    check_shape(op, "w", w, first, (n_ways, len(sources), dim), (n_ways, 1, dim))
    with without_autocast(first):
        return depth_scores_reference(sources, w)
