"""Causal effects of edges: the change of the loss when one reader no longer receives one source.

A read is a sum of contributions c_i (contributions.py). Cutting source j removes its contribution and rescales the others, so that the
absolute weights keep their sum:

    h' = (Σ|M_i| / Σ_{i≠j}|M_i|) Σ_{i≠j} c_i

for every token. Only this read changes: the weights are those of the whole model, and later readers receive source j as before. If a
site reads several mixtures, each has its own edges, which can be cut one by one or all together.

Each cut is a copy of the batch. The pass runs on one copy up to the reader, where the batch grows, so that nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.insight.contributions import Contributions, contributions
from depthmix.insight.intercept import current_calls, intercepted, normed
from depthmix.insight.losses import next_token_losses
from depthmix.insight.mixing import choose_mixer
from depthmix.insight.mode import eval_mode
from depthmix.mixers import Mixer
from depthmix.models.with_mixer import with_mixer

AT_ONCE = 32768  # tokens per pass, over all copies

Cut = tuple[int | None, int] | None  # (way, source), of all ways if way is None; None: no cut


@dataclass
class EdgeEffects:
    """The loss of the unchanged model, and its rise when an edge is cut."""

    tokens: int
    loss: float
    change: list[Tensor]  # by reader, the last for finish: [ways, sources]


class Cutting:
    """A pass with several cuts at one reader, each in a copy of the batch."""

    def __init__(self, mixer: Mixer, reader: int) -> None:
        self.mixer, self.reader = mixer, reader
        self.sources: list[Tensor] = []
        self.contributions: tuple[Contributions, ...] | None = None  # equal in all passes over the batch
        self.calls = current_calls(mixer)

    def losses(self, model: nn.Module, batch: Tensor, cuts: Sequence[Cut]) -> Tensor:
        """Compute the losses of every token with each cut: [len(cuts), B, T]."""
        with torch.no_grad(), eval_mode(model), self.applied(cuts):
            return next_token_losses(model, batch)

    def applied(self, cuts: Sequence[Cut]) -> AbstractContextManager[None]:
        """Apply the cuts inside this context. The model's output has len(cuts) copies along its first dimension."""
        self.cuts = cuts
        return intercepted(self.mixer, start=self.start, read=self.read, write=self.write, finish=self.finish)

    def start(self, x: Tensor) -> Any:
        self.sources = [x]
        return self.calls["start"](x)

    def read(self, state: Any, site: int, norm: Any = None) -> Any:
        if site != self.reader:
            return self.calls["read"](state, site, norm)
        return normed(self.mixer, site, self.mixtures(), norm)

    def write(self, state: Any, site: int, y: Tensor) -> Any:
        if site < self.reader:
            self.sources.append(y)
        elif site == self.reader:
            state = self.grown_state()
        return self.calls["write"](state, site, y)

    def finish(self, state: Any, norm: Any = None) -> Any:
        if self.reader != self.mixer.n_sites:
            return self.calls["finish"](state, norm)
        h = self.mixtures()[0]
        return h if norm is None else norm(h)

    def mixtures(self) -> tuple[Tensor, ...]:
        """Return the reader's mixtures under all cuts, copy after copy: [E * B, ..., D] for each way."""
        if self.contributions is None:
            with intercepted(self.mixer, **self.calls):
                self.contributions = contributions(self.mixer, self.sources)
        dtype = self.sources[0].dtype
        mixtures = []
        for way, (parts, weights) in enumerate(self.contributions):
            whole, size = parts.sum(0), weights.abs()
            total = size.sum(0)
            copies = []
            for cut in self.cuts:
                if cut is None or cut[0] not in (None, way):
                    copies.append(whole.to(dtype))
                    continue
                rest = total - size[cut[1]]
                # If the other weights are zero up to rounding, the mixture is zero: rounding errors must not be scaled up.
                scale = torch.where(rest > 1e-6 * total, total / rest, 0.0).unsqueeze(-1)
                copies.append((scale * (whole - parts[cut[1]])).to(dtype))
            mixtures.append(torch.cat(copies))
        return tuple(mixtures)

    def grown_state(self) -> Any:
        """Return the state of all copies before the reader's write."""
        n = len(self.cuts)
        e, *outputs = (s.repeat(n, *[1] * (s.ndim - 1)) for s in self.sources)
        state = self.calls["start"](e)
        for site, y in enumerate(outputs):
            state = self.calls["write"](state, site, y)
        return state


