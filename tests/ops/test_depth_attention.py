"""depth_attention: values and gradients against an independent fp64 implementation, precision, and refusals."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depthmix.ops import depth_attention
from ops.helpers import (
    LAYOUTS,
    assert_agrees,
    assert_backward_ignores_autocast,
    assert_ignores_autocast,
    assert_inputs_untouched,
    assert_near,
    assert_rounded_once,
    combinations,
    few,
    peak_temporaries,
    quick,
    rand,
    run,
    stacked_sizes,
)
from small_cases import each

QUERIES = ("static", "ways", "token", "token_ways")
W = 2


def naive(
    query: Tensor,
    sources: Sequence[Tensor],
    key_gain: Tensor | None = None,
    eps: float = 1e-6,
    out_gain: Tensor | None = None,
    *,
    kind: str = "static",
    key_norm: bool = True,
    heads: int = 1,
    activation: str = "softmax",
    value_norm: bool = False,
    out_eps: float | None = None,
) -> tuple[Tensor, ...]:
    """From the equations: stack, normalise the keys, one einsum for the logits, one for the sum. Outputs, then weights."""
    v = torch.stack(list(sources))  # [i, ..., D]
    n, *tokens, dim = v.shape
    ways = query.shape[0] if "ways" in kind else 1
    v = v.reshape(n, tokens_in(tokens), heads, dim // heads)
    if kind in ("static", "ways"):
        q = query.reshape(ways, 1, heads, -1).expand(ways, v.shape[1], heads, v.shape[3])
    else:
        q = query.reshape(ways, v.shape[1], heads, v.shape[3])
    keys = v / (v.pow(2).mean((-1, -2), keepdim=True) + eps).sqrt() if key_norm else v
    gain = torch.ones(ways, dim, dtype=v.dtype) if key_gain is None else key_gain.expand(ways, dim)
    logits = torch.einsum("wthc,ithc,whc->wtih", q, keys, gain.reshape(ways, heads, -1))
    if activation == "softmax":
        e = (logits - logits.amax(2, keepdim=True).detach()).exp()
        p = e / e.sum(2, keepdim=True)
    else:
        p = 1 / (1 + (-logits).exp())
    values = v / (v.pow(2).mean((-1, -2), keepdim=True) + eps).sqrt() if value_norm else v
    out = torch.einsum("wtih,ithc->wthc", p, values).reshape(ways, *tokens, dim)
    if out_gain is not None:
        out = out / (out.pow(2).mean(-1, keepdim=True) + (eps if out_eps is None else out_eps)).sqrt()
        out = out * out_gain.reshape(-1, *(1,) * len(tokens), dim)
    p = p.reshape(ways, *tokens, n, heads)
    p = p.squeeze(-1) if heads == 1 else p
    return (*out, p if "ways" in kind else p[0])


def tokens_in(shape: Sequence[int]) -> int:
    """The number of tokens: the product of the leading dimensions."""
    return int(torch.Size(shape).numel())


def case(
    shape: Sequence[int] = (2, 5, 24),
    n: int = 3,
    kind: str = "static",
    key_gain: str | None = None,
    out_gain: str | None = None,
    layout: str = "contiguous",
    dtype: torch.dtype = torch.float64,
    with_weights: bool = True,
    **options: Any,
) -> tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """The op and the naive one as functions of the same leaves (sources, query, gains), and the leaves."""
    dim, gain_shapes = shape[-1], {"D": (shape[-1],), "WD": (W, shape[-1])}
    query_shape = (*((W,) if "ways" in kind else ()), *(shape if "token" in kind else (dim,)))
    small = torch.float32 if dtype.itemsize == 2 else dtype  # parameters are fp32 beside bf16 activations
    leaves = [rand(*shape, seed=i, layout=layout, dtype=dtype) for i in range(n)]
    leaves.append(rand(*query_shape, seed=50, layout=layout, dtype=small))
    names = [k for k, v in (("key_gain", key_gain), ("out_gain", out_gain)) if v]
    leaves += [
        rand(*gain_shapes[g], seed=60 + i, layout=layout, dtype=small) for i, g in enumerate((key_gain, out_gain)) if g
    ]

    def op(*t: Tensor) -> tuple[Tensor, ...]:
        gains = dict(zip(names, t[n + 1 :], strict=True))
        out = depth_attention(t[n], t[:n], return_weights=with_weights, **gains, **options)
        out, p = out if with_weights else (out, None)
        out = out if isinstance(out, tuple) else (out,)
        return (*out, p) if with_weights else out

    def expected(*t: Tensor) -> tuple[Tensor, ...]:
        outs = naive(t[n], t[:n], kind=kind, **dict(zip(names, t[n + 1 :], strict=True)), **options)
        return outs if with_weights else outs[:-1]

    return op, expected, leaves


def allowed(o: dict[str, Any]) -> bool:
    """A key gain needs the keys' norm, gains with ways need a query with ways."""
    gains = (o["key_gain"], o["out_gain"])
    return (o["key_norm"] or not o["key_gain"]) and ("ways" in o["kind"] or "WD" not in gains)


