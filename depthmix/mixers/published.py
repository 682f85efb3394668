"""Convert weights of published models, under their own names, to the parameters of our mixers.

| source | mixer | options |
|---|---|---|
| `kimi-k3` | attnres | block_size: twice its `attn_res_block_size`, which counts layers |
| `flash-linear-attention` | attnres | block_size: its `attnres_block_size` |
| `deepseek-v4` | mhc | convention="deepseek", head="learned", n: its `hc_mult`, iterations: its `hc_sinkhorn_iters` |
| `mhc-lite` | mhc | residual_map="birkhoff", n |

Queries and key gains are one row per site. mHC's logits are pre, post and res in this order everywhere; what differs is the
direction of the residual map (here output stream first) and, for mHC-lite, its permutations and a norm with a gain.
"""

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from depthmix.mixers.options import OptionError
from depthmix.mixers.variant import KEY, silent_entry

State = Mapping[str, Tensor]


class _Names:
    """Tensors of a state, found by the ends of their names. A missing one raises OptionError."""

    def __init__(self, source: str, state: State) -> None:
        self.source, self.state = source, state

    def one(self, end: str) -> Tensor:
        names = [k for k in self.state if k == end or k.endswith("." + end)]
        if len(names) != 1:
            raise OptionError(f"{self.source}: expected one tensor whose name ends in {end}, found {len(names)}")
        return self.state[names[0]].float()

    def layers(self, end: str) -> int:
        """Count the layers that have a tensor of this name."""
        n = 0
        while any(k.endswith(f".{n}.{end}") or k == f"{n}.{end}" for k in self.state):
            n += 1
        if not n:
            raise OptionError(f"{self.source}: no name ends in .0.{end}; these are not weights of that model")
        return n

    def sites(self, first: str, second: str) -> list[Tensor]:
        """Return the tensors of the two sites of every layer, in order."""
        n = self.layers(first)
        return [self.one(f"{i}.{end}") for i in range(n) for end in (first, second)]


def _attnres(names: _Names, ends: tuple[str, str, str]) -> dict[str, Tensor]:
    """Convert <end>_proj [1, D], the queries, and <end>_norm [D], the key gains."""
    query, gain = (
        [*names.sites(f"{ends[0]}_{kind}.weight", f"{ends[1]}_{kind}.weight"), names.one(f"{ends[2]}_{kind}.weight")]
        for kind in ("proj", "norm")
    )
    return {"query": torch.stack([q.reshape(-1) for q in query]), "key_gain": torch.stack(gain)}


def _deepseek_v4(names: _Names) -> dict[str, Tensor]:
    """Convert fn [K, n D], base [K] and scale [3] of attn_hc and ffn_hc, and the head's own."""
    by_site = {
        ours: torch.stack(names.sites(f"attn_hc.{theirs}", f"ffn_hc.{theirs}"))
        for ours, theirs in (("phi", "fn"), ("b", "base"), ("alpha", "scale"))
    }
    head = {ours: names.one(f"hc_head.hc_{end}") for ours, end in (("b_head", "base"), ("alpha_head", "scale"))}
    return {
        **by_site,
        "phi": by_site["phi"].mT.contiguous(),
        "phi_head": names.one("hc_head.hc_fn").T.contiguous(),
        **head,
    }


def _mhc_lite(names: _Names) -> dict[str, Tensor]:
    """Convert the weights of mHC-lite. Its norm's gain becomes part of phi.

    Permutation r sends stream i to perm[i] there, and takes it from order[o] here.
    """

    def of(end: str) -> Tensor:
        return torch.stack([t.reshape(-1) if t.ndim < 2 else t for t in names.sites(f"hc_attn.{end}", f"hc_mlp.{end}")])

    n = of("static_beta").shape[1]
    orders = list(itertools.permutations(range(n)))
    place = {order: r for r, order in enumerate(orders)}
    inverse = [place[tuple(sorted(range(n), key=order.__getitem__))] for order in orders]
    alpha, base = of("dynamic_alpha_fn"), of("static_alpha")
    phi = torch.cat([alpha[..., :n], of("dynamic_beta_fn"), alpha[..., n:][..., inverse]], dim=-1)
    b = torch.cat([base[:, :n], of("static_beta"), base[:, n:][:, inverse]], dim=-1)
    scales = torch.cat([of(end) for end in ("pre_branch_scale", "h_post_scale", "residual_scale")], dim=-1)
    return {"phi": (of("norm.gamma") + 1).unsqueeze(-1) * phi, "b": b, "alpha": scales}


SOURCES: dict[str, Callable[[_Names], dict[str, Tensor]]] = {
    "kimi-k3": lambda names: _attnres(names, ("self_attention_res", "mlp_res", "output_attn_res")),
    "flash-linear-attention": lambda names: _attnres(names, ("attn_res", "mlp_res", "res")),
    "deepseek-v4": _deepseek_v4,
    "mhc-lite": _mhc_lite,
}


def published_weights(source: str, state: State) -> dict[str, Tensor]:
    """Return the parameters of our mixer, in fp32, from the tensors of a published model.

    Args:
        source: one of `SOURCES`.
        state: the model's tensors by name. Tensors that are no weights of its mixer are ignored.

    Raises:
        OptionError: an unknown source, or a tensor that is missing.

    Example:
        >>> mixer.load_state_dict(published_weights("deepseek-v4", tensors), strict=False)
    """
    if source not in SOURCES:
        raise OptionError(f"unknown source {source!r}; there are {', '.join(SOURCES)}")
    return {**SOURCES[source](_Names(source, state)), KEY: silent_entry()}
