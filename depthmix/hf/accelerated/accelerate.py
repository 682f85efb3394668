"""Let a model of transformers that mixes over depth run on this package's operators, in place, and undo that.

The layers of this instance get a subclass of their class with another forward, from the file of their family. Names, weights and
configuration stay as they are, and so does everything around a layer: caches, hooks, gradient checkpointing, adapters inside.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

from torch import nn

from depthmix.errors import UserError
from depthmix.hf.accelerated.check import largest_difference
from depthmix.hf.accelerated.family import Family
from depthmix.ops.backend import why_no_kernels

# Classes of layers, and the file of their family: here and, with another prefix, in transformers.
FAMILIES = {
    "DeepseekV4DecoderLayer": "deepseek_v4",
    "Glm5NextTextDecoderLayer": "glm5_next",
    "HYV4DecoderLayer": "hy_v4",
    "Inkling2SlidingDecoderLayer": "inkling2",
    "Inkling2FullDecoderLayer": "inkling2",
    "Qwen4ExpTextDecoderLayer": "qwen4_exp",
}
TOLERANCE = 1e-3  # of the norm of an output or a gradient: rounding stays far below, another rule far above


def accelerate(model: Any, check: bool = True, *, quiet: bool = False) -> Any:
    """Make a model that already mixes over depth run that mixing on depthmix's kernels, in place.

    DeepSeek-V4, GLM-5-Next, Hunyuan V4, Inkling 2 and Qwen4-Exp are known. Outputs and gradients are those of the model up to
    rounding. Call this before a model is sharded by FSDP2; adapters, `device_map` and `torch.compile` may come before or after.

    Args:
        model: A model of transformers, or a module that contains one, such as a PEFT model.
        check: Whether to compare each layer's mixing with that of transformers first, on a few random tokens on the CPU.
        quiet: Whether to print nothing.

    Returns:
        The model. `restore` undoes the change.

    Raises:
        UserError: The model has no layers of a known family, or they are not as transformers defines them. Nothing is changed then.

    Examples:
        >>> model = AutoModelForCausalLM.from_pretrained("deepseek-ai/DeepSeek-V4-Flash")
        >>> depthmix.hf.accelerate(model)
    """
    family, layers = _layers(model)
    replacements = family.replacements()
    waiting = {name: layer for name, layer in layers.items() if type(layer) in replacements}
    if not waiting:
        if not quiet:
            print(f"{family.title}: this model is accelerated already")
        return model
    difference = 0.0
    for name, layer in waiting.items():
        own = replacements[type(layer)]
        reason = family.why_not(layer, own.KIND)
        if reason is not None:
            raise UserError(f"cannot accelerate {name}: {reason}")
        if check:
            difference = max(difference, largest_difference(family, layer, own))
            if not difference <= TOLERANCE:
                what = "its mixing is not the one of this family"
                raise UserError(f"cannot accelerate {name}: {what} (random tokens differ by {difference:.1e})")
    # Weights that are offloaded or wrapped are not where a step reads them.
    able = [layer for layer in waiting.values() if family.mixes_as_written(layer, replacements[type(layer)].KIND)]
    inside = {part for layer in layers.values() for part in layer.modules()}
    heads = [part for part in model.modules() if type(part) in replacements and part not in inside]
    for module in (*able, *heads):
        _change_class(module, replacements[type(module)])
    if not quiet:
        count = sum(type(part) is type(layer).KIND.connection for layer in able for part in layer.children())
        left = len(waiting) - len(able)
        parts = f"{count} {family.connections}{' and the head' if heads else ''}"
        parts += f", {left} layers with offloaded weights stay as they are" if left else ""
        checked = f"; checked on random tokens: equal within {difference:.0e}" if check else ""
        print(f"{family.title}: {parts}{_where(model)}{checked}")
    return model


def restore_plain(model: Any) -> Any:
    """Undo `accelerate`: the layers run transformers' own code again."""
    for module in model.modules():
        if is_ours(type(module)):
            _change_class(module, type(module).__mro__[1])
        elif any(is_ours(base) for base in type(module).__mro__):
            raise UserError(
                f"a {type(module).__name__} cannot be restored: undo what made it from the accelerated layer first"
            )
    return model


def is_accelerated(model: Any) -> bool:
    """Return whether a part of a model is accelerated."""
    return any(is_ours(base) for module in model.modules() for base in type(module).__mro__)


def is_ours(kind: type) -> bool:
    """Return whether a class is one of those that take over from transformers' own."""
    return kind.__module__.startswith(__package__ + ".")


def _layers(model: Any) -> tuple[Family, dict[str, Any]]:
    """Return the family of a model and its layers by name, or raise UserError."""
    if not isinstance(model, nn.Module):
        raise UserError(f"cannot accelerate a {type(model).__name__}: expected a model of transformers")
    found: dict[str, dict[str, Any]] = {}  # layers by family
    for name, module in model.named_modules():
        known = [base for base in type(module).__mro__ if base.__name__ in FAMILIES]
        if known:
            _require_original(name, module, known[-1])
            found.setdefault(FAMILIES[known[-1].__name__], {})[name] = module
    if not found:
        families = ", ".join(dict.fromkeys(FAMILIES.values()))
        raise UserError(
            f"cannot accelerate a {type(model).__name__}: no layers that mix over depth in it are known ({families})"
        )
    if len(found) > 1:
        raise UserError(f"cannot accelerate a model with layers of several families: {', '.join(found)}")
    ((file, layers),) = found.items()
    return _family(file), layers


def _family(file: str) -> Family:
    try:
        family: Family = importlib.import_module(f"{__package__}.{file}").FAMILY
    except (ImportError, AttributeError) as e:
        raise UserError(f"cannot accelerate {file}: this version of transformers defines it otherwise ({e})") from e
    return family


def _require_original(name: str, layer: Any, known: type) -> None:
    """Raise UserError unless a layer is exactly of a class of transformers, or ours, and runs that class's forward."""
    home = f"transformers.models.{FAMILIES[known.__name__]}.modeling_{FAMILIES[known.__name__]}"
    if known.__module__ != home:
        raise UserError(
            f"cannot accelerate {name}: its class is {known.__module__}.{known.__name__}, not the one of transformers"
        )
    if is_ours(type(layer)):
        return
    if type(layer) is not known:
        raise UserError(
            f"cannot accelerate {name}: {type(layer).__name__} is a subclass of {known.__name__} and may mix otherwise"
            + (" (accelerate a model before it is sharded)" if type(layer).__name__.startswith("FSDP") else "")
        )
    forward: Any = vars(layer).get("_old_forward") if "_hf_hook" in vars(layer) else vars(layer).get("forward")
    if forward is not None and getattr(forward, "__func__", None) is not known.forward:
        raise UserError(f"cannot accelerate {name}: something else has replaced its forward")


def _change_class(module: Any, kind: Any) -> None:
    """Give a module another class, whose forward it then runs also inside the hooks of accelerate."""
    before = type(module).forward
    module.__class__ = kind
    for name in ("_old_forward", "forward"):  # the second is what is left of a hook that was removed
        if getattr(vars(module).get(name), "__func__", None) is before:
            setattr(module, name, types.MethodType(kind.forward, module))


def _where(model: Any) -> str:
    device = next(model.parameters()).device
    reason = (
        why_no_kernels("cuda", device.index)
        if device.type == "cuda"
        else f"kernels run on GPUs, and the model is on {device.type}"
    )
    return f", in plain PyTorch ({reason})" if reason is not None else ""