EVERY_OPTION = combinations(
    kind=QUERIES,
    heads=(1, 2, 3, 24),
    activation=("softmax", "sigmoid"),
    key_norm=(True, False),
    key_gain=(None, "D", "WD"),
    out_gain=(None, "D", "WD"),
)
EVERY_OPTION += combinations(
    kind=QUERIES,
    heads=(1, 3),
    activation=("softmax", "sigmoid"),
    key_norm=(True, False),
    key_gain=(None, "D"),
    out_gain=(None, "D"),
    value_norm=(True,),
)


@each("options", few([o for o in EVERY_OPTION if allowed(o)], 3))
def test_every_option_against_naive(options: dict[str, Any]) -> None:
    """Outputs, weights and all gradients (also through the weights) for every three values of options that can meet."""
    assert_agrees(*case((2, 3, 24), eps=1e-3, out_eps=0.1, **options))


SHAPES = ((2, 5, 24), (7, 1), (3, 24), (0, 5, 8), (2, 3, 1), (24,), (2, 1, 3, 6))


NEEDS_DIMENSIONS = {"static": 1, "ways": 1, "token_ways": 2, "token": 3}  # [N, D] beside sources [N, D] means N ways


@each("n", [1, 3, 29])
@each(("shape", "kind"), [(s, k) for s in SHAPES for k in QUERIES if len(s) >= NEEDS_DIMENSIONS[k]])
def test_odd_shapes_against_naive(shape: tuple[int, ...], kind: str, n: int) -> None:
    """Odd, empty and one-channel shapes, one source and many, with the default eps for both norms."""
    assert_agrees(*case(shape, n, kind, key_gain="D", out_gain="D"))


@each("kind", QUERIES)
@each("layout", LAYOUTS)
def test_layouts_against_naive(layout: str, kind: str) -> None:
    """Transposed, strided and expanded sources, queries and gains."""
    gain = "WD" if "ways" in kind else "D"
    assert_agrees(*case((2, 5, 6), 4, kind, gain, gain, layout, heads=2))


def test_two_dimensional_query_means_ways() -> None:
    """A query [N, D] beside sources [N, D] is N static queries, never one per token."""
    query, v = rand(3, 24, seed=5), [rand(3, 24, seed=i) for i in range(2)]
    outs = depth_attention(query, v)
    assert len(outs) == 3
    assert_near(outs, naive(query, v, kind="ways")[:-1])


def test_repeated_source() -> None:
    """A source listed twice counts twice, in the output and in its gradient."""
    v, query = [rand(2, 5, 6, seed=i) for i in range(2)], rand(6, seed=9)
    assert_agrees(lambda a, b, q: depth_attention(q, [a, b, a]), lambda a, b, q: naive(q, [a, b, a])[:1], [*v, query])


@quick
@given(st.data())
def test_random_cases_against_naive(data: st.DataObject) -> None:
    """Drawn shapes, numbers of sources, layouts and options."""
    heads = data.draw(st.integers(1, 3))
    shape = (*data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=3)), heads * data.draw(st.integers(1, 5)))
    options = data.draw(st.sampled_from([o for o in EVERY_OPTION if allowed(o)]))
    drawn = {"eps": data.draw(st.sampled_from((1e-6, 1e-2, 1.0))), "layout": data.draw(st.sampled_from(LAYOUTS))}
    assert_agrees(*case(shape, data.draw(st.integers(1, 6)), **{**options, "heads": heads}, **drawn))


@each(
    "options",
    few(combinations(kind=QUERIES, heads=(1, 2), activation=("softmax", "sigmoid"), value_norm=(False, True)), 3),
)
def test_gradcheck(options: dict[str, Any]) -> None:
    """Finite differences in a random direction agree with the hand-written backward in each mode."""
    gain = "WD" if "ways" in options["kind"] else "D"
    op, _, leaves = case((2, 1, 4), 3, key_gain=gain, out_gain="D", **options)
    assert torch.autograd.gradcheck(op, [t.clone().requires_grad_() for t in leaves], fast_mode=True)


