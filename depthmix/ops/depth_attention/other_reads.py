"""Reads that the kernels of whole stacks do not know, heads, sigmoid, keys without a norm and queries by token, with kernels of their own."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backward_mail import current_pass_id
from depthmix.ops.depth_attention.reference_autograd import Options, differentiable
from depthmix.ops.precision import without_autocast


class OtherReads(torch.autograd.Function):
    """W mixtures; it keeps references to the sources, and a number for each way, source, token and head."""

    @staticmethod
    def forward(
        ctx: Any, options: Options, out_eps: float, keep: bool, u: Tensor, gain: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        from depthmix.ops.depth_attention.kernels.other_reads import read

        near = [v.contiguous() for v in sources]
        found = [read(*way, near, out_eps=out_eps, keep=keep, **_named(options)) for way in _by_way(u, gain)]
        ctx.options, ctx.out_eps, ctx.n = options, out_eps, len(sources)
        ctx.save_for_backward(u, gain, *sources, *(s for _, s, _ in found), *(lse for *_, lse in found))
        return tuple(y for y, *_ in found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from depthmix.ops.depth_attention.kernels.other_reads import backward

        current_pass_id("depth_attention")  # refuses compiled autograd, whose tensors have no addresses
        u, gain, *rest = ctx.saved_tensors  # once: a second access fails inside a checkpointed region
        sources, kept, needs = rest[: ctx.n], rest[ctx.n :], ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            reference = partial(differentiable, ctx.options, ctx.out_eps, False)
            with without_autocast(u):
                return None, None, None, *reference_gradients(reference, (u, gain, *sources), needs, grads)
        near, ways, rule = [v.contiguous() for v in sources], len(u), _named(ctx.options)
        du, dgain = [], []
        dv: list[Tensor] | None = None
        for w, (way, dy) in enumerate(zip(_by_way(u, gain), grads, strict=True)):
            part = {"before": dv, "last": w == ways - 1, "out_eps": ctx.out_eps, **rule}
            own, of_gain, dv = backward(dy.contiguous(), *way, near, kept[w], kept[ways + w], **part)
            du.append(own.view(u.shape[1:]))
            dgain += [] if of_gain is None else [of_gain]
        of_u = torch.stack(du) if ways > 1 else du[0].unsqueeze(0)  # of tokens it is as large as a source in fp32
        return None, None, None, of_u, torch.stack(dgain) if dgain else None, *(dv or ())


def _named(options: Options) -> dict[str, Any]:
    eps, key_norm, heads, activation = options
    return {"eps": eps, "key_norm": key_norm, "heads": heads, "softmax": activation == "softmax"}


def _by_way(u: Tensor, gain: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """Every way's query [D], or those of tokens [N, D], and its gain [D]."""
    rows = (u if u.ndim == 2 else u.flatten(1, -2)).contiguous().unbind()
    return [(row, None if gain is None else gain[w].contiguous()) for w, row in enumerate(rows)]
