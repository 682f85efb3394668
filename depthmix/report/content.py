"""What a page says, as plain values: whoever has trained, compared or measured something fills it in, and `make_page` draws it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table with its heading; the first cell of a line is its name. best: lines to point out."""

    title: str
    heading: Sequence[str]
    lines: Sequence[Sequence[str]]
    best: frozenset[int] = frozenset()


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
    """One page. documents: those of `depthmix inspect` with a `label` each; the first is what the others are shown beside."""

    title: str
    warnings: Sequence[str] = ()  # what a reader must know before anything else
    verdict: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    reading: Sequence[str] = ()  # how to read the tables
    curves: Sequence[Curve] = ()
    images: bool = False  # in the place of text
    samples: Sequence[Mapping[str, str]] = ()  # arm, prompt and text, which may begin with the prompt
    documents: Sequence[Mapping[str, Any]] = ()
    recipe: str = ""
    environment: Sequence[tuple[str, str]] = ()
    command: str = ""
