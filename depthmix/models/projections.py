"""Linear layers that read one input: in one product while gradients are recorded.

    [q, k, v] = h [W_q; W_k; W_v]ᵀ        dh = [dq, dk, dv] [W_q; W_k; W_v]

reads h once and gives it one gradient, where three products read it three times and add three gradients up. Weights stay apart, as
checkpoints and everybody who looks for them have them, and are joined for a pass: next to nothing beside thousands of tokens, and too
much beside the one of a step of decoding, where layers are asked one by one. So they are in a module that FSDP2 shards, for what is
joined is kept until the backward, which whole weights are not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def joined(h: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """What layers make of h [..., D]; where one is wrapped, sharded, quantized or hooked into, all are asked by themselves."""
    if not torch.is_grad_enabled() or not all(map(_untouched, layers)):
        return one_by_one(h, *layers)
    weight = torch.cat([layer.weight for layer in layers])
    return functional.linear(h, weight).split([layer.out_features for layer in layers], dim=-1)


def one_by_one(h: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """The same, a product each."""
    return tuple(layer(h) for layer in layers)


def _untouched(layer: nn.Linear) -> bool:
    """Whether calling it is a product with its weight and nothing else."""
    hooked = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    plain = type(layer) is nn.Linear and type(layer.weight) in (Tensor, nn.Parameter)
    return plain and layer.bias is None and not hooked
