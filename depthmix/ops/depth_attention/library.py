"""The kernels of depth attention as operators that PyTorch knows: for torch.compile, selective checkpointing, CUDA graphs.

`depthmix::depth_read` differentiates layer by layer: each read's backward writes the gradient of each of its sources.
source_major.py has the faster order, for eager training.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("depthmix", "FRAGMENT")
_library.define(
    "depth_read(Tensor u, Tensor[] sources, Tensor? add, Tensor? gain, float eps, float out_eps, bool keep)"
    " -> (Tensor[] y, Tensor[] o, Tensor s, Tensor lse, Tensor fresh)"
)
_library.define(  # of what is left when the mixture of older sources is known; source_major.py differentiates it
    "depth_read_near(Tensor u, Tensor[] sources, Tensor? add, Tensor? gain, float eps, float out_eps, bool keep,"
    " Tensor bank, Tensor bank_lse) -> (Tensor[] y, Tensor[] o, Tensor s, Tensor lse, Tensor fresh)"
)
_library.define(  # of which all logits but the newest source's are known; source_major.py differentiates it
    "depth_read_known(Tensor u, Tensor[] sources, Tensor[] logits, Tensor? add, Tensor? gain, float eps, float out_eps,"
    " bool keep) -> (Tensor[] y, Tensor[] o, Tensor s, Tensor lse, Tensor fresh)"
)
_library.define(
    "depth_read_backward(Tensor[] dy, Tensor[] o, Tensor u, Tensor? gain, Tensor s, Tensor lse, Tensor[] sources,"
    " Tensor? g, float eps, float out_eps) -> (Tensor[] dv, Tensor du, Tensor dgain)"
)

Read = tuple[list[Tensor], list[Tensor], Tensor, Tensor, Tensor]
Gradients = tuple[list[Tensor], Tensor, Tensor]


def _read(
    u: Tensor, sources: list[Tensor], add: Tensor | None, gain: Tensor | None, eps: float, out_eps: float, keep: bool,
    bank: Tensor | None = None, bank_lse: Tensor | None = None,
) -> Read:  # fmt: skip
    from depthmix.ops.depth_attention import triton

    u, sources = u.contiguous(), [v.contiguous() for v in sources]
    add, gain = (None if t is None else t.contiguous() for t in (add, gain))
    y, o, s, lse, fresh = triton.read(u, sources, add, gain, eps, out_eps, keep, bank, bank_lse)
    return y, o, s, lse, u.new_empty(0) if fresh is None else fresh


def _read_known(
    u: Tensor, sources: list[Tensor], logits: list[Tensor], add: Tensor | None, gain: Tensor | None,
    eps: float, out_eps: float, keep: bool,
) -> Read:  # fmt: skip
    from depthmix.ops.depth_attention import tiling

    y, o, s, lse, fresh = tiling.read_known(u.contiguous(), sources, logits, add, gain, eps, out_eps, keep)
    return y, o, s, lse, u.new_empty(0) if fresh is None else fresh


def _read_known_fake(
    u: Tensor, sources: list[Tensor], logits: list[Tensor], add: Tensor | None, gain: Tensor | None,
    eps: float, out_eps: float, keep: bool,
) -> Read:  # fmt: skip
    return _read_fake(u, sources[-1:], add, gain, eps, out_eps, keep)


def _read_fake(
    u: Tensor, sources: list[Tensor], add: Tensor | None, gain: Tensor | None, eps: float, out_eps: float, keep: bool,
    bank: Tensor | None = None, bank_lse: Tensor | None = None,
) -> Read:  # fmt: skip
    first, (ways, dim) = sources[-1], u.shape
    tokens = first.numel() // dim
    y = [torch.empty_like(first) for _ in range(ways)]
    o = [torch.empty_like(first) for _ in range(ways)] if gain is not None and keep else []
    s = u.new_empty(ways, len(sources) if keep else 0, tokens)
    return y, o, s, u.new_empty(ways, tokens if keep else 0), u.new_empty(0) if add is None else torch.empty_like(first)


def _read_backward(
    dy: list[Tensor],
    o: list[Tensor],
    u: Tensor,
    gain: Tensor | None,
    s: Tensor,
    lse: Tensor,
    sources: list[Tensor],
    g: Tensor | None,
    eps: float,
    out_eps: float,
) -> Gradients:
    from depthmix.ops.depth_attention import triton

    u, gain = u.contiguous(), None if gain is None else gain.contiguous()
    sources, g = [v.contiguous() for v in sources], None if g is None else g.contiguous()
    found = [
        triton.read_backward(
            d, o[w], u[w], None if gain is None else gain[w], s[w], lse[w], None, eps, out_eps, store=True
        )
        for w, d in enumerate(dy)
    ]
    dv: list[Tensor] = []
    du = torch.zeros_like(u)
    for i, v in enumerate(sources):
        readers = [triton.Reader(x.do, [s[w, i]], x.ld, u[w], len(sources) > 1) for w, x in enumerate(found)]
        source = triton.Source(v, g if i == len(sources) - 1 else None)
        (d,), part = triton.source_backward([source], readers, eps, need_du=True)
        assert d is not None
        assert part is not None
        dv.append(d)
        du += part
    return dv, du, u.new_empty(0) if gain is None else torch.stack([x.dgain for x in found])


def _read_backward_fake(
    dy: list[Tensor], o: list[Tensor], u: Tensor, gain: Tensor | None, s: Tensor, lse: Tensor, sources: list[Tensor],
    g: Tensor | None, eps: float, out_eps: float,
) -> Gradients:  # fmt: skip
    dgain = u.new_empty(0) if gain is None else torch.empty_like(u)
    return [torch.empty_like(v) for v in sources], torch.empty_like(u), dgain


for _device in ("CUDA", "CPU"):  # CPU: in Triton's interpreter
    _library.impl("depth_read", _read, _device)
    _library.impl("depth_read_near", _read, _device)
    _library.impl("depth_read_known", _read_known, _device)
    _library.impl("depth_read_backward", _read_backward, _device)
torch.library.register_fake("depthmix::depth_read", _read_fake, lib=_library)
torch.library.register_fake("depthmix::depth_read_near", _read_fake, lib=_library)
torch.library.register_fake("depthmix::depth_read_known", _read_known_fake, lib=_library)
torch.library.register_fake("depthmix::depth_read_backward", _read_backward_fake, lib=_library)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Read) -> None:
    u, sources, add, gain, eps, out_eps, keep = inputs
    y, o, s, lse, fresh = output
    if not keep:
        raise ValueError("depth_read: a read that is differentiated needs keep=True")
    ctx.options, ctx.added, ctx.normed, ctx.n = (eps, out_eps), add is not None, gain is not None, len(sources)
    ctx.ways = len(y)
    olds = sources if add is None else [*sources[:-1], fresh]
    ctx.save_for_backward(u, gain, s, lse, *(o or y), *olds)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Sequence[Tensor | None], do: Any, ds: Any, dlse: Any, g: Tensor | None) -> tuple[Any, ...]:
    u, gain, s, lse, *rest = ctx.saved_tensors
    o, sources = rest[: ctx.ways], rest[ctx.ways :]
    g = g if ctx.added else None
    if all(d is None for d in dy):
        return None, [*[None] * (ctx.n - 1), g], g, None, None, None, None
    given = [torch.zeros_like(x) if d is None else d.contiguous() for d, x in zip(dy, o, strict=True)]
    g = None if g is None else g.contiguous()
    dv, du, dgain = torch.ops.depthmix.depth_read_backward(given, o, u, gain, s, lse, sources, g, *ctx.options)
    # An operator's outputs must not be one tensor twice: the two summands of the newest source share a gradient.
    return du, dv, dv[-1].clone() if ctx.added else None, dgain if ctx.normed else None, None, None, None


torch.library.register_autograd("depthmix::depth_read", _backward, setup_context=_setup, lib=_library)
