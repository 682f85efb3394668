"""Select a few tokens. Depth mixing is token-local, so any selection can be measured alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def some_tokens(sources: Sequence[Tensor], most: int) -> list[Tensor]:
    """Flatten sources [..., D] to [N, D] and select at most `most` tokens, evenly spaced."""
    flat = [s.reshape(-1, s.shape[-1]) for s in sources]
    n = len(flat[0])
    if n <= most:
        return flat
    chosen = torch.linspace(0, n - 1, most, device=flat[0].device).long()
    return [s[chosen] for s in flat]
