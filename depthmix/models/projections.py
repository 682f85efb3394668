"""Linear layers that are trained under autocast: those that read one input in one product, and a gain for outputs in the weights.

    [q, k, v] = h [W_q; W_k; W_v]ᵀ        dh = [dq, dk, dv] [W_q; W_k; W_v]

reads h once and gives it one gradient, where three products read it three times and add three gradients up. Weights stay apart, as
checkpoints and everybody who looks for them have them, and are joined for a pass. What is joined is a copy that waits for the
backward: autocast makes such copies anyway, in its own precision, and without it there is none, nor for a step of decoding.

    g ⊙ (W x) = (diag(g) W) x

A gain for every channel of an output costs a pass over activations each way, and the output kept for its gradient; in the weights
that are copied anyway it costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from depthmix.ops.torch_internals import calls_only_its_forward


def project(h: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """What layers make of h [..., D]; where one is wrapped, sharded, quantized or hooked into, all are asked by themselves."""
    if not copies_weights(h) or not all(map(_untouched, layers)):
        return tuple(layer(h) for layer in layers)
    weight = torch.cat([layer.weight for layer in layers])
    return functional.linear(h, weight).split([layer.out_features for layer in layers], dim=-1)


def project_out(x: Tensor, layer: nn.Linear, gain: Tensor | None) -> Tensor:
    """What a layer makes of x, times a gain [D] in fp32: in its weights."""
    return layer(x) if gain is None else functional.linear(x, layer.weight * gain.unsqueeze(-1))


def copies_weights(h: Tensor) -> bool:
    """Whether autocast copies weights for a product with h, and keeps the copies for the backward."""
    return torch.is_grad_enabled() and h.device.type != "meta" and torch.is_autocast_enabled(h.device.type)


def weights_take_gains(h: Tensor) -> bool:
    """Whether a gain fits into such copies: into bf16, which has the range of fp32; in fp16 a small one would make them zero."""
    return copies_weights(h) and torch.get_autocast_dtype(h.device.type) is torch.bfloat16


def own_gain(gains: Mapping[int, Tensor], site: int, sublayer: nn.Module) -> Tensor | None:
    """The gain that a sublayer is to multiply its output with in its weights; None where that would be seen, or there is none."""
    layer: Any = sublayer.out_proj if site in gains and calls_only_its_forward(sublayer) else None
    return gains[site] if layer is not None and _untouched(layer) else None


def _untouched(layer: nn.Linear) -> bool:
    """Whether calling it is a product with its weight and nothing else."""
    plain = type(layer) is nn.Linear and type(layer.weight) in (Tensor, nn.Parameter)
    return plain and layer.bias is None and calls_only_its_forward(layer)
