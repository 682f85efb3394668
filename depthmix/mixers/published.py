"""Convert weights of published models, under their own names, to the parameters of our mixers.

| source | mixer | options, by the names of its configuration |
|---|---|---|
| `kimi-k3` | attnres | block_size: twice `attn_res_block_size`, which counts layers; eps: `rms_norm_eps` |
| `flash-linear-attention` | attnres | block_size: `attnres_block_size`; eps: `norm_eps` |
| `deepseek-v4` | mhc | convention="deepseek", head="learned", n: `hc_mult`, iterations: `hc_sinkhorn_iters`, eps: `rms_norm_eps` |
| `glm-5-next` | mhc | as `deepseek-v4`, with head="mean" |
| `hunyuan-v4` | mhc | convention="hunyuan", residual_map="identity", head="learned", n: `hc_mult`, post_scale: `hc_magnitude`, eps |
| `mhc-lite` | mhc | residual_map="birkhoff", n |
| `inkling-2` | attnres | ways=3, value_norm=True, scaled_logits=True, block_size: twice `n_layers_per_attn_res_block` |
| `qwen4-exp` | gated_streams | n: `hc_count`, rank: `hc_lowrank`, eps: `rms_norm_eps` |

Names may be those in files (`layers.0.hc_attn_fn`) or in memory (`model.layers.0.attn_hc.fn`). Queries and key gains are one row per
site. mHC's logits are pre, post and res in this order everywhere. The direction of the residual map differs (here output stream
first), and mHC-lite has its own order of permutations and a norm with a gain.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthmix.mixers.base import Mixer
from depthmix.mixers.options import OptionError
from depthmix.mixers.registry import create_mixer
from depthmix.mixers.variant import KEY, named_entry, silent_entry
from depthmix.ops.stream_mix.rules import DEEPSEEK_EPS

State = Mapping[str, Tensor]
Config = Mapping[str, Any]
# Lists of modules that predict further tokens. They are not part of the stack.
FURTHER_TOKENS = re.compile(r"(^|\.)(mtp|mtp_layers|nextn)(\.|$)")


class Parts(NamedTuple):
    """Tensors of the chosen layers, by our short names (`attn.fn`), and those of the head."""

    layers: list[dict[str, Tensor]]
    head: dict[str, Tensor]

    def sites(self, end: str) -> Tensor:
        """Stack a tensor of all sites, in order: [S, ...]."""
        return torch.stack([layer[f"{site}.{end}"] for layer in self.layers for site in ("attn", "mlp")])


class Source(NamedTuple):
    """A published model: names of its tensors, as regular expressions, and how its weights and configuration are read."""

    rule: str
    layer: dict[str, str]  # our short name of a layer's tensor: the end of its name
    head: dict[str, str]
    convert: Callable[[Parts], dict[str, Tensor]]
    options: Callable[[Config], dict[str, Any]] | None  # None: its configurations are not known
    needs_config: bool = False  # whether weights do not tell one rule from another
    rename: Callable[[str], str] | None = (
        None  # a name in files as the one in memory, where layers are numbered otherwise
    )
    optional: frozenset[str] = frozenset()  # tensors that a layer may lack, by our short names
    notes: dict[str, str] = {}  # what to know about an option that differs from the configuration's field


def _attnres(parts: Parts) -> dict[str, Tensor]:
    """Convert queries [1, D] and key gains [D]. Without a head, finish averages the sources."""
    query, gain = parts.sites("proj").flatten(1), parts.sites("norm")
    last = {"proj": torch.zeros_like(gain[0]), "norm": torch.ones_like(gain[0]), **parts.head}
    return {
        "query": torch.cat([query, last["proj"].reshape(1, -1)]),
        "key_gain": torch.cat([gain, last["norm"].reshape(1, -1)]),
    }


def _attnres_names(attention: str, mlp: str, head: str) -> tuple[dict[str, str], dict[str, str]]:
    sites = {
        f"{site}.{kind}": f"{end}_{kind}.weight" for site, end in (("attn", attention), ("mlp", mlp)) for kind in KINDS
    }
    return {k: re.escape(v) for k, v in sites.items()}, {kind: re.escape(f"{head}_{kind}.weight") for kind in KINDS}


KINDS = ("proj", "norm")


def _deepseek(parts: Parts) -> dict[str, Tensor]:
    """Convert fn [K, n D], base [K] and scale [3] of every site, and the head's own if it has any."""
    weights = {
        "phi": parts.sites("fn").mT.contiguous(),
        "b": parts.sites("base"),
        "alpha": parts.sites("scale"),
    }
    if parts.head:
        weights |= {
            "phi_head": parts.head["fn"].T.contiguous(),
            "b_head": parts.head["base"],
            "alpha_head": parts.head["scale"],
        }
    return weights


