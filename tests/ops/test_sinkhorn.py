"""sinkhorn: both conventions against plain divisions in fp64, by hand, their difference, precision, and refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depthmix.ops import sinkhorn
from ops.helpers import (
    LAYOUTS,
    assert_agrees,
    assert_backward_ignores_autocast,
    assert_ignores_autocast,
    assert_inputs_untouched,
    assert_near,
    assert_rounded_once,
    quick,
    rand,
    run,
)
from small_cases import each

CONVENTIONS = ("paper", "deepseek")
EPS = 1e-6
SHAPES = ((2, 5, 4, 4), (7, 1, 1), (3, 3), (0, 5, 4, 4), (2, 29, 29))


def naive(logits: Tensor, iterations: int = 20, convention: str = "paper") -> Tensor:
    """Divisions by sums, written with indices: m[r, c]; a column's sum runs over r, a row's over c."""

    def columns(m: Tensor, eps: float) -> Tensor:
        return m / (torch.einsum("...rc->...c", m)[..., None, :] + eps)

    def rows(m: Tensor, eps: float) -> Tensor:
        return m / (torch.einsum("...rc->...r", m)[..., :, None] + eps)

    m = logits.exp()
    if convention == "paper":
        for _ in range(iterations):
            m = rows(columns(m, 0), 0)
        return m
    m = columns(rows(m, 0) + EPS, EPS)
    for _ in range(iterations - 1):
        m = columns(rows(m, EPS), EPS)
    return m


def case(convention: str, iterations: int = 20) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The op and the naive one as functions of the logits."""
    return lambda x: sinkhorn(x, iterations, convention), lambda x: naive(x, iterations, convention)


@each("iterations", [1, 2, 20])
@each("convention", CONVENTIONS)
@each("shape", SHAPES)
def test_against_naive(shape: tuple[int, ...], convention: str, iterations: int) -> None:
    """Values and gradients at odd and empty shapes, one stream and many."""
    assert_agrees(*case(convention, iterations), [2 * rand(*shape)])


@quick
@given(
    st.lists(st.integers(0, 4), max_size=2),
    st.integers(1, 6),
    st.integers(1, 25),
    st.floats(0, 5),
    st.sampled_from(CONVENTIONS),
    st.sampled_from(LAYOUTS),
)
def test_random_cases_against_naive(
    tokens: list[int], n: int, iterations: int, scale: float, convention: str, layout: str
) -> None:
    """Drawn shapes, sizes of the logits, iterations, conventions and layouts."""
    assert_agrees(*case(convention, iterations), [scale * rand(*tokens, n, n, layout=layout)])


@each("layout", LAYOUTS)
@each("convention", CONVENTIONS)
def test_layouts_against_naive(convention: str, layout: str) -> None:
    """Transposed, strided and expanded logits."""
    assert_agrees(*case(convention), [rand(3, 5, 4, 4, layout=layout)])


@each("iterations", [1, 5])
@each("convention", CONVENTIONS)
def test_gradcheck(convention: str, iterations: int) -> None:
    """Finite differences, first and second order, also far from convergence."""
    logits = (3 * rand(2, 3, 3)).requires_grad_()
    op, _ = case(convention, iterations)
    assert torch.autograd.gradcheck(op, logits)
    assert torch.autograd.gradgradcheck(op, logits)


@each("convention", CONVENTIONS)
def test_large_logits_in_float32(convention: str) -> None:
    """Entries that vanish beside others: as near as fp32 holds their logits, with gradients that are numbers."""
    for scale in (20.0, 300.0, 1e5):
        logits = (scale * rand(200, 4, 4)).float()
        narrow, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
        m, exact = sinkhorn(narrow, 20, convention), naive(wide, 20, convention)
        if scale < 100:  # above it the naive one divides by zero
            assert_near([m], [exact], 1e-5)
            grads = [torch.autograd.grad(out.square().sum(), x)[0] for out, x in ((m, narrow), (exact, wide))]
            assert_near(grads[:1], grads[1:], 1e-4)
        else:
            assert bool(torch.autograd.grad(m.square().sum(), narrow)[0].isfinite().all())
            rows = m.sum(-1 if convention == "paper" else -2)
            assert_near([rows], [torch.ones_like(rows)], 1e-5)


