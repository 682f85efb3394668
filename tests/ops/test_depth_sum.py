"""depth_sum and depth_scores: values and gradients against einsum in fp64, precision, and refusals."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depthmix.ops import depth_scores, depth_sum
from depthmix.ops.depth_sum.op import depth_sum_normed, source_scores
from depthmix.ops.precision import rms_normalize
from ops.helpers import (
    LAYOUTS,
    assert_agrees,
    assert_backward_ignores_autocast,
    assert_ignores_autocast,
    assert_inputs_untouched,
    assert_near,
    assert_rounded_once,
    combinations,
    name,
    peak_temporaries,
    quick,
    rand,
    run,
    saved_storages,
    stacked_sizes,
)
from small_cases import each

Op = Callable[..., tuple[Tensor, ...]]


def naive_sum(
    sources: Sequence[Tensor], static: Tensor | None = None, dynamic: Tensor | None = None, relu: bool = False
) -> tuple[Tensor, ...]:
    """The weight of every way, token, source and channel in one tensor, then one einsum."""
    v = torch.stack(list(sources), -2)  # [..., i, D]
    weight = torch.zeros((), dtype=v.dtype)
    if dynamic is not None:
        weight = weight + dynamic.unsqueeze(-1)
    if static is not None:
        weight = weight + static
    if relu:  # derivative one at zero
        weight = torch.where(weight >= 0, weight, torch.zeros_like(weight))
    ways = weight.shape[-3]
    weight = weight.expand(*v.shape[:-2], ways, *v.shape[-2:])
    return torch.einsum("...wid,...id->...wd", weight, v).unbind(-2)


def naive_scores(sources: Sequence[Tensor], w: Tensor) -> Tensor:
    """One einsum over the stacked sources."""
    return torch.einsum("wid,...id->...wi", w.expand(-1, len(sources), -1), torch.stack(list(sources), -2))


def sum_case(
    shape: Sequence[int] = (2, 5, 24),
    n: int = 3,
    ways: int = 2,
    static: str | None = "D",
    dynamic: bool = False,
    relu: bool = False,
    layout: str = "contiguous",
    dtype: torch.dtype = torch.float64,
) -> tuple[Op, Op, list[Tensor]]:
    """depth_sum and the naive one as functions of the same leaves (sources, then weights), and the leaves."""
    small = torch.float32 if dtype.itemsize == 2 else dtype
    leaves = [rand(*shape, seed=i, layout=layout, dtype=dtype) for i in range(n)]
    names = [k for k, given_ in (("static", static), ("dynamic", dynamic)) if given_]
    if static:
        leaves.append(rand(ways, n, shape[-1] if static == "D" else 1, seed=50, layout=layout, dtype=small))
    if dynamic:
        leaves.append(rand(*shape[:-1], ways, n, seed=51, layout=layout, dtype=small))

    def call(fn: Op) -> Op:
        return lambda *t: fn(t[:n], **dict(zip(names, t[n:], strict=True)), relu=relu)

    return call(depth_sum), call(naive_sum), leaves


def score_case(
    shape: Sequence[int] = (2, 5, 24), n: int = 3, ways: int = 2, shared: bool = False, **how: Any
) -> tuple[Op, Op, list[Tensor]]:
    """depth_scores and the naive one as functions of the same leaves (sources, then w), and the leaves."""
    leaves = [rand(*shape, seed=i, **how) for i in range(n)]
    how = how | ({"dtype": torch.float32} if how.get("dtype") in (torch.bfloat16, torch.float16) else {})
    leaves.append(rand(ways, 1 if shared else n, shape[-1], seed=50, **how))
    return lambda *t: depth_scores(t[:n], t[n]), lambda *t: naive_scores(t[:n], t[n]), leaves


WEIGHTS = [o for o in combinations(static=(None, "D", "1"), dynamic=(False, True)) if o["static"] or o["dynamic"]]
OPTIONS = [w | r for w in WEIGHTS for r in ({"relu": False}, {"relu": True})]
SHAPES = ((2, 5, 24), (7, 1), (3, 24), (0, 5, 8), (2, 3, 1), (24,))
CASES: dict[str, tuple[Op, Op, list[Tensor]]] = {
    **{name(o): sum_case(**o) for o in OPTIONS},
    "scores": score_case(),
    "scores-shared": score_case(shared=True),
}


@each("n", [1, 29])
@each("shape", SHAPES)
@each("options", OPTIONS)
def test_sum_against_naive(options: dict[str, Any], shape: tuple[int, ...], n: int) -> None:
    """Every kind of weight at odd shapes, for one source and many: outputs and all gradients."""
    assert_agrees(*sum_case(shape, n, 3, **options))


@each("shared", [False, True])
@each("n", [1, 29])
@each("shape", SHAPES)
def test_scores_against_naive(shape: tuple[int, ...], n: int, shared: bool) -> None:
    """Dot products with a vector a source or one for all: outputs and all gradients."""
    assert_agrees(*score_case(shape, n, 3, shared))


@each("layout", LAYOUTS)
@each("options", OPTIONS)
def test_layouts_against_naive(options: dict[str, Any], layout: str) -> None:
    """Transposed, strided and expanded sources and weights."""
    assert_agrees(*sum_case((2, 5, 6), 4, **options, layout=layout))
    assert_agrees(*score_case((2, 5, 6), 4, layout=layout))


@quick
@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(OPTIONS),
    st.sampled_from(LAYOUTS),
)
def test_random_cases_against_naive(
    tokens: list[int], dim: int, n: int, ways: int, options: dict[str, Any], layout: str
) -> None:
    """Drawn shapes, numbers of sources and ways, layouts and weights."""
    assert_agrees(*sum_case((*tokens, dim), n, ways, **options, layout=layout))
    assert_agrees(*score_case((*tokens, dim), n, ways, layout=layout))


@each("options", [o for o in OPTIONS if o["relu"]])
def test_relu_has_derivative_one_at_zero(options: dict[str, Any]) -> None:
    """Weights initialised at zero learn: their gradient is the one without relu, and the output is zero."""
    op, expected, leaves = sum_case((2, 5, 6), **options)
    linear, _, _ = sum_case((2, 5, 6), **(options | {"relu": False}))
    leaves = [*leaves[:3], *(torch.zeros_like(t) for t in leaves[3:])]
    outs, grads, cotangents = run(op, leaves)
    assert all(not o.any() for o in outs)
    assert all(bool(g.any()) for g in grads[3:])
    assert_near(grads, run(linear, leaves, cotangents)[1])
    assert_agrees(op, expected, leaves)


def test_unit_weights_add_and_average() -> None:
    """Weights of one give the plain residual sum; one-hot weights pick a source."""
    v = [rand(2, 5, 6, seed=i) for i in range(4)]
    (total,) = depth_sum(v, torch.ones(1, 4, 1, dtype=torch.float64))
    picks = depth_sum(v, torch.eye(4, dtype=torch.float64).unsqueeze(-1))
    assert_near([total, *picks], [v[0] + v[1] + v[2] + v[3], *v], 1e-14)


@each("options", [{"static": "D"}, {"static": "1", "dynamic": True}])
def test_gradcheck(options: dict[str, Any]) -> None:
    """Finite differences, first and second order: these operators are plain autograd."""
    op, _, leaves = sum_case((2, 2), 2, **options)
    leaves = [t.clone().requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(op, leaves)
    assert torch.autograd.gradgradcheck(op, leaves)


HALVES = (torch.bfloat16, torch.float16)
ONE_TERM = [o for o in OPTIONS if o["relu"] or not (o["static"] and o["dynamic"])]


@each("dtype", HALVES)
@each("options", ONE_TERM)
def test_half_precision_rounds_once(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Half-precision sources, one way, fp32 weights: output in the sources' dtype; output and gradients rounded once."""
    op, expected, leaves = sum_case((2, 5, 24), 5, 1, **options, dtype=dtype)
    assert {o.dtype for o in op(*leaves)} == {dtype}
    assert_rounded_once(op, expected, leaves)


