"""Names and parts of a document of `depthmix inspect` (docs/guides/inspecting.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]
Values = Sequence[Sequence[Sequence[float | None]]]
WAYS = {1: ("",), 2: ("queries and keys", "values"), 3: ("queries", "keys", "values")}


def way_names(document: Document) -> list[str]:
    """Name the ways of the readers that have most of them. Return [""] where every reader has one way."""
    most = max(reader["ways"] for reader in document["readers"])
    return list(WAYS.get(most, [f"mixture {way + 1}" for way in range(most)]))


def names_of(document: Document) -> tuple[list[str], list[str]]:
    """Return the names of the readers (sites by name and block, then finish) and of the sources."""
    *sites, last = document["readers"]
    return distinct([*(f"{r['name']} {r['block']}" for r in sites), last["name"]]), distinct(document["sources"])


def distinct(names: Sequence[str]) -> list[str]:
    """Number names that occur several times, so that each place on an axis has a name of its own."""
    return [f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def of_way(values: Sequence[Sequence[Any]], way: int) -> list[Any]:
    """Return the entries of one way of values [reader][way]. A reader with fewer ways stands with its last one."""
    return [ways[min(way, len(ways) - 1)] for ways in values]


def square(values: Sequence[Sequence[float | None]]) -> list[list[float | None]]:
    """Pad rows of growing length to a square, with None where a reader has no such source."""
    return [[*row, *[None] * (len(values) - len(row))] for row in values]


def largest(values: Values) -> float:
    """Return the largest magnitude in values [reader][way][source], or 1 if there is none.

    The first reader does not count: it has one source and no choice.
    """
    return max((abs(v) for ways in values[1:] for row in ways for v in row if v is not None), default=0.0) or 1.0


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are known; None if there are none."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def labels(documents: Sequence[Document]) -> list[str]:
    """Name each model: by its label, otherwise by its mixer and options. Models of the same name get their run's folder added."""
    names = [document.get("label") or _rule_of(document) for document in documents]
    return [
        f"{name} ({document['run']})" if names.count(name) > 1 else name
        for name, document in zip(names, documents, strict=True)
    ]


def _rule_of(document: Document) -> str:
    options = ",".join(f"{k}={v}" for k, v in document["mixer_options"].items())
    return f"{document['mixer']}:{options}" if options else str(document["mixer"])