@each("convention", CONVENTIONS)
def test_under_torch_func(convention: str) -> None:
    """Gradients token by token, as torch.func derives them: a sum of them is what autograd finds."""
    op, _ = case(convention, 3)
    logits = rand(5, 3, 3)
    by_token = torch.func.vmap(torch.func.grad(lambda x: op(x).square().sum()))(logits)
    leaf = logits.clone().requires_grad_()
    assert_near([by_token], torch.autograd.grad(op(leaf).square().sum(), leaf), 1e-12)


@each("convention", CONVENTIONS)
def test_without_gradients_it_has_the_same_bits(convention: str) -> None:
    logits = rand(5, 4, 4).float().requires_grad_()
    with torch.no_grad():
        alone = sinkhorn(logits, 20, convention)
    assert torch.equal(alone, sinkhorn(logits, 20, convention))


HAND = torch.tensor([[1.0, 3.0], [1.0, 1.0]], dtype=torch.float64).log()  # M = [[1, 3], [1, 1]]


def test_one_paper_iteration_by_hand() -> None:
    """Column first: [[1/2, 3/4], [1/2, 1/4]]; row last: [[2/5, 3/5], [2/3, 1/3]]."""
    expected = torch.tensor([[2 / 5, 3 / 5], [2 / 3, 1 / 3]], dtype=torch.float64)
    assert_near([sinkhorn(HAND, 1)], [expected], 1e-15)


def test_one_deepseek_iteration_by_hand() -> None:
    """Row first: [[1/4, 3/4], [1/2, 1/2]] + eps; column last, with eps in the divisor: about [[1/3, 3/5], [2/3, 2/5]]."""
    e = EPS
    expected = torch.tensor(
        [
            [(1 / 4 + e) / (3 / 4 + 3 * e), (3 / 4 + e) / (5 / 4 + 3 * e)],
            [(1 / 2 + e) / (3 / 4 + 3 * e), (1 / 2 + e) / (5 / 4 + 3 * e)],
        ],
        dtype=torch.float64,
    )
    assert_near([sinkhorn(HAND, 1, "deepseek")], [expected], 1e-15)


def test_default_is_twenty_paper_iterations() -> None:
    """The paper's convention and its twenty iterations are the default; each iteration counts."""
    logits = 5 * rand(4, 4)
    assert torch.equal(sinkhorn(logits), sinkhorn(logits, 20, "paper"))
    assert not torch.equal(sinkhorn(logits, 19), sinkhorn(logits, 20))


@each("scale", [1.0, 3.0, 10.0])
def test_paper_sums(scale: float) -> None:
    """Row sums are exact at any scale; column sums only approximately, and only for small logits."""
    m = sinkhorn(scale * rand(50, 4, 4))
    assert_near([m.sum(-1)], [torch.ones(50, 4, dtype=torch.float64)], 1e-12)
    column_error = (m.sum(-2) - 1).abs().max()
    assert column_error < 1e-4 if scale == 1 else column_error > 1e-4
    assert bool((m >= 0).all())


@each("scale", [1.0, 3.0, 10.0])
def test_deepseek_sums(scale: float) -> None:
    """Column sums are exact up to eps at any scale: s / (s + eps), a little below one; row sums only approximately."""
    m = sinkhorn(scale * rand(50, 4, 4), convention="deepseek")
    assert bool((m.sum(-2) < 1).all())
    columns_before = naive_row_step(scale * rand(50, 4, 4)).sum(-2)  # sums that the last column step divides by
    assert_near([m.sum(-2)], [columns_before / (columns_before + EPS)], 1e-12)
    row_error = (m.sum(-1) - 1).abs().max()
    assert row_error < 1e-4 if scale == 1 else row_error > 1e-4
    assert bool((m >= 0).all())


def naive_row_step(logits: Tensor) -> Tensor:
    """DeepSeek's matrix just before its last column step."""
    m = naive(logits, 19, "deepseek")
    return m / (m.sum(-1, keepdim=True) + EPS)


def test_sinkhorn_orientation_and_order_trap() -> None:
    """The conventions differ, even transposed, for non-symmetric logits: by half an iteration, until both converge."""
    logits = 3 * rand(50, 4, 4)
    paper, deepseek = sinkhorn(logits), sinkhorn(logits, convention="deepseek")
    assert (paper - deepseek).abs().max() > 1e-2
    turned = sinkhorn(logits.mT, convention="deepseek").mT  # their comb[in, out], read as M[out, in]
    assert (paper - turned).abs().max() > 1e-4
    assert (sinkhorn(logits.mT).mT - paper).abs().max() > 1e-2  # not symmetric: a forgotten transpose shows
    far = (sinkhorn(logits, 2000) - sinkhorn(logits.mT, 2000, "deepseek").mT).abs().amax((-1, -2))
    assert far.median() < 1e-4  # both tend to the same doubly stochastic matrix, up to eps


