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
query="input": query_s = W_s RMS(newest source) / D. The paper has no 1/D; without it a step of Adam moves logits by up to lr · D².
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from depthmix.mixers.attnres_decoding import SlotReads
from depthmix.mixers.base import Norm, Read, register
from depthmix.mixers.cutting import here
from depthmix.mixers.options import OptionError, at_least
from depthmix.mixers.slots import SlotState
from depthmix.mixers.state import State, last_of, last_rows, register_state
from depthmix.ops import depth_attention, depth_sum
from depthmix.ops.backend import choose
from depthmix.ops.backward_mail import seen_from_outside
from depthmix.ops.depth_attention.op import is_usual, why_unsupported
from depthmix.ops.depth_attention.precomputed_logits import (
    KNOWN_WAYS,
    FirstRead,
    GroupMixtures,
    KnownLogits,
    precompute_block_group,
    precompute_group,
    precompute_logits,
)
from depthmix.ops.depth_attention.reference import weighted_sum
from depthmix.ops.depth_attention.source_major import OP, is_pair, read_sources
from depthmix.ops.matmul import matmul
from depthmix.ops.norm import fused_gains, side_by_side
from depthmix.ops.precision import rms_normalize
from depthmix.ops.row_gradients import collect_rows
from depthmix.ops.torch_internals import transformed


class Tape(NamedTuple):
    """What kernels pass from read to read: the queries of all sites, and the sources as their autograd knows them."""

    queries: Tensor  # [R, D], key gains included, the ways of a site side by side
    blocks: tuple[Tensor, ...]
    partial: Tensor | None
    far: GroupMixtures | KnownLogits | None = None  # what far_sources or known_sources found for the sites to come


OWN = {2: "_v", 3: "_kv"}  # by ways: how parameters end that belong to an attention site's ways after the first


@register_state
class AttnResState(State):
    """The sources, the newest not yet added up, and, with additive routing, the plain stream beside them."""

    blocks: tuple[Tensor, ...] = ()  # e and the sums of the finished blocks, oldest first, without the newest source
    partial: Tensor | None = None  # the newest source is partial + pending: the last finished block or the current one
    pending: Tensor  # e, or what was written last
    stream: Tensor | None = None  # e + every output, for routing="add"
    tape: Tape | None = dataclasses.field(default=None, repr=False, metadata={"cache": True})

    def template(self) -> Tensor:
        return self.blocks[0] if self.blocks else self.pending

    def last(self, n: int) -> Any:
        kept: dict[str, Any] = {
            "blocks": last_of(self.blocks, n),
            "partial": None if self.partial is None else last_rows(self.partial, n),
        }
        stream = None if self.stream is None else last_rows(self.stream, n)
        tape = None if self.tape is None else self.tape._replace(**kept, far=None)
        return dataclasses.replace(
            self, **kept, pending=last_rows(self.pending, n), stream=stream, tape=tape, note=None
        )


