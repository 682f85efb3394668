"""Attention Residuals when tokens are decoded: one launch a site, sources in slots (slots.py, docs/inference.md).

The newest source of site s lies in slot s, so slots 0, S, 2S, … of blocks of S sites are the finished sources. Where that moves
little, a finished source is passed on to the running mixtures of all readers to come, and never read again; elsewhere, and with a
window, a site reads all sources there are.
"""

from collections.abc import Sequence

from torch import Tensor

from depthmix.mixers.base import Mixer
from depthmix.mixers.cutting import here
from depthmix.mixers.slots import SlotState
from depthmix.ops.slots.op import GROUP, attend, few_tokens, look_back, pass_on, rows_at_once, running, usable


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

    def _n_readers(self) -> int:
        raise NotImplementedError

    def _decodes(self, x: Tensor) -> bool:
        known = self.routing == "replace" and len(self.held) > self.n_sites and self._why_no_kernels([x]) is None
        return known and few_tokens(x) and usable("attnres", x)

    def _start_slots(self, x: Tensor) -> SlotState:
        state = SlotState.of(x, self.n_sites + 1)
        if self.window is None:
            others = len(self._nth_attention) * (self.n_ways - 1)
            state.running = running(x, self.n_sites + 1 + others, self.block_size)
        return state

    def _read_slots(self, state: SlotState, site: int, gain: Sequence[Tensor] = (), out_eps: float = 0.0) -> Tensor:
        """The mixtures of a site (or finish), [W, ..., D]."""
        size, again = self.block_size, state.filled(site)
        newest = state.claim(site)
        finished = -(-site // size)  # sources before the newest
        before = -1 if site == 0 or (site - 1) % size == 0 else site - 1
        if state.running is not None:
            passed = site % size == 0 and not again
            return self._read_and_pass_on(state, site, before, passed, gain, out_eps)
        oldest = 1 if self.window is None else max(1, finished + 1 - self.window)  # after e
        place = (1, oldest - 1, min(finished, 1 + finished - oldest))
        bank: tuple[Tensor, ...] = ()
        if self._look_back(state, site):
            first, found, lse = state.ahead
            place = (0, first // size, finished - first // size)
            bank = found[site - first], lse[site - first]
        rows = self._slot_rows("query", site), self._slot_rows("key_gain", site)
        return attend(newest, state.pending, before, site, size, *place, *rows, gain, self.eps, out_eps, *bank)

    def _read_and_pass_on(
        self, state: SlotState, site: int, before: int, passed: bool, gain: Sequence[Tensor], out_eps: float
    ) -> Tensor:
        """The same, with a finished source added to the mixtures of all readers to come."""
        own, at = None, (0, 0)
        if self.n_ways > 1:
            own = (self._own("query").flatten(0, 1), self._own("key_gain").flatten(0, 1))
            others = self.n_ways - 1  # of each attention site
            at = (others * len(self._attention_before(site)), others * len(self._attention_before(site + 1)))
        rows = here(self.query), here(self.key_gain)
        source = state.pending, before, site, passed
        return pass_on(state.slots, state.running, *source, *rows, own, *at, self.ways(site), gain, self.eps, out_eps)

    def _look_back(self, state: SlotState, site: int) -> bool:
        """Whether a site's group reads the sources before it in a launch of its own: where they are more than one launch holds."""
        size = self.block_size
        group = GROUP if size == 1 else size
        first = site - site % group
        last = min(first + group, self._n_readers()) - 1
        few = -(-last // size) <= rows_at_once(self.dim)
        if few or first == 0 or last == first or self.n_ways > 1 or self.window is not None:
            return False
        if state.ahead is None or state.ahead[0] != first:
            rows = slice(first, last + 1)
            found = look_back(state.slots, size, first // size, self.query[rows], self.key_gain[rows], self.eps)
            state.ahead = (first, *found)
        return True

    def _slot_rows(self, name: str, site: int) -> list[Tensor]:
        """The parameter's row for every way of a site, where they lie."""
        row = getattr(self, name)[site]
        return [row] if self.ways(site) == 1 else [row, *self._own(name)[self._nth_attention[site]].unbind(0)]
