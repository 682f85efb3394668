"""`streams`: the kernels of a boundary of mHC one by one, at few and at many tokens, in the same run as a copy.

A boundary of a model is a write, products, coefficients and a read. Where a layer receives its streams, nothing is written, and the
products sum as well. The copy is of the 2 n + 2 rows per token that the whole boundary has to move.
Few tokens are timed many times in a row: then W is in the L2 cache, which it is not while a model decodes.
"""

from __future__ import annotations

import torch

from benchmarks.check import require
from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.stream_kernels import STREAMS, stream_coefficients, stream_products, stream_read, stream_write
from benchmarks.timing import Mark, Run, interleaved
from benchmarks.work import Work
from depthmix.ops.backend import why_no_kernels

TOKENS, DIM = (1, 64, 8192), 4096
SMALL_TOKENS, SMALL_DIM = (1, 3, 70), 136
# Calls in a row, up to this many tokens.
CALLS, FEW = 20, 64
# Of one kernel in bf16.
TOLERANCE = 2e-2
KERNELS = {
    "write": stream_write(False),
    "products": stream_products(24),
    "products and sums": stream_products(24, sums=True),
    "coefficients": stream_coefficients,
    "read": stream_read,
}


def streams(options: Options, report: Report) -> None:
    """Check every kernel, then time all of them in turns."""
    why = why_no_kernels(options.device.type, options.device.index)
    for tokens in SMALL_TOKENS if options.small else TOKENS:
        dim = SMALL_DIM if options.small else DIM
        case = f"N={tokens}, D={dim}"
        if not options.wanted(case):
            continue
        works = {"copy": _copy(tokens, dim, options.device)}
        for name, make in KERNELS.items():
            if why is not None:
                report.add(case, name, "time", None, "µs", note=f"skipped: {why}")
                continue
            works[name] = make(tokens, dim, options.device)
            works[name].run()
            require(name, works[name].errors(), TOLERANCE)
        calls = CALLS if tokens <= FEW and not options.small else 1
        runs = {name: _run(work, calls) for name, work in works.items()}
        times = interleaved(runs, options.repeats, options.warmup, options.device)
        for name, work in works.items():
            seconds = times[name].total / calls / 1e3
            report.add(case, name, "time", 1e6 * seconds, "µs")
            report.add(case, name, "bandwidth", work.bytes / seconds / 1e9, "GB/s")


def _copy(tokens: int, dim: int, device: torch.device) -> Work:
    rows = torch.randn((STREAMS + 1) * tokens, dim, device=device, dtype=torch.bfloat16)
    copied = torch.empty_like(rows)
    return Work(lambda: copied.copy_(rows), 2 * rows.nbytes, dict)


def _run(work: Work, calls: int) -> Run:
    def run(mark: Mark) -> None:
        for _ in range(calls):
            work.run()
        mark()

    return run
