"""Every kernel is launched where its tensors are, whichever device is the current one."""

import ast
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
