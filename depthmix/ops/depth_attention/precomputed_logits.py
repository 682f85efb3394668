"""Work on older sources that several later reads share. It needs the queries alone, which are known before the first read.

Results are caches without autograd history. Gradients always go from each read to each of its sources (source_order.py).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from depthmix.ops.depth_attention import library  # noqa: F401  (registers the operators)
from depthmix.ops.norm import side_by_side
from depthmix.ops.registration import call

# kernels.tiling imports triton.
if TYPE_CHECKING:
    from depthmix.ops.depth_attention.kernels.tiling import SplitRows


class GroupMixtures(NamedTuple):
    """Mixtures of the sources before a group of sites, computed for all sites of the group together."""

    queries: "SplitRows"  # of all sites
    row: int  # row of the group's first site
    scores: tuple[Tensor, ...]  # logits of every GROUP sources, from some row to the last: [R', GROUP, N]
    bank: tuple[Tensor, ...]  # mixtures [N, D] fp32 of the rows that have not read them yet, in the order of the rows
    lse: Tensor  # log-sum-exp of each mixture, [rows, N]
    y: Tensor | None = None  # result of the group's first site, if it was computed too

    def logits(self, rows: int, ways: int) -> list[Tensor]:
        """Return the logits [W, N] of each older source, for the W queries that begin `rows` rows before the last."""
        return _logits(self.scores, rows, ways)

    def read(self, row: int, u: Tensor, sources: Sequence[Tensor], logits: list[Tensor], *rest: Any) -> Any:
        """Read at a row of the group: its mixture of older sources merged with the newer ones."""
        if self.y is not None and row == self.row:
            nothing = u.new_empty(0)
            return [self.y], [], nothing, nothing, nothing
        add, gain, *others = rest
        gain, n_rows = None if gain is None else side_by_side(gain), self._rows_from(row)
        bank, lse = self.bank[len(self.bank) - n_rows], self.lse[len(self.lse) - n_rows]
        return call("depth_read_near", u, sources[len(logits) :], add, gain, *others, bank, lse)

    def after(self, row: int) -> "GroupMixtures":
        """Return what the rows after this one need; the mixture of this row is dropped."""
        return self._replace(bank=self.bank[len(self.bank) + 1 - self._rows_from(row) :], y=None)

    def _rows_from(self, row: int) -> int:
        """Count the group's rows from this one on."""
        return self.row + len(self.lse) - row


class KnownLogits(NamedTuple):
    """Logits of finished sources for all rows to come."""

    queries: "SplitRows"  # of all sites
    scores: tuple[Tensor, ...]  # logits of each source, from some row to the last: [R', 1, N]

    def logits(self, rows: int, ways: int) -> list[Tensor]:
        """Return the logits [W, N] of each older source, for the W queries that begin `rows` rows before the last."""
        return _logits(self.scores, rows, ways)

    def read(self, row: int, u: Tensor, sources: Sequence[Tensor], logits: list[Tensor], *rest: Any) -> Any:
        """Read at a row with known logits for all sources but the newest."""
        add, gain, *others = rest
        return call("depth_read_known", u, sources, logits, add, [] if gain is None else list(gain), *others)

    def after(self, row: int) -> "KnownLogits":
        """Return what the rows after this one need: everything."""
        return self


def _logits(scores: Sequence[Tensor], rows: int, ways: int) -> list[Tensor]:
    return [s[len(s) - rows : len(s) - rows + ways, k] for s in scores for k in range(s.shape[1])]


# From this many ways of a site on, it pays to compute the logits of older sources in advance.
KNOWN_WAYS = 2
# From this many tokens and sources on, it pays to read older sources once for a group of sites.
MIN_TOKENS, MIN_SOURCES = 512, 8


class FirstRead(NamedTuple):
    """Inputs of the group's first read besides its older sources. With them it runs in the same launch; inference only."""

    newest: Tensor
    gain: Tensor | None  # of the norm that follows, [D]
    out_eps: float


def precompute_group(
    queries: Tensor,
    row: int,
    older: Sequence[Tensor],
    precomputed: GroupMixtures | KnownLogits | None,
    eps: float,
    first_read: FirstRead | None = None,
) -> GroupMixtures | None:
    """Return the mixtures that the group of sites at `row` sees of the sources before the group.

    Depth is tiled: the queries are known beforehand, so the first site of a group reads the older sources once for the whole group.
    For stacks in which site `row` reads `row` older sources.

    Args:
        queries: [R, D], of all sites.
        row: row of the site that reads next.
        older: its older sources.
        precomputed: what the previous call returned.
        eps: of the keys' norm.
        first_read: see `FirstRead`; None under training.

    Returns:
        An argument for `read_sources`, or None where tiling does not pay.
    """
    from depthmix.ops.depth_attention.kernels.tiling import GROUP

    assert not isinstance(precomputed, KnownLogits)
    if not _worth_it(older) or len(older) != row:
        return None
    if row % GROUP == 0 and MIN_SOURCES <= row <= len(queries) - 2:
        return precompute_mixtures(
            queries, row, [v.contiguous() for v in older], precomputed, eps, None, None, first_read
        )
    return (
        precomputed
        if precomputed is not None and precomputed.row <= row < precomputed.row + len(precomputed.lse)
        else None
    )


