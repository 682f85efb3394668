"""Next-token losses of a model whose batch may have grown during the pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from depthmix.ops.precision import compute_dtype


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of token ids, also of a Hugging Face model, whose output holds them."""
    out = model(ids)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits


def next_token_losses(model: Any, batch: Tensor) -> Tensor:
    """Compute the loss in nats of every token of a batch [B, T + 1] but the first: [E, B, T], one entry for each of the E
    copies that the logits hold.
    """
    targets = batch[:, 1:]
    copies = logits_of(model, batch[:, :-1]).unflatten(0, (-1, len(batch))).unbind(0)
    # One copy at a time, because fp32 logits are the largest tensor.
    losses = [
        functional.cross_entropy(copy.flatten(0, 1).to(compute_dtype(copy)), targets.flatten(), reduction="none")
        for copy in copies
    ]
    return torch.stack(losses).unflatten(1, targets.shape)


def next_token_loss(model: Any, batch: Tensor) -> Tensor:
    """Compute the mean loss in nats of a batch [B, T + 1]: [E], one entry for each of the E copies that the logits
    hold.
    """
    return next_token_losses(model, batch).flatten(1).mean(1)
