"""What the operators' tests share: running with every gradient, comparing, odd layouts, and watching what PyTorch does."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

import forking
from oracles.cases import pairwise

quick = settings(
    max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
LAYOUTS = ("contiguous", "transposed", "channels_first", "strided", "expanded")


def rand(*shape: int, seed: int = 0, layout: str = "contiguous", dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, the same for the same arguments, in memory laid out as asked for."""
    g = torch.Generator().manual_seed(seed * 1000 + len(shape) + sum(shape))

    def normal(*s: int) -> Tensor:
        return torch.randn(*s, generator=g, dtype=torch.float64).to(dtype)

    if layout == "transposed" and len(shape) > 1:
        return normal(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    if layout == "channels_first" and len(shape) > 1:
        return normal(shape[-1], *shape[:-1]).movedim(0, -1)
    if layout == "strided":
        return normal(*shape[:-1], 2 * shape[-1])[..., ::2]
    if layout == "expanded" and len(shape) > 1:
        return normal(1, *shape[1:]).expand(*shape)
    return normal(*shape)


Run = tuple[tuple[Tensor, ...], tuple[Tensor, ...], list[Tensor]]


def run(fn: Callable[..., Any], leaves: Sequence[Tensor], cotangents: Sequence[Tensor] | None = None) -> Run:
    """fn's outputs, the gradient of every leaf, and the (random) cotangents of the outputs."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    outs = fn(*leaves)
    outs = (outs,) if isinstance(outs, Tensor) else tuple(outs)
    if cotangents is None:
        cotangents = [rand(*o.shape, seed=900 + i).to(o.dtype) for i, o in enumerate(outs)]
    cotangents = [c.to(o.dtype) for c, o in zip(cotangents, outs, strict=True)]
    return outs, torch.autograd.grad(outs, leaves, cotangents), cotangents


def assert_near(actual: Sequence[Tensor], expected: Sequence[Tensor], tol: float = 1e-10) -> None:
    """Each tensor agrees to tol, relative to the largest number expected in it (and at least one)."""
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape, f"{i}: {a.shape} {e.shape}"
        scale = max(1.0, e.abs().max().item()) if e.numel() else 1.0
        torch.testing.assert_close(a.double(), e.double(), rtol=0, atol=tol * scale, msg=lambda m, i=i: f"{i}: {m}")


def assert_agrees(op: Callable[..., Any], naive: Callable[..., Any], leaves: Sequence[Tensor]) -> None:
    """The outputs and the gradient of every leaf are those of the naive implementation, in fp64."""
    outs, grads, cotangents = run(op, leaves)
    expected_outs, expected_grads, _ = run(naive, leaves, cotangents)
    assert_near(outs, expected_outs)
    assert_near(grads, expected_grads)


def assert_rounded_once(
    op: Callable[..., Any], naive: Callable[..., Any], leaves: Sequence[Tensor], grad_roundings: int = 1
) -> None:
    """Outputs and gradients are the exact ones (fp64, same input values), rounded once to their dtype, plus fp32 noise.

    With grad_roundings > 1, half-precision gradients may be that many roundings (of the largest number in them) away.
    """
    outs, grads, cotangents = run(op, leaves)
    exact_outs, exact_grads, _ = run(naive, [t.double() for t in leaves], cotangents)
    assert [g.dtype for g in grads] == [t.dtype for t in leaves]
    for i, (a, e) in enumerate(zip((*outs, *grads), (*exact_outs, *exact_grads), strict=True)):
        noise = 2e-6 * max(1.0, e.abs().max().item())
        if grad_roundings > 1 and i >= len(outs) and a.dtype.itemsize == 2:
            noise += grad_roundings * torch.finfo(a.dtype).eps / 2 * e.abs().max().item()
        half_ulp = torch.finfo(a.dtype).eps / 2  # 2^-8 for bf16, 2^-11 for fp16
        error = (a.double() - e).abs()
        assert bool((error <= half_ulp * e.abs() * (1 + 1e-3) + noise).all()), f"{i}: {error.max()} of {e.abs().max()}"


def assert_ignores_autocast(op: Callable[..., Any], leaves: Sequence[Tensor]) -> None:
    """Outputs and gradients (backward outside the region, as PyTorch advises) are bit-equal under bf16 autocast."""

    def under_autocast(*args: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return op(*args)

    outs, grads, cotangents = run(op, leaves)
    cast_outs, cast_grads, _ = run(under_autocast, leaves, cotangents)
    for a, b in zip((*outs, *grads), (*cast_outs, *cast_grads), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def assert_backward_ignores_autocast(op: Callable[..., Any], leaves: Sequence[Tensor]) -> None:
    """Gradients are bit-equal when the backward itself runs in an autocast region."""
    _, grads, cotangents = run(op, leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, cast_grads, _ = run(op, leaves, cotangents)
    assert [torch.equal(a, b) for a, b in zip(grads, cast_grads, strict=True)] == [True] * len(grads)


def assert_inputs_untouched(op: Callable[..., Any], leaves: Sequence[Tensor]) -> None:
    """Forward and backward write to none of the inputs."""
    before = [(t.clone(), t._version) for t in leaves]
    run(op, leaves)
    assert all(torch.equal(t, old) and t._version == version for t, (old, version) in zip(leaves, before, strict=True))


class StackRecorder(TorchDispatchMode):
    """Records the sizes of what aten.stack and aten.cat produce."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.stack, torch.ops.aten.cat):
            self.sizes.append(out.numel())
        return out


def stacked_sizes(fn: Callable[..., Any], *args: Any) -> list[int]:
    """The number of elements of every stack or cat made in fn(*args)."""
    with StackRecorder() as recorder:
        fn(*args)
    return recorder.sizes


class PeakRecorder(TorchDispatchMode):
    """Records the largest number of tensors of at least `full` elements that were alive at once, inputs left out."""

    def __init__(self, full: int, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.full, self.peak, self.made = full, 0, WeakIdKeyDictionary()
        self.inputs = {t.untyped_storage().data_ptr() for t in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() >= self.full:
            self.made[out] = out.untyped_storage().data_ptr()
        self.peak = max(self.peak, len(set(self.made.values()) - self.inputs))
        return out


def peak_temporaries(fn: Callable[..., Any], full: int, *inputs: Tensor) -> int:
    """The largest number of full-size tensors alive at once while fn runs without a graph, its outputs included."""
    with torch.no_grad(), PeakRecorder(full, inputs) as recorder:
        fn(*inputs)
    return recorder.peak


@contextmanager
def saved_storages(at_least: int) -> Iterator[dict[int, int]]:
    """Bytes by address of the distinct storages kept for the backward that hold `at_least` elements of their dtype."""
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # an address is an identity only while its tensor lives

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.nbytes() >= at_least * t.element_size():
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield kept


def combinations(**options: Sequence[Any]) -> list[dict[str, Any]]:
    """All combinations of the options' values."""
    return [dict(zip(options, values, strict=True)) for values in product(*options.values())]


def few(options: Sequence[dict[str, Any]], meeting: int = 2) -> list[dict[str, Any]]:
    """Few of the options, in which any two (or `meeting`) values that are together in one of them still are."""
    return pairwise("", options, meeting)


def name(options: dict[str, Any]) -> str:
    """A test id out of options."""
    return "-".join(f"{k}={v}" for k, v in options.items())


def nodes_with_mailboxes(out: Tensor) -> list[Any]:
    """Every node of a graph with which others leave something."""
    seen, todo = {}, [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen[node] = hasattr(node, "mail")
            todo += [n for n, _ in node.next_functions]
            todo += getattr(node, "makers", [])
    return [node for node, kept in seen.items() if kept]


# Tests read PTX, so the assembler need not run. The key for Triton's cache is a hash of its 500 MB library, which takes
# 1.6 s per process. The folder of the cache is empty and of this process alone: there is nothing to look up.
ONLY_PTX = """
import triton.runtime.cache
from triton.backends.nvidia.compiler import CUDABackend

CUDABackend.make_cubin = lambda *_: b""
triton.runtime.cache.triton_key = lambda: "unused"
"""


def compiled_in_its_own_process(code: str, cases: Sequence[Any]) -> list[str]:
    """Return what `code` prints for each case, with kernels compiled to PTX for a GPU that need not be here.

    The process has no Triton interpreter.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_DISABLE_LINE_INFO": "1"}
    with tempfile.TemporaryDirectory() as cache:
        done = forking.python(ONLY_PTX + code, repr(cases), env=environment | {"TRITON_CACHE_DIR": cache})
    if done.returncode and "ptxas" in done.stderr:
        pytest.skip("Triton has no assembler for this machine")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split("----")[:-1]
