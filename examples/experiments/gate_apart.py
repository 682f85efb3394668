"""Attention Residuals whose SwiGLU MLPs read two mixtures: one for the gate, one for the up projection.

    logit_i = query_s · (key_gain_s ⊙ RMS(v_i));    p = softmax(logits) over the sources;    h_s = Σ_i p_i v_i

as in attnres, and at an MLP a second row (query_v, key_gain_v) gives a second mixture of the same sources:

    y_s = down(silu(gate norm(h_s)) ⊙ up norm'(h'_s))

Motivation: in attention, values pass through linearly, and they gain most from a mixture of their own. In a SwiGLU the up projection
passes through linearly. values=True: attention has a second mixture too, for its values, as with attnres' ways=2.
Queries start at zero, where both mixtures are the same mean, so the rule starts as attnres.

Costs beyond attnres with ways=1: at every MLP about 2.5 activations forward (a second normed mixture, from the same read of the
sources) and 5 backward. ways=2 costs as much at every attention. In 12 blocks with block_size=4 that is 28 and 54 more than the 193
and 223 of one way.
"""

from typing import Annotated

import torch
from torch import nn

from depthmix.mixers import register
from depthmix.mixers.attnres import SUFFIX, AttnRes
from depthmix.mixers.options import OptionError, at_least


@register("gate_apart")
class GateApart(AttnRes):
    """query, key_gain [S+1, D] as in attnres; query_v = 0, key_gain_v = 1, both [A, D], for the A sites with two mixtures."""

    decayed = frozenset()
    _apart: list[int]  # the sites with two mixtures

    def __init__(
        self, dim: int, n_blocks: int, *, block_size: Annotated[int | None, at_least(1)] = None, values: bool = False
    ) -> None:
        names = enumerate(self.layout.names)
        # Past nn.Module, which is not there yet.
        self.__dict__["_apart"] = [s for s, n in names if n == "mlp" or (values and s in self.layout.attention)]
        if not self._apart:
            raise OptionError("gate_apart is for MLPs, and no site is called 'mlp'")
        super().__init__(dim, n_blocks, block_size=block_size)
        self.values, self.n_ways = values, 2
        self.nth_several = {site: i for i, site in enumerate(self._apart)}

    def _add(self, name: str, *shape: int) -> None:
        super()._add(name, *shape)  # with one way everywhere
        self.register_parameter(name + SUFFIX[2], nn.Parameter(torch.empty(len(self._apart), *shape)))
