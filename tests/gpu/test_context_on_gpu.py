"""Attention to a sequence in parts on the kernels of a GPU, where the last queries of many keys are masked by the kernel itself."""

from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

DEVICE = "cuda"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)], ids=str)
def test_attention_is_that_of_the_whole_sequence(
    dtype: torch.dtype, tolerance: float, kv_heads: int, compiled: bool
) -> None:
    pytest.importorskip("depthmix.parallel.context")
    if compiled and dtype == torch.float32 and kv_heads == 4 and torch.__version__ < "2.12":
        pytest.skip(
            "torch 2.11 compiles the backward of memory-efficient attention with strides that its kernel does not have"
        )
    from parallel.in_turn import in_turn

    torch.compiler.reset()  # or the sizes of the case before would be variable in this one
    q, k, v = (torch.randn(2, heads, 512, 64, device=DEVICE, dtype=dtype) for heads in (4, kv_heads, kv_heads))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    grouped = kv_heads != 4
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected = scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=grouped).transpose(1, 2)
    wrap = partial(torch.compile, fullgraph=True) if compiled else lambda attend: attend
    found, way = in_turn(*inputs, count=4, wrap=wrap), torch.randn(expected.shape, device=DEVICE, dtype=dtype)
    gradients = torch.autograd.grad(found, inputs, way), torch.autograd.grad(expected, wide, way.double())
    for ours, theirs in ((found, expected), *zip(*gradients, strict=True)):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < tolerance
