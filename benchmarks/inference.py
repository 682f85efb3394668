"""`decode`, `prefill` and `prefill-memory`: the cost of depth mixing in inference, against the plain residual.

Weights are random; weights and caches are bf16, mixers' parameters fp32. A decoding step, and a prompt, is one CUDA graph that is
replayed. The plain residual's adds and norms are one launch per site as well, so the baseline is strong. Every arm takes turns with
the first. Nothing is timed before its logits, through the cache, agreed with those of a whole pass in fp64.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable
from statistics import fmean

import torch
from torch import Tensor

from benchmarks import check
from benchmarks.options import Options, backend
from benchmarks.report import Report
from benchmarks.timing import Clock, Mark, Run, interleaved
from depthmix.compare.arms import Arm, check_arms, parse_arms
from depthmix.models import Decoder, DecoderConfig
from depthmix.models.decoding import Decoding
from depthmix.ops.gpu.recording import recorded as recorded_graph

M54 = DecoderConfig(vocab_size=16384, dim=512, n_blocks=12, n_heads=8, mlp="relu2", qk_norm=True)
B1 = DecoderConfig(vocab_size=32768, dim=2048, n_blocks=16, n_heads=16, mlp_dim=8192)
TINY = DecoderConfig(vocab_size=64, dim=32, n_blocks=4, n_heads=2)
# Models, and the sites per block.
SIZES = {"54m": (M54, 4), "1b": (B1, 8)}
BATCHES = (1, 8, 64)
# Decoding steps that are timed together.
STEPS = 8
# Tokens in the cache before a decoding step, and the length of the cache.
PAST, SLOTS = 256, 512
PROMPT, LONG, CHUNK = 8192, 131072, 2048
# Chunk sizes of a prompt. Every arm, the plain residual included, is timed with its best one.
CHUNKS = (2048, 4096, 8192)
# Rounds per round of a kernel.
ROUNDS = 4
# Recordings of a decoding step. The addresses of its tensors change the time of a recording by up to a tenth.
RECORDINGS = 4
# Blocks of the models that are checked.
FEW_BLOCKS = 8
# Tokens of the prompts for checks: for the decoding kernels, and for the others.
FEW_TOKENS, MANY_TOKENS = 100, 600
# Tolerances of fp32 and of bf16.
TIGHT, LOOSE = 1e-3, 1.5e-1
DECODE = {"block": "<= 1.03", "full": "<= 1.05", "ways": "<= 1.04", "dca": "<= 1.05"}
PREFILL = {"block": "<= 1.05", "full": "<= 1.08", "ways": "<= 1.08", "dca": "<= 1.08"}
MEMORY = dict.fromkeys(PREFILL, "<= 1.05")
GIB = 2**30


def decode(options: Options, report: Report) -> None:
    """Time a decoding step at every batch size."""
    batches = (1,) if options.small else BATCHES
    for name, config, targets in _sizes(options, DECODE):
        case = f"decode {name}: {config.n_blocks} blocks, D={config.dim}"
        if not options.wanted(case):
            continue
        arms = _arms(options, config, targets)
        _check(case, config, arms, FEW_TOKENS, options, report)
        first = build(config, arms[0], options)
        for arm in arms[1:]:
            model = build(config, arm, options)
            for batch in batches:
                both = {arms[0].label: first, arm.label: model}
                recordings = [_placed_anew(both, batch, i, options) for i in range(1 if options.small else RECORDINGS)]
                _compare(f"{case}, batch {batch}", arms[0], arm, recordings, STEPS, targets, options, report)
                del recordings, both
            del model
            _free(options)


def prefill(options: Options, report: Report) -> None:
    """Time a prompt in chunks.

    A chunk leaves only keys and values behind, and small chunks keep their sources in the GPU's cache.
    """
    for name, config, targets in _sizes(options, PREFILL):
        tokens, chunks = (32, (16, 32)) if options.small else (PROMPT, CHUNKS)
        case = f"prefill {name}: {config.n_blocks} blocks, D={config.dim}, {tokens} tokens"
        if not options.wanted(case):
            continue
        arms = _arms(options, config, targets)
        _check(case, config, arms, MANY_TOKENS, options, report)
        plain = build(config, arms[0], options)
        for arm in arms[1:]:
            both = ((arms[0].label, plain), (arm.label, build(config, arm, options)))
            runs = {(label, c): prompt_of(model, tokens, c, options) for label, model in both for c in chunks}
            timings = interleaved(runs, _rounds(options), options.warmup, options.device)
            best_of_base, best = (min((timings[label, c].total, c) for c in chunks) for label, _ in both)
            _add(case, arms[0], arm, best[0], best_of_base[0], targets, report)
            report.add(case, arm.label, "best chunk", best[1], "tokens")
            report.add(case, arm.label, f"best chunk of {arms[0].label}", best_of_base[1], "tokens")
            del runs, both
            _free(options)


def prefill_memory(options: Options, report: Report) -> None:
    """Measure the peak memory of a long prompt in chunks, including weights, keys and values."""
    for name, config, targets in _sizes(options, MEMORY):
        tokens, chunk = (64, 16) if options.small else (LONG, CHUNK)
        case = f"prefill-memory {name}: {config.n_blocks} blocks, D={config.dim}, {tokens} tokens in chunks of {chunk}"
        if not options.wanted(case):
            continue
        base = None
        for arm in _arms(options, config, targets):
            seconds, peak = _long_prompt(config, arm, tokens, chunk, options)
            report.add(case, arm.label, "prompt", seconds, "s")
            if peak is not None:
                base = base or peak
                report.add(case, arm.label, "peak memory", peak / GIB, "GiB")
                report.add(case, arm.label, "peak memory / residual", peak / base, target=targets.get(arm.label, ""))


def _long_prompt(
    config: DecoderConfig, arm: Arm, tokens: int, chunk: int, options: Options
) -> tuple[float, int | None]:
    """Return seconds and, on a GPU, peak bytes."""
    _free(options)
    on_gpu = options.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(options.device)
    before = torch.cuda.memory_allocated(options.device) if on_gpu else 0
    ids = torch.randint(0, config.vocab_size, (1, tokens), device=options.device)
    decoding = Decoding(build(config, arm, options), 1, tokens, chunk=chunk)
    seconds = Clock(options.device).seconds(lambda: decoding.prefill(ids))
    return seconds, torch.cuda.max_memory_allocated(options.device) - before if on_gpu else None


def _sizes(options: Options, required: dict[str, str]) -> list[tuple[str, DecoderConfig, dict[str, str]]]:
    """Return name, model and the targets of each arm, the plain residual first."""
    if options.small:
        return [("small", TINY, dict.fromkeys(("residual", "attnres:block_size=4,ways=2", "dca"), ""))]
    return [(name, config, _targets(size, required)) for name, (config, size) in SIZES.items()]


def _targets(size: int, required: dict[str, str]) -> dict[str, str]:
    return {
        "residual": "",
        f"attnres:block_size={size}": required["block"],
        "attnres": required["full"],
        f"attnres:block_size={size},ways=2": required["ways"],
        "dca": required["dca"],
    }


def _arms(options: Options, config: DecoderConfig, targets: dict[str, str]) -> list[Arm]:
    arms = parse_arms(options.arms or tuple(targets))
    check_arms(arms, config.dim, config.n_blocks)
    return arms


def build(config: DecoderConfig, arm: Arm, options: Options, dtype: torch.dtype | None = None) -> Decoder:
    """Return a decoder with random weights and a mixer away from its initial values. On a CPU it is fp32."""
    torch.manual_seed(0)
    # Drawing a billion weights on the CPU would take longer than everything else.
    with options.device:
        model = Decoder(dataclasses.replace(config, mixer=arm.name, mixer_options=arm.options)).requires_grad_(False)
    for p in model.mixer.parameters():
        p.add_(torch.randn_like(p) / config.dim**0.5)
    half = options.device.type == "cuda" and dtype is None
    return model.to(torch.bfloat16 if half else dtype or torch.float32).eval()


def _filled(model: Decoder, batch: int, options: Options) -> Decoding:
    """Return a decoder's state after a prompt."""
    past, slots = (4, 16) if options.small else (PAST, SLOTS)
    decoding = Decoding(model, batch, slots)
    decoding.cache.keys[:, :, :, :past].normal_()
    decoding.cache.values[:, :, :, :past].normal_()
    decoding.cache.advance(past)
    return decoding


