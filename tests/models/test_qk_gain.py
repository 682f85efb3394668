"""Norms of queries and keys without learned gains."""

import torch

from depthmix.models import Decoder, DecoderConfig
from depthmix.ops.norm import RMSNorm
from small_cases import each


def decoder(**changes):
    torch.manual_seed(0)
    shape = {"vocab_size": 11, "dim": 24, "n_blocks": 2, "n_heads": 2, "n_kv_heads": 1, "qk_norm": True}
    return Decoder(DecoderConfig(**{**shape, **changes}))


def test_only_the_gains_are_gone():
    with_gains, without = decoder(), decoder(qk_gain=False)
    gone = set(dict(with_gains.named_parameters())) - set(dict(without.named_parameters()))
    assert gone == {f"sublayers.{site}.{norm}.weight" for site in (0, 2) for norm in ("q_norm", "k_norm")}
    ids = torch.arange(11).view(1, -1)
    assert torch.equal(with_gains(ids), without(ids))  # gains begin at one
    without(ids).sum().backward()
    assert decoder(qk_norm=False, qk_gain=False)(ids).shape == (1, 11, 11)


@each("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_itself(dtype):
    x = torch.randn(3, 8, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    found = RMSNorm(8, eps=1e-6, elementwise_affine=False)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps * 2, atol=1e-6)