@each("heads", [1, 3])
@each("kind", QUERIES)
def test_weights_sum_to_one_and_output_in_convex_hull(kind: str, heads: int) -> None:
    """Softmax weights are a distribution over depth, so every channel stays between its sources."""
    op, _, leaves = case((2, 5, 6), 5, kind, "D", heads=heads)
    *outs, p = op(*leaves)
    assert bool((p >= 0).all())
    total = p.sum(-1 if heads == 1 else -2)
    assert_near([total], [torch.ones_like(total)], 1e-14)
    v = torch.stack(leaves[:5])
    for out in outs:
        assert bool((out >= v.amin(0) - 1e-14).all() and (out <= v.amax(0) + 1e-14).all())


@each(("activation", "weight"), [("softmax", 1 / 5), ("sigmoid", 1 / 2)])
def test_zero_query_weighs_all_alike(activation: str, weight: float) -> None:
    """The published initialisation: a zero query averages the sources (spec 1.7); with sigmoid each has weight one half."""
    v = [rand(2, 5, 6, seed=i) for i in range(5)]
    out = depth_attention(torch.zeros(6, dtype=torch.float64), v, activation=activation)
    assert_near([out], [weight * sum(v)], 1e-14)


@each("activation", ["softmax", "sigmoid"])
def test_large_logits_do_not_overflow(activation: str) -> None:
    """With logits of 1e4 in fp32, outputs and gradients are finite; softmax picks the source with the largest logit."""
    op, expected, leaves = case((2, 5, 24), 4, key_gain="D", dtype=torch.float32, activation=activation)
    leaves[4] = leaves[4] * 1e4
    outs, grads, _ = run(op, leaves)
    assert all(bool(t.isfinite().all()) for t in (*outs, *grads))
    assert_near(outs, expected(*(t.double() for t in leaves)), 1e-5)


@each("kind", QUERIES)
@each("dtype", [torch.bfloat16, torch.float16])
@each("options", [{}, {"out_gain": "D"}, {"heads": 3, "activation": "sigmoid"}, {"value_norm": True}])
def test_half_precision_rounds_once(options: dict[str, Any], dtype: torch.dtype, kind: str) -> None:
    """Half-precision sources with fp32 parameters: output in the sources' dtype, weights fp32, everything rounded once."""
    op, expected, leaves = case((2, 5, 24), 5, kind, "D", dtype=dtype, eps=1e-2, **options)
    *outs, p = op(*leaves)
    assert {o.dtype for o in outs} == {dtype}
    assert p.dtype == torch.float32
    assert_rounded_once(op, expected, leaves)


@each("position", [0, 3])
def test_mixed_dtypes_promote(position: int) -> None:
    """An fp32 embedding among bf16 sources gives an fp32 result, and gradients in each source's dtype."""
    op, expected, leaves = case((2, 5, 24), 4, dtype=torch.bfloat16, key_gain="D")
    leaves[position] = rand(2, 5, 24, dtype=torch.float32)
    assert op(*leaves)[0].dtype == torch.float32
    assert_rounded_once(op, expected, leaves)


@each("options", combinations(kind=QUERIES, heads=(1, 2)))
def test_autocast_changes_nothing(options: dict[str, Any]) -> None:
    """Autocast does not lower the precision of the mixing."""
    op, _, leaves = case((2, 5, 24), 3, key_gain="D", out_gain="D", dtype=torch.float32, **options)
    assert_ignores_autocast(op, leaves)


def test_backward_inside_autocast_changes_nothing() -> None:
    """Nor does a backward called inside the autocast region."""
    op, _, leaves = case((2, 5, 24), 3, dtype=torch.float32)
    assert_backward_ignores_autocast(op, leaves)


@each("options", few(combinations(kind=QUERIES, heads=(1, 3), out_gain=(None, "D"))))
def test_return_weights_and_no_grad_change_nothing(options: dict[str, Any]) -> None:
    """The results are bit-equal with and without the weights, and without gradients; no input is written to."""
    op, _, leaves = case((2, 5, 6), 4, **options)
    lean, _, _ = case((2, 5, 6), 4, **options, with_weights=False)
    outs = run(op, leaves)[0]
    assert all(torch.equal(a, b) for a, b in zip(outs[:-1], lean(*leaves), strict=True))
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(outs, op(*leaves), strict=True))
    assert_inputs_untouched(op, leaves)


