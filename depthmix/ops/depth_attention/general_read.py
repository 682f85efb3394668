"""Reads that the kernels of whole stacks do not know: heads, sigmoid, keys without a norm, normed values, per-token queries."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.autograd import reference_gradients
from depthmix.ops.backward_mail import current_pass_id
from depthmix.ops.depth_attention.reference_autograd import Options, differentiable
from depthmix.ops.precision import without_autocast


class GeneralRead(torch.autograd.Function):
    """Compute W mixtures. Saves references to the sources and one number per way, source, token and head."""

    @staticmethod
    def forward(
        ctx: Any, options: Options, out_eps: float, keep: bool, u: Tensor, gain: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        from depthmix.ops.depth_attention.kernels.general_read import read

        contiguous = [v.contiguous() for v in sources]
        reads = [
            read(*way, contiguous, out_eps=out_eps, keep=keep, **_kernel_options(options)) for way in _by_way(u, gain)
        ]
        ctx.options, ctx.out_eps, ctx.n = options, out_eps, len(sources)
        ctx.save_for_backward(u, gain, *sources, *(s for _, s, _ in reads), *(lse for *_, lse in reads))
        return tuple(y for y, *_ in reads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from depthmix.ops.depth_attention.kernels.general_read import backward

        # Refuse compiled autograd, whose tensors have no addresses.
        current_pass_id("depth_attention")
        # Access saved_tensors once: a second access fails inside a checkpointed region.
        u, gain, *rest = ctx.saved_tensors
        sources, kept, needs = rest[: ctx.n], rest[ctx.n :], ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():
            reference = partial(differentiable, ctx.options, ctx.out_eps, False)
            with without_autocast(u):
                return None, None, None, *reference_gradients(reference, (u, gain, *sources), needs, grads)
        contiguous, ways, rule = [v.contiguous() for v in sources], len(u), _kernel_options(ctx.options)
        du, dgain = [], []
        dv: list[Tensor] | None = None
        for w, (way, dy) in enumerate(zip(_by_way(u, gain), grads, strict=True)):
            part = {"before": dv, "last": w == ways - 1, "out_eps": ctx.out_eps, **rule}
            du_way, dgain_way, dv = backward(dy.contiguous(), *way, contiguous, kept[w], kept[ways + w], **part)
            du.append(du_way.view(u.shape[1:]))
            dgain += [] if dgain_way is None else [dgain_way]
        # Not stacked for one way: a per-token du is as large as a source in fp32.
        all_du = torch.stack(du) if ways > 1 else du[0].unsqueeze(0)
        return None, None, None, all_du, torch.stack(dgain) if dgain else None, *(dv or ())


def _kernel_options(options: Options) -> dict[str, Any]:
    """Return the options as keyword arguments of the kernels."""
    rule: dict[str, Any] = options._asdict()
    softmax = rule.pop("activation") == "softmax"
    return {**rule, "softmax": softmax}


def _by_way(u: Tensor, gain: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """Return each way's query, [D] or per token [N, D], and its gain [D]."""
    rows = (u if u.ndim == 2 else u.flatten(1, -2)).contiguous().unbind()
    return [(row, None if gain is None else gain[w].contiguous()) for w, row in enumerate(rows)]
