"""Random numbers of a training's own: two trainings in one process, or a training beside other work, do not change each other.

torch has one generator for the whole process. A training used to seed it, draw its weights from it and keep its state in checkpoints,
so anybody else who drew numbers meanwhile changed the result. Here the weights come from a generator of the training's own, with the
same numbers: while a model is built, every random operation of this thread is given that generator.

Steps are another matter. Operations such as dropout take no generator, and to look at every operation would slow a step down. This
package's own models draw nothing in a step. For a model with other modules, which may, the state of torch's generator is exchanged
around each step, and a lock keeps the steps of other such trainings out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# Torch's modules that draw nothing in a forward.
QUIET: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Embedding, nn.Conv2d, nn.LayerNorm, nn.RMSNorm, nn.Identity),
    *(nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Sequential),
)

_exchange = threading.RLock()  # held while torch's generators hold the state of a training
_current: ContextVar[OwnRandom | None] = ContextVar("_current", default=None)


def seed_random(seed: int) -> None:
    """Seed what draws the weights of a model: the generator of the training that builds it, or torch's where there is none."""
    random = _current.get()
    if random is None:
        torch.manual_seed(seed)
    else:
        random.seed(seed)


class OwnRandom:
    """Random generator of one training.

    Example:
        >>> own = OwnRandom(0, torch.device("cpu"))
        >>> with own.building():
        ...     model = nn.Linear(3, 3)
        >>> with own.exchanged(model):
        ...     loss = model(torch.ones(3)).sum()
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device  # where the steps are computed
        self._generators: dict[str, torch.Generator] = {}
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Begin anew, with the numbers that torch's own generators give after `torch.manual_seed(seed)`."""
        self._seed = seed
        self._generators.clear()

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator for tensors on a device."""
        name = _name(device)
        if name not in self._generators:
            self._generators[name] = torch.Generator(name).manual_seed(self._seed)
        return self._generators[name]

    def state(self) -> Tensor:
        """Return the state of the CPU's generator, which a checkpoint keeps."""
        return self.generator(torch.device("cpu")).get_state()

    def restore(self, state: Tensor) -> None:
        """Restore a state that a checkpoint kept."""
        self.generator(torch.device("cpu")).set_state(state)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Draw every random number of this thread from this generator inside this context, leaving torch's generators
        unchanged.
        """
        token = _current.set(self)
        try:
            with _Drawing(self):
                yield
        finally:
            _current.reset(token)

    @contextmanager
    def exchanged(self, model: Any) -> Iterator[None]:
        """Let torch's generators continue from here inside this context, if the model may draw, and restore them
        afterwards.

        Numbers that another thread draws from torch's generators meanwhile are those of this training.
        """
        with ExitStack() as stack:
            if may_draw(model):
                stack.enter_context(_exchange)
                for device in dict.fromkeys(("cpu", _name(self.device))):
                    stack.enter_context(_exchanged(_torch_generator(device), self.generator(torch.device(device))))
            yield


class ProcessRandom(OwnRandom):
    """Torch's own generators behind the same calls, for one of several processes: each has one training."""

    def __init__(self) -> None:
        super().__init__(0, torch.device("cpu"))

    def state(self) -> Tensor:
        return torch.get_rng_state()

    def restore(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    @contextmanager
    def building(self) -> Iterator[None]:
        yield

    @contextmanager
    def exchanged(self, model: Any) -> Iterator[None]:
        yield


def may_draw(model: Any) -> bool:
    """Return whether a model has modules that are neither this package's nor known to draw nothing in a forward."""
    return not all(_is_quiet(type(module)) for module in model.modules())


def _is_quiet(kind: type) -> bool:
    return kind in QUIET or kind.__module__.split(".")[0] == "depthmix"


class _Drawing(TorchDispatchMode):
    """Hands a training's generator to every random operation. Modes belong to a thread, so other threads notice nothing."""

    def __init__(self, own: OwnRandom) -> None:
        super().__init__()
        self.own = own

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **kwargs)
        device = next((a.device for a in args if isinstance(a, Tensor)), None) or kwargs.get("device") or "cpu"
        if (device := torch.device(device)).type == "meta":
            return function(*args, **kwargs)
        own = self.own.generator(device)
        if any(argument.name == "generator" for argument in function._schema.arguments):
            given = kwargs.get("generator")
            return function(*args, **{**kwargs, "generator": own if given is None else given})
        with _exchange, _exchanged(_torch_generator(_name(device)), own):
            return function(*args, **kwargs)


@contextmanager
def _exchanged(ours: torch.Generator, own: torch.Generator) -> Iterator[None]:
    """Let torch's generator go on from the state of another, and that one from where it comes to."""
    before = ours.get_state()
    ours.set_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(ours.get_state())
        ours.set_state(before)


def _torch_generator(device: str) -> torch.Generator:
    kind, _, index = device.partition(":")
    if kind == "cuda":
        torch.cuda.init()
        return torch.cuda.default_generators[int(index)]
    return torch.mps._get_default_mps_generator() if kind == "mps" else torch.default_generator


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
    return device.type
