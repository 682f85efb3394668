"""gated_read: the reference and the kernels (in Triton's interpreter) against equations in fp64."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from depthmix.ops import use_backend
from depthmix.ops.gated_streams.kernels import few_tokens
from depthmix.ops.gated_streams.read import FEW_TOKENS, can_read, few_write, gated_read
from depthmix.ops.gated_streams.reference import Inputs, gated_read_reference
from depthmix.ops.gpu.launch import Compiled
from depthmix.ops.torch_internals import UncompiledMode
from ops.helpers import (
    assert_inputs_untouched,
    assert_near,
    compiled_in_its_own_process,
    rand,
    run,
    saved_storages,
)
from ops.test_depth_attention_kernels import assert_second_derivatives

EPS, OFFSET, FP32, FP16 = 1e-2, 1.0, torch.float32, torch.float16
# Tokens, streams, channels and rank.
SHAPES = [(3, 4, 24, 5), (1, 2, 1, 1), (7, 3, 17, 9)]
Fn = Callable[..., Any]


@pytest.fixture(autouse=True)
def _interpreter(request: pytest.FixtureRequest) -> None:
    if "reference" not in str(request.node.name):
        pytest.importorskip("triton")
        request.getfixturevalue("quick_interpreter")


def leaves_of(
    shape: tuple[int, int, int, int], writes: bool, more: bool, dtype: torch.dtype = FP32, scale: float = 1.0
) -> list[Tensor]:
    """Return x, gain, W_down, W_up, then W_inject if a write follows, then y and post if something is written."""
    tokens, n, dim, rank = shape
    width = n * dim
    leaves = [scale * rand(tokens, n, dim, seed=1, dtype=dtype), rand(width, seed=2, dtype=dtype)]
    leaves += [rand(rank, width, seed=3, dtype=dtype), rand(width, rank, seed=4, dtype=dtype)]
    leaves += [rand(n, width, seed=5, dtype=dtype)] * more
    written = [scale * rand(tokens, dim, seed=6, dtype=dtype), rand(tokens, n, seed=7, dtype=FP32)]
    return leaves + written * writes


def inputs_of(leaves: tuple[Tensor, ...], more: bool) -> Inputs:
    x, gain, down, up, *rest = leaves
    inject, written = (rest[0], rest[1:]) if more else (None, rest)
    y, post = written or (None, None)
    return Inputs(x, y, post, gain, down, up, inject)


def expected_by(more: bool, kind: torch.dtype | None = None) -> Fn:
    """The equations. kind: the dtype to which the streams are rounded."""

    def expected(*leaves: Tensor) -> list[Tensor]:
        x, y, post, gain, down, up, inject = inputs_of(leaves, more)
        n = x.shape[1]
        if y is not None:
            x = x + torch.einsum("tn,td->tnd", post, y)
            x = x if kind is None else x + (x.to(kind).double() - x).detach()
        normed = (1 + gain).view(x.shape[1:]) * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)
        flat = normed.reshape(len(x), -1)
        t = torch.einsum("tk,rk->tr", flat, down) / n
        z = torch.einsum("tr,kr->tk", t / (1 + torch.exp(-t)), up).view_as(x)
        h = (normed / (1 + torch.exp(-z))).sum(1) / n
        after = [] if inject is None else [2 / (1 + torch.exp(-torch.einsum("tk,mk->tm", flat, inject) / n))]
        return [x * 1, h, *after]

    return expected


def read_by(backend: str, more: bool) -> Fn:
    def op(*leaves: Tensor) -> list[Tensor]:
        inputs = inputs_of(leaves, more)
        with use_backend(backend):
            if backend == "reference":
                new, h, post = gated_read_reference(EPS, OFFSET, *inputs)
            else:
                assert can_read(inputs.x, inputs.y, inputs.gain, inputs.down, inputs.up, inputs.inject)
                new, h, post = gated_read(inputs, EPS, OFFSET)
        # A copy, so that the streams have a gradient of their own, as from the next write.
        return [new * 1, h, *([] if post is None else [post])]

    return op


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("writes", "more"), [(False, True), (True, True), (False, False)])
def test_outputs_and_gradients(writes: bool, more: bool, shape: tuple[int, int, int, int], backend: str) -> None:
    leaves = leaves_of(shape, writes, more)
    outs, grads, cotangents = run(read_by(backend, more), leaves)
    exact_outs, exact_grads, _ = run(expected_by(more), [t.double() for t in leaves], cotangents)
    assert_near(outs, exact_outs, 1e-5)
    assert_near(grads, exact_grads, 2e-5)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_half_precision(scale: float) -> None:
    """fp16: outputs and gradients within a few roundings, and streams of large numbers cost no gradient."""
    leaves = leaves_of((5, 4, 24, 16), True, True, FP16, scale)
    outs, grads, cotangents = run(read_by("triton", True), leaves)
    exact_outs, exact_grads, _ = run(expected_by(True, FP16), [t.double() for t in leaves], cotangents)
    for found, exact in zip((*outs, *grads), (*exact_outs, *exact_grads), strict=True):
        assert (found.double() - exact).norm() <= 3e-3 * exact.norm()


@pytest.mark.parametrize("tokens", [1, 3, 17, 65])
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_without_gradients(dtype: torch.dtype, tokens: int) -> None:
    """Few tokens take kernels of their own, with several cuts of the channels and rows, and more tokens those of training."""
    leaves = leaves_of((tokens, 3, 300 if tokens < 17 else 40, 70), True, True, dtype)
    leaves[2:5] = [0.1 * w for w in leaves[2:5]]
    assert (tokens > FEW_TOKENS) == (tokens == 65)
    with torch.no_grad():
        found, exact = read_by("triton", True)(*leaves), expected_by(True, dtype)(*[t.double() for t in leaves])
        again = read_by("triton", True)(*leaves)
    for a, e, b in zip(found, exact, again, strict=True):
        assert (a.double() - e).norm() <= (2e-6 if dtype == FP32 else 1.5e-3) * e.norm()
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_write_alone(dtype: torch.dtype) -> None:
    """Few tokens without gradients have a launch for it, which gives what a read writes. Other tokens have none."""
    x, gain, down, up, inject, y, post = leaves_of((5, 3, 1100, 4), True, True, dtype)
    with use_backend("triton"):
        assert few_write(x, y, post) is None
        with torch.no_grad():
            new = few_write(x, y, post)
            assert few_write(x.repeat(20, 1, 1), y.repeat(20, 1), post.repeat(20, 1)) is None
            expected = gated_read(Inputs(x, y, post, gain, down, up, inject), EPS, OFFSET)[0]
    assert new is not None
    assert torch.equal(new, expected)
    with torch.no_grad():
        assert few_write(x, y, post) is None


@pytest.mark.parametrize("kind", ["read", "first read", "last read", "write"])
def test_launches_by_addresses(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call hands Triton's launchers the addresses of what the first call handed to Triton, and its constants."""
    by_triton: list[tuple[Any, ...]] = []
    by_address: list[tuple[Any, ...]] = []
    memory: dict[Any, Tensor] = {}

    def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *arguments: Any, **options: Any) -> None:
        addresses = [t.data_ptr() if isinstance(t, Tensor) else t for t in arguments]
        by_triton.append((kernel, grid, *addresses))

    def run(x: int, y: int, z: int, stream: int, kernel: Any, metadata: Any, *rest: Any) -> None:
        assert (stream, metadata, rest[:3], rest[-1]) == (7, "metadata", (None, None, None), "constant")
        by_address.append((kernel, (x, y, z), *rest[3:-1]))

    def allocate(shape: Any, *, dtype: torch.dtype = FP32, device: Any = None) -> Tensor:
        # Both calls get the same memory.
        return memory.setdefault((shape, dtype), torch.zeros(shape, dtype=dtype))

    settings = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    found = lambda kernel, *_: Compiled(run, kernel, "metadata", ("constant",), settings)  # noqa: E731
    like = lambda t: allocate((*t.shape,), dtype=t.dtype)  # noqa: E731
    fake_torch = SimpleNamespace(empty=allocate, empty_like=like, float32=FP32)
    for name, value in {
        "launch": launch,
        "compiled_kernel": found,
        "torch": fake_torch,
        "_plans": {},
        "current_stream_handle": lambda device: 7,
        "is_watched": lambda kernel, settings: False,
    }.items():
        monkeypatch.setattr(few_tokens, name, value)
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    x, gain, down, up, inject, y, post = leaves_of((4, 4, 16, 8), True, True)

    def call() -> Any:
        if kind == "write":
            return few_tokens.write(x, y, post)
        written = (None, None) if kind == "first read" else (y, post)
        return few_tokens.read(
            Inputs(x, *written, gain, down, up, None if kind == "last read" else inject), EPS, OFFSET
        )

    with monkeypatch.context() as patch:
        patch.setattr(few_tokens, "dependent_launch", lambda like: {"EARLY": True})
        call()
    assert by_triton
    assert not by_address
    launched = list(by_triton)
    call()
    assert by_triton == launched
    assert by_address == launched