def _deepseek_options(config: Config) -> dict[str, Any]:
    if config["hc_eps"] != DEEPSEEK_EPS:
        raise OptionError(f"its hc_eps is {config['hc_eps']}, and the rule mhc has {DEEPSEEK_EPS} there")
    return {
        "n": config["hc_mult"],
        "convention": "deepseek",
        "iterations": config["hc_sinkhorn_iters"],
        "eps": config["rms_norm_eps"],
    }


_HC = ("fn", "base", "scale")
_DEEPSEEK_LAYER = {
    f"{ours}.{end}": rf"{theirs}_hc\.{end}|hc_{theirs}_{end}"
    for ours, theirs in (("attn", "attn"), ("mlp", "ffn"))
    for end in _HC
}


def _mhc_lite(parts: Parts) -> dict[str, Tensor]:
    """Convert the weights of mHC-lite. Its norm's gain becomes part of phi.

    Permutation r sends stream i to perm[i] there, and takes it from order[o] here.
    """

    def of(end: str) -> Tensor:
        tensor = parts.sites(end)
        return tensor if tensor.ndim > 1 else tensor.unsqueeze(-1)

    n = of("static_beta").shape[1]
    orders = list(itertools.permutations(range(n)))
    place = {order: r for r, order in enumerate(orders)}
    inverse = [place[tuple(sorted(range(n), key=order.__getitem__))] for order in orders]
    alpha, base = of("dynamic_alpha_fn"), of("static_alpha")
    phi = torch.cat([alpha[..., :n], of("dynamic_beta_fn"), alpha[..., n:][..., inverse]], dim=-1)
    b = torch.cat([base[:, :n], of("static_beta"), base[:, n:][:, inverse]], dim=-1)
    scales = torch.cat([of(end) for end in ("pre_branch_scale", "h_post_scale", "residual_scale")], dim=-1)
    return {"phi": (of("norm.gamma") + 1).unsqueeze(-1) * phi, "b": b, "alpha": scales}


def _hunyuan_options(config: Config) -> dict[str, Any]:
    deepseek = _deepseek_options({**config, "hc_sinkhorn_iters": None})
    shared = {name: deepseek[name] for name in ("n", "eps")}
    rule = {"convention": "hunyuan", "residual_map": "identity", "head": "learned"}
    return {**shared, **rule, "post_scale": float(config["hc_magnitude"])}


_HUNYUAN_LAYER = {
    f"{ours}.{end}": rf"{theirs}_hc\.{end}|hc_{ours}_layer\.hc_{end}"
    for ours, theirs in (("attn", "attn"), ("mlp", "ffn"))
    for end in _HC
}


def _inkling(parts: Parts) -> dict[str, Tensor]:
    """Convert queries [D], or [3, D] where an attention site reads three mixtures. Layer 0 has none: its one source is the embedding."""
    mlp = [layer["mlp.query"] for layer in parts.layers]
    nothing = torch.zeros_like(mlp[0])
    attention = [layer.get("attn.query", nothing).view(-1, len(nothing)).expand(3, -1) for layer in parts.layers]
    rows = [row for three, own in zip(attention, mlp, strict=True) for row in (three[0], own)]
    query = torch.stack([*rows, parts.head["query"] if parts.head else nothing])
    further = torch.stack([three[1:] for three in attention])
    return {
        "query": query,
        "key_gain": torch.ones_like(query),
        "query_kv": further,
        "key_gain_kv": torch.ones_like(further),
    }


def _inkling_name(name: str) -> str:
    """Return a name with its layer. Files number the queries of attention from layer 1 on, which is the first to have one."""

    def place(match: re.Match[str]) -> str:
        site, first = ("attention", 1) if match[1] == "attn" else ("mlp", 0)
        return f"layers.{int(match[2]) + first}.{site}_input.query"

    name = re.sub(r"attn_res\.(attn|mlp)_queries\.(\d+)$", place, name)
    return re.sub(r"attn_res\.output_query$", "final_input.query", name)


def _qwen(parts: Parts) -> dict[str, Tensor]:
    """Convert the norm's gain less one [n D], and the matrices [out, in] of every site and of the head."""
    gain, down, up, inject = (parts.sites(end) for end in _QWEN)
    n = inject.shape[1]
    head = {end: value.unsqueeze(0) for end, value in parts.head.items()}
    if not head:
        raise OptionError("qwen4-exp: the tensors of the last read, hyper_connection_mixer, are missing")
    gain, down, up = (torch.cat([a, head[end]]) for a, end in ((gain, "gain"), (down, "down"), (up, "up")))
    return {
        "gain": (1.0 + gain).unflatten(-1, (n, -1)),
        "W_down": down.mT.contiguous(),
        "W_up": up.mT.contiguous(),
        "W_inject": inject.mT.contiguous(),
    }


