"""`host`: what a call of an operator costs the host, in microseconds.

On a GPU it is the wall time of a call that nobody waits for, beside the GPU's own time. Without a GPU the operators run on the CPU with
kernels that do nothing: what is left is their Python, and PyTorch's allocations. The lowest of all rounds counts, because other
processes only ever add to it. `--against` measures another checkout in turns with this one, in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks import host_calls
from benchmarks.options import Options
from benchmarks.report import Report

ROOT = Path(__file__).parents[1]
TARGET = "<= 40"
# Rounds per round of the other entries, each short: on a busy machine some of them meet an idle core.
ROUNDS, CALLS = 5, 60
METRICS = ("host", "GPU")


def host(options: Options, report: Report) -> None:
    """Time every case of `host_calls.cases`."""
    calls, rounds = (3, 1) if options.small else (CALLS, ROUNDS * options.repeats)
    folders = {"ours": ROOT} | ({"before": Path(options.against)} if options.against else {})
    lowest: dict[str, dict[str, list[float]]] = defaultdict(dict)
    with _served(folders, options.device) as processes:
        # The first round compiles kernels.
        for n in (3, *[calls] * rounds):
            for who, process in processes.items():
                for case, times in _round(process, n).items():
                    before = lowest[case].get(who, times)
                    lowest[case][who] = [min(pair) for pair in zip(before, times, strict=True)]
    for case, by_folder in lowest.items():
        if not options.wanted(case):
            continue
        target = "" if case.endswith(host_calls.TRAINING) or options.device.type == "cpu" else TARGET
        for who, times in by_folder.items():
            for metric, value in zip(METRICS, times, strict=False):
                report.add(case, who, metric, value, "µs", target if (who, metric) == ("ours", "host") else "")
        if "before" in by_folder:
            report.add(case, "ours", "host / before", by_folder["ours"][0] / by_folder["before"][0])


@contextmanager
def _served(folders: dict[str, Path], device: torch.device) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Start a process for each checkout, and end it. All of them make the calls of this checkout."""
    # -P: this folder has a profile.py, which must not hide Python's.
    command = [sys.executable, "-P", host_calls.__file__, str(device)]
    processes = {
        who: subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(folder.resolve())} | {"TRITON_INTERPRET": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for who, folder in folders.items()
    }
    try:
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


def _round(process: subprocess.Popen[str], calls: int) -> dict[str, list[float]]:
    """Return the times of one round of a process: one per metric."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{calls}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"benchmarks host: the measuring process ended with exit code {process.wait()}")
    found: dict[str, list[float]] = json.loads(line)
    return found
