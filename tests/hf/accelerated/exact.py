"""Run a model of transformers in fp64, also where its code says fp32: the truth that errors are measured against."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-300)).item()