@register("attnres")
class AttnRes(SlotReads):
    """query [S+1, D] = 0 and key_gain [S+1, D] = 1, the last row for finish (none with routing="add").

    The rows of the values with ways=2: query_v, key_gain_v [A, D]; of keys and values with ways=3: query_kv, key_gain_kv [A, 2, D],
    for the A attention sites, of which blocks of two sites have one each. With output_gain: gamma [S, D].
    """

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
        if weights == "static" and (query != "learned" or query_init or heads != 1 or not key_norm):
            raise OptionError(
                "attnres: weights='static' has no queries and keys, so query, query_init, key_norm and heads cannot be set"
            )
        if ways > 1 and not self.layout.attention:
            raise OptionError(
                f"attnres: ways={ways} is for attention, and no site is: a name that ends in 'attention' makes it one"
            )
        self.block_size = self.n_sites if block_size == "all" else block_size or 1
        self.n_ways, self.query_from, self.weights = ways, query, weights
        self.query_init = query_init
        self._nth_attention = {site: i for i, site in enumerate(self.layout.attention)}
        self.key_norm, self.heads, self.window, self.routing, self.eps = key_norm, heads, window, routing, eps
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
        self.register_parameter(name, nn.Parameter(torch.empty(self._n_readers(), *shape)))
        if self.n_ways > 1:
            ways = () if self.n_ways == 2 else (self.n_ways - 1,)
            own = nn.Parameter(torch.empty(len(self.layout.attention), *ways, *shape))
            self.register_parameter(name + OWN[self.n_ways], own)

    def _n_readers(self) -> int:
        """Sites, and finish unless it returns the plain stream."""
        return self.n_sites if self.routing == "add" else self.n_sites + 1

    def _most_sources(self) -> int:
        others = -(-(self._n_readers() - 1) // self.block_size)
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
        return self.n_ways if site in self._nth_attention else 1

    def weight_options(self) -> dict[str, Any]:
        own = super().weight_options()
        own.pop("query_init", None)  # how queries begin
        others = -(-(self._n_readers() - 1) // self.block_size)
        windowed = self.window is not None and self.window < others
        named = {"block_size": self.block_size, "window": self.window if windowed else None}
        return own | named | {"output_gain": self.output_gain is not None}

    def owners(self, name: str) -> Sequence[int] | int:
        return self.layout.attention if name.endswith(OWN.get(self.n_ways, " ")) else super().owners(name)

    def _settled(self, state: AttnResState) -> AttnResState:
        if state.partial is None:
            return state
        return dataclasses.replace(state, partial=None, pending=state.partial + state.pending, tape=None, note=None)

    def _rows(self, name: str, site: int) -> Tensor:
        """The parameter's rows for every way of a site: [W, ...]."""
        row = getattr(self, name)[site].unsqueeze(0)
        if self.ways(site) == 1:
            return row
        own = getattr(self, name + OWN[self.n_ways])[self._nth_attention[site]]
        return torch.cat([row, own.unsqueeze(0) if self.n_ways == 2 else own])

    def _own(self, name: str) -> Tensor:
        """The parameter's rows for the ways of attention sites after the first: [A, W-1, ...]."""
        rows = here(getattr(self, name + OWN[self.n_ways]))
        return rows.unsqueeze(1) if self.n_ways == 2 else rows

    def _windowed(self, blocks: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The blocks that a site reads besides the newest source."""
        if self.window is None or not blocks:
            return blocks
        return (blocks[0], *blocks[max(1, len(blocks) + 1 - self.window) :])

    def _mix(
        self, state: AttnResState, site: int, out_gain: Sequence[Tensor] = (), out_eps: float = 0.0
    ) -> tuple[Tensor, ...]:
        """The mixtures a site (or finish) reads; out_gain, out_eps: of the norms that follow, [D] for each way."""
        tape = None if state.frozen else self._tape(state)
        if tape is not None:
            return self._mix_with_kernels(state, tape, site, out_gain, out_eps)
        newest = state.pending if state.partial is None else state.partial + state.pending
        state.leave_note((newest, state.tape))
        sources = (*self._windowed(state.blocks), newest)
        if self.weights == "static":
            p = torch.softmax(self._rows("logits", site)[:, : len(sources)], dim=-1)
            return depth_sum(sources, static=p.unsqueeze(-1))
        if self.query_from == "learned":
            query = self._rows("query", site)
        else:
            seen = rms_normalize(state.observe(newest), self.eps)
            rows = self._rows("query_proj", site)
            queries = [matmul(seen, (w / self.dim).to(seen.dtype).T) for w in rows]
            query = torch.stack(queries) if len(queries) > 1 else queries[0].unsqueeze(0)  # no copy of one
        gain = self._rows("key_gain", site) if self.key_norm else None
        shape: dict[str, Any] = {"key_norm": self.key_norm, "heads": self.heads, "activation": self.weights}
        if not state.frozen:
            if out_gain:
                shape |= {"out_gain": side_by_side(out_gain), "out_eps": out_eps}
            by_read = not self._usual() and self._why_no_kernels(sources) is None
            return depth_attention(query, sources, gain, self.eps, **shape, backend=None if by_read else "reference")
        _, p = depth_attention(
            query,
            [state.observe(v) for v in sources],
            gain,
            self.eps,
            return_weights=True,
            **shape,
            backend="reference",
        )
        p = p if self.heads > 1 else p.unsqueeze(-1)
        return tuple(weighted_sum(p_way.detach(), sources) for p_way in p)

    def _tape(self, state: AttnResState) -> Tape | None:
        """What the kernels work with, made anew if the state comes from elsewhere; None where they cannot be used."""
        why = self._why_no_kernels([*state.blocks, state.pending, *(() if state.partial is None else (state.partial,))])
        tape = state.tape if why is None and not transformed() else None
        if why is not None and state.blocks:  # an output in another dtype: the reference steps in
            return None
        if tape is None and choose("attnres", state.pending, why) == "triton" and self._usual():
            tape = Tape(collect_rows(self._queries(), OP), state.blocks, state.partial)
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters())
        if tape is not None and trained and not tape.queries.requires_grad:  # made under no_grad
            tape = tape._replace(queries=collect_rows(self._queries(), OP), far=None)  # of the queries of then
        return tape

    def _why_no_kernels(self, tensors: Sequence[Tensor]) -> str | None:
        wide = any(p.dtype == torch.float64 for p in self.parameters())
        return why_unsupported(tensors, wide=wide, heads=self.heads)

    def _usual(self) -> bool:
        """Whether kernels of whole stacks know the reads; the paper's ablations have kernels read by read."""
        static = self.query_from == "learned"
        return is_usual(static=static, key_norm=self.key_norm, heads=self.heads, activation=self.weights)

    def _queries(self) -> Tensor:
        """query ⊙ key_gain of every reader: [R, D], the ways of a site side by side, finish's last."""
        query, gain, attention = here(self.query), here(self.key_gain), self._attention_before(self.held.stop)
        u = query.float() * gain.float()
        if self.n_ways == 1 or not attention:
            return u
        own = self._own("query").float() * self._own("key_gain").float()  # [A, W-1, D]
        ends = [0, *(site + 1 - self.held.start for site in attention), len(u)]
        *parts, rest = u.split([b - a for a, b in itertools.pairwise(ends)])  # each ends with an attention site
        return torch.cat([*itertools.chain(*zip(parts, own.unbind(0), strict=True)), rest])

    def _first_row(self, site: int) -> int:
        """Where the rows of a site begin among those of all: [R, D]."""
        return site - self.held.start + (self.n_ways - 1) * len(self._attention_before(site))

    def _attention_before(self, site: int) -> list[int]:
        """The attention sites before a site whose rows are here."""
        return [a for a in self.layout.attention if self.held.start <= a < site]

    def _mix_with_kernels(
        self, state: AttnResState, tape: Tape, site: int, out_gain: Sequence[Tensor] = (), out_eps: float = 0.0
    ) -> tuple[Tensor, ...]:
        row, ways = self._first_row(site), self.ways(site)
        newest, add = (state.pending, None) if tape.partial is None else (tape.partial, state.pending)
        sources = (*self._windowed(tape.blocks), newest)
        trains = torch.is_grad_enabled()
        gain: Tensor | Sequence[Tensor] | None = out_gain or None  # kernels take any, where they lie
        if trains and out_gain:
            gain = side_by_side(out_gain).float()  # a gradient is fp32
        known = (tape.queries, row, sources[:-1], tape.far, self.eps)
        far: GroupMixtures | KnownLogits | None = None
        lasts = site % self.block_size == 0 and site < self.n_sites
        if self.window is None and not (trains and is_pair(len(sources), ways, lasts)):  # it needs nothing from before
            if self.n_ways >= KNOWN_WAYS:
                far = precompute_logits(*known)
            elif self.block_size == 1:
                own = None if trains else FirstRead(newest, out_gain[0] if out_gain else None, out_eps)
                far = precompute_group(*known, own)
            elif not trains and len(self.held) > self.n_sites:  # it counts on all rows
                far = precompute_block_group(*known, size=self.block_size)
        tape = tape._replace(far=far)
        h, newest = read_sources(tape.queries, row, ways, sources, add, gain, self.eps, out_eps, tape.far, lasts)
        state.leave_note((newest, tape if tape.far is None else tape._replace(far=tape.far.after(row))))
        return tuple(h)

    def _route(self, state: AttnResState, mixed: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if state.stream is None:
            return mixed
        if state.site == 0:  # nothing but e is there, and it is the stream
            return (state.stream,) * len(mixed)
        return tuple(state.stream + h for h in mixed)

    def _with_gradients(self, state: SlotState) -> AttnResState:
        site, size = state.site, self.block_size
        blocks = tuple(state.slots[i * size] for i in range(-(-site // size)))
        partial = state.slots[site - 1] if site and (site - 1) % size else None
        pending = state.pending if state.scale is None else (state.scale * state.pending).to(state.pending.dtype)
        kept: dict[str, Any] = {"site": site, "frozen": state.frozen, "pending": pending}
        return AttnResState(blocks=self._windowed(blocks), partial=partial, **kept)

    # The contract.

    def _start(self, x: Tensor) -> AttnResState | SlotState:
        if self._decodes(x):
            return self._start_slots(x)
        state = AttnResState(pending=x, stream=x if self.routing == "add" else None)
        state.tape = self._tape(state)
        return state

    def _read(self, state: AttnResState | SlotState, site: int) -> Read:
        if isinstance(state, SlotState):
            h = self._read_slots(state, site).unbind(0)
        else:
            h = self._route(state, self._mix(state, site))
        return h if len(h) > 1 else h[0]

    def _read_normed(self, state: AttnResState | SlotState, site: int, norms: Sequence[Norm]) -> Read | None:
        h: tuple[Tensor, ...]
        if isinstance(state, SlotState):
            gains = fused_gains(norms, state.slots)
            if gains is None:
                return None
            h = self._read_slots(state, site, *gains).unbind(0)
        else:
            if self.routing == "add" or self.weights == "static" or state.frozen:
                return None
            fused = fused_gains(norms, state.template())
            if fused is None:
                return None
            h = self._mix(state, site, *fused)
        return h if len(h) > 1 else h[0]

    def output_gains(self) -> Mapping[int, Tensor]:
        return {} if self.output_gain is None else self._rows_of_sites(self.gamma)

    def _write(self, state: AttnResState | SlotState, site: int, y: Tensor) -> AttnResState | SlotState:
        gamma = None if self.output_gain is None else self.gamma[site]
        if isinstance(state, SlotState):
            return self._write_slots(state, site, y, gamma)
        if gamma is not None:
            (y,) = depth_sum((y,), static=gamma.reshape(1, 1, -1))
        return self._write_scaled(state, site, y)

    def _write_scaled(self, state: AttnResState | SlotState, site: int, y: Tensor) -> AttnResState | SlotState:
        if isinstance(state, SlotState):
            return self._write_slots(state, site, y, None)
        newest, tape = state.take_note() or (None, None)
        if newest is None:
            newest = state.pending if state.partial is None else state.partial + state.pending
        opens = site % self.block_size == 0  # the newest source is finished, and y begins a block
        if tape is not None:
            blocks = self._windowed((*tape.blocks, newest)) if opens else tape.blocks
            tape = tape._replace(blocks=blocks, partial=None if opens else newest)
            newest = seen_from_outside(newest, OP)
        blocks = self._windowed((*state.blocks, newest)) if opens else state.blocks
        stream = None if state.stream is None else state.stream + y
        return state.next(blocks=blocks, partial=None if opens else newest, pending=y, stream=stream, tape=tape)

    def _finish(self, state: AttnResState | SlotState) -> Tensor:
        if isinstance(state, SlotState):
            return self._read_slots(state, self.n_sites)[0]
        return self._mix(state, self.n_sites)[0] if state.stream is None else state.stream

    def _finish_normed(self, state: AttnResState | SlotState, norm: Norm) -> Tensor | None:
        if torch.is_grad_enabled() or (isinstance(state, AttnResState) and state.tape is None):
            return None
        h = self._read_normed(state, self.n_sites, [norm])
        assert not isinstance(h, tuple)
        return h