def precompute_block_group(
    queries: Tensor,
    row: int,
    older: Sequence[Tensor],
    precomputed: GroupMixtures | KnownLogits | None,
    eps: float,
    size: int,
) -> GroupMixtures | None:
    """Return `precompute_group` for blocks of `size` sites: finished blocks are old for all sites of a block (the two-phase schedule).

    The first phase reads each of n sources once for up to GROUP sites and writes an fp32 mixture for each, which the second phase
    reads. That is n + 4 GROUP units of memory traffic instead of n GROUP: less from six sources on.
    """
    from depthmix.ops.depth_attention.kernels.tiling import GROUP

    assert not isinstance(precomputed, KnownLogits)
    if not _worth_it(older):
        return None
    inside = row % size
    begins_group, rows = inside % GROUP == 0, min(GROUP, size - inside, len(queries) - row)
    if begins_group and rows > 1 and len(older) >= MIN_SOURCES:
        return precompute_mixtures(queries, row, [v.contiguous() for v in older], precomputed, eps, rows, 1)
    in_group = (
        precomputed is not None and not begins_group and precomputed.row <= row < precomputed.row + len(precomputed.lse)
    )
    return precomputed if in_group else None


def precompute_logits(
    queries: Tensor, row: int, older: Sequence[Tensor], precomputed: GroupMixtures | KnownLogits | None, eps: float
) -> KnownLogits | None:
    """Return the logits of the older sources for the row and all rows after it, or None where that does not pay.

    For reads of several ways, whose dot products would take longer than their memory traffic. precomputed: what the previous call returned.
    """
    assert not isinstance(precomputed, GroupMixtures)
    return extend_logits(queries, row, [v.contiguous() for v in older], precomputed, eps) if _worth_it(older) else None


def _worth_it(older: Sequence[Tensor]) -> bool:
    tokens = older[0].numel() // older[0].shape[-1] if older else 0
    return tokens >= MIN_TOKENS and not torch.compiler.is_compiling()


def precompute_mixtures(
    queries: Tensor,
    row: int,
    sources: Sequence[Tensor],
    before: GroupMixtures | None,
    eps: float,
    rows: int | None = None,
    step: int | None = None,
    first_read: FirstRead | None = None,
) -> GroupMixtures:
    """Compute the mixtures of the group of `rows` sites that begins at `row`.

    Args:
        queries: [R, D].
        row: first row of the group.
        sources: all older sources.
        before: mixtures of an earlier group, whose scores are reused.
        eps: of the keys' norm.
        rows: size of the group, by default GROUP.
        step: number of sources scored per launch, by default GROUP.
        first_read: see `FirstRead`.
    """
    from depthmix.ops.depth_attention.kernels import tiling

    step = step or tiling.GROUP
    first_read_inputs = (
        ()
        if first_read is None
        else (first_read.newest.contiguous(), queries[row], first_read.gain, eps, first_read.out_eps)
    )
    with torch.no_grad():
        halves = tiling.SplitRows.of(queries, sources[0].dtype) if before is None else before.queries
        known_scores = () if before is None else before.scores
        groups = range(step * len(known_scores), len(sources), step)
        new_scores = (tiling.scores(halves.after(row), sources[i : i + step], eps) for i in groups)
        scores, n_rows = (*known_scores, *new_scores), len(queries) - row
        first = [s[0] for s in _logits(scores, n_rows, 1)]
        bank, lse, y = tiling.make_bank(first, sources, rows or min(tiling.GROUP, n_rows), step, *first_read_inputs)
        return GroupMixtures(halves, row, scores, tuple(bank), lse, y)


def extend_logits(
    queries: Tensor, row: int, sources: Sequence[Tensor], before: KnownLogits | None, eps: float
) -> KnownLogits:
    """Extend the known logits of an earlier read (`before`) by the sources that are new at `row`."""
    from depthmix.ops.depth_attention.kernels import tiling

    with torch.no_grad():
        halves = tiling.SplitRows.of(queries, sources[0].dtype) if before is None else before.queries
        known_scores = () if before is None else before.scores
        new_scores = (tiling.scores(halves.after(row), [v], eps) for v in sources[len(known_scores) :])
        return KnownLogits(halves, (*known_scores, *new_scores))


def read(
    queries: Tensor,
    row: int,
    ways: int,
    sources: Sequence[Tensor],
    precomputed: GroupMixtures | KnownLogits | None,
    *rest: Any,
) -> tuple[Any, list[Tensor]]:
    """Run depth_read for queries[row : row + ways].

    Returns:
        What the operator returns, and the precomputed logits [W, N] of the sources that it did not read.
    """
    u = queries[row : row + ways]
    if precomputed is None:
        add, gain, *others = rest
        gain = None if gain is None else side_by_side(gain)
        return call("depth_read", u, sources, add, gain, *others), []
    logits = precomputed.logits(len(queries) - row, ways)
    return precomputed.read(row, u, sources, logits, *rest), logits