@each("convention", CONVENTIONS)
def test_permutation_equivariance(convention: str) -> None:
    """Renaming output or input streams before or after is the same."""
    logits, rows, columns = 3 * rand(5, 4, 4), torch.tensor([2, 0, 3, 1]), torch.tensor([1, 3, 2, 0])
    moved = sinkhorn(logits[:, rows][:, :, columns], 20, convention)
    assert_near([moved], [sinkhorn(logits, 20, convention)[:, rows][:, :, columns]], 1e-13)


def test_paper_ignores_offsets_of_columns_but_not_of_rows_alone() -> None:
    """A constant added to a column's logits cancels in the first step; one added to a row's changes a finite iteration."""
    logits, offset = 3 * rand(4, 4), torch.tensor([[5.0, -3.0, 0.0, 1.0]], dtype=torch.float64)
    assert_near([sinkhorn(logits + offset, 1)], [sinkhorn(logits, 1)], 1e-13)
    assert (sinkhorn(logits + offset.T, 1) - sinkhorn(logits, 1)).abs().max() > 1e-2


@each("value", [0.0, 100.0])
@each("convention", CONVENTIONS)
def test_equal_logits_give_the_uniform_matrix(convention: str, value: float) -> None:
    """Equal logits mean 1/n everywhere, whatever their size."""
    m = sinkhorn(torch.full((4, 4), value, dtype=torch.float64), 20, convention)
    assert_near([m], [torch.full((4, 4), 0.25, dtype=torch.float64)], 2e-6)


@each("convention", CONVENTIONS)
def test_huge_logits_stay_finite(convention: str) -> None:
    """Logits of standard deviation 200 in fp32, where exp overflows, give finite values and gradients."""
    logits = (200 * rand(100, 4, 4)).float()
    assert not bool(logits.exp().isfinite().all())
    (m,), grads, _ = run(case(convention)[0], [logits])
    assert bool(m.isfinite().all() and grads[0].isfinite().all())
    if convention == "paper":
        assert_near([m.sum(-1)], [torch.ones(100, 4)], 1e-5)
    else:  # a column that every row's softmax left at zero has only its eps, so its sum falls short of one
        assert bool((m.sum(-2) <= 1 + 1e-6).all())


@each("dtype", [torch.bfloat16, torch.float16])
@each("convention", CONVENTIONS)
def test_half_precision_is_computed_in_fp32(convention: str, dtype: torch.dtype) -> None:
    """Half-precision logits give an fp32 matrix, not rounded, and a gradient rounded once."""
    op, expected = case(convention)
    assert op(rand(5, 4, 4, dtype=dtype)).dtype == torch.float32
    assert_rounded_once(op, expected, [rand(5, 4, 4, dtype=dtype)])


@each("convention", CONVENTIONS)
def test_autocast_changes_nothing_and_logits_are_untouched(convention: str) -> None:
    """Bit-equal in fp32 under autocast, backward inside or outside of it; the logits are not written to."""
    op, _ = case(convention)
    logits = [rand(5, 4, 4, dtype=torch.float32)]
    assert_ignores_autocast(op, logits)
    assert_backward_ignores_autocast(op, logits)
    assert_inputs_untouched(op, logits)


M = torch.ones(2, 4, 4)
BAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "not square": ((M[..., :3],), r"floating-point logits \[\.\.\., n, n\], got \[2, 4, 3\] of torch\.float32"),
    "one dimension": ((M[0, 0],), r"logits \[\.\.\., n, n\], got \[4\]"),
    "integers": ((M.long(),), r"floating-point logits .* of torch\.int64"),
    "no iterations": ((M, 0), "at least one iteration, got 0"),
    "negative": ((M, -1), "at least one iteration, got -1"),
    "convention": ((M, 20, "rows"), "convention must be 'paper' or 'deepseek', got 'rows'"),
}


@each(("args", "message"), BAD.values(), ids=BAD.keys())
def test_refusals(args: tuple[Any, ...], message: str) -> None:
    """Every bad argument is refused with what was expected and what came."""
    with pytest.raises(ValueError, match=f"^sinkhorn: .*{message}"):
        sinkhorn(*args)
