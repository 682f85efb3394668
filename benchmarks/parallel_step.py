"""`parallel-step`: a training step under DDP and under FSDP2 in a world of one process against the plain loop's.

What torch's engine costs where there is nobody to send anything to: hooks, copies into buckets and shards, collectives of one
(NCCL on a GPU, gloo on a CPU). The recipe's model with each arm, sublayers compiled once for all contenders; no torchrun is needed.

    step / plain             the GPU's time, launched while it sleeps, as in the other entries; this is what is bounded
    wall                     what a step takes in a loop that reads its loss, launching included; a recorded step launches nothing

A recorded step (cuda_graph) comes last, since a recording that fails may take the process along: where torch's engine cannot be
recorded the reason is noted, and the unrecorded steps are there beside the plain loop's recorded one.
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
from depthmix.config import TrainConfig
from depthmix.data.dataset import TokenData
from depthmix.errors import UserError
from depthmix.parallel.layout import Layout
from depthmix.parallel.world import World, join
from depthmix.study.arms import check_arms, parse_arms
from depthmix.train.compiled import compiled_once
from depthmix.train.loop import Trainer

ARMS = ("residual", "attnres:block_size=4", "dca")
TARGET = "<= 1.03"
PLAIN, RECORDED = "plain", "plain, recorded"
LAYOUTS = {"DDP": Layout(dp=1), "FSDP2": Layout(shard=1)}
SAME = 1e-2  # losses and gradient norms of the first steps, in bf16 autocast, with the plain loop's
DDP_LOOKS = 10  # passes of which it takes the times, and waits for the GPU to have them
FIRST = 3  # steps; each depends on all gradients of the one before


def parallel_step(options: Options, report: Report) -> None:
    """The recipe's model with each arm, unrecorded and, on a GPU, recorded."""
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
        for case, mine in cases.items():
            try:
                with compiled_once(mine.compile != "off"):
                    _case(case, mine, data, recording, options, report)
            except RuntimeError as error:  # a recording that failed and took the process group along
                if not recording:
                    raise
                what = str(error).strip().splitlines()[0]
                report.add(case, "recorded", f"step / {RECORDED}", None, note=f"failed: {what[:200]}")
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()


def _case(case: str, config: TrainConfig, data: TokenData, recording: bool, options: Options, report: Report) -> None:
    device = options.device
    trainers: dict[str, Trainer] = {}
    bare, recorded = (dataclasses.replace(config, cuda_graph=graph) for graph in (False, True))
    if (
        recording or device.type == "cuda"
    ):  # before there is a process group, whose threads look at the GPU while it records
        trainers[RECORDED] = Trainer(recorded, data, device)
        expected = _first_steps(trainers[RECORDED])
    if not recording:
        error = arm_errors(config, device)["fp32"]
        report.add(case, PLAIN, "error of fp32", error)
        check.require(case, {"fp32": error}, TIGHT)
        trainers[PLAIN] = Trainer(bare, data, device)
        expected = _first_steps(trainers[PLAIN])
    with one_process(device) as worlds:
        for name, world in worlds.items():
            label = f"{name}, recorded" if recording else name
            trainer = Trainer(recorded if recording else bare, data, world.device, world)
            try:
                found = check.errors(_first_steps(trainer), expected)
            except UserError as error:
                if not recording:
                    raise
                report.add(case, label, f"step / {RECORDED}", None, note=str(error))
                continue
            for what, difference in found.items():
                report.add(case, label, f"error of {what}", difference)
            check.require(label, found, SAME)
            trainers[label] = trainer
        _time(case, trainers, RECORDED if recording else PLAIN, options, report)


def _time(case: str, trainers: Mapping[str, Trainer], base: str, options: Options, report: Report) -> None:
    rounds, device = STEPS * options.repeats, options.device
    warmup = max(options.warmup, DDP_LOOKS) if device.type == "cuda" else options.warmup
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
    """Median milliseconds of a step as the training loop takes it, with its loss read; contenders take turns."""
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
    """Losses and gradient norms of the first steps, in which everything is compiled and recorded."""
    losses, norms = zip(*(trainer.step(step) for step in range(FIRST)), strict=True)
    return {"losses": torch.tensor(losses), "gradient norms": torch.tensor(norms)}


@contextmanager
def one_process(device: torch.device) -> Iterator[dict[str, World]]:
    """A process group of this process alone, as one world for each layout."""
    with join(Layout(), str(device), given=True) as world:
        yield {name: World(layout, world.device, mesh=world.mesh) for name, layout in LAYOUTS.items()}
