"""A few tokens of many. Mixing over depth is done for every token by itself, so any selection of them can be looked at alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def some_tokens(sources: Sequence[Tensor], most: int) -> list[Tensor]:
    """Sources [..., D] as [N, D] of at most so many tokens, evenly spread."""
    flat = [s.reshape(-1, s.shape[-1]) for s in sources]
    n = len(flat[0])
    if n <= most:
        return flat
    chosen = torch.linspace(0, n - 1, most, device=flat[0].device).long()
    return [s[chosen] for s in flat]
