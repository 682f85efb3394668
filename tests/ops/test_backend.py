"""Choosing a backend, and what PyTorch sees of the kernels: operators, one compiled graph, selective checkpointing."""

import asyncio
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import forking
from depthmix import Decoder, DecoderConfig
from depthmix.ops import BackendError, depth_attention, use_backend
from depthmix.ops import backend as backend_module
from ops.helpers import assert_near, rand
from ops.test_depth_attention import naive
from ops.test_depth_attention_order import D, Stack, tokens

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")
FP32 = torch.float32
Q, V = torch.ones(8), [torch.ones(2, 3, 8), torch.zeros(2, 3, 8)]


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the project's own operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "depthmix":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def kernels_run(**options: Any) -> bool:
    with Calls() as calls:
        depth_attention(Q, V, **options)
    return "depth_read" in calls.names


def test_an_argument_or_a_context_forces_a_backend() -> None:
    """Without either the CPU has the reference; the argument has the last word; contexts nest and end, also by an exception."""
    assert not kernels_run()
    assert kernels_run(backend="triton")
    with use_backend("triton"):
        assert kernels_run()
        assert not kernels_run(backend="reference")
        with use_backend("reference"):
            assert not kernels_run()
            assert kernels_run(backend="triton")
            with use_backend(None):
                assert not kernels_run()
        assert kernels_run()
        with pytest.raises(KeyError), use_backend("reference"):
            raise KeyError
        assert kernels_run()
    assert not kernels_run()


def test_the_context_reaches_a_mixer() -> None:
    """A pass keeps the backend it was started with, to its end."""
    stack, x = Stack(n_blocks=1), tokens()
    for backend in ("triton", "reference"):
        with use_backend(backend):
            state = stack.mixer.start(x)
        with Calls() as calls:
            stack.read(state, 0)
        assert ("depth_read" in calls.names) == (backend == "triton")


