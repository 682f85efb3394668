"""Inkling 2: attention over depth, with keys and values normed alike, logits divided by sqrt(D), and blocks of several layers.

    layer:   [read, norm] attention [add, read, norm] MLP [add]

Sources of a read are the sums of the finished blocks, which the model hands from layer to layer as one tensor, and the sum of the
current one. Full-attention layers read three mixtures, for queries, keys and values. Each bracket is one launch
(depthmix.ops.depth_attention.normed_read); nothing is concatenated or copied to fp32. As in transformers, a block's sum stays in
fp32 inside a layer and is rounded once, at its end: a read adds it up again from its two parts. Its gradient is rounded once too: the
part from the layer's end comes to the read's backward by an inlet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers.models.inkling2 import modeling_inkling2 as modeling

from depthmix.hf.accelerated.family import Family
from depthmix.hf.accelerated.streams import fused_gain, is_plain, runs_as_written
from depthmix.ops.backend import choose
from depthmix.ops.depth_attention.normed_read import read_normed, sum_with_inlet, unstacked
from depthmix.ops.depth_attention.op import depth_attention, why_unsupported
from depthmix.ops.norm import side_by_side
from depthmix.ops.precision import compute_dtype, widen, without_autocast

READS = ("attention_input", "mlp_input")


class Kind(NamedTuple):
    """Names of the norms before attention, and classes of a layer's modules."""

    input_norms: tuple[str, ...]
    connection: type[Any] = modeling.Inkling2BlockAttentionResidual
    norm: type[Any] = modeling.Inkling2RMSNorm

    @property
    def norms(self) -> tuple[str, ...]:
        """Return the names of all norms that follow a read."""
        return (*self.input_norms, "post_attention_layernorm")


class Reads(NamedTuple):
    """Mixtures, and what stands for the newest source in a later sum."""

    mixtures: tuple[Tensor, ...]
    inlet: Tensor | None  # of kernels with gradients (depthmix.ops.depth_attention.normed_read)
    newest: Tensor | None  # without kernels: the source itself, in fp32 or wider


def read(
    part: Any,
    blocks: Tensor,
    sources: Sequence[Tensor],
    add: Tensor | None = None,
    norms: Sequence[Any] = (),
    then_sum: bool = False,
) -> Reads:
    """Mix the blocks' sums and apply the norms that follow.

    Args:
        part: the module with the queries.
        blocks: sums of finished blocks [B, T, m, D].
        sources: further sources [B, T, D], the newest one last.
        add: [B, T, D], what the newest source is short of.
        norms: an RMSNorm for each query; without norms the mixtures are in fp32.
        then_sum: whether `_total` adds to the newest source afterwards.

    Returns:
        One mixture [B, T, D] per query.
    """
    gains = [fused_gain(norm, modeling.Inkling2RMSNorm) for norm in norms]
    fused = bool(norms) and all(g is not None for g in gains) and len({norm.variance_epsilon for norm in norms}) == 1
    inlet = newest = None
    with without_autocast(blocks):
        wide = compute_dtype(part.query, *sources)
        query = widen(part.query, wide).view(-1, blocks.shape[-1]) * blocks.shape[-1] ** -0.5
        gain = side_by_side([widen(g, wide) for g in gains if g is not None]) if fused else None
        eps = part.norm.eps, norms[0].variance_epsilon if fused else 0.0
        dtype = sources[0].dtype if fused else wide
        if _kernels(blocks, sources, add, wide):
            mixtures, inlet = read_normed(eps, dtype, then_sum, query, gain, blocks, add, sources)
        else:
            options: dict[str, Any] = {"eps": eps[0], "out_gain": gain, "out_eps": eps[1], "value_norm": True}
            unstacked_sources = unstacked(blocks, add, sources)
            found = depth_attention(query, unstacked_sources, **options, backend="reference")
            mixtures, newest = tuple(widen(h, dtype) for h in found), unstacked_sources[-1]
    if norms and not fused:
        mixtures = tuple(norm(h).to(sources[0].dtype) for norm, h in zip(norms, mixtures, strict=True))
    return Reads(mixtures, inlet, newest)


def _kernels(blocks: Tensor, sources: Sequence[Tensor], add: Tensor | None, wide: torch.dtype) -> bool:
    tensors = [*sources, blocks, *(() if add is None else (add,))]
    why = why_unsupported([sources[0], *tensors], wide=wide == torch.float64)
    return choose("accelerate", sources[0], why) == "triton"


def _forward(
    layer: Any, hidden_states: Tensor, block_states: Tensor, attention_mask: Tensor | None, caches: Any, kwargs: Any
) -> Tensor:
    """Run a layer: return the sum [B, T, D] of its block so far, after attention and MLP."""
    norms = [getattr(layer, name) for name in layer.KIND.input_norms]
    if layer.attention_input is None:
        inputs = [norm(hidden_states).to(hidden_states.dtype) for norm in norms]
    else:
        inputs = list(read(layer.attention_input, block_states, [hidden_states], norms=norms).mixtures)
    given = dict(zip(("hidden_states", "key_hidden_states", "value_hidden_states"), inputs, strict=False))
    y, _ = layer.self_attn(**given, attention_mask=attention_mask, **caches, **kwargs)
    y = _widened(layer.post_attention_convolution(y, **caches), hidden_states)
    opens = layer.is_block_boundary  # then hidden_states is the sum of a finished block
    sources, add = ([hidden_states, y], None) if opens else ([hidden_states], y)
    reads = read(layer.mlp_input, block_states, sources, add, [layer.post_attention_layernorm], then_sum=True)
    z = _widened(layer.post_mlp_convolution(layer.mlp(*reads.mixtures), **caches), hidden_states)
    return widen(_total(reads, (y,) if opens else (hidden_states, y), z), hidden_states.dtype)


