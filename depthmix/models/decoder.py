"""A Llama-style decoder whose connections over depth are a choice.

Pre-norm, RMSNorm, rotary positions, grouped-query attention, SwiGLU or squared ReLU. The whole model is: start, then for each
site write(sublayer(read)), then finish; which rule the mixer follows is its own business.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.mixers.base import Read, create_mixer, mixer_class
from depthmix.mixers.options import check_options
from depthmix.mixers.plain import eps_of_plain
from depthmix.models.cache import KVCache
from depthmix.models.exchange import ARCHITECTURE, FIELDS, MODEL_TYPE, auto_map, code
from depthmix.models.layers import Attention, Context, Mlp, MlpKind, Rotary, causal_mask, last_tokens
from depthmix.names import DEFAULT_MIXER
from depthmix.ops.norm import RMSNorm

EMBEDDING_STD = 0.02
LEFT_OUT: Any = None  # __post_init__ works it out from the rest


@dataclass
class DecoderConfig:
    """The size and shape of a decoder."""

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
    plain_eps: bool = False  # a norm's eps counts as on the plain stream, of which its reads begin as a share
    mixer: str = DEFAULT_MIXER
    mixer_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.n_kv_heads = self.n_heads if self.n_kv_heads is None else self.n_kv_heads
        for name in ("vocab_size", "dim", "n_blocks", "n_heads", "n_kv_heads"):
            self._at_least_one(name)
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads must divide n_heads={self.n_heads}, got {self.n_kv_heads}")
        if self.head_dim is None:
            if self.dim % self.n_heads:
                raise ValueError(f"n_heads must divide dim={self.dim} unless head_dim is given, got {self.n_heads}")
            self.head_dim = self.dim // self.n_heads
        self._at_least_one("head_dim")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.mlp not in ("swiglu", "relu2"):
            raise ValueError(f"mlp must be 'swiglu' or 'relu2', got {self.mlp!r}")
        if self.mlp_dim is None:
            self.mlp_dim = 4 * self.dim if self.mlp == "relu2" else 64 * math.ceil(8 * self.dim / 3 / 64)
        self._at_least_one("mlp_dim")
        check_options(self.mixer, mixer_class(self.mixer).options, self.mixer_options)

    def _at_least_one(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


@dataclass
class Trace:
    """What to keep of one pass, for those who look; a list that is not given is not kept."""

    sources: list[Tensor] | None = None  # the embedding, then the output of every sublayer
    mixtures: list[Tensor] | None = None  # what every block reads before its norm (with several ways: for its queries)


class Backbone(nn.Module):
    """A decoder without its head: embedding, then read, sublayer, write for every site, then the final norm.

    It has no `__init__`, so that models of other libraries, which have one of their own, can be one: `_build` makes its modules.
    """

    def _build(self, config: DecoderConfig) -> None:
        with torch.device(
            "meta"
        ):  # nothing is drawn yet, so one seed gives the same weights elsewhere whatever the mixer
            self.mixer = create_mixer(config.mixer, dim=config.dim, n_blocks=config.n_blocks, **config.mixer_options)
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.rotary = Rotary(config.head_dim, config.rope_theta)
        self.norms, self.sublayers = nn.ModuleList(), nn.ModuleList()  # by site
        for site in range(self.mixer.n_sites):
            ways, eps = self.mixer.ways(site), self._eps(config, site)
            self.norms.append(nn.ModuleList(RMSNorm(config.dim, eps=eps) for _ in range(ways)))
            self.sublayers.append(_attention(config, site // 2) if site % 2 == 0 else _mlp(config))
        self.final_norm = RMSNorm(config.dim, eps=self._eps(config, self.mixer.n_sites))
        self.mixer.to_empty(device=self.embedding.weight.device)

    def _eps(self, config: DecoderConfig, site: int) -> float:
        return eps_of_plain(self.mixer, site, config.norm_eps) if config.plain_eps else config.norm_eps

    def change_mixer(self, config: DecoderConfig) -> None:
        """Put the configuration's mixer in, at its start, for the same sublayers; ways that it adds get copies of the first way's norm."""
        own = create_mixer(config.mixer, dim=config.dim, n_blocks=config.n_blocks, **config.mixer_options)
        self.mixer = own.to(self.embedding.weight.device)
        norms: Any = self.norms
        for site in range(own.n_sites):
            first = norms[site][0]
            first.eps = self._eps(config, site)
            norms[site] = nn.ModuleList([first, *(copy.deepcopy(first) for _ in range(own.ways(site) - 1))])
        self.final_norm.eps = self._eps(config, own.n_sites)

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """What enters the first block: [B, T, D]."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("forward: expected either input_ids or inputs_embeds")
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if torch.is_autocast_enabled(x.device.type):  # autocast leaves the embedding in fp32, and the state follows it
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return x

    def through_blocks(self, x: Tensor, context: Context, trace: Trace | None = None) -> Tensor:
        """What the head sees of embeddings [B, T, D]: the blocks' output after the final norm."""
        mixer, trace = self.mixer, trace or Trace()
        sources, mixtures = trace.sources, trace.mixtures
        if sources is not None:
            sources.append(x)
        state = mixer.start(x)
        for site, (norm, sublayer) in enumerate(zip(self.norms, self.sublayers, strict=True)):
            if mixtures is not None and site % 2 == 0:
                h = mixer.read(state, site)
                mixtures.append(h[0] if isinstance(h, tuple) else h)
            y = self._run_sublayer(sublayer, mixer.read(state, site, norm), context)
            if sources is not None:
                sources.append(y)
            state = mixer.write(state, site, y)
        return mixer.finish(state, self.final_norm)

    def _run_sublayer(self, sublayer: nn.Module, h: Read, context: Context) -> Tensor:
        return sublayer(h, context)


