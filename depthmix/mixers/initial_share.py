"""Measure which part of the plain stream a rule reads at step 0, by running a narrow fresh copy of it once.

The plain stream before a site is the embedding plus every output so far. A read that is c times this stream has the share c;
any other read has None. The shares depend on the rule, its options and its layout, so they are measured once for each of these.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from depthmix.ops.backend import use_backend
from depthmix.ops.torch_internals import UncompiledMode, constant_for_compiler

if TYPE_CHECKING:
    from depthmix.mixers.base import Mixer

TOKENS, NARROW = 3, 8
KEPT = "_initial_shares"  # attribute of a mixer
# Relative. The largest deviation is that of mHC in DeepSeek's convention, which adds 1e-6 to each of its weights.
TOLERANCE = 1e-4

_measured: dict[Any, tuple[float | None, ...]] = {}
# Transformers replaces these functions by empty ones while it builds a model whose weights it loads.
_INIT = {
    name: f for name, f in vars(nn.init).items() if name.endswith("_") and not name.startswith("_") and callable(f)
}
_init_lock = threading.Lock()


def initial_shares(mixer: Mixer) -> tuple[float | None, ...]:
    """Return the share of the plain stream that every site, and finish, reads at step 0.

    The mixer itself is not touched: it may be trained, in parts or on the meta device.

    Returns:
        [S + 1] numbers, finish last. None stands for a read that is no multiple of the plain stream.
    """
    shares: tuple[float | None, ...] | None = getattr(mixer, KEPT, None)
    return _keep_shares(mixer) if shares is None else shares


@constant_for_compiler
def _keep_shares(mixer: Mixer) -> tuple[float | None, ...]:
    """Measure the shares unless a mixer of the same kind has been measured, and keep them with this one."""
    key = (rule_of(mixer), mixer.dim, mixer.layout, repr(mixer.chosen))
    shares = _measured.get(key)
    if shares is None:
        shares = _measured[key] = _measure(mixer)
    object.__setattr__(mixer, KEPT, shares)
    return shares


def rule_of(mixer: Mixer) -> Any:
    """Return the registered class of a mixer, which may be an instance of an unregistered subclass."""
    return next(cls for cls in type(mixer).__mro__ if "name" in vars(cls))


def fresh_narrow_copy(mixer: Mixer, random: torch.Generator | None = None) -> Mixer:
    """Build the same rule, in fp64 on the CPU, with as few channels as its options allow, such as a multiple of its heads.

    Args:
        mixer: may be on any device, the meta device too.
        random: draws the initial values, with seed 0 if it is left out. The global generator stays as it is.
    """
    random = random or torch.Generator("cpu").manual_seed(0)
    with torch.device("cpu"), OwnRandomNumbers(random), _init_functions():
        for dim in range(NARROW, mixer.dim):
            if mixer.dim % dim == 0:
                with contextlib.suppress(ValueError):
                    return _build(mixer, dim).double()
        return _build(mixer, mixer.dim).double()


def _build(mixer: Mixer, dim: int) -> Mixer:
    made: Mixer = rule_of(mixer)(dim, mixer.n_blocks, sites=mixer.layout.blocks, **mixer.chosen)
    return made


def _measure(mixer: Mixer) -> tuple[float | None, ...]:
    random = torch.Generator("cpu").manual_seed(0)
    copy = fresh_narrow_copy(mixer, random)
    # The modes in there would make the run itself four times as slow. A rule that draws numbers while it runs has no share anyway.
    with torch.no_grad(), use_backend("reference"):
        stream = _random(copy.dim, random)
        state: Any = copy.start(stream)
        shares: list[float | None] = []
        for site in range(copy.n_sites):
            shares.append(_share(copy.read(state, site), stream, copy.n_sites))
            y = _random(copy.dim, random)
            state, stream = copy.write(state, site, y), stream + y
        return (*shares, _share(copy.finish(state), stream, copy.n_sites))


def _random(dim: int, generator: torch.Generator) -> Tensor:
    return torch.randn(1, TOKENS, dim, dtype=torch.float64, device="cpu", generator=generator)


def _share(read: Tensor | tuple[Tensor, ...], stream: Tensor, n_sites: int) -> float | None:
    """Return the number c with read = c · stream, in all ways; None if there is no such number above zero."""
    ways = torch.stack(read) if isinstance(read, tuple) else read.unsqueeze(0)
    c = float((ways[0] * stream).sum() / (stream * stream).sum())
    if not c > TOLERANCE / n_sites or bool((ways - c * stream).abs().max() > TOLERANCE * c * stream.abs().max()):
        return None
    # Shares are made of the numbers of streams and of sources, so the fraction is what rounding has hidden.
    exact = float(Fraction(c).limit_denominator(n_sites + 1))
    return exact if abs(exact - c) <= TOLERANCE * c else c


class OwnRandomNumbers(UncompiledMode):
    """Draw random numbers from a generator of one's own, in this thread. The global generator stays as it is."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in function.tags and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self.generator}
            return function.overloadpacket(*args, **kwargs)
        return function(*args, **kwargs)


@contextlib.contextmanager
def _init_functions() -> Iterator[None]:
    """Make torch.nn.init work inside, where somebody has replaced its functions."""
    replaced = {name: getattr(nn.init, name) for name, f in _INIT.items() if getattr(nn.init, name) is not f}
    if not replaced:
        yield
        return
    with _init_lock:
        try:
            for name in replaced:
                setattr(nn.init, name, _INIT[name])
            yield
        finally:
            for name, f in replaced.items():
                setattr(nn.init, name, f)
