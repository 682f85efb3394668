"""Give a pretrained Hugging Face decoder another rule for mixing over depth: the same weights, the same logits at step 0.

The state of the mixer takes the place of the hidden states that one layer hands to the next: the first layer starts it, every
layer reads and writes it, the final norm finishes it. Only this model changes: its layers get a subclass of their class whose
forward does that, and everything else (cache, masks, rotary positions, generation, checkpointing, adapters) stays as it is.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.errors import UserError
from depthmix.hf.architectures import ARCHITECTURES, PREFIX, Architecture, Site, why_not
from depthmix.hf.rounding import warn_if_rounded
from depthmix.mixers.base import Mixer, create_mixer
from depthmix.mixers.state import State

MIXER, NORMS, OURS = "depth_mixer", "depth_norms", "_depthmix"  # modules of the base model, and what a layer knows
PROBE = 8  # tokens with which logits are compared


def retrofit(model: Any, mixer: str, *, quiet: bool = False, **options: Any) -> Any:
    """Make a decoder mix over depth by a rule, in place; prints by how much its logits changed, which for most rules is rounding.

    options: of the mixer. The model keeps its methods and weights, its class becomes a subclass that saves and loads the mixer;
    `depth_mixer` is a module of its base model and is trained with it. `restore` undoes it.
    """
    if _is_retrofitted(model):
        raise UserError("this model is retrofitted already; depthmix.restore(model) undoes that")
    given = [name for name in ("dim", "n_blocks", "sites") if name in options]
    if given:
        raise UserError(f"cannot retrofit: {given[0]} is the model's own and not to be given")
    reason = why_not(model)
    if reason is not None:
        raise UserError(f"cannot retrofit: {reason}")
    before = None if quiet or _place(model)[0].type == "meta" else _logits(model)  # without weights there are none
    install(model, mixer, options)
    _rename(model)
    device, dtype = _place(model)
    getattr(model.base_model, MIXER).to(device)
    norms = getattr(model.base_model, NORMS, None)
    if norms is not None:
        norms.to(device, dtype)
    if before is not None:
        after = _logits(model)
        change = ((after - before).abs().max() / before.abs().max()).item()
        print(f"{mixer}: the logits changed by {change:.1e} of the largest")
    return model


def restore(model: Any) -> Any:
    """Undo `retrofit`: the model adds up its sublayers' outputs again. What the mixer learned is dropped."""
    if not _is_retrofitted(model):
        raise UserError("this model is not retrofitted")
    base = model.base_model
    for module in _patched(base, ARCHITECTURES[_plain_type(model.config)]):
        module.__class__ = type(module).__mro__[2]
        del module.__dict__[OURS]
    for name in (MIXER, NORMS):
        if hasattr(base, name):
            delattr(base, name)
    model.__class__, model.config.__class__ = (type(x).__bases__[-1] for x in (model, model.config))
    del model.config.depthmix
    vars(model.config).pop("auto_map", None)
    return model


