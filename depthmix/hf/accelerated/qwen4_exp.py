"""Qwen4-Exp: streams that are read through gates, channel by channel, and only added to.

    layer:   x -> [norm] gates [mean] attention [write, norm] gates [mean] MLP [write] -> x'

Between two sublayers stands one autograd node (depthmix.ops.gated_streams.read), with the model's own matrices. Where an adapter or a
quantiser has changed a projection, the bracketed parts are launches of their own and the projections' modules are called.

Modules and parameters are looked up in their dictionaries: a step of decoding asks for many, and attributes are slow to find.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

from depthmix.hf.accelerated.family import Family
from depthmix.hf.accelerated.streams import Streams, is_plain, runs_as_written, write
from depthmix.ops.gated_streams import Inputs, can_read, few_write, gated_mean, gated_read, write_norm
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
    inputs = _read_inputs(part, x, None if y is None else y.reshape(-1, width), post)
    if inputs is not None:
        # The norm multiplies by 1 + weight.
        x, h, post = gated_read(inputs, part._modules["hc_norm"].eps, 1.0)
        return h.view(*shape, width), Streams(x, shape, post)
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


def _write_last(streams: Streams, y: Tensor) -> Tensor:
    """Write the output [B, T, D] of a layer's last sublayer, and return the streams."""
    x, _, post, _ = streams
    assert post is not None
    new = few_write(x, y.reshape(-1, y.shape[-1]), post)
    return write(streams, y) if new is None else new


def _read_inputs(part: Any, x: Tensor, y: Tensor | None, post: Tensor | None) -> Inputs | None:
    """Return the inputs of a read as one node, or None if the modules of a connection have to be called."""
    if torch.compiler.is_compiling():
        return None
    modules = part._modules
    down, up = _plain_weight(modules["input_mix_weight_down"]), _plain_weight(modules["input_mix_weight_up"])
    projection = modules.get("block_inject_weight")
    inject = None if projection is None else _plain_weight(projection)
    if down is None or up is None or (projection is not None and inject is None):
        return None
    gain = modules["hc_norm"]._parameters["weight"]
    return Inputs(x, y, post, gain, down, up, inject) if can_read(x, y, gain, down, up, inject) else None


def _plain_weight(module: Any) -> Tensor | None:
    """Return the weight of a projection that is a product with it and nothing else, or None."""
    if type(module) is not nn.Linear or not runs_as_written(module):
        return None
    parameters = module._parameters
    weight: Tensor | None = parameters["weight"]
    return weight if parameters["bias"] is None and type(weight) is nn.Parameter else None


def as_streams(part: Any, hidden_states: Tensor) -> Streams:
    """Return the streams [B, T, n D] that a layer receives, before its first read."""
    return Streams(hidden_states.reshape(-1, part.hc_count, part.hidden_size), hidden_states.shape[:-1])


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
        first, second = self._modules["attn_hyper_connection"], self._modules["mlp_hyper_connection"]
        h, streams = read(first, as_streams(first, hidden_states), None)
        if self.layer_type == "linear_attention":
            y = self.linear_attn(h, cache_params=past_key_values, attention_mask=conv_mask, **kwargs)
        else:
            caches = {"attention_mask": attention_mask, "past_key_values": past_key_values}
            y, _ = self.self_attn(h, position_embeddings, **caches, **kwargs)
        h, streams = read(second, streams, y)
        return _write_last(streams, self.mlp(h)).view(*streams.shape, -1)


class Qwen4ExpTextGatedResidual(modeling.Qwen4ExpTextGatedResidual):
    """The read at the end of the model."""

    def forward(self, hyper_input: Tensor) -> Any:
        """Return the read of the streams [B, T, n D]."""
        if self.block_inject_weight is not None or not _is_known(self, modeling.Qwen4ExpTextRMSNorm):
            return super().forward(hyper_input)
        return read(self, as_streams(self, hyper_input), None)[0]


def _is_known(part: Any, norm: type[Any]) -> bool:
    """Return whether the norm of a connection is still what it was when the model was accelerated."""
    own = part._modules["hc_norm"]
    return type(own) is norm and runs_as_written(own) and is_plain(own._parameters.get("weight"))


def mixes_as_written(layer: Any, kind: Kind) -> bool:
    """Return whether the connections of a layer are still what they were when it was accelerated."""
    for name in CONNECTIONS:
        part = layer._modules[name]
        if type(part) is not kind.connection or not runs_as_written(part) or not _is_known(part, kind.norm):
            return False
    return True


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
