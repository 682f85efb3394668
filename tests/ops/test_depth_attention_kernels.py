"""depth_attention's kernels, in Triton's interpreter: outputs and every gradient against the independent fp64 implementation.

bf16 is left to tests/gpu: the interpreter does not round to it as a GPU does.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.ops import BackendError, depth_attention
from ops.helpers import (
    LAYOUTS,
    assert_inputs_untouched,
    assert_near,
    combinations,
    name,
    rand,
    run,
    stacked_sizes,
)
from ops.test_depth_attention import naive
from small_cases import each

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")
FP32, FP16 = torch.float32, torch.float16
TOL = 4e-6  # of the largest number, in fp32: gradients of queries are sums of differences
Fn = Callable[..., tuple[Tensor, ...]]


def case(
    shape: Sequence[int] = (2, 24),
    n: int = 3,
    ways: int = 0,
    key_gain: bool = False,
    out_gain: bool = False,
    layout: str = "contiguous",
    dtype: torch.dtype = FP32,
    **options: Any,
) -> tuple[Fn, Fn, list[Tensor]]:
    """The kernels and the naive implementation as functions of the same leaves (sources, query, gains), and the leaves.

    ways=0: one query [D] and one result; otherwise queries, and gains, [W, D].
    """
    dim = shape[-1]
    small = (ways, dim) if ways else (dim,)
    leaves = [rand(*shape, seed=i, layout=layout, dtype=dtype) for i in range(n)]
    names = ["query", *["key_gain"] * key_gain, *["out_gain"] * out_gain]
    leaves += [rand(*small, seed=50 + i, layout=layout, dtype=FP32) for i in range(len(names))]
    rows = leaves[n][:1] if layout == "expanded" and ways else leaves[n]
    rows *= 2 / max(4, dim) ** 0.5  # in place, to keep the layout: logits of about 2

    def op(*t: Tensor) -> tuple[Tensor, ...]:
        out = depth_attention(sources=t[:n], **dict(zip(names, t[n:], strict=True)), **options, backend="triton")
        return out if ways else (out,)

    def expected(*t: Tensor) -> tuple[Tensor, ...]:
        kind = "ways" if ways else "static"
        return naive(sources=t[:n], **dict(zip(names, t[n:], strict=True)), kind=kind, **options)[:-1]

    return op, expected, leaves


def assert_exact(op: Fn, expected: Fn, leaves: Sequence[Tensor], tol: float = TOL) -> None:
    """Outputs and the gradient of every leaf are those of the naive implementation in fp64, to fp32's precision."""
    outs, grads, cotangents = run(op, leaves)
    exact_outs, exact_grads, _ = run(expected, [t.double() for t in leaves], cotangents)
    assert [t.dtype for t in (*outs, *grads)] == [*[leaves[0].dtype] * len(outs), *[t.dtype for t in leaves]]
    assert_near(outs, exact_outs, tol)
    assert_near(grads, exact_grads, tol)


@pytest.mark.covered
@each("options", combinations(ways=(0, 1, 2, 3), key_gain=(False, True), out_gain=(False, True)), ids=name)
def test_every_option(options: dict[str, Any]) -> None:
    """Ways with and without gains; two different eps, large enough to be missed if they are mixed up."""
    assert_exact(*case(eps=1e-2, out_eps=0.3, **options))


@each(
    ("shape", "n", "ways"),
    [
        ((1, 24), 1, 0),  # one token, one source
        ((2, 3, 24), 2, 0),  # tokens in two dimensions
        ((24,), 3, 0),  # in none
        ((3, 1), 3, 3),  # one channel
        ((2, 2), 3, 0),
        ((2, 17), 4, 3),  # neither even nor a power of two
        ((2, 40), 5, 0),
        ((1, 257), 2, 2),
        ((2, 2600), 3, 2),  # a row in pieces
        ((2, 16), 3, 5),  # more ways than a kernel reads at once
        ((7, 8), 2, 0),  # more tokens than programs in a kernel that walks over them
        ((2, 8), 16, 0),
        ((1, 8), 17, 3),
        ((1, 8), 33, 0),
        ((1, 8), 200, 0),
    ],
)
def test_shapes(shape: tuple[int, ...], n: int, ways: int) -> None:
    """One token and many, one channel and odd numbers of them, 1 to 200 sources, with every gain and the default eps."""
    assert_exact(*case(shape, n, ways, True, True))


