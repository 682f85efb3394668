"""A Llama-style decoder with a choice of rules for mixing over depth.

Pre-norm, RMSNorm, rotary positions, grouped-query attention, SwiGLU or squared ReLU. blocks.py connects the layers.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from depthmix.mixers.plain import eps_of_plain
from depthmix.mixers.registry import create_mixer
from depthmix.models.blocks import Blocks, as_autocast, complete_sizes
from depthmix.models.cache import KVCache
from depthmix.models.exchange import ARCHITECTURE, FIELDS, MODEL_TYPE, auto_map, code
from depthmix.models.layers import Context, MlpKind, Rotary, causal_mask, last_tokens
from depthmix.models.value_mixing import ValueResidual
from depthmix.names import DEFAULT_MIXER
from depthmix.ops.precision import rms_normalize

# Standard deviation of the initial head, and by default of the initial embedding.
START_STD = 0.02
# A size that `complete_sizes` fills in.
LEFT_OUT: Any = None


@dataclass
class DecoderConfig:
    """Size and shape of a decoder.

    Examples:
        >>> DecoderConfig(vocab_size=512, dim=64, n_blocks=6, n_heads=4, mixer="attnres", mixer_options={"block_size": 4})
    """

    vocab_size: int
    dim: int
    n_blocks: int
    n_heads: int
    n_kv_heads: int = LEFT_OUT  # as many as heads
    head_dim: int = LEFT_OUT  # dim / n_heads
    mlp: MlpKind = "swiglu"
    mlp_dim: int = LEFT_OUT  # 4 dim for relu2; 8/3 dim, rounded up to a multiple of 64, for swiglu
    qk_norm: bool = False  # RMSNorm on the queries and keys of every head
    qk_gain: bool = True  # with learned gains
    tie_embeddings: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    embedding_std: float = START_STD  # standard deviation of the initial embedding
    embedding_norm: bool = False  # RMS norm without gains after the embedding
    # Factor on the initial output projections, whose outputs add up to about one at 1.0.
    output_scale: float = 1.0
    # Scale each norm's eps by the square of the read's initial share of the plain stream (retrofitted models need it).
    plain_eps: bool = False
    # Later blocks mix the values of block 0 with theirs (value_mixing.py): all of them, or the last three eighths.
    value_residual: ValueResidual = "off"
    # Every second block, from the last one down, adds an embedding of the token to its values.
    value_embeddings: bool = False
    mixer: str = DEFAULT_MIXER
    mixer_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        complete_sizes(self, "vocab_size")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if not (isinstance(self.embedding_std, (int, float)) and 0 < self.embedding_std < math.inf):
            raise ValueError(f"embedding_std must be a positive number, got {self.embedding_std!r}")
        if self.value_residual not in get_args(ValueResidual):
            raise ValueError(f"value_residual must be 'off', 'learnable' or 'sparse', got {self.value_residual!r}")
        for name in ("embedding_norm", "value_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")


def mixer_input(x: Tensor, eps: float | None) -> Tensor:
    """Return what the first block receives for embeddings [B, T, D]: normed if there is an eps, in autocast's dtype."""
    return as_autocast(x if eps is None else rms_normalize(x, eps).to(x.dtype))


class Backbone(Blocks):
    """A decoder without its head: embedding, blocks, final norm."""

    def _build(self, config: DecoderConfig) -> None:
        self._build_mixer(config)
        self.value_embeddings = config.value_embeddings
        self.embedding_eps = config.norm_eps if config.embedding_norm else None
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        self._build_blocks(config)

    def _eps(self, config: Any, site: int) -> float:
        return eps_of_plain(self.mixer, site, config.norm_eps) if config.plain_eps else config.norm_eps

    def change_mixer(self, config: DecoderConfig) -> None:
        """Replace the mixer by a fresh one as `config` says, for the same sublayers. Ways that it adds get copies of
        the first way's norm.
        """
        mixer = create_mixer(config.mixer, dim=config.dim, n_blocks=config.n_blocks, **config.mixer_options)
        mixer.variant_elsewhere = self.mixer.variant_elsewhere
        self.mixer = mixer.to(self.embedding.weight.device)
        norms: Any = self.norms
        for site in range(mixer.n_sites):
            first = norms[site][0]
            first.eps = self._eps(config, site)
            norms[site] = nn.ModuleList([first, *(copy.deepcopy(first) for _ in range(mixer.ways(site) - 1))])
        self.final_norm.eps = self._eps(config, mixer.n_sites)

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Embed token ids, or take embeddings as given.

        Args:
            input_ids: Token ids [B, T], or None.
            inputs_embeds: Embeddings [B, T, D], or None.

        Returns:
            The input of the first block [B, T, D].

        Raises:
            ValueError: Both or neither are given, or the ids are not integers [B, T].
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("forward: expected either input_ids or inputs_embeds")
        if input_ids is not None and (input_ids.ndim != 2 or input_ids.is_floating_point()):
            got = f"{input_ids.dtype} of shape {list(input_ids.shape)}"
            raise ValueError(f"forward: expected token ids, integers of shape [batch, tokens], got {got}")
        return mixer_input(self.embedding(input_ids) if inputs_embeds is None else inputs_embeds, self.embedding_eps)

    def with_ids(self, context: Context, ids: Tensor | None) -> Context:
        """Return the context with token ids where value embeddings look them up.

        Raises:
            ValueError: The model has value embeddings, and there are no ids.
        """
        if not self.value_embeddings:
            return context
        if ids is None:
            raise ValueError("forward: value embeddings need input_ids, and only inputs_embeds are given")
        return replace(context, token_ids=ids)


