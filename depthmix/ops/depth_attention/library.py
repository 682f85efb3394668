"""Register the kernels of depth attention as PyTorch operators, for torch.compile, selective checkpointing and CUDA graphs.

`depthmix::depth_read` differentiates layer by layer: each read's backward writes the gradient of each of its sources.
source_order.py has the faster order, for eager training.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.ops.registration import library, register

Read = tuple[list[Tensor], list[Tensor], Tensor, Tensor, Tensor]
Gradients = tuple[list[Tensor], Tensor, Tensor]


def _read(
    u: Tensor, sources: list[Tensor], add: Tensor | None, gain: Tensor | None, eps: float, out_eps: float, keep: int,
    bank: Tensor | None = None, bank_lse: Tensor | None = None,
) -> Read:  # fmt: skip
    from depthmix.ops.depth_attention.kernels.read import read

    u, sources = u.contiguous(), [v.contiguous() for v in sources]
    add, gain = (None if t is None else t.contiguous() for t in (add, gain))
    y, o, s, lse, fresh = read(u, sources, add, gain, eps, out_eps, keep, bank, bank_lse)
    return y, o, s, lse, u.new_empty(0) if fresh is None else fresh


def _read_known(
    u: Tensor, sources: list[Tensor], logits: list[Tensor], add: Tensor | None, gain: list[Tensor],
    eps: float, out_eps: float, keep: int,
) -> Read:  # fmt: skip
    from depthmix.ops.depth_attention.kernels import tiling

    y, o, s, lse, fresh = tiling.read_known(u.contiguous(), sources, logits, add, gain or None, eps, out_eps, keep)
    return y, o, s, lse, u.new_empty(0) if fresh is None else fresh


def _read_known_fake(
    u: Tensor, sources: list[Tensor], logits: list[Tensor], add: Tensor | None, gain: list[Tensor],
    eps: float, out_eps: float, keep: int,
) -> Read:  # fmt: skip
    return _read_fake(u, sources[-1:], add, gain[0] if gain else None, eps, out_eps, keep)


def _read_fake(
    u: Tensor, sources: list[Tensor], add: Tensor | None, gain: Tensor | None, eps: float, out_eps: float, keep: int, *bank: Tensor
) -> Read:  # fmt: skip
    from depthmix.ops.depth_attention.kernels.read import Result

    result = Result.empty(sources[-1], u.shape[0], gain is not None, add is not None, keep, len(sources))
    return *result[:-1], u.new_empty(0) if result.fresh is None else result.fresh


def _read_pair(
    u: Tensor, old: Tensor, newest: Tensor, add: Tensor | None, gain: Tensor | None, eps: float, out_eps: float
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    from depthmix.ops.depth_attention.kernels.pair import pair_read

    u, old, newest = (t.contiguous() for t in (u, old, newest))
    add, gain = (None if t is None else t.contiguous() for t in (add, gain))
    y, s, lse, fresh = pair_read(u, old, newest, add, gain, eps, out_eps)
    return y, s, lse, u.new_empty(0) if fresh is None else fresh


def _read_pair_fake(
    u: Tensor, old: Tensor, newest: Tensor, add: Tensor | None, gain: Tensor | None, eps: float, out_eps: float
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    from depthmix.ops.depth_attention.kernels.pair import PairRead

    y, s, lse, fresh = PairRead.empty(newest, u.shape[0], gain is not None, add is not None)
    return y, s, lse, u.new_empty(0) if fresh is None else fresh


def _read_backward(
    dy: list[Tensor],
    u: Tensor,
    gain: Tensor | None,
    s: Tensor,
    lse: Tensor,
    sources: list[Tensor],
    g: Tensor | None,
    eps: float,
    out_eps: float,
) -> Gradients:
    from depthmix.ops.depth_attention.kernels.layer_backward import layer_backward

    gain, g = (None if t is None else t.contiguous() for t in (gain, g))
    dy, sources = [d.contiguous() for d in dy], [v.contiguous() for v in sources]
    dv, du, dgain = layer_backward(dy, u.contiguous(), gain, s, lse, sources, g, eps, out_eps)
    return dv, du, u.new_empty(0) if gain is None else dgain


def _read_backward_fake(
    dy: list[Tensor], u: Tensor, gain: Tensor | None, s: Tensor, lse: Tensor, sources: list[Tensor], *others: Any
) -> Gradients:
    dgain = u.new_empty(0) if gain is None else torch.empty_like(u)
    return [torch.empty_like(v) for v in sources], torch.empty_like(u), dgain


_RESULT = "(Tensor[] y, Tensor[] o, Tensor s, Tensor lse, Tensor fresh)"
_READ = "Tensor u, Tensor[] sources, Tensor? add, Tensor? gain, float eps, float out_eps, int keep"
register(f"depth_read({_READ}) -> {_RESULT}", _read, _read_fake)
# Reads the newer sources, given the mixture of the older ones. source_order.py differentiates it, and the two that follow.
register(f"depth_read_near({_READ}, Tensor bank, Tensor bank_lse) -> {_RESULT}", _read, _read_fake)
# Reads with known logits for all sources but the newest.
register(
    "depth_read_known(Tensor u, Tensor[] sources, Tensor[] logits, Tensor? add, Tensor[] gain, float eps, float out_eps,"
    f" int keep) -> {_RESULT}",
    _read_known,
    _read_known_fake,
)
# Reads two sources.
register(
    "depth_read_pair(Tensor u, Tensor old, Tensor newest, Tensor? add, Tensor? gain, float eps, float out_eps)"
    " -> (Tensor[] y, Tensor s, Tensor lse, Tensor fresh)",
    _read_pair,
    _read_pair_fake,
)
register(
    "depth_read_backward(Tensor[] dy, Tensor u, Tensor? gain, Tensor s, Tensor lse, Tensor[] sources, Tensor? g,"
    " float eps, float out_eps) -> (Tensor[] dv, Tensor du, Tensor dgain)",
    _read_backward,
    _read_backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Read) -> None:
    u, sources, add, gain, eps, out_eps, keep = inputs
    y, _, s, lse, fresh = output
    if keep != 1:
        raise ValueError("depth_read: a read that is differentiated needs keep=1")
    ctx.options, ctx.added, ctx.normed, ctx.n = (eps, out_eps), add is not None, gain is not None, len(sources)
    ctx.ways = len(y)
    ctx.save_for_backward(u, gain, s, lse, *(sources if add is None else [*sources[:-1], fresh]))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Sequence[Tensor | None], do: Any, ds: Any, dlse: Any, g: Tensor | None) -> tuple[Any, ...]:
    u, gain, s, lse, *sources = ctx.saved_tensors
    g = g if ctx.added else None
    if all(d is None for d in dy):
        return None, [*[None] * (ctx.n - 1), g], g, None, None, None, None
    given = [torch.zeros_like(sources[-1]) if d is None else d for d in dy]
    dv, du, dgain = torch.ops.depthmix.depth_read_backward(given, u, gain, s, lse, sources, g, *ctx.options)
    # An operator's outputs must not be one tensor twice: the two summands of the newest source share a gradient.
    return du, dv, dv[-1].clone() if ctx.added else None, dgain if ctx.normed else None, None, None, None


torch.library.register_autograd("depthmix::depth_read", _backward, setup_context=_setup, lib=library)
