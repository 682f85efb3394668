"""Give a pretrained Hugging Face decoder another rule for mixing over depth: the same weights, the same logits at step 0.

The layers pass the mixer's state on instead of hidden states: the first layer starts it, every layer reads and writes it, and the
final norm finishes it. The layers of this model get a subclass of their class with such a forward. Everything else (cache, masks,
rotary positions, generation, checkpointing, adapters) is unchanged. This package's own decoder, which already has a mixer, gets
another mixer.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.errors import CHECKPOINT, UserError
from depthmix.hf.accelerated.accelerate import is_accelerated, restore_plain
from depthmix.hf.architectures import Site, architecture, why_not
from depthmix.hf.carried import CarriesCode
from depthmix.hf.depth_weights import ASKED, RECORD, Record, asked_for, with_weights
from depthmix.hf.modeling import DepthmixPreTrainedModel
from depthmix.hf.placement import bring_back, to_mixer, warn_if_rounded
from depthmix.hf.separate_inputs import OURS, SeparateInputs
from depthmix.mixers.base import Mixer
from depthmix.mixers.initial_share import initial_shares
from depthmix.mixers.plain import is_plain, why_not_plain
from depthmix.mixers.registry import create_mixer
from depthmix.mixers.state import State

MIXER, NORMS = "depth_mixer", "depth_norms"  # modules of the base model
FROM = "retrofitted_from"  # field of a retrofitted DepthmixConfig: the mixer's fields before
WANTED = "depthmix_gradients"  # argument of the layers: whether the caller of the model wants gradients
CAME_FROM = "_depthmix_came_from"  # attribute of the model: the folder of the plain model
PROBE = 8  # tokens for comparing logits
# Largest change of logits by rounding, relative to the largest logit, in fp32 and in half precision.
ROUNDING, HALF_ROUNDING = 1e-2, 0.2


def retrofit(model: Any, mixer: str, *, quiet: bool = False, **options: Any) -> Any:
    """Give a decoder a rule for mixing over depth, in place, and print by how much rounding changed its logits.

    The model keeps its methods and weights. Its class becomes a subclass that saves and loads the mixer, which is the
    module `depth_mixer` of its base model and is trained with it. The model gets its own copy of the configuration.
    Pass the whole model, not its base model: the configuration of the whole model has to change, too.

    Args:
        model: A Hugging Face model, or this package's decoder as one.
        mixer: Name of the rule.
        quiet: Print nothing.
        options: Options of the rule.

    Returns:
        The model. `restore` undoes the change.

    Raises:
        UserError: The architecture is not supported, or the rule does not start as plain residuals.

    Examples:
        >>> model = retrofit(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"), "attnres", block_size=4)
        attnres: the logits changed by 2.1e-07 of the largest
    """
    if _is_retrofitted(model):
        raise UserError("this model is retrofitted already; depthmix.restore(model) undoes that")
    given = [name for name in ("dim", "n_blocks", "sites") if name in options]
    if given:
        raise UserError(f"cannot retrofit: the model decides {given[0]}; leave it out")
    is_ours = isinstance(model, DepthmixPreTrainedModel)
    reason = _why_not_own(model) if is_ours else why_not(model)
    if reason is None:
        rule = _on_meta(model, mixer, options)
        reason = why_not_plain(rule) or (None if is_ours else _why_not_apart(model, rule))
    if reason is not None:
        raise UserError(f"cannot retrofit: {reason}")
    before = (
        None if quiet or _place(model)[0].type == "meta" else _logits(model)
    )  # a model without weights has no logits
    if before is not None and before.isnan().any():
        what = "the logits of this model are not numbers (NaN), so its weights are not usable"
        raise UserError(f"cannot retrofit: {what}", CHECKPOINT)
    came_from = model.config.name_or_path
    if is_ours:
        plain = {name: getattr(model.config, name) for name in ("mixer", "mixer_options", "plain_eps")}
        _change_own(model, {"mixer": mixer, "mixer_options": dict(options), "plain_eps": True})
        setattr(model.config, FROM, plain)
    else:
        _own_config(model)
        install(model, mixer, options)
        _rename(model)
        device, dtype = _place(model)
        getattr(model.base_model, MIXER).to(device)
        norms = getattr(model.base_model, NORMS, None)
        if norms is not None:
            norms.to(device, dtype)
    # The retrofitted model is not saved yet. If it kept the plain model's folder as its name, its adapters would be loaded onto
    # the plain model. The configuration keeps naming that folder: trainers look there for the tokenizer and for a reference model,
    # and the plain model's logits are those of step 0.
    model.__dict__[CAME_FROM] = came_from
    model.name_or_path = ""
    if before is not None:
        after = _logits(model)
        change = ((after - before).abs().max() / before.abs().max().clamp(min=1e-30)).item()
        if not change <= (ROUNDING if _place(model)[1].itemsize > 2 else HALF_ROUNDING):
            restore(model)
            what = f"{mixer} does not begin as the plain residual in this model, though a narrow copy of it does"
            raise UserError(f"cannot retrofit: {what}: the logits changed by {change:.1e} of the largest")
        print(f"{mixer}: the logits changed by {change:.1e} of the largest")
    return model


def restore(model: Any) -> Any:
    """Undo `retrofit` or `accelerate`, in place.

    A retrofitted model adds its sublayers' outputs again, and the mixer's parameters are dropped. An accelerated model runs
    transformers' own code again.

    Args:
        model: A retrofitted or accelerated model.

    Returns:
        The model.

    Raises:
        UserError: The model is neither.
    """
    if is_accelerated(model):
        return restore_plain(model)
    if not _is_retrofitted(model):
        raise UserError("this model is not retrofitted: there is nothing to undo")
    if isinstance(model, DepthmixPreTrainedModel):
        _change_own(model, getattr(model.config, FROM))
        delattr(model.config, FROM)
        _say_where(model, model.__dict__.pop(CAME_FROM, ""))
        return model
    if not issubclass(_class(model).config_class, CarriesCode):
        raise UserError(
            "this model shares modules with a retrofitted model but was not retrofitted itself: restore the other model"
        )
    base = model.base_model
    for hooks in (base._forward_pre_hooks, base._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in (_before, _after)]:
            del hooks[key]
    for module in base.modules():
        if OURS in vars(module):
            module.__class__ = module.plain_class
            del module.__dict__[OURS]
    for name in (MIXER, NORMS):
        if hasattr(base, name):
            delattr(base, name)
    config = _own_config(model)
    model.__class__, config.__class__ = (type(x).__bases__[-1] for x in (model, config))
    del config.depthmix
    vars(config).pop("auto_map", None)
    _say_where(model, model.__dict__.pop(CAME_FROM, ""))
    if config.architectures:  # set if the retrofitted model was loaded from a folder
        config.architectures = [type(model).__name__]
    return model


def install(model: Any, mixer: str, options: dict[str, Any]) -> None:
    """Put a mixer in, with its initial parameters."""
    base, structure = model.base_model, architecture(model.config)
    layers: Any = getattr(base, structure.layers)
    rule = _create(model, mixer, options)
    several = [site for site in range(rule.n_sites) if rule.ways(site) > 1]
    rule.variant_elsewhere = True  # in config.depthmix
    initial_shares(rule)  # measured and cached now, so that compiling the forward does not trace the measurement
    base.add_module(MIXER, rule)
    if several:
        norms = nn.ModuleDict()
        for site in several:
            norm = getattr(layers[rule.layout.block[site]], structure.sites[0].norm)
            norms[str(site)] = nn.ModuleList(copy.deepcopy(norm) for _ in range(rule.ways(site) - 1))
        base.add_module(NORMS, norms)
    model.config.depthmix = {"mixer": mixer, "options": dict(options)}
    for i, layer in enumerate(layers):
        layer.__dict__[OURS] = (base, i, structure)
        layer.__class__ = _mixed(_class(layer), MixedLayer)
    for site in several:
        for attention in (getattr(layers[rule.layout.block[site]], s.sublayer) for s in structure.sites if s.attention):
            attention.__dict__[OURS] = (structure,)
            attention.__class__ = _mixed(_class(attention), SeparateInputs)
    norm = getattr(base, structure.final_norm)
    norm.__dict__[OURS] = (base,)
    norm.__class__ = _mixed(_class(norm), FinishingNorm)
    base.register_forward_pre_hook(_before, with_kwargs=True)
    base.register_forward_hook(_after, with_kwargs=True)


def _create(model: Any, mixer: str, options: dict[str, Any]) -> Mixer:
    structure = architecture(model.config)
    layout = structure.layout(len(getattr(model.base_model, structure.layers)))
    return create_mixer(mixer, dim=model.get_input_embeddings().weight.shape[1], **layout, **options)


def _on_meta(model: Any, mixer: str, options: dict[str, Any]) -> Mixer:
    """Create the model's mixer on the meta device. Raises OptionError if the model cannot have it."""
    with torch.device("meta"):
        if not isinstance(model, DepthmixPreTrainedModel):
            return _create(model, mixer, options)
        c = model.config.decoder_config()
        return create_mixer(mixer, dim=c.dim, n_blocks=c.n_blocks, **options)


def _why_not_apart(model: Any, rule: Mixer) -> str | None:
    """Explain why a model cannot have a rule whose queries, keys and values read apart; None if it can."""
    if architecture(model.config).projections or all(rule.ways(site) == 1 for site in range(rule.n_sites)):
        return None
    what = "has no projections of queries, keys and values that could read apart"
    return f"{model.config.model_type} {what}: choose a rule, or options, with one way"


def _why_not_own(model: Any) -> str | None:
    current = model.base_model.mixer
    return (
        None
        if is_plain(current)
        else f"this model was trained with {current.name}, and only plain residuals can be replaced"
    )


def _change_own(model: Any, fields: dict[str, Any]) -> None:
    """Change the mixer of this package's decoder."""
    config = _own_config(model)
    for name, value in fields.items():
        setattr(config, name, value)
    model.base_model.change_mixer(config.decoder_config())


def _say_where(model: Any, folder: str) -> None:
    """Set the attributes that name the folder of a model."""
    model.name_or_path = model.config.name_or_path = folder


def _own_config(model: Any) -> Any:
    """Give the model and its modules a copy of the configuration, which other models may share; returns the copy."""
    old, copied = model.config, copy.deepcopy(model.config)
    for module in model.modules():
        for name in [name for name, value in vars(module).items() if value is old]:
            setattr(module, name, copied)
    return copied


def _class(x: Any) -> Any:
    """Return the class, as Any, because mypy does not consider it hashable."""
    return type(x)


def _is_retrofitted(model: Any) -> bool:
    """Tell whether `retrofit` changed the model, by attributes that only `retrofit` sets. The rule alone would not tell,
    since a model may be trained with any rule.
    """
    if isinstance(model, DepthmixPreTrainedModel):
        return getattr(model.config, FROM, None) is not None
    return hasattr(getattr(model, "base_model", None), MIXER)


def _rename(model: Any) -> None:
    """Give the model and its configuration the classes that save and load it with its mixer."""
    from depthmix.hf.retrofitted import config_class, model_class, register_models

    register_models(_class(model.config))
    model.__class__, model.config.__class__ = model_class(_class(model)), config_class(_class(model.config))


@functools.cache
def _mixed(cls: type[nn.Module], way: type) -> type[nn.Module]:
    """Make a subclass with another forward and the same name, because tools find layers by their class names."""

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        """Pickle through the plain class, which pickle would find under this name."""
        return _empty, (cls, way), self.__getstate__()

    body = {"__module__": cls.__module__, "__reduce_ex__": __reduce_ex__, "plain_class": cls}
    return type(cls.__name__, (way, cls), body)


def _empty(cls: Any, way: type) -> nn.Module:
    subclass = _mixed(cls, way)
    return subclass.__new__(subclass)


class MixedLayer:
    """A decoder layer that reads and writes the mixer's state in place of the hidden states."""

    plain_class: Any  # the layer's class before

    def forward(self, hidden_states: Tensor | State, *args: Any, **kwargs: Any) -> State:
        base, i, structure = self.__dict__[OURS]
        given = _by_name(self.plain_class.forward, args, kwargs)
        _refuse_reentrant(self, given.pop(WANTED, False))
        record: Record | None = given.pop(RECORD, None)
        # Looked up in each call, because an adapter may have replaced the mixer by a copy.
        mixer, norms = getattr(base, MIXER), getattr(base, NORMS, {})
        shares = initial_shares(mixer)
        if isinstance(hidden_states, State):
            state = hidden_states
        else:
            warn_if_rounded(mixer)
            embedding = to_mixer(mixer, hidden_states)
            state = mixer.start(embedding)
            if record is not None:
                record.add(embedding)

        def norms_at(number: int, site: Site) -> list[Any]:
            """Return one norm for each way of a site."""
            added = norms[str(number)] if str(number) in norms else []  # noqa: SIM401 (modules)
            share = shares[number]
            return [scaled(norm, share) for norm in (getattr(self, site.norm), *added)]

        if structure.parallel:
            h = mixer.read(state, i)
            ways = h if isinstance(h, tuple) else (h,)
            total: Any = None
            for site in structure.sites:  # sublayers other than attention read the first way, the queries'
                some = norms_at(i, site)[: len(ways) if site.attention else 1]
                inputs = tuple(norm(t) for norm, t in zip(some, ways, strict=False))
                y = _sublayer(self, site, inputs if len(inputs) > 1 else inputs[0], given)
                total = y if total is None else y + total
            return _write(mixer, state, i, total, record)
        for k, site in enumerate(structure.sites):
            number = len(structure.sites) * i + k
            h = mixer.read(state, number, norms_at(number, site))
            state = _write(mixer, state, number, _sublayer(self, site, h, given), record)
        return state


def _write(mixer: Mixer, state: Any, site: int, y: Tensor, record: Record | None) -> Any:
    """Write a sublayer's output, and add it to the record, if any.

    Under autocast the stream is in fp32 but outputs are not. They are widened, as an addition would, so that kernels see one dtype.
    """
    stream = state.template()
    y = y.to(stream.device, torch.promote_types(y.dtype, stream.dtype))
    if record is not None:
        record.add(y)
    return mixer.write(state, site, y)


class FinishingNorm:
    """The final norm, applied to the mixer's finished state."""

    def forward(self, hidden_states: Tensor | State) -> Tensor:
        if isinstance(hidden_states, State):
            h = _next_read(getattr(self.__dict__[OURS][0], MIXER), hidden_states)
            hidden_states = h.to(next(self.parameters(), h).device)  # type: ignore[attr-defined]
        return super().forward(hidden_states)  # type: ignore[misc]


def _next_read(mixer: Mixer, state: State) -> Tensor:
    """Return what the next site (or finish) reads, before its norm; of several ways, the first. At step 0 this is the
    plain stream.
    """
    h = mixer.finish(state) if state.site == mixer.n_sites else mixer.read(state, state.site)
    share = initial_shares(mixer)[state.site]
    h = h[0] if isinstance(h, tuple) else h
    return h if share is None or share == 1.0 else h / share


def _before(base: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass the data of this call to the layers; a hook of the base model.

    The data are the record of depth weights, and whether the caller wants gradients, which a layer in a reentrant checkpoint
    cannot see.
    """
    bring_back(getattr(base, MIXER))
    asked = asked_for(kwargs.pop(ASKED, None), base.config)
    record = kwargs.pop(RECORD, None) or (Record() if asked else None)
    return args, {**kwargs, WANTED: torch.is_grad_enabled(), **({} if record is None else {RECORD: record})}


def _refuse_reentrant(layer: Any, wanted: bool) -> None:
    """Refuse a reentrant checkpoint around a layer, which would lose gradients.

    Such a checkpoint runs the layer without gradients and takes gradients from the tensors that the layer returns, but it does
    not see the tensors in a state.

    Args:
        layer: The layer.
        wanted: Whether the model's caller wants gradients; False if the layer is called on its own.

    Raises:
        UserError: Gradients would be lost.
    """
    if wanted and layer.training and not torch.is_grad_enabled():
        advice = "give gradient_checkpointing_kwargs={'use_reentrant': False}, which is exact"
        raise UserError(f"reentrant gradient checkpointing would lose the gradients of a retrofitted model: {advice}")


def _after(base: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Convert a model's outputs: replace states among the hidden states by what each layer reads, and add depth
    weights. A hook of the base model.
    """
    mixer = getattr(base, MIXER)
    record: Record | None = kwargs.get(RECORD)
    if record is not None:
        record.close(mixer)

    def readable(value: Any) -> Any:
        if not isinstance(value, tuple) or not any(isinstance(x, State) for x in value):
            return value
        return tuple(_next_read(mixer, x) if isinstance(x, State) else x for x in value)

    if isinstance(output, tuple):
        output = tuple(map(readable, output))
    elif getattr(output, "hidden_states", None) is not None:
        output.hidden_states = readable(output.hidden_states)
    return output if record is None else with_weights(output, record.weights)


def scaled(norm: Any, share: float | None) -> Any:
    """Scale a norm's input by 1 / share, for reads that start as a share of the plain stream, so that the norm's eps
    keeps its meaning.
    """
    return norm if share is None or share == 1.0 else lambda h: norm(h / share)


def _by_name(forward: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Map a layer's arguments other than the hidden states to their names."""
    names = [p for p in inspect.signature(forward).parameters if p not in ("self", "hidden_states")]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _sublayer(layer: Any, site: Site, h: Any, given: dict[str, Any]) -> Tensor:
    """Return a sublayer's output [B, T, D]. `h` is its input, or a tuple of inputs for an attention (`SeparateInputs`)."""
    module = getattr(layer, site.sublayer)
    y = module(h, **given) if site.attention else module(h)
    y = y[0] if isinstance(y, tuple) else y
    for name in site.after:
        y = getattr(layer, name)(y)
    return y


def _place(model: Any) -> tuple[torch.device, torch.dtype]:
    weight = model.get_input_embeddings().weight
    return weight.device, weight.dtype


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    """Compute the logits of a few random tokens in eval mode."""
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
    """Return the mixer of a retrofitted model, or of one of depthmix. Raises UserError for any other model."""
    base = getattr(model, "base_model", None)
    mixer = getattr(base, MIXER, getattr(base, "mixer", None))
    if not isinstance(mixer, Mixer):
        raise UserError("this model is not retrofitted: it has no mixer")
    return mixer
