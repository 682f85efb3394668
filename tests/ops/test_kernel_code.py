"""What the kernels keep and what they are: memory that a graph holds and gives back, changes in place, and the machine code."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import pytest
import torch
import torch._dynamo  # imported at first use, it would keep its caller's frames until Python's collector comes by
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from depthmix.ops import use_backend
from ops.helpers import assert_near, compiled_in_its_own_process, saved_storages
from ops.test_depth_attention_order import (
    BLOCK_WAYS,
    FULL_NORMED,
    TWO_WAYS,
    D,
    Stack,
    Stopped,
    backward,
    cotangent,
    tokens,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")


class Operators(TorchDispatchMode):
    """Records the names of the operators that run, and the storages of what they return: of all, or those of one size."""

    def __init__(self, numel: int | None = None) -> None:
        super().__init__()
        self.numel, self.names, self.made = numel, [], {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func.overloadpacket))
        for t in pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.is_floating_point() and self.numel in (None, t.numel()):
                ref = StorageWeakRef(t.untyped_storage())
                self.made[ref.cdata] = ref
        return out

    def alive(self) -> int:
        """How many of the storages are in use. (Addresses, integers, are kept between steps and do not count.)"""
        forget_launches()
        self.made = {key: ref for key, ref in self.made.items() if not ref.expired()}
        return len(self.made)


def forget_launches() -> None:
    """Triton's interpreter keeps the arguments of every launch in a cycle of closures, which a GPU's launcher does not."""
    for f in gc.get_objects():
        if type(f) is FunctionType and f.__module__ == "triton.runtime.interpreter" and "<locals>" in f.__qualname__:
            for cell in f.__closure__ or ():
                if type(cell.cell_contents) is dict:
                    cell.cell_contents.clear()


@pytest.mark.parametrize("options", [FULL_NORMED, TWO_WAYS, BLOCK_WAYS], ids=str)
def test_the_kernels_run_and_in_source_order(options: dict[str, Any]) -> None:
    """What is compared above is not the reference with itself, and no read writes a gradient for each of its sources."""
    for backend, expected in (("triton", True), ("reference", False), (None, False)):
        with use_backend(backend), Operators() as seen:
            backward(stack := Stack(**options), x := tokens(), stack(x))
        assert any(name.startswith("depthmix") for name in seen.names) == expected
        assert not any("depth_read_backward" in name for name in seen.names)


@contextmanager
def without_collector() -> Iterator[None]:
    """What is freed inside is freed by reference counts alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


TOKENS = 7  # then no parameter has as many numbers as an activation


def alive_after(run: Callable[[Stack, Tensor, Operators], None], **options: Any) -> int:
    """Activations alive after `run`, which keeps none itself, x left out."""
    stack, x = Stack(**options), tokens(shape=(TOKENS, D))
    with without_collector(), use_backend("triton"), Operators(x.numel()) as seen:
        run(stack, x, seen)
        x.grad = None
        alive, own = seen.alive(), StorageWeakRef(x.untyped_storage())
        return alive - (own.cdata in seen.made)


def one_step(stack: Stack, x: Tensor, seen: Operators) -> None:
    stack(x).sum().backward()


def watched_step(stack: Stack, x: Tensor, seen: Operators) -> None:
    """When x's gradient arrives, last of all, what the graph kept is gone: before the graph itself goes."""
    out, left = stack(x).sum(), []
    hook = x.register_hook(lambda g: left.append(seen.alive()))
    out.backward()
    hook.remove()
    assert left[0] <= 3, left  # x, its gradient, and the one it was added to


def broken_backward(stack: Stack, x: Tensor, seen: Operators) -> None:
    made = stack.outputs(x)
    made[1].register_hook(stop)
    with pytest.raises(Stopped):
        made[-1].sum().backward(retain_graph=True)


def forward_only(stack: Stack, x: Tensor, seen: Operators) -> None:
    stack(x)


def parts_of_a_kept_graph(stack: Stack, x: Tensor, seen: Operators) -> None:
    """A backward through a part leaves nothing with the nodes that it does not reach."""
    out, counts = stack(x).sum(), []
    for _ in range(2):
        torch.autograd.grad(out, stack.weight[-1], retain_graph=True)
        counts.append(seen.alive())
    assert counts[0] == counts[1]


def stop(_: Tensor) -> None:
    raise Stopped


