"""Next-token loss of a model whose batch may have grown during the pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from depthmix.ops.precision import compute_dtype


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Compute the mean loss in nats of a batch [B, T + 1]: [E], one entry for each of the E copies that the logits
    hold.
    """
    out = model(batch[:, :-1])
    logits = out if isinstance(out, Tensor) else out.logits  # of a Hugging Face model
    targets = batch[:, 1:].flatten()
    copies = logits.unflatten(0, (-1, len(batch))).unbind(0)
    # One copy at a time, because fp32 logits are the largest tensor.
    return torch.stack(
        [functional.cross_entropy(copy.flatten(0, 1).to(compute_dtype(copy)), targets) for copy in copies]
    )
