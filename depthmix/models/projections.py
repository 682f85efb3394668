"""Linear layers that read one input: in one product while gradients are recorded.

    [q, k, v] = h [W_q; W_k; W_v]ᵀ        dh = [dq, dk, dv] [W_q; W_k; W_v]

reads h once and gives it one gradient, where three products read it three times and add three gradients up. Weights stay apart, as
checkpoints and everybody who looks for them have them, and are joined for a pass: next to nothing beside thousands of tokens, and too
much beside the one of a step of decoding, where layers are asked one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def project(h: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """What layers make of h [..., D]; one that is wrapped, sharded, quantized or hooked into is asked by itself, and so are all."""
    if len(layers) < 2 or not torch.is_grad_enabled() or not all(map(_untouched, layers)):
        return tuple(layer(h) for layer in layers)
    weight = torch.cat([layer.weight for layer in layers])
    return functional.linear(h, weight).split([layer.out_features for layer in layers], dim=-1)


def _untouched(layer: nn.Linear) -> bool:
    """Whether calling it is a product with its weight and nothing else."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    plain = type(layer) is nn.Linear and type(layer.weight) in (Tensor, nn.Parameter)
    return plain and layer.bias is None and not hooked
