"""Tensor and sequence parallelism for the decoder, as DTensor plans.

A process holds some heads of every attention, some channels of every MLP and some rows of the embedding and the head. Between
sublayers it holds its part of every sequence: mixing is token-local, so states, reads and writes need no communication at all.

    embedding            ids -> its vocabulary's part, summed and cut along the sequence      [B, T/tp, D]
    mixer, norms         on that part; their parameters are whole everywhere, and each process finds the gradient of its tokens
    sublayer             gathers the sequence once, works on its heads or channels, sums and cuts again
    head                 gathers the sequence; logits stay divided over the vocabulary, and so is the loss
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from depthmix.models import Decoder

# Dimension of tokens in [B, T, D].
SEQUENCE = 1


class GatherSequence(ParallelStyle):
    """A sublayer that needs whole sequences, and whose inputs (one per way) are parts of them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(t: Tensor) -> Tensor:
            return DTensor.from_local(t, device_mesh, [Shard(SEQUENCE)], run_check=False).redistribute(
                placements=[Replicate()]
            )

        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            h, *rest = args
            return (tuple(map(whole, h)) if isinstance(h, tuple) else whole(h), *rest)

        module.register_forward_pre_hook(gather)
        return module


def _positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass the positions of whole sequences to attention, where the model would count those of its own part."""
    if args and kwargs.get("position_ids") is None:
        kwargs = {**kwargs, "position_ids": torch.arange(args[0].shape[1], device=args[0].device).unsqueeze(0)}
    return args, kwargs


def plan(model: Any) -> dict[str, ParallelStyle]:
    """Return the parallel style of each module of a decoder or of a piece. Modules without one stay whole."""
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(SEQUENCE)),
        "head": ColwiseParallel(input_layouts=Shard(SEQUENCE), output_layouts=Shard(-1), use_local_output=False),
    }
    styles = {name: style for name, style in styles.items() if hasattr(model, name)}
    for site, sublayer in model.sublayers.named_children():
        styles[f"sublayers.{site}"] = GatherSequence()
        for name, part in sublayer.named_children():
            if isinstance(part, nn.Linear):
                out = name == "out_proj"
                styles[f"sublayers.{site}.{name}"] = (
                    RowwiseParallel(output_layouts=Shard(SEQUENCE)) if out else ColwiseParallel()
                )
    return styles


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    """Divide a decoder, or a pipeline's piece of one, among the processes of a mesh."""
    parallelize_module(model, mesh, plan(model))
    if not isinstance(model, Decoder):
        model.parts = mesh.size()
        return
    if model.config.tie_embeddings:
        # Both are divided alike, over the vocabulary.
        model.head.weight = model.embedding.weight
    model.register_forward_pre_hook(_positions, with_kwargs=True)
