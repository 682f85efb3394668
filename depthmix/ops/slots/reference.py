"""Reads of decoding in plain PyTorch: the specification. No gradients, and one rounding.

newest = (scale ⊙) y (+ before), rounded;      slots[slot] = newest
attend      o = Σ_i p_i v_i,  p = softmax of the logits of depth attention over the finished sources and the newest
look_back   of the finished sources alone, for several sites:  m = max s_i,  z = Σ exp(s_i - m),  a = Σ exp(s_i - m) v_i,
            stored as a / z and lse = m + log z
merged      (exp(lse - t) a / z + exp(s - t) v) / (exp(lse - t) + exp(s - t)),  t = max(lse, s):  two phases make one softmax
pass_on     the same softmax with a running maximum, sum and mixture for every reader, to which each finished source is added
add_up      o = Σ_i (static_i + w_i · v_i) ⊙ v_i, clamped as relu says
add_norm    x + y, rounded, and its RMSNorm
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthmix.ops.precision import rms_normalize


def _newest(slots: Tensor, y: Tensor, before: Tensor | None, slot: int, scale: Tensor | None = None) -> None:
    y = y.float() if scale is None else scale * y.float()
    slots[slot] = (y if before is None else y + before.float()).to(slots.dtype)


def _logits(sources: Tensor, u: Tensor, eps: float) -> Tensor:
    return (sources * u).sum(-1) * torch.rsqrt(sources.square().mean(-1) + eps)


def _finished(slots: Tensor, stride: int, head: int, skip: int, n: int) -> list[int]:
    return [(i if i < head else i + skip) * stride for i in range(n)]


def _out(o: Tensor, gain: Sequence[Tensor], way: int, eps: float, like: Tensor) -> Tensor:
    return (rms_normalize(o, eps) * gain[way].float() if gain else o).to(like.dtype)


def attend(
    slots: Tensor, y: Tensor, before: Tensor | None, slot: int, stride: int, head: int, skip: int, n: int,
    query: Sequence[Tensor], key_gain: Sequence[Tensor], gain: Sequence[Tensor], eps: float, out_eps: float,
    bank: Tensor | None, bank_lse: Tensor | None, scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute kernels.attend in plain PyTorch."""
    _newest(slots, y, before, slot, scale)
    v = slots[[*_finished(slots, stride, head, skip, n), slot]].float()  # [n + 1, ..., D]
    outs = []
    for way, (q, k) in enumerate(zip(query, key_gain, strict=True)):
        s, values = _logits(v, q * k, eps), v
        if bank is not None and bank_lse is not None:
            s = torch.cat([bank_lse.view(1, *s.shape[1:]), s])
            values = torch.cat([bank.view(1, *v.shape[1:]), v])
        o = (torch.softmax(s, 0).unsqueeze(-1) * values).sum(0)
        outs.append(_out(o, gain, way, out_eps, slots))
    return torch.stack(outs)


def pass_on(
    slots: Tensor, acc: Tensor, stats: Tensor, y: Tensor, before: Tensor | None, slot: int, stride: int, begin: int, end: int,
    query: Tensor, key_gain: Tensor, further_query: Tensor | None, further_key_gain: Tensor | None, further_at: int, further_begin: int, further_end: int,
    ways: int, gain: Sequence[Tensor], eps: float, out_eps: float, scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute running_softmax.pass_on in plain PyTorch."""
    _newest(slots, y, before, slot, scale)

    def added(u: Tensor, row: int, new: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return a running mixture with more sources, started from nothing if the first source is among them."""
        v = slots[list(new)].flatten(1, -2).float()  # [n, N, D]
        s = _logits(v, u, eps)  # [n, N]
        m, z, a = (*stats[:, row], acc[row]) if new[0] else (torch.full_like(s[0], -torch.inf), 0.0, 0.0)
        top = torch.maximum(m, s.amax(0))
        old, p = torch.exp(m - top).unsqueeze(-1), torch.exp(s - top).unsqueeze(-1)
        old = torch.where(m.isinf().unsqueeze(-1), torch.zeros_like(old), old)
        return top, old[..., 0] * z + p.sum(0)[..., 0], old * a + (p * v).sum(0)

    def reader(i: int) -> tuple[Tensor, int]:
        return query[i] * key_gain[i], i

    def further(i: int) -> tuple[Tensor, int]:
        assert further_query is not None
        assert further_key_gain is not None
        return further_query[i] * further_key_gain[i], len(query) + i

    outs = []
    for way in range(ways):
        _, z, a = added(*(further(further_at + way - 1) if way else reader(slot)), [slot])
        outs.append(_out((a / z.unsqueeze(-1)).view(y.shape), gain, way, out_eps, slots))
    new = list(range(0, slot + 1, stride)) if stride else [slot]
    for u, row in [*map(reader, range(begin, end)), *map(further, range(further_begin, further_end))]:
        stats[0, row], stats[1, row], acc[row] = added(u, row, new)
    return torch.stack(outs)


def look_back(slots: Tensor, n: int, query: Tensor, key_gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute kernels.look_back in plain PyTorch."""
    v = slots[:n].flatten(1, -2).float()  # [n, N, D]
    s = torch.stack([_logits(v, u, eps) for u in query * key_gain])  # [R, n, N]
    return torch.einsum("rnt,ntd->rtd", torch.softmax(s, 1), v), torch.logsumexp(s, 1)


def add_up(
    slots: Tensor, y: Tensor, before: Tensor | None, slot: int, ways: int, static: Tensor | None, w: Tensor | None,
    relu: int, gain: Sequence[Tensor], out_eps: float, raw: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute kernels.add_up in plain PyTorch."""
    _newest(slots, y, before, slot)
    v = slots[: slot + 1].float()  # [n, ..., D]
    tokens = (1,) * (v.ndim - 2)
    sums = []
    for way in range(ways):
        weight = torch.zeros_like(v) if static is not None or w is not None else torch.ones_like(v)
        if static is not None:
            weight = weight + static[way].view(slot + 1, *tokens, -1)
        if w is not None:
            s = (v * w[way].view(-1, *tokens, v.shape[-1])).sum(-1, keepdim=True)
            weight = weight + (s.clamp(min=0) if relu == 1 else s)
        sums.append(((weight.clamp(min=0) if relu == 2 else weight) * v).sum(0))
    out = torch.stack([_out(o, gain, way, out_eps, slots) for way, o in enumerate(sums)])
    return out, sums[raw].to(slots.dtype)


def add_norm(x: Tensor, y: Tensor | None, gain: Tensor, eps: float, keep: bool = True) -> tuple[Tensor | None, Tensor]:
    """Compute kernels.add_norm in plain PyTorch."""
    exact = x.float() if y is None else x.float() + y.float()
    total = exact.to(x.dtype) if keep else exact
    out = (rms_normalize(total, eps) * gain.float()).to(x.dtype)
    return total if keep and y is not None else None, out
