"""The tests' quick interpreter computes what Triton's own does, bit for bit."""

import os

import pytest
import torch

import forking
from project import ROOT

triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def kernel(x, narrow, table, out, copy, chosen, whole, n, size: tl.constexpr):
    """Every function that has plans, with operands of several types."""
    row, at = tl.program_id(0), tl.arange(0, size)
    start, inside = row.to(tl.int64) * n, (at < n) & (at >= 0)
    a = tl.load(x + start + at, mask=inside, other=0.0)
    b = tl.load(narrow + start + at, mask=inside, other=0.0)
    c = tl.load(narrow + start + at, mask=inside, other=2.0).to(tl.float32)
    d = tl.load(tl.load(table + row).to(tl.pointer_type(tl.float32)) + at, mask=inside)
    total = tl.full([size], -0.0, tl.float32) + tl.zeros([size], dtype=tl.float32)
    total += (2 - a) * b.to(tl.float32) / (1 + a * a) + 1.5 / (3 + c * c) - tl.where(d > 0.25, d, -1.0) * 0.5
    total = tl.where((a <= 0) | (b.to(tl.float32) == 0), total, total - d)
    square = a[:, None] * d[None, :] + at[:, None] - at[None, :].to(tl.float32) * 3
    total += tl.sum(square, axis=1) + tl.max(square, axis=0) * tl.sum(a * 2)
    tl.store(out + start + at, total, mask=inside)
    tl.store(copy + start + at, total.to(copy.dtype.element_ty), mask=inside)
    tl.store(chosen + start + at, (a != d) & (total >= a - 70), mask=inside)
    products = (start + at * 3 - 7) * (at + 2)
    tl.store(whole + start + at, tl.where(at > 1, products, products - at), mask=inside)
    tl.store(whole + 2 * n + row, (n + row) * 5 - 2)


def run(dtype):
    g = torch.Generator().manual_seed(0)
    x, narrow = torch.randn(2, 5, generator=g), torch.randn(2, 5, generator=g).to(dtype)
    table = torch.tensor([x[1].data_ptr(), x[0].data_ptr()])
    out, copy, chosen = torch.zeros(2, 5), torch.zeros(2, 5, dtype=dtype), torch.zeros(2, 5, dtype=torch.bool)
    whole = torch.zeros(12, dtype=torch.int64)
    kernel[(2,)](x, narrow, table, out, copy, chosen, whole, 5, size=8)
    return [out, copy, chosen, whole]


def compare():
    """Run in a process whose interpreter is as Triton has it, then with plans that are made and with plans that are used."""
    from triton.runtime import interpreter

    from quick_interpreter import quicken

    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    expected = [run(dtype) for dtype in dtypes]
    assert all(t.any() and not t.isnan().any() for found in expected for t in found)
    with pytest.MonkeyPatch.context() as patch:
        quicken(interpreter, patch)
        for _ in range(2):
            for dtype, exact in zip(dtypes, expected, strict=True):
                for name, a, b in zip(("out", "copy", "chosen", "whole"), run(dtype), exact, strict=True):
                    assert torch.equal(a, b), (dtype, name, a, b)


def test_every_planned_function():
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = forking.python("import test_quick_interpreter as t; t.compare()", env=environment)
    assert done.returncode == 0, done.stderr
