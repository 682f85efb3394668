"""`first-call`: seconds until a kernel's first result with nothing compiled before.

A process of its own with empty caches runs every kernel of the registry, one after the other. Two more processes run a whole Full
and a whole Block stack, forward and backward. Importing and starting the GPU are not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import stacks
from benchmarks.kernels import registry
from benchmarks.options import Options, backend
from benchmarks.report import Report
from benchmarks.timing import Clock

TARGET = "<= 10"
# Sites, tokens, dim. Compiling does not depend on the number of tokens.
SIZE, SMALL = (16, 4096, 2048), (4, 32, 48)
GROUPS = {"kernels": "each kernel", "full": "Full stack, forward+backward", "block": "Block stack, forward+backward"}
LIMIT = 120.0


def first_call(options: Options, report: Report) -> None:
    """Measure each group in a fresh process."""
    sites, tokens, dim = SMALL if options.small else SIZE
    for group, label in GROUPS.items():
        case = f"{label}, D={dim}"
        if not options.wanted(case):
            continue
        task = {"group": group, "sites": sites, "tokens": tokens, "dim": dim, "device": str(options.device)}
        task |= {"backend_name": options.backend}
        with tempfile.TemporaryDirectory() as empty:
            caches = {"TRITON_CACHE_DIR": f"{empty}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor"}
            command = [sys.executable, "-m", "benchmarks.first_call", json.dumps(task)]
            try:
                finished = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=LIMIT,
                    env={**os.environ, **caches},
                    cwd=Path(__file__).parents[1],
                )
            except subprocess.TimeoutExpired:
                report.add(case, "ours", "first call", None, "s", TARGET, f"not done after {LIMIT:.0f} s")
                continue
        for line in (x for x in finished.stdout.splitlines() if x.startswith("[")):
            name, seconds = json.loads(line)
            report.add(case, name, "first call", seconds, "s", TARGET if group == "kernels" else "")
        if finished.returncode:
            errors = finished.stderr.strip().splitlines() or ["it said nothing"]
            report.add(case, "ours", "first call", None, "s", TARGET, f"failed: {errors[-1][:200]}")


def _child(group: str, sites: int, tokens: int, dim: int, device: str, backend_name: str) -> None:
    """Print one JSON line per first call: [name, seconds]."""
    with backend(backend_name):
        _first_calls(group, sites, tokens, dim, torch.device(device))


def _first_calls(group: str, sites: int, tokens: int, dim: int, device: torch.device) -> None:
    clock = Clock(device)
    # Starts the GPU.
    clock.seconds(lambda: torch.ones(8, device=device).sum())
    if group == "kernels":
        for kernel in registry():
            work = kernel.make(tokens, dim, device)
            print(json.dumps([kernel.name, clock.seconds(work.run)]), flush=True)
        return
    problem = stacks.Problem.make(sites, tokens, dim, None if group == "full" else 4, torch.bfloat16, device)
    run = stacks.timed(problem, stacks.ours)
    print(json.dumps(["ours", clock.seconds(lambda: run(lambda: None))]), flush=True)


if __name__ == "__main__":
    _child(**json.loads(sys.argv[1]))
