"""`parallel-step`: a training step under DDP and under FSDP2 in a world of one process, against the plain loop's.

It measures the cost of torch's engine with nobody to send anything to: hooks, copies into buckets and shards, collectives of one
process (NCCL on a GPU, gloo on a CPU). The model is the recipe's with each arm. Sublayers are compiled once for all contenders, and
no torchrun is needed.

    step / plain             the GPU's time, launched while it sleeps, as in the other entries; only this has a target
    wall                     time of a step in a loop that reads its loss, including launches; a recorded step launches nothing

Recorded steps (cuda_graph) come last, since a recording that fails may take the process along. If torch's engine cannot be recorded,
the reason is noted, and its unrecorded steps stand beside the plain loop's recorded ones.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import check
from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.step import STEPS, TIGHT, VOCAB, arm_errors, random_data, recipe_config, small_config, steps_of
from benchmarks.timing import Clock, interleaved
from depthmix.compare.arms import check_arms, parse_arms
from depthmix.config import TrainConfig
from depthmix.data.dataset import TokenData
from depthmix.errors import UserError
from depthmix.parallel.layout import Layout
from depthmix.parallel.world import World, join
from depthmix.train.compiled import compiled_once
from depthmix.train.loop import Trainer

ARMS = ("residual", "attnres:block_size=4", "dca")
TARGET = "<= 1.03"
PLAIN, RECORDED = "plain", "plain, recorded"
LAYOUTS = {"DDP": Layout(dp=1), "FSDP2": Layout(shard=1)}
# Tolerance of the first steps' losses and gradient norms against the plain loop's, in bf16 autocast.
SAME = 1e-2
# Passes that DDP times at first, waiting for the GPU each time.
DDP_TIMED_PASSES = 10
# First steps that are compared. Each depends on all gradients of the one before.
FIRST = 3


def parallel_step(options: Options, report: Report) -> None:
    """Time the recipe's model with each arm, unrecorded and, on a GPU, recorded."""
    base = TrainConfig(compile="sublayers", steps=10**6, warmup=1, data="random tokens", quiet=True)
    config = dataclasses.replace(small_config(base), n_blocks=2)
    if not options.small:
        config = recipe_config(base, options.recipe)
    name = "small" if options.small else Path(options.recipe).stem
    size = f"{config.n_blocks} blocks, D={config.dim}, {config.batch_size * config.seq_len} tokens"
    arms = parse_arms(options.arms or ARMS)
    check_arms(arms, config.dim, config.n_blocks)
    cases = {
        case: dataclasses.replace(config, mixer=arm.name, mixer_options=arm.options)
        for arm in arms
        if options.wanted(case := f"{name}, {arm.label}: {size}")
    }
    data = random_data(64 if options.small else VOCAB, 4 * config.batch_size * config.seq_len + 1)
    on_gpu = options.device.type == "cuda"
    for recording in (False, True) if on_gpu else (False,):
        for case, arm_config in cases.items():
            try:
                with compiled_once(arm_config.compile != "off"):
                    _case(case, arm_config, data, recording, options, report)
            # A recording that fails takes the process group along.
            except RuntimeError as error:
                if not recording:
                    raise
                message = str(error).strip().splitlines()[0]
                report.add(case, "recorded", f"step / {RECORDED}", None, note=f"failed: {message[:200]}")
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()


def _case(case: str, config: TrainConfig, data: TokenData, recording: bool, options: Options, report: Report) -> None:
    device = options.device
    trainers: dict[str, Trainer] = {}
    unrecorded, recorded = (dataclasses.replace(config, cuda_graph=graph) for graph in (False, True))
    # Recorded before there is a process group, whose threads query the GPU during a recording.
    if recording or device.type == "cuda":
        trainers[RECORDED] = Trainer(recorded, data, device)
        expected = _first_steps(trainers[RECORDED])
    if not recording:
        error = arm_errors(config, device)["fp32"]
        report.add(case, PLAIN, "error of fp32", error)
        check.require(case, {"fp32": error}, TIGHT)
        trainers[PLAIN] = Trainer(unrecorded, data, device)
        expected = _first_steps(trainers[PLAIN])
    with one_process(device) as worlds:
        for name, world in worlds.items():
            label = f"{name}, recorded" if recording else name
            trainer = Trainer(recorded if recording else unrecorded, data, world.device, world)
            try:
                differences = check.errors(_first_steps(trainer), expected)
            except UserError as error:
                if not recording:
                    raise
                report.add(case, label, f"step / {RECORDED}", None, note=str(error))
                continue
            for what, difference in differences.items():
                report.add(case, label, f"error of {what}", difference)
            check.require(label, differences, SAME)
            trainers[label] = trainer
        _time(case, trainers, RECORDED if recording else PLAIN, options, report)


def _time(case: str, trainers: Mapping[str, Trainer], base: str, options: Options, report: Report) -> None:
    rounds, device = STEPS * options.repeats, options.device
    warmup = max(options.warmup, DDP_TIMED_PASSES) if device.type == "cuda" else options.warmup
    timings = interleaved({name: steps_of(t) for name, t in trainers.items()}, rounds, warmup, device)
    walls = wall(trainers, options.repeats, device)
    for name, timing in timings.items():
        for other in (PLAIN, RECORDED):
            if other in timings and name not in (PLAIN, RECORDED):
                target = TARGET if other == base and not options.small else ""
                report.add(case, name, f"step / {other}", timing.total / timings[other].total, target=target)
        report.add(case, name, "step", timing.total, "ms")
        report.add(case, name, "wall", walls[name], "ms")
        report.add(case, name, "spread of the rounds", timing.spread)


def wall(trainers: Mapping[str, Trainer], rounds: int, device: torch.device) -> dict[str, float]:
    """Return the median milliseconds of a step as the training loop takes it, reading its loss. Contenders take turns."""
    clock = Clock(device)
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            clock.synchronize()
            begun = time.perf_counter()
            for step in range(STEPS):
                trainer.step(step)
            clock.synchronize()
            times[name].append(1e3 * (time.perf_counter() - begun) / STEPS)
    return {name: statistics.median(t) for name, t in times.items()}


def _first_steps(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the losses and gradient norms of the first steps, in which everything is compiled and recorded."""
    losses, norms = zip(*(trainer.step(step) for step in range(FIRST)), strict=True)
    return {"losses": torch.tensor(losses), "gradient norms": torch.tensor(norms)}


@contextmanager
def one_process(device: torch.device) -> Iterator[dict[str, World]]:
    """Yield a process group of this process alone, as one world for each layout."""
    with join(Layout(), str(device), given=True) as world:
        yield {name: World(layout, world.device, mesh=world.mesh) for name, layout in LAYOUTS.items()}
