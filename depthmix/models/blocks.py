"""Transformer blocks shared by all models: pre-norm attention and MLP, connected over depth by a mixer.

A pass is: start, then for each site write(sublayer(read)), then finish. No code here depends on the mixer's rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from depthmix.mixers.checks import Read
from depthmix.mixers.options import check_options, plain_value
from depthmix.mixers.plain import read_early
from depthmix.mixers.registry import create_mixer, mixer_class
from depthmix.models.layers import Attention, Context, Mlp, MlpKind
from depthmix.models.projections import own_gain, weights_take_gains
from depthmix.models.value_mixing import ValueMixing, ValueResidual, value_mixing
from depthmix.ops.norm import RMSNorm


class Sizes(Protocol):
    """Configuration fields that blocks read. `complete_sizes` fills in those that were left out."""

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
    """Fill in the sizes that a configuration left out, in place, and check them.

    Args:
        config: The configuration to complete.
        more: Names of further fields that must be integers of at least 1.

    Raises:
        ValueError: A size does not fit the others.
    """
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
    options = config.mixer_options
    if isinstance(options, dict):
        options = config.mixer_options = {option: plain_value(value) for option, value in options.items()}
    check_options(config.mixer, mixer_class(config.mixer).options, options)


def _at_least_one(config: Sizes, name: str) -> None:
    value = plain_value(getattr(config, name))
    setattr(config, name, value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


@dataclass
class Trace:
    """Tensors to record during one pass. A list that is None is not filled."""

    # The embedding, then the output of every sublayer.
    sources: list[Tensor] | None = None
    # Each block's first read before its norm; of several ways, the one for queries.
    mixtures: list[Tensor] | None = None


class Blocks(nn.Module):
    """Read, sublayer and write for every site, then the final norm.

    There is no `__init__`, so that a model of another library, which has one of its own, can inherit from this class.
    `_build_mixer` and `_build_blocks` create the modules, with those of the model's embedding between them.
    """

    config: Any

    def _build_mixer(self, config: Sizes) -> None:
        # On the meta device nothing is drawn yet, so a seed gives the other weights the same values under any mixer.
        with torch.device("meta"):
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
        """Return the eps of the norms before a site; site n_sites is the final norm."""
        return config.norm_eps

    def through_blocks(
        self,
        x: Tensor,
        context: Context,
        trace: Trace | None = None,
        last: int | None = None,
        blocks: int | None = None,
    ) -> Tensor:
        """Run all blocks on embeddings and return the output of the final norm, the head's input.

        Args:
            x: Embeddings [B, T, D].
            context: Inputs of attention besides the hidden states.
            trace: Lists to fill with tensors of this pass.
            last: Return only this many last tokens; None: all.
            blocks: Exit after this many blocks and return the final norm of the next block's read; None or too
                large: run all.

        Returns:
            Hidden states [B, T, D], or [B, last, D].
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
            if isinstance(y, tuple):
                y, values = y
                context = replace(context, first_values=values)
            if sources is not None:
                sources.append(y)
            state = mixer.write(state, site, y) if gain is None else mixer.write(state, site, y, scaled=True)
        return mixer.finish(state, self.final_norm, **({} if last is None else {"last": last}))

    def _run_sublayer(self, sublayer: nn.Module, h: Read, context: Context, gain: Tensor | None) -> Any:
        return sublayer(h, context, gain)

    def _reset_blocks(self) -> None:
        """Draw matrices from N(0, 1/fan_in), output projections times output_scale / sqrt(sites), and set gains to one.
        The caller resets the mixer.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                out = name.endswith("out_proj")
                init_matrix(module, *((self.mixer.n_sites, self.config.output_scale) if out else ()))
            elif isinstance(module, RMSNorm) and module.weight is not None:
                nn.init.ones_(module.weight)
        for module in self.modules():
            if isinstance(module, ValueMixing):
                module.reset_parameters()

    def parameter_counts(self) -> dict[str, int]:
        """Count the parameters by part.

        Returns:
            Numbers for embedding, attention, mlp, norms, mixer and head, `total`, and `added_by_mixer`: the
                mixer's own parameters and the norms of its extra ways.
        """
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
        """List the parameters that exist because of the mixer: its own, and the norms of ways after the first."""
        parts = ((name, name.split(".")) for name, _ in self.named_parameters())
        return [name for name, part in parts if part[0] == "mixer" or (part[0] == "norms" and part[2] != "0")]

    def repeated_parts(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return (sublayers, norms): the modules to checkpoint or compile one by one."""
        norms = [n for n in self.norms.modules() if isinstance(n, RMSNorm)]
        return list(self.sublayers), [*norms, self.final_norm]


def _attention(c: Sizes, block: int) -> Attention:
    eps = c.norm_eps if c.qk_norm else None
    return Attention(block, c.dim, c.n_heads, c.n_kv_heads, c.head_dim, eps, c.qk_gain, **_values(c, block))


def _values(c: Any, block: int) -> dict[str, Any]:
    """Return what a model's attention is given for its values; nothing unless the model mixes values over depth."""
    residual: ValueResidual = getattr(c, "value_residual", "off")
    embeddings = getattr(c, "value_embeddings", False)
    size = c.vocab_size if embeddings else None
    values = value_mixing(block, c.n_blocks, c.dim, c.n_kv_heads, c.head_dim, residual, size)
    return {"values": values, "gives_values": residual != "off" and block == 0}


def _mlp(c: Sizes) -> Mlp:
    return Mlp(c.mlp, c.dim, c.mlp_dim)


def init_matrix(linear: nn.Linear, n_sites: int = 1, scale: float = 1.0) -> None:
    """Draw a weight from N(0, 1/fan_in) times `scale`, divided by sqrt(n_sites) for an output projection, whose outputs
    add up.
    """
    nn.init.normal_(linear.weight, std=1 / math.sqrt(linear.in_features) / math.sqrt(n_sites) * scale)


def as_autocast(x: Tensor) -> Tensor:
    """Cast an embedding to autocast's dtype. Autocast leaves embeddings in fp32, and the depth state takes the
    embedding's dtype.
    """
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x
