"""`tune`: let flash-linear-attention choose its configurations before anything is timed, fully and quickly.

It tries 24 configurations for every depth (rounded up to a power of two) and width, and compiles one after the other: minutes of a
rented machine. Here parallel processes first compile all of them into Triton's cache. Then it tunes as usual, at the sizes that are
timed. `--tuned FILE` keeps the result for the next machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import rivals, stacks
from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.stack_entries import BLOCK, FULL
from benchmarks.timing import Clock

LIMIT = 150.0
# A multiple of 16, like every size that is timed. Compiling depends on nothing else.
TOKENS = 64
# Nothing is measured, so no tuning result may be kept.
KEEP_NO_RESULTS = {"FLA_CACHE_RESULTS": "0", "TRITON_CACHE_AUTOTUNING": "0"}


def tune(options: Options, report: Report) -> None:
    """Compile in parallel, then tune."""
    if reason := rivals.why_not("fla", options.device):
        report.add("", "fla", "tuning", None, "s", note=reason)
        return
    clock = Clock(options.device)
    sizes = [size for size, *_ in FULL]
    report.add("", "fla", "compiling", clock.seconds(lambda: _compile_all(sizes)), "s")
    for size, block_size in [(s, None) for s in sizes] + [(s, 8) for s, *_ in BLOCK]:
        case = "L={}, N={}, D={}".format(*size) + (", Block" if block_size else "")
        problem = stacks.Problem.make(*size, block_size, options.dtype, options.device)
        run = stacks.timed(problem, rivals.fla)
        report.add(case, "fla", "tuning", clock.seconds(lambda run=run: run(lambda: None)), "s")  # type: ignore[misc]


def _compile_all(sizes: list[tuple[int, int, int]]) -> None:
    """Compile as much as possible. The rest is compiled while tuning."""
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    deepest = {dim: max(s for s, _, d in sizes if d == dim) for _, _, dim in sizes}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.precompile", json.dumps([part, workers, deepest])],
            env={**os.environ, **KEEP_NO_RESULTS},
            cwd=Path(__file__).parents[1],
        )
        for part in range(workers)
    ]
    for process in processes:
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _compile_part(part: int, parts: int, deepest: dict[str, int]) -> None:
    """Run a pass in which tuning compiles every parts-th configuration and measures none."""
    from triton.runtime.autotuner import Autotuner

    def compile_only(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        if self.configs.index(config) % parts != part:
            return [1.0] * 3
        self.fn.run(*args, **{**meta, **config.all_kwargs(), "warmup": True})
        return [0.0] * 3

    tuner: Any = Autotuner
    tuner._bench = compile_only
    for dim, sites in deepest.items():
        size = (sites, TOKENS, int(dim))
        problem = stacks.Problem.make(*size, None, torch.bfloat16, torch.device("cuda"))
        stacks.timed(problem, rivals.fla)(lambda: None)


if __name__ == "__main__":
    _compile_part(*json.loads(sys.argv[1]))
