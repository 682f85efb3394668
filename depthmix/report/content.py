"""The content of a page as plain values, which `make_page` draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table with its heading. The first cell of a line is its name."""

    title: str
    heading: Sequence[str]
    lines: Sequence[Sequence[str]]
    best: frozenset[int] = frozenset()  # lines to highlight


@dataclass(frozen=True)
class Curve:
    """Validation loss of one arm at its evaluations: mean, lowest and highest over its seeds."""

    label: str
    tokens: Sequence[float]  # or images
    seconds: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Content:
    """The content of one page. The page shows the first of `documents` beside each of the others."""

    title: str
    warnings: Sequence[str] = ()  # what a reader must know before anything else
    verdict: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    reading: Sequence[str] = ()  # how to read the tables
    curves: Sequence[Curve] = ()
    images: bool = False  # the models were trained on images, not text
    samples: Sequence[Mapping[str, str]] = ()  # arm, prompt and text, which may begin with the prompt
    documents: Sequence[Mapping[str, Any]] = ()  # from `depthmix inspect`, with a `label` each
    recipe: str = ""
    environment: Sequence[tuple[str, str]] = ()
    command: str = ""
