"""DeepCrossAttention with softmax instead of ReLU.

dca weighs entry j of the stack G (e and the deltas of the finished blocks, t of them) with b_j + ReLU(w · G_j). Here

    a = softmax over j of (w · G_j);      g = Σ_j (b_j + a_j) ⊙ G_j

for each of queries, keys and values; all else is dca. ReLU only adds, entry by entry. A softmax lets entries compete, and its size does
not grow with theirs. a is 1/t where w = 0, so b starts at 1 - 1/t: plain at step 0, like dca.

Costs beyond dca: about 1 activation forward and 3 backward for every entry. Its scores for all later readers are a separate product,
while dca's come from the kernel that adds the entry up. In 12 blocks that is 13 and 39 more than 214 and 490. Softmaxes are over 3t
numbers per token.
"""

import itertools
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from depthmix.mixers import register
from depthmix.mixers.grn import DeltaStack
from depthmix.mixers.options import at_least
from depthmix.mixers.stack_state import Ahead, InsideNorm, StackState, Tape
from depthmix.ops import depth_scores
from depthmix.ops.depth_sum.source_order import Weights, make_source
from depthmix.ops.source_products import source_products


class EntryScores(NamedTuple):
    """An entry's scores for its readers, from the first one on."""

    first: int
    by_reader: tuple[Tensor, ...]  # [ways, ...] each

    def last(self, n: int, tokens: object) -> "EntryScores":
        return self._replace(by_reader=tuple(s[..., -n:] for s in self.by_reader))


@register("softmax_dca")
class SoftmaxDCA(DeltaStack):
    """b["i"] [3, t, D] = 1 - 1/t, w["i"] [3, 1, D] = 0; one way at finish, and where a block has no attention."""

    def __init__(self, dim: int, n_blocks: int, *, window: Annotated[int | None, at_least(1)] = None) -> None:
        super().__init__(dim, n_blocks, 3, 3, window, "dynamic", False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for b in self.b.values():
            nn.init.constant_(b, 1 - 1 / b.shape[1])

    def _mix(self, state: StackState, reader: int, norm: InsideNorm | None) -> tuple[Tensor, ...]:
        if isinstance(state.tape, Ahead):
            a = _softmax([EntryScores(*of_entry) for of_entry in state.tape.scores], reader)
        else:
            a = depth_scores([state.observe(v) for v in state.stack], self.w[str(reader)]).softmax(-1)
        return state.sums(state.stack, norm, static=self.b[str(reader)], dynamic=a)

    # The kernels' side: sums are theirs, and autograd brings the gradients of scores to the entries.

    def _append(self, tape: Tape, v: Tensor, add: Tensor | None, reader: int, slot: int) -> Tape:
        v, _ = make_source(v, add)
        reader = max(reader, 1)  # the first block reads e alone
        assert tape.w is not None
        rows = self._rows(tape.w, reader, slot)
        ways = self.reader_ways[reader:]
        ways = ways[: list(itertools.accumulate(ways)).index(len(rows)) + 1]  # of those in whose window it stays
        entry_scores: Any = EntryScores(reader, source_products(v, rows).split(ways))
        return tape._replace(stack=(*tape.stack, v), scores=(*tape.scores, entry_scores))

    def _weights(self, tape: Tape, reader: int) -> tuple[slice, Weights]:
        return slice(None), Weights(static=self.b[str(reader)].float(), dynamic=_softmax(tape.scores, reader))

    def _slot_weights(self, reader: int) -> Any:
        return None  # decoding has no such kernel


def _softmax(scores: Any, reader: int) -> Tensor:
    """Return a reader's weights of all entries, [..., W, t], from their scores."""
    return torch.stack([s.by_reader[reader - s.first] for s in scores], dim=-1).softmax(-1).movedim(0, -2)
