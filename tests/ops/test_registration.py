"""Operators that are called past PyTorch's dispatcher: where nobody watches, and nowhere else."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from depthmix.ops import depth_attention, registration, use_backend
from depthmix.ops.depth_attention import op

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")


@pytest.fixture
def passed_by(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the operators that were called past the dispatcher, as they come."""
    names: list[str] = []
    for name, run in registration._implementations.items():
        monkeypatch.setitem(
            registration._implementations, name, lambda *a, name=name, run=run: (names.append(name), run(*a))[1]
        )
    mixtures = op._mixtures_by_kernel()
    monkeypatch.setattr(
        op, "_mixtures_by_kernel", lambda: lambda *a, **k: (names.append("mixtures"), mixtures(*a, **k))[1]
    )
    return names


class Own(Tensor):
    """A subclass, which might dispatch operators in its own way."""


def read(x: Tensor) -> Any:
    with use_backend("triton"):
        return depth_attention(torch.ones(4), [x, 2 * x])


def test_an_operator_that_nobody_watches_passes_by_with_the_same_result(passed_by: list[str]) -> None:
    x = torch.randn(3, 4)
    watched = read(x.requires_grad_()).detach()
    with torch.no_grad():
        assert torch.equal(read(x.detach()), watched)
    # With gradients it is inside an autograd function, where nothing is recorded.
    assert passed_by == ["depth_read", "mixtures"]


def test_modes_and_subclasses_see_the_operator(passed_by: list[str]) -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, 4)
    with torch.no_grad():
        with Watch():
            read(x)
        assert any("depth_read" in name for name in seen)
        with FakeTensorMode() as mode:
            assert read(mode.from_tensor(x)).shape == (3, 4)
        for query, sources in (
            (torch.ones(4).as_subclass(Own), [x, 2 * x]),
            (torch.ones(4), [x, 2 * x.as_subclass(Own)]),
        ):
            with use_backend("triton"):
                torch.testing.assert_close(depth_attention(query, sources), read(x))
    assert passed_by == ["mixtures"] * 2
    assert not registration._is_plain([x, x.as_subclass(Own)])
    assert not registration._is_plain(x.as_subclass(Own))
    assert registration._is_plain([x, torch.nn.Parameter(x)])