_QWEN = {
    "gain": "hc_norm.weight",
    "down": "input_mix_weight_down.weight",
    "up": "input_mix_weight_up.weight",
    "inject": "block_inject_weight.weight",
}
_MHC_LITE = (
    "norm.gamma",
    "static_alpha",
    "static_beta",
    "dynamic_alpha_fn",
    "dynamic_beta_fn",
    "pre_branch_scale",
    "h_post_scale",
    "residual_scale",
)

SOURCES = {
    "kimi-k3": Source(
        "attnres",
        *_attnres_names("self_attention_res", "mlp_res", "output_attn_res"),
        _attnres,
        lambda c: {"block_size": 2 * c["attn_res_block_size"], "eps": c["rms_norm_eps"]},
        needs_config=True,
        notes={"block_size": "attn_res_block_size of its configuration counts layers, which have two sites each"},
    ),
    "flash-linear-attention": Source(
        "attnres",
        *_attnres_names("attn_res", "mlp_res", "res"),
        _attnres,
        lambda c: {"block_size": c["attnres_block_size"], "eps": c["norm_eps"]},
        needs_config=True,
    ),
    "deepseek-v4": Source(
        "mhc",
        _DEEPSEEK_LAYER,
        {end: rf"hc_head\.hc_{end}|hc_head_{end}" for end in _HC},
        _deepseek,
        lambda c: {**_deepseek_options(c), "head": "learned"},
    ),
    "glm-5-next": Source("mhc", _DEEPSEEK_LAYER, {}, _deepseek, lambda c: {**_deepseek_options(c), "head": "mean"}),
    "hunyuan-v4": Source(
        "mhc",
        _HUNYUAN_LAYER,
        {end: rf"hc_head\.hc_(?:head_)?{end}" for end in _HC},
        _deepseek,
        _hunyuan_options,
        rename=lambda name: re.sub(r"(^|\.)hc_pre\.", r"\1", name),
    ),
    "inkling-2": Source(
        "attnres",
        {f"{site}.query": rf"{name}_input\.query" for site, name in (("attn", "attention"), ("mlp", "mlp"))},
        {"query": r"final_input\.query"},
        _inkling,
        lambda c: {
            "block_size": 2 * c["n_layers_per_attn_res_block"],
            "ways": 3,
            "value_norm": True,
            "scaled_logits": True,
        },
        needs_config=True,
        rename=_inkling_name,
        optional=frozenset({"attn.query"}),
        notes={
            "block_size": "n_layers_per_attn_res_block of its configuration counts layers, which have two sites each"
        },
    ),
    "qwen4-exp": Source(
        "gated_streams",
        {
            f"{site}.{ours}": re.escape(f"{site}_hyper_connection.{theirs}")
            for site in ("attn", "mlp")
            for ours, theirs in _QWEN.items()
        },
        {ours: re.escape(f"hyper_connection_mixer.{theirs}") for ours, theirs in _QWEN.items() if ours != "inject"},
        _qwen,
        lambda c: {"n": c["hc_count"], "rank": c["hc_lowrank"], "eps": c["rms_norm_eps"]},
    ),
    "mhc-lite": Source(
        "mhc",
        {f"{ours}.{end}": re.escape(f"hc_{ours}.{end}") for ours in ("attn", "mlp") for end in _MHC_LITE},
        {},
        _mhc_lite,
        None,
    ),
}
MODEL_TYPES = {
    "deepseek_v4": "deepseek-v4",
    "glm5_next": "glm-5-next",
    "glm5_next_text": "glm-5-next",
    "hy_v4": "hunyuan-v4",
    "inkling2": "inkling-2",
    "inkling2_text": "inkling-2",
    "qwen4_exp": "qwen4-exp",
    "qwen4_exp_text": "qwen4-exp",
}
FIELDS = {"attn_res_block_size": "kimi-k3", "attnres_block_size": "flash-linear-attention"}


