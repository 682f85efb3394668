"""Keys and values of the tokens seen so far, with the calls of a Hugging Face Cache."""

import torch
from torch import Tensor


class KVCache:
    """A cache that grows: depth mixing is token-local, so this is all a decoder keeps between tokens."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, k: Tensor, v: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Append k and v [B, heads, T, d] of one layer and return all of that layer's."""
        if layer_idx == len(self.keys):
            self.keys.append(k)
            self.values.append(v)
        else:
            self.keys[layer_idx] = torch.cat([self.keys[layer_idx], k], dim=-2)
            self.values[layer_idx] = torch.cat([self.values[layer_idx], v], dim=-2)
        return self.keys[layer_idx], self.values[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held."""
        return self.keys[layer_idx].shape[-2] if layer_idx < len(self.keys) else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many keys an update with so many queries will return, and the position of the first."""
        return self.get_seq_length(layer_idx) + query_length, 0
