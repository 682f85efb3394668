"""Keep what torch compiled for one model, for the next model of the same shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from depthmix.train.sharing import Demands, claim

# Limit on compiled versions of one function. By default torch silently stops compiling after eight.
MANY = 1000
_kept = False


def begin_model() -> None:
    """Reset torch.compile before a model is compiled, unless `compiled_once` keeps its cache."""
    if not _kept:
        torch.compiler.reset()


@contextmanager
def compiled_once(on: bool = True) -> Iterator[None]:
    """Compile sublayers of equal shapes once inside this context, however many models have them.

    A new shape gets a version of its own. By default torch would from then on compile with variable sizes, and the arms
    of a study would no longer run the same code, depending on their order.
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
