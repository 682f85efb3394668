"""Memory of the rank of a pipeline that needs the most, in bytes.

Weights, gradients and AdamW's moments are fp32 and shared by the dp ranks; products work on bf16 copies. tp shares everything
but the inputs of sublayers, which are gathered. Activations are those of all micro-batches in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from depthmix.config import TrainConfig
from depthmix.parallel.plan.hops import cuts
from depthmix.parallel.plan.layout import Layout, micro_batch
from depthmix.parallel.plan.model import Counts
from depthmix.parallel.plan.schedule import play

FREE = 0.08  # of a GPU's memory that fragments, NCCL and the driver's context take


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
    """Of every rank of a pipeline."""
    c = counts.config
    starts = [*cuts(c.n_blocks, layout.chunks), 2 * c.n_blocks]
    micro = micro_batch(layout, config)
    tokens = micro * config.seq_len
    micros = config.batch_size // layout.dp // micro
    flying = play(layout.pp, layout.virtual, micros, 1, 2).in_flight if layout.pp > 1 else [1]
    unit = 2.0 * tokens * c.dim / layout.tp
    found = []
    for rank in range(layout.pp):
        stages = range(rank, layout.chunks, layout.pp)
        sites = [s for i in stages for s in range(starts[i], starts[i + 1])]
        last = rank == layout.pp - 1
        alive = unit * flying[rank] / layout.virtual  # of a site, whatever micro-batches are in flight
        inputs = sum(counts.ways[s] for s in sites) * alive * layout.tp
        inside = sum(counts.kept(s) for s in sites) * alive
        if config.checkpoint_activations:  # those of one sublayer at a time
            inside = max(counts.kept(s) for s in sites) * unit
        logits = counts.logits(layout.tp)[0] * tokens / layout.tp
        kept = sum(counts.traffic[s].kept for s in sites) * alive
        received = sum(sum(counts.states[starts[i]].values()) for i in stages if i) * alive
        found.append(
            Memory(
                *_parameters(counts, layout, config, rank, len(sites) / 2),
                activations=inputs + inside + (logits + 2 * unit) * last,
                depth_state=kept + received + counts.traffic[-1].kept * unit * last,
            )
        )
    return found


def _parameters(
    counts: Counts, layout: Layout, config: TrainConfig, rank: int, blocks: float
) -> tuple[float, float, float, float]:
    """Count the bytes of weights, gradients, optimizer and bf16 copies of a rank that has so many blocks.

    Every pipeline stage has a copy of the whole mixer, in fp32 and not divided by tensor parallelism.
    """
    embedding, head, mixer = (counts.parameters[part] for part in ("embedding", "head", "mixer"))
    first, last = rank == 0, rank == layout.pp - 1
    block = (counts.total - embedding - head - mixer) / counts.config.n_blocks / layout.tp
    if counts.config.tie_embeddings and not first:
        head = embedding  # the last rank has its own
    ends = (embedding * first + head * last) / layout.tp
    ends += mixer * layout.virtual
    own = (block * blocks + ends) / layout.dp
    moments = 8 * own if config.optimizer == "adamw" else (4 * block * blocks + 8 * ends) / layout.dp
    working = block * blocks + head / layout.tp * last  # the embedding is looked up as it is
    if layout.dp > 1 and layout.pp == 1:
        working = min(working, 2 * block + head / layout.tp)  # gathered one block ahead
    return 4 * own, 4 * own, moments, 2 * working


def worst(memory: list[Memory]) -> Memory:
    """The fullest rank's."""
    return max(memory, key=lambda m: m.total)
