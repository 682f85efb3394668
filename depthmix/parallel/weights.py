"""Initial weights of a divided model, equal to those one process would draw. No process holds more than one whole
tensor.

A model is built on the meta device, divided, given memory and drawn. Every process goes through all the random numbers, in the
order of a model in one piece, and keeps its own part: so a run's losses do not depend on how many processes it has.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from depthmix.ops.torch_internals import UncompiledMode

DRAWS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


class AsInOnePiece(UncompiledMode):
    """Inside this context, a random draw into a missing or partial tensor uses the numbers of the whole tensor."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in DRAWS or (args[0].device.type == "cpu" and not isinstance(args[0], DTensor)):
            return function(*args, **(kwargs or {}))
        place = args[0]
        # On the CPU: a GPU would draw other numbers.
        whole = torch.empty(place.shape, dtype=place.dtype, device="cpu")
        function(whole, *args[1:], **(kwargs or {}))
        if not place.is_meta:
            fill(place, whole)
        return place


class NotDrawing(UncompiledMode):
    """Inside this context, nothing is drawn into tensors without memory. torch takes long to find out that nothing is
    to be done.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function in DRAWS and args[0].is_meta else function(*args, **(kwargs or {}))


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of a replicated tensor that this process would hold if it were divided like another. Nothing is
    sent.
    """
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


@torch.no_grad()
def fill(place: Tensor, whole: Tensor) -> None:
    """Copy a tensor that every process has into one that may be divided among them."""
    local = place.to_local() if isinstance(place, DTensor) else place
    local.copy_(part_of(whole.to(local.device), place))


def build_empty(build: Callable[[], Any], seed: int) -> Any:
    """Build a model without memory. The random generator ends where it would after building the undivided model."""
    torch.manual_seed(seed)
    with torch.device("meta"), NotDrawing():
        model = build()
    with AsInOnePiece():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d) and not name.startswith("mixer."):
                # As torch does when it builds a module. Mixers are always built empty.
                module.reset_parameters()
    return model


def like(model: Any) -> Any:
    """Build a model of the same configuration, on the device in force."""
    model_like = type(model)(model.config)
    for (_, p), (_, q) in zip(model_like.named_parameters(), model.named_parameters(), strict=True):
        p.requires_grad_(q.requires_grad)
    return model_like


def fingerprint(model: nn.Module) -> str:
    """Hash a model's weights."""
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        digest.update(name.encode() + b"\0")
        digest.update(p.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def take_over(model: Any, source: nn.Module, device: torch.device) -> None:
    """Allocate a divided model and copy the weights of an undivided one, which every process has."""
    model.to_empty(device=device)
    whole = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    for name, place in (*model.named_parameters(), *model.named_buffers()):
        fill(place, whole[name].detach())


def materialize(model: Any, mixer: nn.Module, device: torch.device) -> None:
    """Allocate a divided model and draw its initial weights. `mixer`: its undivided mixer, on the meta device."""
    model.to_empty(device=device)

    def take(whole: nn.Module) -> None:
        for places, drawn in ((model.mixer.parameters(), whole.parameters()), (model.mixer.buffers(), whole.buffers())):
            for place, value in zip(places, drawn, strict=True):
                fill(place, value.detach())

    draw(model, mixer, take)


def draw(model: Any, mixer: nn.Module, take: Callable[[nn.Module], None]) -> None:
    """Draw the initial weights of a model that may lack memory for some. `take` receives the undivided mixer once it is
    drawn.
    """
    whole = copy.deepcopy(mixer).to_empty(device="cpu")

    # A rule may set single rows and entries, which a divided tensor does not support.
    def reset_mixer() -> None:
        whole.reset_parameters()  # type: ignore[operator]
        take(whole)

    model.mixer.reset_parameters = reset_mixer
    try:
        with AsInOnePiece():
            model.reset_parameters()
    finally:
        del model.mixer.reset_parameters
