"""Layers of the models: attention, MLP, rotary positions, masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from depthmix.mixers.checks import Read
from depthmix.models.cache import StaticKVCache
from depthmix.models.projections import project, project_out
from depthmix.models.value_mixing import ValueMixing
from depthmix.ops.norm import RMSNorm
from depthmix.ops.sublayer.op import activate

MlpKind = Literal["swiglu", "relu2"]


class Rotary(nn.Module):
    """Rotary positions: channel pairs (i, i + d/2) of a head turn by position * theta^(-2i/d)."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B, 1, T, d] in fp32 for positions [B, T]."""
        exponent = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float32) / self.head_dim
        angle = positions.float().unsqueeze(-1) * self.theta**-exponent  # [B, T, d/2]
        angle = torch.cat([angle, angle], dim=-1).unsqueeze(1)
        return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Apply rotary positions, if any, to x [B, heads, T, d]: in fp32, rounded once."""
    if cos is None or sin is None:
        return x
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-b, a], dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention. Takes one input, two (for queries and keys; for values) or three (queries, keys,
    values).
    """

    def __init__(
        self,
        block: int,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        qk_norm_eps: float | None,
        qk_gain: bool = True,
        values: ValueMixing | None = None,
        gives_values: bool = False,
    ) -> None:
        """Build the projections. gives_values: `forward` returns (output, values) for later blocks to mix with theirs."""
        super().__init__()
        self.head_dim, self.gives_values = head_dim, gives_values
        # Attributes that Hugging Face's caches and attention functions read.
        self.layer_idx, self.num_key_value_groups = block, n_heads // n_kv_heads
        self.scaling, self.is_causal = head_dim**-0.5, True
        q_dim, kv_dim = n_heads * head_dim, n_kv_heads * head_dim
        self.q_proj = nn.Linear(dim, q_dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_dim, bias=False)
        self.out_proj = nn.Linear(q_dim, dim, bias=False)
        self.q_norm, self.k_norm = (
            None if qk_norm_eps is None else RMSNorm(head_dim, eps=qk_norm_eps, elementwise_affine=qk_gain)
            for _ in range(2)
        )
        self.values = values

    def forward(self, h: Read, context: Context, gain: Tensor | None = None) -> Any:
        ways = h if isinstance(h, tuple) else (h,)
        h_q, h_v = ways[0], ways[-1]
        if len(ways) == 1:
            projected = project(h_q, self.q_proj, self.k_proj, self.v_proj)
        elif len(ways) == 2:
            projected = (*project(h_q, self.q_proj, self.k_proj), self.v_proj(h_v))
        else:
            projected = self.q_proj(h_q), self.k_proj(ways[1]), self.v_proj(h_v)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in projected)  # [B, T, heads, d]; k, v: kv heads
        own_values = v
        if self.values is not None:
            v = self.values(v, h_v, context.first_values, context.token_ids)
        stored = context.cache.take(self, q, k, v, context) if isinstance(context.cache, StaticKVCache) else None
        if stored is None:
            v = v.transpose(1, 2)
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
            q = rotate(q.transpose(1, 2), context.cos, context.sin).to(v.dtype)
            k = rotate(k.transpose(1, 2), context.cos, context.sin).to(v.dtype)
            if context.cache is not None:
                k, v = context.cache.update(k, v, self.layer_idx)
        else:
            q, k, v = stored
        y = project_out(context.attend(self, q, k, v, context).flatten(2), self.out_proj, gain)
        return (y, own_values) if self.gives_values else y


def scaled_dot_product(attention: Attention, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    """Apply torch's attention to q [B, heads, T, d] and k, v [B, kv heads, keys, d]; returns [B, T, heads, d]."""
    y = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=context.mask, is_causal=context.causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.transpose(1, 2)


def in_all_directions(attention: Attention, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    """Apply torch's attention without a mask: every query sees every key. Shapes as in `scaled_dot_product`."""
    y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return y.transpose(1, 2)


class Mlp(nn.Module):
    """SwiGLU, down(silu(gate x) * up x), or squared ReLU, down(relu(up x)²). SwiGLU takes one input, or two (for gate;
    for up).
    """

    def __init__(self, kind: MlpKind, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False) if kind == "swiglu" else None
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.out_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, h: Read, context: Context, gain: Tensor | None = None) -> Tensor:
        if self.gate_proj is None:
            assert isinstance(h, Tensor)
            return project_out(activate(None, self.up_proj(h)), self.out_proj, gain)
        if isinstance(h, tuple):
            gate, up = self.gate_proj(h[0]), self.up_proj(h[1])
        else:
            gate, up = project(h, self.gate_proj, self.up_proj)
        return project_out(activate(gate, up), self.out_proj, gain)


@dataclass
class Context:
    """Inputs of attention besides the hidden states. All blocks of a pass share one."""

    # Rotary cos and sin; None: the embedding holds the positions.
    cos: Tensor | None
    sin: Tensor | None
    # True or 0 where a query may look, or anything else that `attend` takes; None: causal.
    mask: Any
    cache: Any  # a Hugging Face Cache, or None
    attend: Callable[[Attention, Tensor, Tensor, Tensor, Context], Tensor] = scaled_dot_product
    # For value embeddings, token ids [B, T]; for value residuals, what block 0 projected [B, T, kv heads, d].
    token_ids: Tensor | None = None
    first_values: Tensor | None = None

    @property
    def causal(self) -> bool:
        """Tell whether the attention kernel must hide later tokens itself. A single token has none to hide."""
        several = self.cos is None or self.cos.shape[-2] > 1
        return self.mask is None and (True if several else False)  # noqa: SIM210 (with dynamic shapes it is no bool yet)

    def to(self, device: Any, non_blocking: bool = False) -> Context:
        """Return the context with its tensors on a device: accelerate moves by this method what a module is called with."""
        tensors = {name: getattr(self, name) for name in ("cos", "sin", "mask", "token_ids", "first_values")}
        moved = {n: t.to(device, non_blocking=non_blocking) for n, t in tensors.items() if hasattr(t, "to")}
        return replace(self, **moved)


def causal_mask(padding: Tensor | None, past: int, length: int, n_keys: int, device: torch.device) -> Tensor:
    """Build the mask [B or 1, 1, T, keys]: True at keys up to the query's own position that are not padding."""
    keys, queries = torch.arange(n_keys, device=device), torch.arange(past, past + length, device=device).unsqueeze(-1)
    mask = (keys <= queries)[None, None]
    if padding is not None:
        padding = functional.pad(padding.bool(), (0, n_keys - padding.shape[-1]))
        # A padded query may see no key at all, and a softmax over nothing is NaN: let it look at itself.
        mask = mask & (padding[:, None, None, :] | (keys == queries)[None, None])
    return mask


def last_tokens(length: int, n_keys: int) -> Any:
    """Return the causal mask of the last `length` of n_keys tokens as an object that is never written out; None where
    no mask is needed.
    """
    if length in (1, n_keys):
        return None
    from torch.nn.attention.bias import causal_lower_right  # which imports the compiler

    return causal_lower_right(length, n_keys)