def _widened(y: Tensor, like: Tensor) -> Tensor:
    """Return an output in the dtype of the stream where that is wider, as under autocast. Kernels know sources of one dtype."""
    return widen(y, torch.promote_types(y.dtype, like.dtype))


def _total(reads: Reads, newest: Sequence[Tensor], z: Tensor) -> Tensor:
    """Return the newest source of a read, given in parts, with z added: rounded once."""
    with without_autocast(z):
        if reads.newest is not None:
            return widen(reads.newest + z, newest[0].dtype)
        return sum_with_inlet(reads.inlet, newest, z)


class Inkling2SlidingDecoderLayer(modeling.Inkling2SlidingDecoderLayer):
    """A layer whose attention reads one mixture."""

    KIND: ClassVar = Kind(("input_layernorm",))

    def forward(
        self,
        hidden_states: Tensor,
        block_states: Tensor,
        attention_mask: Tensor | None = None,
        conv_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the sum [B, T, D] of the block so far, after attention and MLP."""
        caches = {"conv_mask": conv_mask, "past_key_values": past_key_values}
        if not mixes_as_written(self, self.KIND):
            return super().forward(hidden_states, block_states, attention_mask, **caches, **kwargs)
        return _forward(self, hidden_states, block_states, attention_mask, caches, kwargs)


class Inkling2FullDecoderLayer(modeling.Inkling2FullDecoderLayer):
    """A layer whose attention reads three mixtures."""

    KIND: ClassVar = Kind(("q_input_layernorm", "k_input_layernorm", "v_input_layernorm"))

    def forward(
        self,
        hidden_states: Tensor,
        block_states: Tensor,
        attention_mask: Tensor | None = None,
        conv_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the sum [B, T, D] of the block so far, after attention and MLP."""
        caches = {"conv_mask": conv_mask, "past_key_values": past_key_values}
        if not mixes_as_written(self, self.KIND):
            return super().forward(hidden_states, block_states, attention_mask, **caches, **kwargs)
        return _forward(self, hidden_states, block_states, attention_mask, caches, kwargs)


class Inkling2BlockAttentionResidual(modeling.Inkling2BlockAttentionResidual):
    """The read at the end of the model."""

    def forward(self, block_states: Tensor, partial_block_states: Tensor) -> tuple[Tensor, ...]:
        """Return the mixtures [B, T, D] in fp32, which the model norms."""
        return read(self, block_states, [partial_block_states]).mixtures


def mixes_as_written(layer: Any, kind: Kind) -> bool:
    """Return whether the modules with a layer's queries are still what they were when the layer was accelerated."""
    parts: list[Any] = [getattr(layer, name) for name in READS]
    return all(
        type(part) is kind.connection
        and runs_as_written(part)
        and type(part.norm) is modeling.Inkling2UnweightedRMSNorm
        and runs_as_written(part.norm)
        and is_plain(part.query)
        for part in parts
        if part is not None
    )


def why_not(layer: Any, kind: Kind) -> str | None:
    """Return why the modules of a layer are not those that a read can replace, or None."""
    ways = {"attention_input": len(kind.input_norms), "mlp_input": 1}
    kinds = dict.fromkeys(READS, kind.connection) | dict.fromkeys(kind.norms, kind.norm)
    for name, expected in kinds.items():
        part = getattr(layer, name, None)
        if type(part) is not expected and not (part is None and name == "attention_input"):
            return f"its {name} is a {type(part).__name__}, not a {expected.__name__}"
    width = dim(layer)
    for name, n in ways.items():
        part = getattr(layer, name)
        shapes = {} if part is None else {key: tuple(p.shape) for key, p in part.named_parameters()}
        if part is not None and shapes != {"query": (width,) if n == 1 else (n, width)}:
            return f"the parameters of its {name} have shapes {shapes}, expected {n} queries of {width}"
    return None


def dim(layer: Any) -> int:
    """Return the channels of a layer."""
    return int(layer.post_attention_layernorm.weight.shape[-1])


FAMILY = Family(
    title="Inkling 2",
    connections="attention residuals",
    layers=(Inkling2SlidingDecoderLayer, Inkling2FullDecoderLayer),
    head=Inkling2BlockAttentionResidual,
    why_not=why_not,
    mixes_as_written=mixes_as_written,
    mixing=(*READS, *Inkling2SlidingDecoderLayer.KIND.norms, *Inkling2FullDecoderLayer.KIND.input_norms),
    dim=dim,
    token_shapes=lambda layer: ((dim(layer),), (2, dim(layer))),
    outputs=lambda layer, name: 2 if name == "self_attn" else 0,
)
