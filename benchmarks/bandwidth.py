"""`bandwidth`: the share of the copy bandwidth that each kernel achieves, measured in the same run.

Counted are the bytes that a call has to move, each tensor once. A kernel that reads a tensor twice therefore shows as slow.
"""

from __future__ import annotations

from benchmarks.check import require
from benchmarks.kernels import Kernel, Work, registry
from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.timing import Mark, Run, interleaved

SIZES = ((16384, 2048), (16384, 1024), (32768, 512))  # tokens, dim
# Of large models, for the kernels that their reads run.
WIDE = tuple((8192, dim) for dim in (4096, 4608, 5120, 7168, 8192))
SMALL = ((64, 32),)
# The target holds from this dim on.
FROM_DIM = 1024
# Of one kernel in bf16: a rounding or two.
TOLERANCE = 2e-2


def bandwidth(options: Options, report: Report, kernels: list[Kernel] | None = None) -> None:
    """Check every kernel at every size, then time it in turns with the copy."""
    kernels = registry() if kernels is None else kernels
    for tokens, dim in SMALL if options.small else (*SIZES, *WIDE):
        case = f"N={tokens}, D={dim}"
        if not options.wanted(case):
            continue
        copy = kernels[0].make(tokens, dim, options.device)
        for kernel in kernels:
            if (tokens, dim) in WIDE and not kernel.wide and kernel is not kernels[0]:
                continue
            work = kernel.make(tokens, dim, options.device)
            work.run()
            require(kernel.name, work.errors(), TOLERANCE)
            runs = {"copy": _run(copy), kernel.name: _run(work)}
            timings = interleaved(runs, options.repeats, options.warmup, options.device)
            timing, copied = timings[kernel.name], copy.bytes / timings["copy"].total / 1e6
            speed = work.bytes / timing.total / 1e6
            target = ">= 0.8" if dim >= FROM_DIM and kernel is not kernels[0] else ""
            report.add(case, kernel.name, "share of copy bandwidth", speed / copied, target=target)
            report.add(case, kernel.name, "bandwidth", speed, "GB/s")
            report.add(case, kernel.name, "time", timing.total, "ms")


def _run(work: Work) -> Run:
    def run(mark: Mark) -> None:
        work.run()
        mark()

    return run
