"""A decoder's configuration as Hugging Face's tools read it."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from depthmix.hf.carried import CarriesCode
from depthmix.hf.fields import foreign_fields, refuse_unknown
from depthmix.models import DecoderConfig
from depthmix.models.exchange import CLASSES, FIELDS, MODEL_TYPE
from depthmix.names import DEFAULT_MIXER


class DepthmixConfig(CarriesCode, PreTrainedConfig):
    """The fields of `DecoderConfig` under Hugging Face's names, with the same checks, and fields that only its tools need.

    max_position_embeddings is the length of the training sequences, which tools take for the context length. Rotary positions
    have no limit, so longer texts are accepted.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]
    # The depth state and the mixer's parameters are equal on every rank, because each row-wise projection ends in an all-reduce.
    base_model_tp_plan = {
        "sublayers.*.q_proj": "colwise",
        "sublayers.*.k_proj": "colwise",
        "sublayers.*.v_proj": "colwise",
        "sublayers.*.q_norm": "replicated_with_grad_allreduce",  # a rank normalises its own heads only
        "sublayers.*.k_norm": "replicated_with_grad_allreduce",
        "sublayers.*.gate_proj": "colwise",
        "sublayers.*.up_proj": "colwise",
        "sublayers.*.out_proj": "rowwise",
    }
    base_model_fsdp_plan = {
        "embedding": "free_full_weight",
        "sublayers.*": "free_full_weight",
        "final_norm": "keep_full_weight",
    }

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 512,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 8,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        mlp: str = "swiglu",
        intermediate_size: int | None = None,
        qk_norm: bool = False,
        qk_gain: bool = True,
        tie_word_embeddings: bool = False,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        embedding_norm: bool = False,
        output_scale: float = 1.0,
        plain_eps: bool = False,
        value_residual: str = "off",
        value_embeddings: bool = False,
        mixer: str = DEFAULT_MIXER,
        mixer_options: dict[str, Any] | None = None,
        max_position_embeddings: int = 2048,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_unknown(kwargs)
        given: dict[str, Any] = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_key_value_heads,
            "head_dim": head_dim,
            "mlp": mlp,
            "intermediate_size": intermediate_size,
            "qk_norm": qk_norm,
            "qk_gain": qk_gain,
            "tie_word_embeddings": tie_word_embeddings,
            "rope_theta": rope_theta,
            "rms_norm_eps": rms_norm_eps,
            "initializer_range": initializer_range,
            "embedding_norm": embedding_norm,
            "output_scale": output_scale,
            "plain_eps": plain_eps,
            "value_residual": value_residual,
            "value_embeddings": value_embeddings,
            "mixer": mixer,
            "mixer_options": dict(mixer_options or {}),
        }
        checked = DecoderConfig(**{ours: given[theirs] for ours, theirs in FIELDS.items()})
        for ours, theirs in FIELDS.items():
            setattr(self, theirs, getattr(checked, ours))
        self.max_position_embeddings, self.use_cache = max_position_embeddings, use_cache
        ids: dict[str, Any] = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        for name, value in ids.items():
            setattr(self, name, value)
        super().__init__(**ids, tie_word_embeddings=tie_word_embeddings, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a configuration as usual. Fields of other tools are kept; mixer options and misspelt fields are
        refused.
        """
        foreign = foreign_fields(config_dict)
        foreign_fields({"mixer": config_dict.get("mixer"), **kwargs})
        loaded = super().from_dict({name: v for name, v in config_dict.items() if name not in foreign}, **kwargs)
        for name in foreign:
            setattr(loaded[0] if isinstance(loaded, tuple) else loaded, name, config_dict[name])
        return loaded

    def classes(self) -> tuple[dict[str, str], str]:
        """Return what `CarriesCode` asks for."""
        return CLASSES, "depthmix.hf"

    def decoder_config(self) -> DecoderConfig:
        """Convert to the decoder's configuration."""
        return DecoderConfig(**{ours: getattr(self, theirs) for ours, theirs in FIELDS.items()})