@each("shape", [(0, 24), (2, 0, 8), (0, 1)])
@each("ways", [0, 2])
def test_no_tokens(shape: tuple[int, ...], ways: int) -> None:
    """Nothing in, nothing out, and gradients of zero for what all tokens share."""
    op, _, leaves = case(shape, 3, ways, True, True)
    outs, grads, _ = run(op, leaves)
    assert {o.shape for o in outs} == {torch.Size(shape)}
    assert [g.shape for g in grads] == [t.shape for t in leaves]
    assert all(not g.any() for g in grads)


@each("gains", [False, True])
@each("layout", LAYOUTS)
def test_layouts(layout: str, gains: bool) -> None:
    """Transposed, strided and expanded sources, queries and gains."""
    assert_exact(*case((2, 2, 6), 3, 3, gains, gains, layout))


@each("layout", ["strided", "channels_first"])
def test_layouts_of_gradients(layout: str) -> None:
    """Gradients of the outputs come as they come: strided, transposed, and expanded from a sum."""
    op, expected, leaves = case((2, 2, 6), 3, 3, True, True)
    cotangents = [rand(2, 2, 6, seed=70 + i, layout=layout, dtype=FP32) for i in range(3)]
    cotangents[1] = torch.ones(()).expand(2, 2, 6)
    _, grads, _ = run(op, leaves, cotangents)
    _, exact, _ = run(expected, [t.double() for t in leaves], cotangents)
    assert_near(grads, exact, TOL)


@each("options", combinations(ways=(0, 2, 3), out_gain=(False, True)))
def test_half_precision(options: dict[str, Any]) -> None:
    """fp16 sources with fp32 parameters: outputs are the exact ones rounded once.

    Gradients are summed in fp32, but from the result before the norm, and its gradient, as they were stored: a few roundings.
    """
    op, expected, leaves = case((2, 24), 4, key_gain=True, dtype=FP16, eps=1e-2, **options)
    outs, grads, cotangents = run(op, leaves)
    exact_outs, exact_grads, _ = run(expected, [t.double() for t in leaves], cotangents)
    assert [t.dtype for t in (*outs, *grads)] == [*[FP16] * len(outs), *[t.dtype for t in leaves]]
    half = torch.finfo(FP16).eps / 2
    for out, e in zip(outs, exact_outs, strict=True):
        assert bool(((out.double() - e).abs() <= half * e.abs() * 1.001 + TOL).all())
    for i, (grad, e) in enumerate(zip(grads, exact_grads, strict=True)):
        assert (grad.double() - e).abs().max() <= 4 * half * e.abs().max(), i


def test_half_precision_gradients_are_summed_before_they_are_rounded() -> None:
    """Three ways' gradients of one source are rounded together: 0.125 of each would be lost beside 1024 in fp16."""
    v = torch.zeros(1, 16, dtype=FP16, requires_grad=True)
    outs = depth_attention(torch.zeros(3, 16), [v], backend="triton")
    grads = [torch.full((1, 16), g, dtype=FP16) for g in (1024.0, 0.375, 0.375)]
    (dv,) = torch.autograd.grad(outs, v, grads)
    assert torch.equal(dv, torch.full_like(dv, 1025.0))  # one after the other: 1024


def test_large_logits_do_not_overflow() -> None:
    """With logits of 1e4 outputs and gradients are finite and right: the softmax is shifted by its maximum."""
    op, expected, leaves = case((2, 24), 4, key_gain=True)
    leaves[4] = leaves[4] * 1e4
    assert_exact(op, expected, leaves, 1e-5)


