"""Hunyuan V4: hyper connections without a residual map, and a learned head.

    pre = sigmoid(H_pre) + eps;   post = magnitude sigmoid(H_post) + eps;   x'_o = x_o + post[o] y

The model norms the projection of the streams, not the streams: r (x W) instead of (r x) W, which is the same number.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from transformers.models.hy_v4 import modeling_hy_v4 as modeling

from depthmix.hf.accelerated import streams as mix
from depthmix.hf.accelerated.family import Family
from depthmix.ops.stream_mix.rules import Rule


def identity_rule(part: Any) -> Rule:
    """Return the rule of a hyper connection without a residual map."""
    return Rule(
        part.hc_mult,
        joint=True,
        eps=part.input_norm.eps,
        residual_map="identity",
        pre_eps=part.hc_eps,
        post_scale=part.hc_post_magnitude,
        post_eps=part.hc_eps,
    )


class HYV4DecoderLayer(modeling.HYV4DecoderLayer):
    """A layer that mixes its streams in three steps."""

    KIND: ClassVar = mix.Kind(modeling.HYV4HyperConnection, modeling.HYV4RMSNorm, identity_rule)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the streams [B, T, n, D] after attention and MLP, and the attention's selection of keys."""
        attention = {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": past_key_values}
        attention |= {
            "use_cache": use_cache,
            "position_embeddings": position_embeddings,
            "prev_topk_indices": prev_topk_indices,
        }
        if not mix.mixes_as_written(self, self.KIND):
            return super().forward(hidden_states, **attention, **kwargs)
        h, streams = mix.read(self.KIND, mix.begin(hidden_states), None, self.attn_hc, self.input_layernorm)
        y, _, topk_indices = self.self_attn(hidden_states=h, **attention, **kwargs)
        h, streams = mix.read(self.KIND, streams, y, self.ffn_hc, self.post_attention_layernorm)
        return mix.write(streams, self.mlp(h)), topk_indices


class HYV4HyperHead(modeling.HYV4HyperHead):
    """The learned read at the end of the model."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the read of the streams [B, T, n, D]."""
        rule = Rule(self.hc_mult, joint=True, eps=self.input_norm.eps, residual_map="identity", pre_eps=self.eps)
        return mix.head(rule, x, mix.Weights(self.hc_fn, self.hc_base, self.hc_scale))


FAMILY = Family(
    title="Hunyuan V4",
    connections="mHC modules",
    layers=(HYV4DecoderLayer,),
    head=HYV4HyperHead,
    why_not=mix.why_not,
    mixes_as_written=mix.mixes_as_written,
    mixing=(*mix.CONNECTIONS, *mix.NORMS),
    dim=lambda layer: mix.token_shape(layer)[1],
    token_shapes=lambda layer: (mix.token_shape(layer),),
    outputs=lambda layer, name: 3 if name == "self_attn" else 0,
)
