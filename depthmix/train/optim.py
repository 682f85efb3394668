"""Which parameters decay, which optimizer takes them, and the learning rate over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.config import TrainConfig
from depthmix.errors import UserError
from depthmix.mixers.decay import decays
from depthmix.names import nearest


def hidden_matrices(model: nn.Module) -> set[str]:
    """The weights Muon is for: those of linear layers between activations, so not the head's (nor an embedding's)."""
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not getattr(model, "head", None)]
    return {f"{n}.weight" for n in linear}


class AdamW(torch.optim.AdamW):
    """torch's AdamW, given of divided parameters what is here: it works entry by entry, and to find that out takes torch's dispatch
    longer than the update. Its state is divided as the parameters are, and saved so.
    """

    def _init_group(self, group: dict[str, Any], params: Any, grads: Any, *states: Any) -> bool:
        """Fill lists with what an update takes, in the order of the parameters."""
        is_complex = super()._init_group(group, params, grads, *states)
        pairs = zip(params, grads, strict=True)
        # A gradient that is divided in another way is left to torch.
        if all(hasattr(p, "to_local") and p.placements == g.placements for p, g in pairs):
            for tensors in (params, grads, *states):  # of which the counts of steps are never divided
                tensors[:] = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return is_complex


class Muon(torch.optim.Muon):
    """torch's Muon, with its Newton-Schulz iteration in fp32 on a CPU: where bf16 is emulated that is a hundred times faster."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; closures are left to torch."""
        if closure is not None or any(p.device.type != "cpu" for g in self.param_groups for p in g["params"]):
            return super().step(closure)
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                mean = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                update = p.grad.lerp(mean, momentum) if group["nesterov"] else mean
                update = _orthogonal(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                scale = _scale_of_update(p.shape[0], p.shape[1], group["adjust_lr_fn"])
                p.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * scale)
        return None


def _scale_of_update(rows: int, columns: int, adjust_lr_fn: str | None) -> float:
    """Keller Jordan's factor, or Moonshot's, with which an update is as large as AdamW's; torch has refused anything else."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _orthogonal(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """About U Vᵀ of the matrix U S Vᵀ."""
    a, b, c = coefficients
    tall = len(x) > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def build_optimizers(
    model: nn.Module,
    config: TrainConfig,
    whole: nn.Module | None = None,
    title: Callable[[str], str] = lambda name: name,
) -> dict[str, torch.optim.Optimizer]:
    """AdamW for everything that trains, or Muon for the hidden matrices and AdamW for the rest.

    whole: the model that this one is a part of; title: what a parameter is called there, which is what groups match.
    """
    whole = whole or model
    named, decay = {n: p for n, p in model.named_parameters() if p.requires_grad}, decays(model)
    said = own_settings([n for n, p in whole.named_parameters() if p.requires_grad], config.groups)
    own = {name: said[title(name)] for name in named if title(name) in said}
    matrices = hidden_matrices(whole) if config.optimizer == "muon" else set()
    fused = next(iter(named.values())).device.type == "cuda"
    rest, hidden = ({n: p for n, p in named.items() if (title(n) in matrices) == taken} for taken in (False, True))
    optimizers: dict[str, torch.optim.Optimizer] = {}
    if rest:
        optimizers["adamw"] = AdamW(
            _groups(rest, decay, config.weight_decay, config.lr, own),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            fused=fused,
        )
    if hidden:
        groups = _groups(hidden, decay, config.weight_decay, config.muon_lr, own)
        optimizers["muon"] = Muon(groups, lr=config.muon_lr)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def check_groups(groups: Sequence[Mapping[str, Any]]) -> None:
    """UserError for a group that no model can have."""
    for group in groups:
        for key in group:
            if key not in ("match", "lr", "weight_decay"):
                what = "a group has match, lr (a factor) and weight_decay"
                raise UserError(f"groups: unknown key {key!r}; {what}{nearest(key, ('match', 'lr', 'weight_decay'))}")
        if not isinstance(group.get("match"), str) or len(group) < 2:
            raise UserError(f"groups: a group needs match, a pattern, and lr or weight_decay, got {dict(group)!r}")
        for key in ("lr", "weight_decay"):
            value = group.get(key, 0.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise UserError(f"groups: {key} must be a finite number of at least 0, got {value!r}")


def own_settings(names: Iterable[str], groups: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameters that the groups name, each with the first group that matches; UserError for one that matches nothing."""
    names = list(names)
    for group in groups:
        if group["match"] == "mixer.*":  # whatever the rule has: a plain arm of a comparison has nothing
            continue
        if not any(fnmatchcase(name, group["match"]) for name in names):
            near = nearest(group["match"].rstrip("*."), names, cutoff=0.3)
            raise UserError(f"groups: {group['match']!r} matches no parameter of this model{near}")
    first = {name: next((g for g in groups if fnmatchcase(name, g["match"])), None) for name in names}
    return {name: group for name, group in first.items() if group is not None}


def _groups(
    named: Mapping[str, Tensor],
    decay: dict[str, bool],
    weight_decay: float,
    peak_lr: float,
    own: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    found: dict[tuple[Any, float, float], list[tuple[str, Tensor]]] = {}
    for on in (True, False):
        for name, p in named.items():
            if decay[name] == on:
                said, mesh = own.get(name, {}), getattr(p, "device_mesh", None)
                setting = said.get("lr", 1.0), said.get("weight_decay", weight_decay if on else 0.0)
                # An optimizer takes parameters together that are divided among the same processes.
                found.setdefault((mesh, *setting), []).append((name, p))
    return [{"params": chosen, "weight_decay": d, "lr": peak_lr * factor} for (_, factor, d), chosen in found.items()]


def set_learning_rate(optimizers: dict[str, torch.optim.Optimizer], factor: float) -> None:
    """Set every group's learning rate to its peak times the factor."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def optimizer_tensors(optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimizers' state as named tensors: `adamw/exp_avg/<parameter>`."""
    tensors = {}
    for key, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                for field, value in optimizer.state.get(p, {}).items():
                    tensors[f"{key}/{field}/{name}"] = torch.as_tensor(value)
    return tensors


def optimizer_place(optimizers: dict[str, torch.optim.Optimizer], path: str, shape: torch.Size) -> Tensor | None:
    """A tensor for one that `optimizer_tensors` gave under this name, divided as its parameter is; None if there is no such parameter."""
    for optimizer in (o for key, o in optimizers.items() if path.startswith(f"{key}/")):
        for group in optimizer.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if path.split("/", 2)[-1] == name:
                    return torch.zeros_like(p) if shape == p.shape else torch.zeros(shape)
    return None


def load_optimizer_tensors(optimizers: dict[str, torch.optim.Optimizer], tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave; ValueError where it does not fit."""
    places = {}
    for key, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                places[key, name] = (optimizer, group, p)
    for path, value in tensors.items():
        key, field, name = path.split("/", 2)
        if (key, name) not in places:
            raise ValueError(f"{path} belongs to no parameter of this model")
        optimizer, group, p = places[key, name]
        if value.ndim and value.shape != p.shape:
            raise ValueError(f"{path} has shape {list(value.shape)}, expected {list(p.shape)}")
        on_cpu = value.ndim == 0 and not group.get("fused")  # AdamW counts its steps on the CPU unless it is fused
        optimizer.state[p][field] = value.to("cpu" if on_cpu else p.device).clone()