def test_zeros_are_sources_too() -> None:
    """A row of zeros has a norm of its own (eps) and a finite gradient."""
    op, expected, leaves = case((2, 24), 3, eps=1e-2)
    leaves[1] = torch.zeros_like(leaves[1])
    assert_exact(op, expected, leaves)


def test_a_source_given_twice() -> None:
    """It counts twice, in the output and in its gradient, also as the newest one."""
    leaves = [rand(2, 24, seed=i, dtype=FP32) for i in range(2)] + [rand(24, seed=9, dtype=FP32)]
    assert_exact(
        lambda a, b, q: (depth_attention(q, [a, b, a, b], backend="triton"),),
        lambda a, b, q: naive(q, [a, b, a, b])[:1],
        leaves,
    )


WANTED = {
    "query only": (4,),
    "key gain only": (5,),
    "out gain only": (6,),
    "oldest source only": (0,),
    "newest source only": (3,),
    "two in the middle": (1, 2),
    "a source and a gain": (1, 5),
}


@each("wanted", WANTED.values(), ids=WANTED)
@each("ways", [0, 2])
def test_some_inputs_are_constants(wanted: tuple[int, ...], ways: int) -> None:
    """Any part of the inputs may be without a gradient; the others' is the same."""
    op, expected, leaves = case((2, 24), 4, ways, True, True)
    cotangents = [rand(2, 24, seed=80 + i, dtype=FP32) for i in range(ways or 1)]
    _, exact, _ = run(expected, [t.double() for t in leaves], cotangents)
    given = [t.requires_grad_(i in wanted) for i, t in enumerate(leaves)]
    grads = torch.autograd.grad(op(*given), [given[i] for i in wanted], cotangents)
    assert_near(grads, [exact[i] for i in wanted], TOL)


def test_one_of_three_results_is_used() -> None:
    """Results without a gradient count as zero."""
    op, expected, leaves = case((2, 24), 3, 3, True, True)
    assert_exact(lambda *t: op(*t)[1:2], lambda *t: expected(*t)[1:2], leaves)


WITHOUT_GRADIENTS = [
    {},
    {"ways": 1, "key_gain": True},
    {"ways": 3, "key_gain": True, "out_gain": True, "shape": (2, 3, 24)},
    {"ways": 4, "out_gain": True, "out_eps": 0.1},
    {"key_gain": True, "out_gain": True, "layout": "strided", "eps": 0.01},
    {"ways": 2, "key_gain": True, "out_gain": True, "layout": "expanded"},
    {"dtype": FP16, "out_gain": True, "n": 1},
    {"value_norm": True, "ways": 4, "out_gain": True},
    {"value_norm": True, "key_gain": True, "dtype": FP16},
    {"heads": 2, "key_gain": True},
    {"activation": "sigmoid"},
    {"key_norm": False, "out_gain": True},
    {"shape": (0, 24), "ways": 2},
]


@each("options", WITHOUT_GRADIENTS)
def test_without_gradients(options: dict[str, Any]) -> None:
    """no_grad and inference_mode give the bits that training gives, and no graph; nothing is written to."""
    op, _, leaves = case(**{"shape": (2, 24), "n": 3, **options})
    outs, _, _ = run(op, leaves)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            again = op(*[t.requires_grad_() for t in leaves])
        assert all(torch.equal(a, b) and not b.requires_grad for a, b in zip(outs, again, strict=True))
        assert [(a.dtype, a.shape, a.stride()) for a in outs] == [(b.dtype, b.shape, b.stride()) for b in again]
    assert_inputs_untouched(op, [t.detach() for t in leaves])


