"""`peer-step` and `mhc-ops`: our code against the published code of the mechanisms, as PyPI has it (`pip install .[bench]`).

* peer-step: a training step of DeepCrossAttention against deep-cross-attention's own GPT, and of dynamic Hyper-Connections against
  hyper-connections' module around our sublayers. Width, depth, heads, vocabulary and tokens are equal, with bf16 autocast, clipping
  and fused AdamW. Their code is passed to torch.compile as a whole; ours runs in our trainer.
* mhc-ops: sites of mHC without sublayers (coefficients, Sinkhorn, read and write, forward and backward) against Liger's operators.

Mechanisms of one name are not always one function. deep-cross-attention norms the stack before its weights, and hyper-connections
has an RMSNorm with a gain instead of the paper's LayerNorm. The times are therefore of the same job, not of the same numbers. Ours is
checked against fp64 first; theirs is not.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import check
from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.step import TIGHT, VOCAB, arm_errors, random_data, steps_of
from benchmarks.timing import Mark, Run, interleaved
from depthmix import create_mixer
from depthmix.compare.arms import parse_arms
from depthmix.config import TrainConfig
from depthmix.device import autocast
from depthmix.models import Decoder
from depthmix.runs.restore import model_config
from depthmix.train.evaluate import token_losses
from depthmix.train.loop import Trainer

STREAMS = 4
TARGET = "<= 0.5"


def peer_step(options: Options, report: Report) -> None:
    """Time a whole training step of DCA and of dynamic HC."""
    size: dict[str, Any] = {"dim": 512, "n_blocks": 12, "n_heads": 8, "seq_len": 512, "batch_size": 16}
    if options.small:
        size = {"dim": 32, "n_blocks": 2, "n_heads": 2, "seq_len": 16, "batch_size": 2}
    compiled: Any = "off" if options.small else "sublayers"
    base = TrainConfig(
        mlp="relu2", steps=10**6, warmup=1, clip=1.0, compile=compiled, data="random tokens", quiet=True, **size
    )
    base.cuda_graph = not options.small
    for arm, package, build in (
        ("dca", "deep_cross_attention", deep_cross_attention),
        ("hyper:norm=rmsnorm", "hyper_connections", WithHyperConnections),
    ):
        case = f"{arm}: {base.n_blocks} blocks, D={base.dim}, {base.batch_size * base.seq_len} tokens"
        if not options.wanted(case):
            continue
        if importlib.util.find_spec(package) is None:
            report.add(case, package, "step", None, "ms", note="skipped: not installed (pip install '.[bench]')")
            continue
        (parsed,) = parse_arms([arm])
        config = dataclasses.replace(base, mixer=parsed.name, mixer_options=parsed.options)
        _require_right(case, arm, config, options, report)
        vocab = 64 if options.small else VOCAB
        data = random_data(vocab, 4 * config.batch_size * config.seq_len + 1)
        with options.device:
            trainer = Trainer(config, data, options.device)
            theirs = build(config, vocab).to(options.device)
        runs = {"ours": steps_of(trainer), package: _steps(theirs, trainer, options)}
        timings = interleaved(runs, 2 * options.repeats, options.warmup + 1, options.device)
        for who, timing in timings.items():
            report.add(case, who, "step", timing.total, "ms")
        counts = {"ours": trainer.model, package: theirs}
        for who, model in counts.items():
            report.add(case, who, "parameters", sum(p.numel() for p in model.parameters()) / 1e6, "M")
        report.add(case, "ours", f"step / {package}", timings["ours"].total / timings[package].total, target=TARGET)
        del runs, trainer, theirs
        if options.device.type == "cuda":
            torch.compiler.reset()
            torch.cuda.empty_cache()


def _require_right(case: str, who: str, config: TrainConfig, options: Options, report: Report) -> None:
    """Check ours against fp64 before it is timed.

    Raises:
        WrongResult: ours is wrong.
    """
    errors = arm_errors(config, options.device)
    report.add(case, who, "error of fp32", errors["fp32"])
    check.require(who, {"fp32": errors["fp32"]}, TIGHT)


def _steps(model: nn.Module, ours: Trainer, options: Options) -> Run:
    """Return a run that takes a training step of a model as our trainer does, on the trainer's batches."""
    config, device = ours.config, options.device
    if config.compile != "off":
        model.compile()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=device.type == "cuda")
    batch = ours.get_batch(0).to(device)

    def run(mark: Mark) -> None:
        with autocast(device, config.precision):
            loss = token_losses(model, batch).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mark()

    return run