def install(model: Any, mixer: str, options: dict[str, Any]) -> None:
    """Put a mixer in, with its initial parameters."""
    base, found = model.base_model, ARCHITECTURES[_plain_type(model.config)]
    layers: Any = getattr(base, found.layers)
    dim = model.get_input_embeddings().weight.shape[1]
    own = create_mixer(mixer, dim=dim, n_blocks=len(layers), **options)
    several = [site for site in range(own.n_sites) if own.ways(site) > 1]
    base.add_module(MIXER, own)
    if several:
        norms = nn.ModuleDict()
        for site in several:
            norm = getattr(layers[site // 2], found.sites[0].norm)
            norms[str(site)] = nn.ModuleList(copy.deepcopy(norm) for _ in range(own.ways(site) - 1))
        base.add_module(NORMS, norms)
    model.config.depthmix = {"mixer": mixer, "options": dict(options)}
    for i, layer in enumerate(layers):
        layer.__dict__[OURS] = (base, i, found)
        layer.__class__ = _mixed(_class(layer), MixedLayer)
    norm = getattr(base, found.final_norm)
    norm.__dict__[OURS] = (base,)
    norm.__class__ = _mixed(_class(norm), FinishingNorm)


def _patched(base: Any, found: Architecture) -> list[Any]:
    return [*getattr(base, found.layers), getattr(base, found.final_norm)]


def _class(x: Any) -> Any:
    """Its class, which to mypy is not hashable."""
    return type(x)


def _is_retrofitted(model: Any) -> bool:
    return getattr(getattr(model, "config", None), "depthmix", None) is not None


def _plain_type(config: Any) -> str:
    return str(config.model_type).removeprefix(PREFIX)


def _rename(model: Any) -> None:
    """Give the model and its configuration the classes that save and load it with its mixer."""
    from depthmix.hf.retrofitted import config_class, model_class, register_models

    register_models(_class(model.config))
    model.__class__, model.config.__class__ = model_class(_class(model)), config_class(_class(model.config))


@functools.cache
def _mixed(cls: type[nn.Module], way: type) -> type[nn.Module]:
    """The class with another forward; tools that look for layers by the name of their class still find them."""
    return type(cls.__name__, (way, cls), {"__module__": cls.__module__})


class MixedLayer:
    """A decoder layer that reads and writes the mixer's state in place of the hidden states."""

    def forward(self, hidden_states: Tensor | State, *args: Any, **kwargs: Any) -> State:
        base, i, found = self.__dict__[OURS]
        # Looked up: an adapter may have put a copy in its place.
        own, norms = getattr(base, MIXER), getattr(base, NORMS, {})
        if isinstance(hidden_states, State):
            state = hidden_states
        else:
            warn_if_rounded(own)
            state = own.start(hidden_states)
        given = _by_name(type(self).__mro__[2].forward, args, kwargs)  # type: ignore[attr-defined]
        for k, site in enumerate(found.sites):
            number = len(found.sites) * i + k
            some = [getattr(self, site.norm), *(norms[str(number)] if str(number) in norms else [])]  # noqa: SIM401 (modules)
            share = own.plain_share(number)
            h = own.read(state, number, [scaled(norm, share) for norm in some])
            state = own.write(state, number, _sublayer(self, site, found, h, given))
        return state


class FinishingNorm:
    """The final norm, of what the mixer makes of its state."""

    def forward(self, hidden_states: Tensor | State) -> Tensor:
        if isinstance(hidden_states, State):
            own = getattr(self.__dict__[OURS][0], MIXER)
            share = own.plain_share(own.n_sites)
            hidden_states = own.finish(hidden_states)
            hidden_states = hidden_states if share in (None, 1.0) else hidden_states / share
        return super().forward(hidden_states)  # type: ignore[misc]


def scaled(norm: Any, share: float | None) -> Any:
    """A norm of reads that begin as a share of the plain stream: of the whole stream, so that its eps means the same."""
    return norm if share is None or share == 1.0 else lambda h: norm(h / share)


def _by_name(forward: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a layer was called with besides hidden states, by name."""
    names = [p for p in inspect.signature(forward).parameters if p not in ("self", "hidden_states")]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _sublayer(layer: Any, site: Site, found: Architecture, h: Any, given: dict[str, Any]) -> Tensor:
    module = getattr(layer, site.sublayer)
    if not site.attention:
        y = module(h)
    elif isinstance(h, tuple):
        queries, *others = h
        with _inputs(module, found, [queries, *others] if len(h) == 3 else [queries, queries, *others]):
            y = module(queries, **given)
    else:
        y = module(h, **given)
    y = y[0] if isinstance(y, tuple) else y
    for name in site.after:
        y = getattr(layer, name)(y)
    return y


@contextmanager
def _inputs(attention: Any, found: Architecture, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inputs of their own for the projections of an attention, whatever it hands to them."""

    def before(tensor: Tensor) -> Any:
        return lambda module, args: (tensor, *args[1:])

    def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """One projection for all three: what each of them is of its own input."""
        whole = [output, *(module.forward(t) for t in tensors[1:])]
        if not found.by_head:
            return torch.cat([out.chunk(3, -1)[k] for k, out in enumerate(whole)], dim=-1)
        parts = [out.unflatten(-1, (-1, 3 * attention.head_size)).chunk(3, -1)[k] for k, out in enumerate(whole)]
        return torch.cat(parts, dim=-1).flatten(-2)

    modules = [getattr(attention, name) for name in found.projections]
    if len(modules) == 1:
        handles = [modules[0].register_forward_hook(after)]
    else:
        handles = [m.register_forward_pre_hook(before(t)) for m, t in zip(modules, tensors, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _place(model: Any) -> tuple[torch.device, torch.dtype]:
    weight = model.get_input_embeddings().weight
    return weight.device, weight.dtype


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    """Of a few tokens, as an evaluation would have them."""
    weight = model.get_input_embeddings().weight
    ids = torch.randint(len(weight), (1, PROBE), generator=torch.Generator().manual_seed(0)).to(weight.device)
    training = model.training
    model.eval()
    try:
        out = model(input_ids=ids)
    finally:
        model.train(training)
    return (out.logits if hasattr(out, "logits") else out.last_hidden_state).float()


def mixer_of(model: Any) -> Mixer:
    """The mixer of a retrofitted model, or of one of depthmix."""
    base = getattr(model, "base_model", None)
    found = getattr(base, MIXER, getattr(base, "mixer", None))
    if not isinstance(found, Mixer):
        raise UserError("this model is not retrofitted: it has no mixer")
    return found