def _attention(c: DecoderConfig, block: int) -> Attention:
    eps = c.norm_eps if c.qk_norm else None
    return Attention(block, c.dim, c.n_heads, c.n_kv_heads, c.head_dim, eps, c.qk_gain)


def _mlp(c: DecoderConfig) -> Mlp:
    return Mlp(c.mlp, c.dim, c.mlp_dim)


def init_matrix(linear: nn.Linear, n_sites: int = 1) -> None:
    """A matrix N(0, 1/fan_in); an output projection's, of which `n_sites` add up, is divided by sqrt(n_sites)."""
    nn.init.normal_(linear.weight, std=1 / math.sqrt(linear.in_features) / math.sqrt(n_sites))


def token_positions(mask: Tensor | None, past: Any, length: int, device: torch.device) -> Tensor:
    """The positions [B or 1, T] of the last `length` tokens, without the padding of a mask [B, keys]; past: tokens before them."""
    if mask is not None and mask.ndim == 2:
        return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return (torch.arange(length, device=device) + past).unsqueeze(0)


class Decoder(Backbone):
    """Token ids [B, T] in, logits [B, T, vocab] out."""

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
        _tie(self)  # to_empty gives every module weights of its own
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Matrices N(0, 1/fan_in), output projections divided by sqrt(sites), embedding and head N(0, 0.02²)."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                init_matrix(module, self.mixer.n_sites if name.endswith("out_proj") else 1)
            elif isinstance(module, RMSNorm) and module.weight is not None:
                nn.init.ones_(module.weight)
        nn.init.normal_(self.head.weight, std=EMBEDDING_STD)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
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
        """Logits for token ids, or for embeddings [B, T, D] in their place.

        attention_mask: [B, keys], 1 for tokens and 0 for padding, or [B or 1, heads or 1, T, keys] as scaled_dot_product_attention
        takes it (then causality is the caller's). position_ids: [B, T], by default counted from what the cache holds, without padding.
        cache: a Hugging Face Cache (`update(k, v, layer_idx)`, `get_seq_length()`, `get_mask_sizes(length, layer_idx)`).
        logits_to_keep: of the last so many tokens; 0: of all.
        """
        x = self.embed(input_ids, inputs_embeds)  # [B, T, D]
        hidden = self.through_blocks(x, self._context(x, attention_mask, position_ids, cache))
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

    def parameter_counts(self) -> dict[str, int]:
        """Parameters by part, `total`, and `added_by_mixer`: the mixer's own and the norms that its extra ways need."""
        counts = dict.fromkeys(("embedding", "attention", "mlp", "norms", "mixer", "head"), 0)
        for name, p in self.named_parameters():  # tied weights come once
            part = name.split(".")[0]
            if part == "sublayers":
                part = "attention" if int(name.split(".")[1]) % 2 == 0 else "mlp"
            counts["norms" if part == "final_norm" else part] += p.numel()
        counts["total"] = sum(counts.values())
        named = dict(self.named_parameters())
        counts["added_by_mixer"] = sum(named[name].numel() for name in self.added_by_mixer())
        return counts

    def added_by_mixer(self) -> list[str]:
        """The names of the parameters that are there for the mixer: its own, and the norms of ways after the first."""
        parts = ((name, name.split(".")) for name, _ in self.named_parameters())
        return [name for name, part in parts if part[0] == "mixer" or (part[0] == "norms" and part[2] != "0")]

    def change_mixer(self, config: DecoderConfig) -> None:
        super().change_mixer(config)
        self.config = config

    def new_cache(self) -> KVCache:
        """An empty cache for `forward`."""
        return KVCache()

    def described(self, seq_len: int) -> dict[str, Any]:
        """The model as a config.json of Hugging Face has it; seq_len: tokens in a sequence of training."""
        kind = {"model_type": MODEL_TYPE, "architectures": [ARCHITECTURE], "auto_map": auto_map()}
        fields = {theirs: getattr(self.config, ours) for ours, theirs in FIELDS.items()}
        return {**kind, **fields, "max_position_embeddings": seq_len, "dtype": "float32"}

    def code(self) -> str:
        """The code that its folders carry."""
        return code()

    def repeated_parts(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """What can be recomputed or compiled piece by piece: the sublayers, and the norms around them."""
        norms = [n for n in self.norms.modules() if isinstance(n, RMSNorm)]
        return list(self.sublayers), [*norms, self.final_norm]


def _tie(decoder: Decoder, loaded: Any = None) -> None:
    """Make the head's weight the embedding's where the configuration says so; a hook of load_state_dict, which may untie them."""
    if decoder.config.tie_embeddings:
        decoder.head.weight = decoder.embedding.weight
