"""Count a model's parameters, FLOPs, kept activations and moved elements, per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from depthmix.mixers import Mixer, create_mixer
from depthmix.models import DecoderConfig
from depthmix.models.value_mixing import value_mixing
from depthmix.parallel.plan.costs import Published, Traffic, costs_of

# Multiples of the size of bf16 logits that are kept and moved, including the head's products. Kept are the logits and their
# gradient. Where tensor parallelism splits them, which our loss does not do, fp32 logarithms and two gradients are added.
LOGITS, SPLIT_LOGITS = (2, 6), (6, 18)
# Bytes moved per parameter and step: casts to bf16 and back, clipping, AdamW.
UPDATE = 52


@dataclass(frozen=True)
class Counts:
    """A decoder with its mixer. Activations and traffic are in units of [tokens, dim] in bf16."""

    config: DecoderConfig
    parameters: dict[str, int]  # by part, as Decoder.parameter_counts has them
    total: float  # number of all parameters
    active: float  # parameters that a token meets; fewer if the model has experts
    ways: list[int]  # by site
    traffic: list[Traffic]  # by site, and finish
    states: list[dict[int, float]]  # by site, and finish
    published: Published | None  # the paper's own count of its inference

    @property
    def widths(self) -> tuple[float, float, float]:
        """The widths of queries, of keys, and of the MLP, in units of dim."""
        c = self.config
        return c.n_heads * c.head_dim / c.dim, c.n_kv_heads * c.head_dim / c.dim, c.mlp_dim / c.dim

    def kept(self, site: int) -> float:
        """Count the units that a sublayer keeps for its backward besides its inputs."""
        c, (q, kv, m) = self.config, self.widths
        if site % 2:
            return m * (2 if c.mlp == "relu2" else 3)
        # Rotated queries and keys, values, the output; then queries and keys before their norms.
        return q + kv + kv + q + (q + kv) * c.qk_norm

    def moved(self, site: int) -> float:
        """Count the units that a sublayer's products and elementwise passes move, forward and backward."""
        c, (q, kv, m) = self.config, self.widths
        if site % 2:
            inner = 2 if c.mlp == "swiglu" else 1
            return 3 * (inner * (1 + m) + m + 1) + (5 if c.mlp == "relu2" else 8) * m
        return 3 * (3 + q + 2 * kv + q + 1) + 5 * (q + kv)

    def logits(self, tp: int) -> tuple[float, float]:
        """Count the bytes per token that the logits and their loss keep and move, split over tp GPUs."""
        kept, moved = SPLIT_LOGITS if tp > 1 else LOGITS
        return kept * 2.0 * self.config.vocab_size, moved * 2.0 * self.config.vocab_size

    def flops(self, seq_len: int) -> tuple[float, float]:
        """Count the FLOPs per token, forward and backward: of products with parameters, and of causal attention."""
        c = self.config
        attention = 2 * seq_len * c.n_heads * c.head_dim * c.n_blocks
        tables = (c.n_blocks + 1) // 2 * c.vocab_size * c.n_kv_heads * c.head_dim if c.value_embeddings else 0
        looked_up = tables + (0 if c.tie_embeddings else self.parameters["embedding"])
        return 6 * (self.active - looked_up), 3.5 * attention

    def useful_flops(self, seq_len: int) -> float:
        """Count the FLOPs per token for MFU, which leaves out the scores that attention's backward computes again."""
        products, attention = self.flops(seq_len)
        return products + attention * 3 / 3.5


def parts_of(config: DecoderConfig, mixer: Mixer) -> dict[str, int]:
    """Count parameters as `Decoder.parameter_counts` does, without building a decoder."""
    c, ways = config, [mixer.ways(site) for site in range(mixer.n_sites)]
    q, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    parts = {
        "embedding": c.vocab_size * c.dim,
        "attention": c.n_blocks * (2 * c.dim * (q + kv) + 2 * c.head_dim * c.qk_norm) + _value_parameters(c),
        "mlp": c.n_blocks * c.dim * c.mlp_dim * (3 if c.mlp == "swiglu" else 2),
        "norms": c.dim * (sum(ways) + 1),
        "mixer": sum(p.numel() for p in mixer.parameters()),
        "head": 0 if c.tie_embeddings else c.vocab_size * c.dim,
    }
    added = parts["mixer"] + c.dim * (sum(ways) - len(ways))
    return {**parts, "total": sum(parts.values()), "added_by_mixer": added}


def _value_parameters(config: DecoderConfig) -> int:
    """Count the parameters of value residuals and value embeddings."""
    c, total = config, 0
    with torch.device("meta"):
        for block in range(c.n_blocks):
            size = c.vocab_size if c.value_embeddings else None
            mixing = value_mixing(block, c.n_blocks, c.dim, c.n_kv_heads, c.head_dim, c.value_residual, size)
            total += 0 if mixing is None else sum(p.numel() for p in mixing.parameters())
    return total


def count(config: DecoderConfig, total: float | None = None, active: float | None = None) -> Counts:
    """Count a decoder of a configuration.

    Args:
        config: of the decoder.
        total: parameters of a model with experts, which this decoder lacks; None for the decoder's own.
        active: parameters of that model that a token meets.
    """
    with torch.device("meta"):
        mixer = create_mixer(config.mixer, dim=config.dim, n_blocks=config.n_blocks, **config.mixer_options)
    parts = parts_of(config, mixer)
    ways = [mixer.ways(site) for site in range(mixer.n_sites)]
    total = float(parts["total"]) if total is None else total + parts["added_by_mixer"]
    active = float(parts["total"]) if active is None else active + parts["added_by_mixer"]
    costs = costs_of(mixer)
    traffic, states, published = costs.traffic(), costs.state_tensors(), costs.published()
    return Counts(config, parts, total, min(active, total), ways, traffic, states, published)
