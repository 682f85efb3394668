"""Add up partial sums that many kernel programs wrote, each over its own tokens: a few parameter rows per program.

    total = Σ_programs part

The partial sums are still in the L2 cache. Each program here adds up a few columns, always in the same order, so the result is
deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthmix.ops.gpu.launch import launch
from depthmix.ops.gpu.sizes import cdiv

# Numbers that a program adds to its sums at a time.
TILE = 8192
# From this many columns on, PyTorch's own sum is as fast.
WIDE = 32768


@triton.jit(do_not_specialize=["programs", "columns"])
def _sum_programs_kernel(
    part, out, programs: tl.int64, columns: tl.int64, UNIT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr
):
    width = columns * UNIT
    c = tl.program_id(0).to(tl.int64) * BC + tl.arange(0, BC)
    acc = tl.zeros([BP, BC], tl.float32)
    for start in range(0, programs, BP):
        p = start + tl.arange(0, BP)
        acc += tl.load(
            part + (p[:, None] * width + c[None, :]), mask=(p < programs)[:, None] & (c < width)[None, :], other=0.0
        )
    tl.store(out + c, tl.sum(acc, 0), mask=c < width)


def sum_programs(part: Tensor) -> Tensor:
    """Sum a contiguous fp32 tensor [programs, ...] over its first dimension, which is not empty."""
    out = torch.empty(part.shape[1:], dtype=torch.float32, device=part.device)
    width = out.numel()
    if width > WIDE:
        torch.sum(part, 0, out=out)
    elif width:
        unit = 4 if width % 4 == 0 else 1
        # Narrow enough blocks that there are programs for all cores.
        block = 16 if width <= 1024 else 32 if width <= 8192 else 64
        launch(
            _sum_programs_kernel, (cdiv(width, block),), part,
            part, out, len(part), width // unit, UNIT=unit, BP=TILE // block, BC=block, num_warps=8, num_stages=1,
        )  # fmt: skip
    return out
