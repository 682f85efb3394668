"""Every kernel is launched where its tensors are, whichever device is the current one."""

import ast
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import depthmix
from depthmix.ops.gpu import launch

KERNEL_FILES = sorted(
    p for p in (Path(depthmix.__file__).parent / "ops").rglob("*.py") if "triton.jit" in p.read_text()
)


def test_no_kernel_is_launched_past_the_guard() -> None:
    """kernel[grid](...) stands in one function."""
    assert len(KERNEL_FILES) >= 5
    for path in (*KERNEL_FILES, Path(launch.__file__)):
        tree = ast.parse(path.read_text())
        kernels = {f.name for f in tree.body if isinstance(f, ast.FunctionDef) and f.decorator_list}
        calls = [n.func.value for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)]
        launched = [n.id for n in calls if isinstance(n, ast.Name) and (n.id in kernels or n.id == "kernel")]
        assert set(launched) == ({"kernel"} if path == Path(launch.__file__) else set()), path


@pytest.mark.parametrize("current", [0, 1])
def test_the_guard_is_entered_if_and_only_if_another_device_is_current(
    current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = []

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: object) -> None:
            entered.append("left")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    with launch.on_device(torch.device("cuda", 1)):
        assert entered == ([] if current == 1 else [torch.device("cuda", 1)])
    assert entered == ([] if current == 1 else [torch.device("cuda", 1), "left"])
    with launch.on_device(torch.device("cpu")):
        pass
    assert len(entered) == (0 if current == 1 else 2)


def test_kernels_and_tables_of_a_stack_are_launched_under_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, on the CPU: every launch and every table asks for the device of its tensors."""
    from ops.test_depth_attention_order import Stack, cotangent, tokens

    addresses = pytest.importorskip("depthmix.ops.gpu.addresses")
    inside, asked = [0], []

    class Guard:
        def __init__(self, device: torch.device) -> None:
            asked.append(device)

        def __enter__(self) -> None:
            inside[0] += 1

        def __exit__(self, *_: object) -> None:
            inside[0] -= 1

    interpreter = pytest.importorskip("triton.runtime.interpreter")
    run, launches = interpreter.GridExecutor.__call__, []

    def counted(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        launches.append(inside[0])
        return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
    for module in (launch, addresses):
        monkeypatch.setattr(module, "on_device", Guard)
    x = tokens(shape=(1, 1, 8))
    with depthmix.ops.use_backend("triton"):
        out = Stack(n_blocks=2, norm=True, dim=8)(x)
        out.backward(cotangent(out))
    assert launches
    assert all(depth == 1 for depth in launches)
    assert len(asked) > len(launches)  # tables too
    assert set(asked) == {x.device}


def test_a_kernel_that_another_thread_is_loading_is_loaded_and_launched_again() -> None:
    """As Triton behaves on a GPU (tests/gpu/test_threads_on_gpu.py): refused, and ready once what was compiled is indexed."""
    triton = pytest.importorskip("triton")
    calls: list[Any] = []

    class Loading(triton.JITFunction):
        def __init__(self, error: Exception) -> None:
            self.error = error

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self.start

        def start(self, *given: Any, **options: Any) -> None:
            calls.append((given, options))
            if "loaded" not in calls:
                raise self.error

        def warmup(self, *given: Any, grid: tuple[int, ...], **options: Any) -> Any:
            calls.append((given, options))
            return self

    class Compiled(Loading):
        def warmup(self, *given: Any, grid: tuple[int, ...], **options: Any) -> Any:
            calls.append((grid, *given, options))

            class Ready:
                def __getitem__(self, grid: tuple[int, ...]) -> None:
                    calls.append("loaded")

            return Ready()

    x = torch.zeros(1)
    launch.launch(Compiled(TypeError("must be int, not None")), (2,), x, 3, N=4)
    assert calls == [((3,), {"N": 4}), ((2,), 3, {"N": 4}), "loaded", ((3,), {"N": 4})]
    calls.clear()
    with pytest.raises(TypeError, match="something else"):
        launch.launch(Loading(TypeError("something else")), (2,), x, 3, N=4)
    with pytest.raises(ValueError, match="another"):
        launch.launch(Loading(ValueError("another")), (2,), x, 3, N=4)


def of_triton(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """Return the key by which Triton itself looks for a variant, as if for an H100."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    _, specialization, others = bind(*arguments, **options)
    return repr((specialization, others))


def example(table, x, y, n, rows, tokens, eps, scale: Any, D, STORE, num=3):  # type: ignore[no-untyped-def]
    """Stand for a kernel: only its signature is looked at."""


def jit_function() -> Any:
    triton = pytest.importorskip("triton")
    constant = triton.language.constexpr
    wide = triton.language.int64
    example.__annotations__.update(D=constant, STORE=constant, num=constant, n=wide, tokens=wide)
    return triton.runtime.jit.JITFunction(example, do_not_specialize=["rows", "tokens"])


