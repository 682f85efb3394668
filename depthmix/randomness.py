"""Give each training its own random numbers, so that trainings in one process do not change each other.

torch has one generator per process, and other code that draws from it would change a training. So a training draws its weights
from a generator of its own, with the numbers that torch's would give: while a model is built, every random operation of this thread
receives that generator.

Steps work differently. Operations such as dropout take no generator, and intercepting every operation would slow a step down. The
models of this package draw nothing in a step. A model with other modules may draw: then the state of torch's generator is swapped
around each step, under a lock that excludes the steps of other such trainings.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.ops.torch_internals import UncompiledMode

# Modules of torch that draw nothing in a forward.
QUIET: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Embedding, nn.Conv2d, nn.LayerNorm, nn.RMSNorm, nn.Identity),
    *(nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Sequential),
)

# Held while torch's generators hold the state of a training.
_exchange = threading.RLock()
_current: ContextVar[OwnRandom | None] = ContextVar("_current", default=None)


def seed_random(seed: int) -> None:
    """Seed the generator that draws the weights of a model: that of the training that builds it, or else torch's."""
    random = _current.get()
    if random is None:
        torch.manual_seed(seed)
    else:
        random.seed(seed)


class OwnRandom:
    """Random generator of one training.

    Examples:
        >>> random = OwnRandom(0, torch.device("cpu"))
        >>> with random.building():
        ...     model = nn.Linear(3, 3)
        >>> with random.exchanged(model):
        ...     loss = model(torch.ones(3)).sum()
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device  # of the steps
        self._generators: dict[str, torch.Generator] = {}
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Restart with the numbers that torch's generators give after `torch.manual_seed(seed)`."""
        self._seed = seed
        self._generators.clear()

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator for tensors on a device."""
        name = _name(device)
        if name not in self._generators:
            self._generators[name] = torch.Generator(name).manual_seed(self._seed)
        return self._generators[name]

    def state(self) -> Tensor:
        """Return the state of the CPU's generator, for a checkpoint."""
        return self.generator(torch.device("cpu")).get_state()

    def restore(self, state: Tensor) -> None:
        """Restore the state of the CPU's generator from a checkpoint."""
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
        """Lend this training's random state to torch's generators inside this context, if the model may draw.

        Meanwhile other threads that draw from torch's generators take numbers of this training.
        """
        with ExitStack() as stack:
            if may_draw(model):
                stack.enter_context(_exchange)
                for device in dict.fromkeys(("cpu", _name(self.device))):
                    stack.enter_context(_exchanged(_torch_generator(device), self.generator(torch.device(device))))
            yield


class ProcessRandom(OwnRandom):
    """Torch's generators behind the interface of `OwnRandom`, for one of several processes, which has only one training."""

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
    """Tell whether a model has modules that may draw in a forward: neither this package's nor listed in `QUIET`."""
    return not all(_is_quiet(type(module)) for module in model.modules())


def _is_quiet(kind: type) -> bool:
    return kind in QUIET or kind.__module__.split(".")[0] == "depthmix"


class _Drawing(UncompiledMode):
    """Gives a training's generator to every random operation. A mode belongs to a thread, so other threads are unaffected."""

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
    """Swap in a generator's state for torch's inside this context, and save the advanced state back."""
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
