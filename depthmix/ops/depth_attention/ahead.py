"""What sites to come will see of sources that are there already: the queries of all sites are known beforehand.

Caches without a history: gradients go from each read to each of its sources in any case (source_major.py).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from depthmix.ops.depth_attention import library  # noqa: F401  (registers the operators)
from depthmix.ops.norm import side_by_side

if TYPE_CHECKING:  # it imports triton
    from depthmix.ops.depth_attention.kernels.tiling import Halves


class Far(NamedTuple):
    """What the sites of a group see of the sources before the group, worked out for all of them together."""

    queries: "Halves"  # of all sites
    row: int  # of the group's first site among them
    scores: tuple[Tensor, ...]  # logits of every GROUP sources for the rows from some row to the last: [R', GROUP, N]
    bank: tuple[Tensor, ...]  # mixtures of the rows that have not read them, the last of them last: [N, D] fp32
    lse: Tensor  # [rows, N]
    y: Tensor | None = None  # what the group's first site reads, if that was worked out too

    def logits(self, rows: int, ways: int) -> list[Tensor]:
        """Of each older source for the queries that are so many rows from the end: [W, N]."""
        return _logits(self.scores, rows, ways)

    def read(self, row: int, u: Tensor, sources: Sequence[Tensor], logits: list[Tensor], *rest: Any) -> Any:
        if self.y is not None and row == self.row:
            nothing = u.new_empty(0)
            return [self.y], [], nothing, nothing, nothing
        add, gain, *others = rest
        gain, left = None if gain is None else side_by_side(gain), self._left(row)
        bank, lse = self.bank[len(self.bank) - left], self.lse[len(self.lse) - left]
        return torch.ops.depthmix.depth_read_near(u, sources[len(logits) :], add, gain, *others, bank, lse)

    def after(self, row: int) -> "Far":
        """What the rows after this one need."""
        return self._replace(bank=self.bank[len(self.bank) + 1 - self._left(row) :], y=None)

    def _left(self, row: int) -> int:
        """Rows of the group from this one on."""
        return self.row + len(self.lse) - row


class Known(NamedTuple):
    """Logits of the sources that are finished for all the rows to come."""

    queries: "Halves"  # of all sites
    scores: tuple[Tensor, ...]  # of each source for the rows from some row to the last: [R', 1, N]

    def logits(self, rows: int, ways: int) -> list[Tensor]:
        """Of each older source for the queries that are so many rows from the end: [W, N]."""
        return _logits(self.scores, rows, ways)

    def read(self, row: int, u: Tensor, sources: Sequence[Tensor], logits: list[Tensor], *rest: Any) -> Any:
        add, gain, *others = rest
        return torch.ops.depthmix.depth_read_known(u, sources, logits, add, [] if gain is None else list(gain), *others)

    def after(self, row: int) -> "Known":
        """What the rows after this one need."""
        return self


def _logits(scores: Sequence[Tensor], rows: int, ways: int) -> list[Tensor]:
    return [s[len(s) - rows : len(s) - rows + ways, k] for s in scores for k in range(s.shape[1])]


KNOWN_WAYS = 2  # ways of a site from which on it pays to work out the logits of old sources beforehand
FAR_TOKENS, FAR_SOURCES = 512, 8  # from which on it pays to look at old sources for a group of sites at once


class Beside(NamedTuple):
    """What a site reads besides its older sources, for those that may have it read at once: where no gradient is wanted."""

    newest: Tensor
    gain: Tensor | None  # of the norm that follows, [D]
    out_eps: float


def far_sources(
    queries: Tensor, row: int, olds: Sequence[Tensor], far: Far | Known | None, eps: float, beside: Beside | None = None
) -> Far | None:
    """What the group of sites that a row belongs to sees of the sources before it, for `read_sources`; None if nothing.

    For stacks in which site number `row` reads `row` older sources. far: what the last call returned. Depth is tiled: the
    queries are known beforehand, so the first site of a group reads the older sources once for the whole group.
    """
    from depthmix.ops.depth_attention.kernels.tiling import GROUP

    assert not isinstance(far, Known)
    if not _worth_it(olds) or len(olds) != row:
        return None
    if row % GROUP == 0 and FAR_SOURCES <= row <= len(queries) - 2:
        return look_ahead(queries, row, [v.contiguous() for v in olds], far, eps, None, None, beside)
    return far if far is not None and far.row <= row < far.row + len(far.lse) else None


def far_blocks(
    queries: Tensor, row: int, olds: Sequence[Tensor], far: Far | Known | None, eps: float, size: int
) -> Far | None:
    """The same for blocks of `size` sites, whose finished sources are old for all sites of a block: the two-phase schedule.

    The first phase reads each of n sources once for up to GROUP sites and writes a mixture in fp32 for each, which the second
    reads: n + 4 GROUP units of memory in the place of n GROUP, and less from six sources on.
    """
    from depthmix.ops.depth_attention.kernels.tiling import GROUP

    assert not isinstance(far, Known)
    if not _worth_it(olds):
        return None
    inside = row % size
    begins, rows = inside % GROUP == 0, min(GROUP, size - inside, len(queries) - row)
    if begins and rows > 1 and len(olds) >= FAR_SOURCES:
        return look_ahead(queries, row, [v.contiguous() for v in olds], far, eps, rows, 1)
    held = far is not None and not begins and far.row <= row < far.row + len(far.lse)
    return far if held else None


def known_sources(
    queries: Tensor, row: int, olds: Sequence[Tensor], known: Far | Known | None, eps: float
) -> Known | None:
    """The logits of the older sources of a row for all the rows from it on, for `read_sources`; None if that does not pay.

    For reads of several ways, whose dot products would take longer than their memory. known: what the last call returned.
    """
    assert not isinstance(known, Far)
    return know(queries, row, [v.contiguous() for v in olds], known, eps) if _worth_it(olds) else None


def _worth_it(olds: Sequence[Tensor]) -> bool:
    tokens = olds[0].numel() // olds[0].shape[-1] if olds else 0
    return tokens >= FAR_TOKENS and not torch.compiler.is_compiling()


def look_ahead(
    queries: Tensor,
    row: int,
    sources: Sequence[Tensor],
    before: Far | None,
    eps: float,
    rows: int | None = None,
    step: int | None = None,
    beside: Beside | None = None,
) -> Far:
    """Far for the group of `rows` sites that begins at a row; before: that of an earlier group. step: sources scored at a time."""
    from depthmix.ops.depth_attention.kernels import tiling

    step = step or tiling.GROUP
    own = () if beside is None else (beside.newest.contiguous(), queries[row], beside.gain, eps, beside.out_eps)
    with torch.no_grad():
        halves = tiling.Halves.of(queries, sources[0].dtype) if before is None else before.queries
        known = () if before is None else before.scores
        groups = range(step * len(known), len(sources), step)
        new = (tiling.scores(halves.after(row), sources[i : i + step], eps) for i in groups)
        scores, left = (*known, *new), len(queries) - row
        first = [s[0] for s in _logits(scores, left, 1)]
        bank, lse, y = tiling.make_bank(first, sources, rows or min(tiling.GROUP, left), step, *own)
        return Far(halves, row, scores, tuple(bank), lse, y)


def know(queries: Tensor, row: int, sources: Sequence[Tensor], before: Known | None, eps: float) -> Known:
    """Known for the read at a row, whose older sources these are; before: that of an earlier read."""
    from depthmix.ops.depth_attention.kernels import tiling

    with torch.no_grad():
        halves = tiling.Halves.of(queries, sources[0].dtype) if before is None else before.queries
        known = () if before is None else before.scores
        new = (tiling.scores(halves.after(row), [v], eps) for v in sources[len(known) :])
        return Known(halves, (*known, *new))


def read(
    queries: Tensor,
    row: int,
    ways: int,
    sources: Sequence[Tensor],
    far: Far | Known | None,
    *rest: Any,
) -> tuple[Any, list[Tensor]]:
    """What depth_read returns for queries[row : row + ways], and logits [W, N] of the sources that it did not look at."""
    u = queries[row : row + ways]
    if far is None:
        add, gain, *others = rest
        gain = None if gain is None else side_by_side(gain)
        return torch.ops.depthmix.depth_read(u, sources, add, gain, *others), []
    logits = far.logits(len(queries) - row, ways)
    return far.read(row, u, sources, logits, *rest), logits
