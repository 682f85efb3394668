"""depth_attention inside autograd: what it keeps for the backward, partial gradients, repeated and double backward."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depthmix.ops import depth_attention
from ops.helpers import assert_near, rand, saved_storages
from ops.test_depth_attention import case
from small_cases import each

TOKENS, D = (2, 8), 64
FULL = 2 * 8 * D


def stacked(query: Tensor, sources: Sequence[Tensor], gain: Tensor, **_: Any) -> Tensor:
    """The obvious implementation, which stacks the sources at every site."""
    v = torch.stack(list(sources)).float()
    keys = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6) * gain
    return torch.einsum("i...,i...d->...d", torch.softmax(keys @ query, 0), v).to(sources[0].dtype)


def kept_by_full_stack(attend: Callable[..., Tensor], sites: int, dtype: torch.dtype, **options: Any) -> list[int]:
    """Bytes of each full-size storage kept by `sites` sites, each reading the embedding and all outputs before it."""
    embedding = rand(*TOKENS, D, dtype=dtype).requires_grad_()
    parameters = [rand(D, seed=i + 1, dtype=torch.float32).requires_grad_() for i in range(2 * sites)]
    with saved_storages(FULL) as kept:
        sources = [embedding]
        for query, gain in zip(parameters[::2], parameters[1::2], strict=True):
            sources.append(torch.tanh(attend(query, sources, gain, **options)))
    sources[-1].float().sum().backward()
    assert embedding.grad is not None
    return list(kept.values())


BF16, FP32 = torch.bfloat16, torch.float32


@each("dtype", [FP32, BF16])
def test_memory_grows_with_sites_not_their_square(dtype: torch.dtype) -> None:
    """A Full stack keeps each source once and nothing else of full size: measured, one activation per source (sites + 1)."""
    kept = {sites: kept_by_full_stack(depth_attention, sites, dtype) for sites in (8, 16)}
    for sites, sizes in kept.items():
        assert len(sizes) == sites + 1
        assert sum(sizes) == (sites + 1) * FULL * dtype.itemsize
    assert sum(kept[16]) < 2.3 * sum(kept[8])


@each("dtype", [FP32, BF16])
def test_memory_with_output_norm(dtype: torch.dtype) -> None:
    """Nor does the output norm keep anything of full size: measured, one activation per source, as without it."""
    gain = torch.ones(D, requires_grad=True)
    kept = {sites: kept_by_full_stack(depth_attention, sites, dtype, out_gain=gain) for sites in (8, 16)}
    for sites, sizes in kept.items():
        assert len(sizes) == sites + 1
        assert sum(sizes) == (sites + 1) * FULL * dtype.itemsize
    assert sum(kept[16]) < 2.3 * sum(kept[8])


@each("dtype", [FP32, BF16])
def test_memory_bound_catches_stacking(dtype: torch.dtype) -> None:
    """The same bounds fail for an implementation that stacks, so they mean something."""
    kept = {sites: kept_by_full_stack(stacked, sites, dtype) for sites in (8, 16)}
    assert sum(kept[16]) > 3 * sum(kept[8])
    activations = sum(kept[16]) / (FULL * dtype.itemsize)
    assert activations > 4 * (16 + 1)


def leaves(n: int = 3, shape: Sequence[int] = (2, 3, 4)) -> tuple[Tensor, list[Tensor], Tensor]:
    """A query, n sources and a gain that want gradients."""
    return (
        rand(shape[-1], seed=20).requires_grad_(),
        [rand(*shape, seed=i).requires_grad_() for i in range(n)],
        rand(shape[-1], seed=21).requires_grad_(),
    )


def test_frozen_output_gain_leaves_the_other_gradients_alone() -> None:
    """The gain of the output norm may be frozen, or be all that wants a gradient."""
    query, sources, gain = leaves()
    out_gain, every = rand(4, seed=22).requires_grad_(), [query, *sources]
    expected = torch.autograd.grad(objective(query, sources, gain, out_gain=out_gain), [*every, out_gain])
    frozen = torch.autograd.grad(objective(query, sources, gain, out_gain=out_gain.detach()), every)
    fixed = [v.detach() for v in sources]
    (only,) = torch.autograd.grad(objective(query.detach(), fixed, gain.detach(), out_gain=out_gain), out_gain)
    assert all(torch.equal(a, b) for a, b in zip([*frozen, only], expected, strict=True))


def objective(query: Tensor, sources: Sequence[Tensor], gain: Tensor, **options: Any) -> Tensor:
    """A scalar that depends on the output non-linearly."""
    return depth_attention(query, sources, gain, **options).square().sum()


FROZEN = {
    "query": (0,),
    "gain": (4,),
    "query and gain": (0, 4),
    "first source": (1,),
    "all but one source": (1, 3),
    "all sources": (1, 2, 3),
    "everything but one source": (0, 1, 3, 4),
}


@each("heads", [1, 2])
@each("frozen", FROZEN.values(), ids=FROZEN.keys())
def test_frozen_inputs_leave_the_other_gradients_alone(frozen: tuple[int, ...], heads: int) -> None:
    """Freezing inputs gives them no gradient and changes no other gradient."""
    query, sources, gain = leaves()
    every = [query, *sources, gain]
    expected = torch.autograd.grad(objective(query, sources, gain, heads=heads), every)
    some = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate(every)]
    objective(some[0], some[1:4], some[4], heads=heads).backward()
    for i, t in enumerate(some):
        assert (t.grad is None) if i in frozen else torch.equal(t.grad, expected[i])


@each("i", range(3))
def test_gradient_of_one_source(i: int) -> None:
    """torch.autograd.grad for a single source gives the gradient that a full backward gives."""
    query, sources, gain = leaves()
    objective(query, sources, gain).backward()
    (only,) = torch.autograd.grad(objective(query, sources, gain), sources[i])
    assert torch.equal(only, sources[i].grad)


def test_no_gradient_no_graph() -> None:
    """Without a gradient to compute, in either way, the output has no graph."""
    query, sources, gain = leaves()
    with torch.no_grad():
        assert not depth_attention(query, sources, gain).requires_grad
    assert not depth_attention(query.detach(), [v.detach() for v in sources], gain.detach()).requires_grad


def test_only_the_weights_are_used() -> None:
    """A loss on the weights alone reaches query, gain and sources; on softmax weights summed it is zero."""
    query, sources, gain = leaves()
    _, p = depth_attention(query, sources, gain, return_weights=True)
    every = [query, gain, *sources]
    zeros = torch.autograd.grad(p.sum(), every, retain_graph=True)
    assert_near(zeros, [torch.zeros_like(t) for t in every], 1e-13)
    assert all(bool(g.abs().max() > 1e-3) for g in torch.autograd.grad(p[..., 0].sum(), every))


def test_retained_graph_gives_the_same_gradients_again() -> None:
    """A second backward through a retained graph repeats the first to the bit; without retaining it is refused."""
    query, sources, gain = leaves()
    every, loss = [query, *sources, gain], objective(query, sources, gain)
    first = torch.autograd.grad(loss, every, retain_graph=True)
    second = torch.autograd.grad(loss, every)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, every)


def test_two_forwards_before_one_backward() -> None:
    """Two sites on the same inputs do not disturb each other: their gradients add up."""
    query, sources, gain = leaves()
    every = [query, *sources, gain]
    one = torch.autograd.grad(objective(query, sources, gain), every)
    other = torch.autograd.grad(objective(query, sources[:2], gain, heads=2), [query, *sources[:2], gain])
    together = objective(query, sources, gain) + objective(query, sources[:2], gain, heads=2)
    extra = [*other[:3], torch.zeros_like(sources[2]), other[3]]
    assert_near(torch.autograd.grad(together, every), [a + b for a, b in zip(one, extra, strict=True)], 1e-14)


@each("reentrant", [False, True])
def test_checkpointed_gradients_are_the_same(reentrant: bool) -> None:
    """Recomputing the op in the backward gives bit-equal gradients."""
    query, sources, gain = leaves()
    every = [query, *sources, gain]
    expected = torch.autograd.grad(objective(query, sources, gain), every)
    checkpoint(lambda q, g, *v: objective(q, v, g), query, gain, *sources, use_reentrant=reentrant).backward()
    assert all(torch.equal(t.grad, e) for t, e in zip(every, expected, strict=True))


def test_source_changed_in_place_is_noticed() -> None:
    """Sources are kept by reference, so writing to one before the backward is an error, not a wrong gradient."""
    query, sources, gain = leaves()
    hidden = [v * 1 for v in sources]
    loss = objective(query, hidden, gain)
    hidden[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def naive_objective(query: Tensor, sources: Sequence[Tensor], gain: Tensor) -> Tensor:
    v = torch.stack(list(sources))
    keys = gain * v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
    return (torch.softmax((keys * query).sum(-1), 0).unsqueeze(-1) * v).sum(0)


@each("linear", [True, False])
def test_second_derivatives_are_right(linear: bool) -> None:
    """The penalty on a gradient, differentiated again: for every leaf what plain autograd gives."""
    query, sources, gain = leaves()
    every, results = [query, *sources, gain], []
    for f in (depth_attention, naive_objective):
        out = f(query, sources, gain)
        first = torch.autograd.grad(out.sum() if linear else out.square().sum(), every, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), every)])
    assert_near(results[0], results[1])


@each("options", [{}, {"heads": 2, "activation": "sigmoid"}, {"key_norm": False}])
@each("kind", ["ways", "token"])
def test_second_derivatives_through_output_norm_and_weights(kind: str, options: dict[str, Any]) -> None:
    """The same for a result that was normed, and for the weights, of every kind of query; one token is all zeros."""
    op, expected, inputs = case((2, 1, 4), 3, kind, out_gain="D", eps=1e-2, **options)
    every = [t.clone() for t in inputs]
    for v in every[:3]:
        v[0] = 0
    every, results = [t.requires_grad_() for t in every], []
    for f in (op, expected):
        first = torch.autograd.grad(sum(o.square().sum() for o in f(*every)), every, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), every)])
    assert_near(results[0], results[1])


def test_second_derivatives_with_a_source_given_twice() -> None:
    """Each place of a tensor in the list counts once."""
    query, (v, *_), gain = leaves()
    results = []
    for f in (depth_attention, naive_objective):
        (first,) = torch.autograd.grad(f(query, [v, v * 2, v], gain).square().sum(), v, create_graph=True)
        results.append([first, *torch.autograd.grad(first.square().sum(), [v, query, gain])])
    assert_near(results[0], results[1])
