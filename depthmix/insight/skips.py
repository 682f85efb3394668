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
from depthmix.models.with_mixer import with_mixer


@dataclass
class SkipEffects:
    """The loss of the unchanged model, and its rise without a site's sublayer."""

    tokens: int
    loss: float
    change: Tensor  # [S]


@torch.no_grad()
def skip_effects(model: nn.Module, batches: Iterable[Tensor], mixer: Mixer | str | None = None) -> SkipEffects:
    """Measure how the loss changes when each sublayer is skipped.

    Args:
        model: A language model with a mixer: model(ids) returns logits.
        batches: Token ids [B, T + 1].
        mixer: The mixer, or its name, of a model with several.

    Returns:
        The loss of the unchanged model, and its rise without each of the S sublayers.

    Raises:
        ValueError: There are no tokens, or the mixer is not found.

    Examples:
        >>> model = depthmix.Decoder(depthmix.DecoderConfig(11, dim=8, n_blocks=2, n_heads=2))
        >>> skip_effects(model, [torch.zeros(2, 4, dtype=torch.int64)]).change.shape
        torch.Size([4])
    """
    model = with_mixer(model)
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