@each("dtype", HALVES)
@each("options", OPTIONS)
def test_half_precision_with_ways(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Several ways: outputs and weights' gradients rounded once, sources' gradients once for every product they are in."""
    op, expected, leaves = sum_case((2, 5, 24), 5, 3, **options, dtype=dtype)
    assert {o.dtype for o in op(*leaves)} == {dtype}
    assert_rounded_once(op, expected, leaves, grad_roundings=2 * (3 if options in ONE_TERM else 6))


@each("dtype", HALVES)
@each("ways", [1, 3])
def test_scores_of_half_precision_stay_fp32(ways: int, dtype: torch.dtype) -> None:
    """Scores are not rounded: half-precision sources give fp32 scores."""
    op, expected, leaves = score_case((2, 5, 24), 5, ways, dtype=dtype)
    assert op(*leaves).dtype == torch.float32
    assert_rounded_once(op, expected, leaves, grad_roundings=1 if ways == 1 else 2 * ways)


@each("case", [sum_case, score_case])
def test_source_gradients_round_once_with_ways(case: Callable[..., tuple[Op, Op, list[Tensor]]]) -> None:
    """The rule of precision.py, one rounding at the end, holds for the sources' gradients with several ways too."""
    assert_rounded_once(*case((2, 5, 24), 5, 4, dtype=torch.bfloat16))


@each("position", [0, 3])
def test_mixed_dtypes_promote(position: int) -> None:
    """An fp32 embedding among bf16 sources gives fp32 sums."""
    op, expected, leaves = sum_case((2, 5, 24), 4, 1, dtype=torch.bfloat16)
    leaves[position] = rand(2, 5, 24, dtype=torch.float32)
    assert {o.dtype for o in op(*leaves)} == {torch.float32}
    assert_rounded_once(op, expected, leaves)


@each("case", CASES.values(), ids=CASES.keys())
def test_autocast_changes_nothing_and_inputs_are_untouched(case: tuple[Op, Op, list[Tensor]]) -> None:
    """Bit-equal in fp32 under autocast, backward inside or outside of it; no input is written to."""
    op, _, leaves = case
    assert_inputs_untouched(op, leaves)
    leaves = [t.float() for t in leaves]
    assert_ignores_autocast(op, leaves)
    assert_backward_ignores_autocast(op, leaves)


@each("case", CASES.values(), ids=CASES.keys())
def test_sources_are_not_stacked(case: tuple[Op, Op, list[Tensor]]) -> None:
    """No stack or cat of the activations; the naive implementation is caught making one."""
    op, expected, leaves = case
    full = 3 * 2 * 5 * 24
    assert max(stacked_sizes(op, *leaves), default=0) < full <= max(stacked_sizes(expected, *leaves))


@each("dtype", [torch.float32, torch.bfloat16])
@each("options", [o for o in OPTIONS if not o["relu"]])
def test_keeps_references_to_the_sources_only(options: dict[str, Any], dtype: torch.dtype) -> None:
    """For the backward, the only full-size tensors kept are the sources themselves, also for bf16 sources."""
    op, _, leaves = sum_case((4, 8, 64), 4, ways=3, **options, dtype=dtype)
    leaves = [t.requires_grad_() for t in leaves]
    with saved_storages(4 * 8 * 64) as kept:
        outs = op(*leaves)
    assert set(kept) == {t.untyped_storage().data_ptr() for t in leaves[:4]}
    assert len(outs) == 3


@each("options", OPTIONS)
def test_temporaries_do_not_grow_with_sources(options: dict[str, Any]) -> None:
    """As many full-size tensors are alive at once in the forward for 29 sources as for 4."""
    peaks = []
    for n in (4, 29):
        op, _, leaves = sum_case((2, 5, 64), n, **options, dtype=torch.bfloat16)
        peaks.append(peak_temporaries(op, 2 * 5 * 64, *leaves))
    assert peaks[0] == peaks[1] <= 6


A = torch.ones(2, 3, 4)
S = torch.ones(5, 1, 4)
BAD_SOURCES: dict[str, tuple[Any, str]] = {
    "one tensor": (A, "non-empty list of source tensors, got one tensor"),
    "no source": ([], "non-empty list of source tensors, got none"),
    "integers": ([A.int()], r"floating-point sources, source 0 is torch\.int32"),
    "shapes": ([A, A[..., :1]], r"source 0 is \[2, 3, 4\] on cpu, source 1 is \[2, 3, 1\]"),
    "devices": ([A, A.to("meta")], "source 0 is .* on cpu, source 1 is .* on meta"),
}
BAD_SUMS: dict[str, tuple[dict[str, Any], str]] = {
    "no weights": ({}, "expected static or dynamic weights"),
    "static": ({"static": torch.ones(5, 2, 4)}, r"static of shape \[5, 1, 4\] or \[5, 1, 1\], got \[5, 2, 4\]"),
    "static dims": ({"static": torch.ones(1, 4)}, r"static of shape \[1, 1, 4\] or \[1, 1, 1\], got \[1, 4\]"),
    "static device": ({"static": S.to("meta")}, "static is on meta, the activations are on cpu"),
    "dynamic": ({"dynamic": torch.ones(2, 3, 5, 2)}, r"dynamic of shape \[2, 3, 5, 1\], got \[2, 3, 5, 2\]"),
    "ways": ({"static": S, "dynamic": torch.ones(2, 3, 6, 1)}, r"dynamic of shape \[2, 3, 5, 1\], got \[2, 3, 6, 1\]"),
    "dynamic device": (
        {"dynamic": torch.ones(2, 3, 5, 1).to("meta")},
        "dynamic is on meta, the activations are on cpu",
    ),
}
BAD_SUMS |= {
    "scalar": ({"static": torch.ones(())}, r"static of shape .*, got \[\]"),
    "one dimension": ({"dynamic": torch.ones(1)}, r"dynamic of shape .*, got \[1\]"),
}


@each(("sources", "message"), BAD_SOURCES.values(), ids=BAD_SOURCES.keys())
@each("op", [depth_sum, depth_scores])
def test_bad_sources_are_refused(op: Callable[..., Any], sources: Any, message: str) -> None:
    """Bad sources are refused by either operator, by name."""
    with pytest.raises(ValueError, match=f"^{op.__name__}: .*{message}"):
        op(sources, S)


@each(("weights", "message"), BAD_SUMS.values(), ids=BAD_SUMS)
def test_bad_weights_are_refused(weights: dict[str, Any], message: str) -> None:
    """Bad weights are refused with the op, the argument, what was expected and what came."""
    with pytest.raises(ValueError, match=f"^depth_sum: .*{message}"):
        depth_sum([A], **weights)


@each(
    ("w", "message"),
    [(torch.ones(5, 2, 4), r"w of shape \[5, 1, 4\].*, got \[5, 2, 4\]"), (S.to("meta"), "w is on meta, .* on cpu")],
    ids=("shape", "device"),
)
def test_bad_score_vectors_are_refused(w: Tensor, message: str) -> None:
    """depth_scores refuses vectors of another shape or device."""
    with pytest.raises(ValueError, match=f"^depth_scores: .*{message}"):
        depth_scores([A], w)


def normed_case(
    gains: int, raw: int, shape: Sequence[int] = (2, 5, 6), static: bool = True, dynamic: bool = True, **how: Any
) -> tuple[Op, Op, list[Tensor]]:
    """depth_sum_normed and the naive sums under RMSNorms, of three sources and three ways, and the leaves."""
    _, naive, leaves = sum_case(shape, 3, 3, "D" if static else None, dynamic, **how)
    kind = torch.float32 if leaves[0].dtype.itemsize == 2 else leaves[0].dtype
    leaves.append(rand(gains, shape[-1], seed=60, dtype=kind))
    names = ["static"] * static + ["dynamic"] * dynamic

    def ours(*t: Tensor) -> tuple[Tensor, ...]:
        return depth_sum_normed(t[:3], t[-1], 1e-3, raw, **dict(zip(names, t[3:-1], strict=True)))

    def expected(*t: Tensor) -> tuple[Tensor, ...]:
        outs = naive(*t[:-1])
        return (*(rms_normalize(o, 1e-3) * g for o, g in zip(outs, t[-1], strict=False)), outs[raw])

    return ours, expected, leaves


NORMED = {"all": (3, 0), "last way goes on": (2, 2)}


@each("case", NORMED.values(), ids=NORMED.keys())
@each("shape", [(2, 5, 6), (0, 5, 8), (24,)])
def test_norms_inside_a_sum(case: tuple[int, int], shape: tuple[int, ...]) -> None:
    """The first sums normed and one as it is; outputs and all gradients."""
    assert_agrees(*normed_case(*case, shape))
    assert_agrees(*normed_case(*case, shape, static=False))
    assert_agrees(*normed_case(*case, shape, layout="transposed"))


@each("case", NORMED.values(), ids=NORMED.keys())
def test_second_derivatives_of_norms_inside_a_sum(case: tuple[int, int]) -> None:
    op, _, leaves = normed_case(*case, (1, 3))
    assert torch.autograd.gradgradcheck(op, [t.clone().requires_grad_() for t in leaves], fast_mode=True)


def test_norms_inside_a_sum_round_once_and_ignore_autocast() -> None:
    """bf16 sources: the sum is not rounded before its norm."""
    assert_rounded_once(*normed_case(3, 0, (2, 5, 24), dtype=torch.bfloat16))
    op, _, leaves = normed_case(3, 0, dtype=torch.float32)
    assert_ignores_autocast(op, leaves)
    assert_backward_ignores_autocast(op, leaves)
    assert_inputs_untouched(op, leaves)


@each("shape", [(2, 5, 6), (0, 5, 8), (24,)])
def test_scores_of_one_source_for_many_readers(shape: tuple[int, ...]) -> None:
    """One product, apart by reader; a reader that nobody asked about has gradient zero."""

    def ours(v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return source_scores(v, w, (3, 1, 2))[:2]

    def expected(v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.einsum("rd,...d->r...", w, v).split((3, 1, 2))[:2]

    leaves = [rand(*shape, seed=1), rand(6, shape[-1], seed=2)]
    assert_agrees(ours, expected, leaves)
    few = [rand(2, 3, seed=1), rand(6, 3, seed=2)]
    assert torch.autograd.gradgradcheck(ours, [t.requires_grad_() for t in few])
    leaves = [t.float() for t in leaves]
    assert_ignores_autocast(ours, leaves)
    assert_backward_ignores_autocast(ours, leaves)