def test_a_gain_that_ways_share_and_a_query_of_the_sources_dtype() -> None:
    """Without gradients, too: a gain [D] counts for all ways, and small parameters are widened."""
    sources = [rand(2, 24, seed=i, dtype=FP16) for i in range(3)]
    query, key_gain, out_gain = (rand(*s, seed=9, dtype=FP16) for s in ((2, 24), (24,), (24,)))

    def read() -> tuple[Tensor, ...]:
        return depth_attention(query, sources, key_gain, out_gain=out_gain, backend="triton")

    outs = read()
    with torch.no_grad():
        again = read()
    assert all(torch.equal(a, b) for a, b in zip(outs, again, strict=True))
    inputs = (query.double(), [v.double() for v in sources], key_gain.double())
    exact = naive(*inputs, out_gain=out_gain.double().expand(2, 24), kind="ways")
    assert_near(again, exact[:2], 2e-3)


def test_autocast_changes_nothing() -> None:
    """Neither around the forward nor around the backward."""
    op, _, leaves = case((2, 24), 3, 3, True, True)
    outs, grads, cotangents = run(op, leaves)
    with torch.autocast("cpu", dtype=FP16):
        cast_outs, cast_grads, _ = run(op, leaves, cotangents)
    for a, b in zip((*outs, *grads), (*cast_outs, *cast_grads), strict=True):
        assert a.dtype == b.dtype == FP32
        assert torch.equal(a, b)


def test_sources_are_not_stacked() -> None:
    """No stack or cat of the activations, forward or backward; of gradients that all tokens share there may be."""
    op, _, leaves = case((5, 24), 3, 0, True, True)
    assert max(stacked_sizes(lambda: run(op, leaves)), default=0) < 5 * 24


@each("again", [True, False])
def test_second_backward(again: bool) -> None:
    """With retain_graph the same bits; without, PyTorch's error."""
    op, _, leaves = case((2, 24), 3, 3, True, True)
    leaves = [t.requires_grad_() for t in leaves]
    loss = sum(o.square().sum() for o in op(*leaves))
    first = torch.autograd.grad(loss, leaves, retain_graph=again)
    if again:
        assert all(map(torch.equal, first, torch.autograd.grad(loss, leaves)))
    else:
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, leaves)


def assert_second_derivatives(op: Fn, expected: Fn, leaves: Sequence[Tensor], tol: float = 1e-5) -> None:
    """The penalty on a gradient, differentiated again."""
    results = []
    for f, wide in ((op, False), (expected, True)):
        inputs = [t.detach().to(torch.float64 if wide else t.dtype).requires_grad_() for t in leaves]
        first = torch.autograd.grad(sum(o.double().square().sum() for o in f(*inputs)), inputs, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.double().square().sum() for g in first), inputs)])
    assert [t.dtype for t in results[0]] == [t.dtype for t in leaves] * 2
    assert_near(results[0], results[1], tol)


def test_second_derivatives() -> None:
    assert_second_derivatives(*case((1, 8), 3, 3, True, True, eps=1e-2))


def test_source_changed_in_place_is_noticed() -> None:
    """Sources are kept by reference, so writing to one before the backward is an error, not a wrong gradient."""
    op, _, leaves = case()
    hidden = [t.requires_grad_() * 1 for t in leaves]
    loss = op(*hidden)[0].sum()
    hidden[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_wide_query_is_right_or_refused() -> None:
    """An fp64 query beside fp32 sources: fp64's result, or a clear refusal."""
    leaves = [rand(2, 24, seed=i, dtype=FP32) for i in range(3)] + [rand(24, seed=9)]
    op, expected, _ = case()
    try:
        assert_exact(op, expected, leaves)
    except BackendError as error:
        assert "float64" in str(error) or "dtype" in str(error)  # noqa: PT017


def test_batched_gradients_are_right_or_refused() -> None:
    """A backward under vmap has no memory that a kernel could be given."""
    op, expected, leaves = case()
    cotangents = rand(4, 2, 24, dtype=FP32)

    def jacobian(f: Fn, dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [t.detach().to(dtype).requires_grad_() for t in leaves]
        return torch.autograd.grad(f(*inputs)[0], inputs, cotangents.to(dtype), is_grads_batched=True)

    exact = jacobian(expected, torch.float64)
    try:
        got = jacobian(op, FP32)
    except (RuntimeError, ValueError, NotImplementedError):
        return
    assert_near(got, exact, TOL)
