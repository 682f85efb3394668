"""write_norm and gated_mean: the reference and the kernels (in Triton's interpreter) against equations in fp64."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from depthmix.fast.gated_streams import PendingGatedStreams
from depthmix.ops import BackendError, use_backend
from depthmix.ops.gated_streams import gated_mean, write_norm
from harness import Sublayers, build, embedding, run_stack
from ops.helpers import assert_near, compiled_in_its_own_process, rand, run, saved_storages
from ops.test_depth_attention_kernels import assert_second_derivatives

EPS, FP32, FP16 = 1e-2, torch.float32, torch.float16
SHAPES = [(3, 4, 24), (1, 2, 1), (7, 3, 17)]
BACKENDS = ["reference", "triton"]
Fn = Callable[..., Any]


@pytest.fixture(autouse=True)
def _interpreter(request: pytest.FixtureRequest) -> None:
    if "triton" in str(request.node.name):
        pytest.importorskip("triton")
        request.getfixturevalue("quick_interpreter")


def expected_write_norm(x: Tensor, gain: Tensor, *written: Tensor) -> tuple[Tensor, Tensor]:
    if written:
        y, post = written
        x = x + torch.einsum("tn,td->tnd", post, y)
    return x, gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)


def expected_gated_mean(z: Tensor, normed: Tensor) -> tuple[Tensor]:
    return ((normed / (1 + torch.exp(-z))).sum(1) / normed.shape[1],)


def write_norm_by(backend: str, **_: Any) -> Fn:
    def op(x: Tensor, gain: Tensor, *written: Tensor) -> tuple[Tensor, Tensor]:
        with use_backend(backend):
            new, normed = write_norm(x, *(written or (None, None)), gain, EPS)
        # Twice, so that the new streams have a gradient of their own, as from the next step.
        return new * 1, normed

    return op


def gated_mean_by(backend: str) -> Fn:
    def op(z: Tensor, normed: Tensor) -> tuple[Tensor]:
        with use_backend(backend):
            return (gated_mean(z, normed),)

    return op


def leaves_of(shape: tuple[int, int, int], writes: bool, dtype: torch.dtype = FP32) -> list[Tensor]:
    tokens, n, dim = shape
    leaves = [rand(*shape, seed=1, dtype=dtype), rand(n, dim, seed=2, dtype=FP32)]
    return leaves + [rand(tokens, dim, seed=3, dtype=dtype), rand(tokens, n, seed=4, dtype=FP32)] * writes


def assert_exact(op: Fn, expected: Fn, leaves: list[Tensor], tol: float) -> None:
    outs, grads, cotangents = run(op, leaves)
    exact_outs, exact_grads, _ = run(expected, [t.double() for t in leaves], cotangents)
    assert [g.dtype for g in grads] == [t.dtype for t in leaves]
    assert_near(outs, exact_outs, tol)
    assert_near(grads, exact_grads, tol)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("writes", [False, True])
def test_write_norm(writes: bool, shape: tuple[int, int, int], backend: str) -> None:
    assert_exact(write_norm_by(backend), expected_write_norm, leaves_of(shape, writes), 4e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_mean(shape: tuple[int, int, int], backend: str) -> None:
    leaves = [3 * rand(*shape, seed=i, dtype=FP32) for i in (1, 2)]
    assert_exact(gated_mean_by(backend), expected_gated_mean, leaves, 4e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision(backend: str) -> None:
    """fp16 streams with fp32 gains and weights: each result is rounded once. The norm sees the rounded streams."""
    leaves = leaves_of((5, 4, 24), True, FP16)
    (new, normed), _, _ = run(write_norm_by(backend), leaves)
    exact, _ = expected_write_norm(*[t.double() for t in leaves])
    assert torch.equal(new.double(), exact.to(FP16).double())
    _, exact_normed = expected_write_norm(new.double(), leaves[1].double())
    assert ((normed - exact_normed).abs() <= 2**-11 * exact_normed.abs() * 1.001 + 1e-7).all()
    assert_exact(write_norm_by(backend), expected_write_norm, leaves, 2e-3)
    gates = [rand(5, 4, 24, seed=i, dtype=FP16) for i in (1, 2)]
    assert_exact(gated_mean_by(backend), expected_gated_mean, gates, 1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_and_no_gradients(backend: str) -> None:
    leaves = leaves_of((0, 4, 24), True)
    outs, grads, _ = run(write_norm_by(backend), leaves)
    assert {o.shape for o in outs} == {torch.Size((0, 4, 24))}
    assert not any(g.any() for g in grads)
    with torch.no_grad(), use_backend(backend):
        x, normed = write_norm(leaves_of((3, 4, 24), False)[0], None, None, torch.ones(4, 24), EPS)
        assert gated_mean(normed, normed).shape == (3, 24)
        assert not x.requires_grad


def test_second_derivatives_by_triton() -> None:
    assert_second_derivatives(write_norm_by("triton"), expected_write_norm, leaves_of((2, 2, 6), True))
    gates = [rand(2, 2, 6, seed=i, dtype=FP32) for i in (1, 2)]
    assert_second_derivatives(gated_mean_by("triton"), expected_gated_mean, gates)


def test_what_a_graph_keeps_by_triton() -> None:
    """Streams before and after a write; of a mean nothing that was not given."""
    leaves = [t.requires_grad_() for t in leaves_of((3, 4, 24), True)]
    given = {t.untyped_storage().data_ptr() for t in leaves}
    with use_backend("triton"), saved_storages(1) as kept:
        _, normed = write_norm(leaves[0], leaves[2], leaves[3], leaves[1], EPS)
    assert sum(size for at, size in kept.items() if at not in given) == 4 * 3 * 4 * 24
    with use_backend("triton"), saved_storages(1) as kept:
        gated_mean(normed, normed)
    assert set(kept) == {normed.untyped_storage().data_ptr()}


def test_what_kernels_do_not_know_by_triton() -> None:
    with use_backend("triton"):
        with pytest.raises(BackendError, match=r"write_norm: .* they know float32, bfloat16 and float16"):
            write_norm(torch.ones(1, 2, 4, dtype=torch.float64), None, None, torch.ones(2, 4), EPS)
        with pytest.raises(BackendError, match="9000 channels do not fit"):
            gated_mean(torch.ones(1, 4, 9000), torch.ones(1, 4, 9000))


def read_and_write(x: Tensor, gain: Tensor, y: Tensor, post: Tensor, z: Tensor) -> list[Tensor]:
    """A write with the read after it, and another read of what was given, as in a layer of Qwen4-Exp."""
    first = gated_mean(z, write_norm(x, None, None, gain, EPS)[1])
    x, normed = write_norm(z.detach(), y, post, gain.detach(), EPS)
    return [first, x, gated_mean(z.detach(), normed)]


def test_compiled_as_one_graph_by_triton() -> None:
    """Both are operators in one graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    leaves = [*leaves_of((3, 2, 6), True), rand(3, 2, 6, seed=5, dtype=FP32)]
    with use_backend("triton"):
        found, expected = (
            run(f, leaves) for f in (torch.compile(read_and_write, backend=counter, fullgraph=True), read_and_write)
        )
    for a, b in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(a, b)
    names = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert [sum(f"depthmix.{op}" in name for name in names) for op in ("write_norm", "gated_mean")] == [2, 2]


