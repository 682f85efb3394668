"""The content of a page as plain values, which `make_page` draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table with its heading. The first cell of a line is its name."""

    title: str
    heading: Sequence[str]
    lines: Sequence[Sequence[str]]
    marks: Mapping[tuple[int, int], str] = field(default_factory=dict)  # of cells (line, column): BETTER, WORSE or BUSY


# What a mark says: the interval excludes zero, below it or above; the time was taken on a busy machine.
BETTER, WORSE, BUSY = "better", "worse", "busy"


@dataclass(frozen=True)
class Effect:
    """The difference of an arm's loss from the baseline's, and the price of its steps."""

    label: str
    difference: float
    interval: float | None  # half the width of the 95% interval; None with one seed
    step_ratio: float | None
    busy: bool = False  # the step times were taken on a busy machine
    title: str = ""  # the rule's name in words

    @property
    def shown(self) -> bool:
        """Tell whether the interval excludes zero."""
        return self.interval is not None and abs(self.difference) > self.interval


@dataclass(frozen=True)
class Curve:
    """Validation loss of one arm at its evaluations: mean, lowest and highest over its seeds."""

    label: str
    tokens: Sequence[float]  # or images
    seconds: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def time_unit(longest: float) -> tuple[float, str]:
    """Return the number of seconds in a suitable unit, and the unit's name."""
    return (1.0, "seconds") if longest < 180 else (60.0, "minutes") if longest < 10800 else (3600.0, "hours")


@dataclass(frozen=True)
class Content:
    """The content of one page. It begins with its finding, the effects of all arms, and the words of a text."""

    title: str  # the finding in one sentence, if there is one
    subtitle: str = ""  # what was compared
    badge: str = ""  # a warning of two or three words, such as "1 seed: a lead"
    baseline: str = ""
    effects: Sequence[Effect] = ()
    cell: str = ""  # domain and size of the effects, if there are several
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
