"""The blocks that every model here is made of: attention and an MLP, pre-norm, whose connections over depth are a choice.

The whole of it is: start, then for each site write(sublayer(read)), then finish; which rule the mixer follows is its own business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from depthmix.mixers.base import Read, create_mixer, mixer_class
from depthmix.mixers.options import check_options, plain_value
from depthmix.mixers.plain import read_early
from depthmix.models.layers import Attention, Context, Mlp, MlpKind
from depthmix.models.projections import own_gain, weights_take_gains
from depthmix.ops.norm import RMSNorm


class Sizes(Protocol):
    """What blocks need of a model's configuration; `complete_sizes` works out what was left out."""

    dim: int
    n_blocks: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp: MlpKind
    mlp_dim: int
    qk_norm: bool
    qk_gain: bool
    norm_eps: float
    output_scale: float
    mixer: str
    mixer_options: dict[str, Any]


def complete_sizes(config: Sizes, *more: str) -> None:
    """Fill in a configuration's sizes that were left out; ValueError for those that do not fit, `more` of its own included."""
    config.n_kv_heads = config.n_heads if config.n_kv_heads is None else config.n_kv_heads
    for name in (*more, "dim", "n_blocks", "n_heads", "n_kv_heads"):
        _at_least_one(config, name)
    if config.n_heads % config.n_kv_heads:
        raise ValueError(f"n_kv_heads must divide n_heads={config.n_heads}, got {config.n_kv_heads}")
    if config.head_dim is None:
        if config.dim % config.n_heads:
            raise ValueError(f"n_heads must divide dim={config.dim} unless head_dim is given, got {config.n_heads}")
        config.head_dim = config.dim // config.n_heads
    _at_least_one(config, "head_dim")
    if config.mlp not in ("swiglu", "relu2"):
        raise ValueError(f"mlp must be 'swiglu' or 'relu2', got {config.mlp!r}")
    if config.mlp_dim is None:
        config.mlp_dim = 4 * config.dim if config.mlp == "relu2" else 64 * math.ceil(8 * config.dim / 3 / 64)
    _at_least_one(config, "mlp_dim")
    if not (isinstance(config.output_scale, int | float) and 0 <= config.output_scale < math.inf):
        raise ValueError(f"output_scale must be a number of at least 0, got {config.output_scale!r}")
    given = config.mixer_options
    if isinstance(given, dict):
        given = config.mixer_options = {option: plain_value(value) for option, value in given.items()}
    check_options(config.mixer, mixer_class(config.mixer).options, given)


