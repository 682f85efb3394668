"""The decoder's own modules as a PreTrainedModel, so that Hugging Face's tools accept it.

Depth mixing is token-local, so only keys and values are kept between tokens, and the standard caches work. Attention differs from
the plain decoder: masks and functions come from transformers' attention interface.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

from depthmix.hf.configuration import DepthmixConfig
from depthmix.hf.depth_weights import GeneratesDepthWeights, asked_for
from depthmix.hf.layer_count import explained
from depthmix.hf.placement import bring_back, to_mixer, warn_if_rounded
from depthmix.mixers.checks import Read
from depthmix.models.blocks import Trace, init_matrix
from depthmix.models.decoder import START_STD, Backbone, token_positions
from depthmix.models.layers import Attention, Context
from depthmix.models.value_mixing import ValueMixing
from depthmix.ops.norm import RMSNorm


@dataclass
class DepthmixOutput(BaseModelOutputWithPast):
    """Output of the base model. depth_weights: [B, T, ways, sites + 1, sites + 1], see `DepthmixModel`."""

    depth_weights: Tensor | None = None


@dataclass
class DepthmixCausalLMOutput(CausalLMOutputWithPast):
    """Output of the causal language model. depth_weights: [B, T, ways, sites + 1, sites + 1], see `DepthmixModel`."""

    depth_weights: Tensor | None = None


def eager_attention(
    module: Any,
    q: Tensor,  # [B, heads, T, d]
    k: Tensor,  # [B, kv heads, keys, d]
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention without fusion; returns (output, weights [B, heads, T, keys]). `mask` is added to the logits."""
    k, v = (t.repeat_interleave(module.num_key_value_groups, dim=1) for t in (k, v))
    logits = q @ k.transpose(-1, -2) * scaling
    if mask is not None:
        logits = logits + mask
    weights = torch.softmax(logits, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return (weights @ v).transpose(1, 2), weights


def _check_run_folder(place: Any) -> None:
    """Check a folder of `depthmix train` before its files are read one by one."""
    if isinstance(place, str | os.PathLike) and (Path(place) / "recipe.yaml").is_file():
        # Imported here, because depthmix.runs imports this package.
        importlib.import_module("depthmix.runs.described").check_run_folder(place)


class DepthmixPreTrainedModel(PreTrainedModel):
    """Properties of all models here that transformers reads."""

    config: DepthmixConfig
    config_class = DepthmixConfig
    post_init: Callable[[], None]  # defined by transformers
    _gradient_checkpointing_func: Callable[..., Tensor]  # set by gradient_checkpointing_enable
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Attention", "Mlp"]
    _skip_keys_device_placement = ["past_key_values"]
    _keep_in_fp32_modules_strict = ["mixer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _input_embed_layer = "embedding"

    @property
    def dtype(self) -> torch.dtype:
        """The embedding's dtype. transformers would take the first parameter's, which is the mixer's and stays fp32."""
        dtype: torch.dtype = self.get_input_embeddings().weight.dtype
        return dtype

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as usual, renaming the head's weight of a run folder's checkpoint."""
        _check_run_folder(folder)
        mapping = {r"^head\.": "lm_head.", **(kwargs.pop("key_mapping", None) or {})}
        with explained(folder, kwargs):
            loaded = super().from_pretrained(folder, *args, key_mapping=mapping, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if getattr(model, "_weight_conversions", None):
            model._weight_conversions = None  # else save_pretrained would go back to the run folder's names
        return loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module as `Decoder.reset_parameters` does. Weights that were loaded stay as they are."""
        mixer = getattr(self, "mixer", None)
        if mixer is not None and any(module is part for part in mixer.modules()):
            # transformers patches torch.nn.init to skip loaded weights, but mixers do not use torch.nn.init.
            tensors = (*mixer.parameters(), *mixer.buffers())
            loaded = [(t, t.clone()) for t in tensors if getattr(t, "_is_hf_initialized", False)]
            mixer.reset_parameters()
            for tensor, value in loaded:
                tensor.copy_(value)
        elif isinstance(module, ValueMixing):  # comes after its parts
            module.reset_parameters()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif module is getattr(self, "lm_head", None):
            nn.init.normal_(module.weight, std=START_STD)
        elif isinstance(module, nn.Linear):
            outputs = [sublayer.out_proj for sublayer in getattr(self, "sublayers", ())]
            is_one = any(module is out for out in outputs)
            init_matrix(module, *((len(outputs), self.config.output_scale) if is_one else ()))
        elif isinstance(module, RMSNorm):
            nn.init.ones_(module.weight)


class DepthmixModel(DepthmixPreTrainedModel, Backbone):
    """The decoder without its head: token ids in, final hidden states [B, T, D] out.

    output_hidden_states: the input of each block before its norm, n_blocks tensors, then the final norm's output. A block's
    input is its mixture of the embedding and all earlier outputs; with several ways, the mixture for the queries. With plain
    residuals these are the usual hidden states.

    output_depth_weights: M[b, t, way, s, i], the weight with which site s reads the embedding (i = 0) or the output of site
    i - 1. The attention of block j is site 2j, its MLP is site 2j + 1, and the last row is the final norm. This is
    `Mixer.mixing` per token, without gradient.
    """

    def __init__(self, config: DepthmixConfig) -> None:
        super().__init__(config)
        self._build(config.decoder_config())
        self.mixer.variant_elsewhere = True  # in config.json
        for sublayer in self.sublayers:
            if isinstance(sublayer, Attention):
                sublayer.config = config  # read by attention functions
        self.gradient_checkpointing = False
        # A run's checkpoint holds parameters only. The mixer computes its constants.
        self._keys_to_ignore_on_load_missing = [rf"mixer\.{name}$" for name, _ in self.mixer.named_buffers()]
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_depth_weights: bool | None = None,
        **kwargs: Any,
    ) -> DepthmixOutput:
        """Compute final hidden states. `kwargs` go to the attention function, as in transformers' own models."""
        c = self.config
        use_cache = c.use_cache if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training:
            use_cache, past_key_values = False, None  # a recomputed sublayer would write its keys a second time
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=c)
        _check_ids(input_ids, c.vocab_size)
        bring_back(self.mixer)
        warn_if_rounded(self.mixer)
        x = to_mixer(self.mixer, self.embed(input_ids, inputs_embeds))
        if isinstance(attention_mask, Tensor):
            attention_mask = attention_mask.to(x.device)
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            padding = attention_mask if isinstance(attention_mask, Tensor) else None
            position_ids = token_positions(padding, past, x.shape[1], x.device)
        position_ids = position_ids.to(x.device)
        if isinstance(attention_mask, dict):  # prepared by `generate` or a server
            mask = attention_mask["full_attention"]
        else:
            mask = create_causal_mask(
                config=c,
                inputs_embeds=x,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
            )
        attentions: list[Tensor] | None = [] if asked_for(output_attentions, c, "output_attentions") else None
        trace = Trace(
            sources=[] if asked_for(output_depth_weights, c) else None,
            mixtures=[] if asked_for(output_hidden_states, c, "output_hidden_states") else None,
        )
        attend = self._attend({**kwargs, "position_ids": position_ids}, attentions)
        cos, sin = self.rotary(position_ids)
        context = self.with_ids(Context(cos, sin, mask, past_key_values, attend), input_ids)
        # transformers requests an early exit by a smaller num_hidden_layers.
        hidden = self.through_blocks(x, context, trace, blocks=c.num_hidden_layers)
        weights = None
        if (
            trace.sources is not None and len(trace.sources) == self.mixer.n_sites + 1
        ):  # a pass that left early has none
            weights = self.mixer.mixing(trace.sources, per_token=True)
        return DepthmixOutput(
            last_hidden_state=hidden,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=None if trace.mixtures is None else (*trace.mixtures, hidden),
            attentions=None if attentions is None else tuple(attentions),
            depth_weights=weights,
        )

    def _attend(self, kwargs: dict[str, Any], attentions: list[Tensor] | None) -> Callable[..., Tensor]:
        """Return the attention function that the configuration names, with the signature of `Context.attend`."""
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)

        def attend(module: Attention, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
            moved = {**kwargs, "position_ids": kwargs["position_ids"].to(q.device)}
            y, weights = function(module, q, k, v, context.mask, dropout=0.0, scaling=module.scaling, **moved)
            if attentions is not None and weights is not None:  # most functions never have them
                attentions.append(weights)
            return y  # [B, T, heads, d]

        return attend

    def _run_sublayer(self, sublayer: nn.Module, h: Read, context: Context, gain: Tensor | None) -> Any:
        y = self._run_where_it_is(sublayer, h, context, gain)
        assert context.cos is not None
        device = context.cos.device  # the state's
        return (y[0].to(device), *y[1:]) if isinstance(y, tuple) else y.to(device)

    def _run_where_it_is(self, sublayer: nn.Module, h: Read, context: Context, gain: Tensor | None) -> Any:
        if not (self.gradient_checkpointing and self.training):
            return sublayer(h, context, gain)
        # One argument per way and for values, because reentrant checkpoints do not see tensors in a tuple or a context.
        ways = h if isinstance(h, tuple) else (h,)

        def run(gain: Tensor | None, first_values: Tensor | None, *ways: Tensor) -> Any:
            h = ways if len(ways) > 1 else ways[0]
            return sublayer(h, replace(context, first_values=first_values), gain)

        return self._gradient_checkpointing_func(run, gain, context.first_values, *ways)


class DepthmixForCausalLM(GeneratesDepthWeights, DepthmixPreTrainedModel, GenerationMixin):
    """The decoder with its head: logits [B, T, vocab], a loss where labels are given, and `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: DepthmixConfig) -> None:
        super().__init__(config)
        self.model = DepthmixModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Generate as usual. Raises ValueError for an empty prompt, where transformers would fail at an index."""
        ids = kwargs.get("input_ids") if inputs is None else inputs
        if ids is not None and ids.ndim == 2 and not ids.shape[1] and kwargs.get("inputs_embeds") is None:
            advice = "begin with a token, such as the one between texts (tokenizer.bos_token)"
            raise ValueError(f"generate: the prompt is empty; {advice}")
        return super().generate(inputs, *args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_depth_weights: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> DepthmixCausalLMOutput:
        """Compute logits and, where labels are given, the loss.

        Args:
            labels: The input ids, which are shifted here; -100 is ignored.
            logits_to_keep: Number of last tokens to compute logits of, or their positions; 0: all.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            output_depth_weights=output_depth_weights,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return DepthmixCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            depth_weights=outputs.depth_weights,
        )


class DepthmixForSequenceClassification(GenericForSequenceClassification, DepthmixPreTrainedModel):
    """The decoder with a head for classes or a reward: logits [B, num_labels] of each row's last token that is not
    padding.
    """


def _check_ids(ids: Tensor | None, vocab_size: int) -> None:
    """Raise ValueError for anything but token ids, and IndexError for ids beyond the vocabulary. Ids on a GPU are not
    read, since the host would wait.
    """
    if ids is not None and (ids.ndim != 2 or ids.is_floating_point()):
        raise ValueError(f"input_ids must be integers [batch, tokens], got {ids.dtype} of shape {list(ids.shape)}")
    if ids is None or ids.device.type != "cpu" or not ids.numel() or torch.compiler.is_compiling():
        return
    low, high = (int(t) for t in ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise IndexError(f"token id {low if low < 0 else high} is not in the vocabulary of {vocab_size} entries")
