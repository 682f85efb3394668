"""Format a plan as text and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from depthmix.config import TrainConfig
from depthmix.parallel.plan.costs import Traffic
from depthmix.parallel.plan.hardware import GIB, Gpu
from depthmix.parallel.plan.layout import Layout, micro_batch
from depthmix.parallel.plan.memory import Memory
from depthmix.parallel.plan.model import Counts
from depthmix.parallel.plan.step import Prediction


@dataclass(frozen=True)
class Row:
    """The plan for a rule in a layout."""

    label: str
    counts: Counts
    memory: Memory
    step: Prediction


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format columns side by side: the first left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def tell(rows: Sequence[Row], layout: Layout, config: TrainConfig, gpu: Gpu) -> str:
    """Format the whole plan."""
    lines = [_title(rows[0].counts, layout, config, gpu), "", "Memory of the fullest rank, GiB"]
    lines += table(
        ["", "parameters", "weights", "gradients", "optimizer", "bf16 copies", "activations", "depth state", "total"],
        [[r.label, f"{r.counts.total / 1e6:,.1f}M", *(f"{v / GIB:.2f}" for v in _parts(r.memory))] for r in rows],
    )
    lines += ["", "Step time, and bytes that a rank sends"]
    lines += table(
        [
            "",
            "ms",
            "MFU",
            "of it mixing, ms",
            "against first",
            "bubble",
            "dp, GB",
            "tp, GB",
            "largest hop, MB",
            "without caching",
        ],
        [[r.label, *_step(r.step, rows[0].step)] for r in rows],
    )
    if layout.pp > 1:
        lines += [
            "",
            "Depth state of a micro-batch, MB, on its hop into stage 1, 2, … (without caching where that is more)",
        ]
        lines += table(["", *map(str, range(1, layout.chunks))], [[r.label, *_hops(r.step)] for r in rows])
    lines += [
        "",
        "Traffic per token and site in units of d: training with our kernels, including norms; and the paper's own count of inference",
    ]
    lines += table(
        ["", "forward", "backward", "kept", "state at the end", "paper: read", "written", "total"],
        [[r.label, *_traffic(r)] for r in rows],
    )
    return "\n".join(lines)


def _title(counts: Counts, layout: Layout, config: TrainConfig, gpu: Gpu) -> str:
    c, micro = counts.config, micro_batch(layout, config)
    gpus = f"{layout.gpus} {gpu.name.upper()}{'s' * (layout.gpus > 1)}"
    tokens = config.batch_size * config.seq_len
    micros = config.batch_size // layout.dp // micro
    return f"{c.n_blocks} blocks of {c.dim} channels, {tokens:,} tokens per step, on {gpus}: {layout}, {micros} micro-batch{'es' * (micros > 1)} of {micro} x {config.seq_len} tokens"


def _parts(m: Memory) -> list[float]:
    return [m.weights, m.gradients, m.optimizer, m.copies, m.activations, m.depth_state, m.total]


def _step(step: Prediction, first: Prediction) -> list[str]:
    hops = [f"{max(sizes) / 1e6:,.0f}" if sizes else "-" for sizes in (step.hop_bytes, step.naive_hop_bytes)]
    return [
        f"{1e3 * step.seconds:,.1f}",
        f"{step.mfu:.1%}",
        f"{1e3 * step.mixing:,.1f}",
        f"{step.seconds / first.seconds:.3f}",
        f"{step.bubble:.1%}",
        f"{step.dp_bytes / 1e9:.2f}",
        f"{step.tp_bytes / 1e9:.2f}",
        *hops,
    ]


def _hops(step: Prediction) -> list[str]:
    pairs = zip(step.hop_bytes, step.naive_hop_bytes, strict=True)
    return [f"{a / 1e6:.0f}" + f" ({b / 1e6:.0f})" * (b > a) for a, b in pairs]


def _traffic(row: Row) -> list[str]:
    moved, sites = Traffic.total(row.counts.traffic), len(row.counts.ways)
    paper = row.counts.published
    published = ["-"] * 3 if paper is None else [f"{v:.4g}" for v in (paper.read, paper.written, paper.total)]
    state = sum(row.counts.states[-1].values())
    return [*(f"{v / sites:.1f}" for v in (moved.forward, moved.backward, moved.kept)), f"{state:g}", *published]
