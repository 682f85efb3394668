"""`full-stack` and `block-stack`: forward and backward of a stack of reads, ours against the published kernels.

For each size, errors against fp64 come first (ours also in fp32, with a tight tolerance). Then the contenders take turns: median
milliseconds of forward, backward and both, peak GPU memory beyond the input, and our ratio to each rival and to the best of them.
"""

from __future__ import annotations

import torch

from benchmarks import reference, rivals, stacks, tuned
from benchmarks.check import TOLERANCE, WrongResult, errors, require
from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.stacks import Build, Problem
from benchmarks.timing import Clock, Timing, extra_memory, interleaved

# (sites, tokens, dim), and the required shares of the best rival's time and memory.
FULL = (((32, 16384, 2048), "<= 0.27", "<= 0.45"), ((24, 32768, 512), "<= 0.27", ""), ((64, 8192, 2048), "<= 0.20", ""))
BLOCK = (((32, 16384, 2048), "<= 0.45", ""),)
SMALL = (((6, 32, 48), "", ""),)
# By --small.
SITES_PER_BLOCK = {False: 8, True: 2}
# Enough for the tight check.
FEW_TOKENS = 256
GIB = 2**30


def full_stack(options: Options, report: Report) -> None:
    """Time Full AttnRes against flash-linear-attention."""
    for size, time_target, memory_target in SMALL if options.small else FULL:
        names = [r for r in options.rivals if r != "flash-attn-res"]
        _case(size, None, names, time_target, memory_target, options, report)


def block_stack(options: Options, report: Report) -> None:
    """Time Block AttnRes against flash-linear-attention and flash-attn-res."""
    for size, time_target, memory_target in SMALL if options.small else BLOCK:
        block_size = SITES_PER_BLOCK[options.small]
        _case(size, block_size, list(options.rivals), time_target, memory_target, options, report)


def _case(
    size: tuple[int, int, int],
    block_size: int | None,
    names: list[str],
    time_target: str,
    memory_target: str,
    options: Options,
    report: Report,
) -> None:
    sites, tokens, dim = size
    case = f"L={sites}, N={tokens}, D={dim}" + (f", {block_size} sites per block" if block_size else "")
    if not options.wanted(case):
        return
    problem = Problem.make(sites, tokens, dim, block_size, options.dtype, options.device)
    contenders = _checked(case, problem, names, options, report)
    runs = {who: stacks.timed(problem, build) for who, build in contenders.items()}
    timings = interleaved(runs, options.repeats, options.warmup, options.device)
    memory = {who: extra_memory(run, options.device) for who, run in runs.items()}
    for who, timing in timings.items():
        report.add(case, who, "forward+backward", timing.total, "ms", note=_spread(timing))
        report.add(case, who, "forward", timing.phases[0], "ms")
        report.add(case, who, "backward", timing.phases[1], "ms")
        if (peak := memory[who]) is not None:
            report.add(case, who, "peak memory", peak / GIB, "GiB")
    _ratios(case, timings, memory, time_target, memory_target, report)


def _ratios(
    case: str,
    timings: dict[str, Timing],
    memory: dict[str, int | None],
    time_target: str,
    memory_target: str,
    report: Report,
) -> None:
    others = [who for who in timings if who != "ours"]
    our_timing, our_memory = timings["ours"], memory["ours"]
    for who in others:
        their_timing, their_memory = timings[who], memory[who]
        best = who == min(others, key=lambda w: timings[w].total)
        report.add(
            case, "ours", f"time / {who}", our_timing.total / their_timing.total, target=time_target if best else ""
        )
        report.add(case, "ours", f"forward / {who}", our_timing.phases[0] / their_timing.phases[0])
        report.add(case, "ours", f"backward / {who}", our_timing.phases[1] / their_timing.phases[1])
        if our_memory is not None and their_memory:
            report.add(case, "ours", f"memory / {who}", our_memory / their_memory, target=memory_target if best else "")


def _checked(case: str, problem: Problem, names: list[str], options: Options, report: Report) -> dict[str, Build]:
    """Return the contenders that run on this device and are right, ours among them.

    Raises:
        WrongResult: ours is wrong.
    """
    sites, (tokens, dim) = problem.sites, problem.x.shape[1:]
    few = Problem.make(sites, min(tokens, FEW_TOKENS), dim, problem.block_size, torch.float32, options.device)
    tight = errors(stacks.results(few, stacks.ours), reference.results(few))
    report.add(case, "ours", "largest error in fp32", max(tight.values()))
    require("ours in fp32", tight, TOLERANCE[torch.float32])

    expected = reference.results(problem)
    right: dict[str, Build] = {}
    for who, build in {"ours": stacks.ours, **rivals.builds(names)}.items():
        reason = "" if who == "ours" else rivals.why_not(who, options.device)
        if reason:
            report.add(case, who, "forward+backward", None, "ms", note=reason)
            continue
        try:
            if who == "flash-attn-res":
                _tuning(case, problem, options, report)
            results: dict[str, torch.Tensor] = {}
            seconds = Clock(options.device).seconds(lambda b=build, f=results: f.update(stacks.results(problem, b)))  # type: ignore[misc]
            report.add(case, who, "first pass", seconds, "s")
            loose = errors(results, expected)
            report.add(case, who, "largest error in bf16", max(loose.values()))
            for name, error in loose.items():
                report.add(case, who, f"error of {name}", error)
            require(who, loose, TOLERANCE[options.dtype])
        except Exception as error:
            if who == "ours":
                raise
            reason_of_failure = (
                str(error) if isinstance(error, WrongResult) else f"failed: {type(error).__name__}: {error}"
            )
            report.add(case, who, "forward+backward", None, "ms", note=reason_of_failure.splitlines()[0][:200])
            continue
        right[who] = build
    return right


def _tuning(case: str, problem: Problem, options: Options, report: Report) -> None:
    known = tuned.holds("phase_1_")
    tuning = rivals.tune_flash_attn_res(problem, options.tune_limit)
    note = "with results of an earlier run" if known else ""
    note = (
        note
        if tuning.finished
        else f"stopped after {tuning.seconds:.0f} s; timed with fewer configurations to choose from"
    )
    report.add(case, "flash-attn-res", "tuning", tuning.seconds if tuning.finished else None, "s", note=note)


def _spread(timing: Timing) -> str:
    return f"middle half of the rounds within {100 * timing.spread:.0f}%" if timing.spread > 0.05 else ""
