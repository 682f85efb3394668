"""Predict the memory in bytes of each rank of a pipeline.

Weights, gradients and AdamW's moments are fp32 and sharded over the dp ranks. Products work on bf16 copies. tp shards everything
but the inputs of sublayers, which are gathered. Activations are those of all micro-batches in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from depthmix.config import TrainConfig
from depthmix.parallel.plan.hops import cuts
from depthmix.parallel.plan.layout import Layout, micro_batch
from depthmix.parallel.plan.model import Counts
from depthmix.parallel.plan.schedule import play

# Share of a GPU's memory that plans leave free for fragments, NCCL and the driver's context.
FREE = 0.08


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    weights: float
    gradients: float
    optimizer: float
    copies: float  # of the weights in bf16
    activations: float  # of sublayers, embedding and head
    depth_state: float  # of the mixer

    @property
    def total(self) -> float:
        return sum(getattr(self, f.name) for f in fields(self))


def memory_by_rank(counts: Counts, layout: Layout, config: TrainConfig) -> list[Memory]:
    """Predict the memory of every rank of a pipeline."""
    c = counts.config
    starts = [*cuts(c.n_blocks, layout.chunks), 2 * c.n_blocks]
    micro = micro_batch(layout, config)
    tokens = micro * config.seq_len
    micros = config.batch_size // layout.dp // micro
    in_flight = play(layout.pp, layout.virtual, micros, 1, 2).in_flight if layout.pp > 1 else [1]
    unit = 2.0 * tokens * c.dim / layout.tp
    memories = []
    for rank in range(layout.pp):
        stages = range(rank, layout.chunks, layout.pp)
        sites = [s for i in stages for s in range(starts[i], starts[i + 1])]
        last = rank == layout.pp - 1
        # One activation of a site, for all micro-batches in flight.
        live_unit = unit * in_flight[rank] / layout.virtual
        inputs = sum(counts.ways[s] for s in sites) * live_unit * layout.tp
        inside = sum(counts.kept(s) for s in sites) * live_unit
        if config.checkpoint_activations:
            # Sublayers are recomputed one at a time.
            inside = max(counts.kept(s) for s in sites) * unit
        logits = counts.logits(layout.tp)[0] * tokens / layout.tp
        kept = sum(counts.traffic[s].kept for s in sites) * live_unit
        received = sum(sum(counts.states[starts[i]].values()) for i in stages if i) * live_unit
        memories.append(
            Memory(
                *_parameters(counts, layout, config, rank, len(sites) / 2),
                activations=inputs + inside + (logits + 2 * unit) * last,
                depth_state=kept + received + counts.traffic[-1].kept * unit * last,
            )
        )
    return memories


def _parameters(
    counts: Counts, layout: Layout, config: TrainConfig, rank: int, blocks: float
) -> tuple[float, float, float, float]:
    """Count the bytes of weights, gradients, optimizer and bf16 copies on a rank with a number of blocks.

    Every pipeline stage has a copy of the whole mixer, in fp32 and not divided by tensor parallelism.
    """
    embedding, head, mixer = (counts.parameters[part] for part in ("embedding", "head", "mixer"))
    first, last = rank == 0, rank == layout.pp - 1
    block = (counts.total - embedding - head - mixer) / counts.config.n_blocks / layout.tp
    if counts.config.tie_embeddings and not first:
        # The last rank has a copy of its own.
        head = embedding
    ends = (embedding * first + head * last) / layout.tp
    ends += mixer * layout.virtual
    on_rank = (block * blocks + ends) / layout.dp
    moments = 8 * on_rank if config.optimizer == "adamw" else (4 * block * blocks + 8 * ends) / layout.dp
    # The embedding is looked up in fp32 and needs no copy.
    working = block * blocks + head / layout.tp * last
    if layout.dp > 1 and layout.pp == 1:
        # Weights are gathered one block in advance.
        working = min(working, 2 * block + head / layout.tp)
    return 4 * on_rank, 4 * on_rank, moments, 2 * working


def worst(memory: list[Memory]) -> Memory:
    """Return the memory of the fullest rank."""
    return max(memory, key=lambda m: m.total)
