"""What sublayers do between their products, in one launch, against the modules' own operators."""

import pytest
import torch
from torch.nn import functional

from depthmix.models.layers import Rotary, rotate
from depthmix.ops import use_backend
from depthmix.ops.norm import RMSNorm
from depthmix.ops.sublayer.op import activate, turn_and_store
from ops.helpers import rand

pytest.importorskip("triton")
pytestmark = [pytest.mark.usefixtures("quick_interpreter"), pytest.mark.covered]


@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "dim", "norm", "dtype"),
    [
        (1, 1, 4, 4, 8, True, torch.float32),
        (2, 3, 3, 1, 6, True, torch.float16),
        (2, 1, 2, 2, 10, False, torch.float32),
        (1, 0, 2, 2, 8, True, torch.float32),
    ],
)
def test_turn_and_store(batch, length, heads, kv_heads, dim, norm, dtype):
    q, k, v = (rand(batch, length, h, dim, seed=h, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    past, slots = 2, 7
    cos, sin = Rotary(dim, 100.0)(torch.arange(past, past + length)[None])
    norms = [RMSNorm(dim, eps=1e-5) for _ in range(2)]
    with torch.no_grad():
        for n in norms:
            n.weight += rand(dim, seed=5, dtype=torch.float32)
        keys, values = (torch.full((batch, kv_heads, slots, dim), float("nan"), dtype=dtype) for _ in range(2))
        gains = (norms[0].weight, norms[1].weight) if norm else None
        turned = turn_and_store(q, k, v, cos, sin, gains, 1e-5, torch.tensor([past]), keys, values)
        q, k = (norms[0](q), norms[1](k)) if norm else (q, k)
        close = {"rtol": 2e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
        torch.testing.assert_close(turned, rotate(q.transpose(1, 2), cos, sin), **close)
        now = slice(past, past + length)
        torch.testing.assert_close(keys[:, :, now], rotate(k.transpose(1, 2), cos, sin), **close)
        assert torch.equal(values[:, :, now], v.transpose(1, 2))
        for cache in (keys, values):
            assert cache[:, :, :past].isnan().all()
            assert cache[:, :, past + length :].isnan().all()


@pytest.mark.parametrize("shape", [(3, 5), (2, 1, 8), (0, 4), (300,)])
def test_activate(shape):
    gate, up = (3 * rand(*shape, seed=s, dtype=torch.float32) for s in (1, 2))
    with use_backend("triton"), torch.no_grad():
        torch.testing.assert_close(activate(gate, up), functional.silu(gate) * up)
        torch.testing.assert_close(activate(None, up), functional.relu(up).square())
    with use_backend("triton"):
        assert activate(gate.requires_grad_(), up).requires_grad
