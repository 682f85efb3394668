"""Decoder layers of n residual streams by one step between two sublayers: what DeepSeek-V4, GLM-5-Next and Hunyuan V4 share.

    layer:   x -> [read] attention [write, read] MLP [write] -> x'

Each bracket is one step of depthmix.ops.stream_mix, one autograd node: the write of the sublayer before it, the coefficients of
the new streams, the read with them and its RMSNorm. Nothing is copied to fp32. The layers of transformers make the same numbers in
several dozen operators and round in between; a step rounds once, when it stores the streams and the input of a sublayer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthmix.ops.backend import choose
from depthmix.ops.precision import compute_dtype, widen, without_autocast
from depthmix.ops.stream_mix.op import stream_write, why_unsupported
from depthmix.ops.stream_mix.rules import Rule
from depthmix.ops.stream_mix.step import Inputs, step, step_reference, write_step
from depthmix.ops.torch_internals import calls_only_its_forward

CONNECTIONS, NORMS = ("attn_hc", "ffn_hc"), ("input_layernorm", "post_attention_layernorm")  # modules of a layer


class Streams(NamedTuple):
    """The streams inside a layer and the weights of the next write."""

    x: Tensor  # [N, n, D]
    shape: tuple[int, ...]  # of the tokens, N in all
    post: Tensor | None = None  # [N, n]
    res: Tensor | None = None  # [N, n, n]; None: the identity


class Weights(NamedTuple):
    """Parameters of a site: fn [K, n D], base [K] and one scale each for pre, post and res. Modules may have them as attributes."""

    fn: Tensor
    base: Tensor
    scale: Tensor


class Kind(NamedTuple):
    """Classes of a family's modules, and how coefficients follow from the streams."""

    connection: type[Any]
    norm: type[Any]
    rule: Callable[[Any], Rule]  # of a connection


def begin(hidden_states: Tensor) -> Streams:
    """Return the streams [B, T, n, D] that a layer receives, before its first read."""
    return Streams(hidden_states.reshape(-1, *hidden_states.shape[-2:]), hidden_states.shape[:-2])


def read(kind: Kind, streams: Streams, y: Tensor | None, connection: Any, norm: Any) -> tuple[Tensor, Streams]:
    """Write a sublayer's output, compute the coefficients of the next site, and read for it.

    Args:
        kind: the classes of the family.
        streams: the layer's streams.
        y: output [B, T, D] of the last sublayer, or None before the first.
        connection: the module with the weights of the next site.
        norm: the RMSNorm module that follows the read.

    Returns:
        The input [B, T, D] of the next sublayer, after its norm, and the streams.
    """
    gain = fused_gain(norm, kind.norm)
    eps = 0.0 if gain is None else norm.variance_epsilon
    h, streams = _read(kind.rule(connection), streams, y, connection, gain, eps)
    return h if gain is not None else norm(h), streams


def _read(
    rule: Rule, streams: Streams, y: Tensor | None, weights: Any, gain: Tensor | None, eps: float
) -> tuple[Tensor, Streams]:
    x, shape, post, res = streams
    wide = compute_dtype(weights.fn)
    w, base, scale = (widen(t, wide) for t in (weights.fn, weights.base, weights.scale))
    y = None if y is None else y.reshape(-1, y.shape[-1])
    inputs = Inputs(x, y, post, res, None, w.T, base, scale, gain)
    with without_autocast(x):
        if _kernels(x, y, w, gain):
            inputs = inputs._replace(gain=None if gain is None else widen(gain, torch.float32))
            found = step(rule, rule.n, eps, inputs)
        else:
            found = step_reference(rule, rule.n, eps, inputs)
    return found.h.view(*shape, x.shape[-1]), Streams(found.x, shape, found.post, found.res)


def write(streams: Streams, y: Tensor) -> Tensor:
    """Write the output [B, T, D] of a layer's last sublayer: the streams [B, T, n, D] that the layer returns."""
    x, shape, post, res = streams
    assert post is not None
    y = y.reshape(-1, y.shape[-1])
    with without_autocast(x):
        out = write_step(x, y, post, res) if _kernels(x, y, post, None) else stream_write(x, res, post, y)
    return out.view(*shape, *x.shape[1:])


