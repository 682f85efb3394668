"""The table of all projections of a stack rule, so that an entry is scored for every later reader in one product.

Reader r scores entry j with projection[w, j] for its mixture w (reader_weights.py). The table [R, D] holds the projections of
readers 1 … N one after the other, of each reader its mixtures, and of each mixture its entries, or one row for all entries:

    reader 1                 reader 2                             …
    ├─ mixture 0: G_0 G_1    ├─ mixture 0: G_0 G_1 G_2
    ├─ mixture 1: G_0 G_1    ├─ mixture 1: G_0 G_1 G_2
"""

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor


class ScoreRows:
    """Row numbers of the table of one mixer."""

    def __init__(self, mixer: Any) -> None:
        self.window: int | None = mixer.window
        # Rows per mixture of each reader: one, or one for each entry. Reader 0 has no projection.
        self.per_mixture = [0]
        # The first row of each reader, with one number more than there are readers.
        self.first = [0, 0]
        for reader in range(1, mixer.n_blocks + 1):
            ways, rows, _ = mixer.reader_weights(reader).projection.shape
            self.per_mixture.append(rows)
            self.first.append(self.first[-1] + ways * rows)

    def row(self, reader: int, way: int, position: int) -> int:
        """Return the row with which a reader's mixture scores the entry at a stack position."""
        rows = self.per_mixture[reader]
        return self.first[reader] + (way * rows + position if rows > 1 else way)

    def rows_from(self, table: Tensor, reader: int, position: int) -> Tensor:
        """Return the rows with which readers from `reader` on score the entry that is at a stack position now.

        With a window the entry moves down the stack and, once it is part of the sum, is scored no more as itself.
        """
        positions = []
        while reader < len(self.per_mixture) and position >= 0:
            positions.append((reader, position))
            # The next push moves every entry but the embedding.
            if position > 0 and self.window is not None and reader + 1 >= self.window + 2:
                position = position - 1 if position > 2 else -1
            reader += 1
        if not positions:
            return table[:0]
        first_reader = positions[0][0]
        if self.per_mixture[first_reader] == 1:
            return table[self.first[first_reader] : self.first[reader]]
        of_readers = {r: table[self.first[r] : self.first[r + 1]] for r, _ in positions}  # [W n, D]
        return torch.cat([of_readers[r][p :: self.per_mixture[r]] for r, p in positions])


_known: "weakref.WeakKeyDictionary[Any, ScoreRows]" = weakref.WeakKeyDictionary()


def score_rows(mixer: Any) -> ScoreRows:
    """Return the row numbers of a mixer, which depend on nothing but its shape."""
    rows = _known.get(mixer)
    if rows is None:
        rows = _known[mixer] = ScoreRows(mixer)
    return rows


def projection_table(mixer: Any) -> Tensor | None:
    """Return the projections of all readers, [R, D]; None for a rule whose weights are no scores."""
    by_reader = [mixer.reader_weights(reader) for reader in range(1, mixer.n_blocks + 1)]
    projections = [w.projection for w in by_reader if w is not None and w.projection is not None]
    return torch.cat([p.flatten(0, 1) for p in projections]) if projections else None


def readers_of(n_rows: int, ways: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of mixtures of the first readers in `ways` that have `n_rows` rows together."""
    return ways[: list(itertools.accumulate(ways)).index(n_rows) + 1]