def _placed_anew(models: dict[str, Decoder], batch: int, i: int, options: Options) -> dict[str, Run]:
    """Return runs that each have a cache and a recording of their own, at new places in memory."""
    runs, spacers = {}, []
    for label, model in models.items():
        spacers.append(torch.empty((1 + 7 * i) << 20, dtype=torch.uint8, device=options.device))
        runs[label] = steps_of(_filled(model, batch, options))
    return runs


def steps_of(decoding: Decoding) -> Run:
    """Return a run of STEPS decoding steps, always from the same position."""
    ids, past = decoding.ids[:, 0].clone(), decoding.cache.filled

    def run(mark: Mark) -> None:
        decoding.cache.position.fill_(past)
        decoding.cache.filled = past
        for _ in range(STEPS):
            decoding.step(ids)
        mark()

    return run


def recorded(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Record a call as a CUDA graph. Without a GPU, the call itself is returned."""
    if device.type != "cuda":
        return call
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with recorded_graph(graph, side) as constants:
        result = call()

    # The default argument keeps everything alive that the graph reads and writes.
    def replay(_: object = (constants, result, call)) -> object:
        graph.replay()
        return result

    return replay


@torch.no_grad()
def prompt_of(model: Decoder, tokens: int, chunk: int, options: Options) -> Run:
    """Return a run that takes a prompt in chunks and computes the logits after it."""
    decoding = Decoding(model, 1, tokens, chunk=chunk)
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=options.device)

    def call() -> Tensor:
        decoding.cache.position.zero_()
        decoding.cache.filled = 0
        return decoding.prefill(ids)

    replay = recorded(call, options.device)

    def run(mark: Mark) -> None:
        replay()
        mark()

    return run


def _compare(
    case: str,
    base: Arm,
    arm: Arm,
    recordings: list[dict[str, Run]],
    steps: int,
    targets: dict[str, str],
    options: Options,
    report: Report,
) -> None:
    """Report medians over a recording's rounds, averaged over recordings."""
    rounds = max(1, _rounds(options) // len(recordings))
    timings = [interleaved(runs, rounds, options.warmup, options.device) for runs in recordings]
    time, base_time = (fmean(t[label].total for t in timings) / steps for label in (arm.label, base.label))
    if len(timings) > 1:
        ratios = [t[arm.label].total / t[base.label].total for t in timings]
        report.add(
            case,
            arm.label,
            "spread of the ratio over recordings",
            max(ratios) - min(ratios),
            note=f"{min(ratios):.3f} to {max(ratios):.3f}",
        )
    _add(case, base, arm, time, base_time, targets, report)


def _rounds(options: Options) -> int:
    return options.repeats * (1 if options.small else ROUNDS)


def _add(
    case: str, base: Arm, arm: Arm, time: float, base_time: float, targets: dict[str, str], report: Report
) -> None:
    report.add(case, arm.label, f"time / {base.label}", time / base_time, target=targets.get(arm.label, ""))
    report.add(case, arm.label, "time", time, "ms")
    report.add(case, arm.label, f"time of {base.label} beside it", base_time, "ms")


def _check(case: str, config: DecoderConfig, arms: list[Arm], prompt: int, options: Options, report: Report) -> None:
    few = dataclasses.replace(config, n_blocks=min(config.n_blocks, FEW_BLOCKS), vocab_size=64)
    for arm in arms:
        arm_errors = errors(few, arm, 12 if options.small else prompt, options)
        for name, error in arm_errors.items():
            report.add(case, arm.label, f"error of {name}", error)
        check.require(arm.label, {n: e for n, e in arm_errors.items() if "fp32" in n}, TIGHT)
        check.require(arm.label, {n: e for n, e in arm_errors.items() if "fp32" not in n}, LOOSE)


@torch.no_grad()
def errors(config: DecoderConfig, arm: Arm, prompt: int, options: Options) -> dict[str, float]:
    """Return the errors of logits through the cache, of a prompt and of single tokens after it.

    The reference is a whole pass in fp64 in plain PyTorch.
    """
    exact = build(config, arm, options, torch.float32)
    new = 3
    ids = torch.randint(0, config.vocab_size, (2, prompt + new), device=options.device)
    with backend("reference"):
        expected = copy.deepcopy(exact).double()(ids)[:, prompt - 1 :]
    by_precision = {}
    kinds = {"fp32": torch.float32, **({"bf16": torch.bfloat16} if options.device.type == "cuda" else {})}
    for name, dtype in kinds.items():
        decoding = Decoding(copy.deepcopy(exact).to(dtype), 2, prompt + new)
        parts: list[Tensor] = [decoding.prefill(ids[:, :prompt])]
        parts += [decoding.step(ids[:, prompt + i]).clone() for i in range(new)]
        by_precision[f"{name}, prompt"] = check.relative_error(parts[0], expected[:, 0])
        by_precision[f"{name}, steps"] = check.relative_error(torch.stack(parts[1:], 1), expected[:, 1:])
    return by_precision


def _free(options: Options) -> None:
    gc.collect()
    if options.device.type == "cuda":
        torch.cuda.empty_cache()