def test_launches_with_one_key_are_one_variant_of_tritons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of all kinds, the integers at which Triton compiles something else, and integers in the places of floats."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    kernel = jit_function()
    table = torch.zeros(8, dtype=torch.int64)
    rows = [torch.zeros(32, dtype=dtype)[start:] for dtype in (torch.float32, torch.bfloat16) for start in (0, 1, 16)]
    integers = [0, 1, 2, 15, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 - 16, 2**31 + 16, -(2**31), -(2**31) - 1, 2**40]
    calls: list[tuple[Any, ...]] = [(table, x, rows[0], 7, 3, 5, 1e-6, 2.0) for x in rows]
    calls += [(table, x, x, 7, 3, 5, 1e-6, 2.0) for x in rows]
    calls += [(table, rows[0], x, n, n, n, 1e-6, n) for x, n in itertools.product(rows[:2], integers)]
    calls += [(table, rows[0], x, n, n, n, n, 1e-6) for x, n in itertools.product(rows[:2], integers)]
    calls += [(table, rows[0], rows[0], n, m, 5, 0.5, 1.0) for n, m in itertools.product(integers, integers)]
    variants: dict[Any, str] = {}
    for call, settings in itertools.product(calls, ({"D": 64, "STORE": 1}, {"D": 64, "STORE": 0, "num_warps": 4})):
        key, numbers = launch.variant(kernel, torch.device("cuda", 0), call, settings)
        assert key is not None
        assert numbers == [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in call]
        assert variants.setdefault(key, of_triton(kernel, call, settings)) == of_triton(kernel, call, settings)
    assert 40 < len(variants) < len(calls)
    assert len(set(variants.values())) > 20


def test_tensors_on_the_cpu_are_left_to_triton() -> None:
    """Triton refuses them with an error. Their addresses mean nothing to a GPU."""
    arguments = (*[torch.zeros(8)] * 3, 7, 3, 5, 1e-6, 2.0)
    assert launch.variant(jit_function(), torch.device("cuda", 0), arguments, {"D": 64, "STORE": 1})[0] is None


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((1, 2, 3, 4, 5, 6, 7, 8, 64), {"STORE": 1, "num": 3}),  # a constant whose value is not in the key
        (
            (1, 2, 3, 4, 5, 6, 7),
            {"scale": 1.0, "D": 64, "STORE": 1, "num": 3},
        ),  # an argument that would never change again
        ((1, 2, 3, 4, 5, 6, 7, 8), {"D": 64, "STORE": 1}),  # a constant that has a default
        ((1, 2, 3, 4, 5, 6, 7, True), {"D": 64, "STORE": 1, "num": 3}),  # neither a tensor nor a number
    ],
)
def test_other_calls_are_left_to_triton(
    arguments: tuple[Any, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_compiled", {})
    launch.remember(jit_function(), object(), torch.device("cuda", 0), arguments, options)
    assert not launch._compiled


class Recorded:
    """Stand for what Triton compiled: keep the launches."""

    function, packed_metadata = 17, "metadata"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def run(self, *given: Any) -> None:
        self.launches.append(given)


def test_a_second_launch_passes_its_own_addresses_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the first launch is left in the second: neither addresses nor numbers, nor the grid, nor the stream."""
    kernel, compiled, started, stream = jit_function(), Recorded(), [], [3]
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(launch, "current_stream_handle", lambda device: stream[0])
    monkeypatch.setattr(launch, "start", lambda *given: started.append(given) or compiled)
    settings = {"D": 64, "STORE": 1, "num": 3, "num_warps": 4}

    def call(seed: int) -> tuple[Any, ...]:
        tensors = [torch.zeros(64) for _ in range(2)]
        arguments = (tensors[0], tensors[1], tensors[1], 17 + seed, 3, 5 + seed, 0.5 + seed, 2.0)
        launch.launch(kernel, (4 + seed, 2), tensors[0], *arguments, **settings)
        first, second = (t.data_ptr() for t in tensors)
        return 4 + seed, 2, 1, stream[0], first, second, second, 17 + seed, 3, 5 + seed, 0.5 + seed, 2.0

    call(0)
    assert (len(started), compiled.launches) == (1, [])
    for seed in (2, 4):
        stream[0] = seed
        x, y, z, handle, *arguments = call(seed)
        expected = (x, y, z, handle, 17, "metadata", None, None, None, *arguments, 64, 1, 3)
        assert compiled.launches[-1] == expected
    assert (len(started), len(compiled.launches)) == (1, 2)
    kernel.add_pre_run_hook(lambda *given, **options: None)
    call(6)
    assert len(started) == 2