def deep_cross_attention(config: TrainConfig, vocab: int) -> nn.Module:
    """Return the package's GPT with a stack of all layers (it takes the first and the last k of them)."""
    from deep_cross_attention.dca_gpt import DCAGPT

    model: nn.Module = DCAGPT(
        num_tokens=vocab,
        dim=config.dim,
        depth=config.n_blocks,
        past_layers_k=config.n_blocks // 2 + 1,
        heads=config.n_heads,
        dim_head=config.dim // config.n_heads,
    )
    return model


class WithHyperConnections(nn.Module):
    """Our decoder with hyper-connections' module instead of our mixer."""

    def __init__(self, config: TrainConfig, vocab: int) -> None:
        from hyper_connections import HyperConnections

        super().__init__()
        plain = dataclasses.replace(config, mixer="residual", mixer_options={})
        self.decoder = Decoder(model_config(plain, vocab))
        make, self.expand, self.reduce = HyperConnections.get_init_and_expand_reduce_stream_functions(STREAMS)
        sites = self.decoder.mixer.n_sites
        self.connections = nn.ModuleList(make(dim=config.dim, layer_index=site) for site in range(sites))

    def forward(self, ids: Tensor) -> Tensor:
        d = self.decoder
        x = self.expand(d.embedding(ids))
        context = d._context(x[: len(ids)], None, None, None)
        for connection, norm, sublayer in zip(self.connections, d.norms, d.sublayers, strict=True):
            h, add = connection(x)
            for way in norm:  # type: ignore[attr-defined]  # one
                h = way(h)
            x = add(sublayer(h, context))
        return d.head(d.final_norm(self.reduce(x)))


def mhc_ops(options: Options, report: Report) -> None:
    """Time a stack of mHC's sites with nothing between them, n = 4: coefficients, Sinkhorn, read and write, and their backward."""
    tokens, dim, sites = (64, 32, 4) if options.small else (16384, 2048, 8)
    case = f"{sites} sites, n={STREAMS}, N={tokens}, D={dim}"
    device = options.device
    config = TrainConfig(
        dim=dim, n_blocks=2, n_heads=2, seq_len=32, mixer="mhc", mixer_options={"n": STREAMS, "init": "uniform"}
    )
    _require_right(case, "ours", config, options, report)
    runs: dict[str, Run] = {"ours": _ours(tokens, dim, sites, device)}
    if importlib.util.find_spec("liger_kernel") is None or device.type != "cuda":
        note = "skipped: needs a GPU and liger-kernel (pip install '.[bench]')"
        report.add(case, "liger", "forward+backward", None, "ms", note=note)
    else:
        runs["liger"] = _liger(tokens, dim, sites, device)
    timings = interleaved(runs, 2 * options.repeats, options.warmup, device)
    for who, timing in timings.items():
        report.add(case, who, "forward+backward", timing.total, "ms")
    if "liger" in timings:
        ratio = timings["ours"].total / timings["liger"].total
        report.add(case, "ours", "forward+backward / liger", ratio, target="<= 0.6")


def _ours(tokens: int, dim: int, sites: int, device: torch.device) -> Run:
    with device:
        mixer = create_mixer("mhc", dim=dim, n_blocks=sites // 2, n=STREAMS, init="uniform")
        x = torch.randn(tokens, dim, dtype=torch.bfloat16).requires_grad_()

    def forward() -> Tensor:
        state = mixer.start(x)
        for site in range(sites):
            state = mixer.write(state, site, mixer.read(state, site))  # type: ignore[arg-type]
        return mixer.finish(state)

    return _backward(forward, [x, *mixer.parameters()])


def _liger(tokens: int, dim: int, sites: int, device: torch.device) -> Run:
    from liger_kernel.transformers.mhc import LigerMHC

    with device:
        stack = nn.Sequential(
            *(LigerMHC(nn.Identity(), hc=STREAMS, c=dim, phi_dtype=torch.bfloat16) for _ in range(sites))
        ).to(device)
        x = torch.randn(tokens, dim, dtype=torch.bfloat16).requires_grad_()

    def forward() -> Tensor:
        out: Tensor = stack(x.unsqueeze(-2).expand(-1, STREAMS, -1).contiguous())
        return out.sum(-2)

    return _backward(forward, [x, *stack.parameters()])


def _backward(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Run:
    grad: list[Tensor] = []

    def run(mark: Mark) -> None:
        out = forward()
        if not grad:
            grad.append(torch.randn_like(out))
        torch.autograd.grad(out, leaves, grad[0])
        mark()

    return run
