"""Decide which parameters weight decay applies to, in any model that contains mixers."""

from __future__ import annotations

from typing import Any

from torch import nn

from depthmix.mixers.base import Mixer


def decays(model: nn.Module) -> dict[str, bool]:
    """Tell by parameter name whether weight decay applies: to matrices, and in a mixer to what its paper decays (`Mixer.decayed`)."""
    result = {name: p.ndim >= 2 for name, p in model.named_parameters()}
    for prefix, module in model.named_modules():
        if isinstance(module, Mixer):
            for name, _ in module.named_parameters():
                result[f"{prefix}.{name}" if prefix else name] = (
                    name.split(".")[0] in module.decayed
                )  # b, or b.3 in a dictionary
    return result


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two groups for any optimizer, of the parameters that train: those that weight decay applies to, and the rest."""
    applies = decays(model)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if applies[name]], "weight_decay": weight_decay},
        {"params": [p for name, p in named if not applies[name]], "weight_decay": 0.0},
    ]