def _at_least_one(config: Sizes, name: str) -> None:
    value = plain_value(getattr(config, name))
    setattr(config, name, value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


@dataclass
class Trace:
    """What to keep of one pass, for those who look; a list that is not given is not kept."""

    sources: list[Tensor] | None = None  # the embedding, then the output of every sublayer
    mixtures: list[Tensor] | None = None  # what every block reads before its norm (with several ways: for its queries)


class Blocks(nn.Module):
    """Read, sublayer, write for every site, then the final norm.

    It has no `__init__`, so that models of other libraries, which have one of their own, can be one: `_build_mixer` and
    `_build_blocks` make its modules, with those of the model's embedding between them.
    """

    config: Any

    def _build_mixer(self, config: Sizes) -> None:
        with torch.device(
            "meta"
        ):  # nothing is drawn yet, so one seed gives the same weights elsewhere whatever the mixer
            self.mixer = create_mixer(config.mixer, dim=config.dim, n_blocks=config.n_blocks, **config.mixer_options)

    def _build_blocks(self, config: Sizes) -> None:
        self.norms, self.sublayers = nn.ModuleList(), nn.ModuleList()  # by site
        layout = self.mixer.layout
        for site in range(self.mixer.n_sites):
            ways, eps = self.mixer.ways(site), self._eps(config, site)
            is_attention = site in layout.attention
            if not is_attention and ways > (2 if config.mlp == "swiglu" else 1):
                takes = "two, for its gate and its up projection" if config.mlp == "swiglu" else "one, and swiglu two"
                raise ValueError(f"{config.mixer} reads {ways} mixtures at an MLP; {config.mlp} takes {takes}")
            self.norms.append(nn.ModuleList(RMSNorm(config.dim, eps=eps) for _ in range(ways)))
            self.sublayers.append(_attention(config, layout.block[site]) if is_attention else _mlp(config))
        self.final_norm = RMSNorm(config.dim, eps=self._eps(config, self.mixer.n_sites))
        self.mixer.to_empty(device=self.final_norm.weight.device)

    def _eps(self, config: Any, site: int) -> float:
        """Eps of the norms in front of a site; after the last comes the final norm."""
        return config.norm_eps

    def through_blocks(
        self,
        x: Tensor,
        context: Context,
        trace: Trace | None = None,
        last: int | None = None,
        blocks: int | None = None,
    ) -> Tensor:
        """Return what the head sees of embeddings [B, T, D]: the blocks' output after the final norm.

        Args:
            x: the embeddings.
            context: what attention needs.
            trace: what to keep of the pass.
            last: of so many tokens alone.
            blocks: leave after so many blocks, with what the next one would read; None or too many: run all.
        """
        mixer, trace = self.mixer, trace or Trace()
        sources, mixtures = trace.sources, trace.mixtures
        if sources is not None:
            sources.append(x)
        state = mixer.start(x)
        gains = mixer.output_gains() if sources is None and weights_take_gains(x) else {}
        for site, (norm, sublayer) in enumerate(zip(self.norms, self.sublayers, strict=True)):
            if blocks is not None and mixer.layout.block[site] >= blocks:
                return self.final_norm(read_early(mixer, state))
            if mixtures is not None and mixer.layout.begins[site]:
                h = mixer.read(state, site)
                mixtures.append(h[0] if isinstance(h, tuple) else h)
            gain = own_gain(gains, site, sublayer)
            y = self._run_sublayer(sublayer, mixer.read(state, site, norm), context, gain)
            if sources is not None:
                sources.append(y)
            state = mixer.write(state, site, y) if gain is None else mixer.write(state, site, y, scaled=True)
        return mixer.finish(state, self.final_norm, **({} if last is None else {"last": last}))

    def _run_sublayer(self, sublayer: nn.Module, h: Read, context: Context, gain: Tensor | None) -> Tensor:
        return sublayer(h, context, gain)

    def _reset_blocks(self) -> None:
        """Matrices N(0, 1/fan_in), output projections times output_scale / sqrt(sites), gains one; the mixer is left to the caller."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                out = name.endswith("out_proj")
                init_matrix(module, *((self.mixer.n_sites, self.config.output_scale) if out else ()))
            elif isinstance(module, RMSNorm) and module.weight is not None:
                nn.init.ones_(module.weight)

    def parameter_counts(self) -> dict[str, int]:
        """Parameters by part, `total`, and `added_by_mixer`: the mixer's own and the norms that its extra ways need."""
        counts = dict.fromkeys(("embedding", "attention", "mlp", "norms", "mixer", "head"), 0)
        for name, p in self.named_parameters():  # tied weights come once
            part = name.split(".")[0]
            if part == "sublayers":
                part = "attention" if int(name.split(".")[1]) in self.mixer.layout.attention else "mlp"
            counts["norms" if part == "final_norm" else part] += p.numel()
        counts["total"] = sum(counts.values())
        named = dict(self.named_parameters())
        counts["added_by_mixer"] = sum(named[name].numel() for name in self.added_by_mixer())
        return counts

    def added_by_mixer(self) -> list[str]:
        """The names of the parameters that are there for the mixer: its own, and the norms of ways after the first."""
        parts = ((name, name.split(".")) for name, _ in self.named_parameters())
        return [name for name, part in parts if part[0] == "mixer" or (part[0] == "norms" and part[2] != "0")]

    def repeated_parts(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """What can be recomputed or compiled piece by piece: the sublayers, and the norms around them."""
        norms = [n for n in self.norms.modules() if isinstance(n, RMSNorm)]
        return list(self.sublayers), [*norms, self.final_norm]


def _attention(c: Sizes, block: int) -> Attention:
    eps = c.norm_eps if c.qk_norm else None
    return Attention(block, c.dim, c.n_heads, c.n_kv_heads, c.head_dim, eps, c.qk_gain)


def _mlp(c: Sizes) -> Mlp:
    return Mlp(c.mlp, c.dim, c.mlp_dim)


def init_matrix(linear: nn.Linear, n_sites: int = 1, scale: float = 1.0) -> None:
    """A matrix N(0, 1/fan_in) times a scale; an output projection's, of which `n_sites` add up, is divided by sqrt(n_sites)."""
    nn.init.normal_(linear.weight, std=1 / math.sqrt(linear.in_features) / math.sqrt(n_sites) * scale)


def as_autocast(x: Tensor) -> Tensor:
    """An embedding in the dtype of autocast, which leaves it in fp32, and the state follows it."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x
