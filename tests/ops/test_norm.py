"""Which norms a read may do itself: those of which it is certain that nothing else happens in them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from torch.nn.utils import parametrize, prune

from depthmix import create_mixer
from depthmix.ops.norm import RMSNorm, is_plain_rms_norm, rms_norm
from small_cases import each

DIM = 6
Watched = Callable[..., None]


class Louder(nn.Module):
    def forward(self, gain: Tensor) -> Tensor:
        return 2 * gain


class Shifted(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Called(nn.RMSNorm):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + 1


def own_forward(norm: nn.RMSNorm, seen: Watched, name: str = "forward") -> None:
    plain = getattr(norm, name)

    def instead(x: Tensor) -> Tensor:
        seen()
        return plain(x) + 1

    setattr(norm, name, instead)


def quantised(norm: nn.RMSNorm, seen: Watched) -> None:
    class Quantised(Tensor):
        pass

    norm.weight = nn.Parameter(norm.weight.detach().as_subclass(Quantised))
    seen()


# What people do to a module, each a function of a norm and of what must then be called.
MEDDLERS: dict[str, Callable[[Any, Watched], Any]] = {
    "forward hook": lambda n, seen: n.register_forward_hook(seen),
    "forward pre-hook": lambda n, seen: n.register_forward_pre_hook(seen),
    "full backward hook": lambda n, seen: n.register_full_backward_hook(seen),
    "full backward pre-hook": lambda n, seen: n.register_full_backward_pre_hook(seen),
    "global forward hook": lambda n, seen: everywhere.register_module_forward_hook(seen),
    "global forward pre-hook": lambda n, seen: everywhere.register_module_forward_pre_hook(seen),
    "global backward hook": lambda n, seen: everywhere.register_module_full_backward_hook(seen),
    "global backward pre-hook": lambda n, seen: everywhere.register_module_full_backward_pre_hook(seen),
    "own forward": own_forward,
    "own call": lambda n, seen: own_forward(n, seen, "_call_impl"),
    "parametrised gain": lambda n, seen: (parametrize.register_parametrization(n, "weight", Louder()), seen())[0],
    "pruned gain": lambda n, seen: (prune.random_unstructured(n, "weight", 0.5), seen())[0],
    "gain of another kind": quantised,
}


@contextmanager
def meddled(norm: nn.RMSNorm, how: str) -> Iterator[list[None]]:
    calls: list[None] = []
    handle = MEDDLERS[how](norm, lambda *args: calls.append(None))
    try:
        yield calls
    finally:
        if hasattr(handle, "remove"):
            handle.remove()


@each("how", MEDDLERS)
@each("kind", [nn.RMSNorm, RMSNorm])
def test_what_someone_does_to_a_norm_happens_in_a_read(kind: type[nn.RMSNorm], how: str) -> None:
    mixer, x = create_mixer("attnres", dim=DIM, n_blocks=1), torch.randn(2, DIM, requires_grad=True)
    norm = kind(DIM)
    assert is_plain_rms_norm(norm, DIM)
    with meddled(norm, how) as calls:
        assert not is_plain_rms_norm(norm, DIM)
        got = mixer.read(mixer.start(x), 0, norm)
        got.sum().backward()
        assert calls
        torch.testing.assert_close(got, norm(x))


@each("norm", [Shifted(DIM), Called(DIM)])
def test_a_subclass_is_called(norm: nn.RMSNorm) -> None:
    mixer, x = create_mixer("attnres", dim=DIM, n_blocks=1), torch.randn(2, DIM)
    assert torch.equal(mixer.read(mixer.start(x), 0, norm), norm(x))


@pytest.mark.parametrize("kind", [nn.RMSNorm, RMSNorm])
def test_a_patched_class_is_called(kind: type[nn.RMSNorm], monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernel libraries do it."""
    mixer, x, norm = create_mixer("attnres", dim=DIM, n_blocks=1), torch.randn(2, DIM), kind(DIM)
    monkeypatch.setattr(kind, "forward", lambda self, x: x + 1)
    assert torch.equal(mixer.read(mixer.start(x), 0, norm), x + 1)


def test_a_compiled_norm_is_still_fused() -> None:
    """Compiled sublayers and norms are how models train here: a kernel does the work of a compiled norm as of any."""
    norm = RMSNorm(DIM)
    norm.compile()
    assert is_plain_rms_norm(norm, DIM)


@each("norm", [nn.RMSNorm(DIM, elementwise_affine=False), nn.RMSNorm((1, DIM)), nn.LayerNorm(DIM)])
def test_another_norm_is_called(norm: nn.Module) -> None:
    mixer, x = create_mixer("attnres", dim=DIM, n_blocks=1), torch.randn(2, 1, DIM)
    assert torch.equal(mixer.read(mixer.start(x), 0, norm), norm(x))


def test_a_norm_of_another_width_says_so() -> None:
    mixer = create_mixer("attnres", dim=DIM, n_blocks=1)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        mixer.read(mixer.start(torch.randn(2, DIM)), 0, nn.RMSNorm(DIM + 1))


@each("shape", [(2, 5, DIM), (0, DIM), (DIM,)])
@each("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_of_reads_is_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Values and gradients of the module's, to the rounding of the dtype; second derivatives by finite differences."""
    norm = RMSNorm(DIM, eps=1e-3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    found, expected = rms_norm(x, norm.weight, 1e-3), norm(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)
    g = torch.randn_like(found)
    inputs = (x, norm.weight)
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, g), torch.autograd.grad(expected, inputs, g), **tolerance
    )
    if dtype == torch.float64:
        assert torch.autograd.gradgradcheck(lambda x, gain: rms_norm(x, gain, 1e-3), inputs)
