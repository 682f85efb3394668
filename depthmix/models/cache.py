"""KV caches with the interface of a Hugging Face Cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from depthmix.ops.norm import eps_of, is_plain_rms_norm
from depthmix.ops.slots.op import usable
from depthmix.ops.sublayer.op import turn_and_store


class KVCache:
    """A cache that grows with every token. Depth mixing is token-local, so a decoder keeps only keys and values."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, k: Tensor, v: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append k and v [B, heads, T, d] of one layer, and return that layer's keys and values of all tokens so far."""
        if layer_idx == len(self.keys):
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[layer_idx] = torch.cat([self.keys[layer_idx], k], dim=-2)
            self.values[layer_idx] = torch.cat([self.values[layer_idx], v], dim=-2)
        return self.keys[layer_idx], self.values[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens held."""
        return self.keys[layer_idx].shape[-2] if layer_idx < len(self.keys) else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys that an update with `query_length` queries will return, and the position of the
        first key.
        """
        return self.get_seq_length(layer_idx) + query_length, 0


class StaticKVCache:
    """A cache in preallocated memory, so that a decoding step can be recorded as a CUDA graph and replayed.

    `position` is where the next token goes, on the device. `filled` is the same number on the host, which a replay does
    not change. Several tokens at once see the slots up to their own. A single token sees all slots and hides later ones
    with a mask.
    """

    def __init__(
        self, n_layers: int, batch: int, n_kv_heads: int, length: int, head_dim: int, dtype: torch.dtype, device: Any
    ) -> None:
        shape = (n_layers, batch, n_kv_heads, length, head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.filled, self.length = 0, length

    def advance(self, tokens: int) -> None:
        """Move the write position on, after a pass of `tokens` tokens through all layers."""
        self.position += tokens
        self.filled += tokens

    def _seen(self, layer_idx: int, tokens: int) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if tokens == 1:
            return keys, values
        return keys[:, :, : self.filled + tokens], values[:, :, : self.filled + tokens]

    def update(self, k: Tensor, v: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write k and v [B, heads, T, d] of one layer to their slots, and return the keys and values that these tokens
        may see.
        """
        places = self.position + torch.arange(k.shape[-2], device=k.device)
        self.keys[layer_idx].index_copy_(2, places, k)
        self.values[layer_idx].index_copy_(2, places, v)
        return self._seen(layer_idx, k.shape[-2])

    def take(self, attention: Any, q: Tensor, k: Tensor, v: Tensor, context: Any) -> tuple[Tensor, ...] | None:
        """Rotate, normalise and store one layer's projections in one kernel launch.

        Args:
            attention: The layer, with its norms.
            q, k, v: Outputs of the projections [B, T, heads, d].
            context: The pass, with rotary cos and sin.

        Returns:
            (queries, keys, values) for attention, or None where no kernel applies.
        """
        norms = [n for n in (attention.q_norm, attention.k_norm) if n is not None]
        plain = all(is_plain_rms_norm(n, attention.head_dim) for n in norms) and k.dtype == v.dtype == self.keys.dtype
        if not plain or not usable("attention", q):
            return None
        eps = eps_of(norms[0], q) if norms else 0.0
        gains = (norms[0].weight, norms[1].weight) if norms else None
        layer = attention.layer_idx
        cache = self.keys[layer], self.values[layer]
        q = turn_and_store(q, k, v, context.cos, context.sin, gains, eps, self.position, *cache)
        return q, *self._seen(layer, k.shape[1])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens held."""
        return self.filled

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys that an update with `query_length` queries will return, and the position of the
        first key.
        """
        return self.length if query_length == 1 else self.filled + query_length, 0
