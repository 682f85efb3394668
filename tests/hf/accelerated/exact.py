"""Run a model of transformers in fp64, also where its code says fp32: the truth that errors are measured against."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hf.accelerated.small_models import BUILD, tokens

# Otherwise a rounding may select other experts.
ALL_SELECTED: dict[str, Any] = {family: {"num_experts_per_tok": 4, "index_topk": 16} for family in BUILD}
ALL_SELECTED |= {family: {"num_experts_per_tok": 4} for family in ("inkling2", "qwen4_exp")}
WIDE = {torch.float32: torch.float64, torch.float: torch.float64}


class Wide(TorchFunctionMode):
    """Make `float()` and every fp32 argument mean fp64."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(WIDE.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: WIDE.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def exact_copy(model: Any) -> Any:
    """Return a copy with the same numbers in fp64."""
    return copy.deepcopy(model).double()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.to(expected) - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def random(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_results(layer: Any, given: list[Any], cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a layer returns, and the gradients of its inputs and of all its weights."""
    given = [None if x is None else x.clone().requires_grad_() for x in given]
    inputs, out = [x for x in given if x is not None], layer(*given)
    out = out[0] if isinstance(out, tuple) else out
    names = [*[f"input {i}" for i in range(len(inputs))], *[name for name, _ in layer.named_parameters()]]
    grads = torch.autograd.grad(out, [*inputs, *layer.parameters()], cotangent)
    return {"out": out.detach(), **dict(zip(names, grads, strict=True))}


def wide(inputs: list[Any]) -> list[Any]:
    return [None if x is None else x.double() for x in inputs]


def assert_as_exact(found: Any, original: Any, exact: Any, dtype: torch.dtype, times: float = 1.5) -> None:
    """Our error is at most 1.5 times the original's, or about a rounding step more. In a few numbers chance counts for more.

    With times near 1 there is no such step: both round at the same places.
    """
    assert found.keys() == original.keys() == exact.keys()
    step = max(torch.finfo(dtype).eps / 2, 5e-7) if times > 1.1 else 0.0
    for name, truth in exact.items():
        ours, theirs = relative_error(found[name], truth), relative_error(original[name], truth)
        allowed = times * theirs if truth.numel() > 16 or times <= 1.1 else 3.0 * theirs
        assert ours <= allowed + step, f"{name}: ours {ours:.1e}, theirs {theirs:.1e}"


def model_results(model: Any, cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a model's logits, and the gradients of all its weights as one vector."""
    model.zero_grad()
    out = model(input_ids=tokens().to(model.device)).logits
    (out * cotangent.to(out)).sum().backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return {"logits": out.detach(), "grads": grads}
