"""GLM-5-Next: the hyper connections of DeepSeek-V4. The model ends with the mean of the streams, which needs no help."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from transformers.models.glm5_next import modeling_glm5_next as modeling

from depthmix.hf.accelerated import streams as mix
from depthmix.hf.accelerated.deepseek_v4 import sinkhorn_rule, why_not_sinkhorn
from depthmix.hf.accelerated.family import Family


class Glm5NextTextDecoderLayer(modeling.Glm5NextTextDecoderLayer):
    """A layer that mixes its streams in three steps."""

    KIND: ClassVar = mix.Kind(modeling.Glm5NextTextHyperConnection, modeling.Glm5NextTextRMSNorm, sinkhorn_rule)

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
        attention = {"position_ids": position_ids, "past_key_values": past_key_values, "use_cache": use_cache}
        attention |= {"position_embeddings": position_embeddings, "prev_topk_indices": prev_topk_indices}
        if not mix.mixes_as_written(self, self.KIND):
            return super().forward(hidden_states, attention_mask=attention_mask, **attention, **kwargs)
        h, streams = mix.read(self.KIND, mix.begin(hidden_states), None, self.attn_hc, self.input_layernorm)
        topk_indices = None
        if self.block_type == "linear_attention":
            y = self.self_attn(hidden_states=h, cache_params=past_key_values, attention_mask=attention_mask, **kwargs)
        else:
            y, _, topk_indices = self.self_attn(hidden_states=h, attention_mask=attention_mask, **attention, **kwargs)
        h, streams = mix.read(self.KIND, streams, y, self.ffn_hc, self.post_attention_layernorm)
        return mix.write(streams, self.mlp(h)), topk_indices


def _outputs(layer: Any, name: str) -> int:
    return 3 if name == "self_attn" and layer.block_type != "linear_attention" else 0


FAMILY = Family(
    title="GLM-5-Next",
    connections="mHC modules",
    layers=(Glm5NextTextDecoderLayer,),
    head=None,
    why_not=why_not_sinkhorn,
    mixes_as_written=mix.mixes_as_written,
    mixing=(*mix.CONNECTIONS, *mix.NORMS),
    dim=lambda layer: mix.token_shape(layer)[1],
    token_shapes=lambda layer: (mix.token_shape(layer),),
    outputs=_outputs,
)
