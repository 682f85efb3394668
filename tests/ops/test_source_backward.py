"""Gradients of sources from all their readers, in Triton's interpreter, against autograd through the equations in fp64."""

import pytest
import torch
from torch import Tensor

from ops.helpers import assert_near, rand
from small_cases import each

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")
EPS, TOKENS, READ = 1e-3, 3, 3
# One rounding; the interpreter cuts bf16 off instead (tests/gpu has the exact bound).
ROUNDED = {torch.float32: 4e-6, torch.float16: 5e-4, torch.bfloat16: 8e-3}


class Case:
    """Readers of READ sources each, and the gradients of the last of them, from the equations."""

    def __init__(self, n: int, dim: int, sources: int, dtype: torch.dtype, read: int = READ) -> None:
        self.v = [rand(TOKENS, dim, seed=i, dtype=dtype) for i in range(read)]
        self.u = rand(n, dim, seed=50, dtype=torch.float32) / dim**0.5
        self.do = [rand(TOKENS, dim, seed=100 + e, dtype=dtype) for e in range(n)]
        v = [x.double().requires_grad_() for x in self.v]
        # Of u, the part that comes from the sources in question: theirs is a copy of its own.
        u = [self.u.double().requires_grad_(i >= read - sources) for i in range(read)]
        keys = [x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() for x in v]
        self.s = torch.stack([q @ k.T for q, k in zip(u, keys, strict=True)], 1)  # [n, read, TOKENS]
        o = torch.einsum("nit,itd->ntd", self.s.softmax(1), torch.stack(v))
        do = torch.stack(self.do).double()
        wanted = torch.autograd.grad((o * do).sum(), [*v[-sources:], *u[-sources:]])
        self.dv, self.du = list(wanted[:sources]), sum(wanted[sources:])
        self.ld = torch.stack([self.s.logsumexp(1), (o * do).sum(-1)], 1).float()  # log-sum-exp and δ: [n, 2, TOKENS]
        self.sources = sources

    def readers(self, several: bool = True) -> list:
        from depthmix.ops.depth_attention.kernels.source_backward import Reader

        s = self.s.detach().float()[:, -self.sources :]
        return [Reader(*known, several) for known in zip(self.do, map(list, s), self.ld.detach(), self.u, strict=True)]


def backward(case: Case, need_du: bool = True, **known: Tensor | bool) -> tuple[list[Tensor | None], Tensor | None]:
    from depthmix.ops.depth_attention.kernels.source_backward import Source, source_backward

    sources = [Source(v) for v in case.v[-case.sources :]]
    sources[-1] = sources[-1]._replace(**known)
    dv, du = source_backward(sources, case.readers(), EPS, need_du)
    return dv, None if du is None else du.sum(0)


@pytest.mark.covered
@each("sources", [1, 2])
@each(
    ("n", "dim"),  # weights are computed for sixteen readers at a time
    [(1, 24), (2, 7), (15, 80), (16, 24), (17, 7), (33, 80)],
)
def test_every_number_of_readers(n: int, dim: int, sources: int) -> None:
    case = Case(n, dim, sources, torch.float32)
    dv, du = backward(case)
    assert_near([*dv, du], [*case.dv, case.du], 4e-6)


FP32, FP16, BF16 = ROUNDED


@pytest.mark.parametrize(
    ("dim", "sources", "dtype"),
    [
        (200, 2, BF16),  # 8 numbers of a row in a lane
        (1000, 2, FP32),  # 16, on more warps
        (1000, 2, BF16), (1024, 2, FP16),  # 32
        (2048, 1, BF16),  # 64
        (2048, 2, FP16), (3000, 1, BF16),  # 16 again: there are no more registers
    ],
)  # fmt: skip
def test_every_width_and_precision(dim: int, sources: int, dtype: torch.dtype) -> None:
    """A lane holds 8 to 64 numbers of a row, readers come in groups of 16 or 32, and bf16's r ds in two halves."""
    lane = (
        dim >= 1000 and dtype != FP32 and not (dim > 2048 or (dim == 2048 and sources == 2))
    )  # 32 numbers in it, or 64
    case = Case(33 if lane else 17, dim, sources, dtype)  # one more than a group
    dv, du = backward(case)
    assert [d is not None and d.dtype for d in dv] == [dtype] * sources
    assert_near(dv, case.dv, ROUNDED[dtype])
    assert_near([du], [case.du], 2e-5)  # nothing of it is rounded to the sources' precision


def test_what_is_known_already_is_added() -> None:
    case = Case(5, 24, 2, torch.float32)
    g, part = rand(TOKENS, 24, seed=70, dtype=torch.float32), rand(TOKENS, 24, seed=71, dtype=torch.float32)
    dv, _ = backward(case, g=g, part=part)
    assert_near(dv, [case.dv[0], case.dv[1] + g + part], 4e-6)


def test_what_is_not_whole_is_not_rounded() -> None:
    case = Case(5, 24, 2, torch.bfloat16)
    dv, _ = backward(case, whole=False)
    assert dv[1] is not None
    assert dv[1].dtype == torch.float32
    assert_near([dv[1]], [case.dv[1]], 4e-6)


def test_only_what_is_needed_is_returned() -> None:
    case = Case(5, 24, 2, torch.float32)
    dv, du = backward(case, need_du=False, need_dv=False)
    assert dv[1] is None
    assert du is None
    assert_near([dv[0]], [case.dv[0]], 4e-6)


def test_an_only_source_gets_do_and_its_query_nothing() -> None:
    """Even where the stored logits say otherwise."""
    from depthmix.ops.depth_attention.kernels.source_backward import Source, source_backward

    case = Case(3, 24, 1, torch.float32, read=1)
    case.ld[:, 1] += 1.0  # δ as a rounded result would give it
    dv, du = source_backward([Source(case.v[0])], case.readers(several=False), EPS, need_du=True)
    assert du is not None
    assert not du.any()
    assert_near(dv, [sum(case.do)], 1e-6)
