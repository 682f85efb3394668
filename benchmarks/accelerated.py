"""`accelerate`: models that mix over depth, as transformers runs them, compiled, and with `depthmix.hf.accelerate`.

* Boundaries: layers whose sublayers pass on their input. What is left is what lies between sublayers: for mHC the write of a
  sublayer's output, coefficients, the read and its norm. Reported per boundary, of which a layer has two.
* Whole models: four layers at real width with few experts and random weights, without a vocabulary's head. Training is forward and
  backward; decoding is timed by the clock on the wall.

Times of passes are the GPU's, with launches hidden. Rows of "wall" are what a caller waits, launches included.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import check
from benchmarks.carry_models import use_carried_models
from benchmarks.depth_models import (
    CLASSES,
    LAYERS,
    WIDTHS,
    depth_model,
    mixing_parameters,
    run_layers,
    twin,
)
from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.timing import Clock, Mark, Run, extra_memory, interleaved

# Families whose layers read only what the layer before wrote need two layers; Inkling 2 reads what all layers wrote.
BOUNDARY_LAYERS = {"inkling2": LAYERS}
# Tokens of training and prefill, and of two steps of decoding.
TOKENS = (8192, 64, 1)
# Batch and length of a training pass, length of a prompt, tokens in the cache before decoding, decoded tokens.
TRAINING, PROMPT, CACHED, DECODED = (4, 2048), 8192, 512, 24
# Of a whole stack in bf16, in which both sides round.
TOLERANCE = 5e-2
# Streams of mHC that Liger's operators compute too.
LIGER_FAMILIES = ("deepseek_v4",)
SMALL_DIM = 32
Forward = Callable[[Tensor], Tensor]


def accelerate(options: Options, report: Report) -> None:
    """Time boundaries and whole models of every family that `depthmix.hf.accelerate` knows."""
    report.add("", "transformers", "version", None, note=use_carried_models())
    from depthmix.hf.accelerated.accelerate import FAMILIES

    wrong: list[str] = []
    families = [name for name in CLASSES if name in FAMILIES.values()]
    for family in families:
        for dim in (SMALL_DIM,) if options.small else WIDTHS[family]:
            try:
                with _errors_reported(report, f"{family}, D={dim}"):
                    boundaries(family, dim, options, report)
            except check.WrongResult as error:
                report.add(f"{family}, D={dim}", "ours", "refused", None, note=str(error))
                wrong.append(str(error))
    for family in families:
        with _errors_reported(report, f"{family}, {LAYERS} layers"):
            whole_model(family, options, report)
    if wrong:
        raise check.WrongResult(f"{len(wrong)} cases are wrong: {wrong[0]}")


def boundaries(family: str, dim: int, options: Options, report: Report) -> None:
    """Time what lies between two sublayers, forward and backward and forward alone."""
    case = f"{family}, D={dim}"
    if not options.wanted(case):
        return
    eager, ours = _pair(family, dim, options, whole=False)
    layers = BOUNDARY_LAYERS.get(family, 2)
    for model in (eager, ours):
        model.layers = model.layers[:layers]
    sites = 2 * layers
    forwards: dict[str, Forward] = {
        "eager": lambda x: run_layers(family, eager, x),
        "ours": lambda x: run_layers(family, ours, x),
    }
    leaves = {"eager": mixing_parameters(eager), "ours": mixing_parameters(ours)}
    _require_equal(case, forwards, leaves, dim, options, report)
    if options.device.type == "cuda":
        # Compiling takes most of this entry's time.
        if dim == WIDTHS[family][0] or family in LIGER_FAMILIES:
            forwards["compiled"] = torch.compile(forwards["eager"], dynamic=False)
            leaves["compiled"] = leaves["eager"]
        if family in LIGER_FAMILIES and importlib.util.find_spec("liger_kernel") is not None:
            with _errors_reported(report, f"{case}, liger"):
                stack = liger_stack(dim, sites, options.device)
                forwards["liger"], leaves["liger"] = stack, list(stack.parameters())
    for tokens in (8, 2, 1) if options.small else TOKENS:
        x = torch.randn(1, tokens, dim, device=options.device, dtype=options.dtype)
        size = f"{case}, {tokens} tokens"
        usable = _warmed(forwards, leaves, x, report, size, backward=tokens == (8 if options.small else TOKENS[0]))
        if tokens == (8 if options.small else TOKENS[0]):
            runs = {who: _backward(forwards[who], [x.clone().requires_grad_(), *leaves[who]]) for who in usable}
            times = interleaved(runs, options.repeats, options.warmup, options.device)
            totals = {who: timing.total / sites for who, timing in times.items()}
            memory = {who: extra_memory(run, options.device) for who, run in runs.items()}
            _add(report, size, "forward+backward", totals, {"eager": "<= 0.2", "compiled": "<= 0.667"})
            shown = {who: m / sites / 2**20 for who, m in memory.items() if m is not None}
            _add(report, size, "peak memory", shown, {"eager": "<= 0.5"}, unit="MiB")
            del runs
        runs = {who: _forward(forwards[who], x) for who in usable}
        times = interleaved(runs, options.repeats, options.warmup, options.device)
        _add(report, size, "forward", {who: timing.total / sites for who, timing in times.items()})
        if tokens <= 64:
            walls = {who: wall(run, options) / sites for who, run in runs.items()}
            _add(report, size, "wall of forward", walls)
        _add_copy_share(family, ours, x, times["ours"].total / sites, options, report, size)
    _free(options)


def whole_model(family: str, options: Options, report: Report) -> None:
    """Time training, a prompt and decoding of a model of four layers, and its peak memory in training."""
    dim = SMALL_DIM if options.small else WIDTHS[family][0]
    case = f"{family}, {LAYERS} layers, D={dim}"
    if not options.wanted(case):
        return
    eager, ours = _pair(family, dim, options, whole=True)
    models = {"eager": eager, "ours": ours}
    batch, length = (2, 8) if options.small else TRAINING
    ids = torch.randint(eager.config.vocab_size - 1, (batch, length), device=options.device)

    def train(model: Any) -> Run:
        parameters = [p for p in model.parameters() if p.requires_grad]
        grad = torch.randn(batch, length, dim, device=options.device)

        def run(mark: Mark) -> None:
            out = model(input_ids=ids, use_cache=False).last_hidden_state
            torch.autograd.grad((out.float() * grad).mean(), parameters, allow_unused=True)
            mark()

        return run

    for who, model in models.items():
        model.train(True)
        with _errors_reported(report, f"{case}, training, {who}"):
            memory = extra_memory(train(model), options.device)
            if memory is not None:
                report.add(case, who, "peak memory in training", memory / 2**30, "GiB")
    with _errors_reported(report, f"{case}, training"):
        times = interleaved({who: train(m) for who, m in models.items()}, options.repeats, 1, options.device)
        _add(report, case, "training pass", {who: t.total for who, t in times.items()}, {"eager": "<= 1"})
        for who, t in times.items():
            report.add(case, who, "training", batch * length / t.total * 1e3, "tokens/s")
    _free(options)
    for model in models.values():
        model.eval()
    prompt = torch.randint(eager.config.vocab_size - 1, (1, 16 if options.small else PROMPT), device=options.device)
    with _errors_reported(report, f"{case}, prefill"):
        runs = {who: _prefill(m, prompt) for who, m in models.items()}
        times = interleaved(runs, options.repeats, 1, options.device)
        _add(report, case, "prefill pass", {who: t.total for who, t in times.items()})
        for who, t in times.items():
            report.add(case, who, "prefill", prompt.shape[1] / t.total * 1e3, "tokens/s")
    with _errors_reported(report, f"{case}, decoding"):
        _add(report, case, "decode latency", decode_latency(models, prompt, options))
    del models, eager, ours
    _free(options)


def decode_latency(models: dict[str, Any], prompt: Tensor, options: Options) -> dict[str, float]:
    """Return the milliseconds per decoded token of each model, batch 1, after a prompt: the median of rounds in turns."""
    cached, decoded = (8, 4) if options.small else (CACHED, DECODED)
    clock, rounds = Clock(options.device), {who: [] for who in models}  # type: ignore[var-annotated]
    for turn in range(4):
        for who, model in models.items():
            with torch.inference_mode():
                cache = model(input_ids=prompt[:, :cached], use_cache=True).past_key_values
                model(input_ids=prompt[:, :1], past_key_values=cache, use_cache=True)
                clock.synchronize()
                begun = time.perf_counter()
                for _ in range(decoded):
                    model(input_ids=prompt[:, :1], past_key_values=cache, use_cache=True)
                clock.synchronize()
                if turn:
                    rounds[who].append((time.perf_counter() - begun) / decoded * 1e3)
    return {who: statistics.median(times) for who, times in rounds.items()}


def liger_stack(dim: int, sites: int, device: torch.device) -> nn.Module:
    """Return sites of Liger's mHC, each with the norm that follows its read."""
    from liger_kernel.transformers.mhc import LigerMHC

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norms = [nn.RMSNorm(dim, dtype=torch.bfloat16) for _ in range(sites)]
            self.sites = nn.Sequential(*(LigerMHC(norm, hc=4, c=dim, phi_dtype=torch.bfloat16) for norm in norms))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.sites(x.unsqueeze(-2).expand(*x.shape[:-1], 4, x.shape[-1]).contiguous())
            return out

    with device:
        return Stack().to(device)


