"""`step`: the time of a whole training step of a decoder, by mechanism, against the plain residual.

The library's own trainer runs on random tokens. All arms alike have bf16 autocast, fused AdamW, compiled sublayers and norms, and
forward and backward recorded as a CUDA graph. Every arm takes turns with the first, step by step, with nothing else in memory. Steps
are launched while the GPU sleeps, so the time is the GPU's, however busy its host is. Memory is what the first step needs beyond
weights, gradients and optimizer state.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks import check
from benchmarks.options import Options, backend
from benchmarks.report import Report
from benchmarks.timing import Clock, Mark, Run, interleaved
from depthmix.cli import build_config
from depthmix.compare.arms import Arm, check_arms, parse_arms
from depthmix.config import CompareConfig, TrainConfig
from depthmix.data.dataset import Split, TokenData
from depthmix.device import autocast
from depthmix.models import Decoder
from depthmix.runs.restore import model_config
from depthmix.train.evaluate import token_losses
from depthmix.train.loop import Trainer

VOCAB = 16384
RECIPE = {
    "residual": "",
    "attnres": "<= 1.12",
    "attnres:block_size=4": "<= 1.07",
    "attnres:block_size=4,ways=2": "<= 1.065",
    "attnres:block_size=4,ways=3": "<= 1.12",
    "attnres:block_size=all,ways=2": "",
    "attnres:block_size=all,ways=2,output_gain=0.1": "",
    "dca": "<= 1.15",
    "dca:window=8": "<= 1.14",
    "grn": "<= 1.10",
    "denseformer": "<= 1.07",
    "mudd": "<= 1.25",
    "hyper": "<= 1.30",
    "mhc": "<= 1.30",
    "mhc:schedule=single_pass": "<= 1.25",
    "layerscale": "",
    "rezero": "",
}
WIDE = {
    "residual": "",
    "attnres": "<= 1.06",
    "attnres:block_size=8": "<= 1.03",
    "attnres:block_size=8,ways=2": "<= 1.03",
    "attnres:block_size=8,ways=3": "<= 1.05",
    "dca": "<= 1.06",
    "denseformer": "<= 1.03",
    "mhc": "<= 1.12",
    "mhc:schedule=single_pass": "<= 1.10",
}
SMALL = ("residual", "attnres:block_size=4,ways=2", "dca", "mhc")
# Blocks and tokens for checks.
FEW_BLOCKS, FEW_TOKENS = 8, 128
# Tolerances: of every gradient in fp32, and of all gradients as one vector under bf16 autocast.
TIGHT, LOOSE = 1e-3, 1.5e-1
GIB = 2**30
# Rounds per round of a kernel.
STEPS = 4


def step(options: Options, report: Report) -> None:
    """Time the recipe's model, and a model of 16 blocks and 2048 channels."""
    name, recipe_model = own_size(options)
    sizes: Sizes = {name: (recipe_model, dict.fromkeys(SMALL, "") if options.small else RECIPE)}
    if not options.small:
        sizes |= _wide(BASE)
    for name, (config, targets) in sizes.items():
        case = case_of(name, config)
        if options.wanted(case):
            arms = options.arms or tuple(targets)
            _case(case, config, parse_arms(arms), targets, options, report)
            if options.device.type == "cuda":
                torch.compiler.reset()
                torch.cuda.empty_cache()


Sizes = dict[str, tuple[TrainConfig, dict[str, str]]]
BASE = TrainConfig(compile="sublayers", steps=10**6, warmup=1, data="random tokens", quiet=True)


def own_size(options: Options) -> tuple[str, TrainConfig]:
    """Return the recipe's model with its name, or a model that a CPU trains in milliseconds."""
    if options.small:
        return "small", small_config(BASE)
    return Path(options.recipe).stem, recipe_config(BASE, options.recipe)


def case_of(name: str, config: TrainConfig) -> str:
    """Name a size in tables."""
    return f"{name}: {config.n_blocks} blocks, D={config.dim}, {config.batch_size * config.seq_len} tokens"


def recipe_config(base: TrainConfig, path: str) -> TrainConfig:
    """Return the base with the model and the optimizer of a recipe."""
    recipe = build_config("benchmarks", CompareConfig, {"recipe": path})
    not_of_model = ("data", "out", "steps", "warmup", "seed", "device", "compile")
    names = [f.name for f in dataclasses.fields(TrainConfig) if f.name not in not_of_model]
    return dataclasses.replace(base, **{n: getattr(recipe, n) for n in names})


def _wide(base: TrainConfig) -> Sizes:
    config = dataclasses.replace(base, dim=2048, n_blocks=16, n_heads=16, seq_len=2048, batch_size=8, cuda_graph=True)
    return {"wide": (config, WIDE)}


def small_config(base: TrainConfig) -> TrainConfig:
    """Return the base with a model that a CPU trains in milliseconds."""
    return dataclasses.replace(base, dim=32, n_blocks=4, n_heads=2, seq_len=16, batch_size=2, compile="off")


