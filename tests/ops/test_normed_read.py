"""Kernels of reads of normed sources, in Triton's interpreter: blocks as one tensor, sums that are not rounded, several ways.

Outputs and every gradient against the independent fp64 implementation. bf16 is left to GPUs.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from depthmix.ops import depth_attention, use_backend
from ops.helpers import LAYOUTS, assert_near, rand, run, saved_storages, stacked_sizes
from ops.test_depth_attention import naive
from ops.test_depth_attention_kernels import TOL, assert_exact, assert_second_derivatives, case
from ops.test_depth_attention_order import Stack, assert_as_oracle, assert_as_reference, plain, tokens

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")
normed_read = pytest.importorskip("depthmix.ops.depth_attention.normed_read")
FP32, FP16 = torch.float32, torch.float16
RULE = {"key_norm": True, "value_norm": True}


@pytest.mark.parametrize("ways", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("out_gain", [False, True])
def test_ways_and_gains(ways: int, out_gain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to three ways per launch; two different eps, large enough to be missed if they are mixed up."""
    calls, forward = [], normed_read.NormedRead.forward
    monkeypatch.setattr(normed_read.NormedRead, "forward", lambda *a: (calls.append(1), forward(*a))[1])
    op, expected, leaves = case(ways=ways, key_gain=True, out_gain=out_gain, eps=1e-2, out_eps=0.3, value_norm=True)
    assert_exact(op, expected, leaves)
    assert len(calls) == -(-max(1, ways) // 3)


@pytest.mark.parametrize(
    ("shape", "n"),
    [((1, 1, 24), 1), ((3, 1), 3), ((2, 1, 17), 4), ((1, 257), 2), ((2, 2600), 3), ((1, 8), 33), ((2, 0, 8), 2)],
)
def test_shapes(shape: tuple[int, ...], n: int) -> None:
    """Try one token, one channel, one source and many, widths that are no power of two, and no tokens at all."""
    op, expected, leaves = case(shape, n, ways=3, out_gain=True, value_norm=True)
    if 0 in shape:
        outs, grads, _ = run(op, leaves)
        assert {o.shape for o in outs} == {torch.Size(shape)}
        assert all(not g.any() for g in grads)
    else:
        assert_exact(op, expected, leaves)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    assert_exact(*case((2, 2, 6), 3, ways=2, layout=layout, out_gain=True, value_norm=True))


def blocks_case(
    m: int,
    ways: int,
    with_sum: bool,
    with_gain: bool,
    dtype: torch.dtype = FP32,
    out: torch.dtype | None = None,
    then_sum: bool = False,
) -> Any:
    """A read of m blocks in one tensor, one more source and the newest one, which may be a sum. then_sum: later, one more is added."""
    shape = (2, 3, 24)
    leaves = [rand(*shape[:-1], m, 24, seed=1, dtype=dtype), *(rand(*shape, seed=2 + i, dtype=dtype) for i in range(3))]
    leaves += [0.4 * rand(ways, 24, seed=8 + i, dtype=FP32) for i in range(1 + with_gain)]

    def op(stack: Tensor, older: Tensor, newest: Tensor, add: Tensor, u: Tensor, *gain: Tensor) -> tuple[Tensor, ...]:
        summands = (newest, add) if with_sum else (newest + add, None)
        args = ((1e-2, 0.3), out or dtype, True, then_sum, u, gain[0] if gain else None, stack, summands[1])
        with use_backend("triton"):
            found = normed_read.NormedRead.apply(*args, older, summands[0])
            if not then_sum:
                return found
            parts = [t.detach() for t in summands if t is not None]
            return (*found[:-1], normed_read.SumWithInlet.apply(found[-1], *parts, newest.square()))

    def expected(stack: Tensor, older: Tensor, newest: Tensor, add: Tensor, u: Tensor, *gain: Tensor) -> Any:
        sources = [*stack.unbind(-2), older + stack.sum() - stack.sum(), newest + add]
        gains = {"out_gain": gain[0]} if gain else {}
        mixtures = naive(u, sources, None, 1e-2, kind="ways", out_eps=0.3, **RULE, **gains)[:-1]
        return (*mixtures, sources[-1] + newest.square()) if then_sum else mixtures

    return op, expected, leaves


@pytest.mark.parametrize("with_gain", [False, True])
@pytest.mark.parametrize(("m", "ways", "with_sum"), [(0, 1, True), (1, 3, True), (4, 3, False), (3, 2, True)])
def test_blocks_and_sums(m: int, ways: int, with_sum: bool, with_gain: bool) -> None:
    assert_exact(*blocks_case(m, ways, with_sum, with_gain))


def test_a_sum_is_not_rounded() -> None:
    """fp16: 1 + 2^-12 is what a read sees, though no fp16 number is. Results may be wider than the sources."""
    op, expected, leaves = blocks_case(2, 2, True, True, FP16, FP32)
    leaves[2].fill_(1.0)
    leaves[3] = leaves[3] * 2**-12
    outs, grads, cotangents = run(op, leaves)
    exact, exact_grads, _ = run(expected, [t.double() for t in leaves], cotangents)
    assert {o.dtype for o in outs} == {FP32}
    assert_near(outs, exact, TOL)
    assert [g.dtype for g in grads] == [t.dtype for t in leaves]
    assert_near(grads, exact_grads, 1e-3)
    rounded = expected(*[t.double() for t in (*leaves[:2], leaves[2] + leaves[3])], 0.0 * leaves[3], *leaves[4:])
    assert (rounded[0] - exact[0]).abs().max() > 1e-5


def test_nothing_is_concatenated_and_little_is_kept() -> None:
    """Logits and their log-sum-exp: one number per way, source and token, and one per way and token."""
    op, _, leaves = blocks_case(3, 3, True, True)
    leaves = [t.requires_grad_() for t in leaves]
    assert max(stacked_sizes(op, *leaves), default=0) < 2 * 3 * 24
    with saved_storages(1) as kept:
        out = op(*leaves)
    given = {t.untyped_storage().data_ptr() for t in leaves}
    assert sorted(size for at, size in kept.items() if at not in given) == [4 * 3 * 6, 4 * 3 * 5 * 6]
    assert out[0].requires_grad


@pytest.mark.parametrize("with_sum", [False, True])
def test_a_sum_after_the_read(with_sum: bool) -> None:
    """The gradient of the sum comes to the read, whose gradient of the newest source is rounded once."""
    assert_exact(*blocks_case(2, 3, with_sum, True, then_sum=True))
    op, expected, leaves = blocks_case(2, 1, with_sum, True, FP16, then_sum=True)
    # Nothing that autograd would add itself.
    leaves[2].zero_()
    _, grads, cotangents = run(op, leaves)
    _, exact, _ = run(expected, [t.double() for t in leaves], cotangents)
    newest = 3 if with_sum else 2
    assert ((grads[newest] - exact[newest]).abs() <= 2**-11 * exact[newest].abs() * 1.01 + 1e-6).all()
    # A mixture that nobody uses has no gradient.
    grads = torch.autograd.grad(op(*(t.requires_grad_() for t in leaves))[-1], leaves[2], cotangents[-1])
    assert torch.equal(grads[0], cotangents[-1])


def test_second_derivatives() -> None:
    assert_second_derivatives(*blocks_case(2, 2, True, True))
    assert_second_derivatives(*blocks_case(1, 1, True, True, then_sum=True))
    assert_second_derivatives(*case((2, 1, 6), 3, layout="strided", out_gain=True, value_norm=True, eps=1e-2))


def read_and_add(
    u: Tensor, gain: Tensor, stack: Tensor, older: Tensor, newest: Tensor, add: Tensor, z: Tensor
) -> list[Tensor]:
    """A read and the sum after it, as in a layer of Inkling 2."""
    mixtures, inlet = normed_read.read_normed((1e-2, 0.3), FP32, True, u, gain, stack, add, (older, newest))
    return [*mixtures, normed_read.sum_with_inlet(inlet, (newest, add), z)]


def leaves_of_a_read() -> list[Tensor]:
    shapes = [(2, 6), (2, 6), (3, 2, 6), *[(3, 6)] * 4]
    return [rand(*shape, seed=i, dtype=FP32) for i, shape in enumerate(shapes)]


@pytest.mark.uncovered
def test_compiled_as_one_graph(quick_inductor: None) -> None:
    """Reads and sums are operators in one graph, and give the bits of eager code. Inductor has nothing to compile besides."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled, leaves = torch.compile(read_and_add, fullgraph=True, backend=counter), leaves_of_a_read()
    with use_backend("triton"):
        found, expected = run(compiled, leaves), run(read_and_add, leaves)
    for a, b in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(a, b)
    names = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert [sum(f"depthmix.{op}" in name for name in names) for op in ("normed_read", "sum_with_inlet")] == [1, 1]


@pytest.mark.parametrize("few", [False, True])
def test_opcheck(few: bool) -> None:
    """Schema, fake kernels, autograd registration and, once, AOT dispatch are in order."""
    u, gain, stack, older, newest, add, _ = (t.requires_grad_() for t in leaves_of_a_read())
    rest = (None, None, None) if few else (gain, stack, add)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"] + ["test_aot_dispatch_dynamic"] * (
        not few
    )
    args = (u, *rest, [older, newest], 1e-2, 0.3, FP32, True, not few)
    torch.library.opcheck(torch.ops.depthmix.normed_read.default, args, test_utils=checks)


STACKS: list[dict[str, Any]] = [
    {"value_norm": True, "scaled_logits": True, "ways": 3, "block_size": 3},
    {"value_norm": True, "heads": 2, "window": 2},
    {"scaled_logits": True, "ways": 2, "block_size": 2},
]


@pytest.mark.parametrize("options", STACKS, ids=str)
def test_every_gradient_of_a_stack(options: dict[str, Any]) -> None:
    assert_as_reference(plain, tokens(shape=(2, 24)), tol=4e-6, norm=True, **options)


@pytest.mark.covered
@pytest.mark.parametrize("options", STACKS, ids=str)
def test_a_stack_against_the_oracle(options: dict[str, Any]) -> None:
    assert_as_oracle(options, 4e-6)


@pytest.mark.parametrize("options", STACKS, ids=str)
def test_decoding(options: dict[str, Any]) -> None:
    """Few tokens without gradients give what the reference gives."""
    stack, x = Stack(norm=True, **options), tokens().detach()
    found = []
    for backend in ("triton", "reference"):
        with torch.no_grad(), use_backend(backend):
            found.append(stack(x))
    assert_near(found[:1], found[1:], 4e-6)


def test_a_zero_query_averages_normed_sources() -> None:
    v = [rand(2, 3, 8, seed=i) * 10**i for i in range(3)]
    out = depth_attention(torch.zeros(8), v, value_norm=True)
    normed = [x / x.square().mean(-1, keepdim=True).sqrt() for x in v]
    torch.testing.assert_close(out, sum(normed) / 3, rtol=1e-5, atol=1e-6)
