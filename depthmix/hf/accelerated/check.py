"""Compare an accelerated layer with the layer of transformers on a few random tokens: outputs and gradients, on the CPU in fp32.

Both run with the layer's own mixing weights, a little changed, so that nothing is hidden by an initial state such as equal
coefficients. Products with fixed numbers stand for attention and MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.hf.accelerated.family import Family
from depthmix.ops import use_backend

BATCH, LENGTH = 2, 3


def largest_difference(family: Family, layer: Any, own: Any) -> float:
    """Return the largest relative difference of an output or a gradient between a layer of transformers and ours.

    own: our class for this layer. Infinity if the two call their sublayers with different arguments or return different things.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"), use_backend("reference"):
        generator = torch.Generator("cpu").manual_seed(0)
        shell = _shell(family, layer, generator)
        shapes = family.token_shapes(layer)
        x = [None if s is None else torch.randn(BATCH, LENGTH, *s, generator=generator) for s in shapes]
        expected, expected_calls = _results(shell, x)
        shell.__class__ = own
        found, calls = _results(shell, x)
    if calls != expected_calls or [t.shape for t in found] != [t.shape for t in expected]:
        return float("inf")
    differences = [(a - b).norm() / b.norm().clamp(min=1e-30) for a, b in zip(found, expected, strict=True)]
    worst = torch.stack(differences).max().item()
    return worst if worst == worst else float("inf")


class _Sublayer(nn.Module):
    """Multiply by fixed numbers, and remember how it is called. Each further input has the numbers in another order."""

    def __init__(self, factors: Tensor, outputs: int) -> None:
        super().__init__()
        self.factors, self.outputs, self.calls = factors, outputs, []  # type: ignore[var-annotated]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, *rest = (*args, *(kwargs.pop("hidden_states"),)) if "hidden_states" in kwargs else args
        self.calls.append((len(rest), sorted(kwargs)))
        inputs = [t for t in (x, *rest, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
        factors = self.factors.repeat(x.shape[-1] // len(self.factors))
        y = torch.stack([t * factors.roll(k) for k, t in enumerate(inputs)]).sum(0)
        return (y, *[None] * (self.outputs - 1)) if self.outputs else y


def _shell(family: Family, layer: Any, generator: torch.Generator) -> Any:
    """Return a layer of transformers with copies of the mixing modules and simple sublayers."""
    shell = _bare(layer)
    for name, child in layer.named_children():
        if name in family.mixing:
            setattr(shell, name, _copy(child, generator))
        else:
            factors = 1.0 + 0.5 * torch.randn(family.dim(layer), generator=generator)
            setattr(shell, name, _Sublayer(factors, family.outputs(layer, name)))
    return shell.eval()


def _bare(module: nn.Module) -> Any:
    """Return a module of the same class with the same plain attributes, without weights, children and hooks."""
    kind = type(module)
    bare = kind.__new__(kind)
    nn.Module.__init__(bare)
    own = {name: value for name, value in vars(module).items() if name not in vars(bare) and not name.startswith("_")}
    bare.__dict__.update(
        {name: value for name, value in own.items() if name not in ("forward", "gradient_checkpointing")}
    )
    return bare


def _copy(module: nn.Module, generator: torch.Generator) -> Any:
    """Return a copy on the CPU in fp32, with slightly other weights."""
    if type(module) is not nn.Linear and hasattr(module, "in_features"):
        # An adapter or a quantised matrix, which both layers call alike.
        plain = nn.Linear(module.in_features, module.out_features, bias=False)  # type: ignore[arg-type]
        plain.weight.data = torch.randn(plain.weight.shape, generator=generator) * plain.in_features**-0.5
        return plain
    bare = _bare(module)
    for name, p in module._parameters.items():
        if p is None:
            bare.register_parameter(name, None)
            continue
        there = type(p) in (nn.Parameter, Tensor) and not p.is_meta
        values = p.detach().to("cpu", torch.float32) if there else torch.zeros(p.shape)
        noise = torch.randn(p.shape, generator=generator)
        bare.register_parameter(name, nn.Parameter(values + (0.2 if p.ndim < 2 else p.shape[-1] ** -0.5) * noise))
    for name, child in module.named_children():
        setattr(bare, name, _copy(child, generator))
    return bare


def _results(shell: Any, given: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Any]]:
    """Return what a layer makes of its inputs, the gradients of these and of all weights, and how sublayers were called."""
    arguments = [None if x is None else x.clone().requires_grad_() for x in given]
    inputs = [x for x in arguments if x is not None]
    for sublayer in (module for module in shell.children() if isinstance(module, _Sublayer)):
        sublayer.calls.clear()
    out = shell(*arguments)
    out = out[0] if isinstance(out, tuple) else out
    weights = (
        torch.linspace(-1.0, 1.0, out.numel()).view(out.shape).cos() * torch.arange(out.numel()).view(out.shape).sin()
    )
    grads = torch.autograd.grad((out * weights).sum(), [*inputs, *shell.parameters()], materialize_grads=True)
    calls = [list(module.calls) for module in shell.children() if isinstance(module, _Sublayer)]
    return [out.detach(), *grads], calls