WAYS = {"norm": True, "n_blocks": 1, "block_size": 2, "ways": 2}


@pytest.mark.parametrize(
    ("run", "options"),
    [(run, FULL_NORMED) for run in (one_step, watched_step, broken_backward, forward_only, parts_of_a_kept_graph)]
    + [(run, WAYS) for run in (watched_step, parts_of_a_kept_graph)],
)
def test_memory_is_released(run: Callable[..., None], options: dict[str, Any]) -> None:
    """By reference counts alone: no cycle keeps activations until Python's collector comes by."""
    assert alive_after(run, **options) == 0


def test_ten_steps_keep_nothing() -> None:
    """Count as many live tensors after 10 steps as after 3."""
    stack, x, counts = Stack(n_blocks=1, norm=True), tokens(shape=(1, D)), []
    with without_collector(), use_backend("triton"), Operators() as seen:
        for step in range(10):
            stack(x).sum().backward()
            if step in (2, 5, 9):
                counts.append(seen.alive())
    assert set(counts) == {counts[0]}


@pytest.mark.parametrize("norm", [False, True])
def test_a_full_stack_keeps_two_tensors_a_site(norm: bool) -> None:
    """Each source and each mixture once, however many sites read it."""
    stack, x = Stack(n_blocks=3, norm=norm).requires_grad_(False), tokens(shape=(1, 2, D))
    stack.mixer.requires_grad_()
    with use_backend("triton"), saved_storages(2 * D) as kept:
        state = stack.mixer.start(x)
        for site in range(6):
            state = stack.mixer.write(state, site, torch.tanh(stack.read(state, site)))
        out = stack.mixer.finish(state)
    full = [size for size in kept.values() if size == 4 * x.numel()]
    assert len(full) <= 2 * 7 + 1
    assert len(kept) - len(full) <= 7 + 2  # logits, and the queries
    assert out.requires_grad


def test_without_gradients_nothing_is_kept() -> None:
    """no_grad gives the bits that training gives, and keeps nothing."""
    stack, x = Stack(norm=True, ways=2), tokens()
    with use_backend("triton"):
        expected = stack(x)
        with torch.no_grad(), saved_storages(1) as kept:
            assert torch.equal(stack(x), expected)
    assert not kept


@pytest.mark.parametrize("name", ["output", "source", "embedding", "read"])
def test_a_change_in_place_raises(name: str) -> None:
    """What the backward needs is kept by reference: writing to it in between is an error, never a wrong gradient."""
    stack, x = Stack(), tokens()
    with use_backend("triton"):
        state = stack.mixer.start(first := x * 1)
        h = stack.read(state, 0)
        made = stack.sublayer(0, h * 1)
        state = stack.mixer.write(state, 0, made * 1)
        for site in range(1, 4):
            state = stack.step(state, site)
        out = stack.mixer.finish(state)
    changed = {"output": state.blocks[1], "source": state.blocks[2], "embedding": first, "read": h}[name]
    with torch.no_grad():
        changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_state_read_after_its_graph_is_gone() -> None:
    """A second backward through freed nodes is PyTorch's error, also where a read only leaves its gradient with them."""
    stack, x = Stack(norm=True), tokens()
    with use_backend("triton"):
        state = stack.mixer.start(x)
        for site in range(3):
            state = stack.step(state, site)
        stack.read(state, 3).sum().backward()
        again = stack.read(state, 3).sum()
    with pytest.raises(RuntimeError, match="second time"):
        again.backward()


def test_a_tensor_of_a_state_has_the_right_gradient_or_none() -> None:
    """Asking for the gradient of what a state holds: right where it is in the graph, otherwise PyTorch's own error."""
    for backend in ("triton", "reference"):
        stack, x = Stack(norm=True), tokens()
        with use_backend(backend):
            state = stack.mixer.start(x)
            for site in range(3):
                state = stack.step(state, site)
            held = [t for t in pytree.tree_leaves(state) if t is not None]
            out = stack.mixer.finish(stack.step(state, 3))
        if backend == "triton":
            got = []
            for t in held:
                try:
                    got.append(torch.autograd.grad(out, t, cotangent(out), retain_graph=True)[0])
                except RuntimeError as error:
                    assert "not have been used in the graph" in str(error)  # noqa: PT017
                    got.append(None)
    expected = torch.autograd.grad(out, held, cotangent(out))
    assert got[-1] is not None  # what was written last
    assert_near(
        [g for g in got if g is not None], [e for g, e in zip(got, expected, strict=True) if g is not None], 2e-6
    )


