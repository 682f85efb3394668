"""`cpu-step`: a training step of a small model on the CPU, mechanisms on the reference against the plain residual.

It uses two threads and fp32, and compiles nothing. Models take turns step by step, and the ratio is one of
medians, so that a neighbour who takes the cores away slows all of them down.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks import check
from benchmarks.options import Options, backend
from benchmarks.report import Report
from benchmarks.step import TIGHT, arm_errors, random_data, steps_of
from benchmarks.timing import Run, interleaved
from depthmix.compare.arms import check_arms, parse_arms
from depthmix.config import TrainConfig
from depthmix.train.loop import Trainer

VOCAB = 512
SMALL = ("residual", "attnres:block_size=4", "dca", "hyper")
ARMS = (
    "residual",
    "layerscale",
    "denseformer",
    "attnres:block_size=4",
    "attnres:block_size=all,ways=2",
    "attnres:block_size=all,ways=2,output_gain=0.1",
    "dca",
    "mudd",
    "hyper",
    "mhc:residual_map=birkhoff",
    "mhc",
)
THREADS = 2
# Rounds per round of the other entries: steps are short, and their times on a CPU vary.
ROUNDS = 4
CPU = torch.device("cpu")


def cpu_step(options: Options, report: Report) -> None:
    """Time a small model with each arm on the CPU, whatever the device of other entries."""
    config = small_config()
    names: tuple[str, ...] = ARMS
    if options.small:
        config, names = dataclasses.replace(config, n_blocks=2, seq_len=8, batch_size=2), SMALL
    case = (
        f"CPU, {THREADS} threads: {config.n_blocks} blocks, D={config.dim}, {config.batch_size}x{config.seq_len} tokens"
    )
    if not options.wanted(case):
        return
    arms = parse_arms(options.arms or names)
    check_arms(arms, config.dim, config.n_blocks)
    data = random_data(VOCAB, 4 * config.batch_size * config.seq_len + 1)
    runs: dict[str, Run] = {}
    with threads(THREADS), backend("reference"):
        for arm in arms:
            arm_config = dataclasses.replace(config, mixer=arm.name, mixer_options=arm.options)
            error = arm_errors(arm_config, CPU)["fp32"]
            report.add(case, arm.label, "error of fp32", error)
            check.require(arm.label, {"fp32": error}, TIGHT)
            runs[arm.label] = steps_of(Trainer(arm_config, data, CPU))
        timings = interleaved(runs, ROUNDS * options.repeats, options.warmup, CPU)
    base = timings[arms[0].label].total
    for label, timing in timings.items():
        report.add(case, label, f"step / {arms[0].label}", timing.total / base)
        report.add(case, label, "step", timing.total, "ms")
        report.add(case, label, "spread of the rounds", timing.spread)


def small_config() -> TrainConfig:
    """Return a model that trains on a laptop, and its optimizer."""
    return TrainConfig(
        data="random tokens",
        dim=64,
        n_blocks=6,
        n_heads=4,
        seq_len=64,
        batch_size=16,
        steps=10**6,
        lr=3e-3,
        warmup=20,
        embedding_std=1.0,
        device="cpu",
        precision="fp32",
        quiet=True,
    )


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Use n CPU threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