def test_a_context_is_of_one_thread() -> None:
    """Two threads that overlap, and the thread that started them, see what they asked for alone; nothing stays forced."""
    both, seen = threading.Barrier(2, timeout=60), dict[str, list[bool]]()
    kernels = threading.Lock()  # the interpreter runs one at a time

    def run(backend: str) -> None:
        with use_backend(backend):
            both.wait()
            with kernels:
                seen[backend] = [kernels_run()]
            both.wait()
            if backend == "triton":
                both.wait()  # the other one has left its context
                with kernels:
                    seen[backend] += [kernels_run()]
        if backend == "reference":
            both.wait()
        with kernels:
            seen[backend] += [kernels_run()]

    with use_backend("triton"):
        threads = [threading.Thread(target=run, args=(b,)) for b in ("reference", "triton")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert kernels_run()
    assert seen == {"reference": [False, False], "triton": [True, True, False]}
    assert not kernels_run()


def test_a_context_is_of_one_task() -> None:
    """Of two asyncio tasks in one thread, the one that entered first leaves first."""
    seen: list[bool] = []

    async def task(backend: str, entered: asyncio.Event, left: asyncio.Event) -> None:
        with use_backend(backend):
            entered.set()
            await left.wait()
            seen.append(kernels_run())

    async def main() -> None:
        entered, left = ([asyncio.Event(), asyncio.Event()] for _ in range(2))
        tasks = []
        for k, backend in enumerate(("triton", "reference")):
            tasks.append(asyncio.create_task(task(backend, entered[k], left[k])))
            await entered[k].wait()
        seen.append(kernels_run())
        for k in range(2):
            left[k].set()
            await tasks[k]

    asyncio.run(main())
    assert seen == [False, True, False]
    assert (backend_module._thread.forced, backend_module._thread.open_contexts) == (None, 0)
    assert torch._C._is_multithreading_enabled()


def test_a_backward_pass_inside_runs_in_the_thread_that_called_it() -> None:
    """PyTorch's own threads, which have the backward of CUDA tensors, have another context."""
    for backend in ("reference", None):
        with use_backend("reference"):
            with use_backend(backend):
                assert not torch._C._is_multithreading_enabled()
            assert not torch._C._is_multithreading_enabled()
        assert torch._C._is_multithreading_enabled()
    with torch.autograd.set_multithreading_enabled(False):
        with use_backend("reference"):
            pass
        assert not torch._C._is_multithreading_enabled()


@pytest.mark.uncovered
def test_what_is_compiled_follows_the_context_of_its_thread(depth_read: Any) -> None:
    """Compiled for either backend, in one thread or two, and with the context inside of what is compiled."""
    torch._dynamo.reset()
    ran: list[bool] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        kernels = any("depth_read" in str(node.target) for node in graph.graph.nodes)
        return lambda *given: (ran.append(kernels), graph(*given))[1]

    compiled = torch.compile(lambda: depth_attention(Q, V) + 1, fullgraph=True, backend=compiler)
    with use_backend("triton"):
        compiled()
        thread = threading.Thread(target=compiled)
        thread.start()
        thread.join(60)
        compiled()
    compiled()
    assert ran == [True, False, True, False]

    @torch.compile(fullgraph=True, backend=compiler)
    def inside() -> Tensor:
        with use_backend("triton"):
            return depth_attention(Q, V) + 1

    inside()
    assert ran[4:] == [True]
    assert not kernels_run()


def test_unknown_names() -> None:
    """Refused with the names there are, and nothing is changed."""
    message = "unknown backend 'cuda'; there are reference, triton"
    with pytest.raises(BackendError, match=message), use_backend("cuda"):
        pass
    with pytest.raises(BackendError, match=message):
        depth_attention(Q, V, backend="cuda")
    assert not kernels_run()


UNSUPPORTED: dict[str, tuple[Any, dict[str, Any]]] = {
    "weights": (Q, {"return_weights": True}),
    "weights of heads": (Q, {"return_weights": True, "heads": 2}),
    "an fp64 query": (Q.double(), {}),
    "fp64 queries of tokens": (torch.ones(2, 3, 8).double(), {}),
}


@pytest.mark.parametrize(("query", "options"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_the_kernels_cannot_do(query: Tensor, options: dict[str, Any]) -> None:
    """Asked for explicitly: an error that says why. Left to the operator: the reference."""
    with pytest.raises(BackendError, match="depth_attention: the triton backend cannot be used: they "):
        depth_attention(query, V, backend="triton", **options)
    with pytest.raises(BackendError, match="cannot be used"), use_backend("triton"):
        depth_attention(query, V, **options)
    depth_attention(query, V, **options)


@pytest.mark.parametrize("sources", [[t.double() for t in V], [V[0], V[1].half()]], ids=["fp64", "mixed"])
def test_dtypes_the_kernels_do_not_know(sources: list[Tensor]) -> None:
    """fp64, and sources of different dtypes."""
    with pytest.raises(BackendError, match="one dtype, float32, bfloat16 or float16"):
        depth_attention(Q, sources, backend="triton")


def python(code: str, **environment: str) -> str:
    """What a new process without Triton's interpreter prints."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    done = forking.python(code, env=clean)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_the_interpreter_there_are_no_kernels_on_the_cpu() -> None:
    """One clear error, from the operator and from a mixer; without being asked for, triton is not even imported."""
    code = """
import sys, torch, depthmix
print("triton" in sys.modules)
from depthmix.ops import BackendError, depth_attention, use_backend
from depthmix.ops import backend as backend_module
x = torch.ones(2, 8)
mixer = depthmix.create_mixer("attnres", dim=8, n_blocks=1)
depth_attention(x[0], [x]), mixer.read(mixer.start(x), 0)
print("triton" in sys.modules)
try:
    depth_attention(x[0], [x], backend="triton")
except BackendError as error:
    print(error)
try:
    with use_backend("triton"):
        mixer.start(x)
except BackendError as error:
    print(error)
"""
    imported, used, of_the_op, of_the_mixer = python(code).splitlines()
    assert imported == used == "False"
    why = "the triton backend cannot be used: kernels run on GPUs, and the tensors are on cpu"
    assert of_the_op == f"depth_attention: {why}"
    assert of_the_mixer == f"attnres: {why}"


# torch.library


@pytest.fixture(scope="module")
def depth_read(quick_interpreter: None) -> Any:
    """The operator, registered by its first use."""
    depth_attention(Q, V, backend="triton")
    return torch.ops.depthmix.depth_read


OPERATOR = {
    "one source": (1, 1, False, False),
    "sources, norm": (1, 3, False, True),
    "ways, add, norm": (2, 2, True, True),
}


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.covered
@pytest.mark.parametrize(("ways", "n", "add", "norm"), OPERATOR.values(), ids=OPERATOR)
def test_opcheck(depth_read: Any, ways: int, n: int, add: bool, norm: bool) -> None:
    """Schema, fake kernels, autograd registration and AOT dispatch are in order."""
    u, *v = [rand(ways, 8, seed=9, dtype=FP32), *[rand(2, 8, seed=i, dtype=FP32) for i in range(n + 2)]]
    u, *v = [t.requires_grad_() for t in (u, *v)]
    gain = rand(ways, 8, seed=8, dtype=FP32).requires_grad_() if norm else None
    torch.library.opcheck(depth_read, (u, v[:n], v[n] if add else None, gain, 1e-6, 1e-3, True))
    if n == 2:
        given = [None if t is None else t.detach() for t in (u, v[n] if add else None, gain)]
        torch.library.opcheck(
            depth_read, (given[0], [t.detach() for t in v[:n]], *given[1:], 1e-6, 1e-3, False), test_utils=CHECKS[:-1]
        )


@pytest.mark.parametrize(
    ("add", "norm", "keep"), [(False, True, 0), pytest.param(True, False, 2, marks=pytest.mark.covered)]
)
def test_opcheck_of_reads_that_know_something(depth_read: Any, add: bool, norm: bool, keep: int) -> None:
    """The mixture of older sources, or their logits, or that there is one; all are differentiated by what calls them.

    AOT dispatch, most of the time, is checked with one of the two forms of the arguments.
    """
    checks = {"test_utils": CHECKS[: 4 if norm else 3]}
    u, *v = [rand(3, 8, seed=9, dtype=FP32), *[rand(2, 8, seed=i, dtype=FP32) for i in range(4)]]
    rest = (v[3] if add else None, rand(3, 8, seed=8, dtype=FP32) if norm else None, 1e-6, 1e-3)
    logits = [rand(3, 2, seed=20 + i, dtype=FP32) for i in range(2)]
    one = (rest[0], None if rest[1] is None else rest[1][:1], *rest[2:])
    several = (rest[0], [] if rest[1] is None else list(rest[1].clone().split(1)), *rest[2:])
    torch.library.opcheck(torch.ops.depthmix.depth_read_known.default, (u, v[:3], logits, *several, keep), **checks)
    bank, lse = rand(2, 8, seed=30, dtype=FP32), rand(2, seed=31, dtype=FP32)
    torch.library.opcheck(torch.ops.depthmix.depth_read_near.default, (u[:1], v[:2], *one, keep, bank, lse), **checks)
    both = (rest[0], None if rest[1] is None else rest[1][:2], *rest[2:])
    torch.library.opcheck(torch.ops.depthmix.depth_read_pair.default, (u[:2], *v[:2], *both), **checks)


@pytest.mark.parametrize("layout", ["strided", "transposed"])
def test_the_operator_with_any_layout(depth_read: Any, layout: str) -> None:
    """Non-contiguous tensors are read as what they are, or refused."""
    u, v = (
        rand(3, 6, seed=9, layout=layout, dtype=FP32),
        [rand(2, 6, seed=i, layout=layout, dtype=FP32) for i in range(2)],
    )
    try:
        got = depth_read(u, v, None, None, 1e-6, 1e-6, False)[0]
    except (ValueError, RuntimeError) as error:
        assert "contiguous" in str(error)  # noqa: PT017
        return
    assert_near(got, naive(u.double(), [t.double() for t in v], kind="ways")[:-1], 2e-6)


def gradients(f: Callable[[Tensor], Tensor], x: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    out = f(x)
    return [out, *torch.autograd.grad(out.square().sum(), wanted)]


@pytest.mark.uncovered  # tracing the compiler itself takes minutes
def test_a_compiled_decoder(depth_read: Any) -> None:
    """A whole model as one graph, in training and without gradients, each compiled once; the kernels are in it.

    Three ways, and partial sums: an operator has several outputs and all its gradients. Other tokens need no other graph.
    """
    options = {"block_size": 2, "ways": 3}
    config = DecoderConfig(
        vocab_size=11, dim=16, n_blocks=1, n_heads=2, mlp_dim=16, mixer="attnres", mixer_options=options
    )
    model, ids = Decoder(config), torch.arange(3).unsqueeze(0)
    for p in model.mixer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    wanted = list(model.parameters())
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with use_backend("triton"):
        got = [gradients(compiled, given, wanted) for given in (ids, ids + 1)]
        with torch.no_grad():
            decoded = [compiled(given) for given in (ids, ids + 1)]
    assert counter.frame_count == 2
    names = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert sum("depthmix.depth_read" in name for name in names) == 2 * (model.mixer.n_sites + 1)
    with use_backend("reference"):
        expected = [gradients(model, given, wanted) for given in (ids, ids + 1)]
    for found, logits, right in zip(got, decoded, expected, strict=True):
        assert_near([*found, logits], [*right, right[0]], 1e-5)


@pytest.mark.covered
@pytest.mark.parametrize("save", [True, False])
def test_selective_checkpointing(depth_read: Any, save: bool) -> None:
    """A policy sees each read as one operator, and may keep its results or have them computed again."""
    query, (a, b, c) = rand(3, D, seed=9, dtype=FP32), [rand(2, D, seed=i, dtype=FP32) for i in range(3)]
    wanted = [t.requires_grad_() for t in (query, a, b, c)]
    seen: list[bool] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.depthmix.depth_read.default:
            seen.append(ctx.is_recompute)
            return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def forward(q: Tensor, *v: Tensor) -> Tensor:
        return torch.stack(depth_attention(q, [t.sin() for t in v], backend="triton")).tanh().sum(0)

    def exact(q: Tensor, *v: Tensor) -> Tensor:
        return torch.stack(naive(q, [t.sin() for t in v], kind="ways")[:-1]).tanh().sum(0)

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    with Calls() as calls:
        out = checkpoint(forward, *wanted, use_reentrant=False, context_fn=contexts)
        out.square().sum().backward()
    assert seen[0] is False
    assert calls.names.count("depth_read") == (1 if save else 2)
    doubles = [t.detach().double().requires_grad_() for t in wanted]
    expected = torch.autograd.grad(exact(*doubles).square().sum(), doubles)
    assert_near([t.grad for t in wanted], expected, 4e-6)
