"""Each private name of torch, used for what depthmix uses it for: a release that renames one fails here, and says which."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from torch.utils.checkpoint import checkpoint

from depthmix.ops import torch_internals
from depthmix.ops.torch_internals import (
    UncompiledMode,
    autograd_is_compiled,
    backward_pass,
    calls_only_its_forward,
    constant_for_compiler,
    current_stream_handle,
    dispatcher_is_idle,
    inside_sharded_model,
    node_will_run,
    pytree,
    saving_is_hooked,
    transformed,
    when_pass_ends,
)
from small_cases import each


class Watch(torch.autograd.Function):
    """The identity, which asks in its backward."""

    asked: list[Any] = []
    about: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        Watch.asked.append((backward_pass(), None if Watch.about is None else node_will_run(Watch.about)))
        return g


@pytest.fixture
def asked() -> list[Any]:
    Watch.asked, Watch.about = [], None
    return Watch.asked


def test_every_name_is_tested_here() -> None:
    functions = {name for name, f in vars(torch_internals).items() if inspect.isfunction(f)}
    assert functions | {"UncompiledMode", "pytree"} == set(torch_internals.__all__)
    assert set(torch_internals.__all__) <= set(globals())


def test_backward_passes_have_numbers_of_their_own(asked: list[Any]) -> None:
    x = torch.ones(1, requires_grad=True)
    assert backward_pass() == -1
    for _ in range(2):
        Watch.apply(Watch.apply(x)).backward()
    first, again, second, _ = (task for task, _ in asked)
    assert first == again != second
    assert min(first, second) >= 0
    assert backward_pass() == -1


def test_a_node_says_whether_the_pass_comes_by(asked: list[Any]) -> None:
    a, b = (torch.ones(1, requires_grad=True) for _ in range(2))
    doubled, tripled = 2 * a, 3 * b
    out = Watch.apply(doubled + tripled)
    Watch.about = doubled.grad_fn
    torch.autograd.grad(out, a, retain_graph=True)
    torch.autograd.grad(out, b)
    assert [will for _, will in asked] == [True, False]


class Note(torch.autograd.Function):
    """The identity, which calls something in its backward."""

    call: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        Note.call()
        return g


def test_what_is_left_for_the_end_of_a_pass_is_called_there() -> None:
    order: list[str] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda g: order.append("gradient"))
    Note.call = lambda: when_pass_ends(lambda: order.append("end"))
    Note.apply(x).backward()
    assert order == ["gradient", "end"]


def test_compiled_autograd_is_noticed() -> None:
    from torch._dynamo import compiled_autograd

    found: list[bool] = []
    Note.call = lambda: found.append(autograd_is_compiled())
    out = Note.apply(torch.ones(1, requires_grad=True))
    out.backward(retain_graph=True)
    with compiled_autograd._enable(lambda graph: graph):
        out.backward()
    assert found[0] is False
    assert found[-1] is True
    assert not autograd_is_compiled()


def test_transforms_are_noticed() -> None:
    found = []

    def square(x: Tensor) -> Tensor:
        found.append(transformed())
        return x.square().sum()

    x = torch.ones(2)
    assert not transformed()
    torch.func.grad(square)(x)
    torch.func.vmap(square)(x)
    torch.func.jvp(square, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        square(x)
    assert found == [True] * 4
    assert not transformed()


def test_checkpointing_is_noticed() -> None:
    found = []

    def region(x: Tensor) -> Tensor:
        found.append(saving_is_hooked())
        return x.sin()

    assert not saving_is_hooked()
    checkpoint(region, torch.ones(1, requires_grad=True), use_reentrant=False)
    assert found == [True]
    assert not saving_is_hooked()


def test_the_compiler_takes_a_marked_function_for_a_constant() -> None:
    """It calls it while it traces, and never looks inside: what it cannot trace passes only if the mark is honoured."""
    calls = []

    def answer() -> int:
        torch._dynamo.graph_break()
        calls.append(None)
        return 3

    def uses(x: Tensor) -> Tensor:
        return x * answer()

    def marked(x: Tensor) -> Tensor:
        return x * constant()

    constant, x = constant_for_compiler(lambda: answer()), torch.ones(1)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(uses, fullgraph=True, backend="eager")(x)
    calls.clear()
    compiled = torch.compile(marked, fullgraph=True, backend="eager")
    assert compiled(x) == compiled(x) == 3
    assert len(calls) == 1


def test_a_mode_that_is_never_compiled_is_not_wrapped_for_the_compiler() -> None:
    class Counting(UncompiledMode):
        calls = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.calls += 1
            return function(*args, **(kwargs or {}))

    assert not hasattr(Counting.__torch_dispatch__, "__wrapped__")
    with Counting():
        assert torch.ones(2).sum() == 2
    assert Counting.calls >= 2


OWN = {
    "_forward_hooks": "register_forward_hook",
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}
GLOBAL = {
    "_global_forward_hooks": "register_module_forward_hook",
    "_global_forward_pre_hooks": "register_module_forward_pre_hook",
    "_global_backward_hooks": "register_module_full_backward_hook",
    "_global_backward_pre_hooks": "register_module_full_backward_pre_hook",
}


@each("name", [*OWN, *GLOBAL])
def test_hooks_are_where_they_are_looked_for(name: str) -> None:
    """Each way to register one is noticed, and only under the name that is listed for it."""
    assert set(OWN) == set(torch_internals._MODULE_HOOKS)
    assert set(GLOBAL) == set(torch_internals._GLOBAL_HOOKS)
    module = nn.Identity()
    assert calls_only_its_forward(module)
    owner: Any = module if name in OWN else everywhere
    handle = getattr(owner, (OWN | GLOBAL)[name])(lambda *args: None)
    assert len(getattr(owner, name)) == 1
    assert not calls_only_its_forward(module)
    handle.remove()
    assert calls_only_its_forward(module)


@each("name", torch_internals._IN_PLACE_OF_FORWARD)
def test_a_call_goes_through_what_may_be_replaced(name: str) -> None:
    module, x = nn.Identity(), torch.ones(1)
    setattr(module, name, lambda x: x + 1)
    assert module(x) == 2
    assert not calls_only_its_forward(module)


def test_sharded_modules_know_whether_a_larger_one_is_around_them(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        inner, alone = nn.Linear(2, 2), nn.Linear(2, 2)
        outer = nn.Sequential(inner)
        for module in (inner, outer, alone):
            fully_shard(module, mesh=mesh)
        assert not inside_sharded_model(inner)
        for module in (outer, alone):
            module(torch.ones(1, 2))
        assert [inside_sharded_model(m) for m in (inner, outer, alone)] == [True, False, False]
    finally:
        torch.distributed.destroy_process_group()


def test_pytrees_take_new_nodes_with_named_children() -> None:
    class Pair:
        def __init__(self, a: Any, b: Any) -> None:
            self.a, self.b = a, b

    pytree.register_pytree_node(
        Pair,
        lambda p: ([p.a, p.b], None),
        lambda children, _: Pair(*children),
        serialized_type_name="depthmix.tests.Pair",
        flatten_with_keys_fn=lambda p: ([(pytree.GetAttrKey("a"), p.a), (pytree.GetAttrKey("b"), p.b)], None),
    )
    leaves, spec = pytree.tree_flatten(Pair(1, 2))
    assert leaves == [1, 2]
    assert pytree.tree_unflatten([3, 4], spec).b == 4
    assert [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(Pair(1, 2))[0]] == [".a", ".b"]


def test_the_dispatcher_is_idle_only_where_nobody_wants_to_see_operators() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    seen: dict[str, bool] = {}

    def look(name: str, x: Tensor) -> Tensor:
        seen[name] = dispatcher_is_idle()
        return x + 1

    x = torch.ones(2)
    look("with gradients", x)
    with torch.no_grad():
        look("plain", x)
        with FlopCounterMode(display=False):
            look("dispatch mode", x)
        torch.func.vmap(lambda x: look("torch.func", x))(x)
        torch.jit.trace(lambda x: look("trace", x), x, check_trace=False)
        make_fx(lambda x: look("fx", x))(x)
        with torch.profiler.profile():
            look("profiler", x)
        torch.compile(lambda x: look("compiler", x), backend="eager", fullgraph=True)(x)
        look("plain again", x)
    assert {name for name, idle in seen.items() if idle} == {"plain", "plain again"}
    assert len(seen) == 9


def test_the_handle_of_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has its own; tests/gpu/test_launch_on_gpu.py compares it with PyTorch's public stream."""
    asked: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: (asked.append(i), 70 + i)[1], raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert current_stream_handle(torch.device("cpu")) == 0
    assert not asked
    assert [current_stream_handle(torch.device(d)) for d in ("cuda:1", "cuda:0", "cuda")] == [71, 70, 72]
