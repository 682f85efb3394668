"""Ways to share the work among GPUs: dp shards parameters and data, tp splits sublayers and sequences, pp splits the depth."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from depthmix.config import TrainConfig
from depthmix.errors import UserError
from depthmix.models import DecoderConfig
from depthmix.names import nearest

NAMES = ("dp", "tp", "pp", "virtual")


@dataclass(frozen=True)
class Layout:
    """A layout of dp x tp x pp GPUs in which each pipeline rank holds `virtual` stages."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    virtual: int = 1

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def chunks(self) -> int:
        return self.pp * self.virtual

    def __str__(self) -> str:
        shown = f"dp={self.dp},tp={self.tp},pp={self.pp}"
        return f"{shown},virtual={self.virtual}" if self.virtual > 1 else shown


def parse_layout(text: str) -> Layout:
    """Parse a layout such as `dp=4,tp=2,pp=1`, in any order. A missing size is 1.

    Raises:
        UserError: the text is no layout.
    """
    given: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in NAMES:
            raise UserError(f"plan: layout has no {name!r}; write dp=…,tp=…,pp=…,virtual=…{nearest(name, NAMES)}")
        if name in given:
            raise UserError(f"plan: layout gives {name} twice")
        if not equals or not value.isdecimal() or int(value) < 1:
            raise UserError(f"plan: layout needs a whole number of at least 1 for {name}, got {value!r}")
        given[name] = int(value)
    return Layout(**given)


def why_not(layout: Layout, gpus: int, node: int, model: DecoderConfig, config: TrainConfig) -> str | None:
    """Return the reason why a layout cannot run a model, or None if it can."""
    if layout.gpus != gpus:
        return f"{layout} makes {layout.gpus} GPUs, not {gpus}"
    if layout.tp > node:
        return f"tp={layout.tp} is more than the {node} GPUs of a node"
    for name, heads in (("heads", model.n_heads), ("key and value heads", model.n_kv_heads)):
        if heads % layout.tp:
            return f"{heads} {name} cannot be split over tp={layout.tp}"
    if model.mlp_dim % layout.tp:
        return f"an MLP of width {model.mlp_dim} cannot be split over tp={layout.tp}"
    if config.seq_len % layout.tp:
        return f"sequences of {config.seq_len} tokens cannot be split over tp={layout.tp}"
    if layout.chunks > model.n_blocks:
        return f"{model.n_blocks} blocks cannot be split over {layout.chunks} pipeline stages"
    if layout.virtual > 1 and layout.pp == 1:
        return f"virtual={layout.virtual} is for pipelines, and pp is 1"
    if config.batch_size % layout.dp:
        return f"a batch of {config.batch_size} sequences cannot be split over dp={layout.dp}"
    micro = micro_batch(layout, config)
    if (config.batch_size // layout.dp) % micro:
        return f"{config.batch_size // layout.dp} sequences per rank cannot be split into micro-batches of {micro}"
    if layout.virtual > 1 and (config.batch_size // layout.dp // micro) % layout.pp:
        return f"interleaved stages need a multiple of pp={layout.pp} micro-batches, and there are {config.batch_size // layout.dp // micro}"
    return None


def micro_batch(layout: Layout, config: TrainConfig) -> int:
    """Return the sequences per micro-batch on a rank. If the recipe does not say, a pipeline takes one at a time."""
    per_rank = max(1, config.batch_size // layout.dp)
    return min(per_rank, config.micro_batch_size or (per_rank if layout.pp == 1 else 1))


def all_layouts(gpus: int, node: int) -> Iterator[Layout]:
    """Yield every way to share GPUs out, the simplest first."""
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for pp, tp in itertools.product(divisors, divisors):
        if gpus % (pp * tp) == 0 and tp <= node:
            for virtual in (1, 2, 4) if pp > 1 else (1,):
                yield Layout(gpus // (pp * tp), tp, pp, virtual)
