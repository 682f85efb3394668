"""Causal effects of sublayers: the change of the loss when a sublayer's output is replaced by zero."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.insight.intercept import current_calls, intercepted
from depthmix.insight.losses import next_token_loss
from depthmix.insight.mixing import choose_mixer
from depthmix.insight.mode import eval_mode
from depthmix.mixers import Mixer


@dataclass
class SkipEffects:
    """The loss of the unchanged model, and its rise without a site's sublayer."""

    tokens: int
    loss: float
    change: Tensor  # [S]


@torch.no_grad()
def skip_effects(model: nn.Module, batches: Iterable[Tensor], mixer: Mixer | str | None = None) -> SkipEffects:
    """Measure the effect of skipping each sublayer over batches of token ids [B, T + 1]. model(ids) returns logits."""
    chosen = choose_mixer(model, mixer)
    write = current_calls(chosen)["write"]
    losses, tokens = torch.zeros(chosen.n_sites + 1, dtype=torch.float64), 0
    for batch in batches:
        by_skip = []
        for skipped in range(-1, chosen.n_sites):

            def skipping_write(state: Any, site: int, y: Tensor, skipped: int = skipped) -> Any:
                return write(state, site, torch.zeros_like(y) if site == skipped else y)

            with intercepted(chosen, write=skipping_write), eval_mode(model):
                by_skip.append(next_token_loss(model, batch))
        size = batch[:, 1:].numel()
        losses += size * torch.cat(by_skip).cpu().double()
        tokens += size
    if not tokens:
        raise ValueError("skip_effects: there are no tokens")
    loss, *others = (losses / tokens).unbind(0)
    return SkipEffects(tokens, float(loss), torch.stack(others) - loss)
