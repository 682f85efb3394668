"""Predict the time of a step: products, attention and memory traffic on each rank, the simulated pipeline, and communication."""

from __future__ import annotations

from dataclasses import dataclass

from depthmix.config import TrainConfig
from depthmix.parallel.plan.costs import Traffic
from depthmix.parallel.plan.hardware import ATTENTION, COLLECTIVE, COPY, FP32, MATMUL, MIXING, START, Gpu
from depthmix.parallel.plan.hops import cuts, hop_sizes
from depthmix.parallel.plan.layout import Layout, micro_batch
from depthmix.parallel.plan.model import UPDATE, Counts
from depthmix.parallel.plan.schedule import play


@dataclass(frozen=True)
class Prediction:
    """Prediction for a step, in seconds and bytes per rank."""

    seconds: float
    mfu: float
    mixing: float  # seconds of depth mixing and norms
    bubble: float
    dp_bytes: float  # sent per step
    tp_bytes: float
    hop_bytes: list[float]  # per micro-batch, into stage 1, 2, …, in the forward; the backward sends as much
    naive_hop_bytes: list[float]  # like hop_bytes, without caching across stages


def mixing_seconds(counts: Counts, gpu: Gpu, tokens: float) -> float:
    """Predict the time of depth mixing and norms at all sites, forward and backward."""
    moved = Traffic.total(counts.traffic)
    unit = 2.0 * tokens * counts.config.dim / (gpu.bandwidth * COPY * MIXING) + START
    return (moved.forward + moved.backward) * unit + 3 * moved.flops * tokens / (gpu.fp32_flops * FP32)


def compute_seconds(counts: Counts, gpu: Gpu, config: TrainConfig, tokens: float, tp: int) -> float:
    """Predict the time of everything but mixing and the optimizer's update."""
    c = counts.config
    products, attention = counts.flops(config.seq_len)
    # Checkpointing runs the forward a second time.
    recompute = 4 / 3 if config.checkpoint_activations else 1.0
    moved = sum(counts.moved(site) for site in range(2 * c.n_blocks)) * 2.0 * c.dim + counts.logits(tp)[1]
    arithmetic = products / MATMUL + attention / ATTENTION
    return tokens * recompute * (arithmetic / gpu.flops + moved / (gpu.bandwidth * COPY))


def predict(counts: Counts, layout: Layout, config: TrainConfig, gpu: Gpu) -> Prediction:
    """Predict a step of a layout that can run."""
    c, micro = counts.config, micro_batch(layout, config)
    micros = config.batch_size // layout.dp // micro
    tokens = micro * config.seq_len
    shared = tokens / layout.tp
    mixing = mixing_seconds(counts, gpu, shared)
    unit = 2.0 * shared * c.dim
    # tp gathers a sublayer's inputs, then sums and scatters its output. Gradients need both again.
    transfers = sum(2 * (ways + 1) for ways in counts.ways)
    tp_bytes = transfers * unit * (layout.tp - 1)
    tp_seconds = tp_bytes / (gpu.link * COLLECTIVE)
    work = compute_seconds(counts, gpu, config, shared, layout.tp) + mixing + tp_seconds

    starts = cuts(c.n_blocks, layout.chunks)
    hops, naive = (
        [unit * size for size in hop_sizes(counts.states, starts, layout.pp, cached)] for cached in (True, False)
    )
    speed = gpu.link if layout.gpus <= gpu.node else gpu.network
    hop = max(hops, default=0.0) / speed
    if layout.pp > 1:
        stage = work / layout.chunks
        simulated = play(layout.pp, layout.virtual, micros, stage / 3, 2 * stage / 3, hop)
        busy, bubble = simulated.seconds, simulated.bubble
    else:
        busy, bubble = work * micros, 0.0

    # dp gathers bf16 parameters for every forward and, unless a pipeline keeps them, again for every backward. It scatters fp32
    # gradients once. Most of this is hidden behind the computation.
    parameters_per_rank = counts.total / (layout.tp * layout.pp)
    gathers = 2 * micros if layout.pp == 1 else 1
    dp_bytes = parameters_per_rank * (2 * gathers + 4) * (layout.dp - 1) / layout.dp
    dp_speed = gpu.link if layout.tp * layout.dp <= gpu.node else gpu.network
    hidden = busy * 0.8
    exposed = max(0.0, dp_bytes / (dp_speed * COLLECTIVE) - hidden)
    update = UPDATE * parameters_per_rank / layout.dp / (gpu.bandwidth * COPY)
    seconds = busy + exposed + update
    useful = counts.useful_flops(config.seq_len) * config.batch_size * config.seq_len
    return Prediction(
        seconds,
        useful / (seconds * layout.gpus * gpu.flops),
        mixing * micros / layout.pp,
        bubble,
        dp_bytes,
        tp_bytes * micros / layout.pp,
        hops,
        naive,
    )
