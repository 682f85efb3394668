"""DeepSeek-V4: mHC in DeepSeek's orientation, with a learned head.

pre = sigmoid(H_pre) + eps;   post = 2 sigmoid(H_post);   comb = Sinkhorn of H_comb;   x'_o = Σ_i comb[i, o] x_i + post[o] y
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from depthmix.hf.accelerated import streams as mix
from depthmix.hf.accelerated.family import Family
from depthmix.ops.sinkhorn.reference import DEEPSEEK_EPS
from depthmix.ops.stream_mix.rules import Rule


def sinkhorn_rule(part: Any) -> Rule:
    """Return the rule of a hyper connection with Sinkhorn's residual map."""
    return Rule(
        part.hc_mult,
        joint=True,
        eps=part.input_norm.eps,
        convention="deepseek",
        iterations=part.hc_sinkhorn_iters,
        pre_eps=part.hc_eps,
    )


def why_not_sinkhorn(layer: Any, kind: mix.Kind) -> str | None:
    """Return why a layer with Sinkhorn's residual map cannot be accelerated, or None."""
    reason = mix.why_not(layer, kind)
    if reason is None and layer.attn_hc.hc_eps != DEEPSEEK_EPS:
        return f"its hc_eps is {layer.attn_hc.hc_eps}, and the Sinkhorn iterations here have {DEEPSEEK_EPS}"
    return reason


class DeepseekV4DecoderLayer(modeling.DeepseekV4DecoderLayer):
    """A layer that mixes its streams in three steps."""

    KIND: ClassVar = mix.Kind(modeling.DeepseekV4HyperConnection, modeling.DeepseekV4RMSNorm, sinkhorn_rule)

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return the streams [B, T, n, D] after attention and MLP."""
        if not mix.mixes_as_written(self, self.KIND):
            return super().forward(hidden_states, input_ids, **kwargs)
        h, streams = mix.read(self.KIND, mix.begin(hidden_states), None, self.attn_hc, self.input_layernorm)
        y, _ = self.self_attn(h, **kwargs)
        h, streams = mix.read(self.KIND, streams, y, self.ffn_hc, self.post_attention_layernorm)
        return mix.write(streams, self.mlp(h, input_ids=input_ids))


class DeepseekV4HyperHead(modeling.DeepseekV4HyperHead):
    """The learned read at the end of the model."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the read of the streams [B, T, n, D]."""
        rule = Rule(self.hc_mult, joint=True, eps=self.input_norm.eps, residual_map="identity", pre_eps=self.eps)
        return mix.head(rule, x, mix.Weights(self.hc_fn, self.hc_base, self.hc_scale))


FAMILY = Family(
    title="DeepSeek-V4",
    connections="mHC modules",
    layers=(DeepseekV4DecoderLayer,),
    head=DeepseekV4HyperHead,
    why_not=why_not_sinkhorn,
    mixes_as_written=mix.mixes_as_written,
    mixing=(*mix.CONNECTIONS, *mix.NORMS),
    dim=lambda layer: mix.token_shape(layer)[1],
    token_shapes=lambda layer: (mix.token_shape(layer),),
    outputs=lambda layer, name: 2 if name == "self_attn" else 0,
)