def wall(run: Run, options: Options) -> float:
    """Return the milliseconds that a caller waits for one pass of many in a row."""
    clock, times = Clock(options.device), []
    count = 2 if options.small else 20
    for _ in range(3):
        clock.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            run(lambda: None)
        clock.synchronize()
        times.append((time.perf_counter() - begun) / count * 1e3)
    return statistics.median(times)


def _pair(family: str, dim: int, options: Options, *, whole: bool) -> tuple[Any, Any]:
    """Return a model and an accelerated one on the same weights."""
    import depthmix.hf

    eager = depth_model(family, dim, options.device, whole=whole, small=options.small, dtype=options.dtype)
    ours = depthmix.hf.accelerate(twin(eager), check=False, quiet=True)
    return eager, ours


def _require_equal(
    case: str,
    forwards: dict[str, Forward],
    leaves: dict[str, list[nn.Parameter]],
    dim: int,
    options: Options,
    report: Report,
) -> None:
    """Compare ours with eager on a few tokens: output and the gradients of the input and all weights.

    Raises:
        WrongResult: they differ by more than rounding.
    """
    x = torch.randn(1, 8 if options.small else 256, dim, device=options.device, dtype=options.dtype)
    found: dict[str, dict[str, Tensor]] = {}
    for who, forward in forwards.items():
        inputs = [x.clone().requires_grad_(), *leaves[who]]
        out = forward(inputs[0])
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out).cos() + out.detach(), allow_unused=True)
        together = [g.flatten().double() for g in grads[1:] if g is not None]
        found[who] = {"output": out.detach(), "d input": grads[0], "d weights": torch.cat(together)}
    errors = check.errors(found["ours"], found["eager"])
    report.add(case, "ours", "error of bf16 against eager", max(errors.values()))
    check.require("ours", errors, TOLERANCE)


