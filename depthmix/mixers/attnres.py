"""Attention Residuals (Kimi Team 2026, arXiv 2603.15031), Full and Block, with the paper's ablations.

    logit_i = query_s · (key_gain_s ⊙ RMS(v_i));    p = softmax(logits) over the sources;    h_s = Σ_i p_i v_i

Full: the sources are e and every earlier output. Block: e, the sums of the finished blocks of `block_size` sites, and,
unless the site is the first of its block, the partial sum of its own. finish reads all of them with a query of its own.
With ways=3 an attention site reads three mixtures, for queries, keys and values. Queries start at zero: plain at step 0.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from depthmix.mixers.base import Mixer, Norm, Read, register
from depthmix.mixers.options import OptionError, at_least
from depthmix.mixers.state import State, register_state
from depthmix.ops import depth_attention, depth_sum
from depthmix.ops.depth_attention.reference import weighted_sum
from depthmix.ops.norm import eps_of, is_plain_rms_norm
from depthmix.ops.precision import rms_normalize


@register_state
class AttnResState(State):
    """The sources and, with additive routing, the plain stream beside them."""

    blocks: tuple[Tensor, ...]  # e and the sums of the finished blocks, oldest first
    partial: Tensor | None = None  # the sum of the current block so far; None before its first output
    stream: Tensor | None = None  # e + every output, for routing="add"

    def template(self) -> Tensor:
        return self.blocks[0]


@register("attnres")
class AttnRes(Mixer):
    """query [S+1, D] = 0 and key_gain [S+1, D] = 1, the last row for finish; ways=3: query_kv, key_gain_kv [N, 2, D]."""

    decayed = frozenset({"query_proj", "query_proj_kv"})

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        block_size: Annotated[int | None, at_least(1)] = None,
        ways: Literal[1, 3] = 1,
        query: Literal["learned", "input"] = "learned",
        weights: Literal["softmax", "sigmoid", "static"] = "softmax",
        key_norm: bool = True,
        heads: Annotated[int, at_least(1)] = 1,
        window: Annotated[int | None, at_least(1)] = None,
        routing: Literal["replace", "add"] = "replace",
        eps: Annotated[float, at_least(0)] = 1e-6,
    ) -> None:
        super().__init__(dim, n_blocks)
        if dim % heads:
            divisors = ", ".join(str(h) for h in range(1, dim + 1) if dim % h == 0)
            raise OptionError(f"attnres: heads must divide dim={dim} (one of {divisors}), got {heads}")
        if weights == "static" and (query != "learned" or heads != 1 or not key_norm):
            raise OptionError(
                "attnres: weights='static' has no queries and keys, so query, key_norm and heads cannot be set"
            )
        self.block_size, self.n_ways, self.query_from, self.weights = block_size or 1, ways, query, weights
        self.key_norm, self.heads, self.window, self.routing, self.eps = key_norm, heads, window, routing, eps
        if weights == "static":
            self._add("logits", self._most_sources())
        else:
            self._add(*(("query", dim) if query == "learned" else ("query_proj", dim, dim)))
            if key_norm:
                self._add("key_gain", dim)
        self.reset_parameters()

    def _add(self, name: str, *shape: int) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(self.n_sites + 1, *shape)))
        if self.n_ways == 3:
            self.register_parameter(f"{name}_kv", nn.Parameter(torch.empty(self.n_blocks, 2, *shape)))

    def _most_sources(self) -> int:
        others = -(-self.n_sites // self.block_size)
        return 1 + (others if self.window is None else min(others, self.window))

    def reset_parameters(self) -> None:
        for name, p in self.named_parameters():
            nn.init.constant_(p, 1.0 if name.startswith("key_gain") else 0.0)

    def ways(self, site: int) -> int:
        return self.n_ways if site % 2 == 0 else 1

    def _rows(self, name: str, site: int) -> Tensor:
        """The parameter's rows for every way of a site: [W, ...]."""
        row = getattr(self, name)[site].unsqueeze(0)
        if self.n_ways == 1 or site % 2 == 1 or site == self.n_sites:
            return row
        return torch.cat([row, getattr(self, f"{name}_kv")[site // 2]])

    def _sources(self, state: AttnResState) -> tuple[Tensor, ...]:
        sources = state.blocks if state.partial is None else (*state.blocks, state.partial)
        return sources if self.window is None else (sources[0], *sources[1:][-self.window :])

    def _mix(self, state: AttnResState, site: int, **out_norm: Any) -> tuple[Tensor, ...]:
        """The mixtures a site (or finish) reads; out_norm: arguments of depth_attention for the norm that follows."""
        sources = self._sources(state)
        if self.weights == "static":
            p = torch.softmax(self._rows("logits", site)[:, : len(sources)], dim=-1)
            return depth_sum(sources, static=p.unsqueeze(-1))
        if self.query_from == "learned":
            query = self._rows("query", site)
        else:
            newest = rms_normalize(state.observe(sources[-1]), self.eps)
            query = torch.stack([newest @ w.to(newest.dtype).T for w in self._rows("query_proj", site)])
        gain = self._rows("key_gain", site) if self.key_norm else None
        shape: dict[str, Any] = {"key_norm": self.key_norm, "heads": self.heads, "activation": self.weights}
        if not state.frozen:
            return depth_attention(query, sources, gain, self.eps, **shape, **out_norm)
        seen = [state.observe(v) for v in sources]
        _, p = depth_attention(query, seen, gain, self.eps, return_weights=True, **shape)
        p = p if self.heads > 1 else p.unsqueeze(-1)
        return tuple(weighted_sum(p_way.detach(), sources) for p_way in p)

    def _route(self, state: AttnResState, mixed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return mixed if state.stream is None else tuple(state.stream + h for h in mixed)

    def _start(self, x: Tensor) -> AttnResState:
        return AttnResState(blocks=(x,), stream=x if self.routing == "add" else None)

    def _read(self, state: AttnResState, site: int) -> Read:
        h = self._route(state, self._mix(state, site))
        return h if len(h) > 1 else h[0]

    def _read_normed(self, state: AttnResState, site: int, norms: Sequence[Norm]) -> Read | None:
        if self.routing == "add" or self.weights == "static" or state.frozen or not all(map(is_plain_rms_norm, norms)):
            return None
        rms: Sequence[Any] = norms
        if any(n.eps != rms[0].eps for n in rms):
            return None
        eps = eps_of(rms[0], state.blocks[0].dtype)
        h = self._mix(state, site, out_gain=torch.stack([n.weight for n in rms]), out_eps=eps)
        return h if len(h) > 1 else h[0]

    def _write(self, state: AttnResState, site: int, y: Tensor) -> AttnResState:
        partial = y if state.partial is None else state.partial + y
        stream = None if state.stream is None else state.stream + y
        if (site + 1) % self.block_size:
            return state.next(partial=partial, stream=stream)
        blocks = (*state.blocks, partial)
        if self.window is not None:
            blocks = (blocks[0], *blocks[1:][-self.window :])
        return state.next(blocks=blocks, partial=None, stream=stream)

    def _finish(self, state: AttnResState) -> Tensor:
        return self._route(state, self._mix(state, self.n_sites))[0]
