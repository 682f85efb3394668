"""Weighted sums of a stack (grn, dca, denseformer) in decoding: one launch per site, entries in slots (slots.py, docs/inference.md).

Slot i holds entry i of the stack. The launch of a block's first site adds up the newest entry, puts it into its slot, and reads.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix.fast.slots import SlotState
from depthmix.fast.weighted_sums import RELU, way_or_ways
from depthmix.mixers.block_stack import StackState
from depthmix.mixers.checks import Norm, Read
from depthmix.mixers.fast_path import FastPath
from depthmix.mixers.reader_weights import ReaderWeights
from depthmix.mixers.state import register_state
from depthmix.ops.norm import fused_gains
from depthmix.ops.slots.op import add_norm, add_up, few_tokens, usable


@register_state
class StackSlots(SlotState):
    """A slot for every entry. With `before`, the newest entry is the sum of `before` and `pending`.

    With `accumulates`, `g` and `delta` are the two parts of what the next site of the block reads.
    """

    before: Tensor | None = None
    g: Tensor | None = None
    delta: Tensor | None = None

    def kept_tensors(self) -> list[Tensor]:
        return [t for t in (self.pending, self.before, self.g, self.delta) if t is not None]


class SlotWeights(NamedTuple):
    """A reader's weights as the kernel takes them; none at all for reader 0, which takes the embedding as it is."""

    static: Tensor | None = None  # [W, n, D] or [W, n, 1]
    projection: Tensor | None = None  # [W, n or 1, D]
    relu: int = 0


class WeightedSumsDecoding(FastPath):
    """Few tokens without gradients, for rules whose readers weigh all entries without a network or a window."""

    def start(self, mixer: Any, x: Tensor) -> StackSlots | None:
        """Begin a pass of few tokens; None for passes that train or have many."""
        if mixer.window is not None or not few_tokens(x) or not usable(mixer.name, x) or not decodes(mixer):
            return None
        if any(p.dtype == torch.float64 for p in itertools.islice(mixer.parameters(), 1)):  # all parameters are alike
            return None
        return StackSlots.of(x, mixer.n_blocks + 1)

    def resume(self, mixer: Any, state: Any) -> StackSlots | None:
        """Continue a pass that began with slots, as long as nobody wants gradients."""
        return state if isinstance(state, StackSlots) and not torch.is_grad_enabled() else None

    def to_plain(self, mixer: Any, state: StackSlots) -> StackState:
        """Convert a decoding state to the rule's own: the slots that are filled are the stack."""
        reader, g, delta = mixer.layout.block[state.site], state.g, state.delta
        if g is not None:  # inside a block, whose first read has filled its slot
            stack = tuple(state.slots[: reader + 1])
        else:
            newest = state.pending if state.before is None else state.before + state.pending
            stack = (*state.slots[:reader], newest)
        if mixer.accumulates and g is not None and delta is not None:
            g, delta = g + delta, None
        plain: StackState = state.as_type(StackState, stack=stack, g=g, delta=delta)
        return plain

    def read(self, mixer: Any, state: StackSlots, site: int, norms: Sequence[Norm] | None) -> Read | None:
        """Read a site, with its RMSNorms applied in the same launch."""
        fused = None if norms is None else fused_gains(norms, state.slots)
        if norms is not None and fused is None:
            return None
        if mixer.layout.begins[site]:
            return way_or_ways(read_slots(mixer, state, mixer.layout.block[site], *(fused or ())).unbind(0))
        assert state.g is not None
        assert state.delta is not None
        total: Tensor | None
        if fused is None:
            total = h = state.g + state.delta
        else:
            total, h = add_norm(state.g, state.delta, fused[0][0], fused[1], keep=mixer.accumulates)
        # The write uses the sum with `accumulates` alone.
        state.leave_note(h if total is None else total)
        return h

    def write(self, mixer: Any, state: StackSlots, site: int, y: Tensor, scaled: bool) -> StackSlots:
        """Keep an output for the launch that adds it up."""
        begins, ends, accumulates = mixer.layout.begins[site], mixer.layout.ends[site], mixer.accumulates
        note = state.take_note()
        if note is None:
            self.read(mixer, state, site, None)
            note = state.take_note()
        changes: dict[str, Any]
        if begins and not ends:
            changes = {"g": note, "delta": y}
        elif ends:
            # Without `accumulates`, there is no output before y where a block is one site.
            changes = {"pending": y, "before": note if accumulates else state.delta, "g": None, "delta": None}
        elif accumulates:
            changes = {"g": note, "delta": y}
        else:
            assert state.delta is not None
            changes = {"delta": state.delta + y}
        after: StackSlots = state.next(**changes)
        return after

    def finish(self, mixer: Any, state: StackSlots, norm: Norm | None) -> Tensor | None:
        """Read for the final norm, in one launch with it."""
        fused = None if norm is None else fused_gains([norm], state.slots)
        if norm is not None and fused is None:
            return None
        return read_slots(mixer, state, mixer.n_blocks, *(fused or ()))[0]


def read_slots(mixer: Any, state: StackSlots, reader: int, gain: Sequence[Tensor] = (), eps: float = 0.0) -> Tensor:
    """Return a reader's mixtures [W, ..., D]. The entry that it is the first to see goes to its slot."""
    slots, ways, residual_way = state.claim(reader), mixer.reader_ways[reader], mixer.residual_way_of(reader)
    weights = slot_weights(mixer.reader_weights(reader)) if reader else SlotWeights()
    assert weights is not None
    h, residual = add_up(slots, state.pending, state.before, reader, ways, *weights, gain, eps, residual_way)
    state.leave_note(residual)
    return h


def slot_weights(weights: ReaderWeights | None) -> SlotWeights | None:
    """Return a reader's weights as the kernel takes them; None where it cannot."""
    if weights is None or weights.network is not None or weights.every > 1:
        return None
    return SlotWeights(weights.static, weights.projection, RELU[weights.relu_on])


_known: "weakref.WeakKeyDictionary[Any, bool]" = weakref.WeakKeyDictionary()


def decodes(mixer: Any) -> bool:
    """Tell whether the kernel can weigh what every reader sees."""
    known = _known.get(mixer)
    if known is None:
        weights = (slot_weights(mixer.reader_weights(reader)) for reader in range(1, mixer.n_blocks + 1))
        known = _known[mixer] = all(w is not None for w in weights)
    return known


DECODING = StackSlots.path = WeightedSumsDecoding()
