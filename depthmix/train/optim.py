"""Build the optimizers: which parameters decay, and which optimizer updates them. Save and load their state."""

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

# What a parameter group may set.
SETTINGS = ("lr", "weight_decay", "beta1", "beta2")


def hidden_matrices(model: nn.Module) -> set[str]:
    """Return the weights that Muon updates: those of linear layers, except the head's."""
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not getattr(model, "head", None)]
    return {f"{n}.weight" for n in linear}


class AdamW(torch.optim.AdamW):
    """torch's AdamW on the local shards of divided parameters.

    AdamW works element by element, so local shards give the same result. Finding that out through DTensor's dispatch
    takes longer than the update. The state is divided as the parameters are, and saved that way.
    """

    def _init_group(self, group: dict[str, Any], params: Any, grads: Any, *states: Any) -> bool:
        """Collect the tensors of an update, in the order of the parameters, as local shards."""
        is_complex = super()._init_group(group, params, grads, *states)
        pairs = zip(params, grads, strict=True)
        # torch handles gradients that are sharded differently from their parameters.
        if all(hasattr(p, "to_local") and p.placements == g.placements for p, g in pairs):
            for tensors in (params, grads, *states):  # step counts among the states are never sharded
                tensors[:] = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return is_complex


class Muon(torch.optim.Muon):
    """torch's Muon, with its Newton-Schulz iteration in fp32 on a CPU, where emulated bf16 is a hundred times slower."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters. A closure is left to torch."""
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
    """Return Keller Jordan's scale of the update, or Moonshot's, which matches AdamW's update size. torch has refused
    other names.
    """
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _orthogonal(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Approximate U Vᵀ of the matrix x = U S Vᵀ by Newton-Schulz iteration."""
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
    """Build AdamW for all trained parameters, or Muon for the hidden matrices and AdamW for the rest.

    Args:
        model: The model, or this process's part of it.
        config: The training.
        whole: The whole model of which `model` is a part.
        title: Maps a parameter's name in `model` to its name in `whole`, which is what groups match.

    Returns:
        Optimizers by name, "adamw" and "muon".

    Raises:
        UserError: A group matches no parameter.
    """
    whole = whole or model
    named, decay = {n: p for n, p in model.named_parameters() if p.requires_grad}, decays(model)
    settings = match_groups([n for n, p in whole.named_parameters() if p.requires_grad], config.groups)
    by_name = {name: settings[title(name)] for name in named if title(name) in settings}
    matrices = hidden_matrices(whole) if config.optimizer == "muon" else set()
    fused = next(iter(named.values())).device.type == "cuda"
    rest, hidden = ({n: p for n, p in named.items() if (title(n) in matrices) == taken} for taken in (False, True))
    optimizers: dict[str, torch.optim.Optimizer] = {}
    if rest:
        optimizers["adamw"] = AdamW(
            _groups(rest, decay, config.weight_decay, config.lr, by_name, (config.beta1, config.beta2)),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            fused=fused,
        )
    if hidden:
        groups = _groups(hidden, decay, config.weight_decay, config.muon_lr, by_name)
        optimizers["muon"] = Muon(groups, lr=config.muon_lr)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def check_groups(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError for a parameter group that no model can have."""
    for group in groups:
        for key in group:
            if key not in ("match", *SETTINGS):
                what = "a group has match, lr (a factor), weight_decay, beta1 and beta2"
                raise UserError(f"groups: unknown key {key!r}; {what}{nearest(key, ('match', *SETTINGS))}")
        if not isinstance(group.get("match"), str) or len(group) < 2:
            raise UserError(f"groups: a group needs match, a pattern, and lr or weight_decay, got {dict(group)!r}")
        for key in ("beta1", "beta2"):
            value = group.get(key, 0.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise UserError(f"groups: {key} must be a number from 0 to below 1, got {value!r}")
        for key in ("lr", "weight_decay"):
            value = group.get(key, 0.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise UserError(f"groups: {key} must be a finite number of at least 0, got {value!r}")


def match_groups(names: Iterable[str], groups: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Map each parameter that a group matches to the first such group. Raises UserError for a group that matches none."""
    names = list(names)
    for group in groups:
        # `mixer.*` may match nothing: the baseline of a comparison may have a mixer without parameters.
        if group["match"] == "mixer.*":
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
    settings: Mapping[str, Mapping[str, Any]],
    betas: tuple[float, float] | None = None,
) -> list[dict[str, Any]]:
    """Divide parameters into groups of equal settings. betas: AdamW's; None for an optimizer without them."""
    groups: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}
    for on in (True, False):
        for name, p in named.items():
            if decay[name] == on:
                overrides, mesh = settings.get(name, {}), getattr(p, "device_mesh", None)
                if betas is None and ("beta1" in overrides or "beta2" in overrides):
                    raise UserError(f"groups: beta1 and beta2 are AdamW's, and {name} is trained by Muon")
                own = None if betas is None else (overrides.get("beta1", betas[0]), overrides.get("beta2", betas[1]))
                setting = overrides.get("lr", 1.0), overrides.get("weight_decay", weight_decay if on else 0.0), own
                # The parameters of a group must be sharded over the same processes.
                groups.setdefault((mesh, *setting), []).append((name, p))
    return [
        {"params": chosen, "weight_decay": d, "lr": peak_lr * factor, **({} if own is None else {"betas": own})}
        for (_, factor, d, own), chosen in groups.items()
    ]


def set_learning_rate(optimizers: dict[str, torch.optim.Optimizer], factor: float) -> None:
    """Set every group's learning rate to its peak times the factor."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def optimizer_tensors(optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return the optimizers' state as named tensors: `adamw/exp_avg/<parameter>`."""
    tensors = {}
    for key, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                for field, value in optimizer.state.get(p, {}).items():
                    tensors[f"{key}/{field}/{name}"] = torch.as_tensor(value)
    return tensors


def optimizer_place(optimizers: dict[str, torch.optim.Optimizer], path: str, shape: torch.Size) -> Tensor | None:
    """Return an empty tensor to load saved optimizer state into, sharded like its parameter; None if there is no such
    parameter.
    """
    for optimizer in (o for key, o in optimizers.items() if path.startswith(f"{key}/")):
        for group in optimizer.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if path.split("/", 2)[-1] == name:
                    return torch.zeros_like(p) if shape == p.shape else torch.zeros(shape)
    return None


def load_optimizer_tensors(optimizers: dict[str, torch.optim.Optimizer], tensors: dict[str, Tensor]) -> None:
    """Restore the state that `optimizer_tensors` returned. Raises ValueError where it does not fit."""
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
        on_cpu = value.ndim == 0 and not group.get("fused")  # AdamW keeps its step count on the CPU unless it is fused
        optimizer.state[p][field] = value.to("cpu" if on_cpu else p.device).clone()