@each("dtype", [torch.float32, torch.bfloat16])
@each("kind", QUERIES)
def test_sources_are_not_stacked(kind: str, dtype: torch.dtype) -> None:
    """No stack or cat of the activations in the forward; the naive implementation is caught making one."""
    op, expected, leaves = case((2, 5, 24), 4, kind, "D", dtype=dtype)
    full = 4 * 2 * 5 * 24
    assert max(stacked_sizes(op, *leaves), default=0) < full
    assert max(stacked_sizes(expected, *(t.float() for t in leaves))) >= full


@each("kind", QUERIES)
def test_temporaries_do_not_grow_with_sources(kind: str) -> None:
    """At most a handful of full-size tensors are alive at once in the forward, as many for 29 sources as for 4."""
    peaks = []
    for n in (4, 29):
        op, _, leaves = case((2, 5, 64), n, kind, "D", dtype=torch.bfloat16)
        peaks.append(peak_temporaries(op, 2 * 5 * 64, *leaves))
    assert peaks[0] == peaks[1] <= 5


A = torch.ones(2, 3, 4)
Q = torch.ones(4)
META = torch.ones(4, device="meta")
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "one tensor": ((Q, A), {}, "non-empty list of source tensors, got one tensor"),
    "no source": ((Q, []), {}, "non-empty list of source tensors, got none"),
    "no tensor": ((Q, [A, None]), {}, r"sources \[..., D\], source 1 is NoneType"),
    "scalar source": ((Q, [torch.ones(())]), {}, r"sources \[..., D\], source 0 is a scalar"),
    "scalar query": ((torch.ones(()), [A]), {}, r"query of shape .*, got \[\]"),
    "integer query": ((Q.long(), [A]), {}, r"a floating-point query, got torch\.int64"),
    "integers": ((Q, [A, A.long()]), {}, r"floating-point sources, source 1 is torch\.int64"),
    "shapes": ((Q, [A, A[:1]]), {}, r"source 0 is \[2, 3, 4\] on cpu, source 1 is \[1, 3, 4\]"),
    "devices": ((Q, [A, A.to("meta")]), {}, "source 0 is .* on cpu, source 1 is .* on meta"),
    "query": ((torch.ones(5), [A]), {}, r"query of shape \[4\] or \[2, 3, 4\], got \[5\]"),
    "ways": ((torch.ones(6, 5), [A]), {}, r"query of shape \[6, 4\] or \[6, 2, 3, 4\], got \[6, 5\]"),
    "tokens": ((torch.ones(2, 4, 4), [A]), {}, r"query of shape \[2, 4\] or \[2, 2, 3, 4\], got \[2, 4, 4\]"),
    "query device": ((META, [A]), {}, "query is on meta, the activations are on cpu"),
    "key_gain": ((Q, [A], torch.ones(1)), {}, r"key_gain of shape \[4\].*, got \[1\]"),
    "key_gain ways": ((torch.ones(2, 4), [A], torch.ones(3, 4)), {}, r"key_gain of .*\[2, 4\], got \[3, 4\]"),
    "key_gain device": ((Q, [A], META), {}, "key_gain is on meta, the activations are on cpu"),
    "out_gain": ((Q, [A]), {"out_gain": torch.ones(2, 4)}, r"out_gain of shape \[4\].*, got \[2, 4\]"),
    "out_gain device": ((Q, [A]), {"out_gain": META}, "out_gain is on meta, the activations are on cpu"),
    "heads": ((Q, [A]), {"heads": 3}, "heads must divide the 4 channels, got 3"),
    "no heads": ((Q, [A]), {"heads": 0}, "heads must divide the 4 channels, got 0"),
    "activation": ((Q, [A]), {"activation": "relu"}, "activation must be 'softmax' or 'sigmoid', got 'relu'"),
    "gain, no norm": ((Q, [A], Q), {"key_norm": False}, "key_gain belongs to .* but key_norm is False"),
}


@each(("args", "options", "message"), BAD.values(), ids=BAD)
def test_refusals(args: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    """Every bad argument is refused with the op, the argument, what was expected and what came."""
    with pytest.raises(ValueError, match=f"^depth_attention: .*{message}"):
        depth_attention(*args, **options)
