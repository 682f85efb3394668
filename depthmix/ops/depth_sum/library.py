"""Register the kernels of weighted sums as PyTorch operators, for torch.compile, selective checkpointing and CUDA graphs.

`depthmix::depth_sum_read` differentiates layer by layer: each read's backward writes the gradient of each of its sources.
source_order.py has the faster order, for eager training.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.depth_sum import source_order as order
from depthmix.ops.registration import library, register

Gradients = tuple[Tensor, Tensor, list[Tensor]]


def _relu(relu: bool) -> int:
    return order.SUM_CLAMPED if relu else order.ADDED


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else t.contiguous() for t in tensors]


def _read(sources: list[Tensor], static: Tensor | None, dynamic: Tensor | None, relu: bool) -> list[Tensor]:
    static, dynamic, *sources = _contiguous(static, dynamic, *sources)
    return list(order.read_sums(sources, order.Weights(static, dynamic, relu=_relu(relu))).y)


def _read_fake(sources: list[Tensor], static: Tensor | None, dynamic: Tensor | None, relu: bool) -> list[Tensor]:
    ways = static.shape[0] if static is not None else dynamic.shape[-2]  # type: ignore[union-attr]
    like = sources[-1]
    return [torch.empty_like(like, memory_format=torch.contiguous_format) for _ in range(ways)]


def _read_backward(
    do: list[Tensor], sources: list[Tensor], static: Tensor | None, dynamic: Tensor | None, relu: bool, need: list[bool]
) -> Gradients:
    static, dynamic, *sources = _contiguous(static, dynamic, *sources)
    plan = order.ReadOptions(order.Weights(relu=_relu(relu)))
    dynamic_numbers = order.dynamic_by_source(dynamic)
    back = order.differentiate_read(
        plan, _contiguous(*do), None, None, None, sources, static, dynamic_numbers, (need[0], need[1])
    )
    reading = order.Reading(
        back.do, order.rows_by_source(static), order.numbers_by_source(dynamic_numbers), plan.weights.relu
    )
    dv = iter(order.source_gradients(reading, [i for i, needed in enumerate(need[2:]) if needed]))
    empty = sources[0].new_empty
    return (
        back.dstatic if need[0] else empty(0),
        back.ddynamic.view_as(dynamic) if need[1] else empty(0),
        [next(dv) if needed else empty(0) for needed in need[2:]],
    )


def _read_backward_fake(
    do: list[Tensor], sources: list[Tensor], static: Tensor | None, dynamic: Tensor | None, relu: bool, need: list[bool]
) -> Gradients:
    def like(x: Tensor | None, needed: bool) -> Tensor:
        if x is None or not needed:
            return sources[0].new_empty(0)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    inputs = (static, dynamic, *sources)
    empty = [like(x, needed) for x, needed in zip(inputs, need, strict=True)]
    return empty[0], empty[1], empty[2:]


register("depth_sum_read(Tensor[] sources, Tensor? static, Tensor? dynamic, bool relu) -> Tensor[]", _read, _read_fake)
# A gradient that is not needed, or whose input is None, comes back empty.
register(
    "depth_sum_read_backward(Tensor[] do, Tensor[] sources, Tensor? static, Tensor? dynamic, bool relu, bool[] need)"
    " -> (Tensor static, Tensor dynamic, Tensor[] sources)",
    _read_backward,
    _read_backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    sources, static, dynamic, relu = inputs
    ctx.relu, ctx.needs = relu, [t is not None and t.requires_grad for t in (static, dynamic, *sources)]
    ctx.save_for_backward(static, dynamic, *sources)


def _backward(ctx: Any, do: Sequence[Tensor]) -> tuple[Any, ...]:
    static, dynamic, *sources = ctx.saved_tensors
    back = torch.ops.depthmix.depth_sum_read_backward(list(do), sources, static, dynamic, ctx.relu, ctx.needs)
    grads = [g if needed else None for g, needed in zip((*back[:2], *back[2]), ctx.needs, strict=True)]
    return grads[2:], grads[0], grads[1], None


torch.library.register_autograd("depthmix::depth_sum_read", _backward, setup_context=_setup, lib=library)
