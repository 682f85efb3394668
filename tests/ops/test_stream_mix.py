"""stream_read and stream_write: values and gradients against einsum in fp64, orientation, precision, and refusals."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depthmix.ops import sinkhorn, stream_read, stream_write
from depthmix.ops.stream_mix.op import stream_rule_read
from depthmix.ops.stream_mix.rules import Rule, by_column
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
    quick,
    rand,
    stacked_sizes,
)
from small_cases import each

Op = Callable[..., Tensor]
SHAPES = ((2, 5, 4, 24), (7, 1, 1), (3, 2, 24), (0, 5, 4, 8), (2, 3, 4, 1), (4, 24), (2, 2, 29, 3))  # [..., n, C]
WRITES = combinations(res=("token", "static", None), post=("token", "static"))


def naive_read(x: Tensor, pre: Tensor) -> Tensor:
    """u = Σ_i pre[i] x_i, with pre expanded to every token."""
    return torch.einsum("...i,...ic->...c", pre.expand(x.shape[:-1]), x)


def naive_write(x: Tensor, res: Tensor | None, post: Tensor, y: Tensor) -> Tensor:
    """x'_o = Σ_i res[o, i] x_i + post[o] y, with everything expanded to every token and None written as an identity."""
    n, tokens = x.shape[-2], x.shape[:-2]
    res = torch.eye(n, dtype=x.dtype) if res is None else res
    mixed = torch.einsum("...oi,...ic->...oc", res.expand(*tokens, n, n), x)
    return mixed + torch.einsum("...o,...c->...oc", post.expand(*tokens, n), y)


def parameter(kind: str, tokens: Sequence[int], *shape: int, **how: Any) -> Tensor:
    """A weight per token, or one for all tokens; fp32 beside half-precision activations."""
    if how.get("dtype") in (torch.bfloat16, torch.float16):
        how = how | {"dtype": torch.float32}
    return rand(*(tokens if kind == "token" else ()), *shape, **how)


def read_case(shape: Sequence[int], pre: str = "token", **how: Any) -> tuple[Op, Op, list[Tensor]]:
    """stream_read, the naive one, and their leaves (x, pre)."""
    *tokens, n, _ = shape
    return stream_read, naive_read, [rand(*shape, seed=1, **how), parameter(pre, tokens, n, seed=2, **how)]


def write_case(
    shape: Sequence[int], res: str | None = "token", post: str = "token", **how: Any
) -> tuple[Op, Op, list[Tensor]]:
    """stream_write and the naive one as functions of the same leaves (x, post, y and perhaps res), and the leaves."""
    *tokens, n, width = shape
    leaves = [
        rand(*shape, seed=1, **how),
        parameter(post, tokens, n, seed=3, **how),
        rand(*tokens, width, seed=4, **how),
    ]
    if res:
        leaves.append(parameter(res, tokens, n, n, seed=5, **how))

    def call(fn: Op) -> Op:
        return lambda x, post, y, res=None: fn(x, res, post, y)

    return call(stream_write), call(naive_write), leaves


def cases(shape: Sequence[int] = (2, 5, 4, 24), **how: Any) -> dict[str, tuple[Op, Op, list[Tensor]]]:
    """Every kind of read and write at one shape."""
    reads = {f"read-pre={pre}": read_case(shape, pre, **how) for pre in ("token", "static")}
    return reads | {f"write-{name(o)}": write_case(shape, **o, **how) for o in WRITES}


EVERY = tuple(cases())


@each("key", EVERY)
@each("shape", SHAPES)
def test_odd_shapes_against_naive(shape: tuple[int, ...], key: str) -> None:
    """Odd, empty and one-channel shapes, one stream and many: outputs and all gradients."""
    assert_agrees(*cases(shape)[key])


@each("key", EVERY)
@each("layout", LAYOUTS)
def test_layouts_against_naive(layout: str, key: str) -> None:
    """Transposed, strided and expanded streams, weights and layer outputs."""
    assert_agrees(*cases((2, 5, 4, 6), layout=layout)[key])


@quick
@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from(EVERY),
    st.sampled_from(LAYOUTS),
)
def test_random_cases_against_naive(tokens: list[int], n: int, width: int, key: str, layout: str) -> None:
    """Drawn shapes, numbers of streams, weights and layouts."""
    assert_agrees(*cases((*tokens, n, width), layout=layout)[key])


