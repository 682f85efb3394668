"""Attention over depth (attnres) in decoding: one launch a site, sources in slots (slots.py, docs/guides/generation.md).

The newest source of site s lies in slot s, so slots 0, S, 2S, … of blocks of S sites are the finished sources. Where that moves
little, the launch that finishes one passes it on to the running mixtures of all readers to come, and it is never read again. Where
tokens are more, it mixes all finished sources for the readers of the block that begins, which go on from there: two phases, without
a launch of the first's own. A Full stack then, and any stack with a window, reads all sources at every site.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthmix.fast.attention import further_before, further_rows, is_usual_rule, why_no_kernels
from depthmix.fast.slots import SlotState
from depthmix.mixers.attnres import AttnResState
from depthmix.mixers.checks import Norm, Read
from depthmix.mixers.fast_path import FastPath
from depthmix.mixers.state import register_state
from depthmix.ops.norm import fused_gains
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


@register_state
class AttnResSlots(SlotState):
    """A slot for every output: slot s holds the newest source of site s."""

    scale: Tensor | None = None  # what `pending` is still to be multiplied with, [D]
    # Mixtures of later readers, to which finished sources have been passed on.
    running: Any = dataclasses.field(default=None, repr=False, metadata={"cache": True})
    # What a group of sites of a Full stack reads of the sources before it.
    group: Any = dataclasses.field(default=None, repr=False, metadata={"cache": True})

    def slots_copied(self) -> None:
        """Forget the running mixtures, which belong to the other slots."""
        self.running = None


class AttentionDecoding(FastPath):
    """Few tokens without gradients, for the rule without the paper's ablations."""

    def start(self, mixer: Any, x: Tensor) -> AttnResSlots | None:
        """Begin a pass of few tokens; None for passes that train or have many."""
        supported = mixer.routing == "replace" and is_usual_rule(mixer) and mixer.logit_scale == 1.0
        if not supported or why_no_kernels(mixer, [x]) is not None or not few_tokens(x) or not usable("attnres", x):
            return None
        state: AttnResSlots = AttnResSlots.of(x, mixer.n_sites + 1)
        if mixer.window is None and (mixer.block_size > 1 or to_all_readers(mixer, x)):
            state.running = running(x, n_mixtures(mixer))
        return state

    def resume(self, mixer: Any, state: Any) -> AttnResSlots | None:
        """Continue a pass that began with slots, as long as nobody wants gradients."""
        return state if isinstance(state, AttnResSlots) and not torch.is_grad_enabled() else None

    def to_plain(self, mixer: Any, state: AttnResSlots) -> AttnResState:
        """Convert a decoding state to the rule's own: slots 0, S, 2S, … of blocks of S sites are the finished sources."""
        site, size = state.site, mixer.block_size
        blocks = tuple(state.slots[i * size] for i in range(-(-site // size)))
        partial = state.slots[site - 1] if site and (site - 1) % size else None
        pending = state.pending if state.scale is None else (state.scale * state.pending).to(state.pending.dtype)
        kept: dict[str, Any] = {"site": site, "frozen": state.frozen, "pending": pending}
        return AttnResState(blocks=mixer.windowed(blocks), partial=partial, **kept)

    def read(self, mixer: Any, state: AttnResSlots, site: int, norms: Sequence[Norm] | None) -> Read | None:
        """Read a site, with RMSNorms applied in the same launch."""
        fused = None if norms is None else fused_gains(norms, state.slots)
        if norms is not None and fused is None:
            return None
        h = read_slots(mixer, state, site, *(fused or ())).unbind(0)
        return h if len(h) > 1 else h[0]

    def finish(self, mixer: Any, state: AttnResSlots, norm: Norm | None) -> Tensor | None:
        """Read for the final norm, as a site reads."""
        h: Any = self.read(mixer, state, mixer.n_sites, None if norm is None else [norm])
        return h

    def write(self, mixer: Any, state: AttnResSlots, site: int, y: Tensor, scaled: bool) -> AttnResSlots:
        """Keep an output, and its gain [D], for the read that puts it into its slot."""
        gain = None if scaled or mixer.output_gain is None else mixer.gamma[site]
        if not state.is_filled(site):  # nobody has read
            read_slots(mixer, state, site)
        after: AttnResSlots = state.next(pending=y, scale=gain)
        return after


DECODING = AttnResSlots.path = AttentionDecoding()


def read_slots(mixer: Any, state: AttnResSlots, site: int, gain: Sequence[Tensor] = (), out_eps: float = 0.0) -> Tensor:
    """Return the mixtures of a site or finish: [W, ..., D]."""
    size, again = mixer.block_size, state.is_filled(site)
    newest = state.claim(site)
    finished = -(-site // size)  # sources before the newest
    before = -1 if site == 0 or (site - 1) % size == 0 else site - 1
    if state.running is not None:
        return read_and_pass_on(mixer, state, site, before, again, gain, out_eps)
    oldest = 1 if mixer.window is None else max(1, finished + 1 - mixer.window)  # after e
    place = (1, oldest - 1, min(finished, 1 + finished - oldest))
    bank: tuple[Tensor | None, Tensor | None] = None, None
    if looks_back(mixer, state, site):
        first, group_sums, lse = state.group
        place = (0, first, site - first)
        bank = group_sums[site - first], lse[site - first]
    rows = slot_rows(mixer, "query", site), slot_rows(mixer, "key_gain", site)
    source = newest, state.pending, before, site, size
    return attend(*source, *place, *rows, gain, mixer.eps, out_eps, *bank, state.scale)


def read_and_pass_on(
    mixer: Any, state: AttnResSlots, site: int, before: int, again: bool, gain: Sequence[Tensor], out_eps: float
) -> Tensor:
    """Return a site's mixtures from its running ones, and pass a finished source on to those of later readers."""
    size, last, to_all = mixer.block_size, mixer.n_readers - 1, to_all_readers(mixer, state.pending)
    if again or site % size:
        last = site
    elif not to_all:
        last = min(site + size, last)
    later = range(site + 1, last + 1)
    further, first_further, later_further = None, 0, range(0)
    if mixer.n_ways > 1:
        further = (further_rows(mixer, "query").flatten(0, 1), further_rows(mixer, "key_gain").flatten(0, 1))
        first_further, *ends = (further_before(mixer, s) for s in (site, later.start, later.stop))
        later_further = range(*ends)
    rows = mixer.query, mixer.key_gain, further, first_further, later_further
    source = state.pending, before, site, 0 if to_all else size, later
    mixtures = state.slots, state.running, *source, *rows, mixer.ways(site)
    return pass_on(*mixtures, gain, mixer.eps, out_eps, state.scale)


def n_mixtures(mixer: Any) -> int:
    """Count the mixtures of all readers and ways."""
    return mixer.n_readers + further_before(mixer, mixer.n_sites)


def to_all_readers(mixer: Any, x: Tensor) -> bool:
    """Tell whether a finished source goes to all later readers at once."""
    return passes_on(x, n_mixtures(mixer))


def looks_back(mixer: Any, state: AttnResSlots, site: int) -> bool:
    """Tell whether a group of sites in a Full stack reads the sources before it in a launch of its own.

    It does where the sources are more than one launch holds.
    """
    first = site - site % GROUP
    last = min(first + GROUP, mixer.n_readers) - 1
    if last <= rows_at_once(mixer.dim) or first == 0 or last == first:
        return False
    if mixer.block_size > 1 or mixer.n_ways > 1 or mixer.window is not None:
        return False
    if state.group is None or state.group[0] != first:
        rows = slice(first, last + 1)
        state.group = (first, *look_back(state.slots, first, mixer.query[rows], mixer.key_gain[rows], mixer.eps))
    return True


def slot_rows(mixer: Any, name: str, site: int) -> list[Tensor]:
    """Return the parameter's row for every way of a site, without copying."""
    row = getattr(mixer, name)[site]
    return [row] if mixer.ways(site) == 1 else [row, *further_rows(mixer, name)[mixer.nth_several[site]].unbind(0)]