def head(rule: Rule, hidden_states: Tensor, weights: Weights) -> Tensor:
    """Read the streams [B, T, n, D] for the end of a model: [B, T, D].

    `weights` has n rows, of pre alone. Zeros stand for those of post, which a step computes too.
    """
    n, pad = rule.n, nn.functional.pad
    fn, base, scale = weights
    padded = Weights(pad(fn, (0, 0, 0, n)), pad(base, (0, n)), pad(scale, (0, 1)))
    return _read(rule, begin(hidden_states), None, padded, None, 0.0)[0]


def runs_as_written(module: nn.Module) -> bool:
    """Return whether calling a module does what its class says, so that the call may be replaced.

    Hooks and a replaced forward make the answer False. Hooks of accelerate that only move inputs to the module's device do not:
    the inputs are on the layer's device.
    """
    own = module.__dict__
    hook, forward = own.get("_hf_hook"), own.get("forward" if "_hf_hook" not in own else "_old_forward")
    # A hook that was removed leaves the class's forward behind, bound to the module.
    if getattr(forward, "__func__", None) is not type(module).forward:
        return calls_only_its_forward(module)
    moves_inputs = hook is None or (type(hook).__name__ == "AlignDevicesHook" and not hook.offload)
    return moves_inputs and not module._forward_hooks and not module._forward_pre_hooks


def mixes_as_written(layer: Any, kind: Kind) -> bool:
    """Return whether the modules of a layer that a step replaces are still what they were when the layer was accelerated.

    An adapter, a quantiser or an offloading hook may have changed them. Then the layer runs transformers' own forward.
    """
    return all(
        type(part) is kind.connection and runs_as_written(part) and is_plain(part.fn)
        for part in (layer.attn_hc, layer.ffn_hc)
    )


def is_plain(weight: Tensor | None) -> bool:
    """Return whether a weight is neither sharded, quantised nor parametrised."""
    return type(weight) in (nn.Parameter, Tensor)


def fused_gain(norm: Any, kind: type[Any]) -> Tensor | None:
    """Return the gain of a norm whose call a kernel may replace, or None."""
    plain = type(norm) is kind and runs_as_written(norm) and is_plain(norm.weight)
    return norm.weight if plain else None


def why_not(layer: Any, kind: Kind) -> str | None:
    """Return why the modules of a layer are not those that a step can replace, or None."""
    kinds = dict.fromkeys(CONNECTIONS, kind.connection) | dict.fromkeys(NORMS, kind.norm)
    for name, expected_type in kinds.items():
        found_type = type(getattr(layer, name, None))
        if found_type is not expected_type:
            return f"its {name} is a {found_type.__name__}, not a {expected_type.__name__}"
    dim = token_shape(layer)[1]
    for name in CONNECTIONS:
        part = getattr(layer, name)
        n, residual_logits = kind.rule(part).n, kind.rule(part).residual_logits
        columns = 2 * n + residual_logits
        expected = {"fn": (columns, n * dim), "base": (columns,), "scale": (3 if residual_logits else 2,)}
        found = {key: tuple(p.shape) for key, p in part.named_parameters()}
        if found != expected:
            return f"the parameters of its {name} have shapes {found} instead of {expected}"
    return None


def token_shape(layer: Any) -> tuple[int, int]:
    """Return [n, D] of a layer's streams."""
    return layer.attn_hc.hc_mult, layer.input_layernorm.weight.shape[-1]


def _kernels(x: Tensor, y: Tensor | None, weight: Tensor, gain: Tensor | None) -> bool:
    if torch.compiler.is_compiling():
        return False
    wide = weight.dtype == torch.float64 or (gain is not None and gain.dtype == torch.float64)
    why = why_unsupported(x, y, x.shape[1], wide=wide)
    return choose("accelerate", x, why) == "triton"
