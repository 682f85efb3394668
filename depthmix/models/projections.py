"""Linear layers under autocast: layers that share an input run as one product, and output gains go into the weights.

    [q, k, v] = h [W_q; W_k; W_v]ᵀ        dh = [dq, dk, dv] [W_q; W_k; W_v]

reads h once and computes one gradient of h, where three products read h three times and add three gradients. The weights stay
separate parameters, as checkpoints and tools expect, and are concatenated in each pass. The concatenation is a copy that is kept
for the backward. Autocast makes such copies anyway, in its own precision. Without autocast, and in decoding, layers run separately.

    g ⊙ (W x) = (diag(g) W) x

A gain for every channel of an output costs a pass over activations in forward and backward, and memory for the unscaled output. Folded
into the weights that are copied anyway, it costs almost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from depthmix.ops.torch_internals import calls_only_its_forward


def project(h: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Apply several layers to h [..., D], in one product where possible. Layers that are wrapped, sharded, quantized or
    hooked into run separately.
    """
    if not copies_weights(h) or not all(map(_untouched, layers)):
        return tuple(layer(h) for layer in layers)
    weight = torch.cat([layer.weight for layer in layers])
    return functional.linear(h, weight).split([layer.out_features for layer in layers], dim=-1)


def project_out(x: Tensor, layer: nn.Linear, gain: Tensor | None) -> Tensor:
    """Apply a layer to x and multiply by a gain [D] in fp32, which is folded into the weight."""
    return layer(x) if gain is None else functional.linear(x, layer.weight * gain.unsqueeze(-1))


def copies_weights(h: Tensor) -> bool:
    """Tell whether autocast copies weights for a product with h and keeps the copies for the backward pass."""
    return torch.is_grad_enabled() and h.device.type != "meta" and torch.is_autocast_enabled(h.device.type)


def weights_take_gains(h: Tensor) -> bool:
    """Tell whether a gain fits into autocast's weight copies: into bf16, which has fp32's range. In fp16 a small gain
    would underflow to zero.
    """
    return copies_weights(h) and torch.get_autocast_dtype(h.device.type) is torch.bfloat16


def own_gain(gains: Mapping[int, Tensor], site: int, sublayer: nn.Module) -> Tensor | None:
    """Return the gain that a sublayer folds into its output weights, or None if there is none or folding would be
    visible from outside.
    """
    layer: Any = sublayer.out_proj if site in gains and calls_only_its_forward(sublayer) else None
    return gains[site] if layer is not None and _untouched(layer) else None


def _untouched(layer: nn.Linear) -> bool:
    """Tell whether calling the layer is a product with its weight and nothing else."""
    plain = type(layer) is nn.Linear and type(layer.weight) in (Tensor, nn.Parameter)
    return plain and layer.bias is None and calls_only_its_forward(layer)
