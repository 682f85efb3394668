"""Tables for notebooks: a DataFrame if pandas is installed, else a plain table with the same numbers."""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from depthmix.compare.columns import lines_of

INDEX = "arm"


class Table:
    """A small table: `table[column]` is a dictionary by arm, and iterating gives one dictionary per row."""

    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        self.records = [dict(record) for record in records]
        self.index = [record[INDEX] for record in self.records]
        self.columns = [name for name in (self.records[0] if self.records else {}) if name != INDEX]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records)

    def __getitem__(self, column: str) -> dict[str, Any]:
        if column not in self.columns:
            raise KeyError(column)
        return {record[INDEX]: record[column] for record in self.records}

    def __repr__(self) -> str:
        return "\n".join(lines_of(self._cells()))

    def _repr_html_(self) -> str:
        return to_html(self._cells())

    def _cells(self) -> list[list[str]]:
        names = [INDEX, *self.columns]
        return [names, *([_shown(record[name]) for name in names] for record in self.records)]


def as_table(records: Sequence[dict[str, Any]]) -> Any:
    """Return records as a `pandas.DataFrame` with the arms as its index or, without pandas, as a `Table`."""
    try:
        pandas: Any = importlib.import_module("pandas")
    except ImportError:
        return Table(records)
    return pandas.DataFrame.from_records(list(records), index=INDEX)


def to_html(cells: Sequence[Sequence[str]], sentences: Sequence[str] = ()) -> str:
    """Write a heading and lines as an HTML table with sentences below; all text is escaped."""
    heading, *lines = [[html.escape(cell) for cell in line] for line in cells]
    rows = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in heading) + "</tr>"]
    rows += [f"<tr><th>{first}</th>" + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>" for first, *rest in lines]
    below = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    return f"<table>{''.join(rows)}</table>" + (f"<ul>{below}</ul>" if below else "")


def _shown(value: Any) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