@each("key", EVERY)
def test_gradcheck(key: str) -> None:
    """Finite differences, first and second order."""
    op, _, leaves = cases((2, 2, 3))[key]
    leaves = [t.clone().requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(op, leaves)
    assert torch.autograd.gradgradcheck(op, leaves)


def test_stream_write_orientation() -> None:
    """res[o, i] takes input stream i to output stream o: a single entry moves one stream to one other, not back."""
    x = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    res = torch.zeros(3, 3)
    res[0, 2] = 5.0
    nothing, y = torch.zeros(3), torch.zeros(2)
    expected = torch.tensor([[15.0, 150.0], [0.0, 0.0], [0.0, 0.0]])
    for r in (res, res.expand(4, 3, 3)):
        out = stream_write(x.expand(*r.shape[:-2], 3, 2), r, nothing, y.expand(*r.shape[:-2], 2))
        assert torch.equal(out, expected.expand_as(out))
    assert not torch.equal(stream_write(x, res.T.contiguous(), nothing, y), expected)


def test_row_stochastic_res_makes_convex_combinations() -> None:
    """With the paper's sinkhorn (rows exact) every output stream stays between the input streams, channel by channel."""
    x, post, y = rand(2, 5, 4, 6), torch.zeros(4, dtype=torch.float64), torch.zeros(2, 5, 6, dtype=torch.float64)
    out = stream_write(x, sinkhorn(3 * rand(2, 5, 4, 4, seed=1)), post, y)
    assert bool((out >= x.amin(-2, keepdim=True) - 1e-14).all() and (out <= x.amax(-2, keepdim=True) + 1e-14).all())


@each("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_res_is_the_identity(dtype: torch.dtype) -> None:
    """res=None gives what an identity matrix gives, to the bit."""
    op, _, leaves = write_case((2, 5, 4, 24), None, dtype=dtype)
    identity = torch.eye(4, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(op(*leaves), op(*leaves, identity))


def test_residual_and_read_of_one_stream() -> None:
    """One stream with weights of one is the ordinary residual connection."""
    x, y, one = rand(2, 5, 1, 6), rand(2, 5, 6, seed=3), torch.ones(1, dtype=torch.float64)
    assert_near([stream_read(x, one), stream_write(x, None, one, y)], [x[..., 0, :], x + y[..., None, :]], 1e-15)


@each("dtype", [torch.bfloat16, torch.float16])
@each("key", EVERY)
def test_half_precision_rounds_once(key: str, dtype: torch.dtype) -> None:
    """Half-precision streams with fp32 weights: result in the streams' dtype, everything rounded once."""
    op, expected, leaves = cases(dtype=dtype)[key]
    assert op(*leaves).dtype == dtype
    assert_rounded_once(op, expected, leaves)


@each("key", EVERY)
def test_autocast_changes_nothing_and_inputs_are_untouched(key: str) -> None:
    """Bit-equal in fp32 under autocast; no input is written to; nothing of the streams' size is stacked."""
    op, _, leaves = cases(dtype=torch.float32)[key]
    assert_ignores_autocast(op, leaves)
    assert_inputs_untouched(op, leaves)
    assert max(stacked_sizes(op, *leaves), default=0) < leaves[0].numel()


@each("key", EVERY)
def test_backward_inside_autocast_changes_nothing(key: str) -> None:
    """Gradients are bit-equal when the backward is called inside the autocast region."""
    op, _, leaves = cases(dtype=torch.float32)[key]
    assert_backward_ignores_autocast(op, leaves)


X, R, P, Y = torch.ones(2, 3, 4, 5), torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4), torch.ones(2, 3, 5)
STREAMS = r"floating-point streams \[\.\.\., n, C\], got"
BAD: dict[str, tuple[Op, tuple[Any, ...], str]] = {
    "read 1-D": (stream_read, (X[0, 0, 0], P), rf"{STREAMS} \[5\] of torch\.float32"),
    "read integers": (stream_read, (X.long(), P), rf"{STREAMS} \[2, 3, 4, 5\] of torch\.int64"),
    "pre shape": (stream_read, (X, P[0]), r"pre of shape \[4\] or \[2, 3, 4\], got \[3, 4\]"),
    "pre scalar": (stream_read, (X, torch.ones(())), r"pre of shape .*, got \[\]"),
    "pre device": (stream_read, (X, P.to("meta")), "pre is on meta, the activations are on cpu"),
    "write 1-D": (stream_write, (X[0, 0, 0], R, P, Y), rf"{STREAMS} \[5\]"),
    "write integers": (stream_write, (X.int(), R, P, Y), rf"{STREAMS} .* of torch\.int32"),
    "res shape": (stream_write, (X, R[..., :1], P, Y), r"res of shape \[4, 4\] or \[2, 3, 4, 4\], got \[2, 3, 4, 1\]"),
    "res device": (stream_write, (X, R.to("meta"), P, Y), "res is on meta, the activations are on cpu"),
    "post shape": (stream_write, (X, R, P[..., :1], Y), r"post of shape \[4\] or \[2, 3, 4\], got \[2, 3, 1\]"),
    "post device": (stream_write, (X, R, P.to("meta"), Y), "post is on meta, the activations are on cpu"),
    "y shape": (stream_write, (X, None, P, Y[0]), r"y of shape \[2, 3, 5\], got \[3, 5\]"),
    "y device": (stream_write, (X, None, P, Y.to("meta")), "y is on meta, the activations are on cpu"),
}


@each(("op", "args", "message"), BAD.values(), ids=BAD.keys())
def test_refusals(op: Op, args: tuple[Any, ...], message: str) -> None:
    """Every bad argument is refused with the op, the argument, what was expected and what came."""
    with pytest.raises(ValueError, match=f"^{op.__name__}: .*{message}"):
        op(*args)


RULES = combinations(centred=(False, True), tanh=(False, True))


def rule_case(
    shape: Sequence[int], centred: bool = True, tanh: bool = True, gain: bool = True, **how: Any
) -> tuple[Op, Op, list[Tensor]]:
    """stream_rule_read and Hyper-Connections' equations as functions of the same leaves (x, W, base, scale and perhaps the gain)."""
    *_, n, width = shape
    rule = Rule(n, joint=False, eps=1e-3, centred=centred, tanh=tanh)
    small = how | ({"dtype": torch.float32} if how.get("dtype") == torch.bfloat16 else {})
    small.pop("layout", None)
    leaves = [rand(*shape, seed=1, **how), rand(width, n + 2, seed=2, **small), rand(n * (n + 2), seed=3, **small)]
    leaves += [rand(2, seed=4, **small), *([rand(width, seed=5, **small)] if gain else [])]

    def ours(x: Tensor, w: Tensor, base: Tensor, scale: Tensor, gain: Tensor | None = None) -> Any:
        w = w - w.mean(0) if centred else w
        site = [p[0] for p in by_column(rule, w[None], base[None], scale[None])]
        return stream_rule_read(rule, x, site[0], site[1], site[2], gain, 1e-2)

    def naive(x: Tensor, w: Tensor, base: Tensor, scale: Tensor, gain: Tensor | None = None) -> Any:
        h = x - x.mean(-1, keepdim=True) if centred else x
        z = (h / (h.square().mean(-1, keepdim=True) + 1e-3).sqrt()) @ w
        z = torch.tanh(z) if tanh else z
        pre, post = base[:n] + scale[0] * z[..., 0], base[n : 2 * n] + scale[1] * z[..., 1]
        a_r = base[2 * n :].view(n, n) + scale[0] * z[..., 2:]
        u = naive_read(x, pre)
        if gain is not None:
            u = gain * u / (u.square().mean(-1, keepdim=True) + 1e-2).sqrt()
        return u, post, a_r.transpose(-1, -2)

    return ours, naive, leaves


@each("options", RULES)
@each("shape", SHAPES[:6])
def test_a_rule_and_its_read(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """Weights, read and norm at odd shapes: outputs and all gradients."""
    assert_agrees(*rule_case(shape, **options))
    assert_agrees(*rule_case(shape, **options, gain=False))


@each("layout", LAYOUTS)
def test_a_rule_and_its_read_of_any_layout(layout: str) -> None:
    """Transposed, strided and expanded streams."""
    assert_agrees(*rule_case((2, 5, 4, 6), layout=layout))


@each("options", RULES)
def test_second_derivatives_of_a_rule(options: dict[str, Any]) -> None:
    """Finite differences of gradients."""
    op, _, leaves = rule_case((1, 2, 3), **options)
    leaves = [t.clone().requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(op, leaves)
    assert torch.autograd.gradgradcheck(op, leaves)


def test_a_rule_rounds_once_and_ignores_autocast() -> None:
    """bf16 streams; bit-equal in fp32 under autocast, backward inside or outside of it; no input is written to."""
    assert_rounded_once(*rule_case((2, 5, 4, 24), dtype=torch.bfloat16))
    op, _, leaves = rule_case((2, 5, 4, 24), dtype=torch.float32)
    assert_ignores_autocast(op, leaves)
    assert_backward_ignores_autocast(op, leaves)
    assert_inputs_untouched(op, leaves)


def test_a_rule_without_gradients_is_the_same() -> None:
    """Plain PyTorch where autograd is off."""
    op, _, leaves = rule_case((2, 5, 4, 24))
    with torch.no_grad():
        without = op(*leaves)
    assert_near(list(without), [t.detach() for t in op(*(t.requires_grad_() for t in leaves))])