PTX = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from depthmix.ops.depth_attention.kernels import layer_backward, pair, read, source_backward, tiling

OTHERS = {"N": "i64", "n": "i32", "stacked": "i32", "C": "i32", "eps": "fp32", "out_eps": "fp32"}
OTHERS |= dict.fromkeys(("table", "sources", "readers"), "*i64") | dict.fromkeys(("u", "gain", "g0", "g1", "g2", "s", "lse", "part"), "*fp32")
OTHERS |= dict.fromkeys(("bank0", "bank1", "bank2", "bank3", "weights", "before"), "*fp32")
for name, constants in eval(sys.argv[1]):
    fn = next(getattr(m, name) for m in (read, source_backward, tiling, layer_backward, pair) if hasattr(m, name))
    constants = {p.name: constants[p.name] for p in fn.params if p.is_constexpr}
    types = {p.name: "constexpr" if p.name in constants else OTHERS.get(p.name, "*bf16") for p in fn.params}
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types.values()) if t.startswith("*")}
    source = ASTSource(fn=fn, signature=types, constexprs=constants, attrs=aligned)
    warps = max(1, constants["D"] // 1024)
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"], end="----")
"""
# Rows of 256: each of a warp's 32 lanes holds 16 bytes of a row of bf16, the least that can be loaded as one.
CONSTANTS = {
    "WAYS": 2,
    "ADD": 0,
    "STORE_SUM": True,
    "STACK": False,
    "VALUE_NORM": False,
    "BANK": False,
    "NORM": True,
    "KEEP": 2,
    "STAGES": 1,
    "S": 2,
    "SPLIT": True,
    "PREFETCH": 2,
    "G": 16,
    "LEVELS": 3,
    "NEAR": 3,
    "LANES": 32,
    "BN": 32,
    "ROWS": 4,
    "STEP": 4,
    "NEWEST": False,
    "HAS_G": True,
    "HAS_BEFORE": True,
    "NEED_A": True,
    "NEED_B": True,
}
KERNELS = ("_read_kernel", "_source_backward_kernel", "_bank_kernel", "_read_known_kernel", "_layer_backward_kernel")
COMPILED = [(kernel, CONSTANTS | {"D": 256, "BD": 256, "C": 1, "K": 256, "ALIGNED": True}) for kernel in KERNELS]
COMPILED += [(kernel, COMPILED[0][1] | {"ALIGNED": False}) for kernel in KERNELS[:2]]
ALONE = {
    "KEEP": 0,
    "WAYS": 1,
    "ADD": 1,
    "NEWEST": True,
    "D": 256,
    "BD": 256,
    "C": 1,
    "K": 256,
    "ALIGNED": True,
}
COMPILED += [(kernel, CONSTANTS | ALONE) for kernel in ("_read_kernel", "_bank_kernel", "_read_known_kernel")]
OF_LAYERS = {"ADD": 1, "STORE_SUM": False, "STACK": True, "VALUE_NORM": True, "WAYS": 3, "KEEP": 1}
COMPILED += [(kernel, COMPILED[0][1] | OF_LAYERS) for kernel in ("_read_kernel", "_layer_backward_kernel")]
IN_PIECES = {"D": 512, "C": 2}
COMPILED += [(kernel, COMPILED[0][1] | IN_PIECES) for kernel in ("_read_kernel", "_layer_backward_kernel")]
COMPILED += [(kernel, COMPILED[0][1]) for kernel in ("_pair_read_kernel", "_pair_backward_kernel", "_add_up_kernel")]


def test_rows_are_loaded_sixteen_bytes_wide() -> None:
    """Compiled for an H100, without one: rows of bf16 come in 16-byte loads, unless nothing is known of their alignment."""
    for (kernel, constants), code in zip(COMPILED, compiled_in_its_own_process(PTX, COMPILED), strict=True):
        narrow = "ld.global.b16" in code or "ld.global.v2.b32" in code or "ld.global.v2.b16" in code
        assert narrow != constants["ALIGNED"], (kernel, constants)
        assert "ld.global.v4.b32" in code or narrow, (kernel, constants)
        assert ("prefetch.global.L2" in code) == (kernel == "_source_backward_kernel"), kernel
