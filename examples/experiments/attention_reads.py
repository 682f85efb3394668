"""Attention Residuals that only attention reads. MLPs and the final norm see the plain sum.

    logit_i = query_s · (key_gain_s ⊙ RMS(v_i));    p = softmax(logits) over the sources;    h_s = Σ_i p_i v_i

Attention reads as in attnres with ways=2: one mixture for its queries and keys, one for its values. At all other sites p_i is the same
for all n sources. Their h is the sum over n, and the norm that follows makes it equivalent to the plain residual's.
only="values": queries and keys have the plain sum too, and only values choose.
Queries start at zero: plain at step 0.

The costs are those of attnres with ways=2. Kernels of its own could save the MLPs' reads: with one block for all sites, whose sources
are e and the sum of all outputs, plain sites would move 8 activations, and attention's move 14 with attnres' kernels.
"""

from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from depthmix.fast.attention import AttentionTraining
from depthmix.mixers import register
from depthmix.mixers.attnres import SUFFIX, AttnRes
from depthmix.mixers.options import at_least


class Training(AttentionTraining):
    """Kernels with a row of zeros wherever the weights are the same for all sources."""

    def queries(self, mixer: Any) -> Tensor:
        own = mixer.query_v.float() * mixer.key_gain_v.float()  # [A, D]
        plain = own.new_zeros(mixer.dim)
        first = [plain] * len(own)
        if mixer.only == "attention":
            first = list((mixer.query.float() * mixer.key_gain.float()).unbind(0))
        pairs = zip(first, own.unbind(0), strict=True)
        rows = (next(pairs) if mixer.ways(site) > 1 else (plain,) for site in range(mixer.n_sites + 1))
        return torch.stack([row for ways in rows for row in ways])


@register("attention_reads")
class AttentionReads(AttnRes):
    """query, query_v = 0 and key_gain, key_gain_v = 1, all [A, D], for the A attention sites; with only="values" the last of each."""

    decayed = frozenset()
    fast_paths = (Training(),)  # decoding with slots takes a row for every site

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        block_size: Annotated[int | None, at_least(1)] = None,
        only: Literal["attention", "values"] = "attention",
    ) -> None:
        self.__dict__["only"] = only  # past nn.Module, which is not there yet
        super().__init__(dim, n_blocks, block_size=block_size, ways=2)

    def _add(self, name: str, *shape: int) -> None:
        for way in ("", SUFFIX[2])[self.only == "values" :]:
            self.register_parameter(name + way, nn.Parameter(torch.empty(len(self.layout.attention), *shape)))

    def _rows(self, name: str, site: int) -> Tensor:
        like = getattr(self, name + SUFFIX[2])
        plain = like.new_full((self.dim,), float(name == "key_gain"))
        if self.ways(site) == 1:
            return plain.unsqueeze(0)
        i = self.nth_several[site]
        return torch.stack([plain if self.only == "values" else getattr(self, name)[i], like[i]])
