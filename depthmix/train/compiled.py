"""What torch compiled for one model, kept for the next of the same shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from depthmix.train.sharing import Demands, claim

MANY = 1000  # versions of one function: by default torch stops at eight, and does not say so
_kept = False


def begin_model() -> None:
    """Before a model is compiled: forget what was compiled for others, unless `compiled_once` keeps it."""
    if not _kept:
        torch.compiler.reset()


@contextmanager
def compiled_once(on: bool = True) -> Iterator[None]:
    """Inside, sublayers of the same shapes are compiled once, however many models have them.

    A shape that was not seen before gets a version of its own: torch would make the sizes of what it compiles from then on
    variable, and the arms of a study would no longer run the same code, depending on their order.
    """
    global _kept
    if not on:
        yield
        return
    from torch._dynamo import config as dynamo

    settings: dict[str, Any] = {
        "recompile_limit": MANY,
        "accumulated_recompile_limit": 100 * MANY,
        "automatic_dynamic_shapes": False,
    }
    with claim(Demands(compiles=True)), dynamo.patch(settings):
        torch.compiler.reset()
        _kept = True
        try:
            yield
        finally:
            _kept = False
            torch.compiler.reset()
