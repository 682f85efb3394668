"""`depthmix plan`: predict memory and time of a recipe on GPUs that are not at hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from depthmix.config import OF_IMAGES, PlanConfig
from depthmix.errors import UserError
from depthmix.mixers import OptionError
from depthmix.models import DecoderConfig
from depthmix.parallel.plan.hardware import GIB, Gpu, find_gpu
from depthmix.parallel.plan.hops import lasting, prefill_bytes
from depthmix.parallel.plan.layout import Layout, all_layouts, parse_layout, why_not
from depthmix.parallel.plan.memory import FREE, memory_by_rank, worst
from depthmix.parallel.plan.model import Counts, count
from depthmix.parallel.plan.report import Row, table, tell
from depthmix.parallel.plan.step import predict

# Vocabulary if neither the recipe nor the data says it.
VOCABULARY = 16384
# Label, name and options.
RuleArm = tuple[str, str, dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """The result of planning."""

    layout: Layout
    rows: list[Row]
    text: str
    warnings: list[str]


def plan(config: PlanConfig, rules: Sequence[RuleArm]) -> Plan:
    """Plan a recipe for each of several rules.

    Args:
        config: the recipe. With a layout, it is used for all rules; otherwise `propose` chooses.
        rules: label, name and options of each.

    Raises:
        UserError: the recipe or the layout makes no sense.
    """
    gpu = find_gpu(config.gpu)
    _check(config)
    counts_by_label = [(label, _count(config, label, name, options)) for label, name, options in rules]
    counts = [c for _, c in counts_by_label]
    warnings: list[str] = []
    if config.layout:
        layout = parse_layout(config.layout)
        if reason := why_not(layout, config.gpus, gpu.node, counts[0].config, config):
            raise UserError(f"plan: {reason}")
    else:
        layout, fits = propose(counts, config, gpu)
        if not fits:
            warnings.append(
                f"no layout of {config.gpus} {gpu.name.upper()} has enough memory: take more GPUs, a smaller micro_batch_size or checkpoint_activations"
            )
    rows = []
    for label, c in counts_by_label:
        memory = worst(memory_by_rank(c, layout, config))
        rows.append(Row(label, c, memory, predict(c, layout, config, gpu)))
        if memory.total > gpu.memory * (1 - FREE):
            available = f"{gpu.memory * (1 - FREE) / GIB:.0f} of {gpu.memory / GIB:.0f} GiB are available"
            warnings.append(f"{label} needs {memory.total / GIB:.1f} GiB per GPU, and {available}")
    text = tell(rows, layout, config, gpu)
    if config.prefill:
        text += "\n\n" + _prefill(config, layout, rows)
    return Plan(layout, rows, text, warnings)


def propose(counts: Sequence[Counts], config: PlanConfig, gpu: Gpu) -> tuple[Layout, bool]:
    """Return the layout in which the slowest of the rules is fastest, and True if it fits.

    If no layout fits, the layout that needs the least memory is returned, and False.
    """
    fitting: list[tuple[float, int, Layout]] = []
    others: list[tuple[float, int, Layout]] = []
    reason = ""
    for place, layout in enumerate(all_layouts(config.gpus, gpu.node)):
        if why := why_not(layout, config.gpus, gpu.node, counts[0].config, config):
            reason = reason or why
            continue
        need = max(worst(memory_by_rank(c, layout, config)).total for c in counts)
        if need > gpu.memory * (1 - FREE):
            others.append((need, place, layout))
        else:
            fitting.append((max(predict(c, layout, config, gpu).seconds for c in counts), place, layout))
    if not fitting and not others:
        raise UserError(f"plan: no layout of {config.gpus} GPUs can run this: {reason}")
    return (min(fitting)[2], True) if fitting else (min(others)[2], False)


def _check(config: PlanConfig) -> None:
    for name in ("gpus", "seq_len", "batch_size", "prefill", "chunk", "micro_batch_size", "vocab_size"):
        value = getattr(config, name)
        if value is not None and value < 1 and not (name == "prefill" and value == 0):
            raise UserError(f"plan: {name} must be at least 1, got {value}")
    for name in OF_IMAGES:
        if getattr(config, name) != getattr(PlanConfig, name):
            raise UserError(f"plan: {name} is for images, and only text decoders can be planned: leave it out")
    if not 0 <= config.params < math.inf:
        raise UserError(f"plan: params must be a finite number of at least 0, got {config.params:g}")
    if config.active_params and not config.params:
        raise UserError("plan: active_params is a part of params: give both")
    if not 0 <= config.active_params <= config.params:
        raise UserError(f"plan: active_params must be from 0 to params={config.params:g}, got {config.active_params:g}")


def _count(config: PlanConfig, label: str, name: str, options: dict[str, Any]) -> Counts:
    try:
        names = ["dim", "n_blocks", "n_heads", "n_kv_heads", "head_dim", "mlp", "mlp_dim", "qk_norm", "tie_embeddings"]
        names += ["value_residual", "value_embeddings"]
        sizes: dict[str, Any] = {size: getattr(config, size) for size in names}
        model = DecoderConfig(vocab_size=config.vocab_size or VOCABULARY, mixer=name, mixer_options=options, **sizes)
        return count(model, config.params or None, config.active_params or config.params or None)
    except (OptionError, ValueError) as error:
        raise UserError(f"plan: {label}: {error}") from None


def _prefill(config: PlanConfig, layout: Layout, rows: Sequence[Row]) -> str:
    chunk = config.chunk or config.prefill
    head = f"Depth state of a prefill of {config.prefill:,} tokens, GB: tensors that last, on one GPU, over tp={layout.tp}, {min(chunk, config.prefill):,} tokens at a time"
    lines = []
    for row in rows:
        states, dim = row.counts.states, config.dim
        sizes = [
            prefill_bytes(states, dim, config.prefill, *how)
            for how in ((1, None), (layout.tp, None), (layout.tp, chunk))
        ]
        lines.append([row.label, f"{lasting(states):g}", *(f"{size / 1e9:.3f}" for size in sizes)])
    return "\n".join([head, *table(["", "tensors", "one GPU", "sharded", "in chunks"], lines)])
