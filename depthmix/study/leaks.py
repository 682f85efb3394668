"""Whether a mechanism that nobody has tested yet reads what it must not: tokens to come, other rows of the batch, or memory that nobody set.

A language model that sees the next token has a fine loss, and parameters that begin as whatever memory held mostly train all the same. The mechanisms of the package are held to this by tests/mixers; one that
a study brings along is tried before its first run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from depthmix.mixers import Mixer, create_mixer
from depthmix.runs.code_checksums import file_of_its_own
from depthmix.study.same import NARROW, reads_and_end, stirred

ROWS, TOKENS = 2, 32
CLOSE = 1e-9  # fp64


def leak(name: str, options: Mapping[str, Any], dim: int, n_blocks: int, tokens_too: bool = True) -> str | None:
    """What it reads and must not, in words; None for a mechanism of the package, and for one that could not be tried so.

    tokens_too: whether later ones are to come, as in text.
    """
    if file_of_its_own(name) is None:
        return None
    for width in sorted({min(dim, NARROW), dim}):
        try:
            with _fresh_memory_of_nan():
                mixer = create_mixer(name, dim=width, n_blocks=n_blocks, **options)
            for parameter, values in mixer.named_parameters():
                if values.isnan().any():
                    return f"its parameter {parameter} is never set, which the constructor does by reset_parameters()"
            return _found(mixer, tokens_too)
        except Exception:
            continue  # as where heads do not divide the narrow width; of the other a training will say what is wrong
    return None


@contextmanager
def _fresh_memory_of_nan() -> Iterator[None]:
    """As torch has it where everything is to be repeatable."""
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, True
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


def _found(mixer: Mixer, tokens_too: bool) -> str | None:
    random = torch.Generator().manual_seed(0)
    stirred(mixer, random)
    x = torch.randn(ROWS, TOKENS, mixer.dim, generator=random, dtype=torch.float64)

    def read(x: Tensor) -> list[Tensor]:
        with torch.no_grad(), torch.random.fork_rng(devices=()):  # the same chance each time
            return reads_and_end(mixer, x)

    before = read(x)
    if not all(bool(torch.isfinite(h).all()) for h in before):  # at these parameters it says nothing
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
