"""RMSNorm as the mixers round it: computed in fp32 (fp64 for fp64), one rounding to the input's dtype."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from depthmix.ops.precision import compute_dtype


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, for inputs narrower than its gain too: under autocast the gain is fp32 and the activations are bf16."""

    def forward(self, x: Tensor) -> Tensor:
        wide = compute_dtype(x, self.weight)
        return functional.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps).to(x.dtype)


def is_plain_rms_norm(norm: object) -> bool:
    """Whether a norm is an RMSNorm with a gain over the channels that nothing hooks into, so that a kernel may do its work."""
    if type(norm) not in (nn.RMSNorm, RMSNorm):
        return False
    assert isinstance(norm, nn.RMSNorm)
    if norm.weight is None or len(norm.normalized_shape) != 1:
        return False
    return not (norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks)


def eps_of(norm: nn.RMSNorm, dtype: torch.dtype) -> float:
    """The norm's eps; torch's default depends on the dtype it computes in."""
    return torch.finfo(dtype).eps if norm.eps is None else norm.eps
