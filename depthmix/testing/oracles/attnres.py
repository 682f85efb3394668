"""Attention Residuals (arXiv 2603.15031), Full and Block.

    logit_i = q_s · (g_s ⊙ RMS(v_i));   p = softmax over the sources;   h_s = Σ_i p_i v_i

Sources of a reader: the embedding, the sums of finished blocks of `block_size` sublayers, and the sum of the block at hand unless
it is empty. Full is a block size of one.

The convention "inkling2" norms values too, divides logits by sqrt(D), has no gain g, and lets sublayer 0 read the embedding as it is.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from depthmix.testing.oracles.base import (
    EpsOutside,
    Mistake,
    Oracle,
    Parameters,
    Sublayer,
    clamps,
    other_eps,
)


class AttnRes(Oracle):
    """query [S+1, D], key_gain [S+1, D]."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"block_size": None, "eps": 1e-6, "normed_values": False}
    CONVENTIONS: ClassVar[dict[str, dict[str, Any]]] = {"paper": {}, "inkling2": {"normed_values": True}}

    def __init__(self, options: Any, n_blocks: int) -> None:
        super().__init__(options, n_blocks)
        self.size = options["block_size"] or 1

    def shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter."""
        gain = {} if self.options["normed_values"] else {"key_gain": (self.sites + 1, dim)}
        return {"query": (self.sites + 1, dim), **gain}

    def initial(self, dim: int) -> dict[str, Tensor]:
        """Return zeros for queries and ones for gains."""
        values = {"query": torch.zeros, "key_gain": torch.ones}
        return {name: values[name](shape, dtype=torch.float64) for name, shape in self.shapes(dim).items()}

    def names_of_initial(self) -> dict[str, str]:
        """Name queries that are not zero."""
        return {"query": "queries not at zero", "key_gain": "key gains not at one"}

    def run(self, p: Parameters, e: Tensor, sublayer: Sublayer) -> Tensor:
        """Run a pass."""
        blocks, partial, closed = self.begin(e)
        for s in range(self.sites):
            sources = self.sources(blocks, partial, closed) or [e]
            y = sublayer(self.read(p, s, sources))
            partial = self.add(partial, closed, y)
            closed = (s + 1) % self.size == 0
            blocks = [*blocks, partial] if closed else blocks
        return self.end(p, self.sources(blocks, partial, closed) or [e])

    def begin(self, e: Tensor) -> tuple[list[Tensor], Tensor | None, bool]:
        """Return the finished blocks, the partial sum, and whether it is among the finished blocks."""
        return [e], None, True

    def add(self, partial: Tensor | None, closed: bool, y: Tensor) -> Tensor:
        """Return the partial sum after an output."""
        return y if closed or partial is None else partial + y

    def sources(self, blocks: list[Tensor], partial: Tensor | None, closed: bool) -> list[Tensor]:
        """Return the sources of a reader."""
        return blocks if closed or partial is None else [*blocks, partial]

    def read(self, p: Parameters, s: int, sources: list[Tensor]) -> Tensor:
        """Return the mixture of reader s."""
        if s == 0 and self.options["normed_values"]:
            return sources[0]
        v = torch.stack(sources)
        weights = torch.softmax(self.cut(self.scaled(p["query"][s] * self.gained(p, s, self.keys(v)))), dim=0)
        return (weights * self.values(v)).sum(0)

    def end(self, p: Parameters, sources: list[Tensor]) -> Tensor:
        """Return the mixture after the last sublayer."""
        return self.read(p, self.sites, sources)

    def keys(self, v: Tensor) -> Tensor:
        """Return the keys of sources."""
        return self.rms(v)

    def gained(self, p: Parameters, s: int, keys: Tensor) -> Tensor:
        """Multiply keys by their gain."""
        return p["key_gain"][s] * keys if "key_gain" in p else keys

    def scaled(self, products: Tensor) -> Tensor:
        """Sum the products of queries and keys to logits."""
        logits = products.sum(-1, keepdim=True)
        return logits / products.shape[-1] ** 0.5 if self.options["normed_values"] else logits

    def values(self, v: Tensor) -> Tensor:
        """Return the values of sources."""
        return self.rms(v) if self.options["normed_values"] else v

    def mistakes(self) -> list[Mistake]:
        """Return the usual mistakes."""
        normed = self.options["normed_values"]
        found = [
            Mistake("embedding not among the sources (it is left out)", NoEmbedding),
            Mistake("embedding not among the sources (it is in the first sum)", EmbeddingInFirstSum),
            Mistake("embedding counted twice (as a source and in the first sum)", EmbeddingTwice),
            Mistake("cumulative states instead of outputs as sources", CumulativeStates),
            Mistake("keys not normed", KeysNotNormed),
            Mistake("values not normed" if normed else "values normed", OtherValues),
            Mistake("logits not divided by sqrt(D)" if normed else "logits divided by sqrt(D)", OtherScale),
            Mistake("no mixture at the end (the sum is returned)", SumAtEnd),
            Mistake("partial sum read twice", PartialTwice),
            Mistake("eps outside the square root", EpsOutside),
            *other_eps(self.eps),
            *clamps(),
        ]
        if not normed:
            found.append(Mistake("gain of the keys missing", NoGain))
        if self.size > 1:
            found.append(Mistake("partial sum not read", PartialNotRead))
            found.append(Mistake("block size counts Transformer layers instead of sublayers", SizeInLayers))
        return found


class NoEmbedding:
    """Leave the embedding out, except where there is nothing else."""

    def sources(self, blocks: list[Tensor], partial: Tensor | None, closed: bool) -> list[Tensor]:
        """Return the sources of a reader."""
        return blocks[1:] if closed or partial is None else [*blocks[1:], partial]


class EmbeddingInFirstSum:
    """Begin the first partial sum with the embedding, which is no source of its own."""

    def begin(self, e: Tensor) -> tuple[list[Tensor], Tensor | None, bool]:
        """Return no blocks and the embedding as the partial sum."""
        return [], e, False


class EmbeddingTwice:
    """Begin the first partial sum with the embedding, which is a source too."""

    def begin(self, e: Tensor) -> tuple[list[Tensor], Tensor | None, bool]:
        """Return the embedding as a block and as the partial sum."""
        return [e], e, False


class CumulativeStates:
    """Keep the running sum of everything as sources."""

    def begin(self, e: Tensor) -> tuple[list[Tensor], Tensor | None, bool]:
        """Return the embedding as a block that is also the running sum."""
        return [e], e, True

    def add(self, partial: Tensor | None, closed: bool, y: Tensor) -> Tensor:
        """Add to the running sum, which never restarts."""
        assert partial is not None
        return partial + y


class PartialTwice:
    """Go on reading the partial sum when its block is finished."""

    def sources(self, blocks: list[Tensor], partial: Tensor | None, closed: bool) -> list[Tensor]:
        """Return all blocks and the partial sum."""
        return blocks if partial is None else [*blocks, partial]


class PartialNotRead:
    """Read finished blocks alone."""

    def sources(self, blocks: list[Tensor], partial: Tensor | None, closed: bool) -> list[Tensor]:
        """Return all blocks."""
        return blocks


class SizeInLayers(AttnRes):
    """Count the block size in Transformer layers, of two sublayers each."""

    def __init__(self, options: Any, n_blocks: int) -> None:
        super().__init__(options, n_blocks)
        self.size = 2 * self.size


class KeysNotNormed:
    """Use sources as keys."""

    def keys(self, v: Tensor) -> Tensor:
        """Return the sources."""
        return v


class OtherValues(AttnRes):
    """Norm values where the convention does not, and the reverse."""

    def values(self, v: Tensor) -> Tensor:
        """Return the other values."""
        return v if self.options["normed_values"] else self.rms(v)


class OtherScale(AttnRes):
    """Divide logits by sqrt(D) where the convention does not, and the reverse."""

    def scaled(self, products: Tensor) -> Tensor:
        """Return the other logits."""
        logits = products.sum(-1, keepdim=True)
        return logits if self.options["normed_values"] else logits / products.shape[-1] ** 0.5


class NoGain:
    """Leave the gain out."""

    def gained(self, p: Parameters, s: int, keys: Tensor) -> Tensor:
        """Return the keys."""
        return keys


class SumAtEnd:
    """Return the plain sum at the end."""

    def end(self, p: Parameters, sources: list[Tensor]) -> Tensor:
        """Return the sum of the sources."""
        return torch.stack(sources).sum(0)