def _case(
    case: str, config: TrainConfig, arms: Sequence[Arm], targets: dict[str, str], options: Options, report: Report
) -> None:
    check_arms(arms, config.dim, config.n_blocks)
    data = data_of(config, options)
    require_exact(case, of_arm(config, arms[0]), arms[0].label, options, report)
    first = first_step(case, of_arm(config, arms[0]), arms[0].label, data, options, report)
    # Checked one by one, so that a run that is cut off has times of the arms before.
    for arm in arms[1:]:
        require_exact(case, of_arm(config, arm), arm.label, options, report)
        run = first_step(case, of_arm(config, arm), arm.label, data, options, report)
        in_turns(case, {arms[0].label: first, arm.label: run}, options, report, targets.get(arm.label, ""))
        del run
        gc.collect()


def require_exact(case: str, config: TrainConfig, label: str, options: Options, report: Report) -> None:
    """Report the errors of a model's losses and gradients before it is timed.

    Raises:
        WrongResult: the errors are too large.
    """
    errors = arm_errors(config, options.device)
    for name, error in errors.items():
        report.add(case, label, f"error of {name}", error)
    check.require(label, {"fp32": errors["fp32"]}, TIGHT)
    check.require(label, {n: e for n, e in errors.items() if n != "fp32"}, LOOSE)


def in_turns(case: str, runs: dict[str, Run], options: Options, report: Report, target: str = "") -> None:
    """Time the second of two runs against the first, step by step."""
    first, label = runs
    timings = interleaved(runs, STEPS * options.repeats, options.warmup, options.device)
    base_time, time = timings[first].total, timings[label].total
    report.add(case, label, f"step / {first}", time / base_time, target=target)
    report.add(case, label, "step", time, "ms")
    report.add(case, label, f"step of {first} beside it", base_time, "ms")


def first_step(case: str, config: TrainConfig, label: str, data: TokenData, options: Options, report: Report) -> Run:
    """Take the first step, in which everything is compiled and recorded, and return a run that takes the next one."""
    # Drawing a billion weights on the CPU would take longer than everything else.
    with options.device:
        run = steps_of(Trainer(config, data, options.device))
    if options.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(options.device)
    report.add(case, label, "first step", Clock(options.device).seconds(lambda: run(lambda: None)), "s")
    if options.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(options.device) - torch.cuda.memory_allocated(options.device)
        report.add(case, label, "memory of a step", peak / GIB, "GiB")
    return run


def of_arm(config: TrainConfig, arm: Arm) -> TrainConfig:
    """Return the configuration with an arm's mixer."""
    return dataclasses.replace(config, mixer=arm.name, mixer_options=arm.options)


def steps_of(trainer: Trainer) -> Run:
    """Return a run that takes the trainer's next step.

    A fused step is only launched, since reading its loss would wake up the host.
    """
    n_steps = 0
    take = trainer.launch if trainer.fused else trainer.step

    def run(mark: Mark) -> None:
        nonlocal n_steps
        take(n_steps)
        n_steps += 1
        mark()

    return run


def data_of(config: TrainConfig, options: Options) -> TokenData:
    """Return random tokens for some steps."""
    return random_data(64 if options.small else VOCAB, 4 * config.batch_size * config.seq_len + 1)


def random_data(vocab: int, tokens: int) -> TokenData:
    """Return random tokens instead of prepared data."""
    ids = np.random.default_rng(0).integers(0, vocab, tokens)
    splits = {name: Split(name, tokens, tokens, 1, [ids]) for name in ("train", "val")}
    return TokenData(Path("random"), {"vocab_size": vocab, "tokenizer": "none"}, splits)


def arm_errors(config: TrainConfig, device: torch.device) -> dict[str, float]:
    """Measure errors against fp64 of a decoder of the same width with fewer blocks: the largest in fp32, and those in bf16."""
    torch.manual_seed(0)
    few = dataclasses.replace(config, n_blocks=min(config.n_blocks, FEW_BLOCKS))
    with device:
        model = Decoder(model_config(few, 64))
    with torch.no_grad():
        # Away from initial values at which a gradient may be zero.
        for p in model.mixer.parameters():
            p.add_(torch.randn_like(p) / config.dim**0.5)
    batch = torch.randint(0, 64, (2, min(config.seq_len, FEW_TOKENS) + 1), device=device)
    with backend("reference"):
        expected = _results(copy.deepcopy(model).double(), batch, "fp32")
    single = check.errors(_results(model, batch, "fp32"), expected)
    half = _results(model, batch, "bf16")
    return {
        "fp32": max(single.values()),
        "bf16 loss": check.relative_error(half["output"], expected["output"]),
        "bf16 gradient": check.relative_error(_flat(half), _flat(expected)),
    }


def _results(model: Decoder, batch: Tensor, precision: str) -> check.Results:
    """Return the losses and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    with autocast(batch.device, precision) if precision == "bf16" else nullcontext():
        losses = token_losses(model, batch) if precision == "bf16" else _losses(model, batch)
    losses.mean().backward()
    grads = {f"d {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"output": losses.detach(), **grads}


def _losses(model: Decoder, batch: Tensor) -> Tensor:
    """Compute `token_losses` without rounding them to fp32."""
    logits = model(batch[:, :-1]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="none").view_as(batch[:, 1:])


def _flat(results: check.Results) -> Tensor:
    return torch.cat([g.flatten().double() for n, g in sorted(results.items()) if n != "output"])