def token_positions(mask: Tensor | None, past: Any, length: int, device: torch.device) -> Tensor:
    """Return the positions [B or 1, T] of the last `length` tokens, not counting the padding of a mask [B, keys].
    `past`: tokens before them.
    """
    if mask is not None and mask.ndim == 2:
        return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return (torch.arange(length, device=device) + past).unsqueeze(0)


class Decoder(Backbone):
    """A language model: token ids [B, T] in, logits [B, T, vocab] out.

    Examples:
        >>> model = Decoder(DecoderConfig(vocab_size=512, dim=64, n_blocks=6, n_heads=4, mixer="attnres"))
        >>> model(torch.zeros(2, 3, dtype=torch.int64)).shape
        torch.Size([2, 3, 512])
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self._build(config)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.register_load_state_dict_post_hook(_tie)
        _tie(self)
        self.reset_parameters()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        _tie(self)  # to_empty gives every module separate weights
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new random weights.

        Matrices: N(0, 1/fan_in), output projections times output_scale / sqrt(sites). Head: N(0, 0.02²). Embedding:
        N(0, embedding_std²), also where it is tied to the head. The mixer: as its rule says.
        """
        self._reset_blocks()
        nn.init.normal_(self.head.weight, std=START_STD)
        nn.init.normal_(self.embedding.weight, std=self.config.embedding_std)
        self.mixer.reset_parameters()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Compute logits for token ids or embeddings.

        Args:
            input_ids: Token ids [B, T].
            attention_mask: [B, keys], 1 for tokens and 0 for padding; or [B or 1, heads or 1, T, keys] as
                scaled_dot_product_attention takes it, and then causality is the caller's.
            position_ids: [B, T]; by default counted from the length of the cache, without padding.
            cache: A Hugging Face Cache (`update(k, v, layer_idx)`, `get_seq_length()`, `get_mask_sizes(length,
                layer_idx)`).
            inputs_embeds: Embeddings [B, T, D] instead of token ids.
            logits_to_keep: Compute logits of this many last tokens only; 0: of all.

        Returns:
            Logits [B, T or logits_to_keep, vocab].

        Raises:
            ValueError: An input has another shape or dtype.
        """
        x = self.embed(input_ids, inputs_embeds)  # [B, T, D]
        context = self.with_ids(self._context(x, attention_mask, position_ids, cache), input_ids)
        hidden = self.through_blocks(x, context)
        return self.head(hidden[:, -logits_to_keep:])

    def _context(self, x: Tensor, mask: Tensor | None, positions: Tensor | None, cache: Any) -> Context:
        batch, length = x.shape[:2]
        past = 0 if cache is None else int(cache.get_seq_length())
        cos, sin = self.rotary(token_positions(mask, past, length, x.device) if positions is None else positions)
        if mask is not None and mask.ndim == 4:
            return Context(cos, sin, mask, cache)
        if mask is not None and tuple(mask.shape) != (batch, past + length):
            expected = f"[{batch}, {past + length}] or four dimensions"
            raise ValueError(f"forward: expected an attention_mask of shape {expected}, got {list(mask.shape)}")
        if mask is None and cache is None:
            return Context(cos, sin, None, cache)
        # A static cache returns all its slots, filled or not; later slots are hidden like later tokens.
        n_keys = past + length if cache is None else cache.get_mask_sizes(length, 0)[0]
        if mask is None and n_keys == past + length and not torch.compiler.is_compiling():
            return Context(cos, sin, last_tokens(length, n_keys), cache)
        return Context(cos, sin, causal_mask(mask, past, length, n_keys, x.device), cache)

    def change_mixer(self, config: DecoderConfig) -> None:
        super().change_mixer(config)
        self.config = config

    def new_cache(self) -> KVCache:
        """Make an empty cache for `forward`."""
        return KVCache()

    def described(self, seq_len: int) -> dict[str, Any]:
        """Describe the model as a Hugging Face config.json does. `seq_len`: tokens per training sequence."""
        kind = {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE], "auto_map": auto_map()}
        fields = {theirs: getattr(self.config, ours) for ours, theirs in FIELDS.items()}
        return {**kind, **fields, "max_position_embeddings": seq_len, "dtype": "float32"}

    def code(self) -> str:
        """Return the source of the modeling file that saved folders carry."""
        return code()


def _tie(decoder: Decoder, loaded: Any = None) -> None:
    """Tie the head's weight to the embedding's where the configuration says so. Also a hook of load_state_dict, which
    may untie them.
    """
    if decoder.config.tie_embeddings:
        decoder.head.weight = decoder.embedding.weight
