"""Mail between autograd nodes is gone when its backward pass ends, and requests that kernels cannot serve raise errors."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from depthmix.ops import backward_mail, use_backend
from ops.helpers import nodes_with_mailboxes
from ops.test_depth_attention_order import Stack, cotangent, leaves, tokens

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("quick_interpreter")
BOTH = pytest.mark.parametrize("options", [{}, {"block_size": 2, "ways": 2}], ids=str)


@BOTH
def test_gradients_of_what_a_site_reads_leave_nothing_behind(options: dict[str, Any]) -> None:
    """The node of a read whose own output is asked about does not run, whatever its readers left with it."""
    with use_backend("triton"):
        stack, x = Stack(n_blocks=2, norm=True, **options), tokens()
        state, read = stack.mixer.start(x), []
        for site in range(4):
            read.append(stack.read(state, site))
            state = stack.mixer.write(state, site, stack.sublayer(site, read[-1]))
        out = stack.mixer.finish(state)
        wanted = [h[0] if isinstance(h, tuple) else h for h in read]
        for _ in range(2):
            for h in wanted:
                torch.autograd.grad(out, h, cotangent(out), retain_graph=True)
        found = nodes_with_mailboxes(out)
        assert len(found) >= 5
        assert all(not node.mail and not getattr(node, "partial_gradient", None) for node in found)
        assert not backward_mail._open_passes


def test_a_pass_that_fails_keeps_no_graph_alive() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise MemoryError("out of memory")

    with use_backend("triton"):
        stack, x = Stack(n_blocks=3), tokens()
        out = stack(Fails.apply(x))
        node = weakref.ref(out.grad_fn)
        with pytest.raises(MemoryError):
            out.backward(cotangent(out))
    del out
    gc.collect()
    assert node() is None
    assert not backward_mail._open_passes


@BOTH
@pytest.mark.parametrize("ask", ["retain_grad", "register_hook"])
def test_the_gradient_of_a_states_tensor(options: dict[str, Any], ask: str) -> None:
    """The reference gives it; kernels never form it, and say so."""
    stack, x = Stack(n_blocks=2, **options), tokens()

    def state() -> Any:
        s = stack.mixer.start(x)
        for site in range(3):
            s = stack.step(s, site)
        return s

    with use_backend("triton"), pytest.raises(RuntimeError, match=r"gradient of a state's tensor .*\"reference\""):
        getattr(state().blocks[-1], ask)(*[print] * (ask == "register_hook"))
    with use_backend("reference"):
        s = state()
        s.blocks[-1].retain_grad()
        out = stack.mixer.finish(stack.step(s, 3))
        out.backward(cotangent(out))
        assert s.blocks[-1].grad is not None
    with use_backend("triton"), torch.no_grad():
        state().blocks[-1].clone()  # nothing to ask for


@BOTH
def test_second_derivatives_of_checkpointed_blocks(options: dict[str, Any]) -> None:
    def derivatives(around: Callable[..., Any]) -> list[Tensor | None]:
        stack, x = Stack(n_blocks=2, **options), tokens()
        state = stack.mixer.start(x)
        for site in range(4):
            state = around(stack.step, state, site)
        out = stack.mixer.finish(state)
        (g,) = torch.autograd.grad(out, x, cotangent(out), create_graph=True)
        return list(torch.autograd.grad(g.square().sum(), leaves(stack, x), allow_unused=True))

    def checkpointed(*args: Any) -> Any:
        return checkpoint(*args, use_reentrant=False)

    with use_backend("triton"), pytest.raises(RuntimeError, match=r"cannot differentiate .* twice; .*\"reference\""):
        derivatives(checkpointed)
    with use_backend("reference"):
        found = derivatives(checkpointed)
    with use_backend("triton"):
        expected = derivatives(lambda f, *args: f(*args))
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_compiled_autograd_is_refused_in_one_sentence() -> None:
    compiled_autograd = pytest.importorskip("torch._dynamo.compiled_autograd")
    torch._dynamo.reset()
    with use_backend("triton"):
        stack, x = Stack(n_blocks=1), tokens()
        out = stack(x)
        with (
            compiled_autograd._enable(torch.compile(backend="eager")),
            pytest.raises(RuntimeError, match=r"compiled autograd .*\"reference\""),
        ):
            out.backward(cotangent(out))
