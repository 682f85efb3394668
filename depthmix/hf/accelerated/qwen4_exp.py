"""Qwen4-Exp: streams that are read through gates, channel by channel, and only added to.

    layer:   x -> [norm] gates [mean] attention [write, norm] gates [mean] MLP [write] -> x'

Each bracket is one launch (depthmix.ops.gated_streams). The gates and the weights of a write are products of the normed streams with
the model's own matrices: these modules are called, so adapters and quantised weights work as before.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

from depthmix.hf.accelerated.family import Family
from depthmix.hf.accelerated.streams import Streams, begin, is_plain, runs_as_written, write
from depthmix.ops.gated_streams import gated_mean, write_norm
from depthmix.ops.precision import compute_dtype, widen

CONNECTIONS = ("attn_hyper_connection", "mlp_hyper_connection")


class Kind(NamedTuple):
    """Classes of a layer's modules."""

    connection: type[Any] = modeling.Qwen4ExpTextGatedResidual
    norm: type[Any] = modeling.Qwen4ExpTextRMSNorm


def read(part: Any, streams: Streams, y: Tensor | None) -> tuple[Tensor, Streams]:
    """Write a sublayer's output, and read for the next one.

    Args:
        part: the module with the weights of the next site, or of the model's end.
        streams: the layer's streams.
        y: output [B, T, D] of the last sublayer, or None before the first.

    Returns:
        The input [B, T, D] of the next sublayer, and the streams.
    """
    x, shape, post, _ = streams
    n, width = x.shape[-2:]
    weight = part.hc_norm.weight
    gain = 1.0 + widen(weight, compute_dtype(x, weight)).view(n, width)
    x, normed = write_norm(x, None if y is None else y.reshape(-1, width), post, gain, part.hc_norm.eps)
    flat = normed.view(*shape, n * width)
    hidden = functional.silu(part.input_mix_weight_down(flat) / n)
    h = gated_mean(part.input_mix_weight_up(hidden).reshape(-1, n, width), normed).view(*shape, width)
    post = None
    if part.block_inject_weight is not None:
        logits = part.block_inject_weight(flat).reshape(-1, n)
        post = 2.0 * torch.sigmoid(widen(logits, compute_dtype(logits)) / n)
    return h, Streams(x, shape, post)


def as_streams(part: Any, hidden_states: Tensor) -> Streams:
    """Return the streams [B, T, n D] that a layer receives, before its first read."""
    return begin(hidden_states.unflatten(-1, (part.hc_count, part.hidden_size)))


class Qwen4ExpTextDecoderLayer(modeling.Qwen4ExpTextDecoderLayer):
    """A layer that mixes its streams in few steps."""

    KIND: ClassVar = Kind()

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        conv_mask: Tensor | None = None,
        past_key_values: Any = None,
        ple_input_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the streams [B, T, n D] after attention and MLP."""
        if not mixes_as_written(self, self.KIND):
            masks = {"attention_mask": attention_mask, "conv_mask": conv_mask}
            own = {"past_key_values": past_key_values, "ple_input_ids": ple_input_ids}
            return super().forward(hidden_states, position_embeddings, **masks, **own, **kwargs)
        if self.ple is not None:
            hidden_states = hidden_states + self.ple(hidden_states, ple_input_ids, past_key_values, conv_mask=conv_mask)
        h, streams = read(self.attn_hyper_connection, as_streams(self.attn_hyper_connection, hidden_states), None)
        if self.layer_type == "linear_attention":
            y = self.linear_attn(h, cache_params=past_key_values, attention_mask=conv_mask, **kwargs)
        else:
            caches = {"attention_mask": attention_mask, "past_key_values": past_key_values}
            y, _ = self.self_attn(h, position_embeddings, **caches, **kwargs)
        h, streams = read(self.mlp_hyper_connection, streams, y)
        return write(streams, self.mlp(h)).flatten(-2)


class Qwen4ExpTextGatedResidual(modeling.Qwen4ExpTextGatedResidual):
    """The read at the end of the model."""

    def forward(self, hyper_input: Tensor) -> Any:
        """Return the read of the streams [B, T, n D]."""
        if self.block_inject_weight is not None or not _is_known(self, modeling.Qwen4ExpTextRMSNorm):
            return super().forward(hyper_input)
        return read(self, as_streams(self, hyper_input), None)[0]


def _is_known(part: Any, norm: type[Any]) -> bool:
    """Return whether the norm of a connection is still what it was when the model was accelerated."""
    return type(part.hc_norm) is norm and runs_as_written(part.hc_norm) and is_plain(part.hc_norm.weight)


def mixes_as_written(layer: Any, kind: Kind) -> bool:
    """Return whether the connections of a layer are still what they were when it was accelerated."""
    parts: list[Any] = [getattr(layer, name) for name in CONNECTIONS]
    return all(type(part) is kind.connection and runs_as_written(part) and _is_known(part, kind.norm) for part in parts)


def why_not(layer: Any, kind: Kind) -> str | None:
    """Return why the modules of a layer are not those that a step can replace, or None."""
    for name in CONNECTIONS:
        part: Any = getattr(layer, name, None)
        if type(part) is not kind.connection:
            return f"its {name} is a {type(part).__name__}, not a {kind.connection.__name__}"
        n, width = part.hc_count, part.hidden_size
        found = tuple(part.hc_norm.weight.shape), part.hc_norm.group_size
        if type(part.hc_norm) is not kind.norm or found != ((n * width,), width):
            return f"the norm of its {name} is not one of {n} streams of {width} channels"
        if part.block_inject_weight is None:
            return f"its {name} has no weights for a write"
    return None


FAMILY = Family(
    title="Qwen4-Exp",
    connections="gated connections",
    layers=(Qwen4ExpTextDecoderLayer,),
    head=Qwen4ExpTextGatedResidual,
    why_not=why_not,
    mixes_as_written=mixes_as_written,
    mixing=CONNECTIONS,
    dim=lambda layer: int(layer.mlp_hyper_connection.hidden_size),
    token_shapes=lambda layer: (
        (layer.mlp_hyper_connection.hc_count * layer.mlp_hyper_connection.hidden_size,),
        None,
    ),
    outputs=lambda layer, name: 2 if name == "self_attn" else 0,
)
