"""Linear layers that read one input: in one product where they are trained under autocast.

    [q, k, v] = h [W_q; W_k; W_v]ᵀ        dh = [dq, dk, dv] [W_q; W_k; W_v]

reads h once and gives it one gradient, where three products read it three times and add three gradients up. Weights stay apart, as
checkpoints and everybody who looks for them have them, and are joined for a pass. What is joined is a copy that waits for the
backward: autocast makes such copies anyway, in its own precision, and without it there is none, nor for a step of decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def project(h: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """What layers make of h [..., D]; where one is wrapped, sharded, quantized or hooked into, all are asked by themselves."""
    copied = torch.is_grad_enabled() and h.device.type != "meta" and torch.is_autocast_enabled(h.device.type)
    if not copied or not all(map(_untouched, layers)):
        return tuple(layer(h) for layer in layers)
    weight = torch.cat([layer.weight for layer in layers])
    return functional.linear(h, weight).split([layer.out_features for layer in layers], dim=-1)


def _untouched(layer: nn.Linear) -> bool:
    """Whether calling it is a product with its weight and nothing else."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    plain = type(layer) is nn.Linear and type(layer.weight) in (Tensor, nn.Parameter)
    return plain and layer.bias is None and not hooked
