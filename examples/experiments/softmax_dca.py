"""DeepCrossAttention with softmax instead of ReLU.

dca weighs entry j of the stack G (e and the deltas of the finished blocks, t of them) with b_j + ReLU(w · G_j). Here

    a = softmax over j of (w · G_j);      g = Σ_j (b_j + a_j) ⊙ G_j

for each of queries, keys and values; all else is dca. ReLU only adds, entry by entry. A softmax lets entries compete, and its size does
not grow with theirs. a is 1/t where w = 0, so b starts at 1 - 1/t: plain at step 0, like dca.

Costs beyond dca: about 1 activation forward and 3 backward for every entry. Its scores for all later readers are a separate product,
while dca's come from the kernel that adds the entry up. In 12 blocks that is 13 and 39 more than 214 and 490. Softmaxes are over 3t
numbers per token.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from depthmix.fast.score_rows import readers_of, score_rows
from depthmix.fast.weighted_sums import PendingStack, Tape, WeightedSums
from depthmix.mixers import register, register_state
from depthmix.mixers.grn import DeltaStack
from depthmix.mixers.options import at_least
from depthmix.mixers.reader_weights import ReaderWeights
from depthmix.ops.depth_sum.source_order import Weights, make_source
from depthmix.ops.source_products import source_products


class SoftmaxWeights(ReaderWeights):
    """Weights whose scores are normalised over the entries."""

    def activate(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


class EntryScores(NamedTuple):
    """An entry's scores for all readers from `first_reader` on."""

    first_reader: int
    by_reader: tuple[Tensor, ...]  # [ways, ...] each

    def last(self, n: int, tokens: Sequence[int]) -> "EntryScores":
        return self._replace(by_reader=tuple(s[..., -n:] for s in self.by_reader))


@register_state
class SoftmaxStack(PendingStack):
    """The state of a pass with `SoftmaxSums`."""


class SoftmaxSums(WeightedSums):
    """Sums with kernels, and scores without them: autograd brings the gradients of scores to the entries."""

    def start(self, mixer: Any, x: Tensor) -> PendingStack:
        started: PendingStack = super().start(mixer, x).as_type(SoftmaxStack)
        return started

    def resume(self, mixer: Any, state: Any) -> PendingStack | None:
        resumed = super().resume(mixer, state)
        return resumed if resumed is None or isinstance(resumed, SoftmaxStack) else resumed.as_type(SoftmaxStack)

    def append(self, mixer: Any, tape: Tape, v: Tensor, add: Tensor | None, reader: int, position: int) -> Tape:
        v, _ = make_source(v, add)
        reader = max(reader, 1)  # the first block reads e alone
        assert tape.table is not None
        rows = score_rows(mixer).rows_from(tape.table, reader, position)
        products = source_products(v, rows).split(readers_of(len(rows), mixer.reader_ways[reader:]))
        scores: Any = EntryScores(reader, products)
        return tape._replace(stack=(*tape.stack, v), scores=(*tape.scores, scores))

    def kernel_weights(self, mixer: Any, tape: Any, reader: int, weights: ReaderWeights) -> Weights:
        assert weights.static is not None
        by_entry = [s.by_reader[reader - s.first_reader] for s in tape.scores]
        return Weights(static=weights.static.float(), dynamic=torch.stack(by_entry, dim=-1).softmax(-1).movedim(0, -2))


SoftmaxStack.path = SoftmaxSums()


@register("softmax_dca")
class SoftmaxDCA(DeltaStack):
    """b["i"] [3, t, D] = 1 - 1/t, w["i"] [3, 1, D] = 0; one way at finish, and where a block has no attention."""

    fast_paths = (SoftmaxStack.path,)

    def __init__(self, dim: int, n_blocks: int, *, window: Annotated[int | None, at_least(1)] = None) -> None:
        super().__init__(dim, n_blocks, 3, 3, window, "dynamic", False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for b in self.b.values():
            nn.init.constant_(b, 1 - 1 / b.shape[1])

    def reader_weights(self, reader: int) -> ReaderWeights:
        return SoftmaxWeights(self.b[str(reader)], self.w[str(reader)])
