"""Hyper-Connections, with Attention Residuals on top of them.

H [n, D] are the streams of Hyper-Connections. v_i are the sources of attnres: e, the sums of finished blocks, and the current block's sum.

    h_0 = A_mᵀ H;      h_s = A_mᵀ H + Σ_i p_i v_i,    p = softmax_i(query_s · (key_gain_s ⊙ RMS(v_i)))
    H ← A_rᵀ H + Bᵀ y_sᵀ, and y_s is added to the sources;      h_S = the sum of H's rows

Motivation: over depth the streams are a linear recurrence with n states, which cannot address single sources. attnres is a softmax
over named sources, without a state. Each has what the other lacks, so a site reads both. The sum is that of attnres' routing="add",
with n streams instead of one, and it starts like it: at step 0 every row of H is the plain stream, and a site reads one of them.

Streams that start again in every block, inside attnres, would add less. With static weights they are learned weights of the block's
own outputs, and a block of four sites has at most three of those.

Costs: both rules, each with its own kernels, and an addition per site. In 12 blocks with n=4 and block_size=4 that is about 680
activations forward and 790 backward. attnres alone takes 196 and 222, hyper 426 and 579.
"""

from typing import Annotated, Any

from torch import Tensor

from depthmix.insight import register_streams, stream_map, streams_of
from depthmix.mixers import Mixer, State, register, register_state
from depthmix.mixers.attnres import AttnRes
from depthmix.mixers.hyper import HyperConnections
from depthmix.mixers.options import at_least


@register_state
class Both(State):
    """The states of the two rules."""

    below: Any
    above: Any

    def template(self) -> Tensor:
        return self.above.template()

    def parts(self) -> tuple[Any, Any]:
        for part in (self.below, self.above):
            part.frozen = self.frozen
        return self.below, self.above


@register("attnres_on_streams")
class AttnResOnStreams(Mixer):
    """below.*: the parameters of hyper; above.*: those of attnres, whose row for finish is unused."""

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        block_size: Annotated[int | None, at_least(1)] = None,
        n: Annotated[int, at_least(1)] = 4,
        static: bool = False,
    ) -> None:
        super().__init__(dim, n_blocks)
        self.block_size, self.n, self.static = block_size or 1, n, static
        sites: dict[str, Any] = {"sites": self.layout.blocks}
        self.below = HyperConnections(dim, **sites, n=n, static=static)
        self.above = AttnRes(dim, **sites, block_size=block_size)

    def reset_parameters(self) -> None:
        self.below.reset_parameters()
        self.above.reset_parameters()

    def _start(self, x: Tensor) -> Both:
        return Both(below=self.below.start(x), above=self.above.start(x))

    def _read(self, state: Both, site: int) -> Tensor:
        below, above = state.parts()
        h: Any = self.below.read(below, site)
        if site == 0:  # there is nothing but e, and it is in the streams
            return h
        mixture: Any = self.above.read(above, site)
        return h + mixture

    def _write(self, state: Both, site: int, y: Tensor) -> Both:
        below, above = state.parts()
        return state.next(below=self.below.write(below, site, y), above=self.above.write(above, site, y))

    def _finish(self, state: Both) -> Tensor:
        return self.below.finish(state.parts()[0])


def _streams(mixer: AttnResOnStreams, state: Both) -> Tensor | None:
    return streams_of(mixer.below, state.parts()[0])


def _stream_map(mixer: AttnResOnStreams, state: Both) -> Tensor | None:
    return stream_map(mixer.below, state.parts()[0])


register_streams(Both, _streams, _stream_map)