def test_frozen_weights_have_no_gradient() -> None:
    """Each set of inputs that need a gradient has the gradients that all together have."""
    leaves = leaves_of((3, 2, 8, 4), True, True)
    _, whole, cotangents = run(read_by("triton", True), leaves)
    for trained in ([0], [1, 3], [2, 5], [4], [6]):
        own = [t.detach().requires_grad_(i in trained) for i, t in enumerate(leaves)]
        outs = read_by("triton", True)(*own)
        pairs = [(o, c) for o, c in zip(outs, cotangents, strict=True) if o.requires_grad]
        grads = torch.autograd.grad([o for o, _ in pairs], [own[i] for i in trained], [c for _, c in pairs])
        assert_near(grads, [whole[i] for i in trained], 1e-6)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_one_output_alone(used: int) -> None:
    """The other outputs have no gradient."""

    def alone(op: Fn) -> Fn:
        # Every leaf takes part.
        return lambda *leaves: op(*leaves)[used] + 0 * sum(t.sum() for t in leaves)

    leaves = leaves_of((3, 2, 8, 4), True, True)
    _, grads, cotangents = run(alone(read_by("triton", True)), leaves)
    _, exact, _ = run(alone(expected_by(True)), [t.double() for t in leaves], cotangents)
    assert_near(grads, exact, 2e-5)


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_backward_under_autocast(dtype: torch.dtype) -> None:
    """Products of the backward are not lowered, wherever it is called."""
    leaves = [t.requires_grad_() for t in leaves_of((3, 2, 8, 4), True, True, dtype)]
    outs = read_by("triton", True)(*leaves)
    cotangents = [torch.ones_like(o) for o in outs]
    expected = torch.autograd.grad(outs, leaves, cotangents, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(outs, leaves, cotangents)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_inputs_and_saved_tensors_are_left_alone() -> None:
    """Nothing is written to an input, and a second backward of one graph has the same bits."""
    leaves = leaves_of((3, 2, 8, 4), True, True)
    assert_inputs_untouched(read_by("triton", True), leaves)
    leaves = [t.requires_grad_() for t in leaves]
    outs = read_by("triton", True)(*leaves)
    cotangents = [torch.ones_like(o) for o in outs]
    first = torch.autograd.grad(outs, leaves, cotangents, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(outs, leaves, cotangents), strict=True):
        assert torch.equal(a, b)


def test_second_derivatives() -> None:
    leaves = leaves_of((2, 2, 6, 3), True, True)
    assert_second_derivatives(read_by("triton", True), expected_by(True), leaves)


class Additions(UncompiledMode):
    """Counts what aten.add computes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_)
        return func(*args, **(kwargs or {}))


def test_autograd_adds_no_gradients() -> None:
    """The streams that a read returns are the next read's alone, also if the read writes nothing."""
    x, gain, down, up, inject, y, _ = (t.requires_grad_() for t in leaves_of((3, 2, 8, 4), True, True))
    weights = [[w.detach().requires_grad_() for w in (gain, down, up, inject)] for _ in range(2)]
    with use_backend("triton"):
        new, _, post = gated_read(Inputs(x, None, None, *weights[0]), EPS, OFFSET)
        assert post is not None
        last, h, _ = gated_read(Inputs(new, y, post, *weights[1]), EPS, OFFSET)
        with Additions() as additions:
            torch.autograd.grad([last, h], [x, y, *weights[0]], [torch.ones_like(last), torch.ones_like(h)])
    assert additions.count == 0


def test_what_a_graph_keeps() -> None:
    """The streams after the write and the logits of the gates are all that is kept with as many numbers as the streams."""
    leaves = [t.requires_grad_() for t in leaves_of((40, 2, 16, 1), True, True)]
    given = {t.untyped_storage().data_ptr() for t in leaves}
    with use_backend("triton"), saved_storages(40 * 2 * 16) as kept:
        gated_read(inputs_of(tuple(leaves), True), EPS, OFFSET)
    assert len(set(kept) - given) == 2


def test_what_kernels_do_not_read() -> None:
    """Tensors of several dtypes, autocast and no tokens are left to other operators."""
    with use_backend("triton"):
        x, gain, down, up, inject = leaves_of((3, 2, 8, 4), False, True)
        assert can_read(x, None, gain, down, up, inject)
        assert can_read(x, None, gain.half(), down, up, None)
        assert not can_read(x, None, gain, down.half(), up, inject)
        assert not can_read(x, x[:, 0].half(), gain, down, up, inject)
        assert not can_read(x[:0], None, gain, down, up, inject)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not can_read(x, None, gain, down, up, inject)
    assert not can_read(x, None, gain, down, up, inject)


PTX = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from depthmix.ops.gated_streams.kernels import few_tokens, read

OTHERS = {"N": "i64", "programs": "i64", "eps": "fp32", "offset": "fp32"}
OTHERS |= dict.fromkeys(("r", "u", "sums", "squares", "post", "dpost", "part"), "*fp32")
VALUES = {"n": 4, "BN": 4, "D": 2048, "S": 8192, "BS": 2048, "R": 320, "M": 4, "P": 328, "BP": 512, "WRITE": True, "HAS_NEXT": True}
VALUES |= {"GAIN": True, "SCALED": True, "BJ": 32, "OF_STREAM": 328 * 2048, "OF_ROW": 2048, "CUTS": 16, "BC": 16, "EARLY": True}
for name, own, warps in eval(sys.argv[1]):
    fn = getattr(read, name, None) or getattr(few_tokens, name)
    values = VALUES | own
    constants = {p.name: values[p.name] for p in fn.params if p.is_constexpr}
    types = {p.name: "constexpr" if p.is_constexpr else OTHERS.get(p.name, "*bf16") for p in fn.params}
    if "network" in name:
        types["u"] = "*bf16"
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types.values()) if t.startswith("*")}
    source = ASTSource(fn=fn, signature=types, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": 1}
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"], end="----")
"""
# Kernels that load rows of bf16, their tile, and their warps at four streams of 2048 channels.
WIDE_LOADS = [
    ("_fold_kernel", {}, 4),
    ("_write_rms_kernel", {"BD": 2048}, 8),
    ("_gate_kernel", {"BD": 512}, 4),
    ("_gate_backward_kernel", {"BD": 512}, 4),
    ("_weights_backward_kernel", {"BD": 64}, 4),
    ("_streams_backward_kernel", {"BD": 2048}, 8),
    ("_down_kernel", {"BK": 128, "BT": 16, "BR": 64}, 4),
    ("_up_kernel", {"BD": 16, "BK": 256, "BT": 64}, 8),
    ("_few_write_kernel", {"BD": 1024}, 4),
]


def test_rows_are_loaded_sixteen_bytes_wide() -> None:
    """Compiled for an H100, without one, at Qwen4-Exp's width. A thread of the first launch for few tokens loads one number of the gain."""
    for (name, *_), code in zip(WIDE_LOADS, compiled_in_its_own_process(PTX, WIDE_LOADS), strict=True):
        assert "ld.global.v4.b32" in code, name
        assert code.count("ld.global.b16") <= (name == "_down_kernel"), name
