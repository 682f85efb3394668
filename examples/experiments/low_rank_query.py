"""Attention Residuals with a query that depends on the input through a few numbers.

    x = RMS(the newest source);      query_s(x) = query_s + U_sᵀ V_s x / (rank √D)      (U_s, V_s [rank, D])
    logit_i = query_s(x) · (key_gain_s ⊙ RMS(v_i));    p = softmax(logits) over the sources;    h_s = Σ_i p_i v_i

Sources, blocks and finish are attnres'. Its query="input" has one D x D matrix per site instead of U_sᵀ V_s. In the paper this matrix
gains 0.006 nats, and it costs a product as large as an output projection and a query per token. At low rank no query is formed:

    logit_i = k_s0 · RMS(v_i) + Σ_r z_r (k_sr · RMS(v_i)),    z = V_s x / √D,    k_s0 = key_gain_s ⊙ query_s,    k_sr = key_gain_s ⊙ U_sr / rank

A source therefore needs 1 + rank numbers for each of its readers, computed once for all readers, and the newest source `rank` more.
query and U start at zero and V at N(0, 1). The rule starts as attnres, and U has a gradient from the first step on. With the two
divisors a step of Adam moves a query about as much as in attnres. Without them (V from N(0, 1/D)) it moved z by lr D.

Costs beyond attnres: for every newest source about 3 activations forward (its products and norm; it is added up separately) and 6
backward. In 12 blocks with block_size=4 that is 75 and 150 more than 193 and 223. Every pair of a source and a reader also takes
1 + rank numbers per token. A kernel that holds the sources anyway would need none of this traffic: 1 + rank dot products per source
instead of one.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from depthmix.fast.attention import AttentionTraining, KernelNote, TapeState
from depthmix.mixers import register, register_state
from depthmix.mixers.attnres import AttnRes
from depthmix.mixers.options import at_least
from depthmix.ops import depth_sum
from depthmix.ops.backend import choose
from depthmix.ops.depth_sum.op import why_unsupported
from depthmix.ops.depth_sum.source_order import Weights, make_source, read_sums
from depthmix.ops.norm import rms_norm, side_by_side
from depthmix.ops.source_products import source_products


class Tape(NamedTuple):
    """Values that one read passes to the next."""

    k: Tensor  # [readers, 1 + rank, D]
    blocks: tuple[Tensor, ...]
    partial: Tensor | None
    scores: tuple[tuple[int, tuple[Tensor, ...]], ...]  # by block: its first reader, and [1 + rank, ...] from it on
    trained: bool
    kernels: bool


@register_state
class LowRankState(TapeState):
    def last(self, n: int) -> Any:
        self.tape = None  # its scores are of all tokens
        return super().last(n)


class LowRankReads(AttentionTraining):
    """Reads with and without kernels, including reads of frozen states."""

    def start(self, mixer: Any, x: Tensor) -> TapeState:
        return LowRankState(pending=x)

    def resume(self, mixer: Any, state: Any) -> TapeState | None:
        resumed: TapeState = state if isinstance(state, LowRankState) else state.as_type(LowRankState)
        return resumed

    def tape(self, mixer: Any, state: Any) -> Any:
        """Return the state's tape, or a new one without scores for a state from elsewhere."""
        trained, kernels = torch.is_grad_enabled(), self._use_kernels(mixer, state)
        tape: Any = state.tape
        if tape is None or tape.kernels != kernels or (trained and not tape.trained):
            k = torch.cat([mixer.query.unsqueeze(1), mixer.U / mixer.rank], dim=1) * mixer.key_gain.unsqueeze(1)
            blocks = tuple(make_source(v)[0] for v in state.blocks) if kernels else state.blocks
            tape = Tape(k, blocks, state.partial, (), trained, kernels)
        return tape

    def _use_kernels(self, mixer: Any, state: Any) -> bool:
        if state.frozen or torch.compiler.is_compiling():
            return False
        tensors = [*state.blocks, state.pending, *(() if state.partial is None else (state.partial,))]
        why = why_unsupported(tensors, wide=mixer.query.dtype == torch.float64)
        if why is not None and len(tensors) > 1:  # an output in another dtype: the reference steps in
            return False
        return choose(mixer.name, state.pending, why) == "triton"

    def mix(
        self, mixer: Any, state: Any, site: int, out_gain: Sequence[Tensor] = (), out_eps: float = 0.0
    ) -> tuple[Tensor, ...]:
        tape: Tape = self.tape(mixer, state)
        parts = (state.pending, None) if tape.partial is None else (tape.partial, state.pending)
        newest = make_source(*parts)[0] if tape.kernels else parts[0] if parts[1] is None else parts[0] + parts[1]
        own, rank = 1 + mixer.rank, mixer.rank
        rows, sizes = tape.k[site:], [own] * (len(tape.k) - site)
        known = [self._score(mixer, state, v, rows, sizes) for v in tape.blocks[len(tape.scores) :]]
        scores = (*tape.scores, *((site, s) for s in known))
        lasting = site % mixer.block_size == 0  # the newest source stays as it is, for all readers to come
        rows, sizes = (rows, sizes) if lasting else (rows[:1], sizes[:1])
        z, *found = self._score(
            mixer, state, newest, torch.cat([mixer.V[site] / math.sqrt(mixer.dim), rows.flatten(0, 1)]), [rank, *sizes]
        )
        s = torch.stack([*(by_reader[site - first] for first, by_reader in scores), found[0]])  # [n, 1 + rank, ...]
        p = (s[:, 0] + (s[:, 1:] * z).sum(1)).softmax(0).movedim(0, -1).unsqueeze(-2)  # [..., 1, n]
        state.leave_note(
            KernelNote(newest, tape._replace(scores=(*scores, (site, tuple(found))) if lasting else scores))
        )
        sources = (*tape.blocks, newest)
        if tape.kernels:
            gain: Any = out_gain or None
            gain = side_by_side(out_gain).float() if gain and torch.is_grad_enabled() else gain  # a gradient is fp32
            return read_sums(sources, Weights(dynamic=p), None, gain, out_eps).y
        h = depth_sum(sources, dynamic=p.detach() if state.frozen else p, backend="reference")
        return tuple(rms_norm(t, g, out_eps) for t, g in zip(h, out_gain, strict=True)) if out_gain else h

    def _score(self, mixer: Any, state: Any, v: Tensor, w: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        return source_products(state.observe(v), w.reshape(-1, mixer.dim), mixer.eps).split(sizes)


LowRankState.path = LowRankReads()


@register("low_rank_query")
class LowRankQuery(AttnRes):
    """query = 0, key_gain = 1, both [S+1, D], and U = 0, V ~ N(0, 1), both [S+1, rank, D]; the last rows are finish's."""

    fast_paths = (LowRankState.path,)
    decayed = frozenset({"U", "V"})

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        block_size: Annotated[int | None, at_least(1)] = None,
        rank: Annotated[int, at_least(1)] = 8,
    ) -> None:
        super().__init__(dim, n_blocks, block_size=block_size)
        self.rank = rank
        self.U = nn.Parameter(torch.empty(self.n_sites + 1, rank, dim))
        self.V = nn.Parameter(torch.empty(self.n_sites + 1, rank, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "V" in self._parameters:  # the base class resets before it is there
            nn.init.normal_(self.V)
