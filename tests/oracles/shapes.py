"""Every parameter's name, shape and initial value (docs/reference/rules.md). options: complete, DEFAULTS[name] | {...}."""

import torch
from torch import Tensor

from . import MODULES
from .blocks import Blocks
from .tables import full


def shapes(name: str, options: dict, dim: int, blocks) -> dict[str, tuple[int, ...]]:
    """Every parameter's state_dict name and shape."""
    return {key: shape for key, (shape, _) in MODULES[name].parameters(options, dim, Blocks(blocks)).items()}


def initial(name: str, options: dict, dim: int, blocks) -> dict[str, Tensor | None]:
    """Every parameter's initial value, fp64; None where it is random (W_T, phi with init="uniform", A, W_1)."""
    out = {}
    for key, (shape, value) in MODULES[name].parameters(options, dim, Blocks(blocks)).items():
        out[key] = None if value is None else value(shape) if callable(value) else full(shape, value)
    return out


def random_parameters(name: str, options: dict, dim: int, blocks, seed: int = 0) -> dict[str, Tensor]:
    """The initial values plus noise, so that nothing stays at a special point; fp64, requiring grad."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for key, value in initial(name, options, dim, blocks).items():
        shape = shapes(name, options, dim, blocks)[key]
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if key.startswith("b") and name == "mhc":
            value = full(shape, 0)  # -8 would hide the residual map
        out[key] = ((0 if value is None else value) + 0.4 * noise).requires_grad_()
    return out
