"""Attention Residuals when tokens are decoded: one launch a site, sources in slots (slots.py, docs/inference.md).

The newest source of site s lies in slot s, so slots 0, S, 2S, … of blocks of S sites are the finished sources. Where that moves
little, the launch that finishes one passes it on to the running mixtures of all readers to come, and it is never read again. Where
tokens are more, it mixes all finished sources for the readers of the block that begins, which go on from there: two phases, without
a launch of the first's own. A Full stack then, and any stack with a window, reads all sources at every site.
"""

from collections.abc import Sequence

from torch import Tensor

from depthmix.mixers.base import Mixer
from depthmix.mixers.cutting import here
from depthmix.mixers.slots import SlotState
from depthmix.ops.slots.op import (
    GROUP,
    attend,
    few_tokens,
    look_back,
    pass_on,
    passes_on,
    rows_at_once,
    running,
    usable,
)


class SlotReads(Mixer):
    """What attnres does with a SlotState."""

    block_size: int
    n_ways: int
    window: int | None
    routing: str
    eps: float
    query: Tensor  # [R, D]
    key_gain: Tensor
    _nth_attention: dict[int, int]

    def _own(self, name: str) -> Tensor:
        raise NotImplementedError

    def _attention_before(self, site: int) -> list[int]:
        raise NotImplementedError

    def _why_no_kernels(self, tensors: Sequence[Tensor]) -> str | None:
        raise NotImplementedError

    def _usual(self) -> bool:
        raise NotImplementedError

    def _n_readers(self) -> int:
        raise NotImplementedError

    def _decodes(self, x: Tensor) -> bool:
        known = self.routing == "replace" and len(self.held) > self.n_sites and self._usual()
        return known and self._why_no_kernels([x]) is None and few_tokens(x) and usable("attnres", x)

    def _start_slots(self, x: Tensor) -> SlotState:
        state = SlotState.of(x, self.n_sites + 1)
        if self.window is None and (self.block_size > 1 or self._to_all(x)):
            state.running = running(x, self._n_mixtures())
        return state

    def _read_slots(self, state: SlotState, site: int, gain: Sequence[Tensor] = (), out_eps: float = 0.0) -> Tensor:
        """The mixtures of a site (or finish), [W, ..., D]."""
        size, again = self.block_size, state.filled(site)
        newest = state.claim(site)
        finished = -(-site // size)  # sources before the newest
        before = -1 if site == 0 or (site - 1) % size == 0 else site - 1
        if state.running is not None:
            return self._read_and_pass_on(state, site, before, again, gain, out_eps)
        oldest = 1 if self.window is None else max(1, finished + 1 - self.window)  # after e
        place = (1, oldest - 1, min(finished, 1 + finished - oldest))
        bank: tuple[Tensor | None, Tensor | None] = None, None
        if self._look_back(state, site):
            first, found, lse = state.ahead
            place = (0, first, site - first)
            bank = found[site - first], lse[site - first]
        rows = self._slot_rows("query", site), self._slot_rows("key_gain", site)
        source = newest, state.pending, before, site, size
        return attend(*source, *place, *rows, gain, self.eps, out_eps, *bank, state.scale)

    def _read_and_pass_on(
        self, state: SlotState, site: int, before: int, again: bool, gain: Sequence[Tensor], out_eps: float
    ) -> Tensor:
        """The same, going on from the site's running mixture; where a source is finished, those of readers to come change."""
        size, last, to_all = self.block_size, self._n_readers() - 1, self._to_all(state.pending)
        if again or site % size:
            last = site
        elif not to_all:
            last = min(site + size, last)
        ahead = range(site + 1, last + 1)
        own, own_at, own_ahead = None, 0, range(0)
        if self.n_ways > 1:
            own = (self._own("query").flatten(0, 1), self._own("key_gain").flatten(0, 1))
            own_at, *ends = (self._own_before(s) for s in (site, ahead.start, ahead.stop))
            own_ahead = range(*ends)
        rows = here(self.query), here(self.key_gain), own, own_at, own_ahead
        source = state.pending, before, site, 0 if to_all else size, ahead
        mixtures = state.slots, state.running, *source, *rows, self.ways(site)
        return pass_on(*mixtures, gain, self.eps, out_eps, state.scale)

    def _write_slots(self, state: SlotState, site: int, y: Tensor, scale: Tensor | None) -> SlotState:
        """An output that waits, times a scale [D], for the read that puts it into its slot."""
        if not state.filled(site):  # nobody has read
            self._read_slots(state, site)
        after: SlotState = state.next(pending=y, scale=scale)
        return after

    def _n_mixtures(self) -> int:
        return self._n_readers() + self._own_before(self.n_sites)

    def _to_all(self, x: Tensor) -> bool:
        """Whether a finished source goes to all readers to come."""
        return passes_on(x, self._n_mixtures())

    def _own_before(self, site: int) -> int:
        """Rows of further ways that belong to the readers before one."""
        return (self.n_ways - 1) * len(self._attention_before(site))

    def _look_back(self, state: SlotState, site: int) -> bool:
        """Whether a Full stack's group of sites reads the sources before it in a launch of its own: where one launch holds fewer."""
        first = site - site % GROUP
        last = min(first + GROUP, self._n_readers()) - 1
        if last <= rows_at_once(self.dim) or first == 0 or last == first:
            return False
        if self.block_size > 1 or self.n_ways > 1 or self.window is not None:
            return False
        if state.ahead is None or state.ahead[0] != first:
            rows = slice(first, last + 1)
            state.ahead = (first, *look_back(state.slots, first, self.query[rows], self.key_gain[rows], self.eps))
        return True

    def _slot_rows(self, name: str, site: int) -> list[Tensor]:
        """The parameter's row for every way of a site, where they lie."""
        row = getattr(self, name)[site]
        return [row] if self.ways(site) == 1 else [row, *self._own(name)[self._nth_attention[site]].unbind(0)]
