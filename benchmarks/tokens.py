"""`tokens`: tokens per second of our plain model against Hugging Face's Llama with the same weights and the same logits.

Both decode with a static cache of the same length, and a step is one CUDA graph on both sides. Their model is compiled by
torch.compile first, which serves it best; ours has kernels of its own between its products.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from benchmarks import check
from benchmarks.inference import B1, M54, PAST, ROUNDS, SLOTS, STEPS, TINY, _filled, _free, build, recorded, steps_of
from benchmarks.options import Options
from benchmarks.report import Report
from benchmarks.timing import Mark, Run, interleaved
from depthmix.compare.arms import parse_arms
from depthmix.models import Decoder, DecoderConfig

SIZES = {"54m": dataclasses.replace(M54, mlp="swiglu", qk_norm=False, mlp_dim=1408), "1b": B1}
BATCHES = (1, 64)
# Largest difference of logits over the largest logit, in fp32 and in bf16.
SAME, NEAR = 1e-4, 5e-2


def tokens(options: Options, report: Report) -> None:
    """Compare batches of 1 and of 64."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        report.add("", "transformers", "skipped", None, note="skipped: transformers is not installed")
        return
    plain = parse_arms(("residual",))[0]
    sizes = {"small": TINY} if options.small else SIZES
    for name, config in sizes.items():
        case = f"tokens {name}: {config.n_blocks} blocks, D={config.dim}"
        if not options.wanted(case):
            continue
        ours = build(config, plain, options, torch.float32)
        theirs = llama_of(ours)
        _same(case, ours, theirs, "fp32", SAME, options, report)
        if options.device.type == "cuda":
            ours, theirs = ours.bfloat16(), theirs.bfloat16()
            _same(case, ours, theirs, "bf16", NEAR, options, report)
        for batch in (1,) if options.small else BATCHES:
            runs = {
                "depthmix": steps_of(_filled(ours, batch, options)),
                "transformers": _steps_of_llama(theirs, batch, options),
            }
            rounds = options.repeats * (1 if options.small else ROUNDS)
            timings = interleaved(runs, rounds, options.warmup, options.device)
            rates = {who: 1e3 * STEPS * batch / timing.total for who, timing in timings.items()}
            for who, rate in rates.items():
                report.add(f"{case}, batch {batch}", who, "tokens per second", rate)
            ratio = rates["depthmix"] / rates["transformers"]
            report.add(
                f"{case}, batch {batch}",
                "depthmix",
                "tokens / transformers'",
                ratio,
                target="" if options.small else ">= 1",
            )
            del runs
            _free(options)
        if options.device.type == "cuda":
            torch.compiler.reset()


def llama_of(model: Decoder) -> Any:
    """Return Hugging Face's Llama with a plain decoder's weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c: DecoderConfig = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.dim,
        intermediate_size=c.mlp_dim,
        num_hidden_layers=c.n_blocks,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    with model.embedding.weight.device:
        llama = LlamaForCausalLM(config)
    llama.load_state_dict({_name(n): w for n, w in model.named_parameters()})
    return llama.to(model.embedding.weight.dtype).eval().requires_grad_(False)


def _name(ours: str) -> str:
    """Return Llama's name for a weight."""
    kind, *rest = ours.split(".")
    if kind in ("norms", "sublayers"):
        block, mlp = divmod(int(rest[0]), 2)
        if kind == "norms":
            return f"model.layers.{block}.{'post_attention' if mlp else 'input'}_layernorm.weight"
        part = {"out_proj": "down_proj" if mlp else "o_proj"}.get(rest[1], rest[1])
        return f"model.layers.{block}.{'mlp' if mlp else 'self_attn'}.{part}.weight"
    return {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}[kind] + ".weight"


@torch.no_grad()
def _same(case: str, ours: Decoder, theirs: Any, name: str, allowed: float, options: Options, report: Report) -> None:
    ids = torch.randint(0, ours.config.vocab_size, (2, 16), device=options.device)
    a, b = ours(ids).float(), theirs(ids).logits.float()
    difference = float((a - b).abs().max() / b.abs().max())
    report.add(case, "depthmix", f"difference of logits in {name}", difference)
    check.require("depthmix", {f"logits in {name}": difference}, allowed)


@torch.no_grad()
def _steps_of_llama(model: Any, batch: int, options: Options) -> Run:
    from transformers import StaticCache

    past, slots = (4, 16) if options.small else (PAST, SLOTS)
    cache = StaticCache(config=model.config, max_cache_len=slots)
    prompt = torch.zeros(batch, past, dtype=torch.int64, device=options.device)
    model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    ids = torch.zeros(batch, 1, dtype=torch.int64, device=options.device)
    lengths: list[Tensor] = [layer.cumulative_length for layer in cache.layers if hasattr(layer, "cumulative_length")]
    initial_lengths = [t.clone() for t in lengths]
    positions = torch.full((batch, 1), past, dtype=torch.int64, device=options.device)

    def forward() -> Tensor:
        return model(ids, past_key_values=cache, position_ids=positions, use_cache=True).logits[:, -1]

    step = torch.compile(forward, dynamic=False) if options.device.type == "cuda" else forward

    def call() -> Tensor:
        with torch.no_grad():
            logits = step()
            positions.add_(1)
            return logits

    def rewind() -> None:
        if lengths:
            torch._foreach_copy_(lengths, initial_lengths)
        positions.fill_(past)

    replay = recorded(call, options.device)

    def run(mark: Mark) -> None:
        rewind()
        for _ in range(STEPS):
            replay()
        mark()

    return run
