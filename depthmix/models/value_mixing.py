"""Depth mixing inside attention: values of the first block, and embeddings looked up as values.

    value residual (ResFormer, Zhou et al. 2024, arXiv 2410.17897)    v ← λ_1 v_1 + λ_2 v
    value embeddings (nanochat)                                       v ← v + 3 σ(W_g a[first 12 channels]) E[token]

v [B, T, kv heads, d] comes from the value projection, v_1 from that of block 0, and a is the projection's input. Both act before
attention and before the KV cache, which holds the mixed values.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from depthmix.ops.precision import compute_dtype

ValueResidual = Literal["off", "learnable", "sparse"]
CHANNELS = 12  # that a gate sees


class ValueMixing(nn.Module):
    """Mix the values of one block's attention with those of block 0, and with an embedding of the token.

    Attributes:
        lambda_1, lambda_2: [1], or None. "learnable": one half each. "sparse": 5 and 1, in the last three eighths of the blocks.
        table: E [vocab, kv heads * d], or None. It starts uniform, with the standard deviation of the value projection.
        gate: W_g [kv heads, 12]. It starts uniform in (0, 0.02), so that a gate starts near 1.5.
    """

    def __init__(
        self, dim: int, n_kv_heads: int, head_dim: int, start: tuple[float, float] | None, vocab_size: int | None
    ) -> None:
        """Build the parts. start: λ_1 and λ_2; None: no value residual. vocab_size: None: no value embedding."""
        super().__init__()
        self.dim, self.start = dim, start
        # Two parameters, since each process of FSDP2 may hold a part of one.
        self.lambda_1, self.lambda_2 = (None if start is None else nn.Parameter(torch.empty(1)) for _ in range(2))
        self.table = self.gate = None
        if vocab_size is not None:
            self.table = nn.Embedding(vocab_size, n_kv_heads * head_dim)
            self.gate = nn.Linear(min(CHANNELS, dim), n_kv_heads, bias=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set all parameters to their initial values."""
        if self.lambda_1 is not None and self.lambda_2 is not None and self.start is not None:
            nn.init.constant_(self.lambda_1, self.start[0])
            nn.init.constant_(self.lambda_2, self.start[1])
        if self.table is not None and self.gate is not None:
            bound = math.sqrt(3 / self.dim)
            nn.init.uniform_(self.table.weight, -bound, bound)
            nn.init.uniform_(self.gate.weight, 0, 0.02)

    def forward(self, v: Tensor, h: Tensor, first: Tensor | None, ids: Tensor | None) -> Tensor:
        """Mix values.

        Args:
            v: Values of this block [B, T, kv heads, d].
            h: Normed input of the value projection [B, T, D].
            first: Values of block 0, as its projection made them.
            ids: Token ids [B, T].

        Returns:
            Values [B, T, kv heads, d] in the dtype of v.
        """
        wide = compute_dtype(v)
        mixed = v.to(wide)
        if self.lambda_1 is not None and self.lambda_2 is not None and first is not None:
            mixed = self.lambda_1.to(wide) * first.to(v.device, wide) + self.lambda_2.to(wide) * mixed
        if self.table is not None and self.gate is not None and ids is not None:
            gate = 3 * torch.sigmoid(self.gate(h[..., : self.gate.in_features]).to(wide))  # [B, T, kv heads]
            embedded = self.table(ids.to(v.device)).unflatten(-1, v.shape[-2:])
            mixed = mixed + gate.unsqueeze(-1) * embedded.to(wide)
        return mixed.to(v.dtype)


def value_mixing(
    block: int,
    n_blocks: int,
    dim: int,
    n_kv_heads: int,
    head_dim: int,
    residual: ValueResidual,
    vocab_size: int | None,
) -> ValueMixing | None:
    """Build what a block's attention does to its values; None if it does nothing.

    Args:
        block: The block, from 0.
        n_blocks: Number of blocks.
        dim, n_kv_heads, head_dim: Sizes of attention.
        residual: The model's value residual.
        vocab_size: Rows of an embedding table; None: no value embeddings.
    """
    start = None
    if residual == "learnable" and block > 0:
        start = (0.5, 0.5)
    elif residual == "sparse" and block >= max(1, n_blocks - round(3 * n_blocks / 8)):
        start = (5.0, 1.0)
    # Every second block, and always the last.
    size = vocab_size if (n_blocks - 1 - block) % 2 == 0 else None
    return None if start is None and size is None else ValueMixing(dim, n_kv_heads, head_dim, start, size)