def text_config(config: Config) -> Config:
    """Return the part of a configuration that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def source_of(config: Config) -> str:
    """Return the name in `SOURCES` of the model that a configuration describes; OptionError if there is none."""
    text = text_config(config)
    named = [MODEL_TYPES[c["model_type"]] for c in (config, text) if c.get("model_type") in MODEL_TYPES]
    named += [source for field, source in FIELDS.items() if text.get(field)]
    if not named:
        kinds = ", ".join([*MODEL_TYPES, *(f"models with {field}" for field in FIELDS)])
        raise OptionError(
            f"a model of type {config.get('model_type')!r} has no mixing over depth that is known; known are {kinds}"
        )
    return named[0]


class Found(NamedTuple):
    """Names of the tensors of a published model's mixing."""

    source: str
    stack: str  # name of the list of layers
    layers: dict[int, dict[str, str]]  # by layer: our short names and the tensors' names
    head: dict[str, str]

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return [name for part in (*self.layers.values(), self.head) for name in part.values()]


def find_names(
    source: str,
    names: Sequence[str],
    layers: Sequence[int] | None = None,
    prefix: str = "",
    n_layers: int | None = None,
) -> Found:
    """Find the tensors of a model's mixing by their names.

    Args:
        source: One of `SOURCES`.
        names: Names of tensors, as in a file or as in memory. Others are ignored.
        layers: The layers to take, one after the other; by default all of them.
        prefix: What the names begin with, such as "mtp.0." for a layer that predicts a further token.
        n_layers: Layers of the model, by its configuration. Layers above predict further tokens.

    Returns:
        The names of the chosen layers' tensors and of the head's.

    Raises:
        OptionError: An unknown source, no such tensors, or a missing one.
    """
    if source not in SOURCES:
        raise OptionError(f"unknown source {source!r}; there are {', '.join(SOURCES)}")
    described = SOURCES[source]
    prefix = prefix if not prefix or prefix.endswith(".") else f"{prefix}."
    in_layer, in_head = (_pattern(ends) for ends in (described.layer, described.head))
    lists: dict[str, dict[int, dict[str, str]]] = {}
    heads: dict[str, dict[str, str]] = {}
    for name in names:
        if not name.startswith(prefix):
            continue
        rest = name[len(prefix) :]
        rest = rest if described.rename is None else described.rename(rest)
        if (match := in_layer.fullmatch(rest)) is not None:
            place = re.fullmatch(r"(.*?)\.?(\d+)", match["place"] or "")
            # With a prefix, one layer may have no number.
            where, number = (place[1], int(place[2])) if place else (match["place"] or "", 0)
            lists.setdefault(where, {}).setdefault(number, {})[_which(described.layer, match)] = name
        elif described.head and (match := in_head.fullmatch(rest)) is not None:
            heads.setdefault(match["place"] or "", {})[_which(described.head, match)] = name
    where = _one_list(source, lists, prefix)
    found = lists[where]
    chosen = _chosen(source, found, layers, None if prefix else n_layers)
    for number in chosen:
        required = {end: theirs for end, theirs in described.layer.items() if end not in described.optional}
        _require(source, required, found[number], f"layer {number}")
    own = f"{where}.{chosen[0]}"
    head = heads.get(own if FURTHER_TOKENS.search(own) else where.rpartition(".")[0], {})
    if head:
        _require(source, described.head, head, "the head")
    return Found(source, prefix + where, {number: found[number] for number in chosen}, head)


def _pattern(ends: Mapping[str, str]) -> re.Pattern[str]:
    return re.compile(r"(?:(?P<place>.*)\.)?(?:" + "|".join(f"({end})" for end in ends.values()) + ")")


def _which(ends: Mapping[str, str], match: re.Match[str]) -> str:
    return list(ends)[next(i for i in range(len(ends)) if match[i + 2] is not None)]


def _one_list(source: str, lists: Mapping[str, Any], prefix: str) -> str:
    """Return the name of the list of layers; OptionError unless there is one."""
    stacks = [where for where in lists if not FURTHER_TOKENS.search(f"{where}.")] or list(lists)
    if len(stacks) == 1:
        return stacks[0]
    if stacks:
        raise OptionError(f"{source}: there are layers in {' and in '.join(sorted(stacks))}; say which with prefix=")
    examples = " or ".join(end.replace("\\", "") for end in next(iter(SOURCES[source].layer.values())).split("|"))
    below = f" below {prefix!r}" if prefix else ""
    raise OptionError(f"{source}: no tensor of its mixing is among these names{below}: none ends in {examples}")


