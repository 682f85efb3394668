"""Attention Residuals (Kimi Team 2026, arXiv 2603.15031), Full and Block, with the paper's ablations.

    logit_i = query_s · (key_gain_s ⊙ RMS(v_i));    p = softmax(logits) over the sources;    h_s = Σ_i p_i v_i

Full: the sources are e and every earlier output. Block: e, the sums of the finished blocks of `block_size` sites, and,
unless the site is the first of its block, the partial sum of its own. finish reads all of them with a query of its own.
block_size="all" is one block: e, and the sum of every output so far.
These blocks count sites, whatever the model's own blocks are.
routing="add" (arXiv 2605.18855): h_0 = e, then the plain stream + Σ_i p_i v_i; finish returns the plain stream.
With ways=2 an attention site reads two mixtures, one for queries and keys and one for values; with ways=3 each has its own.
Queries start at zero: plain at step 0. With query_init they start at N(0, query_init²), which the paper advises against.
output_gain: with γ_s ⊙ y_s where a site has put out y_s, γ a learned vector as in LayerScale, which starts at that number.
value_norm: h_s = Σ_i p_i RMS(v_i). scaled_logits: logits divided by sqrt(D), or by the root of a head's channels. Inkling 2 has both.
query="input": query_s = W_s RMS(newest source) / D. The paper has no 1/D; without it a step of Adam moves logits by up to lr · D².
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from depthmix.mixers.base import Mixer
from depthmix.mixers.checks import Read
from depthmix.mixers.options import OptionError, at_least
from depthmix.mixers.registry import register
from depthmix.mixers.state import State, last_of, last_rows, register_state
from depthmix.ops import depth_attention, depth_sum
from depthmix.ops.depth_attention.reference import weighted_sum
from depthmix.ops.matmul import matmul
from depthmix.ops.precision import rms_normalize, rms_scale

# By number of ways: the suffix of parameters for an attention site's ways after the first.
SUFFIX = {2: "_v", 3: "_kv"}


@register_state
class AttnResState(State):
    """The sources, the newest not yet added up, and, with additive routing, the plain stream beside them."""

    blocks: tuple[Tensor, ...] = ()  # e and the sums of the finished blocks, oldest first, without the newest source
    partial: Tensor | None = None  # the newest source is partial + pending: the last finished block or the current one
    pending: Tensor  # e, or what was written last
    stream: Tensor | None = None  # e + every output, for routing="add"

    def template(self) -> Tensor:
        return self.blocks[0] if self.blocks else self.pending

    def newest(self) -> Tensor:
        """Return the newest source, added up."""
        return self.pending if self.partial is None else self.partial + self.pending

    def complete_sums(self) -> Any:
        return self if self.partial is None else dataclasses.replace(self, partial=None, pending=self.newest())

    def last(self, n: int) -> Any:
        return dataclasses.replace(
            self,
            blocks=last_of(self.blocks, n),
            partial=None if self.partial is None else last_rows(self.partial, n),
            pending=last_rows(self.pending, n),
            stream=None if self.stream is None else last_rows(self.stream, n),
            note=None,
        )


@register("attnres")
class AttnRes(Mixer):
    """query [S+1, D] = 0 and key_gain [S+1, D] = 1, the last row for finish (none with routing="add").

    The rows of the values with ways=2: query_v, key_gain_v [A, D]; of keys and values with ways=3: query_kv, key_gain_kv [A, 2, D],
    for the A attention sites, of which blocks of two sites have one each. With output_gain: gamma [S, D].
    """

    fast_paths = ("depthmix.fast.attention_decoding:DECODING", "depthmix.fast.attention:TRAINING")
    decayed = frozenset({"query_proj", "query_proj_v", "query_proj_kv"})
    query: Tensor
    key_gain: Tensor
    gamma: Tensor

    def __init__(
        self,
        dim: int,
        n_blocks: int,
        *,
        block_size: Annotated[int | Literal["all"] | None, at_least(1)] = None,
        ways: Literal[1, 2, 3] = 1,
        query: Literal["learned", "input"] = "learned",
        query_init: Annotated[float, at_least(0)] = 0.0,
        weights: Literal["softmax", "sigmoid", "static"] = "softmax",
        key_norm: bool = True,
        value_norm: bool = False,
        scaled_logits: bool = False,
        heads: Annotated[int, at_least(1)] = 1,
        window: Annotated[int | None, at_least(1)] = None,
        routing: Literal["replace", "add"] = "replace",
        output_gain: Annotated[float | None, at_least(0)] = None,
        eps: Annotated[float, at_least(0)] = 1e-6,
    ) -> None:
        super().__init__(dim, n_blocks)
        if dim % heads:
            divisors = ", ".join(str(h) for h in range(1, dim + 1) if dim % h == 0)
            raise OptionError(f"attnres: heads must divide dim={dim} (one of {divisors}), got {heads}")
        if weights == "static" and (
            query != "learned" or query_init or heads != 1 or not key_norm or value_norm or scaled_logits
        ):
            raise OptionError(
                "attnres: weights='static' has no queries and keys, so query, query_init, key_norm, value_norm, scaled_logits and "
                "heads cannot be set"
            )
        if ways > 1 and not self.layout.attention:
            raise OptionError(
                f"attnres: ways={ways} is for attention, and no site is: a name that ends in 'attention' makes it one"
            )
        self.block_size = self.n_sites if block_size == "all" else block_size or 1
        self.n_ways, self.query_from, self.weights = ways, query, weights
        self.query_init = query_init
        # Of the sites that read several mixtures: {site: its row in the parameters of the further ways}.
        self.nth_several = {site: i for i, site in enumerate(self.layout.attention)}
        self.key_norm, self.heads, self.window, self.routing, self.eps = key_norm, heads, window, routing, eps
        self.value_norm, self.logit_scale = value_norm, (dim // heads) ** -0.5 if scaled_logits else 1.0
        if weights == "static":
            self._add("logits", self._most_sources())
        else:
            self._add(*(("query", dim) if query == "learned" else ("query_proj", dim, dim)))
            if key_norm:
                self._add("key_gain", dim)
        self.output_gain = output_gain
        self.register_parameter("gamma", None if output_gain is None else nn.Parameter(torch.empty(self.n_sites, dim)))
        self.reset_parameters()

    def _add(self, name: str, *shape: int) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(self.n_readers, *shape)))
        if self.n_ways > 1:
            ways = () if self.n_ways == 2 else (self.n_ways - 1,)
            further = nn.Parameter(torch.empty(len(self.layout.attention), *ways, *shape))
            self.register_parameter(name + SUFFIX[self.n_ways], further)

    @property
    def n_readers(self) -> int:
        """Count the sites, and finish unless it returns the plain stream."""
        return self.n_sites if self.routing == "add" else self.n_sites + 1

    def _most_sources(self) -> int:
        others = -(-(self.n_readers - 1) // self.block_size)
        return 1 + (others if self.window is None else min(others, self.window))

    def reset_parameters(self) -> None:
        for name, p in self.named_parameters():
            if self.query_init and name.startswith("query"):
                nn.init.normal_(p, std=self.query_init)
            elif name == "gamma":
                nn.init.constant_(p, self.output_gain or 0.0)
            else:
                nn.init.constant_(p, 1.0 if name.startswith("key_gain") else 0.0)

    def ways(self, site: int) -> int:
        return self.n_ways if site in self.nth_several else 1

    def weight_options(self) -> dict[str, Any]:
        options = super().weight_options()
        # How queries begin does not matter to weights.
        options.pop("query_init", None)
        others = -(-(self.n_readers - 1) // self.block_size)
        windowed = self.window is not None and self.window < others
        named = {"block_size": self.block_size, "window": self.window if windowed else None}
        return options | named | {"output_gain": self.output_gain is not None}

    # The rule.

    def _start(self, x: Tensor) -> AttnResState:
        return AttnResState(pending=x, stream=x if self.routing == "add" else None)

    def _read(self, state: AttnResState, site: int) -> Read:
        h = self.routed(state, self.mixtures(state, site))
        return h if len(h) > 1 else h[0]

    def _write(self, state: AttnResState, site: int, y: Tensor) -> AttnResState:
        return self.after(state, site, y, state.take_note())

    def _finish(self, state: AttnResState) -> Tensor:
        return self.mixtures(state, self.n_sites)[0] if state.stream is None else state.stream

    def mixtures(self, state: AttnResState, site: int, **call: Any) -> tuple[Tensor, ...]:
        """Mix the sources that a site, or finish, reads: one mixture per way.

        Args:
            state: the sources.
            site: the reader.
            call: what else `depth_attention` is told, such as the norm that follows.
        """
        newest = state.newest()
        state.leave_note(newest)
        sources = (*self.windowed(state.blocks), newest)
        if self.weights == "static":
            p = torch.softmax(self._rows("logits", site)[:, : len(sources)], dim=-1)
            return depth_sum(sources, static=p.unsqueeze(-1))
        query = self._query(state, site, newest)
        gain = self._rows("key_gain", site) if self.key_norm else None
        query = query if self.logit_scale == 1.0 else query * self.logit_scale
        call |= {
            "key_norm": self.key_norm,
            "heads": self.heads,
            "activation": self.weights,
            "value_norm": self.value_norm,
        }
        if not state.frozen:
            return depth_attention(query, sources, gain, self.eps, **call)
        call |= {"return_weights": True, "backend": "reference"}
        observed = [state.observe(v) for v in sources]
        _, p = depth_attention(query, observed, gain, self.eps, **call)
        p = p if self.heads > 1 else p.unsqueeze(-1)
        if self.value_norm:
            p = p * torch.stack([rms_scale(v, self.eps) for v in observed], dim=-2)
        return tuple(weighted_sum(p_way.detach(), sources) for p_way in p)

    def routed(self, state: AttnResState, mixed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Add the mixtures to the plain stream, for routing="add"."""
        if state.stream is None:
            return mixed
        if state.site == 0:  # nothing but e is there, and it is the stream
            return (state.stream,) * len(mixed)
        return tuple(state.stream + h for h in mixed)

    def after(self, state: AttnResState, site: int, y: Tensor, newest: Tensor | None) -> Any:
        """Return the state after y; newest: the newest source before it, if the read has added it up."""
        newest = state.newest() if newest is None else newest
        opens = site % self.block_size == 0  # the newest source is finished, and y begins a block
        blocks = self.windowed((*state.blocks, newest)) if opens else state.blocks
        stream = None if state.stream is None else state.stream + y
        return state.next(blocks=blocks, partial=None if opens else newest, pending=y, stream=stream)

    def windowed(self, blocks: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the blocks that a site reads besides the newest source."""
        if self.window is None or not blocks:
            return blocks
        return (blocks[0], *blocks[max(1, len(blocks) + 1 - self.window) :])

    def output_gains(self) -> Mapping[int, Tensor]:
        return {} if self.output_gain is None else dict(enumerate(self.gamma.unbind(0)))

    def _query(self, state: AttnResState, site: int, newest: Tensor) -> Tensor:
        """Return the query of every way: [W, D], or of the input [W, ..., D]."""
        if self.query_from == "learned":
            return self._rows("query", site)
        normed = rms_normalize(state.observe(newest), self.eps)
        queries = [matmul(normed, (w / self.dim).to(normed.dtype).T) for w in self._rows("query_proj", site)]
        return torch.stack(queries) if len(queries) > 1 else queries[0].unsqueeze(0)  # no copy of one

    def _rows(self, name: str, site: int) -> Tensor:
        """Return a parameter's rows for every way of a site: [W, ...]."""
        row = getattr(self, name)[site].unsqueeze(0)
        if self.ways(site) == 1:
            return row
        further = self.further(name)[self.nth_several[site]]
        return torch.cat([row, further.unsqueeze(0) if self.n_ways == 2 else further])

    def further(self, name: str) -> Any:
        """Return the parameter for the ways after the first."""
        return getattr(self, name + SUFFIX[self.n_ways])