def _warmed(
    forwards: dict[str, Forward],
    leaves: dict[str, list[nn.Parameter]],
    x: Tensor,
    report: Report,
    case: str,
    backward: bool,
) -> list[str]:
    """Run each contender once, and return those that run."""
    usable = []
    for who, forward in forwards.items():
        with _errors_reported(report, f"{case}, {who}"):
            if backward:
                _backward(forward, [x.clone().requires_grad_(), *leaves[who]])(lambda: None)
            _forward(forward, x)(lambda: None)
            usable.append(who)
    return usable


def _forward(forward: Forward, x: Tensor) -> Run:
    def run(mark: Mark) -> None:
        with torch.no_grad():
            forward(x)
        mark()

    return run


def _backward(forward: Forward, leaves: list[Any]) -> Run:
    grad: list[Tensor] = []

    def run(mark: Mark) -> None:
        out = forward(leaves[0])
        if not grad:
            grad.append(torch.randn_like(out))
        torch.autograd.grad(out, leaves, grad[0], allow_unused=True)
        mark()

    return run


def _prefill(model: Any, prompt: Tensor) -> Run:
    def run(mark: Mark) -> None:
        with torch.inference_mode():
            model(input_ids=prompt, use_cache=True)
        mark()

    return run


def _add(
    report: Report,
    case: str,
    metric: str,
    values: dict[str, float],
    targets: dict[str, str] | None = None,
    unit: str = "ms",
) -> None:
    """Add a value for each contender, and ours relative to each other one."""
    for who, value in values.items():
        report.add(case, who, metric, value, unit)
    for who, value in values.items():
        if who != "ours" and "ours" in values and value:
            report.add(case, "ours", f"{metric} / {who}", values["ours"] / value, target=(targets or {}).get(who, ""))


def _add_copy_share(
    family: str, model: Any, x: Tensor, milliseconds: float, options: Options, report: Report, case: str
) -> None:
    """Add the share of a copy's bandwidth at which ours runs forward, for families whose streams pass through a boundary once.

    A boundary reads the streams and an output, and writes the streams and an input: 2 n + 2 rows of D numbers per token.
    """
    n = getattr(model.config, "hc_mult", None)
    if n is None or options.device.type != "cuda" or x.shape[1] < 1024:
        return
    rows = torch.empty((n + 1) * x.numel(), dtype=x.dtype, device=x.device)
    target = torch.empty_like(rows)

    def copy(mark: Mark) -> None:
        target.copy_(rows)
        mark()

    copied = interleaved({"copy": copy}, options.repeats, options.warmup, options.device)["copy"].total
    report.add(case, "ours", "forward, share of copy bandwidth", copied / milliseconds)


@contextmanager
def _errors_reported(report: Report, case: str) -> Iterator[None]:
    """Report what goes wrong in one case, such as too little memory, and let the others run."""
    try:
        yield
    except check.WrongResult:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        report.add(case, "", "failed", None, note=f"{type(error).__name__}: {text}")


def _free(options: Options) -> None:
    torch.compiler.reset()
    gc.collect()
    if options.device.type == "cuda":
        torch.cuda.empty_cache()