def losses_without(
    model: Any,
    batch: Tensor,
    reader: int,
    cuts: Sequence[Cut],
    mixer: Mixer | str | None = None,
    at_once: int = AT_ONCE,
) -> Tensor:
    """Compute the loss of every token of a batch with each of some cuts at one reader.

    Args:
        model: model(ids) returns logits. The logits' first dimension may be longer than the ids'.
        batch: Token ids [B, T + 1].
        reader: A site, or S for finish.
        cuts: (way, source) each. The way None cuts the source from all ways, and the cut None cuts nothing.
        mixer: The mixer, or its name, of a model with several.
        at_once: Tokens per pass.

    Returns:
        Losses in nats [len(cuts), B, T].

    Raises:
        ValueError: The mixer is not found.

    Examples:
        >>> model = depthmix.Decoder(depthmix.DecoderConfig(11, dim=8, n_blocks=2, n_heads=2))
        >>> losses_without(model, torch.zeros(2, 4, dtype=torch.int64), reader=1, cuts=[None, (None, 0)]).shape
        torch.Size([2, 2, 3])
    """
    model = with_mixer(model)
    cutting = Cutting(choose_mixer(model, mixer), reader)
    some = max(1, at_once // max(1, batch[:, 1:].numel()))
    return torch.cat([_losses(cutting, model, batch, cuts[i : i + some]) for i in range(0, len(cuts), some)])


def _losses(cutting: Cutting, model: nn.Module, batch: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """Compute the losses of all copies at once, or one by one in a model whose tensors, such as window masks, fix the
    batch size.
    """
    if len(cuts) > 1:
        with suppress(RuntimeError):
            return cutting.losses(model, batch, cuts)
    return torch.cat([cutting.losses(model, batch, [cut]) for cut in cuts])


def edge_effects(
    model: nn.Module,
    batches: Iterable[Tensor],
    mixer: Mixer | str | None = None,
    at_once: int = AT_ONCE,
    progress: Callable[[], None] | None = None,
) -> EdgeEffects:
    """Measure how the loss changes when each edge between a source and a reader is cut.

    Args:
        model: model(ids) returns logits. The logits' first dimension may be longer than the ids'.
        batches: Token ids [B, T + 1].
        mixer: The mixer, or its name, of a model with several.
        at_once: Tokens per pass.
        progress: Called for every reader of every batch.

    Returns:
        The loss of the unchanged model, and its rise without each edge.

    Raises:
        ValueError: There are no tokens, or the mixer is not found.

    Examples:
        >>> model = depthmix.Decoder(depthmix.DecoderConfig(11, dim=8, n_blocks=2, n_heads=2))
        >>> [tuple(change.shape) for change in edge_effects(model, [torch.zeros(2, 4, dtype=torch.int64)]).change]
        [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5)]
    """
    model = with_mixer(model)
    chosen = choose_mixer(model, mixer)
    n = chosen.n_sites + 1
    total, tokens = 0.0, 0
    change = [torch.zeros(_ways(chosen, reader), reader + 1, dtype=torch.float64) for reader in range(n)]
    for batch in batches:
        size = batch[:, 1:].numel()
        for reader in range(n):
            edges: list[Cut] = [(way, source) for way in range(_ways(chosen, reader)) for source in range(reader + 1)]
            by_token = losses_without(model, batch, reader, [None, *edges], chosen, at_once)
            plain, *losses = by_token.cpu().double().mean((1, 2)).unbind(0)
            change[reader] += size * (torch.stack(losses) - plain).view_as(change[reader])
            total += size * float(plain) / n
            if progress is not None:
                progress()
        tokens += size
    if not tokens:
        raise ValueError("edge_effects: there are no tokens")
    return EdgeEffects(tokens, total / tokens, [c / tokens for c in change])


def _ways(mixer: Mixer, reader: int) -> int:
    return mixer.ways(reader) if reader < mixer.n_sites else 1
