"""`profile`: the time of a training step's kernels, by torch's profiler: the longest by name, and all together.

The model is the recipe's with each arm, as in `step`. The entry shows where a step's time goes. Only `step` shows how long a step is:
the profiler itself takes time, and kernels that overlap count twice.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.step import case_of, data_of, of_arm, own_size, steps_of
from benchmarks.timing import Clock
from depthmix.compare.arms import check_arms, parse_arms
from depthmix.train.loop import Trainer

# Steps that are averaged.
STEPS = 4
LONGEST = 20
# Characters of a kernel's name. The rest of the name are its template's arguments.
NAME = 60


def profile_step(options: Options, report: Report) -> None:
    """Profile every arm by itself, or the plain residual if none is named."""
    size, config = own_size(options)
    arms = parse_arms(options.arms or ("residual",))
    check_arms(arms, config.dim, config.n_blocks)
    data = data_of(config, options)
    for arm in arms:
        case = f"{case_of(size, config)}, {arm.label}"
        if options.wanted(case):
            with options.device:
                trainer = Trainer(of_arm(config, arm), data, options.device)
            times = kernels(trainer, options.device)
            report.add(case, "all kernels", "time of a step", sum(times.values()), "ms")
            for name, milliseconds in sorted(times.items(), key=lambda item: -item[1])[:LONGEST]:
                report.add(case, name, "time of a step", milliseconds, "ms")


def kernels(trainer: Trainer, device: torch.device) -> dict[str, float]:
    """Return {kernel: milliseconds per step}. On a CPU, operators are counted instead."""
    run, cuda = steps_of(trainer), device.type == "cuda"
    # Compiling and recording must not be counted.
    for _ in range(STEPS):
        run(lambda: None)
    Clock(device).synchronize()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
        for _ in range(STEPS):
            run(lambda: None)
        Clock(device).synchronize()
    times: dict[str, float] = {}
    for event in profiled.key_averages():
        microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
        times[event.key[:NAME]] = times.get(event.key[:NAME], 0.0) + microseconds / STEPS / 1e3
    return {name: milliseconds for name, milliseconds in times.items() if milliseconds > 0}