def test_opcheck_by_triton() -> None:
    """Schema, fake kernels, autograd registration and AOT dispatch are in order."""
    x, gain, y, post = (t.requires_grad_() for t in leaves_of((3, 2, 6), True))
    for written in ((y, post), (None, None)):
        torch.library.opcheck(torch.ops.depthmix.write_norm.default, (x, *written, gain, EPS))
    torch.library.opcheck(torch.ops.depthmix.gated_mean.default, (x, x.detach().sin().requires_grad_()))


def pass_results(mixer: Any, sublayers: Any, e: Tensor, backends: Sequence[str]) -> list[Tensor]:
    """Return output, reads and every gradient of a pass. Each site, and finish, runs by a backend of its own."""
    e = e.detach().requires_grad_()
    by_site = [backends[i % len(backends)] for i in range(mixer.n_sites + 1)]
    with use_backend(by_site[0]):
        state, reads = mixer.start(e), []
    for site in range(mixer.n_sites):
        with use_backend(by_site[site]):
            reads.append(mixer.read(state, site))
            state = mixer.write(state, site, sublayers(site, (reads[-1],)))
    with use_backend(by_site[-1]):
        out = mixer.finish(state)
    inputs = [e, *sublayers.parameters(), *mixer.parameters()]
    return [out, *reads, *torch.autograd.grad(out.square().sum(), inputs)]


def test_the_rule_by_triton() -> None:
    """A pass by kernels, one that changes over in between, and one without gradients give what the rule gives."""
    dims = {"dim": 12, "dtype": FP32}
    mixer, sublayers = build("gated_streams", 2, {"n": 3, "rank": 5}, random=True, **dims), Sublayers(2, **dims)
    e = embedding(**dims)
    exact = pass_results(copy.deepcopy(mixer).double(), copy.deepcopy(sublayers).double(), e.double(), ["reference"])
    for backends in (["triton"], ["triton", "triton", "reference"], ["reference", "triton"]):
        assert_near(pass_results(mixer, sublayers, e, backends), exact, 2e-5)
    with torch.no_grad(), use_backend("triton"):
        state = mixer.start(e)
        assert type(state) is PendingGatedStreams
        out = run_stack(mixer, sublayers, e)[0]
    assert_near([out], exact[:1], 2e-6)


PTX = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from depthmix.ops.gated_streams.kernels import norm_and_mean as kernels

OTHERS = {"N": "i64", "eps": "fp32"} | dict.fromkeys(("post", "gain", "dpost", "part"), "*fp32")
for name in eval(sys.argv[1]):
    fn = getattr(kernels, name)
    constants = {"n": 4, "BN": 4, "D": 2048, "BD": 2048, "WRITE": True, "HAS_NEXT": True}
    constants = {p.name: constants[p.name] for p in fn.params if p.is_constexpr}
    types = {p.name: "constexpr" if p.is_constexpr else OTHERS.get(p.name, "*bf16") for p in fn.params}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types.values()) if t.startswith("*")}
    source = ASTSource(fn=fn, signature=types, constexprs=constants, attrs=aligned)
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16}).asm["ptx"], end="----")
"""
KERNELS = ["_write_norm_kernel", "_write_norm_backward_kernel", "_gated_mean_kernel", "_gated_mean_backward_kernel"]


def test_rows_are_loaded_sixteen_bytes_wide() -> None:
    """Compiled for an H100, without one: rows of bf16 come in 16-byte loads, at Qwen4-Exp's width."""
    pytest.importorskip("triton")
    for kernel, code in zip(KERNELS, compiled_in_its_own_process(PTX, KERNELS), strict=True):
        assert "ld.global.v4.b32" in code, kernel
        assert "ld.global.b16" not in code, kernel