def _chosen(source: str, found: Mapping[int, Any], layers: Sequence[int] | None, n_layers: int | None) -> list[int]:
    """Return the numbers of the chosen layers, which follow one another."""
    first, last = min(found), max(found)
    there = f"{first} to {last}" if last > first else str(first)
    if layers is None and n_layers is not None and not found.keys() >= set(range(n_layers)):
        what = f"its configuration has {n_layers} layers, and these tensors are of layers {there}"
        raise OptionError(f"{source}: {what}; choose some with layers=range({first}, {last + 1})")
    everything = range(n_layers) if n_layers is not None else range(first, last + 1)
    wanted = list(everything if layers is None else layers)
    if not wanted or wanted != list(range(wanted[0], wanted[0] + len(wanted))):
        raise OptionError(f"{source}: layers are numbers that follow one another, got {wanted}")
    for number in wanted:
        if number not in found:
            raise OptionError(f"{source}: layer {number} is not among these tensors, which are of layers {there}")
    return wanted


def _require(source: str, ends: Mapping[str, str], found: Mapping[str, str], where: str) -> None:
    for end, theirs in ends.items():
        if end not in found:
            other = next(iter(found.values()))
            names = " or ".join(name.replace("\\", "") for name in theirs.split("|"))
            raise OptionError(f"{source}: {where} has {other} and no {names}")


def meta_mixer(source: str, config: Config, layers: Sequence[int], has_head: bool = True) -> Mixer:
    """Return the mixer of a published model on the meta device, with the options of its configuration.

    Args:
        source: One of `SOURCES`.
        config: The content of the model's config.json.
        layers: The layers that it is for, which follow one another.
        has_head: Whether the learned weights of the last read are there. Without them an mHC ends with the mean of its streams.
    """
    text, described = text_config(config), SOURCES[source]
    if described.options is None:
        raise OptionError(f"{source}: the fields of its configurations are not known; leave the configuration out")
    try:
        options = described.options(text)
        dim = text["hidden_size"]
    except KeyError as error:
        raise OptionError(f"{source}: its configuration has no {error.args[0]}") from None
    except OptionError as error:
        raise OptionError(f"{source}: {error}") from None
    if options.get("head") == "learned" and not has_head:
        options["head"] = "mean"
    of_block = options.get("block_size", 1)
    if 2 * layers[0] % of_block:
        begins = f"layer {layers[0]} is inside a block of {of_block // 2} layers"
        raise OptionError(f"{source}: {begins}; begin with layer {2 * layers[0] // of_block * of_block // 2}")
    with torch.device("meta"):
        return create_mixer(described.rule, dim=dim, n_blocks=len(layers), **options)


def published_weights(
    source: str,
    state: State,
    *,
    config: Config | None = None,
    layers: Sequence[int] | None = None,
    prefix: str = "",
) -> dict[str, Tensor]:
    """Return the parameters of our mixer, in fp32, from the tensors of a published model.

    Args:
        source: One of `SOURCES`.
        state: The model's tensors, by their names in files or in memory. Others are ignored.
        config: The content of its config.json. With it, a mixer with other options refuses the weights. Attention Residuals need
            it, because no tensor says how many layers a block has.
        layers: The layers to take, such as range(24, 28); by default all of them.
        prefix: What the names begin with, such as "mtp.0." for a layer that predicts a further token.

    Returns:
        A state dict. Without a head among the tensors, it has no weights of one, and attnres ends with the mean of its sources.

    Raises:
        OptionError: An unknown source, a missing tensor, or one of another shape than the configuration says.

    Examples:
        >>> mixer.load_state_dict(published_weights("deepseek-v4", model.state_dict()))
    """
    n_layers = None if config is None else text_config(config).get("num_hidden_layers")
    found = find_names(source, list(state), layers, prefix, n_layers)
    described = SOURCES[source]
    if config is None and described.needs_config:
        what = "its tensors do not say how many layers a block has"
        raise OptionError(f"{source}: {what}; pass the content of its config.json as config=")
    parts = Parts(*_read(source, found, state))
    weights = described.convert(parts)
    if config is None:
        return {**weights, KEY: silent_entry()}
    mixer = meta_mixer(source, config, list(found.layers), bool(found.head))
    for name, parameter in mixer.named_parameters():
        if weights[name].shape != parameter.shape:
            what = f"{list(weights[name].shape)} of {name}, and its configuration makes that {list(parameter.shape)}"
            raise OptionError(f"{source}: the tensors have the shape {what}")
    return {**weights, KEY: named_entry(mixer, described.notes)}


def _read(source: str, found: Found, state: State) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the tensors of every layer and of the head, in fp32."""

    def wide(name: str) -> Tensor:
        tensor = state[name]
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise OptionError(f"{source}: {name} is stored as {kind}: dequantise it first")
        return tensor.float()

    return (
        [{end: wide(name) for end, name in layer.items()} for layer in found.layers.values()],
        {end: wide(name) for end, name in found.head.items()},
    )
