"""`profile`: what the kernels of a training step take, by torch's profiler: the longest by name, and all together.

The recipe's model with each arm, as `step` has it. It says where a step's time goes; `step` says what it is, for the profiler
itself takes time and kernels that overlap count twice.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.step import case_of, data_of, of_arm, own_size, steps_of
from benchmarks.timing import Clock
from depthmix.study.arms import check_arms, parse_arms
from depthmix.train.loop import Trainer

STEPS = 4  # of which the mean counts
LONGEST = 20
NAME = 60  # characters: the rest of a kernel's name are its template's arguments


def profile_step(options: Options, report: Report) -> None:
    """Every arm by itself, the plain residual if none is named."""
    size, config = own_size(options)
    arms = parse_arms(options.arms or ("residual",))
    check_arms(arms, config.dim, config.n_blocks)
    data = data_of(config, options)
    for arm in arms:
        case = f"{case_of(size, config)}, {arm.label}"
        if options.wanted(case):
            with options.device:
                trainer = Trainer(of_arm(config, arm), data, options.device)
            found = kernels(trainer, options.device)
            report.add(case, "all kernels", "time of a step", sum(found.values()), "ms")
            for name, took in sorted(found.items(), key=lambda item: -item[1])[:LONGEST]:
                report.add(case, name, "time of a step", took, "ms")


def kernels(trainer: Trainer, device: torch.device) -> dict[str, float]:
    """{kernel: milliseconds of a step}; operators on a CPU."""
    run, cuda = steps_of(trainer), device.type == "cuda"
    for _ in range(STEPS):  # what is compiled and recorded is not a step
        run(lambda: None)
    Clock(device).synchronize()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
        for _ in range(STEPS):
            run(lambda: None)
        Clock(device).synchronize()
    found: dict[str, float] = {}
    for event in seen.key_averages():
        took = event.self_device_time_total if cuda else event.self_cpu_time_total  # microseconds
        found[event.key[:NAME]] = found.get(event.key[:NAME], 0.0) + took / STEPS / 1e3
    return {name: took for name, took in found.items() if took > 0}
