"""Try a user's rule: does it read later tokens, other rows of the batch, or memory that was never set?

A language model that sees the next token has a fine loss. Parameters that begin as whatever memory held mostly train all the same.
Tests hold the rules of the package to this. Commands try every other rule before its first run.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthmix.mixers.base import Mixer
from depthmix.mixers.options import OptionError
from depthmix.mixers.registry import create_mixer, list_mixers, mixer_class
from depthmix.mixers.trial import NARROW, reads_and_end, stir
from depthmix.ops.torch_internals import UncompiledMode
from depthmix.randomness import OwnRandom

PACKAGE = Path(__file__).parents[1]
ROWS, TOKENS = 2, 32
CPU = torch.device("cpu")
EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
CLOSE = 1e-9  # fp64


def check_rule(name: str, options: Mapping[str, Any], dim: int, n_blocks: int, tokens_too: bool = True) -> None:
    """Raise OptionError for a user's rule that reads what it must not (see `leak`)."""
    if reason := leak(name, options, dim, n_blocks, tokens_too):
        raise OptionError(f"mixer {name!r} cannot be used: {reason}, and its losses would say nothing")


def leak(name: str, options: Mapping[str, Any], dim: int, n_blocks: int, tokens_too: bool = True) -> str | None:
    """Say in words what a rule reads and must not; None if that is nothing.

    Rules of the package are not tried, and None is returned for a rule that cannot be tried.

    Args:
        name: of the rule.
        options: of the rule.
        dim: channels of the model.
        n_blocks: blocks of the model.
        tokens_too: also try later tokens, which text has and images have not.
    """
    if not _is_own(name):
        return None
    # Its own random numbers: a run draws what it would draw without the trial, in other threads too.
    with OwnRandom(0, CPU).building():
        for width in sorted({min(dim, NARROW), dim}):
            try:
                with FreshMemoryOfNan():
                    mixer = create_mixer(name, dim=width, n_blocks=n_blocks, **options)
                for parameter, values in mixer.named_parameters():
                    if values.isnan().any():
                        return (
                            f"its parameter {parameter} is never set, which the constructor does by reset_parameters()"
                        )
                return find_leak(mixer, tokens_too)
            except Exception:
                # Heads may not divide the narrow width. An error at the full width is the training's to report.
                continue
    return None


def _is_own(name: str) -> bool:
    """Tell whether a rule stands outside the package."""
    if name not in list_mixers():
        return False
    try:
        return not Path(inspect.getfile(mixer_class(name))).is_relative_to(PACKAGE)
    except (TypeError, OSError):  # typed into a shell: it has no file
        return True


class FreshMemoryOfNan(UncompiledMode):
    """Fill new tensors with NaN in this thread. Torch's deterministic mode would fill those of other threads, too."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function in EMPTY and made.is_floating_point() and not made.is_meta:
            made.fill_(float("nan"))
        return made


def find_leak(mixer: Mixer, tokens_too: bool) -> str | None:
    """Try a mixer and say what it reads and must not; None if that is nothing. The parameters are changed."""
    random = torch.Generator().manual_seed(0)
    stir(mixer, random)
    x = torch.randn(ROWS, TOKENS, mixer.dim, generator=random, dtype=torch.float64)

    def read(x: Tensor) -> list[Tensor]:
        # The same random numbers in every pass.
        with torch.no_grad(), OwnRandom(0, CPU).building():
            return reads_and_end(mixer, x)

    before = read(x)
    # Reads that are not finite cannot be compared.
    if not all(bool(torch.isfinite(h).all()) for h in before):
        return None
    places: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {"other rows of the batch": ((1,), (0,))}
    if tokens_too:
        places["tokens to come"] = (slice(None), -1), (slice(None), slice(None, -1))
    for what, (place, kept) in places.items():
        changed = x.clone()
        changed[place] += torch.randn(x[place].shape, generator=random, dtype=torch.float64)
        for i, (a, b) in enumerate(zip(before, read(changed), strict=True)):
            if not torch.allclose(a[kept], b[kept], rtol=CLOSE, atol=CLOSE):
                who = "its end" if i == len(before) - 1 else "a site"
                return f"what {who} reads of a token depends on {what}"
    return None
